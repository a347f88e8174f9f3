"""The driver's account of its cards, with a fake pynvml: everything told, little told, nothing there."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from app.src.core import nvml

ROOT = Path(__file__).resolve().parents[2]


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Driver(ModuleType):
    """pynvml as far as we use it, with one T4 that works. Counts how often it was opened."""

    NVMLError = NVMLError
    NOT_SUPPORTED, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 13, 15

    def __init__(self, cards: int = 1) -> None:
        super().__init__("pynvml")
        self.cards = cards
        self.opened = 0
        self.held_by = 0x4 | 0x20
        self.fails: dict[str, int] = {}
        self.lacks: set[str] = set()
        """What this version of the package does not have."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name in super().__getattribute__("lacks"):
                raise AttributeError(name)
            if name in super().__getattribute__("fails"):
                raise NVMLError(self.fails[name])
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

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

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 7, 5

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=16 << 30, used=1 << 30, free=15 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return {0: 61}[sensor]

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, threshold: int) -> int:
        return {0: 96, 1: 93}[threshold]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 69_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 65_000

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return {1: 1_350}[clock]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return {1: 1_590}[clock]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self.held_by

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x40

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 3

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8

    def nvmlDeviceGetPcieThroughput(self, handle: int, way: int) -> int:
        return {0: 1_500, 1: 250_000}[way]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return {(1, 0): 2}[kind, counter]

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: int) -> int:
        return 0

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return 4, 1, 1, 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=4711, usedGpuMemory=1 << 20), SimpleNamespace(pid=12, usedGpuMemory=None)]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def test_everything_told(driver: Driver) -> None:
    found = nvml.snapshot()
    assert (found.driver_version, found.cuda_version, found.reason) == ("580.95.05", "13.1", None)
    assert "DCGM" in found.note
    (device,) = dataclasses.asdict(found)["devices"]
    assert [each["normal"] for each in device.pop("throttle")] == [True, False]
    assert device == {
        "index": 0,
        "name": "Tesla T4",
        "uuid": "GPU-0",
        "compute_capability": "7.5",
        "memory_total_bytes": 16 << 30,
        "memory_used_bytes": 1 << 30,
        "utilization_percent": 37,
        "memory_utilization_percent": 12,
        "temperature_celsius": 61,
        "temperature_slowdown_celsius": 93,
        "power_watts": 69.5,
        "power_limit_watts": 65.0,
        "sm_clock_mhz": 1_350,
        "sm_clock_max_mhz": 1_590,
        "throttled_abnormally": True,
        "pcie_generation": 1,
        "pcie_generation_max": 3,
        "pcie_width": 8,
        "pcie_sent_bytes_per_second": 1_500_000,
        "pcie_received_bytes_per_second": 250_000_000,
        "ecc_uncorrected_errors": 2,
        "retired_pages_pending": False,
        "remapped_rows_pending": True,
        "processes": [{"pid": 4711, "memory_bytes": 1 << 20}, {"pid": 12, "memory_bytes": None}],
        "reason": None,
    }
    assert driver.opened == 0


def test_the_fake_answers_what_the_package_can_be_asked() -> None:
    """A question that the real package does not have would be None for ever, and nobody would notice."""
    pynvml = pytest.importorskip("pynvml")
    asked = {name for name in vars(Driver) if name.startswith("nvml")}
    assert {name for name in asked if not hasattr(pynvml, name)} == set()
    numbers = {
        "temperature_celsius": ["NVML_TEMPERATURE_GPU"],
        "temperature_slowdown_celsius": ["NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"],
        "sm_clock_mhz": ["NVML_CLOCK_SM"],
        "pcie_sent_bytes_per_second": ["NVML_PCIE_UTIL_TX_BYTES"],
        "pcie_received_bytes_per_second": ["NVML_PCIE_UTIL_RX_BYTES"],
        "ecc_uncorrected_errors": ["NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"],
    }
    for field, names in numbers.items():
        assert [getattr(pynvml, name) for name in names] == list(nvml._QUERIES[field][2:]), field


def test_the_bits_are_nvmls_own() -> None:
    pynvml = pytest.importorskip("pynvml")
    for bit, reason in nvml.THROTTLE_REASONS.items():
        name = reason.reason.title().replace("_", "")
        known = [f"nvmlClocksEventReason{name}", f"nvmlClocksThrottleReason{name}"]
        assert bit in [getattr(pynvml, each, None) for each in known], reason.reason


def held_by(device: nvml.GpuState) -> list[str]:
    return [each.reason for each in device.throttle or ()]


@pytest.mark.parametrize(
    ("bits", "names", "abnormal"),
    [
        (0x0, [], False),
        (0x1, ["gpu_idle"], False),
        (0x4, ["sw_power_cap"], False),
        (0x2 | 0x100, ["applications_clocks_setting", "display_clock_setting"], False),
        (0x20, ["sw_thermal_slowdown"], True),
        (0x4 | 0x8 | 0x40, ["sw_power_cap", "hw_slowdown", "hw_thermal_slowdown"], True),
        (0x8 | 0x80, ["hw_slowdown", "hw_power_brake_slowdown"], True),
        (0x4 | 0x8000, ["sw_power_cap", "unknown_0x8000"], False),
    ],
)
def test_a_power_limit_is_normal_and_heat_is_not(driver: Driver, bits: int, names: list[str], abnormal: bool) -> None:
    driver.held_by = bits
    (device,) = nvml.snapshot().devices
    assert (held_by(device), device.throttled_abnormally) == (names, abnormal)
    assert all(each.words for each in device.throttle or ())


