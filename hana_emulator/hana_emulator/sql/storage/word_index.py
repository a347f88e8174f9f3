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

# Of a session: (table, column ready for SQLite, term) to the rows whose texts hold the term, as a JSON array
HOLDERS_FUNCTION = "owl_holders"
MOST_BYTES = 256 << 20  # Of the words of all columns that are kept for searches
_WORD_BYTES = 24  # Of one word of one text: in the text's words, and its place among those of the block that hold it
_DISTINCT_BYTES = 160  # Of a word that a block holds, with its list


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
        """The rows whose text has a `score` above 0."""
        phrase = () if term is None else phrase_of(texts.plain(term))
        return [rowid for block in self.blocks for rowid in block.holders(phrase)] if phrase else []
