"""int8 on CPUs: a packed encoder whose linear layers are oneDNN's 8-bit products, with ranges measured on the user's
texts. Attention of long texts is in bf16 where that is faster; otherwise attention, sums and norms are in fp32.

SmoothQuant (Xiao et al. 2023) moves the range of inputs into the weights. Here its factors cost nothing: they are
folded into the norm or the product before, and the sum with the residual removes them. In a feed-forward's second layer
the channels with the largest range have a scale of their own. docs/decisions/0038 has the measurements.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

from ...device import DeviceProfile, choose_precision
from ...memory import CPU_TOKENS
from ...tokens import plan_batches
from .. import ModelUnsupported, Pause
from ..folder import Folder
from ..tokenizing import RustTokenizer
from .architectures import EncoderWeights, LayerWeights, read
from .linears import MISSING, AddNorm, Affine, Linear, bf16_gain, layer_norm
from .packed import SHORT, Layer, Layout, PackedEncoder, load_tensors

ALGORITHM = 1  # of ranges and products: vectors of another number are not compared with these
ALPHA = 0.8  # SmoothQuant's exponent (docs/decisions/0020)
MARGIN = 1.15  # ranges are widened: texts unlike those of the calibration exceed them
FAR = 24  # one feed-forward channel in 24 has the coarser scale: 64 of 1,536
PARTS = ("query_key_value", "attention_out", "wide", "narrow")
LEAST = 1e-5

# "layer/part" -> least and greatest value of each input channel (2, channels).
Ranges = Mapping[str, torch.Tensor]
Scale = tuple[float, int]  # of 8 unsigned bits: step and zero point


def observe(folder: Folder, texts: Sequence[str]) -> Ranges:
    """Return the ranges of all linear layers' inputs over these texts, computed in fp32. Raises ModelUnsupported
    for a model without a packed path or with non-finite activations."""
    encoder = PackedEncoder.load(folder, DeviceProfile.cpu(), torch.float32)
    ranges: dict[str, torch.Tensor] = {}

    def watched(name: str, part: Linear) -> Linear:
        def apply(x: torch.Tensor) -> torch.Tensor:
            low, high = torch.aminmax(x, dim=0)
            if not (low + high).isfinite().all():
                raise ModelUnsupported(f"the activations of layer {name} are not finite, so it cannot be calibrated")
            found = torch.stack([low, high])
            ranges[name] = wider(found, ranges.get(name, found))
            return part(x)

        return apply

    for number, layer in enumerate(encoder._layers):
        parts: Any = {part: watched(f"{number}/{part}", getattr(layer, part)) for part in PARTS}
        encoder._layers[number] = replace(layer, **parts)
    tokens = RustTokenizer.load(folder).ids(texts)
    with torch.inference_mode():
        for batch in plan_batches(tokens.lengths, CPU_TOKENS, 1):
            encoder(tokens.select(batch))
    return ranges


def wider(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ranges that cover both."""
    return torch.stack([torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])])


def load_int8(folder: Folder, profile: DeviceProfile, ranges: Ranges) -> Int8Encoder:
    """Load a model in int8, on a CPU that is not `unusable`."""
    weights = read(folder, load_tensors(folder, torch.device("cpu"), torch.float32, widen_words=False))
    return Int8Encoder(weights, folder, profile, ranges)


