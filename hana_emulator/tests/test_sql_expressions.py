"""Where HANA's SQL differs from SQLite's: arithmetic, comparison, order, NULL, text; and the types of results."""

from __future__ import annotations

import pytest

from emulator_sql import Sql

VALUES = [
    # numbers
    ("7/2", "3.5"),
    ("7/7", "1"),
    ("1 + 2", 3),
    ("1.5 * 2", "3.0"),
    ("0.1 + 0.2", "0.3"),
    ("CAST('12345678901234567890.123456789' AS DECIMAL(38,9)) + 1", "12345678901234567891.123456789"),
    ("10 / 4e0", 2.5),
    ("-7", -7),
    ("- (3 - 5)", 2),
    ("MOD(-7, 3)", -1),
    ("MOD(7, 0)", 7),
    ("CAST('3.999' AS INTEGER)", 3),
    ("CAST(2.345 AS DECIMAL(5,2))", "2.35"),
    ("TO_DECIMAL('1.239', 10, 2)", "1.24"),
    ("ABS(-1.50)", "1.5"),
    ("9223372036854775807", 9223372036854775807),
    # text
    ("'a' || 'b' || 1", "ab1"),
    ("'a' || NULL", None),
    ("CONCAT('x', 2.50)", "x2.50"),
    ("LENGTH('')", 0),
    ("LENGTH('ab ')", 3),
    ("'it''s'", "it's"),
    ("N'é😀'", "é😀"),
    ("CAST('abcdef' AS NVARCHAR(3))", "abc"),
    ("UPPER('aé')", "AÉ"),
    ("X'00FF'", b"\x00\xff"),
    ("BINTOHEX(X'00FF')", "00FF"),
    # conditions and choices
    ("CASE WHEN '1' = 1 THEN 'same' ELSE 'other' END", "same"),
    ("CASE WHEN 1 = 1.0 THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 10.0 > '9' THEN 1 ELSE 0 END", 1),
    ("CASE WHEN '10' > '9' THEN 1 ELSE 0 END", 0),
    ("CASE WHEN 'a' = 'A' THEN 1 ELSE 0 END", 0),
    ("CASE WHEN 'a' = 'a ' THEN 1 ELSE 0 END", 0),
    ("CASE WHEN 'ABC' LIKE 'a%' THEN 1 ELSE 0 END", 0),
    ("CASE WHEN 'a%c' LIKE 'a#%c' ESCAPE '#' THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 'abc' NOT LIKE 'a%' THEN 1 ELSE 0 END", 0),
    ("CASE WHEN 'abc' NOT LIKE 'b%' THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 'a%c' NOT LIKE 'a#%c' ESCAPE '#' THEN 1 ELSE 0 END", 0),
    ("CASE WHEN NOT 'abc' LIKE 'b%' THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 3 NOT BETWEEN 1 AND 2 THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 3 NOT IN (1, 2) THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 3 IS NOT NULL AND NOT EXISTS (SELECT 1 FROM DUMMY WHERE 1 = 0) THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 'abc' LIKE 'a#%c' ESCAPE '#' THEN 1 ELSE 0 END", 0),
    ("CASE WHEN '' IS NULL THEN 1 ELSE 0 END", 0),
    ("CASE WHEN NULL = NULL THEN 1 ELSE 0 END", 0),
    ("CASE 3 WHEN 1 THEN 'a' WHEN 3 THEN 'c' END", "c"),
    ("CASE WHEN 1 = 0 THEN 5 END", None),
    ("CASE WHEN 1 = 1 THEN 1 ELSE 2.5 END", "1.0"),
    ("COALESCE(NULL, NULL, 3)", 3),
    ("IFNULL(NULL, 'x')", "x"),
    ("NULLIF(1, 1)", None),
    ("NULLIF('a', 'b')", "a"),
    ("MAP(2, 1, 'one', 2, 'two', 'many')", "two"),
    ("MAP(9, 1, 'one', 2, 'two', 'many')", "many"),
    ("GREATEST(1, 3, 2)", 3),
    ("LEAST(1, NULL)", None),
    ("CASE WHEN 2 IN (1, '2') THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 2 NOT IN (1, NULL) THEN 1 ELSE 0 END", 0),
    ("CASE WHEN 5 BETWEEN '1' AND 10.0 THEN 1 ELSE 0 END", 1),
    ("CASE WHEN TRUE = 'true' THEN 1 ELSE 0 END", 1),
    # dates
    ("DATE '2024-02-29'", "2024-02-29"),
    ("TIMESTAMP '2024-02-29 12:30:00.5'", "2024-02-29 12:30:00.5000000"),
    ("CAST('20240131' AS DATE)", "2024-01-31"),
    ("CAST(TIMESTAMP '2024-01-31 23:59:59' AS DATE)", "2024-01-31"),
    ("CASE WHEN DATE '2024-01-31' = '2024-01-31' THEN 1 ELSE 0 END", 1),
    ("CASE WHEN DATE '2024-01-31' < TIMESTAMP '2024-01-31 00:00:01' THEN 1 ELSE 0 END", 1),
    ("ADD_DAYS(TO_DATE('2024-02-28'), 2)", "2024-03-01"),
    ("DAYS_BETWEEN(TO_DATE('2024-01-01'), TO_DATE('2024-03-01'))", 60),
    ("EXTRACT(YEAR FROM DATE '2024-02-29')", 2024),
    ("EXTRACT(DAY FROM DATE '2024-02-29')", 29),
    ("CAST('longer than one' AS NVARCHAR)", "longer than one"),
    ("COSINE_SIMILARITY(TO_REAL_VECTOR('[1,0,0]'), TO_REAL_VECTOR('[0.5,0.8660254,0]'))", 0.5),
    # functions without parentheses
    ("CURRENT_USER", "OWL"),
    ("CURRENT_SCHEMA", "S"),
    ("LENGTH(BINTOHEX(SYSUUID))", 32),
    ("TO_NVARCHAR(TRUE)", "TRUE"),
    ("TO_NVARCHAR(TO_REAL_VECTOR('[1, 2.5]'))", "[1,2.5]"),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "expected"), VALUES)
