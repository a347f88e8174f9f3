"""Calibrations of a model for 8 bits, cached with the accuracy gate's verdict: on a CPU ranges of its activations; for
graphs on a card `onnx_export.serving` continues.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .agreement import Verdict
from .artifacts import RANGES, ArtifactCache, Dependencies, Entry
from .backends import Backend, DeviceUnavailable, ModelUnsupported
from .backends.folder import sha256_of
from .backends.hashing import PREFIX as HASHING
from .backends.torch.backend import Calibration, TorchBackend, computing, find_model
from .device import detect

if TYPE_CHECKING:
    from .backends.torch.backend import EngineOptions


class ModelCalibration(ABC):
    """Calibration of one model on one device."""

    kind: ClassVar[str]  # of entries in the cache
    runtime: str
    key: Dependencies  # of its entry: the model; for a card also the machine

    def __init__(self, wanted: EngineOptions, cache: Path) -> None:
        """Find model and device. Raises ModelNotFound, ModelUnsupported, WeightsMismatch; DeviceUnavailable if the
        device is unknown."""
        if wanted.model.startswith(HASHING):
            raise ModelUnsupported(f"model {wanted.model!r} is the test embedder, which has no layers to calibrate")
        self.folder, self._weights = find_model(wanted)
        self.profile = detect(wanted.device)
        self._wanted, self.cache = wanted, ArtifactCache(cache)
        self._model: Dependencies = {
            "model": self._weights,
            "tokenizer": sha256_of([self.folder.encoder / "tokenizer.json"]),
            "pooling": self.folder.pooling,
            "max_tokens": self.folder.max_length,
        }

    @abstractmethod
    def measure(self, texts: Sequence[str], before: Entry | None) -> tuple[bytes, dict[str, Any]]:
        """Return the content of an entry, calibrated on these texts, and figures. `before`: the accepted entry."""

    @abstractmethod
    def load(self, entry: Entry) -> Backend:
        """Load the model in 8 bits, with or without a verdict."""

    def current(self) -> Entry | None:
        """Return the newest entry if it was accepted."""
        entry = self.cache.find(self.kind, self.key)
        return entry if entry is not None and entry.facts["verdict"]["accepted"] else None

    def store(self, content: bytes, report: dict[str, Any], verdict: Verdict) -> None:
        """Write the entry. A refused one never replaces an accepted one, such as that of another process. A replaced
        one stays under its digest, because generations may have its vectors. Raises DeviceUnavailable if the folder
        cannot be written."""
        if (before := self.current()) is not None:
            if not verdict.accepted:
                return
            self.cache.store(self.kind, {**self.key, "digest": before.sha256[:12]}, before.read(), before.facts)
        self.cache.store(self.kind, self.key, content, {"report": report, "verdict": asdict(verdict)})

    def accepted(self, digest: str = "") -> Entry:
        """Return the entry, or that with the digest, if it passed the accuracy gate; else raise DeviceUnavailable."""
        entry = self.cache.find(self.kind, self.key)
        if digest and (entry is None or not entry.sha256.startswith(digest)):
            entry = self.cache.find(self.kind, {**self.key, "digest": digest})
        if entry is None:
            which = f"calibration int8-{digest}" if digest else "calibration"
            raise DeviceUnavailable(f"there is no {which} of this model here: run owl-sap calibrate NAME")
        if not entry.facts["verdict"]["accepted"]:
            raise DeviceUnavailable(f"the accuracy gate {entry.facts['verdict']['reason']}")
        return entry


class CpuCalibration(ModelCalibration):
    """Ranges of activations for int8 on a CPU. Needs torch, and neither ONNX nor ONNX Runtime."""

    kind, runtime = RANGES, "cpu"

    def __init__(self, wanted: EngineOptions, cache: Path) -> None:
        """Raises also ModelUnsupported if the packed path cannot compute the model; DeviceUnavailable for a CPU or a
        torch without correct 8-bit products."""
        super().__init__(wanted, cache)
        from .backends.torch.architectures import refusal
        from .backends.torch.int8 import ALGORITHM, unusable

        if (why_not := refusal(self.folder)) is not None:
            raise ModelUnsupported(f"model {self.folder.name!r} cannot be computed in int8: {why_not}")
        if (why_not := computing(wanted, unusable)) is not None:
            raise DeviceUnavailable(why_not)
        self.key = {**self._model, "algorithm": ALGORITHM}

    def measure(self, texts: Sequence[str], before: Entry | None) -> tuple[bytes, dict[str, Any]]:
        """Return ranges that cover these texts and those of `before`, as a safetensors file, and figures."""
        from safetensors.torch import load, save

        from .backends.torch.int8 import ALGORITHM, MARGIN, observe, wider

        found = computing(self._wanted, lambda: observe(self.folder, texts))
        ranges = {name: each * MARGIN for name, each in found.items()}
        if before is not None:
            known = load(before.read())
            ranges = {name: wider(each, known[name]) for name, each in ranges.items()}
        figures = {"texts": len(texts), "int8_share": 1.0, "layers": len(ranges)}
        return save(dict(ranges), {"algorithm": str(ALGORITHM)}), figures

    def load(self, entry: Entry) -> TorchBackend:
        from safetensors.torch import load

        verdict = entry.facts.get("verdict", {"reason": "not judged yet"})
        found = Calibration(load(entry.read()), entry.sha256, f"calibrated; {verdict['reason']}")
        return TorchBackend.load(replace(self._wanted, calibration=found))
