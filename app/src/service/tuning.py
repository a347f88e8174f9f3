"""Adapt the model of a collection to its texts: calibrate it for INT8, or fine-tune it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.src.service.collections import Collections
from app.src.service.wiring import Parts, check_computed_here
from connector.errors import ConfigurationError
from connector.extras import install_command

if TYPE_CHECKING:
    from app.src.core.finetune.recipe import TrainingObserver
    from app.src.training.run import Report

HELD_BACK_TOO = 1.25  # texts sampled per calibration text: one in five is held back to judge the result


class Tuning:
    def __init__(self, parts: Parts, collections: Collections, file: Path | None = None) -> None:
        """`file`: the settings file; models are kept beside it."""
        self._parts = parts
        self._collections = collections
        self._file = file

    def calibrate(self, name: str, texts: int = 1000) -> dict[str, Any]:
        """Calibrate the model on sampled texts of the source, judge the result, and store it for the engine. `texts`:
        about how many to calibrate with. Return the figures and whether the accuracy gate accepted the result. Raises
        UnknownCollection, WrongOrigin, and the engine's errors."""
        from connector.sync.sampling import sample_texts

        spec, parts = self._collections.spec_of_table(name), self._parts
        embedding = parts.settings.embedding_of(name)
        check_computed_here(embedding.model, "calibrate")
        found = sample_texts(spec, parts.source, parts.embedder_for(name), int(texts * HELD_BACK_TOO))
        try:
            from app.src.core.backends.torch.backend import EngineOptions
            from app.src.core.loading import uses_calibration
            from app.src.core.memory import MemoryLimits
            from app.src.core.onnx_export.optimizer import calibrate

            same = "model revision weights_sha256 cache device threads query_prompt document_prompt"
            wanted = EngineOptions(**{key: getattr(embedding, key) for key in same.split()})
            limits = MemoryLimits(embedding.memory_fraction, embedding.reserve_mb << 20)
            graphs = parts.graph_options()
            done = calibrate(wanted, graphs, limits, name, found)
            used = uses_calibration(replace(wanted, precision=embedding.precision), graphs)
        except ImportError as error:
            raise ConfigurationError(
                f"calibration needs the package {error.name or 'torch'}, which cannot be imported: "
                f"{install_command('engine')}"
            ) from error
        notes = self._notes(name, used=used, kept=done["kept"]) if done["accepted"] else []
        return {"collection": name, "model": embedding.model, **done, "notes": notes}

    def _notes(self, name: str, *, used: bool, kept: bool) -> list[str]:
        """Return what an accepted calibration changes for the collections of this model."""
        if kept:
            return ["the earlier calibration passes on these texts too and stays: no vector changes"]
        if not used:
            return ['it serves with precision = "int8"; on a CPU without fast bf16 also with "auto"']
        model, blocks = self._parts.configured(name).name, self._parts.settings.collections
        same = [each for each in blocks if self._parts.configured(each.name).name == model]
        synced, written = (", ".join(each.name for each in same if each.documents is kind) for kind in (False, True))
        first = (
            f"restart services and workers; then the next sync of {synced} builds a generation in int8; until it is "
            "active, a second engine serves"
        )
        return [first] + [f"{written}, written by clients, stays as it is, with that engine"] * bool(written)

    def finetune(
        self,
        name: str,
        options: Mapping[str, Any],
        out: Path | None = None,
        observer: TrainingObserver | None = None,
        *,
        resume: bool = False,
    ) -> Report:
        """Train the collection's model on pairs of texts, with the options of `Finetuning.run`. `out`: the folder to
        create; default: the next free one among the models beside the job records. Raises UnknownCollection,
        WrongOrigin."""
        from app.src.core.finetune.recipe import TrainingObserver
        from app.src.training.run import Finetuning, next_folder

        spec, parts = self._collections.spec_of_table(name), self._parts
        settings = parts.settings
        check_computed_here(parts.configured(name).name, "train")
        training = Finetuning(
            spec,
            parts.configured(name),
            (out or next_folder(settings.state_folder(self._file) / "models", name)).absolute(),
            lambda: parts.source,
            parts.load,
            settings.embedding.device,
            settings.sync.page_rows,
            observer or TrainingObserver(),
            settings.embedding.cache,
        )
        return training.run(options, resume=resume)
