"""The cache folder of graphs, TensorRT engines, and ranges for int8 on CPUs.

An entry is a folder named by a hash of its origin. Graphs with a wrong checksum are removed; of graphs and engines the
newest of each kind and model are kept, and all ranges, which are small.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .backends import DeviceUnavailable

log = logging.getLogger(__name__)

FORMAT = 4  # version of folder and calibration facts; part of each entry's name
GRAPH, MANIFEST = "model.onnx", "manifest.json"
FLOAT, INT8, ENGINE, RANGES = "graph", "int8", "engine", "ranges"  # kinds of entries
KEPT = 8  # newest entries of each kind and model

# Origin of an entry: `model` (SHA-256 of its weights), versions, card, shapes.
Dependencies = Mapping[str, str | int | float | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A verified graph, or ranges. `facts`: data stored with it, such as a verdict."""

    graph: Path
    sha256: str
    facts: Mapping[str, Any]

    def read(self) -> bytes:
        """Return the content. Raises DeviceUnavailable if another process has just replaced or removed it."""
        try:
            content = self.graph.read_bytes()
        except OSError as error:
            raise DeviceUnavailable(f"{self.graph} cannot be read: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise DeviceUnavailable(f"{self.graph} was replaced while it was read: start again")
        return content


def _file(kind: str) -> str:
    return "ranges.safetensors" if kind == RANGES else GRAPH


class ArtifactCache:
    """Processes may share the folder: graphs are renamed into place, so readers never see an incomplete one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, kind: str, depends: Dependencies) -> Path:
        described = json.dumps({"format": FORMAT, "depends": dict(depends)}, sort_keys=True)
        key = hashlib.sha256(described.encode()).hexdigest()
        return self.folder / f"{kind}-{str(depends['model'])[:12]}-{key[:32]}"

    def find(self, kind: str, depends: Dependencies) -> Entry | None:
        """Return the graph of this origin, or None. Removes a damaged graph, but not an unreadable one."""
        path, damage = self.path(kind, depends), ""
        for _ in range(2):  # the first time another process may just replace it
            if not path.exists():
                return None
            try:
                manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
                with (path / _file(kind)).open("rb") as content:
                    if hashlib.file_digest(content, "sha256").hexdigest() == manifest["sha256"]:
                        return Entry(path / _file(kind), manifest["sha256"], dict(manifest["facts"]))
                damage = "its checksum does not fit"
            except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
                damage = str(error)
            except OSError as error:
                log.warning("%s cannot be read: %s", path, error.strerror)
                return None
        log.warning("%s is damaged and was removed: %s", path, damage)
        shutil.rmtree(path, ignore_errors=True)
        return None

    def store(self, kind: str, depends: Dependencies, content: bytes, facts: Mapping[str, Any]) -> Entry:
        """Write or replace a graph or ranges. Raises DeviceUnavailable if the folder cannot be written."""
        manifest = {"depends": dict(depends), "facts": facts, "sha256": hashlib.sha256(content).hexdigest()}
        target = self.path(kind, depends)
        with self._writing() as aside:
            (aside / _file(kind)).write_bytes(content)
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            try:
                os.rename(aside, target)
            except OSError:  # another process has just written the same graph
                if not target.is_dir():
                    raise
        return Entry(target / _file(kind), str(manifest["sha256"]), facts)

    @contextlib.contextmanager
    def trial(self, kind: str, content: bytes) -> Iterator[Entry]:
        """Yield an entry that only this process can find, in a temporary folder. Raises as `store`."""
        with self._writing() as aside:
            (aside / _file(kind)).write_bytes(content)
            yield Entry(aside / _file(kind), hashlib.sha256(content).hexdigest(), {})

    def engine_folder(self, depends: Dependencies) -> Path:
        """Return a folder in which ONNX Runtime keeps TensorRT's engine. Raises DeviceUnavailable."""
        path = self.path(ENGINE, depends)
        with self._writing():
            path.mkdir(exist_ok=True)
        return path

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Path]:
        """Yield a folder to write to, then remove all but the newest entries of each kind and model."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=self.folder, ignore_cleanup_errors=True) as aside:
                yield Path(aside)
            changed: dict[Path, float] = {}
            for path in self.folder.glob("*-*-*"):
                with contextlib.suppress(OSError):  # another process removed it
                    changed[path] = path.stat().st_mtime
            kept: Counter[str] = Counter()
            for path in sorted(changed, key=changed.__getitem__, reverse=True):
                kind_and_model = path.name.rpartition("-")[0]
                kept[kind_and_model] += 1
                if kept[kind_and_model] > KEPT and path.name.partition("-")[0] in (FLOAT, INT8, ENGINE):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise DeviceUnavailable(f"{self.folder} cannot be written to: {error.strerror}") from error
