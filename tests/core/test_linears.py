"""Linear layers: the same numbers whoever computes them, and a fused one that is wrong or missing is never used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from app.src.core.backends.torch import linears
from app.src.core.backends.torch.linears import Affine, linear


def layer(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple[Affine, torch.Tensor]:
    """Numbers (24 from 16), 9 rows of input."""
    torch.manual_seed(1)
    weight, shift = torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype)
    return Affine(weight, shift if bias else None), torch.randn(9, 16).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_they_are_torchs(prepack: bool, dtype: torch.dtype, bias: bool) -> None:
    numbers, x = layer(dtype, bias=bias)
    wanted = F.linear(x, numbers.weight, numbers.bias)
    close(linear(numbers, prepack=prepack)(x), wanted)
    close(linear(numbers, gelu=True, prepack=prepack)(x), F.gelu(wanted))


def test_fused_ones_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, x = layer()
    monkeypatch.setattr(linears, "prepacked", lambda *_args, **_named: lambda rows: rows @ numbers.weight.T)
    close(linear(numbers, prepack=True)(x), F.linear(x, numbers.weight, numbers.bias))


def test_without_the_private_operators_plain_ones_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Nothing())
    numbers, x = layer()
    assert linears.prepacked(numbers) is None
    close(linear(numbers, gelu=True, prepack=True)(x), F.gelu(F.linear(x, numbers.weight, numbers.bias)))
