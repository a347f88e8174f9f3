"""The driver's account of its cards, with a stand-in for pynvml: everything told, little told, nothing there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from app.src.core import nvml


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Driver(ModuleType):
    """pynvml as far as we use it, with one T4 that works. Counts how often it was opened."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_DRIVER_NOT_LOADED = 3, 4, 9
    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_LIB_RM_VERSION_MISMATCH = 12, 18
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def __init__(self, cards: int = 1) -> None:
        super().__init__("pynvml")
        self.cards = cards
        self.opened = 0
        self.fails: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in super().__getattribute__("fails"):
            raise NVMLError(self.fails[name])
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetCount(self) -> int:
        return self.cards

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "Tesla T4"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=16 << 30, used=1 << 30, free=15 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 69_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 70_000

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 1_350, self.NVML_CLOCK_MEM: 5_000}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x4 | 0x20

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=4711)]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def test_everything_told(driver: Driver) -> None:
    found = nvml.snapshot()
    assert (found.driver_version, found.cuda_version, found.reason) == ("580.95.05", "13.1", None)
    assert found.as_dict()["devices"] == [
        {
            "index": 0,
            "name": "Tesla T4",
            "uuid": "GPU-0",
            "memory_total_bytes": 16 << 30,
            "memory_used_bytes": 1 << 30,
            "memory_free_bytes": 15 << 30,
            "utilization_percent": 37,
            "memory_utilization_percent": 12,
            "temperature_celsius": 61,
            "power_watts": 69.5,
            "power_limit_watts": 70.0,
            "sm_clock_mhz": 1_350,
            "memory_clock_mhz": 5_000,
            "throttle_reasons": ["sw_power_cap", "sw_thermal_slowdown"],
            "compute_processes": 1,
        }
    ]
    assert driver.opened == 0


def test_what_a_card_does_not_tell_is_none(driver: Driver) -> None:
    questions = [name for name in vars(Driver) if name.startswith("nvmlDeviceGet")]
    known = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName"}
    driver.fails = dict.fromkeys(set(questions) - known, Driver.NVML_ERROR_NOT_SUPPORTED)
    (device,) = nvml.snapshot().as_dict()["devices"]
    assert {name for name, value in device.items() if value is not None} == {"index", "name"}
    assert driver.opened == 0


@pytest.mark.parametrize(
    ("number", "words"), [(12, "no NVIDIA driver"), (9, "not loaded"), (4, "may not"), (18, "restart"), (99, "99")]
)
@pytest.mark.proves(20)
def test_why_there_are_none(driver: Driver, number: int, words: str) -> None:
    driver.fails["nvmlInit"] = number
    found = nvml.snapshot()
    assert (found.devices, found.driver_version) == ((), None)
    assert words in str(found.reason)


@pytest.mark.proves(20)
def test_a_driver_without_a_card_and_one_that_fails_in_the_middle(driver: Driver) -> None:
    driver.cards = 0
    assert nvml.snapshot().driver_version == "580.95.05"
    assert nvml.snapshot().reason == "the NVIDIA driver sees no card"
    driver.fails["nvmlDeviceGetCount"] = 15
    assert "15" in str(nvml.snapshot().reason)
    assert driver.opened == 0


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in str(nvml.snapshot().reason)


@pytest.mark.parametrize(
    ("driver_version", "cuda", "floor"),
    [
        ("580.95.05", "13.0", None),
        ("579.99", "13.0", 580),
        ("470.223.02", "13.2", 580),
        ("470.223.02", "12.8", 525),
        ("525.60.13", "12.8", None),
        ("450.80.02", "11.8", None),
        ("440.33", "11.8", 450),
        ("595.10", "14.0", None),
        ("unknown", "13.0", None),
    ],
)
def test_drivers_and_cuda_builds(driver_version: str, cuda: str, floor: int | None) -> None:
    assert nvml.driver_too_old(driver_version, cuda) == floor
