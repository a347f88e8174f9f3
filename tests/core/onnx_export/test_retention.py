"""What leaves the cache: the oldest of each series, never what serves, and with a graph the engines built of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.src.core.onnx_export.cache import (
    ENGINES,
    FLOAT,
    JUDGED,
    KEPT,
    MACHINES,
    QUANTISED,
    TIMINGS,
    ArtifactCache,
    Entry,
    superseded,
    tidy,
)


class Shelf:
    """Entries put into a cache one after the other, a second apart."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = ArtifactCache(folder)
        self._now = 1_000_000.0
        monkeypatch.setattr("app.src.core.onnx_export.cache.time.time", self._later)

    def _later(self) -> float:
        self._now += 1.0
        return self._now

    def put(self, kind: str, content: str = "x", facts: dict[str, Any] | None = None, **depends: Any) -> Entry:
        with self.cache.build(kind, depends) as building:
            (building.path / "file").write_text(content)
            building.facts.update(facts or {})
        found = self.cache.find(kind, depends).entry
        assert found is not None
        return found

    def calibrated(self, texts: str, model: str = "m", machine: str = "A", algorithm: str = "minmax") -> Entry:
        """A graph, what was said of it, and an engine of it."""
        graph = self.put(QUANTISED, f"{model} {texts} {algorithm}", model=model, texts=texts, algorithm=algorithm)
        about = {"graph": dict(graph.dependencies)}
        self.put(JUDGED, facts=about, model=model, texts=texts, algorithm=algorithm, driver=machine)
        self.put(ENGINES, graph=graph.files["file"], precision="int8", gpu="T4", driver=machine)
        return graph

    def count(self, kind: str) -> int:
        return sum(entry.kind == kind for entry in self.cache.entries())


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return Shelf(tmp_path / "cache", monkeypatch)


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert tidy(ArtifactCache(tmp_path / "none")) == 0


def test_calibrations_with_ever_other_texts_do_not_fill_the_disk(shelf: Shelf) -> None:
    graphs = []
    for number in range(12):
        graphs.append(shelf.calibrated(f"texts {number}"))
        tidy(shelf.cache)
    assert (shelf.count(QUANTISED), shelf.count(JUDGED), shelf.count(ENGINES)) == (KEPT, 1, KEPT)
    assert [graph.path.exists() for graph in graphs] == [False] * (12 - KEPT) + [True] * KEPT
    assert not list(shelf.cache.folder.glob(".building-*"))


def test_a_graph_that_serves_another_machine_stays_however_old(shelf: Shelf) -> None:
    old = shelf.calibrated("old", machine="B")
    for number in range(10):
        shelf.calibrated(f"texts {number}", machine="A")
    tidy(shelf.cache)
    assert old.path.exists()
    assert (shelf.count(QUANTISED), shelf.count(JUDGED), shelf.count(ENGINES)) == (KEPT + 1, 2, KEPT + 1)


def test_models_and_algorithms_do_not_push_each_other_out(shelf: Shelf) -> None:
    for model in ("m", "n", "o"):
        for algorithm in ("minmax", "entropy"):
            shelf.calibrated("texts", model, algorithm=algorithm)
        for precision in ("fp32", "fp16"):
            shelf.put(FLOAT, f"{model} {precision}", model=model, precision=precision, onnx="1")
    assert superseded(shelf.cache.entries()) == []


def test_machines_that_are_gone_are_forgotten_in_the_end(shelf: Shelf) -> None:
    for number in range(MACHINES + 5):
        shelf.calibrated("the same", machine=f"driver {number}")
    tidy(shelf.cache)
    assert (shelf.count(JUDGED), shelf.count(QUANTISED), shelf.count(ENGINES)) == (MACHINES, 1, KEPT)


def test_new_versions_leave_the_last_few_float_graphs_and_engines(shelf: Shelf) -> None:
    for number in range(9):
        graph = shelf.put(FLOAT, f"graph {number}", model="m", precision="fp16", onnx=str(number))
        shelf.put(ENGINES, graph=graph.files["file"], precision="fp16", gpu="T4", driver="1")
        shelf.put(TIMINGS, gpu="T4", capability="7.5", driver=str(number))
    tidy(shelf.cache)
    assert (shelf.count(FLOAT), shelf.count(ENGINES), shelf.count(TIMINGS)) == (KEPT, KEPT, KEPT)
    left = {entry.dependencies["onnx"] for entry in shelf.cache.entries() if entry.kind == FLOAT}
    assert left == {"5", "6", "7", "8"}


def test_what_is_of_no_known_kind_or_cannot_be_read_is_left_alone(shelf: Shelf) -> None:
    stranger = shelf.put("notes", model="m")
    (shelf.cache.folder / "not-ours").mkdir()
    damaged = shelf.put(QUANTISED, model="m", algorithm="minmax", texts="d")
    (damaged.path / "manifest.json").write_text("{")
    assert tidy(shelf.cache) == 0
    assert stranger.path.exists()
    assert (shelf.cache.folder / "not-ours").is_dir()
    assert damaged.path.exists()
