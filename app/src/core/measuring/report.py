"""The report of the command: device, settings, measurements and their ratios. Every figure is measured in this run, or
null with a reason in the settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..backends import EngineError
from ..device import PRECISIONS, DeviceProfile, Precision, Setting, detect, settings_of
from ..loading import EngineOptions, load_engine
from ..nvml import snapshot
from .clocks import figure
from .embedding import Embedding, Trace, measure_embedding, usable_precisions, with_shares, write_trace
from .products import (
    MULTIPLES,
    SQUARE,
    Matmul,
    ModelProducts,
    first_line,
    groups_of,
    measure_products,
    products_of_model,
    set_tf32,
)
from .sustained import Conditions, Sampler, Sustained, driver_of, measure_sustained, sustained_shape

T = TypeVar("T")
MODEL = "all-MiniLM-L6-v2"  # the default model to measure
QUICK = {"cpu": 4.0, "cuda": 8.0}  # most seconds for the table of products
LEAST_SHARE = 0.25  # of the tokens to embed if less than a second is given
UNDISTURBED = 0.25  # median spread of the products up to which comparisons are meaningful
# Default seconds of each sustained run: a card of 70 W needs 30 to show its cap.
SUSTAINED = {"cpu": 1.0, "cuda": 30.0}


@dataclass(frozen=True, slots=True)
class Ratio:
    """`text`: a line for people that contains the value."""

    name: str
    value: float
    text: str


@dataclass(slots=True)
class Report:
    """`clocks`: the driver's samples while products were measured; `trace`: only with --profile."""

    device: dict[str, Any]
    settings: list[Setting] = field(default_factory=list)
    matmul: list[Matmul] = field(default_factory=list)
    embedding: list[Embedding] = field(default_factory=list)
    model: str | None = None
    sustained: list[Sustained] = field(default_factory=list)
    clocks: Conditions | None = None
    ratios: list[Ratio] = field(default_factory=list)
    trace: Trace | None = None

    def add(self, found: T | Setting, rows: list[T]) -> None:
        """Add a measurement to its rows, or a setting that says why it is missing."""
        if isinstance(found, Setting):
            self.settings.append(found)
        else:
            rows.append(found)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `sizes`: edges of square products; `seconds`: of each sustained run, also a limit for the table
    of products (None: by kind of device); `model`: for products and embedding; `trace`: file for a profile."""

    sizes: tuple[int, ...] | None = None
    seconds: float | None = None
    device: str = "auto"
    model: str = MODEL
    trace: Path | None = None


def describe(profile: DeviceProfile) -> dict[str, Any]:
    """Describe the device as JSON; unknown values are null."""
    import torch

    return {
        "kind": profile.kind,
        "name": profile.name,
        "compute_capability": ".".join(map(str, profile.capability)) if profile.capability else None,
        "memory_bytes": profile.memory_bytes or None,
        "bandwidth_gb_per_s": profile.bandwidth,
        "multiprocessors": profile.multiprocessors or None,
        "instructions": list(profile.instructions) or None,
        "tensor_cores": sorted(profile.tensor_cores),
        "attention": profile.attention,
        "peak_tflops": dict(profile.peaks) or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "driver": snapshot(throughput=False).driver_version,
    }


def make_report(plan: Plan, tell: Callable[[str], None] = lambda _line: None) -> Report:
    """Measure everything. Raises DeviceError for a missing device, OSError if the trace cannot be written."""
    from ..backends.torch.linears import bf16_gain

    profile = detect(plan.device)
    report = Report(describe(profile), settings_of(profile, bf16_gain), model=plan.model)
    model = None
    try:
        try:
            model = products_of_model(plan.model)
        except EngineError as error:
            report.settings.append(Setting("matmul of the model", None, first_line(error)))
        _measure_products(profile, plan, model, report, tell)
        _measure_sustained(profile, plan, report, tell)
        _measure_embedding(profile, plan, model, report, tell)
        if plan.trace is not None:
            tell("tracing one call of the engine")
            try:
                with load_engine(EngineOptions(model=plan.model, device=plan.device)) as engine:
                    report.trace = write_trace(engine, plan.trace)
            except EngineError as error:
                report.settings.append(Setting("trace", None, first_line(error)))
    finally:
        set_tf32(profile, False)
    report.ratios = list(ratios_of(profile, report))
    return report


def _chosen(report: Report) -> Precision:
    """Return the precision that the engine chooses."""
    value = next(each.value for each in report.settings if each.name == "precision")
    return next(each for each in PRECISIONS if each == value)


def _measure_products(
    profile: DeviceProfile, plan: Plan, model: ModelProducts | None, report: Report, tell: Callable[[str], None]
) -> None:
    seconds = min(plan.seconds or QUICK[profile.kind], QUICK[profile.kind])
    tell(f"measuring matrix products on {profile.name} ({profile.kind}), about {seconds:g} s")
    with Sampler(*driver_of(profile)) as sampler:
        for found in measure_products(profile, groups_of(profile, plan.sizes, model), seconds):
            report.add(found, report.matmul)
    report.clocks = sampler.conditions
    report.settings += _disturbed(report.matmul)
    if profile.kind == "cpu":
        report.settings.append(Setting("kernel", None, "a CPU: torch's profiler names kernels of cards only"))


def _disturbed(rows: Sequence[Matmul]) -> list[Setting]:
    spreads = [row.spread for row in rows if row.spread is not None]
    middle = statistics.median(spreads) if spreads else 0.0
    why = "half of the products scattered more than this: other programs used the device, so ignore the ratios"
    return [Setting("disturbed", round(middle, 2), why)] if middle > UNDISTURBED else []


def _measure_sustained(profile: DeviceProfile, plan: Plan, report: Report, tell: Callable[[str], None]) -> None:
    """Measure the engine's precision and fp32, so that both sides of the ratio have the same power cap."""
    seconds = plan.seconds or SUSTAINED[profile.kind]
    chosen = _chosen(report)
    wanted: list[Precision] = ["fp32"]
    if chosen != "fp32" and any(row.dtype == chosen and row.tflops is not None for row in report.matmul):
        wanted.append(chosen)
    tell(f"measuring {' and '.join(wanted)} sustained, {seconds:g} s each")
    for found in measure_sustained(profile, sustained_shape(profile, plan.sizes), wanted, seconds):
        report.add(found, report.sustained)


