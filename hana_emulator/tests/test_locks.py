"""Row locks of the emulator, session against session without a socket: who waits for whom, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from emulator_background import Background
from emulator_sql import USER, Sql, open_database, transacting, vector
from hana_emulator.errors import HanaError
from hana_emulator.sql.database import Database

START = [(1, "one", 10), (2, "two", 20), (3, "three", 30)]


@pytest.fixture
def a(patient: Database) -> Sql:
    sql = transacting(patient)
    sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY, N NVARCHAR(9), Q INTEGER UNIQUE)")
    sql.many("INSERT INTO T VALUES (?, ?, ?)", START)
    sql.session.commit()
    return sql


@pytest.fixture
def b(a: Sql, patient: Database) -> Sql:
    return transacting(patient)


@pytest.fixture
def c(a: Sql, patient: Database) -> Sql:
    return transacting(patient)


def content(sql: Sql) -> list[tuple[object, ...]]:
    return sql.rows("SELECT K, N, Q FROM T ORDER BY K")


def update(sql: Sql, key: int, name: str) -> int:
    return sql.run("UPDATE T SET N = ? WHERE K = ?", name, key)


def commit(*sessions: Sql) -> None:
    for sql in sessions:
        sql.session.commit()


def test_different_rows_of_one_table_are_written_side_by_side(a: Sql, b: Sql, c: Sql) -> None:
    assert [update(a, 1, "a"), update(b, 2, "b"), update(a, 3, "a3")] == [1, 1, 1]
    assert b.run("INSERT INTO T VALUES (4, 'four', 40)") == 1
    assert a.run("INSERT INTO T VALUES (5, 'five', 50)") == 1
    assert content(a) == [(1, "a", 10), (2, "two", 20), (3, "a3", 30), (5, "five", 50)]
    assert content(b) == [(1, "one", 10), (2, "b", 20), (3, "three", 30), (4, "four", 40)]
    assert content(c) == START
    commit(b)
    assert content(c) == [(1, "one", 10), (2, "b", 20), (3, "three", 30), (4, "four", 40)]
    commit(a)
    assert content(c) == [(1, "a", 10), (2, "b", 20), (3, "a3", 30), (4, "four", 40), (5, "five", 50)]


def test_a_rolled_back_neighbour_leaves_nothing(a: Sql, b: Sql) -> None:
    update(a, 1, "a")
    a.run("DELETE FROM T WHERE K = 3")
    b.run("INSERT INTO T VALUES (4, 'four', 40)")
    a.run("INSERT INTO T VALUES (5, 'five', 50)")
    b.session.rollback()
    commit(a)
    assert content(b) == [(1, "a", 10), (2, "two", 20), (5, "five", 50)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_same_row_waits_and_then_goes_on(a: Sql, b: Sql, end: str) -> None:
    a.run("UPDATE T SET N = N || 'A' WHERE K = 1")
    waiting = Background(lambda: b.run("UPDATE T SET N = N || 'B' WHERE K = 1"))
    waiting.assert_waits()
    getattr(a.session, end)()
    assert waiting.result() == 1
    commit(b)
    assert content(a)[0] == (1, "oneAB" if end == "commit" else "oneB", 10)


def test_a_waiter_sees_the_row_as_it_has_become(a: Sql, b: Sql) -> None:
    """READ COMMITTED: the condition is looked at again after the wait."""
    a.run("UPDATE T SET Q = 99 WHERE K = 1")
    waiting = Background(lambda: b.run("DELETE FROM T WHERE Q = 10"))
    waiting.assert_waits()
    commit(a)
    assert waiting.result() == 0


def test_rows_that_do_not_match_any_more_are_not_waited_for(a: Sql, b: Sql) -> None:
    a.run("UPDATE T SET Q = 99 WHERE K = 1")
    assert b.run("DELETE FROM T WHERE Q = 99") == 0
    assert b.run("DELETE FROM T WHERE Q = 20") == 1


def test_lock_timeout_is_131_and_ends_the_transaction(a: Sql, b: Sql) -> None:
    update(a, 1, "a")
    update(b, 2, "b")
    b.run("SET TRANSACTION LOCK WAIT TIMEOUT 200")
    with pytest.raises(HanaError) as caught:
        update(b, 1, "b")
    assert (caught.value.code, caught.value.rolls_back) == (131, True)
    assert not b.session.in_transaction
    assert update(a, 2, "a") == 1
    commit(a)
    assert content(b)[:2] == [(1, "a", 10), (2, "a", 20)]


def test_a_lock_wait_timeout_of_nonsense_is_refused(a: Sql) -> None:
    assert a.code("SET TRANSACTION LOCK WAIT TIMEOUT -1") == 306
    assert a.code("SET TRANSACTION LOCK WAIT TIMEOUT") == 257


def test_two_rows_in_opposite_order_deadlock_and_one_survives(a: Sql, b: Sql, c: Sql) -> None:
    update(a, 1, "a")
    update(b, 2, "b")
    waiting = Background(lambda: update(a, 2, "a"))
    waiting.assert_waits()
    with pytest.raises(HanaError) as caught:
        update(b, 1, "b")
    assert (caught.value.code, caught.value.rolls_back) == (133, True)
    assert waiting.result() == 1
    commit(a)
    assert content(c)[:2] == [(1, "a", 10), (2, "a", 20)]
    assert update(b, 1, "again") == 1


def test_a_ring_of_three_deadlocks(a: Sql, b: Sql, c: Sql) -> None:
    for key, sql in enumerate((a, b, c), 1):
        update(sql, key, "mine")
    first = Background(lambda: update(a, 2, "a"))
    first.assert_waits()
    second = Background(lambda: update(b, 3, "b"))
    second.assert_waits()
    with pytest.raises(HanaError) as caught:
        update(c, 1, "c")
    assert caught.value.code == 133
    assert second.result() == 1
    first.assert_waits()
    commit(b)
    assert first.result() == 1
    commit(a)
    assert content(c) == [(1, "mine", 10), (2, "a", 20), (3, "b", 30)]


def test_waiting_in_a_queue_is_no_deadlock(a: Sql, b: Sql, c: Sql) -> None:
    update(a, 1, "a")
    waiting = [Background(lambda: update(b, 1, "b")), Background(lambda: update(c, 1, "c"))]
    for one in waiting:
        one.assert_waits()
    commit(a)
    while any(one.is_running for one in waiting):
        commit(*[sql for sql, one in zip((b, c), waiting, strict=True) if not one.is_running])
    assert [one.result() for one in waiting] == [1, 1]


# --- unique keys ------------------------------------------------------------------------------------------------------

INSERTS = ["INSERT INTO T VALUES (4, 'b', 41)", "INSERT INTO T VALUES (5, 'b', 40)", "UPDATE T SET Q = 40 WHERE K = 1"]


@pytest.mark.parametrize("text", INSERTS)
def test_a_key_that_another_has_inserted_is_taken_if_that_commits(a: Sql, b: Sql, text: str) -> None:
    a.run("INSERT INTO T VALUES (4, 'a', 40)")
    waiting = Background(lambda: b.run(text))
    waiting.assert_waits()
    commit(a)
    assert waiting.code() == 301
    assert content(b) == [*START, (4, "a", 40)]


@pytest.mark.parametrize("text", INSERTS)
def test_a_key_that_another_has_inserted_is_free_if_that_rolls_back(a: Sql, b: Sql, text: str) -> None:
    a.run("INSERT INTO T VALUES (4, 'a', 40)")
    waiting = Background(lambda: b.run(text))
    waiting.assert_waits()
    a.session.rollback()
    assert waiting.result() == 1


DELETE, MOVE = "DELETE FROM T WHERE K = 1", "UPDATE T SET K = 11, Q = 12 WHERE K = 1"
PRIMARY, UNIQUE = "INSERT INTO T VALUES (1, 'b', 99)", "INSERT INTO T VALUES (7, 'b', 10)"


@pytest.mark.parametrize(
    ("text", "insert", "end"),
    [
        (DELETE, PRIMARY, "commit"),
        (MOVE, UNIQUE, "rollback"),
        pytest.param(DELETE, PRIMARY, "rollback", marks=pytest.mark.slow),
        pytest.param(DELETE, UNIQUE, "commit", marks=pytest.mark.slow),
        pytest.param(DELETE, UNIQUE, "rollback", marks=pytest.mark.slow),
        pytest.param(MOVE, PRIMARY, "commit", marks=pytest.mark.slow),
        pytest.param(MOVE, PRIMARY, "rollback", marks=pytest.mark.slow),
        pytest.param(MOVE, UNIQUE, "commit", marks=pytest.mark.slow),
    ],
)
def test_a_key_that_another_gives_up_is_waited_for(a: Sql, b: Sql, text: str, insert: str, end: str) -> None:
    a.run(text)
    waiting = Background(lambda: b.run(insert))
    waiting.assert_waits()
    getattr(a.session, end)()
    if end == "commit":
        assert waiting.result() == 1
    else:
        assert waiting.code() == 301


def test_a_key_that_nobody_gives_up_is_refused_at_once(a: Sql, b: Sql) -> None:
    update(a, 1, "new name")
    a.run("DELETE FROM T WHERE K = 3")
    assert b.code("INSERT INTO T VALUES (1, 'b', 99)") == 301
    assert b.code("INSERT INTO T VALUES (2, 'b', 99)") == 301


def test_null_in_a_key_clashes_with_nothing(a: Sql, b: Sql) -> None:
    a.run("INSERT INTO T VALUES (4, 'a', NULL)")
    assert b.run("INSERT INTO T VALUES (5, 'b', NULL)") == 1


def test_rows_that_exchange_keys_come_back_from_parking(a: Sql, b: Sql) -> None:
    a.run("UPDATE T SET K = 100, Q = 100 WHERE K = 1")
    a.run("UPDATE T SET K = 1, Q = 10 WHERE K = 2")
    a.run("UPDATE T SET K = 2, Q = 20 WHERE K = 100")
    update(b, 3, "b")
    assert content(a) == [(1, "two", 10), (2, "one", 20), (3, "three", 30)]
    commit(b, a)
    assert content(b) == [(1, "two", 10), (2, "one", 20), (3, "b", 30)]


def test_upsert_waits_for_an_uncommitted_row_of_its_key(a: Sql, b: Sql) -> None:
    a.run("INSERT INTO T VALUES (4, 'a', 40)")
    waiting = Background(lambda: b.run("UPSERT T VALUES (4, 'b', 44) WITH PRIMARY KEY"))
    waiting.assert_waits()
    commit(a)
    assert waiting.result() == 1
    commit(b)
    assert content(a) == [*START, (4, "b", 44)]


# --- parking ----------------------------------------------------------------------------------------------------------


def test_savepoints_survive_parking(a: Sql, b: Sql, c: Sql) -> None:
    a.run("INSERT INTO T VALUES (4, 'a', 40)")
    a.run("SAVEPOINT S")
    a.run("UPDATE T SET N = 'changed' WHERE K IN (1, 4)")
    a.run("SAVEPOINT S")
    a.run("DELETE FROM T WHERE K = 4")
    a.run("INSERT INTO T VALUES (5, 'five', 50)")
    update(b, 2, "b")
    assert content(a)[0] == (1, "changed", 10)
    assert [row[0] for row in content(a)] == [1, 2, 3, 5]
    update(b, 3, "b")
    a.run("ROLLBACK TO SAVEPOINT S")
    assert content(a) == [(1, "changed", 10), (2, "two", 20), (3, "three", 30), (4, "changed", 40)]
    b.run("INSERT INTO T VALUES (6, 'six', 60)")
    a.run("RELEASE SAVEPOINT S")
    a.run("ROLLBACK TO SAVEPOINT S")
    assert content(a) == [*START, (4, "a", 40)]
    commit(a, b)
    assert content(c) == [(1, "one", 10), (2, "b", 20), (3, "b", 30), (4, "a", 40), (6, "six", 60)]


def test_identity_values_of_parked_transactions_do_not_collide(a: Sql, b: Sql, c: Sql) -> None:
    a.run("CREATE TABLE I (ID BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, N NVARCHAR(9))")
    for _ in range(2):
        a.run("INSERT INTO I (N) VALUES ('a')")
        b.run("INSERT INTO I (N) VALUES ('b')")
    assert a.rows("SELECT ID FROM I ORDER BY ID") == [(1,), (3,)]
    assert b.rows("SELECT ID FROM I ORDER BY ID") == [(2,), (4,)]
    b.session.rollback()
    commit(a)
    c.run("INSERT INTO I (N) VALUES ('c')")
    assert c.rows("SELECT ID, N FROM I ORDER BY ID") == [(1, "a"), (3, "a"), (5, "c")]


@pytest.mark.parametrize("value", [7, 20])
def test_a_chosen_identity_value_is_locked_as_any_key(a: Sql, b: Sql, value: int) -> None:
    """Below and above what has been given out."""
    a.run("CREATE TABLE I (ID BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, N NVARCHAR(9))")
    a.run("INSERT INTO I VALUES (10, 'first')")
    commit(a)
    a.run("INSERT INTO I VALUES (?, 'a')", value)
    b.run("INSERT INTO I (N) VALUES ('b')")
    a.run("INSERT INTO I VALUES (?, 'a')", value + 5)
    b.run("INSERT INTO I (N) VALUES ('b')")
    assert a.column("SELECT ID FROM I ORDER BY ID") == sorted([10, value, value + 5])
    waiting = Background(lambda: b.run("INSERT INTO I VALUES (?, 'b')", value))
    waiting.assert_waits()
    commit(a)
    assert waiting.code() == 301


def test_a_big_batch_survives_parking_exactly(a: Sql, b: Sql) -> None:
    a.run("CREATE TABLE V (K INTEGER PRIMARY KEY, V REAL_VECTOR(2), B BLOB, D DECIMAL(9,2), X NCLOB)")
    rows = [(key, vector(key, 1), bytes([key % 256]) * 5, f"{key}.50", f"text {key}") for key in range(3_000)]
    a.many("INSERT INTO V VALUES (?, ?, ?, ?, ?)", rows)
    b.many("INSERT INTO V VALUES (?, ?, ?, ?, ?)", [(key + 5_000, None, None, None, None) for key in range(10)])
    a.run("DELETE FROM V WHERE K >= 2990")
    b.run("UPDATE V SET X = 'b'")
    commit(a)
    assert b.value("SELECT COUNT(*) FROM V") == 3_000
    assert a.rows("SELECT * FROM V ORDER BY K") == rows[:2990]
    commit(b)
    assert a.value("SELECT COUNT(*) FROM V WHERE X LIKE 'b'") == 10


def test_search_sees_ones_own_vectors_and_nobody_elses(a: Sql, b: Sql) -> None:
    a.run("CREATE TABLE V (K INTEGER PRIMARY KEY, V REAL_VECTOR(2))")
    a.run("INSERT INTO V VALUES (1, ?)", vector(1, 0))
    b.run("INSERT INTO V VALUES (2, ?)", vector(0, 1))
    text = "SELECT TOP 5 K, COSINE_SIMILARITY(V, TO_REAL_VECTOR('[1, 0]')) AS S FROM V ORDER BY S DESC"
    assert [row[0] for row in a.rows(text)] == [1]
    assert [row[0] for row in b.rows(text)] == [2]
    commit(a)
    assert [row[0] for row in b.rows(text)] == [1, 2]


def test_triggers_that_keep_constraints_rest_while_rows_are_put_back(a: Sql, b: Sql, patient: Database) -> None:
    a.run("CREATE TABLE LOG (INSERTED INTEGER)")
    a.run("INSERT INTO LOG VALUES (0)")
    commit(a)
    connection = patient.open_connection(a.session.context)
    insert = """AFTER INSERT ON "~S.T" WHEN owl_enforcing() BEGIN UPDATE "~S.LOG" SET INSERTED = INSERTED + 1; END"""
    connection.execute(f"CREATE TRIGGER follow {insert}")
    connection.close()
    a.run("INSERT INTO T VALUES (4, 'a', 40)")
    update(b, 1, "b")
    assert a.column("SELECT INSERTED FROM LOG") == [1]
    commit(b, a)
    assert b.column("SELECT INSERTED FROM LOG") == [1]


def test_a_transaction_that_cannot_be_put_back_is_rolled_back(a: Sql, b: Sql, patient: Database) -> None:
    """A row that came from nowhere, behind the locks' back, takes the key meanwhile."""
    a.run("INSERT INTO T VALUES (4, 'a', 40)")
    update(b, 1, "b")
    commit(b)
    foreign = patient.open_connection(b.session.context)
    foreign.execute("INSERT INTO \"~S.T\" (K, N, Q) VALUES (4, 'x', 44)")
    foreign.close()
    with pytest.raises(HanaError) as caught:
        update(a, 2, "a")
    assert (caught.value.code, caught.value.rolls_back) == (129, True)
    assert not a.session.in_transaction
    assert update(a, 2, "a") == 1


