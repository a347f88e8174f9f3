"""ONNX Runtime on this machine: installed versions, execution providers for CPU, CUDA and TensorRT, and sessions."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from connector.extras import install_command

from ..backends import DeviceUnavailable
from ..backends.onnx import MakeSession, Session, make_session
from ..device import DeviceError, DeviceProfile, Precision, choose_precision, detect
from ..memory import MOST_TOKENS, MemoryLimits, ModelShape, T4MemoryManager
from .graph import ATTENTION_MASK, INPUT_IDS, GraphPrecision

Runtime = Literal["tensorrt", "cuda", "cpu"]
# For `onnxruntime.InferenceSession(providers=[...])`: the first provider that supports a node computes it.
Provider = tuple[str, dict[str, bool | int | str]]

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"

TENSORRT_MAJOR = 10  # onnxruntime-gpu 1.31 links libnvinfer.so.10. microsoft/onnxruntime#32278.
# onnxruntime-gpu 1.31 is built with CUDA 13. NVIDIA, CUDA Compatibility: 13.x needs driver 580.
DRIVER_FLOOR = 580
LEAST_CAPABILITY = (7, 5)  # CUDA 13 and TensorRT from 10.5 on support no older card
USUAL_TOKENS = 128  # TensorRT optimises its kernels for this length


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of TensorRT's builder. `workspace_mb`: memory for kernels; `optimization_level`: 0 (fast to build) to 5
    (fast to run)."""

    workspace_mb: int = 4096
    optimization_level: int = 3


@dataclass(frozen=True, slots=True)
class Shapes:
    """The largest rectangle of an engine, which also takes all smaller ones.

    Only one range is built, because ONNX Runtime uses only the first (microsoft/onnxruntime#31624). A shape outside it
    would rebuild the engine, which takes minutes.
    """

    texts: int
    tokens: int

    def options(self) -> dict[str, bool | int | str]:
        usual = f"{self.texts}x{min(self.tokens, USUAL_TOKENS)}"
        rectangles = {"min": "1x1", "opt": usual, "max": f"{self.texts}x{self.tokens}"}
        return {
            f"trt_profile_{name}_shapes": ",".join(f"{given}:{shape}" for given in (INPUT_IDS, ATTENTION_MASK))
            for name, shape in rectangles.items()
        }


@dataclass(frozen=True, slots=True)
class Installed:
    """Installed versions; None: not installed or unknown. `available`: ONNX Runtime's providers."""

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
        # NVIDIA's names for the TensorRT distribution, newest CUDA first.
        names = [f"tensorrt{cuda}{kind}" for cuda in ("-cu13", "-cu12", "") for kind in ("-libs", "_libs", "")]
        tensorrt = next(filter(None, map(_version, names)), None)
        return cls(version, _version("onnx"), tensorrt, driver, available)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def choose_runtime(profile: DeviceProfile, installed: Installed) -> tuple[Runtime, str]:
    """Return the best runtime for this device, and the reason; `cpu` also for a card that ONNX Runtime cannot use."""
    if profile.kind == "cpu":
        return "cpu", "ONNX Runtime on the CPU"
    install = install_command("tensorrt", index="https://pypi.nvidia.com")
    ours = f"onnxruntime {installed.onnxruntime}"
    if installed.onnxruntime is None:
        return "cpu", f"ONNX Runtime is not installed: {install_command('onnx')}"
    if CUDA not in installed.available:
        both = "both packages contain the same module, so only one may be installed"
        return "cpu", f"{ours} is the build for CPUs: uninstall it, then {install} ({both})"
    if profile.capability is not None and profile.capability < LEAST_CAPABILITY:
        has, wanted = (".".join(map(str, each)) for each in (profile.capability, LEAST_CAPABILITY))
        return "cpu", f"{profile.name} has compute capability {has}; onnxruntime-gpu and TensorRT begin at {wanted}"
    if installed.driver is not None and _major(installed.driver) < DRIVER_FLOOR:
        needed = f"{DRIVER_FLOOR} or newer is needed"
        return "cpu", f"driver {installed.driver} is too old for {ours} (CUDA 13): {needed}"
    missing = None
    if TENSORRT not in installed.available:
        missing = f"{ours} was built without TensorRT: {install}"
    elif installed.tensorrt is None:
        missing = f"TensorRT is not installed: {install}"
    elif _major(installed.tensorrt) != TENSORRT_MAJOR:
        wanted = f"pip install 'tensorrt-cu13=={TENSORRT_MAJOR}.16.*' --extra-index-url https://pypi.nvidia.com"
        missing = f"TensorRT {installed.tensorrt} is installed, but {ours} links TensorRT {TENSORRT_MAJOR}: {wanted}"
    if missing is not None:
        return "cuda", f"ONNX Runtime on CUDA, without TensorRT: {missing}"
    return "tensorrt", f"TensorRT {installed.tensorrt} in ONNX Runtime"


