"""Choose and load the graph to serve: the calibrated one if its verdict on this machine passes, else the float graph.
ONNX Runtime runs it on CUDA or through TensorRT, whose engines are cached. `path_reason` explains the
choice.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from connector.extras import install_command

from ..artifacts import FLOAT, INT8, Dependencies, Entry
from ..backends import DeviceUnavailable, ModelUnsupported, OutOfMemory
from ..backends.onnx import OUTPUT, OnnxRuntimeBackend, loading_errors_mapped, make_session
from ..backends.torch.backend import computing
from ..calibration import ModelCalibration
from ..device import DeviceProfile, Precision, choose_precision
from ..memory import MOST_TOKENS, MemoryLimits, T4MemoryManager
from ..nvml import snapshot
from . import needs
from .graph import ATTENTION_MASK, INPUT_IDS, GraphPrecision, build_graph
from .quantise import quantise

if TYPE_CHECKING:
    from ..backends.torch.backend import EngineOptions

log = logging.getLogger(__name__)

Runtime = Literal["tensorrt", "cuda", "cpu"]

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
LEAST_CAPABILITY = (7, 5)  # CUDA 13 (onnxruntime-gpu 1.31) and TensorRT since 10.5 do not support older cards
USUAL_TOKENS = 128  # TensorRT optimises its kernels for this length


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """`enabled`: use graphs for all precisions that have them, else only for int8. TensorRT's builder: `workspace_mb`
    for kernels; `optimization_level` 0 (fast to build) to 5 (fast to run)."""

    cache: Path
    enabled: bool = False
    workspace_mb: int = 4096
    optimization_level: int = 3


class NotAsGraph(DeviceUnavailable):
    """No graph of this model can run here; the message says why and what to do."""


def load_backend(wanted: EngineOptions, options: GraphOptions, limits: MemoryLimits) -> OnnxRuntimeBackend:
    """On a card: for int8 or auto, load the calibrated graph if its verdict passes. Otherwise load the float graph, but
    only with `enabled`. Raises NotAsGraph if neither can be used, ModelNotFound,
    WeightsMismatch."""
    try:
        serving = GraphServing(wanted, options, limits)
        if serving.runtime == "cpu":
            raise NotAsGraph(serving.reason)
        refusal = f"precision {wanted.precision} was requested"
        name, _, digest = wanted.precision.partition("-")
        if name in ("auto", "int8"):
            try:
                graph = serving.accepted(digest)
            except DeviceUnavailable as refused:
                refusal = f"not in int8: {refused}"
            else:
                return serving.load(graph)
        if digest or not options.enabled:
            raise NotAsGraph(refusal)
        log.info("%s runs as a float graph; %s", serving.folder.name, refusal)
        return serving.float_backend(wanted.precision, refusal)
    except NotAsGraph:
        raise
    except (DeviceUnavailable, ModelUnsupported, OutOfMemory) as error:
        raise NotAsGraph(str(error)) from error


def choose_runtime(profile: DeviceProfile, tensorrt: str | None, available: Sequence[str]) -> tuple[Runtime, str]:
    """Return the best runtime for this device, and the reason; `cpu` also for a card that ONNX Runtime cannot use.

    `tensorrt`: installed version; `available`: ONNX Runtime's providers.
    """
    if profile.kind == "cpu":
        return "cpu", "ONNX Runtime on the CPU"
    install = install_command("tensorrt", index="https://pypi.nvidia.com")
    if CUDA not in available:
        both = "both packages contain the same module, so only one may be installed"
        return "cpu", f"onnxruntime is a CPU-only build: uninstall it, then {install} ({both})"
    if profile.capability is not None and profile.capability < LEAST_CAPABILITY:
        has = f"{profile.name} has compute capability {profile.dotted_capability}"
        return "cpu", f"{has}; onnxruntime-gpu and TensorRT need at least 7.5"
    if TENSORRT not in available or tensorrt is None:
        return "cuda", f"ONNX Runtime on CUDA, without TensorRT, which is not installed: {install}"
    if tensorrt.partition(".")[0] != "10":  # onnxruntime-gpu 1.31 links libnvinfer.so.10; microsoft/onnxruntime#32278
        return "cuda", f"ONNX Runtime on CUDA, without TensorRT: it must be version 10, not {tensorrt}: {install}"
    return "tensorrt", f"TensorRT {tensorrt} in ONNX Runtime"


def _version(*distributions: str) -> str | None:
    """Return the version of the first installed distribution, or None."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def preload(runtime: Runtime) -> None:
    """Load CUDA, cuDNN and TensorRT from pip's packages, so that providers find them: they are not on the library
    path. Failures appear when a session is created."""
    if runtime != "cpu":
        importlib.import_module("onnxruntime").preload_dlls()
    if runtime == "tensorrt":
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module("tensorrt")  # loads tensorrt_libs/*.so


