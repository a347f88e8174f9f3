"""Capabilities of a device, the precision that the engine uses on it with the reason, and the published builds of
torch that run on a card.

Facts come from the device and published figures. Only `detect` imports torch.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from .nvml import DRIVER_FLOORS

Kind = Literal["cpu", "cuda"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8"]  # of an engine
Format = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"]  # of a card; no engine uses fp8
Capability = tuple[int, int]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FORMATS: tuple[Format, ...] = get_args(Format)
ELEMENT_BYTES: Mapping[Precision, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "int8": 1}
# Lowest compute capability with tensor cores for a format: NVIDIA, TensorRT support matrix.
TENSOR_CORES_FROM: Mapping[Format, Capability] = {
    "fp16": (7, 0),
    "int8": (7, 2),
    "tf32": (8, 0),
    "bf16": (8, 0),
    "fp8": (8, 9),
}
_CPUINFO = Path("/proc/cpuinfo")

_AMPERE_100: Mapping[Format, float] = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624}
_HOPPER: Mapping[Format, float] = {"fp32": 67, "tf32": 495, "fp16": 990, "bf16": 990, "int8": 1979, "fp8": 1979}
# Card -> compute capability, multiprocessors, memory bandwidth in GB/s, dense rates in TFLOP/s (INT8: TOPS). From
# NVIDIA's data sheets; figures without a source are left out. The P4's fp16 runs at 1/64 of its fp32 rate (GP104); the
# P100 has fast fp16, no tensor cores.
CARDS: Mapping[str, tuple[Capability, int, float, Mapping[Format, float]]] = {
    "Tesla P4": ((6, 1), 20, 192, {"fp32": 5.5, "fp16": 0.089, "int8": 22}),
    "Tesla P100": ((6, 0), 56, 732, {"fp32": 10.6, "fp16": 21.2}),
    "Tesla V100": ((7, 0), 80, 900, {"fp32": 15.7, "fp16": 125}),
    "Tesla T4": ((7, 5), 40, 320, {"fp32": 8.1, "fp16": 65, "int8": 130}),
    "NVIDIA A100": ((8, 0), 108, 1555, _AMPERE_100),
    "NVIDIA A100 80GB": ((8, 0), 108, 2039, _AMPERE_100),
    "NVIDIA A10": ((8, 6), 72, 600, {}),
    "NVIDIA L4": ((8, 9), 58, 300, {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "int8": 242, "fp8": 242}),
    "NVIDIA H100": ((9, 0), 132, 3350, _HOPPER),
    "NVIDIA H200": ((9, 0), 132, 4800, _HOPPER),
    "NVIDIA B200": ((10, 0), 148, 8000, {"fp16": 2250, "bf16": 2250, "fp8": 4500}),
}
# Boards whose rates differ from those above, so their profiles have no figures.
_OTHER_RATES = ("pcie", "nvl", "a10g", "mig")


class EngineError(Exception):
    """Base of the engine's errors. `retryable`: the same call may succeed later."""

    retryable = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling `__init__`, whose parameters differ between classes."""
        return Exception.__new__, (type(self), *self.args), vars(self)


class DeviceUnavailable(EngineError):
    """This machine does not have the requested device or precision. The message says what to request instead."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device. `memory_bytes`: total (0: unknown); `peaks`: dense TFLOP/s (INT8: TOPS), as far as published."""

    kind: Kind
    name: str
    index: int = 0
    capability: Capability | None = None
    memory_bytes: int = 0
    peaks: Mapping[Format, float] = field(default_factory=dict)
    bandwidth: float | None = None  # GB/s
    multiprocessors: int = 0  # 0: unknown

    @classmethod
    def cpu(cls, name: str = "CPU", memory_bytes: int = 0) -> DeviceProfile:
        return cls("cpu", name, memory_bytes=memory_bytes)

    @classmethod
    def cuda(cls, name: str, capability: Capability, memory_bytes: int = 0, index: int = 0) -> DeviceProfile:
        """Return a GPU as its driver describes it, with the published figures of the listed card that best fits this
        name (`NVIDIA A100-SXM4-80GB`), if any."""
        words = set(name.replace("-", " ").split())
        fitting = [known for known in CARDS if set(known.split()[1:]) <= words and CARDS[known][0] == capability]
        if not fitting or any(word in name.lower() for word in _OTHER_RATES):
            return cls("cuda", name, index, capability, memory_bytes)
        _, multiprocessors, bandwidth, peaks = CARDS[max(fitting, key=len)]
        return cls("cuda", name, index, capability, memory_bytes, peaks, bandwidth, multiprocessors)

    @classmethod
    def of_card(cls, name: str, memory_gib: int = 16) -> DeviceProfile:
        """Return the profile of a listed card without having one, for tests and previews."""
        return cls.cuda(name, CARDS[name][0], memory_gib << 30)

    @property
    def dotted_capability(self) -> str | None:
        return None if self.capability is None else ".".join(map(str, self.capability))

    @property
    def tensor_core_formats(self) -> tuple[Format, ...]:
        """Return the formats with tensor cores, including fp8, which no engine uses."""
        if self.capability is None:
            return ()
        return tuple(each for each in FORMATS if self.capability >= TENSOR_CORES_FROM.get(each, (99, 0)))

    @property
    def tensor_cores(self) -> frozenset[Precision]:
        """Return the engine precisions with tensor cores."""
        return frozenset(each for each in PRECISIONS if each in self.tensor_core_formats)

    @property
    def tf32(self) -> bool:
        return "tf32" in self.tensor_cores

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def padding_multiple(self, precision: Precision) -> int:
        """Return the multiple to pad sequence lengths to. Tensor cores are efficient if M, N, K are multiples of 16
        bytes (NVIDIA, Matrix Multiplication Background guide); other units do not gain."""
        if precision not in self.tensor_cores:
            return 1
        return {"tf32": 4, "int8": 16}.get(precision, 8)


