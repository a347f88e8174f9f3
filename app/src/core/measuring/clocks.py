"""Time works on a device in turns, after a warm-up: by CUDA events on a card, else by the host's clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..device import DeviceProfile

LEAST_SAMPLES, MOST_SAMPLES = 5, 200
# Least seconds of a sample: with that many launches back to back, the first one's start and the clock's resolution
# (half a microsecond for events) are negligible.
LEAST_SAMPLE = {"cuda": 2e-3, "cpu": 2e-4}
# Seconds of overtime for LEAST_SAMPLES on a busy device; then two samples are enough.
OVERTIME = 2.0
MOST_LAUNCHES = 1000
WARM_UP_SECONDS = 0.025
SETTLED = 0.02  # clocks have settled if two rounds differ by less than this share


class Clock(Protocol):
    """Times calls on a device."""

    def __call__(self, work: Callable[[], object], launches: int = 1, /) -> float:
        """Return the device's seconds per call of `launches` calls, made back to back."""
        ...


def host_clock(work: Callable[[], object], launches: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(launches):
        work()
    return (time.perf_counter() - started) / launches


class CudaClock:
    """Times with events on the stream of this device, which may not be the current device."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __call__(self, work: Callable[[], object], launches: int = 1) -> float:
        import torch

        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        with torch.cuda.device(self._index):
            begin.record()
            for _ in range(launches):
                work()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / launches


def clock_of(profile: DeviceProfile) -> Clock:
    return CudaClock(profile.index) if profile.kind == "cuda" else host_clock


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Work:
    """`run` is timed; `before` is called before each sample, off the clock."""

    run: Callable[[], object]
    before: Callable[[], None] = _nothing


def sample(work: Work, clock: Clock, launches: int) -> float:
    work.before()
    return clock(work.run, launches)


def launches_of(work: Work, clock: Clock, least: float) -> int:
    """Return how many launches fill `least` seconds. The first call, which creates handles, does not count."""
    sample(work, clock, 1)
    once = sample(work, clock, 1)
    return max(1, min(MOST_LAUNCHES, math.ceil(least / max(once, 1e-9))))


def in_turns(works: Sequence[Work], clock: Clock, seconds: float, least: float = 0.0) -> list[list[float]]:
    """Return samples of each work, in seconds per launch. Works take turns, because clocks drift with heat and load.
    `seconds`: for all samples, after a warm-up of at most half as long; `least`: seconds of a sample."""
    launches = [launches_of(work, clock, least) for work in works]

    def one_round() -> list[float]:
        return [sample(work, clock, times) for work, times in zip(works, launches, strict=True)]

    _settle(one_round, min(seconds / 2, 1.0))
    samples: list[list[float]] = []
    until = time.perf_counter() + seconds
    while _wanted(len(samples), time.perf_counter() - until):
        samples.append(one_round())
    return [list(times) for times in zip(*samples, strict=True)]


def _wanted(samples: int, late: float) -> bool:
    if samples < LEAST_SAMPLES:
        return samples < 2 or late < OVERTIME
    return samples < MOST_SAMPLES and late < 0


def _settle(one_round: Callable[[], list[float]], most: float) -> None:
    """Run rounds until two in a row take the same time, for at least WARM_UP_SECONDS and at most `most` seconds."""
    started = time.perf_counter()
    before = math.inf
    while (spent := time.perf_counter() - started) < most:
        took = sum(one_round())
        if spent >= WARM_UP_SECONDS and abs(took - before) < SETTLED * took:
            return
        before = took


def spread(samples: Sequence[float]) -> float:
    """Return (p90 - p10) / median."""
    tenths = statistics.quantiles(samples, n=10)
    return (tenths[-1] - tenths[0]) / statistics.median(samples)


def figure(number: float) -> float:
    """Round to four significant digits, because fixed decimals would round slow rates to 0."""
    return float(f"{number:.4g}")
