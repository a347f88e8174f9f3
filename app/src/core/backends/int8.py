"""Linear layers in INT8 for CPUs with VNNI, for who asks for them: oneDNN's quantised operators, 8-bit weights by
output channel, 8-bit inputs by ranges that a calibration has seen.

The vectors stay near those of fp32 by SmoothQuant's scales, by the few far-reaching channels of the feed-forward that
keep their precision, and by attention's output staying as it is (docs/gpu.md: measured). Knows layers, not models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from .linears import AddingLinear, Affine, Linear, PrepackedLinears

UNSIGNED = 255
"""Inputs are unsigned: for signed ones oneDNN has only its reference behind torch's packing, 20,000 x slower."""
SIGNED = 127
OUTLIERS = 24
"""One channel of the feed-forward in so many keeps its precision: 64 of 1536."""
_LEAST = 1e-5

MISSING = (RuntimeError, AttributeError, TypeError, NotImplementedError)


@dataclass(slots=True)
class Seen:
    """The numbers of a layer and what calibration has seen of its inputs: least and greatest of each channel."""

    layer: Affine
    low: torch.Tensor = field(init=False)
    high: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = self.layer.weight.shape[1]
        self.low, self.high = torch.full((width,), torch.inf), torch.full((width,), -torch.inf)

    def see(self, x: torch.Tensor) -> None:
        """`torch.aminmax` of both takes ten times as long."""
        self.low, self.high = torch.minimum(self.low, x.amin(0)), torch.maximum(self.high, x.amax(0))

    @property
    def reach(self) -> torch.Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())


