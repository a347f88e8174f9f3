"""INSERT, UPDATE, DELETE, UPSERT and MERGE in SAP's documented forms, and what a column refuses."""

from __future__ import annotations

import pytest

from emulator_sql import Sql, vector
from hana_emulator.errors import HanaError
from hana_emulator.sql.query.writes import WritePlan


@pytest.fixture
def table(sql: Sql) -> Sql:
    sql.run("CREATE COLUMN TABLE T (K INTEGER PRIMARY KEY, N NVARCHAR(10), Q INTEGER DEFAULT 7)")
    sql.many("INSERT INTO T VALUES (?,?,?)", [(1, "one", 1), (2, "two", 2)])
    return sql


ALL = "SELECT * FROM T ORDER BY K"
ONE, TWO = (1, "one", 1), (2, "two", 2)

WRITES = [
    ("INSERT INTO T VALUES (3, 'x', 0)", 1, [ONE, TWO, (3, "x", 0)]),
    ("INSERT INTO T (K) VALUES (3)", 1, [ONE, TWO, (3, None, 7)]),
    ("INSERT INTO T (N, K) VALUES (UPPER('x') || 'y', 1 + 2)", 1, [ONE, TWO, (3, "Xy", 7)]),
    ("INSERT INTO T (K, N) SELECT K + 10, N FROM T WHERE K = 1", 1, [ONE, TWO, (11, "one", 7)]),
    ("INSERT INTO T (SELECT K + 10, N, Q FROM T)", 2, [ONE, TWO, (11, "one", 1), (12, "two", 2)]),
    ("UPDATE T SET N = 'x', Q = Q + K WHERE K = 2", 1, [ONE, (2, "x", 4)]),
    ("UPDATE T SET Q = NULL", 2, [(1, "one", None), (2, "two", None)]),
    ("UPDATE T AS A SET A.N = A.N || '!' WHERE A.K = 1", 1, [(1, "one!", 1), TWO]),
    ("UPDATE T SET Q = (SELECT MAX(Q) FROM T) WHERE K = 1", 1, [(1, "one", 2), TWO]),
    ("UPDATE T SET Q = 9 WHERE K = 5", 0, [ONE, TWO]),
    ("DELETE FROM T WHERE K IN (1, 5)", 1, [TWO]),
    ("DELETE FROM T", 2, []),
    # UPSERT: https://help.sap.com, "REPLACE | UPSERT Statement (Data Manipulation)"
    ("UPSERT T VALUES (1, 'new', 5) WITH PRIMARY KEY", 1, [(1, "new", 5), TWO]),
    ("UPSERT T VALUES (3, 'new', 5) WITH PRIMARY KEY", 1, [ONE, TWO, (3, "new", 5)]),
    ("UPSERT T (K, N) VALUES (1, 'new') WITH PRIMARY KEY", 1, [(1, "new", 1), TWO]),
    ("REPLACE T (K, N) VALUES (1, 'new') WITH PRIMARY KEY", 1, [(1, "new", 1), TWO]),
    ("UPSERT T VALUES (1, 'new', 5) WHERE K = 1", 1, [(1, "new", 5), TWO]),
    ("UPSERT T VALUES (3, 'new', 5) WHERE K = 3", 1, [ONE, TWO, (3, "new", 5)]),
    ("UPSERT T (K, Q) VALUES (2, 5) WHERE N = 'two'", 1, [ONE, (2, "two", 5)]),
    ("UPSERT T SELECT K + 1, N, Q FROM T", 2, [ONE, (2, "one", 1), (3, "two", 2)]),
    ("UPSERT T (K, N) SELECT K + 1, N FROM T WHERE K = 2 WITH PRIMARY KEY", 1, [ONE, TWO, (3, "two", 7)]),
    # MERGE: https://help.sap.com, "MERGE INTO Statement (Data Manipulation)"
    ("MERGE INTO T USING (SELECT 1 AS K, 'm' AS N FROM DUMMY) S ON T.K = S.K WHEN MATCHED THEN UPDATE SET T.N = S.N", 1,
     [(1, "m", 1), TWO]),
    ("MERGE INTO T AS A USING T AS B ON A.K = B.K + 1 WHEN MATCHED THEN UPDATE SET A.N = B.N "
     "WHEN NOT MATCHED THEN INSERT VALUES (B.K + 1, B.N, B.Q)", 2, [ONE, (2, "one", 2), (3, "two", 2)]),
    ("MERGE INTO T USING (SELECT K, N FROM T) S ON T.K = S.K WHEN MATCHED AND S.K = 1 THEN UPDATE SET N = 'only'", 1,
     [(1, "only", 1), TWO]),
    ("MERGE INTO T USING (SELECT 1 AS K FROM DUMMY) S ON T.K = S.K WHEN MATCHED THEN DELETE", 1, [TWO]),
    ("MERGE INTO T USING (SELECT 5 AS K FROM DUMMY) S ON T.K = S.K WHEN NOT MATCHED THEN INSERT (K) VALUES (S.K)", 1,
     [ONE, TWO, (5, None, 7)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "count", "rows"), WRITES)
def test_write(table: Sql, text: str, count: int, rows: list[tuple[object, ...]]) -> None:
    assert table.run(text) == count
    assert table.rows(ALL) == rows


def test_batches_count_each_row(table: Sql) -> None:
    assert table.many("UPDATE T SET N = ? WHERE K >= ?", [("a", 1), ("b", 2), ("c", 9)]) == [2, 1, 0]
    assert table.many("DELETE FROM T WHERE K = ?", [(1,), (9,)]) == [1, 0]
    assert table.many("UPSERT T (K, N) VALUES (?, ?) WITH PRIMARY KEY", [(2, "u"), (3, "v")]) == [1, 1]
    merge = """MERGE INTO T USING (SELECT ? AS K, ? AS N FROM DUMMY) S ON T.K = S.K
        WHEN MATCHED THEN UPDATE SET N = S.N WHEN NOT MATCHED THEN INSERT (K, N) VALUES (S.K, S.N)"""
    assert table.many(merge, [("3", "w"), ("4", "x"), ("4", "y")]) == [1, 1, 1]
    assert table.rows("SELECT K, N FROM T ORDER BY K") == [(2, "u"), (3, "w"), (4, "y")]


def test_merge_decides_before_it_changes_the_key(table: Sql) -> None:
    table.run("""MERGE INTO T USING (SELECT 1 AS K FROM DUMMY) S ON T.K = S.K WHEN MATCHED THEN UPDATE SET K = 50
        WHEN NOT MATCHED THEN INSERT (K) VALUES (S.K)""")
    assert table.column("SELECT K FROM T ORDER BY K") == [2, 50]


@pytest.mark.parametrize("source", ["(SELECT K, UPPER(N) AS N FROM T)", "V"])
def test_the_source_of_a_merge_is_computed_once(table: Sql, source: str) -> None:
    """Not again for each row of the target, as SQLite might do."""
    table.run("CREATE VIEW V AS SELECT K, UPPER(N) AS N FROM T")
    merge = f"MERGE INTO T USING {source} S ON T.K = S.K WHEN MATCHED THEN UPDATE SET N = S.N"
    assert table.run(merge) == 2
    plan = table.session.prepare(merge).plan
    assert isinstance(plan, WritePlan)
    steps = table.session._connection.execute(f"EXPLAIN QUERY PLAN {plan.steps[0].sql}")
    assert any(text.startswith("MATERIALIZE") for *_, text in steps)


REFUSED = [
    ("INSERT INTO T VALUES (1, 'again', 0)", 301),
    ("UPDATE T SET K = 2 WHERE K = 1", 301),
    ("INSERT INTO T (N) VALUES ('x')", 287),
    ("UPDATE T SET K = NULL WHERE K = 1", 287),
    ("INSERT INTO T (K, N) VALUES (3, 'eleven char')", 274),
    ("UPDATE T SET N = N || N || N || N WHERE K = 1", 274),
    ("INSERT INTO T (K, N) SELECT 3, 'eleven char' FROM DUMMY", 274),
    ("INSERT INTO T (K) VALUES ('x')", 339),
    ("INSERT INTO T (K) VALUES (3000000000)", 314),
    ("INSERT INTO T (K, Q) VALUES (3, 2147483647 + 1)", 314),
    ("INSERT INTO T VALUES (3)", 268),
    ("INSERT INTO T (K) VALUES (3, 4)", 269),
    ("INSERT INTO T (K, K) VALUES (3, 4)", 264),
    ("INSERT INTO T (NOSUCH) VALUES (3)", 260),
    ("INSERT INTO NOSUCH VALUES (3)", 259),
    ("INSERT INTO T VALUES (3, 'a', 1), (4, 'b', 1)", 257),
    ("UPDATE T SET NOSUCH = 1", 260),
    ("DELETE FROM T WHERE NOSUCH = 1", 260),
    ("UPSERT", 257),
    ("UPSERT T SELECT 1, 'a', 2 FROM DUMMY WHERE NOSUCH = 1", 260),
    ("MERGE INTO T USING DUMMY ON 1 = 1 WHEN MATCHED THEN UPDATE SET NOSUCH = 1", 260),
]


@pytest.mark.parametrize(("text", "code"), REFUSED)
def test_refused_write_changes_nothing(table: Sql, text: str, code: int) -> None:
    assert table.code(text) == code
    assert table.rows(ALL) == [ONE, TWO]


def test_refused_batch_is_undone_as_a_whole(table: Sql) -> None:
    with pytest.raises(HanaError) as caught:
        table.many("INSERT INTO T (K) VALUES (?)", [(3,), (4,), (1,)])
    assert caught.value.code == 301
    assert "T" in caught.value.text
    assert "K" in caught.value.text
    assert table.rows(ALL) == [ONE, TWO]


VALUES = [
    ("TINYINT", 255, 255), ("SMALLINT", -32768, -32768), ("BIGINT", 2**63 - 1, 2**63 - 1),
    ("DECIMAL(5,2)", "1.005", "1.01"), ("DECIMAL(5,2)", "-1", "-1.00"), ("DECIMAL", "1.5000", "1.5"),
    ("DECIMAL(38,10)", "1234567890123456789012345678.0123456789", "1234567890123456789012345678.0123456789"),
    ("SMALLDECIMAL", "0.1", "0.1"), ("REAL", 0.1, 0.10000000149011612), ("DOUBLE", 0.1, 0.1), ("DOUBLE", "2.5", 2.5),
    ("BOOLEAN", 1, 1), ("BOOLEAN", "false", 0), ("NVARCHAR(4)", "a  ", "a  "), ("NVARCHAR(4)", "", ""),
    ("NVARCHAR(4)", "😀😀", "😀😀"), ("NCLOB", "x" * 100_000, "x" * 100_000), ("VARBINARY(3)", b"\0\1\2", b"\0\1\2"),
    ("BLOB", b"\0" * 5000, b"\0" * 5000), ("DATE", "20240229", "2024-02-29"), ("TIME", "1:02:03", "01:02:03"),
    ("SECONDDATE", "2024-02-29T10:00:00", "2024-02-29 10:00:00"), 
    ("TIMESTAMP", "2024-02-29", "2024-02-29 00:00:00.0000000"),
    ("TIMESTAMP", "2024-02-29 01:02:03.1234567", "2024-02-29 01:02:03.1234567"),
    ("REAL_VECTOR(2)", vector(1, 2), vector(1, 2)), ("REAL_VECTOR", vector(1, 2, 3), vector(1, 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "kept"), VALUES)
def test_value_as_the_column_keeps_it(sql: Sql, kind: str, given: object, kept: object) -> None:
    sql.run(f"CREATE TABLE V (A {kind})")
    sql.many("INSERT INTO V VALUES (?)", [(given,), (None,)])
    assert sql.column("SELECT A FROM V") == [kept, None]


BAD_VALUES = [
    ("TINYINT", 256, 314), ("SMALLINT", -32769, 314), ("INTEGER", "abc", 339), ("DECIMAL(3,1)", "100", 314),
    ("DECIMAL(3,1)", "x", 339), ("DOUBLE", "x", 339), ("BOOLEAN", "maybe", 266), ("NVARCHAR(3)", "😀😀", 274),
    ("VARBINARY(2)", b"abc", 274), ("DATE", "2023-02-29", 303), ("TIME", "25:00:00", 303), ("TIMESTAMP", "now", 303),
    ("REAL_VECTOR(2)", vector(1, 2, 3), 20005), ("REAL_VECTOR", b"\1\0\0\0", 20004), ("REAL_VECTOR", "[1]", 266),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "code"), BAD_VALUES)
def test_value_that_the_column_refuses(sql: Sql, kind: str, given: object, code: int) -> None:
    sql.run(f"CREATE TABLE V (A {kind})")
    with pytest.raises(HanaError) as caught:
        sql.many("INSERT INTO V VALUES (?)", [(given,)])
    assert caught.value.code == code
    assert "A" in caught.value.text
    assert str(given) not in caught.value.text


def test_value_conversions_between_columns(sql: Sql) -> None:
    sql.run("CREATE TABLE A (I INTEGER, D DECIMAL(10,4), T TIMESTAMP, B BOOLEAN, N NVARCHAR(30))")
    sql.run("INSERT INTO A VALUES (5, 2.34567, '2024-01-31 10:00:00', TRUE, '42')")
    sql.run("CREATE TABLE B (N1 NVARCHAR(20), D DECIMAL(10,1), DT DATE, N2 NVARCHAR(5), I INTEGER)")
    sql.run("INSERT INTO B SELECT I, D, T, B, N FROM A")
    assert sql.rows("SELECT * FROM B") == [("5", "2.3", "2024-01-31", "TRUE", 42)]


def test_identity(sql: Sql) -> None:
    sql.run("CREATE TABLE I (ID BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, N NVARCHAR(5))")
    sql.many("INSERT INTO I (N) VALUES (?)", [("a",), ("b",)])
    assert sql.evaluate("CURRENT_IDENTITY_VALUE()") == 2
    sql.run("INSERT INTO I (ID, N) VALUES (10, 'c')")
    sql.run("DELETE FROM I WHERE ID = 10")
    sql.run("INSERT INTO I (N) VALUES ('d')")
    assert sql.column("SELECT ID FROM I ORDER BY ID") == [1, 2, 11]
    sql.run("CREATE TABLE J (ID INTEGER GENERATED ALWAYS AS IDENTITY, N NVARCHAR(5))")
    assert sql.code("INSERT INTO J (ID, N) VALUES (1, 'x')") == 396
    assert sql.code("UPDATE J SET ID = 2") == 396
    sql.run("INSERT INTO J (N) VALUES ('x')")
    assert sql.rows("SELECT * FROM J") == [(1, "x")]


def test_default_expressions(sql: Sql) -> None:
    sql.run(
        "CREATE TABLE D (K INTEGER, T TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, N NVARCHAR(3) DEFAULT 'x',"
        " V INTEGER DEFAULT -1)"
    )
    sql.run("INSERT INTO D (K) VALUES (1)")
    ((moment, name, number),) = sql.rows("SELECT T, N, V FROM D")
    assert (len(moment), name, number) == (27, "x", -1)
    assert sql.code("INSERT INTO D (K, T) VALUES (1, NULL)") == 287