def _measure_embedding(
    profile: DeviceProfile, plan: Plan, model: ModelProducts | None, report: Report, tell: Callable[[str], None]
) -> None:
    if profile.kind == "cuda":
        import torch

        torch.cuda.empty_cache()  # an engine plans its batches by the driver's figure of free memory
    precisions = usable_precisions(profile, report.matmul)
    share = max(LEAST_SHARE, min(1.0, plan.seconds or 1.0))
    tell(f"measuring the embedding model in {', '.join(precisions)}")
    for found in measure_embedding(profile, plan.model, precisions, share):
        if model and not isinstance(found, Setting):
            found = with_shares(found, report.matmul, model)
        report.add(found, report.embedding)


def why_not_embedded(report: Report) -> str:
    """Return why no text was embedded."""
    reasons = (each.reason for each in report.settings if each.value is None and each.name.startswith("embedding "))
    chosen = (each.reason for each in report.settings if each.name == f"embedding {_chosen(report)}")
    return next(iter([*chosen, *reasons]), "no precision could be measured here")


# ------------------------------------------------------------------------------------------------------------- ratios


def ratios_of(profile: DeviceProfile, report: Report) -> Iterator[Ratio]:
    """Yield the ratios of products by precision, alignment and duration, and of embedding by precision."""
    yield from _of_products(profile, report.matmul)
    yield from _of_sustained(report.sustained)
    yield from _of_embedding(report.embedding)


def _of_products(profile: DeviceProfile, rows: Sequence[Matmul]) -> Iterator[Ratio]:
    """Compare precisions on the largest aligned square, where they were measured in turns; then alignments."""
    squares = [row for row in rows if row.role == SQUARE and row.aligned and row.tflops]
    largest = max((row.m for row in squares), default=0)
    rates = {row.dtype: row.tflops for row in squares if row.m == largest and row.tflops}
    for precision, rate in rates.items():
        if precision == "fp32" or "fp32" not in rates:
            continue
        value = figure(rate / rates["fp32"])
        by = "tensor cores" if precision in profile.tensor_cores else f"no tensor cores ({profile.kind})"
        text = f"{by}: {precision} is {value:.2f} times fp32 here ({largest} x {largest})"
        yield Ratio(f"{precision} over fp32", value, text)
    for row in rows:
        one_less = (row.dtype, row.role, row.m - 1)
        pair = (each for each in rows if (each.dtype, each.role, each.m) == one_less)
        other = next((each for each in pair if row.aligned and not each.aligned), None)
        if row.tflops is None or other is None or other.tflops is None:
            continue
        value = figure(row.tflops / other.tflops)
        wanted = f"multiples of {MULTIPLES[row.dtype]} in {'every edge' if row.role == SQUARE else 'tokens'}"
        text = f"{wanted}: {row.dtype} is {value:.2f} times as fast with {row.m} as with {other.m}"
        yield Ratio(f"{row.dtype} {row.role} {row.m} over {other.m}", value, text)


def _of_sustained(rows: Sequence[Sustained]) -> Iterator[Ratio]:
    for row in rows:
        text = f"sustained: {row.dtype} keeps {row.kept:.0%} of its burst over {row.seconds:.0f} s"
        yield Ratio(f"{row.dtype} sustained over burst", row.kept, text)
    rates = {row.dtype: row.tflops for row in rows}
    for precision, rate in rates.items():
        if precision != "fp32" and "fp32" in rates:
            value = figure(rate / rates["fp32"])
            text = f"sustained: {precision} is {value:.2f} times fp32"
            yield Ratio(f"{precision} over fp32 sustained", value, text)


def _of_embedding(rows: Sequence[Embedding]) -> Iterator[Ratio]:
    exact = {(row.lengths, row.tokens): row.texts_per_second for row in rows if row.precision == "fp32"}
    for row in rows:
        fp32 = exact.get((row.lengths, row.tokens))
        if row.precision == "fp32" or not fp32:
            continue
        value = figure(row.texts_per_second / fp32)
        length = f"{row.tokens} tokens" if row.lengths == "equal" else f"{row.shortest} to {row.longest} tokens mixed"
        text = f"embedding: {row.precision} is {value:.2f} times fp32, texts of {length}"
        yield Ratio(f"embedding {row.precision} over fp32, {length}", value, text)


def as_json(report: Report) -> dict[str, Any]:
    return asdict(report)
