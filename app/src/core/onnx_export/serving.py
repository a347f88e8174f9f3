"""Choose and load the graph that serves: the calibrated one if its verdict on this machine passes, else the float
graph. `path_reason` gives the reason. TensorRT's engines are cached.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..backends import DeviceUnavailable, ModelUnsupported, OutOfMemory
from ..backends.folder import Folder, check_files, display_name, find_folder, read_folder, sha256_of
from ..backends.hashing import PREFIX as HASHING
from ..backends.onnx import OUTPUT, Loaded, OnnxRuntimeBackend, Session, Sessions, loading_errors_mapped
from ..device import Precision
from ..memory import MemoryLimits
from .cache import FLOAT, INT8, ArtifactCache, Dependencies, Entry
from .graph import ATTENTION_MASK, INPUT_IDS, GraphPrecision, build_graph
from .quantise import DEFAULT
from .runtime import BuildOptions as BuildOptions
from .runtime import Shapes, Site, find_site

if TYPE_CHECKING:
    from ..backends.torch.backend import TorchOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder with the hashes of its files."""

    folder: Folder
    weights: str
    tokenizer: str

    @classmethod
    def find(cls, name: str, revision: str | None = None, weights_sha256: str | None = None) -> Model:
        """Find and read a model. Raises ModelNotFound, ModelUnsupported, WeightsMismatch."""
        if name.startswith(HASHING):
            raise ModelUnsupported(f"model {name!r} is the test embedder, which has no layers for a graph")
        path = find_folder(name, revision)
        return cls.read(read_folder(path, display_name(name, path)), weights_sha256)

    @classmethod
    def read(cls, folder: Folder, weights_sha256: str | None = None) -> Model:
        weights = check_files(folder, weights_sha256)
        return cls(folder, weights, sha256_of([folder.encoder / "tokenizer.json"]))

    def dependencies(self) -> dict[str, str | int | float | None]:
        folder = self.folder
        return {
            "model": self.weights,
            "tokenizer": self.tokenizer,
            "pooling": folder.pooling,
            "max_tokens": folder.max_length,
        }


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """`enabled`: use graphs for all precisions that have them, else only for int8 on a card; `algorithm`: of the
    calibration that serves."""

    cache: Path
    enabled: bool = False
    algorithm: str = DEFAULT
    build: BuildOptions = field(default_factory=BuildOptions)


class NotAsGraph(DeviceUnavailable):
    """No graph of this model can serve here; the message says why and what to do."""


def load_backend(wanted: TorchOptions, options: GraphOptions, limits: MemoryLimits) -> OnnxRuntimeBackend:
    """Load the calibrated graph for int8 or auto if its verdict passes; else, on a card with `enabled`, the float
    graph. On a CPU the packed path is faster than a float graph. Raises NotAsGraph if neither can serve, and errors of
    `Model.find`."""
    model = Model.find(wanted.model, wanted.revision, wanted.weights_sha256)
    try:
        site = find_site(wanted.device, options.build, limits, wanted.threads)
        if site.profile.kind == "cuda" and site.runtime == "cpu":
            raise NotAsGraph(site.reason)
        serving = GraphServing(site, model, ArtifactCache(options.cache), limits)
        refusal = f"precision {wanted.precision} was asked for"
        if wanted.precision in ("auto", "int8"):
            try:
                return serving.int8_backend(serving.accepted(options.algorithm), options.algorithm)
            except NotAsGraph as refused:
                refusal = f"not in int8: {refused}"
        if site.runtime == "cpu" or not options.enabled:
            raise NotAsGraph(refusal)
        log.info("%s runs as a float graph; %s", model.folder.name, refusal)
        return serving.float_backend(wanted.precision, refusal)
    except NotAsGraph:
        raise
    except (DeviceUnavailable, ModelUnsupported, OutOfMemory) as error:
        raise NotAsGraph(str(error)) from error


