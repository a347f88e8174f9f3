"""How the tokens of a packed batch look at each other: one kernel over sequences of any length where the card has one,
runs of sequences of equal length elsewhere. Which one is right here is tried, not believed: `choose`.

Knows tensors and what a device is; nothing of models, texts or tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch.nn import functional as F

from ...device import DeviceProfile

Bias = Callable[[int], torch.Tensor | None]
"""What is added to the score of each pair of tokens, by the length of a sequence: (heads or 1, length, length)."""


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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the sequences of a packed batch stand. `cumulative` is int32 (sequences + 1) on the device: the first token
    of each sequence, and behind the last. `runs` is empty where the sequences are known on the device only (a CUDA
    graph, recorded once for all of them); `longest` is a bound there."""

    runs: Sequence[Run]
    longest: int
    cumulative: torch.Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """One packed batch on the device: three times int32 (tokens). `places` counts the tokens of each sequence from 0,
    `positions` as the model's architecture counts them."""

    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    layout: Layout


class Attention(Protocol):
    """(tokens, 3 x hidden) queries, keys and values -> (tokens, hidden). `name` is what reports say; `takes_bias`:
    whether it can add a bias to the scores; `any_layout`: whether it needs no `runs`."""

    name: str
    takes_bias: bool
    any_layout: bool

    def __init__(self, heads: int) -> None: ...

    def __call__(self, qkv: torch.Tensor, layout: Layout, bias: Bias | None = None) -> torch.Tensor: ...


