"""What comes with a request beside its head and its body: trailers, chunk sizes and extensions; and requests that are
sent ahead of their answers. All of it is bounded, and a trailer is never a header.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from httpx import Client

from app.src.access.keys import Grant, create
from app.src.api import server
from app.src.api.server import FRAMING, MOST_AHEAD, MOST_HEAD_BYTES, MOST_HEADERS, metrics_served
from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import serving, settings_in
from tests.api.test_slow_clients import HEAD, connected, rest, some, status, told, whole_answer

POST = (
    b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b'{"inputs": "steel shaft", "truncate": true}'
LAST = b"GET /nope HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
TOO_MUCH = MOST_HEAD_BYTES + 1000


def chunked(body: bytes, size: int, extension: bytes = b"") -> bytes:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with closing(Service(settings_in(tmp_path_factory.mktemp("framing")))) as service, serving(service) as client:
        yield client


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The metrics port of a worker."""
    folder = tmp_path_factory.mktemp("worker")
    with (
        closing(Service(settings_in(folder))) as service,
        metrics_served(service, "127.0.0.1", 0) as url,
        Client(base_url=url.removesuffix("/metrics"), timeout=30) as client,
    ):
        assert client.get("/metrics").status_code == 200
        yield client


def statuses(answers: bytes) -> list[int]:
    return [status(b"HTTP/1.1 " + each) for each in answers.split(b"HTTP/1.1 ")[1:]]


def sent(connection: socket.socket, content: bytes) -> None:
    """The rest of it may find the other side gone."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(content)


# ----------------------------------------------------------------------------------------------------- never as headers


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[tuple[Service, str]]:
    """A service behind a proxy that it trusts, and a key for it."""
    key = create(tmp_path / "keys.json", Grant("somebody", ("embed",)))[1]
    access = {"keys": tmp_path / "keys.json", "audit": str(tmp_path / "audit.log"), "failures": "1/minute"}
    document = settings_in(tmp_path).model_dump(by_alias=True) | {"access": access}
    document["api"]["trusted_proxies"] = ["127.0.0.1"]
    with closing(Service(Settings.model_validate(document))) as service:
        yield service, key


@pytest.mark.parametrize("later", [False, True], ids=["with the head", "behind it"])
def test_a_trailer_is_no_header(audited: tuple[Service, str], tmp_path: Path, later: bool) -> None:
    """No key comes by one, and none overrides what the proxy says of the client."""
    service, key = audited
    forged = b"0\r\nX-API-Key: %s\r\nX-Forwarded-For: 192.0.2.99\r\n\r\n" % key.encode()
    through = b"X-Forwarded-For: 192.0.2.1\r\nTransfer-Encoding"
    with serving(service) as client:
        for expected in (401, 429):
            with connected(client) as connection:
                head = POST.replace(b"Transfer-Encoding", through) + chunked(BODY, 100)
                if later:
                    connection.sendall(head)
                    answer = whole_answer(connection)  # the guard waits for no body
                    sent(connection, forged)
                else:
                    connection.sendall(head + forged)
                    answer = whole_answer(connection)
                assert status(answer) == expected
        with connected(client) as connection:
            headed = POST.replace(b"Transfer-Encoding", b"X-API-Key: %s\r\nTransfer-Encoding" % key.encode())
            connection.sendall(headed + chunked(BODY, 100) + b"0\r\nX-API-Key: another\r\n\r\n")
            assert status(whole_answer(connection)) == 200, "trailers are allowed, and ignored"
            connection.sendall(POST + chunked(BODY, 100) + b"0\r\n\r\n")
            assert status(whole_answer(connection)) in (401, 429), "nor are they headers of the next request"
    log = (tmp_path / "audit.log").read_text(encoding="utf-8")
    assert "192.0.2.1" in log
    assert "192.0.2.99" not in log


# -------------------------------------------------------------------------------------------------------------- bounded

ENDLESS = {
    "trailers": b"0\r\n" + b"a: b\r\n" * (TOO_MUCH // 6),
    "one trailer": b"0\r\na: " + b"b" * TOO_MUCH,
    "one name": b"0\r\n" + b"b" * TOO_MUCH,
    "an extension": b"1;" + b"x" * TOO_MUCH,
    "a value of an extension": b'1;x="' + b"x" * TOO_MUCH,
    "extensions": chunked(b"x" * (TOO_MUCH // 100), 1, b";" + b"x" * 200),
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("port", ["client", "worker"])
@pytest.mark.proves(27)
def test_all_of_it_is_bounded(
    port: str, what: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LINGER_SECONDS", 3600)
    client: Client = request.getfixturevalue(port)
    with connected(client) as connection:
        if port == "worker":  # answers at once, whatever is still to come of the request
            connection.sendall(GET)
            assert status(whole_answer(connection)) == 200
        else:
            connection.sendall(HEAD + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert status(some(connection)) == 100  # the head has been read
        connection.settimeout(30)
        sent(connection, ENDLESS[what])
        answer = rest(connection)
    if port == "client":
        assert told(answer)["status"] == 431
        assert f"{MOST_HEAD_BYTES} bytes and {FRAMING} for each byte" in told(answer)["detail"]
    else:
        assert len(statuses(answer)) <= 1


def test_a_body_may_come_byte_by_byte(client: Client) -> None:
    """Five bytes of framing for each of it, far more than a head may have."""
    body = json.dumps({"inputs": "steel " * 1400, "truncate": True}).encode() + b" " * 10_000
    framed = chunked(body, 1)
    assert len(framed) - len(body) > MOST_HEAD_BYTES
    with connected(client) as connection:
        for at in range(0, len(framed), 10_000):
            connection.sendall((POST if at == 0 else b"") + framed[at : at + 10_000])
        connection.sendall(b"0\r\nX-Sum: 1\r\n\r\n" + LAST)
        assert statuses(rest(connection)) == [200, 404]


def test_a_head_in_pieces_may_follow_a_large_body(client: Client) -> None:
    """What the body before had is no part of the next head, also where it was too large."""
    body = json.dumps({"inputs": "steel", "truncate": True}).encode() + b" " * MOST_HEAD_BYTES
    head = POST.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body))
    with connected(client) as connection:
        connection.sendall(head + body)
        begun = some(connection)
        connection.sendall(LAST[:30])
        assert client.get("/health/live").status_code == 200  # so the server has read the first piece
        connection.sendall(LAST[30:])
        assert statuses(begun + rest(connection)) == [413, 404]


def test_the_number_of_headers_is_bounded(client: Client, worker: Client) -> None:
    """13,000 empty ones in an unfinished head held 1.6 MB a connection, without a key."""
    for to in (client, worker):
        with connected(to) as connection:
            sent(connection, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * (MOST_HEADERS + 1))
            refused = told(rest(connection))
        assert (refused["status"], str(MOST_HEADERS) in refused["detail"]) == (431, True)


# ---------------------------------------------------------------------------------------------------------------- ahead


def test_requests_ahead_of_their_answers(client: Client) -> None:
    """Some are answered, in order; so many that only parsing them takes long are not even parsed."""
    live = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(client) as connection:
        connection.sendall(live * MOST_AHEAD + LAST)
        assert statuses(rest(connection)) == [200] * MOST_AHEAD + [404]
    with connected(client) as connection:
        sent(connection, live * (MOST_AHEAD + 2))
        refused = told(rest(connection))
    assert (refused["status"], str(MOST_AHEAD) in refused["detail"]) == (400, True)
