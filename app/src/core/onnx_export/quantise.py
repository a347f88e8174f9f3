"""Calibrated INT8 of a graph: texts go through it, each layer gets the shift, the scales and the range that spoil its
results least, and layers stay in float until the vectors are near enough. Knows token ids, not texts.

SmoothQuant (Xiao et al. 2023) with its exponent searched for each layer, and Outlier Suppression+'s shift (Wei et al.
2023), by which channels of one sign use all 8 bits although TensorRT's zero point is 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import ModelUnsupported, TokenIds, Vectors
from . import needs
from .activations import Channels, Rows, inputs_of, session, vectors
from .calibrators import ALGORITHMS, DEFAULT, Algorithm, Histogram, threshold
from .qdq import Constants, LayerPlan, behind_gelu, linears, reordered, rounded, rounded_weight, with_qdq
from .sensitivity import Choice, Search, Target

if TYPE_CHECKING:
    import onnx

ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8)
"""Of SmoothQuant; and none at all is tried."""
FAR = 24
"""One channel in so many of a feed-forward stays in float: 64 of 1,536 (as `backends/torch/int8.py`; docs/gpu.md)."""
SAMPLE = 512
"""Rows of each layer by which plans are compared."""
_TARGET = Target()
HELD_OUT = 5
"""One text in so many is held out where none are given."""
COARSE = 1024
"""Bins by which plans are compared; the ranges that are used come from all texts and fine bins."""
_LEAST = 1e-5


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is tried and wanted. `far`: one channel in so many, 0 for none. `sensitivities`: measure each layer alone
    even where nothing has to stay in float."""

    target: Target = _TARGET
    least_share: float = 0.5
    alphas: Sequence[float] = ALPHAS
    shifts: bool = True
    far: int = FAR
    sensitivities: bool = False


@dataclass(frozen=True, slots=True)
class LayerReport:
    """`alpha` None: not smoothed. `near`: so many of `channels` are in 8 bits, the rest in float. `error`: of its
    results on calibration's rows, over their variance. `loss`: 1 - mean cosine of the whole, this layer alone in 8
    bits; None where it was not measured."""

    name: str
    int8: bool
    alpha: float | None
    shifted: bool
    threshold: float
    channels: int
    near: int
    error: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it. Cosines and overlap are of the held-out texts, to the graph as it was. `share`: of the linear
    layers' operations, in 8 bits. `met`: the target; who uses the graph all the same knows it."""

    algorithm: Algorithm
    texts: int
    held_out: int
    mean_cosine: float
    least_cosine: float
    overlap: float
    share: float
    met: bool
    target: Target
    excluded: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    seconds: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def quantise(
    graph: onnx.ModelProto,
    tokens: Sequence[TokenIds],
    algorithm: Algorithm = DEFAULT,
    *,
    held_out: Sequence[TokenIds] | None = None,
    recipe: Recipe | None = None,
) -> tuple[onnx.ModelProto, Report]:
    """The graph of `graph.build_graph` with Q/DQ, calibrated on `tokens` and judged by `held_out` (None: each fifth of
    `tokens`, not calibrated on). The result is given back whether or not it met the target.

    1,000 texts of 40 tokens through all-MiniLM-L6-v2: about a minute on two cores. Raises DeviceUnavailable without the
    extra, ValueError for too few texts or an unknown algorithm, ModelUnsupported for activations that are not finite.
    """
    needs("onnx", "onnxruntime")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is none of {', '.join(ALGORITHMS)}")
    if held_out is None:
        held_out = tokens[::HELD_OUT]
        tokens = [each for place, each in enumerate(tokens) if place % HELD_OUT]
    if not tokens or len(held_out) < 2:
        raise ValueError("calibration wants texts to see, and at least two others to be judged by")
    return _Quantising(graph, tokens, algorithm, recipe or Recipe()).run(held_out)


@dataclass(frozen=True, slots=True)
class _Found:
    """The best plan of a layer, and what it was chosen by."""

    plan: LayerPlan
    alpha: float | None
    error: float


