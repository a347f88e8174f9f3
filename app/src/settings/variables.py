"""Accepted environment variables besides OWL_SAP_<SECTION>__<KEY>: SAP's usual HANA_* names and those of the T4 guides,
each with its setting or the reason why it has no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]  # a setting: ("hana", "port")


@dataclass(frozen=True, slots=True)
class Variable:
    """`assign` turns the variable's text into settings; it raises ValueError without the text. None: accepted without
    effect, and `note` says why."""

    name: str
    note: str
    assign: Callable[[str], Mapping[Path, Any]] | None = None


def _sets(name: str, setting: str, note: str = "", parse: Callable[[str], Any] = str) -> Variable:
    """Return a variable that sets `setting`. `parse` returns None for a text that changes nothing."""
    path = tuple(setting.split("."))

    def assign(text: str) -> Mapping[Path, Any]:
        value = parse(text)
        return {} if value is None else {path: value}

    return Variable(name, note or f"sets {setting}", assign)


def _nothing(names: str, why: str) -> list[Variable]:
    return [Variable(name, why) for name in names.split()]


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _fp32_if_off(text: str) -> str | None:
    return None if _flag(text) else "fp32"


def _number(text: str, what: str, least: int = 0) -> int:
    if not text.strip().isdecimal() or len(text) > 15 or int(text) < least:  # no memory has more bytes
        raise ValueError(f"must be {what}: a whole number of at least {least}, of 15 digits at most")
    return int(text)


def _device(text: str) -> str | None:
    return f"cuda:{number}" if (number := _number(text, "the number of a GPU")) else None


_HANA = {name.upper(): name for name in ["host", "port", "user", "password", "userkey", "schema", "encrypt"]}
_HANA |= {"SSL_TRUST_STORE": "trust_store", "SSL_VALIDATE": "validate_certificate"}
_BY_TOKENS = "does nothing: batches are planned by tokens from the memory that is free, never by a number of texts"
_FP32, _PRECISION = "false sets embedding.precision to fp32; true changes nothing", "embedding.precision"

VARIABLES: tuple[Variable, ...] = (
    # Within a group later entries win (USE_GPU=false beats GPU_DEVICE_ID).
    *(_sets(f"HANA_{name}", f"hana.{key}") for name, key in _HANA.items()),
    *(_sets(f"HANA_STORE_{name}", f"store.hana.{key}") for name, key in _HANA.items()),
    _sets("T4_GPU_FP16_MODE", _PRECISION, f"{_FP32}, for auto takes fp16 where the card gains by it", _fp32_if_off),
    _sets("T4_GPU_INT8_MODE", "tensorrt.enabled", "sets tensorrt.enabled: INT8 where the accuracy gate let it through"),
    _sets(
        "T4_GPU_MAX_WORKSPACE_SIZE",
        "tensorrt.workspace_mb",
        "sets tensorrt.workspace_mb (the variable is in bytes): memory for building an engine, not for running it",
        lambda text: _number(text, "in bytes", 1 << 20) >> 20,
    ),
    _sets("T4_GPU_OPTIMIZATION_LEVEL", "tensorrt.optimization_level"),
    *_nothing("T4_GPU_DYNAMIC_BATCH_SIZE T4_GPU_MAX_BATCH_SIZE", _BY_TOKENS),
    *_nothing("T4_GPU_ENABLE_PROFILING", "does nothing: Nsight Systems and torch's profiler need no switch"),
    _sets("T4_GPU_ENABLE_TENSOR_CORES", _PRECISION, f"{_FP32}: they follow from the precision", _fp32_if_off),
    *_nothing("T4_GPU_ENABLE_SPARSE", "does nothing: 2:4 sparsity needs compute capability 8.0 and pruned weights"),
    _sets("T4_GPU_MEMORY_FRACTION", "embedding.memory_fraction"),
)

# HANA_* and T4_GPU_* beat these in this order, and OWL_SAP_* beats both.
GUIDE_VARIABLES: tuple[Variable, ...] = (
    _sets(
        "GPU_DEVICE_ID",
        "embedding.device",
        "sets embedding.device; 0 changes nothing: the first card is the default",
        _device,
    ),
    Variable(
        "USE_GPU",
        "false sets embedding.device to cpu; true makes a missing GPU a warning, a metric and a fault in doctor",
        lambda text: {("embedding", "expect_gpu"): True} if _flag(text) else {("embedding", "device"): "cpu"},
    ),
    _sets("GPU_MEMORY_FRACTION", "embedding.memory_fraction"),
    _sets("RESERVE_MEMORY", "embedding.reserve_mb", "sets embedding.reserve_mb (MB)"),
    *_nothing("ENABLE_AMP", "does nothing: weights are held in the chosen precision, which is faster than autocast"),
    *_nothing("CUDNN_BENCHMARK", "does nothing: it tunes convolutions, and text encoders have none"),
    *_nothing(
        "CUDNN_FRONTEND_ENABLE_TENSOR_CORE_MATH_FP32 CUDNN_FRONTEND_ENABLE_BACKWARD_CONVOLUTION_FP16 "
        "CUDNN_FRONTEND_ENABLE_BACKWARD_CONVOLUTION_FP32",
        "does nothing: cuDNN knows no such variable",
    ),
    *_nothing("TF32_OVERRIDE", "does nothing: no NVIDIA library knows it; use embedding.precision = tf32"),
    *_nothing("NVIDIA_TF32_OVERRIDE", "read by NVIDIA's libraries: 0 forces TF32 off, 1 enables nothing"),
    *_nothing("INFERENCE_BATCH_SIZE DOCUMENT_BATCH_SIZE", _BY_TOKENS),
    *_nothing("NER_BATCH_SIZE", "does nothing: there is no named-entity recognition here"),
    _sets("WORKER_CONCURRENCY", "worker.concurrency", "sets worker.concurrency: jobs that `owl-sap worker` runs"),
    _sets("WORKER_MAX_TASKS_PER_CHILD", "worker.max_jobs", "sets worker.max_jobs, after which a worker is renewed"),
    *_nothing("CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING", "read by CUDA itself, not out of .env"),
    *_nothing("CUDA_MODULE_LOADING", "read by CUDA itself, not out of .env; LAZY has been its default since 12.2"),
    *_nothing("PYTORCH_CUDA_ALLOC_CONF", "read by torch itself, not out of .env; its name is PYTORCH_ALLOC_CONF now"),
    *_nothing("PYTORCH_JIT", "does nothing: no TorchScript is used"),
)