def test_a_folder_of_an_older_emulator_gets_its_triggers(tmp_path: Path) -> None:
    first = open_database(tmp_path)
    Sql(first.connect(USER)).run("CREATE TABLE T (K INTEGER PRIMARY KEY)")
    Sql(first.connect(USER)).run("INSERT INTO T VALUES (1)")
    connection = first.open_connection(first.connect(USER).context)
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f'DROP TRIGGER "{name}"')
    connection.close()
    first.close()
    second = open_database(tmp_path, lock_timeout=0.0)
    a, b = transacting(second), transacting(second)
    a.run("DELETE FROM T WHERE K = 1")
    assert b.code("DELETE FROM T WHERE K = 1") == 131
    second.close()


def test_definitions_wait_for_open_writers(a: Sql, b: Sql) -> None:
    update(a, 1, "a")
    for text in ("ALTER TABLE T ADD (Z INTEGER)", "TRUNCATE TABLE T", "DROP TABLE T", "CREATE INDEX I ON T (N)"):
        b.run("SET TRANSACTION LOCK WAIT TIMEOUT 10")
        assert b.code(text) == 131
    b.run("SET TRANSACTION LOCK WAIT TIMEOUT 10000")
    b.run("CREATE TABLE OTHER (K INTEGER)")
    waiting = Background(lambda: b.run("ALTER TABLE T ADD (Z INTEGER)"))
    waiting.assert_waits()
    update(a, 2, "a")
    commit(a)
    waiting.result()
    assert a.rows("SELECT K, Z FROM T ORDER BY K") == [(1, None), (2, None), (3, None)]
    assert update(a, 3, "z") == 1


