"""Which graph serves, and on what: float, or the calibrated one where its verdict on this very machine allows it. What
is chosen, and why nothing better, is said in words. Knows the cache's entries; makes none but float graphs and engines.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from ..backends import DeviceUnavailable, ModelUnsupported, OutOfMemory
from ..backends.onnx import Loaded, OnnxRuntimeBackend, Session, Sessions
from ..device import Precision
from ..memory import MemoryLimits
from .cache import ArtifactCache, Dependencies, Entry
from .calibrators import DEFAULT
from .engines import Engines
from .gate import Bar as Bar
from .gate import Verdict
from .graph import GraphPrecision
from .models import GRAPH, Model, float_graph
from .providers import BuildOptions as BuildOptions
from .retention import JUDGED as JUDGED
from .retention import QUANTISED as QUANTISED
from .sites import Found, Site, find_site

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Whether and how models run as graphs. `enabled`: wherever they can; else only for int8 on a card. `algorithm` is
    that of the calibration to serve, `bar` what its verdict is measured by."""

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
    """No graph of this model may or can serve here; the message says why and what to do."""


def load_backend(wanted: Wanted, options: GraphOptions) -> OnnxRuntimeBackend:
    """On a card: the calibrated graph where `precision` is int8, or auto with `enabled`, and the gate let it pass;
    else, with `enabled`, the float graph, and its `path_reason` says why. On a CPU only the calibrated graph: in float
    the packed path is better. Raises NotAsGraph where neither can be, and the errors of loading a model."""
    model = Model.find(wanted.model, wanted.revision, wanted.weights_sha256)
    try:
        found = find_site(wanted.device, options.build, wanted.limits, wanted.threads)
        _check_runtime(found)
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
    except OSError as error:  # a folder that cannot be written, a full disk; the path is nobody's business
        raise NotAsGraph(f"its files cannot be kept or read ({error.strerror or type(error).__name__})") from error


def _check_runtime(found: Found) -> None:
    if found.site.profile.kind == "cuda" and found.site.runtime == "cpu":
        raise NotAsGraph(found.reason)


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
        """The calibrated graph, if its newest verdict here passes the bar. Raises NotAsGraph."""
        if self._site.runtime == "cuda":
            raise NotAsGraph(f"8-bit graphs gain nothing on CUDA alone; {reason}")
        return self.quantised_backend(self._accepted(algorithm, bar), f"{reason}; calibrated by {algorithm}")

    def quantised_backend(self, graph: Entry, reason: str) -> OnnxRuntimeBackend:
        """This 8-bit graph, judged or not. Its family goes by its content: another version of the quantiser, or another
        processor, may make another graph of the same texts."""
        variant = f"int8-{graph.files[GRAPH][:12]}"
        site, model = self._site, self._model
        loaded = Loaded(model.folder, model.weights, site.profile, "int8", "asked for", variant)
        return OnnxRuntimeBackend(loaded, self._sessions(graph, "int8", reason))

    def _accepted(self, algorithm: str, bar: Bar) -> Entry:
        judged = self._cache.newest(JUDGED, verdict_dependencies(self._site, self._model, algorithm))
        if judged.entry is None:
            other = f" (one for something else is there: {judged.note})" if judged.note else ""
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
        """The fp32 graph, without TensorRT: for the few rows that overflowed it is not worth an engine."""
        return self._site.plain(self._float("fp32").path / GRAPH)


def verdict_dependencies(site: Site, model: Model, algorithm: str) -> Dependencies:
    """What a verdict must have been given on, to hold here."""
    return {**model.dependencies(), "algorithm": algorithm, "runtime": site.runtime, **site.card()}
