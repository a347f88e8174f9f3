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
from .backends.tokenizing import TokenizerBackend, TokenizingBackend
from .backends.torch.backend import EngineOptions as EngineOptions
from .backends.torch.backend import TorchBackend, find_model
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
    if each[0].precision.startswith("int8") or (onnx is not None and onnx.enabled):
        raise DeviceUnavailable(
            "int8 and TensorRT use one device: choose another [embedding] precision, switch [tensorrt] enabled off, or "
            "name one device"
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
        pool = EnginePool(first, members)
        loaded.pop_all()
    return pool


def load_tokenizer_engine(options: EngineOptions, dimension: int) -> EmbeddingEngine:
    """Load a model's tokenizer and description without its weights, as the `first` of an EnginePool: the engine counts,
    splits and has the fingerprint of this model in a float precision, and computes nothing. Hashing models have no
    weights and are loaded whole. `dimension`: of the vectors of the pool's members. Raises EngineError."""
    if options.model.startswith(HASHING):
        return _load(options, None)
    if options.precision.startswith("int8"):
        raise DeviceUnavailable("int8 uses one device of this machine: choose another [embedding] precision")
    folder, weights = find_model(options)
    return EmbeddingEngine(TokenizerBackend(folder, weights, dimension))


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


def uses_calibration(options: EngineOptions, onnx: GraphOptions) -> bool:
    """Return whether a calibrated model is preferred: int8 or [tensorrt] enabled requests it, or, with precision auto
    on a CPU, bf16 is not faster than fp32."""
    from .backends.torch.linears import bf16_gain

    if options.precision == "auto" and not onnx.enabled:
        profile = detect(options.device)
        return profile.kind == "cpu" and choose_precision(profile, "auto", bf16_gain)[0] == "fp32"
    return options.precision == "auto" or options.precision.startswith("int8")


def _backend(options: EngineOptions, onnx: GraphOptions | None, limits: MemoryLimits) -> TokenizingBackend:
    """Load the model as a graph on a card if requested, or in int8 if its calibration passed the accuracy gate. If that
    cannot be done, use torch in a float precision; the log and `path_reason` give the reason. Raises it instead if the
    precision names a calibration."""
    card, precision = detect(options.device).kind == "cuda", options.precision
    if precision == "float":
        return TorchBackend.load(replace(options, precision="auto"))
    if onnx is None or not ((card and onnx.enabled) or uses_calibration(options, onnx)):
        return TorchBackend.load(options)
    try:
        if card:
            from .onnx_export.serving import load_backend

            return load_backend(options, onnx, limits)
        from .calibration import CpuCalibration

        calibration = CpuCalibration(options, onnx.cache)
        return calibration.load(calibration.accepted(precision.partition("-")[2]))
    except (DeviceUnavailable, ModelUnsupported) as refused:
        if "-" in precision:
            raise
        missing = "as a graph in ONNX Runtime" if card else "in int8"
        if onnx.enabled or precision == "int8":
            log.warning("%s is not computed %s: %s", options.model, missing, refused)
        backend = TorchBackend.load(replace(options, precision="auto") if precision == "int8" else options)
        backend.info = replace(backend.info, path_reason=f"not {missing}: {refused}; {backend.info.path_reason}")
        return backend
