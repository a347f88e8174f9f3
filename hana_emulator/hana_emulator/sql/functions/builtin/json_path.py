"""SQL/JSON paths of members and indices, lax or strict, and the functions JSON_VALUE, JSON_QUERY and JSON_EXISTS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hana_emulator.errors import HanaError

from .texts import plain

_STEP = re.compile(
    r"""\s*(?:\.\s*(?P<word>\w+|\*) | \.\s*"(?P<quoted>(?:[^"\\]|\\.)*)" | \[\s*(?P<index>\d+|\*)\s*\]
    | \[\s*(?P<q>["'])(?P<bracket>(?:(?!(?P=q))[^\\]|\\.)*)(?P=q)\s*\])\s*""",
    re.VERBOSE,
)
_NOTHING = object()
Step = str | int
_ANY = "*"


class _Literal(str):
    __slots__ = ()


class JsonFault(Exception):
    """An error for ON ERROR: invalid JSON, not one scalar, no match in strict mode, or a failed conversion."""


@dataclass(frozen=True, slots=True)
class Path:
    """A parsed path; each step has a flag for a wildcard."""

    steps: tuple[tuple[Step, bool], ...]
    strict: bool = False


@lru_cache(maxsize=256)
def read_path(path: str) -> Path:
    """Parse a path. Raises HanaError 8 if it is invalid."""
    mode = re.match(r"(lax|strict)\s+", path.strip())
    text = path.strip()[mode.end() if mode else 0 :]
    if not text.startswith("$"):
        raise _bad_path()
    position, steps = 1, list[tuple[Step, bool]]()
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None:
            raise _bad_path()
        steps.append(_step(match))
        position = match.end()
    return Path(tuple(steps), mode is not None and mode[1] == "strict")


def _step(match: re.Match[str]) -> tuple[Step, bool]:
    word, quoted, index, bracket = match["word"], match["quoted"], match["index"], match["bracket"]
    if index is not None:
        return (_ANY, True) if index == "*" else (int(index), False)
    if word is not None:
        return word, word == "*"
    return re.sub(r"\\(.)", r"\1", quoted if quoted is not None else bracket), False


def _bad_path() -> HanaError:
    return HanaError(8, "invalid argument: not a JSON path of the form $.member[index] (as this emulator knows them)")


@lru_cache(maxsize=64)
def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_float=_Literal, parse_int=_Literal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def document(text: Any) -> Any:
    """The parsed document; numbers keep their text. Raises JsonFault for invalid JSON."""
    found = _parse(plain(text))
    if found is _NOTHING:
        raise JsonFault
    return found


def select(root: Any, path: Path) -> list[Any]:
    """The values at `path` below `root`. In strict mode a step without a match raises JsonFault."""
    found = [root]
    for step, wild in path.steps:
        following = [inner for outer in found for inner in _children(outer, step, wild, strict=path.strict)]
        if path.strict and not following and not wild:
            raise JsonFault
        found = following
    return found


def _children(node: Any, step: Step, wild: bool, *, strict: bool) -> list[Any]:
    if isinstance(step, int):
        items = node if isinstance(node, list) else [] if strict else [node]
        return items[step : step + 1]
    if wild:
        return list(node.values()) if isinstance(node, dict) else list(node) if isinstance(node, list) else []
    if isinstance(node, list) and not strict:
        return [inner for item in node for inner in _children(item, step, wild, strict=True) if isinstance(item, dict)]
    return [node[step]] if isinstance(node, dict) and step in node else []


def scalar_text(found: list[Any]) -> str | None:
    """The only scalar as text: numbers as written, true and false in lower case, None for null."""
    if len(found) != 1 or isinstance(found[0], dict | list):
        raise JsonFault
    scalar = found[0]
    return ("true" if scalar else "false") if isinstance(scalar, bool) else None if scalar is None else str(scalar)


def structure_text(found: list[Any], wrapper: str) -> str:
    """Objects and arrays as JSON text. `wrapper` is WITHOUT, CONDITIONAL (wrap all but a single object or array)
    or WITH (always wrap)."""
    single = len(found) == 1 and isinstance(found[0], dict | list)
    if wrapper == "WITH" or (wrapper == "CONDITIONAL" and not single):
        return dump(found)
    if not single:
        raise JsonFault
    return dump(found[0])


def value(text: Any, path: Any) -> str | None:
    """JSON_VALUE without clauses; NULL unless the path finds exactly one scalar other than null."""
    return _or_none(text, path, scalar_text)


def query(text: Any, path: Any) -> str | None:
    """JSON_QUERY without clauses; NULL unless the path finds one object or array."""
    return _or_none(text, path, lambda found: structure_text(found, "WITHOUT"))


def _or_none(text: Any, path: Any, show: Callable[[list[Any]], str | None]) -> str | None:
    steps = read_path(plain(path))
    try:
        return show(select(document(text), steps))
    except JsonFault:
        return None


def exists(text: Any, path: Any) -> bool:
    steps = read_path(plain(path))
    try:
        return bool(select(document(text), steps))
    except JsonFault:
        return False


def dump(node: Any) -> str:
    if isinstance(node, _Literal):
        return str(node)
    if isinstance(node, dict):
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{dump(item)}" for key, item in node.items()) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return json.dumps(node, ensure_ascii=False)
