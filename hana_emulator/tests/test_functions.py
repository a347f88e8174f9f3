"""HANA's SQL functions as SQLite sees them: what they compute, how they fail, how they are typed."""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hana_emulator.errors import HanaError
from hana_emulator.nlp import Nlp
from hana_emulator.sql.functions import registration as functions
from hana_emulator.sql.functions.builtin import fulltext, fvecs, json_path, moments
from hana_emulator.sql.functions.registration import Context
from hana_emulator.sql.functions.signatures import SIGNATURES
from hana_emulator.types import DEFAULT_PARAMETER, DOUBLE, HanaType, TypeCode

Call = Callable[..., Any]
NVARCHAR = HanaType(TypeCode.NVARCHAR, 20)
DATE = HanaType(TypeCode.DATE, 10)


@pytest.fixture
def context() -> Context:
    clock = datetime(2024, 2, 29, 23, 59, 58, 123456, tzinfo=UTC)
    return Context(user="MEIERA", schema="SAPDEMO", connection_id=7, clock=lambda: clock)


@pytest.fixture
def call(context: Context) -> Iterator[Call]:
    """Calls a HANA function through SQLite with bound arguments, raising the HanaError it left behind."""
    connection = sqlite3.connect(":memory:")
    functions.register(connection, context, Nlp())

    def run(name: str, *arguments: Any) -> Any:
        context.error = None
        sqlite_name = SIGNATURES[name].sqlite_name if name in SIGNATURES else name
        marks = ", ".join("?" * len(arguments))
        try:
            return connection.execute(f"SELECT {sqlite_name}({marks})", arguments).fetchone()[0]
        except sqlite3.OperationalError:
            assert context.error is not None
            raise context.error from None

    yield run
    connection.close()


def vector(*values: float) -> bytes:
    return fvecs.encode(values)


# ------------------------------------------------------------------------------------------------------------ vectors


def test_vectors_are_made_of_text_and_of_bytes(call: Call) -> None:
    made = call("TO_REAL_VECTOR", "[1, -2.5,3e-1]")
    assert made == bytes.fromhex("03000000 0000803f 000020c0 9a99993e")
    assert call("TO_REAL_VECTOR", made) == made
    assert call("TO_NVARCHAR", made) == "[1,-2.5,0.3]"


def test_fvecs_bytes_that_were_taken_for_text_on_the_way_are_understood(call: Call) -> None:
    made = vector(0.0, 2.0)
    assert call("TO_REAL_VECTOR", made.decode("utf-8")) == made


def test_half_vectors_round_and_keep_their_width(call: Call) -> None:
    half = call("TO_HALF_VECTOR", "[1,0.1]")
    assert half == bytes.fromhex("02000000 003c 662e")
    assert call("TO_NVARCHAR", half) == "[1,0.1]"
    assert call("TO_REAL_VECTOR", half) == vector(1.0, float(np.float16(0.1)))
    assert len(call("L2NORMALIZE", half)) == len(half)


@pytest.mark.parametrize(
    ("name", "left", "right", "expected"),
    [
        ("COSINE_SIMILARITY", (1, 0), (1, 0), 1.0),
        ("COSINE_SIMILARITY", (1, 0), (0, 3), 0.0),
        ("COSINE_SIMILARITY", (1, 2), (-2, -4), -1.0),
        ("COSINE_SIMILARITY", (0, 0), (1, 1), 0.0),
        ("COSINE_SIMILARITY", (3e38, 3e38), (3e38, 3e38), 1.0),
        ("L2DISTANCE", (0, 0), (3, 4), 5.0),
        ("L2DISTANCE", (1, 1), (1, 1), 0.0),
    ],
)
def test_similarity(call: Call, name: str, left: tuple[float, ...], right: tuple[float, ...], expected: float) -> None:
    assert call(name, vector(*left), vector(*right)) == pytest.approx(expected, abs=1e-12)


def test_vector_measures(call: Call) -> None:
    assert call("CARDINALITY", vector(3, 4)) == 2
    assert call("L2NORM", vector(3, 4)) == 5.0
    assert call("L2NORMALIZE", vector(3, 4)) == vector(0.6, 0.8)
    assert call("L2NORMALIZE", vector(0, 0)) == vector(0, 0)


