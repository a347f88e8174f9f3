"""Labelled queries, read from JSON lines: a text, an optional filter, and the rows that answer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from connector.document.document import document_id
from connector.errors import ConfigurationError
from connector.model import Filter

NO_GROUP = "other"
_NAMES = ("query", "relevant", "filter", "group")
_EXAMPLE = '{"query": "noise from the gearbox", "relevant": [["100", "4711"]]}'


@dataclass(frozen=True, slots=True)
class LabelledQuery:
    """`relevant`: for each relevant row, its possible ids in a hit (several only where a text could be an id or the
    value of a single key column). `line` counts from 1."""

    text: str
    relevant: tuple[frozenset[str], ...]
    where: Filter | None = None
    group: str = NO_GROUP
    line: int = 0

    def ranks(self, ids: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks, from 1, of the relevant rows among these hits; each row counts once."""
        place = {id_: n for n, names in enumerate(self.relevant) for id_ in names}
        first: dict[int, int] = {}
        for rank, id_ in enumerate(ids, 1):
            if id_ in place:
                first.setdefault(place[id_], rank)
        return tuple(first.values())


def read(file: Path, columns: Sequence[str] = ()) -> list[LabelledQuery]:
    """Return the queries of a file in order. `columns`: the key columns, for rows written as objects. Raises
    ConfigurationError with file and line for an invalid line and for a repeated query."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the encoding is not UTF-8"
        raise ConfigurationError(f"{file} cannot be read: {reason}") from None
    queries: list[LabelledQuery] = []
    first: dict[bytes, int] = {}
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also split at U+2028, which JSON may contain
        if not line.strip():
            continue
        try:
            query = _query(line, columns, number)
        except ValueError as error:
            raise ConfigurationError(f"{file}, line {number}: {error}") from None
        earlier = first.setdefault(orjson.dumps([query.text, query.where], option=orjson.OPT_SORT_KEYS), number)
        if earlier != number:
            raise ConfigurationError(f"{file}, line {number}: the query repeats line {earlier}; remove one of them")
        queries.append(query)
    if not queries:
        raise ConfigurationError(f"{file} contains no queries; write one JSON object per line, such as {_EXAMPLE}")
    return queries


def _query(line: str, columns: Sequence[str], number: int) -> LabelledQuery:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"must be a JSON object, such as {_EXAMPLE}")
    if unknown := set(entry) - set(_NAMES):
        raise ValueError(f'"{min(unknown)}" is unknown; known names: {", ".join(_NAMES)}')
    text, where, group = entry.get("query"), entry.get("filter"), entry.get("group", NO_GROUP)
    if not isinstance(text, str) or not text.strip():
        raise ValueError('"query" must be a text that is not blank')
    if where is not None and not isinstance(where, dict):
        raise ValueError('"filter" must be an object, as in a search')
    if not isinstance(group, str) or not group:
        raise ValueError('"group" must be a text')
    rows = entry.get("relevant")
    if not isinstance(rows, list) or not rows:
        raise ValueError('"relevant" must be a list of at least one row: a key as a list, or the id of a hit')
    relevant = tuple(_ids(row, columns) for row in rows)
    if len(frozenset().union(*relevant)) < sum(map(len, relevant)):
        raise ValueError('"relevant" names a row twice')
    return LabelledQuery(text, relevant, where, group, number)


def _ids(row: Any, columns: Sequence[str]) -> frozenset[str]:
    if isinstance(row, Mapping):
        if set(row) != set(columns):
            raise ValueError(f'a row of "relevant" must name the key columns {", ".join(columns)}')
        row = [row[name] for name in columns]
    if isinstance(row, str):
        return frozenset({row} if row.startswith("[") else {row, document_id((row,))})
    values = row if isinstance(row, list) else [row]
    if not values or not all(value is None or isinstance(value, str | int | float) for value in values):
        raise ValueError(
            'a row of "relevant" must be a list of key values, an object by key column, or the id of a hit'
        )
    if columns and len(values) != len(columns):
        raise ValueError(f'a row of "relevant" has {len(values)} key values; the collection has {len(columns)}')
    return frozenset({document_id(tuple(values))})
