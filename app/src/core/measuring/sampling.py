"""What a card's clocks, power and temperature did while something ran: asked of its driver a few times a second, on a
thread. Knows neither torch nor what runs.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..device import DeviceProfile
from ..nvml import GpuState, snapshot
from .clocks import figure

INTERVAL = 0.2
Ask = Callable[[], GpuState | None]


@dataclass(frozen=True, slots=True)
class Range:
    least: float
    median: float
    most: float


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which something ran. `throttle_reasons`: the share of the samples in which each held the clocks back; a
    power cap is normal on a card of 70 W, heat is not. None: the card does not tell, or `reason` says why not."""

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
    seconds: float
    """Since sampling began."""
    state: GpuState


def driver_of(profile: DeviceProfile) -> tuple[Ask | None, str | None]:
    """What asks the driver about this very card, or why nothing does. torch counts the cards that it may use, the
    driver all of them, and in another order: the card's UUID is what both know."""
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
        return None, "which of the driver's cards this is cannot be told"

    def ask() -> GpuState | None:  # without the 40 ms that PCIe's rates take
        return next((each for each in snapshot(throughput=False).devices if each.index == index), None)

    return ask, None


def _uuid(profile: DeviceProfile) -> str | None:
    import torch

    found: Any = getattr(torch.cuda.get_device_properties(profile.index), "uuid", None)
    return None if found is None else str(found)


class Sampler:
    """Samples while its block runs. `ask` None: nothing to ask, for this `reason`."""

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
