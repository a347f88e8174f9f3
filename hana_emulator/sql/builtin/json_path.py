"""JSON_VALUE, JSON_QUERY and JSON_EXISTS: SQL/JSON paths of members and indices in lax mode, NULL ON ERROR."""

from __future__ import annotations

import json
import re
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
    """A JSON number as it was written."""

    __slots__ = ()


@lru_cache(maxsize=256)
def _steps(path: str) -> tuple[tuple[Step, bool], ...]:
    """The steps of a path; the flag says that the step is a wildcard. Raises 8 for what is no path."""
    text = re.sub(r"^(lax|strict)\s+", "", path.strip())
    if not text.startswith("$"):
        raise _bad_path()
    position, steps = 1, list[tuple[Step, bool]]()
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None:
            raise _bad_path()
        steps.append(_step(match))
        position = match.end()
    return tuple(steps)


def _step(match: re.Match[str]) -> tuple[Step, bool]:
    word, quoted, index, bracket = match["word"], match["quoted"], match["index"], match["bracket"]
    if index is not None:
        return (_ANY, True) if index == "*" else (int(index), False)
    if word is not None:
        return word, word == "*"
    return re.sub(r"\\(.)", r"\1", quoted if quoted is not None else bracket), False


def _bad_path() -> HanaError:
    return HanaError(8, "invalid argument: not a JSON path of the form $.member[index] (as this stand-in knows them)")


@lru_cache(maxsize=64)
def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_float=_Literal, parse_int=_Literal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _found(text: Any, path: Any) -> list[Any]:
    document, steps = _parse(plain(text)), _steps(plain(path))
    found = [] if document is _NOTHING else [document]
    for step, wild in steps:
        found = [inner for outer in found for inner in _children(outer, step, wild)]
    return found


def _children(node: Any, step: Step, wild: bool) -> list[Any]:
    if isinstance(step, int):
        items = node if isinstance(node, list) else [node]
        return items[step : step + 1]
    if wild:
        return list(node.values()) if isinstance(node, dict) else list(node) if isinstance(node, list) else []
    if isinstance(node, list):
        return [inner for item in node for inner in _children(item, step, wild) if isinstance(item, dict)]
    return [node[step]] if isinstance(node, dict) and step in node else []


def value(text: Any, path: Any) -> str | None:
    """The scalar at `path` as text: numbers as written, true and false in lower case. NULL when it is missing, null,
    an object, an array, ambiguous, or the text is no JSON."""
    found = _found(text, path)
    if len(found) != 1 or isinstance(found[0], dict | list):
        return None
    scalar = found[0]
    return ("true" if scalar else "false") if isinstance(scalar, bool) else None if scalar is None else str(scalar)


def query(text: Any, path: Any, wrapper: Any = "WITHOUT") -> str | None:
    """The object or array at `path` as JSON text. `wrapper` is WITHOUT, CONDITIONAL or WITH (an array)."""
    found, mode = _found(text, path), plain(wrapper).upper()
    if not found:
        return None
    single = len(found) == 1 and (isinstance(found[0], dict | list) or mode == "CONDITIONAL")
    if mode == "WITH" or (mode == "CONDITIONAL" and len(found) > 1):
        return _dump(found)
    return _dump(found[0]) if single else None


def exists(text: Any, path: Any) -> bool:
    return bool(_found(text, path))


def _dump(node: Any) -> str:
    if isinstance(node, _Literal):
        return str(node)
    if isinstance(node, dict):
        return (
            "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{_dump(item)}" for key, item in node.items()) + "}"
        )
    if isinstance(node, list):
        return "[" + ",".join(map(_dump, node)) + "]"
    return json.dumps(node, ensure_ascii=False)
