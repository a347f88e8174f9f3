"""Whatever the text, the SQL side answers or raises a HanaError with a meaningful code; messages leak nothing."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator_sql import STATEMENTS, USER, Sql, open_database
from hana_emulator.errors import HanaError
from hana_emulator.sql.functions.signatures import SIGNATURES
from hana_emulator.types import BINARIES, FLOATS, VECTORS, HanaType, TypeCode

WORDS = [
    *("SELECT", "FROM", "T", "WHERE", "A", "B", "C", "*", ",", "(", ")", "=", "<>", "<", "+", "-", "/", "||", "?", "1"),
    *("'x'", "NULL", "AND", "OR", "NOT", "IN", "LIKE", "BETWEEN", "IS", "CASE", "WHEN", "THEN", "END", "AS", "ORDER"),
    *("GROUP", "BY", "LIMIT", "TOP", "DISTINCT", "UNION", "EXCEPT", "JOIN", "ON", "COUNT", "SUM", "CAST", "INSERT"),
    *(
        "INTO",
        "VALUES",
        "UPDATE",
        "SET",
        "DELETE",
        "UPSERT",
        "WITH",
        "PRIMARY",
        "KEY",
        "CREATE",
        "TABLE",
        "VIEW",
        "DROP",
    ),
    *(
        "COMMENT",
        '"q"',
        ".",
        ";",
        "OVER",
        "EXISTS",
        "DUMMY",
        "DATE",
        "TRIM",
        "ESCAPE",
        "FOR",
        "HINT",
        "INTERVAL",
        "2.5",
    ),
    *("[", "]", ":", "@", "::", "%"),
]


def garbled(chance: random.Random) -> str:
    """A known statement with one to four words replaced, added, dropped or moved."""
    words = chance.choice(STATEMENTS).split()
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(words))
        kind = chance.random()
        if kind < 0.4:
            words[place] = chance.choice(WORDS)
        elif kind < 0.7:
            words.insert(place, chance.choice(WORDS))
        elif len(words) > 2:
            words.append(words.pop(place))
    return " ".join(words)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_garbled_statements_end_in_a_hana_error_or_run(sql: Sql, seed: int) -> None:
    sql.run("CREATE TABLE T (A INTEGER PRIMARY KEY, B NVARCHAR(10), C NCLOB, D DECIMAL(5,2))")
    chance = random.Random(seed)
    codes = set()
    for _ in range(250):
        try:
            statement = sql.prepare(garbled(chance))
            row = (None,) * len(statement.parameters)
            list(sql.session.execute(statement, [row], autocommit=True).rows or ())
        except HanaError as error:
            codes.add(error.code)
    assert 257 in codes
    assert 2 not in codes, "a general error means that SQLite refused what we let through"
    assert sql.evaluate("1") == 1


@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 3000 + "1" + ")" * 3000 + " FROM DUMMY",
        "SELECT " + "NOT " * 3000 + "1=1 FROM DUMMY",
        "(" * 5000,
        "'",
    ],
)
def test_deep_nesting_is_refused(shared: Sql, text: str) -> None:
    assert shared.code(text) == 257


def test_neither_log_nor_message_repeats_the_statement(sql: Sql, caplog: pytest.LogCaptureFixture) -> None:
    sql.run("CREATE TABLE T (A INTEGER, N NVARCHAR(3))")
    caplog.set_level(logging.DEBUG)
    for text in (
        "SELECT A FROM T WHERE N = 'hush-hush' AND",
        "SELECT A FROM T WHERE N = 'x' 'hush-hush'",
        "COMMENT 'hush-hush' COLUMN",
        "INSERT INTO T (N) VALUES ('hush-hush')",
        "INSERT INTO T (A) VALUES ('hush-hush')",
        "SELECT CAST('hush-hush' AS DATE) FROM DUMMY",
        "SELECT * FROM T WHERE A = 'hush-hush'",
        "INSERT INTO T VALUES (1, 2, 'hush-hush')",
    ):
        sql.run("INSERT INTO T VALUES (1, 'x')")
        with pytest.raises(HanaError) as caught:
            sql.rows(text)
        assert "hush" not in caught.value.text
    assert "hush" not in caplog.text
    assert "hush" not in str(caplog.records)


def test_half_a_surrogate_pair_is_refused_clearly(sql: Sql) -> None:
    sql.run("CREATE TABLE T (N NVARCHAR(3), C NCLOB)")
    sql.run("INSERT INTO T VALUES ('a', 'b')")
    for text, parameters in (
        ("INSERT INTO T (N) VALUES (?)", ["\ud83d"]),
        ("INSERT INTO T (C) VALUES (?)", ["\ude00 x"]),
        ("UPDATE T SET N = ?", ["\udc00"]),
        ("SELECT N FROM T WHERE N = ?", ["\ud83d"]),
        ("SELECT '\ud83d' FROM DUMMY", []),
        ('CREATE TABLE "\ud83d" (A INTEGER)', []),
    ):
        with pytest.raises(HanaError, match="surrogate") as caught:
            sql.rows(text, *parameters)
        assert caught.value.code == 2
    assert sql.rows("SELECT * FROM T") == [("a", "b")]
    assert sql.evaluate("SUBSTRING('😀', 1, 1) || LEFT('a😀', 2) || RIGHT('😀b', 2)") == "\ufffda\ufffd\ufffdb"


def test_text_with_nul_and_control_characters_is_kept(sql: Sql) -> None:
    sql.run("CREATE TABLE T (N NVARCHAR(9), C NCLOB)")
    sql.run("INSERT INTO T VALUES (?, ?)", "a\0b\n\x7f", "\0")
    assert sql.rows("SELECT * FROM T") == [("a\0b\n\x7f", "\0")]


# --- results keep the promise of types.py -----------------------------------------------------------------------------

LITERALS = [
    *("NULL", "0", "-1", "7", "255", "2147483647", "-9223372036854775808", "1.50", "-0.0", "99999999999999999.99"),
    *(
        "0e0",
        "-2.5e0",
        "1e308",
        "TRUE",
        "''",
        "'a'",
        "' 12 '",
        "'ä😀'",
        "'2024-02-29'",
        "'YYYY-MM-DD'",
        "'[1,2]'",
        "'$.a'",
    ),
    *("""'{"a":[1,"\\ud83d"]}'""", "DATE '9999-12-31'", "TIME '23:59:59'", "TIMESTAMP '2024-02-29 01:02:03.5'", "X''"),
    *("X'FF00'", "X'0100000000000080'", "TO_REAL_VECTOR('[1,-2]')", "TO_HALF_VECTOR('[1]')", "TO_NCLOB('long')"),
]
TYPES = [
    *(
        "TINYINT",
        "SMALLINT",
        "INTEGER",
        "BIGINT",
        "DECIMAL(5,2)",
        "DECIMAL",
        "SMALLDECIMAL",
        "REAL",
        "DOUBLE",
        "BOOLEAN",
    ),
    *("NVARCHAR(2)", "NCLOB", "VARBINARY(3)", "BLOB", "DATE", "TIME", "SECONDDATE", "TIMESTAMP", "REAL_VECTOR(2)"),
]
NAMES = [
    *("ABS", "ROUND", "FLOOR", "CEIL", "MOD", "GREATEST", "LEAST", "COALESCE", "NULLIF", "CONCAT", "TO_DECIMAL", "MAP"),
    *("TO_BOOLEAN", "IFNULL", "SUM", "AVG", "MIN", "MAX", "COUNT", "STRING_AGG", "STDDEV"),
    *sorted(SIGNATURES),
]

literals = st.sampled_from(LITERALS)
expressions = st.recursive(
    literals,
    lambda inner: st.one_of(
        st.builds("{}({})".format, st.sampled_from(NAMES), st.lists(inner, max_size=3).map(", ".join)),
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "||"]), inner),
        st.builds("CAST({} AS {})".format, inner, st.sampled_from(TYPES)),
        st.builds("CASE WHEN {0} {1} {2} THEN {0} ELSE {2} END".format, inner, st.sampled_from(["=", "LIKE"]), inner),
        st.builds("(- {})".format, inner),
    ),
    max_leaves=5,
)  # fmt: skip

RANGES = {
    TypeCode.TINYINT: (0, 255),
    TypeCode.SMALLINT: (-(2**15), 2**15 - 1),
    TypeCode.INTEGER: (-(2**31), 2**31 - 1),
    TypeCode.BIGINT: (-(2**63), 2**63 - 1),
    TypeCode.BOOLEAN: (0, 1),
}
MOMENTS = {
    TypeCode.DATE: r"\d{4}-\d\d-\d\d",
    TypeCode.TIME: r"\d\d:\d\d:\d\d",
    TypeCode.SECONDDATE: r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d",
    TypeCode.TIMESTAMP: r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{7}",
}


def keeps_its_promise(kind: HanaType, value: object) -> bool:
    """Whether `value` is a storage value of its declared type, as the wire side relies on."""
    if kind.code in RANGES:
        low, high = RANGES[kind.code]
        return type(value) is int and low <= value <= high
    if kind.code in FLOATS:
        return type(value) is float and math.isfinite(value) and (kind.code is TypeCode.DOUBLE or abs(value) < 3.5e38)
    if kind.code is TypeCode.DECIMAL:
        fraction = r"(\.\d+)?" if kind.scale > 38 else rf"\.\d{{{kind.scale}}}" if kind.scale else ""
        return isinstance(value, str) and re.fullmatch(r"-?\d+" + fraction, value) is not None
    if kind.code in MOMENTS:
        return isinstance(value, str) and re.fullmatch(MOMENTS[kind.code], value) is not None
    if kind.code in VECTORS:
        width = 4 if kind.code is TypeCode.REAL_VECTOR else 2
        return isinstance(value, bytes) and len(value) == 4 + width * int.from_bytes(value[:4], "little")
    if kind.code in BINARIES | {TypeCode.BLOB}:
        return isinstance(value, bytes)
    return isinstance(value, str) and value.encode() is not None


@pytest.fixture(scope="module")
def shared() -> Iterator[Sql]:
    opened = open_database()
    yield Sql(opened.connect(USER))
    opened.close()


def refusal(shared: Sql, text: str) -> HanaError | None:
    """The error of running `text`; any other exception is the test's failure."""
    try:
        shared.rows(text, *[None] * len(shared.prepare(text).parameters))
    except HanaError as error:
        return error
    return None


