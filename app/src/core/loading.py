"""Load an engine: choose the backend for a model and a device. torch and ONNX Runtime are imported if needed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .backends import Backend
from .backends.hashing import PREFIX as HASHING
from .backends.hashing import HashingBackend
from .backends.torch.backend import TorchBackend, TorchOptions
from .engine import EmbeddingEngine
from .memory import MemoryLimits
from .ranges import show_to_nvtx

if TYPE_CHECKING:
    from .onnx_export.serving import GraphOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions(TorchOptions):
    """How to load an engine; `model` may also be hash:N.

    `memory_fraction` and `reserve_mb` limit the GPU memory. `onnx`: use of ONNX Runtime, None for never. On a card,
    without effect on vectors, `preallocate` computes one largest batch at loading, and `profiling` shows the engine's
    steps as NVTX ranges (Nsight Systems).
    """

    memory_fraction: float = 0.8
    reserve_mb: int = 512
    onnx: GraphOptions | None = None
    preallocate: bool = False
    profiling: bool = False


def load_engine(options: EngineOptions) -> EmbeddingEngine:
    """Load a model. Raises EngineError with what to do."""
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
    """Load the model in torch, or as a graph if requested; only graphs have int8. If no graph can serve, use torch, in
    precision auto instead of int8; the log and `path_reason` give the reason."""
    int8 = options.precision == "int8"
    if options.onnx is None or not (options.onnx.enabled or int8):
        return TorchBackend.load(options)
    from .onnx_export.serving import NotAsGraph, load_backend

    try:
        return load_backend(options, options.onnx, limits)
    except NotAsGraph as refused:
        log.warning("%s is not computed as a graph in ONNX Runtime: %s", options.model, refused)
        backend = TorchBackend.load(replace(options, precision="auto") if int8 else options)
        backend.info = replace(backend.info, path_reason=f"no graph, {refused}; {backend.info.path_reason}")
        return backend


def preallocate(engine: EmbeddingEngine) -> int:
    """Compute one largest batch of longest texts on a card, and return its tokens; 0 on a CPU.

    torch keeps the memory, and a budget that is too large is halved now instead of during a sync.
    """
    if engine.profile.kind == "cpu":
        return 0
    before = engine.stats().tokens
    texts = max(1, engine.token_budget // engine.max_tokens)
    engine.embed([f"{number} " + "oil " * engine.max_tokens for number in range(texts)])
    return engine.stats().tokens - before
