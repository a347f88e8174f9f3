"""Fine-tune the model of a collection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.src.service.collections import Collections
from app.src.service.wiring import Parts
from connector.model import ModelSource

if TYPE_CHECKING:
    from app.src.core.finetune.recipe import TrainingObserver
    from app.src.training.run import Report, Request


class Finetuning:
    def __init__(self, parts: Parts, collections: Collections, file: Path | None = None) -> None:
        """`file`: where the settings were read: models are kept beside it."""
        self._parts = parts
        self._collections = collections
        self._file = file

    def run(
        self, name: str, request: Request, out: Path | None = None, observer: TrainingObserver | None = None
    ) -> Report:
        """Train the collection's model on pairs of texts, as `training.run.finetune`. `out`: the folder to create;
        default: the next free one among the models beside the job records. Raises UnknownCollection, WrongOrigin."""
        from app.src.core.finetune.recipe import TrainingObserver
        from app.src.training.run import Resources, finetune
        from app.src.training.work import Work, next_folder

        spec, settings = self._collections.spec_of_table(name), self._parts.settings
        embedding = settings.embedding_of(name)
        source = ModelSource(embedding.model, embedding.revision, embedding.weights_sha256, embedding.precision)
        folder = out or next_folder(settings.state_folder(self._file) / "models", name)
        resources = Resources(
            lambda: self._parts.source, self._parts.load, settings.embedding.device, settings.sync.page_rows
        )
        return finetune(spec, source, request, Work(folder.absolute()), resources, observer or TrainingObserver())
