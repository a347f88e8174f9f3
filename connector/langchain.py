"""LangChain within the process: a collection as a vector store and retriever, a model as embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict

from connector.protocols import Embedder
from connector.sync.documents import NewDocument

Mode = Literal["vector", "keyword", "hybrid"]
BATCH = 200
"""Documents per write transaction."""
_IDS = 100
"""Rows per read."""


class OwlEmbeddings(Embeddings):
    """A model as LangChain's embeddings: unit vectors. Truncates texts above the model's limit."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self.embedder.embed_documents(texts).tolist() if texts else []
        return vectors

    def embed_query(self, text: str) -> list[float]:
        vector: list[float] = self.embedder.embed_query(text).tolist()
        return vector


class OwlVectorStore(VectorStore):
    """A collection as LangChain's vector store, embedded by its own model. A collection synced from a table is
    read-only: writing raises WrongOrigin.

    Every search also takes these keywords. `filter`: in the filter language of search. `mode`: None means hybrid for a
    text, vector for a vector. `min_score`: compared with the score in modes vector and keyword, with the cosine in
    hybrid. `mmr_lambda`: from 0 (diverse hits among the best `depth`) to 1 (the most relevant hits).

    MMR, relevance scores and vector searches use mode vector unless another is given. Relevance scores are the hits'
    `relevance`: 0 to 1, below 0.2 probably irrelevant. The asynchronous methods run in threads.
    """

    def __init__(self, collection: Any) -> None:
        """`collection`: as `app.src.langchain` opens it, with the rights of one caller."""
        self.collection = collection

    @property
    def embeddings(self) -> OwlEmbeddings:
        return OwlEmbeddings(self.collection.embedder)

    # ---------------------------------------------------------------------------------------------------- writing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Store the texts, replacing existing ids, and return the ids. A text without an id gets a new one. Each BATCH
        of documents is one transaction; earlier ones remain if a later one fails. Raises WrongOrigin, and BadDocument
        with the document's position in its transaction. Ignores `batch_size`, which LangChain's index() passes."""
        kwargs.pop("batch_size", None)
        if kwargs:
            raise TypeError(f"add_texts takes no {', '.join(kwargs)}")
        listed = _listed("texts", texts)
        metadatas = metadatas or [{} for _ in listed]
        given: Sequence[str | None] = ids or [None] * len(listed)
        for name, values in (("metadatas", metadatas), ("ids", given)):
            if len(values) != len(listed):
                raise ValueError(f"{len(values)} {name} for {len(listed)} texts")
        documents = [NewDocument(*each) for each in zip(given, listed, metadatas, strict=True)]
        parts = (documents[start : start + BATCH] for start in range(0, len(documents), BATCH))
        return [id_ for part in parts for id_ in self.collection.put(part)]

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id; ignores missing ones. Raises ValueError without `ids`, and WrongOrigin for another
        program's row; then no document of its batch is deleted."""
        if ids is None or kwargs:
            raise ValueError("delete takes the ids of documents, and nothing else: it never deletes all documents")
        listed = _listed("ids", ids)
        for start in range(0, len(listed), BATCH):
            self.collection.delete(listed[start : start + BATCH])
        return True

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        collection: Any = None,
        **kwargs: Any,
    ) -> OwlVectorStore:
        """Store the texts in `collection`, which is required. Raises ValueError unless `embedding` is the collection's
        own model (`OwlVectorStore.embeddings`)."""
        if collection is None or kwargs:
            raise TypeError("from_texts takes collection=..., which is where the texts go, and no other keywords")
        if (
            not isinstance(embedding, OwlEmbeddings)
            or embedding.embedder.fingerprint != collection.embedder.fingerprint
        ):
            raise ValueError(
                f'the collection "{collection.name}" embeds by itself, with {collection.embedder.model}: give its own '
                "embeddings, or choose another model in [embedding] or in the collection's block"
            )
        store = cls(collection)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    # ---------------------------------------------------------------------------------------------------- reading

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return whole texts in the order of `ids`; omits missing ones."""
        listed = _listed("ids", ids)
        pages = (listed[start : start + _IDS] for start in range(0, len(listed), _IDS))
        return [_document(row) for page in pages for row in self.collection.rows(page)]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """Return documents best first; each text is the matching passage."""
        return [(_document(hit), hit.score) for hit in self.collection.search(query, k, **kwargs)]

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return [_document(hit) for hit in self.collection.search(embedding, k, **kwargs)]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        options = {"mode": "vector", "depth": fetch_k, "mmr_lambda": lambda_mult} | kwargs
        return self.similarity_search(query, k, **options)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        options = {"depth": fetch_k, "mmr_lambda": lambda_mult} | kwargs
        return self.similarity_search_by_vector(embedding, k, **options)

    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        hits = self.collection.search(query, k, **{"mode": "vector", **kwargs})
        return [(_document(hit), hit.relevance or 0.0) for hit in hits]

    async def _asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return await run_in_executor(None, partial(self._similarity_search_with_relevance_scores, query, k, **kwargs))


class OwlRetriever(BaseRetriever):
    """Retrieves the best rows of a collection by meaning, words or both. `invoke` also takes every field
    except `collection` as a keyword."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    collection: Any
    """As in `OwlVectorStore`."""
    k: int = 4
    filter: dict[str, Any] | None = None
    mode: Mode = "hybrid"
    min_score: float | None = None
    mmr_lambda: float | None = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        k = kwargs.pop("k", self.k)
        asked = {"filter": self.filter, "mode": self.mode, "min_score": self.min_score, "mmr_lambda": self.mmr_lambda}
        return [_document(hit) for hit in self.collection.search(query, k, **asked | kwargs)]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        """Pass keywords on, unlike LangChain's base method."""
        ask = partial(self._get_relevant_documents, query, run_manager=run_manager.get_sync(), **kwargs)
        return await run_in_executor(None, ask)


def _listed(name: str, values: Iterable[str]) -> list[str]:
    """Return a list. Raises ValueError for a single string, which would be split into letters."""
    if isinstance(values, str):
        raise ValueError(f"{name} is one string; pass a list")
    return list(values)


def _document(row: Any) -> Document:
    return Document(id=row.id, page_content=row.text, metadata=dict(row.metadata))
