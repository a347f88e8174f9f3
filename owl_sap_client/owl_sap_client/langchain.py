"""LangChain over REST: embeddings, a vector store and a retriever. The service embeds and searches. Needs
langchain-core.

Asynchronous methods use the AsyncClient if one is given (it belongs to one event loop), otherwise the Client in a
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore

from owl_sap_client import operations
from owl_sap_client.client import AsyncClient, Client
from owl_sap_client.operations import Vector
from owl_sap_client.results import Hit, Row, SearchResult

Mode = Literal["vector", "keyword", "hybrid"]
# The most ids in one request for rows.
_MOST_ROWS = 100
_VECTOR: Mapping[str, Any] = {"mode": "vector"}


class _Most:
    """The service's limit on texts per request, fetched once."""

    def __init__(self, client: Client, async_client: AsyncClient | None) -> None:
        self._client = client
        self._async = async_client
        self._most: int | None = None

    def now(self) -> int:
        if self._most is None:
            self._most = self._client.info().limits.max_inputs
        return self._most

    async def later(self) -> int:
        if self._most is None:
            if self._async is None:
                return await run_in_executor(None, self.now)
            self._most = (await self._async.info()).limits.max_inputs
        return self._most


class OwlSapEmbeddings(Embeddings):
    """Embeddings of the service's model. `truncate`: cut texts that are too long instead of raising Unprocessable."""

    def __init__(self, client: Client, async_client: AsyncClient | None = None, *, truncate: bool = False) -> None:
        self._client = client
        self._async = async_client
        self._most = _Most(client, async_client)
        self._truncate = truncate

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        found: list[list[float]] = []
        for some in _batches(texts, self._most.now()):
            found += _numbers(self._client.embed(some, truncate=self._truncate))
        return found

    def embed_query(self, text: str) -> list[float]:
        return _numbers(self._client.embed([text], input_type="query", truncate=self._truncate))[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        if self._async is None:
            return await super().aembed_documents(texts)
        found: list[list[float]] = []
        for some in _batches(texts, await self._most.later()):
            found += _numbers(await self._async.embed(some, truncate=self._truncate))
        return found

    async def aembed_query(self, text: str) -> list[float]:
        if self._async is None:
            return await super().aembed_query(text)
        return _numbers(await self._async.embed([text], input_type="query", truncate=self._truncate))[0]


class OwlSapVectorStore(VectorStore):
    """A collection as a vector store. Only collections with `documents = true` can be written; others raise Conflict.

    Searches take `filter` (docs/search.md), `mode` and `min_score`. A search by text uses `mode` (default hybrid); MMR,
    relevance scores and searches by vector use the mode vector unless another is given. Relevance scores are the hits'
    `relevance`: 0 to 1, below 0.2 probably irrelevant.
    """

    def __init__(
        self, client: Client, collection: str, async_client: AsyncClient | None = None, *, mode: Mode = "hybrid"
    ) -> None:
        self._client = client
        self._async = async_client
        self._collection = collection
        self._most = _Most(client, async_client)
        self._mode: Mode = mode

    @property
    def embeddings(self) -> OwlSapEmbeddings:
        return OwlSapEmbeddings(self._client, self._async)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> OwlSapVectorStore:
        """Create a store, write texts into it and return it; takes the constructor's arguments too. Raises ValueError
        if `embedding` is not an OwlSapEmbeddings: the service embeds the texts itself."""
        if not isinstance(embedding, OwlSapEmbeddings):
            raise ValueError("the service embeds with its own model; pass OwlSapEmbeddings(client)")
        made = cls(**kwargs)
        made.add_texts(texts, metadatas, ids=ids)
        return made

    # ------------------------------------------------------------------------------------------------------ writing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **other: Any,
    ) -> list[str]:
        """Write texts and return their ids; existing ids are replaced. `batch_size` is ignored."""
        _check_known(other, "batch_size")
        written: list[str] = []
        for some in _batches(_documents(texts, metadatas, ids), self._most.now()):
            written += self._client.add_documents(self._collection, some)
        return written

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **other: Any,
    ) -> list[str]:
        _check_known(other, "batch_size")
        if self._async is None:
            return await run_in_executor(None, partial(self.add_texts, texts, metadatas, ids=ids))
        written: list[str] = []
        for some in _batches(_documents(texts, metadatas, ids), await self._most.later()):
            written += await self._async.add_documents(self._collection, some)
        return written

    def delete(self, ids: list[str] | None = None, **other: Any) -> bool:
        """Delete documents; unknown ids are ignored. Raises ValueError without ids, to protect the collection."""
        _check_known(other)
        for some in _batches(_named(ids), self._most.now()):
            self._client.delete_documents(self._collection, some)
        return True

    async def adelete(self, ids: list[str] | None = None, **other: Any) -> bool:
        _check_known(other)
        if self._async is None:
            return await run_in_executor(None, self.delete, ids)
        for some in _batches(_named(ids), await self._most.later()):
            await self._async.delete_documents(self._collection, some)
        return True

    # ------------------------------------------------------------------------------------------------------ reading

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        found: list[Row] = []
        for some in _batches(_named(ids), _MOST_ROWS):
            found += self._client.rows(self._collection, some)
        return [_of_row(row) for row in found]

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        if self._async is None:
            return await run_in_executor(None, self.get_by_ids, ids)
        found: list[Row] = []
        for some in _batches(_named(ids), _MOST_ROWS):
            found += await self._async.rows(self._collection, some)
        return [_of_row(row) for row in found]

    def similarity_search_with_score(self, query: str, k: int = 4, **options: Any) -> list[tuple[Document, float]]:
        return _scored(self._client.search(self._collection, query, **self._options(k, options)))

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, **options: Any
    ) -> list[tuple[Document, float]]:
        return _scored(await self._asked(query, self._options(k, options)))

    def similarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        return _plain(self.similarity_search_with_score(query, k, **options))

    async def asimilarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        return _plain(await self.asimilarity_search_with_score(query, k, **options))

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **options: Any) -> list[Document]:
        """Search by a vector of the service's own model."""
        wanted = self._options(k, {**_VECTOR, **options, "vector": embedding})
        return _plain(_scored(self._client.search(self._collection, None, **wanted)))

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = 4, **options: Any) -> list[Document]:
        wanted = self._options(k, {**_VECTOR, **options, "vector": embedding})
        return _plain(_scored(await self._asked(None, wanted)))

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **options: Any
    ) -> list[Document]:
        return self.similarity_search(query, k, **_spread(fetch_k, lambda_mult, options))

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **options: Any
    ) -> list[Document]:
        return await self.asimilarity_search(query, k, **_spread(fetch_k, lambda_mult, options))

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **options: Any
    ) -> list[Document]:
        return self.similarity_search_by_vector(embedding, k, **_spread(fetch_k, lambda_mult, options))

    async def amax_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **options: Any
    ) -> list[Document]:
        return await self.asimilarity_search_by_vector(embedding, k, **_spread(fetch_k, lambda_mult, options))

    def _options(self, k: int, options: Mapping[str, Any]) -> operations.SearchOptions:
        wanted: operations.SearchOptions = {"k": k, "mode": self._mode, **options}  # type: ignore[typeddict-item]
        return wanted

    async def _asked(self, query: str | None, options: operations.SearchOptions) -> SearchResult:
        if self._async is None:
            return await run_in_executor(None, partial(self._client.search, self._collection, query, **options))
        return await self._async.search(self._collection, query, **options)

    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **options: Any
    ) -> list[tuple[Document, float]]:
        return _judged(self._client.search(self._collection, query, **self._options(k, {**_VECTOR, **options})))

    async def _asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **options: Any
    ) -> list[tuple[Document, float]]:
        return _judged(await self._asked(query, self._options(k, {**_VECTOR, **options})))


