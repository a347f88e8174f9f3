"""IS_SQL_INJECTION_SAFE: how many SQL tokens a text holds. Reads words and signs only, no grammar."""

from __future__ import annotations

import re
from typing import Any

from . import numbers
from .texts import plain

_TOKEN = re.compile(
    r"""\s*(?: "(?:[^"]|"")+" | '(?:[^']|'')*' | [\w#$]+ | <=|>=|<>|!=|\|\| | [-+*/%=<>(),.;:?@\[\]{}!&|^~] )""",
    re.VERBOSE,
)
_COMMENT = re.compile(r"--|/\*")


def is_injection_safe(text: Any, most: Any = 1) -> int:
    """1 when the text is `most` tokens or fewer and holds no comment and no unfinished quotes, 0 otherwise."""
    written, limit = plain(text), int(numbers.number(most))
    position = count = 0
    end = len(written.rstrip())
    while position < end:
        if count > limit:
            return 0
        match = _TOKEN.match(written, position)
        if match is None or _COMMENT.match(written, match.start() + len(match[0]) - len(match[0].lstrip())):
            return 0
        position, count = match.end(), count + 1
    return int(count <= limit)
