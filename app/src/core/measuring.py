"""The measurements of `python -m app.src.core.t4_gpu_optimizer`: matrix products, a sustained load, embedding.

Works run in turns, because clocks drift with heat and load. Every figure is measured in this run, or null with a reason
in the settings.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .backends import EngineError
from .backends.folder import display_name, find_folder, read_folder
from .device import PRECISIONS, DeviceError, DeviceProfile, Precision, Setting, choose_precision, detect, settings_of
from .loading import EngineOptions, load_engine
from .memory import CPU_TOKENS, ModelShape
from .nvml import GpuState, snapshot

Row = dict[str, Any]

# ------------------------------------------------------------------------------------------------------- works in turns

Clock = Callable[[Callable[[], object], int], float]  # device seconds per call of so many calls, made back to back
Sampled = Callable[[int], float]  # the same for one work

LEAST_SAMPLES, MOST_SAMPLES = 5, 200
# Least seconds of a sample: with that many launches back to back, the first one's start and the clock's resolution
# (half a microsecond for events) are negligible.
LEAST_SAMPLE = {"cuda": 2e-3, "cpu": 2e-4}
OVERTIME = 2.0  # seconds of overtime for LEAST_SAMPLES on a busy device; then two samples are enough
MOST_LAUNCHES = 1000
WARM_UP_SECONDS = 0.025
SETTLED = 0.02  # clocks have settled if two rounds differ by less than this share


def clock_of(profile: DeviceProfile) -> Clock:
    """Return CUDA events on the stream of this device, which may not be the current one, or the host's clock."""

    def host(work: Callable[[], object], launches: int) -> float:
        started = time.perf_counter()
        for _ in range(launches):
            work()
        return (time.perf_counter() - started) / launches

    def events(work: Callable[[], object], launches: int) -> float:
        import torch

        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        with torch.cuda.device(profile.index):
            begin.record()
            for _ in range(launches):
                work()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / launches

    return events if profile.kind == "cuda" else host


def launches_of(work: Sampled, least: float) -> int:
    """Return how many launches fill `least` seconds. The first call, which creates handles, does not count."""
    work(1)
    return max(1, min(MOST_LAUNCHES, math.ceil(least / max(work(1), 1e-9))))


def in_turns(works: Sequence[Sampled], seconds: float, least: float = 0.0) -> list[list[float]]:
    """Return samples of each work, after a warm-up until two rounds take the same time, at most half of `seconds`.
    `least`: seconds of a sample."""
    launches = [launches_of(work, least) for work in works]

    def one_round() -> list[float]:
        return [work(times) for work, times in zip(works, launches, strict=True)]

    started, before = time.perf_counter(), math.inf
    while (spent := time.perf_counter() - started) < min(seconds / 2, 1.0):
        took = sum(one_round())
        if spent >= WARM_UP_SECONDS and abs(took - before) < SETTLED * took:
            break
        before = took
    rounds: list[list[float]] = []
    until = time.perf_counter() + seconds
    while len(rounds) < MOST_SAMPLES:
        late = time.perf_counter() - until
        if late >= 0 and len(rounds) >= (LEAST_SAMPLES if late < OVERTIME else 2):
            break
        rounds.append(one_round())
    return [list(times) for times in zip(*rounds, strict=True)]


def figure(number: float) -> float:
    """Round to four significant digits, because fixed decimals would round slow rates to 0."""
    return float(f"{number:.4g}")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


# ------------------------------------------------------------------------------------------------------ matrix products

