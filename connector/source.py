"""Rows out of a HANA table or view, page by page in key order (keyset paging, never OFFSET).
Knows nothing of texts, documents or vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from sys import getsizeof
from typing import Any

from connector import catalog
from connector.errors import (
    ConfigurationError,
    ConnectorError,
    NoKey,
    Overloaded,
    SchemaChanged,
    StatementFailed,
    UnknownColumn,
    UnknownTable,
)
from connector.hana import HanaPool, Rows, quote, utc_now
from connector.model import Cells, Key, KeyRange, Query, Row, Table, TableRef

LOOKUP_SIZES = (1, 8, 64)
"""Keys per look-up statement: few sizes, so few statement texts in HANA's plan cache."""

_SYNTAX = 257
"""HANA's code for a syntax error; ours is fixed text, so with a `where` it is the operator's."""

SMALLEST_PAGE = 16
"""Rows; a HANA that has no memory for these has none for anything."""

PAGE_BYTES = 16 << 20
"""Pages of large rows get fewer rows, so that about so much is read at once."""
_ROW_BYTES = 1000
"""Of a row beside its values: the objects around them, and what is made of it."""
_SAMPLE = 16


class HanaSource:
    """`model.Source` over a pool. Thread-safe; nothing is held between pages, so a page may be taken at any time."""

    def __init__(self, pool: HanaPool) -> None:
        self._pool = pool

    def describe(self, ref: TableRef) -> Table:
        return catalog.describe(self._pool, ref)

    def now(self) -> datetime:
        return utc_now(self._pool)

    def count(self, query: Query) -> int:
        """Rows that `pages` would give now."""
        statement = Statement(query)
        rows = self._read(query, statement.count, (), "counting")
        return int(rows[0][0])

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        """Cut where the keys stand now. One statement for each border, which costs HANA about what a page costs: it
        sorts the keys behind the border before."""
        statement = Statement(query)
        borders: list[Key] = []
        step = max(1, rows // parts)
        for _ in range(parts - 1):
            condition, parameters = statement.after(borders[-1]) if borders else ("", ())
            sql = f"{statement.keys}{statement.where(condition)}{statement.order} LIMIT ? OFFSET ?"
            found = self._read(query, sql, (*parameters, 1, step - 1), "dividing")
            if not found:
                break
            borders.append(statement.key_of(found[0]))
        return [KeyRange(after, upto) for after, upto in pairwise([None, *borders, None])]

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        """Every row once, in key order; `size` rows a page, the last one shorter, none empty. While HANA is short of
        memory, or rows are large, pages are smaller.

        Each page is one statement of its own, retried after a lost connection: rows that change meanwhile are seen
        as they are when their page is read. NULL in a key column (views) comes first, as HANA orders it. Raises NoKey
        when two rows share one key, because one of them would be lost; SchemaChanged when the table or a column goes
        away between pages.
        """
        if size < 1:
            raise ValueError(f"a page has at least one row, not {size}")
        statement = Statement(query, None if within is None else within.upto)
        last = None if within is None else within.after
        count, more = size, True
        while more:
            try:
                # One row more than the page: it tells whether there is another page and whether the key is unique.
                rows = self._page(query, statement, last, count + 1)
            except Overloaded:
                if count <= SMALLEST_PAGE:
                    raise
                count = max(count // 2, SMALLEST_PAGE)
                continue
            page, more = [statement.row(values) for values in rows[:count]], len(rows) > count
            _check_unique(query, last, page, statement.key_of(rows[count]) if more else None)
            if page:
                yield page
                last = page[-1].key
            count = min(size, count * 2, _rows_that_fit(page))

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        statement = Statement(query)
        whole = [key for key in keys if None not in key]
        found: list[Row] = []
        start = 0
        while start < len(whole):
            size = next((n for n in LOOKUP_SIZES if n >= len(whole) - start), LOOKUP_SIZES[-1])
            found += self._lookup(query, statement, whole[start : start + size], size)
            start += size
        for key in keys:
            if None in key:
                found += self._lookup(query, statement, [key], 1)
        return found

    def _lookup(self, query: Query, statement: Statement, keys: Sequence[Key], size: int) -> list[Row]:
        padded = [*keys, *[keys[-1]] * (size - len(keys))]
        condition, parameters = statement.any_of(padded)
        sql = f"{statement.select}{statement.where(condition)}"
        return [statement.row(values) for values in self._read(query, sql, parameters, "reading rows of")]

    def _page(self, query: Query, statement: Statement, last: Key | None, limit: int) -> Rows:
        condition, parameters = statement.between(last)
        sql = f"{statement.select}{statement.where(condition)}{statement.order} LIMIT ?"
        try:
            return self._read(query, sql, (*parameters, limit), "reading")
        except (UnknownTable, UnknownColumn) as error:
            if last is None:
                raise
            raise SchemaChanged(f"{query.table} changed while it was read: {error}") from None

    def _read(self, query: Query, sql: str, parameters: Sequence[Any], doing: str) -> Rows:
        try:
            return _with_bytes(self._pool.read(sql, parameters, doing=f"{doing} {query.table}"))
        except ConnectorError as error:
            if query.where and isinstance(error, UnknownColumn):
                raise UnknownColumn(f"{error} Is the name in `where`?") from None
            if query.where and isinstance(error, StatementFailed) and error.code == _SYNTAX:
                raise ConfigurationError(f"`where` is no condition that HANA understands: {error}") from None
            raise


def size_of_rows(rows: Sequence[Row]) -> int:
    """Bytes, judged by a few of them."""
    sample = rows[:: max(1, len(rows) // _SAMPLE)]
    if not sample:
        return 0
    values = sum(sum(map(getsizeof, row.values.values())) for row in sample)
    return len(rows) * (_ROW_BYTES + values // len(sample))


def _rows_that_fit(page: Sequence[Row]) -> int:
    return max(SMALLEST_PAGE, len(page) * PAGE_BYTES // max(1, size_of_rows(page)))


class Statement:
    """The SQL of one query, and how its result rows are read; `upto`: the last key of interest. Pure: sends nothing."""

    def __init__(self, query: Query, upto: Key | None = None) -> None:
        if not query.key:
            raise NoKey(f"{query.table}: a query needs key columns")
        self._key = [quote(name) for name in query.key]
        self._width = len(query.key)
        self._names = (*query.key, *(name for name in dict.fromkeys(query.columns) if name not in query.key))
        self._places = {name: place for place, name in enumerate(self._names)}
        self._own = _own_condition(query.where)
        table = f"{quote(query.table.schema)}.{quote(query.table.name)}"
        # Every name is quoted, and `where` is the operator's own: S608 has nothing to find here.
        self.count = f"SELECT COUNT(*) FROM {table}{self.where()}"  # noqa: S608
        self.select = f"SELECT {','.join(map(quote, self._names))} FROM {table}"  # noqa: S608
        self.keys = f"SELECT {','.join(self._key)} FROM {table}"  # noqa: S608
        self.order = f" ORDER BY {','.join(self._key)}"
        self._upto = ("", ()) if upto is None else self.upto(upto)

    def where(self, condition: str = "") -> str:
        both = " AND ".join(part for part in (self._own, condition) if part)
        return f" WHERE {both}" if both else ""

    def after(self, last: Key) -> tuple[str, tuple[Any, ...]]:
        """The condition for all rows behind this key, and its parameters: K1 > ? OR (K1 = ? AND K2 > ?) ..."""
        terms: list[str] = []
        parameters: list[Any] = []
        for column in reversed(range(self._width)):
            # Built from the last column outwards, so each step wraps what stands already.
            above, above_parameters = _greater(self._key[column], last[column])
            if terms:
                same, same_parameters = _equal(self._key[column], last[column])
                terms = [f"({above} OR ({same} AND {terms[0]}))"]
                parameters = [*above_parameters, *same_parameters, *parameters]
            else:
                terms, parameters = [above], above_parameters
        return terms[0], tuple(parameters)

    def upto(self, last: Key) -> tuple[str, tuple[Any, ...]]:
        """The condition for this key and all before it: exactly the rows that `after` leaves out."""
        sql, parameters = _not_greater(self._key[-1], last[-1])
        for name, value in reversed(list(zip(self._key[:-1], last[:-1], strict=True))):
            below, below_parameters = _less(name, value)
            same, same_parameters = _equal(name, value)
            terms = [term for term in (below, f"({same} AND {sql})") if term]
            sql = f"({' OR '.join(terms)})"
            parameters = [*below_parameters, *same_parameters, *parameters]
        return sql, tuple(parameters)

    def between(self, last: Key | None) -> tuple[str, tuple[Any, ...]]:
        """The condition for what comes behind `last` and is still of interest."""
        after, parameters = ("", ()) if last is None else self.after(last)
        upto, more = self._upto
        return " AND ".join(sql for sql in (after, upto) if sql), (*parameters, *more)

    def any_of(self, keys: Sequence[Key]) -> tuple[str, tuple[Any, ...]]:
        """The condition for exactly these keys."""
        terms: list[str] = []
        parameters: list[Any] = []
        for key in keys:
            parts = [_equal(name, value) for name, value in zip(self._key, key, strict=True)]
            terms.append("(" + " AND ".join(sql for sql, _ in parts) + ")")
            parameters += [value for _, values in parts for value in values]
        return f"({' OR '.join(terms)})", tuple(parameters)

    def key_of(self, values: Sequence[Any]) -> Key:
        return tuple(values[: self._width])

    def row(self, values: tuple[Any, ...]) -> Row:
        return Row(values[: self._width], Cells(self._places, values))


def _with_bytes(rows: Rows) -> Rows:
    """The driver gives binary columns as memoryview, which does not survive as a key;
    rows carry bytes. A column's values have one type, so its first one that is not NULL decides."""
    firsts = [next((value for value in column if value is not None), None) for column in zip(*rows, strict=True)]
    binary = [position for position, value in enumerate(firsts) if isinstance(value, memoryview)]
    if not binary:
        return rows
    columns = list(zip(*rows, strict=True))
    for position in binary:
        columns[position] = tuple(value if value is None else bytes(value) for value in columns[position])
    return list(zip(*columns, strict=True))


def _own_condition(where: str | None) -> str:
    if not where or not where.strip():
        return ""
    # A comment at its end must not swallow our bracket.
    return f"({where}\n)" if "--" in where else f"({where})"


def _greater(name: str, value: Any) -> tuple[str, list[Any]]:
    """HANA puts NULL first, so everything that is not NULL comes behind it."""
    return (f"{name} IS NOT NULL", []) if value is None else (f"{name} > ?", [value])


def _less(name: str, value: Any) -> tuple[str, list[Any]]:
    return ("", []) if value is None else (f"{name} IS NULL OR {name} < ?", [value])


def _not_greater(name: str, value: Any) -> tuple[str, list[Any]]:
    return (f"{name} IS NULL", []) if value is None else (f"({name} IS NULL OR {name} <= ?)", [value])


def _equal(name: str, value: Any) -> tuple[str, list[Any]]:
    return (f"{name} IS NULL", []) if value is None else (f"{name} = ?", [value])


def _check_unique(query: Query, last: Key | None, page: Sequence[Row], following: Key | None) -> None:
    previous = last
    for row in page:
        if row.key == previous:
            raise NoKey(_not_unique(query))
        previous = row.key
    if following is not None and following == previous:
        raise NoKey(_not_unique(query))


def _not_unique(query: Query) -> str:
    return (
        f"`key` ({', '.join(query.key)}) does not identify the rows of {query.table}: two of them share one key. "
        "Name further columns (a TIMESTAMP is told apart to the microsecond only)"
    )
