"""A packed encoder in INT8 for CPUs with VNNI, on oneDNN's quantised operators. It is compared with fp32 before use.

Weights are scaled by output channel, inputs by ranges from a calibration. For accuracy (measured in docs/gpu.md) it
uses SmoothQuant's scales, and keeps attention's output and the feed-forward channels with the largest range in float.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from ...device import DeviceProfile
from ...tokens import plan_batches
from .. import DeviceUnavailable, ModelUnsupported, TokenBatch
from ..folder import Folder
from ..tokenizing import RustTokenizer
from .architectures import refusal
from .linears import MISSING, AddingLinear, Affine, Linear, PrepackedLinears, gain
from .packed import PackedEncoder
from .process import one_thread

UNSIGNED = 255  # inputs are unsigned: for signed ones torch uses oneDNN's reference code, 20,000 x slower
SIGNED = 127
OUTLIERS = 24  # one feed-forward channel in 24 stays in float: 64 of 1536
_LEAST = 1e-5


@dataclass(slots=True)
class Seen:
    """A layer with the smallest and largest input of each channel in the calibration."""

    layer: Affine
    low: torch.Tensor = field(init=False)
    high: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = self.layer.weight.shape[1]
        self.low, self.high = torch.full((width,), torch.inf), torch.full((width,), -torch.inf)

    def see(self, x: torch.Tensor) -> None:
        # torch.aminmax takes ten times as long.
        self.low, self.high = torch.minimum(self.low, x.amin(0)), torch.maximum(self.high, x.amax(0))

    @property
    def reach(self) -> torch.Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())


class Observing(PrepackedLinears):
    """Linear layers in fp32 that record their input ranges; except attention's output, which stays in float."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def linear(self, layer: Affine, *, gelu: bool = False) -> Linear:
        seen, apply = Seen(layer), super().linear(layer, gelu=gelu)
        self.seen.append(seen)

        def noting(x: torch.Tensor) -> torch.Tensor:
            seen.see(x)
            return apply(x)

        return noting

    def adding(self, layer: Affine) -> AddingLinear:
        return PrepackedLinears().adding(layer)

    def feed_forward(self, wide: Affine, narrow: Affine) -> AddingLinear:
        first, second = self.linear(wide, gelu=True), self.linear(narrow)
        return lambda x, residual: second(first(x)) + residual


