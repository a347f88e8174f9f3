"""Routes that read their bodies themselves take and refuse what FastAPI would; nothing is done for who has left."""

from __future__ import annotations

import base64
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import anyio
import anyio.to_thread
import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request, Response
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import from_json
from starlette.types import Message

from app.src.api import errors
from app.src.api.requests import DirectRoute, Executors, direct
from app.src.api.search import SearchRequest
from app.src.core.backends import InputType
from app.src.core.queue import EmbeddingQueue
from app.src.core.tokens import TokenBatch
from app.src.service.service import Service
from connector.model import Vectors
from tests.api.conftest import TableSource, serving, settings_in
from tests.core.conftest import words_by_text

SEARCH = "/v1/collections/materials/search"


# ------------------------------------------------------------------------------------------- the same as FastAPI's own


async def shown(request: Request, name: str, body: SearchRequest) -> Response:
    """What came: repr tells 1 from 1.0 and keeps every digit."""
    return Response(repr((name, body.model_dump(), request.headers.get("accept"))))


@pytest.fixture(scope="module")
def both() -> tuple[FastAPI, FastAPI]:
    """One endpoint in an application of each kind."""
    apps = FastAPI(), FastAPI()
    for app in apps:
        errors.install(app)
    direct(apps[0].router, "/in/{name}")(shown)
    apps[1].post("/in/{name}")(shown)
    assert isinstance(apps[0].router.routes[-1], DirectRoute)
    return apps


async def asked(app: FastAPI, content: bytes, kind: str | None) -> tuple[int, str, bytes]:
    headers = {} if kind is None else {"Content-Type": kind}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/in/a%20name", content=content, headers=headers)
    return response.status_code, response.headers.get("content-type", ""), response.content


GOOD = b'{"query": "steel", "k": 3}'
CONTENTS = [
    GOOD,
    b' \n{"query":"\\u00f6l \\ud83e\\udd89"}\t',
    '{"query": "Öl"}'.encode("latin-1"),
    '{"query": "Öl"}'.encode("utf-16"),
    '{"query": "Öl"}'.encode("utf-8-sig"),
    '{"query": "Öl 🦉 漢字"}'.encode(),
    b'{"query": "\\ud83d"}',
    b'{"query": "a", "query": "b"}',
    b'{"query": "a\nb"}',
    b'{"query": "a", "filter": {"N": 123456789012345678901234567890}}',
    b'{"query": "a", "filter": {"N": 18446744073709551616, "M": -9223372036854775809, "O": 1e400}}',
    b'{"query": "a", "filter": {"N": 0.1, "M": 1e-320, "O": 5e-324, "P": 1.7976931348623157e308, "Q": -0.0}}',
    b'{"query": "a", "filter": {"N": ' + b"1" * 5000 + b"}}",
    b'{"query": "a", "filter": {"a": ' + b'{"a": ' * 300 + b"1" + b"}" * 301 + b"}",
    b'{"vector": [1, 2.5, -0.0, 1e-45]}',
    b'{"vector": [NaN]}',
    b'{"vector": [Infinity, -Infinity]}',
    b'{"vector": [1e999]}',
    b'{"vector": [true]}',
    b'{"vector": ["1"]}',
    b'{"vector": []}',
    b'{"query": "a", "min_score": NaN}',
    b'{"query": "a", "k": 1.0}',
    b'{"query": "a", "k": true}',
    b'{"query": "a", "k": 99999999999999999999}',
    b'{"query": "a", "kk": 1}',
    b'{"query": "a", "vector": [1]}',
    b"{}",
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"3",
    b"{",
    b'{"query":',
    b'{"query": "a",}',
    b'{"query": "a"} x',
    b"{'query': 'a'}",
    b"\xff\xfe{\x00",
    b"\xef\xbb\xbf",
    b"[" * 5000,
    b'{"a":' * 3000,
]
KINDS = [
    "application/json",
    "Application/JSON; charset=utf-8",
    "application/json;charset=latin-1",
    "application/problem+json",
    "text/json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "",
    None,
]


async def compared(both: tuple[FastAPI, FastAPI], content: bytes, kind: str | None) -> int:
    mine, ordinary = [await asked(app, content, kind) for app in both]
    assert mine == ordinary
    return mine[0]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content)[:40])
