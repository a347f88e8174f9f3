"""Calibrated INT8 of a graph: observe the activations of texts, choose for each layer the shift, scales and range with
the least error, and keep layers in float until the vectors are close enough.

SmoothQuant (Xiao et al. 2023) with the exponent searched for each layer, and the shift of Outlier Suppression+ (Wei et
al. 2023), which lets channels of one sign use all 8 bits although TensorRT's zero point is 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..agreement import Agreement, agreement
from ..backends import DeviceUnavailable, ModelUnsupported, TokenIds, Vectors
from . import needs
from .calibrators import ALGORITHMS, DEFAULT, Algorithm, Histogram, threshold
from .graph import ATTENTION_MASK, OUTPUT, feeds
from .qdq import Constants, LayerPlan, behind_gelu, linears, reordered, rounded, rounded_weight, with_qdq

if TYPE_CHECKING:
    import onnx


Rows = NDArray[np.float32]
BATCH = 1024  # tokens of a batch, at most, or those of one text
WATCHED = 2**24  # numbers that are watched at once, about: 64 MB


def batches(tokens: Sequence[TokenIds], budget: int = BATCH) -> Iterator[list[int]]:
    """Yield positions of texts to compute together: similar lengths, rectangles of at most `budget` tokens."""
    batch: list[int] = []
    for place in sorted(range(len(tokens)), key=lambda place: len(tokens[place])):
        if batch and (len(batch) + 1) * len(tokens[place]) > budget:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def session(model: onnx.ModelProto, threads: int | None = None) -> Any:
    """Return an onnxruntime.InferenceSession on the CPU. Raises DeviceUnavailable when ONNX Runtime rejects the
    graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting threads leave the CPU to others
    options.add_session_config_entry("session.x64quantprecision", "1")  # without VNNI, sums of int8 would saturate
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common root but this
        raise DeviceUnavailable(f"ONNX Runtime cannot load the graph: {type(error).__name__}: {error}") from error


def vectors(runtime: Any, tokens: Sequence[TokenIds]) -> Vectors:
    """Return each text's vector, not normalised, in the order given. `runtime`: from `session`."""
    found: list[tuple[int, Any]] = []
    for batch in batches(tokens):
        rows = runtime.run([OUTPUT], feeds([tokens[place] for place in batch]))[0]
        found += zip(batch, rows, strict=True)
    made: Vectors = np.stack([row for _, row in sorted(found, key=lambda pair: pair[0])])
    return made


