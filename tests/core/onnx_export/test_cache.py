"""The cache of calibrated graphs and engines: keys, checksums, and what is damaged or somebody else's."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from app.src.core.onnx_export.cache import MANIFEST, ArtifactCache, Building, Entry, key_of, texts_hash

DEPENDS = {"model": "a" * 64, "texts": "b", "algorithm": "entropy", "onnxruntime": "1.31.1", "gpu": None, "level": 3}


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "made" / "when-needed")


def _put(cache: ArtifactCache, text: str = "graph", kind: str = "quantised", **changed: object) -> Entry:
    depends = {**DEPENDS, **changed}
    with cache.build(kind, depends) as building:  # type: ignore[arg-type]
        (building.path / "model.onnx").write_text(text)
        building.facts["accepted"] = True
    entry = cache.find(kind, depends).entry  # type: ignore[arg-type]
    assert entry is not None
    return entry


def test_what_was_put_is_found_with_its_facts(cache: ArtifactCache) -> None:
    entry = _put(cache)
    assert (entry.path / "model.onnx").read_text() == "graph"
    assert entry.facts == {"accepted": True}
    assert entry.files == {"model.onnx": hashlib.sha256(b"graph").hexdigest()}
    assert cache.find("engine", DEPENDS).entry is None


@pytest.mark.parametrize("name", sorted(DEPENDS))
def test_another_dependency_is_another_entry(cache: ArtifactCache, name: str) -> None:
    _put(cache)
    assert cache.find("quantised", {**DEPENDS, name: "another"}).entry is None


def test_the_kind_is_part_of_the_key() -> None:
    assert key_of("engine", DEPENDS) != key_of("quantised", DEPENDS)
    assert key_of("engine", DEPENDS) == key_of("engine", dict(reversed(DEPENDS.items())))


def test_texts_are_told_apart_by_their_borders_and_their_order() -> None:
    assert len({texts_hash(each) for each in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c", ""])}) == 5
    assert texts_hash(["\ud800"]) != texts_hash(["\ud801"])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _rewritten(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["facts"]["accepted"] = False
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: _flip(path / "model.onnx"), "checksum"),
        (lambda path: (path / "model.onnx").unlink(), "missing"),
        (lambda path: (path / "model.onnx").write_bytes(b""), "checksum"),
        (lambda path: (path / "extra.engine").write_bytes(b"x"), "another program"),
        (lambda path: _rewritten(path / MANIFEST), "checksum"),
        (lambda path: (path / MANIFEST).write_text("{"), "manifest cannot be read"),
        (lambda path: (path / MANIFEST).write_text("[]"), "another format"),
        (lambda path: (path / MANIFEST).unlink(), "manifest cannot be read"),
    ],
)
def test_what_is_damaged_is_removed_and_never_loaded(cache: ArtifactCache, harm: object, said: str) -> None:
    entry = _put(cache)
    harm(entry.path)  # type: ignore[operator]
    found = cache.find("quantised", DEPENDS)
    assert found.entry is None
    assert said in found.note
    assert not entry.path.exists()
    made = cache.obtain("quantised", DEPENDS, _make)
    assert made[1] is False


def _make(building: Building) -> None:
    (building.path / "model.onnx").write_text("made anew")


def test_a_damaged_one_is_made_again_with_a_sentence(cache: ArtifactCache) -> None:
    entry = _put(cache)
    _flip(entry.path / "model.onnx")
    again, cached, note = cache.obtain("quantised", DEPENDS, _make)
    assert (again.path / "model.onnx").read_text() == "made anew"
    assert not cached
    assert "checksum" in note
    again, cached, note = cache.obtain("quantised", DEPENDS, _make)
    assert (cached, note) == (True, "")


@pytest.mark.parametrize("file", ["model.onnx", MANIFEST])
def test_what_cannot_be_read_now_is_not_used_and_stays(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """A process out of file handles, or of another user, must not throw away what took minutes to make."""
    entry = _put(cache)

    def refused(*_: Any, **__: Any) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        if file == MANIFEST:
            patched.setattr(Path, "read_text", refused)
        else:
            patched.setattr("app.src.core.onnx_export.cache._sha256", refused)
        for found in (cache.find("quantised", DEPENDS), cache.newest("quantised", DEPENDS)):
            assert found.entry is None
            assert found.note == f"{entry.path.name} in the cache cannot be read (Too many open files)"
    assert cache.find("quantised", DEPENDS).entry == entry


@pytest.mark.parametrize("after", ["it is put aside", "it is put there"])
def test_another_process_that_writes_the_same_entry_meanwhile(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Which of the two is found in the end does not matter; that neither fails, and that one is found, does."""
    old, rename = _put(cache, "old").path, os.rename

    def interrupted(made: Path, target: Path) -> None:
        if target.name == "old":
            rename(made, cache.folder / ".building-of-another")
            if after == "it is put there":
                shutil.copytree(cache.folder / ".building-of-another", old)
                monkeypatch.setattr(os, "rename", rename)
        rename(made, target) if after == "it is put aside" or made != old else None

    monkeypatch.setattr(os, "rename", interrupted)
    entry = _put(cache, "new")
    assert (entry.path / "model.onnx").read_text() == ("new" if after == "it is put aside" else "old")


