"""Doctor on the way to a HANA: names, ports, certificates and TLS mixed up, against small servers with real ones."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from app.src.observe import Fault, network
from app.src.observe.network import Network
from app.src.settings import HanaSettings

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
HANA_REPLY = bytes.fromhex("0414000401000000")

Serve = Callable[[Callable[[socket.socket], None]], int]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE", 1.0)
    monkeypatch.setattr(network, "_ANSWER_WITHIN", 0.5)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(answer)` calls `answer` with each connection, one after the other; gives the port."""
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[socket.socket], None]) -> int:
            server = stack.enter_context(socket.create_server(("localhost", 0)))

            def loop() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        connection.settimeout(5)
                        with connection, contextlib.suppress(OSError):
                            answer(connection)

            thread = threading.Thread(target=loop, daemon=True)
            thread.start()
            stack.callback(thread.join, 5)
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            port: int = server.getsockname()[1]
            return port

        yield start


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(organization_name="Owl Test Authority")


@pytest.fixture
def trust(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return str(tmp_path / "ca.pem")


def secured(certificate: trustme.LeafCert) -> Callable[[socket.socket], None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return secured_by(context)


def secured_by(context: ssl.SSLContext) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as inner:
            inner.recv(1)

    return answer


def plain(connection: socket.socket) -> None:
    """As a HANA without TLS: eight bytes for the fourteen it expects, and the end for anything else."""
    if connection.recv(14).startswith(b"\xff\xff\xff\xff"):
        connection.sendall(HANA_REPLY)


def tls(port: int, **settings: Any) -> str:
    return Network(HanaSettings.model_validate({"host": "localhost", "port": port} | settings)).tls()


def fault(port: int, **settings: Any) -> Fault:
    with pytest.raises(Fault) as caught:
        tls(port, **settings)
    assert caught.value.fix
    return caught.value


# -------------------------------------------------------------------------------------------------------- certificates


def test_a_good_certificate(serve: Serve, authority: trustme.CA, trust: str) -> None:
    port = serve(secured(authority.issue_cert("localhost", not_after=NOW + 40 * DAY)))
    detail = tls(port, trust_store=trust)
    assert "TLSv1." in detail
    assert "for localhost valid until" in detail
    assert "(40 days)" in detail
    assert "valid until" in tls(port, trust_store=authority.cert_pem.bytes().decode())


def test_an_unknown_authority(serve: Serve, authority: trustme.CA, trust: str, tmp_path: Path) -> None:
    port = serve(secured(authority.issue_cert("localhost")))
    unknown = fault(port)
    assert "Owl Test Authority" in str(unknown)
    assert "HANA_SSL_TRUST_STORE" in unknown.fix
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    assert "not accepted" in str(fault(port, trust_store=str(tmp_path / "other.pem")))


def test_a_self_signed_certificate(serve: Serve, tmp_path: Path) -> None:
    own = trustme.CA(organization_name="Alone")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with own.cert_pem.tempfile() as certificate, own.private_key_pem.tempfile() as key:
        context.load_cert_chain(certificate, key)
    found = fault(serve(secured_by(context)))
    assert re.search("self.signed", str(found))
    assert "openssl s_client" in found.fix


def test_an_expired_certificate_and_one_of_the_future(serve: Serve, authority: trustme.CA, trust: str) -> None:
    old = authority.issue_cert("localhost", not_before=NOW - 9 * DAY, not_after=NOW - 3 * DAY)
    expired = fault(serve(secured(old)), trust_store=trust)
    assert "expired" in str(expired)
    assert "renew it" in expired.fix
    early = authority.issue_cert("localhost", not_before=NOW + 3 * DAY, not_after=NOW + 90 * DAY)
    assert "clock" in fault(serve(secured(early)), trust_store=trust).fix


def test_a_certificate_that_ends_soon(serve: Serve, authority: trustme.CA, trust: str) -> None:
    port = serve(secured(authority.issue_cert("localhost", not_after=NOW + 5 * DAY)))
    assert "in 5 days" in str(fault(port, trust_store=trust))


def test_a_certificate_for_another_name(serve: Serve, authority: trustme.CA, trust: str) -> None:
    port = serve(secured(authority.issue_cert("*.db.example", "hana.db.example")))
    found = fault(port, trust_store=trust)
    assert "the certificate for *.db.example, hana.db.example by " in str(found)
    assert "localhost" in str(found)
    assert 'host_name_in_certificate = "hana.db.example"' in found.fix
    assert "valid until" in tls(port, trust_store=trust, host_name_in_certificate="hana.db.example")


def test_an_address_is_never_matched_by_the_driver(serve: Serve, authority: trustme.CA, trust: str) -> None:
    port = serve(secured(authority.issue_cert("localhost", "127.0.0.1")))
    found = fault(port, host="127.0.0.1", trust_store=trust)
    assert "is an address" in str(found)
    assert 'host_name_in_certificate = "localhost"' in found.fix


def test_without_validation_it_says_so(serve: Serve, authority: trustme.CA) -> None:
    port = serve(secured(authority.issue_cert("other.example")))
    assert "NOT checked" in tls(port, validate_certificate=False, trust_store="/no/such/file")


@pytest.mark.parametrize(
    "content", [None, b"\x30\x82", b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_trust_stores_that_cannot_work(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "trust.pem"
    if content is not None:
        path.write_bytes(content)
    found = fault(1, trust_store=str(path))
    assert "cannot be used" in str(found)
    assert str(path) in str(found)


def test_a_damaged_trust_store_in_a_variable() -> None:
    damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    assert "the PEM in HANA_SSL_TRUST_STORE" in str(fault(1, trust_store=damaged))


# ------------------------------------------------------------------------------------------------- what answers there


@pytest.mark.parametrize("kind", ["plain", "silent", "rude", "web"])
def test_what_speaks_no_tls(serve: Serve, kind: str) -> None:
    def answer(connection: socket.socket) -> None:
        if kind == "plain":
            plain(connection)
        elif kind == "silent":
            connection.recv(5000)
            time.sleep(0.7)
        elif kind == "web":
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    start = time.monotonic()
    found = fault(serve(answer))
    assert "no TLS with the server" in str(found)
    assert "HANA_ENCRYPT=false" in found.fix
    assert time.monotonic() - start < 10


def test_without_encryption_it_says_so() -> None:
    assert "crosses the network in plain text" in tls(1, encrypt=False)


# ------------------------------------------------------------------------------------------------------- names, ports


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(Fault, match=r"no-such-host\.invalid cannot be resolved") as caught:
        Network(HanaSettings(host="no-such-host.invalid")).dns()
    assert "HANA_HOST" in caught.value.fix
    with pytest.raises(Fault, match="cannot be resolved"):
        Network(HanaSettings(host="ü" * 70)).dns()
    with pytest.raises(Fault, match="no HANA host"):
        Network(HanaSettings()).dns()


@contextlib.contextmanager
def unreachable() -> Iterator[int]:
    """A port whose queue is full: the system drops every further attempt without a word, as a firewall does."""
    with socket.socket() as server, contextlib.ExitStack() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        time.sleep(0.05)
        yield server.getsockname()[1]


def test_a_host_behind_a_firewall() -> None:
    with unreachable() as port, pytest.raises(Fault, match="does not answer within 1 s") as caught:
        Network(HanaSettings(host="127.0.0.1", port=port)).tcp()
    assert "allow-list" in caught.value.fix


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(Fault, match="nothing listens there"):
        Network(HanaSettings(host="127.0.0.1", port=port)).tcp()


def test_every_address_of_a_name_is_tried(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    port = serve(plain)
    resolve = socket.getaddrinfo
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *given, **more: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", closed), *resolve(*given, **more)],
    )
    assert "connected in" in Network(HanaSettings(host="localhost", port=port)).tcp()


@pytest.mark.slow
def test_the_whole_run_is_bounded(cli: Callable[..., Any]) -> None:
    with unreachable() as port:
        start = time.monotonic()
        login = {"HANA_HOST": "127.0.0.1", "HANA_PORT": str(port), "HANA_USER": "U", "HANA_PASSWORD": "canary-85"}
        run = cli("doctor", "--json", OWL_SAP_EMBEDDING__MODEL="hash:8", **login)
        assert time.monotonic() - start < 30
    assert run.code == 1
    assert "canary-85" not in run.out + run.err
    assert os.linesep not in "".join(check["detail"] for check in run.json)
