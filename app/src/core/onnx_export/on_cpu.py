"""Calibrations for int8 on a CPU: ranges of a model's activations and their verdict, in the same cache as graphs. Needs
torch, and neither ONNX nor ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..backends import DeviceUnavailable, ModelUnsupported
from ..backends.folder import check_files, display_name, find_folder, read_folder, sha256_of
from ..backends.hashing import PREFIX as HASHING
from ..backends.torch.backend import Calibration, TorchBackend
from ..device import detect
from .cache import RANGES, ArtifactCache, Dependencies, Entry

if TYPE_CHECKING:
    from ..backends.torch.backend import EngineOptions
    from .serving import GraphOptions


class CpuCalibration:
    """Calibration of one model on this CPU."""

    runtime = "cpu"

    def __init__(self, wanted: EngineOptions, options: GraphOptions) -> None:
        """Find the model. Raises ModelNotFound, WeightsMismatch; ModelUnsupported if the packed path cannot compute it;
        DeviceUnavailable for a CPU or a torch without correct 8-bit products."""
        if wanted.model.startswith(HASHING):
            raise ModelUnsupported(f"model {wanted.model!r} is the test embedder, which has no layers to calibrate")
        import torch

        from ..backends.torch.architectures import refusal
        from ..backends.torch.int8 import unusable

        path = find_folder(wanted.model, wanted.revision, wanted.cache)
        self.folder = read_folder(path, display_name(wanted.model, path), wanted.query_prompt, wanted.document_prompt)
        if (why_not := refusal(self.folder)) is not None:
            raise ModelUnsupported(f"model {self.folder.name!r} cannot be computed in int8: {why_not}")
        if (why_not := unusable()) is not None:
            raise DeviceUnavailable(why_not)
        self._wanted, self._cache, self.profile = wanted, ArtifactCache(options.cache), detect(wanted.device)
        self._depends: Dependencies = {
            "model": check_files(self.folder, wanted.weights_sha256),
            "tokenizer": sha256_of([self.folder.encoder / "tokenizer.json"]),
            "pooling": self.folder.pooling,
            "max_tokens": self.folder.max_length,
            "cpu": self.profile.name,
            "torch": torch.__version__,
        }

    def measure(self, texts: Sequence[str]) -> tuple[bytes, dict[str, Any]]:
        """Return the ranges over these texts, as a safetensors file, and figures."""
        from safetensors.torch import save

        from ..backends.torch.int8 import observe

        ranges = observe(self.folder, texts)
        return save(dict(ranges)), {"texts": len(texts), "int8_share": 1.0, "layers": len(ranges)}

    def trial(self, ranges: bytes, facts: Mapping[str, Any]) -> TorchBackend:
        """Store ranges that have no verdict yet, and load the model with them."""
        return TorchBackend.load(replace(self._wanted, calibration=self.store(ranges, facts)))

    def store(self, ranges: bytes, facts: Mapping[str, Any]) -> Calibration:
        """Write the ranges to the cache. Raises DeviceUnavailable if the folder cannot be written."""
        return self._read(self._cache.store(RANGES, self._depends, ranges, facts), "calibrated")

    def accepted(self) -> Calibration:
        """Return the ranges if they passed the accuracy gate here, else raise DeviceUnavailable."""
        entry = self._cache.find(RANGES, self._depends)
        if entry is None or "verdict" not in entry.facts:
            raise DeviceUnavailable(
                "this machine (CPU, version of torch) has no calibration of this model: run owl-sap calibrate NAME"
            )
        verdict = entry.facts["verdict"]
        if not verdict["accepted"]:
            raise DeviceUnavailable(f"the accuracy gate {verdict['reason']}")
        return self._read(entry, f"calibrated; {verdict['reason']}")

    def _read(self, entry: Entry, reason: str) -> Calibration:
        from safetensors.torch import load

        return Calibration(load(entry.graph.read_bytes()), entry.sha256, reason)
