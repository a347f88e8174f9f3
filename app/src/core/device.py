"""What a device can really do, and which precision the engine therefore uses on it.

Facts come from the device itself (compute capability) and from a table of published dense rates. Importing this module
never imports torch; only `detect` and `allow_tf32` do.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["cpu", "cuda"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8"]
Capability = tuple[int, int]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ELEMENT_BYTES: Mapping[Precision, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "int8": 1}


class DeviceError(ValueError):
    """The device or the precision asked for cannot be had here; the message says why and what to ask for instead."""


@dataclass(frozen=True, slots=True)
class Card:
    """Published dense rates of a GPU: TFLOP/s (INT8: TOPS), memory bandwidth in GB/s. No sparsity figures."""

    capability: Capability
    peaks: Mapping[Precision, float]
    bandwidth: float


# NVIDIA's data sheets. The P4's fp16 runs at 1/64 of its fp32 rate (GP104); P100 has fast fp16 without tensor cores.
CARDS: Mapping[str, Card] = {
    "Tesla P4": Card((6, 1), {"fp32": 5.5, "fp16": 0.089, "int8": 22}, 192),
    "Tesla P100": Card((6, 0), {"fp32": 10.6, "fp16": 21.2}, 732),
    "Tesla V100": Card((7, 0), {"fp32": 15.7, "fp16": 125, "int8": 62.8}, 900),
    "Tesla T4": Card((7, 5), {"fp32": 8.1, "fp16": 65, "int8": 130}, 320),
    "NVIDIA A100": Card((8, 0), {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624}, 1555),
    "NVIDIA A10": Card((8, 6), {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125, "int8": 250}, 600),
    "NVIDIA L4": Card((8, 9), {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "int8": 242}, 300),
    "NVIDIA H100": Card((9, 0), {"fp32": 67, "tf32": 495, "fp16": 990, "bf16": 990, "int8": 1979}, 3350),
    "NVIDIA H200": Card((9, 0), {"fp32": 67, "tf32": 495, "fp16": 990, "bf16": 990, "int8": 1979}, 4800),
    "NVIDIA B200": Card((10, 0), {"fp32": 75, "tf32": 1100, "fp16": 2250, "bf16": 2250, "int8": 4500}, 8000),
}
# PCIe boards of these have other rates than the SXM ones above; better no figure than a wrong one.
_OTHER_RATES = ("PCIe", "NVL", "A10G", "MIG")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device. `memory_bytes` is its total memory (0: unknown); `peaks` is empty for an unlisted device."""

    kind: Kind
    name: str
    index: int = 0
    capability: Capability | None = None
    memory_bytes: int = 0
    peaks: Mapping[Precision, float] = field(default_factory=dict)
    bandwidth: float | None = None
    """GB/s"""
    multiprocessors: int = 0
    """0: unknown."""

    @classmethod
    def cpu(cls, name: str = "CPU", memory_bytes: int = 0) -> DeviceProfile:
        return cls("cpu", name, memory_bytes=memory_bytes)

    @classmethod
    def cuda(cls, name: str, capability: Capability, memory_bytes: int = 0, index: int = 0) -> DeviceProfile:
        """A GPU as its driver describes it; rates are filled in where the card is listed."""
        card = _card(name, capability)
        peaks = card.peaks if card else {}
        bandwidth = card.bandwidth if card else None
        return cls("cuda", name, index, capability, memory_bytes, peaks, bandwidth)

    @classmethod
    def of_card(cls, name: str, memory_gib: int = 16) -> DeviceProfile:
        """A listed card without having one: for tests and for `what would you do on ...`."""
        return cls.cuda(name, CARDS[name].capability, memory_gib << 30)

    @property
    def tensor_cores(self) -> frozenset[Precision]:
        """The precisions whose matrix products run on tensor cores."""
        if self.capability is None or self.capability < (7, 0):
            return frozenset()
        found: set[Precision] = {"fp16"}
        if self.capability >= (7, 2):
            found.add("int8")
        if self.capability >= (8, 0):
            found |= {"bf16", "tf32"}
        return frozenset(found)

    @property
    def tf32(self) -> bool:
        return "tf32" in self.tensor_cores

    @property
    def attention(self) -> str:
        """The fastest kernel torch's scaled_dot_product_attention has here (sdp_utils.cpp), with a padding mask."""
        if self.capability is None:
            return "cpu flash"
        return "memory-efficient" if self.capability >= (5, 0) else "math"

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def padding_multiple(self, precision: Precision) -> int:
        """Sequence lengths are padded to this. Tensor cores are efficient when M, N, K are multiples of 16 bytes
        (NVIDIA, Matrix Multiplication Background guide); other units gain nothing from padding."""
        if precision not in self.tensor_cores:
            return 1
        return {"tf32": 4, "int8": 16}.get(precision, 8)

    def peak(self, precision: Precision) -> float | None:
        """Dense peak in TFLOP/s (INT8: TOPS); None where no published figure applies."""
        return self.peaks.get(precision)


