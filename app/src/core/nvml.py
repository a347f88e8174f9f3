"""State of NVIDIA's driver and cards through NVML, and which CUDA builds a driver runs. Works without torch.

Never raises: without a card the snapshot gives the reason.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

# CUDA major version, oldest driver branch on Linux that runs its builds: NVIDIA, CUDA Compatibility, minor versions.
DRIVER_FLOORS: tuple[tuple[int, int], ...] = ((13, 580), (12, 525), (11, 450))

NOTE = (
    "utilisation is the share of time in which any kernel ran, not what the tensor cores did: their activity comes "
    "only from DCGM (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, compute capability 7.0 and up), not from NVML"
)


class Reason(NamedTuple):
    """Why a clock is held below its maximum. `normal` is None for a bit that this version does not know."""

    name: str
    words: str
    normal: bool | None


THROTTLE_REASONS: Mapping[int, Reason] = {
    # Bits of nvmlDeviceGetCurrentClocksEventReasons: NVML API reference, nvmlClocksEventReasons.
    0x1: Reason("gpu_idle", "nothing runs, so the clock rests", True),
    0x2: Reason("applications_clocks_setting", "held at the clock that somebody has set", True),
    0x4: Reason("sw_power_cap", "held by the power limit, as usual under load; a T4 nearly always is", True),
    0x8: Reason("hw_slowdown", "the hardware has at least halved the clock: heat or power supply", False),
    0x10: Reason("sync_boost", "held to the clock of the other cards of its group", True),
    0x20: Reason("sw_thermal_slowdown", "too hot: the driver lowers the clock", False),
    0x40: Reason("hw_thermal_slowdown", "far too hot: the hardware has at least halved the clock", False),
    0x80: Reason("hw_power_brake_slowdown", "the power supply asks for less, and the clock is at least halved", False),
    0x100: Reason("display_clock_setting", "held by what its displays need", True),
    0x200: Reason("board_limit", "held by a limit of the board", True),
    0x400: Reason("reliability", "at the highest voltage that it may have", True),
}

# Values of NVML's enumerations, which never change (nvml.h). Older versions of pynvml lack some of the names.
_NO_PERMISSION, _DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _VERSIONS_DIFFER = 4, 9, 12, 18
_SENSOR_GPU, _SLOWDOWN_THRESHOLD = 0, 1
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_PCIE_SENT, _PCIE_RECEIVED = 0, 1
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE, _AGGREGATE = 0, 1
_RETIRED_FOR = (0, 1)  # several single-bit errors; one double-bit error
_STATE_UNKNOWN = 32
_ASKING = threading.Lock()


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
    known = {
        _LIBRARY_NOT_FOUND: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
        _DRIVER_NOT_LOADED: "the NVIDIA driver is installed, but not loaded",
        _NO_PERMISSION: "this user may not talk to the NVIDIA driver",
        _VERSIONS_DIFFER: "driver and its library differ in version: restart this machine",
    }
    return known.get(getattr(error, "value", None) or 0, f"NVML: {error}")


def _asked(nvml: Any, throughput: bool) -> GpuSnapshot:
    devices = tuple(_state(nvml, index, throughput) for index in range(nvml.nvmlDeviceGetCount()))
    cuda = _told(nvml.nvmlSystemGetCudaDriverVersion)
    return GpuSnapshot(
        devices,
        driver_version=_text(_told(nvml.nvmlSystemGetDriverVersion)),
        cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        reason=None if devices else "the NVIDIA driver sees no card",
    )


def _state(nvml: Any, index: int, throughput: bool) -> GpuState:
    try:
        card = _Card(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    except Exception as error:
        nothing: dict[str, Any] = dict.fromkeys(GpuState.__dataclass_fields__)
        return GpuState(**nothing | {"index": index, "name": "unknown", "reason": _why(error)})
    return GpuState(
        index=index,
        name=_text(card.ask("Name")) or "unknown",
        uuid=_text(card.ask("UUID")),
        **card.load(),
        **card.power(),
        **card.clocks(),
        **card.pcie(throughput),
        **card.health(),
        **card.processes(),
    )


class _Card:
    """Queries to one card, by subject."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def ask(self, name: str, *more: Any) -> Any:
        """Return the result of nvmlDeviceGet`name`; None if card, driver or package does not support it."""
        return _told(lambda: getattr(self._nvml, f"nvmlDeviceGet{name}")(self._handle, *more))

    def first(self, *names: str) -> Any:
        """Return the first result that is not None: older drivers and packages know queries by older names."""
        answers = (self.ask(name) for name in names)
        return next((answer for answer in answers if answer is not None), None)

    def flag(self, name: str) -> bool | None:
        answer = self.ask(name)
        return None if answer is None else bool(answer)

    def watts(self, name: str) -> float | None:
        return _thousandths(self.ask(name))

    def load(self) -> dict[str, Any]:
        memory, busy, capability = self.ask("MemoryInfo"), self.ask("UtilizationRates"), None
        if version := self.ask("CudaComputeCapability"):
            capability = ".".join(map(str, version))
        return {
            "compute_capability": capability,
            "memory_total_bytes": None if memory is None else memory.total,
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_free_bytes": None if memory is None else memory.free,
            "utilization_percent": None if busy is None else busy.gpu,
            "memory_utilization_percent": None if busy is None else busy.memory,
        }

    def power(self) -> dict[str, Any]:
        least, most = self.ask("PowerManagementLimitConstraints") or (None, None)
        return {
            "temperature_celsius": self.ask("Temperature", _SENSOR_GPU),
            "temperature_slowdown_celsius": self.ask("TemperatureThreshold", _SLOWDOWN_THRESHOLD),
            "power_watts": self.watts("PowerUsage"),
            "power_limit_watts": self.watts("EnforcedPowerLimit"),
            "power_limit_default_watts": self.watts("PowerManagementDefaultLimit"),
            "power_limit_min_watts": _thousandths(least),
            "power_limit_max_watts": _thousandths(most),
            "energy_joules": _thousandths(self.ask("TotalEnergyConsumption")),
            "fan_percent": self.ask("FanSpeed"),
            "persistence_mode": self.flag("PersistenceMode"),
        }

    def clocks(self) -> dict[str, Any]:
        state = self.ask("PerformanceState")
        held = throttles(self.first("CurrentClocksEventReasons", "CurrentClocksThrottleReasons"))
        return {
            "sm_clock_mhz": self.ask("ClockInfo", _CLOCK_SM),
            "sm_clock_max_mhz": self.ask("MaxClockInfo", _CLOCK_SM),
            "memory_clock_mhz": self.ask("ClockInfo", _CLOCK_MEMORY),
            "memory_clock_max_mhz": self.ask("MaxClockInfo", _CLOCK_MEMORY),
            "performance_state": None if state == _STATE_UNKNOWN else state,
            "throttle": held,
            "throttle_reasons": None if held is None else [each.reason for each in held],
            "throttled_abnormally": None if held is None else any(each.normal is False for each in held),
        }

    def pcie(self, throughput: bool) -> dict[str, Any]:
        sent, received = (
            self.ask("PcieThroughput", way) if throughput else None for way in (_PCIE_SENT, _PCIE_RECEIVED)
        )
        return {
            "pcie_generation": self.ask("CurrPcieLinkGeneration"),
            "pcie_generation_max": self.ask("MaxPcieLinkGeneration"),
            "pcie_width": self.ask("CurrPcieLinkWidth"),
            "pcie_width_max": self.ask("MaxPcieLinkWidth"),
            "pcie_sent_bytes_per_second": None if sent is None else sent * 1000,  # NVML counts in KB
            "pcie_received_bytes_per_second": None if received is None else received * 1000,
        }

    def health(self) -> dict[str, Any]:
        mode = self.ask("EccMode")
        retired = [self.ask("RetiredPages", cause) for cause in _RETIRED_FOR]
        corrected, uncorrected, pending, _ = self.ask("RemappedRows") or (None, None, None, None)
        return {
            "ecc_enabled": None if mode is None else bool(mode[0]),
            "ecc_corrected_errors": self.ask("TotalEccErrors", _CORRECTED, _VOLATILE),
            "ecc_uncorrected_errors": self.ask("TotalEccErrors", _UNCORRECTED, _VOLATILE),
            "ecc_corrected_errors_lifetime": self.ask("TotalEccErrors", _CORRECTED, _AGGREGATE),
            "ecc_uncorrected_errors_lifetime": self.ask("TotalEccErrors", _UNCORRECTED, _AGGREGATE),
            "retired_pages": None if None in retired else sum(len(pages) for pages in retired),
            "retired_pages_pending": self.flag("RetiredPagesPendingStatus"),
            "remapped_rows": None if corrected is None else corrected + uncorrected,
            "remapped_rows_pending": None if pending is None else bool(pending),
        }

    def processes(self) -> dict[str, Any]:
        found = self.first("ComputeRunningProcesses", "ComputeRunningProcesses_v2")
        if found is None:
            return {"compute_processes": None, "processes": None}
        processes = [GpuProcess(each.pid, getattr(each, "usedGpuMemory", None)) for each in found]
        return {"compute_processes": len(processes), "processes": processes}


def throttles(bits: int | None) -> list[Throttle] | None:
    """Return the reasons that these NVML bits stand for; None if unknown."""
    if bits is None:
        return None
    found = [Throttle(*reason) for bit, reason in THROTTLE_REASONS.items() if bits & bit]
    if unknown := bits & ~sum(THROTTLE_REASONS):
        found.append(Throttle(f"unknown_{unknown:#x}", "a reason that this version does not know", None))
    return found


def _told(question: Callable[[], Any]) -> Any:
    """Return the result, or None after any error: NVMLError of card or driver, AttributeError of an older package."""
    try:
        return question()
    except Exception:
        return None


def _thousandths(number: int | None) -> float | None:
    return None if number is None else number / 1000


def _text(value: Any) -> str | None:
    """Decode bytes, which older versions of the package return."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


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