CARD_TOKENS = 16_384  # rows of the layer's product on a card: a batch that fills it; a CPU uses those of its batches
SQUARES = {"cpu": (512, 1024), "cuda": (1024, 4096, 8192)}
# Numbers in 16 bytes, to whose multiples edges are aligned: NVIDIA, Matrix Multiplication Background guide.
MULTIPLES: Mapping[Precision, int] = {"fp32": 4, "tf32": 4, "fp16": 8, "bf16": 8, "int8": 16}
ERROR_ROWS = 64  # the relative error covers only the first rows, which saves fp64 work
# A precision slower than this share of fp32 on a small probe is not measured further: it is emulated (fp16 on most
# CPUs), or has few units (fp16 on a P4).
SLOWEST = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """A product (m, k) x (k, n): `square`, or the `feed-forward` layer of the model over a full batch."""

    m: int
    n: int
    k: int
    role: str = "square"

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    def row(self, profile: DeviceProfile, precision: Precision) -> Row:
        """Return this product's row without figures. Tensor cores reach full speed if every edge is aligned."""
        aligned = all(edge % MULTIPLES[precision] == 0 for edge in (self.m, self.n, self.k))
        figures = dict.fromkeys(("tflops", "spread", "share_of_peak", "relative_error"))
        cores = precision in profile.tensor_cores
        return {"dtype": precision, **asdict(self), "aligned": aligned, "tensor_cores": cores, **figures}


PROBE = Shape(256, 1536, 384)


def groups_of(profile: DeviceProfile, sizes: Sequence[int] | None, model: ModelShape | None) -> list[list[Shape]]:
    """Return the shapes to measure in turns, so that those of a group are comparable: the largest square with one of
    edges one shorter, the model's widest layer with one token less."""
    *smaller, largest = sorted(set(sizes or SQUARES[profile.kind]))
    groups = [[Shape(edge, edge, edge)] for edge in smaller]
    groups.append([Shape(edge, edge, edge) for edge in (largest, largest - 1)])
    if model:
        tokens = CARD_TOKENS if profile.kind == "cuda" else CPU_TOKENS
        groups.append([Shape(m, model.intermediate, model.hidden, "feed-forward") for m in (tokens, tokens - 1)])
    return groups


def set_tf32(profile: DeviceProfile, on: bool) -> None:
    """Set torch's process-wide switch. Switch it off before loading an engine, which sets it itself."""
    if profile.tf32:
        import torch

        torch.set_float32_matmul_precision("high" if on else "highest")


class Product:
    """A product of random numbers in one precision: zeros would need less power, and power limits the clocks.

    The right matrix is laid out (n, k) like a layer's weight: cuBLAS has no fast 8-bit product for the other layout.
    """

    def __init__(self, profile: DeviceProfile, shape: Shape, precision: Precision) -> None:
        import torch

        device = profile.torch_name
        generator = torch.Generator(device).manual_seed(7)
        left, weight = (torch.randn(rows, shape.k, generator=generator, device=device) for rows in (shape.m, shape.n))
        self._profile, self._precision, self._clock = profile, precision, clock_of(profile)
        self._reference = left[:ERROR_ROWS].double() @ weight.double().t()
        self._scale = 1.0
        if precision == "int8":
            steps = [float(each.abs().max()) / 127 for each in (left, weight)]
            self._scale = math.prod(steps)
            left, weight = (
                (each / step).round().to(torch.int8) for each, step in zip((left, weight), steps, strict=True)
            )
        else:
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
            left, weight = left.to(dtype), weight.to(dtype)
        self._multiply = torch._int_mm if precision == "int8" else torch.mm
        self._left, self._right = left, weight.t()
        dtype = torch.int32 if precision == "int8" else left.dtype
        self._out = torch.empty(shape.m, shape.n, dtype=dtype, device=device)

    def run(self) -> Any:
        return self._multiply(self._left, self._right, out=self._out)

    def __call__(self, launches: int) -> float:
        if self._precision in ("fp32", "tf32"):  # the same call, distinguished by torch's switch
            set_tf32(self._profile, self._precision == "tf32")
        return self._clock(self.run, launches)

    def relative_error(self) -> float:
        """Compare with fp64 (Frobenius norm), including the rounding of inputs."""
        self(1)
        rows = self._out[:ERROR_ROWS].double() * self._scale
        return float((rows - self._reference).norm() / self._reference.norm())