class Int8Linears(PrepackedLinears):
    """8-bit layers from the records of `Observing`, made in the same order. Raises one of MISSING without operators."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen: Iterator[Seen] = iter(seen)

    def linear(self, layer: Affine, *, gelu: bool = False) -> Linear:
        seen = next(self._seen)
        grid, weight = smoothed(seen)
        product = Product(weight, seen.layer.bias, grid, gelu=gelu)
        return lambda x: product(grid(x), x.dtype)

    def adding(self, layer: Affine) -> AddingLinear:
        return PrepackedLinears().adding(layer)

    def feed_forward(self, wide: Affine, narrow: Affine) -> AddingLinear:
        """Make a feed-forward with GELU's output in 8 bits, except in the channels with the largest range."""
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
        second_far = self.adding(Affine(columns[:, far].contiguous().to(narrow.weight.dtype)))

        def feed_forward(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            rows = grid(x)
            rest = second_far(first_far(rows, x.dtype), residual)
            return second.adding(first.onto(rows, between), rest)

        return feed_forward


# ------------------------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class Grid:
    """A quantisation: `scale` x (unsigned - `zero`) = number x `factors` of the channel (None: 1)."""

    scale: float
    zero: int
    factors: torch.Tensor | None = None

    @classmethod
    def over(cls, low: float, high: float, factors: torch.Tensor | None = None) -> Grid:
        """Make a grid for numbers between `low` and `high`, and 0."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = max((high - low) / UNSIGNED, _LEAST / UNSIGNED)
        return cls(scale, round(-low / scale), factors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Quantise and clamp; adding 0.5 and truncating rounds to nearest, and saves a pass."""
        factors = 1.0 / self.scale if self.factors is None else self.factors / self.scale
        shifted = x.float() * factors
        return shifted.add_(self.zero + 0.5).clamp_(0, UNSIGNED).to(torch.uint8)


def smoothed(seen: Seen) -> tuple[Grid, torch.Tensor]:
    """Apply SmoothQuant with alpha 0.5: scale each input channel so that inputs and weights have the same range.

    Otherwise one channel with a large range makes the grid coarse for all.
    """
    weight = seen.layer.weight.float()
    balance = (seen.reach.clamp(min=_LEAST) / weight.abs().amax(0).clamp(min=_LEAST)).sqrt()
    low, high = float((seen.low / balance).min()), float((seen.high / balance).max())
    return Grid.over(low, high, 1.0 / balance), weight * balance


class Product:
    """8-bit rows times 8-bit weights, then bias and GELU. Keeps the weights in oneDNN's layout only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, grid: Grid, *, gelu: bool = False) -> None:
        """`weight`: (out, in), for inputs on `grid`. The grid's zero is folded into the bias."""
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
        """Return the results in 8 bits on `grid`."""
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


def int8_gain() -> float:
    """Return the speed of 8-bit products relative to fp32, by CPU seconds; 0 if torch lacks the operators.

    The product is small: without the instructions oneDNN's reference code is thousands of times slower.
    """
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(768, 384, generator=generator), torch.randn(32, 384, generator=generator)
    grid = Grid.over(float(x.min()), float(x.max()))
    try:
        plain, product = PrepackedLinears().linear(Affine(weight)), Product(weight, None, grid)
        rows = grid(x)
        wanted = F.linear(x, weight)
        if not float((product(rows, torch.float32) - wanted).abs().max() / wanted.abs().max()) < 0.05:
            return 0.0
    except MISSING:
        return 0.0
    with one_thread(), torch.inference_mode():
        return gain(lambda: plain(x), lambda: product(rows, torch.float32))


# ------------------------------------------------------------------------------------------------------ a model in INT8

LEARNT, JUDGED = 96, 32  # texts for calibration, and others for the comparison
BATCH = 1024  # tokens of a batch
PAYS = 1.3  # measured gain over fp32 from which int8 is used; with VNNI it is 1.7 to 4
LEAST_COSINE = 0.98  # to fp32; all-MiniLM-L6-v2 reaches 0.996


def load_int8(
    folder: Folder, profile: DeviceProfile, dtype: torch.dtype, texts: Sequence[str] | None = None
) -> tuple[PackedEncoder, str]:
    """Return the encoder, with `dtype` between its 8-bit layers, and a sentence about its accuracy.

    `texts` replaces the built-in texts of the calibration. Raises DeviceUnavailable or ModelUnsupported.
    """
    why_not = refusal(folder)
    if why_not is None and folder.config.get("model_type") == "modernbert":
        why_not = "its feed-forward is gated"
    if why_not is not None:
        raise ModelUnsupported(f"model {folder.name!r} cannot be computed in int8: {why_not}; use precision auto")
    measured = int8_gain()
    if measured < PAYS:
        raise DeviceUnavailable(
            f"precision int8 cannot be used on {profile.name}: 8-bit products measured {measured:.2f} x as fast"
            " as fp32; use bf16, fp32 or auto"
        )
    tokenizer = RustTokenizer.load(folder)
    observing = Observing()
    exact = PackedEncoder.load(folder, DeviceProfile.cpu(), torch.float32, observing)

    def batches(chosen: Sequence[str]) -> list[TokenBatch]:
        tokens = tokenizer.ids(chosen)
        return [tokens.select(places) for places in plan_batches(tokens.lengths.tolist(), BATCH, packed=True)]

    with torch.inference_mode():
        for batch in batches(calibration_texts(LEARNT, 5) if texts is None else texts):
            exact(batch)
        seen = list(observing.seen)
        try:
            encoder = PackedEncoder.load(folder, profile, dtype, Int8Linears(seen))
            judged = batches(calibration_texts(JUDGED, 6))
            pairs = [F.cosine_similarity(encoder(batch).double(), exact(batch).double()) for batch in judged]
        except MISSING as error:
            raise DeviceUnavailable(
                f"precision int8: this torch lacks its operators ({type(error).__name__})"
            ) from error
    near = torch.cat(pairs).nan_to_num(nan=-1.0)
    least = float(near.min())
    if not least >= LEAST_COSINE:
        raise ModelUnsupported(
            f"model {folder.name!r} loses too much in int8: cosine {least:.4f} to fp32 at the least of {JUDGED} texts,"
            f" {LEAST_COSINE} is wanted; use precision auto"
        )
    reason = f"8-bit layers, calibrated; cosine to fp32 {least:.4f} at the least, {float(near.mean()):.4f} on average"
    return encoder, reason


# ------------------------------------------------------------------------------------------------ texts for calibration

_WORDS = (  # noqa: SIM905 - easier to read
    "pump valve seal bearing motor filter sensor bolt gasket belt housing cable compressor coupling gear oil pressure"
    " flow steel order delivery invoice customer vendor plant material notification maintenance inspection leak noise"
    " vibration temperature damaged replaced checked cleaned released blocked quantity price contract account cost"
    " center Pumpe Ventil Dichtung Lager Motor Filter Auftrag Lieferung Rechnung Kunde Werk Material Meldung Wartung"
    " undicht beschädigt ersetzt geprüft Schraube verzinkt Edelstahl the and of is was not for with ohne nach über"
).split()
_SENTENCES = (
    "",  # special tokens alone have unusual values
    "The hydraulic pump leaks at the flange and was replaced by maintenance.",
    "Delivery 80012345 was late; the customer complained twice about missing items.",
    "Bitte prüfen Sie die Dichtung am Ventil, es tropft unter Last.",
    "Purchase order 4500017892 for stainless steel bolts M8x20 DIN 933, galvanised.",
    "Invoice blocked for payment because the quantity received differs from the order.",
    "Vibration above the permitted limit at the conveyor drive, next inspection in May.",
    "Employee training on occupational safety, plant 1000, storage location 0001.",
    "This module calculates the remaining useful life of rotating equipment.",
    "A lightweight office chair with adjustable height, armrests and a breathable mesh back.",
    "Annual service contract for air conditioning units including spare parts and labour.",
    "How do I reset the password of my account?",
    "What is the status of the shipment to Hamburg?",
    "Software library for reading and writing configuration files in several formats.",
    "Temperature sensor PT100 class A, 4-wire, cable length 5 m, IP67.",
    "Rohrleitung DN50 aus Edelstahl, geschweißt, mit Flansch nach DIN EN 1092-1.",
    "Le moteur électrique chauffe et s'arrête après dix minutes; remplacer le roulement.",
)


def calibration_texts(count: int, seed: int) -> list[str]:
    """Return texts like those in SAP tables, the same for equal seeds: 2 to 120 words, mostly few, with numbers."""
    chance = random.Random(seed)
    made = [*_SENTENCES[:count]]
    while len(made) < count:
        length = min(120, max(2, int(chance.lognormvariate(2.8, 0.8))))
        words = [chance.choice(_WORDS) for _ in range(length)]
        for _ in range(max(1, length // 8)):
            words.insert(chance.randrange(len(words) + 1), _mark(chance))
        made.append(" ".join([*words, chance.choice(_SENTENCES)] if chance.random() < 0.5 else words))
    return made


def _mark(chance: random.Random) -> str:
    number = str(chance.randrange(10 ** chance.randrange(2, 9)))
    code = f"{chance.choice('ABMXDN')}{chance.randrange(999)}-{chance.randrange(99)}"
    return chance.choice([number, code, "/", ",", ".", "(", ")"])
