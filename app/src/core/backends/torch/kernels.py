"""Fused kernels for the layers of a packed encoder on a card in half precision: tried when a model is loaded, and taken
only if right and faster there.

They are behind `EngineOptions.experimental_kernels`, because no card has run them yet (decision 0036).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...device import DeviceProfile
from ...memory import full_tokens
from .architectures import EncoderWeights
from .linears import AddNorm, Affine, Linear, gain, linear, linear_add_norm
from .process import device_clock

# Largest difference to torch's own functions, relative to 1 + the value: rounding errors, and in GELU up to 5e-4 for
# its tanh form. A missing bias, another activation or a wrong norm differ by tenths.
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2}
COMPARED = 1024  # rows
FASTER = 1.03  # less could be the scatter of the timing


@dataclass(frozen=True, slots=True)
class Kernels:
    """`gelu` makes a linear layer with GELU; `add_norm`, which also gets LayerNorm's epsilon, a linear layer, and the
    sum and LayerNorm that follow it. `reason`: which fused kernels were taken, and why not the others."""

    gelu: Callable[[Affine], Linear]
    add_norm: Callable[[Affine, Affine, float], tuple[Linear, AddNorm]]
    reason: str = ""

    @classmethod
    def of_torch(cls, *, prepack: bool = False) -> Kernels:
        """Return torch's own functions; for `prepack` see `linear`."""
        return cls(partial(linear, gelu=True, prepack=prepack), partial(linear_add_norm, prepack=prepack))


def fused_gelu(layer: Affine) -> Linear:
    """Return the layer with bias and GELU in the product's epilogue, by a private function of torch. On a card this is
    GELU's tanh form; vectors keep a cosine of at least 0.999998 to the exact form's."""
    weight, bias = layer.weight.t(), layer.bias
    assert bias is not None
    return lambda x: torch._addmm_activation(bias, x, weight, use_gelu=True)


def fused_add_norm(layer: Affine, norm: Affine, epsilon: float) -> tuple[Linear, AddNorm]:
    """Return the product alone, and a Triton kernel for bias, sum and LayerNorm. Raises ImportError without Triton."""
    from .triton_norm import add_norm

    bias = layer.bias
    assert bias is not None
    return linear(Affine(layer.weight)), lambda x, residual: add_norm(x, bias, residual, norm, epsilon)


def choose_kernels(
    profile: DeviceProfile, weights: EncoderWeights, plain: Kernels, clock: Callable[[], float] | None = None
) -> Kernels:
    """Try each fused kernel in the model's first layer, on as many tokens as fill the card; return those that are right
    and faster, else `plain`'s. `clock`, in seconds, waits for the device first.

    Small batches are not timed: in a CUDA graph a kernel less always gains, and launching Triton's kernel takes a few
    microseconds longer only in the batches between graphs and a full card.
    """
    layer, like, fused = weights.layers[0], weights.positions, Kernels(fused_gelu, fused_add_norm)
    if profile.kind == "cpu" or like.dtype not in TOLERANCE:
        return replace(plain, reason="experimental kernels need a card and half precision")
    clock = clock or device_clock(profile)
    rows, width = full_tokens(profile, like.shape[1]), like.shape[1]

    def wide(kernels: Kernels) -> AddNorm:
        product = kernels.gelu(layer.wide)
        return lambda x, _: product(x)

    def normed(kernels: Kernels) -> AddNorm:
        product, norm = kernels.add_norm(layer.attention_out, layer.attention_norm, weights.epsilon)
        return lambda x, residual: norm(product(x), residual)

    def better(part: Callable[[Kernels], AddNorm]) -> tuple[bool, str]:
        """Return whether a part of a layer, made of fused kernels, is right and faster; and the reason."""
        try:
            with torch.inference_mode():
                given = torch.randn(2, rows, width, dtype=like.dtype, device=like.device).unbind()
                one, other = partial(part(plain), *given), partial(part(fused), *given)
                some = slice(None, None, max(1, rows // COMPARED))
                wanted, found = one()[some].float(), other()[some].float()
                worst = float(((found - wanted).abs() / (1 + wanted.abs())).max())
                if not worst <= TOLERANCE[like.dtype]:  # also if it is not a number
                    return False, f"not used (off by {worst:.2g})"
                factor = gain(one, other, clock)
        except Exception as error:  # torch's, Triton's, and those of its C compiler
            said = str(error).partition("\n")[0][:120]
            return False, f"not used ({type(error).__name__}: {said})"
        return factor >= FASTER, f"{'' if factor >= FASTER else 'not '}used (measured {factor:.2f} x as fast)"

    (gelu, gelu_reason), (norm, norm_reason) = better(wide), better(normed)
    return Kernels(
        (fused if gelu else plain).gelu,
        (fused if norm else plain).add_norm,
        f"experimental kernels: GELU in the product {gelu_reason}; bias, sum and LayerNorm in one {norm_reason}",
    )