class EqualRuns:
    """torch's scaled dot-product attention over each run: views, no mask, and every device has it. As many kernels as
    there are lengths, which a CPU does not feel and a GPU does."""

    name = "runs of equal length"
    takes_bias = True
    any_layout = False

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def __call__(self, qkv: torch.Tensor, layout: Layout, bias: Bias | None = None) -> torch.Tensor:
        parts = []
        for run in layout.runs:
            rows = qkv[run.start : run.start + run.count * run.length]
            heads = rows.view(run.count, run.length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            added = bias(run.length) if bias else None
            out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=added)
            parts.append(out.transpose(1, 2).reshape(run.count * run.length, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Varlen:
    """torch.nn.attention.varlen, FlashAttention 2 inside torch: compute capability 8.0 and up, half precision, torch
    2.10 and up. The arguments used are those that 2.10 to 2.13 share."""

    name = "varlen_attn"
    takes_bias = False
    any_layout = True

    def __init__(self, heads: int) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._heads = heads
        self._apply = varlen_attn

    def __call__(self, qkv: torch.Tensor, layout: Layout, bias: Bias | None = None) -> torch.Tensor:
        _refuse(bias, self.name)
        query, key, value = qkv.view(len(qkv), 3, self._heads, -1).unbind(1)
        starts, longest = layout.cumulative, layout.longest
        out = self._apply(query, key, value, starts, starts, longest, longest)
        assert isinstance(out, torch.Tensor)  # a pair only when auxiliary results are asked for
        return out.reshape(len(qkv), -1)


class MemoryEfficient:
    """CUTLASS' kernel with sequence borders, which torch's nested tensors use on cards without FlashAttention
    (torch/nested/_internal/sdpa.py has the same call): compute capability 5.0 and up, fp32 and fp16."""

    name = "memory-efficient attention"
    takes_bias = False
    any_layout = True

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self._apply = torch.ops.aten._efficient_attention_forward

    def __call__(self, qkv: torch.Tensor, layout: Layout, bias: Bias | None = None) -> torch.Tensor:
        _refuse(bias, self.name)
        query, key, value = (part.unsqueeze(0) for part in qkv.view(len(qkv), 3, self._heads, -1).unbind(1))
        starts, longest = layout.cumulative, layout.longest
        found = self._apply(query, key, value, None, starts, starts, longest, longest, 0.0, 0)
        out: torch.Tensor = found[0]
        return out.reshape(len(qkv), -1)


class PaddedRows:
    """The sequences as rows of a rectangle with a mask; only attention pays for the padding. The last resort."""

    name = "padded rows"
    takes_bias = True
    any_layout = False

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def __call__(self, qkv: torch.Tensor, layout: Layout, bias: Bias | None = None) -> torch.Tensor:
        starts = layout.cumulative.long()
        columns = torch.arange(layout.longest, device=qkv.device)
        there = columns < (starts[1:] - starts[:-1])[:, None]
        rows = torch.where(there, starts[:-1, None] + columns, 0)
        heads = qkv[rows].view(*rows.shape, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(there.shape, dtype=qkv.dtype, device=qkv.device).masked_fill_(~there, -torch.inf)
        added = bias(layout.longest) if bias else None
        pairs = mask[:, None, None, :] if added is None else mask[:, None, None, :] + added
        out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=pairs)
        return out.transpose(1, 2)[there].reshape(len(qkv), -1)


def _refuse(bias: Bias | None, name: str) -> None:
    if bias is not None:
        raise NotImplementedError(f"{name} cannot add a bias to the scores")


# ------------------------------------------------------------------------------------------------------ which one here


@dataclass(frozen=True, slots=True)
class Choice:
    attention: Attention
    reason: str


FIRST_FLASH = (8, 0)


def candidates(profile: DeviceProfile, dtype: torch.dtype, *, biased: bool) -> list[type[Attention]]:
    """What may be used, best first. FlashAttention starts at compute capability 8.0 and knows no fp32; the CUTLASS
    kernel has bfloat16 from there on only. Neither adds a bias to packed sequences."""
    if profile.kind == "cpu" or biased:
        return [EqualRuns, PaddedRows]
    flash = profile.capability is not None and profile.capability >= FIRST_FLASH
    found: list[type[Attention]] = [Varlen] if flash and dtype != torch.float32 else []
    if flash or dtype != torch.bfloat16:
        found.append(MemoryEfficient)
    return [*found, EqualRuns, PaddedRows]


def choose(profile: DeviceProfile, heads: int, width: int, dtype: torch.dtype, *, biased: bool = False) -> Choice:
    """The first candidate that gives the right numbers on the device, with what kept the others away. `width` is that
    of the model. Raises RuntimeError when none does."""
    reasons: list[str] = []
    for make in candidates(profile, dtype, biased=biased):
        why_not = _why_not(make, profile, (heads, width), dtype)
        if why_not is None:
            return Choice(make(heads), "; ".join([*reasons, f"{make.name} gives the right numbers here"]))
        reasons.append(f"{make.name}: {why_not}")
    raise RuntimeError(f"no attention works on {profile.name}: {'; '.join(reasons)}")


_LENGTHS = (1, 2, 5, 5, 5, 17, 33, 33, 64, 130)
TOLERANCE = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of values of about 1: what fp16 (TF32 alike) and bf16 round; a wrong border or scale is off by tenths."""


def _why_not(make: type[Attention], profile: DeviceProfile, size: tuple[int, int], dtype: torch.dtype) -> str | None:
    """None when it agrees with plain arithmetic in fp32, for each sequence alone."""
    heads, width = size
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(sum(_LENGTHS), 3 * width, generator=generator).to(profile.torch_name, dtype)
    try:
        with torch.inference_mode():
            found = make(heads)(qkv, layout_of(_LENGTHS, qkv.device))
            wanted = _by_definition(qkv.cpu().float(), heads)
            worst = float((found.cpu().float() - wanted).abs().max())
    except Exception as error:  # whatever this torch has against it, the next way is tried
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return None if worst <= TOLERANCE[dtype] else f"off by {worst:.2g}"


def _by_definition(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    parts = []
    for rows in torch.split(qkv, list(_LENGTHS)):
        query, key, value = rows.view(len(rows), 3, heads, -1).permute(1, 2, 0, 3)
        weights = torch.softmax(query @ key.transpose(1, 2) / query.shape[-1] ** 0.5, dim=-1)
        parts.append((weights @ value).transpose(0, 1).reshape(len(rows), -1))
    return torch.cat(parts)


def layout_of(lengths: Sequence[int], device: torch.device) -> Layout:
    cumulative = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Layout(runs_of(lengths), max(lengths), cumulative.to(device))