def test_an_older_driver_and_an_older_package_are_asked_by_the_older_names(driver: Driver) -> None:
    driver.fails["nvmlDeviceGetCurrentClocksEventReasons"] = Driver.FUNCTION_NOT_FOUND
    assert held_by(nvml.snapshot().devices[0]) == ["hw_thermal_slowdown"]
    driver.fails = {}
    driver.lacks = {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetPcieThroughput"}
    (device,) = nvml.snapshot().devices
    assert held_by(device) == ["hw_thermal_slowdown"]
    assert (device.pcie_sent_bytes_per_second, device.pcie_generation) == (None, 1)


def test_what_a_card_does_not_tell_is_none(driver: Driver) -> None:
    questions = [name for name in vars(Driver) if name.startswith("nvmlDeviceGet")]
    known = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName"}
    driver.fails = dict.fromkeys(set(questions) - known, Driver.NOT_SUPPORTED)
    (device,) = dataclasses.asdict(nvml.snapshot())["devices"]
    assert {name for name, value in device.items() if value is not None} == {"index", "name"}
    assert driver.opened == 0


def test_a_process_whose_memory_is_not_told(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Driver, "nvmlDeviceGetComputeRunningProcesses", lambda _self, _handle: [SimpleNamespace(pid=4711)]
    )
    assert nvml.snapshot().devices[0].processes == [{"pid": 4711, "memory_bytes": None}]


def test_an_answer_that_cannot_be_read_is_none(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def garbled(self: Driver, handle: int) -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(Driver, "nvmlDeviceGetUUID", garbled)
    assert nvml.snapshot().devices[0].uuid is None


def test_a_card_that_is_lost_does_not_hide_the_others(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(self: Driver, index: int) -> int:
        if index == 0:
            raise NVMLError(Driver.GPU_IS_LOST)
        return index

    driver.cards = 2
    monkeypatch.setattr(Driver, "nvmlDeviceGetHandleByIndex", handle)
    lost, well = nvml.snapshot().devices
    assert (lost.name, lost.temperature_celsius) == ("unknown", None)
    assert "15" in str(lost.reason)
    assert (well.index, well.temperature_celsius, well.reason) == (1, 61, None)


def test_a_driver_that_hangs_is_not_waited_for(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), []

    def count(self: Driver) -> int:
        asked.append(1)
        assert answers.wait(30)
        return 1

    monkeypatch.setattr(Driver, "nvmlDeviceGetCount", count)
    for _ in range(2):
        found = nvml.snapshot_within(0.02)
        assert (found.devices, found.answered) == ((), False)
        assert "not answered within 0.02 s" in str(found.reason)
    answers.set()
    assert nvml.snapshot_within(30).devices[0].name == "Tesla T4"
    assert len(asked) <= 2, "while it hangs nobody asks it again"


def test_a_driver_that_is_slow_hangs_for_the_first_call_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asked for anew by who gets the one before; too old an answer is none."""
    turns: list[threading.Event] = []

    def count(self: Driver) -> int:
        turns.append(threading.Event())
        assert turns[-1].wait(30)
        return 1

    def answer() -> None:
        (reading,) = nvml._READINGS
        for _ in range(3000):
            if turns:
                turns.pop().set()
                break
            time.sleep(0.01)
        reading.result(30)

    monkeypatch.setattr(nvml, "_READINGS", [])  # no other test gets an answer of this one
    monkeypatch.setattr(Driver, "nvmlDeviceGetCount", count)
    assert not nvml.snapshot_within(0.02).answered
    for _ in range(3):
        answer()
        assert nvml.snapshot_within(0.0).devices[0].name == "Tesla T4"
    assert not nvml.snapshot_within(0.02).answered, "that one has not come yet, and the one before was given away"
    answer()
    monkeypatch.setattr(nvml, "KEPT", 0.0)
    assert not nvml.snapshot_within(0.02).answered
    answer()


def test_one_line_for_people(driver: Driver) -> None:
    (device,) = nvml.snapshot().devices
    told = nvml.summary(device)
    assert told.startswith("37 % busy, 61 C, 70 of 65 W, 1350 MHz; held by the power limit")
    assert "too hot" in told
    driver.held_by = 0x1
    assert nvml.summary(nvml.snapshot().devices[0]).endswith("1350 MHz")


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


@pytest.mark.gpu
def test_a_real_card_tells_what_torch_and_nvidia_smi_tell() -> None:
    import torch

    pytest.importorskip("pynvml", reason="needs the package nvidia-ml-py")
    found = nvml.snapshot_within(10)
    assert found.reason is None
    device = next(each for each in found.devices if each.name == torch.cuda.get_device_name(0))
    assert device.compute_capability == ".".join(map(str, torch.cuda.get_device_capability(0)))
    told = (device.memory_total_bytes, device.temperature_celsius, device.power_watts, device.sm_clock_max_mhz)
    assert None not in (*told, device.throttle, device.pcie_sent_bytes_per_second)
    reading = subprocess.run(
        ["bash", str(ROOT / "scripts/monitor_gpu.sh"), "--once", "--json"], capture_output=True, text=True, check=True
    )
    other = next(each for each in json.loads(reading.stdout)["devices"] if each["uuid"] == device.uuid)
    fixed = ("name", "compute_capability", "sm_clock_max_mhz", "pcie_generation_max")
    assert {name: other[name] for name in fixed} == {name: getattr(device, name) for name in fixed}
    assert abs(other["power_limit_watts"] - (device.power_limit_watts or 0)) < 1
    assert other["throttle"] is not None