def test_a_statement_that_waited_for_a_definition_is_planned_anew(a: Sql, b: Sql) -> None:
    prepared = b.prepare("INSERT INTO T VALUES (4, 'b', 40)")
    a.run("LOCK TABLE T IN EXCLUSIVE MODE")
    waiting = Background(lambda: b.session.execute(prepared, [()], autocommit=True))
    waiting.assert_waits()
    a.run("ALTER TABLE T ADD (Z INTEGER)")
    assert waiting.code() == 268


def test_renamed_and_altered_tables_keep_their_locks(a: Sql, b: Sql) -> None:
    a.run("RENAME TABLE T TO R")
    a.run("ALTER TABLE R ADD (Z INTEGER)")
    a.run("RENAME COLUMN R.K TO KEY1")
    a.run("UPDATE R SET Z = 1 WHERE KEY1 = 1")
    waiting = Background(lambda: b.run("UPDATE R SET Z = 2 WHERE KEY1 <= 2"))
    waiting.assert_waits()
    assert a.run("UPDATE R SET Z = 1 WHERE KEY1 = 3") == 1
    commit(a)
    assert waiting.result() == 2
    commit(b)
    assert a.rows("SELECT KEY1, Z FROM R ORDER BY KEY1") == [(1, 2), (2, 2), (3, 1)]