def test_different_dimensions_are_named(call: Call) -> None:
    with pytest.raises(HanaError, match="different dimensions: 2 and 3"):
        call("COSINE_SIMILARITY", vector(1, 2), vector(1, 2, 3))


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "1,2",
        "[]",
        "[1,",
        "[1,true]",
        "[[1]]",
        '["1"]',
        "[NaN]",
        "[1e39]",
        b"",
        b"\x02\0\0\0\0\0",
        b"\0\0\0\0",
        5,
    ],
)
def test_bad_vectors_are_refused(call: Call, bad: Any) -> None:
    with pytest.raises(HanaError) as caught:
        call("TO_REAL_VECTOR", bad)
    assert caught.value.code == 8


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_text_of_a_vector_reads_back_exactly(values: list[float]) -> None:
    made = fvecs.encode(values)
    assert fvecs.to_real_vector(fvecs.to_text(made)) == (
        made if not _negative_zero(values) else fvecs.encode(np.add(values, 0.0))
    )


def _negative_zero(values: list[float]) -> bool:
    return any(value == 0 and math.copysign(1, value) < 0 for value in values)


# --------------------------------------------------------------------------------------------------------------- JSON

DOCUMENT = (
    '{"a":{"b":[1,{"c":"x"}]},"n":1.50,"big":12345678901234567890,"t":true,"f":false,"z":null,"s":"Ä😀","odd key":7,'
    '"e":"","exp":1E3}'
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("$.n", "1.50"),
        ("$.big", "12345678901234567890"),
        ("$.exp", "1E3"),
        ("$.t", "true"),
        ("$.f", "false"),
        ("$.s", "Ä😀"),
        ("$.e", ""),
        ("$.z", None),
        ("$.missing", None),
        ("$.a", None),
        ("$.a.b", None),
        ("$.a.b[0]", "1"),
        ("$.a.b[1].c", "x"),
        ("$.a.b[9]", None),
        ("$.a.b.c", "x"),
        ('$."odd key"', "7"),
        ("$['odd key']", "7"),
        ("lax $.n", "1.50"),
        ("$.n[0]", "1.50"),
    ],
)
def test_json_value(call: Call, path: str, expected: str | None) -> None:
    assert call("JSON_VALUE", DOCUMENT, path) == expected


@pytest.mark.parametrize("text", ["", "not json", '{"a":NaN}', "{", None, "[" * 100_000])
def test_json_value_of_no_json_is_null(call: Call, text: str | None) -> None:
    assert call("JSON_VALUE", text, "$.a") is None


@pytest.mark.parametrize("path", ["", "a", "$a", "$.", "$[x]", "$.a b", "$.a[*]", "strict $.a"])
def test_a_bad_json_path_is_an_error(call: Call, path: str) -> None:
    with pytest.raises(HanaError, match="JSON path"):
        call("JSON_VALUE", DOCUMENT, path)


def test_json_query_gives_structures_as_written(call: Call) -> None:
    assert call("JSON_QUERY", DOCUMENT, "$.a") == '{"b":[1,{"c":"x"}]}'
    assert call("JSON_QUERY", '{"a":[1.0,"Ä",null,true]}', "$.a") == '[1.0,"Ä",null,true]'
    assert call("JSON_QUERY", DOCUMENT, "$.n") is None


def test_json_exists(call: Call) -> None:
    assert call("JSON_EXISTS", DOCUMENT, "$.z") == 1
    assert call("JSON_EXISTS", DOCUMENT, "$.missing") == 0


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8))))
def test_json_value_finds_every_member(document: dict[str, Any]) -> None:
    import json

    text = json.dumps(document)
    for name, value in document.items():
        path = '$."' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        expected = None if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        if "\n" not in name:
            assert json_path.value(text, path) == expected


# --------------------------------------------------------------------------------------------------------- full text


@pytest.mark.parametrize(
    ("term", "text", "found"),
    [
        ("pump", "A Pump leaks", True),
        ("PUMP", "pump", True),
        ("pump", "pumps leak", False),
        ("good", "goodness", False),
        ("leaking pump", "the leaking, PUMP of hall A", True),
        ("pump leaking", "the leaking pump", False),
        ("Straße", "HAUPT STRASSE 1", True),
        ("e-mail", "send an e mail", True),
        ("42", "valve 42", True),
        ("", "anything", False),
        ("...", "anything ...", False),
        ("x", "", False),
    ],
)
def test_score_finds_whole_words_in_order(call: Call, term: str, text: str, found: bool) -> None:
    assert (call("hana_score", term, text) > 0) is found