def test_value(shared: Sql, expression: str, expected: object) -> None:
    assert shared.evaluate(expression) == expected


TYPES = [
    ("1", "INTEGER"),
    ("3000000000", "BIGINT"),
    ("1.5", "DECIMAL"),
    ("1e3", "DOUBLE"),
    ("'a'", "NVARCHAR"),
    ("TRUE", "BOOLEAN"),
    ("X'00'", "VARBINARY"),
    ("1 + 1", "BIGINT"),
    ("1 / 2", "DECIMAL"),
    ("1 + 1e0", "DOUBLE"),
    ("'a' || 'b'", "NVARCHAR"),
    ("LENGTH('a')", "INTEGER"),
    ("NULLIF(1, 2)", "INTEGER"),
    ("COALESCE(1, 2.5)", "DECIMAL"),
    ("CASE WHEN 1 = 1 THEN 'a' END", "NVARCHAR"),
    ("JSON_VALUE('{}', '$.a')", "NVARCHAR"),
    ("TO_REAL_VECTOR('[1]')", "REAL_VECTOR"),
    ("COSINE_SIMILARITY(TO_REAL_VECTOR('[1]'), TO_REAL_VECTOR('[1]'))", "DOUBLE"),
    ("CURRENT_DATE", "DATE"),
    ("CURRENT_UTCTIMESTAMP", "TIMESTAMP"),
    ("ADD_DAYS(CURRENT_DATE, 1)", "DATE"),
    ("CAST(1 AS SMALLINT)", "SMALLINT"),
    ("CAST('x' AS NVARCHAR(7))", "NVARCHAR"),
    ("HASH_SHA256(TO_BINARY('a'))", "VARBINARY"),
    ("COUNT(*)", "BIGINT"),
    ("SUM(1)", "BIGINT"),
    ("SUM(1.5)", "DECIMAL"),
    ("AVG(1)", "DECIMAL"),
    ("MAX('a')", "NVARCHAR"),
    ("NULL", "NVARCHAR"),
    ("(SELECT 1.5 FROM DUMMY)", "DECIMAL"),
    ("ROW_NUMBER() OVER (ORDER BY DUMMY)", "BIGINT"),
]


@pytest.mark.parametrize(("expression", "expected"), TYPES)
def test_result_type(shared: Sql, expression: str, expected: str) -> None:
    assert shared.result_types(f"SELECT {expression} FROM DUMMY") == [expected]


ERRORS = [
    ("1 / 0", 304),
    ("1e0 / 0", 304),
    ("1.5 / 0.0", 304),
    ("9223372036854775807 + 1", 314),
    ("CAST('x' AS INTEGER)", 339),
    ("CAST(300 AS DECIMAL(2,0))", 314),
    ("'x' + 1", 339),
    ("CAST('2024-02-30' AS DATE)", 303),
    ("CAST('hello' AS DATE)", 303),
    ("NO_SUCH_FUNCTION(1)", 328),
    ("CAST(1 AS NO_SUCH_TYPE)", 264),
    ("COSINE_SIMILARITY(TO_REAL_VECTOR('[1]'))", 316),
    ("MOD(1)", 316),
    ("TRUE + 1", 266),
    ("SUM(COUNT(*))", 294),
    ("(SELECT 1, 2 FROM DUMMY)", 269),
    ("CASE WHEN 1 IN (SELECT 1, 2 FROM DUMMY) THEN 1 END", 269),
    ("X'0'", 257),
]


@pytest.mark.parametrize(("expression", "code"), ERRORS)
def test_error(shared: Sql, expression: str, code: int) -> None:
    assert shared.code(f"SELECT {expression} FROM DUMMY") == code


