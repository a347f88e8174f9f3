"""Row locks of the emulator through the real hdbcli: threads, processes that are killed, cancelling, batch errors."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hdbcli import dbapi

from emulator_background import Background, wait_until
from hana_emulator.testing import Emulator, running

START = [(1, "one"), (2, "two"), (3, "three")]
IMPATIENCE = 8.0
"""Seconds: less than the lock timeout, and more than a machine that does other things needs."""


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with running() as started:
        yield started


class Clients:
    """hdbcli connections that are closed with the test."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.connections: list[Any] = []

    def __call__(self, **options: Any) -> Any:
        self.connections.append(self.emulator.connect(**options))
        return self.connections[-1]


@pytest.fixture
def client(emulator: Emulator) -> Iterator[Clients]:
    clients = Clients(emulator)
    first = clients()
    run(first, "CREATE TABLE T (K INTEGER PRIMARY KEY, N NVARCHAR(9))")
    first.cursor().executemany("INSERT INTO T VALUES (?, ?)", START)
    first.commit()
    yield clients
    for connection in clients.connections:
        connection.rollback()
        connection.close()
    last = emulator.connect()
    run(last, "DROP TABLE T")
    last.close()


def run(connection: Any, text: str, *parameters: Any) -> int:
    cursor = connection.cursor()
    cursor.execute(text, parameters)
    return int(cursor.rowcount)


def rows(connection: Any, text: str = "SELECT K, N FROM T ORDER BY K") -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    cursor.execute(text)
    return [tuple(row) for row in cursor.fetchall()]


def update(connection: Any, key: int, name: str) -> int:
    return run(connection, "UPDATE T SET N = ? WHERE K = ?", name, key)


def test_different_rows_are_written_without_waiting(client: Clients) -> None:
    writers = [client() for _ in range(3)]
    began = time.monotonic()
    assert [update(writer, key, f"w{key}") for key, writer in enumerate(writers, 1)] == [1, 1, 1]
    assert time.monotonic() - began < IMPATIENCE
    assert rows(client()) == START
    for writer in writers:
        writer.commit()
    assert rows(client()) == [(1, "w1"), (2, "w2"), (3, "w3")]


def test_the_same_row_waits_and_goes_on(client: Clients) -> None:
    a, b = client(), client()
    update(a, 1, "a")
    waiting = Background(lambda: update(b, 1, "b"))
    waiting.assert_lasts()
    a.commit()
    assert waiting.result() == 1
    b.commit()
    assert rows(a)[0] == (1, "b")


def test_lock_timeout_is_131_and_rolls_back(client: Clients) -> None:
    a, b = client(), client()
    update(a, 1, "a")
    update(b, 2, "b")
    run(b, "SET TRANSACTION LOCK WAIT TIMEOUT 200")
    with pytest.raises(dbapi.OperationalError) as caught:
        update(b, 1, "b")
    assert caught.value.errorcode == 131
    assert update(a, 2, "a") == 1
    a.commit()
    assert rows(b) == [(1, "a"), (2, "a"), (3, "three")]


def test_the_classic_deadlock_is_133_and_the_survivor_commits(client: Clients) -> None:
    a, b = client(), client()
    update(a, 1, "a")
    update(b, 2, "b")
    waiting = Background(partial(code_of, a, 2, "a"))
    waiting.assert_lasts()
    began = time.monotonic()
    code = code_of(b, 1, "b")
    assert time.monotonic() - began < IMPATIENCE
    assert {waiting.result(), code} == {0, 133}, "whose statement came first waits, the other closes the circle"
    survivor, name = (a, "a") if code else (b, "b")
    survivor.commit()
    assert rows(client())[:2] == [(1, name), (2, name)]


def code_of(connection: Any, key: int, name: str) -> int:
    """Of the error that the update ends with; 0 when it updates the row."""
    try:
        return update(connection, key, name) - 1
    except dbapi.InternalError as error:
        return int(error.errorcode)


def test_an_inserted_key_is_waited_for(client: Clients) -> None:
    a, b = client(), client()
    run(a, "INSERT INTO T VALUES (4, 'a')")
    waiting = Background(lambda: run(b, "INSERT INTO T VALUES (4, 'b')"))
    waiting.assert_lasts()
    a.rollback()
    assert waiting.result() == 1
    again = Background(lambda: run(a, "INSERT INTO T VALUES (4, 'a')"))
    again.assert_lasts()
    b.commit()
    assert again.code() == 301


