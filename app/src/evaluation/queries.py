"""Labelled queries: a text, perhaps a filter, and the rows that answer it. Reads them from JSON lines and says what is
wrong with a line. Knows no store.
"""

from __future__ import annotations

import difflib
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
    """`right`: of each row that answers the ids it may have in a hit (several only where a text could be an id or the
    value of a single key column). `line` counts from 1."""

    text: str
    right: tuple[frozenset[str], ...]
    where: Filter | None = None
    group: str = NO_GROUP
    line: int = 0

    def found(self, ids: Sequence[str]) -> list[bool]:
        """Of each hit whether it answers; one row answers once."""
        place = {id_: n for n, names in enumerate(self.right) for id_ in names}
        seen: set[int] = set()
        found = []
        for id_ in ids:
            which = place.get(id_)
            found.append(which is not None and which not in seen)
            if which is not None:
                seen.add(which)
        return found


def read(file: Path, columns: Sequence[str] = ()) -> list[LabelledQuery]:
    """The queries of a file, in order. `columns`: the key columns, for rows that are named by column.

    Raises ConfigurationError, naming file and line, for what cannot be read and for the same query twice.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"{file} cannot be read: {reason}") from None
    queries: list[LabelledQuery] = []
    first: dict[bytes, int] = {}
    for number, line in enumerate(text.split("\n"), 1):  # JSON may hold other ends of lines as they are
        if not line.strip():
            continue
        try:
            query = _query(line, columns, number)
        except ValueError as error:
            raise ConfigurationError(f"{file}, line {number}: {error}") from None
        earlier = first.setdefault(orjson.dumps([query.text, query.where], option=orjson.OPT_SORT_KEYS), number)
        if earlier != number:
            raise ConfigurationError(f"{file}, line {number}: the same query stands in line {earlier}")
        queries.append(query)
    if not queries:
        raise ConfigurationError(f"{file} holds no queries; one JSON object a line: {_EXAMPLE}")
    return queries


def _query(line: str, columns: Sequence[str], number: int) -> LabelledQuery:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"no JSON object; it should look like {_EXAMPLE}")
    for name in entry:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(_NAMES)}"
            raise ValueError(f'"{name}" is unknown; {hint}')
    text, where, group = entry.get("query"), entry.get("filter"), entry.get("group", NO_GROUP)
    if not isinstance(text, str) or not text.strip():
        raise ValueError('"query" must be a text that is not blank')
    if where is not None and not isinstance(where, dict):
        raise ValueError('"filter" must be an object, as in a search')
    if not isinstance(group, str) or not group:
        raise ValueError('"group" must be a text')
    return LabelledQuery(text, _right(entry.get("relevant"), columns), where, group, number)


def _right(relevant: Any, columns: Sequence[str]) -> tuple[frozenset[str], ...]:
    if not isinstance(relevant, list) or not relevant:
        raise ValueError('"relevant" must be a list of rows, at least one: a key as a list, or the id of a hit')
    right = tuple(_ids(row, columns) for row in relevant)
    if len(frozenset().union(*right)) < sum(map(len, right)):
        raise ValueError('"relevant" names a row twice')
    return right


def _ids(row: Any, columns: Sequence[str]) -> frozenset[str]:
    if isinstance(row, Mapping):
        if not columns:
            raise ValueError("the key columns are not known yet; name a row by a list of its key values")
        if set(row) != set(columns):
            raise ValueError(f'a row of "relevant" must name the key columns {", ".join(columns)}')
        row = [row[name] for name in columns]
    if isinstance(row, str):
        return frozenset({row} if row.startswith("[") else {row, document_id((row,))})
    values = row if isinstance(row, list) else [row]
    if not values or not all(value is None or isinstance(value, str | int | float) for value in values):
        raise ValueError('a row of "relevant" is a list of key values, an object by key column, or the id of a hit')
    if columns and len(values) != len(columns):
        raise ValueError(f'a row of "relevant" has {len(values)} key values; there are {len(columns)} key columns')
    return frozenset({document_id(tuple(values))})
