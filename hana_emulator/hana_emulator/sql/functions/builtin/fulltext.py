"""SCORE(term IN (column EXACT SEARCH MODE 'text')): which texts hold a term, word by word, and how well.

HANA's own score is not known; this one is in (0, 1] for a match and 0 otherwise, higher when the term fills more of the
text. Only "is it above 0" should be relied on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_WORD = re.compile(r"[^\W_]+")  # the underscore is one of HANA's token separators
Words = tuple[str, ...]


def words(text: str) -> list[str]:
    """The words of a text, folded for comparison without case."""
    return _WORD.findall(text.casefold())


@lru_cache(maxsize=64)
def phrase_of(term: str) -> Words:
    return tuple(words(term))


def score(term: str, text: str) -> float:
    """0 unless `text` contains the words of `term` as whole words, side by side and in order."""
    phrase = phrase_of(term)
    if not phrase or phrase[0] not in text.casefold():
        return 0.0
    found = words(text)
    count = occurrences(phrase, found)
    return min(1.0, (count * len(phrase) / len(found)) ** 0.5) if count else 0.0


def occurrences(phrase: Words, found: Sequence[str]) -> int:
    size = len(phrase)
    return sum(1 for start in range(len(found) - size + 1) if tuple(found[start : start + size]) == phrase)
