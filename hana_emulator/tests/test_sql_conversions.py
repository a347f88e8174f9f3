"""From every kind of type to every other, by CAST and into a column; exact decimals; what the numbers refuse."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal, localcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulator_sql import USER, Sql, open_database, vector
from hana_emulator.errors import HanaError
from hana_emulator.sql.database import Database


@pytest.fixture(scope="module")
def shared() -> Iterator[Database]:
    opened = open_database()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def quick(shared: Database) -> Sql:
    """A session on a database of the whole module: nothing here changes tables that another test reads."""
    return Sql(shared.connect(USER))


# --- the matrix -------------------------------------------------------------------------------------------------------

TARGETS = [
    *("INTEGER", "DECIMAL(5,1)", "DOUBLE", "BOOLEAN", "NVARCHAR(30)", "NCLOB"),
    *("DATE", "TIME", "SECONDDATE", "TIMESTAMP", "VARBINARY(9)", "REAL_VECTOR(2)"),
]


class Code(int):
    """An error code, apart from a value that happens to be equal."""


NO, BAD_NUMBER, BAD_DATE = Code(266), Code(339), Code(303)
NO_VECTOR, TOO_LARGE = (Code(8), NO), Code(274)
"""By CAST, text is read as a vector; into a column it needs TO_REAL_VECTOR."""
DAY, CLOCK, SECOND = "2024-02-29", "10:11:12", "2024-02-29 10:11:12"
TICK, FULL, MIDNIGHT = f"{SECOND}.5000000", f"{SECOND}.0000000", f"{DAY} 00:00:00.0000000"
FOUR, DATES, NUMBERS = (NO,) * 4, (BAD_DATE,) * 4, (BAD_NUMBER,) * 3
"""No number, boolean, binary or vector becomes a date or time, and none of these a number."""
MATRIX: dict[str, tuple[object, ...]] = {
    # INTEGER DECIMAL DOUBLE BOOLEAN NVARCHAR NCLOB DATE TIME SECONDDATE TIMESTAMP VARBINARY REAL_VECTOR
    "7": (7, "7.0", 7.0, 1, "7", "7", *FOUR, NO, NO),
    "7.55": (7, "7.6", 7.55, 1, "7.55", "7.55", *FOUR, NO, NO),
    "-7.55": (-7, "-7.6", -7.55, 1, "-7.55", "-7.55", *FOUR, NO, NO),
    "0.00": (0, "0.0", 0.0, 0, "0.00", "0.00", *FOUR, NO, NO),
    "7.55e0": (7, "7.6", 7.55, 1, "7.55", "7.55", *FOUR, NO, NO),
    "TRUE": (1, "1.0", 1.0, 1, "TRUE", "TRUE", *FOUR, NO, NO),
    "FALSE": (0, "0.0", 0.0, 0, "FALSE", "FALSE", *FOUR, NO, NO),
    "' 12.5 '": (12, "12.5", 12.5, NO, " 12.5 ", " 12.5 ", *DATES, b" 12.5 ", NO_VECTOR),
    "'x'": (*NUMBERS, NO, "x", "x", *DATES, b"x", NO_VECTOR),
    "''": (*NUMBERS, NO, "", "", *DATES, b"", NO_VECTOR),
    "'on'": (*NUMBERS, 1, "on", "on", *DATES, b"on", NO_VECTOR),
    "TO_NCLOB('7')": (7, "7.0", 7.0, NO, "7", "7", *DATES, b"7", NO_VECTOR),
    f"'{DAY}'": (
        *NUMBERS,
        NO,
        DAY,
        DAY,
        DAY,
        BAD_DATE,
        f"{DAY} 00:00:00",
        MIDNIGHT,
        (DAY.encode(), TOO_LARGE),
        NO_VECTOR,
    ),
    f"DATE '{DAY}'": (*FOUR, DAY, DAY, DAY, NO, f"{DAY} 00:00:00", MIDNIGHT, NO, NO),
    f"TIME '{CLOCK}'": (*FOUR, CLOCK, CLOCK, NO, CLOCK, NO, NO, NO, NO),
    f"CAST('{SECOND}' AS SECONDDATE)": (*FOUR, SECOND, SECOND, DAY, CLOCK, SECOND, FULL, NO, NO),
    f"TIMESTAMP '{SECOND}.5'": (*FOUR, TICK, TICK, DAY, CLOCK, SECOND, TICK, NO, NO),
    "X'41'": (*FOUR, "A", "A", *FOUR, b"A", Code(8)),
    "TO_REAL_VECTOR('[1,2]')": (*FOUR, "[1,2]", "[1,2]", *FOUR, NO, vector(1, 2)),
    "NULL": (None,) * 12,
}
CASES = [
    (source, target, *(expected if isinstance(expected, tuple) else (expected, expected)))
    for source, row in MATRIX.items()
    for target, expected in zip(TARGETS, row, strict=True)
]


@pytest.fixture(scope="module")
def columns(quick: Sql) -> Sql:
    for number, target in enumerate(TARGETS):
        quick.run(f"CREATE TABLE C{number} (A {target})")
    return quick


def outcome(sql: Sql, text: str) -> object:
    try:
        return sql.value(text)
    except HanaError as error:
        return Code(error.code)


@pytest.mark.parametrize(("source", "target", "by_cast", "by_insert"), CASES)
def test_conversion(columns: Sql, source: str, target: str, by_cast: object, by_insert: object) -> None:
    found = outcome(columns, f"SELECT CAST({source} AS {target}) FROM DUMMY")
    assert (found, type(found)) == (by_cast, type(by_cast))
    table = f"C{TARGETS.index(target)}"
    columns.run(f"DELETE FROM {table}")
    for form in (f"VALUES ({source})", f"SELECT {source} FROM DUMMY"):
        if isinstance(by_insert, Code):
            assert columns.code(f"INSERT INTO {table} {form}") == by_insert
            continue
        columns.run(f"INSERT INTO {table} {form}")
        found = columns.value(f"SELECT A FROM {table}")
        assert (found, type(found)) == (by_insert, type(by_insert))
        columns.run(f"UPDATE {table} SET A = {source}")
        assert columns.value(f"SELECT A FROM {table}") == by_insert
        columns.run(f"DELETE FROM {table}")


# --- ranges -----------------------------------------------------------------------------------------------------------

RANGES = [
    ("TINYINT", 0, 255),
    ("SMALLINT", -(2**15), 2**15 - 1),
    ("INTEGER", -(2**31), 2**31 - 1),
    ("BIGINT", -(2**63), 2**63 - 1),
]


@pytest.mark.parametrize(("kind", "low", "high"), RANGES)
@pytest.mark.parametrize(
    "form", ["CAST({} AS {kind})", "CAST('{}' AS {kind})", "CAST({}.9 AS {kind})", "TO_{kind}({})"]
)
def test_integers_end_where_the_type_ends(quick: Sql, form: str, kind: str, low: int, high: int) -> None:
    for border in (low, high):
        assert quick.evaluate(form.format(border, kind=kind)) == border
    for beyond in (low - 1, high + 1):
        assert quick.code(f"SELECT {form.format(beyond, kind=kind)} FROM DUMMY") == 314


NOT_EXACT = [
    ("CAST(0.1 AS REAL)", 0.10000000149011612),
    ("CAST('16777217' AS REAL)", 16777216.0),
    ("TO_REAL(16777219)", 16777220.0),
    ("CAST(1e300 * 1e8 AS DOUBLE)", 1e308),
    ("CAST('1E2' AS INTEGER)", 100),
    ("CAST('😀😀' AS NVARCHAR(3))", "😀\ufffd"),
    ("CAST('😀b' AS NVARCHAR(2))", "😀"),
    ("CAST(? AS INTEGER)", 42),
    ("CAST(? AS DECIMAL(4,1))", "42.0"),
    ("CAST(? AS NVARCHAR(1))", "4"),
    ("'1e-7000' + 1", "1"),
    ("-0.0", "0.0"),
    ("- 0.000", "0.000"),
]


@pytest.mark.parametrize(("expression", "expected"), NOT_EXACT)
def test_value_that_a_cast_changes(quick: Sql, expression: str, expected: object) -> None:
    found = quick.evaluate(expression, *["42"] * expression.count("?"))
    assert (found, type(found)) == (expected, type(expected))


REFUSED = [
    ("CAST('1e39' AS REAL)", 314),
    ("TO_REAL(1e39)", 314),
    ("1e308 * 10", 314),
    ("-1e308 - 1e308", 314),
    ("1e400", 314),
    ("1e", 257),
    ("1.5E", 257),
    ("CAST('1e400' AS DOUBLE)", 314),
    ("99999999999999999.99 / (7 / 1e308)", 314),
    ("CAST('1e7000' AS DECIMAL)", 314),
    ("CAST('1e6000' AS DECIMAL) * CAST('1e6000' AS DECIMAL)", 314),
    ("SUM('1e3082147483647')", 314),
    ("SUM('x')", 339),
    ("POWER(10, 400)", 314),
    ("LPAD('a', 40000)", 306),
    ("EXP(1000)", 314),
    ("CAST('inf' AS DOUBLE)", 339),
    ("CAST('NaN' AS DOUBLE)", 339),
    ("TO_DOUBLE('Infinity')", 339),
    ("CAST('NaN' AS DECIMAL)", 339),
    ("CAST('1_000' AS INTEGER)", 339),
    ("CAST('1_000' AS DECIMAL(9,2))", 339),
    ("TO_DOUBLE('1_0')", 339),
    ("CAST('٣' AS INTEGER)", 339),
    ("CAST('0x10' AS INTEGER)", 339),
    ("CAST('1,5' AS DOUBLE)", 339),
    ("CAST('--1' AS INTEGER)", 339),
    ("'x' * 2", 339),
    ("SQRT('x')", 339),
    ("ABS(-9223372036854775808)", 314),
    ("-(-9223372036854775808)", 314),
    ("9223372036854775807 * 2", 314),
    ("ROUND(9223372036854775807, -1)", 314),
    ("CAST(999.96 AS DECIMAL(4,1))", 314),
    ("TO_DECIMAL('12345', 4, 0)", 314),
    ("5 / 0", 304),
    ("5.0 / 0.00", 304),
    ("5e0 / 0e0", 304),
    ("'5' / '0'", 304),
    ("SQRT(-1)", 306),
    ("LN(0)", 306),
    ("LOG(1, 5)", 306),
    ("ACOS(2)", 306),
    ("ROUND(1.5, 'x')", 339),
    ("TO_DECIMAL('1', 'a', 'b')", 257),
    ("CAST('[1,2]' AS REAL_VECTOR(3))", 20005),
    ("CAST(TO_REAL_VECTOR('[1,2]') AS REAL_VECTOR(1))", 20005),
    ("DATE '2024-02-29' + 1", 266),
    ("NCHAR(1114112)", 306),
]


@pytest.mark.parametrize(("expression", "code"), REFUSED)
def test_value_that_has_no_place_in_the_type(quick: Sql, expression: str, code: int) -> None:
    assert quick.code(f"SELECT {expression} FROM DUMMY") == code


def test_a_value_of_the_same_type_is_still_measured(sql: Sql) -> None:
    """SQLite would store anything: what an expression may outgrow is checked at the column."""
    sql.run("CREATE TABLE T (N NVARCHAR(3), S SMALLINT, V REAL_VECTOR(2), D DECIMAL(5,2), R REAL)")
    sql.run("CREATE TABLE W (V REAL_VECTOR(3), A REAL_VECTOR, D DECIMAL(4,1), N NVARCHAR(4))")
    sql.run("INSERT INTO T VALUES ('ßßß', 32767, ?, '999.99', 0.1)", vector(1, 2))
    assert sql.value("SELECT R FROM T") == 0.10000000149011612
    assert sql.code("UPDATE T SET N = UPPER(N)") == 274
    assert sql.code("INSERT INTO T (N) SELECT UPPER(N) FROM T") == 274
    assert sql.code("UPDATE T SET N = N || 'x'") == 274
    assert sql.code("UPDATE T SET S = S + 1") == 314
    assert sql.code("UPDATE T SET D = D + 0.01") == 314
    assert sql.code("INSERT INTO W (V) SELECT V FROM T") == 20005
    assert sql.code("INSERT INTO W (D) SELECT D FROM T") == 314
    sql.run("INSERT INTO W (A, N) SELECT V, N FROM T")
    assert sql.rows("SELECT A, N FROM W") == [(vector(1, 2), "ßßß")]


# --- decimals ---------------------------------------------------------------------------------------------------------

EXACT = [
    ("0.1 + 0.2", "0.3"),
    ("0.1 * 0.1", "0.01"),
    ("0.30 - 0.3", "0.00"),
    ("1.0 / 3", "0.3333333333333333333333333333333333"),
    ("2 / 3.0", "0.6666666666666666666666666666666667"),
    ("1 / 4", "0.25"),
    ("1.10 + 2", "3.10"),
    ("99999999999999999999999999999999999.99 + 0.01", "100000000000000000000000000000000000.00"),
    ("CAST('0.000000000000000000000000000000000001' AS DECIMAL(38,36)) * 10", "0.00000000000000000000000000000000001"),
    ("CAST(2.5 AS DECIMAL(1,0))", "3"),
    ("CAST(-2.5 AS DECIMAL(1,0))", "-3"),
    ("CAST(-0.4 AS DECIMAL(3,0))", "0"),
    ("CAST(1.005 AS DECIMAL(3,2))", "1.01"),
    ("ROUND(1.005, 2)", "1.01"),
    ("MOD(10.5, 3)", "1.5"),
    ("MOD(-10.5, 3)", "-1.5"),
    ("FLOOR(-0.5)", "-1"),
    ("CEIL(-0.5)", "0"),
    ("CAST(1e0 / 3 AS DECIMAL(5,4))", "0.3333"),
]


@pytest.mark.parametrize(("expression", "expected"), EXACT)
def test_decimals_are_exact(quick: Sql, expression: str, expected: str) -> None:
    assert quick.evaluate(expression) == expected


prices = st.decimals(min_value=-99_999, max_value=99_999, places=3, allow_nan=False, allow_infinity=False)
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(st.lists(prices, min_size=1, max_size=8))
def test_aggregates_of_decimals_are_exact_and_keep_their_scale(shared: Database, values: list[Decimal]) -> None:
    sql = Sql(shared.connect(USER))
    sql.autocommit = False
    if shared.catalog.find("S", "P") is None:
        sql.run("CREATE TABLE P (D DECIMAL(8,3))")
    sql.many("INSERT INTO P VALUES (?)", [(str(value),) for value in values])
    found = sql.rows("SELECT SUM(D), SUM(DISTINCT D), MIN(D), MAX(D), COUNT(DISTINCT D) FROM P")
    grouped = sql.column("SELECT D FROM P GROUP BY D ORDER BY D")
    mean = sql.value("SELECT AVG(D) FROM P")
    sql.session.close()
    distinct = sorted(set(values))
    sized = [f"{number or abs(number):.3f}" for number in (sum(values), sum(distinct), distinct[0], distinct[-1])]
    assert found == [(*sized, len(distinct))]
    assert grouped == [f"{number or abs(number):.3f}" for number in distinct]
    with localcontext() as context:
        context.prec = 34
        assert Decimal(mean) == sum(values) / len(values)


@few
@given(prices, prices)
def test_decimal_arithmetic_agrees_with_python(shared: Database, left: Decimal, right: Decimal) -> None:
    sql = Sql(shared.connect(USER))
    cast = [f"CAST('{number}' AS DECIMAL(8,3))" for number in (left, right)]
    texts = [f"{cast[0]} {operator} {cast[1]}" for operator in "+-*"]
    found = [Decimal(value) for value in sql.rows(f"SELECT {', '.join(texts)} FROM DUMMY")[0]]
    cents = sql.evaluate(f"ROUND({cast[0]}, 1)")
    order = sql.evaluate(f"CASE WHEN {cast[0]} < {cast[1]} THEN -1 WHEN {cast[0]} = {cast[1]} THEN 0 ELSE 1 END")
    sql.session.close()
    assert found == [left + right, left - right, left * right]
    assert Decimal(cents) == left.quantize(Decimal("0.1"), rounding=ROUND_HALF_UP)
    assert order == (left > right) - (left < right)
