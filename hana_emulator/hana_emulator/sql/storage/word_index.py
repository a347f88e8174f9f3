"""Index the words of a column's texts, so that SCORE(...) > 0 need not read every text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from hana_emulator.sql.functions.builtin import fulltext, texts
from hana_emulator.sql.functions.builtin.fulltext import Words, occurrences, phrase_of
from hana_emulator.sql.storage import row_blocks

# A session's SQLite function: (table, quoted column, term) -> JSON array of the rows whose texts contain the term
HOLDERS_FUNCTION = "owl_holders"
MOST_BYTES = 256 << 20  # Maximum size of the cached words of all columns
_WORD_BYTES = 24  # For each word of a text: its entry in the text's words and its place in the block
_DISTINCT_BYTES = 160  # For each distinct word of a block, with its list of places


class _WordBlock:
    """A block of texts as words, and the rows that contain each word."""

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
        return [rowid for rowid, found in rows if len(phrase) == 1 or occurrences(phrase, found)]


@dataclass(frozen=True, slots=True)
class WordIndex:
    blocks: Sequence[_WordBlock] = ()

    @classmethod
    def build(cls, rows: Iterable[tuple[int, object]]) -> WordIndex:
        return cls().changed(frozenset(), rows)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def changed(self, rowids: AbstractSet[int], rows: Iterable[tuple[int, object]]) -> WordIndex:
        new = [
            (rowid, tuple(map(sys.intern, fulltext.words(texts.plain(text)))))
            for rowid, text in rows
            if text is not None
        ]
        return WordIndex(row_blocks.changed(self.blocks, rowids, new, _WordBlock))

    def holders(self, term: object) -> list[int]:
        """The rows whose text has a `fulltext.score` above 0."""
        phrase = () if term is None else phrase_of(texts.plain(term))
        return [rowid for block in self.blocks for rowid in block.holders(phrase)] if phrase else []
