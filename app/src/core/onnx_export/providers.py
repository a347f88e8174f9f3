"""ONNX Runtime's execution providers: with which options a graph runs on a CPU, on CUDA and through TensorRT, in which
shapes, and whether what is installed can do it. Knows options and versions; neither graphs nor texts.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from connector.extras import install_command

from ..device import DeviceProfile, Precision
from ..memory import MOST_TOKENS

Value = bool | int | str
Provider = tuple[str, dict[str, Value]]
"""As `onnxruntime.InferenceSession(providers=[...])` takes them: the first that can compute a node does."""

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
INPUTS = ("input_ids", "attention_mask")

TENSORRT_MAJOR = 10
"""onnxruntime-gpu 1.31 links libnvinfer.so.10. microsoft/onnxruntime#32278."""
DRIVER_FLOOR = 580
"""onnxruntime-gpu 1.31 is built with CUDA 13. NVIDIA, CUDA Compatibility: 13.x needs driver 580."""
LEAST_CAPABILITY = (7, 5)
"""CUDA 13 and TensorRT from 10.5 on know no older card."""
USUAL_TOKENS = 128
"""The length of text that TensorRT picks its kernels for."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How TensorRT builds. `workspace_mb`: memory for trying kernels and for computing; `optimization_level` 0 to 5:
    how long it looks for the fastest ones."""

    workspace_mb: int = 4096
    optimization_level: int = 3

    def __post_init__(self) -> None:
        if self.workspace_mb < 1:
            raise ValueError(f"a workspace of {self.workspace_mb} MB is not possible")
        if not 0 <= self.optimization_level <= 5:
            raise ValueError(f"optimization level {self.optimization_level} is not one of 0 to 5")


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Texts and tokens of each."""

    texts: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.texts}x{self.tokens}"


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """What an engine is built for: every rectangle between `least` and `most`, kernels picked for `usual`.

    One profile only: ONNX Runtime computes with the first whatever the shape (microsoft/onnxruntime#31624), and a shape
    outside of it builds the engine anew, for minutes.
    """

    least: Rectangle
    usual: Rectangle
    most: Rectangle

    @classmethod
    def planned(cls, token_budget: int, max_tokens: int) -> ShapeProfile:
        """`most` has about the area of the budget, so that what TensorRT sets aside for it fits into memory: of shorter
        texts a batch takes fewer than the budget allows. `max_tokens`: special ones included; a model has no positions
        beyond them."""
        texts = max(1, min(token_budget, MOST_TOKENS) // max_tokens)
        return cls(Rectangle(1, 1), Rectangle(texts, min(max_tokens, USUAL_TOKENS)), Rectangle(texts, max_tokens))

    def options(self) -> dict[str, Value]:
        return {
            f"trt_profile_{name}_shapes": ",".join(f"{given}:{rectangle}" for given in INPUTS)
            for name, rectangle in (("min", self.least), ("opt", self.usual), ("max", self.most))
        }


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """Where TensorRT keeps its engines and what it measured of kernels."""

    engines: str
    timings: str


# Names and meanings: ONNX Runtime, "TensorRT Execution Provider", "CUDA Execution Provider"; bools as True and False.


def cpu_provider() -> Provider:
    return CPU, {}


def cuda_provider(profile: DeviceProfile, memory_limit: int = 0) -> Provider:
    """`memory_limit` in bytes; 0: none. fp32 stays fp32: the provider would take TF32 where the card has it."""
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
    """int8 needs a graph with Q/DQ in it and no calibration table; what is between 8-bit layers is in fp16 then."""
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
    """Versions here; None: not installed, or not told. `available`: the providers that ONNX Runtime was built with."""

    onnxruntime: str | None = None
    onnx: str | None = None
    tensorrt: str | None = None
    driver: str | None = None
    available: Sequence[str] = ()

    @classmethod
    def found(cls) -> Installed:
        """Asks the packages and the driver. Imports onnxruntime where there is one."""
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
    """Of the libraries, by the names under which NVIDIA publishes them; the oldest CUDA last."""
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
    """Why no graph can be computed at all."""
    if installed.onnxruntime is None:
        return f"ONNX Runtime is not installed: {install_command('onnx')}"
    return None


def refusal_of_cuda(installed: Installed, profile: DeviceProfile) -> str | None:
    """Why this ONNX Runtime cannot compute on the card."""
    if (missing := refusal_of_onnxruntime(installed)) is not None:
        return missing
    if CUDA not in installed.available:
        return (
            f"onnxruntime {installed.onnxruntime} is the build for CPUs: uninstall it, then {_install_tensorrt()}"
            " (both packages bring the same module, so that only one may be there)"
        )
    if profile.capability is not None and profile.capability < LEAST_CAPABILITY:
        has, wanted = (".".join(map(str, each)) for each in (profile.capability, LEAST_CAPABILITY))
        return f"{profile.name} has compute capability {has}; onnxruntime-gpu and TensorRT begin at {wanted}"
    return _refusal_of_driver(installed)


def refusal_of_tensorrt(installed: Installed, profile: DeviceProfile) -> str | None:
    """Why TensorRT cannot be used with this ONNX Runtime on the card."""
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
        return None  # without NVML nobody can tell; the session will
    return (
        f"driver {installed.driver} is too old for onnxruntime {installed.onnxruntime} (CUDA 13): {DRIVER_FLOOR} or"
        " newer is needed"
    )


def _major(version: str) -> int:
    first = version.split(".", 1)[0]
    return int(first) if first.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class ChosenRuntime:
    """`reason`: why this way and no better one."""

    runtime: Runtime
    reason: str


def choose_runtime(profile: DeviceProfile, installed: Installed) -> ChosenRuntime:
    """The best way for this device. For a card that ONNX Runtime cannot use at all the answer is `cpu`, which the
    caller will hardly want there."""
    if profile.kind == "cpu":
        return ChosenRuntime("cpu", "ONNX Runtime on the CPU")
    if (missing := refusal_of_cuda(installed, profile)) is not None:
        return ChosenRuntime("cpu", missing)
    if (missing := refusal_of_tensorrt(installed, profile)) is not None:
        return ChosenRuntime("cuda", f"ONNX Runtime on CUDA, without TensorRT: {missing}")
    return ChosenRuntime("tensorrt", f"TensorRT {installed.tensorrt} in ONNX Runtime")


def preload(runtime: Runtime) -> None:
    """Load what pip has installed of CUDA, cuDNN and TensorRT, where no library path leads to it: the providers look
    for it by name and find what is loaded already. What cannot be loaded shows when the session is made."""
    if runtime == "cpu":
        return
    onnxruntime = importlib.import_module("onnxruntime")
    onnxruntime.preload_dlls()
    if runtime == "tensorrt":
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module("tensorrt")  # loads tensorrt_libs/*.so
