"""The service with its parts as public attributes. Add a part in `Service`."""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.src.access.authentication import Authentication
from app.src.access.rows import Rights
from app.src.evaluation.run import Evaluator
from app.src.observe.metrics import Metrics
from app.src.service.background import Background
from app.src.service.browse import Browse
from app.src.service.collections import Collections
from app.src.service.generations import Generations
from app.src.service.labels import Labels
from app.src.service.rerank import Reranker
from app.src.service.search import Search
from app.src.service.status import Status, version
from app.src.service.tuning import Tuning
from app.src.service.wiring import Parts
from app.src.settings import Settings
from connector.protocols import Source
from connector.stores.store import VectorStore

if TYPE_CHECKING:
    from app.src.observe.checks import Checks
    from app.src.service.catalog import Catalog
    from app.src.service.documents import ClientDocuments
    from app.src.service.sync import Quarantine, Sync

T = TypeVar("T")


class _Part(cached_property[T]):
    """A part that is imported and made on first use, once for all threads."""

    def __get__(self, service: Any, owner: type | None = None) -> T:  # type: ignore[override]
        with _making:
            made: T = super().__get__(service, owner)
        return made


_making = threading.RLock()


class Service:
    """Thread-safe. Opens connections and loads models on first use; `close` closes them."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics | None = None,
        *,
        source: Source | None = None,
        store: VectorStore | None = None,
        file: Path | None = None,
        scaled: bool = False,
    ) -> None:
        """`source` and `store` replace the configured ones; the service closes the store. `file`: the settings file,
        where `collections` notices further ones. `scaled`: embed on the Ray cluster of [scale], if it names one.
        Raises SettingsError for a reranker that does not exist."""
        self.settings = settings
        self.file = file
        self.metrics = metrics or Metrics()
        self.metrics.build_info.labels(version(), settings.embedding.model).set(1)
        self.access = Authentication(settings.access)
        self.parts = Parts(
            settings,
            self.metrics,
            source=source,
            store=store,
            graphs_folder=settings.tensorrt_cache(file),
            scaled=scaled,
        )
        self.collections = Collections(self.parts, file)
        self.rights = Rights(self.collections.blocks, self.collections.block)
        self.generations = Generations(self.parts, self.collections)
        self.background = Background(self.parts, self.collections, lambda: self.sync, lambda: self.quarantine, file)
        self.jobs = self.background.jobs
        self.reranker = Reranker(self.parts, self.metrics)
        self.search = Search(
            self.reranker, self.collections, self.generations, self.rights, self.background, self.metrics
        )
        self.browse = Browse(self.collections, self.rights)
        self.labels = Labels(self.parts, self.collections, self.rights)
        self.evaluation = Evaluator(self.search.operators_ids, self.collections.spec, lambda: self.parts.store)
        self.tuning = Tuning(self.parts, self.collections, file)
        self.status = Status(self.parts, self.collections, self.background, self.metrics)

    @_Part
    def sync(self) -> Sync:
        from app.src.service.sync import Sync

        return Sync(self.parts, self.collections, self.generations, self.metrics)

    @_Part
    def quarantine(self) -> Quarantine:
        from app.src.service.sync import Quarantine

        return Quarantine(self.parts, self.collections, self.generations)

    @_Part
    def documents(self) -> ClientDocuments:
        from app.src.service.documents import ClientDocuments

        return ClientDocuments(self.parts, self.collections, self.generations, self.rights, self.metrics)

    @_Part
    def catalog(self) -> Catalog:
        from app.src.service.catalog import Catalog

        return Catalog(self.parts, self.collections)

    @_Part
    def readiness(self) -> Checks:
        from app.src.observe.checks import Checks

        return Checks(self.parts, self.access, self.metrics, self.reranker.probe)

    def close(self) -> None:
        """Stop jobs and close connections; the service cannot be used afterwards."""
        self.jobs.close()
        self.status.close()
        self.parts.close()
