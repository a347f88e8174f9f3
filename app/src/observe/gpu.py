"""Whether the CPU computes although a GPU is asked for, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.src.observe.doctor.machine import why_no_gpu
from app.src.observe.doctor.report import Fault
from app.src.settings import EmbeddingSettings

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine


def gpu_missing(embedding: EmbeddingSettings, engine: EmbeddingEngine | None) -> Fault | None:
    """Return why the CPU computes although a GPU is asked for (USE_GPU=true), and what to do; None otherwise. Without
    an engine judged by what is installed."""
    if not embedding.expect_gpu or (engine is not None and engine.profile.kind == "cuda"):
        return None
    fault = why_no_gpu(embedding)
    if fault is None and engine is not None:
        fault = Fault(
            f"torch sees no CUDA device ({engine.precision_reason})",
            "check CUDA_VISIBLE_DEVICES, nvidia-smi, and that the container was started with --gpus all",
        )
    return fault


def gpu_is_missing(embedding: EmbeddingSettings, engine: EmbeddingEngine | None) -> bool:
    """As `gpu_missing`, without the reason: a loaded engine answers at once, even if the driver hangs."""
    if engine is not None and embedding.expect_gpu:
        return engine.profile.kind != "cuda"
    return gpu_missing(embedding, engine) is not None


def gpu_message(missing: Fault) -> str:
    """One line for logs."""
    return (
        f"a GPU is required (USE_GPU=true, [embedding] expect_gpu), but the CPU is used: {missing}. Fix: {missing.fix}"
    )
