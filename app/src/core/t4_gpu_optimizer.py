"""`python -m app.src.core.t4_gpu_optimizer`: what this device is, which settings follow, what its matrix products and
the embedding model really reach. Runs anywhere; without a GPU it measures the CPU and says so.

Every figure is measured here and now or null, with the reason among the settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from .backends import EngineError
from .choices import Setting, settings_of
from .device import PRECISIONS, DeviceError, DeviceProfile, Precision, choose_precision, detect
from .engine import EmbeddingEngine, EngineOptions, load_engine

if TYPE_CHECKING:
    import torch

SLOWEST = 0.2
"""A precision slower than this share of fp32 on a small probe is not measured further: it runs in emulation."""
LEAST_SAMPLES, MOST_SAMPLES = 5, 200
WARM_UP_SECONDS = 0.025
ERROR_ROWS = 64
"""The relative error is taken over the first rows of the product, which need little fp64 work."""
TEXT_LENGTHS = (16, 64, 254)
WORDS = (
    *("pump", "motor", "valve", "seal", "oil", "filter", "pressure", "gear"),
    *("order", "late", "noise", "water", "steel", "plant", "repair", "engine"),
)
TEXTS_TOKENS = 6_000
"""Tokens of one embedding measurement on a CPU; a GPU gets a hundred times as many."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """One measured product (m, k) x (k, n). `spread` is (p90 - p10) / median of the times. `relative_error` is that of
    the result in this precision, inputs rounded to it, against fp64 (Frobenius norm)."""

    dtype: Precision
    m: int
    n: int
    k: int
    aligned: bool
    tensor_cores: bool
    tflops: float | None = None
    spread: float | None = None
    share_of_peak: float | None = None
    relative_error: float | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """`tokens` is the length of every text, special tokens not counted; the rates count what was computed with them."""

    precision: Precision
    tokens: int
    texts_per_second: float
    tokens_per_second: float


@dataclass(slots=True)
class Report:
    device: dict[str, Any]
    settings: list[Setting] = field(default_factory=list)
    matmul: list[Matmul] = field(default_factory=list)
    embedding: list[Embedding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: edges of square products (None: by kind of device), seconds for all products together, and the
    model."""

    sizes: tuple[int, ...] | None = None
    seconds: float = 8.0
    device: str = "auto"
    model: str = "all-MiniLM-L6-v2"


# ------------------------------------------------------------------------------------------------------ what is there


def describe(profile: DeviceProfile) -> dict[str, Any]:
    """The device as JSON; unknown things are null."""
    return {
        "kind": profile.kind,
        "name": profile.name,
        "compute_capability": ".".join(map(str, profile.capability)) if profile.capability else None,
        "memory_bytes": profile.memory_bytes or None,
        "bandwidth_gb_per_s": profile.bandwidth,
        "tensor_cores": sorted(profile.tensor_cores),
        "attention": profile.attention,
        "peak_tflops": dict(profile.peaks) or None,
        **_software(),
    }


def _software() -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


# ---------------------------------------------------------------------------------------------------- matrix products


class Clock(Protocol):
    """Times calls on a device."""

    def __call__(self, work: Callable[[], object]) -> float:
        """Seconds the work took on the device."""
        ...


