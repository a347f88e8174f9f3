"""Encoders without padding: linear layers over all tokens of a batch at once, attention sequence by sequence.
Vectors equal those of transformers to 1e-6; benchmarks/embed.py measures the gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from ...device import DeviceProfile
from .. import ModelUnsupported, Pause, TokenBatch
from ..folder import Folder
from .architectures import WORDS, EncoderWeights, LayerWeights, read
from .kernels import Kernels, choose_kernels
from .linears import AddNorm, Linear, layer_norm, linear, rounds_of
from .process import device_clock
from .staging import uploads_for

# ----------------------------------------------------------------------------------------------------------- attention


Run = tuple[int, int, int]  # consecutive sequences of equal length: their first token, number and length


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences of a packed batch. `cumulative`, int32 (sequences + 1) on the device: the index of each one's first
    token, and the number of tokens. In a CUDA graph, which is recorded for all lengths, `runs` is empty and `longest`
    is a bound."""

    runs: Sequence[Run]
    longest: int
    cumulative: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Layout:
        cumulative = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(runs_of(lengths), max(lengths), cumulative.to(device))


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """Group neighbouring sequences of equal length."""
    runs: list[Run] = []
    start = 0
    for length, group in groupby(lengths):
        runs.append((start, sum(1 for _ in group), length))
        start += runs[-1][1] * length
    return runs


# Queries, keys and values (tokens, 3 x hidden), layout and number of heads -> output (tokens, hidden).
Attention = Callable[[torch.Tensor, Layout, int], torch.Tensor]


