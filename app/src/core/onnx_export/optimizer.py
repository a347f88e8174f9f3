"""`T4TensorRTOptimizer`: calibrate a model on the user's texts, judge the 8-bit graph on held-back texts, and cache it.

On a card it also builds the engine; without one the graph is judged on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..agreement import LEAST_TEXTS, Verdict, judge
from ..backends import Backend, EngineError, ModelUnsupported, Vectors
from ..backends.folder import PACKAGED, Folder, read_folder
from ..backends.torch.backend import TorchBackend, TorchOptions
from ..device import PRECISIONS
from ..memory import CPU_TOKENS, MemoryLimits
from ..tokens import plan_batches
from .cache import INT8, ArtifactCache
from .quantise import ALGORITHMS, DEFAULT, quantise
from .runtime import BuildOptions, find_site
from .serving import GraphServing, Model

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

HELD_BACK = 5  # one text in five judges and does not calibrate
MOST_JUDGES = 400
# Model, texts, algorithm -> the 8-bit graph and its figures, including `int8_share`.
Quantiser = Callable[[Folder, Sequence[str], str], "tuple[onnx.ModelProto, Mapping[str, Any]]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class T4GPUConfig:
    """The guides' switches: the variables `T4_GPU_` and the name in capitals, then their further arguments. What a card
    makes of them is in docs/gpu.md. Raises ValueError naming the field."""

    fp16_mode: bool = True  # False: fp32 everywhere
    int8_mode: bool = False  # used only if the accuracy gate lets it through
    max_workspace_size: int = 4 << 30  # bytes of the card that TensorRT may use while it tries kernels
    dynamic_batch_size: bool = True  # changes nothing: batches are planned by tokens from the memory that is free
    enable_profiling: bool = False  # NVTX ranges
    enable_tensor_cores: bool = True  # False: fp32 everywhere, which uses none on any card
    enable_sparse: bool = False  # changes nothing: it needs weights that were pruned for 2:4 sparsity
    memory_fraction: float = 0.8  # share of the card's memory for this process, weights included
    max_batch_size: int = 64  # upper bound of `T4MemoryManager.calculate_optimal_batch_size`
    optimization_level: int = 3  # TensorRT's builder, 0 (fast to build) to 5 (fast to run)
    precision: str = "auto"  # as `embedding.precision`
    calibration_cache: str | Path | None = None  # folder of calibrations and engines; None keeps nothing

    def __post_init__(self) -> None:
        bounds = {
            "max_workspace_size": (self.max_workspace_size >= 1 << 20, "bytes, at least 1048576"),
            "memory_fraction": (0 < self.memory_fraction <= 1, "above 0 and at most 1"),
            "max_batch_size": (self.max_batch_size >= 1, "at least 1"),
            "optimization_level": (self.optimization_level in range(6), "0 to 5"),
            "precision": (self.precision in ("auto", *PRECISIONS), f"one of auto, {', '.join(PRECISIONS)}"),
        }
        for name, (good, wanted) in bounds.items():
            if not good:
                raise ValueError(f"T4GPUConfig.{name} must be {wanted}, not {getattr(self, name)!r}")

    @property
    def embedding_precision(self) -> str:
        """Return the `embedding.precision`: fp32 if half precision or tensor cores are switched off."""
        if self.precision != "auto":
            return self.precision
        return "auto" if self.fp16_mode and self.enable_tensor_cores else "fp32"


class TooFewTexts(EngineError):
    """Not enough distinct texts to calibrate and to judge."""


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Folder of graphs and engines, device and TensorRT's limits."""

    cache: Path = field(default_factory=lambda: Path(".owl-sap") / "tensorrt")
    device: str = "auto"
    build: BuildOptions = field(default_factory=BuildOptions)
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Optimized:
    """`path`: the 8-bit graph, which serves only if `accepted`; `report`: the quantiser's figures; `engine`: a sentence
    about TensorRT's engine, or None; `cached`: the calibration came from the cache."""

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
        """Return all fields except the local path."""
        values = asdict(self)
        del values["path"]
        return values


