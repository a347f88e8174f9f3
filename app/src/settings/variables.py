"""The environment variables that are understood besides OWL_SAP_<SECTION>__<KEY>, as data: SAP's usual HANA_* names and
the T4 guides' names, each with the setting it reaches or the reason why it does nothing. Reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]
"""A setting: ("hana", "port")."""
Assigned = Mapping[Path, Any]


@dataclass(frozen=True, slots=True)
class Variable:
    """`assign` turns the variable's text into settings; None: accepted, and `note` says why it changes nothing."""

    name: str
    note: str
    assign: Callable[[str], Assigned] | None = None
    target: Path | None = None


class BadVariable(ValueError):
    """A variable's text is not what it must be; the message does not repeat the text."""


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


def _fp16_mode(text: str) -> Assigned:
    return {} if _flag(text) else {("embedding", "precision"): "fp32"}


def _use_gpu(text: str) -> Assigned:
    return {("embedding", "expect_gpu"): True} if _flag(text) else {("embedding", "device"): "cpu"}


def _device_id(text: str) -> Assigned:
    if not text.strip().isdecimal():
        raise BadVariable("must be the number of a GPU: 0, 1, ...")
    index = int(text)
    return {("embedding", "device"): f"cuda:{index}"} if index else {}


def _nothing(names: str, why: str) -> list[Variable]:
    return [Variable(name, why) for name in names.split()]


_BY_TOKENS = "does nothing: batches are planned by tokens from the memory that is free, never by a number of texts"
_TENSORRT = "does nothing yet: it belongs to TensorRT, which this version does not have"
_ONE_PROCESS = "does nothing: a worker is one process whose jobs run in threads; worker.concurrency bounds them"
_LIBRARY = "read by {0} itself, not by us"
_CONVOLUTIONS = "does nothing: it tunes convolutions, and text encoders have none"

VARIABLES: tuple[Variable, ...] = (
    # Later entries win over earlier ones within their group (USE_GPU=false beats GPU_DEVICE_ID).
    *_hana("HANA_", "hana"),
    *_hana("HANA_STORE_", "store", "hana"),
    Variable(
        "T4_GPU_FP16_MODE",
        "false sets embedding.precision to fp32; true changes nothing, for auto takes fp16 where the card gains by it",
        _fp16_mode,
        ("embedding", "precision"),
    ),
    *_nothing("T4_GPU_INT8_MODE", "does nothing: INT8 is for CPUs only, where embedding.precision asks for it"),
    *_nothing("T4_GPU_MAX_WORKSPACE_SIZE T4_GPU_OPTIMIZATION_LEVEL", _TENSORRT),
    *_nothing("T4_GPU_DYNAMIC_BATCH_SIZE T4_GPU_MAX_BATCH_SIZE", _BY_TOKENS),
    *_nothing("T4_GPU_ENABLE_PROFILING", "does nothing yet: profiling comes with a later version"),
    *_nothing("T4_GPU_ENABLE_TENSOR_CORES", "does nothing: tensor cores follow from the precision"),
    *_nothing("T4_GPU_ENABLE_SPARSE", "does nothing: 2:4 sparsity needs compute capability 8.0 and pruned weights"),
    _to("T4_GPU_MEMORY_FRACTION", "embedding", "memory_fraction"),
)

GUIDE_VARIABLES: tuple[Variable, ...] = (
    Variable("GPU_DEVICE_ID", "sets embedding.device", _device_id, ("embedding", "device")),
    Variable(
        "USE_GPU",
        "false sets embedding.device to cpu; true makes doctor report a missing GPU as a fault",
        _use_gpu,
        ("embedding", "device"),
    ),
    _to("GPU_MEMORY_FRACTION", "embedding", "memory_fraction"),
    _to("RESERVE_MEMORY", "embedding", "reserve_mb", note="sets embedding.reserve_mb (MB)"),
    *_nothing("ENABLE_AMP", "does nothing: weights are held in the chosen precision, which is faster than autocast"),
    *_nothing("CUDNN_BENCHMARK", _CONVOLUTIONS),
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
    *_nothing("WORKER_MAX_TASKS_PER_CHILD", _ONE_PROCESS),
    *_nothing("CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING", _LIBRARY.format("CUDA")),
    *_nothing("CUDA_MODULE_LOADING", "read by CUDA itself; LAZY has been its default since 12.2"),
    *_nothing("PYTORCH_CUDA_ALLOC_CONF", "read by torch itself; its name is now PYTORCH_ALLOC_CONF"),
    *_nothing("PYTORCH_JIT", "does nothing: no TorchScript is used"),
)
"""In this order HANA_*, T4_GPU_* beat these, and OWL_SAP_* beats both."""
