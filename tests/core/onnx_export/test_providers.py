"""Options of CUDA and TensorRT, letter by letter; shapes; and what is said of versions that do not fit."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from app.src.core.device import DeviceProfile
from app.src.core.memory import MemoryLimits, ModelShape
from app.src.core.onnx_export import runtime as providers
from app.src.core.onnx_export.runtime import (
    CPU,
    CUDA,
    TENSORRT,
    BuildOptions,
    Installed,
    Shapes,
    Site,
    choose_runtime,
)

T4 = DeviceProfile.of_card("Tesla T4")
MINILM = ModelShape(384, 1536, 12, 256)
ALL = (TENSORRT, CUDA, CPU)
FITTING = Installed("1.31.1", "1.23.2", "10.16.1.11", "580.95.05", ALL)
SHAPES = Shapes(128, 256)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(providers, "preload", lambda _: None)
    return []


def _through(asked: list[Any], precision: str, build: BuildOptions | None = None, **changed: Any) -> dict[str, Any]:
    def make(graph: object, given: Any, threads: object) -> Any:
        asked.extend(given)

    site = Site(T4, "tensorrt", FITTING, build=build or BuildOptions(), make=make, **changed)
    site.tensorrt_session(Path("model.onnx"), precision, SHAPES, Path("/cache/engine"))  # type: ignore[arg-type]
    assert [name for name, _ in asked] == [TENSORRT, CUDA, CPU]
    return dict(asked)


def test_int8_on_a_t4(asked: list[Any]) -> None:
    assert _through(asked, "int8", memory_limit=5) == {
        TENSORRT: {
            "device_id": 0,
            "trt_fp16_enable": True,
            "trt_int8_enable": True,
            "trt_layer_norm_fp32_fallback": True,
            "trt_max_workspace_size": 4_294_967_296,
            "trt_builder_optimization_level": 3,
            "trt_engine_cache_enable": True,
            "trt_engine_cache_path": "/cache/engine",
            "trt_timing_cache_enable": True,
            "trt_timing_cache_path": "/cache",
            "trt_profile_min_shapes": "input_ids:1x1,attention_mask:1x1",
            "trt_profile_opt_shapes": "input_ids:128x128,attention_mask:128x128",
            "trt_profile_max_shapes": "input_ids:128x256,attention_mask:128x256",
        },
        CUDA: {"device_id": 0, "arena_extend_strategy": "kSameAsRequested", "use_tf32": 0, "gpu_mem_limit": 5},
        CPU: {},
    }


@pytest.mark.parametrize(("precision", "half", "int8"), [("fp32", False, False), ("fp16", True, False)])
def test_float_engines(asked: list[Any], precision: str, half: bool, int8: bool) -> None:
    options = _through(asked, precision, BuildOptions(512, 5))[TENSORRT]
    assert (options["trt_fp16_enable"], options["trt_layer_norm_fp32_fallback"]) == (half, half)
    assert options["trt_int8_enable"] is int8
    assert (options["trt_max_workspace_size"], options["trt_builder_optimization_level"]) == (512 << 20, 5)


def test_shapes_do_not_follow_what_is_free_at_the_moment() -> None:
    """Or the engine would be built at every start."""
    site = Site(T4, "tensorrt", FITTING)
    assert site.shapes(MINILM, "int8", MemoryLimits()) == site.shapes(MINILM, "int8", MemoryLimits(reserve_bytes=1))
    small = Site(DeviceProfile.of_card("Tesla T4", 1), "tensorrt", FITTING)
    assert small.shapes(MINILM, "fp32", MemoryLimits()).texts < 256


@pytest.mark.parametrize(
    ("installed", "card", "runtime", "said"),
    [
        (FITTING, T4, "tensorrt", "TensorRT 10.16.1.11"),
        (FITTING, DeviceProfile.cpu(), "cpu", "on the CPU"),
        (Installed(), T4, "cpu", "ONNX Runtime is not installed: pip install"),
        (Installed("1.31.1", available=(CPU,)), T4, "cpu", "the build for CPUs: uninstall it"),
        (Installed("1.31.1", None, None, "580.1", ALL), T4, "cuda", "TensorRT is not installed"),
        (Installed("1.31.1", None, "10.16", "580.1", (CUDA, CPU)), T4, "cuda", "built without TensorRT"),
        (Installed("1.31.1", None, "11.4.0.106", "580.1", ALL), T4, "cuda", "TensorRT 11.4.0.106 is installed"),
        (Installed("1.31.1", None, "11.4.0.106", "580.1", ALL), T4, "cuda", "tensorrt-cu13==10.16"),
        (Installed("1.31.1", None, "10.16", "535.183.01", ALL), T4, "cpu", "driver 535.183.01 is too old"),
        (Installed("1.31.1", None, "10.16", None, ALL), T4, "tensorrt", "TensorRT 10.16"),
        (FITTING, DeviceProfile.of_card("Tesla V100"), "cpu", "capability 7.0; onnxruntime-gpu and TensorRT begin"),
        (FITTING, DeviceProfile.of_card("Tesla P4"), "cpu", "capability 6.1"),
        (FITTING, DeviceProfile.of_card("NVIDIA H200", 141), "tensorrt", "TensorRT 10.16"),
    ],
)
def test_what_is_installed_decides_and_is_said(
    installed: Installed, card: DeviceProfile, runtime: str, said: str
) -> None:
    chosen, reason = choose_runtime(card, installed)
    assert chosen == runtime
    assert said in reason


def test_the_versions_here_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    found = Installed.found()
    assert found.onnxruntime == onnxruntime.__version__
    assert CPU in found.available
    monkeypatch.setattr(providers, "_version", lambda name: {"tensorrt_cu13_libs": "10.16.1"}.get(name))
    assert Installed.found().tensorrt is None  # pip's spelling of that name is the next one
    monkeypatch.setattr(providers, "_version", lambda name: {"tensorrt-cu13-libs": "10.16.1"}.get(name))
    assert Installed.found().tensorrt == "10.16.1"


def test_libraries_are_loaded_before_a_session_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    runtime = types.SimpleNamespace(preload_dlls=lambda: loaded.append("cuda"))
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # not importable: the session will say so
    for which, wanted in (("cpu", []), ("cuda", ["cuda"]), ("tensorrt", ["cuda", "cuda"])):
        providers.preload(which)  # type: ignore[arg-type]
        assert loaded == wanted
