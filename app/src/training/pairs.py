"""Training pairs, read from JSON lines or from two columns of a collection's rows. Messages name lines and columns,
never a text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from connector.document import values
from connector.document.document import UNREADABLE
from connector.errors import ConfigurationError
from connector.hana.catalog import check_columns, resolve_key
from connector.model import CollectionSpec, Query
from connector.protocols import Source

_NAMES = (("query", "text"), ("anchor", "positive"))
_SKIPPED = {
    "incomplete": "incomplete",
    "duplicates": "repeated",
    "same": "with the same text on both sides",
    "unreadable": "unreadable",
}
_SHOWN = 5  # bad lines that a message names; others are only counted


class Pair(NamedTuple):
    """A query and the text that answers it."""

    query: str
    text: str


@dataclass(slots=True)
class Pairs:
    """`read`: rows or lines. Each becomes a pair or counts in `skipped`: `incomplete` (one side blank), `duplicates`,
    `same` (both sides equal) or `unreadable` (a value that cannot be formatted). `limited`: the limit was reached
    before the end."""

    origin: Literal["file", "rows"]
    pairs: list[Pair] = field(default_factory=list)
    read: int = 0
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SKIPPED, 0))
    limited: bool = False
    _seen: set[bytes] = field(default_factory=set, repr=False)

    def add(self, query: str, text: str) -> None:
        self.read += 1
        query, text = query.strip(), text.strip()
        digest = hashlib.blake2b(f"{len(query)} {query}{text}".encode(), digest_size=16).digest()
        if not query or not text:
            self.skipped["incomplete"] += 1
        elif query == text:
            self.skipped["same"] += 1
        elif digest in self._seen:
            self.skipped["duplicates"] += 1
        else:
            self._seen.add(digest)
            self.pairs.append(Pair(query, text))

    def counts(self) -> dict[str, Any]:
        read = {"origin": self.origin, "pairs": len(self.pairs), "read": self.read}
        return read | self.skipped | {"limited": self.limited}

    def __str__(self) -> str:
        parts = [f"{len(self.pairs)} pairs from {self.read} {'rows' if self.origin == 'rows' else 'lines'}"]
        parts += [f"{count} {_SKIPPED[name]} skipped" for name, count in self.skipped.items() if count]
        return ", ".join(parts + (["the rest not read"] if self.limited else []))

    @property
    def digest(self) -> str:
        """SHA-256 over all pairs in order: identifies them without revealing a text."""
        whole = hashlib.sha256()
        for text in chain.from_iterable(self.pairs):
            content = text.encode()
            whole.update(len(content).to_bytes(8, "little") + content)
        return whole.hexdigest()


def read_file(file: Path, limit: int) -> Pairs:
    """Read JSON lines, each {"query", "text"} or {"anchor", "positive"}; other names and blank lines are ignored.
    Raises ConfigurationError with the numbers of the bad lines."""
    found, faults = Pairs("file"), list[str]()
    try:
        with file.open("rb") as content:
            for number, line in enumerate(content, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                if len(found.pairs) >= limit:
                    found.limited = True
                    break
                pair = _pair(line)
                if isinstance(pair, str):
                    faults.append(f"{file}, line {number} {pair}")
                else:
                    found.add(*pair)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None
    if faults:
        more = [f"and {len(faults) - _SHOWN} more lines"] if len(faults) > _SHOWN else []
        raise ConfigurationError("\n".join(faults[:_SHOWN] + more))
    return found


def _pair(line: bytes) -> Pair | str:
    """Return the pair, or what is wrong with the line."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"is not valid JSON (column {error.colno})"
    if not isinstance(record, dict):
        return "must be a JSON object"
    for names in _NAMES:
        if all(name in record for name in names):
            query, text = (record[name] for name in names)
            if isinstance(query, str) and isinstance(text, str):
                return Pair(values.clean(query), values.clean(text))
            wrong = names[0] if not isinstance(query, str) else names[1]
            return f'must have a text as "{wrong}"'
    return 'needs "query" and "text", or "anchor" and "positive"'


def read_rows(
    spec: CollectionSpec,
    columns: tuple[str, str],
    source: Source,
    limit: int,
    *,
    page_rows: int = 1000,
    stop: Callable[[], bool] = lambda: False,
) -> Pairs:
    """Read the first column as the query and the second as its text, formatted as in the collection's documents. Raises
    ConfigurationError, UnknownTable, UnknownColumn, NoKey, and the source's errors."""
    table = source.describe(spec.source)
    if columns[0] == columns[1]:
        raise ConfigurationError(f"--columns names {columns[0]!r} twice; name a title and its long text")
    check_columns(table, columns, "columns")
    formatters = []
    for name in columns:
        column = table.column(name)
        assert column is not None  # ensured by check_columns
        if column.type_name in UNREADABLE:
            raise ConfigurationError(f"--columns: {name!r} of {table.ref} is a {column.type_name} and contains no text")
        formatters.append(values.formatter(column))
    query = Query(table.ref, resolve_key(spec, table), columns, spec.where)
    found = Pairs("rows")
    for row in chain.from_iterable(source.pages(query, page_rows)):
        if len(found.pairs) >= limit or stop():
            found.limited = True
            break
        try:
            title, text = (format_(row.values[name]) for format_, name in zip(formatters, columns, strict=True))
        except (ValueError, ArithmeticError):
            found.read += 1
            found.skipped["unreadable"] += 1
            continue
        found.add(title, text)
    return found