def test_tables_whose_columns_hide_the_row_number(a: Sql, b: Sql) -> None:
    a.run('CREATE TABLE R ("_ROWID_" INTEGER PRIMARY KEY, "ROWID" INTEGER)')
    a.many("INSERT INTO R VALUES (?, 7)", [(1,), (2,)])
    commit(a)
    a.run('UPDATE R SET "ROWID" = 8 WHERE "_ROWID_" = 1')
    assert b.run('UPDATE R SET "ROWID" = 9 WHERE "_ROWID_" = 2') == 1
    commit(a, b)
    assert a.rows("SELECT * FROM R ORDER BY 1") == [(1, 8), (2, 9)]
    assert a.code("SELECT * FROM R FOR UPDATE") == 7
    assert a.code('CREATE TABLE X ("_ROWID_" INTEGER, "ROWID" INTEGER, OID INTEGER)') == 7


# --- FOR UPDATE and LOCK TABLE ----------------------------------------------------------------------------------------


def test_for_update_locks_the_selected_rows_only(a: Sql, b: Sql) -> None:
    assert a.rows("SELECT N FROM T WHERE K = 1 FOR UPDATE") == [("one",)]
    assert update(b, 2, "b") == 1
    waiting = Background(lambda: update(b, 1, "b"))
    waiting.assert_waits()
    assert a.rows("SELECT N FROM T WHERE K = 1") == [("one",)]
    commit(a)
    assert waiting.result() == 1