# ---------------------------------------------------------------------------------------------------------- precision


BF16_PAYS = 1.3  # gain from which a CPU uses bf16; with bf16 instructions it is about 2, else far below 1


def choose_precision(
    profile: DeviceProfile, requested: str = "auto", bf16_gain: Callable[[], float] | None = None
) -> tuple[Precision, str]:
    """Return the precision to compute in, and the reason. Raises DeviceUnavailable for an unsupported precision.

    `bf16_gain` measures a CPU's speed in bf16 relative to fp32 (`backends/torch/linears.py`). It is called only if
    needed; without it a CPU uses fp32.
    """
    if requested == "auto" and profile.capability:
        if "fp16" not in profile.tensor_cores:
            return "fp32", f"compute capability {profile.dotted_capability} has no tensor cores"
        if not profile.tf32:
            dotted = profile.dotted_capability
            return "fp16", f"compute capability {dotted} has tensor cores for fp16, none for bf16 or tf32"
        return "fp16", "fastest on tensor cores and more exact than bf16; rows that overflow are computed again in fp32"
    if requested == "auto":
        if bf16_gain is None:
            return "fp32", "the default on a CPU; bf16 is tried when a model is loaded"
        gain = bf16_gain()
        if gain >= BF16_PAYS:
            return "bf16", f"{gain:.1f}x faster than fp32 here (used from {BF16_PAYS}x)"
        if gain == 0:
            return "fp32", "this torch cannot compute bf16 on this CPU"
        return "fp32", f"bf16 is only {gain:.2f}x as fast as fp32 here (used from {BF16_PAYS}x)"
    if requested not in PRECISIONS:
        raise DeviceUnavailable(f"precision {requested!r} is not one of auto, {', '.join(PRECISIONS)}")
    if refusal := _refusal(profile, requested):
        raise DeviceUnavailable(f"precision {requested} cannot be used on {profile.name}: {refusal}")
    return requested, "requested"


def _refusal(profile: DeviceProfile, precision: Precision) -> str | None:
    if precision == "int8":
        return "it needs a calibration (owl-sap calibrate NAME); or use auto"
    if profile.capability is None:
        slow = precision in ("fp16", "tf32")
        return f"CPUs have no fast {precision} matrix products; use fp32, bf16 or auto" if slow else None
    if precision in ("tf32", "bf16") and precision not in profile.tensor_cores:
        better = "fp16" if "fp16" in profile.tensor_cores else "fp32"
        return f"it needs compute capability 8.0, this card has {profile.dotted_capability}; use {better} or auto"
    if precision == "fp16" and profile.capability == (6, 1):
        return "its fp16 runs at 1/64 of the fp32 rate; use fp32 or auto"
    return None


# ----------------------------------------------------------------------------------------------------- all choices


@dataclass(frozen=True, slots=True)
class Setting:
    """One choice, as doctor, `/v1/info` and the benchmark show it. `value` None: not available, see `reason`."""

    name: str
    value: str | int | float | bool | None
    reason: str


