"""Read rows of a HANA table or view, page by page in key order (keyset paging, never OFFSET)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from sys import getsizeof
from typing import Any

from connector.errors import (
    ConfigurationError,
    ConnectorError,
    Overloaded,
    SchemaChanged,
    StatementFailed,
    UnknownColumn,
    UnknownTable,
)
from connector.hana import catalog
from connector.hana.capture import HanaCapture
from connector.hana.connection import HanaPool, Rows, utc_now
from connector.hana.privileges import granted, selecting
from connector.hana.statement import Statement, check_unique, with_bytes
from connector.model import Key, KeyRange, Query, Row, Table, TableRef
from connector.protocols import Capture

_SYNTAX = 257  # HANA's code for a syntax error; our SQL is fixed, so the error is in the operator's `where`
SMALLEST_PAGE = 16  # rows; below this, smaller pages no longer help a HANA that is short of memory
PAGE_BYTES = 16 << 20  # read at once, about; pages of large rows have fewer rows
_ROW_BYTES = 1000  # of a row beside its values: objects around them
_SAMPLE = 16


class HanaSource:
    """`protocols.Source` over a pool. Thread-safe; nothing is held between pages."""

    def __init__(self, pool: HanaPool) -> None:
        self._pool = pool
        self._capture = HanaCapture(pool, self._read)

    @property
    def capture(self) -> Capture:
        return self._capture

    def describe(self, ref: TableRef) -> Table:
        return catalog.describe(self._pool, ref)

    def now(self) -> datetime:
        return utc_now(self._pool)

    def count(self, query: Query) -> int:
        """Return how many rows `pages` would give now."""
        statement = Statement(query)
        rows = self._read(query, statement.count, (), "counting")
        return int(rows[0][0])

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        """Divide the present keys. One statement for each border, which costs about as much as a page."""
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
        """Yield every row once, in key order; `size` rows a page, fewer while HANA is short of memory or rows are
        large.

        Each page is one statement, retried after a lost connection, and shows its rows at that time. NULL in a key
        column (views) comes first. Raises NoKey when two rows share a key, because one would be lost; SchemaChanged
        when the table or a column disappears between pages.
        """
        if size < 1:
            raise ValueError(f"a page must have at least one row, not {size}")
        statement = Statement(query, None if within is None else within.upto)
        last = None if within is None else within.after
        count, more = size, True
        while more:
            try:
                # One more row shows whether another page follows and whether the key is unique.
                rows = self._page(query, statement, last, count + 1)
            except Overloaded:
                if count <= SMALLEST_PAGE:
                    raise
                count = max(count // 2, SMALLEST_PAGE)
                continue
            page, more = [statement.row(values) for values in rows[:count]], len(rows) > count
            check_unique(query, last, page, statement.key_of(rows[count]) if more else None)
            if page:
                yield page
                last = page[-1].key
            count = min(size, count * 2, _rows_that_fit(page))

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        statement = Statement(query)
        found: list[Row] = []
        for sql, parameters in statement.lookups(statement.select, keys):
            found += map(statement.row, self._read(query, sql, parameters, "reading rows of"))
        return found

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
            with granted(self._pool, selecting(query.table)):
                return with_bytes(self._pool.read(sql, parameters, doing=f"{doing} {query.table}"))
        except ConnectorError as error:
            if query.where and isinstance(error, UnknownColumn):
                raise UnknownColumn(f"{error} Is the name in `where`?") from None
            if query.where and isinstance(error, StatementFailed) and error.code == _SYNTAX:
                raise ConfigurationError(f"HANA does not understand the condition in `where`: {error}") from None
            raise


def size_of_rows(rows: Sequence[Row]) -> int:
    """Return bytes, estimated from a sample."""
    sample = rows[:: max(1, len(rows) // _SAMPLE)]
    if not sample:
        return 0
    values = sum(sum(map(getsizeof, row.values.values())) for row in sample)
    return len(rows) * (_ROW_BYTES + values // len(sample))


def _rows_that_fit(page: Sequence[Row]) -> int:
    return max(SMALLEST_PAGE, len(page) * PAGE_BYTES // max(1, size_of_rows(page)))
