"""Calibrate a model on the user's texts, judge it in 8 bits on held-back texts, and cache the result.

On a card this makes a graph and builds TensorRT's engine; on a CPU it measures ranges for int8. The
guides call this `T4TensorRTOptimizer`.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..agreement import LEAST_TEXTS, Verdict, judge
from ..artifacts import Entry
from ..backends import Backend, DeviceUnavailable, EngineError, Vectors
from ..backends.torch.backend import EngineOptions, TorchBackend
from ..calibration import CpuCalibration, ModelCalibration
from ..device import PRECISIONS, detect
from ..memory import CPU_TOKENS, MemoryLimits
from ..tokens import plan_batches
from .serving import GraphOptions, GraphServing

log = logging.getLogger(__name__)

HELD_BACK = 5  # one text in five is held back to judge the result
MOST_JUDGES = 400
QUERIES = 32  # texts of one to three words that judge too, with the prompt of queries


class TooFewTexts(EngineError):
    """Not enough distinct texts to calibrate and to judge."""


def calibrate(
    wanted: EngineOptions, options: GraphOptions, limits: MemoryLimits, name: str, texts: Sequence[str]
) -> dict[str, Any]:
    """Calibrate and judge a model, and return the verdict and figures as JSON. The engine uses it only if `accepted`.
    `kept`: an earlier calibration passes on these texts too and stays. If it does not, the new ranges on a CPU cover
    its texts too.

    `texts`: about 1,000, similar to those that the model will embed as documents; one in five is held back to judge.
    Building an engine takes minutes. Raises TooFewTexts, ModelNotFound, ModelUnsupported, WeightsMismatch,
    DeviceUnavailable.
    """
    learnt, judges = divided(texts)
    started = time.perf_counter()
    learner = _learner(wanted, options, limits)
    folder = learner.folder
    short = (" ".join(text.split()[: 1 + n % 3]) for n, text in enumerate(judges[:: -(-len(judges) // QUERIES)]))
    judges = [folder.document_prompt + text for text in judges] + [folder.query_prompt + text for text in short]
    judges = list(dict.fromkeys(judges))
    # The reference is transformers in fp32, so that errors of graphs and of the packed path are found.
    exact = replace(wanted, precision="fp32", device=learner.profile.torch_name, packed=False)
    right = embedded(TorchBackend.load(exact), judges)

    def judged(entry: Entry) -> tuple[Verdict, str | None]:
        backend = learner.load(entry)
        engine = backend.info.path_reason if learner.runtime == "tensorrt" else None
        return judge(right, embedded(backend, judges)), engine

    before = learner.current()
    verdict, engine = (None, None) if before is None else judged(before)
    kept = verdict is not None and verdict.accepted
    if verdict is None or before is None or not kept:
        content, report = learner.measure([folder.document_prompt + text for text in learnt], before)
        with learner.cache.trial(learner.kind, content) as entry:
            verdict, engine = judged(entry)
        learner.store(content, report, verdict)
    else:
        report = before.facts["report"]
    if not verdict.accepted:
        log.warning("%s: INT8 was %s; nothing changes", name, verdict.reason)
    return {
        "name": name,
        "accepted": verdict.accepted,
        "reason": verdict.reason,
        "kept": kept,
        "calibrated_on": 0 if kept else len(learnt),
        "verdict": asdict(verdict),
        "report": report,
        "runtime": learner.runtime,
        "device": learner.profile.name,
        "engine": engine,
        "seconds": round(time.perf_counter() - started, 2),
    }


def _learner(wanted: EngineOptions, options: GraphOptions, limits: MemoryLimits) -> ModelCalibration:
    if detect(wanted.device).kind == "cpu":
        return CpuCalibration(wanted, options.cache)
    serving = GraphServing(wanted, options, limits)
    if serving.runtime != "tensorrt":
        raise DeviceUnavailable(f'{serving.reason}; device = "cpu" calibrates for CPUs')
    return serving


def embedded(backend: Backend, texts: Sequence[str]) -> Vectors:
    """Return the vectors, float32 (n, dimension), not normalised. Closes the backend."""
    try:
        tokens = backend.tokenize(texts)
        vectors = np.empty((len(texts), backend.info.dimension), dtype=np.float32)
        multiple = backend.profile.padding_multiple(backend.info.precision)
        for batch in plan_batches(tokens.lengths, CPU_TOKENS, multiple):
            vectors[batch] = backend.forward(tokens.select(batch))
        return vectors
    finally:
        backend.close()


def divided(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the distinct texts to calibrate with and, evenly spaced among them, those to judge. Raises TooFewTexts."""
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


# ---------------------------------------------------------------------------------------------------- the guides' names


@dataclass(frozen=True, slots=True, kw_only=True)
class T4GPUConfig:
    """The guides' switches; each variable is `T4_GPU_` and the field's name in capitals. Calibration uses only fields
    with a comment; docs/gpu.md describes the effect of each. Raises ValueError naming the field."""

    fp16_mode: bool = True
    int8_mode: bool = False
    max_workspace_size: int = 4 << 30  # bytes of the card that TensorRT may use while it tries kernels
    dynamic_batch_size: bool = True
    enable_profiling: bool = False
    enable_tensor_cores: bool = True
    enable_sparse: bool = False
    memory_fraction: float = 0.8  # share of the card's memory for this process, weights included
    max_batch_size: int = 64
    optimization_level: int = 3  # TensorRT's builder, 0 (fast to build) to 5 (fast to run)
    precision: str = "auto"
    calibration_cache: str | Path | None = None  # folder of calibrations and engines; None keeps nothing

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("max_workspace_size", self.max_workspace_size >= 1 << 20, "bytes, at least 1048576"),
            ("memory_fraction", 0 < self.memory_fraction <= 1, "above 0 and at most 1"),
            ("max_batch_size", self.max_batch_size >= 1, "at least 1"),
            ("optimization_level", self.optimization_level in range(6), "0 to 5"),
            ("precision", self.precision in ("auto", *PRECISIONS), f"one of auto, {', '.join(PRECISIONS)}"),
        ):
            if not good:
                raise ValueError(f"T4GPUConfig.{name} must be {wanted}, not {getattr(self, name)!r}")


class T4TensorRTOptimizer:
    """Calibrates any number of models. Without a `calibration_cache`, it keeps results for its own lifetime only."""

    def __init__(self, config: T4GPUConfig | None = None, device: str = "auto") -> None:
        config = config or T4GPUConfig()
        folder = config.calibration_cache
        if folder is None:
            folder = tempfile.mkdtemp(prefix="owl-sap-calibration-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        build = config.max_workspace_size >> 20, config.optimization_level
        self._options = GraphOptions(Path(folder), True, *build)
        self._limits, self._device = MemoryLimits(config.memory_fraction), device

    def optimize_model_with_calibration(self, model: str | Path, name: str, data: Sequence[str]) -> dict[str, Any]:
        """Calibrate `model` (a packaged name, a folder, or a cached hub id), as `calibrate` does."""
        return calibrate(EngineOptions(str(model), device=self._device), self._options, self._limits, name, data)
