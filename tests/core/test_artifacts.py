"""The cache of graphs and engines: keys, checksums, and which entries stay."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.src.core.artifacts import FLOAT, GRAPH, INT8, KEPT, MANIFEST, RANGES, ArtifactCache, Entry
from app.src.core.backends import DeviceUnavailable

DEPENDS = {"model": "a" * 64, "precision": "fp16", "onnxruntime": "1.31.1", "gpu": None, "level": 3}


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "made" / "when-needed")


def _put(cache: ArtifactCache, producer: str = "one", **changed: object) -> Entry:
    return cache.store(INT8, {**DEPENDS, **changed}, producer.encode(), {"accepted": True})  # type: ignore[dict-item]


def test_an_entry_is_found_with_its_facts_and_replaced_whole(cache: ArtifactCache) -> None:
    _put(cache, "old")
    entry = _put(cache, "new")
    assert cache.find(INT8, DEPENDS) == entry
    assert entry.graph.read_bytes() == b"new"
    assert entry.facts == {"accepted": True}
    assert cache.find(FLOAT, DEPENDS) is None
    assert len(list(cache.folder.iterdir())) == 1


def test_an_entry_that_was_replaced_or_removed_is_not_read(cache: ArtifactCache) -> None:
    entry = _put(cache, "old")
    assert entry.read() == b"old"
    _put(cache, "new")
    with pytest.raises(DeviceUnavailable, match="was replaced"):
        entry.read()
    entry.graph.unlink()
    with pytest.raises(DeviceUnavailable, match="cannot be read: No such file"):
        entry.read()


@pytest.mark.parametrize("name", sorted(DEPENDS))
def test_another_dependency_is_another_entry(cache: ArtifactCache, name: str) -> None:
    _put(cache)
    assert cache.find(INT8, {**DEPENDS, name: "another"}) is None


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: (path / GRAPH).write_bytes(b""),
        lambda path: (path / GRAPH).unlink(),
        lambda path: (path / MANIFEST).write_text("{"),
        lambda path: (path / MANIFEST).write_text("[]"),
        lambda path: (path / MANIFEST).unlink(),
    ],
)
def test_a_damaged_entry_is_removed_and_never_loaded(cache: ArtifactCache, harm: Callable[[Path], object]) -> None:
    folder = _put(cache).graph.parent
    harm(folder)
    assert cache.find(INT8, DEPENDS) is None
    assert not folder.exists()


def test_an_entry_that_cannot_be_read_now_stays(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process out of file handles, or of another user, must not throw away what took minutes to make."""
    entry = _put(cache)

    def refused(*_: Any, **__: Any) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refused)
        assert cache.find(INT8, DEPENDS) is None
    assert cache.find(INT8, DEPENDS) == entry


def test_an_entry_that_fails_leaves_nothing_behind(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DeviceUnavailable, match="No space left on device"):
        _put(cache)
    assert list(cache.folder.iterdir()) == []


def test_the_newest_of_each_kind_and_model_stay(cache: ArtifactCache) -> None:
    (cache.folder / "not-ours-1").mkdir(parents=True)
    other = _put(cache, model="b" * 64)
    for level in range(KEPT + 3):
        entry = cache.store(RANGES, {**DEPENDS, "level": level}, b"ranges", {})
        os.utime(entry.graph.parent, (time.time() - 2000 + level,) * 2)
        entry = _put(cache, level=level)
        os.utime(entry.graph.parent, (time.time() - 1000 + level,) * 2)
    assert [cache.find(INT8, {**DEPENDS, "level": level}) is not None for level in (0, 3, KEPT + 2)] == [0, 1, 1]
    assert all(cache.find(RANGES, {**DEPENDS, "level": level}) for level in range(KEPT + 3))
    assert other.graph.exists()
    assert (cache.folder / "not-ours-1").exists()


def test_an_entry_that_another_process_removes_does_not_stop_the_writing(cache: ArtifactCache) -> None:
    _put(cache)
    (cache.folder / f"{INT8}-gone-1").symlink_to(cache.folder / "nowhere")  # listed, but without a date
    entry = _put(cache, level=4)
    assert entry.graph.exists()