def test_for_update_waits_for_a_writer_and_reads_what_it_left(a: Sql, b: Sql) -> None:
    update(a, 1, "a")
    waiting = Background(lambda: b.rows("SELECT N FROM T WHERE K = 1 FOR UPDATE"))
    waiting.assert_waits()
    commit(a)
    assert waiting.result() == [("a",)]


def test_for_update_nowait_and_wait(a: Sql, b: Sql) -> None:
    update(a, 1, "a")
    update(b, 2, "b")
    with pytest.raises(HanaError) as caught:
        b.rows("SELECT N FROM T WHERE K = 1 FOR UPDATE NOWAIT")
    assert (caught.value.code, caught.value.rolls_back) == (146, False)
    assert content(b)[1] == (2, "b", 20)
    assert b.code("SELECT N FROM T WHERE K = 1 FOR UPDATE WAIT 0") == 146
    assert b.code("SELECT N FROM T WHERE K = 1 FOR UPDATE WAIT 1") == 131
    assert b.rows("SELECT N FROM T WHERE K = 3 FOR UPDATE NOWAIT") == [("three",)]


def test_for_update_ignore_locked_passes_over_locked_rows(a: Sql, b: Sql) -> None:
    a.rows("SELECT K FROM T WHERE K <= 2 FOR UPDATE")
    text = "SELECT K FROM T ORDER BY K FOR UPDATE IGNORE LOCKED"
    assert b.rows(text) == [(3,)]
    assert a.code("SELECT K FROM T FOR UPDATE NOWAIT") == 146
    commit(a)
    assert b.rows(text) == [(1,), (2,), (3,)]


