"""Read rows of a HANA table or view in key order (keyset paging, never OFFSET). Read changes from a watermark column, a
token per row, or the log that triggers fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from sys import getsizeof
from typing import Any

from connector.errors import (
    ConfigurationError,
    ConnectorError,
    LogMissing,
    NoKey,
    Overloaded,
    SchemaChanged,
    StatementFailed,
    UnknownColumn,
    UnknownTable,
)
from connector.hana import catalog
from connector.hana.change_log import ID, check_log
from connector.hana.connection import HanaPool, Rows, Session, quote, utc_now
from connector.hana.privileges import granted, selecting
from connector.hana.statement import Statement, check_unique, place, with_bytes
from connector.hana.watermarks import Watermark, watermark
from connector.model import Column, Key, KeyRange, Query, Row, Span, Table, TableRef, Token, Value
from connector.protocols import Capture

_SYNTAX = 257  # HANA's code for a syntax error; our SQL is fixed, so the operator's `where` is wrong
SMALLEST_PAGE = 16  # rows; smaller pages do not help a HANA that is short of memory
PAGE_BYTES = 16 << 20  # approximate size of a page; large rows make pages of fewer rows
_ROW_BYTES = 1000  # memory of a row without its values
_SAMPLE = 16
_ROWID = '"$rowid$"'
_TABLE = "SELECT TABLE_OID, IS_COLUMN_TABLE FROM SYS.TABLES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?"
_VIEW = "SELECT VIEW_OID FROM SYS.VIEWS WHERE SCHEMA_NAME = ? AND VIEW_NAME = ?"


class HanaSource:
    """`protocols.Source` and `protocols.Capture` over a pool. Thread-safe; holds no connection between pages."""

    def __init__(self, pool: HanaPool) -> None:
        self._pool = pool

    @property
    def pool(self) -> HanaPool:
        return self._pool

    @property
    def capture(self) -> Capture:
        return self

    def describe(self, ref: TableRef) -> Table:
        return catalog.describe(self._pool, ref)

    def now(self) -> datetime:
        return utc_now(self._pool)

    def count(self, query: Query) -> int:
        """Return how many rows `pages` would yield now."""
        return self.count_where(query, "")

    def count_where(self, query: Query, condition: str) -> int:
        """Return how many rows of the query meet an SQL condition."""
        rows = self._read(query, Statement(query).of_all("COUNT(*)", condition and f"({condition})"), (), "counting")
        return int(rows[0][0])

    def ranges(self, query: Query, parts: int, rows: int, within: KeyRange | None = None) -> list[KeyRange]:
        """Divide the existing keys. Runs one statement per border, each about as costly as a page."""
        start, end = (None, None) if within is None else (within.after, within.upto)
        statement = Statement(query, end)
        borders: list[Key] = []
        step = max(1, rows // max(1, parts))
        for _ in range(parts - 1):
            condition, parameters = statement.between(borders[-1] if borders else start)
            sql = f"{statement.keys}{statement.where(condition)}{statement.order} LIMIT ? OFFSET ?"
            found = self._read(query, sql, (*parameters, 1, step - 1), "dividing")
            if not found:
                break
            borders.append(statement.key_of(found[0]))
        return [KeyRange(after, upto) for after, upto in pairwise([start, *borders, end])]

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[Sequence[Row]]:
        """Yield every row once, in key order: `size` rows per page, fewer if HANA is short of memory or rows are large.

        Each page is one statement, retried after a lost connection, and returns rows as of that time. NULL in a key
        column (views) sorts first. Raises NoKey if two rows share a key, because one would be lost; SchemaChanged if
        the table or a column disappears between pages.
        """
        if size < 1:
            raise ValueError(f"a page must have at least one row, not {size}")
        statement = Statement(query, None if within is None else within.upto)
        last = None if within is None else within.after
        count, more = size, True
        while more:
            # Read one more row, to see whether another page follows and whether the key is unique.
            rows, count = _read_fewer(partial(self._page, query, statement, last), count)
            page, more = statement.page(rows[:count]), len(rows) > count
            check_unique(query, last, page, statement.key_of(rows[count]) if more else None)
            if page:
                yield page
                last = page.keys[-1]
            fitting = len(page) * PAGE_BYTES // max(1, size_of_rows(page))
            count = min(size, count * 2, max(SMALLEST_PAGE, fitting))

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
            return self._read(query, sql, (*parameters, limit + 1), "reading")
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

    def table_id(self, table: TableRef) -> int | None:
        found = self._look_up(table)
        if found is None:
            views = self._pool.read(_VIEW, (table.schema, table.name), doing=f"looking up {table}")
            found = views[0] if views else None
        return None if found is None else int(found[0])

    def _look_up(self, table: TableRef) -> Sequence[Any] | None:
        found = self._pool.read(_TABLE, (table.schema, table.name), doing=f"looking up {table}")
        return found[0] if found else None

    # -------------------------------------------------------------------------------------------------- watermark

    def window(self, query: Query, span: Span, size: int, *, repeated: bool = False) -> Iterator[tuple[list[Row], str]]:
        """Yield pages. Each is one statement that starts after the last row of the previous page."""
        statement, mark = Statement(query), watermark(span.column, query.table)
        name = quote(span.column.name)
        start = statement.select_with(mark.selected.format(name))
        order = f" ORDER BY {name},{statement.key_list} LIMIT ?"
        after, key = span.after, span.key
        count, more = size, True
        while more:
            condition, parameters = _inside(statement, mark, replace(span, after=after, key=key))
            sql = f"{start}{statement.where(condition)}{order}"
            found, count, more = self._next(query, sql, parameters, size, count, "reading the changes of")
            rows = [statement.row(values[:-1]) for values in found]
            places = [
                (after, key),
                *((mark.text(values[-1]), row.key) for values, row in zip(found, rows, strict=True)),
            ]
            if not repeated and any(one == other for one, other in pairwise(places)):
                raise NoKey(f"`key` ({', '.join(query.key)}) does not identify the rows of {query.table}")
            if rows:
                after, key = mark.text(found[-1][-1]), rows[-1].key
                yield rows, after

    def record_types(self, query: Query, span: Span) -> tuple[dict[Value, int], int]:
        statement = Statement(query)
        condition, parameters = _inside(statement, watermark(span.column, query.table), span)
        *key, kind = map(quote, query.key)
        keyless = " OR ".join(f"{name} IS NULL" for name in key)
        what = f"{kind},COUNT(*),SUM(CASE WHEN {keyless} THEN 1 ELSE 0 END)"
        sql = f"{statement.of_all(what, condition)} GROUP BY {kind}"
        found = self._read(query, sql, parameters, "counting the records of")
        return {kind: int(records) for kind, records, _ in found}, sum(int(row[2]) for row in found)

    def highest(self, query: Query, column: Column, least: str | None) -> str | None:
        statement, mark, name = Statement(query), watermark(column, query.table), quote(column.name)
        condition, parameters = ("", ()) if least is None else (f"{name} >= {mark.bound}", (mark.bind(least),))
        sql = statement.of_all(mark.selected.format(f"MAX({name})"), condition)
        ((value,),) = self._read(query, sql, parameters, "looking for the latest change of")
        return None if value is None else mark.text(value)

    # ----------------------------------------------------------------------------------------------------- tokens

    def tokens(self, query: Query, token: Token, size: int, *, values: bool = False) -> Iterator[list[Row]]:
        statement = Statement(query if values else Query(query.table, query.key, (), query.where))
        start = statement.select_with(_token_of(query, token))
        last: Key | None = None
        count, more = size, True
        while more:
            condition, parameters = statement.between(last)
            sql = f"{start}{statement.where(condition)}{statement.order} LIMIT ?"
            try:
                found, count, more = self._next(query, sql, parameters, size, count, "reading tokens of")
            except (UnknownColumn, StatementFailed) as error:
                if token == "rowid" and isinstance(error, UnknownColumn) and "rowid" in str(error):
                    raise _no_row_ids(query.table) from None
                if token == "hash" and isinstance(error, StatementFailed):
                    raise ConfigurationError(
                        f"`changes.hash`: HANA cannot hash the rows of {query.table}; "
                        f'use hash = "client", the default. {error}'
                    ) from None
                raise
            rows = [_with_token(statement.row(row[:-1]), row[-1], values) for row in found]
            check_unique(query, last, rows, None)
            if rows:
                last = rows[-1].key
                yield rows

    def rows_with_tokens(self, query: Query, token: Token, keys: Sequence[Key]) -> list[Row]:
        statement = Statement(query)
        found: list[Row] = []
        for sql, parameters in statement.lookups(statement.select_with(_token_of(query, token)), keys):
            rows = self._read(query, sql, parameters, "reading rows of")
            found += [_with_token(statement.row(row[:-1]), row[-1], values=True) for row in rows]
        return found

    def row_ids(self, query: Query) -> tuple[int, int]:
        found = self._look_up(query.table)
        if found is None or found[1] != "TRUE":
            raise _no_row_ids(query.table)
        statement = Statement(Query(query.table, query.key, ()))
        sql = statement.of_all(f"MAX({_ROWID}),COUNT(*)")
        try:
            ((highest, rows),) = self._read(query, sql, (), "looking at the row ids of")
        except UnknownColumn:
            raise _no_row_ids(query.table) from None
        return int(highest or 0), int(rows)

    # -------------------------------------------------------------------------------------------------------- log

    def check_log(self, query: Query, log: TableRef) -> None:
        check_log(self._pool, query, log)

    def log_length(self, log: TableRef) -> int:
        sql = f"SELECT COUNT(*) FROM {place(log)}"  # noqa: S608 - the name is quoted
        with _there():
            ((rows,),) = self._pool.read(sql, doing=f"counting the entries of {log}")
        return int(rows)

    def log_entries(self, query: Query, log: TableRef, after: int, size: int) -> list[tuple[int, Key]]:
        names = ",".join(map(quote, query.key))
        sql = f"SELECT {quote(ID)},{names} FROM {place(log)} WHERE {quote(ID)} > ? ORDER BY {quote(ID)} LIMIT ?"  # noqa: S608
        with _there():
            found = self._pool.read(sql, (after, size), doing=f"reading {log}")
        return [(int(row[0]), tuple(row[1:])) for row in with_bytes(found)]

    def forget(self, log: TableRef, ids: Sequence[int]) -> None:
        sql = f"DELETE FROM {place(log)} WHERE {quote(ID)} = ?"  # noqa: S608

        def delete(session: Session) -> None:
            session.execute_many(sql, [(number,) for number in ids], doing=f"deleting entries from {log}")

        if ids:
            with _there():
                self._pool.in_transaction(delete, doing=f"deleting entries from {log}")

    def _next(
        self, query: Query, sql: str, parameters: Sequence[Any], size: int, count: int, doing: str
    ) -> tuple[Rows, int, bool]:
        """Return the next page, the size of the page after it, and whether more rows may follow."""
        rows, read = _read_fewer(lambda n: self._read(query, sql, (*parameters, n), doing), count)
        return rows, min(size, read * 2), len(rows) == read


def _read_fewer(read: Callable[[int], Rows], count: int) -> tuple[Rows, int]:
    """Read `count` rows, fewer if HANA is short of memory, and return the count that worked."""
    while True:
        try:
            return read(count), count
        except Overloaded:
            if count <= SMALLEST_PAGE:
                raise
            count = max(count // 2, SMALLEST_PAGE)


def size_of_rows(rows: Sequence[Row]) -> int:
    """Return the approximate size of all rows in bytes, from a sample."""
    sample = rows[:: max(1, len(rows) // _SAMPLE)]
    if not sample:
        return 0
    values = sum(sum(map(getsizeof, row.values.values())) for row in sample)
    return len(rows) * (_ROW_BYTES + values // len(sample))


def _inside(statement: Statement, mark: Watermark, span: Span) -> tuple[str, tuple[Any, ...]]:
    """Return the condition for the rows of a span, and its parameters."""
    name = quote(span.column.name)
    behind, parameters = statement.behind(name, mark.bound, mark.bind(span.after), span.key)
    return f"{behind} AND {name} <= {mark.bound}", (*parameters, mark.bind(span.upto))


@contextmanager
def _there() -> Iterator[None]:
    """Raise LogMissing if the log or a column of it disappeared after the check."""
    try:
        yield
    except (UnknownTable, UnknownColumn) as error:
        raise LogMissing(f"the change log disappeared while it was read: {error}") from None


def _token_of(query: Query, token: Token) -> str:
    """Return SQL for the token. A hash is one SHA-256 over the query's columns without its key. Each column adds length
    and text, and NULL adds "-" as its length, so different rows never give the same bytes."""
    if token == "rowid":
        return _ROWID
    parts: list[str] = []
    for column in dict.fromkeys(query.columns):
        text = f"TO_NVARCHAR({quote(column)})"
        parts.append(f"TO_BINARY(COALESCE(TO_NVARCHAR(LENGTH({text})) || ':', '-'))")
        parts.append(f"TO_BINARY(COALESCE({text}, ''))")
    return f"HASH_SHA256({', '.join(parts)})"


def _with_token(row: Row, token: Any, values: bool) -> Row:
    data = token.to_bytes(8, "big") if isinstance(token, int) else bytes(token or b"")
    return Row(row.key, row.values if values else {}, data)


def _no_row_ids(table: TableRef) -> ConfigurationError:
    return ConfigurationError(
        f'`changes.method`: {table} has no "$rowid$": only column tables have it; '
        'use method = "full" with hash = "server"'
    )