def _card(name: str, capability: Capability) -> Card | None:
    if any(word in name for word in _OTHER_RATES):
        return None
    matches = [known for known in CARDS if _model_word(known) in name.replace("-", " ").split()]
    return next((CARDS[known] for known in matches if CARDS[known].capability == capability), None)


def _model_word(card: str) -> str:
    return card.rsplit(" ", 1)[-1]


# ---------------------------------------------------------------------------------------------------- which precision


BF16_PAYS = 1.3
"""Measured gain from which a CPU computes in bf16 by itself. With bf16 instructions it is about 2, else far below 1."""


def choose_precision(
    profile: DeviceProfile, requested: str = "auto", bf16_gain: Callable[[], float] | None = None
) -> tuple[Precision, str]:
    """The precision to compute in and the reason in words. Raises DeviceError for what cannot be had here.

    `bf16_gain` measures how many times as fast a CPU multiplies in bf16 as in fp32 (`backends/probe.py`); it is called
    only where that decides. Without it a CPU stays with fp32.
    """
    if requested == "auto":
        return _automatic(profile, bf16_gain)
    if requested not in PRECISIONS:
        raise DeviceError(f"precision {requested!r} is not one of auto, {', '.join(PRECISIONS)}")
    precision: Precision = requested
    refusal = _refusal(profile, precision)
    if refusal:
        raise DeviceError(f"precision {precision} cannot be used on {profile.name}: {refusal}")
    return precision, "asked for"


def _automatic(profile: DeviceProfile, bf16_gain: Callable[[], float] | None) -> tuple[Precision, str]:
    if profile.capability is None:
        return _automatic_on_cpu(bf16_gain)
    if "fp16" not in profile.tensor_cores:
        return "fp32", f"compute capability {_dotted(profile)} has no tensor cores"
    if not profile.tf32:
        return "fp16", f"compute capability {_dotted(profile)} has tensor cores for fp16, none for bf16 or tf32"
    return "fp16", "tensor cores; fp16 rounds finer than bf16, and rows that overflow are computed again in fp32"


def _automatic_on_cpu(bf16_gain: Callable[[], float] | None) -> tuple[Precision, str]:
    if bf16_gain is None:
        return "fp32", "a CPU; whether bf16 pays on it is measured when a model is loaded"
    gain = bf16_gain()
    if gain >= BF16_PAYS:
        return "bf16", f"bf16 products measured {gain:.2f} x as fast as fp32 on this CPU (taken from {BF16_PAYS} x on)"
    if gain == 0:
        return "fp32", "this torch has no bf16 products for this CPU"
    return "fp32", f"bf16 products measured {gain:.2f} x as fast as fp32 on this CPU (taken from {BF16_PAYS} x on)"


def _refusal(profile: DeviceProfile, precision: Precision) -> str | None:
    if profile.capability is None:
        return _refusal_on_cpu(precision)
    if precision == "int8":
        return "int8 is computed on CPUs only; use auto"
    if precision in ("tf32", "bf16") and precision not in profile.tensor_cores:
        better = "fp16" if "fp16" in profile.tensor_cores else "fp32"
        return f"it starts at compute capability 8.0, this is {_dotted(profile)}; use {better} or auto"
    if precision == "fp16" and profile.capability == (6, 1):
        return "its fp16 runs at 1/64 of the fp32 rate; use fp32 or auto"
    return None