class GraphServing(ModelCalibration):
    """Creates backends and their sessions for the graphs of one model on one device."""

    kind = INT8
    runtime: Runtime

    def __init__(self, wanted: EngineOptions, options: GraphOptions, limits: MemoryLimits) -> None:
        """Find model, device and runtime. Raises also DeviceUnavailable if ONNX Runtime is missing."""
        super().__init__(wanted, options.cache)
        needs("onnxruntime")
        import onnxruntime

        self._options, self._limits = options, limits
        tensorrt = _version("tensorrt-cu13-libs", "tensorrt-cu13", "tensorrt-libs", "tensorrt")
        self.runtime, self.reason = choose_runtime(self.profile, tensorrt, onnxruntime.get_available_providers())
        # Verdicts and engines depend on these values.
        self._card: Dependencies = {
            "gpu": self.profile.name,
            "capability": self.profile.dotted_capability,
            "runtime": self.runtime,
            "onnxruntime": onnxruntime.__version__,
            "tensorrt": tensorrt,
            "driver": None if self.runtime == "cpu" else snapshot().driver_version,
        }
        self._model = {**self._model, "onnx": _version("onnx")}
        self.key = {**self._model, **self._card}

    def measure(self, texts: Sequence[str], before: Entry | None) -> tuple[bytes, dict[str, Any]]:
        """Return a graph, calibrated on these texts, and figures."""
        made, report = computing(self._wanted, lambda: quantise(self.folder, texts))
        return made.SerializeToString(), dict(report)

    def accepted(self, digest: str = "") -> Entry:
        if self.runtime == "cuda":
            raise DeviceUnavailable(f"8-bit graphs are not faster on CUDA without TensorRT; {self.reason}")
        return super().accepted(digest)

    def load(self, entry: Entry) -> OnnxRuntimeBackend:
        """Load an 8-bit graph. The engine's fingerprint contains the graph's hash: another quantiser version or
        processor may produce a different graph from the same texts."""
        return self._backend(entry, "int8", "requested", "calibrated", f"int8-{entry.sha256[:12]}")

    def float_backend(self, requested: str, reason: str = "") -> OnnxRuntimeBackend:
        """Load the float graph; `requested` int8 counts as auto. Raises DeviceUnavailable."""
        if requested not in ("auto", "int8", "fp32", "fp16"):
            raise DeviceUnavailable(f"precision {requested}: graphs compute in fp32, fp16 or int8; use auto")
        chosen, why = choose_precision(self.profile, "auto" if requested == "int8" else requested)
        precision: GraphPrecision = "fp16" if chosen == "fp16" else "fp32"
        return self._backend(self._float(precision), precision, why, reason)

    def _float(self, precision: GraphPrecision) -> Entry:
        depends = {**self._model, "precision": precision}
        graph = self.cache.find(FLOAT, depends)
        if graph is None:
            graph = self.cache.store(
                FLOAT, depends, build_graph(self.folder, precision=precision).SerializeToString(), {}
            )
        return graph

    def _backend(
        self, graph: Entry, precision: Precision, why: str, reason: str, variant: str = ""
    ) -> OnnxRuntimeBackend:
        """Return the backend. It computes overflowing rows in fp32 without TensorRT: they are too few for an engine."""
        preload(self.runtime)
        note, most = "; ".join(part for part in (self.reason, reason) if part), None
        if self.runtime == "tensorrt" and precision != "fp32":
            usual, engine, most = self._through_tensorrt(graph, precision)
            note += f"; {engine}"
        else:  # in fp32 TensorRT would use TF32
            usual = self._session(graph.graph)
        exact = (lambda: usual) if precision == "fp32" else (lambda: self._session(self._float("fp32").graph))
        model = self.folder, self._weights, self.profile
        return OnnxRuntimeBackend(*model, precision, why, usual, exact, note, most, variant)

    def _session(self, graph: Path, *first: tuple[str, dict[str, bool | int | str]]) -> Any:
        """Create a session that prefers the `first` providers to CUDA or the CPU. TF32 is off, so that fp32 is exact.
        Source: ONNX Runtime, "CUDA Execution Provider"."""
        cuda: dict[str, bool | int | str] = {
            "device_id": self.profile.index,
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": 0,
            "gpu_mem_limit": int(self.profile.memory_bytes * self._limits.fraction),
        }
        usual = [(CPU, {})] if self.runtime == "cpu" else [(CUDA, cuda), (CPU, {})]
        return make_session(graph, [*first, *usual], self._wanted.threads)

    def _through_tensorrt(self, graph: Entry, precision: Precision) -> tuple[Any, str, int]:
        """Return a session, a sentence about its engine, and its largest batch in texts. Building an engine takes
        minutes. A cached engine that does not load is rebuilt. Raises DeviceUnavailable, OutOfMemory.

        The engine accepts all rectangles up to a maximum, planned by the card's total memory: by free memory, each
        start could need another engine. Only one range is built, because ONNX Runtime uses only the first
        (microsoft/onnxruntime#31624); a shape outside it would rebuild the engine.
        """
        shape, build = self.folder.shape, self._options
        budget = T4MemoryManager(self.profile, self._limits).plan_for(shape, precision)
        texts = max(1, min(1 << (budget.bit_length() - 1), MOST_TOKENS) // shape.max_tokens)
        sizes = {"min": "1x1", "opt": f"{texts}x{min(shape.max_tokens, USUAL_TOKENS)}"}
        sizes["max"] = f"{texts}x{shape.max_tokens}"
        half = "fp16" in self.profile.tensor_cores
        # ONNX Runtime, "TensorRT Execution Provider". int8 needs a graph with Q/DQ; other layers compute in fp16.
        options: dict[str, bool | int | str] = {
            "device_id": self.profile.index,
            "trt_fp16_enable": half,
            "trt_int8_enable": precision == "int8",
            "trt_layer_norm_fp32_fallback": half,
            "trt_max_workspace_size": build.workspace_mb << 20,
            "trt_builder_optimization_level": build.optimization_level,
            "trt_engine_cache_enable": True,
            "trt_timing_cache_enable": True,
        }
        for name, size in sizes.items():
            options[f"trt_profile_{name}_shapes"] = f"{INPUT_IDS}:{size},{ATTENTION_MASK}:{size}"
        depends: Dependencies = {"model": self._weights, "graph": graph.sha256, **self._card, **options}
        while True:
            folder = self.cache.engine_folder(depends)
            options |= {"trt_engine_cache_path": str(folder), "trt_timing_cache_path": str(folder.parent)}
            cached, started = any(folder.iterdir()), time.perf_counter()
            try:
                session = self._session(graph.graph, (TENSORRT, options))
                with loading_errors_mapped():
                    for rectangle in ((1, 1), (texts, shape.max_tokens)):
                        ids = np.zeros(rectangle, np.int64)
                        session.run([OUTPUT], {INPUT_IDS: ids, ATTENTION_MASK: np.ones_like(ids)})
            except DeviceUnavailable as error:
                shutil.rmtree(folder, ignore_errors=True)
                if not cached:
                    raise
                log.warning("TensorRT's engine %s does not load and is rebuilt: %s", folder, error)
                continue
            seconds = time.perf_counter() - started
            origin = "its engine came from the cache" if cached else f"its engine was built in {seconds:.0f} s"
            return session, origin if any(folder.iterdir()) else "TensorRT runs no part of the graph", texts
