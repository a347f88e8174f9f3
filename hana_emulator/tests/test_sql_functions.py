"""Every function by a fact of SAP's SQL reference (its own example where it gives one), through SQL; NULL anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from emulator_sql import USER, Sql, open_database, vector
from hana_emulator.sql.functions.signatures import SIGNATURES
from hana_emulator.sql.query.expressions import NILADIC

Fact = tuple[str, tuple[str, ...], object]
ANT = bytes.fromhex("416e74")
V34 = "TO_REAL_VECTOR('[3,4]')"
LATE = "TIMESTAMP '2012-01-01 23:30:45'"

VECTORS: list[Fact] = [
    ("COSINE_SIMILARITY", (V34, "TO_REAL_VECTOR('[4,3]')"), 0.96),
    ("L2DISTANCE", (V34, "TO_REAL_VECTOR('[0,0]')"), 5.0),
    ("CARDINALITY", (V34,), 2),
    ("L2NORM", (V34,), 5.0),
    ("L2NORMALIZE", ("TO_REAL_VECTOR('[0,2]')",), vector(0, 1)),
    ("TO_REAL_VECTOR", ("'[3, 4e0]'",), vector(3, 4)),
    ("TO_HALF_VECTOR", ("'[1]'",), bytes.fromhex("01000000 003c")),
]
CONVERSIONS: list[Fact] = [
    ("TO_NVARCHAR", ("DATE '2009-12-31'", "'YYYY/MM/DD'"), "2009/12/31"),
    ("TO_NVARCHAR", ("X'0AFF'",), "0AFF"),
    ("TO_NVARCHAR", ("1.50",), "1.50"),
    ("TO_NVARCHAR", ("2.50e0",), "2.5"),
    ("TO_NVARCHAR", ("TIMESTAMP '2024-02-29 01:02:03'",), "2024-02-29 01:02:03.0000000"),
    ("TO_VARCHAR", ("DATE '2009-12-31'", "'YYYY/MM/DD'"), "2009/12/31"),
    ("TO_NCLOB", ("'TestString'",), "TestString"),
    ("TO_CLOB", ("'TestString'",), "TestString"),
    ("TO_TINYINT", ("'10'",), 10),
    ("TO_SMALLINT", ("'-10'",), -10),
    ("TO_INTEGER", ("'10'",), 10),
    ("TO_INT", ("10.9",), 10),
    ("TO_BIGINT", ("'9223372036854775807'",), 2**63 - 1),
    ("TO_DOUBLE", ("'15.12'",), 15.12),
    ("TO_REAL", ("'0.1'",), 0.10000000149011612),
    ("TO_SMALLDECIMAL", ("7654321.89",), "7654321.89"),
    ("TO_DATE", ("'2010-01-12'", "'YYYY-MM-DD'"), "2010-01-12"),
    ("TO_DATE", ("'060 2024'", "'DDD YYYY'"), "2024-02-29"),
    ("TO_TIME", ("'08:30 AM'", "'HH:MI AM'"), "08:30:00"),
    ("TO_TIME", ("'12:30 AM'", "'HH12:MI AM'"), "00:30:00"),
    ("TO_TIME", ("'12:30 PM'", "'HH12:MI PM'"), "12:30:00"),
    ("TO_SECONDDATE", ("'2010-01-11 13:30:00'", "'YYYY-MM-DD HH24:MI:SS'"), "2010-01-11 13:30:00"),
    ("TO_TIMESTAMP", ("'2010-01-11 13:30:00.25'",), "2010-01-11 13:30:00.2500000"),
    ("TO_DATS", ("'2010-01-12'",), "20100112"),
    ("TO_BINARY", ("'abc'",), b"abc"),
    ("TO_VARBINARY", ("'abc'",), b"abc"),
    ("TO_BLOB", ("TO_BINARY('abcde')",), b"abcde"),
]
JSON: list[Fact] = [
    ("JSON_VALUE", ("""'{"item1":10}'""", "'$.item1'"), "10"),
    ("JSON_QUERY", ("""'{"item1":{"a":[1, 2]}}'""", "'$.item1'"), '{"a":[1,2]}'),
    ("JSON_EXISTS", ("""'{"item1":null}'""", "'$.item1'"), 1),
    ("JSON_EXISTS", ("""'{"item1":null}'""", "'$.item2'"), 0),
]
TEXTS: list[Fact] = [
    ("UPPER", ("'Ant'",), "ANT"),
    ("UCASE", ("'Ant'",), "ANT"),
    ("LOWER", ("'AnT'",), "ant"),
    ("LCASE", ("'TesT'",), "test"),
    ("INITCAP", ("'that is wHat'",), "That Is What"),
    ("LENGTH", ("'length in char'",), 14),
    ("LENGTH", ("X'00FF'",), 2),
    ("SUBSTRING", ("'1234567890'", "4", "2"), "45"),
    ("SUBSTR", ("'1234567890'", "9"), "90"),
    ("LEFT", ("'Hello'", "3"), "Hel"),
    ("RIGHT", ("'HI0123456789'", "3"), "789"),
    ("TRIM", ("'  a '",), "a"),
    ("LTRIM", ("'babababAabend'", "'ab'"), "Aabend"),
    ("RTRIM", ("'endabAabbabab'", "'ab'"), "endabA"),
    ("LPAD", ("'end'", "15", "'12345'"), "123451234512end"),
    ("RPAD", ("'end'", "15", "'12345'"), "end123451234512"),
    ("REPLACE", ("'DOWNGRADE DOWNWARD'", "'DOWN'", "'UP'"), "UPGRADE UPWARD"),
    ("LOCATE", ("'length in char'", "'char'"), 11),
    ("LOCATE", ("'length in char'", "'length'"), 1),
    ("LOCATE", ("'length in char'", "'zchar'"), 0),
    ("SUBSTR_BEFORE", ("'Hello My Friend'", "'My'"), "Hello "),
    ("SUBSTR_AFTER", ("'Hello My Friend'", "'My '"), "Friend"),
    ("SUBSTR_BEFORE", ("'Hello'", "''"), ""),
    ("SUBSTR_AFTER", ("'Hello'", "''"), "Hello"),
    ("REVERSE", ("'a😀b'",), "b😀a"),
    ("ASCII", ("'Ant'",), 65),
    ("UNICODE", ("'#'",), 35),
    ("CHAR", ("65",), "A"),
    ("NCHAR", ("55357",), "\ufffd"),
    ("ABAP_UPPER", ("'Ant'",), "ANT"),
    ("ABAP_LOWER", ("'ANT'",), "ant"),
    ("IS_SQL_INJECTION_SAFE", ("'tab_le'",), 1),
    ("IS_SQL_INJECTION_SAFE", ("'tab,le'",), 0),
    ("IS_SQL_INJECTION_SAFE", ('\'"CUST 1"."A"\'', "3"), 1),
    ("IS_SQL_INJECTION_SAFE", ("'a --'", "9"), 0),
]
BINARIES: list[Fact] = [
    ("BINTOHEX", ("'AB'",), "4142"),
    ("BINTONHEX", ("X'0a'",), "0A"),
    ("HEXTOBIN", ("'416e74'",), ANT),
    ("BINTOSTR", ("X'416E74'",), "Ant"),
    ("BINTONSTR", ("X'416E74'",), "Ant"),
    ("STRTOBIN", ("'Ant'", "'UTF-8'"), ANT),
    ("HASH_SHA256", ("X'616263'",), bytes.fromhex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")),
    ("HASH_MD5", ("X'61'", "X'6263'"), bytes.fromhex("900150983cd24fb0d6963f7d28e17f72")),
]
NUMBERS: list[Fact] = [
    ("SIGN", ("-15",), -1),
    ("SIGN", ("0.00",), 0),
    ("POWER", ("2", "10"), 1024.0),
    ("LOG", ("10", "2"), 0.30102999566398),
    ("LN", ("9",), 2.1972245773362196),
    ("ATAN2", ("1.0", "2.0"), 0.4636476090008061),
    ("COT", ("40",), -0.8950829176379128),
    ("BITNOT", ("255",), -256),
    ("BITCOUNT", ("255",), 8),
    ("BITCOUNT", ("-1",), 64),
    ("BITAND", ("255", "123"), 123),
    ("BITOR", ("255", "123"), 255),
    ("BITXOR", ("255", "123"), 132),
    ("SQRT", ("2",), 1.4142135623730951),
    ("EXP", ("1.0",), 2.718281828459045),
    ("SIN", ("0.5",), 0.479425538604203),
    ("COS", ("0.0",), 1.0),
    ("TAN", ("0.0",), 0.0),
    ("ASIN", ("0.5",), 0.5235987755982989),
    ("ACOS", ("0.5",), 1.0471975511965979),
    ("ATAN", ("0.5",), 0.4636476090008061),
    ("SINH", ("0.0",), 0.0),
    ("COSH", ("0.5",), 1.1276259652063807),
    ("TANH", ("1.0",), 0.7615941559557649),
]
MOMENTS: list[Fact] = [
    ("ADD_DAYS", ("DATE '2009-12-05'", "30"), "2010-01-04"),
    ("ADD_MONTHS", ("DATE '2009-12-05'", "1"), "2010-01-05"),
    ("ADD_YEARS", ("DATE '2009-12-05'", "1"), "2010-12-05"),
    ("ADD_SECONDS", (LATE, "60*30"), "2012-01-02 00:00:45.0000000"),
    ("DAYS_BETWEEN", ("DATE '2009-12-05'", "DATE '2010-01-05'"), 31),
    ("SECONDS_BETWEEN", ("'2009-12-05'", "'2010-01-05'"), 2_678_400),
    ("NANO100_BETWEEN", ("'2013-01-30'", "'2013-01-31'"), 864_000_000_000),
    ("MONTHS_BETWEEN", ("DATE '2009-12-05'", "DATE '2010-03-04'"), 2),
    ("YEARS_BETWEEN", ("DATE '2001-05-05'", "DATE '2010-05-04'"), 8),
    ("LAST_DAY", ("DATE '2010-01-04'",), "2010-01-31"),
    ("LOCALTOUTC", ("TIMESTAMP '2012-01-01 01:00:00'",), "2012-01-01 01:00:00.0000000"),
    ("UTCTOLOCAL", ("TIMESTAMP '2012-01-01 01:00:00'", "'UTC'"), "2012-01-01 01:00:00.0000000"),
    ("NEXT_DAY", ("DATE '2009-12-31'",), "2010-01-01"),
    ("YEAR", ("DATE '2011-05-30'",), 2011),
    ("MONTH", ("DATE '2011-05-30'",), 5),
    ("DAYOFMONTH", ("DATE '2011-05-30'",), 30),
    ("DAYOFYEAR", ("DATE '2011-05-30'",), 150),
    ("HOUR", ("TIME '12:34:56'",), 12),
    ("MINUTE", ("TIME '12:34:56'",), 34),
    ("SECOND", ("TIME '12:34:56'",), "56"),
    ("WEEKDAY", ("DATE '2010-12-31'",), 4),
    ("WEEK", ("DATE '2011-05-30'",), 23),
    ("ISOWEEK", ("DATE '2011-05-30'",), "2011-W22"),
    ("QUARTER", ("DATE '2011-01-01'",), "2011-Q1"),
    ("DAYNAME", ("'2011-05-30'",), "MONDAY"),
    ("MONTHNAME", ("'2011-05-30'",), "MAY"),
]
SESSION: list[Fact] = [
    ("CURRENT_USER", (), "OWL"),
    ("SESSION_USER", (), "OWL"),
    ("CURRENT_SCHEMA", (), "S"),
    ("CURRENT_IDENTITY_VALUE", (), None),
    ("CURRENT_TRANSACTION_ISOLATION_LEVEL", (), "READ COMMITTED"),
    ("CURRENT_DATE", (), "2024-02-29"),
    ("CURRENT_UTCDATE", (), "2024-02-29"),
    ("CURRENT_TIME", (), "23:59:58"),
    ("CURRENT_UTCTIME", (), "23:59:58"),
    ("CURRENT_TIMESTAMP", (), "2024-02-29 23:59:58.1234560"),
    ("CURRENT_UTCTIMESTAMP", (), "2024-02-29 23:59:58.1234560"),
    ("NOW", (), "2024-02-29 23:59:58.1234560"),
    ("SESSION_CONTEXT", ("'APPLICATION'",), "owl"),
]
SPECIAL: list[Fact] = [
    ("ABS", ("-1",), 1),
    ("CEIL", ("14.5",), "15"),
    ("CEILING", ("14.5",), "15"),
    ("FLOOR", ("14.5",), "14"),
    ("ROUND", ("16.16", "1"), "16.2"),
    ("ROUND", ("16.16", "-1"), "20"),
    ("MOD", ("15", "4"), 3),
    ("MOD", ("-15", "4"), -3),
    ("MOD", ("5.5", "2"), "1.5"),
    ("GREATEST", ("'aa'", "'ab'", "'bb'", "'ba'"), "bb"),
    ("LEAST", ("'aa'", "'ab'", "'bb'", "'ba'"), "aa"),
    ("GREATEST", ("9", "10.5"), "10.5"),
    ("CONCAT", ("'C'", "'at'"), "Cat"),
    ("TO_DECIMAL", ("7654321.888888", "10", "3"), "7654321.889"),
    ("TO_BOOLEAN", ("'true'",), 1),
]
ELSEWHERE = {"SYSUUID", "NEWUID", "RAND", "CURRENT_CONNECTION", "VECTOR_EMBEDDING"}
"""Without one fixed value; below, or in test_nlp.py."""
FACTS = [*VECTORS, *CONVERSIONS, *JSON, *TEXTS, *BINARIES, *NUMBERS, *MOMENTS, *SESSION, *SPECIAL]
NULLS_LEAVE_SIZES = {"TO_DECIMAL"}


@pytest.fixture(scope="module")
def clocked() -> Iterator[Sql]:
    opened = open_database()
    sql = Sql(opened.connect(USER))
    sql.session.context.clock = lambda: datetime(2024, 2, 29, 23, 59, 58, 123456, tzinfo=UTC)
    sql.run("SET 'APPLICATION' = 'owl'")
    yield sql
    opened.close()


def written(name: str, arguments: tuple[str, ...]) -> str:
    return name if name in NILADIC and not arguments else f"{name}({', '.join(arguments)})"


@pytest.mark.parametrize(("name", "arguments", "expected"), FACTS, ids=lambda part: str(part)[:40])
def test_value(clocked: Sql, name: str, arguments: tuple[str, ...], expected: object) -> None:
    found = clocked.evaluate(written(name, arguments))
    assert found == (pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected)
    assert type(found) is type(expected)


def test_no_function_is_without_a_fact() -> None:
    assert set(SIGNATURES) == {name for name, _, _ in FACTS if name in SIGNATURES} | ELSEWHERE


@pytest.mark.parametrize("name", sorted({name for name, arguments, _ in FACTS if arguments}))
def test_null_in_any_argument_gives_null(clocked: Sql, name: str) -> None:
    for _, arguments, _ in [fact for fact in FACTS if fact[0] == name]:
        places = 1 if name in NULLS_LEAVE_SIZES else len(arguments)
        for place in range(places):
            call = written(name, (*arguments[:place], "NULL", *arguments[place + 1 :]))
            assert clocked.evaluate(call) is None, call


@pytest.mark.parametrize("name", sorted({name for name, arguments, _ in FACTS if arguments}))
def test_no_argument_and_far_too_many_are_refused(clocked: Sql, name: str) -> None:
    assert clocked.code(f"SELECT {name}() FROM DUMMY") in (257, 316)
    variadic = (name in SIGNATURES and SIGNATURES[name].variadic) or name in ("GREATEST", "LEAST")
    if not variadic:
        assert clocked.code(f"SELECT {name}({', '.join('123456')}) FROM DUMMY") in (257, 316)


def test_values_that_change(sql: Sql, other: Sql) -> None:
    assert len({sql.evaluate(name) for name in ("SYSUUID", "SYSUUID", "NEWUID()", "NEWUID()")}) == 4
    assert all(0 <= sql.evaluate("RAND()") < 1 for _ in range(20))
    assert sql.evaluate("CURRENT_CONNECTION") == sql.session.connection_id != other.evaluate("CURRENT_CONNECTION")


def test_identity_value_belongs_to_the_session(sql: Sql, other: Sql) -> None:
    sql.run("CREATE TABLE T (ID BIGINT GENERATED BY DEFAULT AS IDENTITY, N NVARCHAR(3))")
    sql.many("INSERT INTO T (N) VALUES (?)", [("a",), ("b",)])
    other.run("INSERT INTO T (N) VALUES ('c')")
    assert sql.evaluate("CURRENT_IDENTITY_VALUE()") == 2
    assert other.evaluate("CURRENT_IDENTITY_VALUE()") == 3


def test_one_time_for_every_row_of_a_statement(sql: Sql) -> None:
    sql.run("CREATE TABLE T (K INTEGER, AT TIMESTAMP)")
    sql.many("INSERT INTO T VALUES (?, CURRENT_TIMESTAMP)", [(number,) for number in range(300)])
    assert sql.value("SELECT COUNT(DISTINCT AT) FROM T") == 1
    assert len(set(sql.column("SELECT CURRENT_UTCTIMESTAMP FROM T"))) == 1


# --- borders of the calendar ------------------------------------------------------------------------------------------

BORDERS = [
    ("ADD_DAYS(DATE '2023-02-28', 1)", "2023-03-01"),
    ("ADD_DAYS(DATE '2024-02-28', 1)", "2024-02-29"),
    ("ADD_DAYS(DATE '1900-02-28', 1)", "1900-03-01"),
    ("ADD_DAYS(DATE '2000-02-28', 1)", "2000-02-29"),
    ("ADD_DAYS(DATE '2023-12-31', 1)", "2024-01-01"),
    ("ADD_DAYS(DATE '9999-12-30', 1)", "9999-12-31"),
    ("ADD_DAYS(TIMESTAMP '2023-12-31 23:59:59.9999999', 1)", "2024-01-01 23:59:59.9999999"),
    ("ADD_DAYS('2024-02-29', 365)", "2025-02-28 00:00:00.0000000"),
    ("ADD_MONTHS(DATE '2023-12-31', 2)", "2024-02-29"),
    ("ADD_MONTHS(DATE '2024-02-29', 12)", "2025-02-28"),
    ("ADD_MONTHS(DATE '2024-03-31', -1)", "2024-02-29"),
    ("ADD_MONTHS(DATE '9999-11-30', 1)", "9999-12-30"),
    ("ADD_YEARS(DATE '2024-02-29', -1)", "2023-02-28"),
    ("ADD_YEARS(DATE '2024-02-29', 4)", "2028-02-29"),
    ("ADD_YEARS(DATE '1896-02-29', 4)", "1900-02-28"),
    ("ADD_SECONDS(DATE '2024-02-28', 86400)", "2024-02-29 00:00:00.0000000"),
    ("ADD_SECONDS(TIMESTAMP '1999-12-31 23:59:59.9999999', 0.0000001)", "2000-01-01 00:00:00.0000000"),
    ("ADD_SECONDS(TIME '23:59:59', 2)", "00:00:01"),
    ("ADD_SECONDS(TIME '00:00:00', -1)", "23:59:59"),
    ("ADD_SECONDS(CAST('2024-12-31 23:59:59' AS SECONDDATE), 1)", "2025-01-01 00:00:00"),
    ("DAYS_BETWEEN(DATE '1900-02-28', DATE '1900-03-01')", 1),
    ("DAYS_BETWEEN(DATE '2000-02-28', DATE '2000-03-01')", 2),
    ("DAYS_BETWEEN(DATE '0001-01-01', DATE '9999-12-31')", 3_652_058),
    ("DAYS_BETWEEN('2024-01-01 00:00:01', '2024-01-02 00:00:00')", 0),
    ("SECONDS_BETWEEN('2024-01-02 00:00:00', '2024-01-01 23:59:59.5')", 0),
    ("NANO100_BETWEEN('0001-01-01', '9999-12-31 23:59:59.9999999')", 3_155_378_975_999_999_999),
    ("MONTHS_BETWEEN('2024-01-31', '2024-03-01')", 1),
    ("MONTHS_BETWEEN('2024-03-01', '2024-01-31')", -1),
    ("YEARS_BETWEEN('2020-02-29', '2021-02-28')", 0),
    ("YEARS_BETWEEN('2020-02-29', '2021-03-01')", 1),
    ("LAST_DAY(DATE '1900-02-01')", "1900-02-28"),
    ("LAST_DAY(DATE '9999-12-01')", "9999-12-31"),
    ("NEXT_DAY(DATE '9999-12-30')", "9999-12-31"),
    ("DAYOFYEAR(DATE '1900-12-31')", 365),
    ("WEEK(DATE '2024-12-31')", 53),
    ("WEEK(DATE '2023-01-01')", 1),
    ("ISOWEEK(DATE '2021-01-03')", "2020-W53"),
    ("ISOWEEK(DATE '2018-12-31')", "2019-W01"),
    ("QUARTER(DATE '2024-12-31')", "2024-Q4"),
]


@pytest.mark.parametrize(("expression", "expected"), BORDERS)
def test_border_of_the_calendar(shared: Sql, expression: str, expected: object) -> None:
    assert shared.evaluate(expression) == expected


BEYOND = [
    "ADD_DAYS(DATE '9999-12-31', 1)",
    "ADD_DAYS(DATE '0001-01-01', -1)",
    "ADD_DAYS(DATE '2024-01-01', 1000000000000)",
    "ADD_MONTHS(DATE '9999-12-31', 1)",
    "ADD_YEARS(DATE '2024-01-01', 8000)",
    "ADD_YEARS(DATE '2024-01-01', -2024)",
    "ADD_SECONDS(TIMESTAMP '9999-12-31 23:59:59.9999999', 0.0000001)",
    "NEXT_DAY(DATE '9999-12-31')",
    "DATE '0000-01-01'",
    "DATE '10000-01-01'",
    "DATE '1900-02-29'",
    "TIMESTAMP '2024-01-01 24:00:00'",
    "TIME '23:59:60'",
    "TO_DATE('366 2023', 'DDD YYYY')",
    "TO_DATE('000 2024', 'DDD YYYY')",
    "TO_DATE('2024-02-30', 'YYYY-MM-DD')",
    "TO_DATE('2024-1', 'YYYY-MM-DD')",
    "TO_TIME('13:30 PM', 'HH12:MI PM')",
    "TO_TIME('00:30 AM', 'HH12:MI AM')",
]


@pytest.mark.parametrize("expression", BEYOND)
def test_beyond_the_calendar_is_303(shared: Sql, expression: str) -> None:
    assert shared.code(f"SELECT {expression} FROM DUMMY") == 303


# --- JSON paths -------------------------------------------------------------------------------------------------------

ORDERS = """{"id":7,"buyer":{"name":"Ä😀","tags":["a","b",{"deep":[10,20]}]},"items":[{"sku":"x/1","n":2},
 {"sku":"x/2","n":3.10}],"a.b":1,"":"empty","q\\"k":"quote","half":"\\ud83d","pair":"\\ud83d\\ude00","nul":null}"""
PATHS = [
    ("$.id", "7"),
    ("$.buyer.name", "Ä😀"),
    ("$.buyer.tags[1]", "b"),
    ("$.buyer.tags[2].deep[1]", "20"),
    ("$.buyer.tags[3]", None),
    ("$.items[0].sku", "x/1"),
    ("$.items.sku", None),
    ("$.items[1].n", "3.10"),
    ('$."a.b"', "1"),
    ("$['a.b']", "1"),
    ('$.""', "empty"),
    ('$."q\\"k"', "quote"),
    ("$.half", "\ufffd"),
    ("$.pair", "😀"),
    ("$.nul", None),
    ("$.ID", None),
    ("$", None),
    ("$[0].id", "7"),
]


@pytest.mark.parametrize(("path", "expected"), PATHS)
def test_json_path(shared: Sql, path: str, expected: str | None) -> None:
    assert shared.evaluate("JSON_VALUE(?, ?)", ORDERS, path) == expected


def test_json_structures(shared: Sql) -> None:
    assert shared.evaluate("JSON_QUERY(?, '$.items[1]')", ORDERS) == '{"sku":"x/2","n":3.10}'
    assert shared.evaluate("JSON_QUERY(?, '$.items.sku')", ORDERS) is None
    assert shared.code("SELECT JSON_VALUE('{}', '$.') FROM DUMMY") == 8
