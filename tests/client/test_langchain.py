"""LangChain's own suites over the served application, and what they do not look at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import (
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)

import owl_sap_client
from app.src.langchain import Owl
from owl_sap_client import AsyncClient, Client
from owl_sap_client.langchain import OwlSapEmbeddings, OwlSapRetriever, OwlSapVectorStore
from tests.client.conftest import Served

_CLIENTS: dict[str, Client] = {}
"""The suites take classes and arguments, no fixtures."""


@pytest.fixture(scope="module", autouse=True)
def shared(served: Served) -> Iterator[Client]:
    with Client(served.url) as client:
        _CLIENTS["client"] = client
        yield client
    _CLIENTS.clear()


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OwlSapEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"client": _CLIENTS["client"]}


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return OwlSapRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"client": _CLIENTS["client"], "collection": "materials", "mode": "vector"}

    @property
    def retriever_query_example(self) -> str:
        return "oil pump"


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, shared: Client) -> Iterator[VectorStore]:
        yield OwlSapVectorStore(shared, "notes")
        empty(shared)


class TestVectorStoreOfAsyncClient(VectorStoreIntegrationTests):
    """Asynchronous methods over an AsyncClient of the test's own loop."""

    @pytest.fixture
    async def vectorstore(self, shared: Client, served: Served) -> AsyncIterator[VectorStore]:
        async with AsyncClient(served.url) as client:
            yield OwlSapVectorStore(shared, "notes", client)
        empty(shared)

    @property
    def has_sync(self) -> bool:
        return False


def empty(client: Client) -> None:
    while hits := client.search("notes", "anything", k=4).hits:
        client.delete_documents("notes", [hit.id for hit in hits])


def test_documents_are_written_found_and_deleted_in_any_number(shared: Client, served: Served) -> None:
    texts = [f"note {number} about pumps" for number in range(9)]  # api.max_inputs is 4
    store = OwlSapVectorStore.from_texts(
        texts, OwlSapEmbeddings(shared), [{"number": number} for number in range(9)], client=shared, collection="notes"
    )
    try:
        found = store.similarity_search("note 7 about pumps", k=9, filter={"number": {"$gte": 7}})
        assert {document.page_content for document in found} == set(texts[7:])
        ids = [str(document.id) for document in store.similarity_search("pumps", k=9)]
        assert [document.id for document in store.get_by_ids(ids)] == ids
        assert shared.rows("notes", ids[:1])[0].chunks == [store.get_by_ids(ids[:1])[0].page_content]
        assert store.delete(ids)
        assert store.similarity_search("pumps", k=9) == []
    finally:
        empty(shared)


def test_a_table_s_collection_is_not_written(shared: Client) -> None:
    with pytest.raises(owl_sap_client.Conflict):
        OwlSapVectorStore(shared, "materials").add_texts(["a"])


def test_more_texts_than_one_request_takes(shared: Client, served: Served) -> None:
    texts = [f"text {number}" for number in range(9)]  # api.max_inputs is 4
    found = OwlSapEmbeddings(shared).embed_documents(texts)
    assert found == served.service.parts.engine.embed(texts).tolist()
    assert OwlSapEmbeddings(shared).embed_documents([]) == []

    async def later() -> None:
        async with AsyncClient(served.url) as client:
            embeddings = OwlSapEmbeddings(shared, client)
            assert await embeddings.aembed_documents(texts) == found
            assert await embeddings.aembed_query(texts[0]) == found[0]

    asyncio.run(later())


def test_too_long_is_refused_or_cut(shared: Client, served: Served) -> None:
    long = "word " * (served.service.parts.engine.max_tokens + 1)
    with pytest.raises(owl_sap_client.Unprocessable, match="tokens"):
        OwlSapEmbeddings(shared).embed_query(long)
    assert len(OwlSapEmbeddings(shared, truncate=True).embed_query(long)) == 64


def test_a_collection_of_rows_is_searched(shared: Client, served: Served) -> None:
    store = OwlSapVectorStore(shared, "materials")
    ((best, score),) = store.similarity_search_with_score("hydraulic oil pump", k=1, mode="vector")
    assert (best.page_content, best.metadata) == ("hydraulic oil pump", {"MTART": "ROH"})
    assert 0.9 < score <= 1.0001
    assert store.similarity_search("hydraulic oil pump", k=1, filter={"MTART": "FERT"}) != [best]
    vector = store.embeddings.embed_query("hydraulic oil pump")
    assert store.similarity_search_by_vector(vector, k=1) == [best]
    assert OwlSapVectorStore(shared, "materials", mode="hybrid").similarity_search_by_vector(vector, k=1) == [best]
    assert len(store.max_marginal_relevance_search("oil", k=3, lambda_mult=0.1)) == 3
    assert store.max_marginal_relevance_search_by_vector(vector, k=1) == [best]
    ((_, relevance),) = store.similarity_search_with_relevance_scores("hydraulic oil pump", k=1)
    assert 0.9 < relevance <= 1
    both_ways = OwlSapVectorStore(shared, "materials", mode="hybrid")
    for mode in ("hybrid", "keyword"):
        judged = store.similarity_search_with_relevance_scores("hydraulic oil pump", mode=mode)
        assert judged[0][1] > 0.9
        again = store.asimilarity_search_with_relevance_scores("hydraulic oil pump", mode=mode)
        assert asyncio.run(again) == judged
    assert both_ways.similarity_search_with_relevance_scores("hydraulic oil pump", k=1)[0][0] == best
    (found,) = store.as_retriever(search_kwargs={"k": 1}).invoke("hydraulic oil pump")
    assert found == best

    async def later(async_client: AsyncClient | None) -> None:
        same = OwlSapVectorStore(shared, "materials", async_client)
        found = await same.asimilarity_search_with_score("hydraulic oil pump", k=1, mode="vector")
        assert found == [(best, score)]
        assert await same.asimilarity_search_by_vector(vector, k=1) == [best]
        assert await same.amax_marginal_relevance_search("hydraulic oil pump", k=1) == [best]
        assert await same.amax_marginal_relevance_search_by_vector(vector, k=1) == [best]

    async def both() -> None:
        await later(None)
        async with AsyncClient(served.url) as client:
            await later(client)

    asyncio.run(both())


