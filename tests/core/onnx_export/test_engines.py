"""TensorRT's engine files, through a session that writes files as TensorRT does. A real card is not tested here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import DeviceUnavailable
from app.src.core.device import DeviceProfile
from app.src.core.onnx_export.cache import ArtifactCache
from app.src.core.onnx_export.runtime import CPU, CUDA, TENSORRT, BuildOptions, Installed, Site
from app.src.core.onnx_export.serving import GraphServing, Model

pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")

INSTALLED = Installed("1.31.1", "1.23.2", "10.16.1", "580.95", (TENSORRT, CUDA, CPU))


class FakeTensorRT:
    """Builds an engine where its folder has none; does not load one that it did not build."""

    def __init__(self) -> None:
        self.built = 0
        self.ran: list[tuple[int, ...]] = []

    def __call__(self, graph: object, providers: Sequence[tuple[str, Mapping[str, Any]]], threads: object) -> Any:
        file = Path(str(dict(providers)[TENSORRT]["trt_engine_cache_path"])) / "graph_sm75.engine"
        if not file.exists():
            self.built += 1
            file.write_text("engine")
        if file.read_text() != "engine":
            raise DeviceUnavailable("TensorRT does not load the engine")
        return self

    def run(self, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]) -> Sequence[Any]:
        self.ran.append(feeds["input_ids"].shape)
        return [np.zeros((len(feeds["input_ids"]), 3), np.float32)]

    def get_providers(self) -> Sequence[str]:
        return []


@pytest.fixture
def start(
    make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Load a float graph; returns the engines that were built until then, and the reason that the backend gives."""
    monkeypatch.setattr("app.src.core.onnx_export.runtime.preload", lambda runtime: None)
    maker, model = FakeTensorRT(), Model.find(str(make_folder()))

    def load(precision: str = "fp16", **changed: Any) -> tuple[int, str]:
        given = {"profile": DeviceProfile.of_card("Tesla T4"), "installed": INSTALLED, **changed}
        site = Site(runtime="tensorrt", make=maker, **given)
        maker.ran.clear()
        backend = GraphServing(site, model, ArtifactCache(tmp_path / "cache")).float_backend(precision)
        assert maker.ran[0] == (1, 1)
        assert len(maker.ran) == 3  # the least and the largest batch, and the backend's first
        return maker.built, backend.info.path_reason

    return load


def test_an_engine_is_built_once(start: Callable[..., tuple[int, str]]) -> None:
    assert "was built" in start()[1]
    for _ in range(2):
        built, reason = start()
        assert built == 1
        assert "came from the cache" in reason


@pytest.mark.parametrize(
    "changed",
    [
        {"profile": DeviceProfile.of_card("NVIDIA L4")},
        {"installed": replace(INSTALLED, onnxruntime="1.31.2")},
        {"installed": replace(INSTALLED, tensorrt="10.16.2")},
        {"installed": replace(INSTALLED, driver="581.00")},
        {"build": BuildOptions(workspace_mb=1024)},
        {"build": BuildOptions(optimization_level=5)},
        {"precision": "fp32"},
    ],
    ids=["card", "onnxruntime", "tensorrt", "driver", "workspace", "level", "precision"],
)
def test_anything_else_builds_another(start: Callable[..., tuple[int, str]], changed: dict[str, Any]) -> None:
    start()
    assert start(**changed)[0] == 2


def test_a_damaged_engine_is_built_again(start: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    start()
    (engine,) = (tmp_path / "cache").glob("engine-*/*.engine")
    engine.write_text("half an eng")
    built, reason = start()
    assert built == 2
    assert "was built" in reason
