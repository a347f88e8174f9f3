"""Linear layers and norms over packed tokens: torch's own, and oneDNN's prepacked layers with fused GELU, which are
used only if they agree. Also measures whether a CPU multiplies faster in bf16 than in fp32."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from .process import one_thread

Linear = Callable[[torch.Tensor], torch.Tensor]
# Output of a linear layer, which is overwritten, and residual (tokens, width) -> LayerNorm of their sum.
AddNorm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MISSING = (RuntimeError, AttributeError, TypeError, NotImplementedError)  # raised if torch lacks private operators


@dataclass(frozen=True, slots=True)
class Affine:
    """Weights of a linear layer, `weight` (out, in), or of a norm, `weight` (width)."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


def linear(layer: Affine, *, gelu: bool = False, prepack: bool = False) -> Linear:
    """Return the layer as torch's public function, followed by exact GELU if `gelu`.

    `prepack`, for CPUs, returns oneDNN's layer instead, unless its results differ or torch lacks it. That layer keeps
    the weights in oneDNN's layout only, so they need no additional memory.
    """

    def plain(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, layer.weight, layer.bias)
        return F.gelu(y) if gelu else y

    fused = prepacked(layer, gelu=gelu) if prepack else None
    if fused is None:
        return plain
    weight = layer.weight
    probe = torch.linspace(-1, 1, 5 * weight.shape[1]).view(5, -1).to(weight.dtype)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    with torch.inference_mode():
        same = torch.allclose(fused(probe), plain(probe), rtol=tolerance, atol=tolerance)
    return fused if same else plain


def layer_norm(norm: Affine, epsilon: float) -> Linear:
    """Return torch's LayerNorm over rows."""
    weight, bias = norm.weight, norm.bias
    return lambda x: F.layer_norm(x, weight.shape, weight, bias, epsilon)


def linear_add_norm(layer: Affine, norm: Affine, epsilon: float, *, prepack: bool = False) -> tuple[Linear, AddNorm]:
    """Return a linear layer, and the sum and LayerNorm that follow it. The sum is computed in place: on one thread of a
    CPU that measures 1 to 2 % faster than oneDNN's fused addition."""
    normed = layer_norm(norm, epsilon)
    return linear(layer, prepack=prepack), lambda x, residual: normed(x.add_(residual))


def prepacked(layer: Affine, *, gelu: bool = False) -> Linear | None:
    """Return the layer as private operators of torch's compiler; None if torch lacks them."""
    weight, bias = layer.weight, layer.bias
    activation, algorithm = ("gelu", "none") if gelu else ("none", "")
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        apply = torch.ops.mkldnn._linear_pointwise

        def fused(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = apply(x, packed, bias, activation, [], algorithm)
            return y

        fused(torch.zeros(8, weight.shape[1], dtype=weight.dtype))
    except MISSING:
        return None
    return fused


# -------------------------------------------------------------------------------------------------------------- timing

ROUNDS, LEAST_ROUNDS = 7, 3
BUDGET = 0.05  # seconds after which no further round begins
_HOPELESS = 0.5  # if a small product gains less, no large one is tried: emulated, it may take a second
_lock = threading.Lock()
_known: float | None = None


def bf16_gain() -> float:
    """Return a lower bound of bf16's speed relative to fp32; 0 if torch has no bf16 products.

    Measured once per process, with the model's own operator, because CPU flags do not show it. With bf16 instructions
    the gain is about 2, without them as low as 0.01.
    """
    global _known
    with _lock:
        if _known is None:
            with one_thread(), torch.inference_mode():  # the ratio is the same for all threads
                _known = _measured()
        return _known


def _measured() -> float:
    found = 0.0
    generator = torch.Generator().manual_seed(1)
    for rows, wide in ((32, 384), (256, 1536)):  # the default model's widest layer; larger models gain at least as much
        weight, x = torch.randn(wide, 384, generator=generator), torch.randn(rows, 384, generator=generator)
        exact, half = (prepacked(Affine(weight.to(dtype))) for dtype in (torch.float32, torch.bfloat16))
        if exact is None or half is None:
            return found
        found = gain(partial(exact, x), partial(half, x.bfloat16()))
        if found < _HOPELESS:
            return found
    return found


def gain(
    one: Callable[[], object], other: Callable[[], object], clock: Callable[[], float] = time.thread_time
) -> float:
    """Return the speed of `other` relative to `one`: the lower of the ratio of the best times and the median ratio, so
    that other load on the machine can lower the result, not raise it. The default clock counts this thread's CPU
    seconds."""
    rounds = rounds_of((one, other), clock)
    best = min(took for took, _ in rounds) / min(took for _, took in rounds)
    return min(best, statistics.median(took / other for took, other in rounds))


def rounds_of(works: Sequence[Callable[[], object]], clock: Callable[[], float]) -> list[list[float]]:
    """Run all once, then time them in turns; return the seconds of each, for each round."""

    def seconds(work: Callable[[], object]) -> float:
        started = clock()
        work()
        return max(clock() - started, 1e-9)

    for work in works:
        work()
    ends = clock() + BUDGET
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS and (len(rounds) < LEAST_ROUNDS or clock() < ends):
        rounds.append([seconds(work) for work in works])
    return rounds