def test_score_lies_between_0_and_1_and_prefers_the_shorter_text() -> None:
    assert 0 < fulltext.score("pump", "a pump in the hall") < fulltext.score("pump", "the pump") <= 1
    assert fulltext.score("pump", "pump pump pump") == 1


def test_score_of_null_is_null(call: Call) -> None:
    assert call("hana_score", "pump", None) is None


# -------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("UPPER", ("straße é",), "STRASSE É"),
        ("LCASE", ("ÄÖ",), "äö"),
        ("INITCAP", ("der ALTE mann",), "Der Alte Mann"),
        ("LENGTH", ("a😀",), 3),
        ("LENGTH", ("",), 0),
        ("LENGTH", (b"\0\1",), 2),
        ("LENGTH", (12.0,), 2),
        ("SUBSTRING", ("hana", 2, 2), "an"),
        ("SUBSTR", ("hana", 0, 2), "ha"),
        ("SUBSTRING", ("hana", 3), "na"),
        ("SUBSTRING", ("hana", 9, 2), ""),
        ("SUBSTRING", ("a😀b", 2, 2), "😀"),
        ("SUBSTRING", ("a😀b", 4), "b"),
        ("SUBSTRING", (b"abc", 2), b"bc"),
        ("LEFT", ("hana", 2), "ha"),
        ("RIGHT", ("hana", 3), "ana"),
        ("RIGHT", ("x", 3), "x"),
        ("RIGHT", ("x", 0), ""),
        ("TRIM", ("  x ",), "x"),
        ("LTRIM", ("xxy", "x"), "y"),
        ("RTRIM", ("yxx", "x"), "y"),
        ("LPAD", ("7", 3, "0"), "007"),
        ("LPAD", ("hana", 2, "0"), "ha"),
        ("RPAD", ("a", 4, "xy"), "axyx"),
        ("LPAD", ("a", 3, ""), "a"),
        ("REPLACE", ("a.b.c", ".", ""), "abc"),
        ("REPLACE", ("abc", "", "x"), "abc"),
        ("LOCATE", ("banana", "na"), 3),
        ("LOCATE", ("banana", "na", 4), 5),
        ("LOCATE", ("banana", "na", -1), 5),
        ("LOCATE", ("banana", "na", 1, 2), 5),
        ("LOCATE", ("banana", "x"), 0),
        ("SUBSTR_BEFORE", ("a/b/c", "/"), "a"),
        ("SUBSTR_BEFORE", ("abc", "/"), ""),
        ("SUBSTR_AFTER", ("a/b/c", "/"), "b/c"),
        ("REVERSE", ("abc",), "cba"),
        ("UNICODE", ("Ä",), 196),
        ("ASCII", ("",), None),
        ("NCHAR", (8364,), "€"),
        ("BINTOHEX", (b"\x0a\xff",), "0AFF"),
        ("BINTOHEX", ("hana",), "68616E61"),
        ("HEXTOBIN", ("0aFF",), b"\x0a\xff"),
        ("BINTOSTR", ("Ä".encode(),), "Ä"),
        ("STRTOBIN", ("Ä", "UTF-8"), "Ä".encode()),
        ("TO_BINARY", ("abc",), b"abc"),
        ("HASH_SHA256", (b"abc",), hashlib.sha256(b"abc").digest()),
        ("HASH_SHA256", (b"ab", b"c"), hashlib.sha256(b"abc").digest()),
        ("HASH_MD5", (b"abc",), hashlib.md5(b"abc", usedforsecurity=False).digest()),
        ("TO_NCLOB", ("x",), "x"),
    ],
)
def test_text_and_binary_functions(call: Call, name: str, arguments: tuple[Any, ...], expected: Any) -> None:
    assert call(name, *arguments) == expected


@pytest.mark.parametrize(
    ("name", "argument"), [("HEXTOBIN", "0"), ("HEXTOBIN", "zz"), ("NCHAR", -1), ("BINTOSTR", b"\xff")]
)
def test_text_functions_refuse_nonsense(call: Call, name: str, argument: Any) -> None:
    with pytest.raises(HanaError) as caught:
        call(name, argument)
    assert caught.value.code == 306


