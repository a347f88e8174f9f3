"""/v1/embeddings and /v1/models through OpenAI's own client, and by hand where that would not send such a thing."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from app.src.core.backends import EngineClosed
from app.src.core.engine import EmbeddingEngine
from app.src.core.queue import EngineOverloaded
from app.src.service.service import Service
from tests.api.conftest import TableSource, serving, settings_in

ROUTE = "/v1/embeddings"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(settings_in(tmp_path_factory.mktemp("openai")), source=TableSource())
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as client:
        yield client


@pytest.fixture
def official(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official:
        yield official


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """OpenAI's error object, and nothing beside it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert set(document) == {"error"}
    error: dict[str, Any] = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["message"]
    return error


# ------------------------------------------------------------------------------------------------- the official client


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}], ids=str)
def test_the_client_gets_our_vectors_in_order(official: openai.OpenAI, service: Service, form: dict[str, Any]) -> None:
    """Without a form the client asks for base64 and decodes it; with base64 named it hands it over as it came."""
    texts = ["steel", "oil pump", "steel", "Überdruck 🦉"]
    answer = official.embeddings.create(model="hash:64", input=texts, **form)
    vectors = [
        np.frombuffer(base64.b64decode(item.embedding), dtype="<f4")
        if isinstance(item.embedding, str)
        else np.array(item.embedding, dtype=np.float32)
        for item in answer.data
    ]
    np.testing.assert_array_equal(vectors, service.parts.engine.embed(texts))
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    assert {item.object for item in answer.data} == {"embedding"}
    assert (answer.object, answer.model) == ("list", "hash:64")
    tokens = sum(service.parts.engine.count_tokens(texts))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_one_text_and_the_model_s_own_length(official: openai.OpenAI) -> None:
    answer = official.embeddings.create(model="hash:64", input="steel", dimensions=64, user="somebody")
    (item,) = answer.data
    assert len(item.embedding) == 64
    assert np.linalg.norm(item.embedding) == pytest.approx(1, abs=1e-6)


def test_the_asynchronous_client(client: httpx.Client, service: Service) -> None:
    async def several() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official:
            asked = (official.embeddings.create(model="hash:64", input=f"text {n}") for n in range(6))
            return await asyncio.gather(*asked)

    answers = asyncio.run(several())
    expected = service.parts.engine.embed([f"text {n}" for n in range(6)])
    np.testing.assert_array_equal([np.array(answer.data[0].embedding, np.float32) for answer in answers], expected)


@pytest.mark.slow
def test_the_clients_try_again_when_the_engine_is_busy(
    client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of OpenAI's clients, on their own: 429 with Retry-After is tried again, and only so often."""
    submit = service.parts.embedder.engine.submit
    refused: list[list[str]] = []

    def busy_at_first(texts: list[str], **options: Any) -> Any:
        if len(refused) % 2 == 0:
            refused.append(texts)
            raise EngineOverloaded("the queue is full", seconds=0.01)
        refused.append([])
        return submit(texts, **options)

    monkeypatch.setattr(service.parts.embedder.engine, "submit", busy_at_first)
    address = f"{client.base_url}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=1) as official:
        first = official.embeddings.create(model="hash:64", input="steel")

    async def later() -> Any:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=1) as official:
            return await official.embeddings.create(model="hash:64", input="steel")

    assert asyncio.run(later()).data[0].embedding == first.data[0].embedding
    assert len(refused) == 4

    async def not_again() -> None:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as official:
            with pytest.raises(openai.RateLimitError) as busy:
                await official.embeddings.create(model="hash:64", input="steel")
            assert busy.value.response.headers["retry-after"] == "1"
            with pytest.raises(openai.NotFoundError, match="hash:64"):
                await official.models.retrieve("gpt-5")

    asyncio.run(not_again())


def test_models(official: openai.OpenAI) -> None:
    (model,) = official.models.list()
    assert (model.id, model.object, model.owned_by) == ("hash:64", "model", "owl-sap-connector")
    assert official.models.retrieve("hash:64") == model


