"""What a card did while something ran, with a fake of its driver; and the sustained run that shows its cap."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.src.core.device import DeviceProfile, Setting
from app.src.core.measuring import sustained
from app.src.core.measuring import sustained as sampling
from app.src.core.measuring.products import Shape
from app.src.core.measuring.sustained import (
    POINTS,
    Conditions,
    Range,
    Sample,
    Sampler,
    Sustained,
    Window,
    course,
    driver_of,
    measure_sustained,
    readings,
    summary,
)
from app.src.core.nvml import GpuSnapshot, GpuState

CPU = DeviceProfile.cpu("Test CPU")
T4 = DeviceProfile.of_card("Tesla T4")
SHAPE = Shape(1000, 1000, 1000)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Several wait for each other at every product when tests take turns on few cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def state(**told: Any) -> GpuState:
    """A card that tells this and nothing else."""
    silent: dict[str, Any] = {each.name: None for each in dataclasses.fields(GpuState)}
    return GpuState(**{**silent, "index": 0, "name": "Tesla T4", **told})


def capped(clock: int, power: float, *reasons: str) -> GpuState:
    return state(
        sm_clock_mhz=clock,
        memory_clock_mhz=5000,
        power_watts=power,
        power_limit_watts=70.0,
        temperature_celsius=61,
        throttle_reasons=list(reasons),
    )


class Driver:
    """Gives its states one after the other, then the last one again; says when it has given `enough`."""

    def __init__(self, *states: GpuState | None) -> None:
        self.states = list(states)
        self.asked = 0
        self.enough = threading.Event()

    def __call__(self) -> GpuState | None:
        found = self.states[min(self.asked, len(self.states) - 1)]
        self.asked += 1
        if self.asked > len(self.states):
            self.enough.set()
        return found


def sampled(*states: GpuState | None) -> Sampler:
    driver = Driver(*states)
    with Sampler(driver, interval=0.001) as sampler:
        assert driver.enough.wait(60)
    sampler.samples = sampler.samples[: sum(each is not None for each in states)]
    return sampler


def test_conditions_are_ranges_and_shares_of_samples() -> None:
    found = sampled(
        capped(1590, 30.0), capped(900, 70.2, "sw_power_cap"), capped(870, 69.8, "sw_power_cap", "hw_thermal_slowdown")
    ).conditions
    assert found == Conditions(
        samples=3,
        sm_clock_mhz=Range(870, 900, 1590),
        memory_clock_mhz=Range(5000, 5000, 5000),
        power_watts=Range(30.0, 69.8, 70.2),
        power_limit_watts=70.0,
        temperature_celsius=Range(61, 61, 61),
        throttle_reasons={"sw_power_cap": 0.6667, "hw_thermal_slowdown": 0.3333},
    )


def test_what_a_card_does_not_tell_is_null() -> None:
    found = sampled(state(sm_clock_mhz=585), None, state(sm_clock_mhz=585)).conditions
    assert (found.samples, found.sm_clock_mhz) == (2, Range(585, 585, 585))
    assert [found.power_watts, found.temperature_celsius, found.throttle_reasons] == [None] * 3


def test_sampling_ends_with_its_block() -> None:
    driver = Driver(capped(1590, 30.0))
    with Sampler(driver, interval=0.001):
        assert driver.enough.wait(60)
    asked = driver.asked
    assert not any(thread.name == "owl-sap-nvml" for thread in threading.enumerate())
    assert driver.asked == asked


def test_without_a_driver_the_reason_is_given() -> None:
    with Sampler(None, "there is no NVIDIA driver here") as sampler:
        pass
    assert sampler.conditions == Conditions(reason="there is no NVIDIA driver here")
    assert driver_of(CPU) == (None, "a CPU: clocks and power are not read")


def cards(*uuids: str | None) -> GpuSnapshot:
    return GpuSnapshot(tuple(dataclasses.replace(state(uuid=uuid), index=place) for place, uuid in enumerate(uuids)))


@pytest.mark.parametrize(
    ("known", "own", "index"),
    [
        (cards("GPU-aa", "GPU-bb"), "bb", 1),  # CUDA_VISIBLE_DEVICES shows torch the second card alone
        (cards("GPU-aa"), None, 0),  # an older torch does not tell, and there is no choice
        (cards("GPU-aa", "GPU-bb"), None, None),
        (cards("GPU-aa", None), "cc", None),
    ],
)
def test_the_driver_is_asked_about_the_very_card(
    monkeypatch: pytest.MonkeyPatch, known: GpuSnapshot, own: str | None, index: int | None
) -> None:
    monkeypatch.setattr(sampling, "snapshot", lambda **_: known)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _index: SimpleNamespace(uuid=own))
    ask, reason = driver_of(T4)
    if index is None:
        assert ask is None
        assert reason == "the driver's card for this device is unknown"
    else:
        assert ask is not None
        found = ask()
        assert found is not None
        assert found.index == index


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampling, "snapshot", lambda **_: GpuSnapshot(reason="the package nvidia-ml-py is not installed")
    )
    assert driver_of(T4) == (None, "the package nvidia-ml-py is not installed")


# ------------------------------------------------------------------------------------------------------------ sustained


def seconds_at(tflops: float) -> float:
    return SHAPE.operations / tflops / 1e12


def test_burst_is_the_best_of_the_first_second_and_sustained_the_second_half() -> None:
    """A T4 as NVIDIA's staff describe it: 50 at first, 24 under its cap."""
    rates = [45.0, 50.0, 40.0, 30.0, 24.0, 24.0, 24.0, 24.0]
    windows = [Window(0.5 * (place + 1), seconds_at(rate), 10) for place, rate in enumerate(rates)]
    found = summary(T4, "fp16", SHAPE, windows, Sampler(None, "none"))
    assert (found.burst_tflops, found.tflops, found.kept) == (50.0, 24.0, 0.48)
    assert found.share_of_peak == pytest.approx(24 / 65, rel=1e-3)
    assert found.seconds == 4.0
    assert [point.tflops for point in found.course] == rates
    assert found.conditions.reason == "none"


