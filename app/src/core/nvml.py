"""State of NVIDIA's driver and cards through NVML, and which CUDA builds a driver runs. Works without torch.

Never raises: without a card the snapshot gives the reason.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

# CUDA major version, oldest driver branch on Linux that runs its builds: NVIDIA, CUDA Compatibility, minor versions.
DRIVER_FLOORS: tuple[tuple[int, int], ...] = ((13, 580), (12, 525), (11, 450))

NOTE = (
    "utilisation is the share of time in which any kernel ran, not what the tensor cores did: their activity comes "
    "only from DCGM (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, compute capability 7.0 and up), not from NVML"
)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process that computes on a card: no name and no command line, for it may be another user's."""

    pid: int
    memory_bytes: int | None


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

# For the API. (Descriptions are not taken from docstrings: pydantic would parse this file at every start, and
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
    memory_free_bytes: int | None
    utilization_percent: int | None
    memory_utilization_percent: int | None = field(
        metadata={"description": "Share of the time in which memory was read or written; not how full it is."}
    )
    temperature_celsius: int | None
    power_watts: float | None
    power_limit_watts: float | None = field(metadata={"description": "In force now."})
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    throttle_reasons: list[str] | None
    compute_processes: int | None

    compute_capability: str | None = None
    temperature_slowdown_celsius: int | None = field(
        default=None, metadata={"description": "From here on the clock is lowered."}
    )
    power_limit_default_watts: float | None = None
    power_limit_min_watts: float | None = None
    power_limit_max_watts: float | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    pcie_generation: int | None = field(default=None, metadata={"description": "Now: an idle link falls back to 1."})
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_sent_bytes_per_second: int | None = field(default=None, metadata={"description": "By the card, over 20 ms."})
    pcie_received_bytes_per_second: int | None = None
    throttle: list[Throttle] | None = None
    throttled_abnormally: bool | None = field(
        default=None, metadata={"description": "Held back by heat or by the power supply; a power limit is normal."}
    )
    performance_state: int | None = field(default=None, metadata={"description": "0 is the fastest, 15 the slowest."})
    ecc_enabled: bool | None = None
    ecc_corrected_errors: int | None = field(default=None, metadata={"description": "Since the driver was loaded."})
    ecc_uncorrected_errors: int | None = None
    ecc_corrected_errors_lifetime: int | None = None
    ecc_uncorrected_errors_lifetime: int | None = None
    retired_pages: int | None = field(default=None, metadata={"description": "Up to Turing; later cards remap rows."})
    retired_pages_pending: bool | None = None
    remapped_rows: int | None = None
    remapped_rows_pending: bool | None = None
    energy_joules: float | None = field(
        default=None, metadata={"description": "Since the driver was loaded; compute capability 7.0 and up."}
    )
    fan_percent: int | None = field(default=None, metadata={"description": "None on a card without a fan, as a T4 is."})
    persistence_mode: bool | None = None
    processes: list[GpuProcess] | None = None
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"devices": [asdict(device) for device in self.devices]}


def snapshot(*, throughput: bool = True) -> GpuSnapshot:
    """Return the state of all cards. Never raises: unknown values are None, and `reason` says why.

    Takes some milliseconds per card, and 40 ms more with `throughput`: PCIe is sampled for 20 ms in each direction.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuSnapshot(reason="the package nvidia-ml-py is not installed")
    with _ASKING:  # NVML counts initialisations for the whole process
        try:
            nvml.nvmlInit()
        except Exception as error:
            return GpuSnapshot(reason=_why(error))
        try:
            return _asked(nvml, throughput)
        except Exception as error:
            return GpuSnapshot(reason=_why(error))
        finally:
            _told(nvml.nvmlShutdown)


def _why(error: Exception) -> str:
    known = {  # values of nvmlReturn_t, which never change (nvml.h)
        12: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
        9: "the NVIDIA driver is installed, but not loaded",
        4: "this user may not talk to the NVIDIA driver",
        18: "driver and its library differ in version: restart this machine",
    }
    return known.get(getattr(error, "value", None) or 0, f"NVML: {error}")


def _asked(nvml: Any, throughput: bool) -> GpuSnapshot:
    devices = tuple(_state(nvml, index, throughput) for index in range(nvml.nvmlDeviceGetCount()))
    return GpuSnapshot(
        devices,
        driver_version=_told(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        cuda_version=_told(lambda: "{}.{}".format(*divmod(nvml.nvmlSystemGetCudaDriverVersion() // 10, 100))),
        reason=None if devices else "the NVIDIA driver sees no card",
    )


def _text(value: Any) -> Any:
    """Decode bytes, which older versions of the package return."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _same(value: Any) -> Any:
    return value


