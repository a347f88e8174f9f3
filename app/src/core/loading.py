"""Load an engine: choose the backend for a model and a device.

torch and ONNX Runtime are imported only if the model needs them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .backends import Backend
from .backends.hashing import PREFIX as HASHING
from .backends.hashing import HashingBackend
from .device import DeviceError, detect
from .engine import EmbeddingEngine
from .memory import MemoryLimits
from .ranges import show_to_nvtx

if TYPE_CHECKING:
    from .backends.torch.backend import TorchBackend
    from .onnx_export.serving import GraphOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load an engine. `model`: a packaged name, a folder, a cached hub id, or hash:N.

    `precision`: auto fp32 tf32 fp16 bf16 int8; `device`: auto cpu cuda cuda:N. `memory_fraction` and `reserve_mb`
    bound the GPU memory used. `weights_sha256` and `revision` pin a model that is not packaged. `threads`: torch's
    CPU threads, for the whole process; None leaves them. `packed` False forces padded batches, for comparison. `onnx`:
    how the model runs in ONNX Runtime; None: it never does.

    On a card only: `overlap` launches a batch while the one before it computes, `pinned` copies by way of pinned
    memory, and `graphs` (auto, on, off) replays small batches from CUDA graphs; auto if that measures faster.
    `preallocate` computes one largest batch at loading, `clear_cache` frees memory after large batches,
    `cudnn_benchmark` lets cuDNN compare its convolutions, `profiling` shows the engine's steps as NVTX ranges (Nsight
    Systems). These four never affect vectors.
    """

    model: str = "all-MiniLM-L6-v2"
    precision: str = "auto"
    device: str = "auto"
    memory_fraction: float = 0.8
    reserve_mb: int = 512
    weights_sha256: str | None = None
    revision: str | None = None
    threads: int | None = None
    packed: bool = True
    overlap: bool = True
    pinned: bool = True
    graphs: str = "auto"
    profiling: bool = False
    onnx: GraphOptions | None = None
    preallocate: bool = False
    clear_cache: bool = False
    cudnn_benchmark: bool = False


def load_engine(options: EngineOptions) -> EmbeddingEngine:
    """Load a model. torch is imported only when the model needs it. Raises EngineError with what to do."""
    limits = MemoryLimits(options.memory_fraction, options.reserve_mb << 20)
    if options.model.startswith(HASHING):
        return EmbeddingEngine(HashingBackend(options.model), limits)
    backend = _backend(options, limits)
    if options.profiling and backend.profile.kind == "cuda":
        show_to_nvtx()
    try:
        engine = EmbeddingEngine(backend, limits)
        if options.preallocate:
            preallocate(engine)
    except BaseException:
        backend.close()
        raise
    return engine


def _backend(options: EngineOptions, limits: MemoryLimits) -> Backend:
    graphs = options.onnx
    if graphs is not None and (graphs.enabled or _int8_on_card(options)):
        return _as_graph(options, graphs, limits)
    return _in_torch(options)


def _in_torch(options: EngineOptions) -> TorchBackend:
    from .backends.torch.backend import TorchBackend, TorchOptions

    return TorchBackend.load(
        TorchOptions(
            model=options.model,
            precision=options.precision,
            device=options.device,
            threads=options.threads,
            weights_sha256=options.weights_sha256,
            revision=options.revision,
            packed=options.packed,
            overlap=options.overlap,
            pinned=options.pinned,
            graphs=options.graphs,
            cudnn_benchmark=options.cudnn_benchmark,
            clear_cache=options.clear_cache,
        )
    )


def _int8_on_card(options: EngineOptions) -> bool:
    """Whether int8 needs a graph: torch has no 8-bit layers on cards."""
    if options.precision != "int8":
        return False
    try:
        return detect(options.device).kind == "cuda"
    except DeviceError:
        return False  # loading raises this error, too


def _as_graph(options: EngineOptions, graphs: GraphOptions, limits: MemoryLimits) -> Backend:
    """Load the model as a graph; if that fails, in torch with a float precision (on a CPU with the requested one).

    The log and `path_reason` give the reason.
    """
    from .onnx_export.serving import NotAsGraph, load_backend

    try:
        return load_backend(options, graphs, limits)
    except NotAsGraph as refused:
        log.warning("%s is not computed as a graph in ONNX Runtime: %s", options.model, refused)
        backend = _in_torch(replace(options, precision="auto") if _int8_on_card(options) else options)
        backend.info = replace(backend.info, path_reason=f"no graph, {refused}; {backend.info.path_reason}")
        return backend


def preallocate(engine: EmbeddingEngine) -> int:
    """Compute one largest batch of longest texts on a card, and return its tokens; 0 on a CPU.

    torch's allocator keeps the memory, and a budget that does not fit is halved now, not during a sync.
    """
    if engine.profile.kind == "cpu":
        return 0
    before = engine.stats().tokens
    texts = max(1, engine.token_budget // engine.max_tokens)
    engine.embed([f"{number} " + "oil " * engine.max_tokens for number in range(texts)])
    return engine.stats().tokens - before
