"""One product run without pause for seconds: what a card gives at first, and what is left when its power cap and its
heat have had their say. Two honest readers who do not say which of the two they mean differ by a factor of two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..choices import Setting
from ..device import DeviceProfile, Precision
from .clocks import Clock, clock_of, figure, launches_of
from .products import Bench, Operands, Product, cache_bytes_of, refused
from .sampling import Conditions, Sample, Sampler, driver_of
from .shapes import Shape

WINDOW = {"cuda": 0.1, "cpu": 0.05}  # seconds between two readings of the rate
REST = 1.0  # seconds a card rests before, so that the burst is one
BURST = 1.0  # seconds at the start in which the best window is the burst
POINTS = 60  # of the course, at most


@dataclass(frozen=True, slots=True)
class Point:
    """`seconds` since the start, and what the driver last said then."""

    seconds: float
    tflops: float
    sm_clock_mhz: int | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True)
class Sustained:
    """`burst_tflops`: the best window of the first second; `tflops`: the second half of the run, by the time it took.
    `kept` is their ratio."""

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
    """Large enough to keep the device full, small enough to be read ten times a second."""
    edge = max(sizes) if sizes else (4096 if profile.kind == "cuda" else 1024)
    return Shape(edge, edge, edge)


def measure_sustained(
    profile: DeviceProfile, shape: Shape, precisions: Sequence[Precision], seconds: float
) -> Iterator[Sustained | Setting]:
    """Each precision for so many seconds."""
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
    """`ended`: seconds since the start; `took`: of one launch, as the device's clock has it."""

    ended: float
    took: float
    launches: int


def readings(run: Callable[[], object], clock: Clock, launches: int, seconds: float) -> list[Window]:
    """Windows back to back until the time is over; three at least."""
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
    """At most POINTS of the rates, evenly spread, each with the sample before it."""
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
