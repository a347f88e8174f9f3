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

_SECONDS = 1.0
"""Of computing time for one text: a search cannot be cancelled, but other sessions continue."""
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


def _chosen(found: list[regex.Match[str]], occurrence: Any, group: Any) -> tuple[regex.Match[str], int] | None:
    number, part = int(numbers.number(occurrence)), int(numbers.number(group))
    if number < 1 or part < 0:
        raise _fault("OCCURRENCE counts from 1, GROUP from 0")
    if number > len(found) or part > (found[0].re.groups if found else 0):
        return None
    match = found[number - 1]
    return (match, part) if match.start(part) >= 0 else None


def like(text: Any, pattern: Any, flags: Any = "") -> bool:
    """Whether the pattern matches anywhere in the text."""
    return bool(_matches(pattern, flags, plain(text)))


def occurrences(pattern: Any, flags: Any, text: Any, start: Any) -> int:
    return len(_matches(pattern, flags, plain(text), start))


def locate(pattern: Any, flags: Any, text: Any, start: Any, *place: Any) -> int:
    """The 1-based start of a match; 0 for none. `place`: occurrence, group, 1 for the position after the match."""
    occurrence, group, after = place
    chosen = _chosen(_matches(pattern, flags, plain(text), start), occurrence, group)
    if chosen is None:
        return 0
    match, part = chosen
    return int(match.end(part) if after else match.start(part)) + 1


def substring(pattern: Any, flags: Any, text: Any, start: Any, occurrence: Any, group: Any) -> str | None:
    """The matching text or one of its groups; NULL without a match."""
    chosen = _chosen(_matches(pattern, flags, plain(text), start), occurrence, group)
    return None if chosen is None else str(chosen[0].group(chosen[1]))


def replace(pattern: Any, flags: Any, text: Any, replacement: Any, start: Any, occurrence: Any) -> str:
    """`occurrence` 0 means ALL. \\0 to \\9 in the replacement are the match and its groups."""
    subject, number = plain(text), int(numbers.number(occurrence))
    found = _matches(pattern, flags, subject, start)
    if number < 0:
        raise _fault("OCCURRENCE counts from 1")
    pieces, position, length = list[str](), 0, len(subject)
    for match in found if not number else found[number - 1 : number]:
        inserted = _filled(plain(replacement), match)
        check_built(length := length + len(inserted))
        pieces += [subject[position : match.start()], inserted]
        position = match.end()
    return "".join([*pieces, subject[position:]])


def _filled(replacement: str, match: regex.Match[str]) -> str:
    def group(reference: regex.Match[str]) -> str:
        number = int(reference[1])
        return (match.group(number) or "") if number <= match.re.groups else ""

    return str(_BACKREFERENCE.sub(group, replacement))