def settings_of(
    profile: DeviceProfile,
    bf16_gain: Callable[[], float] | None = None,
    *,
    requested: str = "auto",
    chosen: tuple[Precision, str] | None = None,
) -> list[Setting]:
    """Return the engine's choices on this device, with reasons. Raises DeviceUnavailable for an unsupported precision.

    `requested`: `embedding.precision`; `bf16_gain`: see `choose_precision`. `chosen`: precision and reason of a loaded
    engine; with it nothing is measured.
    """
    precision, reason = chosen or choose_precision(profile, requested, bf16_gain)
    multiple = profile.padding_multiple(precision)
    blocks = "tensor cores work on blocks of 16 bytes" if multiple > 1 else "not needed: no tensor cores in use"
    tf32 = f"off: not used with {precision}, and rows computed again in fp32 are exact"
    if profile.capability is None:
        tf32 = "not available on CPU"
    elif not profile.tf32:
        tf32 = f"needs compute capability 8.0, this card has {profile.dotted_capability}"
    elif precision == "tf32":
        tf32 = "requested: fp32 products with inputs rounded to 10 bits, as in fp16"
    elif precision == "fp32":
        tf32 = "off, so that fp32 is not rounded; precision tf32 switches it on"
    settings = [
        Setting("precision", precision, reason),
        Setting("padding_multiple", multiple, blocks),
        Setting("tf32", precision == "tf32" and profile.tf32, tf32),
    ]
    if profile.capability is not None:
        formats = " ".join(profile.tensor_core_formats) or None
        why = "by compute capability; nothing is computed in fp8" if formats else "tensor cores start at 7.0"
        settings.append(Setting("tensor_cores", formats, f"compute capability {profile.dotted_capability}: {why}"))
        cuda = next((build.cuda for build in builds_for(profile.capability)), None)
        settings.append(Setting("torch_build", cuda, what_to_install(profile.capability)))
    for other in PRECISIONS:
        refusal = _refusal(profile, other)
        if refusal:
            refusal = f"precision {other} cannot be used on {profile.name}: {refusal}"
            settings.append(Setting(f"embedding {other}", None, refusal))
    if not profile.peaks:
        unknown = f"this version knows no published peak rates of {profile.name!r}"
        unknown = "no published peak rates for CPUs" if profile.kind == "cpu" else unknown
        settings.append(Setting("share_of_peak", None, unknown))
    return settings


# -------------------------------------------------------------------------------------------------- builds of torch


@dataclass(frozen=True, slots=True)
class Build:
    """A build of torch for Linux. `torch`: newest release that pyproject.toml allows; `last`: last release with this
    build, None if not announced; `index`: pip's index, None for PyPI."""

    torch: str
    cuda: str
    architectures: tuple[str, ...]
    index: str | None = None
    last: str | None = None

    @property
    def driver(self) -> int:
        """Return the oldest driver branch that runs the build."""
        return next(floor for cuda, floor in DRIVER_FLOORS if int(self.cuda.partition(".")[0]) >= cuda)

    @property
    def command(self) -> str:
        return f"pip install 'torch=={self.torch}.*'" + (f" --index-url {self.index}" if self.index else "")


_CUDA_12_6 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_CUDA_12_8 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
# Read from the wheels, best first. Sources for the end of cu126 with torch 2.14: pytorch issues 190355, 190385.
BUILDS: tuple[Build, ...] = (
    Build("2.13", "13.0", _CUDA_13),
    Build("2.13", "12.6", _CUDA_12_6, "https://download.pytorch.org/whl/cu126", last="2.14"),
    Build("2.10", "12.8", _CUDA_12_8),
)


def builds_for(capability: Capability, driver: int | None = None) -> list[Build]:
    """Return the builds with kernels for the card that this driver branch runs (None: any driver), best first."""
    fitting = [build for build in BUILDS if kernels_exist(build.architectures, capability)]
    return [build for build in fitting if driver is None or build.driver <= driver]


def driver_ceiling(capability: Capability) -> int | None:
    """Return the newest driver branch that supports the card; None if all newer ones do."""
    return 580 if capability < (7, 5) else None  # R580 is the last for Maxwell, Pascal and Volta


def what_to_install(capability: Capability, driver: int | None = None) -> str:
    """Return one sentence without a full stop: the install command and its drivers."""
    fitting, ceiling = builds_for(capability), driver_ceiling(capability)
    dotted = ".".join(map(str, capability))
    if not fitting:
        return f"no build of torch that this version takes has kernels for compute capability {dotted}"

    def drivers(build: Build) -> str:
        return f"{build.driver} or newer" if ceiling is None else f"{build.driver} to {ceiling}"

    best = next(iter(builds_for(capability, driver)), None)
    if best is None:
        wanted = drivers(fitting[0])
        return f"driver {driver} is too old for every build with kernels for {dotted}: install {wanted}"
    ends = f", published up to torch {best.last}" if best.last else ""
    return f"{best.command} (built for CUDA {best.cuda}{ends}; driver {drivers(best)})"