def test_sysuuid_is_new_each_time(call: Call) -> None:
    one, two = call("SYSUUID"), call("SYSUUID")
    assert len(one) == 16
    assert one != two


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("TO_INTEGER", ("42",), 42),
        ("TO_INTEGER", (" -7 ",), -7),
        ("TO_INTEGER", (7.9,), 7),
        ("TO_INTEGER", ("7.9",), 7),
        ("TO_BIGINT", ("9223372036854775807",), 2**63 - 1),
        ("TO_DOUBLE", ("1.5e2",), 150.0),
        ("TO_DOUBLE", (3,), 3.0),
        ("TO_SMALLDECIMAL", ("1.50",), "1.50"),
        ("TO_SMALLDECIMAL", (0.1,), "0.1"),
        ("TO_SMALLDECIMAL", ("-0.0",), "0.0"),
        ("SIGN", ("-0.5",), -1),
        ("SIGN", (0,), 0),
        ("POWER", (2, 10), 1024.0),
        ("SQRT", ("2.25",), 1.5),
        ("LOG", (10, 1000), pytest.approx(3.0)),
        ("LN", (1,), 0.0),
        ("BITAND", (12, 10), 8),
        ("BITOR", (12, 10), 14),
        ("BITXOR", (12, 10), 6),
    ],
)
def test_numbers(call: Call, name: str, arguments: tuple[Any, ...], expected: Any) -> None:
    assert call(name, *arguments) == expected


@pytest.mark.parametrize(
    ("name", "argument", "code"),
    [
        ("TO_INTEGER", "abc", 339),
        ("TO_INTEGER", "", 339),
        ("TO_DOUBLE", "NaN", 339),
        ("TO_DOUBLE", "Infinity", 339),
        ("TO_INTEGER", b"1", 339),
        ("TO_INTEGER", 2**31, 314),
        ("TO_TINYINT", -1, 314),
        ("TO_BIGINT", "9223372036854775808", 314),
        ("TO_DOUBLE", "1e999", 314),
        ("EXP", 1000, 314),
        ("SQRT", -1, 306),
        ("LN", 0, 306),
    ],
)
def test_bad_numbers_have_hanas_codes(call: Call, name: str, argument: Any, code: int) -> None:
    with pytest.raises(HanaError) as caught:
        call(name, argument)
    assert caught.value.code == code


