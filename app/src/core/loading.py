"""Load an engine: choose the backend for a model and a device. torch and ONNX Runtime are imported only if needed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from .backends.hashing import PREFIX as HASHING
from .backends.hashing import HashingBackend
from .backends.tokenizing import TokenizingBackend
from .backends.torch.backend import EngineOptions as EngineOptions
from .backends.torch.backend import TorchBackend
from .engine import EmbeddingEngine
from .memory import MemoryLimits

if TYPE_CHECKING:
    from .onnx_export.serving import GraphOptions

log = logging.getLogger(__name__)


def load_engine(options: EngineOptions, onnx: GraphOptions | None = None) -> EmbeddingEngine:
    """Load a model. `onnx`: options for ONNX Runtime; None never uses it. Raises EngineError with a remedy."""
    limits = MemoryLimits(options.memory_fraction, options.reserve_mb << 20)
    if options.model.startswith(HASHING):
        prompts = options.query_prompt or "", options.document_prompt or ""
        return EmbeddingEngine(HashingBackend(options.model, *prompts), limits)
    backend = _backend(options, onnx, limits)
    try:
        backend.start_tokenizers(options.tokenizer_workers)
        return EmbeddingEngine(backend, limits)
    except BaseException:
        backend.close()
        raise


def _backend(options: EngineOptions, onnx: GraphOptions | None, limits: MemoryLimits) -> TokenizingBackend:
    """Load the model in torch, or as a graph if requested; int8 needs a graph. If no graph can serve, use torch, with
    precision auto instead of int8; the log and `path_reason` give the reason."""
    int8 = options.precision == "int8"
    if onnx is None or not (onnx.enabled or int8):
        return TorchBackend.load(options)
    from .onnx_export.serving import NotAsGraph, load_backend

    try:
        return load_backend(options, onnx, limits)
    except NotAsGraph as refused:
        log.warning("%s is not computed as a graph in ONNX Runtime: %s", options.model, refused)
        backend = TorchBackend.load(replace(options, precision="auto") if int8 else options)
        backend.info = replace(backend.info, path_reason=f"no graph, {refused}; {backend.info.path_reason}")
        return backend
