"""TLS of the emulator with the real hdbcli: who gets in, who is refused, and that nobody harms the others."""

from __future__ import annotations

import socket
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from hana_emulator import tls
from hana_emulator.testing import Emulator, running

dbapi = pytest.importorskip("hdbcli.dbapi")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with running("--tls", "--data", str(tmp_path_factory.mktemp("tls"))) as emulator:
        yield emulator
        assert emulator.stop() == 0
        assert emulator.process.stderr is not None
        assert emulator.process.stderr.read() == "", "a client that is refused is no incident"


def answers(emulator: Emulator, **options: Any) -> bool:
    with closing(emulator.connect(**options)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT 'x' FROM DUMMY")
        return bool(cursor.fetchone()[0] == "x")


def refusal(emulator: Emulator, **options: Any) -> str:
    with pytest.raises(dbapi.Error) as caught:
        emulator.connect(**options)
    assert caught.value.errorcode == -10709
    return str(caught.value.errortext)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sslValidateCertificate": "true"},
        {"address": "localhost", "sslHostNameInCertificate": "localhost"},
        {"sslHostNameInCertificate": "*"},
        {"sslTrustStore": None, "sslValidateCertificate": "false"},
    ],
)
def test_a_client_that_trusts_it_gets_in(secure: Emulator, options: dict[str, Any]) -> None:
    assert answers(secure, **{name: value for name, value in options.items() if value is not None})


def test_the_trust_store_may_be_given_as_text(secure: Emulator) -> None:
    assert secure.trust_store is not None
    assert answers(secure, sslTrustStore=Path(secure.trust_store).read_text(encoding="ascii"))


def test_another_authority_is_not_trusted(secure: Emulator, tmp_path: Path) -> None:
    with running("--tls", "--data", str(tmp_path)) as other:
        assert "300015" in refusal(secure, sslTrustStore=other.trust_store)
    assert answers(secure)


def test_without_a_trust_store_it_is_refused(secure: Emulator) -> None:
    with pytest.raises(dbapi.Error, match="300015"):
        dbapi.connect(address=secure.host, port=secure.port, user=secure.user, password=secure.password, encrypt="true")


def test_a_plain_client_fails_at_once(secure: Emulator) -> None:
    started = time.monotonic()
    refusal(secure, encrypt="false")
    assert time.monotonic() - started < 20, "nobody waits for a timeout"
    assert answers(secure)


def test_a_secure_client_fails_at_once_on_a_plain_port(emulator: Emulator, secure: Emulator) -> None:
    started = time.monotonic()
    refusal(emulator, **secure.tls)
    assert time.monotonic() - started < 20, "nobody waits for a timeout"
    assert answers(emulator)


def test_silent_clients_keep_nobody_waiting(secure: Emulator) -> None:
    silent = [socket.create_connection((secure.host, secure.port)) for _ in range(20)]
    try:
        started = time.monotonic()
        assert answers(secure)
        assert time.monotonic() - started < 20
    finally:
        for sock in silent:
            sock.close()


def test_garbage_instead_of_a_handshake_ends_that_client_only(secure: Emulator) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 70_000, b"\x00" * 100):
        with socket.create_connection((secure.host, secure.port), timeout=5) as sock:
            sock.sendall(garbage[:100])
            sock.shutdown(socket.SHUT_WR)
            while True:
                try:
                    if not sock.recv(4096):
                        break
                except ConnectionResetError:
                    break
    assert answers(secure)


def test_the_certificate_names_every_loopback_address(secure: Emulator) -> None:
    """Checked by OpenSSL itself, which compares addresses too; hdbcli never does."""
    assert secure.trust_store is not None
    context = ssl.create_default_context(cafile=secure.trust_store)
    for name in ("localhost", "127.0.0.1", "::1"):
        with (
            socket.create_connection((secure.host, secure.port), timeout=5) as sock,
            context.wrap_socket(sock, server_hostname=name) as secured,
        ):
            assert secured.version() in ("TLSv1.2", "TLSv1.3")


def test_big_packets_lobs_and_pages(secure: Emulator) -> None:
    with closing(secure.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE BIG (ID INTEGER PRIMARY KEY, T NCLOB)")
        rows = [(number, "ä" * 40_000) for number in range(20)]
        cursor.executemany("INSERT INTO BIG VALUES (?, ?)", rows)
        connection.commit()
        cursor.execute("SELECT ID, T FROM BIG ORDER BY ID")
        assert [tuple(row) for row in cursor.fetchall()] == rows
        cursor.execute("DROP TABLE BIG")


def test_a_vanished_client_lets_go_of_its_locks(secure: Emulator) -> None:
    """The watch over sockets that nobody reads sees a hang-up under TLS too."""
    with closing(secure.connect(autocommit=True)) as setup:
        setup.cursor().execute("CREATE TABLE HELD (A INTEGER)")
        setup.cursor().execute("INSERT INTO HELD VALUES (0)")
        holder = secure.connect()
        holder.cursor().execute("UPDATE HELD SET A = 1")
        session = holder.cursor()
        session.execute("SELECT CURRENT_CONNECTION FROM DUMMY")
        number = session.fetchone()[0]
        setup.cursor().execute(f"ALTER SYSTEM DISCONNECT SESSION '{number}'")
        started = time.monotonic()
        setup.cursor().execute("UPDATE HELD SET A = 2")
        assert time.monotonic() - started < 8, "less than the lock timeout"
        setup.cursor().execute("DROP TABLE HELD")
        with pytest.raises(dbapi.Error):
            session.execute("SELECT 1 FROM DUMMY")
        holder.close()


def test_a_certificate_for_another_name_is_good_for_that_name_only() -> None:
    with running("--tls-host", "db.example") as emulator:
        text = refusal(emulator)
        assert "300015" in text
        assert "db.example" in text
        assert answers(emulator, sslHostNameInCertificate="db.example")
        assert answers(emulator, sslValidateCertificate="false")
        assert emulator.stop() == 0


@pytest.mark.slow
def test_an_expired_certificate_is_refused() -> None:
    with running("--tls-expired") as emulator:
        assert "300015" in refusal(emulator)
        assert answers(emulator, sslValidateCertificate="false")
        assert emulator.stop() == 0


def test_authority_and_certificate_are_kept_with_the_data(tmp_path: Path) -> None:
    first = tls.prepare(tmp_path)
    assert first.trust_store == tmp_path / "tls" / "ca.pem"
    before = {path.name: path.read_bytes() for path in (tmp_path / "tls").iterdir()}
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert modes == {"ca.pem": 0o600, "ca-key.pem": 0o600, "server.pem": 0o600}
    tls.prepare(tmp_path, "db.example")
    with running("--tls", "--data", str(tmp_path)) as emulator:
        assert emulator.trust_store == str(first.trust_store)
        assert answers(emulator)
    assert {name: (tmp_path / "tls" / name).read_bytes() for name in before} == before


def test_an_authority_whose_key_is_gone_is_made_anew(tmp_path: Path) -> None:
    before = tls.prepare(tmp_path).trust_store.read_bytes()
    (tmp_path / "tls" / "ca-key.pem").unlink()
    after = tls.prepare(tmp_path).trust_store.read_bytes()
    assert after != before
    client, server = ssl.create_default_context(cadata=after.decode("ascii")), tls.prepare(tmp_path).context
    assert handshake(client, server) in ("TLSv1.2", "TLSv1.3")


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> str | None:
    """The protocol that the two agree upon, without a socket between them."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(5):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].version()
