"""Encoders without padding: linear layers over all tokens of a batch at once, attention sequence by sequence
(`attention.py`). benchmarks/embed.py measures the gain; the vectors are transformers' own to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from ...device import DeviceProfile
from ...ranges import ranged
from .. import ModelUnsupported, Pause, TokenBatch
from ..folder import Folder
from .architectures import Attention as Extras
from .architectures import EncoderWeights, LayerWeights, read, turned
from .attention import Choice, Inputs, Layout, Run, choose, runs_of
from .linears import AddingLinear, Affine, Linear, Linears, PlainLinears, PrepackedLinears
from .staging import Uploads, uploads_for

FEW_TOKENS = 256  # smaller batches are filled up to a multiple of 8, larger ones of 16
# Queries, keys and values (tokens, 3 x hidden) of one batch -> attention's output (tokens, hidden).
Attend = Callable[[torch.Tensor], torch.Tensor]


def filled(batch: TokenBatch) -> TokenBatch:
    """Add a text so that the tokens are a multiple of 8, which fills a card's tensor cores, or of 16.

    oneDNN keeps code for each number of rows that it multiplies: with few such numbers 60 batches take 9 MB of memory,
    else 64 MB (measured, bf16).
    """
    tokens = len(batch.ids)
    more = -tokens % (8 if tokens < FEW_TOKENS else 16)
    if not more:
        return batch
    ids = np.concatenate([batch.ids, np.resize(batch.ids, more)])
    return TokenBatch(ids, np.append(batch.offsets, tokens + more))


def places_of(batch: TokenBatch) -> NDArray[np.int32]:
    """Return for each token its place in its sequence, from 0."""
    return (np.arange(len(batch.ids)) - np.repeat(batch.offsets[:-1], batch.lengths)).astype(np.int32)


def counted_positions(batch: TokenBatch, padding_id: int) -> NDArray[np.int32]:
    """Return positions as RoBERTa counts them: from `padding_id` + 1 on, without tokens with this id."""
    real = batch.ids != padding_id
    counted = np.cumsum(real)
    before = np.repeat((counted - real)[batch.offsets[:-1]], batch.lengths)
    return (np.where(real, counted - before, 0) + padding_id).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class NormBehind:
    """A layer of BERT and its kin: a norm follows each sum."""

    query_key_value: Linear
    attention_out: AddingLinear
    attention_norm: Norm
    feed_forward: AddingLinear
    out_norm: Norm

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.attention_norm(self.attention_out(attend(self.query_key_value(x)), x))
        return self.out_norm(self.feed_forward(x, x))


@dataclass(frozen=True, slots=True)
class NormFirst:
    """A layer of ModernBERT: a norm precedes attention and a gated feed-forward."""

    attention_norm: Norm | None
    query_key_value: Linear
    attention_out: AddingLinear
    out_norm: Norm
    wide: Linear  # twice as wide: the input of GELU, and its factor
    narrow: AddingLinear

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = self.attention_out(attend(self.query_key_value(normed)), x)
        value, gate = self.wide(self.out_norm(x)).chunk(2, dim=-1)
        return self.narrow(F.gelu(value) * gate, x)


@dataclass(frozen=True, slots=True)
class Place:
    """Device and type of an encoder; `pinned`: copy to a card by way of pinned memory."""

    profile: DeviceProfile
    dtype: torch.dtype
    pinned: bool = True

    @classmethod
    def cpu(cls, dtype: torch.dtype) -> Place:
        return cls(DeviceProfile.cpu(), dtype)

    @property
    def linears(self) -> Linears:
        return PrepackedLinears() if self.profile.kind == "cpu" else PlainLinears()

    @property
    def device(self) -> torch.device:
        return torch.device(self.profile.torch_name)


class PackedEncoder:
    """An `Encoder` that pauses between layers. Sequences of equal length should be neighbours."""

    path = "packed"

    def __init__(self, weights: EncoderWeights, folder: Folder, place: Place, linears: Linears) -> None:
        self.longest = folder.max_length
        self.attention = _attention(weights, place)
        self._mean = folder.pooling == "mean"
        self._heads = weights.heads
        self._words, self._positions, self._padding_id = weights.words, weights.positions, weights.padding_id
        self._attentions = weights.attentions
        self._uploads = uploads_for(weights.words.device, pinned=place.pinned)
        epsilon = weights.epsilon
        self._norm = _norm(weights.embedding_norm, epsilon)
        self._final_norm = None if weights.final_norm is None else _norm(weights.final_norm, epsilon)
        make = _norm_first if weights.norms_first else _norm_behind
        self._layers = [(make(layer, epsilon, linears), layer.attention) for layer in weights.layers]

    @classmethod
    def load(cls, folder: Folder, place: Place, linears: Linears | None = None) -> PackedEncoder:
        """Load a model without `architectures.refusal`. Raises ModelUnsupported for missing or damaged weights."""
        try:
            weights = read(folder, load_tensors(folder, place))
        except KeyError as error:
            raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {error}") from error
        return cls(weights, folder, place, linears or place.linears)

    @property
    def pauses(self) -> int:
        return len(self._layers)

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        whole = filled(batch)
        return self.compute(sent(self._uploads, self.staged(whole), whole), pause)[: len(batch)]

    def staged(self, batch: TokenBatch) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return ids, positions and places of a batch, sequence after sequence."""
        places = places_of(batch)
        counted = places if self._padding_id is None else counted_positions(batch, self._padding_id)
        return batch.ids, counted, places

    @ranged("forward")
    def compute(self, inputs: Inputs, pause: Pause | None = None) -> torch.Tensor:
        """Return (sequences, dimension), pooled, float32."""
        x = F.embedding(inputs.ids, self._words)
        if self._positions is not None:
            x = x + F.embedding(inputs.positions, self._positions)
        x = self._norm(x)
        ways = [self._way(attention, inputs, x.dtype) for attention in self._attentions]
        for layer, way in self._layers:
            x = layer(x, ways[way])
            if pause is not None:
                pause()
        if self._final_norm is not None:
            x = self._final_norm(x)
        return self._pool(x.float(), inputs.layout)

    def _way(self, attention: Extras, inputs: Inputs, dtype: torch.dtype) -> Attend:
        """Return this batch's attention; what does not depend on the layer is computed once."""
        apply, layout, bias = self.attention.attention, inputs.layout, attention.bias
        if attention.rotary is None:
            return lambda qkv: apply(qkv, layout, bias)
        turns = attention.rotary.turns(inputs.places, dtype)
        return lambda qkv: apply(turned(qkv, self._heads, turns), layout, bias)

    @ranged("pool")
    def _pool(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        if x.device.type == "cpu" and layout.runs:
            return self._pool_runs(x, layout.runs)
        starts = layout.cumulative
        if not self._mean:
            return x[starts[:-1].clamp(max=len(x) - 1)]
        tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)
        return F.embedding_bag(tokens, x, starts, mode="mean", include_last_offset=True)

    def _pool_runs(self, x: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        parts = []
        for run in runs:
            rows = x[run.start : run.start + run.count * run.length].view(run.count, run.length, -1)
            parts.append(rows.mean(1) if self._mean else rows[:, 0])
        return torch.cat(parts)


@ranged("copy")
def sent(uploads: Uploads, staged: Sequence[NDArray[np.int32]], batch: TokenBatch) -> Inputs:
    """Copy a batch's numbers to the device at once."""
    tokens, lengths = len(batch.ids), batch.lengths.tolist()
    cumulative = batch.offsets.astype(np.int32)
    np.concatenate([*staged, cumulative], out=uploads.room(3 * tokens + len(cumulative)))
    ids, positions, places, borders = torch.split(uploads.send(), [tokens, tokens, tokens, len(cumulative)])
    return Inputs(ids, positions, places, Layout(runs_of(lengths), max(lengths), borders))


def load_tensors(folder: Folder, place: Place) -> Mapping[str, torch.Tensor]:
    """Load all tensors of the model's files to the device. Raises ModelUnsupported for damaged files."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    device = place.device
    try:
        for file in folder.weights:
            tensors.update({name: value.to(device, place.dtype) for name, value in load_file(file).items()})
    except SafetensorError as error:
        raise ModelUnsupported(f"model {folder.name!r}: model.safetensors cannot be read: {error}") from error
    return tensors


def _attention(weights: EncoderWeights, place: Place) -> Choice:
    biased = any(extras.bias is not None for extras in weights.attentions)
    return choose(place.profile, weights.heads, weights.words.shape[1], place.dtype, biased=biased)


def _norm(numbers: Affine, epsilon: float) -> Norm:
    return Norm(numbers.weight, numbers.bias, epsilon)


def _norm_behind(layer: LayerWeights, epsilon: float, linears: Linears) -> NormBehind:
    if layer.attention_norm is None:
        raise KeyError("attention_norm")
    return NormBehind(
        query_key_value=linears.linear(layer.query_key_value),
        attention_out=linears.adding(layer.attention_out),
        attention_norm=_norm(layer.attention_norm, epsilon),
        feed_forward=linears.feed_forward(layer.wide, layer.narrow),
        out_norm=_norm(layer.out_norm, epsilon),
    )


def _norm_first(layer: LayerWeights, epsilon: float, linears: Linears) -> NormFirst:
    return NormFirst(
        attention_norm=None if layer.attention_norm is None else _norm(layer.attention_norm, epsilon),
        query_key_value=linears.linear(layer.query_key_value),
        attention_out=linears.adding(layer.attention_out),
        out_norm=_norm(layer.out_norm, epsilon),
        wide=linears.linear(layer.wide),
        narrow=linears.adding(layer.narrow),
    )
