"""Keyword search of the local store: FTS5 finds texts with a word, BM25 ranks those that the caller may see."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.model import Hit
from connector.stores import filters, records
from connector.stores.local.search import FilterCache, Mark, places_of, read_mark
from connector.stores.local.sqlite_file import Damaged
from connector.stores.local.tables import by_ids, hits, only
from connector.stores.words import LENGTH_SHARE, SATURATION, Word, most_common, weight, words, worth_it

# The statements are built from constants, checked names and placeholders.
# ruff: noqa: S608

_MOST_WORDS = 2**31 - 1

WORDS_REMEMBERED = 10_000
TEXTS_REMEMBERED = 4_000_000  # in all cached sets together; 12 bytes per text, and for PLACES_REMEMBERED 16
PLACES_REMEMBERED = 4  # positions of frequent words, per text
HOLDERS = 2_000  # rows whose ids contain a number; more are left to SQLite's scan and sort
FREQUENT = 100  # a word is frequent if one text in this many contains it


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of one collection that a caller may see in a transaction at `mark`: ascending record ids and word
    counts. `holding`: number of texts that contain a word. `frequent`: positions of the texts with frequent words, the
    last used last."""

    mark: Mark
    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    holding: dict[Word, int] = field(default_factory=dict)
    frequent: dict[Word, NDArray[np.int32]] = field(default_factory=dict)

    def places(self, db: sqlite3.Connection, collection: int, word: Word) -> NDArray[np.signedinteger[Any]]:
        """Return the positions of texts with the word. Caches those of frequent words, at most PLACES_REMEMBERED per
        text."""
        known = self.frequent.pop(word, None)
        found = holding(db, collection, word, self) if known is None else known
        if len(found) * FREQUENT > len(self.ids):
            self.frequent[word] = found.astype(np.int32, copy=False)
            while sum(map(len, list(self.frequent.values()))) > PLACES_REMEMBERED * len(self.ids):
                for oldest in list(self.frequent)[:1]:  # other threads may have emptied it
                    self.frequent.pop(oldest, None)
        return found

    def scores(self, found: Sequence[NDArray[np.signedinteger[Any]]]) -> NDArray[np.float64]:
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


@dataclass(frozen=True, slots=True)
class _Keys:
    """The ids of a collection's rows in UTF-8, each with a line end, joined, and the end and record of each, for a
    transaction at `mark`. Rows deleted after the tombstone `since` may remain."""

    mark: Mark
    since: int
    joined: bytes
    ends: NDArray[np.int64]
    records: NDArray[np.int64]


def key_holders(db: sqlite3.Connection, cache: FilterCache[_Keys], collection: int, number: str) -> list[int] | None:
    """Return the first records of the rows whose id contains `number`, and perhaps some of deleted rows; None if there
    are more than HOLDERS. Cached: later calls only read new rows."""
    key, mark, nothing = FilterCache.key(filters.Compiled(), collection), read_mark(db), np.empty(0, np.int64)
    known = cache.get(key)
    if known is None or known.mark != mark:
        older = known is not None and known.mark[0] <= mark[0] and known.mark[1] <= mark[1]
        if known is None or not older or mark[1] - known.since > len(known.records):
            known = _Keys((0, 0), mark[1], b"", nothing, nothing)
        sql = "SELECT id, document FROM records WHERE collection = ? AND id > ? AND number = 0"
        rows = db.execute(sql, (collection, known.mark[0])).fetchall()
        lines = [f"{document}\n".encode() for _, document in rows]
        ends = np.cumsum([len(line) for line in lines], dtype=np.int64) + len(known.joined)
        ids = np.array([id_ for id_, _ in rows], dtype=np.int64)
        joined = b"".join([known.joined, *lines])
        known = _Keys(mark, known.since, joined, np.append(known.ends, ends), np.append(known.records, ids))
        cache.put(key, known, len(known.records), TEXTS_REMEMBERED)
    found, wanted = list[int](), number.encode()
    start = known.joined.find(wanted)
    while 0 <= start < len(known.joined) and len(found) <= HOLDERS:
        place = int(np.searchsorted(known.ends, start, side="right"))
        found.append(int(known.records[place]))
        start = known.joined.find(wanted, int(known.ends[place]))
    return found if len(found) <= HOLDERS else None