def test_an_entry_under_another_ones_name_is_foreign(cache: ArtifactCache) -> None:
    entry = _put(cache)
    other = _put(cache, level=4)
    for name in (*other.files, MANIFEST):
        os.replace(other.path / name, entry.path / name)
    assert "another entry" in cache.find("quantised", DEPENDS).note


def test_a_link_out_of_the_folder_is_refused(cache: ArtifactCache, tmp_path: Path) -> None:
    entry = _put(cache)
    outside = tmp_path / "outside"
    outside.write_text("graph")
    (entry.path / "model.onnx").unlink()
    (entry.path / "model.onnx").symlink_to(outside)
    assert "not a regular file" in cache.find("quantised", DEPENDS).note
    assert outside.exists()


def test_what_fails_leaves_nothing_behind(cache: ArtifactCache) -> None:
    def half(building: Building) -> None:
        _make(building)
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        cache.obtain("quantised", DEPENDS, half)
    assert list(cache.folder.iterdir()) == []


def test_an_entry_is_replaced_whole(cache: ArtifactCache) -> None:
    _put(cache, "old")
    entry = _put(cache, "new")
    assert (entry.path / "model.onnx").read_text() == "new"
    assert [path.name for path in cache.folder.iterdir()] == [entry.path.name]


def test_what_dead_processes_left_is_swept_after_a_day(cache: ArtifactCache) -> None:
    _put(cache)
    old, young = cache.folder / ".building-old", cache.folder / ".building-young"
    for path in (old, young):
        path.mkdir()
    os.utime(old, (time.time() - 90_000,) * 2)
    _put(cache, level=5)
    assert (old.exists(), young.exists()) == (False, True)


def test_the_newest_that_fits_is_found_and_differences_are_named(cache: ArtifactCache) -> None:
    for texts in ("first", "second"):
        _put(cache, texts, texts=texts)
    known = {name: DEPENDS[name] for name in ("model", "onnxruntime")}
    found = cache.newest("quantised", known)
    assert found.entry is not None
    assert found.entry.dependencies["texts"] == "second"
    newer = cache.newest("quantised", {**known, "onnxruntime": "1.32.0"})
    assert newer.entry is None
    assert newer.note == "onnxruntime was 1.31.1 and is 1.32.0"
    assert cache.newest("quantised", {**known, "model": "other"}).note == ""


def test_newest_passes_over_what_is_damaged(cache: ArtifactCache) -> None:
    good, bad = _put(cache, texts="good"), _put(cache, texts="bad")
    _flip(bad.path / "model.onnx")
    found = cache.newest("quantised", {"model": DEPENDS["model"]})
    assert found.entry is not None
    assert found.entry.path == good.path
    assert "checksum" in found.note
