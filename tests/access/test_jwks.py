"""The issuer's keys over HTTP on loopback: had once, had anew, and what an issuer that misbehaves can do: nothing."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import trustme

from app.src.access import tokens as module
from app.src.access.authentication import Authentication
from app.src.access.principal import AccessUnusable, Unauthenticated
from app.src.access.tokens import KeySet, Tokens, download, parse
from app.src.settings import AccessSettings
from tests.access.issuer import AUDIENCE, ISSUER, claims, jwk, jwks, rsa_key, signed

OLD, NEW = rsa_key(1), rsa_key(2)


class Keys(ThreadingHTTPServer):
    """What it gives can be changed; counts how often it was asked, and for what."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.content = jwks(jwk(OLD, "old"))
        self.status, self.location = 200, ""
        self.asked: list[str] = []
        self.answer: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/keys?zid=1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """We hang up on it in some of the tests."""


class _Answer(BaseHTTPRequestHandler):
    server: Keys

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.answer is not None:
            self.server.answer(self)
            return
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def keys() -> Iterator[Keys]:
    with Keys() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def authentication(url: str) -> Authentication:
    made = Authentication(
        AccessSettings.model_validate({"jwt": {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": url}})
    )
    made.open()
    return made


def tokens_of(made: Authentication) -> Tokens:
    assert made._tokens is not None
    return made._tokens


def test_keys_are_fetched_when_first_needed_and_once_for_all_who_wait(keys: Keys) -> None:
    made = authentication(keys.url)
    assert keys.asked == []
    token = signed(claims(), OLD, "old")

    async def asked() -> None:
        found = await asyncio.gather(*(made.principal(token) for _ in range(50)))
        assert {principal.name for principal in found} == {"somebody"}

    asyncio.run(asked())
    assert keys.asked == ["/keys?zid=1"]


def test_a_new_key_is_had_when_a_token_names_it(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    made = authentication(keys.url)

    async def asked() -> None:
        await made.principal(signed(claims(), OLD, "old"))
        keys.content = jwks(jwk(OLD, "old"), jwk(NEW, "new"))
        monkeypatch.setattr(module, "COOLDOWN", 0.0)
        assert (await made.principal(signed(claims(), NEW, "new"))).name == "somebody"
        keys.content = jwks(jwk(NEW, "new"))
        with pytest.raises(Unauthenticated):  # asks again, and so learns that the old one is gone
            await made.principal(signed(claims(), rsa_key(3), "stranger"))
        with pytest.raises(Unauthenticated) as refused:
            await made.principal(signed(claims(), OLD, "old"))
        assert refused.value.code == "unknown_kid"

    asyncio.run(asked())


def test_strangers_cannot_make_us_ask_the_issuer(keys: Keys) -> None:
    made = authentication(keys.url)

    async def asked() -> None:
        await made.principal(signed(claims(), OLD, "old"))
        for number in range(30):
            with pytest.raises(Unauthenticated):
                await made.principal(signed(claims(), rsa_key(3), f"stranger {number}"))

    asyncio.run(asked())
    assert len(keys.asked) == 1


def test_an_issuer_that_is_away_is_said_to_be_and_asked_again_later(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.status = 500
    made = authentication(keys.url)

    async def asked() -> None:
        for _ in range(20):
            with pytest.raises(Unauthenticated, match="unavailable"):
                await made.principal(signed(claims(), OLD, "old"))
        assert len(keys.asked) == 1
        keys.status = 200
        monkeypatch.setattr(module, "RETRY", 0.0)
        assert (await made.principal(signed(claims(), OLD, "old"))).name == "somebody"

    asyncio.run(asked())


def test_keys_in_hand_outlive_a_failure_but_not_for_ever(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    made = authentication(keys.url)
    token = signed(claims(), OLD, "old")

    async def asked() -> None:
        await made.principal(token)
        keys.status = 500
        monkeypatch.setattr(module, "LIFESPAN", 0.0)
        monkeypatch.setattr(module, "COOLDOWN", 0.0)
        assert (await made.principal(token)).name == "somebody"  # fetched behind the scenes, in vain
        while tokens_of(made).keys.fault is None:
            await asyncio.sleep(0.01)
        assert len(keys.asked) == 2
        assert (await made.principal(token)).name == "somebody"
        monkeypatch.setattr(module, "LONGEST", 0.0)
        with pytest.raises(Unauthenticated, match="unavailable"):
            await made.principal(token)

    asyncio.run(asked())


def test_an_issuer_that_has_taken_its_last_key_away_is_believed(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a theft. Only one that cannot be reached, or answers with nonsense, leaves the keys in hand."""
    made = authentication(keys.url)
    token = signed(claims(), OLD, "old")
    fetched = tokens_of(made).keys

    async def asked() -> None:
        await made.principal(token)
        keys.content = b"nonsense"
        fetched.fetch()
        await made.principal(token)
        keys.content = jwks()
        fetched.fetch()
        with pytest.raises(Unauthenticated, match="unavailable"):
            await made.principal(token)
        keys.content = jwks(jwk(OLD, "old"))
        fetched.fetch()
        await made.principal(token)

    asyncio.run(asked())


def test_a_name_that_cannot_be_looked_up() -> None:
    with pytest.raises(AccessUnusable, match="cannot be reached"):
        download(f"https://{'x' * 64}.example/", 1)


def test_what_readiness_says(keys: Keys) -> None:
    keys.status = 500
    made = authentication(keys.url)
    fault = made.check()
    assert fault is not None
    assert "500" in fault
    keys.status = 200
    assert made.check() == fault  # not asked again so soon
    again = authentication(keys.url)
    assert again.check() is None


# --------------------------------------------------------------------------------------------------- issuers gone wrong


LASTS = 20.0
"""Seconds for which an issuer goes on, unless the test is over."""


def _silent(request: BaseHTTPRequestHandler) -> None:
    assert isinstance(request.server, Keys)
    request.server.over.wait(LASTS)


def _endless_header(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n")


def _huge(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (1 << 20))


def _no_http(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"SSH-2.0-OpenSSH\r\n")


@pytest.mark.parametrize("answer", [_silent, _endless_header, _huge, _no_http])
def test_an_issuer_that_misbehaves_costs_bounded_time_and_memory(
    keys: Keys, answer: Callable[[BaseHTTPRequestHandler], None]
) -> None:
    keys.answer = answer
    start = time.monotonic()
    with pytest.raises(AccessUnusable):
        parse(download(keys.url, 0.3), ["RS256"])
    assert time.monotonic() - start < LASTS / 2


def test_an_ipv6_address_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def connect(self: http.client.HTTPConnection) -> None:
        asked.append((self.host, self.port))
        raise ConnectionRefusedError

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    with pytest.raises(AccessUnusable):
        download("http://[::1]/keys")
    assert asked == [("::1", 80)]


def test_redirects_are_not_followed(keys: Keys) -> None:
    keys.status, keys.location = 302, f"http://127.0.0.1:{keys.server_port}/other"
    with pytest.raises(AccessUnusable, match="302"):
        download(keys.url)
    assert len(keys.asked) == 1


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(AccessUnusable, match="cannot be reached"):
        download(f"http://127.0.0.1:{port}/", 1)


def test_a_proxy_of_the_environment_is_not_asked(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert download(keys.url) == keys.content


def test_a_certificate_that_nobody_vouches_for_is_refused() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with Keys() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with pytest.raises(AccessUnusable, match=r"(?i)cert"):
                download(f"https://localhost:{server.server_port}/")
        finally:
            server.shutdown()
            thread.join()


def test_a_hanging_issuer_holds_up_neither_others_nor_the_loop(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "download", partial(download, seconds=0.5))
    keys.answer = _silent
    made = authentication(keys.url)
    ticks = 0

    async def ticking() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async def asked() -> None:
        beside = asyncio.create_task(ticking())
        with pytest.raises(Unauthenticated, match="unavailable"):
            await made.principal(signed(claims(), OLD, "old"))
        beside.cancel()

    asyncio.run(asked())
    assert ticks > 20


def test_private_parts_in_a_key_set_are_not_kept(keys: Keys) -> None:
    from jwt.algorithms import RSAAlgorithm

    private = RSAAlgorithm.to_jwk(OLD, as_dict=True) | {"kid": "old", "key_ops": ["sign", "verify"]}
    keys.content = jwks(private)
    made = KeySet(keys.url, ["RS256"])
    made.fetch()
    key = made.get("old", "RS256")
    assert key is not None
    assert not hasattr(key.key, "private_numbers")
