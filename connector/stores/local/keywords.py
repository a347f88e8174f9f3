"""Keyword search of the local store: FTS5 finds texts with a word, BM25 ranks those that the caller may see."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from connector.model import Hit
from connector.stores import filters, records
from connector.stores.local.search import FilterCache, Mark, read_mark
from connector.stores.local.sqlite_file import undamaged
from connector.stores.local.tables import Records
from connector.stores.words import LENGTH_SHARE, SATURATION, Word, most_common, weight, words, worth_it

# FTS5 stores the word count of each column in this table, one varint per column; `scope` has one word.
_LENGTHS = (
    "SELECT records.id, sz FROM records JOIN keywords_docsize ON keywords_docsize.id = records.id "
    "WHERE collection = ? AND records.id > ?{} ORDER BY records.id"
)

_MOST_WORDS = 2**31 - 1

WORDS_REMEMBERED = 10_000
TEXTS_REMEMBERED = 4_000_000
"""Total for all cached sets; 12 bytes each."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of one collection that a caller may see in a transaction at `mark`: ascending record ids and word
    counts. `holding`: number of texts that contain a word."""

    mark: Mark
    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    holding: dict[Word, int] = field(default_factory=dict)

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of those `ids` that are in this set."""
        if not len(self.ids):
            return np.empty(0, np.int64)
        found = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        here: NDArray[np.int64] = found[self.ids[found] == ids]
        return here

    def scores(self, found: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Return the BM25 score of each text, given the positions of the texts with each word. A text with all words
        gets a bonus that puts it above any text without one of them."""
        held, count = np.zeros(len(self.ids)), np.zeros(len(self.ids), np.int64)
        weights = [weight(len(places), len(self.ids)) for places in found]
        for places, worth in zip(found, weights, strict=True):
            held[places] += worth
            count[places] += 1
        length = self.lengths / max(float(self.lengths.mean()), 1.0)
        scores: NDArray[np.float64] = held / (1 + SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * length))
        if len(found) > 1:
            scores[count == len(found)] += sum(weights)
        return scores


class TextCache:
    """Cache the texts that callers may see, because finding them scans every row. Later writes update the cache.
    Thread-safe."""

    def __init__(self) -> None:
        self._known = FilterCache[_Texts](lambda texts: len(texts.ids))

    def of(self, db: sqlite3.Connection, collection: int, within: filters.Condition | None) -> _Texts:
        """Return the texts of rows that match `within` (None: all)."""
        compiled = filters.Compiled("", ()) if within is None else filters.to_sqlite(within)
        key, mark = FilterCache.key(compiled, collection), read_mark(db)
        known = self._known.get(key)
        if known is not None and known.mark == mark and len(known.holding) <= WORDS_REMEMBERED:
            return known
        texts = _brought_up(db, collection, compiled, known, mark)
        self._known.put(key, texts, TEXTS_REMEMBERED)
        return texts


def _brought_up(
    db: sqlite3.Connection, collection: int, within: filters.Compiled, known: _Texts | None, mark: Mark
) -> _Texts:
    """Return `known` plus added and minus deleted texts. Reload everything if `known` is newer than the transaction,
    its tombstones are gone, or changed metadata may affect `within`."""
    gone = np.empty(0, np.int64)
    if known is not None:
        sql = "SELECT record FROM tombstones WHERE collection = ? AND seq > ?"
        gone = np.array([id_ for (id_,) in db.execute(sql, (collection, known.mark[1]))], dtype=np.int64)
        (pruned,) = db.execute("SELECT pruned FROM collections WHERE id = ?", (collection,)).fetchone()
        newer = known.mark[0] > mark[0] or known.mark[1] > mark[1]
        if newer or pruned > known.mark[1] or (within.sql and (gone == 0).any()):
            known = None
    if known is None:
        known = _Texts((0, 0), np.empty(0, np.int64), np.empty(0, np.int32))
    sql = _LENGTHS.format(within.and_also)
    rows = db.execute(sql, (collection, known.mark[0], *within.parameters)).fetchall()
    ids, lengths = [], []
    with undamaged("the index of words"):
        for id_, size in rows:
            count = 0
            for byte in size[1:]:  # the second varint; the first is one byte, because `scope` is one word
                count = count << 7 | byte & 0x7F
            if count > _MOST_WORDS:
                raise ValueError(count)
            ids.append(id_)
            lengths.append(count)
    stay = ~np.isin(known.ids, gone)
    return _Texts(
        mark,
        np.concatenate([known.ids[stay], np.array(ids, dtype=np.int64)]),
        np.concatenate([known.lengths[stay], np.array(lengths, dtype=np.int32)]),
    )


class KeywordSearch:
    """Searches one collection within one transaction."""

    def __init__(self, db: sqlite3.Connection, collection: int, texts: TextCache) -> None:
        self._db = db
        self._texts = texts
        self._collection = collection
        self._records = Records(db)

    def __call__(self, text: str, k: int, condition: filters.Condition | None) -> list[Hit]:
        """Return the best `k` documents by BM25, ties by document id; texts with all the words come first. Do not use
        FTS5's own BM25: it counts rows of all collections in the file, so its scores would reveal hidden texts."""
        wanted = words(text)
        if k < 1 or not wanted:
            return []
        within = condition.within if isinstance(condition, filters.Guarded) else None
        texts = self._texts.of(self._db, self._collection, within)
        if not len(texts.ids):
            return []
        scores = texts.scores(self._found(wanted, texts))
        hit = np.flatnonzero(scores)
        order = hit[np.argsort(-scores[hit], kind="stable")]
        return self._records.hits(self._walk(texts.ids[order], scores[order], k, condition))

    def _found(self, wanted: Sequence[Word], texts: _Texts) -> list[NDArray[np.int64]]:
        """Return the positions of the texts with each word worth a search. Skip words known to be common."""
        count, found = len(texts.ids), dict[Word, NDArray[np.int64]]()
        for word in wanted:
            if texts.holding.get(word, 0) <= most_common(count):
                found[word] = self._holding(word, texts)
                texts.holding[word] = len(found[word])
        chosen = [wanted[place] for place in worth_it(wanted, [texts.holding[word] for word in wanted], count)]
        return [found[word] if word in found else self._holding(word, texts) for word in chosen]

    def _holding(self, word: Word, texts: _Texts) -> NDArray[np.int64]:
        """Return the positions of texts with the word. FTS5 gets quoted words of letters, digits and blanks only."""
        phrases = " OR ".join(f'"{phrase}"' for phrase in word.alternatives)
        match = f'scope : "c{self._collection:d}" AND text : ({phrases})'
        rows = self._db.execute("SELECT rowid FROM keywords WHERE keywords MATCH ?", (match,))
        return texts.places(np.fromiter((id_ for (id_,) in rows), np.int64))

    def _walk(
        self, ids: NDArray[np.int64], scores: NDArray[np.float64], k: int, condition: filters.Condition | None
    ) -> list[Hit]:
        """Read down the ranking until `k` documents pass the filter. A step never splits rows of equal score."""
        passed: list[Hit] = []
        start, step = 0, 2 * k + 16
        while start < len(ids):
            end = min(start + step, len(ids))
            end = int(np.searchsorted(-scores, -scores[end - 1], side="right"))
            chunk = dict(zip(ids[start:end].tolist(), scores[start:end].tolist(), strict=True))
            passed = records.best_per_document([*passed, *self._records.candidates(chunk, condition)], k)
            if len(passed) == k:
                break
            start, step = end, step * 4
        return passed
