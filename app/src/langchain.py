"""LangChain's classes over the collections and models of the settings, opened in the application's own process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from app.src.access.principal import OPERATOR, Principal
from app.src.service.search import FoundHit, SearchOptions
from app.src.service.service import Service
from app.src.service.wiring import EngineEmbedder
from app.src.settings import load
from connector.langchain import OwlEmbeddings, OwlRetriever, OwlVectorStore
from connector.model import Filter
from connector.sync.documents import NewDocument


class Owl(AbstractContextManager["Owl"]):
    """Opens the collections and models of owl-sap.toml for LangChain; connects and loads only when needed. Close the
    object, or use it as a context manager. Thread-safe; one per process is enough."""

    def __init__(self, config: str | Path | None = None, *, service: Service | None = None) -> None:
        """Load the settings. `config` None: as for the commands, from the environment and ./owl-sap.toml. `service`: an
        existing one, which `close` closes too. Raises SettingsError."""
        if service is None:
            loaded = load(None if config is None else Path(config))
            service = Service(loaded.settings, file=loaded.file)
        self.service = service

    def vector_store(self, collection: str, *, principal: Principal = OPERATOR) -> OwlVectorStore:
        """Return a vector store, writable where `documents = true`. `principal`: whose row rights apply; by default the
        operator, who sees every row. Raises UnknownCollection."""
        return OwlVectorStore(_Opened(self.service, collection, principal))

    def retriever(self, collection: str, *, principal: Principal = OPERATOR, **fields: Any) -> OwlRetriever:
        """Return a retriever with these `fields` of `OwlRetriever`. Raises UnknownCollection."""
        return OwlRetriever(collection=_Opened(self.service, collection, principal), **fields)

    def embeddings(self) -> OwlEmbeddings:
        """Return the model of [embedding]."""
        return OwlEmbeddings(self.service.parts.embedder)

    def close(self) -> None:
        self.service.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Opened:
    """A collection of the service, as `principal` may see and write it."""

    def __init__(self, service: Service, name: str, principal: Principal) -> None:
        service.collections.spec(name)
        self.name = name
        self._service = service
        self._principal = principal

    @property
    def embedder(self) -> EngineEmbedder:
        return self._service.generations.embedder_of(self.name)

    def search(
        self, query: str | Sequence[float], k: int, filter: Filter | None = None, **options: Any
    ) -> list[FoundHit]:
        """Return hits, best first; [] for a collection without data. `options`: fields of `SearchOptions`. Raises
        ValueError for an empty text or unknown mode."""
        found = self._service.search.run(
            self.name, query, k, filter, SearchOptions(**options), principal=self._principal
        )
        return found.hits

    def rows(self, ids: Sequence[str]) -> list[Any]:
        return list(self._service.browse.rows(self.name, ids, principal=self._principal))

    def put(self, documents: Sequence[NewDocument]) -> list[str]:
        return self._service.documents.put(self.name, documents, principal=self._principal).ids

    def delete(self, ids: Sequence[str]) -> int:
        return self._service.documents.delete(self.name, ids, principal=self._principal)
