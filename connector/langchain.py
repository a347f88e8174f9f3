"""LangChain in the process: a collection as its vector store and retriever, a model as its embeddings. Knows the
collection by the protocol below and LangChain's base classes; neither store nor engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict

from connector.model import Filter
from connector.protocols import Embedder
from connector.sync.documents import NewDocument

Mode = Literal["vector", "keyword", "hybrid"]
BATCH = 200
"""Documents that are written in one transaction."""
_IDS = 100
"""Rows that are read at once."""


class FoundRow(Protocol):
    """A row of the collection, found or read."""

    @property
    def id(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class ScoredRow(FoundRow, Protocol):
    @property
    def score(self) -> float: ...


@dataclass(frozen=True, slots=True)
class SearchWith:
    """How to search. `filter`: the filter language of search; `mode` None: hybrid for a text, vector for a vector;
    `min_score`: by the score of the modes vector and keyword, by the cosine in hybrid; `mmr_lambda` from 0 (different)
    to 1 (relevant): hits unlike each other, chosen from the best `depth`."""

    filter: Filter | None = None
    mode: Mode | None = None
    min_score: float | None = None
    mmr_lambda: float | None = None
    depth: int | None = None


class Collection(Protocol):
    """A collection as somebody may see and write it. Raises the tree of `errors.py`."""

    @property
    def name(self) -> str: ...

    @property
    def embedder(self) -> Embedder:
        """The model that its vectors are of."""
        ...

    def search(self, query: str | Sequence[float], k: int, how: SearchWith) -> Sequence[ScoredRow]:
        """Best first; none where nothing was ever written. Raises ValueError for an empty text, and what is no mode."""
        ...

    def rows(self, ids: Sequence[str]) -> Sequence[FoundRow]:
        """In the order of up to 100 `ids`; those that are not there are left out."""
        ...

    def put(self, documents: Sequence[NewDocument]) -> list[str]:
        """All or none; replaces those whose ids are there. Raises WrongOrigin where a table is the source."""
        ...

    def delete(self, ids: Sequence[str]) -> int: ...


class OwlEmbeddings(Embeddings):
    """A model as LangChain's embeddings: unit vectors. A text longer than the model takes is cut."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self.embedder.embed_documents(texts).tolist() if texts else []
        return vectors

    def embed_query(self, text: str) -> list[float]:
        vector: list[float] = self.embedder.embed_query(text).tolist()
        return vector


class OwlVectorStore(VectorStore):
    """A collection as LangChain's vector store. It embeds with its own model. One that clients write can be written
    here, too; one that is synced from a table is for reading, and a write raises WrongOrigin.

    Every search takes, beside what LangChain names, the fields of `SearchWith` as keywords. A search by text has the
    mode hybrid; MMR, relevance scores and searches by vector have the mode vector, whose scores are cosines. Relevance
    scores are those cosines, those below 0 as 0. The asynchronous methods work in threads.
    """

    def __init__(self, collection: Collection) -> None:
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
        """Store them, replacing those whose ids are there; their ids. A text without an id gets a new one. In
        transactions of BATCH documents: when one is refused, those of the transactions before it are stored. Raises
        BadDocument, counting within its transaction, and WrongOrigin. `batch_size`, which LangChain's index() gives, is
        passed over."""
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
        """Those that are not there do not matter. Raises ValueError without `ids`, because nothing deletes everything,
        and WrongOrigin for a row that another program wrote: the rows of its batch then stay."""
        if ids is None or kwargs:
            raise ValueError("delete takes the ids of documents, and nothing else: it never deletes all there is")
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
        collection: Collection | None = None,
        **kwargs: Any,
    ) -> OwlVectorStore:
        """The texts in `collection`, which must be given. `embedding`: its own model (`OwlVectorStore.embeddings`);
        ValueError for any other, because nothing else would ever be asked for vectors."""
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
        """In the order of `ids`, whole texts; those that are not there are left out."""
        listed = _listed("ids", ids)
        pages = (listed[start : start + _IDS] for start in range(0, len(listed), _IDS))
        return [_document(row) for page in pages for row in self.collection.rows(page)]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """Best first; each text is the passage that was found."""
        return self._search(query, k, SearchWith(**kwargs))

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return [document for document, _ in self._search(embedding, k, SearchWith(**kwargs))]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        options: dict[str, Any] = {"mode": "vector", "depth": fetch_k} | kwargs
        how = SearchWith(mmr_lambda=lambda_mult, **options)
        return [document for document, _ in self._search(query, k, how)]

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        options: dict[str, Any] = {"depth": fetch_k} | kwargs
        how = SearchWith(mmr_lambda=lambda_mult, **options)
        return [document for document, _ in self._search(embedding, k, how)]

    def _search(self, query: str | Sequence[float], k: int, how: SearchWith) -> list[tuple[Document, float]]:
        return [(_document(hit), hit.score) for hit in self.collection.search(query, k, how)]

    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return super()._similarity_search_with_relevance_scores(query, k, **_relevant(kwargs))

    async def _asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return await super()._asimilarity_search_with_relevance_scores(query, k, **_relevant(kwargs))

    def _select_relevance_score_fn(self) -> Any:
        return lambda cosine: min(1.0, max(0.0, cosine))


class OwlRetriever(BaseRetriever):
    """The best rows of a collection for a question, by meaning, words or both. `invoke` takes each field but the first
    as a keyword, too."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    collection: Any
    """A `Collection`."""
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
        return [_document(hit) for hit in self.collection.search(query, k, SearchWith(**asked | kwargs))]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        """LangChain's own takes no keywords."""
        ask = partial(self._get_relevant_documents, query, run_manager=run_manager.get_sync(), **kwargs)
        return await run_in_executor(None, ask)


def _relevant(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a search for relevance scores, in mode vector. Raises ValueError for another mode."""
    if (mode := options.get("mode", "vector")) != "vector":
        raise ValueError(
            f"scores of mode {mode} say nothing about how relevant a hit is; filter by min_score, or "
            "search in mode vector"
        )
    return {**options, "mode": "vector"}


def _listed(name: str, values: Iterable[str]) -> list[str]:
    """Raises ValueError for one string, whose letters would be taken for so many."""
    if isinstance(values, str):
        raise ValueError(f"{name} is one string; give a list")
    return list(values)


def _document(row: FoundRow) -> Document:
    return Document(id=row.id, page_content=row.text, metadata=dict(row.metadata))