@pytest.mark.parametrize("fetch_k", [1, 3, 4, 50, 5000])
def test_mmr_chooses_from_fetch_k_hits_as_it_does_in_the_process(shared: Client, served: Served, fetch_k: int) -> None:
    remote = OwlSapVectorStore(shared, "materials")
    owl = Owl(service=served.service)  # not closed: the service serves on
    here = owl.vector_store("materials")
    vector = here.embeddings.embed_query("hydraulic oil pump")

    def chosen(store: VectorStore) -> list[list[str | None]]:
        wanted: dict[str, Any] = {"k": 3, "fetch_k": fetch_k, "lambda_mult": 0.0}
        by_text = store.max_marginal_relevance_search("hydraulic oil pump", **wanted)
        by_vector = store.max_marginal_relevance_search_by_vector(vector, **wanted)
        return [[document.id for document in found] for found in (by_text, by_vector)]

    assert chosen(remote) == chosen(here)
    best = [document.id for document in remote.similarity_search_by_vector(vector, k=3)]
    assert (set(chosen(remote)[0]) == set(best)) is (fetch_k <= 3)


def test_texts_are_searched_by_hybrid_and_the_other_ways_by_vector(shared: Client, served: Served) -> None:
    remote = OwlSapVectorStore(shared, "materials")
    owl = Owl(service=served.service)  # not closed: the service serves on
    text = "hydraulic oil for the pump"
    vector = owl.embeddings().embed_query(text)
    for store in (remote, owl.vector_store("materials")):
        both = store.similarity_search_with_score(text, k=3, mode="hybrid")
        near = store.similarity_search_with_score(text, k=3, mode="vector")
        assert [score for _, score in both] != [score for _, score in near], "modes that can be told apart"
        assert store.similarity_search_with_score(text, k=3) == both
        assert store.similarity_search_by_vector(vector, k=3) == [found for found, _ in near]
        relevant = store.similarity_search_with_relevance_scores(text, k=3)
        assert [found for found, _ in relevant] == [found for found, _ in near]
        judged = [score for _, score in relevant]
        assert judged == sorted(judged, reverse=True)
        assert all(0 <= score <= 1 for score in judged)
        spread = store.max_marginal_relevance_search(text, k=3)
        assert spread == store.max_marginal_relevance_search(text, k=3, mode="vector")


def test_the_retriever_tells_key_and_score(shared: Client, served: Served) -> None:
    retriever = OwlSapRetriever(client=shared, collection="materials", k=2, filter={"MTART": "ROH"})
    (best, *_) = retriever.invoke("hydraulic oil pump")
    assert best.metadata["_key"] == {"MATNR": "3"}
    assert best.metadata["_score"] > 0
    assert best.metadata["MTART"] == "ROH"
    assert len(retriever.invoke("pump", filter={"MTART": "FERT"}, mode="keyword")) == 0
    with pytest.raises(owl_sap_client.Unprocessable, match="mmr_lambda"):  # so it is asked for
        OwlSapRetriever(client=shared, collection="materials", mmr_lambda=2.0).invoke("pump")

    async def later() -> None:
        async with AsyncClient(served.url) as client:
            same = OwlSapRetriever(client=shared, async_client=client, collection="materials", k=2)
            assert (await same.ainvoke("hydraulic oil pump"))[0].id == best.id

    asyncio.run(later())


def test_what_is_refused(shared: Client) -> None:
    with pytest.raises(ValueError, match="OwlSapEmbeddings"):
        OwlSapVectorStore.from_texts(["a"], DeterministicFakeEmbedding(size=3), client=shared, collection="materials")
    store = OwlSapVectorStore(shared, "materials")
    with pytest.raises(ValueError, match="ids"):
        store.delete()
    with pytest.raises(ValueError, match="zip"):
        store.add_texts(["a", "b"], ids=["1"])
    for wrong in (store.add_texts, store.delete, store.get_by_ids):
        with pytest.raises(ValueError, match="list"):
            wrong("ab")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"metadata$"):
        store.add_texts(["a"], metadata=[{}])
    with pytest.raises(TypeError, match="filter"):
        store.delete(["1"], filter={"A": 1})
    with pytest.raises(ValueError, match="filters"):
        OwlSapRetriever(client=shared, collection="materials", filters={"MTART": "ROH"})  # type: ignore[call-arg]
    with pytest.raises(owl_sap_client.NotFound):
        OwlSapRetriever(client=shared, collection="nothing").invoke("x")
