"""State of NVIDIA's driver and cards through NVML, and which CUDA builds a driver runs. Works without torch.

Never raises: without a card the snapshot gives the reason.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

# CUDA major version, oldest Linux driver branch that runs its builds: NVIDIA, CUDA Compatibility, minor versions.
DRIVER_FLOORS: tuple[tuple[int, int], ...] = ((13, 580), (12, 525), (11, 450))

NOTE = (
    "utilisation is the share of time in which any kernel ran, not what the tensor cores did: their activity comes "
    "only from DCGM (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, compute capability 7.0 and up), not from NVML"
)


@dataclass(frozen=True, slots=True)
class Throttle:
    """One thing that holds the clock back. `normal`: no reason for an alarm; None for a reason unknown here."""

    reason: str
    words: str
    normal: bool | None


THROTTLE_REASONS: Mapping[int, Throttle] = {
    # Bits of nvmlDeviceGetCurrentClocksEventReasons: NVML API reference, nvmlClocksEventReasons.
    0x1: Throttle("gpu_idle", "nothing runs, so the clock rests", True),
    0x2: Throttle("applications_clocks_setting", "held at the clock that somebody has set", True),
    0x4: Throttle("sw_power_cap", "held by the power limit, as usual under load; a T4 nearly always is", True),
    0x8: Throttle("hw_slowdown", "the hardware has at least halved the clock: heat or power supply", False),
    0x10: Throttle("sync_boost", "held to the clock of the other cards of its group", True),
    0x20: Throttle("sw_thermal_slowdown", "too hot: the driver lowers the clock", False),
    0x40: Throttle("hw_thermal_slowdown", "far too hot: the hardware has at least halved the clock", False),
    0x80: Throttle(
        "hw_power_brake_slowdown", "the power supply asks for less, and the clock is at least halved", False
    ),
    0x100: Throttle("display_clock_setting", "held by what its displays need", True),
    0x200: Throttle("board_limit", "held by a limit of the board", True),
    0x400: Throttle("reliability", "at the highest voltage that it may have", True),
}
_ASKING = threading.Lock()

# For the API. (Field descriptions are metadata: to read docstrings, pydantic would parse this file at every start, and
# `ast.parse` in two threads at once can fail in CPython 3.11: https://github.com/python/cpython/issues/106905)
_SCHEMA = {"json_schema_serialization_defaults_required": True}


@dataclass(frozen=True, slots=True)
class GpuState:
    """One card now. None: this card does not tell (a T4 has no such sensor, the driver is too old, no rights)."""

    __pydantic_config__ = _SCHEMA

    index: int
    name: str
    uuid: str | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    utilization_percent: int | None = field(metadata={"description": "Share of the time in which a kernel ran."})
    temperature_celsius: int | None
    power_watts: float | None
    power_limit_watts: float | None
    sm_clock_mhz: int | None

    memory_utilization_percent: int | None = field(
        default=None, metadata={"description": "Share of the time in which memory was read or written."}
    )
    compute_capability: str | None = None
    temperature_slowdown_celsius: int | None = None  # the driver lowers the clock from here on
    sm_clock_max_mhz: int | None = None
    pcie_generation: int | None = None  # current; an idle link drops to 1
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_sent_bytes_per_second: int | None = None  # by the card, over 20 ms
    pcie_received_bytes_per_second: int | None = None
    throttle: list[Throttle] | None = None
    throttled_abnormally: bool | None = field(
        default=None, metadata={"description": "Held back by heat or by the power supply; a power limit is normal."}
    )
    ecc_uncorrected_errors: int | None = None  # since the driver was loaded
    retired_pages_pending: bool | None = None  # up to Turing
    remapped_rows_pending: bool | None = None  # from Ampere on
    processes: list[dict[str, int | None]] | None = field(
        default=None,
        metadata={"description": "Those that compute, with `pid` and `memory_bytes`: no name, for it may be private."},
    )
    reason: str | None = field(
        default=None, metadata={"description": "Why this card tells nothing, such as one that has fallen off the bus."}
    )


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """`reason`: why there are no devices. `cuda_version`: the newest CUDA that the driver knows."""

    __pydantic_config__ = _SCHEMA

    devices: tuple[GpuState, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    reason: str | None = None
    note: str = NOTE
    answered: bool = field(default=True, metadata={"description": "False: the driver hangs (`snapshot_within`)."})


def snapshot() -> GpuSnapshot:
    """Return the state of all cards, in about 50 ms each. Never raises: unknown values are None, and `reason` says
    why."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuSnapshot(reason="the package nvidia-ml-py is not installed")
    with _ASKING:  # NVML counts initialisations for the whole process
        try:
            nvml.nvmlInit()
            try:
                cuda = _told(nvml.nvmlSystemGetCudaDriverVersion)
                devices = tuple(_state(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
                return GpuSnapshot(
                    devices,
                    driver_version=_told(nvml.nvmlSystemGetDriverVersion),
                    cuda_version=cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
                    reason=None if devices else "the NVIDIA driver sees no card",
                )
            finally:
                _told(nvml.nvmlShutdown)
        except Exception as error:
            return GpuSnapshot(reason=_why(error))


def _why(error: Exception) -> str:
    known = {  # values of nvmlReturn_t, which never change (nvml.h)
        12: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
        9: "the NVIDIA driver is installed, but not loaded",
        4: "this user may not talk to the NVIDIA driver",
        18: "driver and its library differ in version: restart this machine",
    }
    return known.get(getattr(error, "value", None) or 0, f"NVML: {error}")


# Field -> conversion of the answer (None: unchanged), query nvmlDeviceGet..., and its arguments: enumeration values of
# nvml.h (sensor: GPU 0; clock: SM 1; errors: uncorrected 1, since the driver was loaded 0).
_QUERIES: Mapping[str, tuple[Any, ...]] = {
    "uuid": (None, "UUID"),
    "compute_capability": (lambda version: ".".join(map(str, version)), "CudaComputeCapability"),
    "memory_total_bytes": (lambda memory: memory.total, "MemoryInfo"),
    "memory_used_bytes": (lambda memory: memory.used, "MemoryInfo"),
    "utilization_percent": (lambda busy: busy.gpu, "UtilizationRates"),
    "memory_utilization_percent": (lambda busy: busy.memory, "UtilizationRates"),
    "temperature_celsius": (None, "Temperature", 0),
    "temperature_slowdown_celsius": (None, "TemperatureThreshold", 1),
    "power_watts": (lambda milliwatts: milliwatts / 1000, "PowerUsage"),
    "power_limit_watts": (lambda milliwatts: milliwatts / 1000, "EnforcedPowerLimit"),
    "sm_clock_mhz": (None, "ClockInfo", 1),
    "sm_clock_max_mhz": (None, "MaxClockInfo", 1),
    "pcie_generation": (None, "CurrPcieLinkGeneration"),
    "pcie_generation_max": (None, "MaxPcieLinkGeneration"),
    "pcie_width": (None, "CurrPcieLinkWidth"),
    "pcie_sent_bytes_per_second": (lambda rate: rate * 1000, "PcieThroughput", 0),  # NVML counts in KB
    "pcie_received_bytes_per_second": (lambda rate: rate * 1000, "PcieThroughput", 1),
    "ecc_uncorrected_errors": (None, "TotalEccErrors", 1, 0),
    "retired_pages_pending": (bool, "RetiredPagesPendingStatus"),
    "remapped_rows_pending": (lambda rows: bool(rows[2]), "RemappedRows"),
}


def _state(nvml: Any, index: int) -> GpuState:
    found: dict[str, Any] = dict.fromkeys(GpuState.__dataclass_fields__) | {"index": index, "name": "unknown"}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:
        return GpuState(**found | {"reason": _why(error)})

    def ask(name: str, *more: int) -> Any:
        """Return the result of nvmlDeviceGet`name`; None if card, driver or package does not support it."""
        return _told(lambda: getattr(nvml, f"nvmlDeviceGet{name}")(handle, *more))

    found["name"] = ask("Name") or "unknown"
    for place, (convert, name, *more) in _QUERIES.items():
        answer = ask(name, *more)
        found[place] = answer if answer is None or convert is None else convert(answer)
    # Older drivers support only the older name of this query.
    bits = ask("CurrentClocksEventReasons")
    found["throttle"] = held = throttles(ask("CurrentClocksThrottleReasons") if bits is None else bits)
    if held is not None:
        found["throttled_abnormally"] = any(each.normal is False for each in held)
    running = ask("ComputeRunningProcesses")
    if running is not None:
        found["processes"] = [
            {"pid": each.pid, "memory_bytes": getattr(each, "usedGpuMemory", None)} for each in running
        ]
    return GpuState(**found)


def throttles(bits: int | None) -> list[Throttle] | None:
    """Return the throttle reasons that these NVML bits encode; None if `bits` is None."""
    if bits is None:
        return None
    found = [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]
    if unknown := bits & ~sum(THROTTLE_REASONS):
        found.append(Throttle(f"unknown_{unknown:#x}", "a reason that this version does not know", None))
    return found


def _told(question: Callable[[], Any]) -> Any:
    """Return the result, or None after any error: NVMLError of card or driver, AttributeError of an older package."""
    try:
        return question()
    except Exception:
        return None


def driver_too_old(driver_version: str, cuda_version: str) -> int | None:
    """If the driver is too old for a torch built for this CUDA, return the oldest branch that runs it; else None."""
    major = int(cuda_version.partition(".")[0])
    floor = next((floor for cuda, floor in DRIVER_FLOORS if major >= cuda), 0)
    branch = driver_version.partition(".")[0]
    return floor if branch.isdecimal() and int(branch) < floor else None


# ------------------------------------------------------------------------------------------------- within a time limit


KEPT = 60.0  # seconds for which a late result may answer the next call
_SHARING = threading.Lock()
_READINGS: list[Future[tuple[float, GpuSnapshot]]] = []  # at most one, in progress or late: (time, result)


def snapshot_within(seconds: float) -> GpuSnapshot:
    """Return `snapshot()` within a time limit: with a dead card the driver may take minutes, or never answer.

    After a timeout the reason says so, and the next call waits for the same query instead of starting another. A late
    result (slow cards without persistence mode) answers the next call, which also starts a new query.
    """
    with _SHARING:
        late = _READINGS.pop() if _READINGS and _READINGS[0].done() else None
        if not _READINGS:
            # A daemon thread, so that a driver that hangs does not keep the process from ending.
            _READINGS.append(Future())
            answer = _READINGS[0].set_result
            threading.Thread(
                target=lambda: answer((time.monotonic(), snapshot())), name="owl-sap-nvml", daemon=True
            ).start()
        reading = _READINGS[0]
    if late is not None and time.monotonic() - late.result()[0] < KEPT:
        return late.result()[1]
    try:
        _, found = reading.result(seconds)
    except TimeoutError:
        why = f"the NVIDIA driver has not answered within {seconds:g} s: see nvidia-smi and dmesg"
        return GpuSnapshot(reason=why, answered=False)
    with _SHARING:
        _READINGS[:] = [each for each in _READINGS if each is not reading]
    return found


def summary(device: GpuState) -> str:
    """Return one line for people: the card's load and what holds its clock back."""
    known: Sequence[tuple[str, Any]] = (
        ("{} % busy", device.utilization_percent),
        ("{} C", device.temperature_celsius),
        ("{:.0f} W", device.power_watts),
        ("of {:.0f} W", device.power_limit_watts),
        ("{} MHz", device.sm_clock_mhz),
    )
    now = ", ".join(form.format(value) for form, value in known if value is not None)
    held = "; ".join(each.words for each in device.throttle or () if each.reason != "gpu_idle")
    return "; ".join(part for part in (now.replace(" W, of", " of"), held) if part)
