"""What NVIDIA's driver says of itself and its cards, through NVML, and which CUDA builds a driver runs. The only file
that imports pynvml; works without torch, and without a card says why there is none.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T")

DRIVER_FLOORS: tuple[tuple[int, int], ...] = ((13, 580), (12, 525), (11, 450))
"""CUDA major version -> the oldest driver branch on Linux that runs its builds. Source: NVIDIA, CUDA Compatibility,
minor version compatibility."""

_THROTTLE_REASONS = {
    # Bits of nvmlDeviceGetCurrentClocksThrottleReasons: NVML API reference, nvmlClocksEventReasons.
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_ASKING = threading.Lock()


@dataclass(frozen=True, slots=True)
class GpuState:
    """One card now. None: this card does not tell (a T4 has no such sensor, the driver is too old, no rights)."""

    index: int
    name: str
    uuid: str | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    memory_free_bytes: int | None
    utilization_percent: int | None
    memory_utilization_percent: int | None
    temperature_celsius: int | None
    power_watts: float | None
    power_limit_watts: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    throttle_reasons: list[str] | None
    compute_processes: int | None
    """How many processes compute on the card; not which ones: other users' are none of the caller's business."""


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """`reason`: why there are no devices. `cuda_version`: the newest CUDA that the driver knows."""

    devices: tuple[GpuState, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"devices": [asdict(device) for device in self.devices]}


def snapshot() -> GpuSnapshot:
    """The cards as they are now. Never raises: what cannot be had is None or the `reason`. Some milliseconds each."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuSnapshot(reason="the package nvidia-ml-py is not installed")
    with _ASKING:  # initialising and shutting down are counted for the whole process
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return GpuSnapshot(reason=_why(nvml, error))
        try:
            return _asked(nvml)
        except nvml.NVMLError as error:
            return GpuSnapshot(reason=f"NVML: {error}")
        finally:
            nvml.nvmlShutdown()


def _why(nvml: Any, error: Exception) -> str:
    known = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed, but not loaded",
        nvml.NVML_ERROR_NO_PERMISSION: "this user may not talk to the NVIDIA driver",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver and its library differ in version: restart this machine",
    }
    return known.get(getattr(error, "value", None), f"NVML: {error}")


def _asked(nvml: Any) -> GpuSnapshot:
    count = nvml.nvmlDeviceGetCount()
    devices = tuple(_state(nvml, index) for index in range(count))
    cuda = _told(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    return GpuSnapshot(
        devices,
        driver_version=_text(_told(nvml, nvml.nvmlSystemGetDriverVersion)),
        cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        reason=None if devices else "the NVIDIA driver sees no card",
    )


def _state(nvml: Any, index: int) -> GpuState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: str, *more: Any) -> Any:
        return _told(nvml, lambda: getattr(nvml, question)(handle, *more))

    memory = ask("nvmlDeviceGetMemoryInfo")
    busy = ask("nvmlDeviceGetUtilizationRates")
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    bits, processes = ask("nvmlDeviceGetCurrentClocksThrottleReasons"), ask("nvmlDeviceGetComputeRunningProcesses")
    return GpuState(
        index=index,
        name=_text(ask("nvmlDeviceGetName")) or "unknown",
        uuid=_text(ask("nvmlDeviceGetUUID")),
        memory_total_bytes=None if memory is None else memory.total,
        memory_used_bytes=None if memory is None else memory.used,
        memory_free_bytes=None if memory is None else memory.free,
        utilization_percent=None if busy is None else busy.gpu,
        memory_utilization_percent=None if busy is None else busy.memory,
        temperature_celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_watts=None if power is None else power / 1000,
        power_limit_watts=None if limit is None else limit / 1000,
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        throttle_reasons=None if bits is None else [name for bit, name in _THROTTLE_REASONS.items() if bits & bit],
        compute_processes=None if processes is None else len(processes),
    )


def _told(nvml: Any, question: Callable[[], T]) -> T | None:
    """The answer, or None where the card or the driver does not know the question."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: Any) -> str | None:
    """Older versions of the package give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def driver_too_old(driver_version: str, cuda_version: str) -> int | None:
    """The oldest driver branch that runs a torch built for this CUDA, when the driver is older; None when it is not."""
    major = int(cuda_version.partition(".")[0])
    floor = next((floor for cuda, floor in DRIVER_FLOORS if major >= cuda), 0)
    branch = driver_version.partition(".")[0]
    return floor if branch.isdecimal() and int(branch) < floor else None
