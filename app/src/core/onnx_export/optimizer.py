"""`T4TensorRTOptimizer`: calibrate a model on the user's texts, judge the 8-bit graph on texts that were held back, and
keep it in the cache; on a card, build its engine. Without a card the graph is judged on the CPU.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..agreement import LEAST_TEXTS, Bar, Verdict, judge
from ..backends import EngineError, ModelUnsupported, Vectors
from ..backends.folder import PACKAGED, Folder, read_folder
from ..backends.tokenizing import RustTokenizer
from ..backends.torch.backend import TorchBackend, TorchOptions
from ..memory import MemoryLimits
from ..t4_config import T4GPUConfig
from .cache import ArtifactCache, Building, Dependencies, Entry, texts_hash, tidy
from .calibrators import ALGORITHMS, DEFAULT, Algorithm
from .graph import build_graph
from .quantise import quantise
from .runtime import BuildOptions, Site, find_site
from .serving import GRAPH, JUDGED, QUANTISED, GraphServing, Model, embedded, verdict_dependencies

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

HELD_BACK = 5  # one text in so many judges and does not calibrate
MOST_JUDGES = 400


class TooFewTexts(EngineError):
    """Not enough distinct texts to calibrate and to judge."""


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Folder of graphs and engines, device, TensorRT's limits, and the bar of the gate."""

    cache: Path = field(default_factory=lambda: Path(".owl-sap") / "tensorrt")
    device: str = "auto"
    build: BuildOptions = field(default_factory=BuildOptions)
    bar: Bar = field(default_factory=Bar)
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Optimized:
    """`path`: the 8-bit graph, which serves only if `accepted`. `report`: the quantiser's figures. `engine`: a sentence
    about TensorRT's engine, None without TensorRT. `cached`: the calibration came from the cache."""

    name: str
    accepted: bool
    reason: str
    path: Path
    algorithm: str
    calibrated_on: int
    verdict: Verdict
    report: Mapping[str, Any]
    runtime: str
    device: str
    engine: str | None
    cached: bool
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the path, which holds on this machine only."""
        values = asdict(self)
        del values["path"]
        return values | {"report": dict(self.report)}


Quantiser = Callable[[Folder, Sequence[str], str], "tuple[onnx.ModelProto, Mapping[str, Any]]"]
"""Model, texts, algorithm -> the 8-bit graph and its figures, `int8_share` among them."""


class T4TensorRTOptimizer:
    """Calibrates any number of models."""

    def __init__(
        self, options: OptimizerOptions | T4GPUConfig | None = None, *, quantiser: Quantiser | None = None
    ) -> None:
        """With a T4GPUConfig without `calibration_cache`, results live as long as this object."""
        if isinstance(options, T4GPUConfig):
            options = self._configured(options)
        self._options = options or OptimizerOptions()
        self._cache = ArtifactCache(self._options.cache)
        self._quantiser = quantiser or quantised_graph

    def _configured(self, config: T4GPUConfig) -> OptimizerOptions:
        kept = config.calibration_cache
        folder = Path(tempfile.mkdtemp(prefix="owl-sap-calibration-") if kept is None else kept)
        if kept is None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        build = BuildOptions(config.workspace_mb, config.optimization_level)
        return OptimizerOptions(folder, build=build, limits=MemoryLimits(config.memory_fraction))

    def optimize_model_with_calibration(
        self,
        model: Model | str | Path | Folder | Any,
        name: str,
        data: Sequence[str],
        calibration_algorithm: str = DEFAULT,
    ) -> Optimized:
        """Calibrate and judge `model`: a packaged name, a folder, a hub id in the local cache, or a
        SentenceTransformer. `data`: about 1,000 texts like those it will embed; one in five judges. A calibration with
        the same texts comes from the cache. Calibrating takes a minute or two on two cores, building an engine longer.

        Raises TooFewTexts, ModelNotFound, ModelUnsupported, DeviceUnavailable, ValueError for an unknown algorithm.
        """
        if calibration_algorithm not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {calibration_algorithm!r}; use {', '.join(ALGORITHMS)}")
        learnt, judges = divided(data)
        with readable(model) as found:
            run = _Run(self._options, self._cache, found, name)
            return run.calibrate(learnt, judges, calibration_algorithm, self._quantiser)


def divided(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the distinct texts into those that calibrate and those that judge, both spread evenly. Raises
    TooFewTexts."""
    distinct = list(dict.fromkeys(text for text in texts if text.strip()))
    judges = distinct[HELD_BACK - 1 :: HELD_BACK]
    if len(judges) < LEAST_TEXTS:
        raise TooFewTexts(
            f"{len(distinct)} distinct texts are too few: calibration needs at least {LEAST_TEXTS * HELD_BACK}, one in"
            f" {HELD_BACK} of them to judge the result; about 1,000 are recommended"
        )
    held = set(judges)
    if len(judges) > MOST_JUDGES:
        judges = [judges[place] for place in np.linspace(0, len(judges) - 1, MOST_JUDGES, dtype=int)]
    return [text for text in distinct if text not in held], judges