def test_for_update_of_names_the_table_to_lock(a: Sql, b: Sql) -> None:
    a.run("CREATE TABLE U (K INTEGER PRIMARY KEY, M NVARCHAR(9))")
    a.many("INSERT INTO U VALUES (?, ?)", [(1, "eins"), (2, "zwei")])
    commit(a)
    joined = "SELECT T.N, X.M FROM T LEFT JOIN U AS X ON X.K = T.K WHERE T.K IN (1, 3) ORDER BY T.K FOR UPDATE"
    assert a.rows(f"{joined} OF X.M") == [("one", "eins"), ("three", None)]
    assert update(b, 1, "b") == 1
    assert b.code("SELECT K FROM U WHERE K = 1 FOR UPDATE NOWAIT") == 146
    commit(a, b)
    assert a.rows(joined) == [("b", "eins"), ("three", None)]
    assert b.code("SELECT K FROM T WHERE K = 3 FOR UPDATE NOWAIT") == 146
    assert b.rows("SELECT M FROM U WHERE K = 2 FOR UPDATE NOWAIT") == [("zwei",)]
    assert a.code(f"{joined} OF NOSUCH") == 260


def test_for_update_with_parameters_limit_and_names_that_look_like_it(a: Sql, b: Sql) -> None:
    text = 'SELECT K AS "FOR UPDATE" FROM T WHERE N <> ? ORDER BY K LIMIT ? FOR UPDATE'
    assert a.rows(text, "FOR UPDATE", 1) == [(1,)]
    assert b.rows(text + " IGNORE LOCKED", "one", 5) == [(2,), (3,)]
    assert [column.name for column in a.prepare(text).columns] == ["FOR UPDATE"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("SELECT COUNT(*) FROM T FOR UPDATE", 7),
        ("SELECT DISTINCT N FROM T FOR UPDATE", 7),
        ("SELECT K FROM T UNION SELECT K FROM T FOR UPDATE", 7),
        ("SELECT K FROM (SELECT K FROM T) FOR UPDATE", 7),
        ("SELECT K FROM T FOR SHARE LOCK", 7),
        ("SELECT K FROM T FOR UPDATE SOON", 257),
        ("SELECT K FROM T FOR UPDATE WAIT", 257),
        ("DELETE FROM T FOR UPDATE", 257),
        ("FOR UPDATE", 257),
    ],
)
def test_for_update_where_it_cannot_stand(a: Sql, text: str, code: int) -> None:
    assert a.code(text) == code


