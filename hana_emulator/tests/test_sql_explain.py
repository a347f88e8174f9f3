"""EXPLAIN PLAN: the operators it writes, whether a vector search would use an HNSW index, and what it refuses."""

from __future__ import annotations

import pytest

from emulator_sql import Sql, vector

SCORE = "COSINE_SIMILARITY(V, TO_REAL_VECTOR(?))"
TOP = "SELECT TOP 5 ID FROM T ORDER BY"


def with_indexes(sql: Sql) -> Sql:
    """T.V has a cosine index, T.W one for L2, T.N none."""
    sql.run("CREATE TABLE T (ID INTEGER, V REAL_VECTOR(2), W REAL_VECTOR(2), N REAL_VECTOR(2))")
    sql.run("CREATE HNSW VECTOR INDEX HV ON T (V) SIMILARITY FUNCTION COSINE_SIMILARITY")
    sql.run("CREATE HNSW VECTOR INDEX HW ON T (W) SIMILARITY FUNCTION L2DISTANCE")
    sql.run("INSERT INTO T VALUES (1, ?, ?, ?)", *[vector(1, 0)] * 3)
    sql.run("CREATE TABLE U (ID INTEGER)")
    sql.run("CREATE VIEW VW AS SELECT ID FROM T WHERE ID > 0")
    return sql


@pytest.fixture
def indexed(sql: Sql) -> Sql:
    return with_indexes(sql)


@pytest.fixture(scope="module")
def explaining(shared: Sql) -> Sql:
    """The same, for what changes nothing and leaves no plan behind."""
    return with_indexes(shared)


def plan(sql: Sql, text: str, name: str = "x") -> list[tuple[str, str | None]]:
    sql.run(f"EXPLAIN PLAN SET STATEMENT_NAME = '{name}' FOR {text}")
    found = sql.rows(
        "SELECT OPERATOR_NAME, OPERATOR_PROPERTIES FROM EXPLAIN_PLAN_TABLE WHERE STATEMENT_NAME = ?"
        " ORDER BY OPERATOR_ID",
        name,
    )
    sql.run("DELETE FROM SYS.EXPLAIN_PLAN_TABLE")
    return found


WITH_INDEX = [
    (f"{TOP} {SCORE} DESC", "HV"),
    (f"SELECT ID FROM T ORDER BY {SCORE} DESC LIMIT 5", "HV"),
    (f"SELECT TOP ? ID, {SCORE} AS S FROM T ORDER BY S DESC", "HV"),
    (f"SELECT TOP 5 {SCORE}, ID FROM T ORDER BY 1 DESC", "HV"),
    (f"SELECT TOP 5 X.ID FROM S.T AS X WHERE X.ID > ? ORDER BY {SCORE} DESC", "HV"),
    ("SELECT TOP 5 ID FROM T ORDER BY L2DISTANCE(TO_REAL_VECTOR('[1,2]'), W)", "HW"),
    (f"SELECT * FROM (SELECT TOP 5 ID, {SCORE} AS S FROM T ORDER BY S DESC) AS X WHERE S > 0.5", "HV"),
    (f"WITH H AS ({TOP} {SCORE} DESC) SELECT * FROM H", "HV"),
    (f"{TOP} {SCORE} DESC WITH HINT (NO_CS_JOIN)", "HV"),
]
EXACT = [
    (f"{TOP} {SCORE} DESC WITH HINT (NO_VECTOR_INDEX)", "hint"),
    (f"{TOP} {SCORE}", "ascending"),
    (f"{TOP} L2DISTANCE(V, TO_REAL_VECTOR(?))", "is for COSINE_SIMILARITY"),
    (f"{TOP} COSINE_SIMILARITY(N, TO_REAL_VECTOR(?)) DESC", "no HNSW index"),
    (f"SELECT ID FROM T ORDER BY {SCORE} DESC", "neither TOP nor LIMIT"),
    (f"{TOP} {SCORE} DESC, ID", "further sort keys"),
    (f"SELECT DISTINCT TOP 5 {SCORE} AS S FROM T ORDER BY S DESC", "grouped"),
]
NO_SEARCH = [
    "SELECT TOP 5 ID FROM T ORDER BY ID",
    f"SELECT TOP 5 ID, {SCORE} FROM T ORDER BY ID",
    "SELECT TOP 5 ID FROM T ORDER BY COSINE_SIMILARITY(V, W) DESC",
    f"SELECT TOP 5 T.ID FROM T JOIN U ON T.ID = U.ID ORDER BY {SCORE} DESC",
    f"SELECT ID FROM T WHERE {SCORE} > 0.5",
]


@pytest.mark.parametrize(("text", "index"), WITH_INDEX)
def test_the_index_would_be_used(explaining: Sql, text: str, index: str) -> None:
    assert ("HNSW INDEX SEARCH", f"VECTOR INDEX: S.{index}") in plan(explaining, text)