def unavailable(profile: DeviceProfile, precision: Precision) -> str | None:
    """Return why this precision is not measured here, or None. A small probe excludes slow precisions."""
    if precision == "tf32" and not profile.tf32:
        where = "compute capability " + ".".join(map(str, profile.capability)) if profile.capability else "a CPU"
        return f"not available: {where}; TF32 starts at compute capability 8.0"
    if precision == "bf16" and profile.kind == "cuda" and precision not in profile.tensor_cores:
        return "emulated below compute capability 8.0"
    if precision == "fp32":
        return None
    try:
        pair = [Product(profile, PROBE, each) for each in (precision, "fp32")]
        own, fp32 = (min(times) for times in zip(*([each(1) for each in pair] for _ in range(8)), strict=True))
    except (RuntimeError, AttributeError) as error:
        return f"torch refuses: {first_line(error)}"
    return f"no gain here: {own / fp32:.1f} times slower than fp32 on a small product" if fp32 < own * SLOWEST else None


def measure_products(
    profile: DeviceProfile, groups: Sequence[Sequence[Shape]], seconds: float
) -> Iterator[Row | Setting]:
    """Measure every precision and shape in about `seconds`, plus warm-up. A product that cannot be measured is a row of
    nulls, and a setting with the reason."""
    reasons = {precision: unavailable(profile, precision) for precision in PRECISIONS}
    usable = [precision for precision, reason in reasons.items() if reason is None]
    for precision, reason in reasons.items():
        if reason:
            yield Setting(f"matmul {precision}", None, reason)
            yield from (shape.row(profile, precision) for group in groups for shape in group)
    each = seconds / (sum(map(len, groups)) * len(usable))
    for group in groups:
        products: dict[tuple[Precision, Shape], Product] = {}
        for precision in usable:
            for shape in group:
                try:
                    products[precision, shape] = product = Product(profile, shape, precision)
                    product.run()
                except RuntimeError as error:  # such as out of memory
                    products.pop((precision, shape), None)
                    name = f"matmul {precision} {shape.m}x{shape.n}x{shape.k}"
                    yield shape.row(profile, precision)
                    yield Setting(name, None, f"torch refuses: {first_line(error)}")
        samples = in_turns(list(products.values()), each * len(products), LEAST_SAMPLE[profile.kind])
        for ((precision, shape), product), times in zip(products.items(), samples, strict=True):
            middle, tenths = statistics.median(times), statistics.quantiles(times, n=10)
            rate, peak = shape.operations / middle / 1e12, profile.peak(precision)
            yield shape.row(profile, precision) | {
                "tflops": figure(rate),
                "spread": round((tenths[-1] - tenths[0]) / middle, 4),
                "share_of_peak": figure(rate / peak) if peak else None,
                "relative_error": product.relative_error(),
            }


# ------------------------------------------------------------------------------------------------------- sustained load

WINDOW = {"cuda": 0.1, "cpu": 0.05}  # seconds of one reading of the rate
REST = 1.0  # seconds that a card rests before a run
BURST = 1.0  # seconds at the start whose best window is the burst
INTERVAL = 0.2  # seconds between two samples of clocks and power


