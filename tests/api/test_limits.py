"""Limits at exactly the bound and one past it, every route with what it does not take, what a refusal looks like."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from httpx import Client, Response

from app.src.api.errors import Refused, retry_after
from app.src.core.backends import DeviceFailed, EngineClosed, NonFinite, OutOfMemory
from app.src.core.queue import EngineOverloaded, WorkerDied
from app.src.service.explaining import by_code
from app.src.service.service import Service
from connector import errors
from connector.stores.local.store import LocalView
from tests.api.conftest import TableSource, serving, settings_in

# route, what it allows, a body that it would take
ROUTES: list[tuple[str, str, Any]] = [
    ("/health/live", "GET", None),
    ("/health/ready", "GET", None),
    ("/metrics", "GET", None),
    ("/v1/info", "GET", None),
    ("/v1/gpu", "GET", None),
    ("/embed", "POST", {"inputs": "a"}),
    ("/v1/collections", "GET", None),
    ("/v1/collections/materials", "GET", None),
    ("/v1/collections/materials/search", "POST", {"query": "a"}),
    ("/v1/collections/materials/sync", "POST", {}),
    ("/v1/jobs", "GET", None),
    ("/v1/jobs/x", "GET", None),
]
WITH_BODY = [(route, body) for route, _, body in ROUTES if body is not None]
SEARCH = "/v1/collections/materials/search"
MEANING = ("vector", "hybrid")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests here, synced: none of them changes it."""
    service = Service(settings_in(tmp_path_factory.mktemp("limits")), source=TableSource())
    service.sync.run("materials")
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with serving(service) as client:
        yield client


