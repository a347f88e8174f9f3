"""The filter language: what is refused and where, and that SQLite and Python read it alike. That HANA does too is
tested by the contract of the stores."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from connector.errors import BadFilter
from connector.stores import filters
from connector.stores.filters import Group, Kind, Term, is_unreadable, parse, register, to_hana, to_sqlite
from tests.filter_oracle import like, matches


@pytest.fixture(scope="module")
def db() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    register(connection)
    connection.execute("CREATE TABLE t (meta TEXT)")
    yield connection
    connection.close()


def in_sqlite(db: sqlite3.Connection, where: Any, metadata: dict[str, Any]) -> bool:
    """As the local store would ask. BadFilter as it would raise it."""
    condition = parse(where)
    assert condition is not None
    compiled = to_sqlite(condition)
    db.execute("DELETE FROM t")
    db.execute("INSERT INTO t VALUES (?)", (json.dumps(metadata),))
    try:
        return bool(db.execute(f"SELECT count(*) FROM t WHERE {compiled.sql}", compiled.parameters).fetchone()[0])
    except sqlite3.OperationalError as error:
        if not is_unreadable(error):
            raise
        raise filters.not_comparable(condition) from None


# ---------------------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_filter(nothing):
    assert parse(nothing) is None


def test_the_tree():
    where = {"A": "x", "$or": [{"B": {"$gte": 2}}, {"C": None}, {"D": {"$nin": [1, 2.5]}}]}
    assert parse(where) == Group(
        "AND",
        (
            Term("A", "$eq", ("x",)),
            Group(
                "OR",
                (
                    Term("B", "$gte", (2.0,), Kind.NUMBER),
                    Term("C", "$eq", ()),
                    Term("D", "$nin", (1.0, 2.5), Kind.NUMBER),
                ),
            ),
        ),
    )


def test_true_is_no_number():
    assert parse({"A": True}) == Term("A", "$eq", (True,), Kind.BOOLEAN)
    assert parse({"A": 1}) == Term("A", "$eq", (1.0,), Kind.NUMBER)


def test_a_group_of_one_is_that_one():
    assert parse({"$and": [{"$or": [{"A": 1}]}]}) == parse({"A": 1})


def nested(depth: int) -> dict[str, Any]:
    return {"$and": [nested(depth - 1), {"B": 1}]} if depth else {"A": 1}


REFUSED: list[tuple[Any, str, str]] = [
    ("A = 1", "the top", "an object"),
    ([], "the top", "an object"),
    ({1: 2}, "the top", "field name must be text"),
    ({"A": {"$eqq": 1}}, "A.$eqq", "known are $eq $ne"),
    ({"A": {"gte": 1}}, "A.gte", "unknown operator"),
    ({"A": {"$regex": "x"}}, "A.$regex", "known are $eq $ne"),
    ({"A": {}}, "A", "one operator"),
    ({"A": {"$gt": 1, "$lt": 2}}, "A", "join several with $and"),
    ({"$eq": 1}, "$eq", "below a field name"),
    ({"$not": [{"A": 1}]}, "$not", "unknown operator"),
    ({"$and": {"A": 1}}, "$and", "list of at least one"),
    ({"$or": []}, "$or", "list of at least one"),
    ({"$and": [{"A": 1}, {}]}, "$and[1]", "empty object"),
    ({"$and": [{"A": 1}, {"MTART": {"$in": []}}]}, "$and[1].MTART.$in", "1 to 1000"),
    ({"A": {"$in": "abc"}}, "A.$in", "a list"),
    ({"A": {"$in": [1, "1"]}}, "A.$in", "one type"),
    ({"A": {"$in": [True, 1]}}, "A.$in", "one type"),
    ({"A": {"$nin": [None]}}, "A.$nin[0]", "null"),
    ({"A": {"$in": list(range(1001))}}, "A.$in", "1 to 1000"),
    ({"A": {"$between": [1]}}, "A.$between", "two numbers"),
    ({"A": {"$between": [1, 2, 3]}}, "A.$between", "two numbers"),
    ({"A": {"$between": [False, True]}}, "A.$between", "two numbers"),
    ({"A": {"$between": [1, "2"]}}, "A.$between", "one type"),
    ({"A": {"$lt": True}}, "A.$lt", "no order"),
    ({"A": {"$lt": None}}, "A.$lt", "null"),
    ({"A": {"$like": 5}}, "A.$like", "text"),
    ({"A": {"$like": None}}, "A.$like", "text"),
    ({"A": {"$contains": ""}}, "A.$contains", "non-empty"),
    ({"A": {"$like": "%" + "a" * 101}}, "A.$like", "100 characters"),
    ({"A": [1, 2]}, "A", "a list of 2"),
    ({"A": float("nan")}, "A", "finite"),
    ({"A": float("inf")}, "A", "finite"),
    ({"A": 10**400}, "A", "finite"),
    ({"A": b"x"}, "A", "bytes"),
    ({"A": {"type": "date"}}, "A", "a date is written"),
    ({"A": {"type": "time", "date": "2024-01-01"}}, "A", "a date is written"),
    ({"A": {"type": "date", "date": "2024-02-30"}}, "A", "not a date"),
    ({"A": {"type": "date", "date": "20240201"}}, "A", "a date is written"),
    ({"A": {"type": "date", "date": 20240201}}, "A", "a date is written"),
    ({"A": {"type": "date", "date": "2024-01-01", "x": 1}}, "A", "a date is written"),
    ({"A": "x\0y"}, "A", "NUL"),
    ({"A": "\ud800"}, "A", "unpaired surrogate"),
    ({"A": "x" * 5001}, "A", "5000"),
    ({"": 1}, "", "field name"),
    ({"1A": 1}, "1A", "field name"),
    ({"A.B": 1}, "A.B", "field name"),
    ({"A'": 1}, "A'", "field name"),
    ({'A"': 1}, 'A"', "field name"),
    ({"Ä": 1}, "Ä", "field name"),
    ({"A\n": 1}, "A", "field name"),
    ({"A" * 128: 1}, "A", "field name"),
    (nested(6), "$and[0].$and[0].$and[0].$and[0].$and[0].$and", "deeper than 5"),
    ({"$or": [{"A": 1}] * 101}, "$or[100].A", "more than 100"),
    ({"$or": [{"A": {"$in": list(range(1000))}}] * 11}, "$or[10]", "more than 10000"),
]


@pytest.mark.parametrize(
    ("where", "path", "message"), REFUSED, ids=[f"{n}:{row[1][:30]}" for n, row in enumerate(REFUSED)]
)
def test_what_is_no_filter_is_refused_where_it_is_wrong(where, path, message):
    with pytest.raises(BadFilter) as raised:
        parse(where)
    assert str(raised.value).startswith(f"filter at {path}")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


def test_limits_are_inclusive():
    assert parse(nested(5)) is not None
    assert parse({"$or": [{"A": 1}] * 100}) is not None
    assert parse({"A": {"$in": list(range(1000))}}) is not None
    assert parse({"A" * 127: "x" * 5000}) is not None


def test_messages_never_hold_values():
    for where in ({"A": {"$in": ["secret", 1]}}, {"A": {"$lt": ["secret"]}}, {"A": {"$between": ["secret"]}}):
        with pytest.raises(BadFilter) as raised:
            parse(where)
        assert "secret" not in str(raised.value)


def test_mapped_names():
    names = {"/BIC/AZD": "_BIC_AZD", "MTART": "MTART"}
    assert parse({"/BIC/AZD": 1}, names) == parse({"_BIC_AZD": 1}, names) == parse({"_BIC_AZD": 1})
    with pytest.raises(BadFilter, match="a field name has"):
        parse({"/BIC/AZ": 1}, names)


# -------------------------------------------------------------------------------------------------------- semantics

CASES: list[tuple[Any, dict[str, Any], bool]] = [
    ({"A": None}, {}, True),
    ({"A": None}, {"A": None}, True),
    ({"A": None}, {"A": [1]}, True),
    ({"A": None}, {"A": {"B": 1}}, True),
    ({"A": None}, {"A": ""}, False),
    ({"A": {"$ne": None}}, {"A": 0}, True),
    ({"A": {"$ne": None}}, {}, False),
    ({"A": {"$ne": 1}}, {}, False),
    ({"A": {"$nin": [1]}}, {"A": None}, False),
    ({"A": {"$nin": [1, 2]}}, {"A": 3}, True),
    ({"A": "5"}, {"A": 5}, True),
    ({"A": 5}, {"A": "5"}, True),
    ({"A": "5.0"}, {"A": 5}, False),
    ({"A": "5.0"}, {"A": 5.0}, True),
    ({"A": "true"}, {"A": True}, True),
    ({"A": True}, {"A": "TRUE"}, True),
    ({"A": True}, {"A": 1}, True),
    ({"A": False}, {"A": True}, False),
    ({"A": {"$gt": 9}}, {"A": 10}, True),
    ({"A": {"$gt": "9"}}, {"A": 10}, False),
    ({"A": {"$lt": "b"}}, {"A": "B"}, True),
    ({"A": 2**53}, {"A": 2**53 + 1}, True),
    ({"A": 0.1}, {"A": 0.1}, True),
    ({"A": "1e+22"}, {"A": 1e22}, True),
    ({"A": {"type": "date", "date": "2024-01-31"}}, {"A": "2024-01-31"}, True),
    ({"A": {"type": "date", "date": "2024-01-31"}}, {"A": "20240131"}, True),
    ({"A": {"type": "date", "date": "2024-01-31"}}, {"A": 20240131}, True),
    ({"A": {"$lt": {"type": "date", "date": "2024-01-31"}}}, {"A": "2024-01-30T23:59:59"}, True),
    ({"A": {"$between": [1, 3]}}, {"A": 3}, True),
    ({"A": {"$between": [3, 1]}}, {"A": 2}, False),
    ({"A": {"$between": ["a", "c"]}}, {"A": "b"}, True),
    ({"A": {"$like": "Pump%"}}, {"A": "Pumpe"}, True),
    ({"A": {"$like": "pump%"}}, {"A": "Pumpe"}, False),
    ({"A": {"$like": "_"}}, {"A": "😀"}, True),
    ({"A": {"$like": "1_"}}, {"A": 12}, True),
    ({"A": {"$like": "%"}}, {"A": ""}, True),
    ({"A": {"$like": ""}}, {"A": "x"}, False),
    ({"A": {"$like": "*"}}, {"A": "x"}, False),
    ({"A": {"$like": "[x]"}}, {"A": "x"}, False),
    ({"A": {"$like": "[x]"}}, {"A": "[x]"}, True),
    ({"A": {"$like": "a%b_d"}}, {"A": "a\nxbcd"}, True),
    ({"A": {"$like": "%"}}, {}, False),
    ({"A": {"$contains": "ball BEARING"}}, {"A": "a Ball-Bearing, sealed"}, True),
    ({"A": {"$contains": "bearing ball"}}, {"A": "ball bearing"}, False),
    ({"A": {"$contains": "all bearing"}}, {"A": "ball bearing"}, False),
    ({"A": {"$contains": "ball bear"}}, {"A": "ball bearing"}, False),
    ({"A": {"$contains": "ball"}}, {"A": "small, " * 2000 + "ball"}, True),
    ({"A": {"$contains": "ball"}}, {"A": "small, " * 2000 + "balls"}, False),
    ({"A": {"$contains": "bear"}}, {"A": "ball bearing"}, False),
    ({"A": {"$contains": "12"}}, {"A": 12}, True),
    ({"A": {"$contains": "?!"}}, {"A": "what?!"}, False),
    ({"A": {"$contains": "x"}}, {}, False),
    ({"A": 1, "B": 2}, {"A": 1}, False),
    ({"$or": [{"A": 1}, {"B": {"$ne": 1}}]}, {"B": 2}, True),
]


@pytest.mark.parametrize(("where", "metadata", "holds"), CASES)
def test_semantics_in_python_and_sqlite(db, where, metadata, holds):
    condition = parse(where)
    assert condition is not None
    assert matches(condition, metadata) is holds
    assert in_sqlite(db, where, metadata) is holds


@pytest.mark.parametrize(
    ("where", "metadata"),
    [
        ({"A": 5}, {"A": "FERT"}),
        ({"A": 5}, {"A": ""}),
        ({"A": 5}, {"A": True}),
        ({"A": {"$in": [5]}}, {"A": "nan"}),
        ({"A": {"$lt": 5}}, {"A": "1e999"}),
        ({"A": True}, {"A": "yes"}),
        ({"A": True}, {"A": 2}),
        ({"A": {"type": "date", "date": "2024-01-31"}}, {"A": "31.01.2024"}),
        ({"A": {"type": "date", "date": "2024-01-31"}}, {"A": "2024-02-30"}),
    ],
)
def test_values_of_another_kind_make_the_filter_bad(db, where, metadata):
    condition = parse(where)
    assert condition is not None
    with pytest.raises(BadFilter, match=r"A as (number|boolean|date)"):
        matches(condition, metadata)
    with pytest.raises(BadFilter, match=r"A as (number|boolean|date)"):
        in_sqlite(db, where, metadata)


texts = st.text(st.sampled_from("aAbB %_*?[]^-'\"\\.\n漢😀5"), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    texts,
)
metadatas = st.dictionaries(st.sampled_from("ABC"), scalars, max_size=3)
operands = st.one_of(st.booleans(), st.integers(-5, 5), st.floats(-5, 5), texts)
leaves = st.one_of(
    st.dictionaries(st.sampled_from("ABC"), st.one_of(st.none(), operands), min_size=1, max_size=2),
    st.tuples(st.sampled_from("ABC"), st.sampled_from(["$eq", "$ne", "$lt", "$lte", "$gt", "$gte"]), operands).map(
        lambda t: {t[0]: {t[1]: t[2]}}
    ),
    st.tuples(st.sampled_from("ABC"), st.sampled_from(["$in", "$nin"]), st.lists(operands, min_size=1, max_size=3)).map(
        lambda t: {t[0]: {t[1]: t[2]}}
    ),
    st.tuples(st.sampled_from("ABC"), st.sampled_from(["$like", "$contains"]), texts).map(
        lambda t: {t[0]: {t[1]: t[2]}}
    ),
)
wheres = st.one_of(
    leaves,
    st.tuples(st.sampled_from(["$and", "$or"]), st.lists(leaves, min_size=1, max_size=3)).map(lambda t: {t[0]: t[1]}),
)


@settings(max_examples=150, deadline=None)
@given(where=wheres, metadata=metadatas)
def test_python_and_sqlite_agree(db, where, metadata):
    try:
        condition = parse(where)
    except BadFilter:
        assume(False)
        raise
    assert condition is not None
    try:
        expected = matches(condition, metadata)
    except BadFilter:
        assume(False)  # SQLite may have looked at other parts first
        raise
    try:
        assert in_sqlite(db, where, metadata) is expected
    except BadFilter:
        assert isinstance(condition, Group), "only a part that Python skipped can be unreadable"


@settings(max_examples=150, deadline=None)
@given(pattern=st.text("ab%_", max_size=7), text=st.text("ab", max_size=9))
def test_like_is_what_a_regular_expression_says(pattern, text):
    wanted = re.compile("".join({"%": ".*", "_": "."}.get(char, char) for char in pattern), re.DOTALL)
    assert like(pattern, text) is bool(wanted.fullmatch(text))


def cost(call: Callable[[], object]) -> float:
    """Seconds of the processor, the least of three."""

    def once() -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    return min(once() for _ in range(3))


def test_the_time_to_read_a_number_grows_with_its_length_only():
    """Of 20,000 digits and a letter it took 5 s, and the lock of the interpreter: nothing else ran."""

    def read(digits: int) -> None:
        with pytest.raises(filters.Unreadable):
            filters.read_number("1" * digits + "x")

    short, long = cost(lambda: read(1000)), cost(lambda: read(20_000))
    assert long < 150 * short, "20 times is proportional, 400 times is the square"


def test_hostile_patterns_take_no_time(db):
    pattern, text = "%a" * 500 + "%" + "a_" * 49 + "b", "a" * 5000
    start = time.perf_counter()
    assert not like(pattern, text)
    assert not in_sqlite(db, {"A": {"$like": pattern}}, {"A": text})
    assert time.perf_counter() - start < 20


# -------------------------------------------------------------------------------------------------------- SQL for HANA

META = "JSON_VALUE(\"VEC_META\", '$.A')"


@pytest.mark.parametrize(
    ("where", "sql", "parameters"),
    [
        ({"A": "x"}, f"{META} = TO_NVARCHAR(?)", ("x",)),
        ({"A": {"$ne": 5}}, f"{META} <> TO_DOUBLE(?)", (5.0,)),
        ({"A": True}, f"{META} = TO_BOOLEAN(?)", ("true",)),
        ({"A": {"$gte": {"type": "date", "date": "2024-01-31"}}}, f"{META} >= TO_DATE(?)", ("2024-01-31",)),
        ({"A": {"$in": ["x", "y"]}}, f"{META} IN (TO_NVARCHAR(?), TO_NVARCHAR(?))", ("x", "y")),
        ({"A": {"$nin": [1]}}, f"{META} NOT IN (TO_DOUBLE(?))", (1.0,)),
        ({"A": {"$between": [1, 2]}}, f"{META} BETWEEN TO_DOUBLE(?) AND TO_DOUBLE(?)", (1.0, 2.0)),
        ({"A": {"$like": "x%"}}, f"{META} LIKE TO_NVARCHAR(?)", ("x%",)),
        ({"A": None}, f"{META} IS NULL", ()),
        ({"A": {"$ne": None}}, f"{META} IS NOT NULL", ()),
        (
            {"$or": [{"A": 1}, {"A": "x", "$and": [{"A": None}, {"A": 2}]}]},
            f"({META} = TO_DOUBLE(?)) OR "
            f"(({META} = TO_NVARCHAR(?)) AND (({META} IS NULL) AND ({META} = TO_DOUBLE(?))))",
            (1.0, "x", 2.0),
        ),
    ],
)
def test_the_shapes_of_hanadb(where, sql, parameters):
    condition = parse(where)
    assert condition is not None
    compiled = to_hana(condition)
    assert (compiled.sql, compiled.parameters, compiled.projection) == (sql, parameters, "")


def test_full_text_names_a_column_that_the_statement_must_offer():
    condition = parse({"A": {"$contains": "ball"}, "ID": {"$contains": "x"}})
    assert condition is not None
    compiled = to_hana(condition)
    assert compiled.sql == (
        "(SCORE(TO_NVARCHAR(?) IN (\"META_0\" EXACT SEARCH MODE 'text')) > 0) AND "
        "(SCORE(TO_NVARCHAR(?) IN (\"META_1\" EXACT SEARCH MODE 'text')) > 0)"
    )
    assert compiled.projection == (
        'JSON_VALUE("VEC_META", \'$.A\') AS "META_0", JSON_VALUE("VEC_META", \'$.ID\') AS "META_1"'
    )


@given(where=wheres)
def test_one_placeholder_for_each_parameter_and_no_value_in_the_sql(where):
    try:
        condition = parse(where)
    except BadFilter:
        assume(False)
        raise
    assert condition is not None
    for compiled in (to_hana(condition), to_sqlite(condition)):
        assert compiled.sql.count("?") == len(compiled.parameters)
        assert "漢" not in compiled.sql
        assert "\\" not in compiled.sql