def test_for_update_of_dummy_locks_nothing(a: Sql) -> None:
    assert a.rows("SELECT 1 FROM DUMMY FOR UPDATE") == [(1,)]


def test_with_autocommit_for_update_and_lock_table_end_with_the_statement(a: Sql, b: Sql) -> None:
    a.autocommit = True
    a.rows("SELECT K FROM T FOR UPDATE")
    a.run("LOCK TABLE T IN EXCLUSIVE MODE")
    assert not a.session.in_transaction
    assert update(b, 1, "b") == 1
    assert a.code("SELECT K FROM T FOR UPDATE NOWAIT") == 146


def test_lock_table_waits_for_writers_and_keeps_them_out(a: Sql, b: Sql, c: Sql) -> None:
    a.run("CREATE TABLE U (K INTEGER PRIMARY KEY)")
    update(a, 1, "a")
    assert b.code("LOCK TABLE T IN EXCLUSIVE MODE NOWAIT") == 146
    waiting = Background(lambda: b.run("LOCK TABLE T IN EXCLUSIVE MODE"))
    waiting.assert_waits()
    commit(a)
    waiting.result()
    assert c.run("INSERT INTO U VALUES (1)") == 1
    assert content(c)[0] == (1, "a", 10)
    blocked = Background(lambda: c.run("INSERT INTO T VALUES (4, 'c', 40)"))
    blocked.assert_waits()
    assert update(b, 2, "b") == 1
    commit(b)
    assert blocked.result() == 1
    assert a.code("LOCK TABLE NOSUCH IN EXCLUSIVE MODE") == 259


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_cancelling_a_waiting_session_rolls_it_back_and_frees_its_locks(a: Sql, b: Sql, c: Sql) -> None:
    update(a, 1, "a")
    update(b, 2, "b")
    waiting = Background(lambda: update(b, 1, "b"))
    waiting.assert_waits()
    c.run(f"ALTER SYSTEM CANCEL SESSION '{b.session.connection_id}'")
    assert waiting.code() == 139
    assert not b.session.in_transaction
    assert update(a, 2, "a") == 1


def test_closing_a_parked_session_frees_its_locks(a: Sql, b: Sql) -> None:
    update(a, 1, "a")
    update(b, 2, "b")
    waiting = Background(lambda: update(b, 1, "b"))
    waiting.assert_waits()
    a.session.close()
    assert waiting.result() == 1
    commit(b)
    assert content(b)[:2] == [(1, "b", 10), (2, "b", 20)]


# --- batches ----------------------------------------------------------------------------------------------------------

BATCH: list[tuple[object, ...]] = [
    (4, "four", 40),
    (1, "dup", 41),
    (5, "far too long", 50),
    (6, "six", 60),
    (7, "seven", 40),
    (None, "x", 1),
]


def batch(sql: Sql, text: str, rows: Sequence[Any]) -> tuple[list[int], list[int]]:
    outcome = sql.session.execute(sql.prepare(text), rows, autocommit=sql.autocommit, batch=True)
    return outcome.rows_affected, [error.code for error in outcome.errors]


def test_a_batch_keeps_its_good_rows(a: Sql, b: Sql) -> None:
    assert batch(a, "INSERT INTO T VALUES (?, ?, ?)", BATCH) == ([1, -3, -3, 1, -3, -3], [301, 274, 301, 287])
    assert content(a) == [*START, (4, "four", 40), (6, "six", 60)]
    assert content(b) == START
    a.session.rollback()
    a.autocommit = True
    batch(a, "UPSERT T VALUES (?, ?, ?) WITH PRIMARY KEY", BATCH)
    assert content(b) == [(1, "dup", 41), *START[1:], (4, "four", 40), (6, "six", 60)]


def test_a_batch_of_good_rows_reports_nothing(a: Sql) -> None:
    assert batch(a, "UPDATE T SET N = ? WHERE K = ?", [("x", 1), ("y", 9)]) == ([1, 0], [])


