"""Aggregates and window functions on the emulator, against figures computed by hand or by Python's statistics."""

from __future__ import annotations

import statistics

import pytest

from emulator_sql import Sql

ROWS = [(1, "a", 1.0, "10.5"), (2, "a", 2.0, "9.5"), (3, "a", 4.0, None), (4, "b", 8.0, "100"), (5, "b", None, "20")]
VALUES = [row[2] for row in ROWS if row[2] is not None]


@pytest.fixture(scope="module")
def filled(shared: Sql) -> Sql:
    shared.run("CREATE TABLE T (ID INTEGER, K NVARCHAR(3), X DOUBLE, D DECIMAL(10,2))")
    shared.many("INSERT INTO T VALUES (?, ?, ?, ?)", ROWS)
    return shared


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("STDDEV(X)", statistics.stdev(VALUES)),
        ("STDDEV_SAMP(X)", statistics.stdev(VALUES)),
        ("STDDEV_POP(X)", statistics.pstdev(VALUES)),
        ("VAR(X)", statistics.variance(VALUES)),
        ("VAR_SAMP(X)", statistics.variance(VALUES)),
        ("VAR_POP(X)", statistics.pvariance(VALUES)),
        ("MEDIAN(X)", 3.0),
        ("MEDIAN(D)", 15.25),
        ("CORR(ID, X)", statistics.correlation([1, 2, 3, 4], VALUES)),
        ("PERCENTILE_CONT(0.5) WITHIN GROUP (ORDER BY X)", 3.0),
        ("PERCENTILE_CONT(0.25) WITHIN GROUP (ORDER BY X)", 1.75),
        ("PERCENTILE_CONT(0.25) WITHIN GROUP (ORDER BY X DESC)", 5.0),
        ("PERCENTILE_DISC(0.5) WITHIN GROUP (ORDER BY X)", 2.0),
        ("PERCENTILE_DISC(1) WITHIN GROUP (ORDER BY X)", 8.0),
        ("STRING_AGG(K, ',' ORDER BY K DESC, ID)", "b,b,a,a,a"),
        ("STRING_AGG(TO_NVARCHAR(ID), '' ORDER BY D)", "32154"),
        ("STRING_AGG(TO_NVARCHAR(ID), '' ORDER BY D NULLS LAST)", "21543"),
        ("STRING_AGG(K ORDER BY ID)", "aaabb"),
    ],
)
def test_aggregate(filled: Sql, aggregate: str, expected: object) -> None:
    found = filled.value(f"SELECT {aggregate} FROM T")
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)
    assert filled.value(f"SELECT {aggregate} FROM T WHERE ID < 0") is None


def test_grouped(filled: Sql) -> None:
    text = "SELECT K, STDDEV_POP(X), PERCENTILE_DISC(0.5) WITHIN GROUP (ORDER BY ID) FROM T GROUP BY K ORDER BY K"
    assert filled.rows(text) == [("a", pytest.approx(statistics.pstdev([1, 2, 4])), 2.0), ("b", 0.0, 4.0)]
    assert filled.code("SELECT ID, MEDIAN(X) FROM T") == 276
    assert filled.code("SELECT ID, PERCENTILE_CONT(0.5) WITHIN GROUP (ORDER BY X) FROM T") == 276


WINDOWS = [
    ("ROW_NUMBER() OVER (ORDER BY ID DESC)", [5, 4, 3, 2, 1]),
    ("RANK() OVER (ORDER BY K)", [1, 1, 1, 4, 4]),
    ("DENSE_RANK() OVER (ORDER BY K)", [1, 1, 1, 2, 2]),
    ("NTILE(2) OVER (ORDER BY ID)", [1, 1, 1, 2, 2]),
    ("LAG(ID) OVER (ORDER BY ID)", [None, 1, 2, 3, 4]),
    ("LEAD(ID, 2, 0) OVER (ORDER BY ID)", [3, 4, 5, 0, 0]),
    ("FIRST_VALUE(ID) OVER (PARTITION BY K ORDER BY ID DESC)", [3, 3, 3, 5, 5]),
    ("LAST_VALUE(ID) OVER (PARTITION BY K)", [3, 3, 3, 5, 5]),
    ("SUM(ID) OVER (PARTITION BY K ORDER BY ID)", [1, 3, 6, 4, 9]),
    ("SUM(ID) OVER (ORDER BY ID ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)", [1, 3, 5, 7, 9]),
    ("COUNT(*) OVER ()", [5, 5, 5, 5, 5]),
    ("MEDIAN(X) OVER (PARTITION BY K)", [2.0, 2.0, 2.0, 8.0, 8.0]),
    ("MEDIAN(ID) OVER (ORDER BY ID ROWS BETWEEN 2 PRECEDING AND CURRENT ROW)", [1.0, 1.5, 2.0, 3.0, 4.0]),
    ("MEDIAN(X) OVER (ORDER BY ID ROWS BETWEEN CURRENT ROW AND CURRENT ROW)", [1.0, 2.0, 4.0, 8.0, None]),
    ("STRING_AGG(K, '') OVER (ORDER BY ID ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)", ["a", "aa", "aa", "ab", "bb"]),
    ("PERCENTILE_CONT(0.5) WITHIN GROUP (ORDER BY X) OVER (PARTITION BY K)", [2.0, 2.0, 2.0, 8.0, 8.0]),
    ("CUME_DIST() OVER (ORDER BY K)", [0.6, 0.6, 0.6, 1.0, 1.0]),
]


@pytest.mark.parametrize(("function", "expected"), WINDOWS)
def test_window(filled: Sql, function: str, expected: list[object]) -> None:
    assert [value for _, value in filled.rows(f"SELECT ID, {function} FROM T ORDER BY ID")] == expected


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        ("CORR(ID)", 316),
        ("STRING_AGG()", 316),
        ("CORR(SUM(ID), ID)", 294),
        ("COUNT(*) WITHIN GROUP (ORDER BY ID)", 7),
        ("PERCENTILE_CONT(ID) WITHIN GROUP (ORDER BY X)", 257),
        ("PERCENTILE_CONT(0.5) WITHIN GROUP (ORDER BY X, ID)", 7),
    ],
)
def test_refuses(filled: Sql, expression: str, code: int) -> None:
    assert filled.code(f"SELECT {expression} FROM T") == code


def test_vectors_are_not_counted(sql: Sql) -> None:
    sql.run("CREATE TABLE V (A INTEGER, R REAL_VECTOR, H HALF_VECTOR(2))")
    for expression in ("COUNT(R)", "COUNT(DISTINCT H)", "COUNT(TO_REAL_VECTOR('[1]'))"):
        assert sql.code(f"SELECT {expression} FROM V") == 7
    assert sql.value("SELECT COUNT(*) FROM V WHERE R IS NOT NULL") == 0
    assert sql.code("CREATE HNSW VECTOR INDEX IF NOT EXISTS I ON V (R) SIMILARITY FUNCTION L2DISTANCE") == 257
