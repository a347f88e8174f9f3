"""Options of CUDA and TensorRT, letter by letter; shapes; and what is said of versions that do not fit."""

from __future__ import annotations

import sys
import types

import pytest

from app.src.core.device import DeviceProfile
from app.src.core.memory import MemoryLimits, ModelShape
from app.src.core.onnx_export import runtime as providers
from app.src.core.onnx_export.runtime import (
    CPU,
    CUDA,
    TENSORRT,
    BuildOptions,
    EngineFolder,
    Installed,
    Rectangle,
    ShapeProfile,
    Site,
    choose_runtime,
    cuda_provider,
    tensorrt_provider,
)

T4 = DeviceProfile.of_card("Tesla T4")
MINILM = ModelShape(384, 1536, 12, 256)
ALL = (TENSORRT, CUDA, CPU)
FITTING = Installed("1.31.1", "1.23.2", "10.16.1.11", "580.95.05", ALL)
SHAPES = ShapeProfile(Rectangle(1, 1), Rectangle(128, 128), Rectangle(128, 256))
FOLDER = EngineFolder("/engines", "/timings")


def test_int8_on_a_t4() -> None:
    name, options = tensorrt_provider(T4, "int8", SHAPES, FOLDER)
    assert name == "TensorrtExecutionProvider"
    assert options == {
        "device_id": 0,
        "trt_fp16_enable": True,
        "trt_int8_enable": True,
        "trt_layer_norm_fp32_fallback": True,
        "trt_max_workspace_size": 4_294_967_296,
        "trt_builder_optimization_level": 3,
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": "/engines",
        "trt_timing_cache_enable": True,
        "trt_timing_cache_path": "/timings",
        "trt_profile_min_shapes": "input_ids:1x1,attention_mask:1x1",
        "trt_profile_opt_shapes": "input_ids:128x128,attention_mask:128x128",
        "trt_profile_max_shapes": "input_ids:128x256,attention_mask:128x256",
    }


@pytest.mark.parametrize(("precision", "half", "int8"), [("fp32", False, False), ("fp16", True, False)])
def test_float_engines(precision: str, half: bool, int8: bool) -> None:
    _, options = tensorrt_provider(T4, precision, SHAPES, FOLDER, BuildOptions(512, 5))  # type: ignore[arg-type]
    assert (options["trt_fp16_enable"], options["trt_layer_norm_fp32_fallback"]) == (half, half)
    assert options["trt_int8_enable"] is int8
    assert (options["trt_max_workspace_size"], options["trt_builder_optimization_level"]) == (512 << 20, 5)
    assert not any("calibration" in name for name in options)


def test_cuda_on_the_second_card() -> None:
    card = DeviceProfile.cuda("NVIDIA H100", (9, 0), 80 << 30, index=1)
    plain = {"device_id": 1, "arena_extend_strategy": "kSameAsRequested", "use_tf32": 0}
    assert cuda_provider(card) == ("CUDAExecutionProvider", plain)
    assert cuda_provider(card, 1 << 30)[1] == plain | {"gpu_mem_limit": 1 << 30}


@pytest.mark.parametrize(("level", "mb"), [(-1, 4096), (6, 4096), (3, 0)])
def test_impossible_builds_are_refused(level: int, mb: int) -> None:
    with pytest.raises(ValueError, match="not"):
        BuildOptions(mb, level)


@pytest.mark.parametrize(
    ("budget", "longest", "usual", "most"),
    [
        (65_536, 256, "256x128", "256x256"),
        (32_768, 512, "64x128", "64x512"),
        (10_000_000, 512, "256x128", "256x512"),  # never more than a batch may have
        (300, 512, "1x128", "1x512"),
        (4_096, 46, "89x46", "89x46"),  # a model that takes less than the usual length
    ],
)
def test_shapes_follow_budget_and_model(budget: int, longest: int, usual: str, most: str) -> None:
    planned = ShapeProfile.planned(budget, longest)
    assert (str(planned.least), str(planned.usual), str(planned.most)) == ("1x1", usual, most)


def test_shapes_do_not_follow_what_is_free_at_the_moment() -> None:
    """Or the engine would be built anew at every start."""
    site = Site(T4, "tensorrt", FITTING)
    assert site.shapes(MINILM, "int8", MemoryLimits()) == site.shapes(MINILM, "int8", MemoryLimits(reserve_bytes=1))
    small = Site(DeviceProfile.of_card("Tesla T4", 1), "tensorrt", FITTING)
    assert small.shapes(MINILM, "fp32", MemoryLimits()).most.texts < 256


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
    chosen = choose_runtime(card, installed)
    assert chosen.runtime == runtime
    assert said in chosen.reason


def test_the_versions_here_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    found = Installed.found()
    assert found.onnxruntime == onnxruntime.__version__
    assert CPU in found.available
    monkeypatch.setattr(providers, "_version", lambda name: {"tensorrt_cu13_libs": "10.16.1"}.get(name))
    assert providers.tensorrt_version() is None  # pip's spelling of that name is the next one
    monkeypatch.setattr(providers, "_version", lambda name: {"tensorrt-cu13-libs": "10.16.1"}.get(name))
    assert providers.tensorrt_version() == "10.16.1"


def test_libraries_are_loaded_before_a_session_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    runtime = types.SimpleNamespace(preload_dlls=lambda: loaded.append("cuda"))
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # not importable: the session will say so
    for which, wanted in (("cpu", []), ("cuda", ["cuda"]), ("tensorrt", ["cuda", "cuda"])):
        providers.preload(which)  # type: ignore[arg-type]
        assert loaded == wanted
