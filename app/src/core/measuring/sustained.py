"""Run one product for seconds without pause, and compare the first rate with the rate under power cap and heat.

A thread samples clocks, power and temperature from the driver.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..device import DeviceProfile, Precision, Setting
from ..nvml import GpuState, snapshot
from .clocks import Clock, clock_of, figure, launches_of
from .products import Bench, Operands, Product, Shape, cache_bytes_of, refused

INTERVAL = 0.2
Ask = Callable[[], GpuState | None]


@dataclass(frozen=True, slots=True)
class Range:
    least: float
    median: float
    most: float


@dataclass(frozen=True, slots=True)
class Conditions:
    """The driver's reports while work ran; None: unknown, see `reason`. `throttle_reasons`: share of samples in which
    each reduced the clocks; a power cap is normal on a card of 70 W, heat is not."""

    samples: int = 0
    sm_clock_mhz: Range | None = None
    memory_clock_mhz: Range | None = None
    power_watts: Range | None = None
    power_limit_watts: float | None = None
    temperature_celsius: Range | None = None
    throttle_reasons: dict[str, float] | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float  # since sampling began
    state: GpuState


def driver_of(profile: DeviceProfile) -> tuple[Ask | None, str | None]:
    """Return a function that queries the driver about this card, or None and the reason. The card is found by its UUID:
    torch and the driver may number cards differently."""
    if profile.kind == "cpu":
        return None, "a CPU: clocks and power are not read"
    found = snapshot(throughput=False)
    if not found.devices:
        return None, found.reason
    uuid = _uuid(profile)
    index = next((each.index for each in found.devices if each.uuid and uuid and uuid in each.uuid), None)
    if index is None and len(found.devices) == 1:
        index = found.devices[0].index
    if index is None:
        return None, "the driver's card for this device is unknown"

    def ask() -> GpuState | None:  # without PCIe's rates, which take 40 ms
        return next((each for each in snapshot(throughput=False).devices if each.index == index), None)

    return ask, None


def _uuid(profile: DeviceProfile) -> str | None:
    import torch

    found: Any = getattr(torch.cuda.get_device_properties(profile.index), "uuid", None)
    return None if found is None else str(found)


class Sampler:
    """Samples while the context is open. `ask` None: no samples, for the given `reason`."""

    def __init__(self, ask: Ask | None, reason: str | None = None, interval: float = INTERVAL) -> None:
        self._ask = ask
        self._reason = reason
        self._interval = interval
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.samples: list[Sample] = []

    def __enter__(self) -> Sampler:
        if self._ask is not None:
            self._thread = threading.Thread(target=self._run, args=(self._ask,), name="owl-sap-nvml", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self, ask: Ask) -> None:
        began = time.perf_counter()
        while not self._stopped.is_set():
            state = ask()
            if state is not None:
                self.samples.append(Sample(time.perf_counter() - began, state))
            self._stopped.wait(self._interval)

    @property
    def conditions(self) -> Conditions:
        states = [sample.state for sample in self.samples]
        if not states:
            return Conditions(reason=self._reason or "the driver gave no sample")
        told = [state.throttle_reasons for state in states if state.throttle_reasons is not None]
        counted = Counter(reason for reasons in told for reason in reasons)
        return Conditions(
            samples=len(states),
            sm_clock_mhz=_range([state.sm_clock_mhz for state in states]),
            memory_clock_mhz=_range([state.memory_clock_mhz for state in states]),
            power_watts=_range([state.power_watts for state in states]),
            power_limit_watts=states[-1].power_limit_watts,
            temperature_celsius=_range([state.temperature_celsius for state in states]),
            throttle_reasons={name: figure(count / len(told)) for name, count in counted.items()} if told else None,
        )


def _range(numbers: Sequence[float | None]) -> Range | None:
    known = [number for number in numbers if number is not None]
    return Range(min(known), statistics.median(known), max(known)) if known else None


WINDOW = {"cuda": 0.1, "cpu": 0.05}  # seconds of one reading of the rate
REST = 1.0  # seconds that a card rests before a run
BURST = 1.0  # seconds at the start whose best window is the burst
POINTS = 60  # most points of the course


@dataclass(frozen=True, slots=True)
class Point:
    """The rate at `seconds` since the start, with the driver's last sample before."""

    seconds: float
    tflops: float
    sm_clock_mhz: int | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True)