def test_for_update_nowait_is_146(client: Clients) -> None:
    a, b = client(), client()
    assert rows(a, "SELECT N FROM T WHERE K = 1 FOR UPDATE") == [("one",)]
    with pytest.raises(dbapi.Error) as caught:
        rows(b, "SELECT N FROM T WHERE K = 1 FOR UPDATE NOWAIT")
    assert caught.value.errorcode == 146
    assert rows(b, "SELECT K FROM T ORDER BY K FOR UPDATE IGNORE LOCKED") == [(2,), (3,)]
    a.rollback()
    assert rows(b, "SELECT N FROM T WHERE K = 1 FOR UPDATE NOWAIT") == [("one",)]


HOLDER = """
import sys, time
from hdbcli import dbapi
host, port, user, password = sys.argv[1:]
connection = dbapi.connect(address=host, port=int(port), user=user, password=password, autocommit=False)
connection.cursor().execute("UPDATE T SET N = 'held' WHERE K = 1")
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("parked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_killing_a_client_frees_its_locks(client: Clients, emulator: Emulator, parked: bool) -> None:
    b = client()
    arguments = [emulator.host, str(emulator.port), emulator.user, emulator.password]
    command = [sys.executable, "-c", HOLDER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        if parked:
            update(b, 2, "b")
        waiting = Background(lambda: update(b, 1, "b"))
        waiting.assert_lasts()
        os.kill(holder.pid, signal.SIGKILL)
        assert waiting.result() == 1
    b.commit()
    assert rows(b) == [(1, "b"), (2, "b" if parked else "two"), (3, "three")]


def is_free(connection: Any, key: int) -> bool:
    try:
        return len(rows(connection, f"SELECT K FROM T WHERE K = {key} FOR UPDATE NOWAIT")) == 1
    except dbapi.Error as error:
        if error.errorcode != 146:
            raise
        return False


def test_killing_a_client_that_waits_leaves_nothing_behind(client: Clients, emulator: Emulator) -> None:
    a = client()
    update(a, 1, "a")
    arguments = [emulator.host, str(emulator.port), emulator.user, emulator.password]
    deleting = "connection.cursor().execute('DELETE FROM T WHERE K = 2')\nprint('ready', flush=True)\n"
    text = HOLDER.replace("connection.cursor()", f"{deleting}connection.cursor()")
    with subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True) as waiter:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "ready\n"
        time.sleep(0.3)
        waiter.kill()
    observer = client(autocommit=True)
    wait_until(lambda: is_free(observer, 2))  # until then the two wait for each other: 133 is right
    assert update(a, 2, "a") == 1
    a.commit()
    assert rows(a) == [(1, "a"), (2, "a"), (3, "three")]


def test_cancel_reaches_a_connection_that_waits(client: Clients) -> None:
    a, b = client(), client()
    update(a, 1, "a")
    waiting = Background(lambda: update(b, 1, "b"))
    waiting.assert_lasts()
    until_ended(waiting, b.cancel)
    assert waiting.code() == 139
    assert update(b, 2, "b") == 1


def test_alter_system_cancel_session_reaches_a_connection_that_waits(client: Clients) -> None:
    a, b, c = client(), client(), client()
    ((number,),) = rows(b, "SELECT CURRENT_CONNECTION FROM DUMMY")
    update(a, 1, "a")
    waiting = Background(lambda: update(b, 1, "b"))
    waiting.assert_lasts()
    until_ended(waiting, lambda: run(c, f"ALTER SYSTEM CANCEL SESSION '{number}'"))
    assert waiting.code() == 139


def until_ended(waiting: Background, cancel: Callable[[], object]) -> None:
    """Cancels a statement that may be on its way to the server still: before it is there nothing is cancelled."""
    deadline = time.monotonic() + IMPATIENCE
    while waiting.is_running:
        assert time.monotonic() < deadline, "no cancel reaches it"
        cancel()
        with suppress(AssertionError):
            waiting.assert_lasts(0.5)


def test_money_is_neither_made_nor_lost(client: Clients) -> None:
    """Threads move amounts between rows in any order; deadlocks and all, what is taken is given."""
    first = client()
    run(first, "DELETE FROM T")
    first.cursor().executemany("INSERT INTO T VALUES (?, ?)", [(key, "100") for key in range(6)])
    first.commit()

    def move(connection: Any, seed: int) -> tuple[int, int]:
        choose, done, deadlocks = random.Random(seed), 0, 0
        while done < 25:
            source, target = choose.sample(range(6), 2)
            amount = choose.randint(1, 9)
            try:
                for key, change in ((source, -amount), (target, amount)):
                    run(connection, "UPDATE T SET N = TO_NVARCHAR(TO_INTEGER(N) + ?) WHERE K = ?", change, key)
                connection.commit()
                done += 1
            except dbapi.Error as error:
                if error.errorcode != 133:
                    raise
                deadlocks += 1
        return done, deadlocks

    started = [Background(partial(move, client(), seed)) for seed in range(4)]
    assert [one.result(60)[0] for one in started] == [25] * 4
    assert sum(int(name) for _, name in rows(client())) == 600


def test_a_serializable_transaction_keeps_its_snapshot_and_fails_with_138(client: Clients) -> None:
    a, b = client(), client()
    run(a, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    assert rows(a, "SELECT CURRENT_TRANSACTION_ISOLATION_LEVEL FROM DUMMY") == [("SERIALIZABLE",)]
    assert rows(a) == START
    update(b, 1, "b")
    b.commit()
    assert rows(a) == START
    with pytest.raises(dbapi.InternalError) as caught:
        update(a, 1, "a")
    assert caught.value.errorcode == 138
    assert update(a, 1, "a") == 1
    a.commit()
    assert rows(b)[0] == (1, "a")


# --- batches: hdbcli sends the same bytes with and without batcherrors ------------------------------------------------

BATCH = [(4, "four"), (1, "dup"), (5, "far too long"), (6, "six")]


@pytest.mark.parametrize("autocommit", [False, True])
def test_batcherrors_keeps_the_good_rows(client: Clients, autocommit: bool) -> None:
    a, b = client(autocommit=autocommit), client()
    cursor = a.cursor()
    with pytest.raises(dbapi.ExecuteManyError) as caught:
        cursor.executemany("INSERT INTO T VALUES (?, ?)", BATCH, batcherrors=True)
    assert [(error.rownumber, error.errorcode) for error in caught.value.errors] == [(2, 301), (3, 274)]
    assert cursor.getrowsaffectedcounts() == (1, 0, 0, 1)
    assert cursor.rowcount == 2
    good = [*START, (4, "four"), (6, "six")]
    assert rows(a) == good
    assert rows(b) == (good if autocommit else START)
    a.commit()
    assert rows(b) == good


def test_batcherrors_numbers_rows_across_packets(client: Clients) -> None:
    a = client(packetSize="65536")
    size, bad = 12_000, [0, 5_999, 11_999]
    batch = [(1 if place in bad else place + 10, "x" * 9) for place in range(size)]
    cursor = a.cursor()
    with pytest.raises(dbapi.ExecuteManyError) as caught:
        cursor.executemany("INSERT INTO T VALUES (?, ?)", batch, batcherrors=True)
    assert [error.rownumber - 1 for error in caught.value.errors] == bad
    assert rows(a, "SELECT COUNT(*) FROM T") == [(size,)]
    assert sum(cursor.getrowsaffectedcounts()) == size - len(bad)
    a.rollback()


def test_batcherrors_without_errors_is_an_ordinary_batch(client: Clients) -> None:
    cursor = client().cursor()
    cursor.executemany("INSERT INTO T VALUES (?, ?)", [(4, "a"), (5, "b")], batcherrors=True)
    assert cursor.getrowsaffectedcounts() == (1, 1)


def test_errors_of_every_length_are_read(client: Clients) -> None:
    """hdbcli crashed where the text of an error ended on a multiple of eight bytes."""
    cursor = client().cursor()
    for length in range(1, 9):
        name = "L" * length
        cursor.execute(f"CREATE COLUMN TABLE {name} (A INTEGER, CONSTRAINT C CHECK (A > 0))")
        for batcherrors in (False, True):
            with pytest.raises((dbapi.Error, dbapi.ExecuteManyError)) as caught:
                cursor.executemany(f"INSERT INTO {name} VALUES (?)", [(-1,), (1,), (-2,)], batcherrors=batcherrors)
            assert name in str(getattr(caught.value, "errors", [caught.value])[0])
        cursor.execute(f"DROP TABLE {name}")


def test_without_batcherrors_the_first_error_is_raised(client: Clients) -> None:
    a = client()
    with pytest.raises(dbapi.IntegrityError) as caught:
        a.cursor().executemany("INSERT INTO T VALUES (?, ?)", BATCH)
    assert caught.value.errorcode == 301
    a.rollback()
    assert rows(a) == START
