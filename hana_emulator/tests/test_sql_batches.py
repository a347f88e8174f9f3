"""What stays after an error in row k, in and out of a transaction; UPSERT and MERGE in all their forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator_sql import Sql, vector
from hana_emulator.errors import HanaError

Rows = list[tuple[object, ...]]
START: Rows = [(1, "one", 10), (2, "two", 20)]


@pytest.fixture
def table(sql: Sql) -> Sql:
    sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY, N NVARCHAR(5) NOT NULL, Q SMALLINT UNIQUE)")
    sql.many("INSERT INTO T VALUES (?,?,?)", START)
    return sql


def content(sql: Sql) -> Rows:
    return sql.rows("SELECT * FROM T ORDER BY K")


INSERT = "INSERT INTO T VALUES (?,?,?)"
SELECTED = "INSERT INTO T SELECT ?, ?, ? FROM DUMMY"
UPSERT = "UPSERT T VALUES (?,?,?) WITH PRIMARY KEY"
BY_WHERE = "UPSERT T (K, N, Q) VALUES (?,?,?) WHERE K = ?"
UPDATE = "UPDATE T SET N = ?, Q = ? WHERE K = ?"
RENUMBER = "UPDATE T SET K = ? WHERE K = ?"
MERGE = """MERGE INTO T USING (SELECT ? AS K, ? AS N, ? AS Q FROM DUMMY) S ON T.K = S.K
 WHEN MATCHED THEN UPDATE SET N = S.N, Q = S.Q WHEN NOT MATCHED THEN INSERT VALUES (S.K, S.N, S.Q)"""

BATCHES: list[tuple[str, list[tuple[object, ...]], int]] = [
    # statement, rows of which one is bad, code
    (INSERT, [(3, "a", 1), (1, "b", 2)], 301),
    (INSERT, [(3, "a", 1), (3, "b", 2)], 301),
    (INSERT, [(3, "a", 1), (4, "b", 10)], 301),
    (INSERT, [(3, "a", 1), (4, "b", 1), (5, "c", 2)], 301),
    (INSERT, [(3, "a", 1), (4, None, 2)], 287),
    (INSERT, [(3, "a", 1), (None, "b", 2)], 287),
    (INSERT, [(3, "a", 1), (4, "too long", 2), (5, "c", 3)], 274),
    (INSERT, [(3, "a", 1), (4, "b", 32768)], 314),
    (INSERT, [(3, "a", 1), (4, "b", "x")], 339),
    (INSERT, [(3, "a", 1), (2**31, "b", 2)], 314),
    (SELECTED, [(3, "a", 1), (4, "too long", 2)], 274),
    (SELECTED, [(3, "a", 1), (4, "b", "x")], 339),
    (SELECTED, [(3, "a", 1), (4, None, 3)], 287),
    (UPSERT, [(1, "a", 1), (3, "b", 2), (4, "c", 20)], 301),
    (UPSERT, [(1, "a", 1), (3, None, 2)], 287),
    (UPSERT, [(1, "a", 1), (2, "b", 70000)], 314),
    (BY_WHERE, [(1, "a", 1, 1), (3, "b", 1, 3)], 301),
    (BY_WHERE, [(1, "a", 1, 1), (3, "too long", 2, 3)], 274),
    (UPDATE, [("a", 1, 1), ("b", 1, 2)], 301),
    (UPDATE, [("a", 1, 1), (None, 2, 2)], 287),
    (UPDATE, [("a", 1, 1), ("b", 2, 9), ("too long", 3, 9)], 274),
    (RENUMBER, [(5, 1), (5, 2)], 301),
    (RENUMBER, [(5, 1), (None, 2)], 287),
    (MERGE, [("1", "a", "1"), ("3", "b", "1")], 301),
    (MERGE, [("1", "a", "1"), ("3", "too long", "2")], 274),
    (MERGE, [("1", "a", "1"), ("x", "b", "2")], 339),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rows", "code"), BATCHES)
def test_an_error_in_any_row_leaves_nothing_of_its_statement(
    table: Sql, other: Sql, text: str, rows: Rows, code: int
) -> None:
    with pytest.raises(HanaError) as caught:
        table.many(text, rows)
    assert caught.value.code == code
    assert not table.session.in_transaction
    assert content(table) == content(other) == START
    table.autocommit = False
    table.run("INSERT INTO T VALUES (9, 'nine', 90)")
    with pytest.raises(HanaError) as again:
        table.many(text, rows)
    assert again.value.code == code
    assert table.session.in_transaction
    assert content(table) == [*START, (9, "nine", 90)]
    table.run("INSERT INTO T VALUES (8, 'eight', 80)")
    table.session.commit()
    assert content(other) == [*START, (8, "eight", 80), (9, "nine", 90)]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "rows", "code"), BATCHES)
def test_the_rows_before_the_bad_one_are_good(table: Sql, text: str, rows: Rows, code: int) -> None:
    """Else the case above would prove nothing: one by one, all rows but one go in."""
    results = []
    for row in rows:
        try:
            results.append(len(table.many(text, [row])))
        except HanaError as error:
            results.append(error.code)
    assert results.count(code) == 1
    assert results.count(1) == len(rows) - 1


def test_unique_key_with_null_takes_many(table: Sql) -> None:
    table.many(INSERT, [(3, "a", None), (4, "b", None)])
    assert content(table) == [*START, (3, "a", None), (4, "b", None)]


def test_savepoints_and_failed_statements(table: Sql, other: Sql) -> None:
    table.autocommit = False
    table.run("INSERT INTO T VALUES (3, 'three', 30)")
    table.run("SAVEPOINT OWL_STATEMENT")
    table.run("DELETE FROM T WHERE K = 1")
    assert table.code("INSERT INTO T VALUES (3, 'again', 31)") == 301
    assert [row[0] for row in content(table)] == [2, 3]
    table.run("ROLLBACK TO SAVEPOINT OWL_STATEMENT")
    assert [row[0] for row in content(table)] == [1, 2, 3]
    assert content(other) == START
    table.run("DELETE FROM T WHERE K = 2")
    table.run("ROLLBACK TO SAVEPOINT OWL_STATEMENT")
    table.session.commit()
    assert [row[0] for row in content(other)] == [1, 2, 3]
    assert table.code("ROLLBACK TO SAVEPOINT OWL_STATEMENT") == 128


def test_a_batch_with_vectors_and_lobs(sql: Sql) -> None:
    sql.run("CREATE TABLE D (K INTEGER PRIMARY KEY, C NCLOB, V REAL_VECTOR(2), B BLOB)")
    rows: Rows = [(1, "x" * 70_000, vector(1, 2), b"\0" * 70_000), (2, None, None, None), (3, "", vector(0, 0), b"")]
    assert sql.many("INSERT INTO D VALUES (?,?,?,?)", rows) == [1, 1, 1]
    with pytest.raises(HanaError) as caught:
        sql.many("INSERT INTO D VALUES (?,?,?,?)", [(4, "y", vector(1, 1), b""), (5, "z", vector(1), b"")])
    assert caught.value.code == 20005
    assert sql.rows("SELECT * FROM D ORDER BY K") == rows


# --- UPSERT and MERGE: https://help.sap.com, SAP HANA SQL Reference Guide ---------------------------------------------

FORMS: list[tuple[str, tuple[object, ...], int, Rows]] = [
    ("UPSERT T VALUES (?, ?, ?)", (3, "new", 5), 1, [*START, (3, "new", 5)]),
    ("UPSERT T (N, Q, K) VALUES ('new', 5, ?) WITH PRIMARY KEY", (2,), 1, [START[0], (2, "new", 5)]),
    ("UPSERT T (K, N) VALUES (?, UPPER(?)) WITH PRIMARY KEY", (1, "up"), 1, [(1, "UP", 10), START[1]]),
    ("UPSERT T (K, N) VALUES (1 + 2, 'a' || 'b') WITH PRIMARY KEY", (), 1, [*START, (3, "ab", None)]),
    ("UPSERT T VALUES (?, ?, ?) WHERE T.K = ?", (2, "new", 5, 2), 1, [START[0], (2, "new", 5)]),
    ("UPSERT T (K, N, Q) VALUES (?, ?, ?) WHERE Q > ?", (7, "new", 5, 99), 1, [*START, (7, "new", 5)]),
    ("UPSERT T (K, N) VALUES (1, 'where') WHERE N = 'one' AND Q = 10", (), 1, [(1, "where", 10), START[1]]),
    ("UPSERT T (N) VALUES (?) WHERE K IN (1, 2)", ("both",), 2, [(1, "both", 10), (2, "both", 20)]),
    ("UPSERT T SELECT K + 1, N, Q + 1 FROM T", (), 2, [START[0], (2, "one", 11), (3, "two", 21)]),
    ("UPSERT T (K, N) SELECT K, N || '!' FROM T WHERE K = ? WITH PRIMARY KEY", (1,), 1, [(1, "one!", 10), START[1]]),
    ("UPSERT T (SELECT 5, 'q', 7 FROM DUMMY) WITH PRIMARY KEY", (), 1, [*START, (5, "q", 7)]),
    ("UPSERT T SELECT * FROM T WHERE 1 = 0", (), 0, START),
    ("REPLACE T VALUES (?, ?, ?) WITH PRIMARY KEY", (1, "r", 1), 1, [(1, "r", 1), START[1]]),
    ("UPSERT S.T (K, N) VALUES (1, 's') WITH PRIMARY KEY", (), 1, [(1, "s", 10), START[1]]),
    ("MERGE INTO T USING T2 ON T.K = T2.K WHEN MATCHED THEN UPDATE SET N = T2.N", (), 1, [START[0], (2, "zwei", 20)]),
    ("MERGE INTO T USING T2 ON T.K = T2.K WHEN NOT MATCHED THEN INSERT VALUES (T2.K, T2.N, NULL)", (), 1,
     [*START, (3, "drei", None)]),
    ("MERGE INTO T USING T2 ON T.K = T2.K WHEN MATCHED THEN UPDATE SET T.N = T2.N, T.Q = T.Q + 1 "
     "WHEN NOT MATCHED THEN INSERT (N, K) VALUES (UPPER(T2.N), T2.K)", (), 2,
     [START[0], (2, "zwei", 21), (3, "DREI", None)]),
    ("MERGE INTO T AS A USING T2 AS B ON A.K = B.K WHEN MATCHED AND A.Q = ? THEN UPDATE SET N = B.N", (99,), 0, START),
    ("MERGE INTO T AS A USING T2 AS B ON A.K = B.K WHEN NOT MATCHED AND B.N LIKE ? THEN INSERT (K, N) "
     "VALUES (B.K, B.N)", ("x%",), 0, START),
    ("MERGE INTO T USING (SELECT K, N FROM T2 WHERE K = ?) X ON T.K = X.K WHEN MATCHED THEN UPDATE SET N = X.N", (2,),
     1, [START[0], (2, "zwei", 20)]),
    ("MERGE INTO T USING T2 ON T.K = T2.K WHEN MATCHED THEN DELETE", (), 1, [START[0]]),
    ("MERGE INTO S.T USING DUMMY ON T.K = 1 WHEN MATCHED THEN UPDATE SET N = 'd'", (), 1, [(1, "d", 10), START[1]]),
    ("MERGE INTO T USING T2 ON T.K = T2.K AND T2.N = 'none' WHEN MATCHED THEN UPDATE SET N = 'x' "
     "WHEN NOT MATCHED THEN INSERT VALUES (T2.K + 10, T2.N, T2.K)", (), 2,
     [*START, (12, "zwei", 2), (13, "drei", 3)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parameters", "count", "expected"), FORMS)
def test_form(table: Sql, text: str, parameters: tuple[object, ...], count: int, expected: Rows) -> None:
    table.run("CREATE TABLE T2 (K INTEGER, N NVARCHAR(5))")
    table.many("INSERT INTO T2 VALUES (?, ?)", [(2, "zwei"), (3, "drei")])
    assert table.run(text, *parameters) == count
    assert content(table) == expected


FORM_ERRORS = [
    ("UPSERT T (K, N) VALUES (1) WITH PRIMARY KEY", 268),
    ("UPSERT T VALUES (1, 'a', 2, 3) WITH PRIMARY KEY", 269),
    ("UPSERT T (K, K) VALUES (1, 2) WITH PRIMARY KEY", 264),
    ("UPSERT NOKEY VALUES (1) WITH PRIMARY KEY", 7),
    ("UPSERT T (N) VALUES ('x') WITH PRIMARY KEY", 287),
    ("UPSERT T VALUES (1, 'a', 20) WITH PRIMARY KEY", 301),
    ("UPSERT T VALUES (1, 'a', 2) WHERE NOSUCH = 1", 260),
    ("UPSERT T VALUES (1, 'a', 2) WHERE", 257),
    ("UPSERT T VALUES (1, 'a', 2) WITH PRIMARY", 257),
    ("UPSERT INTO T VALUES (1, 'a', 2)", 257),
    ("MERGE INTO T USING NOKEY ON T.K = NOKEY.A", 257),
    ("MERGE INTO T USING NOKEY ON T.K = NOKEY.A WHEN MATCHED THEN INSERT VALUES (1, 'a', 2)", 257),
    ("MERGE INTO T USING NOKEY ON T.K = NOKEY.A WHEN NOT MATCHED THEN DELETE", 257),
    ("MERGE INTO T USING NOKEY ON T.K = NOKEY.A WHEN NOT MATCHED THEN INSERT VALUES (5)", 268),
    ("MERGE INTO T USING NOKEY ON T.K = NOKEY.A WHEN NOT MATCHED THEN INSERT (K, N) VALUES (1, 'dup')", 301),
    ("MERGE INTO T USING NOKEY ON T.K = NOSUCH WHEN MATCHED THEN DELETE", 260),
    ("MERGE INTO T USING NOSUCH ON 1 = 1 WHEN MATCHED THEN DELETE", 259),
]


@pytest.mark.parametrize(("text", "code"), FORM_ERRORS)
def test_refused_form(table: Sql, text: str, code: int) -> None:
    table.run("CREATE TABLE NOKEY (A INTEGER)")
    table.run("INSERT INTO NOKEY VALUES (7)")
    assert table.code(text) == code
    assert content(table) == START


@pytest.fixture(scope="module")
def names(shared: Sql) -> Sql:
    shared.run("CREATE TABLE T (K INTEGER PRIMARY KEY, N NVARCHAR(3))")
    return shared


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.text("abc", max_size=3)), max_size=12))
def test_upsert_is_the_last_row_of_each_key(names: Sql, rows: list[tuple[int, str]]) -> None:
    names.run("DELETE FROM T")
    for row in rows:
        names.many("UPSERT T VALUES (?, ?) WITH PRIMARY KEY", [row])
    found = names.rows("SELECT * FROM T ORDER BY K")
    names.run("DELETE FROM T")
    if rows:
        assert names.many("UPSERT T VALUES (?, ?) WITH PRIMARY KEY", rows) == [1] * len(rows)
    assert found == names.rows("SELECT * FROM T ORDER BY K") == sorted(dict(rows).items())