class _Quantising:
    def __init__(
        self, graph: onnx.ModelProto, tokens: Sequence[TokenIds], algorithm: Algorithm, recipe: Recipe
    ) -> None:
        self._original = graph
        self._graph = graph
        self._tokens = tokens
        self._algorithm = algorithm
        self._recipe = recipe
        self._shapes = linears(graph)
        self._seconds: dict[str, float] = {}

    def run(self, held_out: Sequence[TokenIds]) -> tuple[onnx.ModelProto, Report]:
        with self._timing("observing"):
            seen = self._observed()
        orders = self._orders(seen)
        self._graph = reordered(self._graph, orders)
        for name, order in orders.items():
            seen[name].reorder(order)
        with self._timing("planning"):
            found = {name: self._planned(name, each) for name, each in seen.items()}
        with self._timing("calibrating"):
            plans = self._calibrated({name: each.plan for name, each in found.items()})
        with self._timing("judging"):
            choice = self._chosen(plans, held_out)
        kept = {name: plan for name, plan in plans.items() if name not in choice.excluded}
        found = {name: replace(each, plan=plans[name]) for name, each in found.items()}
        return with_qdq(self._graph, kept), self._report(found, choice, len(held_out))

    @contextlib.contextmanager
    def _timing(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[what] = round(time.perf_counter() - start, 2)

    def _observed(self) -> dict[str, Channels]:
        every = max(1, sum(map(len, self._tokens)) // SAMPLE)
        seen = {name: Channels(every) for name in self._shapes}
        for batch in inputs_of(self._graph, list(self._shapes), self._tokens):
            for name, rows in batch.items():
                seen[name].see(rows)
        broken = [name for name, each in seen.items() if not np.isfinite(each.reach).all()]
        if broken:
            raise ModelUnsupported(f"the activations of {broken[0]} are not finite: there is nothing to calibrate on")
        return seen

    def _orders(self, seen: Mapping[str, Channels]) -> dict[str, Any]:
        """Of second layers of feed-forwards: the channels that reach farthest come last."""
        second = [name for name in self._shapes if behind_gelu(name) in self._shapes]
        return {name: np.argsort(seen[name].reach, kind="stable") for name in second if self._recipe.far}

    def _near(self, name: str) -> int | None:
        channels = self._shapes[name][0]
        second = behind_gelu(name) in self._shapes
        return channels - max(1, channels // self._recipe.far) if second and self._recipe.far else None

    def _planned(self, name: str, seen: Channels) -> _Found:
        """The plan whose results on the kept rows are nearest."""
        constants = Constants(self._graph)
        weight = constants[f"{name}.weight"].astype(np.float32)
        near, rows = self._near(name), seen.rows
        exact = rows @ weight
        shifts = self._recipe.shifts and f"{name}.bias" in constants
        found = []
        for alpha, plan in balances(seen, weight[:near], self._recipe.alphas, shifts=shifts):
            counted = Histogram(COARSE)
            counted.add(plan.balanced(rows[:, :near]))
            whole = replace(plan, threshold=threshold(counted, self._algorithm), near=near)
            found.append(_Found(whole, alpha, error(whole, rows, weight, exact)))
        return min(found, key=lambda each: each.error)

    def _calibrated(self, plans: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
        """The same plans with ranges from all texts."""
        counted = {name: Histogram() for name in plans}
        for batch in inputs_of(self._graph, list(plans), self._tokens):
            for name, rows in batch.items():
                counted[name].add(plans[name].balanced(rows))
        return {
            name: replace(plan, threshold=threshold(counted[name], self._algorithm)) for name, plan in plans.items()
        }

    def _chosen(self, plans: Mapping[str, LayerPlan], held_out: Sequence[TokenIds]) -> Choice:
        def compute(layers: Collection[str]) -> Vectors:
            return vectors(session(with_qdq(self._graph, {name: plans[name] for name in layers})), held_out)

        costs = {name: float((self._near(name) or wide) * out) for name, (wide, out) in self._shapes.items()}
        whole = float(sum(wide * out for wide, out in self._shapes.values()))
        recipe = self._recipe
        search = Search(costs, whole, recipe.target, recipe.least_share, recipe.sensitivities)
        return search(compute, vectors(session(self._original), held_out))

    def _report(self, found: Mapping[str, _Found], choice: Choice, held_out: int) -> Report:
        layers = (self._layer(name, each, choice) for name, each in found.items())
        return Report(
            algorithm=self._algorithm,
            texts=len(self._tokens),
            held_out=held_out,
            mean_cosine=choice.found.mean_cosine,
            least_cosine=choice.found.least_cosine,
            overlap=choice.found.overlap,
            share=choice.share,
            met=choice.met,
            target=self._recipe.target,
            excluded=choice.excluded,
            layers=tuple(layers),
            seconds=self._seconds,
        )

    def _layer(self, name: str, found: _Found, choice: Choice) -> LayerReport:
        channels = self._shapes[name][0]
        return LayerReport(
            name=name,
            int8=name not in choice.excluded,
            alpha=found.alpha,
            shifted=found.plan.shift is not None,
            threshold=found.plan.threshold,
            channels=channels,
            near=channels if found.plan.near is None else found.plan.near,
            error=found.error,
            loss=choice.losses.get(name),
        )


def balances(
    seen: Channels, weight: Rows, alphas: Sequence[float], *, shifts: bool
) -> Iterator[tuple[float | None, LayerPlan]]:
    """Shifts and factors to try for the first channels, as many as `weight` (in, out) has; without their range. A
    factor divides by how far its channel reaches, to the power of alpha, and multiplies by how far its weights do, to
    that of 1 - alpha; on average they are 1."""
    near = len(weight)
    low, high = seen.low[:near], seen.high[:near]
    mighty = np.maximum(np.abs(weight).max(1), _LEAST)
    middle: Rows = ((low + high) / 2).astype(np.float32)
    for shift in [None, middle] if shifts else [None]:
        reach = np.maximum(seen.reach[:near] if shift is None else (high - low) / 2, _LEAST)
        yield None, LayerPlan(1.0, shift)
        for alpha in alphas:
            factors = mighty ** (1 - alpha) / reach**alpha
            yield alpha, LayerPlan(1.0, shift, (factors / np.exp(np.log(factors).mean())).astype(np.float32))


def error(plan: LayerPlan, rows: Rows, weight: Rows, exact: Rows) -> float:
    """Mean square of what the plan adds to a layer's results `exact` for these inputs, over their variance."""
    near = len(weight) if plan.near is None else plan.near
    inside = weight[:near]
    shift = 0.0 if plan.shift is None else plan.shift @ inside
    integers, scales = rounded_weight(inside if plan.factors is None else inside / plan.factors[:, None])
    found = rounded(plan.balanced(rows), plan.threshold) @ (integers * scales) + shift + rows[:, near:] @ weight[near:]
    return float(np.mean((found - exact) ** 2) / max(float(exact.var()), _LEAST**2))
