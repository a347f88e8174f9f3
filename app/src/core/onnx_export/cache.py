"""The folder of calibrated graphs and built engines. Each entry is stored under a hash of everything it depends on;
damaged or foreign entries are removed with a note and made again. `tidy` removes entries that are superseded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..backends import DeviceUnavailable

log = logging.getLogger(__name__)

FORMAT = 1  # of this folder and of what calibration writes into it; another number is another file
MANIFEST = "manifest.json"
_BUILDING = ".building-"
_ABANDONED_AFTER = 24 * 3600.0  # seconds after which a half-made entry belongs to a process that died

Dependencies = Mapping[str, str | int | float | None]
"""What an entry was made from: model, texts, algorithm, versions, card, shapes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder whose files were verified (except in `ArtifactCache.entries`). `facts`: what its maker noted, such as a
    report. `files`: name -> SHA-256."""

    kind: str
    key: str
    path: Path
    dependencies: Dependencies
    facts: Mapping[str, Any]
    files: Mapping[str, str]
    created: float


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, or a `note` why it was not used; the note is empty where nothing was found."""

    entry: Entry | None
    note: str = ""


class Damaged(Exception):
    """An entry differs from what was written; the message says how."""


@dataclass(slots=True)
class Building:
    """A folder to write an entry into; `facts` go into its manifest."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)


def key_of(kind: str, dependencies: Dependencies) -> str:
    """Return a hash that changes with every dependency and with the format."""
    described = {"format": FORMAT, "kind": kind, "depends": dict(dependencies)}
    return hashlib.sha256(json.dumps(described, sort_keys=True, allow_nan=False).encode()).hexdigest()


def texts_hash(texts: Sequence[str]) -> str:
    """Hash texts in order, each after its length, so that different lists never collide."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class ArtifactCache:
    """Entries are written aside and renamed into place, so a reader sees a complete one or none. Processes may share
    the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, kind: str, dependencies: Dependencies) -> Found:
        """Return the entry made from exactly these dependencies. A damaged one is removed."""
        path = self._path(kind, key_of(kind, dependencies))
        return self._checked(path) if path.exists() else Found(None)

    def newest(self, kind: str, dependencies: Dependencies) -> Found:
        """Return the newest entry that agrees with these dependencies; it may have more of them. Where only entries for
        the same `model` with other dependencies exist, the note names the differences."""
        notes: list[str] = []
        there: list[tuple[float, Path, Dependencies]] = []
        for path in self.folder.glob(f"{kind}-*"):
            try:
                manifest = _manifest(path)
            except Damaged as error:
                notes.append(self._removed(path, error).note)
            except OSError as error:
                notes.append(_unread(path, error))
            else:
                there.append((manifest["created"], path, manifest["depends"]))
        for _, path, depends in sorted(there, reverse=True, key=lambda each: each[:2]):
            differing = [name for name, value in dependencies.items() if depends.get(name) != value]
            if differing:
                if "model" not in differing and not notes:
                    notes.append(_difference(depends, dependencies, differing))
                continue
            found = self._checked(path)
            notes += [found.note] if found.note else []
            if found.entry is not None:
                return Found(found.entry, "; ".join(notes))
        return Found(None, "; ".join(notes))

    @contextlib.contextmanager
    def build(self, kind: str, dependencies: Dependencies) -> Iterator[Building]:
        """Yield a folder for the files of an entry, which exists once the block ends without an error. An entry with
        the same key is replaced. Raises DeviceUnavailable when the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            building = Building(Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.folder)))
        except OSError as error:
            raise DeviceUnavailable(
                f"the folder of graphs and engines ([tensorrt] cache) cannot be written to: {error.strerror}"
            ) from error
        self._sweep()
        try:
            yield building
            key = key_of(kind, dependencies)
            _seal(building, kind, key, dependencies)
            self._replace(building.path, self._path(kind, key))
        finally:
            shutil.rmtree(building.path, ignore_errors=True)

    def obtain(
        self, kind: str, dependencies: Dependencies, make: Callable[[Building], None]
    ) -> tuple[Entry, bool, str]:
        """Return the entry, whether it existed, and a note where a damaged one was removed. `make` writes a missing
        one; if it raises, nothing is left behind."""
        found = self.find(kind, dependencies)
        if found.entry is not None:
            return found.entry, True, ""
        with self.build(kind, dependencies) as building:
            make(building)
        made = self.find(kind, dependencies)
        if made.entry is None:
            raise DeviceUnavailable(f"what was just written to [tensorrt] cache cannot be read back: {made.note}")
        return made.entry, False, found.note

    def entries(self) -> list[Entry]:
        """Return all entries by their manifests, without verifying files. Unreadable ones are skipped."""
        found = []
        for path in self.folder.glob("*-*"):
            if not path.name.startswith(_BUILDING):
                with contextlib.suppress(Damaged, OSError):
                    found.append(_entry(path, _manifest(path)))
        return found

    def remove(self, entry: Entry) -> None:
        """Remove an entry in one step: readers find all of it or nothing. A failure is ignored."""
        with contextlib.suppress(OSError):
            aside = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.folder))
            try:
                os.rename(entry.path, aside / "old")
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    # -------------------------------------------------------------------------------------------------------- how

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{key[:32]}"

    def _checked(self, path: Path) -> Found:
        """Verify an entry. One that cannot be read now (permission, file handles, just replaced) is skipped but
        kept."""
        try:
            return Found(_verified(path))
        except Damaged as error:
            return self._removed(path, error)
        except OSError as error:
            return Found(None, _unread(path, error))

    def _removed(self, path: Path, error: Damaged) -> Found:
        shutil.rmtree(path, ignore_errors=True)
        note = f"{path.name} in the cache was not used and has been removed: {error}"
        log.warning("%s", note)
        return Found(None, note)

    def _replace(self, made: Path, target: Path) -> None:
        with contextlib.suppress(OSError):  # as where there is one already
            os.rename(made, target)
            return
        aside = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.folder))
        try:
            with contextlib.suppress(FileNotFoundError):  # another process has put it aside
                os.rename(target, aside / "old")
            os.rename(made, target)
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what processes that died have left unfinished."""
        for path in self.folder.glob(f"{_BUILDING}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                    shutil.rmtree(path, ignore_errors=True)


def _unread(path: Path, error: OSError) -> str:
    return f"{path.name} in the cache cannot be read ({error.strerror or type(error).__name__})"


def _difference(had: Dependencies, wanted: Dependencies, names: Sequence[str]) -> str:
    return ", ".join(f"{name} was {had.get(name)} and is {wanted[name]}" for name in names)


def _seal(building: Building, kind: str, key: str, dependencies: Dependencies) -> None:
    """Write the manifest with every file's hash. Everything is on disk before the folder gets its name."""
    files = sorted(path for path in building.path.iterdir() if path.is_file())
    for path in files:
        _to_disk(path)
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "key": key,
        "created": time.time(),
        "depends": dict(dependencies),
        "facts": building.facts,
        "files": {path.name: {"sha256": _sha256(path), "bytes": path.stat().st_size} for path in files},
    }
    manifest["sum"] = _sum_of(manifest)
    target = building.path / MANIFEST
    target.write_text(json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False), encoding="utf-8")
    _to_disk(target)


