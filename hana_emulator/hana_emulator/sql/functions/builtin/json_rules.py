"""JSON_VALUE and JSON_QUERY with RETURNING, ON EMPTY and ON ERROR, and the rows of JSON_TABLE."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hana_emulator.errors import HanaError
from hana_emulator.sql.language.limits import check_built

from . import json_path
from .json_path import JsonFault
from .texts import plain

Convert = Callable[[Any], Any]
"""From text to the storage value of a column's type; raises HanaError when it does not fit."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The type of one value and its replacement if missing or invalid; a scalar has no `wrapper`."""

    wrapper: str = ""
    on_empty: str = "NULL"
    on_error: str = "NULL"
    empty_default: str | None = None
    error_default: str | None = None

    def evaluate(self, root: Callable[[], Any], path: json_path.Path, convert: Convert) -> Any:
        """The value at `path`. Raises HanaError 8 (emulator's choice) for ERROR ON EMPTY or ERROR ON ERROR."""
        try:
            found = json_path.select(root(), path)
            if found:
                text = json_path.structure_text(found, self.wrapper) if self.wrapper else json_path.scalar_text(found)
                return _converted(text, convert)
            return _instead(self.on_empty, self.empty_default, convert, "the path finds nothing")
        except JsonFault:
            pass
        try:
            return _instead(self.on_error, self.error_default, convert, "the JSON value has another kind")
        except JsonFault:
            raise HanaError(8, "invalid argument: JSON: the default ON ERROR does not fit the type") from None


def _converted(text: str | None, convert: Convert) -> Any:
    try:
        return None if text is None else convert(text)
    except HanaError:
        raise JsonFault from None


def _instead(act: str, default: str | None, convert: Convert, reason: str) -> Any:
    if act == "ERROR":
        raise HanaError(8, f"invalid argument: JSON: {reason}")
    if act == "DEFAULT":
        return _converted(default, convert)
    return {"EMPTY ARRAY": "[]", "EMPTY OBJECT": "{}"}.get(act)


def value_by_rules(converter: Callable[[int, int, int], Convert]) -> Callable[..., Any]:
    """A function of (document, path, type code, length, scale, wrapper, on empty, on error, both defaults)."""

    def call(text: Any, path: Any, code: int, length: int, scale: int, *rules: Any) -> Any:
        if text is None or path is None:
            return None
        steps = json_path.read_path(plain(path))
        return Rules(*rules).evaluate(lambda: json_path.document(text), steps, converter(code, length, scale))

    return call


# --- JSON_TABLE -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column at `place` of the row; without a path, it numbers the rows of its level."""

    place: int
    path: json_path.Path | None
    convert: Convert
    rules: Rules


@dataclass(frozen=True, slots=True)
class Level:
    """The columns of one path, and the nested paths."""

    path: json_path.Path
    columns: tuple[TableColumn, ...]
    nested: tuple[Level, ...]

    def rows(self, root: Any) -> Iterator[dict[int, Any]]:
        """Yield rows as {place: value}. A parent row repeats for each nested row and is kept without any."""
        for number, item in enumerate(json_path.select(root, self.path), 1):
            own = {column.place: _cell(column, item, number) for column in self.columns}
            below = [row for level in self.nested for row in level.nested_rows(item)]
            yield from ({**own, **row} for row in below or [{}])

    def nested_rows(self, item: Any) -> list[dict[int, Any]]:
        try:
            return list(self.rows(item))
        except JsonFault:
            return []


def _cell(column: TableColumn, item: Any, number: int) -> Any:
    if column.path is None:
        return number
    return column.rules.evaluate(lambda: item, column.path, column.convert)


def rows_of(converter: Callable[[int, int, int], Convert]) -> Callable[..., str | None]:
    """A function of (document, path, columns as JSON, column count, 1 for ERROR ON ERROR).
    It returns all rows as one JSON array of arrays."""

    @lru_cache(maxsize=64)
    def level(path: str, columns: str) -> Level:
        return _level(path, json.loads(columns), converter)

    def call(text: Any, path: Any, columns: str, width: int, strict: int) -> str | None:
        if text is None or path is None:
            return None
        top = level(plain(path), columns)
        rows, length = list[list[Any]](), 0
        try:
            for row in top.rows(json_path.document(text)):
                rows.append([row.get(place) for place in range(width)])
                length += sum(len(value) if isinstance(value, str) else 8 for value in rows[-1])
                check_built(length)
        except JsonFault:
            if strict:
                raise HanaError(8, "invalid argument: JSON_TABLE: no JSON, or nothing at the path") from None
            rows = []
        return json.dumps(rows)

    return call


def _level(path: str, columns: list[Any], converter: Callable[[int, int, int], Convert]) -> Level:
    """Read the compiler's form: [place, path, [code, length, scale], rules] or [path, columns]."""
    own = tuple(
        TableColumn(place, json_path.read_path(where) if where else None, converter(*kind), Rules(*rules))
        for place, where, kind, rules in (column for column in columns if len(column) == 4)
    )
    nested = tuple(_level(column[0], column[1], converter) for column in columns if len(column) == 2)
    return Level(json_path.read_path(path), own, nested)
