"""A Triton kernel for bias, residual and LayerNorm in one pass over the activations. Importing this needs Triton, which
torch's CUDA builds bring; the first launch needs a C compiler.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .linears import Affine


@triton.jit
def _add_norm(  # noqa: PLR0913 - a kernel's arguments are pointers and numbers
    x, bias, residual, weight, shift, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalise one row of x + bias + residual, computed in fp32, and store it in x. Triton's compiler evaluates
    annotations, so only those of constants are written."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    total = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, total - tl.sum(total, axis=0) / WIDTH, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, axis=0) / WIDTH + epsilon)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + places, (centred / deviation * scale + offset).to(x.dtype.element_ty), mask=inside)


def add_norm(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, norm: Affine, epsilon: float) -> torch.Tensor:
    """Return LayerNorm(x + bias + residual) of rows (tokens, width), written over `x`. Both are contiguous; sums are in
    fp32. No argument depends on the number of rows, so that one compiled kernel serves all batches and can be recorded
    in CUDA graphs."""
    width = x.shape[1]
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _add_norm[(len(x),)](
            x, bias, residual, norm.weight, norm.bias, epsilon, WIDTH=width, BLOCK=triton.next_power_of_2(width)
        )
    return x