def inputs_of(
    model: onnx.ModelProto, layers: Sequence[str], tokens: Sequence[TokenIds]
) -> Iterator[Mapping[str, Rows]]:
    """Yield for each batch the inputs of these MatMuls, (real tokens, channels) in fp32."""
    import onnx

    sources = {node.name: node.input[0] for node in model.graph.node if node.name in set(layers)}
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    names = list(dict.fromkeys(sources.values()))
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    runtime = session(watched)
    channels = sum(shape[0] for name, shape in linears(model).items() if name in sources)
    for batch in batches(tokens, min(BATCH, WATCHED // channels)):
        given = feeds([tokens[place] for place in batch])
        real = given[ATTENTION_MASK].astype(bool)
        seen = dict(zip(names, runtime.run(names, given), strict=True))
        yield {layer: seen[source][real].astype(np.float32, copy=False) for layer, source in sources.items()}


@dataclass(slots=True)
class Channels:
    """Least and greatest value of each channel of a layer's input, and an even sample of its rows."""

    every: int
    """One row in so many is kept."""
    low: Rows = field(init=False)
    high: Rows = field(init=False)
    kept: list[Rows] = field(default_factory=list)
    _seen: int = 0

    def see(self, rows: Rows) -> None:
        low, high = rows.min(0), rows.max(0)
        if self._seen:
            low, high = np.minimum(low, self.low), np.maximum(high, self.high)
        self.low, self.high = low, high
        self.kept.append(rows[-self._seen % self.every :: self.every].copy())
        self._seen += len(rows)

    def reorder(self, order: NDArray[np.intp]) -> None:
        """Permute the channels."""
        self.low, self.high = self.low[order], self.high[order]
        self.kept = [rows[:, order] for rows in self.kept]

    @property
    def rows(self) -> Rows:
        return np.concatenate(self.kept)

    @property
    def reach(self) -> Rows:
        made: Rows = np.maximum(np.abs(self.low), np.abs(self.high))
        return made


Compute = Callable[[Collection[str]], Vectors]
"""Layers in 8 bits -> the vectors of the held-out texts."""


@dataclass(frozen=True, slots=True)
class Target:
    mean_cosine: float = 0.99
    overlap: float = 0.90

    def met(self, found: Agreement) -> bool:
        return found.mean_cosine >= self.mean_cosine and found.overlap >= self.overlap


@dataclass(frozen=True, slots=True)
class Choice:
    """`excluded`: layers that stay in float, worst first. `share`: of the linear layers' operations in 8 bits.
    `losses`: 1 - mean cosine with this layer alone in 8 bits; empty where nothing had to be excluded."""

    excluded: tuple[str, ...]
    found: Agreement
    met: bool
    share: float
    losses: Mapping[str, float] = field(default_factory=dict)


def losses(layers: Collection[str], compute: Compute, exact: Vectors) -> dict[str, float]:
    """Return 1 - mean cosine with each layer alone in 8 bits."""
    return {name: 1.0 - agreement(compute([name]), exact).mean_cosine for name in layers}


@dataclass(frozen=True, slots=True)
class Search:
    """A search for layers to exclude. `costs`: each layer's operations that would be in 8 bits; `whole`: all operations
    of all linear layers. It stops before `least_share`. `always_measure`: each layer alone, even if none is
    excluded."""

    costs: Mapping[str, float]
    whole: float
    target: Target = Target()
    least_share: float = 0.5
    always_measure: bool = False

    def share(self, layers: Collection[str]) -> float:
        return sum(self.costs[name] for name in layers) / self.whole

    def __call__(self, compute: Compute, exact: Vectors) -> Choice:
        """Compute once where all layers together meet the target; else once more for each layer and each exclusion.
        Layers are excluded by loss per operation."""
        layers = list(self.costs)
        found = agreement(compute(layers), exact)
        if self.target.met(found) and not self.always_measure:
            return Choice((), found, True, self.share(layers))
        alone = losses(layers, compute, exact)
        worst_first = sorted(layers, key=lambda name: -alone[name] / self.costs[name])
        excluded: list[str] = []
        for name in worst_first:
            rest = [each for each in layers if each not in (*excluded, name)]
            if self.target.met(found) or self.share(rest) < self.least_share:
                break
            excluded.append(name)
            found = agreement(compute(rest), exact)
        kept = [each for each in layers if each not in excluded]
        return Choice(tuple(excluded), found, self.target.met(found), self.share(kept), alone)


ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8)  # of SmoothQuant; and none at all is tried
# One channel in so many of a feed-forward stays in float: 64 of 1,536 (as `backends/torch/int8.py`; docs/gpu.md).
FAR = 24
SAMPLE = 512  # rows of each layer by which plans are compared
_TARGET = Target()
HELD_OUT = 5  # one text in so many is held out where none are given
COARSE = 1024  # bins by which plans are compared; the ranges that are used come from all texts and fine bins
_LEAST = 1e-5


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is tried. `far`: one channel in so many stays in float, 0 for none. `sensitivities`: measure each layer
    alone even when none is excluded."""

    target: Target = _TARGET
    least_share: float = 0.5
    alphas: Sequence[float] = ALPHAS
    shifts: bool = True
    far: int = FAR
    sensitivities: bool = False


@dataclass(frozen=True, slots=True)
class LayerReport:
    """`alpha` None: not smoothed. `near`: of `channels` in 8 bits, the rest in float. `error`: of its results on the
    calibration rows, over their variance. `loss`: 1 - mean cosine with only this layer in 8 bits; None: not
    measured."""

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
    """Cosines and overlap compare the held-out texts with the float graph. `share`: of the linear layers' operations in
    8 bits. `met`: whether the target was reached."""

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
    """Add Q/DQ to a graph of `build_graph`, calibrated on `tokens` and measured on `held_out` (None: every fifth of
    `tokens`, left out of the calibration). The graph is returned whether or not it reached the target.

    1,000 texts of 40 tokens through all-MiniLM-L6-v2: about a minute on two cores. Raises DeviceUnavailable without the
    extra, ValueError for too few texts or an unknown algorithm, ModelUnsupported for activations that are not finite.
    """
    needs("onnx", "onnxruntime")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; use {', '.join(ALGORITHMS)}")
    if held_out is None:
        held_out = tokens[::HELD_OUT]
        tokens = [each for place, each in enumerate(tokens) if place % HELD_OUT]
    if not tokens or len(held_out) < 2:
        raise ValueError("calibration needs texts, and at least two others to measure with")
    return _Quantising(graph, tokens, algorithm, recipe or Recipe()).run(held_out)


@dataclass(frozen=True, slots=True)
class _Found:
    """The best plan of a layer, and its error."""

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
            raise ModelUnsupported(f"the activations of {broken[0]} are not finite, so it cannot be calibrated")
        return seen

    def _orders(self, seen: Mapping[str, Channels]) -> dict[str, Any]:
        """Order the channels of feed-forwards' second layers so that those with the largest range come last."""
        second = [name for name in self._shapes if behind_gelu(name) in self._shapes]
        return {name: np.argsort(seen[name].reach, kind="stable") for name in second if self._recipe.far}

    def _near(self, name: str) -> int | None:
        channels = self._shapes[name][0]
        second = behind_gelu(name) in self._shapes
        return channels - max(1, channels // self._recipe.far) if second and self._recipe.far else None

    def _planned(self, name: str, seen: Channels) -> _Found:
        """Return the plan with the least error on the sampled rows."""
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
        """Return the plans with ranges from all texts."""
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
    """Yield shifts and factors to try for the channels of `weight` (in, out), without a range. A factor is the range of
    the channel's weights to the power 1 - alpha, over the range of the channel to the power alpha, normalised to 1."""
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
    """Return the mean squared error of a layer's results against `exact`, over their variance."""
    near = len(weight) if plan.near is None else plan.near
    inside = weight[:near]
    shift = 0.0 if plan.shift is None else plan.shift @ inside
    integers, scales = rounded_weight(inside if plan.factors is None else inside / plan.factors[:, None])
    found = rounded(plan.balanced(rows), plan.threshold) @ (integers * scales) + shift + rows[:, near:] @ weight[near:]
    return float(np.mean((found - exact) ** 2) / max(float(exact.var()), _LEAST**2))
