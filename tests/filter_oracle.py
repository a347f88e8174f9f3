"""The filter language evaluated in Python: what both compilers must agree with."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from connector.stores import filters


def like(pattern: str, text: str) -> bool:
    """Match SQL's LIKE without an escape character. Take each piece at its first match, without backtracking."""
    first, *pieces = (".".join(map(re.escape, piece.split("_"))) for piece in pattern.split("%"))
    between = "".join(f"(?>.*?{piece})" for piece in pieces[:-1])
    last = f".*{pieces[-1]}" if pieces else ""
    return re.fullmatch(first + between + last, text, re.DOTALL) is not None


_READERS: dict[filters.Kind, Callable[[str], Any]] = {
    filters.Kind.BOOLEAN: filters._read_boolean,
    filters.Kind.NUMBER: filters.read_number,
    filters.Kind.TEXT: str,
    filters.Kind.DATE: filters._read_date,
}
_TESTS: dict[str, Callable[..., bool]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$in": lambda value, *given: value in given,
    "$nin": lambda value, *given: value not in given,
    "$between": lambda value, lowest, highest: lowest <= value <= highest,
    "$like": lambda value, pattern: like(pattern, value),
    "$contains": lambda value, phrase: filters.contains(phrase, value),
}


def matches(condition: filters.Condition, metadata: Mapping[str, Any]) -> bool:
    """Return whether one record matches. Both compilers are tested against this function. Raises BadFilter."""
    try:
        return _holds(condition, metadata)
    except filters.Unreadable:
        raise filters.not_comparable(condition) from None


def _holds(condition: filters.Condition, metadata: Mapping[str, Any]) -> bool:
    if isinstance(condition, filters.Guarded):
        return _holds(condition.within, metadata) and (condition.where is None or _holds(condition.where, metadata))
    if isinstance(condition, filters.Group):
        return (all if condition.word == "AND" else any)(_holds(part, metadata) for part in condition.parts)
    value, text = metadata.get(condition.field), None  # as JSON_VALUE gives it
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, int | float | str):
        text = str(value)
    if not condition.values:
        return (text is None) is (condition.operator == "$eq")
    return text is not None and _TESTS[condition.operator](_READERS[condition.kind](text), *condition.values)