@contextmanager
def readable(model: Model | str | Path | Folder | Any) -> Iterator[Model]:
    """Yield the model as files; a loaded one is written to a temporary folder."""
    if isinstance(model, Model):
        yield model
    elif isinstance(model, Folder):
        yield Model.read(model)
    elif isinstance(model, str | Path):
        yield Model.find(str(model))
    elif callable(getattr(model, "save", None)) and hasattr(model, "tokenizer"):
        with tempfile.TemporaryDirectory(prefix="owl-sap-model-") as folder:
            model.save(folder)
            yield Model.read(read_folder(Path(folder), "loaded model"))
    else:
        raise ModelUnsupported(
            f"a {type(model).__name__} cannot be calibrated: pass a packaged name, a folder, or a SentenceTransformer"
        )


class _Run:
    """One calibration of one model."""

    def __init__(self, options: OptimizerOptions, cache: ArtifactCache, model: Model, name: str) -> None:
        self._options = options
        self._cache = cache
        self._model = model
        self._name = name
        found = find_site(options.device, options.build, options.limits, options.threads)
        if found.site.profile.kind == "cuda" and found.site.runtime != "tensorrt":
            log.warning("%s; calibrated and judged on the CPU", found.reason)
            found = find_site("cpu", options.build, options.limits, options.threads)
        self._site, self._runs_on = found.site, found.reason

    def calibrate(
        self, learnt: Sequence[str], judges: Sequence[str], algorithm: str, quantiser: Quantiser
    ) -> Optimized:
        started = time.perf_counter()
        site, model = self._site, self._model
        depends = quantised_dependencies(site, model, learnt, judges, algorithm)

        def make(building: Building) -> None:
            import onnx

            made, report = quantiser(model.folder, learnt, algorithm)
            onnx.save(made, str(building.path / GRAPH))
            building.facts["report"] = dict(report)

        graph, cached, note = self._cache.obtain(QUANTISED, depends, make)
        serving = GraphServing(site, model, self._cache, self._options.limits)
        backend = serving.quantised_backend(graph, self._runs_on)
        try:
            found = embedded(backend, judges)
            engine = backend.info.path_reason if site.runtime == "tensorrt" else None
        finally:
            backend.close()
        verdict = judge(self._exact(judges), found, float(graph.facts["report"]["int8_share"]), self._options.bar)
        self._remember(verdict, graph, algorithm)
        if not verdict.accepted:
            log.warning("%s: INT8 by %s was %s; the float precision stays", self._name, algorithm, verdict.reason)
        return Optimized(
            name=self._name,
            accepted=verdict.accepted,
            reason=f"{verdict.reason}; {note}" if note else verdict.reason,
            path=graph.path / GRAPH,
            algorithm=algorithm,
            calibrated_on=len(learnt),
            verdict=verdict,
            report=graph.facts["report"],
            runtime=site.runtime,
            device=site.profile.name,
            engine=engine,
            cached=cached,
            seconds=round(time.perf_counter() - started, 2),
        )

    def _exact(self, texts: Sequence[str]) -> Vectors:
        """Embed with our own fp32 path, not with a graph, so that errors of graphs are found too."""
        folder, site = self._model.folder, self._site
        name = folder.name if folder.name in PACKAGED else str(folder.path)
        packed = folder.name in PACKAGED  # else transformers, against which every packed path is tested
        options = TorchOptions(name, "fp32", site.profile.torch_name, self._options.threads, packed=packed)
        backend = TorchBackend.load(options)
        try:
            return embedded(backend, texts)
        finally:
            backend.close()

    def _remember(self, verdict: Verdict, graph: Entry, algorithm: str) -> None:
        """Store the verdict that `serving` asks for; the newest on a machine counts."""
        judged = {**verdict_dependencies(self._site, self._model, algorithm), "texts": graph.dependencies["texts"]}
        with self._cache.build(JUDGED, judged) as building:
            building.facts["verdict"] = verdict.as_dict()
            building.facts["graph"] = dict(graph.dependencies)
            building.facts["sum"] = graph.files[GRAPH]
        tidy(self._cache)


def quantised_graph(folder: Folder, texts: Sequence[str], algorithm: str) -> tuple[onnx.ModelProto, Mapping[str, Any]]:
    """Quantise with `quantise`."""
    tokens = RustTokenizer.load(folder).ids(texts)
    graph, report = quantise(build_graph(folder), tokens, cast(Algorithm, algorithm))
    return graph, {**report.to_dict(), "int8_share": report.share}


def quantised_dependencies(
    site: Site, model: Model, learnt: Sequence[str], judges: Sequence[str], algorithm: str
) -> Dependencies:
    """Return everything that an 8-bit graph depends on."""
    return {
        **model.dependencies(),
        "algorithm": algorithm,
        "texts": texts_hash([*learnt, *judges]),
        "learnt": len(learnt),
        "onnx": site.installed.onnx,
        "onnxruntime": site.installed.onnxruntime,
    }