def _sum_of(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "sum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _to_disk(path: Path) -> None:
    with path.open("rb+") as content:
        os.fsync(content.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _manifest(path: Path) -> dict[str, Any]:
    """Read a manifest. Raises Damaged unless `_seal` wrote it for this folder, OSError when it cannot be read now."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
        raise Damaged(f"its manifest cannot be read ({type(error).__name__})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Damaged("it has another format")
    wanted = {"kind": str, "key": str, "created": float, "depends": dict, "facts": dict, "files": dict}
    if any(not isinstance(manifest.get(name), kind) for name, kind in wanted.items()):
        raise Damaged("its manifest is not complete")
    if manifest.get("sum") != _sum_of(manifest):
        raise Damaged("its manifest does not have the checksum that was written down")
    own = key_of(manifest["kind"], manifest["depends"])
    if manifest["key"] != own or path.name != f"{manifest['kind']}-{own[:32]}":
        raise Damaged("its manifest belongs to another entry")
    return manifest


def _verified(path: Path) -> Entry:
    manifest = _manifest(path)
    there = {each.name for each in path.iterdir()} - {MANIFEST}
    if strangers := there - set(manifest["files"]):
        raise Damaged(f"{min(strangers)} was added by another program")
    for name, wanted in manifest["files"].items():
        if name not in there:
            raise Damaged(f"{name} is missing")
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise Damaged(f"{name} is not a regular file")
        if not isinstance(wanted, dict) or _sha256(file) != wanted.get("sha256"):
            raise Damaged(f"{name} does not have the checksum that was written down")
    return _entry(path, manifest)


def _entry(path: Path, manifest: Mapping[str, Any]) -> Entry:
    try:
        files = {name: str(manifest["files"][name]["sha256"]) for name in sorted(manifest["files"])}
    except (KeyError, TypeError) as error:
        raise Damaged("its manifest is not complete") from error
    return Entry(
        manifest["kind"], manifest["key"], path, manifest["depends"], manifest["facts"], files, manifest["created"]
    )


# Float graphs; 8-bit graphs with their reports; what the gate said of them on one machine.
FLOAT, QUANTISED, JUDGED = "graph", "quantised", "verdict"
ENGINES, TIMINGS = "engine", "timing"

# Of each series: calibrations of one model by one algorithm, float graphs of one model in one precision, engines of
# one graph on one kind of card, timings of one kind of card.
KEPT = 4
# States of machines (card, driver, versions) whose newest verdict is kept, for each model and algorithm: several
# machines may share a folder.
MACHINES = 8

Series = Callable[[Entry], Hashable]


def superseded(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries that may be removed: all verdicts but the newest of each machine, graphs that no kept verdict
    is about, and engines without a graph."""
    by_kind: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda each: (each.created, each.key), reverse=True):
        by_kind[entry.kind].append(entry)
    verdicts = _verdicts(by_kind[JUDGED])
    about = [dict(each.facts.get("graph") or {}) for each in verdicts]
    newest = _newest(by_kind[QUANTISED], _series("model", "algorithm"))
    quantised = [each for each in by_kind[QUANTISED] if each in newest or dict(each.dependencies) in about]
    floats = _newest(by_kind[FLOAT], _series("model", "precision"))
    files = {name for graph in (*quantised, *floats) for name in graph.files.values()}
    alive = [each for each in by_kind[ENGINES] if each.dependencies.get("graph") in files]
    engines = _newest(alive, _series("graph", "precision", "gpu"))
    timings = _newest(by_kind[TIMINGS], _series("gpu", "capability"))
    staying = {each.path for each in (*verdicts, *quantised, *floats, *engines, *timings)}
    known = (FLOAT, QUANTISED, JUDGED, ENGINES, TIMINGS)
    return [each for kind in known for each in by_kind[kind] if each.path not in staying]


def tidy(cache: ArtifactCache) -> int:
    """Remove superseded entries, and return how many."""
    found = superseded(cache.entries())
    for entry in found:
        cache.remove(entry)
    return len(found)


def _series(*names: str) -> Series:
    return lambda entry: tuple(entry.dependencies.get(name) for name in names)


def _newest(newest_first: Sequence[Entry], series: Series, most: int = KEPT) -> list[Entry]:
    counted: dict[Hashable, int] = defaultdict(int)
    kept: list[Entry] = []
    for entry in newest_first:
        counted[series(entry)] += 1
        if counted[series(entry)] <= most:
            kept.append(entry)
    return kept


def _verdicts(newest_first: Sequence[Entry]) -> list[Entry]:
    """Return the newest verdict of each machine, for any texts: only that one is ever read."""

    def machine(entry: Entry) -> Hashable:
        return tuple(sorted((name, str(value)) for name, value in entry.dependencies.items() if name != "texts"))

    return _newest(_newest(newest_first, machine, 1), _series("model", "algorithm"), MACHINES)