class OwlSapRetriever(BaseRetriever):
    """Retrieve the best `k` rows of a collection. Their metadata contains the row's key as `_key`, the score as
    `_score`, and the row's own fields. `invoke` also takes `k`, `filter`, `mode` and the other options."""

    model_config = {"arbitrary_types_allowed": True, "extra": "forbid"}  # noqa: RUF012 - as pydantic reads it

    client: Client
    collection: str
    async_client: AsyncClient | None = None
    k: int = 4
    mode: Mode = "hybrid"
    filter: dict[str, Any] | None = None
    min_score: float | None = None
    mmr_lambda: float | None = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        found = self.client.search(self.collection, query, **self._options(options))
        return [_retrieved(hit) for hit in found.hits]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        if self.async_client is None:
            ask = partial(self.client.search, self.collection, query, **self._options(options))
            found = await run_in_executor(None, ask)
        else:
            found = await self.async_client.search(self.collection, query, **self._options(options))
        return [_retrieved(hit) for hit in found.hits]

    def _options(self, options: Mapping[str, Any]) -> operations.SearchOptions:
        own = {name: getattr(self, name) for name in ("k", "mode", "filter", "min_score", "mmr_lambda")}
        wanted: operations.SearchOptions = {**own, **options}  # type: ignore[typeddict-item]
        return wanted


# --------------------------------------------------------------------------------------------------------- conversions


def _batches(items: Sequence[Any], size: int) -> Iterator[Any]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _numbers(vectors: Iterable[Vector]) -> list[list[float]]:
    return [vector.tolist() for vector in vectors]


def _named(ids: Sequence[str] | None) -> Sequence[str]:
    if ids is None or isinstance(ids, str):  # a string's letters would become ids
        raise ValueError("ids must be a list of ids")
    return list(ids)


def _check_known(options: Mapping[str, Any], *known: str) -> None:
    """Raise TypeError for unknown keywords."""
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(f"unexpected keywords: {', '.join(unknown)}")


def _documents(
    texts: Iterable[str], metadatas: Sequence[Mapping[str, Any]] | None, ids: Sequence[str | None] | None
) -> list[operations.Document]:
    """Return the documents to write. Raises ValueError for lists of different lengths and for a single string."""
    if isinstance(texts, str):
        raise ValueError("texts is one string; pass a list: [text]")
    texts = list(texts)
    rows = zip(texts, metadatas or [{}] * len(texts), ids or [None] * len(texts), strict=True)
    return [{"id": id_, "text": text, "metadata": metadata or {}} for text, metadata, id_ in rows]


def _spread(fetch_k: int, lambda_mult: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a search by MMR."""
    return {**_VECTOR, "depth": fetch_k, **options, "mmr_lambda": lambda_mult}


def _of_row(row: Row) -> Document:
    return Document(id=row.id, page_content=row.text, metadata=dict(row.metadata))


def _scored(found: SearchResult) -> list[tuple[Document, float]]:
    return [(Document(id=hit.id, page_content=hit.text, metadata=dict(hit.metadata)), hit.score) for hit in found.hits]


def _judged(found: SearchResult) -> list[tuple[Document, float]]:
    """Return documents with their relevance; 0 where an older service gives none."""
    relevance = (hit.relevance or 0.0 for hit in found.hits)
    return [(document, judged) for (document, _), judged in zip(_scored(found), relevance, strict=True)]


def _plain(scored: Iterable[tuple[Document, float]]) -> list[Document]:
    return [document for document, _ in scored]


def _retrieved(hit: Hit) -> Document:
    metadata = {**hit.metadata, "_key": hit.key, "_score": hit.score}
    return Document(id=hit.id, page_content=hit.text, metadata=metadata)
