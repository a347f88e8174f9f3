"""TensorRT's engine files between one start and the next: verified before they are used, built where there are none,
kept by everything that they were built from. Knows caches and sessions; not which graph is good enough.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..backends.folder import sha256_of
from ..backends.onnx import OUTPUT, Session, loading_errors_mapped
from ..device import Precision
from .cache import ArtifactCache, Building, Dependencies, Entry
from .providers import EngineFolder, Rectangle, ShapeProfile
from .retention import ENGINES as ENGINES
from .retention import TIMINGS as TIMINGS
from .retention import tidy
from .sites import Site

log = logging.getLogger(__name__)

_TIMING_SUFFIX = ".timing"


class Engines:
    """TensorRT's files by what they were built from."""

    def __init__(self, cache: ArtifactCache) -> None:
        self._cache = cache

    def session(
        self, site: Site, graph: Entry, file: str, precision: Precision, shapes: ShapeProfile
    ) -> tuple[Session, str]:
        """A session through TensorRT over `file` of a verified graph, and in words whether its engine was there.
        TensorRT works in a copy of the verified files, which lives as long as the session: it may write beside them.
        Building takes minutes. Raises DeviceUnavailable, OutOfMemory."""
        wanted = engine_dependencies(site, graph, file, precision, shapes)
        found = self._cache.find(ENGINES, wanted)
        work = Path(tempfile.mkdtemp(prefix="owl-sap-tensorrt-"))
        try:
            before = self._unpacked(found.entry, site, work)
            started = time.perf_counter()
            session = site.through_tensorrt(graph.path / file, precision, shapes, EngineFolder(str(work), str(work)))
            with loading_errors_mapped():
                for rectangle in (shapes.least, shapes.most):
                    session.run([OUTPUT], _blank(rectangle))
            seconds = time.perf_counter() - started
            after = _sums(work)
            if after != before:
                self._keep(work, wanted, site, seconds)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        weakref.finalize(session, shutil.rmtree, work, ignore_errors=True)
        if not after:
            return session, "TensorRT took no part of the graph"
        if after == before:
            return session, "its engine came from the cache"
        log.info("TensorRT built an engine for %s in %.0f s", site.profile.name, seconds)
        built = f"its engine was built in {seconds:.0f} s"
        return session, f"{built}; {found.note}" if found.note else built

    def _unpacked(self, engine: Entry | None, site: Site, work: Path) -> Mapping[str, str]:
        """Sums of the engine's files; empty where it is to be built, with what is known of kernels' timings."""
        if engine is not None:
            for name in engine.files:
                shutil.copyfile(engine.path / name, work / name)
            return _sums(work)
        timings = self._cache.find(TIMINGS, site.card()).entry
        for name in timings.files if timings is not None else ():
            assert timings is not None
            shutil.copyfile(timings.path / name, work / name)
        return {}

    def _keep(self, work: Path, wanted: Dependencies, site: Site, seconds: float) -> None:
        files = [path for path in sorted(work.iterdir()) if path.is_file()]
        engines = [path for path in files if path.suffix != _TIMING_SUFFIX]
        timings = [path for path in files if path.suffix == _TIMING_SUFFIX]
        with self._cache.build(ENGINES, wanted) as building:
            building.facts["build_seconds"] = round(seconds, 1)
            _copied(engines, building)
        if timings:
            with self._cache.build(TIMINGS, site.card()) as building:
                _copied(timings, building)
        tidy(self._cache)


def engine_dependencies(
    site: Site, graph: Entry, file: str, precision: Precision, shapes: ShapeProfile
) -> dict[str, str | int | float | None]:
    """Everything that makes another engine."""
    shape = {f"shape_{name}": str(Rectangle(**given)) for name, given in asdict(shapes).items()}
    build = {"workspace_mb": site.build.workspace_mb, "optimization_level": site.build.optimization_level}
    return {"graph": graph.files[file], "precision": precision} | site.card() | shape | build


def _copied(files: list[Path], building: Building) -> None:
    for path in files:
        shutil.copyfile(path, building.path / path.name)


def _sums(folder: Path) -> dict[str, str]:
    """Of engines and what belongs to them; timings may change while an engine is loaded."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != _TIMING_SUFFIX)
    return {path.name: sha256_of([path]) for path in files}


def _blank(rectangle: Rectangle) -> dict[str, NDArray[np.int64]]:
    shape = (rectangle.texts, rectangle.tokens)
    return {"input_ids": np.zeros(shape, np.int64), "attention_mask": np.ones(shape, np.int64)}
