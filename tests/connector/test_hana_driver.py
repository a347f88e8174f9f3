"""The real driver under our pool: failed connects against small wrong servers, and statements against the emulator."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.src.service.explaining import code_of
from connector.cancellation import Cancellation, cancelled_by
from connector.errors import (
    Cancelled,
    ConnectFailed,
    ConnectionLost,
    LoginRefused,
    Overloaded,
    PermissionRefused,
    RowRejected,
    StatementFailed,
    TransactionRolledBack,
    Unavailable,
    UnknownColumn,
    UnknownTable,
    Unreachable,
)
from connector.hana.connection import ConnectionOptions, HanaFeatures, HanaPool, Session
from connector.retry import RetryPolicy
from hana_emulator.testing import Emulator, running

pytest.importorskip("hdbcli")

QUICK = RetryPolicy(attempts=3, first_wait=0.01, longest_wait=0.02)


# ----------------------------------------------------------------------------------------------- failed connects


class WrongServer:
    """Accepts on a free loopback port, remembers what came, answers `reply` (None: stays silent)."""

    def __init__(self, reply: bytes | None) -> None:
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.received: list[bytes] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                self.received.append(connection.recv(4096))
                if self._reply is None:
                    self._open.append(connection)
                    continue
                connection.sendall(self._reply)
                connection.close()
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()


@pytest.fixture
def wrong_server() -> Iterator[Callable[[bytes | None], WrongServer]]:
    servers: list[WrongServer] = []

    def make(reply: bytes | None) -> WrongServer:
        servers.append(WrongServer(reply))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def connect_to(port: int, host: str = "127.0.0.1", **options: Any) -> None:
    chosen = ConnectionOptions(
        host=host, port=port, user="U", password="Geheim-1", **{"connect_timeout": 1.0, **options}
    )
    with HanaPool(chosen, retry=RetryPolicy(attempts=1)) as pool:
        pool.read("SELECT 1 FROM DUMMY")


HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "options", "error", "named"),
    [
        (HTTP, {"encrypt": False}, ConnectFailed, "web server.*`port`"),
        (HTTP, {}, ConnectFailed, "plain text.*`port`"),
        (b"x" * 64, {"encrypt": False}, ConnectFailed, "not HANA's SQL port.*`encrypt`"),
        (b"", {"encrypt": False}, Unreachable, "could not be reached.*`port`"),
        (None, {"encrypt": False, "connect_timeout": 0.3}, Unreachable, "`connect_timeout`"),
        pytest.param(None, {"connect_timeout": 0.3}, Unreachable, "`connect_timeout`", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_hana_is_told_apart(wrong_server, reply, options, error, named):
    with pytest.raises(error, match=named) as caught:
        connect_to(wrong_server(reply).port, **options)
    assert code_of(caught.value) == "OWL-2005"
    assert "Geheim" not in str(caught.value)


def test_a_closed_port_and_an_unknown_name():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unreachable, match=r"refused.*`host`"):
        connect_to(port)
    with pytest.raises(Unreachable, match=r"cannot be resolved.*`host`"):
        connect_to(443, host="no-such-host.invalid")
    with pytest.raises(ConnectFailed, match=r"address is invalid.*`host`"):
        connect_to(443, host="127.0.0.1;encrypt=false")


@pytest.mark.parametrize(("options", "first"), [({}, 0x16), ({"encrypt": False}, 0xFF)])
@pytest.mark.proves(8)
def test_the_first_byte_on_the_wire_is_tls_unless_switched_off(wrong_server, options, first):
    server = wrong_server(b"")
    with pytest.raises(Unreachable):
        connect_to(server.port, **options)
    assert [data[0] for data in server.received] == [first]


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Emulator]:
    with running("--tls", "--tls-host", "db.example") as emulator:
        yield emulator


@pytest.mark.xdist_group("encrypted emulator")
@pytest.mark.parametrize(
    ("tls", "options", "error", "named"),
    [
        (False, {"encrypt": True}, Unreachable, "`encrypt`"),
        (True, {"encrypt": False}, Unreachable, "`encrypt`"),
        (True, {"host": "localhost"}, ConnectFailed, "another name than `host`.*db.example"),
        (True, {"host": "localhost", "trust_store": ""}, ConnectFailed, "not trusted.*`trust_store`"),
    ],
)
def test_an_address_or_tls_setting_that_is_wrong_is_a_failed_connect(emulator, encrypted, tls, options, error, named):
    there = encrypted if tls else emulator
    with pytest.raises(error, match=named) as caught:
        connect_to(there.port, **{"trust_store": there.trust_store or "", "connect_timeout": 10.0, **options})
    assert code_of(caught.value) == "OWL-2005"


def test_the_connect_timeout_is_kept(wrong_server):
    start = time.monotonic()
    with pytest.raises(Unreachable):
        connect_to(wrong_server(None).port, connect_timeout=0.3)
    assert 0.2 < time.monotonic() - start < 8, "less than the usual 10 s"


def test_an_unknown_user_store_key_is_named():
    with (
        HanaPool(ConnectionOptions(userkey="NO_SUCH_KEY"), retry=QUICK) as pool,
        pytest.raises(ConnectFailed, match="`userkey`"),
    ):
        pool.read("SELECT 1 FROM DUMMY")


# ------------------------------------------------------------------------------------------- against the emulator


def options_of(emulator: Emulator, **changes: Any) -> ConnectionOptions:
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    return ConnectionOptions(**{**login, "encrypt": False, **changes})


@pytest.fixture
def pool(emulator: Emulator, hana_schema: str) -> Iterator[HanaPool]:
    with HanaPool(options_of(emulator, schema=hana_schema), 4, retry=QUICK) as pool:
        pool.execute('CREATE TABLE "T" ("K" INTEGER PRIMARY KEY, "A" NVARCHAR(3), "V" REAL_VECTOR(2), "D" DATE)')
        yield pool


def test_the_schema_is_the_current_one(pool, hana_schema):
    assert pool.read("SELECT CURRENT_SCHEMA FROM DUMMY") == [(hana_schema,)]


def test_an_unknown_schema_is_named(emulator):
    with HanaPool(options_of(emulator, schema="NOPE")) as pool, pytest.raises(UnknownTable, match=r"`schema`.*NOPE"):
        pool.read("SELECT 1 FROM DUMMY")


def test_a_wrong_password_is_refused_once(emulator):
    with HanaPool(options_of(emulator, password="Geheim-2")) as pool:
        for _ in range(2):
            with pytest.raises(LoginRefused, match="`password`") as caught:
                pool.read("SELECT 1 FROM DUMMY")
            assert caught.value.code == 10
            assert "Geheim" not in str(caught.value)


def test_a_transaction_is_all_or_nothing(pool):
    def twice(session: Session) -> None:
        session.execute('INSERT INTO "T" ("K") VALUES (?)', (1,))
        session.execute('INSERT INTO "T" ("K") VALUES (?)', (1,))

    with pytest.raises(RowRejected):
        pool.in_transaction(twice)
    assert pool.read('SELECT COUNT(*) FROM "T"') == [(0,)]
    with pool.transaction() as session:
        session.execute_many('INSERT INTO "T" ("K") VALUES (?)', [(n,) for n in range(100)])
    assert pool.read('SELECT COUNT(*) FROM "T"') == [(100,)]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("A", "Geheim"),
        ("A", "\ud800"),
        ("A", object()),
        ("K", "Geheim"),
        ("K", 2**40),
        ("K", 2**70),
        ("K", None),
        ("D", "Geheim"),
        ("V", b"Geheim"),
        ("V", [1.0]),
    ],
)
def test_bad_values_are_rejected_rows_without_their_text(pool, column, value):
    with pytest.raises(RowRejected) as caught, pool.transaction() as session:
        session.execute(f'INSERT INTO "T" ("{column}") VALUES (?)', (value,))
    assert "Geheim" not in str(caught.value)
    assert pool.read('SELECT COUNT(*) FROM "T"') == [(0,)]


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ('SELECT "NOPE" FROM "T"', UnknownColumn),
        ('SELECT * FROM "NOPE"', UnknownTable),
        ('SELEC "A" FROM "T"', StatementFailed),
    ],
)
def test_bad_statements_say_what_is_wrong_and_the_connection_lives(pool, sql, error):
    with pytest.raises(error, match=r"NOPE|syntax"):
        pool.read(sql)
    assert pool.read("SELECT 1 FROM DUMMY") == [(1,)]


def test_rows_are_tuples_and_vectors_memoryviews(pool):
    pool.execute('INSERT INTO "T" ("K","V") VALUES (?,?)', (1, [1.0, 2.0]))
    ((key, vector),) = pool.read('SELECT "K","V" FROM "T"')
    assert key == 1
    assert bytes(vector) == bytes.fromhex("020000000000803f00000040")


def test_features_of_the_emulator(pool):
    features = HanaFeatures.probe(pool)
    assert features.real_vector
    assert features.version


@pytest.mark.proves(3)
def test_a_server_that_dies_is_connection_lost_and_its_successor_is_found(tmp_path):
    with running("--data", str(tmp_path)) as first:
        port = first.port
        pool = HanaPool(options_of(first, connect_timeout=2), 2, retry=QUICK)
        assert pool.read("SELECT 1 FROM DUMMY") == [(1,)]
        with pool.session() as session:
            first.process.kill()
            first.process.wait(10)
            with pytest.raises(ConnectionLost) as lost:
                session.query("SELECT 1 FROM DUMMY")
    with pytest.raises(Unreachable) as refused:
        pool.read("SELECT 1 FROM DUMMY")
    assert (code_of(lost.value), code_of(refused.value)) == ("OWL-2003", "OWL-2005")
    with running("--data", str(tmp_path), "--port", str(port)):
        assert pool.read("SELECT 1 FROM DUMMY") == [(1,)]
    pool.close()


def test_threads_have_connections_of_their_own(pool):
    pool.execute('INSERT INTO "T" ("K") VALUES (0)')
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                assert pool.read('SELECT "K" FROM "T" WHERE "K" = ?', (0,)) == [(0,)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def reading(pool: HanaPool, call: Cancellation, ended: list[object]) -> threading.Thread:
    """A thread that reads the row that somebody else has locked."""

    def work() -> None:
        with cancelled_by(call):
            try:
                ended.append(pool.read('SELECT "K" FROM "T" WHERE "K" = 0 FOR UPDATE'))
            except BaseException as error:
                ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def cancelled(thread: threading.Thread, call: Cancellation) -> None:
    """Again and again: what is cancelled before it has come to the server runs there."""
    for _ in range(200):
        call.cancel()
        thread.join(0.1)
        if not thread.is_alive():
            return
    raise AssertionError("it still waits for the lock")


def test_a_statement_that_nobody_waits_for_is_cancelled(emulator, hana_schema):
    sent = threading.Event()
    options = options_of(emulator, schema=hana_schema)
    with HanaPool(options, 4, retry=QUICK) as owner, HanaPool(options, 1, on_statement=lambda _: sent.set()) as pool:
        owner.execute('CREATE TABLE "T" ("K" INTEGER PRIMARY KEY)')
        owner.execute('INSERT INTO "T" VALUES (0)')
        assert pool.read("SELECT 1 FROM DUMMY") == [(1,)]
        ended: list[object] = []
        with owner.transaction() as session:
            session.execute('UPDATE "T" SET "K" = 0 WHERE "K" = 0')
            sent.clear()
            calls = [Cancellation(), Cancellation()]
            holder = reading(pool, calls[0], ended)
            assert sent.wait(60)
            waiter = reading(pool, calls[1], ended)  # the only connection is in use
            cancelled(waiter, calls[1])
            assert [type(error) for error in ended] == [Cancelled]
            cancelled(holder, calls[0])
            assert [type(error) for error in ended] == [Cancelled, Cancelled], "and not tried again"
        assert pool.read('SELECT "K" FROM "T" FOR UPDATE') == [(0,)]


# ---------------------------------------------------------------------------------------------- rows of a batch

PUT = 'INSERT INTO "T" VALUES (?, ?, ?, ?)'
VECTOR = struct.pack("<iff", 2, 1.0, 0.0)
GOOD = ("a", VECTOR, None)


def each(pool: HanaPool, rows: list[tuple[Any, ...]], sql: str = PUT) -> None:
    with pool.transaction() as session:
        session.execute_many(sql, rows, doing="writing")


def count(pool: HanaPool) -> int:
    return int(pool.read('SELECT COUNT(*) FROM "T"')[0][0])


def test_a_batch_with_bad_rows_is_refused_whole_by_the_first(pool):
    with pytest.raises(RowRejected) as caught:
        each(pool, [(1, *GOOD), (2, "secret", VECTOR, None), (3, *GOOD), (1, *GOOD), (4, *GOOD)])
    assert caught.value.code == 274
    assert "secret" not in str(caught.value)
    assert count(pool) == 0, "the good rows were in the transaction, which is rolled back"
    each(pool, [(1, *GOOD), (2, *GOOD)])
    each(pool, [])
    assert count(pool) == 2


def test_a_check_of_the_table_is_the_rows_fault(pool):
    pool.execute('ALTER TABLE "T" ADD CONSTRAINT "SMALL" CHECK ("K" < 100)')
    with pytest.raises(RowRejected) as caught:
        each(pool, [(1, *GOOD), (100, *GOOD)])
    assert caught.value.code == 677


def test_a_refusal_in_words_that_are_not_ascii_is_an_error_like_others(pool):
    """Asked to name the rows (`batcherrors`), the driver ends the process here."""
    pool.execute('CREATE TABLE "UMLAUT" ("Ä" NVARCHAR(3))')
    with pytest.raises(RowRejected) as caught:
        each(pool, [("a",), ("aaaaa",)], 'INSERT INTO "UMLAUT" VALUES (?)')
    assert caught.value.code == 274


@pytest.mark.parametrize(
    "row",
    [
        (2, "a", struct.pack("<ifff", 3, 1.0, 0.0, 0.0), None),
        (2, "a", b"no vector", None),
        (2, "a\ud800", VECTOR, None),
        (2**70, "a", VECTOR, None),
    ],
    ids=["a longer vector", "no vector", "half a character", "beyond 64 bits"],
)
def test_what_the_driver_cannot_send_is_the_rows_fault(pool, row):
    with pytest.raises(RowRejected):
        each(pool, [(1, *GOOD), row, (3, *GOOD)])
    assert count(pool) == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (131, TransactionRolledBack),
        (4, Overloaded),
        (2048, Overloaded),
        (258, PermissionRefused),
        (259, UnknownTable),
        (1888, Unavailable),
        (597, ConnectionLost),
        (9999, StatementFailed),
    ],
)
def test_an_error_of_a_batch_that_is_no_rows_is_raised_as_what_it_is(pool, code, kind):
    fault = f'{{"match": "INSERT INTO .T.", "action": "error", "code": {code}, "text": "Memory allocation failed"}}'
    text = fault.replace("Memory allocation failed", "x") if code != 2048 else fault
    pool.execute(f"ALTER SYSTEM INJECT FAULT '{text}'")
    try:
        with pytest.raises(kind) as caught:
            each(pool, [(1, *GOOD), (2, *GOOD)])
        assert getattr(caught.value, "code", code) == code
    finally:
        pool.execute("ALTER SYSTEM CLEAR FAULTS")
    each(pool, [(1, *GOOD)])


def test_a_line_lost_in_a_batch_is_no_rows_fault_and_the_connection_is_not_used_again(pool):
    pool.execute("""ALTER SYSTEM INJECT FAULT '{"match": "INSERT INTO .T.", "action": "drop_before"}'""")
    with pytest.raises(ConnectionLost):
        each(pool, [(1, *GOOD), (2, *GOOD)])
    pool.in_transaction(lambda session: session.execute_many(PUT, [(1, *GOOD), (2, *GOOD)]))
    assert count(pool) == 2
