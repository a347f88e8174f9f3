"""What a `Source` promises: every row once, in key order, whatever the key. Runs over HANA on the emulator, and over a
live HANA where HANA_TEST_DSN names one (hdb://user:password@host:port/SCHEMA; the schema must exist and may be written
to)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.document.document import document_id, parse_id
from connector.errors import NoKey, UnknownColumn, UnknownTable
from connector.hana.catalog import resolve_key
from connector.hana.connection import ConnectionOptions, HanaPool, quote
from connector.hana.source import HanaSource
from connector.model import CollectionSpec, Query, TableRef
from connector.protocols import Source

_names = itertools.count(1)


@dataclass
class Place:
    """A source, and a schema behind it in which a test may make tables."""

    source: Source
    pool: HanaPool
    schema: str
    made: list[str] = field(default_factory=list)

    def execute(self, sql: str) -> None:
        self.pool.execute(sql)

    def table(self, columns: str, rows: Sequence[Sequence[Any]] = (), *, name: str = "") -> TableRef:
        ref = TableRef(self.schema, name or f"OWL_TEST_{os.getpid()}_{next(_names)}")
        self.execute(f"CREATE COLUMN TABLE {sql(ref)} ({columns})")
        self.made.append(f"TABLE {sql(ref)}")
        self.fill(ref, rows)
        return ref

    def view(self, select: str) -> TableRef:
        ref = TableRef(self.schema, f"OWL_TEST_V_{os.getpid()}_{next(_names)}")
        self.execute(f"CREATE VIEW {sql(ref)} AS {select}")
        self.made.append(f"VIEW {sql(ref)}")
        return ref

    def fill(self, ref: TableRef, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            marks = ",".join("?" * len(rows[0]))
            with self.pool.transaction() as session:
                session.execute_many(f"INSERT INTO {sql(ref)} VALUES ({marks})", [tuple(row) for row in rows])

    def drop(self) -> None:
        for made in reversed(self.made):
            self.execute(f"DROP {made}")


def sql(ref: TableRef) -> str:
    return f"{quote(ref.schema)}.{quote(ref.name)}"


def _connection(request: pytest.FixtureRequest) -> tuple[ConnectionOptions, str]:
    if request.param == "hana":
        emulator = request.getfixturevalue("emulator")
        login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
        return ConnectionOptions(**login, encrypt=False, communication_timeout=30), emulator.schema
    dsn = os.environ.get("HANA_TEST_DSN")
    if not dsn:
        pytest.skip("HANA_TEST_DSN names no live HANA")
    at = urlsplit(dsn)
    login = {"host": at.hostname, "port": at.port or 443, "user": at.username, "password": unquote(at.password or "")}
    return ConnectionOptions(**login), at.path.strip("/")


@pytest.fixture(params=["hana", pytest.param("hana-live", marks=pytest.mark.hana_live)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    options, schema = _connection(request)
    with HanaPool(options, 2) as pool:
        place = Place(HanaSource(pool), pool, schema)
        yield place
        place.drop()


def query(place: Place, ref: TableRef, *columns: str, key: tuple[str, ...] = (), where: str | None = None) -> Query:
    table = place.source.describe(ref)
    return Query(ref, resolve_key(CollectionSpec("c", ref, "{X}", key=key), table), columns, where)


def keys(source: Source, asked: Query, size: int) -> list[Any]:
    return [row.key for page in source.pages(asked, size) for row in page]


def keys_by_range(source: Source, asked: Query, parts: int, size: int) -> list[Any]:
    ranges = source.ranges(asked, parts, source.count(asked))
    assert 1 <= len(ranges) <= parts
    return [row.key for within in ranges for page in source.pages(asked, size, within) for row in page]


PAIR = '"A" NVARCHAR(10), "B" INTEGER, "X" NVARCHAR(20), PRIMARY KEY ("A", "B")'


def pairs(count: int) -> list[tuple[str, int, str]]:
    """In key order; three rows share each first key column, so page borders fall inside a group."""
    return [(f"{n // 3:04d}", n % 3, f"text {n}") for n in range(count)]


OFTEN = [(0, 3), (1, 1), (3, 3), (7, 2), (7, 3), (12, 1), (12, 4), (12, 100)]
SIZES = [(count, size) for count in (0, 1, 3, 7, 12) for size in (1, 2, 3, 4, 7, 100)]


@pytest.mark.parametrize(
    ("count", "size"), [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in OFTEN)) for pair in SIZES]
)
def test_every_row_once_in_key_order(place, count, size):
    rows = pairs(count)
    asked = query(place, place.table(PAIR, rows), "X")
    pages = list(itertools.islice(place.source.pages(asked, size), count + 1))  # pages without end are a failure, too
    assert [row.key for page in pages for row in page] == [row[:2] for row in rows]
    assert [row.values["X"] for page in pages for row in page] == [row[2] for row in rows]
    assert [len(page) for page in pages] == [size] * (count // size) + [count % size] * bool(count % size)
    assert place.source.count(asked) == count


def test_rows_carry_key_and_columns_by_name(place):
    asked = query(place, place.table(PAIR, [("a", 1, "x")]), "X", "A")
    ((row,),) = place.source.pages(asked, 5)
    assert row.key == ("a", 1)
    assert dict(row.values) == {"A": "a", "B": 1, "X": "x"}


def test_only_rows_that_meet_the_operators_condition(place):
    ref = place.table(PAIR, pairs(12))
    asked = query(place, ref, "X", where='"B" = 0 OR "X" = \'text 4\'')
    assert keys(place.source, asked, 2) == [("0000", 0), ("0001", 0), ("0001", 1), ("0002", 0), ("0003", 0)]
    assert place.source.count(asked) == 5
    assert [row.key for row in place.source.rows(asked, [("0000", 0), ("0000", 1)])] == [("0000", 0)]


def test_a_view_with_a_named_key(place):
    ref = place.table(PAIR, pairs(7))
    view = place.view(f'SELECT "B" AS "N", "A" AS "M", "X" FROM {sql(ref)}')
    asked = query(place, view, "X", key=("M", "N"))
    assert keys(place.source, asked, 3) == [row[:2] for row in pairs(7)]


def test_a_view_without_a_named_key_is_refused(place):
    view = place.view(f'SELECT "A" FROM {sql(place.table(PAIR))}')
    with pytest.raises(NoKey, match="key = "):
        query(place, view)


def test_a_key_that_does_not_identify_rows_is_refused_wherever_the_border_falls(place):
    ref = place.table(PAIR, pairs(9))
    for size in (1, 2, 3, 5, 100):
        with pytest.raises(NoKey, match="does not identify"):
            keys(place.source, query(place, ref, key=("A",)), size)


def test_a_view_whose_key_changes_its_type_is_read_by_the_new_type(place):
    table = place.table('"A" NVARCHAR(10) PRIMARY KEY', [(str(number),) for number in range(12)])
    view = place.view(f'SELECT "A" AS "K" FROM {sql(table)}')
    assert len(keys(place.source, query(place, view, key=("K",)), 3)) == 12
    place.execute(f"DROP VIEW {sql(view)}")
    place.execute(f'CREATE VIEW {sql(view)} AS SELECT TO_INTEGER("A") AS "K" FROM {sql(table)}')
    assert keys(place.source, query(place, view, key=("K",)), 3) == [(number,) for number in range(12)]


def test_null_in_the_key_of_a_view(place):
    ref = place.table('"ID" INTEGER PRIMARY KEY, "A" NVARCHAR(5), "B" INTEGER', [
        (1, None, 1), (2, None, 2), (3, None, None), (4, "x", None), (5, "x", 1), (6, "y", 0),
    ])  # fmt: skip
    asked = query(place, ref, "ID", key=("A", "B"))
    for size in (1, 2, 3, 10):
        found = keys(place.source, asked, size)
        assert found == [(None, None), (None, 1), (None, 2), ("x", None), ("x", 1), ("y", 0)]
    rows = place.source.rows(asked, [(None, 2), ("x", None), ("y", 0), ("z", None)])
    assert sorted(row.values["ID"] for row in rows) == [2, 4, 6]


@pytest.mark.parametrize(
    "name", ["/BIC/AZD00100", "with.dot", 'with "quotes"', "mixed Case", "SELECT", "ümläut", "a'b"]
)
def test_odd_names(place, name):
    column = quote(name)
    ref = place.table(f"{column} NVARCHAR(5) PRIMARY KEY, {quote(name + ' 2')} INTEGER", [("k", 1)], name=name)
    ((row,),) = place.source.pages(query(place, ref, name + " 2"), 2)
    assert row.key == ("k",)
    assert row.values[name + " 2"] == 1


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("INTEGER", [-(2**31), -1, 0, 1, 2**31 - 1]),
        ("BIGINT", [-(2**63), 0, 2**63 - 1]),
        ("DECIMAL(15,2)", [Decimal("-1.50"), Decimal("0.00"), Decimal("12.34"), Decimal("1000000.00")]),
        ("DOUBLE", [-1.5, 0.1, 1e300]),
        ("DATE", [date(1900, 1, 1), date(2024, 2, 29)]),
        ("TIMESTAMP", [datetime(1999, 12, 31, 23, 59, 59, 999999), datetime(2024, 1, 1, 0, 0, 0, 1)]),
        ("VARBINARY(8)", [b"\x00", b"\x00\x01", b"\xff"]),
        ("NVARCHAR(20)", ["", " ", "0", "A", "A ", "A  ", "a", "a/b", 'q"q', "ä", "😀"]),
        ("NVARCHAR(20)", ["%", "_", "'; DROP TABLE X; --", "\\", "\n"]),
    ],
)
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_keys_of_every_type_page_look_up_and_survive_their_id(place, kind, values, size):
    ref = place.table(f'"K" {kind} PRIMARY KEY, "X" INTEGER', [(value, n) for n, value in enumerate(values)])
    asked = query(place, ref, "X")
    rows = [row for page in place.source.pages(asked, size) for row in page]
    assert sorted(row.values["X"] for row in rows) == list(range(len(values)))
    assert keys_by_range(place.source, asked, 3, size) == [row.key for row in rows]
    for row in rows:
        assert row.key == (values[row.values["X"]],)
        assert parse_id(document_id(row.key)) == list(row.key)
        (again,) = place.source.rows(asked, [tuple(parse_id(document_id(row.key)))])
        assert again.values["X"] == row.values["X"]


def test_long_texts_come_whole_as_text(place):
    texts = [None, "", "short", "ä😀" * 1000, "x" * 300_000]
    ref = place.table('"K" INTEGER PRIMARY KEY, "L" NCLOB', list(enumerate(texts)))
    rows = [row.values["L"] for page in place.source.pages(query(place, ref, "L"), 2) for row in page]
    assert rows == texts


def test_rows_by_key(place):
    ref = place.table(PAIR, pairs(300))
    asked = query(place, ref, "X")
    wanted = [row[:2] for row in pairs(300)][::2]
    found = place.source.rows(asked, [*wanted, ("none", 0)])
    assert sorted(row.key for row in found) == wanted
    assert place.source.rows(asked, []) == []


def test_rows_that_come_and_go_between_pages(place):
    ref = place.table(PAIR, pairs(12))
    asked = query(place, ref, "X")
    pages = place.source.pages(asked, 4)
    read = [row.key for row in next(pages)]  # up to ("0001", 0)
    place.execute(f"DELETE FROM {sql(ref)} WHERE \"A\" = '0000'")  # behind us: read already
    place.execute(f"DELETE FROM {sql(ref)} WHERE \"A\" = '0002'")  # ahead: not read any more
    place.execute(f"INSERT INTO {sql(ref)} VALUES ('0000', 9, 'late')")  # behind us: the next run finds it
    place.execute(f"INSERT INTO {sql(ref)} VALUES ('0002', 9, 'new')")  # ahead: read
    place.execute(f"UPDATE {sql(ref)} SET \"X\" = 'changed' WHERE \"A\" = '0003'")
    rest = [row for page in pages for row in page]
    read += [row.key for row in rest]
    assert read == [("0000", 0), ("0000", 1), ("0000", 2), ("0001", 0), ("0001", 1), ("0001", 2),
                    ("0002", 9), ("0003", 0), ("0003", 1), ("0003", 2)]  # fmt: skip
    assert {row.values["X"] for row in rest if row.key[0] == "0003"} == {"changed"}


OFTEN_IN_PARTS = [(0, 3), (1, 2), (2, 3), (7, 1), (7, 8), (12, 3)]
PARTS = [(count, parts) for count in (0, 1, 2, 7, 12) for parts in (1, 2, 3, 8)]


@pytest.mark.parametrize(
    ("count", "parts"), [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in OFTEN_IN_PARTS)) for pair in PARTS]
)
def test_ranges_hold_every_row_once_in_parts_alike(place, count, parts):
    asked = query(place, place.table(PAIR, pairs(count)), "X")
    assert keys_by_range(place.source, asked, parts, 2) == [row[:2] for row in pairs(count)]
    sizes = [sum(map(len, place.source.pages(asked, 5, within))) for within in place.source.ranges(asked, parts, count)]
    assert max(sizes) - min(sizes) < max(2, parts)


def test_ranges_of_keys_with_null(place):
    ref = place.table('"ID" INTEGER PRIMARY KEY, "A" NVARCHAR(5), "B" INTEGER', [
        (1, None, 1), (2, None, 2), (3, None, None), (4, "x", None), (5, "x", 1), (6, "y", 0), (7, "y", None),
    ])  # fmt: skip
    asked = query(place, ref, "ID", key=("A", "B"))
    whole = keys(place.source, asked, 10)
    assert len(whole) == 7
    for parts in range(1, 8):
        assert keys_by_range(place.source, asked, parts, 2) == whole, parts


def test_ranges_within_the_operators_condition(place):
    asked = query(place, place.table(PAIR, pairs(30)), "X", where='"B" = 0 OR "B" = 2')
    assert keys_by_range(place.source, asked, 3, 4) == [row[:2] for row in pairs(30) if row[1] != 1]


def test_rows_that_come_and_go_after_the_ranges_were_cut(place):
    ref = place.table(PAIR, pairs(12))
    asked = query(place, ref, "X")
    ranges = place.source.ranges(asked, 3, 12)
    assert [within.upto for within in ranges] == [("0001", 0), ("0002", 1), None]
    place.execute(f'DELETE FROM {sql(ref)} WHERE "A" = \'0001\' AND "B" = 0')  # a border itself
    place.execute(f"DELETE FROM {sql(ref)} WHERE \"A\" = '0003'")
    for new in ("'', 0", "'0001', -1", "'0002', 9", "'zzz', 0"):
        place.execute(f"INSERT INTO {sql(ref)} VALUES ({new}, 'new')")
    read = [row.key for within in ranges for page in place.source.pages(asked, 2, within) for row in page]
    assert read == keys(place.source, asked, 100)
    assert len(read) == 12 - 4 + 4


def test_a_key_that_does_not_identify_rows_is_refused_in_a_range_too(place):
    asked = query(place, place.table(PAIR, pairs(9)), key=("A",))
    with pytest.raises(NoKey, match="does not identify"):
        keys_by_range(place.source, asked, 2, 100)


def test_several_readers_at_once(place):
    asked = query(place, place.table(PAIR, pairs(20)), "X")
    together = zip(place.source.pages(asked, 3), place.source.pages(asked, 3), strict=True)
    assert all(list(one) == list(other) for one, other in together)


def test_wrong_names_are_told(place):
    ref = place.table(PAIR, pairs(1))
    with pytest.raises(UnknownTable, match="Did you mean"):
        place.source.describe(TableRef(ref.schema, ref.name + "X"))
    with pytest.raises(UnknownColumn):
        keys(place.source, Query(ref, ("A", "B"), ("NOPE",)), 2)
    with pytest.raises(UnknownColumn, match="`where`"):
        keys(place.source, Query(ref, ("A", "B"), ("X",), '"NOPE" = 1'), 2)


WORDS = st.text(st.sampled_from("aAzä0 %_\"'/😀"), max_size=3)
KEYS = st.lists(st.tuples(WORDS, st.integers(-2, 2), WORDS), unique=True, max_size=25)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=KEYS, size=st.integers(1, 8))
def test_every_row_exactly_once_over_random_three_column_keys(place, found, size):
    name = f"OWL_TEST_RANDOM_{os.getpid()}"
    ref = TableRef(place.schema, name)
    if f"TABLE {sql(ref)}" not in place.made:
        place.table('"A" NVARCHAR(6), "B" INTEGER, "C" NVARCHAR(6), PRIMARY KEY ("A","B","C")', name=name)
    place.execute(f"DELETE FROM {sql(ref)}")
    place.fill(ref, found)
    asked = Query(ref, ("A", "B", "C"), ())
    read = keys(place.source, asked, size)
    assert len(read) == len(found)
    assert set(read) == set(found)
    assert read == keys(place.source, asked, 100), "the order does not depend on the page size"
    assert read == keys_by_range(place.source, asked, 1 + size % 4, size)