def _major(version: str) -> int:
    first = version.split(".", 1)[0]
    return int(first) if first.isdecimal() else 0


def preload(runtime: Runtime) -> None:
    """Load CUDA, cuDNN and TensorRT from pip's packages, which are on no library path, so that providers find them.
    Failures appear when a session is created."""
    if runtime == "cpu":
        return
    onnxruntime = importlib.import_module("onnxruntime")
    onnxruntime.preload_dlls()
    if runtime == "tensorrt":
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module("tensorrt")  # loads tensorrt_libs/*.so


@dataclass(frozen=True, slots=True)
class Site:
    """A device and its runtime, with the `reason` for the choice. `threads`: of ONNX Runtime on a CPU; `memory_limit`:
    of CUDA's arena in bytes, 0: none."""

    profile: DeviceProfile
    runtime: Runtime
    installed: Installed
    reason: str = ""
    build: BuildOptions = field(default_factory=BuildOptions)
    threads: int | None = None
    memory_limit: int = 0
    make: MakeSession = make_session

    def session(self, graph: Path) -> Session:
        """Create a session on CUDA or the CPU."""
        preload(self.runtime)
        return self.make(graph, self._providers(), self.threads)

    def tensorrt_session(self, graph: Path, precision: Precision, shapes: Shapes, engine: Path) -> Session:
        """Create a session on TensorRT, which stores its engine in the folder `engine` and kernel timings in the
        parent. int8 needs a graph with Q/DQ; other layers compute in fp16."""
        preload(self.runtime)
        half = precision in ("fp16", "int8") and "fp16" in self.profile.tensor_cores
        # ONNX Runtime, "TensorRT Execution Provider".
        options: dict[str, bool | int | str] = {
            "device_id": self.profile.index,
            "trt_fp16_enable": half,
            "trt_int8_enable": precision == "int8",
            "trt_layer_norm_fp32_fallback": half,
            "trt_max_workspace_size": self.build.workspace_mb << 20,
            "trt_builder_optimization_level": self.build.optimization_level,
            "trt_engine_cache_enable": True,
            "trt_engine_cache_path": str(engine),
            "trt_timing_cache_enable": True,
            "trt_timing_cache_path": str(engine.parent),
        }
        return self.make(graph, [(TENSORRT, options | shapes.options()), *self._providers()], self.threads)

    def _providers(self) -> list[Provider]:
        if self.runtime == "cpu":
            return [(CPU, {})]
        # TF32 is off, so that fp32 is exact. ONNX Runtime, "CUDA Execution Provider".
        options: dict[str, bool | int | str] = {
            "device_id": self.profile.index,
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": 0,
        }
        if self.memory_limit:
            options["gpu_mem_limit"] = self.memory_limit
        return [(CUDA, options), (CPU, {})]

    def card(self) -> dict[str, str | int | float | None]:
        """Return the card, driver and libraries, on which verdicts and engines depend."""
        capability = None if self.profile.capability is None else ".".join(map(str, self.profile.capability))
        versions = asdict(self.installed)
        del versions["available"]
        return {"gpu": self.profile.name, "capability": capability, "runtime": self.runtime, **versions}

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

    def shapes(self, shape: ModelShape, precision: Precision, limits: MemoryLimits) -> Shapes:
        """Plan by the card's total memory: with free memory, each start could need another engine."""
        budget = T4MemoryManager(self.profile, limits).plan_for(shape, precision)
        whole = min(1 << (budget.bit_length() - 1), MOST_TOKENS)
        return Shapes(max(1, whole // shape.max_tokens), shape.max_tokens)


def find_site(
    device: str = "auto",
    build: BuildOptions | None = None,
    limits: MemoryLimits | None = None,
    threads: int | None = None,
) -> Site:
    """Find device and runtime. Raises DeviceUnavailable without ONNX Runtime, and for an unknown device."""
    installed = Installed.found()
    if installed.onnxruntime is None:
        raise DeviceUnavailable(f"ONNX Runtime is not installed: {install_command('onnx')}")
    try:
        profile = detect(device)
    except DeviceError as error:
        raise DeviceUnavailable(str(error)) from error
    runtime, reason = choose_runtime(profile, installed)
    allowed = int(profile.memory_bytes * (limits or MemoryLimits()).fraction) if profile.kind == "cuda" else 0
    return Site(profile, runtime, installed, reason, build or BuildOptions(), threads, allowed)
