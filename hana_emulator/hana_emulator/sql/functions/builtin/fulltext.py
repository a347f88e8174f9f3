"""SCORE(term IN (column EXACT SEARCH MODE 'text')): match a term in texts as whole words.

HANA does not document its score. The emulator's score is 0 without a match, else in (0, 1] and higher when the term
is a larger part of the text. Rely only on whether the score is above 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_WORD = re.compile(r"[^\W_]+")  # HANA separates tokens at the underscore
Words = tuple[str, ...]


def words(text: str) -> list[str]:
    """The words of a text, case-folded."""
    return _WORD.findall(text.casefold())


@lru_cache(maxsize=64)
def phrase_of(term: str) -> Words:
    return tuple(words(term))


def score(term: str, text: str) -> float:
    """The score of `text`; 0 unless it contains the words of `term` as whole words, adjacent and in order."""
    phrase = phrase_of(term)
    if not phrase or phrase[0] not in text.casefold():
        return 0.0
    found = words(text)
    count = occurrences(phrase, found)
    return min(1.0, (count * len(phrase) / len(found)) ** 0.5) if count else 0.0


def occurrences(phrase: Words, found: Sequence[str]) -> int:
    size = len(phrase)
    return sum(1 for start in range(len(found) - size + 1) if tuple(found[start : start + size]) == phrase)
