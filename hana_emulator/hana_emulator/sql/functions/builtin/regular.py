"""LIKE_REGEXPR and the ..._REGEXPR functions, with the `regex` library, which can limit their run time.

HANA uses PCRE; `regex` is similar and supports POSIX classes such as [[:digit:]].
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import Any

import regex

from hana_emulator.errors import HanaError, out_of_memory
from hana_emulator.sql.language.limits import check_built

from . import numbers
from .texts import plain

_SECONDS = 1.0  # Limit on computing time for one text: a search cannot be cancelled, but other sessions continue
_LONGEST_PATTERN = 5_000
_MOST_MATCHES = 1_000_000
_FLAGS = {"i": regex.IGNORECASE, "m": regex.MULTILINE, "s": regex.DOTALL, "x": regex.VERBOSE}
_BACKREFERENCE = regex.compile(r"\\(\d)")


def _fault(detail: str) -> HanaError:
    return HanaError(306, f"invalid argument: {detail}")


@lru_cache(maxsize=128)
def _compiled(pattern: str, flags: str) -> regex.Pattern[str]:
    if len(pattern) > _LONGEST_PATTERN:
        raise _fault(f"a regular expression has {_LONGEST_PATTERN} characters at most")
    options = regex.VERSION0
    for flag in flags:
        if flag not in _FLAGS:
            raise _fault("a regular expression takes the flags i, m, s and x")
        options |= _FLAGS[flag]
    try:
        return regex.compile(pattern, options)
    except (regex.error, RecursionError, OverflowError, MemoryError):
        raise _fault("the regular expression cannot be read") from None


def _matches(pattern: Any, flags: Any, text: str, start: Any = 1) -> list[regex.Match[str]]:
    """All matches from the 1-based character `start` on."""
    first = int(numbers.number(start))
    if first < 1:
        raise _fault("a regular expression starts at character 1 or later")
    matches = _compiled(plain(pattern), plain(flags)).finditer(text, first - 1, timeout=_SECONDS)
    try:
        found = list(islice(matches, _MOST_MATCHES + 1))
    except TimeoutError:
        raise _fault(f"the regular expression takes longer than {_SECONDS:g} s") from None
    if len(found) > _MOST_MATCHES:
        raise out_of_memory(f"a regular expression has more than {_MOST_MATCHES} matches")
    return found


def like(text: Any, pattern: Any, flags: Any = "") -> bool:
    """Whether the pattern matches anywhere in the text."""
    return bool(_matches(pattern, flags, plain(text)))


def replace(pattern: Any, flags: Any, text: Any, replacement: Any, start: Any, occurrence: Any) -> str:
    """`occurrence` 0 means ALL. \\0 to \\9 in the replacement are the match and its groups."""
    subject, number = plain(text), int(numbers.number(occurrence))
    found = _matches(pattern, flags, subject, start)
    if number < 0:
        raise _fault("OCCURRENCE counts from 1")
    pieces, position, length = list[str](), 0, len(subject)
    for match in found if not number else found[number - 1 : number]:
        groups = [match.group(number) or "" for number in range(match.re.groups + 1)]
        inserted = _BACKREFERENCE.sub(lambda it: "".join(groups[int(it[1]) : int(it[1]) + 1]), plain(replacement))  # noqa: B023
        check_built(length := length + len(inserted))
        pieces += [subject[position : match.start()], inserted]
        position = match.end()
    return "".join([*pieces, subject[position:]])