def kernels_exist(built_for: Sequence[str], capability: Capability) -> bool:
    """Return whether a torch built for these architectures (`sm_75`, `compute_90` ...) runs on the capability.

    A cubin needs the same major version and no higher minor version; PTX, any version up to the capability. Return True
    for an empty list.
    """
    if not built_for:
        return True
    for name in built_for:
        flavour, _, digits = name.rstrip("af").partition("_")
        architecture = (int(digits[:-1]), int(digits[-1]))
        same_major = architecture[0] == capability[0]
        if architecture <= capability and (same_major or flavour == "compute"):
            return True
    return False


def torch_build() -> tuple[str, str | None] | None:
    """Return the version of the installed torch and of the CUDA it was built for (None for a CPU build), or None
    without torch. Does not import torch, because that takes seconds and fails if a CUDA library is missing."""
    try:
        spec = importlib.util.find_spec("torch")
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "unknown", None
    found = dict(re.findall(r"""^(__version__|cuda)\b[^=\n]*=\s*['"]([^'"\n]+)""", text, re.MULTILINE))
    return found.get("__version__", "unknown"), found.get("cuda")


# ------------------------------------------------------------------------------------------------------------ detection


def devices_of(device: str | Sequence[str]) -> list[str]:
    """Return the names of the devices, which are different and of one kind; for `all` the usable cards. A text may hold
    several, with commas. Imports torch only for `all`. Several CPUs, `cpu:0` and `cpu:1`, are for tests. Raises
    DeviceUnavailable."""
    if device == "all":
        return _usable_cards()
    names = re.split(", ?", device) if isinstance(device, str) else list(device)
    if len(names) == 1:
        return names
    shown = ", ".join(names)
    if not names or not all(re.fullmatch(r"(cpu|cuda)(:\d+)?", name) for name in names):
        raise DeviceUnavailable(f"devices {shown or 'without a name'}: several devices are written cuda:0, cuda:1 ...")
    full = [kind + ":" + str(int(number or 0)) for kind, _, number in (name.partition(":") for name in names)]
    if len({name.partition(":")[0] for name in full}) > 1:
        raise DeviceUnavailable(f"devices {shown}: CPU and cards do not compute together; leave out the CPU")
    if len(set(full)) < len(full):
        raise DeviceUnavailable(f"devices {shown}: the same device is there twice; name each once")
    return full


def _usable_cards() -> list[str]:
    import torch

    found, refused = [], None
    for index in range(torch.cuda.device_count()):
        try:
            found.append(detect(f"cuda:{index}").torch_name)
        except DeviceUnavailable as error:  # without kernels in this build
            refused = error
    if not found:
        raise refused or DeviceUnavailable(f'device "all": torch {torch.__version__} sees no CUDA device; use auto')
    return found


def detect(device: str | Sequence[str] = "auto") -> DeviceProfile:
    """Return the profile of `auto` (a usable GPU, else the CPU), `cpu`, `cuda` or `cuda:N`; of several, the first."""
    device = devices_of(device)[0]
    if re.fullmatch(r"cpu(:\d+)?", device):
        return replace(_cpu(), index=int(device.partition(":")[2] or 0))
    kind, colon, number = device.partition(":")
    if kind not in ("auto", "cuda") or (colon and not (kind == "cuda" and number.isdecimal())):
        raise DeviceUnavailable(f"device {device!r} is not auto, cpu, cuda, cuda:N or all")
    import torch

    if not torch.cuda.is_available():
        if device == "auto":
            return _cpu()
        fix = f"check nvidia-smi and the driver (CUDA {torch.version.cuda} builds), or use device cpu"
        if torch.version.cuda is None:
            fix = "this is a CPU build of torch: install the CUDA build, or use device cpu"
        raise DeviceUnavailable(f"device {device!r}: torch {torch.__version__} sees no CUDA device; {fix}")
    index = int(number or 0)
    if index >= torch.cuda.device_count():
        raise DeviceUnavailable(
            f"device {device!r}: there are only {torch.cuda.device_count()} CUDA devices, counted from 0"
        )
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    built_for = torch.cuda.get_arch_list()
    if not kernels_exist(built_for, capability):
        raise DeviceUnavailable(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}, but this torch"
            f" {torch.__version__} was built for {', '.join(built_for)} only: {what_to_install(capability)}"
        )
    profile = DeviceProfile.cuda(properties.name, capability, properties.total_memory, index)
    return replace(profile, multiprocessors=properties.multi_processor_count)


def _cpu() -> DeviceProfile:
    try:
        cpuinfo = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the file exists on Linux only
        cpuinfo = ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    named = re.search(r"^model name\s*:\s*(.+?)\s*$", cpuinfo, re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine() or "CPU"
    return DeviceProfile.cpu(name, memory)
