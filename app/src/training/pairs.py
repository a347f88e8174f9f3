"""Pairs of texts to learn from: out of a file of JSON lines, or of two columns of a collection's rows. Messages name
lines and columns, never a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from connector.document import values
from connector.document.document import UNREADABLE
from connector.errors import ConfigurationError
from connector.hana.catalog import check_columns, resolve_key
from connector.model import CollectionSpec, Column, Query, Row, Table
from connector.protocols import Source

_NAMES = (("query", "text"), ("anchor", "positive"))
_SHOWN = 5
"""Bad lines that a message tells of; the rest are counted."""


class Pair(NamedTuple):
    """What somebody asks, and the text that answers it."""

    query: str
    text: str


@dataclass(slots=True)
class Pairs:
    """`read`: rows or lines; each is a pair or counted in one of the others. `incomplete`: one side is blank or empty;
    `duplicates`: the same pair once more; `same`: both sides are one text, of which nothing is learnt; `unreadable`: a
    value that cannot be shown; `limited`: there were more, which were not read."""

    origin: Literal["file", "rows"]
    pairs: list[Pair] = field(default_factory=list)
    read: int = 0
    incomplete: int = 0
    duplicates: int = 0
    same: int = 0
    unreadable: int = 0
    limited: bool = False
    _seen: set[bytes] = field(default_factory=set, repr=False)

    def add(self, query: str, text: str) -> None:
        self.read += 1
        query, text = query.strip(), text.strip()
        digest = hashlib.blake2b(f"{len(query)} {query}{text}".encode(), digest_size=16).digest()
        if not query or not text:
            self.incomplete += 1
        elif query == text:
            self.same += 1
        elif digest in self._seen:
            self.duplicates += 1
        else:
            self._seen.add(digest)
            self.pairs.append(Pair(query, text))

    def counts(self) -> dict[str, Any]:
        names = ("read", "incomplete", "duplicates", "same", "unreadable", "limited")
        return {"origin": self.origin, "pairs": len(self.pairs)} | {name: getattr(self, name) for name in names}

    @property
    def digest(self) -> str:
        """SHA-256 over all pairs in order: says whether two runs had the same, and nothing of what they say."""
        whole = hashlib.sha256()
        for pair in self.pairs:
            for text in pair:
                content = text.encode()
                whole.update(len(content).to_bytes(8, "little") + content)
        return whole.hexdigest()


# -------------------------------------------------------------------------------------------------------- out of a file


def read_file(file: Path, limit: int) -> Pairs:
    """JSON lines, each {"query", "text"} or {"anchor", "positive"}; other names in them are not looked at, blank lines
    are skipped. Raises ConfigurationError with the numbers of the bad lines."""
    found, faults = Pairs("file"), _Faults(file)
    for number, line in _lines(file):
        if len(found.pairs) >= limit:
            found.limited = True
            break
        pair = _pair(line)
        if isinstance(pair, str):
            faults.add(number, pair)
        else:
            found.add(*pair)
    faults.raise_if_any()
    return found


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with file.open("rb") as content:
            for number, line in enumerate(content, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None


def _pair(line: bytes) -> Pair | str:
    """The pair, or what is wrong with the line."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"is no JSON (column {error.colno})"
    if not isinstance(record, dict):
        return "holds no JSON object"
    for names in _NAMES:
        if all(name in record for name in names):
            query, text = (record[name] for name in names)
            if isinstance(query, str) and isinstance(text, str):
                return Pair(values.clean(query), values.clean(text))
            wrong = names[0] if not isinstance(query, str) else names[1]
            return f'has no text in "{wrong}"'
    return 'has neither "query" and "text" nor "anchor" and "positive"'


class _Faults:
    """Bad lines of a file; no text of theirs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._told: list[str] = []
        self._count = 0

    def add(self, number: int, what: str) -> None:
        self._count += 1
        if len(self._told) < _SHOWN:
            self._told.append(f"{self._file}, line {number} {what}")

    def raise_if_any(self) -> None:
        if self._count:
            more = self._count - len(self._told)
            raise ConfigurationError("\n".join(self._told + ([f"and {more} more lines"] if more else [])))


# ---------------------------------------------------------------------------------------------------------- out of rows


def read_rows(
    spec: CollectionSpec,
    columns: tuple[str, str],
    source: Source,
    limit: int,
    *,
    page_rows: int = 1000,
    stop: Callable[[], bool] = lambda: False,
) -> Pairs:
    """The first column as what is asked, the second as what answers it, of each row of the collection, formatted as
    texts of the collection are. Raises ConfigurationError, UnknownTable, UnknownColumn, NoKey, and as the source."""
    table = source.describe(spec.source)
    query = _query(spec, table, columns)
    show = [values.formatter(_column(table, name)) for name in columns]
    found = Pairs("rows")
    for row in _rows(source.pages(query, page_rows)):
        if len(found.pairs) >= limit or stop():
            found.limited = True
            break
        try:
            query_text, text = (shown(row.values[name]) for shown, name in zip(show, columns, strict=True))
        except (ValueError, ArithmeticError):
            found.read += 1
            found.unreadable += 1
            continue
        found.add(query_text, text)
    return found


def _query(spec: CollectionSpec, table: Table, columns: tuple[str, str]) -> Query:
    if columns[0] == columns[1]:
        raise ConfigurationError(f"--columns names {columns[0]!r} twice: a title and the long text that belongs to it")
    check_columns(table, columns, "columns")
    for name in columns:
        if (kind := _column(table, name).type_name) in UNREADABLE:
            raise ConfigurationError(f"--columns: {name!r} of {table.ref} is a {kind}, which holds no text")
    return Query(table.ref, resolve_key(spec, table), columns, spec.where)


def _column(table: Table, name: str) -> Column:
    column = table.column(name)
    assert column is not None  # check_columns has seen to it
    return column


def _rows(pages: Iterable[list[Row]]) -> Iterator[Row]:
    for page in pages:
        yield from page
