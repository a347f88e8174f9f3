"""SQL/JSON paths of members and indices, and the functions JSON_VALUE, JSON_QUERY and JSON_EXISTS."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from hana_emulator.errors import HanaError

from .texts import plain

_STEP = re.compile(
    r"""\s*(?:\.\s*(?P<word>\w+) | \.\s*"(?P<quoted>(?:[^"\\]|\\.)*)" | \[\s*(?P<index>\d+)\s*\]
    | \[\s*(?P<q>["'])(?P<bracket>(?:(?!(?P=q))[^\\]|\\.)*)(?P=q)\s*\])\s*""",
    re.VERBOSE,
)
_NOTHING = object()
Step = str | int


class _Literal(str):
    __slots__ = ()


@lru_cache(maxsize=256)
def read_path(path: str) -> tuple[Step, ...]:
    """Return the members and indices of a path. Raises HanaError 8 if it is invalid."""
    text = re.sub(r"^lax\s+", "", path.strip())
    if not text.startswith("$"):
        raise _bad_path()
    position, steps = 1, list[Step]()
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None:
            raise _bad_path()
        if match["index"] is not None:
            steps.append(int(match["index"]))
        else:
            quoted = match["quoted"] if match["quoted"] is not None else match["bracket"]
            steps.append(match["word"] or re.sub(r"\\(.)", r"\1", quoted))
        position = match.end()
    return tuple(steps)


def _bad_path() -> HanaError:
    return HanaError(8, "invalid argument: this emulator supports only JSON paths of the form $.member[index]")


@lru_cache(maxsize=64)
def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_float=_Literal, parse_int=_Literal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _select(text: Any, path: Any) -> list[Any]:
    """Return the values at a path of a document; an empty list if the text is not JSON."""
    steps, root = read_path(plain(path)), _parse(plain(text))
    found = [] if root is _NOTHING else [root]
    for step in steps:
        found = [inner for outer in found for inner in _children(outer, step)]
    return found


def _children(node: Any, step: Step) -> list[Any]:
    if isinstance(step, int):
        return (node if isinstance(node, list) else [node])[step : step + 1]
    if isinstance(node, list):
        return [inner for item in node if isinstance(item, dict) for inner in _children(item, step)]
    return [node[step]] if isinstance(node, dict) and step in node else []


def value(text: Any, path: Any) -> str | None:
    """JSON_VALUE: numbers as written, true and false in lower case; NULL unless the path finds exactly one scalar other
    than null."""
    found = _select(text, path)
    if len(found) != 1 or found[0] is None or isinstance(found[0], dict | list):
        return None
    return ("true" if found[0] else "false") if isinstance(found[0], bool) else str(found[0])


def query(text: Any, path: Any) -> str | None:
    """JSON_QUERY; NULL unless the path finds one object or array."""
    found = _select(text, path)
    return dump(found[0]) if len(found) == 1 and isinstance(found[0], dict | list) else None


def exists(text: Any, path: Any) -> bool:
    return bool(_select(text, path))


def dump(node: Any) -> str:
    if isinstance(node, _Literal):
        return str(node)
    if isinstance(node, dict):
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{dump(item)}" for key, item in node.items()) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return json.dumps(node, ensure_ascii=False)