class Sustained:
    """`burst_tflops`: best window of the first second; `tflops`: mean of the run's second half; `kept`: their ratio."""

    dtype: Precision
    m: int
    n: int
    k: int
    seconds: float
    burst_tflops: float
    tflops: float
    kept: float
    share_of_peak: float | None
    conditions: Conditions
    course: list[Point]


def sustained_shape(profile: DeviceProfile, sizes: Sequence[int] | None) -> Shape:
    """Return a shape that fills the device and can be timed ten times a second."""
    edge = max(sizes) if sizes else (4096 if profile.kind == "cuda" else 1024)
    return Shape(edge, edge, edge)


def measure_sustained(
    profile: DeviceProfile, shape: Shape, precisions: Sequence[Precision], seconds: float
) -> Iterator[Sustained | Setting]:
    """Measure each precision for `seconds`."""
    ask, reason = driver_of(profile)
    for precision in precisions:
        try:
            operands = Operands(shape, profile.torch_name)
            product = Product(operands, precision, cache_bytes_of(profile))
            work = Bench(profile, seconds).work(product, precision)
            work.before()
            clock = clock_of(profile)
            launches = launches_of(work, clock, WINDOW[profile.kind])
            if profile.kind == "cuda":
                time.sleep(min(REST, seconds))
            with Sampler(ask, reason) as sampler:
                windows = readings(product.run, clock, launches, seconds)
        except RuntimeError as error:
            yield Setting(f"sustained {precision}", None, refused(error))
            continue
        yield summary(profile, precision, shape, windows, sampler)


@dataclass(frozen=True, slots=True)
class Window:
    """`ended`: seconds since the start; `took`: seconds of one launch by the device's clock."""

    ended: float
    took: float
    launches: int


def readings(run: Callable[[], object], clock: Clock, launches: int, seconds: float) -> list[Window]:
    """Time windows back to back for `seconds`, at least three."""
    began = time.perf_counter()
    found: list[Window] = []
    while len(found) < 3 or time.perf_counter() - began < seconds:
        took = clock(run, launches)
        found.append(Window(time.perf_counter() - began, took, launches))
    return found


def summary(
    profile: DeviceProfile, precision: Precision, shape: Shape, windows: Sequence[Window], sampler: Sampler
) -> Sustained:
    def rate(took: float) -> float:
        return shape.operations / took / 1e12

    whole = windows[-1].ended
    first = [window.took for window in windows if window.ended <= BURST] or [windows[0].took]
    last = [window.took for window in windows if window.ended > whole / 2]
    burst, steady = rate(min(first)), rate(statistics.fmean(last))
    peak = profile.peak(precision)
    names: dict[str, Any] = {"dtype": precision, "m": shape.m, "n": shape.n, "k": shape.k}
    return Sustained(
        **names,
        seconds=figure(whole),
        burst_tflops=figure(burst),
        tflops=figure(steady),
        kept=figure(steady / burst),
        share_of_peak=figure(steady / peak) if peak else None,
        conditions=sampler.conditions,
        course=course([(window.ended, rate(window.took)) for window in windows], sampler.samples),
    )


def course(rates: Sequence[tuple[float, float]], samples: Sequence[Sample]) -> list[Point]:
    """Return at most POINTS of the rates, evenly spread, each with the sample before it."""
    step = max(1, -(-len(rates) // POINTS))
    points = []
    for seconds, tflops in rates[::step]:
        before = [sample.state for sample in samples if sample.seconds <= seconds]
        state = before[-1] if before else None
        points.append(
            Point(
                figure(seconds),
                figure(tflops),
                state.sm_clock_mhz if state else None,
                state.power_watts if state else None,
            )
        )
    return points
