"""INT8 calibration of a collection's model: sample its texts, calibrate and judge the model on them, and keep the
result where the engine finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.src.service.wiring import Parts
from app.src.settings import EmbeddingSettings
from connector.errors import ConfigurationError
from connector.extras import install_command
from connector.model import CollectionSpec

if TYPE_CHECKING:
    from app.src.core.onnx_export.optimizer import Optimized

HELD_BACK_TOO = 1.25  # texts taken for each one that calibrates: one in five judges


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """`texts`: about how many calibrate; more are sampled to judge. `algorithm` None: as configured. `stored`: take the
    texts from the store instead of the source."""

    texts: int = 1000
    algorithm: str | None = None
    stored: bool = False


class Calibration:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def calibrate(self, spec: CollectionSpec, request: CalibrationRequest) -> dict[str, Any]:
        """Return the figures of the calibration and whether the gate accepted it. Raises the connector's and the
        engine's errors."""
        texts = self._texts(spec, request)
        embedding = self._parts.settings.embedding_of(spec.name)
        done = self._optimized(
            spec.name, embedding, texts, request.algorithm or self._parts.settings.tensorrt.algorithm
        )
        wanted = self._parts.settings.tensorrt
        notes = []
        if done.accepted and not wanted.enabled:
            notes.append('it serves with [tensorrt] enabled = true (on a card, precision = "int8" is enough)')
        if done.accepted and done.algorithm != wanted.algorithm:
            notes.append(f'it serves with [tensorrt] algorithm = "{done.algorithm}"; now it is "{wanted.algorithm}"')
        return {
            "collection": spec.name,
            "model": embedding.model,
            **done.as_dict(),
            "notes": notes,
        }

    def _texts(self, spec: CollectionSpec, request: CalibrationRequest) -> list[str]:
        from connector.sync.generations import sample_texts as stored_texts
        from connector.sync.sampling import sample_texts

        count = int(request.texts * HELD_BACK_TOO)
        if request.stored:
            return stored_texts(self._parts.store, spec.name, count)
        return sample_texts(spec, self._parts.source, self._parts.embedder_for(spec.name), count)

    def _optimized(self, name: str, wanted: EmbeddingSettings, texts: list[str], algorithm: str) -> Optimized:
        """Calibrate the collection's model, `wanted`, which may differ from the default."""
        tensorrt = self._parts.settings.tensorrt
        try:
            from app.src.core.agreement import Bar
            from app.src.core.memory import MemoryLimits
            from app.src.core.onnx_export.optimizer import OptimizerOptions, T4TensorRTOptimizer, divided
            from app.src.core.onnx_export.runtime import BuildOptions
            from app.src.core.onnx_export.serving import Model

            options = OptimizerOptions(
                cache=self._parts.graphs_folder,
                device=wanted.device,
                build=BuildOptions(tensorrt.workspace_mb, tensorrt.optimization_level),
                bar=Bar(tensorrt.least_cosine, tensorrt.least_overlap, tensorrt.least_int8_share),
                limits=MemoryLimits(wanted.memory_fraction, wanted.reserve_mb << 20),
                threads=wanted.threads,
            )
            divided(texts)  # raises TooFewTexts before a model is loaded
            model = Model.find(wanted.model, wanted.revision, wanted.weights_sha256)
            return T4TensorRTOptimizer(options).optimize_model_with_calibration(model, name, texts, algorithm)
        except ImportError as error:
            raise ConfigurationError(
                f"calibration needs the package {error.name or 'torch'}, which cannot be imported: "
                f"{install_command('engine', 'onnx')}"
            ) from error