def host_clock(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cuda_clock(work: Callable[[], object]) -> float:
    """By events on the device: launches of the host are not in it."""
    import torch

    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


@dataclass(frozen=True, slots=True)
class Shape:
    m: int
    n: int
    k: int

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    def aligned(self, precision: Precision) -> bool:
        """Whether every edge is a multiple of 16 bytes, as tensor cores like it."""
        multiple = {"fp16": 8, "bf16": 8, "int8": 16}.get(precision, 4)
        return all(edge % multiple == 0 for edge in (self.m, self.n, self.k))


def shapes_of(profile: DeviceProfile, sizes: Sequence[int] | None) -> list[Shape]:
    """Squares, the largest also one smaller (misaligned), and the widest layer of the default model over a batch."""
    on_gpu = profile.kind == "cuda"
    edges = sizes or ((1024, 4096, 8192) if on_gpu else (512, 1024))
    smaller = max(edges) - 1
    squares = [Shape(edge, edge, edge) for edge in (*edges, smaller)]
    return [*squares, Shape(16_384 if on_gpu else 1024, 1536, 384)]


class Product:
    """One product in one precision on one device, ready to run."""

    def __init__(self, shape: Shape, precision: Precision, device: str) -> None:
        import torch

        generator = torch.Generator().manual_seed(7)
        self._precise = [
            torch.randn(shape.m, shape.k, generator=generator),
            torch.randn(shape.k, shape.n, generator=generator),
        ]
        self._precision = precision
        self._scale = 1.0
        self._left, self._right = (self._rounded(matrix).to(device) for matrix in self._precise)

    def _rounded(self, matrix: torch.Tensor) -> torch.Tensor:
        import torch

        if self._precision == "int8":
            step = float(matrix.abs().max()) / 127
            self._scale *= step
            return (matrix / step).round().to(torch.int8)
        return matrix.to({"fp16": torch.float16, "bf16": torch.bfloat16}.get(self._precision, torch.float32))

    def run(self) -> torch.Tensor:
        import torch

        if self._precision == "int8":
            return torch._int_mm(self._left, self._right)
        return self._left @ self._right

    def relative_error(self) -> float:
        rows = self.run()[:ERROR_ROWS].double().cpu() * self._scale
        left, right = self._precise
        reference = left[:ERROR_ROWS].double() @ right.double()
        return float((rows - reference).norm() / reference.norm())


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures products on one device, `seconds` each."""

    profile: DeviceProfile
    seconds: float

    @property
    def clock(self) -> Clock:
        return cuda_clock if self.profile.kind == "cuda" else host_clock

    def measure(self, shape: Shape, precision: Precision) -> Matmul:
        """Raises RuntimeError where the device refuses the shape or the precision."""
        _set_tf32(self.profile, precision)
        product = Product(shape, precision, self.profile.torch_name)
        samples = self._samples(product.run)
        rate = shape.operations / statistics.median(samples) / 1e12
        peak = self.profile.peak(precision)
        return Matmul(
            **_names(self.profile, shape, precision),
            tflops=_figure(rate),
            spread=round(_spread(samples), 4),
            share_of_peak=_figure(rate / peak) if peak else None,
            relative_error=product.relative_error(),
        )

    def _samples(self, work: Callable[[], object]) -> list[float]:
        until = time.perf_counter() + min(WARM_UP_SECONDS, self.seconds / 2)
        work()
        while time.perf_counter() < until:
            work()
        samples: list[float] = []
        until = time.perf_counter() + self.seconds
        while len(samples) < LEAST_SAMPLES or (time.perf_counter() < until and len(samples) < MOST_SAMPLES):
            samples.append(self.clock(work))
        return samples


def _names(profile: DeviceProfile, shape: Shape, precision: Precision) -> dict[str, Any]:
    tensor_cores = precision in profile.tensor_cores
    return {
        "dtype": precision,
        **asdict(shape),
        "aligned": shape.aligned(precision),
        "tensor_cores": tensor_cores,
    }


def _figure(number: float) -> float:
    """Four significant digits: by decimals a slow device would have a rate of nothing."""
    return float(f"{number:.4g}")


def _spread(samples: Sequence[float]) -> float:
    tenths = statistics.quantiles(samples, n=10)
    return (tenths[-1] - tenths[0]) / statistics.median(samples)


def _set_tf32(profile: DeviceProfile, precision: Precision) -> None:
    """The one switch that all of torch agrees on; written, never read."""
    if profile.tf32:
        import torch

        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def unavailable(bench: Bench, precision: Precision) -> str | None:
    """Why products of this precision are not measured here, or None. Slow emulation is found by a small probe."""
    profile = bench.profile
    if precision == "tf32" and not profile.tf32:
        where = (
            "a CPU" if profile.capability is None else "compute capability " + ".".join(map(str, profile.capability))
        )
        return f"not available: {where}; TF32 starts at compute capability 8.0"
    if precision == "bf16" and profile.kind == "cuda" and precision not in profile.tensor_cores:
        return "emulated below compute capability 8.0"
    if precision == "fp32":
        return None
    try:
        rounds = [[_probe(profile, each) for each in (precision, "fp32")] for _ in range(4)]
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"torch refuses: {_first_line(error)}"
    own, fp32 = (min(times) for times in zip(*rounds, strict=True))  # the least disturbed of interleaved rounds
    if fp32 < own * SLOWEST:
        return f"runs in emulation here: {own / fp32:.0f} times slower than fp32 on a small product"
    return None


def _probe(profile: DeviceProfile, precision: Any) -> float:
    product = Product(Shape(192, 192, 192), precision, profile.torch_name)
    clock = cuda_clock if profile.kind == "cuda" else host_clock
    return min(clock(product.run) for _ in range(2))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def measure_products(profile: DeviceProfile, plan: Plan) -> Iterator[Matmul | Setting]:
    """Every precision over every shape; what cannot be had comes as a row of nulls and a setting with the reason."""
    shapes = shapes_of(profile, plan.sizes)
    bench = Bench(profile, plan.seconds / (len(shapes) * len(PRECISIONS)))
    for precision in PRECISIONS:
        reason = unavailable(bench, precision)
        if reason:
            yield Setting(f"matmul {precision}", None, reason)
        for shape in shapes:
            yield from [Matmul(**_names(profile, shape, precision))] if reason else _measured(bench, shape, precision)


def _measured(bench: Bench, shape: Shape, precision: Precision) -> Iterator[Matmul | Setting]:
    try:
        yield bench.measure(shape, precision)
    except RuntimeError as error:
        yield Matmul(**_names(bench.profile, shape, precision))
        name = f"matmul {precision} {shape.m}x{shape.n}x{shape.k}"
        yield Setting(name, None, f"torch refuses: {_first_line(error)}")


# ---------------------------------------------------------------------------------------------------------- embedding


def measure_embedding(
    profile: DeviceProfile, plan: Plan, precisions: Sequence[Precision]
) -> Iterator[Embedding | Setting]:
    """Texts and tokens per second of the real engine, tokenising included, by precision and length of text."""
    for precision in precisions:
        try:
            options = EngineOptions(model=plan.model, precision=precision, device=profile.torch_name)
            with load_engine(options) as engine:
                yield Setting(f"embedding {precision}", engine.path, "how batches are computed in this precision")
                yield from (_embed(engine, precision, length) for length in TEXT_LENGTHS)
        except (EngineError, ImportError) as error:
            yield Setting(f"embedding {precision}", None, _first_line(error))


def _embed(engine: EmbeddingEngine, precision: Precision, length: int) -> Embedding:
    length = min(length, engine.max_tokens)
    tokens = TEXTS_TOKENS * (100 if engine.profile.kind == "cuda" else 1)
    texts = texts_of(length, max(8, tokens // length))
    engine.embed(texts[:8])
    before = engine.stats().tokens
    seconds = min(host_clock(lambda: engine.embed(texts)) for _ in range(2))
    computed = (engine.stats().tokens - before) / 2
    return Embedding(precision, length, round(len(texts) / seconds, 1), round(computed / seconds, 1))


def texts_of(length: int, count: int) -> list[str]:
    """Different texts of `length` one-token words."""
    return [" ".join(WORDS[(number >> (place % 8 * 4)) % 16] for place in range(length)) for number in range(count)]


def usable_precisions(profile: DeviceProfile, products: Sequence[Matmul]) -> list[Precision]:
    """Those the engine takes here and whose products were measured."""
    measured = {row.dtype for row in products if row.tflops is not None}
    return [each for each in PRECISIONS if each in measured and not _refused(profile, each)]


def _refused(profile: DeviceProfile, precision: Precision) -> bool:
    try:
        choose_precision(profile, precision)
    except DeviceError:
        return True
    return False


# ------------------------------------------------------------------------------------------------------------- output


def make_report(plan: Plan, tell: Callable[[str], None] = lambda _line: None) -> Report:
    """Measure everything. Raises DeviceError when the device asked for is not there."""
    from .backends.probe import bf16_gain

    profile = detect(plan.device)
    report = Report(describe(profile), settings_of(profile, bf16_gain))
    tell(f"measuring matrix products on {profile.name} ({profile.kind}), about {plan.seconds:.0f} s")
    for found in measure_products(profile, plan):
        (report.matmul if isinstance(found, Matmul) else report.settings).append(found)  # type: ignore[arg-type]
    precisions = usable_precisions(profile, report.matmul)
    tell(f"measuring the embedding model in {', '.join(precisions)}")
    for measured in measure_embedding(profile, plan, precisions):
        (report.embedding if isinstance(measured, Embedding) else report.settings).append(measured)  # type: ignore[arg-type]
    return report


def as_text(report: Report) -> str:
    """The report for people."""
    device = report.device
    capability = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
    lines = [f"{device['name']} ({device['kind']}{capability}), torch {device['torch']}", "", "settings"]
    lines += [f"  {each.name:<24} {_shown(each.value):<18} {each.reason}" for each in report.settings]
    lines += [
        "",
        f"{'products':<18} {'m x n x k':>18} {'aligned':>8} {'TFLOP/s':>9} {'spread':>7} {'peak':>6} {'error':>9}",
    ]
    lines += [_product_line(row) for row in report.matmul]
    lines += ["", f"{'embedding':<18} {'tokens a text':>18} {'texts/s':>10} {'tokens/s':>10}"]
    lines += [
        f"  {row.precision:<16} {row.tokens:>18} {row.texts_per_second:>10.1f} {row.tokens_per_second:>10.0f}"
        for row in report.embedding
    ]
    return "\n".join(lines)


def _product_line(row: Matmul) -> str:
    name = row.dtype + (" tensor cores" if row.tensor_cores else "")
    shape = f"{row.m} x {row.n} x {row.k}"
    figures = f"{_shown(row.tflops, '.3f'):>9} {_shown(row.spread, '.0%'):>7} {_shown(row.share_of_peak, '.0%'):>6}"
    aligned = "yes" if row.aligned else "no"
    return f"  {name:<16} {shape:>18} {aligned:>8} {figures} {_shown(row.relative_error, '.1e'):>9}"


def _shown(value: object, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m app.src.core.t4_gpu_optimizer", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--sizes", type=_sizes, default=None, help="edges of square products, such as 512,1024")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds for all matrix products together")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="the model of the embedding section")
    return parser.parse_args(arguments)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if not all(32 <= size <= 32_768 for size in sizes):
        raise argparse.ArgumentTypeError("sizes are numbers from 32 to 32768, separated by commas")
    return sizes


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    plan = Plan(given.sizes, given.duration, given.device, given.model)
    try:
        report = make_report(plan, lambda line: _write(sys.stderr, line))
    except DeviceError as error:
        _write(sys.stderr, str(error))
        return 2
    _write(sys.stdout, json.dumps(asdict(report), indent=2) if given.json else as_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
