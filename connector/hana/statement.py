"""Build the SQL of one query, and convert its result rows. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import eq
from typing import Any

from connector.errors import NoKey
from connector.hana.connection import Rows, quote
from connector.model import Cells, Key, Page, Query, Row, TableRef, keys_of

LOOKUP_SIZES = (1, 8, 64)  # keys per look-up statement; few sizes give few statement texts in HANA's plan cache


class Statement:
    """The statements of one query. `upto`: the last key to read."""

    def __init__(self, query: Query, upto: Key | None = None) -> None:
        if not query.key:
            raise NoKey(f"{query.table}: a query needs key columns")
        self._key = [quote(name) for name in query.key]
        self._width = len(query.key)
        self._names = (*query.key, *(name for name in dict.fromkeys(query.columns) if name not in query.key))
        self._places = {name: place for place, name in enumerate(self._names)}
        # A comment at the end of the operator's condition must not hide our closing bracket.
        own = query.where if query.where and query.where.strip() else ""
        self._own = own and (f"({own}\n)" if "--" in own else f"({own})")
        self._table = place(query.table)
        self.key_list = ",".join(self._key)
        # S608: every name is quoted, and `where` is the operator's own SQL.
        self.select = f"SELECT {','.join(map(quote, self._names))} FROM {self._table}"  # noqa: S608
        self.keys = f"SELECT {self.key_list} FROM {self._table}"  # noqa: S608
        self.order = f" ORDER BY {self.key_list}"
        self._upto = ("", ()) if upto is None else self.upto(upto)

    def of_all(self, what: str, condition: str = "") -> str:
        """Return a SELECT of the SQL expressions `what` over all rows of the query that meet the condition."""
        return f"SELECT {what} FROM {self._table}{self.where(condition)}"  # noqa: S608

    def select_with(self, what: str) -> str:
        """Return `select` with one more column at the end."""
        return f"SELECT {','.join(map(quote, self._names))},{what} FROM {self._table}"  # noqa: S608

    def where(self, condition: str = "") -> str:
        both = " AND ".join(part for part in (self._own, condition) if part)
        return f" WHERE {both}" if both else ""

    def after(self, last: Key) -> tuple[str, tuple[Any, ...]]:
        """Return the condition for all rows after this key, and its parameters: K1 > ? OR (K1 = ? AND K2 > ?) ..."""
        sql, parameters = _greater(self._key[-1], last[-1])
        # From the last column outwards: each step wraps the condition so far.
        for name, value in reversed(list(zip(self._key[:-1], last[:-1], strict=True))):
            above, above_parameters = _greater(name, value)
            same, same_parameters = _equal(name, value)
            sql = f"({above} OR ({same} AND {sql}))"
            parameters = [*above_parameters, *same_parameters, *parameters]
        return sql, tuple(parameters)

    def upto(self, last: Key) -> tuple[str, tuple[Any, ...]]:
        """Return the condition for this key and all before it: the complement of `after`."""
        name, value = self._key[-1], last[-1]
        sql, parameters = f"({name} IS NULL OR {name} <= ?)", [value]
        if value is None:
            sql, parameters = f"{name} IS NULL", []
        for name, value in reversed(list(zip(self._key[:-1], last[:-1], strict=True))):
            below, below_parameters = ("", []) if value is None else (f"{name} IS NULL OR {name} < ?", [value])
            same, same_parameters = _equal(name, value)
            terms = [term for term in (below, f"({same} AND {sql})") if term]
            sql = f"({' OR '.join(terms)})"
            parameters = [*below_parameters, *same_parameters, *parameters]
        return sql, tuple(parameters)

    def between(self, last: Key | None) -> tuple[str, tuple[Any, ...]]:
        """Return the condition for the rows after `last` and up to `upto`."""
        after, parameters = ("", ()) if last is None else self.after(last)
        upto, more = self._upto
        return " AND ".join(sql for sql in (after, upto) if sql), (*parameters, *more)

    def behind(self, name: str, bound: str, value: Any, last: Key | None) -> tuple[str, tuple[Any, ...]]:
        """Return the condition for rows whose column `name` is above `value`, or equals it with a key after `last`.
        `bound`: SQL with one parameter for the value."""
        if last is None:
            return f"{name} > {bound}", (value,)
        condition, parameters = self.after(last)
        return f"({name} > {bound} OR ({name} = {bound} AND {condition}))", (value, value, *parameters)

    def lookups(self, start: str, keys: Sequence[Key]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield statements that start with `start` and together find exactly these keys; one per key with NULL."""
        whole = [key for key in keys if None not in key]
        parts = [[key] for key in keys if None in key]
        while whole:
            size = next((n for n in LOOKUP_SIZES if n >= len(whole)), LOOKUP_SIZES[-1])
            part, whole = whole[:size], whole[size:]
            parts.append(part + part[-1:] * (size - len(part)))
        for part in parts:
            terms: list[str] = []
            parameters: list[Any] = []
            for key in part:
                same = [_equal(name, value) for name, value in zip(self._key, key, strict=True)]
                terms.append("(" + " AND ".join(sql for sql, _ in same) + ")")
                parameters += [value for _, values in same for value in values]
            yield start + self.where(f"({' OR '.join(terms)})"), tuple(parameters)

    def key_of(self, values: Sequence[Any]) -> Key:
        return tuple(values[: self._width])

    def row(self, values: tuple[Any, ...]) -> Row:
        return Row(values[: self._width], Cells(self._places, values))

    def page(self, rows: Sequence[tuple[Any, ...]]) -> Page:
        return Page(self._places, self._width, rows)


def place(table: TableRef) -> str:
    return f"{quote(table.schema)}.{quote(table.name)}"


def with_bytes(rows: Rows) -> Rows:
    """Return the rows with bytes instead of memoryviews, which cannot be part of a key. The first non-NULL value
    of a column determines its type."""
    firsts = list(rows[0]) if rows else []
    for position, value in enumerate(firsts):
        if value is None:
            firsts[position] = next((row[position] for row in rows if row[position] is not None), None)
    binary = [position for position, value in enumerate(firsts) if isinstance(value, memoryview)]
    if not binary:
        return rows
    columns = list(zip(*rows, strict=True))
    for position in binary:
        columns[position] = tuple(value if value is None else bytes(value) for value in columns[position])
    return list(zip(*columns, strict=True))


def _greater(name: str, value: Any) -> tuple[str, list[Any]]:
    """Return the condition for values after `value`. HANA sorts NULL first."""
    return (f"{name} IS NOT NULL", []) if value is None else (f"{name} > ?", [value])


def _equal(name: str, value: Any) -> tuple[str, list[Any]]:
    return (f"{name} IS NULL", []) if value is None else (f"{name} = ?", [value])


def check_unique(query: Query, last: Key | None, page: Sequence[Row], following: Key | None) -> None:
    keys = [key for key in (last, *keys_of(page), following) if key is not None]
    if any(map(eq, keys, keys[1:])):
        raise NoKey(
            f"`key` ({', '.join(query.key)}) does not identify the rows of {query.table}: two rows share one key. "
            "Add columns to `key` (two TIMESTAMPs within one microsecond count as equal)"
        )
