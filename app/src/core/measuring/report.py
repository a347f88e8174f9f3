"""The report of the measuring command: what the device is, what follows from that, what was measured, and the few
ratios that a person came for. Every figure is measured here and now, or null with the reason among the settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..backends import EngineError
from ..choices import Setting, settings_of
from ..device import PRECISIONS, DeviceProfile, Precision, detect
from ..loading import EngineOptions, load_engine
from ..nvml import snapshot
from .applying import MATMUL, TF32_ON, Change, changes
from .clocks import figure
from .embedding import Embedding, measure_embedding, usable_precisions, with_shares
from .products import Matmul, first_line, measure_products, set_tf32
from .sampling import Conditions, Sampler, driver_of
from .shapes import MULTIPLES, SQUARE, ModelProducts, groups_of, products_of_model
from .sustained import Sustained, measure_sustained, sustained_shape
from .tracing import Trace, write_trace

MODEL = "all-MiniLM-L6-v2"
"""Whose layers and vectors are measured where no other is asked for."""
QUICK = {"cpu": 4.0, "cuda": 8.0}
"""Seconds for the table of products, at most."""
LEAST_SHARE = 0.25
"""Of the tokens that are embedded, where less than a second is given."""
UNDISTURBED = 0.25
"""Spread of the products, in the middle, up to which they are worth comparing."""
SUSTAINED = {"cpu": 1.0, "cuda": 30.0}
"""Seconds of each sustained run, where none are given: a card of 70 W needs 30 to show its cap."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """`text`: a line for people, with the number in it."""

    name: str
    value: float
    text: str


@dataclass(slots=True)
class Report:
    """`clocks`: what the driver said while products were measured; `trace`: where a profile was asked for."""

    device: dict[str, Any]
    settings: list[Setting] = field(default_factory=list)
    matmul: list[Matmul] = field(default_factory=list)
    embedding: list[Embedding] = field(default_factory=list)
    model: str | None = None
    applied: list[Change] = field(default_factory=list)
    sustained: list[Sustained] = field(default_factory=list)
    clocks: Conditions | None = None
    ratios: list[Ratio] = field(default_factory=list)
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: edges of square products (None: by kind of device), `seconds` of each sustained run, which the
    table of products does not exceed either (None: by kind of device), the model whose layers are multiplied and whose
    vectors are computed. `apply` sets what `applying` says; `trace` is a file for a profile."""

    sizes: tuple[int, ...] | None = None
    seconds: float | None = None
    device: str = "auto"
    model: str = MODEL
    apply: bool = False
    trace: Path | None = None


def describe(profile: DeviceProfile) -> dict[str, Any]:
    """The device as JSON; unknown things are null."""
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
        **_software(),
        "driver": snapshot(throughput=False).driver_version,
    }


def _software() -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


def make_report(plan: Plan, tell: Callable[[str], None] = lambda _line: None) -> Report:
    """Measure everything. Raises DeviceError when the device asked for is not there, OSError when the trace cannot be
    written."""
    from ..backends.torch.probe import bf16_gain

    profile = detect(plan.device)
    report = Report(describe(profile), settings_of(profile, bf16_gain), model=plan.model)
    report.applied = changes(profile, _chosen(report), apply=plan.apply)
    try:
        model = _model_products(plan, report)
        _measure_products(profile, plan, model, report, tell)
        _measure_sustained(profile, plan, report, tell)
        _give_back(profile)
        precisions = usable_precisions(profile, report.matmul)
        share = max(LEAST_SHARE, min(1.0, plan.seconds or 1.0))
        tell(f"measuring the embedding model in {', '.join(precisions)}")
        for measured in measure_embedding(profile, plan.model, precisions, share):
            if isinstance(measured, Setting):
                report.settings.append(measured)
            else:
                report.embedding.append(with_shares(measured, report.matmul, model) if model else measured)
        if plan.trace is not None:
            tell("tracing one call of the engine")
            _trace(plan, plan.trace, report)
    finally:
        set_tf32(profile, _tf32_wanted(report.applied))
    report.ratios = list(ratios_of(profile, report))
    return report


def _chosen(report: Report) -> Precision:
    """What the engine computes in by itself."""
    value = next(each.value for each in report.settings if each.name == "precision")
    return next(each for each in PRECISIONS if each == value)


def _tf32_wanted(applied: Sequence[Change]) -> bool:
    """As it was before, or as it was applied."""
    return any(each.name == MATMUL and (each.new if each.applied else each.old) == TF32_ON for each in applied)


def _give_back(profile: DeviceProfile) -> None:
    """What torch keeps of the card's memory after products: an engine plans its batches for what the driver has."""
    if profile.kind == "cuda":
        import torch

        torch.cuda.empty_cache()


def _model_products(plan: Plan, report: Report) -> ModelProducts | None:
    try:
        return products_of_model(plan.model)
    except EngineError as error:
        report.settings.append(Setting("matmul of the model", None, first_line(error)))
        return None


