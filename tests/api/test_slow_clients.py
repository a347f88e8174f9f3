"""Clients that send slowly, never, too much or nonsense, and clients that do not read: each is let go in time."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from httpx import Client, TransportError

from app.src.api import jobs, server
from app.src.api.server import MOST_HEAD_BYTES
from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import TableSource, serving, settings_in

SHORT = 0.3
"""Seconds, in place of 30."""
PATIENCE = 60.0
"""Seconds until something hangs; a machine that does other things may need some of them."""


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINGER_SECONDS", SHORT)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One for most tests here: none of them changes it."""
    with closing(Service(settings_in(tmp_path_factory.mktemp("slow")))) as service:
        yield from bounded(service)


def bounded(service: Service, **api: Any) -> Iterator[Client]:
    document = service.settings.model_dump(by_alias=True)
    wanted = document["api"] | {"read_timeout": SHORT} | api
    service.settings = Settings.model_validate(document | {"api": wanted})
    with serving(service) as client:
        yield client


@contextmanager
def connected(client: Client) -> Iterator[socket.socket]:
    address = (client.base_url.host, client.base_url.port or 0)
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """What still comes until the other side closes."""
    found = b""
    while part := _received(connection):
        found += part
    return found


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except ConnectionResetError:
        return b""


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def told(answer: bytes) -> dict[str, Any]:
    """The problem document of a whole answer after which the connection was closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head.lower()
    document: dict[str, Any] = json.loads(body)
    assert document["status"] == status(answer)
    return document


HEAD = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.proves(27)
def test_a_head_that_does_not_come(client: Client) -> None:
    with connected(client) as connection:
        connection.sendall(HEAD)
        assert "api.read_timeout" in told(rest(connection))["detail"]
    with connected(client) as connection:
        assert rest(connection) == b"", "who says nothing is told nothing"


def test_a_head_that_comes_byte_by_byte(client: Client) -> None:
    """The clock runs for the whole head, however often something comes."""
    deadline = time.monotonic() + PATIENCE
    with connected(client) as connection:
        answer = b""
        connection.settimeout(0.02)
        for byte in itertools.chain(HEAD, itertools.cycle(b"x")):  # the name of a header that has no end
            assert time.monotonic() < deadline, "it would wait for ever"
            try:
                connection.sendall(bytes((byte,)))
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
    assert status(answer) == 408


@pytest.mark.parametrize("path", ["/embed", "/v1/collections/materials/sync"])
@pytest.mark.proves(27)
def test_a_body_that_does_not_come(client: Client, path: str) -> None:
    with connected(client) as connection:
        connection.sendall(HEAD.replace(b"/embed", path.encode()) + b'Content-Length: 100\r\n\r\n{"in')
        answer = rest(connection)
    assert status(answer) == 408
    assert "api.read_timeout" in told(answer)["detail"]
    until_served(client)


def test_a_body_that_drips_on_after_its_answer(client: Client) -> None:
    """An answer that needs no body is given at once; the rest is not waited for."""
    with connected(client) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n")
        assert status(connection.recv(65_536)) == 200
        start = time.monotonic()
        connection.settimeout(0.05)
        closed = False
        while not closed and time.monotonic() - start < PATIENCE:
            try:
                connection.sendall(b"x")
                closed = connection.recv(10) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
        assert closed


def test_blank_lines_keep_no_connection(client: Client) -> None:
    with connected(client) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(whole_answer(connection)) == 200
        connection.settimeout(0.1)
        start, answer = time.monotonic(), b"-"
        while answer == b"-" and time.monotonic() - start < PATIENCE:
            try:
                connection.sendall(b"\r\n")
                answer = connection.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                answer = b""
        assert answer == b"" or status(answer) == 408


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "endless"])
@pytest.mark.proves(27)
def test_heads_that_are_too_large(client: Client, whole: bool) -> None:
    with connected(client) as connection:
        head = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"x" * (MOST_HEAD_BYTES + 1)
        connection.sendall(head + (b"\r\n\r\n" if whole else b""))
        assert status(rest(connection)) == 431
    assert client.get("/health/live", headers={"X-Large": "x" * (MOST_HEAD_BYTES // 2)}).status_code == 200


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"HELLO there\r\n\r\n", b"\x00" * 100]
)
def test_what_is_no_http(client: Client, nonsense: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with connected(client) as connection:
        connection.sendall(nonsense)
        answer = rest(connection)
    assert told(answer)["status"] == 400
    assert capfd.readouterr().err == "", "nobody fills our log from outside"


@pytest.mark.proves(27)
def test_connections_are_counted(synced: Service) -> None:
    for client in bounded(synced, max_connections=2, read_timeout=20.0):
        with connected(client) as first, connected(client):
            first.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status(first.recv(65_536)) == 200
            with connected(client) as third:
                answer = rest(third)
            assert "api.max_connections" in told(answer)["detail"]
            assert status(answer) == 503
            assert b"retry-after" in answer
        until_served(client)


def until_served(client: Client) -> None:
    deadline = time.monotonic() + PATIENCE
    while not served(client):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def served(client: Client) -> bool:
    try:
        return client.get("/health/live").status_code == 200
    except TransportError:  # one connection too many may be ended before it has said what it wants
        return False


@pytest.mark.proves(27)
def test_who_does_not_read_is_let_go(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that nobody fetches fill the buffers, and are given up."""
    monkeypatch.setattr(synced.status, "collections", lambda *_: [{"x": "y" * 60_000_000}])
    for client in bounded(synced):
        with connected(client) as connection:
            connection.sendall(b"GET /v1/collections HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert hung_up(connection), "it waits for ever"
            assert len(rest(connection)) < 60_000_000, "the other side has hung up in the middle"


def hung_up(connection: socket.socket) -> bool:
    """Waits for it, without reading anything."""
    waiting = select.poll()
    waiting.register(connection, select.POLLRDHUP)
    return bool(waiting.poll(1000 * PATIENCE))


def test_who_never_reads_is_told_that_it_is_over(
    synced: Service,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An end behind what it does not fetch would never reach it, and the system would keep that for minutes. What it
    asked for further is not answered, and fills no log."""
    monkeypatch.setattr(synced.status, "collections", lambda *_: [{"x": "y" * 20_000_000}])
    for client in bounded(synced):
        with connected(client) as connection:
            connection.sendall(b"GET /v1/collections HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
            deadline = time.monotonic() + PATIENCE
            while connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != errno.ECONNRESET:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    assert (capfd.readouterr().err, caplog.text) == ("", "")


@pytest.mark.parametrize(
    "closing",
    [pytest.param(b"", id="kept"), pytest.param(b"Connection: close\r\n", id="closed", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("size", "pace"), [(30_000_000, 15_000_000), pytest.param(8_000_000, 400_000, marks=pytest.mark.slow)]
)
def test_who_reads_slowly_but_steadily_gets_all(
    synced: Service, monkeypatch: pytest.MonkeyPatch, closing: bytes, size: int, pace: int
) -> None:
    """As over a slow line: longer than any of the clocks."""
    monkeypatch.setattr(synced.status, "collections", lambda *_: [{"x": "y" * size}])
    for client in bounded(synced, read_timeout=1.0):
        with connected(client) as connection:
            connection.sendall(b"GET /v1/collections HTTP/1.1\r\nHost: localhost\r\n" + closing + b"\r\n")
            got, start = 0, time.monotonic()
            while got < size and (part := _received(connection)):
                got += len(part)
                time.sleep(max(0.0, start + got / pace - time.monotonic()))
            assert got >= size


def test_the_body_of_a_second_request_is_waited_for(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began to come before the first had its answer, so nobody may take it for the rest of the first one's body."""
    begun, go = threading.Event(), threading.Event()

    def slow(*_: Any) -> list[Any]:
        begun.set()
        assert go.wait(PATIENCE)
        return []

    monkeypatch.setattr(synced.status, "collections", slow)
    body = b'{"inputs": "a"}'
    for client in bounded(synced, read_timeout=20.0):
        with connected(client) as connection:
            second = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
            connection.sendall(b"GET /v1/collections HTTP/1.1\r\nHost: localhost\r\n\r\n" + second[:-5])
            assert begun.wait(PATIENCE)
            go.set()
            assert status(whole_answer(connection)) == 200
            time.sleep(2 * SHORT)  # longer than server.LINGER_SECONDS here
            connection.sendall(second[-5:])
            assert status(whole_answer(connection)) == 200


def whole_answer(connection: socket.socket) -> bytes:
    """One, with its body: they may come in several pieces."""
    come = b""
    while b"\r\n\r\n" not in come:
        come += some(connection)
    head, _, body = come.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split()[0])
    while len(body) < length:
        body += some(connection)
    assert len(body) == length
    return head


def some(connection: socket.socket) -> bytes:
    part = connection.recv(65_536)
    assert part, "it was closed in the middle of an answer"
    return part


def test_an_answer_that_does_not_begin(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def slow(*_: Any) -> list[Any]:
        assert go.wait(60)
        return []

    monkeypatch.setattr(synced.status, "collections", slow)
    try:
        for client in bounded(synced, timeout=0.5, read_timeout=30.0):
            answer = client.get("/v1/collections")
            assert not go.is_set()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert "api.timeout" in answer.json()["detail"]
            go.set()
            deadline = time.monotonic() + PATIENCE
            while client.get("/v1/models").status_code != 200:  # a busy machine may need longer for it, too
                assert time.monotonic() < deadline
    finally:
        go.set()


def test_an_answer_that_has_begun_may_last(
    synced: Service, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of a job, beyond the time that an answer may take to begin."""
    monkeypatch.setattr(jobs, "PING_SECONDS", 0.1)
    source.gate.clear()
    job = synced.jobs.start("never")
    for client in bounded(synced, timeout=1.0, read_timeout=1.0):
        followed, deadline = 0.0, time.monotonic() + PATIENCE
        while followed == 0:  # a busy machine may take longer than a second to begin, and that is refused
            assert time.monotonic() < deadline
            followed = follow(client, job.id, 1.2)
        assert followed > 1.2, "it was ended"
        source.gate.set()


def follow(client: Client, job: str, most: float) -> float:
    """For so many seconds; how long it was."""
    with client.stream("GET", f"/v1/jobs/{job}/events") as stream:
        if stream.status_code != 200:
            return 0
        began = time.monotonic()
        for _ in stream.iter_lines():
            if time.monotonic() - began > most:
                break
        return time.monotonic() - began


def test_half_a_head_behind_a_request_spoils_no_answer(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock runs from when nothing else is worked on."""
    go, begun = threading.Event(), threading.Event()

    def slow(*_: Any) -> list[Any]:
        begun.set()
        assert go.wait(60)
        return []

    monkeypatch.setattr(synced.status, "collections", slow)
    for client in bounded(synced, read_timeout=SHORT):
        with connected(client) as connection:
            connection.sendall(b"GET /v1/collections HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v1/mod")
            assert begun.wait(PATIENCE)
            time.sleep(2 * SHORT)
            go.set()
            answers = rest(connection)  # whoever is slow to read finds both
            assert status(answers) == 200
            assert [status(b"HTTP/1.1 " + each) for each in answers.split(b"HTTP/1.1 ")[1:]] == [200, 408]


def test_the_end_of_a_refused_body_is_no_head(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in one piece, larger than a head may be, when its answer has been given: the connection goes on."""
    body, held = b"x" * (MOST_HEAD_BYTES + 1), bytearray()
    receive = server.BoundedHttp.data_received

    def in_one_piece(self: server.BoundedHttp, data: bytes) -> None:
        if data.startswith((b"POST", b"GET")):
            receive(self, data)
            return
        held.extend(data)
        if len(held) == len(body):
            receive(self, bytes(held))

    monkeypatch.setattr(server.BoundedHttp, "data_received", in_one_piece)
    monkeypatch.setattr(server, "LINGER_SECONDS", 30)
    for client in bounded(synced, read_timeout=30, max_body_bytes=1024):
        with connected(client) as connection:
            connection.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
            assert status(connection.recv(65_536)) == 413
            connection.sendall(body)
            until = time.monotonic() + 30
            while len(held) < len(body) and time.monotonic() < until:
                time.sleep(0.01)
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answers = rest(connection)
            assert b"HTTP/1.1 200" in answers
            assert b"HTTP/1.1 431" not in answers


def test_a_timer_behind_a_reset_connection_does_nothing() -> None:
    """uvicorn's own timer outlives a connection that the other side reset; under uvloop its socket is gone by then."""

    class Gone(asyncio.Transport):
        def is_closing(self) -> bool:
            return True

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            raise ValueError("negative file descriptor")

        def close(self) -> None:
            raise AssertionError("it is closed already")

    connection = server.BoundedHttp.__new__(server.BoundedHttp)
    connection.transport = Gone()
    connection.timeout_keep_alive_handler()