def visible(
    db: sqlite3.Connection, cache: FilterCache[_Texts], collection: int, within: filters.Condition | None
) -> _Texts:
    """Return the texts of rows that match `within` (None: all). Cached, because the first call scans every row; later
    calls only add new texts and remove deleted ones. Reloads all texts if the cached ones are newer than the
    transaction, their tombstones are gone, or changed metadata may affect `within`."""
    compiled = filters.Compiled() if within is None else filters.to_sqlite(within)
    key, mark = FilterCache.key(compiled, collection), read_mark(db)
    known = cache.get(key)
    if known is not None and known.mark == mark and len(known.holding) <= WORDS_REMEMBERED:
        return known
    gone = np.empty(0, np.int64)
    if known is not None:
        sql = "SELECT record FROM tombstones WHERE collection = ? AND seq > ?"
        gone = np.array([id_ for (id_,) in db.execute(sql, (collection, known.mark[1]))], dtype=np.int64)
        (pruned,) = db.execute("SELECT pruned FROM collections WHERE id = ?", (collection,)).fetchone()
        newer = known.mark[0] > mark[0] or known.mark[1] > mark[1]
        if newer or pruned > known.mark[1] or (compiled.sql and (gone == 0).any()):
            known = None
    known = known or _Texts((0, 0), np.empty(0, np.int64), np.empty(0, np.int32))
    # FTS5 stores the word count of each column in this table, one varint per column; `scope` has one word.
    sql = (
        "SELECT records.id, sz FROM records JOIN keywords_docsize ON keywords_docsize.id = records.id "
        f"WHERE collection = ? AND records.id > ?{compiled.and_also} ORDER BY records.id"
    )
    ids, lengths = [], []
    for id_, size in db.execute(sql, (collection, known.mark[0], *compiled.parameters)):
        count = 0
        whole = isinstance(size, bytes)
        for byte in size[1:] if whole else ():  # the first varint is one byte, because `scope` is one word
            count = count << 7 | byte & 0x7F
        if not whole or count > _MOST_WORDS:
            raise Damaged("the index of words cannot be read")
        ids.append(id_)
        lengths.append(count)
    stay = ~np.isin(known.ids, gone)
    texts = _Texts(
        mark,
        np.concatenate([known.ids[stay], np.array(ids, dtype=np.int64)]),
        np.concatenate([known.lengths[stay], np.array(lengths, dtype=np.int32)]),
    )
    cache.put(key, texts, len(texts.ids), TEXTS_REMEMBERED)
    return texts


def holding(db: sqlite3.Connection, collection: int, word: Word, texts: _Texts) -> NDArray[np.int64]:
    """Return the positions of texts with the word. FTS5 gets quoted words of letters, digits and blanks only."""
    phrases = " OR ".join(f'"{phrase}"' for phrase in word.alternatives)
    match = f'scope : "c{collection:d}" AND text : ({phrases})'
    rows = db.execute("SELECT rowid FROM keywords WHERE keywords MATCH ?", (match,))
    return places_of(np.fromiter((id_ for (id_,) in rows), np.int64), texts.ids)


def search(
    db: sqlite3.Connection,
    cache: FilterCache[_Texts],
    collection: int,
    text: str,
    k: int,
    condition: filters.Condition | None,
) -> list[Hit]:
    """Return the best `k` documents by BM25, ties by document id; texts with all the words come first. FTS5's own
    BM25 cannot be used: it counts rows of all collections in the file, so its scores would reveal hidden texts."""
    wanted = words(text)
    if k < 1 or not wanted:
        return []
    texts = visible(db, cache, collection, condition.within if isinstance(condition, filters.Guarded) else None)
    count = len(texts.ids)
    if not count:
        return []
    found = dict[Word, NDArray[np.signedinteger[Any]]]()
    for word in wanted:
        if texts.holding.get(word, 0) <= most_common(count):  # skip words known to be common
            found[word] = texts.places(db, collection, word)
            texts.holding[word] = len(found[word])
    chosen = [wanted[place] for place in worth_it(wanted, [texts.holding[word] for word in wanted], count)]
    all_scores = texts.scores([found[word] if word in found else texts.places(db, collection, word) for word in chosen])
    hit = np.flatnonzero(all_scores)
    order = hit[np.argsort(-all_scores[hit], kind="stable")]
    ids, scores = texts.ids[order], all_scores[order]
    # Read down the ranking until `k` documents pass the filter. A step never splits rows of equal score.
    best: list[Hit] = []
    start, step = 0, 2 * k + 16
    sql = "SELECT document, number, id FROM records"
    while start < len(ids) and len(best) < k:
        end = min(start + step, len(ids))
        end = int(np.searchsorted(-scores, -scores[end - 1], side="right"))
        some = dict(zip(ids[start:end].tolist(), scores[start:end].tolist(), strict=True))
        rows = by_ids(db, sql, "id", list(some), only(condition))
        candidates = [Hit(document, some[id_], "", {}, number, id_) for document, number, id_ in rows]
        best = records.best_per_document([*best, *candidates], k)
        start, step = end, step * 4
    return hits(db, best)
