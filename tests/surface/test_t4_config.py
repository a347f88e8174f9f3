"""T4GPUConfig: the guides' defaults and every T4_GPU_* variable in it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.src.core.onnx_export.optimizer import T4GPUConfig
from app.src.settings import Settings
from app.src.settings.model import EmbeddingSettings, TensorRtSettings
from app.src.settings.variables import VARIABLES

# The table of the guide hana-genai-toolkit-t4.md, "Environment Variables".
GUIDE = {
    "T4_GPU_FP16_MODE": True,
    "T4_GPU_INT8_MODE": False,
    "T4_GPU_MAX_WORKSPACE_SIZE": 4_294_967_296,
    "T4_GPU_DYNAMIC_BATCH_SIZE": True,
    "T4_GPU_ENABLE_PROFILING": False,
    "T4_GPU_ENABLE_TENSOR_CORES": True,
    "T4_GPU_ENABLE_SPARSE": False,
    "T4_GPU_MEMORY_FRACTION": 0.8,
    "T4_GPU_MAX_BATCH_SIZE": 64,
    "T4_GPU_OPTIMIZATION_LEVEL": 3,
}


def test_defaults_are_the_guides() -> None:
    made = {f"T4_GPU_{name.upper()}": value for name, value in asdict(T4GPUConfig()).items()}
    assert {name: made[name] for name in GUIDE} == GUIDE
    assert set(GUIDE) == {each.name for each in VARIABLES if each.name.startswith("T4_GPU_")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_workspace_size": 4096},
        {"memory_fraction": 0.0},
        {"memory_fraction": 1.1},
        {"max_batch_size": 0},
        {"optimization_level": 6},
        {"precision": "int4"},
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"T4GPUConfig.{next(iter(wrong))} must be"):
        T4GPUConfig(**wrong)


def test_the_cache_lies_with_the_state(tmp_path: Path) -> None:
    settings = Settings.model_validate({"state": {"path": tmp_path / "state"}})
    assert settings.tensorrt_cache(None) == tmp_path / "state" / "tensorrt"


def test_settings_have_the_same_bounds() -> None:
    assert TensorRtSettings().workspace_mb == T4GPUConfig().max_workspace_size >> 20
    assert TensorRtSettings().optimization_level == T4GPUConfig().optimization_level
    assert EmbeddingSettings().memory_fraction == T4GPUConfig().memory_fraction