def test_a_body_is_read_as_fastapi_reads_it(both: tuple[FastAPI, FastAPI], content: bytes) -> None:
    anyio.run(compared, both, content, "application/json")


@pytest.mark.parametrize("kind", KINDS)
def test_so_is_one_of_another_kind(both: tuple[FastAPI, FastAPI], kind: str | None) -> None:
    status = anyio.run(compared, both, GOOD, kind)
    assert (status == 200) == ("json" in (kind or "").lower() and not (kind or "").startswith("text"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit and of one type; NaN is NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return math.isnan(one) == math.isnan(other) and (math.isnan(one) or one.hex() == other.hex())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@given(JSON, st.booleans(), st.integers(0, 40), st.binary(max_size=2))
def test_the_fast_parser_takes_nothing_that_the_standard_one_refuses_or_reads_otherwise(
    document: Any, escaped: bool, place: int, damage: bytes
) -> None:
    content = json.dumps(document, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    for written in (content, content[:place] + damage + content[place:], content[:place] + content[place + 1 :]):
        try:
            found = from_json(written)
        except ValueError:
            continue  # it then goes to the standard one
        assert same(found, json.loads(written))


# ------------------------------------------------------------------------------------------------------ chunks, headers


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = settings_in(tmp_path_factory.mktemp("direct"))
    api = settings.api.model_copy(update={"threads": 1, "max_wait": 0.5})
    with closing(Service(settings.model_copy(update={"api": api}), source=TableSource())) as service:
        service.sync.run("materials")
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as client:
        yield client


@pytest.mark.parametrize(
    ("route", "body"),
    [("/embed", {"inputs": ["steel", "Öl"]}), ("/v1/embeddings", {"input": "steel"}), (SEARCH, {"query": "steel"})],
)
def test_a_body_may_come_in_pieces(client: httpx.Client, route: str, body: dict[str, Any]) -> None:
    whole = client.post(route, json=body)
    content = json.dumps(body).encode()
    pieces = (content[place : place + 1] for place in range(len(content)))
    in_pieces = client.post(route, content=pieces, headers={"Content-Type": "application/json"})
    assert (whole.status_code, in_pieces.status_code) == (200, 200)
    answers = [whole.json(), in_pieces.json()]
    if route == SEARCH:
        assert all(answer.pop("took_ms") for answer in answers)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "dimension", [8, pytest.param(9, marks=pytest.mark.slow), 64, pytest.param(384, marks=pytest.mark.slow)]
)
def test_base64_of_every_length(tmp_path_factory: pytest.TempPathFactory, dimension: int) -> None:
    """Rows of bytes that are a multiple of three, and those that need one or two signs of padding."""
    settings = settings_in(tmp_path_factory.mktemp("base64"))
    embedding = settings.embedding.model_copy(update={"model": f"hash:{dimension}"})
    with closing(Service(settings.model_copy(update={"embedding": embedding}), source=TableSource())) as service:
        with serving(service) as client:
            asked = {"input": ["steel", "oil", "pump"], "encoding_format": "base64"}
            data = client.post("/v1/embeddings", json=asked).json()["data"]
        rows = [np.frombuffer(base64.b64decode(item["embedding"], validate=True), "<f4") for item in data]
        np.testing.assert_array_equal(rows, service.parts.engine.embed(["steel", "oil", "pump"]))


def test_openapi_describes_the_direct_routes(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for route in ("/embed", "/v1/embeddings", "/v1/collections/{name}/search"):
        operation = document["paths"][route]["post"]
        assert operation["requestBody"]["required"]
        assert "$ref" in operation["requestBody"]["content"]["application/json"]["schema"]
        assert "schema" in operation["responses"]["200"]["content"]["application/json"]
    assert "application/octet-stream" in document["paths"]["/embed"]["post"]["responses"]["200"]["content"]
    (name,) = document["paths"]["/v1/collections/{name}/search"]["post"]["parameters"]
    assert (name["name"], name["in"], name["required"]) == ("name", "path", True)


# ------------------------------------------------------------------------------------------------- clients that leave


@contextmanager
def connected(client: httpx.Client) -> Iterator[socket.socket]:
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=20) as connection:
        yield connection


def request_bytes(text: str) -> bytes:
    content = json.dumps({"inputs": text}).encode()
    head = (
        "POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def left(client: httpx.Client) -> float:
    """How many requests to /embed were counted whose clients left."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "owl_sap_http_requests_total"
        and (sample.labels["route"], sample.labels["status"]) == ("/embed", "499")
    )


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


Held = tuple[threading.Event, list[str]]


@pytest.fixture
def held(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """An engine that waits for the event, and the texts that it has begun to compute."""
    go, seen = threading.Event(), list[str]()
    begin = service.parts.engine._runner.begin  # type: ignore[attr-defined]

    def slow(batch: TokenBatch, *more: Any) -> Any:
        seen.extend(map(" ".join, words_by_text(batch)))
        assert go.wait(20)
        return begin(batch, *more)

    monkeypatch.setattr(service.parts.engine._runner, "begin", slow)  # type: ignore[attr-defined]
    yield go, seen
    go.set()


@pytest.fixture
def threads_held(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Tokenising waits for the event, in the thread of the request; and the texts that it has begun with."""
    go, seen = threading.Event(), list[str]()
    tokenize = service.parts.engine._tokenize  # type: ignore[attr-defined]

    def slow(texts: Sequence[str], input_type: InputType) -> Any:
        seen.extend(texts)
        assert go.wait(20)
        return tokenize(texts, input_type)

    monkeypatch.setattr(service.parts.engine, "_tokenize", slow)
    yield go, seen
    go.set()


def test_work_that_nobody_waits_for_is_not_begun_with(client: httpx.Client, threads_held: Held) -> None:
    """Where it waits for a thread."""
    go, seen = threads_held
    before = left(client)
    with connected(client) as first:
        first.sendall(request_bytes("the first"))
        until(lambda: seen == ["the first"])
        with connected(client) as second:
            second.sendall(request_bytes("the second"))
            time.sleep(0.1)
        until(lambda: left(client) == before + 1)
        go.set()
        assert first.recv(20).startswith(b"HTTP/1.1 200 ")
    assert client.post("/embed", json={"inputs": "the third"}).status_code == 200
    assert seen == ["the first", "the third"]


@pytest.mark.proves(28)
def test_work_that_nobody_waits_for_is_not_begun(
    client: httpx.Client, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    go, seen = held
    before = left(client)
    with connected(client) as first:
        first.sendall(request_bytes("the first"))
        until(lambda: seen == ["the first"])
        with connected(client) as second:  # waits for the engine
            second.sendall(request_bytes("the second"))
            time.sleep(0.1)  # it may come before or after the server has begun to look whether it still waits
        until(lambda: left(client) == before + 1)
        go.set()
        assert first.recv(20).startswith(b"HTTP/1.1 200 ")
    assert client.post("/embed", json={"inputs": "the third"}).status_code == 200
    assert seen == ["the first", "the third"]
    assert caplog.messages == []


@pytest.mark.proves(28)
def test_what_is_queued_for_a_client_that_has_left_leaves_the_queue(service: Service) -> None:
    """It left while a thread tokenised its texts."""
    go, queued = threading.Event(), Future[Vectors]()

    def queue() -> Future[Vectors]:
        assert go.wait(20)
        return queued

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def leave() -> None:
        with closing(Executors(service)) as desk:
            with pytest.raises(errors.Refused, match="client closed"):
                await desk.embed(Request({"type": "http"}, gone), ["a"], queue)
            go.set()
            await anyio.to_thread.run_sync(lambda: until(queued.cancelled))

    anyio.run(leave)


@pytest.mark.proves(28)
def test_a_client_that_leaves_in_the_middle_costs_only_its_own_answer(
    client: httpx.Client, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    go, seen = held
    before = left(client)
    with connected(client) as connection:
        connection.sendall(request_bytes("nobody"))
        until(lambda: seen == ["nobody"])
    until(lambda: left(client) == before + 1)
    go.set()
    assert client.post("/embed", json={"inputs": "somebody"}).status_code == 200
    assert caplog.messages == []


def test_half_a_body(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    before = left(client)
    with connected(client) as connection:
        connection.sendall(request_bytes("steel")[:-3])
    until(lambda: left(client) == before + 1)
    assert caplog.messages == []


def test_two_requests_in_one_packet(client: httpx.Client, held: Held) -> None:
    """The second must not look like the first one's client leaving."""
    go, seen = held
    with connected(client) as connection:
        connection.sendall(request_bytes("one") + request_bytes("two"))
        until(lambda: seen == ["one"])
        time.sleep(0.1)
        go.set()
        answered = b""
        while answered.count(b"HTTP/1.1 200 ") < 2:
            got = connection.recv(1 << 16)
            assert got
            answered += got
    assert seen == ["one", "two"]


# ------------------------------------------------------------------------------------------------------------ overload


@pytest.mark.proves(27)
def test_who_would_wait_too_long_for_a_thread_is_told_at_once(client: httpx.Client, threads_held: Held) -> None:
    """The only thread is busy; a request waits for it. Once it has waited longer than is allowed, it is refused, and
    so is every other at once."""
    go, seen = threads_held
    with connected(client) as first, connected(client) as second:
        first.sendall(request_bytes("the first"))
        until(lambda: seen == ["the first"])
        second.sendall(request_bytes("the second"))
        answered = second.recv(1 << 16)  # it waited 120 s for a 503
        assert answered.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: " in answered.lower()
        answers: list[httpx.Response] = []

        def refused() -> bool:
            """While it is not, the request would wait, so it is given up soon."""
            try:
                answers.append(client.post("/embed", json={"inputs": "the third"}, timeout=0.2))
            except httpx.TimeoutException:
                return False
            return True

        until(refused)
        assert answers[0].status_code == 429
        assert int(answers[0].headers["retry-after"]) > 0
        assert "api.max_wait" in answers[0].json()["detail"]
        error = client.post("/v1/embeddings", json={"input": "a"})
        assert (error.status_code, error.json()["error"]["type"]) == (429, "rate_limit_error")
        assert client.post(SEARCH, json={"query": "a", "mode": "keyword"}).status_code == 429
        assert client.get("/health/live").status_code == 200
        assert client.get("/v1/jobs").status_code == 200
        go.set()
        assert first.recv(20).startswith(b"HTTP/1.1 200 ")
    assert client.post("/embed", json={"inputs": "the fourth"}).status_code == 200
    assert seen == ["the first", "the fourth"]


def test_nobody_waits_for_a_thread_to_be_told_that_the_engine_is_busy(
    client: httpx.Client, threads_held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals came as late as a thread got free (found by benchmarks/load.py)."""
    go, seen = threads_held
    with connected(client) as first:
        first.sendall(request_bytes("the first"))
        until(lambda: seen == ["the first"])
        monkeypatch.setattr(EmbeddingQueue, "expected_wait", lambda *_: 41.2)
        refused = client.post("/embed", json={"inputs": "steel"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "42")
        assert "embedding.max_wait" in refused.json()["detail"]
        assert client.post("/v1/embeddings", json={"input": "steel"}).status_code == 429
        assert seen == ["the first"]
        monkeypatch.setattr(EmbeddingQueue, "expected_wait", lambda *_: 0.0)
        go.set()
        assert first.recv(20).startswith(b"HTTP/1.1 200 ")


@pytest.mark.proves(27)
def test_who_would_wait_too_long_for_the_engine_is_told_at_once(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddingQueue, "expected_wait", lambda *_: 41.2)
    refused = client.post("/embed", json={"inputs": "steel"})
    assert (refused.status_code, refused.headers.get_list("retry-after")) == (429, ["42"]), "as measured"
    assert "embedding.max_wait" in refused.json()["detail"]
    error = client.post("/v1/embeddings", json={"input": "steel"})
    assert (error.status_code, error.json()["error"]["type"]) == (429, "rate_limit_error")
    assert error.headers["retry-after"] == "42"
    search = client.post(SEARCH, json={"query": "never asked before"})
    assert (search.status_code, search.headers["retry-after"]) == (429, "42")
    assert client.post(SEARCH, json={"query": "steel", "mode": "keyword"}).status_code == 200


def test_requests_that_wait_for_the_engine_take_no_threads(client: httpx.Client, held: Held) -> None:
    """There is one thread; several requests wait, and a search that needs no engine is answered."""
    go, seen = held
    texts = [f"text{number}" for number in range(5)]
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(client)) for _ in texts]
        for connection, text in zip(connections, texts, strict=True):
            connection.sendall(request_bytes(text))
        until(lambda: len(seen) > 0)
        assert client.post(SEARCH, json={"query": "steel", "mode": "keyword"}).status_code == 200
        go.set()
        for connection in connections:
            assert connection.recv(20).startswith(b"HTTP/1.1 200 ")
    assert sorted(seen) == texts