class Observing:
    """Layers in fp32 that note what they see. Calibration computes through them."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._layers = PrepackedLinears()

    def linear(self, layer: Affine, *, gelu: bool = False) -> Linear:
        return self._noting(layer, self._layers.linear(layer, gelu=gelu))

    def adding(self, layer: Affine) -> AddingLinear:
        return self._layers.adding(layer)

    def feed_forward(self, wide: Affine, narrow: Affine) -> AddingLinear:
        first = self.linear(wide, gelu=True)
        second = self._noting(narrow, self._layers.linear(narrow))
        return lambda x, residual: second(first(x)) + residual

    def _noting(self, layer: Affine, apply: Linear) -> Linear:
        seen = Seen(layer)
        self.seen.append(seen)

        def noting(x: torch.Tensor) -> torch.Tensor:
            seen.see(x)
            return apply(x)

        return noting


class Int8Linears:
    """Layers out of what `Observing` saw of the same model: they are asked for in the same order. Raises RuntimeError
    and its like where torch lacks the operators."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen: Iterator[Seen] = iter(seen)
        self._other = PrepackedLinears()

    def linear(self, layer: Affine, *, gelu: bool = False) -> Linear:
        seen = next(self._seen)
        grid, weight = smoothed(seen)
        product = Product(weight, seen.layer.bias, grid, gelu=gelu)
        return lambda x: product(grid(x), x.dtype)

    def adding(self, layer: Affine) -> AddingLinear:
        return self._other.adding(layer)

    def feed_forward(self, wide: Affine, narrow: Affine) -> AddingLinear:
        """GELU's output leaves the first product as 8 bits, save for the channels that reach far."""
        seen, inner = next(self._seen), next(self._seen)
        far = torch.topk(inner.reach, max(1, len(inner.reach) // OUTLIERS)).indices.sort().values
        near = torch.ones(len(inner.reach), dtype=torch.bool).index_fill_(0, far, False).nonzero().squeeze(1)
        grid, weight = smoothed(seen)
        bias = seen.layer.bias
        between = Grid.over(float(inner.low[near].min()), float(inner.high[near].max()))
        first = Product(weight[near], None if bias is None else bias[near], grid, gelu=True)
        first_far = Product(weight[far], None if bias is None else bias[far], grid, gelu=True)
        columns = inner.layer.weight
        second = Product(columns[:, near].contiguous(), inner.layer.bias, between)
        second_far = self._other.adding(Affine(columns[:, far].contiguous().to(narrow.weight.dtype)))

        def feed_forward(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            rows = grid(x)
            rest = second_far(first_far(rows, x.dtype), residual)
            return second.adding(first.onto(rows, between), rest)

        return feed_forward


# ------------------------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class Grid:
    """How numbers become 8 bits: `scale` x (unsigned - `zero`) = number x `factors` of its channel (None: 1)."""

    scale: float
    zero: int
    factors: torch.Tensor | None = None

    @classmethod
    def over(cls, low: float, high: float, factors: torch.Tensor | None = None) -> Grid:
        """For numbers between these two. 0 stands on the grid, as it must where rows are filled up with it."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = max((high - low) / UNSIGNED, _LEAST / UNSIGNED)
        return cls(scale, round(-low / scale), factors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What lies outside is cut off. Rounds to nearest: 0.5 is added and the rest cut off, one pass fewer."""
        factors = 1.0 / self.scale if self.factors is None else self.factors / self.scale
        shifted = x.float() * factors
        return shifted.add_(self.zero + 0.5).clamp_(0, UNSIGNED).to(torch.uint8)


def smoothed(seen: Seen) -> tuple[Grid, torch.Tensor]:
    """SmoothQuant with alpha 0.5: each channel of the input is divided, and its weights multiplied, by what makes both
    reach equally far; so a channel that reaches far does not make the grid coarse for all."""
    weight = seen.layer.weight.float()
    balance = (seen.reach.clamp(min=_LEAST) / weight.abs().amax(0).clamp(min=_LEAST)).sqrt()
    low, high = float((seen.low / balance).min()), float((seen.high / balance).max())
    return Grid.over(low, high, 1.0 / balance), weight * balance


class Product:
    """8-bit rows times 8-bit weights, with bias and GELU behind; the weight is kept in oneDNN's layout only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, grid: Grid, *, gelu: bool = False) -> None:
        """`weight` (out, in) for inputs on `grid`, whose zero is taken off here once instead of at every call."""
        scales = (weight.abs().amax(1).clamp(min=_LEAST) / SIGNED).float()
        whole = (weight / scales[:, None]).round().clamp_(-SIGNED, SIGNED)
        shift = whole.sum(1) * scales * (grid.scale * grid.zero)
        self._bias = (torch.zeros(len(weight)) if bias is None else bias.float()) - shift
        self._scale = grid.scale
        self._scales = scales
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        self._packed = _operators().qlinear_prepack(whole.to(torch.int8), None)
        self._apply = _operators().qlinear_pointwise
        self._after: tuple[str, list[Any], str] = ("gelu", [], "none") if gelu else ("none", [], "")

    def _numbers(self, rows: torch.Tensor) -> tuple[Any, ...]:
        return rows, self._scale, 0, self._packed, self._scales, self._zeros

    def __call__(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        y: torch.Tensor = self._apply(*self._numbers(rows), self._bias, 1.0, 0, dtype, *self._after)
        return y

    def onto(self, rows: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The results in 8 bits on another grid."""
        y: torch.Tensor = self._apply(
            *self._numbers(rows), self._bias, grid.scale, grid.zero, torch.uint8, *self._after
        )
        return y

    def adding(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._apply.binary(
            *self._numbers(rows), residual, self._bias, 1.0, 0, residual.dtype, 1.0, 0, "add", 1.0, *self._after
        )
        return y


def _operators() -> Any:
    return torch.ops.onednn


def probe_products() -> tuple[Callable[[], object], Callable[[], object]] | None:
    """A small product in fp32 and the same in 8 bits, for measuring whether this CPU gains by it; None where torch has
    no such operators. Small, because without the instructions oneDNN takes its reference, thousands of times slower."""
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(768, 384, generator=generator), torch.randn(32, 384, generator=generator)
    grid = Grid.over(float(x.min()), float(x.max()))
    try:
        plain, product = PrepackedLinears().linear(Affine(weight)), Product(weight, None, grid)
        rows = grid(x)
        far = (product(rows, torch.float32) - F.linear(x, weight)).abs().max() / F.linear(x, weight).abs().max()
        return (lambda: plain(x), lambda: product(rows, torch.float32)) if float(far) < 0.05 else None
    except MISSING:
        return None