def _refusal_on_cpu(precision: Precision) -> str | None:
    if precision in ("fp16", "tf32"):
        return f"CPUs have no fast {precision} matrix products; use fp32, bf16 or auto"
    return None  # whether int8 works here is tried when a model is loaded (`backends/quantising.py`)


def _dotted(profile: DeviceProfile) -> str:
    return ".".join(map(str, profile.capability or ()))


# ---------------------------------------------------------------------------------------------------- asking the device


def detect(device: str = "auto") -> DeviceProfile:
    """The profile of `auto` (a usable GPU, else the CPU), `cpu`, `cuda` or `cuda:N`. Raises DeviceError."""
    kind, index = _parse(device)
    if kind == "cpu":
        return _cpu()
    import torch

    if not torch.cuda.is_available():
        if device == "auto":
            return _cpu()
        raise DeviceError(f"device {device!r}: torch {torch.__version__} sees no CUDA device; {_why_no_cuda()}")
    if index >= torch.cuda.device_count():
        raise DeviceError(f"device {device!r}: there are only {torch.cuda.device_count()} CUDA devices, counted from 0")
    return _cuda(index)


def _parse(device: str) -> tuple[Kind, int]:
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return "cpu", 0
    if kind in ("auto", "cuda") and (not number or (kind == "cuda" and number.isdecimal())):
        return "cuda", int(number or 0)
    raise DeviceError(f"device {device!r} is not auto, cpu, cuda or cuda:N")


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return "this is a CPU build of torch: install the CUDA build, or use device cpu"
    return f"check nvidia-smi and the driver (CUDA {torch.version.cuda} builds), or use device cpu"


def _cuda(index: int) -> DeviceProfile:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    built_for = torch.cuda.get_arch_list()
    if not kernels_exist(built_for, capability):
        raise DeviceError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}, but this torch"
            f" {torch.__version__} was built for {', '.join(built_for)} only: install a build for it (docs/gpu.md)"
        )
    profile = DeviceProfile.cuda(properties.name, capability, properties.total_memory, index)
    return replace(profile, multiprocessors=properties.multi_processor_count)


def kernels_exist(built_for: Sequence[str], capability: Capability) -> bool:
    """Whether a torch built for these architectures (`sm_75`, `compute_90` ...) runs on the capability: a cubin of the
    same major and no higher minor version, or PTX of any lower one. No list says nothing: True."""
    if not built_for:
        return True
    for name in built_for:
        flavour, _, digits = name.rstrip("af").partition("_")
        architecture = (int(digits[:-1]), int(digits[-1]))
        same_major = architecture[0] == capability[0]
        if architecture <= capability and (same_major or flavour == "compute"):
            return True
    return False


def _cpu() -> DeviceProfile:
    return DeviceProfile.cpu(_cpu_name(), _cpu_memory())


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine() or "CPU"


def _cpu_memory() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """`cuda`: the version that it was built for; None for a build for the CPU (or another maker's cards)."""

    version: str
    cuda: str | None


def torch_build() -> TorchBuild | None:
    """The torch that is installed, read from its `version.py` without importing it, which takes seconds and fails where
    a CUDA library is missing. None when there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return TorchBuild("unknown", None)
    values: dict[str, object] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(value := getattr(node, "value", None), ast.Constant):
            values[target.id] = value.value
    cuda = values.get("cuda")
    return TorchBuild(str(values.get("__version__", "unknown")), cuda if isinstance(cuda, str) else None)


def allow_tf32(profile: DeviceProfile, precision: Precision) -> bool:
    """Switch TF32 on, once, when it was asked for and exists; says whether it did. Never read back through torch:
    mixing its old and new switches raises RuntimeError from torch 2.9 on."""
    if precision != "tf32" or not profile.tf32:
        return False
    import torch

    torch.set_float32_matmul_precision("high")
    return True
