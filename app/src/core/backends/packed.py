"""Encoders without padding: linear layers over all tokens of a batch at once, attention over runs of sequences of equal
length. The gain is measured by benchmarks/embed.py; the vectors are transformers' own to 1e-6.

Knows an encoder's layers (`architectures.py`), not which model they come from; nothing of texts or tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from . import ModelUnsupported, TokenIds
from .architectures import Attention, EncoderWeights, LayerWeights, read, turned
from .folder import Folder
from .linears import AddingLinear, Affine, Linear, Linears, PrepackedLinears

FEW_TOKENS = 256
"""Below that a batch is filled up to a multiple of 8, above it of 16."""
Attend = Callable[[torch.Tensor], torch.Tensor]
"""Queries, keys and values (tokens, 3 x hidden) of one batch -> what they attend to (tokens, hidden)."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` sequences of `length` tokens, standing one after the other from token `start` on."""

    start: int
    count: int
    length: int


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """Neighbours of equal length, as runs."""
    runs: list[Run] = []
    start = 0
    for length, group in groupby(lengths):
        count = sum(1 for _ in group)
        runs.append(Run(start, count, length))
        start += count * length
    return runs


def filling(tokens: int) -> int:
    """Tokens added to a batch, as a text of their own. oneDNN prepares code for each number of rows that it multiplies,
    and keeps it: with few such numbers 60 batches cost 9 MB of memory where they cost 64 MB (measured, bf16)."""
    return -tokens % (8 if tokens < FEW_TOKENS else 16)


def places_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Of each token its place in its sequence, from 0."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def counted_positions(ids: NDArray[np.int64], lengths: Sequence[int], padding_id: int) -> NDArray[np.int64]:
    """As RoBERTa counts: from `padding_id` + 1 on, passing over tokens that are it (a text may spell it out)."""
    real = ids != padding_id
    counted = np.cumsum(real)
    starts = np.cumsum(lengths) - lengths
    before = np.repeat((counted - real)[starts], lengths)
    positions: NDArray[np.int64] = np.where(real, counted - before, 0) + padding_id
    return positions


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class NormBehind:
    """A layer of BERT and its kin: the norm stands behind each sum."""

    query_key_value: Linear
    attention_out: AddingLinear
    attention_norm: Norm
    wide: Linear
    """With its GELU."""
    narrow: AddingLinear
    out_norm: Norm

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.attention_norm(self.attention_out(attend(self.query_key_value(x)), x))
        return self.out_norm(self.narrow(self.wide(x), x))


@dataclass(frozen=True, slots=True)
class NormFirst:
    """A layer of ModernBERT: the norm stands before attention and before a gated feed-forward."""

    attention_norm: Norm | None
    query_key_value: Linear
    attention_out: AddingLinear
    out_norm: Norm
    wide: Linear
    """Twice as wide: what goes through GELU, and what multiplies it."""
    narrow: AddingLinear

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = self.attention_out(attend(self.query_key_value(normed)), x)
        value, gate = self.wide(self.out_norm(x)).chunk(2, dim=-1)
        return self.narrow(F.gelu(value) * gate, x)