def test_messages_never_hold_the_value(call: Call) -> None:
    for name in ("TO_INTEGER", "TO_DATE", "TO_REAL_VECTOR", "HEXTOBIN"):
        with pytest.raises(HanaError) as caught:
            call(name, "secret")
        assert "secret" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- dates


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("TO_DATE", ("2024-01-31",), "2024-01-31"),
        ("TO_DATE", ("20240131",), "2024-01-31"),
        ("TO_DATE", ("31.01.2024", "DD.MM.YYYY"), "2024-01-31"),
        ("TO_DATE", ("Jan 31, 24", "Mon DD, YY"), "2024-01-31"),
        ("TO_DATE", ("2024060", "YYYYDDD"), "2024-02-29"),
        ("TO_DATE", ("2024-01-31 23:59:59.9",), "2024-01-31"),
        ("TO_TIME", ("9:05",), "09:05:00"),
        ("TO_TIME", ("09:05 pm", "HH:MI PM"), "21:05:00"),
        ("TO_TIME", ("12:05 am", "HH12:MI AM"), "00:05:00"),
        ("TO_SECONDDATE", ("20240131093000",), "2024-01-31 09:30:00"),
        ("TO_TIMESTAMP", ("2024-01-31T09:30:00.5Z",), "2024-01-31 09:30:00.5000000"),
        ("TO_TIMESTAMP", ("2024-01-31",), "2024-01-31 00:00:00.0000000"),
        ("TO_TIMESTAMP", ("2024/01/31 09-30-00-1234567", "YYYY/MM/DD HH24-MI-SS-FF7"), "2024-01-31 09:30:00.1234567"),
        ("TO_DATS", ("2024-01-31",), "20240131"),
        ("TO_NVARCHAR", ("2024-01-05", "DD.MM.YYYY"), "05.01.2024"),
        ("TO_NVARCHAR", ("2024-01-05 15:06:07.1234567", 'DY DDD "at" HH12:MI:SS.FF3 AM'), "FRI 005 at 03:06:07.123 PM"),
        ("TO_NVARCHAR", ("2024-08-05 00:00:01.0000000", "YY Q MONTH SSSSS"), "24 3 AUGUST 00001"),
        ("TO_NVARCHAR", (0.1,), "0.1"),
        ("TO_NVARCHAR", (3.0,), "3"),
        ("TO_NVARCHAR", (42,), "42"),
        ("TO_NVARCHAR", ("abcdef", 3), "abc"),
        ("ADD_DAYS", ("2024-02-28", 2), "2024-03-01"),
        ("ADD_DAYS", ("2024-03-01 10:00:00", -1), "2024-02-29 10:00:00"),
        ("ADD_MONTHS", ("2024-01-31", 1), "2024-02-29"),
        ("ADD_MONTHS", ("2024-03-31", -13), "2023-02-28"),
        ("ADD_YEARS", ("2024-02-29", 1), "2025-02-28"),
        ("ADD_SECONDS", ("2024-02-29 23:59:59.5000000", 0.5), "2024-03-01 00:00:00.0000000"),
        ("ADD_SECONDS", ("2024-02-29 23:59:59", 1), "2024-03-01 00:00:00"),
        ("ADD_SECONDS", ("23:59:59", 2), "00:00:01"),
        ("DAYS_BETWEEN", ("2024-02-28", "2024-03-01"), 2),
        ("DAYS_BETWEEN", ("2024-03-01", "2024-02-28"), -2),
        ("DAYS_BETWEEN", ("2024-03-01 12:00:00", "2024-03-02 11:00:00"), 0),
        ("SECONDS_BETWEEN", ("2024-02-29 23:59:59", "2024-03-01 00:00:01"), 2),
        ("NANO100_BETWEEN", ("2024-01-01", "2024-01-01 00:00:00.0000003"), 3),
        ("MONTHS_BETWEEN", ("2024-01-31", "2024-02-29"), 0),
        ("MONTHS_BETWEEN", ("2024-03-15", "2024-01-15"), -2),
        ("YEARS_BETWEEN", ("2020-02-29", "2024-02-28"), 3),
        ("YEARS_BETWEEN", ("2024-02-28", "2020-02-29"), -3),
        ("YEAR", ("2024-02-29",), 2024),
        ("MONTH", ("2024-02-29",), 2),
        ("DAYOFMONTH", ("2024-02-29",), 29),
        ("DAYOFYEAR", ("2024-12-31",), 366),
        ("HOUR", ("13:14:15",), 13),
        ("MINUTE", ("13:14:15",), 14),
        ("SECOND", ("13:14:15",), "15"),
        ("SECOND", ("2024-01-01 00:00:15.5000000",), "15.5000000"),
        ("WEEKDAY", ("2024-03-03",), 6),
        ("WEEK", ("2024-01-08",), 2),
        ("ISOWEEK", ("2024-12-30",), "2025-W01"),
        ("QUARTER", ("2024-05-01",), "2024-Q2"),
        ("DAYNAME", ("2024-03-03",), "SUNDAY"),
        ("MONTHNAME", ("2024-03-03",), "MARCH"),
        ("LAST_DAY", ("2024-02-03",), "2024-02-29"),
        ("NEXT_DAY", ("2024-02-29",), "2024-03-01"),
    ],
)
def test_dates(call: Call, name: str, arguments: tuple[Any, ...], expected: Any) -> None:
    assert call(name, *arguments) == expected


@pytest.mark.parametrize("bad", ["", "00000000", "2024-02-30", "2024-13-01", "yesterday", "25:00:00", "2024-1-1"])
def test_bad_dates_are_303(call: Call, bad: str) -> None:
    with pytest.raises(HanaError) as caught:
        call("TO_DATE", bad)
    assert caught.value.code == 303


def test_the_calendar_ends(call: Call) -> None:
    for name, start, count in (("ADD_DAYS", "9999-12-31", 1), ("ADD_MONTHS", "0001-01-01", -1)):
        with pytest.raises(HanaError) as caught:
            call(name, start, count)
        assert caught.value.code == 303


@given(st.datetimes(), st.integers(min_value=-400, max_value=400))
def test_adding_and_taking_away_days_gives_the_start(start: datetime, days: int) -> None:
    if 500 < start.toordinal() < 3_650_000:
        text = moments.now(lambda: start.replace(tzinfo=UTC)).timestamp()
        there = moments.add_days(text, days)
        assert moments.add_days(there, -days) == text
        assert moments.days_between(text, there) == days


# ------------------------------------------------------------------------------------------------------------ session


