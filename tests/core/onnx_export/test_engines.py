"""TensorRT and CUDA through sessions that write files as TensorRT does: options letter by letter, engine files, and
what is said of versions that do not fit. A real card is not tested here."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core import calibration
from app.src.core.backends import DeviceUnavailable
from app.src.core.backends.torch.backend import EngineOptions
from app.src.core.device import DeviceProfile
from app.src.core.memory import MemoryLimits
from app.src.core.nvml import GpuSnapshot
from app.src.core.onnx_export import serving
from app.src.core.onnx_export.serving import CPU, CUDA, TENSORRT, GraphOptions, GraphServing, choose_runtime

pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")

T4 = DeviceProfile.of_card("Tesla T4")
ALL = (TENSORRT, CUDA, CPU)


class FakeTensorRT:
    """Builds an engine where its folder has none; does not load one that it did not build."""

    def __init__(self) -> None:
        self.built = 0
        self.asked: list[dict[str, Any]] = []
        self.ran: list[tuple[int, ...]] = []

    def __call__(self, graph: object, providers: Sequence[tuple[str, Mapping[str, Any]]], threads: object) -> Any:
        self.asked.append(dict(providers))
        if TENSORRT in self.asked[-1]:
            file = Path(str(self.asked[-1][TENSORRT]["trt_engine_cache_path"])) / "graph_sm75.engine"
            if not file.exists():
                self.built += 1
                file.write_text("engine")
            if file.read_text() != "engine":
                raise DeviceUnavailable("TensorRT does not load the engine")
        return self

    def run(self, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]) -> Sequence[Any]:
        self.ran.append(feeds["input_ids"].shape)
        return [np.zeros((len(feeds["input_ids"]), 3), np.float32)]


Start = Callable[..., str]


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    fake = FakeTensorRT()
    monkeypatch.setattr(serving, "preload", lambda runtime: None)
    monkeypatch.setattr(serving, "make_session", fake)
    return fake


@pytest.fixture
def start(
    tensorrt: FakeTensorRT, make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Load a float graph, and return the reason that the backend gives."""
    folder = str(make_folder())

    def load(
        precision: str = "fp16",
        card: DeviceProfile = T4,
        versions: str = "10.16.1",
        driver: str = "580.95.05",
        **options: Any,
    ) -> str:
        monkeypatch.setattr(serving, "snapshot", lambda: GpuSnapshot(driver_version=driver))
        monkeypatch.setattr(calibration, "detect", lambda _device: card)
        monkeypatch.setattr(serving, "_version", lambda *_names: versions)
        monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ALL)
        tensorrt.ran.clear()
        tensorrt.asked.clear()
        graphs = GraphServing(EngineOptions(folder), GraphOptions(tmp_path / "cache", **options), MemoryLimits())
        return graphs.float_backend(precision, "for a test").info.path_reason

    return load


def test_an_engine_is_built_once(start: Start, tensorrt: FakeTensorRT) -> None:
    assert "was built" in start()
    for _ in range(2):
        assert "came from the cache" in start()
        assert tensorrt.built == 1
        assert tensorrt.ran[0] == (1, 1)
        assert len(tensorrt.ran) == 3  # the least and the largest batch, and the backend's first


@pytest.mark.parametrize(
    "changed",
    [
        {"card": DeviceProfile.of_card("NVIDIA L4")},
        {"versions": "10.16.2"},
        {"driver": "590.10"},
        {"workspace_mb": 1024},
        {"optimization_level": 5},
    ],
    ids=["card", "versions", "driver", "workspace", "level"],
)
def test_anything_else_builds_another(start: Start, tensorrt: FakeTensorRT, changed: dict[str, Any]) -> None:
    start()
    start(**changed)
    assert tensorrt.built == 2


def test_a_damaged_engine_is_built_again(start: Start, tensorrt: FakeTensorRT, tmp_path: Path) -> None:
    start()
    (engine,) = (tmp_path / "cache").glob("engine-*/*.engine")
    engine.write_text("half an eng")
    assert "was built" in start()
    assert tensorrt.built == 2