class Sampler:
    """Samples a card's clocks, power and temperature from the driver while the context is open."""

    def __init__(self, profile: DeviceProfile, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._index: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="owl-sap-nvml", daemon=True)
        self._states: list[GpuState] = []
        if profile.kind == "cpu":
            self._reason: str | None = "a CPU: clocks and power are not read"
            return
        import torch

        found = snapshot(throughput=False)
        # torch and the driver may number cards differently.
        own = getattr(torch.cuda.get_device_properties(profile.index), "uuid", None)
        fitting = [each.index for each in found.devices if each.uuid and own and str(own) in each.uuid]
        if not fitting and len(found.devices) == 1:
            fitting = [found.devices[0].index]
        self._index = fitting[0] if fitting else None
        self._reason = found.reason or (None if fitting else "the driver's card for this device is unknown")

    def __enter__(self) -> Sampler:
        if self._index is not None:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopped.set()
        if self._index is not None:
            self._thread.join(timeout=5)

    def _sample(self) -> None:
        while not self._stopped.is_set():
            devices = snapshot(throughput=False).devices  # PCIe's rates take 40 ms
            self._states += [each for each in devices if each.index == self._index]
            self._stopped.wait(self._interval)

    @property
    def conditions(self) -> Row:
        """Return least, median and most of what the driver reported, and the share of samples in which each reason
        reduced the clocks; a power cap is normal on a card of 70 W, heat is not. `reason`: why there are none."""
        known = [each.throttle_reasons for each in self._states if each.throttle_reasons is not None]
        held = Counter(reason for reasons in known for reason in reasons)
        found: Row = {"samples": len(self._states), "reason": None if self._states else self._reason or "no samples"}
        for name in ("sm_clock_mhz", "memory_clock_mhz", "power_watts", "temperature_celsius"):
            values = [value for each in self._states if (value := getattr(each, name)) is not None]
            told = {"least": min(values), "median": statistics.median(values), "most": max(values)} if values else None
            found[name] = told
        shares = {name: figure(count / len(known)) for name, count in held.items()}
        return found | {
            "power_limit_watts": self._states[-1].power_limit_watts if self._states else None,
            "throttle_reasons": shares if known else None,
        }


def measure_sustained(profile: DeviceProfile, shape: Shape, precision: Precision, seconds: float) -> Row | Setting:
    """Run one product for seconds without pause, and compare the first rate with the rate under power cap and heat."""
    windows: list[tuple[float, float]] = []  # seconds since the start, rate
    try:
        product = Product(profile, shape, precision)
        launches = launches_of(product, WINDOW[profile.kind])
        if profile.kind == "cuda":
            time.sleep(min(REST, seconds))
        with Sampler(profile) as sampler:
            began = time.perf_counter()
            while len(windows) < 3 or windows[-1][0] < seconds:
                rate = shape.operations / product(launches) / 1e12
                windows.append((time.perf_counter() - began, rate))
    except RuntimeError as error:
        return Setting(f"sustained {precision}", None, f"torch refuses: {first_line(error)}")
    return sustained_row(profile, precision, shape, windows) | {"conditions": sampler.conditions}


def sustained_row(
    profile: DeviceProfile, precision: Precision, shape: Shape, windows: Sequence[tuple[float, float]]
) -> Row:
    """Return the best window of the first second as `burst_tflops`, the mean of the run's second half as `tflops`."""
    whole = windows[-1][0]
    burst = max([rate for ended, rate in windows if ended <= BURST] or [windows[0][1]])
    steady = statistics.harmonic_mean([rate for ended, rate in windows if ended > whole / 2])
    peak = profile.peak(precision)
    return {
        "dtype": precision,
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "seconds": figure(whole),
        "burst_tflops": figure(burst),
        "tflops": figure(steady),
        "kept": figure(steady / burst),
        "share_of_peak": figure(steady / peak) if peak else None,
    }


# ------------------------------------------------------------------------------------------------------------ embedding

TEXT_LENGTHS = (16, 64, 254)
WORDS = (
    *("pump", "motor", "valve", "seal", "oil", "filter", "pressure", "gear"),
    *("order", "late", "noise", "water", "steel", "plant", "repair", "engine"),
)
TEXTS_TOKENS = {"cpu": 3_000, "cuda": 600_000}  # tokens of one measurement, if at least a second is given


