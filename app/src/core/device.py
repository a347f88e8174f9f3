"""Capabilities of a device, and the precision that the engine uses on it, with the reason.

Facts come from the device and published figures (`cards`). Only `detect` imports torch.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from .cards import CARDS as CARDS
from .cards import FORMATS as FORMATS
from .cards import PRECISIONS as PRECISIONS
from .cards import Build, builds_for, card_of, what_to_install
from .cards import Capability as Capability
from .cards import Format as Format
from .cards import Precision as Precision
from .cards import TorchBuild as TorchBuild
from .cards import kernels_exist as kernels_exist
from .cards import torch_build as torch_build

Kind = Literal["cpu", "cuda"]

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


class DeviceError(ValueError):
    """The requested device or precision is not available; the message says why, and what to request instead."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device. `memory_bytes`: total (0: unknown); `peaks`: empty for an unlisted device."""

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
        """Return a GPU as its driver describes it, with published rates if the card is listed."""
        card = card_of(name, capability)
        peaks, bandwidth = (card.peaks, card.bandwidth) if card else ({}, None)
        return cls("cuda", name, index, capability, memory_bytes, peaks, bandwidth)

    @classmethod
    def of_card(cls, name: str, memory_gib: int = 16) -> DeviceProfile:
        """Return the profile of a listed card without having one, for tests and previews."""
        return cls.cuda(name, CARDS[name].capability, memory_gib << 30)

    @property
    def tensor_core_formats(self) -> tuple[Format, ...]:
        """Return the formats with tensor cores, also fp8, which no engine uses."""
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
    def builds(self) -> list[Build]:
        """Return torch's published builds for this card, best first; [] for a CPU, which runs every build."""
        return [] if self.capability is None else builds_for(self.capability)

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def padding_multiple(self, precision: Precision) -> int:
        """Return the multiple to pad sequence lengths to. Tensor cores are efficient if M, N, K are multiples of 16
        bytes (NVIDIA, Matrix Multiplication Background guide); other units do not gain."""
        if precision not in self.tensor_cores:
            return 1
        return {"tf32": 4, "int8": 16}.get(precision, 8)

    def peak(self, precision: Format) -> float | None:
        """Return the dense peak in TFLOP/s (INT8: TOPS); None without a published figure."""
        return self.peaks.get(precision)


# ---------------------------------------------------------------------------------------------------------- precision


BF16_PAYS = 1.3  # gain from which a CPU uses bf16; with bf16 instructions it is about 2, else far below 1


def choose_precision(
    profile: DeviceProfile, requested: str = "auto", bf16_gain: Callable[[], float] | None = None
) -> tuple[Precision, str]:
    """Return the precision to compute in, and the reason. Raises DeviceError for an unsupported precision.

    `bf16_gain` measures a CPU's speed in bf16 relative to fp32 (`backends/torch/linears.py`). It is called only if
    needed; without it a CPU uses fp32.
    """
    if requested == "auto" and profile.capability:
        if "fp16" not in profile.tensor_cores:
            return "fp32", f"compute capability {_dotted(profile)} has no tensor cores"
        if not profile.tf32:
            return "fp16", f"compute capability {_dotted(profile)} has tensor cores for fp16, none for bf16 or tf32"
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
        raise DeviceError(f"precision {requested!r} is not one of auto, {', '.join(PRECISIONS)}")
    if refusal := _refusal(profile, requested):
        raise DeviceError(f"precision {requested} cannot be used on {profile.name}: {refusal}")
    return requested, "asked for"


def _refusal(profile: DeviceProfile, precision: Precision) -> str | None:
    if precision == "int8":
        return "torch has no 8-bit layers; calibrate a graph (owl-sap calibrate NAME), or use auto"
    if profile.capability is None:
        slow = precision in ("fp16", "tf32")
        return f"CPUs have no fast {precision} matrix products; use fp32, bf16 or auto" if slow else None
    if precision in ("tf32", "bf16") and precision not in profile.tensor_cores:
        better = "fp16" if "fp16" in profile.tensor_cores else "fp32"
        return f"it needs compute capability 8.0, this card has {_dotted(profile)}; use {better} or auto"
    if precision == "fp16" and profile.capability == (6, 1):
        return "its fp16 runs at 1/64 of the fp32 rate; use fp32 or auto"
    return None


def _dotted(profile: DeviceProfile) -> str:
    return ".".join(map(str, profile.capability or ()))


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
    """Return the engine's choices on this device, with reasons. Raises DeviceError for an unsupported precision.

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
        tf32 = f"needs compute capability 8.0, this card has {_dotted(profile)}"
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
        settings.append(Setting("tensor_cores", formats, f"compute capability {_dotted(profile)}: {why}"))
        cuda = profile.builds[0].cuda if profile.builds else None
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


# ------------------------------------------------------------------------------------------------------------ detection


def detect(device: str = "auto") -> DeviceProfile:
    """Return the profile of `auto` (a usable GPU, else the CPU), `cpu`, `cuda` or `cuda:N`. Raises DeviceError."""
    if device == "cpu":
        return _cpu()
    kind, colon, number = device.partition(":")
    if kind not in ("auto", "cuda") or (colon and not (kind == "cuda" and number.isdecimal())):
        raise DeviceError(f"device {device!r} is not auto, cpu, cuda or cuda:N")
    import torch

    if not torch.cuda.is_available():
        if device == "auto":
            return _cpu()
        fix = f"check nvidia-smi and the driver (CUDA {torch.version.cuda} builds), or use device cpu"
        if torch.version.cuda is None:
            fix = "this is a CPU build of torch: install the CUDA build, or use device cpu"
        raise DeviceError(f"device {device!r}: torch {torch.__version__} sees no CUDA device; {fix}")
    index = int(number or 0)
    if index >= torch.cuda.device_count():
        raise DeviceError(f"device {device!r}: there are only {torch.cuda.device_count()} CUDA devices, counted from 0")
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    built_for = torch.cuda.get_arch_list()
    if not kernels_exist(built_for, capability):
        raise DeviceError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}, but this torch"
            f" {torch.__version__} was built for {', '.join(built_for)} only: {what_to_install(capability)}"
        )
    profile = DeviceProfile.cuda(properties.name, capability, properties.total_memory, index)
    return replace(profile, multiprocessors=properties.multi_processor_count)


def _cpu() -> DeviceProfile:
    try:
        cpuinfo = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # exists on Linux only
        cpuinfo = ""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory = 0
    named = re.search(r"^model name\s*:\s*(.+?)\s*$", cpuinfo, re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine() or "CPU"
    return DeviceProfile.cpu(name, memory)