def _thousandths(value: int) -> float:
    return value / 1000


# Field -> what it makes of the answer, and the query nvmlDeviceGet... with its arguments, values of enumerations in
# nvml.h (the sensor of the GPU 0; clocks: SM 1, memory 2; errors: corrected 0, uncorrected 1, of now 0, of ever 1).
_QUERIES: Mapping[str, tuple[Any, ...]] = {
    "uuid": (_text, "UUID"),
    "compute_capability": (lambda version: ".".join(map(str, version)), "CudaComputeCapability"),
    "memory_total_bytes": (lambda memory: memory.total, "MemoryInfo"),
    "memory_used_bytes": (lambda memory: memory.used, "MemoryInfo"),
    "memory_free_bytes": (lambda memory: memory.free, "MemoryInfo"),
    "utilization_percent": (lambda busy: busy.gpu, "UtilizationRates"),
    "memory_utilization_percent": (lambda busy: busy.memory, "UtilizationRates"),
    "temperature_celsius": (_same, "Temperature", 0),
    "temperature_slowdown_celsius": (_same, "TemperatureThreshold", 1),
    "power_watts": (_thousandths, "PowerUsage"),
    "power_limit_watts": (_thousandths, "EnforcedPowerLimit"),
    "power_limit_default_watts": (_thousandths, "PowerManagementDefaultLimit"),
    "power_limit_min_watts": (lambda limits: limits[0] / 1000, "PowerManagementLimitConstraints"),
    "power_limit_max_watts": (lambda limits: limits[1] / 1000, "PowerManagementLimitConstraints"),
    "energy_joules": (_thousandths, "TotalEnergyConsumption"),
    "fan_percent": (_same, "FanSpeed"),
    "persistence_mode": (bool, "PersistenceMode"),
    "sm_clock_mhz": (_same, "ClockInfo", 1),
    "sm_clock_max_mhz": (_same, "MaxClockInfo", 1),
    "memory_clock_mhz": (_same, "ClockInfo", 2),
    "memory_clock_max_mhz": (_same, "MaxClockInfo", 2),
    "performance_state": (lambda state: None if state == 32 else state, "PerformanceState"),  # 32: unknown
    "pcie_generation": (_same, "CurrPcieLinkGeneration"),
    "pcie_generation_max": (_same, "MaxPcieLinkGeneration"),
    "pcie_width": (_same, "CurrPcieLinkWidth"),
    "pcie_width_max": (_same, "MaxPcieLinkWidth"),
    "pcie_sent_bytes_per_second": (lambda rate: rate * 1000, "PcieThroughput", 0),  # NVML counts in KB
    "pcie_received_bytes_per_second": (lambda rate: rate * 1000, "PcieThroughput", 1),
    "ecc_enabled": (lambda mode: bool(mode[0]), "EccMode"),
    "ecc_corrected_errors": (_same, "TotalEccErrors", 0, 0),
    "ecc_uncorrected_errors": (_same, "TotalEccErrors", 1, 0),
    "ecc_corrected_errors_lifetime": (_same, "TotalEccErrors", 0, 1),
    "ecc_uncorrected_errors_lifetime": (_same, "TotalEccErrors", 1, 1),
    "retired_pages_pending": (bool, "RetiredPagesPendingStatus"),
    "remapped_rows": (lambda rows: rows[0] + rows[1], "RemappedRows"),
    "remapped_rows_pending": (lambda rows: bool(rows[2]), "RemappedRows"),
}