def measure_embedding(
    profile: DeviceProfile, model: str, precisions: Sequence[Precision], share: float = 1.0
) -> Iterator[Row | Setting]:
    """Measure texts and tokens per second, tokenising included, in each precision and length of text. `tokens` are
    those of a text without special tokens, which the rates include. `share`: of TEXTS_TOKENS."""
    for precision in precisions:
        set_tf32(profile, False)  # engines expect it off, and switch it on themselves
        try:
            with load_engine(EngineOptions(model=model, precision=precision, device=profile.torch_name)) as engine:
                yield Setting(f"embedding {precision}", engine.path, "how batches are computed in this precision")
                for length in sorted({min(length, engine.max_tokens) for length in TEXT_LENGTHS}):
                    texts = texts_of(max(4, int(TEXTS_TOKENS[engine.profile.kind] * share) // length), length)
                    engine.embed(texts[:8], "bulk")
                    before, took = engine.stats().tokens, []
                    for _ in range(2):
                        started = time.perf_counter()
                        engine.embed(texts, "bulk")
                        took.append(time.perf_counter() - started)
                    yield {
                        "precision": precision,
                        "tokens": length,
                        "texts_per_second": round(len(texts) / min(took), 1),
                        "tokens_per_second": round((engine.stats().tokens - before) / 2 / min(took), 1),
                        "texts": len(texts),
                        "path": engine.path,
                    }
        except (EngineError, ImportError) as error:
            yield Setting(f"embedding {precision}", None, first_line(error))


def texts_of(count: int, length: int) -> list[str]:
    """Return distinct texts of `length` one-token words."""
    return [" ".join(WORDS[(number >> (place % 8 * 4)) % 16] for place in range(length)) for number in range(count)]


def usable_precisions(profile: DeviceProfile, products: Sequence[Row]) -> list[Precision]:
    """Return the precisions that the engine supports here and that have measured products."""
    found: list[Precision] = []
    for precision in PRECISIONS:
        try:
            choose_precision(profile, precision)
        except DeviceError:
            continue
        if any(row["dtype"] == precision and row["tflops"] is not None for row in products):
            found.append(precision)
    return found


# ----------------------------------------------------------------------------------------------------------- the report

MODEL = "all-MiniLM-L6-v2"  # the default model to measure
QUICK = {"cpu": 4.0, "cuda": 8.0}  # most seconds for the table of products
SUSTAINED = {"cpu": 1.0, "cuda": 30.0}  # seconds of each sustained run: a card of 70 W needs 30 to show its cap
LEAST_SHARE = 0.25  # of the tokens to embed if less than a second is given
UNDISTURBED = 0.25  # median spread of the products up to which comparisons are meaningful


def model_shape(model: str) -> ModelShape:
    """Return the sizes of a model by name. Raises EngineError for an unknown model."""
    path = find_folder(model)
    return read_folder(path, display_name(model, path)).shape


def describe(profile: DeviceProfile) -> Row:
    """Describe the device as JSON; unknown values are null."""
    import torch

    return {
        "kind": profile.kind,
        "name": profile.name,
        "compute_capability": ".".join(map(str, profile.capability)) if profile.capability else None,
        "memory_bytes": profile.memory_bytes or None,
        "bandwidth_gb_per_s": profile.bandwidth,
        "multiprocessors": profile.multiprocessors or None,
        "tensor_cores": sorted(profile.tensor_cores),
        "peak_tflops": dict(profile.peaks) or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "driver": snapshot(throughput=False).driver_version,
    }


def make_report(
    device: str = "auto",
    model: str = MODEL,
    sizes: Sequence[int] | None = None,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Row:
    """Measure everything. `sizes`: edges of square products; `seconds`: of each sustained run, and a limit for the
    table of products. Raises DeviceError for a missing device."""
    import torch

    from .backends.torch.linears import bf16_gain

    profile = detect(device)
    kind, settings = profile.kind, settings_of(profile, bf16_gain)
    matmul: list[Row] = []
    sustained: list[Row] = []
    embedding: list[Row] = []

    def add(found: Row | Setting, rows: list[Row]) -> None:
        settings.append(found) if isinstance(found, Setting) else rows.append(found)

    shape = None
    try:
        shape = model_shape(model)
    except EngineError as error:
        settings.append(Setting("matmul of the model", None, first_line(error)))
    try:
        quick = min(seconds or QUICK[kind], QUICK[kind])
        tell(f"measuring matrix products on {profile.name} ({kind}), about {quick:g} s")
        with Sampler(profile) as sampler:
            for found in measure_products(profile, groups_of(profile, sizes, shape), quick):
                add(found, matmul)
        middle = statistics.median([row["spread"] for row in matmul if row["spread"] is not None] or [0.0])
        if middle > UNDISTURBED:
            why = "half of the products scattered more than this: other programs used the device, ignore the ratios"
            settings.append(Setting("disturbed", round(middle, 2), why))
        # fp32 and the engine's precision, so that both sides of the ratio have the same power cap.
        usable = usable_precisions(profile, matmul)
        chosen = next(each.value for each in settings if each.name == "precision")
        wanted = [each for each in usable if each in ("fp32", chosen)]
        span = seconds or SUSTAINED[kind]
        tell(f"measuring {' and '.join(wanted)} sustained, {span:g} s each")
        edge = max(sizes) if sizes else {"cpu": 1024, "cuda": 4096}[kind]
        for precision in wanted:
            add(measure_sustained(profile, Shape(edge, edge, edge), precision, span), sustained)
        if kind == "cuda":
            torch.cuda.empty_cache()  # an engine plans its batches by the driver's figure of free memory
        tell(f"measuring the embedding model in {', '.join(usable)}")
        for found in measure_embedding(profile, model, usable, max(LEAST_SHARE, min(1.0, seconds or 1.0))):
            add(found, embedding)
    finally:
        set_tf32(profile, False)
    return {
        "device": describe(profile),
        "settings": [asdict(each) for each in settings],
        "matmul": matmul,
        "embedding": embedding,
        "model": model,
        "sustained": sustained,
        "clocks": sampler.conditions,
        "ratios": list(ratios_of(matmul, sustained, embedding)),
    }


def ratios_of(matmul: Sequence[Row], sustained: Sequence[Row], embedding: Sequence[Row]) -> Iterator[Row]:
    """Yield the ratios of products by precision and alignment, of sustained runs, and of embedding by precision."""

    def ratio(name: str, value: float, text: str) -> Row:
        return {"name": name, "value": figure(value), "text": text.format(value)}

    measured = [row for row in matmul if row["tflops"]]
    squares = [row for row in measured if row["role"] == "square" and row["aligned"]]
    largest = max((row["m"] for row in squares), default=0)
    rates = {row["dtype"]: row for row in squares if row["m"] == largest}
    for name, row in rates.items():
        if name != "fp32" and "fp32" in rates:
            by = "tensor cores" if row["tensor_cores"] else "no tensor cores"
            text = f"{by}: {name} is {{:.2f}} times fp32 here ({largest} x {largest})"
            yield ratio(f"{name} over fp32", row["tflops"] / rates["fp32"]["tflops"], text)
    by_shape = {(row["dtype"], row["role"], row["m"]): row for row in measured}
    for (name, role, m), row in by_shape.items():
        other = by_shape.get((name, role, m - 1))
        if row["aligned"] and other and not other["aligned"]:
            edges = f"multiples of {MULTIPLES[name]} in {'every edge' if role == 'square' else 'tokens'}"
            text = f"{edges}: {name} is {{:.2f}} times as fast with {m} as with {m - 1}"
            yield ratio(f"{name} {role} {m} over {m - 1}", row["tflops"] / other["tflops"], text)
    steady = {row["dtype"]: row["tflops"] for row in sustained}
    for row in sustained:
        text = f"sustained: {row['dtype']} keeps {{:.0%}} of its burst over {row['seconds']:.0f} s"
        yield ratio(f"{row['dtype']} sustained over burst", row["kept"], text)
        if row["dtype"] != "fp32" and "fp32" in steady:
            text = f"sustained: {row['dtype']} is {{:.2f}} times fp32"
            yield ratio(f"{row['dtype']} over fp32 sustained", row["tflops"] / steady["fp32"], text)
    exact = {row["tokens"]: row["texts_per_second"] for row in embedding if row["precision"] == "fp32"}
    for row in embedding:
        name, tokens = row["precision"], row["tokens"]
        if name != "fp32" and exact.get(tokens):
            text = f"embedding: {name} is {{:.2f}} times fp32, texts of {tokens} tokens"
            yield ratio(f"embedding {name} over fp32, {tokens} tokens", row["texts_per_second"] / exact[tokens], text)