class GraphServing:
    """Backends of one model on one site."""

    def __init__(self, site: Site, model: Model, cache: ArtifactCache, limits: MemoryLimits | None = None) -> None:
        self._site = site
        self._model = model
        self._cache = cache
        self._limits = limits or MemoryLimits()

    def float_backend(self, requested: str, reason: str = "") -> OnnxRuntimeBackend:
        precision, why = self._site.float_precision(requested)
        graph = self._float(precision)
        loaded = Loaded(self._model.folder, self._model.weights, self._site.profile, precision, why)
        return OnnxRuntimeBackend(loaded, self._sessions(graph, precision, reason))

    def int8_backend(self, graph: Entry, algorithm: str) -> OnnxRuntimeBackend:
        """Load an 8-bit graph, with or without a verdict. The engine's fingerprint contains the graph's hash: another
        quantiser version or processor may make another graph from the same texts."""
        site, model = self._site, self._model
        loaded = Loaded(model.folder, model.weights, site.profile, "int8", "asked for", f"int8-{graph.sha256[:12]}")
        return OnnxRuntimeBackend(loaded, self._sessions(graph, "int8", f"calibrated by {algorithm}"))

    def calibration(self, algorithm: str) -> Dependencies:
        """Return the cache key of a calibrated graph and its verdict: machine, model and algorithm."""
        return {**self._model.dependencies(), "algorithm": algorithm, **self._site.card()}

    def accepted(self, algorithm: str) -> Entry:
        """Return the calibrated graph if it passed the accuracy gate here. Raises NotAsGraph."""
        if self._site.runtime == "cuda":
            raise NotAsGraph(f"8-bit graphs gain nothing on CUDA alone; {self._site.reason}")
        graph = self._cache.find(INT8, self.calibration(algorithm))
        if graph is None or "verdict" not in graph.facts:
            raise NotAsGraph(
                f"this machine (card, driver, versions) has no calibration of this model by {algorithm}:"
                " owl-sap calibrate NAME makes one"
            )
        if not graph.facts["verdict"]["accepted"]:
            raise NotAsGraph(f"the accuracy gate {graph.facts['verdict']['reason']}")
        return graph

    def _float(self, precision: GraphPrecision) -> Entry:
        depends = {**self._model.dependencies(), "precision": precision, "onnx": self._site.installed.onnx}
        graph = self._cache.find(FLOAT, depends)
        if graph is None:
            graph = self._cache.store(FLOAT, depends, build_graph(self._model.folder, precision=precision), {})
        return graph

    def _sessions(self, graph: Entry, precision: Precision, reason: str) -> Sessions:
        site = self._site
        reason = "; ".join(part for part in (site.reason, reason) if part)
        if site.runtime == "tensorrt" and precision == "fp32" and site.profile.tf32:
            reason += "; in fp32 on CUDA alone, for TensorRT would take TF32"
        elif site.runtime == "tensorrt":
            shapes = site.shapes(self._model.folder.shape, precision, self._limits)
            usual, note = self._through_tensorrt(graph, precision, shapes)
            return Sessions(usual, self._exact, f"{reason}; {note}", shapes.texts)
        usual = site.session(graph.graph)
        exact = (lambda: usual) if precision == "fp32" else self._exact
        return Sessions(usual, exact, reason)

    def _exact(self) -> Session:
        """Return a session for rows that overflowed, in fp32 without TensorRT: they are too few for an engine."""
        return self._site.session(self._float("fp32").graph)

    def _through_tensorrt(self, graph: Entry, precision: Precision, shapes: Shapes) -> tuple[Session, str]:
        """Return a TensorRT session and a sentence about its engine, which takes minutes to build. A cached engine that
        does not load is rebuilt. Raises DeviceUnavailable, OutOfMemory."""
        site, build = self._site, self._site.build
        depends = {"model": self._model.weights, "graph": graph.sha256, "precision": precision, **site.card()}
        depends |= {"texts": shapes.texts, "tokens": shapes.tokens}
        depends |= {"workspace_mb": build.workspace_mb, "optimization_level": build.optimization_level}
        while True:
            folder = self._cache.engine_folder(depends)
            cached = any(folder.iterdir())
            started = time.perf_counter()
            try:
                session = site.tensorrt_session(graph.graph, precision, shapes, folder)
                with loading_errors_mapped():
                    for texts, tokens in ((1, 1), (shapes.texts, shapes.tokens)):
                        ids = np.zeros((texts, tokens), np.int64)
                        session.run([OUTPUT], {INPUT_IDS: ids, ATTENTION_MASK: np.ones_like(ids)})
            except DeviceUnavailable as error:
                shutil.rmtree(folder, ignore_errors=True)
                if not cached:
                    raise
                log.warning("TensorRT's engine in [tensorrt] cache does not load and is built again: %s", error)
                continue
            if not any(folder.iterdir()):
                return session, "TensorRT took no part of the graph"
            seconds = time.perf_counter() - started
            return session, "its engine came from the cache" if cached else f"its engine was built in {seconds:.0f} s"