def test_the_options_letter_by_letter(start: Start, tensorrt: FakeTensorRT, tmp_path: Path) -> None:
    start("fp16", workspace_mb=512, optimization_level=5)
    (asked,) = tensorrt.asked
    assert list(asked) == [TENSORRT, CUDA, CPU]
    engine = asked[TENSORRT].pop("trt_engine_cache_path")
    assert Path(engine).parent == tmp_path / "cache"
    texts = tensorrt.ran[1][0]
    assert asked == {
        TENSORRT: {
            "device_id": 0,
            "trt_fp16_enable": True,
            "trt_int8_enable": False,
            "trt_layer_norm_fp32_fallback": True,
            "trt_max_workspace_size": 512 << 20,
            "trt_builder_optimization_level": 5,
            "trt_engine_cache_enable": True,
            "trt_timing_cache_enable": True,
            "trt_timing_cache_path": str(tmp_path / "cache"),
            "trt_profile_min_shapes": "input_ids:1x1,attention_mask:1x1",
            "trt_profile_opt_shapes": f"input_ids:{texts}x48,attention_mask:{texts}x48",
            "trt_profile_max_shapes": f"input_ids:{texts}x48,attention_mask:{texts}x48",
        },
        CUDA: {
            "device_id": 0,
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": 0,
            "gpu_mem_limit": int(0.8 * (16 << 30)),
        },
        CPU: {},
    }


@pytest.mark.parametrize(
    ("card", "precision", "through_tensorrt"),
    [
        ("Tesla T4", "fp32", False),
        ("Tesla T4", "fp16", True),
        ("NVIDIA A100", "fp16", True),
        ("NVIDIA A100", "fp32", False),
    ],
)
def test_fp32_does_not_become_tf32(
    start: Start, tensorrt: FakeTensorRT, card: str, precision: str, through_tensorrt: bool
) -> None:
    """TensorRT takes TF32 where a card has it, and ONNX Runtime has no option against it, as it has for CUDA."""
    start(precision, DeviceProfile.of_card(card))
    assert [list(each) for each in tensorrt.asked] == [[TENSORRT, CUDA, CPU] if through_tensorrt else [CUDA, CPU]]


@pytest.mark.parametrize(
    ("tensorrt", "available", "card", "runtime", "said"),
    [
        ("10.16.1.11", ALL, T4, "tensorrt", "TensorRT 10.16.1.11"),
        ("10.16.1.11", ALL, DeviceProfile.cpu(), "cpu", "on the CPU"),
        (None, (CPU,), T4, "cpu", "CPU-only build: uninstall it"),
        (None, ALL, T4, "cuda", "TensorRT, which is not installed"),
        ("10.16", (CUDA, CPU), T4, "cuda", "TensorRT, which is not installed"),
        ("11.4.0.106", ALL, T4, "cuda", "not 11.4.0.106: pip install "),
        (
            "10.16",
            ALL,
            DeviceProfile.of_card("Tesla V100"),
            "cpu",
            "capability 7.0; onnxruntime-gpu and TensorRT",
        ),
        ("10.16", ALL, DeviceProfile.of_card("NVIDIA H200", 141), "tensorrt", "TensorRT 10.16"),
    ],
)
def test_what_is_installed_decides_and_is_said(
    tensorrt: str | None, available: Sequence[str], card: DeviceProfile, runtime: str, said: str
) -> None:
    chosen, reason = choose_runtime(card, tensorrt, available)
    assert chosen == runtime
    assert said in reason


def test_libraries_are_loaded_before_a_session_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    runtime = types.SimpleNamespace(preload_dlls=lambda: loaded.append("cuda"))
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # not importable: the session will say so
    for which, wanted in (("cpu", []), ("cuda", ["cuda"]), ("tensorrt", ["cuda", "cuda"])):
        serving.preload(which)  # type: ignore[arg-type]
        assert loaded == wanted