def value_or_refusal(shared: Sql, expression: str) -> None:
    text = f"SELECT {expression} FROM DUMMY"
    error = refusal(shared, text)
    assert error is None or error.code not in (2, 2048), error
    if error is not None:
        return
    (column,), ((value,),) = shared.prepare(text).columns, shared.rows(text)
    assert value is None or keeps_its_promise(column.type, value), (column.type, value)


@settings(max_examples=150, deadline=None)
@given(expressions)
def test_every_value_is_of_its_declared_type(shared: Sql, expression: str) -> None:
    value_or_refusal(shared, expression)


@settings(max_examples=75, deadline=None)
@given(st.sampled_from(NAMES), st.lists(literals, max_size=3))
def test_every_function_takes_or_refuses_any_argument(shared: Sql, name: str, arguments: list[str]) -> None:
    value_or_refusal(shared, f"{name}({', '.join(arguments)})")


ONCE_WRONG = [
    "STRING_AGG()",
    "GREATEST()",
    "SECOND(255)",
    "CAST(300 AS TINYINT)",
    "CAST(SECOND(TIME '23:59:59') AS NCLOB)",
    "SUM('1e3082147483647')",
    "CAST('1e400000' AS DECIMAL)",
    "TO_SMALLDECIMAL('1e-400000')",
    "99999999999999999.99 / (7 / 1e308)",
    "LPAD('a', 99999999999999999.99)",
    "RPAD('a', 1e308)",
    "SUBSTR_BEFORE('a', '') || SUBSTR_AFTER('a', '')",
    "TO_DECIMAL('1', 'a', 'b')",
    "REVERSE(NCHAR(55357))",
    "SUBSTR(TO_REAL_VECTOR('[1,-2]'), 0)",
    "SUBSTRING(TO_BLOB('abc'), 2)",
    "LEFT(X'FF00', 1)",
]


@pytest.mark.parametrize("expression", ONCE_WRONG)
def test_what_random_expressions_found(shared: Sql, expression: str) -> None:
    value_or_refusal(shared, expression)


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("SELECT FROM DUMMY WHERE 1234'\"()[]{}*/+-<>=|?:;,.%#@!~^&\\`$\t\n\0é😀"), max_size=60))
def test_noise_is_refused(shared: Sql, text: str) -> None:
    for statement in (f"SELECT {text} FROM DUMMY", f"SELECT 1 FROM DUMMY WHERE {text}", f"({text})", f"SELECT {text}"):
        error = refusal(shared, statement)
        assert error is None or error.code not in (2, 2048), error
    for statement in (text, f"CREATE TABLE {text}", f"UPSERT {text}", f"COMMENT ON {text}"):
        with contextlib.suppress(HanaError):
            shared.prepare(statement)
