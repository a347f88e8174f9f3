"""The accepted environment variables besides OWL_SAP_<SECTION>__<KEY>, as data: SAP's usual HANA_* names and the T4
guides' names, each with its setting or the reason why it has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]  # a setting: ("hana", "port")
Assigned = Mapping[Path, Any]


@dataclass(frozen=True, slots=True)
class Variable:
    """`assign` turns the variable's text into settings; None: accepted without effect, and `note` says why. `kept`: the
    field of core's T4GPUConfig for a variable without a setting, read by `read`."""

    name: str
    note: str
    assign: Callable[[str], Assigned] | None = None
    target: Path | None = None
    kept: str | None = None
    read: Callable[[str], Any] = str


class BadVariable(ValueError):
    """A variable's text is invalid; the message does not repeat it."""


def _to(name: str, *target: str, note: str = "") -> Variable:
    return Variable(name, note or f"sets {'.'.join(target)}", lambda text: {target: text}, target)


def _hana(prefix: str, *section: str) -> list[Variable]:
    names = {
        "HOST": "host",
        "PORT": "port",
        "USER": "user",
        "PASSWORD": "password",
        "USERKEY": "userkey",
        "SCHEMA": "schema",
        "ENCRYPT": "encrypt",
        "SSL_TRUST_STORE": "trust_store",
        "SSL_VALIDATE": "validate_certificate",
    }
    return [_to(prefix + name, *section, key) for name, key in names.items()]


_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise BadVariable("must be true or false")
    return word in _TRUE


def _fp32_if_off(text: str) -> Assigned:
    return {} if _flag(text) else {("embedding", "precision"): "fp32"}


def _flag_of(*target: str) -> Callable[[str], Assigned]:
    return lambda text: {target: _flag(text)}


MOST_DIGITS = 15  # of a number in a variable: no memory has more bytes