class PackedEncoder:
    """Token ids in, pooled float32 vectors out; sequences of equal length should be neighbours."""

    path = "packed"
    pause: Callable[[], None] | None = None
    """Called between the layers: another batch may go before this one there."""

    def __init__(self, weights: EncoderWeights, pooling: str, linears: Linears) -> None:
        self._mean = pooling == "mean"
        self._heads = weights.heads
        self._words, self._positions, self._padding_id = weights.words, weights.positions, weights.padding_id
        self._attentions = weights.attentions
        epsilon = weights.epsilon
        self._norm = _norm(weights.embedding_norm, epsilon)
        self._final_norm = None if weights.final_norm is None else _norm(weights.final_norm, epsilon)
        make = _norm_first if weights.norms_first else _norm_behind
        self._layers = [(make(layer, epsilon, linears), layer.attention) for layer in weights.layers]

    @classmethod
    def load(cls, folder: Folder, dtype: torch.dtype, linears: Linears | None = None) -> PackedEncoder:
        """For a model without `architectures.refusal`. Raises ModelUnsupported when the weights are not those that
        config.json speaks of, or are damaged."""
        try:
            weights = read(folder, load_tensors(folder, dtype))
        except KeyError as error:
            raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {error}") from error
        return cls(weights, folder.pooling, linears or PrepackedLinears())

    @property
    def pauses(self) -> int:
        return len(self._layers)

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        filler = filling(sum(map(len, batch)))
        return self._computed([*batch, [0] * filler])[:-1] if filler else self._computed(batch)

    def _computed(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        lengths = [len(tokens) for tokens in batch]
        runs = runs_of(lengths)
        ids = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in batch])
        places = places_of(lengths)
        x = self._embedded(ids, lengths, places)
        ways = [self._way(attention, runs, places, x.dtype) for attention in self._attentions]
        for layer, way in self._layers:
            x = layer(x, ways[way])
            if self.pause is not None:
                self.pause()
        if self._final_norm is not None:
            x = self._final_norm(x)
        return self._pool(x.float(), runs)

    def _embedded(self, ids: NDArray[np.int64], lengths: Sequence[int], places: NDArray[np.int64]) -> torch.Tensor:
        x = self._words[torch.from_numpy(ids)]
        if self._positions is not None:
            counted = places if self._padding_id is None else counted_positions(ids, lengths, self._padding_id)
            x = x + self._positions[torch.from_numpy(counted)]
        return self._norm(x)

    def _way(self, attention: Attention, runs: Sequence[Run], places: NDArray[np.int64], dtype: torch.dtype) -> Attend:
        """How this batch attends: what does not depend on the layer is computed once."""
        masks = [None if attention.bias is None else attention.bias(run.length) for run in runs]
        if attention.rotary is None:
            return lambda qkv: self._attend(qkv, runs, masks)
        turns = attention.rotary.turns(torch.from_numpy(places), dtype)
        return lambda qkv: self._attend(turned(qkv, self._heads, turns), runs, masks)

    def _attend(self, qkv: torch.Tensor, runs: Sequence[Run], masks: Sequence[torch.Tensor | None]) -> torch.Tensor:
        parts = []
        for run, mask in zip(runs, masks, strict=True):
            rows = qkv[run.start : run.start + run.count * run.length]
            heads = rows.view(run.count, run.length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
            parts.append(out.transpose(1, 2).reshape(run.count * run.length, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pool(self, x: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        parts = []
        for run in runs:
            rows = x[run.start : run.start + run.count * run.length].view(run.count, run.length, -1)
            parts.append(rows.mean(1) if self._mean else rows[:, 0])
        return torch.cat(parts)


def load_tensors(folder: Folder, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """All tensors of the model's files in this precision. Raises ModelUnsupported for damaged files."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in folder.weights:
            tensors.update({name: value.to(dtype) for name, value in load_file(file).items()})
    except SafetensorError as error:
        raise ModelUnsupported(f"model {folder.name!r}: model.safetensors cannot be read: {error}") from error
    return tensors


def _norm(numbers: Affine, epsilon: float) -> Norm:
    return Norm(numbers.weight, numbers.bias, epsilon)


def _norm_behind(layer: LayerWeights, epsilon: float, linears: Linears) -> NormBehind:
    if layer.attention_norm is None:
        raise KeyError("attention_norm")
    return NormBehind(
        query_key_value=linears.linear(layer.query_key_value),
        attention_out=linears.adding(layer.attention_out),
        attention_norm=_norm(layer.attention_norm, epsilon),
        wide=linears.linear(layer.wide, gelu=True),
        narrow=linears.adding(layer.narrow),
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
