"""Transactions with two sessions: isolation, locks, savepoints, cancelling, and result sets that outlive statements."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from emulator_sql import USER, Sql, open_database
from hana_emulator.errors import HanaError
from hana_emulator.sql.database import LOCK_TIMEOUT_SECONDS, Database
from hana_emulator.sql.session import Session

SLOW = "SELECT COUNT(*) FROM T A, T B, T C WHERE A.K + B.K + C.K < 0"


@pytest.fixture
def table(sql: Sql) -> Sql:
    sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY, N NVARCHAR(10))")
    sql.run("INSERT INTO T VALUES (1, 'one')")
    sql.autocommit = False
    return sql


def keys(sql: Sql) -> list[int]:
    return sql.column("SELECT K FROM T ORDER BY K")


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A started thread, and what it raised once joined."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_writes_are_seen_by_others_after_commit_only(table: Sql, other: Sql) -> None:
    table.run("INSERT INTO T VALUES (2, 'two')")
    assert table.session.in_transaction
    assert (keys(table), keys(other)) == ([1, 2], [1])
    table.session.commit()
    assert not table.session.in_transaction
    assert keys(other) == [1, 2]


def test_rollback_undoes_the_transaction(table: Sql, other: Sql) -> None:
    table.run("INSERT INTO T VALUES (2, 'two')")
    table.run("DELETE FROM T WHERE K = 1")
    table.session.rollback()
    assert keys(table) == keys(other) == [1]
    table.session.rollback()
    table.session.commit()


def test_commit_and_rollback_as_statements(table: Sql, other: Sql) -> None:
    table.run("INSERT INTO T VALUES (2, 'two')")
    table.run("COMMIT")
    table.run("INSERT INTO T VALUES (3, 'three')")
    table.run("ROLLBACK")
    assert keys(other) == [1, 2]


def test_failed_statement_leaves_the_transaction(table: Sql, other: Sql) -> None:
    table.run("INSERT INTO T VALUES (2, 'two')")
    with pytest.raises(HanaError) as caught:
        table.many("INSERT INTO T VALUES (?, 'x')", [(3,), (1,)])
    assert (caught.value.code, caught.value.rolls_back) == (301, False)
    assert table.code("SELECT NOSUCH FROM T") == 260
    table.run("INSERT INTO T VALUES (4, 'four')")
    table.session.commit()
    assert keys(other) == [1, 2, 4]


def test_failed_autocommit_statement_ends_its_transaction(table: Sql, other: Sql) -> None:
    table.autocommit = True
    assert table.code("INSERT INTO T VALUES (1, 'again')") == 301
    assert not table.session.in_transaction
    assert other.run("INSERT INTO T VALUES (2, 'two')") == 1


def test_definition_commits_what_came_before(table: Sql, other: Sql) -> None:
    table.run("INSERT INTO T VALUES (2, 'two')")
    table.run("CREATE TABLE U (A INTEGER)")
    table.session.rollback()
    assert keys(other) == [1, 2]


def test_reading_opens_no_transaction(table: Sql, other: Sql) -> None:
    """READ COMMITTED: every SELECT sees what is committed when it starts."""
    assert keys(table) == [1]
    assert not table.session.in_transaction
    other.run("INSERT INTO T VALUES (2, 'two')")
    assert keys(table) == [1, 2]


def test_second_writer_waits_for_the_first(table: Sql, database: Database) -> None:
    database.lock_timeout = 10
    table.run("UPDATE T SET N = 'mine'")
    second = Sql(database.connect(USER))
    thread, raised = in_thread(lambda: second.run("UPDATE T SET N = N || '+'"))
    time.sleep(0.15)
    assert thread.is_alive()
    table.session.commit()
    thread.join(60)
    assert not raised
    assert table.value("SELECT N FROM T") == "mine+"


def test_lock_wait_ends_with_131_and_rolls_back(table: Sql, other: Sql) -> None:
    table.run("UPDATE T SET N = 'mine'")
    started = time.monotonic()
    with pytest.raises(HanaError) as caught:
        other.run("UPDATE T SET N = 'theirs'")
    assert (caught.value.code, caught.value.rolls_back) == (131, True)
    assert 0.25 <= time.monotonic() - started < LOCK_TIMEOUT_SECONDS, "that of this database"
    assert not other.session.in_transaction
    table.session.commit()
    assert other.run("UPDATE T SET N = 'theirs'") == 1


def test_lock_wait_is_ten_seconds_unless_told_otherwise() -> None:
    assert LOCK_TIMEOUT_SECONDS >= 10


def test_select_for_update_and_lock_table_take_the_lock(table: Sql, other: Sql) -> None:
    other.run("SET TRANSACTION LOCK WAIT TIMEOUT 50")
    table.rows("SELECT K FROM T WHERE K = 1 FOR UPDATE")
    assert other.code("UPDATE T SET N = 'x'") == 131
    table.session.rollback()
    table.run("LOCK TABLE T IN EXCLUSIVE MODE")
    assert other.code("UPDATE T SET N = 'x'") == 131
    table.session.commit()
    other.run("UPDATE T SET N = 'x'")


def test_closing_rolls_back_and_frees_the_lock(table: Sql, other: Sql) -> None:
    table.run("INSERT INTO T VALUES (2, 'two')")
    table.session.close()
    table.session.close()
    other.run("INSERT INTO T VALUES (3, 'three')")
    assert keys(other) == [1, 3]


def test_savepoints(table: Sql) -> None:
    table.run("INSERT INTO T VALUES (2, 'two')")
    table.run("SAVEPOINT A")
    table.run("INSERT INTO T VALUES (3, 'three')")
    table.run('SAVEPOINT "b"')
    table.run("INSERT INTO T VALUES (4, 'four')")
    table.run('ROLLBACK TO SAVEPOINT "b"')
    assert keys(table) == [1, 2, 3]
    table.run("RELEASE SAVEPOINT A")
    assert table.code("ROLLBACK TO SAVEPOINT A") == 128
    assert table.code("RELEASE SAVEPOINT NOSUCH") == 128
    table.session.commit()
    assert keys(table) == [1, 2, 3]


def test_cancel_stops_a_running_statement(table: Sql, database: Database) -> None:
    table.many("INSERT INTO T VALUES (?, 'x')", [(number,) for number in range(2, 1500)])
    table.session.commit()
    thread, raised = in_thread(lambda: table.rows(SLOW))
    wait_until(lambda: table.session._running)
    time.sleep(0.1)
    Sql(database.connect(USER)).run(f"ALTER SYSTEM CANCEL SESSION '{table.session.connection_id}'")
    thread.join(60)
    assert not thread.is_alive()
    (error,) = raised
    assert isinstance(error, HanaError)
    assert error.code == 139
    assert keys(table)[:2] == [1, 2]


def test_cancel_stops_waiting_for_a_lock(table: Sql, database: Database) -> None:
    database.lock_timeout = 30
    table.run("UPDATE T SET N = 'mine'")
    waiting = Sql(database.connect(USER))
    thread, raised = in_thread(lambda: waiting.run("UPDATE T SET N = 'theirs'"))
    wait_until(lambda: waiting.session._running)
    time.sleep(0.1)
    waiting.session.cancel()
    thread.join(60)
    assert [getattr(error, "code", None) for error in raised] == [139]


@pytest.fixture
def begun(table: Sql) -> Sql:
    """A transaction whose first write (K = 1000) is done; T has 300 committed rows."""
    table.many("INSERT INTO T VALUES (?, 'x')", [(number,) for number in range(2, 301)])
    table.session.commit()
    table.run("INSERT INTO T VALUES (1000, 'first')")
    return table


@contextmanager
def cancelled_while_running(session: Session) -> Iterator[None]:
    """Cancels inside SQLite after 100 steps of its machine: in the middle of a statement over 300 rows, every time."""
    connection = session._connection
    connection.set_progress_handler(session.cancel, 100)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


@pytest.mark.parametrize("statement", ["UPDATE T SET N = 'second'", "DELETE FROM T WHERE N = 'x'", SLOW])
def test_cancel_rolls_the_whole_transaction_back(begun: Sql, other: Sql, statement: str) -> None:
    with cancelled_while_running(begun.session), pytest.raises(HanaError) as caught:
        begun.rows(statement) if statement == SLOW else begun.run(statement)
    assert (caught.value.code, caught.value.rolls_back) == (139, True)
    assert "transaction rolled back" in caught.value.text
    assert not begun.session.in_transaction
    assert keys(begun) == keys(other) == list(range(1, 301))
    assert other.run("UPDATE T SET N = 'theirs'") == 300


@pytest.mark.parametrize(("end", "left"), [("rollback", []), ("commit", [(2000, "third")])])
def test_writes_after_a_cancelled_one_are_a_transaction_of_their_own(
    begun: Sql, other: Sql, end: str, left: list[tuple[int, str]]
) -> None:
    with cancelled_while_running(begun.session):
        assert begun.code("UPDATE T SET N = 'second'") == 139
    begun.run("INSERT INTO T VALUES (2000, 'third')")
    assert other.value("SELECT COUNT(*) FROM T") == 300
    getattr(begun.session, end)()
    assert other.rows("SELECT K, N FROM T WHERE K > 1 AND N <> 'x'") == left
    assert other.run("INSERT INTO T VALUES (3000, 'free')") == 1


@pytest.mark.parametrize("end", ["rollback", "commit"])
def test_ending_a_transaction_after_its_cancelled_write_does_nothing(begun: Sql, other: Sql, end: str) -> None:
    with cancelled_while_running(begun.session):
        assert begun.code("UPDATE T SET N = 'second'") == 139
    getattr(begun.session, end)()
    assert other.rows("SELECT K FROM T WHERE N IN ('first', 'second')") == []
    assert other.run("INSERT INTO T VALUES (3000, 'free')") == 1


def test_cancelled_first_write_leaves_no_transaction(begun: Sql, other: Sql) -> None:
    begun.session.commit()
    with cancelled_while_running(begun.session):
        assert begun.code("UPDATE T SET N = 'second'") == 139
    assert not begun.session.in_transaction
    assert other.run("UPDATE T SET N = 'theirs'") == 301


def test_savepoint_is_gone_after_a_cancelled_write(begun: Sql, other: Sql) -> None:
    begun.run("SAVEPOINT A")
    with cancelled_while_running(begun.session):
        assert begun.code("UPDATE T SET N = 'second'") == 139
    assert begun.code("ROLLBACK TO SAVEPOINT A") == 128
    assert other.run("DELETE FROM T") == 300


def test_full_disk_rolls_the_whole_transaction_back(begun: Sql, other: Sql) -> None:
    begun.run("ALTER TABLE T ADD (B BLOB)")
    begun.run("INSERT INTO T (K) VALUES (2000)")
    connection = begun.session._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(HanaError) as caught:
        begun.run("INSERT INTO T (K, B) VALUES (?, ?)", 2001, bytes(100_000))
    assert (caught.value.code, caught.value.rolls_back) == (2048, True)
    assert "full; the transaction was rolled back" in caught.value.text
    assert not begun.session.in_transaction
    begun.run("INSERT INTO T (K) VALUES (2002)")
    begun.session.rollback()
    assert other.rows("SELECT K FROM T WHERE K >= 2000") == []
    assert other.run("INSERT INTO T (K) VALUES (2003)") == 1


def test_lack_of_memory_is_code_4_and_frees_the_lock(begun: Sql, other: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """sqlite3 reports it as MemoryError, after SQLite has undone the transaction."""

    def fail(*_: object) -> int:
        begun.session._connection.execute("ROLLBACK")
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(begun.session, "_write_rows", fail)
        assert begun.code("DELETE FROM T") == 4
    assert not begun.session.in_transaction
    assert other.run("DELETE FROM T") == 300


def test_cancel_of_an_idle_or_unknown_session(table: Sql, other: Sql) -> None:
    table.session.cancel()
    assert keys(table) == [1]
    assert other.code("ALTER SYSTEM CANCEL SESSION '1'") == 1093
    assert other.code("ALTER SYSTEM CANCEL SESSION 'x'") == 1093


@pytest.fixture
def filled(table: Sql) -> Sql:
    table.many("INSERT INTO T VALUES (?, 'x')", [(number,) for number in range(2, 10_001)])
    table.session.commit()
    return table


def test_open_result_sets_survive_everything(filled: Sql, other: Sql) -> None:
    statement = filled.prepare("SELECT K FROM T ORDER BY K")
    results = [filled.session.execute(statement, [()], autocommit=False).rows for _ in range(3)]
    assert all(rows is not None for rows in results)
    firsts = [next(rows)[0] for rows in results if rows is not None]
    assert firsts == [1, 1, 1]
    filled.run("DELETE FROM T WHERE K > 5000")
    filled.session.commit()
    other.run("INSERT INTO T VALUES (20000, 'y')")
    other.run("DROP TABLE T")
    for rows in results:
        assert rows is not None
        assert [row[0] for row in rows] == list(range(2, 10_001))


def test_result_set_inside_a_transaction_keeps_its_rows(filled: Sql) -> None:
    filled.run("DELETE FROM T WHERE K <= 10")
    rows = filled.session.execute(filled.prepare("SELECT K FROM T ORDER BY K"), [()], autocommit=False).rows
    assert rows is not None
    assert next(rows)[0] == 11
    filled.session.rollback()
    assert len(list(rows)) == 9_989
    assert filled.value("SELECT COUNT(*) FROM T") == 10_000


def test_connections_of_long_results_are_used_again(filled: Sql) -> None:
    for _ in range(2):
        assert len(filled.rows("SELECT K FROM T")) == 10_000
    assert len(filled.session._spare) == 1


def test_error_in_the_middle_of_a_result_has_its_code(filled: Sql) -> None:
    filled.run("UPDATE T SET N = '1' WHERE K < 9000")
    filled.session.commit()
    assert filled.code("SELECT CAST(N AS INTEGER) FROM T ORDER BY K") == 339
    assert filled.value("SELECT COUNT(*) FROM T") == 10_000


def test_many_writers_lose_nothing(database: Database, table: Sql) -> None:
    database.lock_timeout = 30
    table.run("UPDATE T SET N = '0'")
    table.session.commit()
    sessions = [Sql(database.connect(USER)) for _ in range(4)]

    def work(session: Sql) -> None:
        for _ in range(25):
            session.run("UPDATE T SET N = TO_NVARCHAR(TO_INTEGER(N) + 1) WHERE K = 1")

    started = [in_thread(lambda session=session: work(session)) for session in sessions]  # type: ignore[misc]
    for thread, raised in started:
        thread.join(20)
        assert not raised
    assert table.value("SELECT N FROM T") == "100"


def test_lock_held_by_a_foreign_process_is_131(table: Sql, database: Database) -> None:
    foreign = sqlite3.connect(database.folder / "hana.sqlite", isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    fresh = Sql(database.connect(USER))
    assert fresh.code("INSERT INTO T VALUES (5, 'x')") == 131
    foreign.execute("ROLLBACK")
    foreign.close()
    assert fresh.run("INSERT INTO T VALUES (5, 'x')") == 1


def test_closing_the_database_closes_its_sessions() -> None:
    database = open_database()
    sql = Sql(database.connect(USER))
    sql.autocommit = False
    sql.run("CREATE TABLE T (K INTEGER)")
    sql.run("INSERT INTO T VALUES (1)")
    database.close()
    assert not sql.session.in_transaction