def _measure_products(
    profile: DeviceProfile, plan: Plan, model: ModelProducts | None, report: Report, tell: Callable[[str], None]
) -> None:
    seconds = min(plan.seconds or QUICK[profile.kind], QUICK[profile.kind])
    tell(f"measuring matrix products on {profile.name} ({profile.kind}), about {seconds:g} s")
    groups = groups_of(profile, plan.sizes, model)
    with Sampler(*driver_of(profile)) as sampler:
        for found in measure_products(profile, groups, seconds):
            if isinstance(found, Setting):
                report.settings.append(found)
            else:
                report.matmul.append(found)
    report.clocks = sampler.conditions
    report.settings += _disturbed(report.matmul)
    if profile.kind == "cpu":
        report.settings.append(Setting("kernel", None, "a CPU: torch's profiler names kernels of cards only"))


def _disturbed(rows: Sequence[Matmul]) -> list[Setting]:
    spreads = [row.spread for row in rows if row.spread is not None]
    middle = statistics.median(spreads) if spreads else 0.0
    if middle <= UNDISTURBED:
        return []
    why = "half of the products scattered more than this: other programs took the device's time, so believe no ratio"
    return [Setting("disturbed", round(middle, 2), why)]


def _measure_sustained(profile: DeviceProfile, plan: Plan, report: Report, tell: Callable[[str], None]) -> None:
    """In the precision that the engine takes, and in fp32, so that both ends of the ratio were under the same cap."""
    seconds = plan.seconds or SUSTAINED[profile.kind]
    chosen = _chosen(report)
    wanted: list[Precision] = ["fp32"]
    if chosen != "fp32" and any(row.dtype == chosen and row.tflops is not None for row in report.matmul):
        wanted.append(chosen)
    tell(f"measuring {' and '.join(wanted)} sustained, {seconds:g} s each")
    for found in measure_sustained(profile, sustained_shape(profile, plan.sizes), wanted, seconds):
        if isinstance(found, Setting):
            report.settings.append(found)
        else:
            report.sustained.append(found)


def why_not_embedded(report: Report) -> str:
    """What kept the model from computing, where no text was embedded."""
    reasons = (each.reason for each in report.settings if each.value is None and each.name.startswith("embedding "))
    chosen = (each.reason for each in report.settings if each.name == f"embedding {_chosen(report)}")
    return next(iter([*chosen, *reasons]), "no precision could be measured here")


def _trace(plan: Plan, file: Path, report: Report) -> None:
    try:
        with load_engine(EngineOptions(model=plan.model, device=plan.device)) as engine:
            report.trace = write_trace(engine, file)
    except EngineError as error:
        report.settings.append(Setting("trace", None, first_line(error)))


# ------------------------------------------------------------------------------------------------------------- ratios


def ratios_of(profile: DeviceProfile, report: Report) -> Iterator[Ratio]:
    yield from _by_precision(profile, report.matmul)
    yield from _by_alignment(report.matmul)
    yield from _by_endurance(report.sustained)
    yield from _by_embedding(report.embedding)


def _by_precision(profile: DeviceProfile, rows: Sequence[Matmul]) -> Iterator[Ratio]:
    """Over the largest aligned square, where all precisions were measured in turns."""
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


def _by_alignment(rows: Sequence[Matmul]) -> Iterator[Ratio]:
    """By operations, so that the one token or edge that is missing does not count."""
    for row in rows:
        other = next((each for each in rows if _one_less(each, row)), None)
        if row.tflops is None or other is None or other.tflops is None:
            continue
        value = figure(row.tflops / other.tflops)
        wanted = f"multiples of {MULTIPLES[row.dtype]} in {'every edge' if row.role == SQUARE else 'tokens'}"
        text = f"{wanted}: {row.dtype} is {value:.2f} times as fast with {row.m} as with {other.m}"
        yield Ratio(f"{row.dtype} {row.role} {row.m} over {other.m}", value, text)


def _one_less(row: Matmul, than: Matmul) -> bool:
    return (row.dtype, row.role, row.m) == (than.dtype, than.role, than.m - 1) and than.aligned and not row.aligned


def _by_endurance(rows: Sequence[Sustained]) -> Iterator[Ratio]:
    for row in rows:
        text = f"sustained: {row.dtype} keeps {row.kept:.0%} of its burst over {row.seconds:.0f} s"
        yield Ratio(f"{row.dtype} sustained over burst", row.kept, text)
    rates = {row.dtype: row.tflops for row in rows}
    for precision, rate in rates.items():
        if precision != "fp32" and "fp32" in rates:
            value = figure(rate / rates["fp32"])
            text = f"sustained: {precision} is {value:.2f} times fp32"
            yield Ratio(f"{precision} over fp32 sustained", value, text)


def _by_embedding(rows: Sequence[Embedding]) -> Iterator[Ratio]:
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