def test_a_very_slow_device_has_a_burst_too() -> None:
    windows = [Window(2.0 * place, seconds_at(0.01), 1) for place in (1, 2, 3)]
    assert summary(CPU, "fp32", SHAPE, windows, Sampler(None)).kept == 1


def test_the_course_is_thinned_and_carries_the_sample_before_each_point() -> None:
    rates = [(0.1 * place, 10.0) for place in range(1, 301)]
    samples = [Sample(0.0, capped(1590, 30.0)), Sample(15.0, capped(900, 70.0, "sw_power_cap"))]
    points = course(rates, samples)
    assert len(points) <= POINTS
    assert (points[0].sm_clock_mhz, points[-1].sm_clock_mhz, points[-1].power_watts) == (1590, 900, 70.0)
    assert course([(0.1, 5.0)], [])[0].sm_clock_mhz is None


def test_windows_stand_back_to_back_until_the_time_is_over() -> None:
    asked: list[int] = []

    def clock(_work: Any, launches: int = 1) -> float:
        asked.append(launches)
        return 0.001

    windows = readings(lambda: None, clock, 7, 0.0)
    assert asked == [7, 7, 7]
    assert [window.ended for window in windows] == sorted(window.ended for window in windows)


def test_both_precisions_are_measured_on_the_processor() -> None:
    found = list(measure_sustained(CPU, Shape(128, 128, 128), ["fp32", "bf16"], 0.1))
    assert [row.dtype for row in found if isinstance(row, Sustained)] == ["fp32", "bf16"]
    for row in found:
        assert isinstance(row, Sustained)
        assert 0 < row.tflops < 100
        assert row.conditions.reason == "a CPU: clocks and power are not read"


def test_a_product_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(sustained, "Operands", full)
    assert list(measure_sustained(CPU, SHAPE, ["fp32"], 0.1)) == [
        Setting("sustained fp32", None, "torch refuses: CUDA out of memory")
    ]


@pytest.mark.gpu
def test_a_card_tells_its_clocks_while_it_works() -> None:
    profile = DeviceProfile.cuda(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    (row,) = measure_sustained(profile, Shape(4096, 4096, 4096), ["fp16"], 3.0)
    assert isinstance(row, Sustained)
    assert row.conditions.samples >= 5, row.conditions.reason
    assert row.conditions.sm_clock_mhz is not None
    assert row.burst_tflops >= row.tflops * 0.9
