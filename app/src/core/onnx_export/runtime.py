"""ONNX Runtime on this machine: execution providers and their options for CPU, CUDA and TensorRT, what is installed,
and the `Site` that creates sessions.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from connector.extras import install_command

from ..backends import DeviceUnavailable
from ..backends.onnx import MakeSession, Session, make_session
from ..device import DeviceError, DeviceProfile, Precision, choose_precision, detect
from ..memory import MOST_TOKENS, MemoryLimits, ModelShape, T4MemoryManager
from .graph import GraphPrecision

Value = bool | int | str
# As `onnxruntime.InferenceSession(providers=[...])` takes them: the first that can compute a node does.
Provider = tuple[str, dict[str, Value]]

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
INPUTS = ("input_ids", "attention_mask")

TENSORRT_MAJOR = 10  # onnxruntime-gpu 1.31 links libnvinfer.so.10. microsoft/onnxruntime#32278.
# onnxruntime-gpu 1.31 is built with CUDA 13. NVIDIA, CUDA Compatibility: 13.x needs driver 580.
DRIVER_FLOOR = 580
LEAST_CAPABILITY = (7, 5)  # CUDA 13 and TensorRT from 10.5 on know no older card
USUAL_TOKENS = 128  # the length of text that TensorRT picks its kernels for


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How TensorRT builds. `workspace_mb`: memory for trying kernels and computing. `optimization_level`, 0 to 5: how
    long it searches for fast kernels."""

    workspace_mb: int = 4096
    optimization_level: int = 3

    def __post_init__(self) -> None:
        if self.workspace_mb < 1:
            raise ValueError(f"workspace_mb must be at least 1, not {self.workspace_mb}")
        if not 0 <= self.optimization_level <= 5:
            raise ValueError(f"optimization_level must be 0 to 5, not {self.optimization_level}")


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Texts, and tokens of each."""

    texts: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.texts}x{self.tokens}"


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """An engine is built for all rectangles from `least` to `most`, with kernels chosen for `usual`.

    There is one profile only: ONNX Runtime always uses the first (microsoft/onnxruntime#31624), and a shape outside it
    rebuilds the engine, which takes minutes.
    """

    least: Rectangle
    usual: Rectangle
    most: Rectangle

    @classmethod
    def planned(cls, token_budget: int, max_tokens: int) -> ShapeProfile:
        """Plan shapes whose largest has about the area of the budget, so that TensorRT's memory for it fits.
        `max_tokens` includes special tokens."""
        texts = max(1, min(token_budget, MOST_TOKENS) // max_tokens)
        return cls(Rectangle(1, 1), Rectangle(texts, min(max_tokens, USUAL_TOKENS)), Rectangle(texts, max_tokens))

    def options(self) -> dict[str, Value]:
        return {
            f"trt_profile_{name}_shapes": ",".join(f"{given}:{rectangle}" for given in INPUTS)
            for name, rectangle in (("min", self.least), ("opt", self.usual), ("max", self.most))
        }


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """Where TensorRT keeps its engines and its timings of kernels."""

    engines: str
    timings: str


# Names and meanings: ONNX Runtime, "TensorRT Execution Provider", "CUDA Execution Provider"; bools as True and False.


def cpu_provider() -> Provider:
    return CPU, {}


def cuda_provider(profile: DeviceProfile, memory_limit: int = 0) -> Provider:
    """Return the CUDA provider. `memory_limit` in bytes, 0: none. TF32 is off, so that fp32 means fp32."""
    options: dict[str, Value] = {
        "device_id": profile.index,
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": 0,
    }
    if memory_limit:
        options["gpu_mem_limit"] = memory_limit
    return CUDA, options


def tensorrt_provider(
    profile: DeviceProfile,
    precision: Precision,
    shapes: ShapeProfile,
    folder: EngineFolder,
    build: BuildOptions | None = None,
) -> Provider:
    """Return the TensorRT provider. int8 needs a graph with Q/DQ; between its 8-bit layers it computes in fp16."""
    build = build or BuildOptions()
    half = precision in ("fp16", "int8") and "fp16" in profile.tensor_cores
    options: dict[str, Value] = {
        "device_id": profile.index,
        "trt_fp16_enable": half,
        "trt_int8_enable": precision == "int8",
        "trt_layer_norm_fp32_fallback": half,
        "trt_max_workspace_size": build.workspace_mb << 20,
        "trt_builder_optimization_level": build.optimization_level,
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": folder.engines,
        "trt_timing_cache_enable": True,
        "trt_timing_cache_path": folder.timings,
    }
    return TENSORRT, options | shapes.options()


# ---------------------------------------------------------------------------------------------------- what is installed

Runtime = Literal["tensorrt", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Installed:
    """Installed versions; None: not installed or unknown. `available`: the providers that ONNX Runtime was built
    with."""

    onnxruntime: str | None = None
    onnx: str | None = None
    tensorrt: str | None = None
    driver: str | None = None
    available: Sequence[str] = ()

    @classmethod
    def found(cls) -> Installed:
        """Ask the packages and the driver. Imports onnxruntime if it is installed."""
        from ..nvml import snapshot

        try:
            import onnxruntime

            version, available = onnxruntime.__version__, onnxruntime.get_available_providers()
        except ImportError:
            version, available = None, []
        driver = snapshot().driver_version if CUDA in available else None
        return cls(version, _version("onnx"), tensorrt_version(), driver, available)

    def as_dependencies(self) -> dict[str, str | None]:
        return {
            "onnx": self.onnx,
            "onnxruntime": self.onnxruntime,
            "tensorrt": self.tensorrt,
            "driver": self.driver,
        }


def tensorrt_version() -> str | None:
    """Return the version of TensorRT's libraries, by NVIDIA's distribution names, newest CUDA first."""
    names = [f"tensorrt{cuda}{kind}" for cuda in ("-cu13", "-cu12", "") for kind in ("-libs", "_libs", "")]
    return next((version for name in names if (version := _version(name)) is not None), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install_tensorrt() -> str:
    return install_command("tensorrt", index="https://pypi.nvidia.com")


def refusal_of_onnxruntime(installed: Installed) -> str | None:
    """Return why no graph can run at all, or None."""
    if installed.onnxruntime is None:
        return f"ONNX Runtime is not installed: {install_command('onnx')}"
    return None


def refusal_of_cuda(installed: Installed, profile: DeviceProfile) -> str | None:
    """Return why this ONNX Runtime cannot use the card, or None."""
    if (missing := refusal_of_onnxruntime(installed)) is not None:
        return missing
    if CUDA not in installed.available:
        return (
            f"onnxruntime {installed.onnxruntime} is the build for CPUs: uninstall it, then {_install_tensorrt()}"
            " (both packages contain the same module, so only one may be installed)"
        )
    if profile.capability is not None and profile.capability < LEAST_CAPABILITY:
        has, wanted = (".".join(map(str, each)) for each in (profile.capability, LEAST_CAPABILITY))
        return f"{profile.name} has compute capability {has}; onnxruntime-gpu and TensorRT begin at {wanted}"
    return _refusal_of_driver(installed)


def refusal_of_tensorrt(installed: Installed, profile: DeviceProfile) -> str | None:
    """Return why this ONNX Runtime cannot use TensorRT on the card, or None."""
    if (missing := refusal_of_cuda(installed, profile)) is not None:
        return missing
    if TENSORRT not in installed.available:
        return f"onnxruntime {installed.onnxruntime} was built without TensorRT: {_install_tensorrt()}"
    if installed.tensorrt is None:
        return f"TensorRT is not installed: {_install_tensorrt()}"
    major = _major(installed.tensorrt)
    if major != TENSORRT_MAJOR:
        return (
            f"TensorRT {installed.tensorrt} is installed, but onnxruntime {installed.onnxruntime} links TensorRT"
            f" {TENSORRT_MAJOR} (libnvinfer.so.{TENSORRT_MAJOR}): pip install 'tensorrt-cu13==10.16.*'"
            " --extra-index-url https://pypi.nvidia.com"
        )
    return None


def _refusal_of_driver(installed: Installed) -> str | None:
    if installed.driver is None or _major(installed.driver) >= DRIVER_FLOOR:
        return None  # unknown without NVML; creating the session will show it
    return (
        f"driver {installed.driver} is too old for onnxruntime {installed.onnxruntime} (CUDA 13): {DRIVER_FLOOR} or"
        " newer is needed"
    )


def _major(version: str) -> int:
    first = version.split(".", 1)[0]
    return int(first) if first.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class ChosenRuntime:
    """`reason`: why no better runtime was chosen."""

    runtime: Runtime
    reason: str


def choose_runtime(profile: DeviceProfile, installed: Installed) -> ChosenRuntime:
    """Return the best runtime for this device: `cpu` also for a card that ONNX Runtime cannot use."""
    if profile.kind == "cpu":
        return ChosenRuntime("cpu", "ONNX Runtime on the CPU")
    if (missing := refusal_of_cuda(installed, profile)) is not None:
        return ChosenRuntime("cpu", missing)
    if (missing := refusal_of_tensorrt(installed, profile)) is not None:
        return ChosenRuntime("cuda", f"ONNX Runtime on CUDA, without TensorRT: {missing}")
    return ChosenRuntime("tensorrt", f"TensorRT {installed.tensorrt} in ONNX Runtime")


def preload(runtime: Runtime) -> None:
    """Load CUDA, cuDNN and TensorRT from pip's packages, which no library path contains; the providers then find them
    by name. Failures show when a session is created."""
    if runtime == "cpu":
        return
    onnxruntime = importlib.import_module("onnxruntime")
    onnxruntime.preload_dlls()
    if runtime == "tensorrt":
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module("tensorrt")  # loads tensorrt_libs/*.so


@dataclass(frozen=True, slots=True)
class Site:
    """A device and the runtime for it. `threads`: ONNX Runtime's on a CPU. `memory_limit`: bytes for CUDA's arena."""

    profile: DeviceProfile
    runtime: Runtime
    installed: Installed
    build: BuildOptions = field(default_factory=BuildOptions)
    threads: int | None = None
    memory_limit: int = 0
    make: MakeSession = make_session

    def plain(self, graph: bytes | Path) -> Session:
        """Create a session on CUDA or the CPU."""
        preload(self.runtime)
        return self.make(graph, self._below(), self.threads)

    def _below(self) -> list[Provider]:
        """Return the providers for nodes that TensorRT does not take."""
        on_card = self.runtime != "cpu"
        return [*([cuda_provider(self.profile, self.memory_limit)] if on_card else []), cpu_provider()]

    def through_tensorrt(
        self, graph: Path, precision: Precision, shapes: ShapeProfile, folder: EngineFolder
    ) -> Session:
        preload(self.runtime)
        first = tensorrt_provider(self.profile, precision, shapes, folder, self.build)
        return self.make(graph, [first, *self._below()], self.threads)

    def card(self) -> dict[str, str | int | float | None]:
        """Return what an engine depends on: card, driver and libraries."""
        capability = None if self.profile.capability is None else ".".join(map(str, self.profile.capability))
        return {"gpu": self.profile.name, "capability": capability, **self.installed.as_dependencies()}

    def float_precision(self, requested: str) -> tuple[GraphPrecision, str]:
        """Return the precision for `requested` (int8 counts as auto) and the reason. Raises DeviceUnavailable."""
        asked = "auto" if requested == "int8" else requested
        if asked not in ("auto", "fp32", *(["fp16"] if self.runtime != "cpu" else [])):
            where = "on a CPU in fp32 or int8" if self.runtime == "cpu" else "on a card in fp32, fp16 or int8"
            raise DeviceUnavailable(f"precision {asked}: ONNX Runtime computes {where} here; use auto")
        if self.runtime == "cpu":
            return "fp32", "ONNX Runtime on a CPU" if asked == "auto" else "asked for"
        try:
            chosen, reason = choose_precision(self.profile, asked)
        except DeviceError as error:
            raise DeviceUnavailable(str(error)) from error
        return ("fp16" if chosen == "fp16" else "fp32"), reason

    def shapes(self, shape: ModelShape, precision: Precision, limits: MemoryLimits) -> ShapeProfile:
        """Plan by the card's total memory: by free memory, each start would need another engine."""
        budget = T4MemoryManager(self.profile, limits).plan_for(shape, precision)
        whole = 1 << (budget.bit_length() - 1)
        return ShapeProfile.planned(whole, shape.max_tokens)


@dataclass(frozen=True, slots=True)
class Found:
    """A site, and why it uses this runtime."""

    site: Site
    reason: str


def find_site(
    device: str = "auto",
    build: BuildOptions | None = None,
    limits: MemoryLimits | None = None,
    threads: int | None = None,
) -> Found:
    """Find device and runtime. Raises DeviceUnavailable without ONNX Runtime, and for an unknown device."""
    installed = Installed.found()
    if (missing := refusal_of_onnxruntime(installed)) is not None:
        raise DeviceUnavailable(missing)
    try:
        profile = detect(device)
    except DeviceError as error:
        raise DeviceUnavailable(str(error)) from error
    chosen = choose_runtime(profile, installed)
    allowed = int(profile.memory_bytes * (limits or MemoryLimits()).fraction) if profile.kind == "cuda" else 0
    site = Site(profile, chosen.runtime, installed, build or BuildOptions(), threads, allowed)
    return Found(site, chosen.reason)
