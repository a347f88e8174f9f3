"""Load an engine: choose the backend for a model and a device. torch and ONNX Runtime are imported only if needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from .backends import ModelUnsupported
from .backends.hashing import PREFIX as HASHING
from .backends.hashing import HashingBackend
from .backends.tokenizing import TokenizingBackend
from .backends.torch.backend import EngineOptions as EngineOptions
from .backends.torch.backend import TorchBackend
from .device import DeviceUnavailable, choose_precision, detect, devices_of
from .engine import EmbeddingEngine, Engine
from .memory import MemoryLimits

if TYPE_CHECKING:
    from .onnx_export.serving import GraphOptions
    from .pool import EnginePool, Member

# Hidden size from which threads of one process keep several cards busy; smaller models get a process for each card. One
# process prepares about 3 million tokens/s, because one thread at a time runs Python (the GIL). An H100 could compute
# 12 million of all-MiniLM-L6-v2 (384), 2.2 of BERT-base (768) and 0.75 of BERT-large (1024). All estimated.
THREADS_FROM = 1024

log = logging.getLogger(__name__)


def load_engine(options: EngineOptions, onnx: GraphOptions | None = None) -> Engine:
    """Load a model, on several devices as an EnginePool. `onnx`: the folder of calibrations and
    options for ONNX Runtime; None uses neither. Raises EngineError with a remedy."""
    if options.model.startswith(HASHING) and options.device == "all":
        options = replace(options, device="cpu")  # needs no card
    devices = devices_of(options.device)
    each = [replace(options, device=device, engines=len(devices)) for device in devices]
    return _load(each[0], onnx) if len(each) == 1 else _pool(each, onnx)


def _pool(each: Sequence[EngineOptions], onnx: GraphOptions | None) -> EnginePool:
    """Load a model on several devices: in this process if it is large, else on all but the first in child processes."""
    if each[0].precision == "int8" or (onnx is not None and onnx.enabled):
        raise DeviceUnavailable(
            "int8 and TensorRT use one device, because a calibrated graph belongs to one card: choose another "
            "[embedding] precision, switch [tensorrt] enabled off, or name one device"
        )
    from .child import ChildEngine
    from .pool import EnginePool

    with ExitStack() as loaded:
        first = loaded.enter_context(_load(each[0], None))
        if first.dimension < THREADS_FROM:
            children = []
            for options in each[1:]:
                children.append(ChildEngine(load_engine, options))
                loaded.callback(children[-1].close)
            for child in children:  # they load at the same time
                child.load()
            members: Sequence[Member] = [first, *children]
        else:
            members = [first, *(loaded.enter_context(_load(options, None)) for options in each[1:])]
        if len({member.fingerprint for member in members}) > 1:
            raise DeviceUnavailable("the devices would compute vectors that cannot be compared: name one device")
        loaded.pop_all()
    return EnginePool(members)


def _load(options: EngineOptions, onnx: GraphOptions | None) -> EmbeddingEngine:
    """Load a model on one device."""
    limits = MemoryLimits(options.memory_fraction, options.reserve_mb << 20)
    if options.model.startswith(HASHING):
        prompts = options.query_prompt or "", options.document_prompt or ""
        return EmbeddingEngine(HashingBackend(options.model, *prompts), limits)
    backend = _backend(options, onnx, limits)
    try:
        backend.start_tokenizers(options.tokenizer_workers, options.engines)
        return EmbeddingEngine(backend, limits)
    except BaseException:
        backend.close()
        raise


def _backend(options: EngineOptions, onnx: GraphOptions | None, limits: MemoryLimits) -> TokenizingBackend:
    """Load the model in torch, or on a card as a graph if requested; int8 needs a graph there. If no graph can serve,
    use torch, with precision auto instead of int8; the log and `path_reason` give the reason."""
    if onnx is None:
        return TorchBackend.load(options)
    if detect(options.device).kind == "cpu":
        return _on_cpu(options, onnx)
    int8 = options.precision == "int8"
    if not (onnx.enabled or int8):
        return TorchBackend.load(options)
    from .onnx_export.serving import NotAsGraph, load_backend

    try:
        return load_backend(options, onnx, limits)
    except NotAsGraph as refused:
        log.warning("%s is not computed as a graph in ONNX Runtime: %s", options.model, refused)
        backend = TorchBackend.load(replace(options, precision="auto") if int8 else options)
        backend.info = replace(backend.info, path_reason=f"no graph, {refused}; {backend.info.path_reason}")
        return backend


def _on_cpu(options: EngineOptions, onnx: GraphOptions) -> TorchBackend:
    """Load the model on a CPU: in int8 if its calibration passed the accuracy gate and int8 is requested (precision
    int8, or auto with `enabled`), or auto finds no faster bf16. Otherwise, load it in its float precision."""
    from .backends.torch.linears import bf16_gain

    if options.precision not in ("auto", "int8"):
        return TorchBackend.load(options)
    requested = options.precision == "int8" or onnx.enabled
    if not requested and choose_precision(detect("cpu"), "auto", bf16_gain)[0] != "fp32":
        return TorchBackend.load(options)
    from .calibration import CpuCalibration

    try:
        calibration = CpuCalibration(options, onnx.cache)
        return calibration.load(calibration.accepted())
    except (DeviceUnavailable, ModelUnsupported) as refused:
        if requested:
            log.warning("%s is not computed in int8: %s", options.model, refused)
        backend = TorchBackend.load(replace(options, precision="auto"))
        backend.info = replace(backend.info, path_reason=f"not in int8: {refused}; {backend.info.path_reason}")
        return backend
