"""The settings in force as the arguments of core's T4GPUConfig, the T4 guides' way to configure. Knows no core: whoever
knows both makes it, `T4GPUConfig(**t4_gpu(loaded))`.
"""

from __future__ import annotations

from typing import Any

from app.src.settings.sources import Loaded


def t4_gpu(loaded: Loaded) -> dict[str, Any]:
    """Each field by the setting that its variable reaches, wherever that was set; the few that have none as the
    variables say, else left to the guides' default."""
    embedding, tensorrt = loaded.settings.embedding, loaded.settings.tensorrt
    half = embedding.precision not in ("fp32", "tf32")
    return {
        **loaded.kept,
        "fp16_mode": half,
        "enable_tensor_cores": embedding.precision != "fp32",
        "int8_mode": tensorrt.enabled or embedding.precision == "int8",
        "max_workspace_size": tensorrt.workspace_mb << 20,
        "optimization_level": tensorrt.optimization_level,
        "enable_profiling": embedding.profiling,
        "memory_fraction": embedding.memory_fraction,
        "precision": embedding.precision,
        "calibration_cache": loaded.settings.tensorrt_cache(loaded.file),
    }
