"""NVIDIA's cards and the published builds of torch that run on them, with sources. Never imports torch.

A build must have kernels for the card's compute capability, and the driver must be new enough and still support it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .nvml import DRIVER_FLOORS

Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8"]  # of an engine
Format = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"]  # of a card; no engine uses fp8
Capability = tuple[int, int]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True, slots=True)
class Card:
    """Dense rates of a GPU: TFLOP/s (INT8: TOPS), memory bandwidth in GB/s. No sparsity figures.

    `unread`: formats whose figure was not checked in a source.
    """

    capability: Capability
    peaks: Mapping[Format, float]
    bandwidth: float
    unread: frozenset[Format] = frozenset()


_AMPERE_100: Mapping[Format, float] = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624}
_HOPPER: Mapping[Format, float] = {"fp32": 67, "tf32": 495, "fp16": 990, "bf16": 990, "int8": 1979, "fp8": 1979}
_BLACKWELL: Mapping[Format, float] = {"fp32": 75, "tf32": 1100, "fp16": 2250, "bf16": 2250, "int8": 4500, "fp8": 4500}

# NVIDIA's data sheets. The P4's fp16 runs at 1/64 of its fp32 rate (GP104); the P100 has fast fp16, no tensor cores.
CARDS: Mapping[str, Card] = {
    "Tesla P4": Card((6, 1), {"fp32": 5.5, "fp16": 0.089, "int8": 22}, 192),
    "Tesla P100": Card((6, 0), {"fp32": 10.6, "fp16": 21.2}, 732),
    "Tesla V100": Card((7, 0), {"fp32": 15.7, "fp16": 125, "int8": 62.8}, 900, frozenset({"int8"})),
    "Tesla T4": Card((7, 5), {"fp32": 8.1, "fp16": 65, "int8": 130}, 320),
    "NVIDIA A100": Card((8, 0), _AMPERE_100, 1555),
    "NVIDIA A100 80GB": Card((8, 0), _AMPERE_100, 2039),
    "NVIDIA A10": Card(
        (8, 6),
        {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125, "int8": 250},
        600,
        frozenset({"fp32", "tf32", "fp16", "bf16", "int8"}),
    ),
    "NVIDIA L4": Card((8, 9), {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "int8": 242, "fp8": 242}, 300),
    "NVIDIA H100": Card((9, 0), _HOPPER, 3350),
    "NVIDIA H200": Card((9, 0), _HOPPER, 4800),
    "NVIDIA B200": Card((10, 0), _BLACKWELL, 8000, frozenset({"fp32", "tf32", "int8"})),
}
# Boards with other rates than those above: they get no figure.
_OTHER_RATES = ("pcie", "nvl", "a10g", "mig")


def card_of(name: str, capability: Capability) -> Card | None:
    """Return the listed card that best fits this name (`NVIDIA A100-SXM4-80GB`), or None."""
    if any(word in name.lower() for word in _OTHER_RATES):
        return None
    words = set(name.replace("-", " ").split())
    matches = [known for known in CARDS if set(known.split()[1:]) <= words and CARDS[known].capability == capability]
    return CARDS[max(matches, key=len)] if matches else None


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
# From the wheels, best first. The end of cu126 with 2.14: pytorch issues 190355, 190385.
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

    A cubin needs the same major and no higher minor version, PTX any version up to it. True for an empty list.
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


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch. `cuda`: the version it was built for; None for a build without CUDA."""

    version: str
    cuda: str | None


def torch_build() -> TorchBuild | None:
    """Return the installed torch, or None. Importing it takes seconds, and fails if a CUDA library is missing."""
    try:
        spec = importlib.util.find_spec("torch")
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return TorchBuild("unknown", None)
    found = dict(re.findall(r"""^(__version__|cuda)\b[^=\n]*=\s*['"]([^'"\n]+)""", text, re.MULTILINE))
    return TorchBuild(found.get("__version__", "unknown"), found.get("cuda"))