def test_session_functions(call: Call, context: Context) -> None:
    context.last_identity = 99
    context.session_variables["APPLICATION"] = "owl"
    assert call("CURRENT_USER") == "MEIERA"
    assert call("CURRENT_SCHEMA") == "SAPDEMO"
    assert call("CURRENT_CONNECTION") == 7
    assert call("CURRENT_IDENTITY_VALUE") == 99
    assert call("SESSION_CONTEXT", "APPLICATION") == "owl"
    assert call("SESSION_CONTEXT", "NOTHING") is None
    assert call("CURRENT_UTCTIMESTAMP") == "2024-02-29 23:59:58.1234560"
    assert call("CURRENT_DATE") == "2024-02-29"
    assert call("CURRENT_TIME") == "23:59:58"


def test_one_statement_has_one_time(context: Context) -> None:
    ticking = iter(range(10))
    context.clock = lambda: datetime(2024, 1, 1, 0, 0, next(ticking), tzinfo=UTC)
    context.begin_statement()
    assert context.now() == context.now()
    first = context.now()
    context.begin_statement()
    assert context.now() != first


def test_begin_statement_forgets_the_last_error(call: Call, context: Context) -> None:
    with pytest.raises(HanaError):
        call("TO_INTEGER", "x")
    context.begin_statement()
    assert context.error is None


# ------------------------------------------------------------------------------------------------- types and contract


def test_null_in_null_out_for_every_function_with_arguments(call: Call) -> None:
    for name, signature in SIGNATURES.items():
        count = len(signature.parameters)
        if count:
            assert call(name, *[None] * count) is None, name


def test_every_signature_is_registered(context: Context) -> None:
    connection = sqlite3.connect(":memory:")
    functions.register(connection, context, Nlp())
    known = {row[0] for row in connection.execute("SELECT name FROM pragma_function_list")}
    assert {signature.sqlite_name for signature in SIGNATURES.values()} <= known
    for signature in SIGNATURES.values():
        assert signature.function([DATE, NVARCHAR]) in known
    connection.close()


def test_a_wrong_number_of_arguments_is_an_error_of_ours(call: Call) -> None:
    with pytest.raises(HanaError) as caught:
        call("UPPER", "a", "b")
    assert caught.value.code == 266


def test_signatures_say_how_many_arguments_they_take() -> None:
    substring, sha = SIGNATURES["SUBSTRING"], SIGNATURES["HASH_SHA256"]
    assert [substring.accepts(count) for count in range(5)] == [False, False, True, True, False]
    assert [sha.accepts(count) for count in (0, 1, 9)] == [False, True, True]
    assert SIGNATURES["TO_REAL_VECTOR"].parameter(0) == HanaType(TypeCode.NCLOB)
    assert SIGNATURES["UPPER"].parameter(5) is None


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("JSON_VALUE", [HanaType(TypeCode.NCLOB), NVARCHAR], DEFAULT_PARAMETER),
        ("COSINE_SIMILARITY", [], DOUBLE),
        ("UPPER", [NVARCHAR], NVARCHAR),
        ("UPPER", [DATE], DEFAULT_PARAMETER),
        ("SUBSTRING", [HanaType(TypeCode.NCLOB)], DEFAULT_PARAMETER),
        ("ADD_DAYS", [DATE], DATE),
        ("ADD_SECONDS", [DATE], HanaType(TypeCode.TIMESTAMP, 27, 7)),
        ("L2NORMALIZE", [HanaType(TypeCode.REAL_VECTOR, 3)], HanaType(TypeCode.REAL_VECTOR, 3)),
    ],
)
def test_result_types(name: str, arguments: list[HanaType], expected: HanaType) -> None:
    assert SIGNATURES[name].result_type(arguments) == expected


def test_text_given_to_add_days_becomes_a_timestamp(call: Call) -> None:
    converting = SIGNATURES["ADD_DAYS"].function([NVARCHAR])
    assert call(converting, "2024-02-28", 2) == "2024-03-01 00:00:00.0000000"
    assert SIGNATURES["ADD_DAYS"].function([DATE]) == "hana_add_days"
    assert call(SIGNATURES["ADD_SECONDS"].function([DATE]), "2024-02-28", 1) == "2024-02-28 00:00:01.0000000"


def test_to_nvarchar_is_chosen_by_type(call: Call) -> None:
    binary = HanaType(TypeCode.VARBINARY, 8)
    looks_like_a_vector = vector(1.0)
    assert call(SIGNATURES["TO_NVARCHAR"].function([binary]), looks_like_a_vector) == "010000000000803F"