def problem(response: Response, status: int) -> dict[str, Any]:
    """RFC 9457, with everything we promise of it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert {"type", "title", "status", "detail", "code", "instance", "request_id"} <= set(document)
    assert by_code(document["code"]).code == document["code"] != "OWL-9000" or status == 500
    assert (document["type"], document["status"]) == ("about:blank", status)
    assert document["instance"] == response.request.url.path
    assert document["request_id"] == response.headers["x-request-id"]
    assert document["detail"]
    assert ("retry-after" in response.headers) == (status in (429, 503))
    return document


def post(client: Client, route: str, text: str | bytes, kind: str = "application/json") -> Response:
    return client.post(route, content=text, headers={"Content-Type": kind})


# -------------------------------------------------------------------------------------------------- methods and bodies


def test_methods_that_a_route_does_not_have(client: Client) -> None:
    for route, allowed, _ in ROUTES:
        there = {"GET", "POST"} if route == "/v1/collections" else {allowed}
        for method in {"GET", "POST", "PUT", "DELETE", "PATCH"} - there:
            response = client.request(method, route)
            assert problem(response, 405)["title"] == "Method Not Allowed"
            assert set(response.headers["allow"].split(", ")) == there, (method, route)


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/", "/embed/x", "/v1/collections/a/b", "/v1/jobs/a/b", "/health"])
def test_paths_that_are_none(client: Client, path: str) -> None:
    problem(client.get(path), 404)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "[]", "[1]", '"text"', "3", "null", "true", "{'inputs': 'a'}", '{"inputs": "a"', "\ufeff", "{}}"],
)
def test_bodies_that_are_no_object(client: Client, text: str) -> None:
    for route, _ in WITH_BODY:
        if route.endswith("/sync") and text in ("", "null"):
            continue  # its body may be left out
        problem(post(client, route, text.encode()), 422)


@pytest.mark.parametrize("text", [b"\xff\xfe{\x00", b'{"inputs": "\xff"}', b"\x80", b"[" * 5000, b'{"a":' * 3000])
def test_bodies_that_are_no_text_or_too_deep(client: Client, text: bytes) -> None:
    for route, _ in WITH_BODY:
        response = post(client, route, text)
        assert response.status_code in (400, 422)
        problem(response, response.status_code)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_other_kinds_of_content_are_told_which_is_wanted(client: Client, kind: str) -> None:
    for route, body in WITH_BODY:
        response = post(client, route, json.dumps(body | {"k": 1}), kind)
        assert "application/json" in problem(response, 422)["detail"]


@pytest.mark.parametrize(
    ("route", "body", "where"),
    [
        ("/embed", {"inputs": None}, "body.inputs"),
        ("/embed", {"inputs": {}}, "body.inputs"),
        ("/embed", {"inputs": [["a"]]}, "body.inputs"),
        ("/embed", {"inputs": ["a", None]}, "body.inputs"),
        ("/embed", {"inputs": "a", "normalize": "true"}, "body.normalize"),
        ("/embed", {"inputs": "a", "truncate": None}, "body.truncate"),
        ("/embed", {"inputs": "a", "x": 1}, "body.x"),
        (SEARCH, {"query": "a", "k": "10"}, "body.k"),
        (SEARCH, {"query": "a", "k": 1.5}, "body.k"),
        (SEARCH, {"query": "a", "k": -1}, "body.k"),
        (SEARCH, {"query": "a", "k": None}, "body.k"),
        (SEARCH, {"query": ["a"]}, "body.query"),
        (SEARCH, {"query": "a", "filter": []}, "body.filter"),
        (SEARCH, {"query": "a", "filter": "MTART"}, "body.filter"),
        (SEARCH, {"query": "a", "mode": 1}, "body.mode"),
        (SEARCH, {"query": "a", "limit": 3}, "body.limit"),
        (SEARCH, {"vector": "abc"}, "body.vector"),
        (SEARCH, {"vector": [[0.1]]}, "body.vector"),
        (SEARCH, {"vector": [None]}, "body.vector"),
        ("/v1/collections/materials/sync", {"full": "yes"}, "body.full"),
        ("/v1/collections/materials/sync", {"full": 1}, "body.full"),
        ("/v1/collections/materials/sync", {"max_deletes": -0.1}, "body.max_deletes"),
        ("/v1/collections/materials/sync", {"max_deletes": "0.5"}, "body.max_deletes"),
        ("/v1/collections/materials/sync", {"owner": "me"}, "body.owner"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(client: Client, route: str, body: dict[str, Any], where: str) -> None:
    jobs = client.get("/v1/jobs").json()
    document = problem(client.post(route, json=body), 422)
    assert where in document["detail"]
    assert any(fault["where"].startswith(where) and fault["what"] for fault in document["errors"])
    assert client.get("/v1/jobs").json() == jobs, "a refused sync starts no job"


def test_a_refusal_does_not_repeat_what_was_sent(client: Client) -> None:
    for route, _ in WITH_BODY:
        assert "canary-8979" not in client.post(route, json={"canary": ["canary-8979"], "inputs": 1}).text


def test_many_faults_make_a_bounded_answer(client: Client) -> None:
    document = problem(client.post("/embed", json={"inputs": [1] * 1000} | {f"x{n}": 1 for n in range(100)}), 422)
    assert len(document["errors"]) == 50
    assert len(document["detail"]) < 1000


# --------------------------------------------------------------------------------------------------------------- bounds


def body_of(size: int) -> bytes:
    """A body for /embed of exactly so many bytes."""
    empty = b'{"inputs": "a", "truncate": true}'
    return empty[:-1] + b" " * (size - len(empty)) + b"}"


@pytest.mark.parametrize(("size", "status"), [(19_999, 200), (20_000, 200), (20_001, 413)])
@pytest.mark.proves(27)
def test_bytes_of_a_body(client: Client, size: int, status: int) -> None:
    body = body_of(size)
    assert len(body) == size
    response = post(client, "/embed", body)
    assert response.status_code == status
    if status == 413:
        assert "20000 bytes" in problem(response, 413)["detail"]
    chunked = client.post(
        "/embed", content=iter([body[:7000], body[7000:]]), headers={"Content-Type": "application/json"}
    )
    assert chunked.status_code == status


@pytest.mark.parametrize(
    ("length", "statuses"),
    [("20001", "413"), ("9" * 19, "413"), ("9" * 20, "400 413"), ("9" * 5000, "400 413"), ("1x", "400")],
    ids=lambda value: str(value)[:24],
)
@pytest.mark.proves(27)
def test_a_large_body_is_refused_before_it_is_sent(client: Client, length: str, statuses: str) -> None:
    """What is no number of 64 bits may be no HTTP either, and the server itself says so."""
    address = (client.base_url.host, client.base_url.port or 0)
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode())
        assert connection.recv(100).split()[1].decode() in statuses.split()


@pytest.mark.parametrize(
    ("inputs", "status", "words"),
    [
        (["a"] * 4, 200, ""),
        (["a"] * 5, 413, "5 texts; at most 4"),
        ("x" * 9_000, 200, ""),
        ("x" * 9_001, 413, "inputs has 9001 characters; at most 9000"),
        (["x" * 9_001], 413, "inputs[0] has 9001 characters; at most 9000"),
        (["a", "é" * 9_000], 200, ""),  # characters, not bytes
        ("🦉" * 4_000, 200, ""),
        ([""], 200, ""),
        ("", 200, ""),
        ([], 422, "inputs is empty"),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.proves(27)
def test_texts_of_one_call(client: Client, inputs: Any, status: int, words: str) -> None:
    content = json.dumps({"inputs": inputs, "truncate": True}, ensure_ascii=False).encode()
    response = post(client, "/embed", content)
    assert response.status_code == status, response.text
    assert not words or words in problem(response, status)["detail"]


@pytest.mark.parametrize(("k", "status", "hits"), [(1, 200, 1), (4, 200, 4), (5, 200, 4), (50, 200, 4), (51, 422, 0)])
def test_hits_of_one_search(client: Client, k: int, status: int, hits: int) -> None:
    response = client.post(SEARCH, json={"query": "steel", "k": k})
    assert response.status_code == status
    assert len(response.json().get("hits", [])) == hits


@pytest.mark.parametrize(("size", "status"), [(9_000, 200), (9_001, 413)])
def test_characters_of_a_query(client: Client, size: int, status: int) -> None:
    response = client.post(SEARCH, json={"query": "x" * size})
    assert response.status_code == status
    assert status == 200 or problem(response, 413)["detail"].startswith("query has 9001 characters")


@pytest.mark.parametrize(("size", "status"), [(63, 422), (64, 200), (65, 422), (0, 422), (1, 422)])
def test_numbers_of_a_vector(client: Client, size: int, status: int) -> None:
    response = client.post(SEARCH, json={"vector": [0.5] * size})
    assert response.status_code == status
    assert status == 200 or f"{size} numbers; this collection has 64" in problem(response, 422)["detail"]


@pytest.mark.parametrize(("tokens", "status"), [(253, 200), (254, 200), (255, 422)])
def test_tokens_of_a_text(client: Client, service: Service, tokens: int, status: int) -> None:
    assert service.parts.engine.max_tokens == 254
    text = "w " * tokens
    response = client.post("/embed", json={"inputs": ["a", text]})
    assert response.status_code == status
    if status == 422:
        assert "inputs[1] has 255 tokens; the limit is 254" in problem(response, 422)["detail"]
    assert client.post("/embed", json={"inputs": text, "truncate": True}).status_code == 200


@pytest.mark.parametrize(("share", "status"), [(0, 202), (1, 202), (0.0, 202), (1.0001, 422), (2, 422)])
def test_the_share_of_deletions(client: Client, service: Service, share: float, status: int) -> None:
    response = client.post("/v1/collections/materials/sync", json={"max_deletes": share})
    assert response.status_code == status
    while service.jobs.current("materials"):
        time.sleep(0.005)


# -------------------------------------------------------------------------------------------------- ids and statuses


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc", True),
        ("A-z_0.9", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("", False),
        ("a b", False),
        ("a/b", False),
        ('"', False),
        ("a\tb", False),
    ],
)
def test_request_ids(client: Client, given: str, kept: bool) -> None:
    for path, status in (("/health/live", 200), ("/nope", 404)):
        response = client.get(path, headers={"X-Request-Id": given})
        assert response.status_code == status
        assert (response.headers["x-request-id"] == given) is kept
        assert kept or len(response.headers["x-request-id"]) == 32


def test_an_answer_is_not_held_back(client: Client) -> None:
    """Nagle's algorithm and the peer's delayed acknowledgement together cost 40 ms a request, load or no load."""
    client.get("/health/live")
    quick, asked = 0, 0
    while quick < 10 and asked < 200:  # held back, one of them may be quick all the same
        start = time.perf_counter()
        client.get("/health/live")
        quick += time.perf_counter() - start < 0.03
        asked += 1
    assert quick == 10


def test_request_ids_differ(client: Client) -> None:
    assert len({client.get("/health/live").headers["x-request-id"] for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ConnectionLost("the session is gone"), 503),
        (errors.Overloaded("out of memory"), 503),
        (errors.LoginRefused("login refused"), 503),
        (errors.ModelMismatch("another model"), 409),
        (errors.BadFilter("no such operator"), 422),
        (errors.UnknownCollection("never synced"), 404),
        (errors.StoreCorrupt("not a database"), 500),
        (errors.TextsNotEmbeddable("no finite vector", indices=[0]), 422),
        (NonFinite([0]), 422),
        (OutOfMemory("memory does not hold this batch"), 503),
        (DeviceFailed("the GPU computes nothing more"), 503),
        (EngineClosed("the engine is closed"), 503),
        (EngineOverloaded("the embedding engine is busy"), 429),
        (WorkerDied("the thread that computes has ended"), 503),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_status_and_its_words(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def failing(*_args: Any, **_options: Any) -> Any:
        raise error

    monkeypatch.setattr(service.search, "run", failing)
    monkeypatch.setattr(service.parts.embedder, "embed_later", failing)
    for response in (client.post(SEARCH, json={"query": "a"}), client.post("/embed", json={"inputs": "a"})):
        assert problem(response, status)["detail"] == str(error)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (EngineOverloaded("busy", seconds=0.2), "1"),
        (EngineOverloaded("busy", seconds=17.0), "17"),
        (EngineOverloaded("busy"), None),
        (Refused("Crowded", "the next one has waited", seconds=12.3), "13"),
        (OutOfMemory("memory"), None),
    ],
)
def test_retry_after_is_what_was_measured(error: Exception, seconds: str | None) -> None:
    assert retry_after(error) == seconds


def test_who_would_wait_too_long_for_the_engine_hears_it_while_every_thread_is_taken(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, let_go = threading.Semaphore(0), threading.Event()
    real = LocalView.keyword

    def hanging(*given: Any, **more: Any) -> Any:
        taken.release()
        assert let_go.wait(30)
        return real(*given, **more)

    assert client.post(SEARCH, json={"query": "remembered"}).status_code == 200
    monkeypatch.setattr(LocalView, "keyword", hanging)
    threads = service.settings.api.threads
    with ThreadPoolExecutor(threads + 1) as others:
        try:
            words = {"query": "steel", "mode": "keyword"}
            waiting = [others.submit(client.post, SEARCH, json=words) for _ in range(threads)]
            assert all(taken.acquire(timeout=30) for _ in range(threads))
            monkeypatch.setattr(service.parts.embedder.engine._queue, "expected_wait", lambda _: 17.0)  # type: ignore[attr-defined]
            refusals = [client.post(SEARCH, json={"query": f"unheard of {mode}", "mode": mode}) for mode in MEANING]
            refusals.append(client.post("/embed", json={"inputs": "unheard of"}))
            for refused in refusals:
                assert "embedding.max_wait" in problem(refused, 429)["detail"]
                assert refused.headers["retry-after"] == "17"
            waiting.append(others.submit(client.post, SEARCH, json={"query": "remembered"}))
        finally:
            let_go.set()
        assert {each.result().status_code for each in waiting} == {200}, "words and known texts need no engine"