def test_a_batch_waits_for_keys_as_a_whole(a: Sql, b: Sql) -> None:
    a.run("INSERT INTO T VALUES (6, 'a', 66)")
    a.run("DELETE FROM T WHERE K = 1")
    waiting = Background(lambda: batch(b, "INSERT INTO T VALUES (?, ?, ?)", BATCH))
    waiting.assert_waits()
    assert content(b) == START
    commit(a)
    assert waiting.result() == ([1, 1, -3, -3, -3, -3], [274, 301, 301, 287])


# --- isolation levels -------------------------------------------------------------------------------------------------

SNAPSHOTS = ["REPEATABLE READ", pytest.param("SERIALIZABLE", marks=pytest.mark.slow)]


def level(sql: Sql) -> str:
    return str(sql.value("SELECT CURRENT_TRANSACTION_ISOLATION_LEVEL FROM DUMMY"))


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_stays_as_it_is_until_the_transaction_ends(a: Sql, b: Sql, name: str) -> None:
    assert level(a) == "READ COMMITTED"
    a.run(f"SET TRANSACTION ISOLATION LEVEL {name}")
    assert level(a) == name
    assert content(a) == START
    update(b, 1, "b")
    commit(b)
    assert content(a) == START
    a.session.rollback()
    assert content(a)[0] == (1, "b", 10)
    commit(a)
    a.run("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    assert content(a)[0] == (1, "b", 10)
    update(b, 1, "c")
    commit(b)
    assert content(a)[0] == (1, "c", 10)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_write_over_a_newer_row_is_138(a: Sql, b: Sql, name: str) -> None:
    a.run(f"SET TRANSACTION ISOLATION LEVEL {name}")
    assert content(a) == START
    update(b, 1, "b")
    commit(b)
    with pytest.raises(HanaError) as caught:
        update(a, 1, "a")
    assert (caught.value.code, caught.value.rolls_back) == (138, True)
    assert not a.session.in_transaction
    assert update(a, 1, "a") == 1
    assert content(a)[0] == (1, "a", 10)
    commit(a)
    assert content(b)[0] == (1, "a", 10)


def test_a_write_that_waited_for_a_newer_row_is_138(a: Sql, b: Sql) -> None:
    a.run("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    assert update(a, 2, "a") == 1
    update(b, 1, "b")
    waiting = Background(lambda: update(a, 1, "a"))
    waiting.assert_waits()
    commit(b)
    assert waiting.code() == 138
    assert content(b) == [(1, "b", 10), *START[1:]]


def test_a_snapshot_with_writes_reads_itself_and_commits_beside_others(a: Sql, b: Sql) -> None:
    a.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    update(a, 1, "a")
    update(b, 2, "b")
    assert content(a) == [(1, "a", 10), *START[1:]]
    commit(b)
    commit(a)
    assert content(b)[:2] == [(1, "a", 10), (2, "b", 20)]


def test_a_snapshot_with_vectors(a: Sql, b: Sql) -> None:
    a.run("CREATE TABLE V (K INTEGER PRIMARY KEY, V REAL_VECTOR(2))")
    a.run("INSERT INTO V VALUES (1, ?)", vector(1, 0))
    commit(a)
    a.run("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    text = "SELECT TOP 5 K, COSINE_SIMILARITY(V, TO_REAL_VECTOR('[1, 0]')) AS S FROM V ORDER BY S DESC"
    assert len(a.rows(text)) == 1
    b.run("INSERT INTO V VALUES (2, ?)", vector(0, 1))
    commit(b)
    assert len(b.rows(text)) == 2
    assert len(a.rows(text)) == 1
    a.session.rollback()
    assert len(a.rows(text)) == 2


def test_a_long_result_of_a_snapshot_is_whole(a: Sql, b: Sql) -> None:
    a.many("INSERT INTO T VALUES (?, 'x', NULL)", [(key,) for key in range(10, 10_010)])
    commit(a)
    a.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    assert len(content(a)) == 10_003
    b.run("DELETE FROM T")
    commit(b)
    assert len(content(a)) == 10_003
    a.run("CREATE TABLE ENDS_IT (K INTEGER)")
    assert content(a) == []


def test_other_isolation_levels_are_refused(a: Sql) -> None:
    assert a.code("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED") == 257