def test_refusals_become_the_client_s_exceptions(official: openai.OpenAI, service: Service) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        official.embeddings.create(model="text-embedding-3-small", input="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert "hash:64" in unknown.value.message
    assert unknown.value.request_id
    with pytest.raises(openai.NotFoundError, match="hash:64"):
        official.models.retrieve("gpt-5")
    long = "word " * (service.parts.engine.max_tokens + 1)
    with pytest.raises(openai.BadRequestError) as too_long:
        official.embeddings.create(model="hash:64", input=["a", long])
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")
    assert f"input[1] has {service.parts.engine.max_tokens + 1} tokens" in too_long.value.message
    with pytest.raises(openai.BadRequestError, match=r"32.*has 64.*Matryoshka"):
        official.embeddings.create(model="hash:64", input="a", dimensions=32)
    with pytest.raises(openai.BadRequestError, match="65"):
        official.embeddings.create(model="hash:64", input="a", dimensions=65)
    for tokens in ([1, 2, 3], [[1, 2], [3]]):
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length"):
            official.embeddings.create(model="hash:64", input=tokens)
    with pytest.raises(openai.APIStatusError, match=r"api\.max_inputs") as many:
        official.embeddings.create(model="hash:64", input=["a"] * 5)
    assert many.value.status_code == 413
    with pytest.raises(openai.UnprocessableEntityError, match="input is empty"):
        official.embeddings.create(model="hash:64", input=[])


def test_an_engine_that_is_away(
    official: openai.OpenAI, client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(texts: list[str], **_: Any) -> Any:
        raise EngineClosed("the engine of hash:64 is closed")

    monkeypatch.setattr(service.parts.embedder.engine, "submit", closed)
    with pytest.raises(openai.InternalServerError, match="closed") as caught:
        official.embeddings.create(model="hash:64", input="a")
    assert caught.value.status_code == 503
    assert refusal(client.post(ROUTE, json={"input": "a"}), 503)["type"] == "server_error"
    assert client.post(ROUTE, json={"input": "a"}).headers["retry-after"]

    def broken(texts: list[str], **_: Any) -> Any:
        raise RuntimeError("canary-91")

    monkeypatch.setattr(service.parts.embedder.engine, "submit", broken)
    assert "canary-91" not in refusal(client.post(ROUTE, json={"input": "a"}), 500)["message"]
    monkeypatch.setattr(EmbeddingEngine, "model", property(lambda self: closed([])), raising=False)
    refusal(client.get("/v1/models"), 503)


# -------------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("name", ["hash:64", "any/path/hash:64"])
def test_the_model_is_known_with_and_without_a_path(client: httpx.Client, name: str) -> None:
    assert client.post(ROUTE, json={"input": "a", "model": name}).json()["model"] == "hash:64"
    assert client.get(f"/v1/models/{name}").json()["id"] == "hash:64"


@pytest.mark.parametrize(
    ("configured", "served", "asked", "known"),
    [
        ("BAAI/bge-small-en", "BAAI/bge-small-en", "bge-small-en", True),
        ("BAAI/bge-small-en", "BAAI/bge-small-en", "other/bge-small-en", False),
        ("/models/own", "own", "/models/own", True),
        ("/models/own", "own", "own", True),
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2", True),
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2", "all-MiniLM-L12-v2", False),
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2", "", False),
    ],
)
def test_names_of_models(
    client: httpx.Client,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    configured: str,
    served: str,
    asked: str,
    known: bool,
) -> None:
    embedding = service.settings.embedding.model_copy(update={"model": configured})
    monkeypatch.setattr(service, "settings", service.settings.model_copy(update={"embedding": embedding}))
    monkeypatch.setattr(service.parts.engine, "model", served)
    response = client.post(ROUTE, json={"input": "a", "model": asked})
    if known:
        assert response.json()["model"] == served
    else:
        assert refusal(response, 404)["code"] == "model_not_found"


def test_without_a_model_there_is_one(client: httpx.Client) -> None:
    assert client.post(ROUTE, json={"input": "a"}).json()["model"] == "hash:64"


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 422, "input", "body.input"),
        ({"input": 3}, 422, "input", "body.input"),
        ({"input": [None]}, 422, "input", "body.input"),
        ({"input": ["a", 1]}, 422, "input", "body.input"),
        ({"input": "a", "dimensions": 0}, 422, "dimensions", "body.dimensions"),
        ({"input": "a", "dimensions": True}, 422, "dimensions", "body.dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 422, "encoding_format", "body.encoding_format"),
        ({"input": "a", "model": 3}, 422, "model", "body.model"),
        ({"input": "a", "truncate": True}, 422, "truncate", "body.truncate"),
        ({"input": "\ud83d"}, 422, "input", "surrogate"),
        ({"input": ["a", "b" * 9_001]}, 413, "input", "input[1]"),
        ({"input": "a", "user": "u" * 20_001}, 413, None, "api.max_body_bytes"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    response = client.post(ROUTE, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = refusal(response, status)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[" * 10_000])
def test_bodies_that_are_no_json(client: httpx.Client, content: bytes) -> None:
    response = client.post(ROUTE, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    refusal(response, response.status_code)


def test_routing_errors_keep_the_shape(client: httpx.Client) -> None:
    refusal(client.get(ROUTE), 405)
    refusal(client.post("/v1/models"), 405)
    refusal(client.get(f"{ROUTE}/nope"), 404)


def test_a_chunked_body_that_grows_too_large(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    assert "api.max_body_bytes" in refusal(client.post(ROUTE, content=chunks()), 413)["message"]


def test_a_model_that_was_trained_to_be_cut(
    client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.parts.engine, "matryoshka", (16, 32))
    texts = ["steel shaft of a pump", "office chair with wheels"]
    data = client.post(ROUTE, json={"input": texts, "dimensions": 32}).json()["data"]
    short = service.parts.engine.embed(texts)[:, :32]
    expected = short / np.linalg.norm(short, axis=1, keepdims=True)
    np.testing.assert_allclose([item["embedding"] for item in data], expected, atol=1e-6)
    error = refusal(client.post(ROUTE, json={"input": texts, "dimensions": 24}), 400)
    assert (error["param"], "16, 32" in error["message"]) == ("dimensions", True)
    monkeypatch.setattr(service.parts.engine, "matryoshka", range(1, 64))
    assert len(client.post(ROUTE, json={"input": "steel", "dimensions": 24}).json()["data"][0]["embedding"]) == 24


def test_openapi_shows_openai_s_error(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path in (ROUTE, "/v1/models", "/v1/models/{model}"):
        for operation in document["paths"][path].values():
            content = operation["responses"]["4XX"]["content"]
            assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/OpenAIError"}
    assert "error" in document["components"]["schemas"]["OpenAIError"]["properties"]
