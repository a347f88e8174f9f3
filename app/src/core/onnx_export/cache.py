"""Calibrated graphs and built engines in one folder, each under the sum of everything that it depends on. What is
damaged or made by something else is never loaded: it is removed, with a sentence, and made again. Knows files, not
what they hold.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..backends import DeviceUnavailable

log = logging.getLogger(__name__)

FORMAT = 1
"""Of this folder and of what calibration writes into it; another number is another file."""
MANIFEST = "manifest.json"
_BUILDING = ".building-"
_ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a half-made entry belongs to a process that died."""

Dependencies = Mapping[str, str | int | float | None]
"""What an entry was made from: model, texts, algorithm, versions, card, shapes ..."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder whose files have been verified (but for `ArtifactCache.entries`). `facts`: what its maker wrote down
    about it, such as a report; `files`: names, and the SHA-256 of each."""

    kind: str
    key: str
    path: Path
    dependencies: Dependencies
    facts: Mapping[str, Any]
    files: Mapping[str, str]
    created: float


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, or why there is none; `note` is empty where nothing was there."""

    entry: Entry | None
    note: str = ""


class Damaged(Exception):
    """An entry is not what was written; the message says how."""


@dataclass(slots=True)
class Building:
    """A folder to write an entry into; `facts` go into its manifest."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)


def key_of(kind: str, dependencies: Dependencies) -> str:
    """Another one whenever anything in `dependencies`, or the format, is."""
    described = {"format": FORMAT, "kind": kind, "depends": dict(dependencies)}
    return hashlib.sha256(json.dumps(described, sort_keys=True, allow_nan=False).encode()).hexdigest()


def texts_hash(texts: Sequence[str]) -> str:
    """Of the texts in their order; lengths first, so that no two lists run together."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class ArtifactCache:
    """Entries are written beside and renamed into place, so that a reader sees a whole one or none. Processes may share
    the folder: who comes second finds the entry of the first, which is as good."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, kind: str, dependencies: Dependencies) -> Found:
        """The entry made from exactly this. A damaged one is removed."""
        path = self._path(kind, key_of(kind, dependencies))
        return self._checked(path) if path.exists() else Found(None)

    def newest(self, kind: str, dependencies: Dependencies) -> Found:
        """The newest entry whose own dependencies agree with these, whatever else it depends on. Where there are only
        others of the kind for the same `model`, the note says in what they differ."""
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
        """Write the files of an entry into the folder given; it exists once the block ends without an error. An entry
        of the same key is replaced. Raises DeviceUnavailable where the folder cannot be written to."""
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
        """The entry, made where there is none; whether it was there; and a sentence where a damaged one was removed.
        What `make` raises comes out, and nothing is left behind."""
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
        """All there are, by their manifests: their files were not looked at. What cannot be read is left out."""
        found = []
        for path in self.folder.glob("*-*"):
            if not path.name.startswith(_BUILDING):
                with contextlib.suppress(Damaged, OSError):
                    found.append(_entry(path, _manifest(path)))
        return found

    def remove(self, entry: Entry) -> None:
        """In one step for whoever reads: a reader finds all of it, or nothing. Nothing happens where it cannot be."""
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
        """What cannot be read at the moment (no permission, no file handle, just exchanged) is not used, but stays."""
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
        """What processes that died have left half-made."""
        for path in self.folder.glob(f"{_BUILDING}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                    shutil.rmtree(path, ignore_errors=True)


def _unread(path: Path, error: OSError) -> str:
    return f"{path.name} in the cache cannot be read ({error.strerror or type(error).__name__})"


def _difference(had: Dependencies, wanted: Dependencies, names: Sequence[str]) -> str:
    return ", ".join(f"{name} was {had.get(name)} and is {wanted[name]}" for name in names)


def _seal(building: Building, kind: str, key: str, dependencies: Dependencies) -> None:
    """Note every file with its sum, all on disk before the folder gets its name."""
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
    """Raises Damaged for anything that `_seal` has not written for this very folder, OSError where that cannot be told
    now."""
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
        raise Damaged(f"{min(strangers)} was put there by somebody else")
    for name, wanted in manifest["files"].items():
        if name not in there:
            raise Damaged(f"{name} is missing")
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise Damaged(f"{name} is no plain file")
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
