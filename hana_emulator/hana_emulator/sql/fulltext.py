"""SCORE(term IN (column EXACT SEARCH MODE 'text')): which texts hold a term, word by word, and how well.

HANA's own score is not known; this one is in (0, 1] for a match and 0 otherwise, higher when the term fills more of the
text. Only "is it above 0" should be relied on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hana_emulator.sql import row_blocks
from hana_emulator.sql.builtin import texts

HOLDERS_FUNCTION = "owl_holders"
"""Of a session: (table, column ready for SQLite, term) to the rows whose texts hold the term, as a JSON array."""
MOST_BYTES = 256 << 20
"""Of the words of all columns that are kept for searches."""
_WORD_BYTES = 24
"""Of one word of one text: in the text's words, and its place among those of the block that hold it."""
_DISTINCT_BYTES = 160
"""Of a word that a block holds, with its list."""
_WORD = re.compile(r"[^\W_]+")  # the underscore is one of HANA's token separators
Words = tuple[str, ...]


def words(text: str) -> list[str]:
    """The words of a text, folded for comparison without case."""
    return _WORD.findall(text.casefold())


@lru_cache(maxsize=64)
def _phrase(term: str) -> Words:
    return tuple(words(term))


def score(term: str, text: str) -> float:
    """0 unless the words of `term` stand in `text` as whole words, side by side and in order."""
    phrase = _phrase(term)
    if not phrase or phrase[0] not in text.casefold():
        return 0.0
    found = words(text)
    count = _occurrences(phrase, found)
    return min(1.0, (count * len(phrase) / len(found)) ** 0.5) if count else 0.0


def _occurrences(phrase: Words, found: Sequence[str]) -> int:
    size = len(phrase)
    return sum(1 for start in range(len(found) - size + 1) if tuple(found[start : start + size]) == phrase)


class _WordBlock:
    """A block of texts as words, and which of them hold each word."""

    def __init__(self, rows: Sequence[tuple[int, Words]]) -> None:
        self._rows = rows
        self.rowids = np.array([rowid for rowid, _ in rows], np.int64)
        self._places: dict[str, list[int]] = {}
        for place, (_, found) in enumerate(rows):
            for word in dict.fromkeys(found):
                self._places.setdefault(word, []).append(place)
        count = sum(len(found) for _, found in rows)
        self.nbytes = self.rowids.nbytes + _WORD_BYTES * count + _DISTINCT_BYTES * len(self._places)

    def rows(self) -> Sequence[tuple[int, Words]]:
        return self._rows

    def holders(self, phrase: Words) -> list[int]:
        some = min((self._places.get(word, []) for word in phrase), key=len)
        rows = [self._rows[place] for place in some]
        return [rowid for rowid, found in rows if len(phrase) == 1 or _occurrences(phrase, found)]


@dataclass(frozen=True, slots=True)
class WordIndex:
    """The words of a column's texts."""

    blocks: Sequence[_WordBlock] = ()

    @classmethod
    def build(cls, rows: Iterable[tuple[int, object]]) -> WordIndex:
        return cls().changed(frozenset(), rows)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def changed(self, rowids: AbstractSet[int], rows: Iterable[tuple[int, object]]) -> WordIndex:
        new = [(rowid, tuple(map(sys.intern, words(texts.plain(text))))) for rowid, text in rows if text is not None]
        return WordIndex(row_blocks.changed(self.blocks, rowids, new, _WordBlock))

    def holders(self, term: object) -> list[int]:
        """The rows for whose text `score` is above 0."""
        phrase = () if term is None else _phrase(texts.plain(term))
        return [rowid for block in self.blocks for rowid in block.holders(phrase)] if phrase else []