class Int8Encoder(PackedEncoder):
    """A packed encoder in int8."""

    def __init__(self, weights: EncoderWeights, folder: Folder, profile: DeviceProfile, ranges: Ranges) -> None:
        super().__init__(weights, folder, profile, prepack=False)
        layers, epsilon = weights.layers, weights.epsilon
        smooth = [_factors(ranges[f"{at}/{PARTS[0]}"], layer.query_key_value) for at, layer in enumerate(layers)]
        smooth.append(torch.ones_like(smooth[0]))  # the pooling gets plain vectors
        self._norm = layer_norm(_times(weights.embedding_norm, smooth[0]), epsilon)
        pays = choose_precision(profile, "auto", bf16_gain)[0] == "bf16"
        self._long = torch.bfloat16 if pays and unusable(torch.bfloat16) is None else torch.float32
        self._joint: list[_Product] = []
        self._layers = [
            self._layer(layer, {part: ranges[f"{number}/{part}"] for part in PARTS}, *factors, epsilon)
            for number, (layer, factors) in enumerate(zip(layers, pairwise(smooth), strict=True))
        ]

    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout, pause: Pause | None = None
    ) -> torch.Tensor:
        given = self._long if layout.longest > SHORT else torch.float32

        def resume() -> None:
            for product in self._joint:
                product.given = given

        def paused() -> None:
            if pause is not None:
                pause()  # may compute another batch
                resume()

        resume()
        return super().compute(ids, positions, layout, paused)

    def _layer(
        self, layer: LayerWeights, ranges: Ranges, smooth: torch.Tensor, smooth_next: torch.Tensor, epsilon: float
    ) -> Layer:
        """Make a layer whose input is multiplied by `smooth` and whose output by `smooth_next`."""
        mixed = _factors(ranges["attention_out"], layer.attention_out)
        inner = _factors(ranges["wide"], layer.wide)
        joint, (low, high) = layer.query_key_value, ranges["narrow"]
        # Attention mixes the rows of each channel, so the values' factors reach its output.
        rows = torch.cat([torch.ones(len(joint.weight) - len(mixed)), mixed])
        joint = Affine(joint.weight * rows[:, None], None if joint.bias is None else joint.bias * rows)
        query_key_value = _Product(joint, _scale(ranges["query_key_value"], smooth), smooth)
        self._joint.append(query_key_value)
        attention_out = _Product(layer.attention_out, _scale(ranges["attention_out"], mixed), mixed)
        order = torch.argsort(torch.maximum(low.abs(), high.abs()), stable=True)
        count = len(order) - max(1, len(order) // FAR)
        halves, outer = [], Affine(layer.narrow.weight, layer.narrow.bias)
        for channels in (order[:count], order[count:]):
            bias = None if layer.wide.bias is None else layer.wide.bias[channels]
            wide = _Product(Affine(layer.wide.weight[channels], bias), _scale(ranges["wide"], inner), inner)
            narrow = _Product(Affine(outer.weight[:, channels], outer.bias), _scale(ranges["narrow"][:, channels]))
            halves.append((wide, narrow))
            outer = Affine(layer.narrow.weight)  # the bias is added once
        (near_wide, near), (far_wide, far) = halves

        def feed_forward(x: torch.Tensor) -> torch.Tensor:
            return far.added(far_wide.gelu(x, far.scale), near(near_wide.gelu(x, near.scale)))

        return Layer(
            lambda x: query_key_value(quantised(x, query_key_value.scale)),
            lambda x: attention_out(quantised(x.float(), attention_out.scale)),
            _add_norm(layer.attention_norm, smooth, inner, epsilon),
            lambda x: quantised(x, near_wide.scale),  # its products are in the next part, because they have two scales
            feed_forward,
            _add_norm(layer.out_norm, inner, smooth_next, epsilon),
        )


def _factors(ranges: torch.Tensor, layer: Affine) -> torch.Tensor:
    """Return SmoothQuant's factor of each input channel; their geometric mean is 1."""
    reach = ranges.abs().amax(0).clamp_min(LEAST)
    factors = layer.weight.abs().amax(0).clamp_min(LEAST) ** (1 - ALPHA) / reach**ALPHA
    return factors / factors.log().mean().exp()


def _scale(ranges: torch.Tensor, factors: torch.Tensor | float = 1.0) -> Scale:
    """Return the scale on which these values, multiplied by the factors, and 0 fit."""
    low, high = min(0.0, float((ranges[0] * factors).min())), max(0.0, float((ranges[1] * factors).max()))
    step = max(high - low, LEAST) / 255
    return step, round(-low / step)


def _times(norm: Affine, factors: torch.Tensor) -> Affine:
    return Affine(norm.weight * factors, None if norm.bias is None else norm.bias * factors)


def _add_norm(norm: Affine, before: torch.Tensor, after: torch.Tensor, epsilon: float) -> AddNorm:
    """Return the sum with a residual that was multiplied by `before`, and the norm, multiplied by `after`."""
    normed, back = layer_norm(_times(norm, after), epsilon), 1 / before
    return lambda x, residual: normed(x.addcmul_(residual, back))


def quantised(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Return x / step + zero point, rounded and limited to 0 to 255, uint8. One pass; `int_repr` would copy."""
    found = torch.quantize_per_tensor(x, *scale, torch.quint8)
    whole = torch.empty(0, dtype=torch.uint8)
    whole.set_(found.untyped_storage(), 0, x.shape, found.stride())
    return whole


class _Product:
    """A linear layer over inputs on `scale`, which were multiplied by `factors`. Weights have a scale per output."""

    def __init__(self, layer: Affine, scale: Scale, factors: torch.Tensor | float = 1.0) -> None:
        weight = layer.weight / factors
        steps = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        whole = (weight / steps[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.scale = scale
        packed = torch.ops.onednn.qlinear_prepack(whole, None)
        self._weights = packed, steps, torch.zeros(len(steps), dtype=torch.int32)
        self._bias, self.given = layer.bias, torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, outputs) of type `given`."""
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            x, *self.scale, *self._weights, self._bias, 1.0, 0, self.given, "none", [], ""
        )
        return y

    def gelu(self, x: torch.Tensor, scale: Scale) -> torch.Tensor:
        """Return the product with exact GELU, uint8 on another scale."""
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            x, *self.scale, *self._weights, self._bias, *scale, torch.uint8, "gelu", [], "none"
        )
        return y

    def added(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Add the product to `other`, which is overwritten."""
        rest = self._bias, 1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", list[float](), ""
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise.binary(x, *self.scale, *self._weights, other, *rest)
        return y


def unusable(given: torch.dtype = torch.float32) -> str | None:
    """Return why 8-bit products with results of this type cannot be used here, or None."""
    try:
        worst = _worst_error(given)
    except MISSING as error:
        said = str(error).partition("\n")[0][:120]
        return f"this torch {torch.__version__} could not compute 8-bit products on this CPU ({said})"
    return None if worst <= 1 else "8-bit products overflow on this CPU, which has no VNNI instructions; use auto"


@cache
def _worst_error(given: torch.dtype) -> float:
    """Return the largest error of 8-bit products, as a multiple of the allowed one. The largest inputs and weights find
    CPUs whose sums saturate: without VNNI, pairs of products are added in 16 bits (oneDNN, "Nuances of int8
    computations"). One of two input scales has a zero point."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.rand(64, 384, generator=generator).round() * 2 - 1
    weight[::2] = 1
    layer, worst = Affine(weight, torch.linspace(-1, 1, 64)), 0.0
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces once that quantize_per_tensor will be removed
        for rows, zero in ((24, 0), (8, 128)):
            scale, out = (1 / 255, zero), (1.0, zero)
            product = _Product(layer, scale)
            product.given = given
            x = quantised(torch.rand(rows, 384, generator=generator) - zero / 255, scale)
            wanted = F.linear((x.float() - zero) / 255, weight, layer.bias)
            rounding = torch.finfo(given).eps * float(wanted.abs().max())
            results = (
                (product(x).float(), wanted, max(1e-3, rounding)),
                (product.added(x, torch.ones_like(wanted)), wanted + 1, 1e-3),
                (product.gelu(x, out).float(), (F.gelu(wanted).round() + zero).clamp(0, 255), 1.0),
            )
            worst = max(worst, *(float((found - right).abs().max()) / allowed for found, right, allowed in results))
    return worst
