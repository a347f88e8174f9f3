"""Linear layers over packed tokens: torch's own, and oneDNN's prepacked ones with what follows fused in, which are used
only where they prove to give the same numbers. Knows tensors; nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
AddingLinear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, residual) -> layer(x) + residual"""


@dataclass(frozen=True, slots=True)
class Affine:
    """The numbers of a linear layer, `weight` (out, in), or of a norm, `weight` (width)."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class Linears(Protocol):
    """Makes the layers of a model out of their numbers; a precision that torch has no layers for brings its own."""

    def linear(self, layer: Affine, *, gelu: bool = False) -> Linear:
        """With exact GELU behind it when asked."""
        ...

    def adding(self, layer: Affine) -> AddingLinear: ...

    def feed_forward(self, wide: Affine, narrow: Affine) -> AddingLinear:
        """(x, residual) -> narrow(gelu(wide(x))) + residual"""
        ...


class PlainLinears:
    """torch's public functions: the reference, and all there is on a GPU."""

    def linear(self, layer: Affine, *, gelu: bool = False) -> Linear:
        def plain(x: torch.Tensor) -> torch.Tensor:
            y = F.linear(x, layer.weight, layer.bias)
            return F.gelu(y) if gelu else y

        return plain

    def adding(self, layer: Affine) -> AddingLinear:
        return lambda x, residual: F.linear(x, layer.weight, layer.bias) + residual

    def feed_forward(self, wide: Affine, narrow: Affine) -> AddingLinear:
        return _one_behind_the_other(self.linear(wide, gelu=True), self.adding(narrow))


class PrepackedLinears:
    """oneDNN's layers, each compared with the plain one as it is made; the plain one where they differ or do not exist.

    The weight is kept in oneDNN's layout only, so a model needs no more memory for it.
    """

    def __init__(self) -> None:
        self._plain = PlainLinears()

    def linear(self, layer: Affine, *, gelu: bool = False) -> Linear:
        plain = self._plain.linear(layer, gelu=gelu)
        fused = prepacked(layer, gelu=gelu)
        return fused if fused is not None and _same(fused, plain, layer.weight) else plain

    def adding(self, layer: Affine) -> AddingLinear:
        """oneDNN can add inside the product; measured on one thread that is 1 to 2 % slower than adding in place."""
        linear = self.linear(layer)
        return lambda x, residual: linear(x).add_(residual)

    def feed_forward(self, wide: Affine, narrow: Affine) -> AddingLinear:
        return _one_behind_the_other(self.linear(wide, gelu=True), self.adding(narrow))


def _one_behind_the_other(wide: Linear, narrow: AddingLinear) -> AddingLinear:
    return lambda x, residual: narrow(wide(x), residual)


def prepacked(layer: Affine, *, gelu: bool = False) -> Linear | None:
    """torch's operators behind its compiler; private, hence tried and compared before they are trusted."""
    weight, bias = layer.weight, layer.bias
    try:
        operators = _operators()
        packed = operators._reorder_linear_weight(weight, None)
        apply = operators._linear_pointwise
        activation, algorithm = ("gelu", "none") if gelu else ("none", "")

        def linear(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = apply(x, packed, bias, activation, [], algorithm)
            return y

        linear(torch.zeros(8, weight.shape[1], dtype=weight.dtype))
    except _MISSING:
        return None
    return linear


_MISSING = (RuntimeError, AttributeError, TypeError, NotImplementedError)


def _operators() -> Any:
    return torch.ops.mkldnn


def _same(one: Linear, other: Linear, weight: torch.Tensor) -> bool:
    probe = torch.linspace(-1, 1, 5 * weight.shape[1]).view(5, -1).to(weight.dtype)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    with torch.inference_mode():
        return torch.allclose(one(probe), other(probe), rtol=tolerance, atol=tolerance)
