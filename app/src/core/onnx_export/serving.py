"""Choose and load the graph that serves: the calibrated one where its verdict on this machine allows it, else the float
graph. `path_reason` says why. TensorRT's engines are kept between starts.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..agreement import Bar as Bar
from ..agreement import Verdict
from ..backends import Backend, DeviceUnavailable, ModelUnsupported, OutOfMemory, Vectors
from ..backends.folder import Folder, check_files, display_name, find_folder, read_folder, sha256_of
from ..backends.hashing import PREFIX as HASHING
from ..backends.onnx import OUTPUT, Loaded, OnnxRuntimeBackend, Session, Sessions, loading_errors_mapped
from ..device import Precision
from ..memory import CPU_TOKENS, MemoryLimits
from ..tokens import plan_batches
from .cache import ENGINES as ENGINES
from .cache import FLOAT as FLOAT
from .cache import JUDGED as JUDGED
from .cache import QUANTISED as QUANTISED
from .cache import TIMINGS as TIMINGS
from .cache import ArtifactCache, Building, Dependencies, Entry, tidy
from .calibrators import DEFAULT
from .graph import GraphPrecision, build_graph
from .runtime import BuildOptions as BuildOptions
from .runtime import EngineFolder, Rectangle, ShapeProfile, Site, find_site

log = logging.getLogger(__name__)

GRAPH = "model.onnx"  # the file of every graph in the cache


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder with the hashes of its files."""

    folder: Folder
    weights: str
    tokenizer: str

    @classmethod
    def find(cls, name: str, revision: str | None = None, weights_sha256: str | None = None) -> Model:
        """Raises ModelNotFound, ModelUnsupported, WeightsMismatch."""
        if name.startswith(HASHING):
            raise ModelUnsupported(f"model {name!r} is the test embedder, which has no layers for a graph")
        path = find_folder(name, revision)
        return cls.read(read_folder(path, display_name(name, path)), weights_sha256)

    @classmethod
    def read(cls, folder: Folder, weights_sha256: str | None = None) -> Model:
        weights = check_files(folder, weights_sha256)
        return cls(folder, weights, sha256_of([folder.encoder / "tokenizer.json"]))

    def dependencies(self) -> Dependencies:
        folder = self.folder
        return {
            "model": self.weights,
            "tokenizer": self.tokenizer,
            "pooling": folder.pooling,
            "max_tokens": folder.max_length,
        }


def float_graph(cache: ArtifactCache, model: Model, precision: GraphPrecision, onnx_version: str | None) -> Entry:
    """Return the graph in fp32 or fp16. Raises ModelUnsupported for an architecture without graphs."""
    wanted = {**model.dependencies(), "precision": precision, "onnx": onnx_version}

    def make(building: Building) -> None:
        import onnx

        graph = build_graph(model.folder, precision=precision)
        onnx.save(graph, str(building.path / GRAPH))

    return cache.obtain(FLOAT, wanted, make)[0]


def embedded(backend: Backend, texts: Sequence[str]) -> Vectors:
    """Return float32 (n, dimension), not normalised, in order."""
    tokens = backend.tokenize(texts)
    vectors = np.empty((len(texts), backend.info.dimension), dtype=np.float32)
    multiple = backend.profile.padding_multiple(backend.info.precision)
    for batch in plan_batches([len(ids) for ids in tokens], CPU_TOKENS, multiple, packed=False):
        vectors[batch] = backend.forward(tokens.select(batch))
    return vectors


_TIMING_SUFFIX = ".timing"


class Engines:
    """TensorRT's engine files in the cache, by everything they were built from."""

    def __init__(self, cache: ArtifactCache) -> None:
        self._cache = cache

    def session(
        self, site: Site, graph: Entry, file: str, precision: Precision, shapes: ShapeProfile
    ) -> tuple[Session, str]:
        """Return a TensorRT session over `file` of a verified graph, and a sentence about its engine. TensorRT may
        write beside its files, so it gets a copy that lives as long as the session. Building an engine takes minutes.
        Raises DeviceUnavailable, OutOfMemory."""
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
        """Copy the engine's files and return their hashes; without an engine copy known timings, and return {}."""
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
    """Return everything that an engine depends on."""
    shape = {f"shape_{name}": str(Rectangle(**given)) for name, given in asdict(shapes).items()}
    build = {"workspace_mb": site.build.workspace_mb, "optimization_level": site.build.optimization_level}
    return {"graph": graph.files[file], "precision": precision} | site.card() | shape | build


def _copied(files: list[Path], building: Building) -> None:
    for path in files:
        shutil.copyfile(path, building.path / path.name)


