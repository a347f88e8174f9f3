"""TensorRT's engine files, through a session that records what it is asked for and writes files as TensorRT does. No
card was at hand: what a real one does with these options is not tested here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.device import DeviceProfile
from app.src.core.onnx_export.cache import KEPT, ArtifactCache, Entry
from app.src.core.onnx_export.runtime import CPU, CUDA, TENSORRT, BuildOptions, Installed, Rectangle, ShapeProfile, Site
from app.src.core.onnx_export.serving import ENGINES, TIMINGS, Engines

INSTALLED = Installed("1.31.1", "1.23.2", "10.16.1", "580.95", (TENSORRT, CUDA, CPU))
T4 = DeviceProfile.of_card("Tesla T4")
SHAPES = ShapeProfile(Rectangle(1, 1), Rectangle(4, 8), Rectangle(4, 16))


class FakeTensorRT:
    """Keeps what it was given; builds an engine where its folder has none, as the provider does with these options."""

    def __init__(self) -> None:
        self.asked: list[Sequence[tuple[str, Mapping[str, Any]]]] = []
        self.graphs: list[Path | bytes] = []
        self.built = 0
        self.ran: list[tuple[int, ...]] = []
        self.saw_timings = False
        self.fails = False

    def __call__(
        self, graph: bytes | Path, providers: Sequence[tuple[str, Mapping[str, Any]]], threads: int | None
    ) -> FakeSession:
        if self.fails:
            raise RuntimeError("no engine")
        self.asked.append(providers)
        self.graphs.append(graph)
        folder = Path(str(dict(providers)[TENSORRT]["trt_engine_cache_path"]))
        self.saw_timings = (folder / "sm75.timing").exists()
        if not (folder / "graph_sm75.engine").exists():
            self.built += 1
            (folder / "graph_sm75.engine").write_text(f"engine {self.built}")
            (folder / "graph_sm75.profile").write_text("shapes")
        (folder / "sm75.timing").write_text("timings")
        return FakeSession(self)


class FakeSession:
    def __init__(self, maker: FakeTensorRT) -> None:
        self._maker = maker

    def run(self, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]) -> Sequence[Any]:
        assert {each.dtype for each in feeds.values()} == {np.dtype(np.int64)}
        self._maker.ran.append(feeds["input_ids"].shape)
        return [np.zeros((len(feeds["input_ids"]), 3), np.float32)]

    def get_providers(self) -> Sequence[str]:
        return [name for name, _ in self._maker.asked[-1]]


@pytest.fixture(autouse=True)
def _no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.src.core.onnx_export.runtime.preload", lambda runtime: None)


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


@pytest.fixture
def graph(cache: ArtifactCache) -> Entry:
    with cache.build("quantised", {"model": "m"}) as building:
        (building.path / "model.onnx").write_text("graph")
    entry = cache.find("quantised", {"model": "m"}).entry
    assert entry is not None
    return entry


def _site(maker: FakeTensorRT, **changed: Any) -> Site:
    return Site(**{"profile": T4, "runtime": "tensorrt", "installed": INSTALLED, "make": maker, **changed})


def test_providers_in_order_with_the_shapes_tried(cache: ArtifactCache, graph: Entry) -> None:
    maker = FakeTensorRT()
    _, note = Engines(cache).session(_site(maker, memory_limit=5), graph, "model.onnx", "int8", SHAPES)
    assert [name for name, _ in maker.asked[0]] == [TENSORRT, CUDA, CPU]
    assert dict(maker.asked[0])[TENSORRT]["trt_int8_enable"] is True
    assert dict(maker.asked[0])[CUDA]["gpu_mem_limit"] == 5
    assert maker.graphs == [graph.path / "model.onnx"]
    assert maker.ran == [(1, 1), (4, 16)]
    assert note.startswith("its engine was built in")


def test_an_engine_is_built_once(cache: ArtifactCache, graph: Entry) -> None:
    maker = FakeTensorRT()
    for wanted in ("was built", "came from the cache", "came from the cache"):
        session, note = Engines(cache).session(_site(maker), graph, "model.onnx", "int8", SHAPES)
        assert wanted in note
        del session
    assert maker.built == 1
    assert {path.name.split("-")[0] for path in cache.folder.iterdir()} == {"quantised", ENGINES, TIMINGS}


def test_ever_newer_drivers_do_not_fill_the_disk(cache: ArtifactCache, graph: Entry) -> None:
    maker = FakeTensorRT()
    for driver in range(KEPT + 3):
        site = _site(maker, installed=replace(INSTALLED, driver=f"58{driver}"))
        Engines(cache).session(site, graph, "model.onnx", "int8", SHAPES)
    assert maker.built == KEPT + 3
    kinds = Counter(entry.kind for entry in cache.entries())
    assert kinds == {"quantised": 1, ENGINES: KEPT, TIMINGS: KEPT}


def test_the_working_copy_goes_with_the_session(
    cache: ArtifactCache, graph: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # other processes have such folders in the machine's
    maker = FakeTensorRT()
    session, _ = Engines(cache).session(_site(maker), graph, "model.onnx", "int8", SHAPES)
    work = Path(str(dict(maker.asked[0])[TENSORRT]["trt_engine_cache_path"]))
    assert work.is_dir()
    assert work.parent == tmp_path
    assert work.parent != cache.folder
    del session
    assert not work.exists()
    maker.fails = True
    with pytest.raises(RuntimeError, match="no engine"):
        Engines(cache).session(_site(maker), graph, "model.onnx", "int8", SHAPES)
    assert not list(tmp_path.glob("owl-sap-tensorrt-*"))


@pytest.mark.parametrize(
    "changed",
    [
        {"profile": DeviceProfile.of_card("NVIDIA L4")},
        {"installed": Installed("1.31.2", "1.23.2", "10.16.1", "580.95", INSTALLED.available)},
        {"installed": Installed("1.31.1", "1.23.2", "10.16.2", "580.95", INSTALLED.available)},
        {"installed": Installed("1.31.1", "1.23.2", "10.16.1", "581.00", INSTALLED.available)},
        {"build": BuildOptions(workspace_mb=1024)},
        {"build": BuildOptions(optimization_level=5)},
        {"precision": "fp16"},
        {"shapes": ShapeProfile(SHAPES.least, SHAPES.usual, Rectangle(8, 16))},
        {"graph": "another"},
    ],
    ids=["card", "onnxruntime", "tensorrt", "driver", "workspace", "level", "precision", "shapes", "graph"],
)
def test_anything_else_builds_another(cache: ArtifactCache, graph: Entry, changed: dict[str, Any]) -> None:
    maker = FakeTensorRT()
    Engines(cache).session(_site(maker), graph, "model.onnx", "int8", SHAPES)
    precision, shapes = changed.pop("precision", "int8"), changed.pop("shapes", SHAPES)
    if changed.pop("graph", None):
        with cache.build("quantised", {"model": "m"}) as building:  # of the same key, and not the same
            (building.path / "model.onnx").write_text("another")
        other = cache.find("quantised", {"model": "m"}).entry
        assert other is not None
        graph = other
    Engines(cache).session(_site(maker, **changed), graph, "model.onnx", precision, shapes)
    assert maker.built == 2


def test_a_damaged_engine_is_built_again_with_a_sentence(cache: ArtifactCache, graph: Entry) -> None:
    maker = FakeTensorRT()
    Engines(cache).session(_site(maker), graph, "model.onnx", "int8", SHAPES)
    (engine,) = cache.folder.glob(f"{ENGINES}-*/*.engine")
    engine.write_text("engine of somebody else")
    _, note = Engines(cache).session(_site(maker), graph, "model.onnx", "int8", SHAPES)
    assert maker.built == 2
    assert "was built" in note
    assert "checksum" in note


def test_timings_help_the_next_engine_on_the_same_card(cache: ArtifactCache, graph: Entry) -> None:
    maker = FakeTensorRT()
    Engines(cache).session(_site(maker), graph, "model.onnx", "int8", SHAPES)
    assert not maker.saw_timings
    Engines(cache).session(_site(maker), graph, "model.onnx", "fp16", SHAPES)
    assert maker.saw_timings
    Engines(cache).session(
        _site(maker, profile=DeviceProfile.of_card("NVIDIA L4")), graph, "model.onnx", "fp16", SHAPES
    )
    assert not maker.saw_timings
