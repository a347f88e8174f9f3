"""Calibrated graphs for cards, which ONNX Runtime runs on the CPU here, without TensorRT."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core import calibration, loading
from app.src.core.backends import DeviceUnavailable, OutOfMemory
from app.src.core.backends.folder import Folder
from app.src.core.backends.torch.backend import EngineOptions
from app.src.core.device import DeviceProfile
from app.src.core.loading import load_engine
from app.src.core.memory import MemoryLimits
from app.src.core.onnx_export import optimizer, serving
from app.src.core.onnx_export.graph import build_graph
from app.src.core.onnx_export.optimizer import calibrate
from app.src.core.onnx_export.serving import CPU, CUDA, GraphOptions, GraphServing

pytest.importorskip("onnxruntime", reason="needs the extra onnx")
onnx = pytest.importorskip("onnx", reason="needs the extra onnx")

TEXTS = [f"pump {number} leaks at flange {number * 7 % 13}, valve {chr(97 + number % 26)}" for number in range(200)]


@pytest.mark.parametrize("noise", [1e-4, 0.8])
def test_for_a_card_a_graph_is_calibrated_and_judged(
    folder: Path, options: GraphOptions, monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    """As with TensorRT, except that ONNX Runtime computes the graph on the CPU. The graph is the float one with noise
    on its weights."""

    def quantise(folder: Folder, texts: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
        model, random = build_graph(folder), np.random.default_rng(3)
        for constant in model.graph.initializer:
            if "/" in constant.name and constant.name.endswith(".weight"):
                numbers = onnx.numpy_helper.to_array(constant)
                spoilt = numbers + noise * numbers.std() * random.standard_normal(numbers.shape)
                constant.CopyFrom(onnx.numpy_helper.from_array(spoilt.astype(np.float32), constant.name))
        return model, {"int8_share": 0.7}

    monkeypatch.setattr(serving, "quantise", quantise)
    graphs = GraphServing(EngineOptions(str(folder), device="cpu"), options, MemoryLimits())
    monkeypatch.setattr(optimizer, "_learner", lambda *_: graphs)
    with pytest.raises(DeviceUnavailable, match="owl-sap calibrate"):
        graphs.accepted()
    done = calibrate(EngineOptions(str(folder), device="cpu"), options, MemoryLimits(), "materials", TEXTS)
    assert done["accepted"] is (noise < 0.1)
    assert done["report"] == {"int8_share": 0.7}
    if not done["accepted"]:
        with pytest.raises(DeviceUnavailable, match="the accuracy gate refused"):
            graphs.accepted()
        return
    info = graphs.load(graphs.accepted()).info
    assert (info.path, info.precision, info.variant.startswith("int8-")) == ("onnx-runtime", "int8", True)


def test_a_card_is_calibrated_only_with_tensorrt(
    folder: Path, options: GraphOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (optimizer, calibration):
        monkeypatch.setattr(module, "detect", lambda _device: DeviceProfile.of_card("Tesla T4"))
    for runtime in ("tensorrt", "cuda", "cpu"):
        monkeypatch.setattr(serving, "choose_runtime", lambda *_, chosen=runtime: (chosen, "the reason"))
        if runtime == "tensorrt":
            learner = optimizer._learner(EngineOptions(str(folder)), options, MemoryLimits())
            assert (type(learner), learner.runtime) == (GraphServing, runtime)
        else:
            with pytest.raises(DeviceUnavailable, match='the reason; device = "cpu"'):
                optimizer._learner(EngineOptions(str(folder)), options, MemoryLimits())


class Failing:
    """A session that is made, but cannot compute."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Sequence[Any]:
        raise self._error


@pytest.mark.parametrize(
    "fault",
    [
        "no kernels",
        pytest.param("no memory", marks=pytest.mark.slow),
        pytest.param("no memory to load", marks=pytest.mark.slow),
        pytest.param("no folder", marks=pytest.mark.slow),
        pytest.param("no space", marks=pytest.mark.slow),
    ],
)
def test_a_card_that_cannot_run_the_graph_stops_no_start(
    folder: Path, options: GraphOptions, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The engine runs on torch and says why, whatever fails between a card that looks well and its first vector."""
    from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

    def make(graph: bytes | Path, providers: object, threads: int | None) -> Failing:
        if fault == "no memory to load":
            raise OutOfMemory("this graph does not fit in the device's memory")
        return Failing(EPFail("no kernel image" if fault == "no kernels" else "CUDA failure 2: out of memory"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere")

    monkeypatch.setattr(loading, "detect", lambda _device: DeviceProfile.of_card("Tesla T4"))
    monkeypatch.setattr(calibration, "detect", lambda _device: DeviceProfile.of_card("Tesla T4"))
    monkeypatch.setattr(serving, "make_session", make)
    monkeypatch.setattr(serving, "preload", lambda _: None)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [CUDA, CPU])
    if fault == "no folder":
        options.cache.write_text("a file")
    if fault == "no space":
        monkeypatch.setattr(Path, "write_bytes", full)
    said = {"no kernels": "no kernel image", "no folder": "cannot be written to", "no space": "No space left"}
    with load_engine(EngineOptions(str(folder), device="cpu"), options) as engine:
        assert engine.path == "packed"
        assert said.get(fault, "does not fit in the device's memory") in engine.path_reason
        assert "/somewhere" not in engine.path_reason
        assert np.isfinite(engine.embed(TEXTS[:3])).all()


def test_a_card_without_tensorrt_is_refused(
    folder: Path, options: GraphOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (optimizer, calibration):
        monkeypatch.setattr(place, "detect", lambda _device: DeviceProfile.of_card("Tesla T4"))
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [CUDA, CPU])
    with pytest.raises(DeviceUnavailable, match=r'without TensorRT.*device = "cpu" calibrates for CPUs'):
        calibrate(EngineOptions(str(folder)), options, MemoryLimits(), "materials", TEXTS)