def _state(nvml: Any, index: int, throughput: bool) -> GpuState:
    nothing: dict[str, Any] = dict.fromkeys(GpuState.__dataclass_fields__) | {"index": index, "name": "unknown"}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:
        return GpuState(**nothing | {"reason": _why(error)})

    @cache
    def ask(name: str, *more: int) -> Any:
        """Return the result of nvmlDeviceGet`name`; None if card, driver or package does not support it."""
        return _told(lambda: getattr(nvml, f"nvmlDeviceGet{name}")(handle, *more))

    found = nothing | {"name": _text(ask("Name")) or "unknown"}
    for place, (convert, name, *more) in _QUERIES.items():
        if throughput or name != "PcieThroughput":
            answer = ask(name, *more)
            found[place] = None if answer is None else convert(answer)
    retired = [ask("RetiredPages", cause) for cause in (0, 1)]  # several single-bit errors; one double-bit error
    found["retired_pages"] = None if None in retired else sum(map(len, retired))
    # Older drivers and packages know these two by older names.
    bits = ask("CurrentClocksEventReasons")
    found["throttle"] = held = throttles(ask("CurrentClocksThrottleReasons") if bits is None else bits)
    if held is not None:
        found["throttle_reasons"] = [each.reason for each in held]
        found["throttled_abnormally"] = any(each.normal is False for each in held)
    running = ask("ComputeRunningProcesses")
    running = ask("ComputeRunningProcesses_v2") if running is None else running
    if running is not None:
        found["processes"] = [GpuProcess(each.pid, getattr(each, "usedGpuMemory", None)) for each in running]
        found["compute_processes"] = len(running)
    return GpuState(**found)


def throttles(bits: int | None) -> list[Throttle] | None:
    """Return the reasons that these NVML bits stand for; None if unknown."""
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
    """Return the oldest driver branch that runs a torch built for this CUDA if this driver is older, else None."""
    major = int(cuda_version.partition(".")[0])
    floor = next((floor for cuda, floor in DRIVER_FLOORS if major >= cuda), 0)
    branch = driver_version.partition(".")[0]
    return floor if branch.isdecimal() and int(branch) < floor else None


# ------------------------------------------------------------------------------------------------- within a time limit


KEPT = 60.0  # seconds for which a late result may answer the next call


class _Asked:
    """One snapshot on a thread, shared by concurrent callers. `late`: a caller timed out, and none has the result."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.found = GpuSnapshot()
        self.ended = 0.0
        self.late = False
        threading.Thread(target=self._read, name="owl-sap-nvml", daemon=True).start()

    def _read(self) -> None:
        try:
            self.found = snapshot()
        finally:
            self.ended = time.monotonic()
            self.done.set()

    @property
    def counts(self) -> bool:
        return self.late and self.done.is_set() and time.monotonic() - self.ended < KEPT


_SHARING = threading.Lock()
_READINGS: list[_Asked] = []  # only the newest, in progress or done


def snapshot_within(seconds: float) -> GpuSnapshot:
    """Return `snapshot()` within a time limit: with a dead card the driver may take minutes, or never answer.

    After a timeout the reason says so, and the next call waits for the same query instead of starting another. A late
    result (slow cards without persistence mode) answers the next call, which also starts a new query.
    """
    with _SHARING:
        before = next((each.found for each in _READINGS if each.counts), None)
        if not _READINGS or _READINGS[0].done.is_set():
            _READINGS[:] = [_Asked()]
        reading = _READINGS[0]
        reading.late = reading.late or before is not None
    if before is not None:
        return before
    if reading.done.wait(seconds):
        reading.late = False
        return reading.found
    reading.late = True
    why = f"the NVIDIA driver has not answered within {seconds:g} s: see nvidia-smi and dmesg"
    return GpuSnapshot(reason=why, answered=False)


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