class T4TensorRTOptimizer:
    """Calibrates any number of models."""

    def __init__(
        self, options: OptimizerOptions | T4GPUConfig | None = None, *, quantiser: Quantiser = quantise
    ) -> None:
        """With a T4GPUConfig without `calibration_cache`, results are deleted with this object."""
        if isinstance(options, T4GPUConfig):
            folder = options.calibration_cache
            if folder is None:
                folder = tempfile.mkdtemp(prefix="owl-sap-calibration-")
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            build = BuildOptions(options.max_workspace_size >> 20, options.optimization_level)
            options = OptimizerOptions(Path(folder), build=build, limits=MemoryLimits(options.memory_fraction))
        self._options = options or OptimizerOptions()
        self._cache = ArtifactCache(self._options.cache)
        self._quantiser = quantiser

    def optimize_model_with_calibration(
        self,
        model: Model | str | Path | Any,
        name: str,
        data: Sequence[str],
        calibration_algorithm: str = DEFAULT,
    ) -> Optimized:
        """Calibrate and judge `model`: a packaged name, folder, cached hub id, or SentenceTransformer.

        `data`: about 1,000 texts like those it will embed; one in five judges. A calibration with the same texts comes
        from the cache. Building an engine takes minutes.

        Raises TooFewTexts, ModelNotFound, ModelUnsupported, DeviceUnavailable, ValueError for an unknown algorithm.
        """
        if calibration_algorithm not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {calibration_algorithm!r}; use {', '.join(ALGORITHMS)}")
        learnt, judges = divided(data)
        with _readable(model) as found:
            return self._calibrated(found, name, learnt, judges, calibration_algorithm)

    def _calibrated(
        self, model: Model, name: str, learnt: Sequence[str], judges: Sequence[str], algorithm: str
    ) -> Optimized:
        started, options = time.perf_counter(), self._options
        site = find_site(options.device, options.build, options.limits, options.threads)
        if site.profile.kind == "cuda" and site.runtime != "tensorrt":
            log.warning("%s; calibrated and judged on the CPU", site.reason)
            site = find_site("cpu", options.build, options.limits, options.threads)
        serving = GraphServing(site, model, self._cache, options.limits)
        depends = serving.calibration(algorithm)
        texts = hashlib.sha256(json.dumps([*learnt, *judges]).encode()).hexdigest()
        graph, engine = self._cache.find(INT8, depends), None
        cached = graph is not None and graph.facts["texts"] == texts and "verdict" in graph.facts
        if graph is not None and cached:
            verdict = Verdict(**{each.name: graph.facts["verdict"][each.name] for each in fields(Verdict)})
        else:
            made, report = self._quantiser(model.folder, learnt, algorithm)
            facts = {"texts": texts, "report": dict(report)}
            graph = self._cache.store(INT8, depends, made, facts)
            backend = serving.int8_backend(graph, algorithm)
            found = _embedded(backend, judges)
            if site.runtime == "tensorrt":
                engine = backend.info.path_reason
            exact = self._exact(model, site.profile.torch_name, judges)
            verdict = judge(exact, found, float(report["int8_share"]))
            graph = self._cache.store(INT8, depends, made, facts | {"verdict": asdict(verdict)})
        if not verdict.accepted:
            log.warning("%s: INT8 by %s was %s; the float precision stays", name, algorithm, verdict.reason)
        return Optimized(
            name=name,
            accepted=verdict.accepted,
            reason=verdict.reason,
            path=graph.graph,
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

    def _exact(self, model: Model, device: str, texts: Sequence[str]) -> Vectors:
        """Embed in fp32 with torch, not with a graph, so that errors of graphs are found."""
        packaged = model.folder.name in PACKAGED  # else with transformers, the reference of every packed path
        name = model.folder.name if packaged else str(model.folder.path)
        options = TorchOptions(name, "fp32", device, self._options.threads, packed=packaged)
        return _embedded(TorchBackend.load(options), texts)


def _embedded(backend: Backend, texts: Sequence[str]) -> Vectors:
    """Return float32 (n, dimension), not normalised; closes the backend."""
    try:
        tokens = backend.tokenize(texts)
        vectors = np.empty((len(texts), backend.info.dimension), dtype=np.float32)
        multiple = backend.profile.padding_multiple(backend.info.precision)
        for batch in plan_batches([len(ids) for ids in tokens], CPU_TOKENS, multiple):
            vectors[batch] = backend.forward(tokens.select(batch))
        return vectors
    finally:
        backend.close()


def divided(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the distinct texts evenly into those that calibrate and those that judge. Raises TooFewTexts."""
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
def _readable(model: Model | str | Path | Any) -> Iterator[Model]:
    """Yield the model as files; write a loaded one to a temporary folder."""
    if isinstance(model, Model):
        yield model
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