def _sums(folder: Path) -> dict[str, str]:
    """Return the hashes of all files but timings, which may change while an engine is loaded."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != _TIMING_SUFFIX)
    return {path.name: sha256_of([path]) for path in files}


def _blank(rectangle: Rectangle) -> dict[str, NDArray[np.int64]]:
    shape = (rectangle.texts, rectangle.tokens)
    return {"input_ids": np.zeros(shape, np.int64), "attention_mask": np.ones(shape, np.int64)}


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """`enabled`: models run as graphs wherever they can; else only for int8 on a card. `algorithm`: of the calibration
    that serves. `bar`: for its verdict."""

    cache: Path
    enabled: bool = False
    algorithm: str = DEFAULT
    build: BuildOptions = field(default_factory=BuildOptions)
    bar: Bar = field(default_factory=Bar)


@dataclass(frozen=True, slots=True)
class Wanted:
    """As `EngineOptions` has them."""

    model: str
    precision: str = "auto"
    device: str = "auto"
    threads: int | None = None
    weights_sha256: str | None = None
    revision: str | None = None
    limits: MemoryLimits = field(default_factory=MemoryLimits)


class NotAsGraph(DeviceUnavailable):
    """No graph of this model can serve here; the message says why and what to do."""


def load_backend(wanted: Wanted, options: GraphOptions) -> OnnxRuntimeBackend:
    """Load the calibrated graph for precision int8 (or auto with `enabled`) if its verdict passes; else, on a card with
    `enabled`, the float graph. On a CPU only the calibrated graph serves: in float the packed path is faster. Raises
    NotAsGraph when neither can serve, and the errors of loading a model."""
    model = Model.find(wanted.model, wanted.revision, wanted.weights_sha256)
    try:
        found = find_site(wanted.device, options.build, wanted.limits, wanted.threads)
        if found.site.profile.kind == "cuda" and found.site.runtime == "cpu":
            raise NotAsGraph(found.reason)
        serving = GraphServing(found.site, model, ArtifactCache(options.cache), wanted.limits)
        refusal = "" if wanted.precision in ("auto", "int8") else f"precision {wanted.precision} was asked for"
        if not refusal:
            try:
                return serving.int8_backend(options.algorithm, options.bar, found.reason)
            except NotAsGraph as refused:
                refusal = f"not in int8: {refused}"
        if found.site.runtime == "cpu" or not options.enabled:
            raise NotAsGraph(refusal)
        log.info("%s runs as a float graph; %s", model.folder.name, refusal)
        return serving.float_backend(wanted.precision, f"{found.reason}; {refusal}")
    except NotAsGraph:
        raise
    except (DeviceUnavailable, ModelUnsupported, OutOfMemory) as error:
        raise NotAsGraph(str(error)) from error
    except OSError as error:  # a folder that cannot be written, a full disk; without the path
        raise NotAsGraph(f"its files cannot be kept or read ({error.strerror or type(error).__name__})") from error


class GraphServing:
    """Backends of one model on one site."""

    def __init__(self, site: Site, model: Model, cache: ArtifactCache, limits: MemoryLimits | None = None) -> None:
        self._site = site
        self._model = model
        self._cache = cache
        self._limits = limits or MemoryLimits()

    def float_backend(self, requested: str, reason: str) -> OnnxRuntimeBackend:
        precision, why = self._site.float_precision(requested)
        graph = self._float(precision)
        loaded = Loaded(self._model.folder, self._model.weights, self._site.profile, precision, why)
        return OnnxRuntimeBackend(loaded, self._sessions(graph, precision, reason))

    def int8_backend(self, algorithm: str, bar: Bar, reason: str) -> OnnxRuntimeBackend:
        """Load the calibrated graph if its newest verdict here passes the bar. Raises NotAsGraph."""
        if self._site.runtime == "cuda":
            raise NotAsGraph(f"8-bit graphs gain nothing on CUDA alone; {reason}")
        return self.quantised_backend(self._accepted(algorithm, bar), f"{reason}; calibrated by {algorithm}")

    def quantised_backend(self, graph: Entry, reason: str) -> OnnxRuntimeBackend:
        """Load this 8-bit graph, judged or not. Its fingerprint follows its content: another version of the quantiser,
        or another processor, may make another graph of the same texts."""
        variant = f"int8-{graph.files[GRAPH][:12]}"
        site, model = self._site, self._model
        loaded = Loaded(model.folder, model.weights, site.profile, "int8", "asked for", variant)
        return OnnxRuntimeBackend(loaded, self._sessions(graph, "int8", reason))

    def _accepted(self, algorithm: str, bar: Bar) -> Entry:
        judged = self._cache.newest(JUDGED, verdict_dependencies(self._site, self._model, algorithm))
        if judged.entry is None:
            other = f" (found one for something else: {judged.note})" if judged.note else ""
            raise NotAsGraph(f"this machine has no calibration of this model by {algorithm}{other}: owl-sap calibrate")
        verdict = Verdict.from_dict(judged.entry.facts["verdict"]).by(bar)
        if not verdict.accepted:
            raise NotAsGraph(f"the accuracy gate {verdict.reason}")
        graph = self._cache.find(QUANTISED, judged.entry.facts["graph"])
        if graph.entry is None:
            raise NotAsGraph(f"the calibrated graph is gone; {graph.note or 'owl-sap calibrate NAME makes it again'}")
        if graph.entry.files[GRAPH] != judged.entry.facts.get("sum"):
            raise NotAsGraph(
                "the calibrated graph was made again since it was judged: owl-sap calibrate NAME judges it"
            )
        return graph.entry

    def _float(self, precision: GraphPrecision) -> Entry:
        return float_graph(self._cache, self._model, precision, self._site.installed.onnx)

    def _sessions(self, graph: Entry, precision: Precision, reason: str) -> Sessions:
        site = self._site
        if site.runtime == "tensorrt" and precision == "fp32" and site.profile.tf32:
            reason = f"{reason}; in fp32 on CUDA alone, for TensorRT would take TF32"
        elif site.runtime == "tensorrt":
            shapes = site.shapes(self._model.folder.shape, precision, self._limits)
            usual, note = Engines(self._cache).session(site, graph, GRAPH, precision, shapes)
            return Sessions(usual, self._exact, f"{reason}; {note}", shapes.most.texts)
        usual = site.plain(graph.path / GRAPH)
        exact = (lambda: usual) if precision == "fp32" else self._exact
        return Sessions(usual, exact, reason)

    def _exact(self) -> Session:
        """Return the fp32 graph without TensorRT: the few rows that overflowed are not worth an engine."""
        return self._site.plain(self._float("fp32").path / GRAPH)


def verdict_dependencies(site: Site, model: Model, algorithm: str) -> Dependencies:
    """Return what must be equal for a verdict to hold here."""
    return {**model.dependencies(), "algorithm": algorithm, "runtime": site.runtime, **site.card()}
