"""The switches of the T4 guides: every T4_GPU_* variable, its default and its effect. Reads no environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16", "int8")
OPTIMIZATION_LEVELS = range(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class T4GPUConfig:
    """What was asked for; what a card makes of it is in docs/gpu.md. Raises ValueError naming the field.

    The first ten fields are the guides' variables, `T4_GPU_` and the name in capitals; the last two are the guides'
    further arguments.
    """

    fp16_mode: bool = True
    """Compute in half precision where the card gains by it. False: fp32 everywhere."""
    int8_mode: bool = False
    """Build INT8 for TensorRT; used only if the accuracy gate lets it through, else the float precision stays."""
    max_workspace_size: int = 4 << 30
    """Bytes of the card that TensorRT may use while it tries kernels for an engine; nothing of it stays in use."""
    dynamic_batch_size: bool = True
    """Batches by what fits. False changes nothing: they are always planned by tokens from the memory that is free."""
    enable_profiling: bool = False
    """NVTX ranges around tokenising, copying, computing and pooling, for Nsight Systems and torch's profiler."""
    enable_tensor_cores: bool = True
    """False: fp32 everywhere, which uses none on any card. True changes nothing: they follow from the precision."""
    enable_sparse: bool = False
    """Changes nothing: 2:4 sparsity needs compute capability 8.0 and weights that were pruned for it."""
    memory_fraction: float = 0.8
    """Share of the card's memory for this process, weights included."""
    max_batch_size: int = 64
    """Upper bound of `T4MemoryManager.calculate_optimal_batch_size`; the engine counts tokens, not texts."""
    optimization_level: int = 3
    """TensorRT's builder, 0 (fast to build) to 5 (fast to run); 3 is TensorRT's own default."""
    precision: str = "auto"
    """As `embedding.precision`; `int8_mode` and `fp16_mode` follow from it where settings made this value."""
    calibration_cache: str | Path | None = None
    """Folder of calibrations and engines; None keeps nothing."""

    def __post_init__(self) -> None:
        for name in ("fp16_mode", "int8_mode", "dynamic_batch_size", "enable_profiling", "enable_tensor_cores"):
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        self._check("enable_sparse", isinstance(self.enable_sparse, bool), "true or false")
        self._check("max_workspace_size", self.max_workspace_size >= 1 << 20, "bytes, at least 1048576")
        self._check("memory_fraction", 0 < self.memory_fraction <= 1, "above 0 and at most 1")
        self._check("max_batch_size", self.max_batch_size >= 1, "at least 1")
        self._check("optimization_level", self.optimization_level in OPTIMIZATION_LEVELS, "0 to 5")
        self._check("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")

    def _check(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ValueError(f"T4GPUConfig.{name} must be {wanted}, not {getattr(self, name)!r}")

    @property
    def workspace_mb(self) -> int:
        return self.max_workspace_size >> 20

    @property
    def embedding_precision(self) -> str:
        """Return the `embedding.precision`: fp32 if half precision or tensor cores are switched off."""
        if self.precision != "auto":
            return self.precision
        return "auto" if self.fp16_mode and self.enable_tensor_cores else "fp32"


_ARGUMENTS = ("precision", "calibration_cache")


def variables() -> Mapping[str, str]:
    """Return the field of T4GPUConfig for each T4_GPU_* variable."""
    return {f"T4_GPU_{each.name.upper()}": each.name for each in fields(T4GPUConfig) if each.name not in _ARGUMENTS}