@pytest.fixture(scope="module")
def table(shared: Sql) -> Sql:
    shared.run("CREATE TABLE T (I INTEGER, D DECIMAL(10,2), N NVARCHAR(10), C NCLOB, F DOUBLE)")
    rows = [
        (1, "10.5", "b", "x", 0.5),
        (2, "9", "a", "y", 1.5),
        (3, None, "B", None, None),
        (None, "-1", None, "", 2.5),
    ]
    shared.many("INSERT INTO T VALUES (?,?,?,?,?)", rows)
    return shared


def test_nulls_come_first_ascending_and_last_descending(table: Sql) -> None:
    assert table.column("SELECT I FROM T ORDER BY I") == [None, 1, 2, 3]
    assert table.column("SELECT I FROM T ORDER BY I DESC") == [3, 2, 1, None]
    assert table.column("SELECT I FROM T ORDER BY I NULLS LAST") == [1, 2, 3, None]
    assert table.column("SELECT I FROM T ORDER BY I DESC NULLS FIRST") == [None, 3, 2, 1]


def test_text_is_ordered_by_code_point(table: Sql) -> None:
    assert table.column("SELECT N FROM T WHERE N IS NOT NULL ORDER BY N") == ["B", "a", "b"]


def test_decimals_compare_and_sort_as_numbers(table: Sql) -> None:
    assert table.column("SELECT D FROM T WHERE D IS NOT NULL ORDER BY D") == ["-1.00", "9.00", "10.50"]
    assert table.column("SELECT I FROM T WHERE D > 9.5") == [1]
    assert table.column("SELECT I FROM T WHERE D > ? ORDER BY I", "9") == [1]
    assert table.rows("SELECT MAX(D), MIN(D), SUM(D), COUNT(D) FROM T") == [("10.50", "-1.00", "18.50", 3)]


def test_decimals_compare_with_integers_and_doubles(table: Sql) -> None:
    assert table.column("SELECT I FROM T WHERE D = 9") == [2]
    assert table.column("SELECT I FROM T WHERE D < F") == [None]
    assert table.column("SELECT I FROM T WHERE I = D - 7") == [2]


def test_average_of_integers_is_exact(table: Sql) -> None:
    assert table.rows("SELECT AVG(I), AVG(F), SUM(I), SUM(F) FROM T") == [("2", 1.5, 6, 4.5)]
    assert table.rows("SELECT SUM(I), AVG(D), MAX(N), COUNT(*) FROM T WHERE 1 = 0") == [(None, None, None, 0)]


def test_text_against_number_converts_the_text(table: Sql) -> None:
    assert table.column("SELECT I FROM T WHERE '2' = I") == [2]
    assert table.code("SELECT I FROM T WHERE N = 1") == 339


def test_lobs_do_not_compare_sort_or_group(table: Sql) -> None:
    for text in (
        "SELECT I FROM T WHERE C = 'x'",
        "SELECT I FROM T WHERE C IN ('x')",
        "SELECT I FROM T ORDER BY C",
        "SELECT C FROM T GROUP BY C",
        "SELECT DISTINCT C FROM T",
        "SELECT C FROM T UNION SELECT C FROM T",
    ):
        assert table.code(text) == 266
    assert table.column("SELECT I FROM T WHERE C LIKE 'x%'") == [1]
    assert table.column("SELECT I FROM T WHERE TO_NVARCHAR(C) = 'y'") == [2]
    assert table.column("SELECT I FROM T WHERE C IS NULL") == [3]


def test_long_chains_of_conditions_are_no_problem(table: Sql) -> None:
    chain = " OR ".join(f'("I" = {number} AND "N" = ?)' for number in range(1500))
    assert table.column(f"SELECT I FROM T WHERE {chain}", *["a"] * 1500) == [2]


def test_string_agg_and_spread(table: Sql) -> None:
    assert table.value("SELECT STRING_AGG(N, ',' ORDER BY N DESC) FROM T") == "b,a,B"
    assert table.value("SELECT STRING_AGG(N, '') FROM T WHERE N = 'a'") == "a"
    assert table.rows("SELECT MEDIAN(F), STDDEV(F), VAR(F) FROM T") == [(1.5, 1.0, 1.0)]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("ROUND(2.345, 2)", "2.35"),
        ("ROUND(-2.5)", "-3"),
        ("ROUND(25, -1)", 30),
        ("ROUND(2.5e0)", 3.0),
        ("FLOOR(-1.5)", "-2"),
        ("CEIL(1.1)", "2"),
        ("CEILING(7)", 7),
        ("ABS(-7)", 7),
        ("ABS(-7.5e0)", 7.5),
        ("ROUND(NULL)", None),
    ],
)
def test_rounding_keeps_the_kind_of_number(shared: Sql, expression: str, expected: object) -> None:
    found = shared.evaluate(expression)
    assert found == expected
    assert type(found) is type(expected)
