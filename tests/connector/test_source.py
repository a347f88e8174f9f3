"""The SQL of a query, page borders, lost connections and changes of the schema. What every source must do stands in
tests/contracts/test_source.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.errors import ConnectionLost, NoKey, Overloaded, SchemaChanged, UnknownColumn, UnknownTable
from connector.hana import source as source_module
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource, Statement
from connector.model import Query, Row, TableRef
from hana_emulator.testing import Emulator

REF = TableRef("S", "T")


def query(*key: str, columns: tuple[str, ...] = (), where: str | None = None) -> Query:
    return Query(REF, key, columns, where)


# ------------------------------------------------------------------------------------------------------- the SQL


def test_columns_are_quoted_key_first_and_none_twice():
    statement = Statement(query("K1", "K2", columns=("A", 'b"c', "K1", "A")))
    assert statement.select == 'SELECT "K1","K2","A","b""c" FROM "S"."T"'
    assert statement.order == ' ORDER BY "K1","K2"'
    assert statement.of_all("COUNT(*)") == 'SELECT COUNT(*) FROM "S"."T"'


@pytest.mark.parametrize(
    ("last", "condition", "parameters"),
    [
        ((1,), '"A" > ?', (1,)),
        ((1, 2), '("A" > ? OR ("A" = ? AND "B" > ?))', (1, 1, 2)),
        ((1, 2, 3), '("A" > ? OR ("A" = ? AND ("B" > ? OR ("B" = ? AND "C" > ?))))', (1, 1, 2, 2, 3)),
        ((None,), '"A" IS NOT NULL', ()),
        ((None, 2), '("A" IS NOT NULL OR ("A" IS NULL AND "B" > ?))', (2,)),
        ((1, None), '("A" > ? OR ("A" = ? AND "B" IS NOT NULL))', (1, 1)),
    ],
)
def test_the_condition_for_the_next_page(last, condition, parameters):
    assert Statement(query(*"ABC"[: len(last)])).after(last) == (condition, parameters)


def order(value: int | None) -> tuple[bool, int]:
    return (value is not None, value or 0)


SMALL = st.one_of(st.none(), st.integers(0, 2))


@given(st.lists(st.tuples(SMALL, SMALL, SMALL), unique=True), st.tuples(SMALL, SMALL, SMALL))
def test_the_condition_means_behind_this_key_with_null_first(keys, last):
    import sqlite3

    condition, parameters = Statement(query("A", "B", "C")).after(last)
    with sqlite3.connect(":memory:") as connection:
        connection.execute("CREATE TABLE t (A, B, C)")
        connection.executemany("INSERT INTO t VALUES (?,?,?)", keys)
        found = connection.execute(f"SELECT A,B,C FROM t WHERE {condition}", parameters).fetchall()
    connection.close()
    assert set(found) == {key for key in keys if tuple(map(order, key)) > tuple(map(order, last))}


@pytest.mark.parametrize(
    ("last", "condition", "parameters"),
    [
        ((1,), '("A" IS NULL OR "A" <= ?)', (1,)),
        ((None,), '"A" IS NULL', ()),
        ((1, 2), '("A" IS NULL OR "A" < ? OR ("A" = ? AND ("B" IS NULL OR "B" <= ?)))', (1, 1, 2)),
        ((None, 2), '(("A" IS NULL AND ("B" IS NULL OR "B" <= ?)))', (2,)),
    ],
)
def test_the_condition_for_the_end_of_a_range(last, condition, parameters):
    assert Statement(query(*"ABC"[: len(last)])).upto(last) == (condition, parameters)


@given(st.lists(st.tuples(SMALL, SMALL, SMALL), unique=True), st.tuples(SMALL, SMALL, SMALL))
def test_a_range_ends_with_its_last_key_and_the_next_begins_behind_it(keys, last):
    import sqlite3

    statement = Statement(query("A", "B", "C"))
    with sqlite3.connect(":memory:") as connection:
        connection.execute("CREATE TABLE t (A, B, C)")
        connection.executemany("INSERT INTO t VALUES (?,?,?)", keys)
        both = [
            set(connection.execute(f"SELECT A,B,C FROM t WHERE {condition}", parameters).fetchall())
            for condition, parameters in (statement.upto(last), statement.after(last))
        ]
    connection.close()
    assert both[0] == {key for key in keys if tuple(map(order, key)) <= tuple(map(order, last))}
    assert both[0] ^ both[1] == set(keys), "every key on exactly one side"


def test_pages_of_large_rows_get_fewer_rows(monkeypatch):
    """About 3 KB a row, with all that is made of it."""
    monkeypatch.setattr(source_module, "PAGE_BYTES", 100_000)
    rows = [(n, "x" * 2000) for n in range(100)]
    pool = FakePool(rows[:65], rows[64:97])
    pages_of_two = HanaSource(pool).pages(query("K", columns=("T",)), 64)
    assert [len(next(pages_of_two)) for _ in range(2)] == [64, 32]
    assert [parameters[-1] for _, parameters in pool.asked] == [65, 33]


@pytest.mark.parametrize(
    ("where", "sql"),
    [
        (None, ""),
        ("  ", ""),
        ("A = 1 OR B = 2", " WHERE (A = 1 OR B = 2)"),
        ("A = 1 -- only these", " WHERE (A = 1 -- only these\n)"),
    ],
)
def test_the_operators_condition_stands_in_brackets(where, sql):
    assert Statement(query("K", where=where)).where() == sql


def test_both_conditions_hold():
    assert Statement(query("K", where="A = 1 OR B = 2")).where('"K" > ?') == ' WHERE (A = 1 OR B = 2) AND "K" > ?'


def test_single_rows_are_asked_for_by_whole_keys():
    statement = Statement(query("A", "B"))
    assert dict(statement.lookups("", [(1, 2), (3, None)])) == {
        ' WHERE (("A" = ? AND "B" = ?))': (1, 2),
        ' WHERE (("A" = ? AND "B" IS NULL))': (3,),
    }
    ((sql, parameters),) = statement.lookups("", [(1, 2), (3, 4)])
    assert sql.count('("A" = ? AND "B" = ?)') == 8
    assert parameters == (1, 2, *(3, 4) * 7)


def test_a_query_without_key_is_refused():
    with pytest.raises(NoKey):
        Statement(query())


# -------------------------------------------------------------------------------------------- pages, with a fake


class FakePool:
    """Answers each read with the next of `answers`: rows, or an error to raise."""

    def __init__(self, *answers: list[tuple[Any, ...]] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> list[tuple[Any, ...]]:
        self.asked.append((sql, tuple(parameters)))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def pages(*answers: list[tuple[Any, ...]] | Exception, size: int = 2) -> list[list[tuple[Any, ...]]]:
    source = HanaSource(FakePool(*answers))
    return [[row.key for row in page] for page in source.pages(query("K"), size)]


def test_one_row_more_is_read_to_see_the_end():
    pool = FakePool([(1,), (2,), (3,)], [(3,), (4,)])
    assert [len(page) for page in HanaSource(pool).pages(query("K"), 2)] == [2, 2]
    assert pool.asked == [
        ('SELECT "K" FROM "S"."T" ORDER BY "K" LIMIT ?', (3,)),
        ('SELECT "K" FROM "S"."T" WHERE "K" > ? ORDER BY "K" LIMIT ?', (2, 3)),
    ]


def test_a_table_that_shrinks_to_the_page_border_gives_no_empty_page():
    assert pages([(1,), (2,), (3,)], []) == [[(1,), (2,)]]


@pytest.mark.parametrize(
    "answers",
    [
        [[(1,), (1,)]],
        [[(1,), (2,), (2,)]],
        [[(1,), (2,), (3,)], [(2,), (3,)]],
        [[(None,), (None,)]],
    ],
)
def test_a_key_that_two_rows_share_is_refused(answers):
    with pytest.raises(NoKey, match=r"`key` \(K\) does not identify the rows of S\.T"):
        pages(*answers)


@pytest.mark.parametrize("gone", [UnknownTable("gone"), UnknownColumn("gone")])
def test_what_goes_away_between_pages_is_a_changed_schema(gone):
    with pytest.raises(SchemaChanged, match="changed while it was read"):
        pages([(1,), (2,), (3,)], gone)


@pytest.mark.parametrize("gone", [UnknownTable("gone"), UnknownColumn("gone")])
def test_what_was_never_there_is_a_wrong_name(gone):
    with pytest.raises(type(gone)):
        pages(gone)


def test_an_unknown_column_may_emulator_where():
    source = HanaSource(FakePool(UnknownColumn("unknown column")))
    with pytest.raises(UnknownColumn, match="`where`"):
        source.count(query("K", where="NOPE = 1"))


@pytest.mark.proves(5)
def test_pages_shrink_while_hana_is_short_of_memory_and_grow_again():
    table = [(n,) for n in range(400)]

    class TightPool(FakePool):
        limits: list[int]

        def read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> list[tuple[Any, ...]]:
            *last, limit = parameters
            self.limits.append(limit)
            if limit > 50 and len(self.limits) < 6:
                raise Overloaded("no memory")
            start = last[0] + 1 if last else 0
            return table[start : start + limit]

    pool = TightPool()
    pool.limits = []
    read = [row.key for page in HanaSource(pool).pages(query("K"), 160) for row in page]
    assert read == table
    assert pool.limits == [161, 81, 41, 81, 41, 81, 161, 161]


def test_reading_tokens_is_called_so_in_errors():
    told: list[str] = []

    class ToldPool(FakePool):
        def read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> list[tuple[Any, ...]]:
            told.append(doing)
            return []

    assert not list(HanaSource(ToldPool()).tokens(query("K"), "rowid", 10))
    assert told == ["reading tokens of S.T"]


def test_a_hana_without_memory_for_the_smallest_page_is_told():
    with pytest.raises(Overloaded):
        pages(*[Overloaded("no memory")] * 20, size=1000)
    with pytest.raises(Overloaded):
        pages(Overloaded("no memory"), size=3)


@pytest.mark.parametrize("size", [0, -1])
def test_a_page_has_at_least_one_row(size):
    with pytest.raises(ValueError, match="at least one"):
        list(HanaSource(FakePool()).pages(query("K"), size))


def test_look_ups_use_few_statement_texts():
    pool = FakePool(*[[] for _ in range(20)])
    source = HanaSource(pool)
    for count in (1, 2, 8, 9, 63, 64, 65, 130):
        source.rows(query("K"), [(n,) for n in range(count)])
    assert len({sql for sql, _ in pool.asked}) == 3
    assert source.rows(query("K"), []) == []


def test_binary_columns_become_bytes():
    rows = [(memoryview(b"a"), None, 1), (memoryview(b"b"), memoryview(b"x"), 2)]
    source = HanaSource(FakePool(rows))
    (page,) = source.pages(query("K", columns=("B", "N")), 5)
    assert {type(value) for row in page for value in (*row.key, *row.values.values())} == {bytes, int, type(None)}
    assert list(page) == [Row((b"a",), {"K": b"a", "B": None, "N": 1}), Row((b"b",), {"K": b"b", "B": b"x", "N": 2})]


# ---------------------------------------------------------------------------------------- against the emulator


@pytest.fixture
def make_pool(emulator: Emulator) -> Iterator[Callable[..., HanaPool]]:
    pools: list[HanaPool] = []

    def make(**arguments: Any) -> HanaPool:
        options = ConnectionOptions(
            host=emulator.host, port=emulator.port, user=emulator.user, password=emulator.password, encrypt=False
        )
        pools.append(HanaPool(options, 2, **arguments))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def filled(pool: HanaPool, schema: str, rows: int) -> Query:
    pool.execute(f'CREATE TABLE "{schema}"."T" ("K" INTEGER PRIMARY KEY, "A" NVARCHAR(10))')
    with pool.transaction() as session:
        session.execute_many(f'INSERT INTO "{schema}"."T" VALUES (?,?)', [(n, f"row {n}") for n in range(rows)])
    return Query(TableRef(schema, "T"), ("K",), ("A",))


def test_a_lost_connection_between_pages_is_not_noticed(make_pool, hana_schema):
    pool = make_pool()
    asked = filled(pool, hana_schema, 50)
    read: list[int] = []
    for page in HanaSource(pool).pages(asked, 10):
        read += [row.key[0] for row in page]
        pool._idle[0]._connection.close()  # as if the server had gone: the driver says "Connection closed"
    assert read == list(range(50))


def test_nothing_is_held_between_pages(make_pool, hana_schema):
    pool = make_pool()
    asked = filled(pool, hana_schema, 10)
    pages = HanaSource(pool).pages(asked, 3)
    next(pages)
    assert len(pool._idle) == 1
    with pool.transaction() as session:  # this thread may use the connection meanwhile
        session.execute(f'DELETE FROM "{hana_schema}"."T" WHERE "K" = ?', (5,))
    assert [row.key[0] for page in pages for row in page] == [3, 4, 6, 7, 8, 9]


def test_a_table_dropped_between_pages_is_a_changed_schema(make_pool, hana_schema):
    pool = make_pool()
    pages = HanaSource(pool).pages(filled(pool, hana_schema, 10), 3)
    next(pages)
    pool.execute(f'DROP TABLE "{hana_schema}"."T"')
    with pytest.raises(SchemaChanged):
        next(pages)


def test_a_pool_that_is_closed_says_so(make_pool, hana_schema):
    pool = make_pool()
    asked = filled(pool, hana_schema, 1)
    pool.close()
    with pytest.raises(ConnectionLost, match="closed"):
        HanaSource(pool).count(asked)


def test_every_statement_shape_of_a_read(make_pool, hana_schema):
    told: list[str] = []
    pool = make_pool(on_statement=told.append)
    asked = filled(pool, hana_schema, 5)
    told.clear()
    source = HanaSource(pool)
    source.count(asked)
    list(source.pages(asked, 3))
    source.rows(asked, [(1,)])
    table = f'"{hana_schema}"."T"'
    assert told == [
        f"SELECT COUNT(*) FROM {table}",
        f'SELECT "K","A" FROM {table} ORDER BY "K" LIMIT ?',
        f'SELECT "K","A" FROM {table} WHERE "K" > ? ORDER BY "K" LIMIT ?',
        f'SELECT "K","A" FROM {table} WHERE (("K" = ?))',
    ]