@pytest.mark.parametrize(("text", "reason"), EXACT)
def test_the_search_would_be_exact(explaining: Sql, text: str, reason: str) -> None:
    explaining.run(f"EXPLAIN PLAN FOR {text}")
    found = explaining.column(
        "SELECT OPERATOR_DETAILS FROM EXPLAIN_PLAN_TABLE WHERE OPERATOR_NAME = 'COLUMN TABLE'"
        " AND OPERATOR_PROPERTIES = 'EXACT VECTOR SEARCH'"
    )
    explaining.run("DELETE FROM SYS.EXPLAIN_PLAN_TABLE")
    (details,) = found
    assert reason in details
    assert "emulator" in details


@pytest.mark.parametrize("text", NO_SEARCH)
def test_no_vector_search(explaining: Sql, text: str) -> None:
    assert all(properties is None for _, properties in plan(explaining, text))


def test_a_dropped_index_is_used_no_more(indexed: Sql) -> None:
    indexed.run("DROP INDEX HV")
    assert ("COLUMN TABLE", "EXACT VECTOR SEARCH") in plan(indexed, f"{TOP} {SCORE} DESC")


SHAPES = [
    ("SELECT ID FROM T WHERE ID = ? ORDER BY ID LIMIT 1", ["PROJECT", "COLUMN TABLE"]),
    ("SELECT T.ID FROM T LEFT JOIN U ON T.ID = U.ID", ["PROJECT", "COLUMN TABLE", "COLUMN TABLE"]),
    ("SELECT ID FROM T UNION ALL SELECT ID FROM U", ["PROJECT", "COLUMN TABLE", "COLUMN TABLE"]),
    ("SELECT * FROM VW", ["PROJECT", "VIEW", "COLUMN TABLE"]),
    ("SELECT * FROM DUMMY", ["PROJECT", "ROW SEARCH"]),
    ("INSERT INTO U VALUES (1)", ["INSERT"]),
    ("INSERT INTO U SELECT ID FROM T", ["INSERT", "COLUMN TABLE"]),
    ("UPDATE U SET ID = 2 WHERE ID = ?", ["UPDATE"]),
    ("DELETE FROM U", ["DELETE"]),
    ("MERGE INTO U USING T ON U.ID = T.ID WHEN MATCHED THEN DELETE", ["MERGE", "COLUMN TABLE"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "operators"), SHAPES)
def test_operators(explaining: Sql, text: str, operators: list[str]) -> None:
    assert [name for name, _ in plan(explaining, text)] == operators
    assert explaining.value("SELECT COUNT(*) FROM U") == 0, "what is explained is not run"


def test_the_tree_and_its_owner(indexed: Sql, other: Sql) -> None:
    indexed.run("EXPLAIN PLAN SET STATEMENT_NAME = 'a' FOR SELECT T.ID FROM T JOIN U ON T.ID = U.ID")
    rows = indexed.rows(
        "SELECT OPERATOR_ID, PARENT_OPERATOR_ID, LEVEL, POSITION, SCHEMA_NAME, TABLE_NAME, TABLE_SIZE, CONNECTION_ID"
        " FROM EXPLAIN_PLAN_TABLE ORDER BY OPERATOR_ID"
    )
    number = indexed.session.connection_id
    assert rows == [
        (1, None, 1, 1, None, None, None, number),
        (2, 1, 2, 1, "S", "T", 1.0, number),
        (3, 1, 2, 2, "S", "U", 0.0, number),
    ]
    assert other.rows("SELECT * FROM SYS.EXPLAIN_PLAN_TABLE") == []


REFUSED = [
    ("EXPLAIN PLAN FOR DROP TABLE T", 327),
    ("EXPLAIN PLAN FOR COMMIT", 327),
    ("EXPLAIN PLAN FOR EXPLAIN PLAN FOR SELECT ID FROM T", 327),
    ("EXPLAIN PLAN FOR SELECT NOSUCH FROM T", 260),
    ("EXPLAIN PLAN FOR", 257),
    ("EXPLAIN PLAN SELECT ID FROM T", 257),
    ("EXPLAIN PLAN SET STATEMENT_NAME = x FOR SELECT ID FROM T", 257),
    ("EXPLAIN PLAN FOR SQL PLAN CACHE ENTRY 5", 7),
    ("EXPLAIN PLAN FOR UPSERT U VALUES (1) WHERE ID = 1", 7),
    ("INSERT INTO EXPLAIN_PLAN_TABLE (STATEMENT_NAME) VALUES ('x')", 258),
    ("UPDATE EXPLAIN_PLAN_TABLE SET STATEMENT_NAME = 'x'", 258),
    ("DROP TABLE SYS.EXPLAIN_PLAN_TABLE", 258),
    ("DROP PUBLIC SYNONYM EXPLAIN_PLAN_TABLE", 315),
]


@pytest.mark.parametrize(("text", "code"), REFUSED)
def test_refused(explaining: Sql, text: str, code: int) -> None:
    assert explaining.code(text) == code
    assert explaining.rows("SELECT * FROM EXPLAIN_PLAN_TABLE") == []
