"""Searches of many shapes, data sets and moments: the vectorised way against the scalar functions, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator_sql import USER, Sql, open_database, vector
from hana_emulator.errors import HanaError
from hana_emulator.sql.database import Database
from hana_emulator.sql.planner import Prepared, QueryPlan

Rows = list[tuple[object, ...]]
COSINE, L2 = "COSINE_SIMILARITY(V, TO_REAL_VECTOR(?)) AS S", "L2DISTANCE(V, TO_REAL_VECTOR(?)) AS S"


def vectorised(sql: Sql, text: str) -> bool:
    statement = sql.prepare(text)
    assert isinstance(statement, Prepared)
    assert isinstance(statement.plan, QueryPlan)
    return statement.plan.search is not None


def both_ways(sql: Sql, text: str, *parameters: object) -> tuple[Rows, Rows]:
    """The rows by the recognised shape and by the same text as a derived table, scores rounded to single precision."""
    assert vectorised(sql, text)
    wrapped = f"SELECT * FROM ({text})"
    assert not vectorised(sql, wrapped)
    return rounded(sql.rows(text, *parameters)), rounded(sql.rows(wrapped, *parameters))


def rounded(rows: Rows) -> Rows:
    return [tuple(round(cell, 5) + 0.0 if isinstance(cell, float) else cell for cell in row) for row in rows]


@pytest.fixture(scope="module")
def shared() -> Iterator[Database]:
    opened = open_database()
    yield opened
    opened.close()


CREATE = "CREATE TABLE T (ID INTEGER PRIMARY KEY, K NVARCHAR(3), V REAL_VECTOR(2), P DECIMAL(5,2), M NCLOB)"


@pytest.fixture
def table(sql: Sql) -> Sql:
    """Twelve rows: ties in every score, two rows without a vector, one zero vector, NULLs in the filter columns."""
    sql.run(CREATE)
    directions = [(1, 0), (0, 1), (1, 1), (-1, 0), (2, 0), (0, 0), (3, 3), None, (1, 0), (0, -1), None, (5, 1)]
    rows = [
        (
            number,
            None if number == 3 else "ab"[number % 2],
            None if pair is None else vector(*pair),
            None if number == 5 else str(number),
            f'{{"n": {number}, "t": "w{number % 3}"}}',
        )
        for number, pair in enumerate(directions, 1)
    ]
    sql.many("INSERT INTO T VALUES (?,?,?,?,?)", rows)
    return sql


Q = vector(1, 0)
SHAPES: list[tuple[str, tuple[object, ...], list[int]]] = [
    (f"SELECT ID, {COSINE} FROM T ORDER BY S DESC, ID LIMIT 4", (Q,), [1, 5, 9, 12]),
    (f"SELECT ID, {COSINE} FROM T ORDER BY S DESC, ID DESC LIMIT 4", (Q,), [9, 5, 1, 12]),
    (f"SELECT ID, {COSINE} FROM T ORDER BY S DESC, P NULLS LAST LIMIT 3", (Q,), [1, 9, 5]),
    (f"SELECT TOP 2 ID, {COSINE} FROM T WHERE K = 'a' ORDER BY S DESC, ID", (Q,), [12, 2]),
    (f"SELECT TOP ? ID, {COSINE} FROM T WHERE K = ? ORDER BY S DESC, ID", (3, Q, "b"), [1, 5, 9]),
    (f"SELECT ID, {COSINE} FROM T WHERE K IS NULL ORDER BY S DESC LIMIT 5", (Q,), [3]),
    (f"SELECT ID, {COSINE} FROM T WHERE P > 8.5 AND P <= 12 ORDER BY S DESC, ID LIMIT 9", (Q,), [9, 12, 10, 11]),
    (f"SELECT ID, {COSINE} FROM T WHERE V IS NULL ORDER BY S DESC, ID LIMIT 9", (Q,), [8, 11]),
    (f"SELECT ID, {COSINE} FROM T WHERE V IS NOT NULL ORDER BY S DESC, ID LIMIT 2 OFFSET 8", (Q,), [10, 4]),
    (f"SELECT ID, {COSINE} FROM T WHERE ID IN (SELECT ID FROM T WHERE K = 'a') ORDER BY S DESC, ID LIMIT 2", (Q,),
     [12, 2]),
    (f"SELECT ID, {COSINE} FROM T WHERE EXISTS (SELECT 1 FROM T B WHERE B.ID = T.ID + 11) ORDER BY S DESC LIMIT 2",
     (Q,), [1]),
    (f"SELECT ID, {COSINE} FROM T WHERE JSON_VALUE(M, '$.t') = ? ORDER BY S DESC, ID LIMIT 3", (Q, "w0"), [9, 12, 3]),
    (f"SELECT ID, {COSINE} FROM T WHERE M LIKE '%w1%' AND (K = 'b' OR ID = 4) ORDER BY S DESC, ID LIMIT 3", (Q,),
     [1, 7, 4]),
    (f"SELECT ID, {COSINE} FROM T ORDER BY S DESC, ID LIMIT 0", (Q,), []),
    (f"SELECT ID, {COSINE} FROM T ORDER BY S DESC, ID LIMIT 3 OFFSET 99", (Q,), []),
    (f"SELECT ID, {COSINE} FROM T ORDER BY S DESC, ID LIMIT 3 OFFSET 9", (Q,), [4, 8, 11]),
    (f"SELECT ID, {COSINE} FROM T WHERE 1 = 0 ORDER BY S DESC LIMIT 3", (Q,), []),
    (f"SELECT ID, {COSINE} FROM T ORDER BY S LIMIT 3", (Q,), [8, 11, 4]),
    (f"SELECT ID, {COSINE} FROM T ORDER BY S DESC, ID LIMIT 2", (vector(0, 0),), [1, 2]),
    (f"SELECT ID, {L2} FROM T ORDER BY S NULLS FIRST, ID LIMIT 3", (Q,), [8, 11, 1]),
    (f"SELECT ID, {L2} FROM T WHERE V IS NOT NULL ORDER BY S, ID LIMIT 4", (Q,), [1, 9, 3, 5]),
    (f"SELECT ID, {L2} FROM T ORDER BY S DESC, ID LIMIT 2", (Q,), [12, 7]),
    (f"SELECT ID, {L2} FROM T WHERE V IS NOT NULL ORDER BY 2, 1 DESC LIMIT 3", (Q,), [9, 1, 6]),
    (f"SELECT K, ID, P, {L2}, M FROM S.T AS X WHERE X.K = ? AND V IS NOT NULL ORDER BY S, X.ID LIMIT ? OFFSET ?",
     (Q, "b", 2, 1), []),
    ("SELECT ID, K || '!' AS L FROM T WHERE V IS NOT NULL ORDER BY L2DISTANCE(TO_REAL_VECTOR(?), V), ID LIMIT 2", (Q,),
     [1, 9]),
    ("SELECT ID, V FROM T ORDER BY COSINE_SIMILARITY(V, TO_REAL_VECTOR('[0,-1]')) DESC LIMIT 1", (), [10]),
    (f"SELECT ID, {COSINE} FROM T ORDER BY S DESC, ID LIMIT 1 WITH HINT (NO_VECTOR_INDEX)", (Q,), [1]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parameters", "expected"), SHAPES)
def test_shape(table: Sql, text: str, parameters: tuple[object, ...], expected: list[int]) -> None:
    if "HINT" in text:
        assert [row[0] for row in table.rows(text, *parameters)] == expected
        return
    found, scalar = both_ways(table, text, *parameters)
    assert found == scalar
    if text.startswith("SELECT K"):
        assert [row[1] for row in found] == [9, 5]
    else:
        assert [row[0] for row in found] == expected


def test_score_in_the_where_clause_runs_row_by_row(table: Sql) -> None:
    near = "COSINE_SIMILARITY(V, TO_REAL_VECTOR('[1,0]')) > 0.9"
    text = f"SELECT ID, {COSINE} FROM T WHERE {near} ORDER BY S DESC, ID LIMIT 9"
    assert [row[0] for row in table.rows(text, Q)] == [1, 5, 9, 12]


def test_a_column_called_like_the_row_number_is_no_trap(sql: Sql) -> None:
    sql.run('CREATE TABLE T ("_ROWID_" INTEGER, "ROWID" INTEGER, ID INTEGER, V REAL_VECTOR(2))')
    sql.many("INSERT INTO T VALUES (?, 5, ?, ?)", [(7, 1, vector(1, 0)), (7, 2, vector(0, 1)), (7, 3, None)])
    rows = sql.rows(f"SELECT TOP 2 ID, {COSINE} FROM T ORDER BY S DESC", vector(0, 1))
    assert [row[0] for row in rows] == [2, 1]


@pytest.mark.parametrize("query", [vector(1, 0, 0), "[1,2,3]", "nonsense", "[]", b"\1", vector(1)])
def test_a_bad_query_vector_is_8_by_either_way(table: Sql, query: object) -> None:
    text = f"SELECT TOP 3 ID, {COSINE} FROM T ORDER BY S DESC"
    assert table.code(text, query) == table.code(f"SELECT * FROM ({text})", query) == 8


def test_text_query_equals_bytes_query(table: Sql) -> None:
    text = f"SELECT TOP 5 ID, {COSINE} FROM T ORDER BY S DESC, ID"
    assert table.rows(text, "[1, 0]") == table.rows(text, Q)


def test_search_sees_what_the_session_sees(table: Sql, other: Sql) -> None:
    text = f"SELECT TOP 1 ID, {COSINE} FROM T ORDER BY S DESC, ID"
    near = vector(0.5, -1)
    best = [sql.rows(text, near)[0][0] for sql in (table, other)]
    assert best == [10, 10]
    table.autocommit = False
    table.run("INSERT INTO T (ID, V) VALUES (50, ?)", near)
    table.run("SAVEPOINT A")
    table.run("UPDATE T SET V = ? WHERE ID = 1", near)
    assert [sql.rows(text, near)[0][0] for sql in (table, other)] == [1, 10]
    table.run("ROLLBACK TO SAVEPOINT A")
    assert [sql.rows(text, near)[0][0] for sql in (table, other)] == [50, 10]
    assert table.code("INSERT INTO T (ID) VALUES (50)") == 301
    table.session.commit()
    assert [sql.rows(text, near)[0][0] for sql in (table, other)] == [50, 50]
    other.run("MERGE INTO T USING DUMMY ON T.ID = 50 WHEN MATCHED THEN UPDATE SET V = NULL")
    assert [sql.rows(text, near)[0][0] for sql in (table, other)] == [10, 10]
    other.run("UPSERT T (ID, V) VALUES (10, ?) WITH PRIMARY KEY", vector(-1, 0))
    assert [sql.rows(text, near)[0][0] for sql in (table, other)] == [1, 1]
    other.run("DELETE FROM T WHERE ID <> 4")
    assert [sql.rows(text, near)[0][0] for sql in (table, other)] == [4, 4]


def test_search_follows_definitions(table: Sql, other: Sql) -> None:
    text = f"SELECT TOP 1 ID, {COSINE} FROM T ORDER BY S DESC, ID"
    assert other.rows(text, Q)[0][0] == 1
    table.run("RENAME TABLE T TO OLD")
    assert other.code(text, Q) == 259
    table.run(CREATE)
    assert other.rows(text, Q) == []
    table.run("INSERT INTO T (ID, V) VALUES (77, ?)", Q)
    assert other.rows(text, Q)[0][0] == 77
    table.run("DROP TABLE T")
    table.run("RENAME TABLE OLD TO T")
    assert other.rows(text, Q)[0][0] == 1
    table.run("RENAME COLUMN T.V TO W")
    assert other.code(text, Q) == 260
    table.run("ALTER TABLE T ADD (V REAL_VECTOR(2))")
    assert [row[1] for row in other.rows(text, Q)] == [None]


components = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0])
pairs = st.tuples(components, components)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.none() | pairs), max_size=14),
    pairs,
    st.sampled_from([COSINE, L2]),
    st.sampled_from(["", "WHERE K = 'a'", "WHERE K <> 'b' AND ID > 3", "WHERE V IS NOT NULL"]),
    st.sampled_from(["S DESC, ID", "S, ID DESC", "S DESC, K, ID", "S, K DESC, ID"]),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
def test_every_search_equals_the_scalar_one(
    shared: Database,
    rows: list[tuple[str, tuple[float, float] | None]],
    query: tuple[float, float],
    score: str,
    where: str,
    order: str,
    page: tuple[int, int],
) -> None:
    """Scores in order, and each with its row; rows of one score may change places, as single precision has it."""
    sql = Sql(shared.connect(USER))
    if shared.catalog.find("S", "T") is None:
        sql.run(CREATE)
    sql.run("DELETE FROM T")
    values = [(number, kind, None if pair is None else vector(*pair)) for number, (kind, pair) in enumerate(rows, 1)]
    if values:
        sql.many("INSERT INTO T (ID, K, V) VALUES (?,?,?)", values)
    text = f"SELECT ID, {score} FROM T {where} ORDER BY {order} LIMIT ? OFFSET ?"
    found, scalar = both_ways(sql, text, vector(*query), *page)
    everything = rounded(sql.rows(f"SELECT ID, {score} FROM T {where}", vector(*query)))
    sql.session.close()
    assert [row[1] for row in found] == [row[1] for row in scalar]
    assert len({row[0] for row in found}) == len(found)
    assert set(found) <= set(everything)


def test_dimension_is_checked_before_the_filter(sql: Sql) -> None:
    """A column without a fixed dimension: one row of another one spoils the search, as it may in HANA."""
    sql.run("CREATE TABLE T (ID INTEGER, V REAL_VECTOR)")
    sql.many("INSERT INTO T VALUES (?, ?)", [(1, vector(1, 0)), (2, vector(1, 0, 0))])
    with pytest.raises(HanaError) as caught:
        sql.rows(f"SELECT TOP 1 ID, {COSINE} FROM T ORDER BY S DESC", Q)
    assert caught.value.code == 8
    assert "2" in caught.value.text
    assert "3" in caught.value.text
