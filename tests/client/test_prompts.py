"""Texts as queries and as documents, for a model with prompts: over REST, by our clients and in LangChain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from openai import OpenAI

from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine
from app.src.langchain import Owl
from app.src.service.service import Service
from owl_sap_client import AsyncClient, Client
from owl_sap_client.langchain import OwlSapEmbeddings
from tests.api.conftest import TableSource, serving, settings_in
from tests.client.conftest import Served

TEXT = "hydraulic oil pump"
QUERY, DOCUMENT = "query: hydraulic oil pump", "passage: hydraulic oil pump"


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = settings_in(tmp_path_factory.mktemp("prompted"))
    prompts = {"query_prompt": "query: ", "document_prompt": "passage: "}
    settings = settings.model_copy(update={"embedding": settings.embedding.model_copy(update=prompts)})
    source = TableSource()
    with closing(Service(settings, source=source)) as service:
        service.sync.run("materials")
        with serving(service) as http:
            yield Served(service, source, str(http.base_url), http)


@pytest.fixture(scope="module")
def bare() -> Iterator[Engine]:
    """The same model without prompts."""
    with load_engine(EngineOptions("hash:64")) as engine:
        yield engine


@pytest.mark.parametrize(
    ("asked", "embedded"),
    [({}, DOCUMENT), ({"input_type": "document"}, DOCUMENT), ({"input_type": "query"}, QUERY)],
    ids=str,
)
def test_over_rest(prompted: Served, bare: EmbeddingEngine, asked: dict[str, str], embedded: str) -> None:
    wanted = bare.embed([embedded])
    ours = prompted.http.post("/embed", json={"inputs": TEXT} | asked).json()
    np.testing.assert_array_equal(np.array(ours, np.float32), wanted)
    answer = prompted.http.post("/v1/embeddings", json={"input": TEXT} | asked).json()
    np.testing.assert_array_equal(np.array([answer["data"][0]["embedding"]], np.float32), wanted)
    assert answer["usage"]["total_tokens"] == bare.count_tokens([TEXT])[0]
    with OpenAI(base_url=f"{prompted.url}/v1", api_key="any", max_retries=0) as openai:
        (data,) = openai.embeddings.create(input=[TEXT], model="hash:64", extra_body=asked).data
    np.testing.assert_array_equal(np.array([data.embedding], np.float32), wanted)


@pytest.mark.parametrize("input_type", ["passage", "", "Query", 1, None])
@pytest.mark.parametrize(("route", "name"), [("/embed", "inputs"), ("/v1/embeddings", "input")])
def test_another_input_type_is_refused(prompted: Served, route: str, name: str, input_type: object) -> None:
    answer = prompted.http.post(route, json={name: TEXT, "input_type": input_type})
    assert answer.status_code == 422
    assert "input_type" in answer.text


def test_the_limit_excludes_the_prompts(prompted: Served, bare: EmbeddingEngine) -> None:
    most = prompted.http.get("/v1/info").json()["max_tokens"]
    assert most == bare.max_tokens - 2
    full = "oil " * most
    assert prompted.http.post("/embed", json={"inputs": full}).status_code == 200
    refused = prompted.http.post("/embed", json={"inputs": f"{full} pump"})
    assert f"has {most + 1} tokens; the limit is {most}" in refused.json()["detail"]
    cut = prompted.http.post("/embed", json={"inputs": f"{full} pump", "truncate": True, "input_type": "query"})
    np.testing.assert_allclose(cut.json(), bare.embed([f"query: {full}"]), atol=1e-6)


def test_by_our_clients_and_in_langchain(prompted: Served, bare: EmbeddingEngine) -> None:
    query, document = bare.embed([QUERY, DOCUMENT]).tolist()

    async def later() -> None:
        async with AsyncClient(prompted.url) as asynchronous:
            assert [vector.tolist() for vector in await asynchronous.embed([TEXT], input_type="query")] == [query]
            embeddings = OwlSapEmbeddings(client, asynchronous)
            assert await embeddings.aembed_query(TEXT) == query
            assert await embeddings.aembed_documents([TEXT]) == [document]

    with Client(prompted.url) as client:
        assert client.embed([TEXT])[0].tolist() == document
        assert client.embed([TEXT], input_type="query")[0].tolist() == query
        (data,) = client.openai_embeddings([TEXT], input_type="query").data
        np.testing.assert_array_equal(np.array(data.embedding, np.float32), np.array(query, np.float32))
        asyncio.run(later())
        for embeddings in (OwlSapEmbeddings(client), Owl(service=prompted.service).embeddings()):
            assert embeddings.embed_query(TEXT) == query
            assert embeddings.embed_documents([TEXT]) == [document]
            assert asyncio.run(embeddings.aembed_query(TEXT)) == query


def test_a_search_compares_the_query_with_documents(prompted: Served, bare: EmbeddingEngine) -> None:
    """Also after the same text was embedded as a document: the cache of search texts has queries alone."""
    query, document = bare.embed([QUERY, DOCUMENT])
    with Client(prompted.url) as client:
        for _ in range(2):
            client.embed([TEXT])
            (hit,) = client.search("materials", TEXT, k=1, mode="vector").hits
            assert hit.text == TEXT
            assert hit.score == pytest.approx(float(query @ document), abs=2e-3)