def runs_of_equal_length(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
    """Compute each run by torch's own attention, on a CPU in `windows`. No other attention needs `runs`.

    Works on every device. Each length needs its own kernel launch, which costs time on GPUs only.
    """
    parts = []
    for start, count, length in layout.runs:
        if qkv.device.type == "cpu" and (found := windows(qkv, start, count, length, heads)) is not None:
            parts.append(found)
            start, count = start + len(found), count - len(found) // length
        if count:
            rows = qkv[start : start + count * length]
            query, key, value = rows.view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(query, key, value)
            parts.append(out.transpose(1, 2).reshape(count * length, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# torch's kernel for CPUs computes 16 keys at once and 32 queries; a rest is slow: 32 tokens cost less than 26, and four
# texts of 8 less than one of 32.
LANES, WINDOW = 16, 32
EMPTY = 10  # tokens of a window that may be of no text: measured on AVX512 for lengths from 6 to 240


def windows(qkv: torch.Tensor, start: int, count: int, length: int, heads: int) -> torch.Tensor | None:
    """Compute the first texts of a run in windows of a multiple of LANES tokens, each with one text or several short
    ones. Windows overlap in memory, so nothing is copied: a mask hides the texts that follow. Returns None if that
    gains nothing."""
    bf16, width = qkv.dtype == torch.bfloat16, WINDOW if length < WINDOW else -(-length // LANES) * LANES
    if bf16 and length < WINDOW and WINDOW % length > EMPTY:
        width = 2 * WINDOW
    texts = width // length
    used = texts * length
    number = min(count // texts, (len(qkv) - start - width) // used + 1)
    aligned = length % LANES == 0 and (texts == 1 or not bf16)  # has no rest
    if number < 1 or aligned or width - used > EMPTY:
        return None
    step, hidden = qkv.stride(0), qkv.shape[1] // 3
    shape, strides = (number, width, 3, heads, hidden // heads), (used * step, step, hidden, hidden // heads, 1)
    views = qkv.as_strided(shape, strides, qkv.storage_offset() + start * step)
    query, key, value = views.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value, _mask(length, texts, width, qkv.dtype))
    return out.transpose(1, 2)[:, :used].reshape(number * used, -1)


@lru_cache(512)
def _mask(length: int, texts: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where query and key are of the same text, else -inf; 0 for queries of no text. (width, width), for one
    text (1, width)."""
    text = torch.arange(width) // length
    query = text[: width if texts > 1 else 1, None]
    seen = (query == text) | (query >= texts)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)


def flash_attention(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
    """Compute by FlashAttention 2: half precision, compute capability 8.0 and up, heads of a multiple of 8. Makes the
    same call as torch's nested tensors; `varlen_attention` adds a Python operator and a kernel that fills zeros."""
    query, key, value = qkv.view(len(qkv), 3, heads, -1).unbind(1)
    starts, longest = layout.cumulative, layout.longest
    kernel = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = kernel(query, key, value, starts, starts, longest, longest, 0.0, False, False)[0]
    return out.reshape(len(qkv), -1)


def varlen_attention(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
    """Compute by torch.nn.attention.varlen, the public way to FlashAttention 2. Uses only arguments that torch 2.10 to
    2.13 share."""
    from torch.nn.attention import varlen

    query, key, value = qkv.view(len(qkv), 3, heads, -1).unbind(1)
    starts, longest = layout.cumulative, layout.longest
    out = varlen.varlen_attn(query, key, value, starts, starts, longest, longest)
    assert isinstance(out, torch.Tensor)  # it is a pair only if auxiliary results are requested
    return out.reshape(len(qkv), -1)


def memory_efficient_attention(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
    """Compute by CUTLASS' kernel with sequence borders: fp32 and fp16, compute capability 5.0 and up. Makes the same
    call as torch's nested tensors (torch/nested/_internal/sdpa.py)."""
    query, key, value = (part.unsqueeze(0) for part in qkv.view(len(qkv), 3, heads, -1).unbind(1))
    starts, longest = layout.cumulative, layout.longest
    kernel = torch.ops.aten._efficient_attention_forward
    out: torch.Tensor = kernel(query, key, value, None, starts, starts, longest, longest, 0.0, 0)[0]
    return out.reshape(len(qkv), -1)


def candidates(profile: DeviceProfile, dtype: torch.dtype) -> list[Attention]:
    """Return the attentions to try. FlashAttention needs half precision and compute capability 8.0; CUTLASS needs 8.0
    for bfloat16. The last one is used only if no other works."""
    found: list[Attention] = [runs_of_equal_length]
    if profile.capability is not None:
        new = profile.capability >= (8, 0)
        if new or dtype != torch.bfloat16:
            found.insert(0, memory_efficient_attention)
        if new and dtype != torch.float32:
            found[:0] = [flash_attention, varlen_attention]
    return found


# FlashAttention computes tiles of 128 rows where heads are narrow, CUTLASS tiles of 64: so short texts are timed apart.
SHORT = 64
_LENGTHS = (1, 2, 5, 5, 5, 17, 33, 33, 64, 130)
# For values of about 1: more than the rounding error of TF32, fp16 and bf16; a wrong border or scale errs by tenths.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_TIMED = (17, 256)  # tokens of a short and a long text
_TIMED_TOKENS, _CALLS = 8192, 5


def choose(profile: DeviceProfile, heads: int, width: int, dtype: torch.dtype) -> tuple[Attention, str]:
    """Return the fastest candidates whose results equal plain fp32 arithmetic here, for short and for long texts, else
    the last candidate; and the reason. `width`: hidden size."""
    *tried, last = candidates(profile, dtype)
    right: list[Attention] = []
    reasons: list[str] = []
    for attention in tried:
        try:
            with torch.inference_mode():
                worst = max(_error(attention, profile, heads, width, dtype, most) for most in (SHORT, max(_LENGTHS)))
            if worst <= TOLERANCE[dtype]:
                right.append(attention)
            else:
                reasons.append(f"{_name(attention)}: off by {worst:.2g}")
        except Exception as error:  # the next candidate is tried
            said = str(error).partition("\n")[0][:120]
            reasons.append(f"{_name(attention)}: {type(error).__name__}: {said}")
    if not right:
        return last, "; ".join([*reasons, _name(last)])
    if len(right) == 1:
        return right[0], "; ".join([*reasons, f"{_name(right[0])} gives the right numbers here"])
    try:
        with torch.inference_mode():
            (short, short_times), (long, long_times) = (
                _fastest(right, profile, heads, width, dtype, length) for length in _TIMED
            )
    except RuntimeError as error:  # includes OutOfMemoryError
        reasons.append(f"{_name(right[0])}, not timed: {str(error)[:120]}")
        return right[0], "; ".join(reasons)
    reason = "; ".join([*reasons, f"up to {SHORT} tokens {short_times}", f"above {long_times}"])

    def by_longest(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
        return (short if layout.longest <= SHORT else long)(qkv, layout, heads)

    return short if short is long else by_longest, reason


def _error(
    attention: Attention, profile: DeviceProfile, heads: int, width: int, dtype: torch.dtype, most: int
) -> float:
    """Return the largest difference from plain fp32 arithmetic, for the trial texts of at most `most` tokens."""
    lengths = [length for length in _LENGTHS if length <= most]
    qkv = torch.randn(sum(lengths), 3 * width, generator=torch.Generator().manual_seed(7))
    qkv = qkv.to(profile.torch_name, dtype)
    wanted = []
    for rows in torch.split(qkv.cpu().float(), lengths):
        query, key, value = rows.view(len(rows), 3, heads, -1).permute(1, 2, 0, 3)
        weights = torch.softmax(query @ key.transpose(1, 2) / query.shape[-1] ** 0.5, dim=-1)
        wanted.append((weights @ value).transpose(0, 1).reshape(len(rows), -1))
    found = attention(qkv, Layout.of(lengths, qkv.device), heads)
    return float((found.cpu().float() - torch.cat(wanted)).abs().nan_to_num(nan=torch.inf).max())


def _fastest(
    attentions: Sequence[Attention], profile: DeviceProfile, heads: int, width: int, dtype: torch.dtype, length: int
) -> tuple[Attention, str]:
    """Time many texts of `length` tokens; return the attention with the best time, and all times."""
    count = _TIMED_TOKENS // length
    qkv = torch.zeros(count * length, 3 * width, dtype=dtype, device=profile.torch_name)
    layout = Layout.of([length] * count, qkv.device)

    def calls(attention: Attention) -> None:
        for _ in range(_CALLS):
            attention(qkv, layout, heads)

    rounds = rounds_of([partial(calls, attention) for attention in attentions], device_clock(profile))
    times = {
        attention: min(taken) / _CALLS for attention, taken in zip(attentions, zip(*rounds, strict=True), strict=True)
    }
    first, *others = sorted(attentions, key=times.__getitem__)
    shown = [f"{_name(each)} {1e6 * times[each]:.0f} us" for each in (first, *others)]
    return first, f"{shown[0]} ({', '.join(shown[1:])})"


def _name(attention: Attention) -> str:
    return attention.__name__.replace("_", " ")


# ------------------------------------------------------------------------------------------------------------- batches

FEW_TOKENS = 256  # batches below this are filled up to a multiple of 8
MANY_TOKENS = 512  # batches above this may be filled up to a larger multiple


def filled(batch: TokenBatch, multiple: int = 16) -> TokenBatch:
    """Add a text so that the tokens are a multiple of 8, or from FEW_TOKENS on of `multiple`, which fills a card's
    tensor cores."""
    tokens = len(batch.ids)
    more = -tokens % (8 if tokens < FEW_TOKENS else multiple)
    if not more:
        return batch
    ids = np.concatenate([batch.ids, np.resize(batch.ids, more)])
    return TokenBatch(ids, np.append(batch.offsets, tokens + more))


def positions_of(batch: TokenBatch, padding_id: int | None = None) -> NDArray[np.int32]:
    """Return the position of each token in its sequence, from 0. With `padding_id`, count as RoBERTa does: from
    `padding_id` + 1, skipping tokens with this id."""
    if padding_id is None:
        return (np.arange(len(batch.ids)) - np.repeat(batch.offsets[:-1], batch.lengths)).astype(np.int32)
    real = batch.ids != padding_id
    counted = np.cumsum(real)
    before = np.repeat((counted - real)[batch.offsets[:-1]], batch.lengths)
    return (np.where(real, counted - before, 0) + padding_id).astype(np.int32)


# -------------------------------------------------------------------------------------------------------------- layers

# Queries, keys and values (tokens, 3 x hidden) of one batch -> attention's output (tokens, hidden).
Attend = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with a norm after each sum. Each part may be replaced, such as by one in int8 or one that is timed."""

    query_key_value: Linear
    attention_out: Linear
    attention_norm: AddNorm
    wide: Linear  # with GELU
    narrow: Linear
    out_norm: AddNorm

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.attention_norm(self.attention_out(attend(self.query_key_value(x))), x)
        return self.out_norm(self.narrow(self.wide(x)), x)


def _layer(layer: LayerWeights, epsilon: float, kernels: Kernels, *, prepack: bool) -> Layer:
    return Layer(
        linear(layer.query_key_value, prepack=prepack),
        *kernels.add_norm(layer.attention_out, layer.attention_norm, epsilon),
        kernels.gelu(layer.wide),
        *kernels.add_norm(layer.narrow, layer.out_norm, epsilon),
    )


# ------------------------------------------------------------------------------------------------------------- encoder


class PackedEncoder:
    """An `Encoder` that pauses between layers. It is fastest if sequences of equal length are neighbours."""

    path = "packed"

    def __init__(
        self, weights: EncoderWeights, folder: Folder, profile: DeviceProfile, *, prepack: bool, fused: bool = False
    ) -> None:
        self.longest = folder.max_length
        hidden, dtype = weights.positions.shape[1], weights.positions.dtype
        self.attention, self.attention_reason = choose(profile, weights.heads, hidden, dtype)
        self._heads = weights.heads
        # oneDNN keeps code for each number of rows, about 4 MB: 64 different ones from 1,024 to 2,048 took 310 MB.
        self._multiples = (64, 128) if profile.kind == "cpu" and folder.max_length >= 128 else (16, 16)
        self._mean = folder.pooling == "mean"
        self._words, self._positions, self._padding_id = weights.words, weights.positions, weights.padding_id
        self._uploads = uploads_for(weights.words.device)
        self._norm = layer_norm(weights.embedding_norm, weights.epsilon)
        kernels = Kernels.of_torch(prepack=prepack)
        if fused:
            kernels = choose_kernels(profile, weights, kernels)
        self.kernels_reason = kernels.reason
        self._layers = [_layer(layer, weights.epsilon, kernels, prepack=prepack) for layer in weights.layers]

    @classmethod
    def load(
        cls, folder: Folder, profile: DeviceProfile, dtype: torch.dtype, *, prepack: bool = True, fused: bool = False
    ) -> PackedEncoder:
        """Load a model that `architectures.refusal` accepts; `prepack` affects only CPUs, and `fused`, which
        tries the kernels of `kernels.py`, only cards. Raises ModelUnsupported for missing or damaged weights."""
        try:
            weights = read(folder, load_tensors(folder, torch.device(profile.torch_name), dtype, widen_words=False))
        except KeyError as error:
            raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {error}") from error
        return cls(weights, folder, profile, prepack=prepack and profile.kind == "cpu", fused=fused)

    @property
    def pauses(self) -> int:
        return len(self._layers)

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        """Copy all inputs of the batch to the device in one transfer, then compute."""
        whole = filled(batch, self._multiples[len(batch.ids) > MANY_TOKENS])
        tokens, lengths, cumulative = len(whole.ids), whole.lengths.tolist(), whole.offsets.astype(np.int32)
        np.concatenate([*self.staged(whole), cumulative], out=self._uploads.room(2 * tokens + len(cumulative)))
        ids, positions, borders = torch.split(self._uploads.send(), [tokens, tokens, len(cumulative)])
        layout = Layout(runs_of(lengths), max(lengths), borders)
        return self.compute(ids, positions, layout, pause)[: len(batch)]

    def staged(self, batch: TokenBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and positions of a batch, each int32 (tokens)."""
        return batch.ids, positions_of(batch, self._padding_id)

    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout, pause: Pause | None = None
    ) -> torch.Tensor:
        """Return pooled vectors, float32 (sequences, dimension), of int32 ids and positions (tokens)."""
        words, places = F.embedding(ids, self._words), F.embedding(positions, self._positions)
        x = self._norm(words.to(places.dtype) + places)

        def attend(qkv: torch.Tensor) -> torch.Tensor:
            return self.attention(qkv, layout, self._heads)

        for layer in self._layers:
            x = layer(x, attend)
            if pause is not None:
                pause()
        return self._pool(x.float(), layout)

    def _pool(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        if x.device.type == "cpu" and layout.runs:
            parts = []
            for start, count, length in layout.runs:
                rows = x[start : start + count * length].view(count, length, -1)
                parts.append(rows.mean(1) if self._mean else rows[:, 0])
            return torch.cat(parts)
        starts = layout.cumulative
        if not self._mean:
            return x[starts[:-1].clamp(max=len(x) - 1)]
        tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)
        return F.embedding_bag(tokens, x, starts, mode="mean", include_last_offset=True)


def load_tensors(
    folder: Folder, device: torch.device, dtype: torch.dtype, *, widen_words: bool = True
) -> Mapping[str, torch.Tensor]:
    """Load all tensors of the model's files to the device; `dtype` does not apply to integers. Without `widen_words`, a
    table of words in fewer bits than `dtype` keeps its type. Raises ModelUnsupported for damaged files."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in folder.weights:
            for name, value in load_file(file).items():
                table = not widen_words and name.endswith(WORDS) and value.dtype.itemsize < dtype.itemsize
                tensors[name] = value.to(device, value.dtype if table or not value.is_floating_point() else dtype)
    except SafetensorError as error:
        raise ModelUnsupported(f"model {folder.name!r}: model.safetensors cannot be read: {error}") from error
    return tensors