def _count(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > MOST_DIGITS or not int(text):
        raise BadVariable(f"must be a whole number above 0, of {MOST_DIGITS} digits at most")
    return int(text)


def _workspace(text: str) -> Assigned:
    """The guides give bytes."""
    size = _count(text)
    if size < 1 << 20:
        raise BadVariable("is in bytes, and must be at least 1048576 (1 MB)")
    return {("tensorrt", "workspace_mb"): size >> 20}


def _use_gpu(text: str) -> Assigned:
    return {("embedding", "expect_gpu"): True} if _flag(text) else {("embedding", "device"): "cpu"}


def _device_id(text: str) -> Assigned:
    if not text.strip().isdecimal() or len(text) > MOST_DIGITS:
        raise BadVariable("must be the number of a GPU: 0, 1, ...")
    index = int(text)
    return {("embedding", "device"): f"cuda:{index}"} if index else {}


def _nothing(names: str, why: str) -> list[Variable]:
    return [Variable(name, why) for name in names.split()]


_BY_TOKENS = "does nothing: batches are planned by tokens from the memory that is free, never by a number of texts"
_LIBRARY = "read by {0} itself out of the real environment, not by us and not out of .env"

VARIABLES: tuple[Variable, ...] = (
    # Later entries win over earlier ones within their group (USE_GPU=false beats GPU_DEVICE_ID).
    *_hana("HANA_", "hana"),
    *_hana("HANA_STORE_", "store", "hana"),
    Variable(
        "T4_GPU_FP16_MODE",
        "false sets embedding.precision to fp32; true changes nothing, for auto takes fp16 where the card gains by it",
        _fp32_if_off,
        ("embedding", "precision"),
    ),
    Variable(
        "T4_GPU_INT8_MODE",
        "sets tensorrt.enabled: INT8 on a CPU, or on a card from 7.5 on, where the accuracy gate let it through",
        _flag_of("tensorrt", "enabled"),
        ("tensorrt", "enabled"),
    ),
    Variable(
        "T4_GPU_MAX_WORKSPACE_SIZE",
        "sets tensorrt.workspace_mb (the variable is in bytes): memory for building an engine, not for running it",
        _workspace,
        ("tensorrt", "workspace_mb"),
    ),
    _to("T4_GPU_OPTIMIZATION_LEVEL", "tensorrt", "optimization_level"),
    Variable("T4_GPU_DYNAMIC_BATCH_SIZE", _BY_TOKENS, kept="dynamic_batch_size", read=_flag),
    Variable("T4_GPU_MAX_BATCH_SIZE", _BY_TOKENS, kept="max_batch_size", read=_count),
    Variable(
        "T4_GPU_ENABLE_PROFILING",
        "sets embedding.profiling: NVTX ranges for a profiler",
        _flag_of("embedding", "profiling"),
        ("embedding", "profiling"),
    ),
    Variable(
        "T4_GPU_ENABLE_TENSOR_CORES",
        "false sets embedding.precision to fp32, which uses none; true changes nothing: they follow from the precision",
        _fp32_if_off,
        ("embedding", "precision"),
    ),
    Variable(
        "T4_GPU_ENABLE_SPARSE",
        "does nothing: 2:4 sparsity needs compute capability 8.0 and pruned weights",
        kept="enable_sparse",
        read=_flag,
    ),
    _to("T4_GPU_MEMORY_FRACTION", "embedding", "memory_fraction"),
)

# In this order HANA_*, T4_GPU_* beat these, and OWL_SAP_* beats both.
GUIDE_VARIABLES: tuple[Variable, ...] = (
    Variable(
        "GPU_DEVICE_ID",
        "sets embedding.device; 0 changes nothing, for the first card is the default",
        _device_id,
        ("embedding", "device"),
    ),
    Variable(
        "USE_GPU",
        "false sets embedding.device to cpu; true makes a missing GPU a warning, a metric and a fault in doctor",
        _use_gpu,
        ("embedding", "device"),
    ),
    _to("GPU_MEMORY_FRACTION", "embedding", "memory_fraction"),
    _to("RESERVE_MEMORY", "embedding", "reserve_mb", note="sets embedding.reserve_mb (MB)"),
    *_nothing(
        "ENABLE_AMP",
        "does nothing: weights are held in the chosen precision, which is faster than autocast (measured, on a CPU)",
    ),
    Variable(
        "CUDNN_BENCHMARK",
        "sets embedding.cudnn_benchmark: cuDNN tries its convolutions, and text encoders have none",
        _flag_of("embedding", "cudnn_benchmark"),
        ("embedding", "cudnn_benchmark"),
    ),
    *_nothing(
        "CUDNN_FRONTEND_ENABLE_TENSOR_CORE_MATH_FP32 CUDNN_FRONTEND_ENABLE_BACKWARD_CONVOLUTION_FP16 "
        "CUDNN_FRONTEND_ENABLE_BACKWARD_CONVOLUTION_FP32",
        "does nothing: cuDNN knows no such variable",
    ),
    *_nothing("TF32_OVERRIDE", "does nothing: no NVIDIA library knows it; use embedding.precision = tf32"),
    *_nothing("NVIDIA_TF32_OVERRIDE", "read by NVIDIA's libraries: 0 forces TF32 off, 1 enables nothing"),
    *_nothing("INFERENCE_BATCH_SIZE DOCUMENT_BATCH_SIZE", _BY_TOKENS),
    *_nothing("NER_BATCH_SIZE", "does nothing: there is no named-entity recognition here"),
    _to("WORKER_CONCURRENCY", "worker", "concurrency", note="sets worker.concurrency: jobs that `owl-sap worker` runs"),
    _to(
        "WORKER_MAX_TASKS_PER_CHILD",
        "worker",
        "max_jobs",
        note="sets worker.max_jobs: `owl-sap worker` ends after so many jobs, and its supervisor starts a fresh one",
    ),
    *_nothing("CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING", _LIBRARY.format("CUDA")),
    *_nothing("CUDA_MODULE_LOADING", "read by CUDA itself, not out of .env; LAZY has been its default since 12.2"),
    *_nothing("PYTORCH_CUDA_ALLOC_CONF", "read by torch itself, not out of .env; its name is PYTORCH_ALLOC_CONF now"),
    *_nothing("PYTORCH_JIT", "does nothing: no TorchScript is used"),
)
