"""Without a service: what is sent, what is tried again and for how long, what becomes of odd answers."""

from __future__ import annotations

import asyncio
import gzip
import pickle
import ssl
import subprocess
import sys
import time
import tomllib
from array import array
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import owl_sap_client
from owl_sap_client import AsyncClient, Client, Retries
from owl_sap_client.errors import KINDS
from owl_sap_client.results import Job, decode

ROOT = Path(__file__).parents[1]
URL = "http://service.test"
SECRET = "owl_sk_canary-77"
PROBLEM = {"title": "x", "status": 503, "detail": "HANA is away", "code": "OWL-3001", "request_id": "r1"}
INFO_OF_JOB: dict[str, Any] = {
    "id": "j1", "collection": "c", "kind": "sync", "state": "succeeded", "progress": {}, "result": {}, "error": None,
    "created": 1.0, "started": 1.0, "finished": 2.0, "attempts": 1, "a member of tomorrow": True,
}  # fmt: skip
Answer = httpx.Response | Exception


class Script:
    """A transport that gives these answers in turn, and keeps the requests."""

    def __init__(self, *answers: Answer | Callable[[httpx.Request], Answer]) -> None:
        self._answers: Iterator[Any] = iter(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = next(self._answers)
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, httpx.Response)
        return answer

    def client(self, **options: Any) -> Client:
        return Client(URL, transport=httpx.MockTransport(self), **options)


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits here; how long they would."""
    seconds: list[float] = []

    async def later(wait: float) -> None:
        seconds.append(wait)

    monkeypatch.setattr("owl_sap_client.client.time.sleep", seconds.append)
    monkeypatch.setattr("owl_sap_client.client.asyncio.sleep", later)
    return seconds


def busy(status: int = 503, **headers: str) -> httpx.Response:
    return httpx.Response(status, json=PROBLEM, headers=headers)


def jobs() -> httpx.Response:
    return httpx.Response(200, json=[INFO_OF_JOB])


# ------------------------------------------------------------------------------------------------------- tries


def test_tries_again_when_the_service_says_when(slept: list[float]) -> None:
    script = Script(busy(429, **{"Retry-After": "7"}), busy(503, **{"Retry-After": "3"}), jobs())
    with script.client() as client:
        assert client.jobs()[0].id == "j1"
    assert len(script.requests) == 3
    assert 7 <= slept[0] <= 7.7
    assert 3 <= slept[1] <= 3.3


def test_a_date_says_when_too(slept: list[float]) -> None:
    with Script(busy(503, **{"Retry-After": formatdate(time.time() + 10)}), jobs()).client() as client:
        client.jobs()
    assert 8 <= slept[0] <= 11


def test_the_tries_end_and_the_error_says_it_all(slept: list[float]) -> None:
    script = Script(*(busy(503, **{"Retry-After": "1"}) for _ in range(3)))
    with script.client() as client, pytest.raises(owl_sap_client.Unavailable) as away:
        client.jobs()
    assert len(script.requests) == 3
    error = away.value
    assert (error.status, error.code, error.detail, error.request_id) == (503, "OWL-3001", "HANA is away", "r1")
    assert (error.retry_after, error.errors) == (1.0, [])
    assert isinstance(error, owl_sap_client.ServerError)
    assert str(error) == "503 OWL-3001: HANA is away (request r1)"


def test_longer_than_one_would_wait_is_told_at_once(slept: list[float]) -> None:
    script = Script(busy(429, **{"Retry-After": "31"}))
    with script.client() as client, pytest.raises(owl_sap_client.TooMany) as refused:
        client.search("c", "q")
    assert (refused.value.retry_after, slept) == (31.0, [])


def test_without_retry_after_the_waits_grow(slept: list[float]) -> None:
    script = Script(*(busy() for _ in range(4)))
    with script.client(retries=Retries(most=3)) as client, pytest.raises(owl_sap_client.Unavailable):
        client.search("c", "q")
    assert [least <= wait <= least * 1.1 for wait, least in zip(slept, (0.25, 0.5, 1.0), strict=True)] == [True] * 3


LOST = [httpx.ReadError("reset"), httpx.RemoteProtocolError("closed"), httpx.WriteError("reset")]


@pytest.mark.parametrize("lost", LOST, ids=repr)
def test_a_lost_connection_is_tried_again_where_twice_is_as_once(lost: Exception) -> None:
    with Script(lost, jobs()).client() as client:
        assert len(client.jobs()) == 1
    script = Script(lost)
    with script.client() as client, pytest.raises(owl_sap_client.NotReached) as error:
        client.sync("c")
    assert len(script.requests) == 1
    assert error.value.__cause__ is lost


def test_what_was_never_sent_is_tried_again_whatever_it_is() -> None:
    with Script(httpx.ConnectError("refused"), httpx.Response(202, json={"job": "j1"})).client() as client:
        assert client.sync("c") == "j1"


def test_a_service_that_is_slow_is_not_asked_twice() -> None:
    script = Script(httpx.ReadTimeout("30 s"))
    with script.client() as client, pytest.raises(owl_sap_client.NotReached, match=r"service\.test did not answer"):
        client.search("c", "q")
    assert len(script.requests) == 1


def test_a_gateways_503_does_not_start_a_second_job() -> None:
    script = Script(httpx.Response(503, text="<html>"), busy(503, **{"Retry-After": "1"}))
    with script.client() as client, pytest.raises(owl_sap_client.Unavailable):
        client.rollback_generation("c")
    assert len(script.requests) == 1


def test_documents_get_their_ids_here_so_that_twice_is_once() -> None:
    script = Script(httpx.ReadError("reset"), httpx.Response(200, json={"ids": ["1", "2"]}))
    with script.client() as client:
        assert client.add_documents("c", [{"text": "a"}, {"id": "2", "text": "b", "metadata": {"n": 1}}]) == ["1", "2"]
    first, second = (request.content for request in script.requests)
    assert first == second
    assert b'"id":null' not in first


def test_other_refusals_are_not_tried_again(slept: list[float]) -> None:
    for status, kind in {**KINDS, 418: owl_sap_client.ProblemError, 500: owl_sap_client.ServerError}.items():
        if status in (429, 503):
            continue
        script = Script(httpx.Response(status, json=PROBLEM))
        with script.client() as client, pytest.raises(kind) as refused:
            client.search("c", "q")
        assert type(refused.value) is kind
        assert len(script.requests) == 1
    assert slept == []


def test_the_asynchronous_client_tries_as_often(slept: list[float]) -> None:
    script = Script(busy(429, **{"Retry-After": "7"}), httpx.ReadError("reset"), jobs())

    async def ask() -> int:
        async with AsyncClient(URL, transport=httpx.MockTransport(script)) as client:
            return len(await client.jobs())

    assert asyncio.run(ask()) == 1
    assert 7 <= slept[0] <= 7.7
    assert 0.5 <= slept[1] <= 0.55


# ------------------------------------------------------------------------------------------------------- what is sent


def test_headers_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWL_SAP_API_KEY", SECRET)
    script = Script(jobs(), jobs(), httpx.Response(200, json=[]))
    with Client(f"{URL}/owl/", user_agent="shop/2", transport=httpx.MockTransport(script)) as client:
        client.jobs("a/b", limit=3)
        (_, first) = client.jobs(), script.requests[0]
        assert SECRET not in repr(client)
        assert SECRET not in repr(vars(client))
    assert first.headers["authorization"] == f"Bearer {SECRET}"
    assert str(first.url) == f"{URL}/owl/v1/jobs?collection=a%2Fb&limit=3"
    assert first.headers["user-agent"].startswith("shop/2 owl-sap-client/")
    with Client(URL, "", transport=httpx.MockTransport(script)) as client:
        client.collections()
    assert "authorization" not in script.requests[-1].headers


def test_no_name_leaves_its_place() -> None:
    script = Script(*(httpx.Response(404, json=PROBLEM) for _ in range(4)))
    with script.client() as client:
        for name in ("..", "a/../b", "a?b#c", "ü %2F"):
            with pytest.raises(owl_sap_client.NotFound):
                client.collection(name)
        with pytest.raises(ValueError, match="empty"):
            client.collection("")
    assert [request.url.raw_path for request in script.requests] == [
        b"/v1/collections/%2E%2E",
        b"/v1/collections/a%2F%2E%2E%2Fb",
        b"/v1/collections/a%3Fb%23c",
        b"/v1/collections/%C3%BC%20%252F",
    ]


@pytest.mark.parametrize("url", ["service.test", "ftp://service.test", "http://", f"http://me:{SECRET}@service.test"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="address") as refused:
        Client(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("key", [f"{SECRET}\n", f"{SECRET}\r\nX: y", f"{SECRET} ", f"{SECRET}ü"])
def test_what_is_no_key_is_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="key") as refused:
        Client(URL, key)
    assert "canary" not in str(refused.value)


def test_a_redirect_is_not_followed_with_the_key() -> None:
    script = Script(httpx.Response(307, headers={"Location": "http://elsewhere.test/"}))
    with (
        Client(URL, SECRET, transport=httpx.MockTransport(script)) as client,
        pytest.raises(owl_sap_client.UnexpectedAnswer, match="307"),
    ):
        client.jobs()
    assert len(script.requests) == 1


def test_certificates_are_checked_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    for tls, mode in ((True, ssl.CERT_REQUIRED), (False, ssl.CERT_NONE)):
        with Client("https://service.test", tls=tls) as client:
            context = client._http._transport._pool._ssl_context  # type: ignore[attr-defined]
            assert context.verify_mode is mode
    with pytest.raises(FileNotFoundError):
        Client("https://service.test", tls=str(tmp_path / "nothing.pem"))


def test_one_string_is_not_a_list_of_letters() -> None:
    with Script().client() as client:
        for ask in (client.embed, partial(client.rows, "c"), partial(client.delete_documents, "c")):
            with pytest.raises(ValueError, match="one string"):
                ask("n1")


def test_a_setting_that_there_is_not_is_not_passed_over() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match=r"^unknown option api_key, verify; ") as refused:
            kind(URL, api_key=SECRET, verify=False)  # type: ignore[call-arg]
        assert SECRET not in str(refused.value)


def test_calls_of_the_asynchronous_client_are_tasks() -> None:
    """To the type checker too."""

    async def ask() -> int:
        async with AsyncClient(URL, transport=httpx.MockTransport(Script(jobs()))) as client:
            task: asyncio.Task[list[Job]] = asyncio.create_task(client.jobs())
            return len(await task)

    assert asyncio.run(ask()) == 1


# --------------------------------------------------------------------------------------------------- odd answers


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>a proxy's page</html>"),
        httpx.Response(200, json={"other": 1}),
        httpx.Response(200, json=[{"id": "j1"}]),
        httpx.Response(200, json=[3]),
        httpx.Response(204),
    ],
    ids=lambda answer: answer.text[:20],
)
def test_an_answer_of_something_else(answer: httpx.Response) -> None:
    with Script(answer).client() as client, pytest.raises(owl_sap_client.UnexpectedAnswer):
        client.jobs()


@pytest.mark.parametrize(
    ("content", "headers"),
    [(b"\0" * 7, {}), (b"\0" * 8, {}), (b"\0" * 8, {"X-Embedding-Dimension": "3", "X-Embedding-Count": "1"})],
)
def test_what_is_no_vectors(content: bytes, headers: dict[str, str]) -> None:
    answer = httpx.Response(200, content=content, headers=headers)
    with Script(answer).client() as client, pytest.raises(owl_sap_client.UnexpectedAnswer):
        client.embed(["a"])


def test_vectors_are_little_endian(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"X-Embedding-Dimension": "2", "X-Embedding-Count": "2"}
    answer = httpx.Response(200, content=bytes.fromhex("0000803f000000400000404000008040"), headers=headers)
    with Script(answer, answer).client() as client:
        assert client.embed(["a", "b"]) == [array("f", [1, 2]), array("f", [3, 4])]
        monkeypatch.setattr("owl_sap_client.operations.sys.byteorder", "big")
        swapped = array("f", [1.0, 2.0])
        swapped.byteswap()
        assert client.embed(["a", "b"])[0].tobytes() == swapped.tobytes()


def test_errors_without_a_document() -> None:
    for answer in (httpx.Response(502, text="<html>"), httpx.Response(502, json=["x"]), httpx.Response(502)):
        with Script(answer).client() as client, pytest.raises(owl_sap_client.ServerError, match="Bad Gateway"):
            client.search("c", "q")


def test_odd_members_of_a_refusal_do_not_hide_it() -> None:
    headers = {"Retry-After": f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT"}
    script = Script(httpx.Response(418, json={"detail": "x", "errors": 5}, headers=headers))
    with script.client() as client, pytest.raises(owl_sap_client.ProblemError, match="418: x") as refused:
        client.jobs()
    assert (refused.value.errors, refused.value.retry_after) == ([], None)


def test_errors_come_through_a_pool_of_processes() -> None:
    with Script(busy(404)).client() as client, pytest.raises(owl_sap_client.NotFound) as refused:
        client.jobs()
    failed = owl_sap_client.JobFailed(decode(Job, INFO_OF_JOB))
    for error in (refused.value, failed, owl_sap_client.WaitTimeout("late"), owl_sap_client.NotReached("away")):
        same = pickle.loads(pickle.dumps(error))
        assert (type(same), str(same), vars(same)) == (type(error), str(error), vars(error))


def test_openais_shape_is_understood() -> None:
    error = {"error": {"message": "not served here", "code": "model_not_found", "param": "model", "type": "x"}}
    answer = httpx.Response(404, json=error, headers={"X-Request-Id": "r2"})
    with Script(answer).client() as client, pytest.raises(owl_sap_client.NotFound, match="not served") as refused:
        client.model("gpt-5")
    assert (refused.value.code, refused.value.request_id) == ("model_not_found", "r2")


# ------------------------------------------------------------------------------------------------------- events


def stream(*parts: bytes, error: Exception | None = None) -> Callable[[httpx.Request], httpx.Response]:
    class Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from parts
            if error is not None:
                raise error

        async def __aiter__(self) -> Any:
            for part in self:
                yield part

    return lambda _: httpx.Response(200, stream=Stream(), headers={"Content-Type": "text/event-stream"})


def event(number: int, name: str, data: str) -> bytes:
    return f"id: {number}\nevent: {name}\ndata: {data}\n\n".encode()


FIRST = event(1, "state", '{"state":"running"}')
SECOND = event(2, "progress", '{"note":"a\u2028b\x85c"}')
LAST = event(3, "result", '{"state":"succeeded"}')
ASKED = "last-event-id"


def test_a_stream_that_breaks_off_is_taken_up_again(slept: list[float]) -> None:
    script = Script(
        stream(FIRST[:9], FIRST[9:] + b": ping\n\n" + SECOND[:20], error=httpx.ReadError("reset")),
        httpx.ConnectError("refused"),
        busy(503, **{"Retry-After": "2"}),
        stream(FIRST, SECOND.replace(b"\n", b"\r\n")),
        stream(LAST, b"never read"),
    )
    with script.client() as client:
        seen = list(client.events("j1"))
    assert [each.id for each in seen] == [1, 2, 3]
    assert seen[1].data == {"note": "a\u2028b\x85c"}
    assert [request.headers[ASKED] for request in script.requests] == ["0", "1", "1", "1", "2"]
    assert len(slept) >= 4


def test_a_stream_that_brings_nothing_is_given_up() -> None:
    for error, words in ((None, "ended before the job"), (httpx.ReadTimeout("quiet"), "quiet")):
        script = Script(*(stream(error=error) for _ in range(11)))
        with script.client() as client, pytest.raises(owl_sap_client.NotReached, match=words):
            list(client.events("j1"))
        assert len(script.requests) == 11


@pytest.mark.parametrize(
    "bad", [b"data: {\n\n", b"data: \xff\n\n", b"id: x\nevent: state\ndata: {}\n\n", b"id: 1\ndata: {}\n\n"]
)
def test_what_is_no_event(bad: bytes) -> None:
    with Script(stream(bad)).client() as client, pytest.raises(owl_sap_client.UnexpectedAnswer):
        list(client.events("j1"))


def test_the_asynchronous_client_takes_a_stream_up_too() -> None:
    script = Script(stream(FIRST, error=httpx.ReadError("reset")), stream(SECOND, LAST))

    async def follow() -> list[int]:
        async with AsyncClient(URL, transport=httpx.MockTransport(script)) as client:
            return [each.id async for each in client.events("j1")]

    assert asyncio.run(follow()) == [1, 2, 3]
    assert script.requests[1].headers[ASKED] == "1"


# ------------------------------------------------------------------------------------------------------- passages


def test_passages_and_explain_as_they_were_asked_for() -> None:
    hit = {"id": "1", "key": {"A": "1"}, "score": 0.5, "text": "t", "metadata": {}}
    passages = [{"text": "t", "score": 0.5, "chunk": 2, "of tomorrow": 1}]
    told = {
        "hits": [hit | {"passages": passages}, hit | {"passages": None}, hit],
        "took_ms": {},
        "explain": {"mode": "x"},
    }
    script = Script(httpx.Response(200, json=told))
    with script.client() as client:
        found = client.search("c", "q", passages=3, explain=True, filter={"A": {"$ne": None}})
    assert script.requests[0].content == (b'{"query":"q","passages":3,"explain":true,"filter":{"A":{"$ne":null}}}')
    assert [[(each.text, each.chunk) for each in one.passages] for one in found.hits] == [[("t", 2)], [], []]
    assert (found.explain, found.notes, found.stale_since) == ({"mode": "x"}, [], None)


def test_waiting_for_a_job_outlives_a_restart(slept: list[float]) -> None:
    """Longer than one request would be tried: there is a model to load."""
    away = httpx.ConnectError("refused")

    def over(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=INFO_OF_JOB)

    assert Script(*[away] * 8, over).client().wait("j1").over
    assert sum(slept) > 5

    async def wait() -> Job:
        async with AsyncClient(URL, transport=httpx.MockTransport(Script(*[away] * 8, over))) as client:
            return await client.wait("j1")

    assert asyncio.run(wait()).over
    with pytest.raises(owl_sap_client.NotReached):
        Script(*[away] * 11).client().wait("j1")


def test_without_httpx_the_import_says_what_to_install() -> None:
    """In a process of its own, where httpx cannot be imported."""
    blocked = "import sys; sys.modules['httpx'] = None; import owl_sap_client"
    ended = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True, check=False)
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    last = ended.stderr.splitlines()[-1]
    assert "owl_sap_client needs httpx" in last
    assert f'{sys.executable} -m pip install "{wanted}"' in last


# --- the events of a job behind gateways


def test_a_gateway_before_a_service_that_restarts() -> None:
    script = Script(stream(FIRST), httpx.Response(502, text="<html>"), httpx.Response(504), stream(SECOND, LAST))
    with script.client() as client:
        assert [each.id for each in client.events("j1")] == [1, 2, 3]
    script = Script(*(httpx.Response(502) for _ in range(11)))
    with script.client() as client, pytest.raises(owl_sap_client.NotReached, match="502 Bad Gateway"):
        list(client.events("j1"))


def test_a_stream_in_which_nothing_happens_is_not_given_up() -> None:
    script = Script(*(stream(b": ping\n\n") for _ in range(30)), stream(FIRST, LAST))
    with script.client() as client:
        assert [each.id for each in client.events("j1")] == [1, 3]


def test_a_packed_stream_and_a_page_in_its_place() -> None:
    packed = httpx.Response(
        200,
        content=gzip.compress(FIRST + LAST),
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Content-Encoding": "gzip"},
    )
    script = Script(packed)
    with script.client() as client:
        assert [each.id for each in client.events("j1")] == [1, 3]
    assert script.requests[0].headers["accept-encoding"] == "identity"
    script = Script(httpx.Response(200, html="<p>Who are you?</p>"))
    with script.client() as client, pytest.raises(owl_sap_client.UnexpectedAnswer, match="no events"):
        list(client.events("j1"))
