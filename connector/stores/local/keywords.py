"""Keyword search of the local store: FTS5 finds texts with a word, BM25 ranks those that the caller may see."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from connector.model import Hit
from connector.stores import filters
from connector.stores.local.search import FilterCache, Mark, places_of, read_mark
from connector.stores.local.sqlite_file import Damaged
from connector.stores.local.tables import by_ids, hits, only
from connector.stores.scan import Positions, kth_largest
from connector.stores.words import LENGTH_SHARE, SATURATION, Word, most_common, weight, words, worth_it

# The statements are built from constants, checked names and placeholders.
# ruff: noqa: S608

_MOST_WORDS = 2**31 - 1

WORDS_REMEMBERED = 10_000
# In all cached sets together: 12 bytes per text, and for FREQUENT_REMEMBERED 16; and apart from these, 12 of keys.
TEXTS_REMEMBERED, TEXT_BYTES = 4_000_000, 12
FREQUENT_REMEMBERED = 128  # frequent words, each a bit per text
HOLDERS = 2_000  # rows whose ids contain a number; more are left to SQLite's scan and sort
_BETWEEN = re.compile(rb"[\x00-/:-@[-`{-\x7f]+0*")  # two values of an id
SPARSE = 4  # Words are read from all collections if the file has at most this many times the texts between the ids
FREQUENT = 100  # a word is frequent if one text in this many contains it


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of one collection that a caller may see in a transaction at `mark`: ascending record ids and word
    counts. `holding`: number of texts that contain a word. `frequent`: a bit for each text, set if it has the word; the
    last used word last."""

    mark: Mark
    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    holding: dict[Word, int] = field(default_factory=dict)
    frequent: dict[Word, NDArray[np.uint8]] = field(default_factory=dict)

    def having(self, db: sqlite3.Connection, collection: int, word: Word) -> NDArray[np.uint8]:
        """Return a bit for each text, set if it has the word. Caches those of frequent words, at most
        FREQUENT_REMEMBERED."""
        bits = self.frequent.pop(word, None)
        if bits is None:
            there, places = np.zeros(len(self.ids), np.bool_), holding(db, collection, word, self)
            there[places] = True
            self.holding[word], bits = len(places), np.packbits(there)
        if self.holding[word] * FREQUENT > len(self.ids):
            self.frequent[word] = bits
            for oldest in list(self.frequent)[:-FREQUENT_REMEMBERED]:
                self.frequent.pop(oldest, None)  # other threads may have done so
        return bits

    def scores(self, found: Mapping[Word, NDArray[np.uint8]]) -> NDArray[np.float64]:
        """Return the BM25 score of each text, given `having` of each word. A text with all words gets a bonus that puts
        it above any text without one of them."""
        texts, worths = len(self.ids), np.zeros(1)  # the sum of the weights for each set of words, by its bits
        had = np.zeros(texts, np.uint16)  # the words of each text, as bits
        for place, (word, bits) in enumerate(found.items()):
            had |= np.left_shift(np.unpackbits(bits, count=texts), place, dtype=np.uint16)
            worths = np.concatenate([worths, worths + weight(self.holding[word], texts)])
        length = self.lengths / max(float(self.lengths.mean()), 1.0)
        scores: NDArray[np.float64] = worths.take(had) / (1 + SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * length))
        if len(found) > 1:
            scores[had == len(worths) - 1] += worths[-1]
        return scores


@dataclass(frozen=True, slots=True)
class _Keys:
    """The `_searchable` ids of a collection's rows, each with a line end, joined, and the end and record of each, for a
    transaction at `mark`."""

    mark: Mark
    joined: bytes
    ends: NDArray[np.int64]
    records: NDArray[np.int64]


def _searchable(id_: str) -> bytes:
    """Return an id in UTF-8, shorter: with one quote before each value, and without the value's leading zeros."""
    return _BETWEEN.sub(b'"', b'"' + id_.encode())


def key_holders(db: sqlite3.Connection, cache: FilterCache[_Keys], collection: int, number: str) -> list[int] | None:
    """Return the records of all rows whose id contains `number`, and perhaps of others; None if there are more than
    HOLDERS. Cached: later calls only read new rows and remove deleted ones."""
    key, mark, nothing = FilterCache.key(filters.Compiled(), collection), read_mark(db), np.empty(0, np.int64)
    known = cache.get(key)
    if known is None or known.mark != mark:
        gone = None if known is None else _gone(db, collection, known.mark, mark)
        if known is None or gone is None:
            known, gone = _Keys((0, 0), b"", nothing, nothing), nothing
        stay, lengths = ~np.isin(known.records, gone), np.diff(known.ends, prepend=0)
        cut, whole = known.ends[~stay], memoryview(known.joined)
        borders = [0, *np.stack([cut - lengths[~stay], cut], axis=1).ravel().tolist(), len(whole)]
        kept = [whole[start:end] for start, end in zip(borders[::2], borders[1::2], strict=True)]
        sql = "SELECT id, document FROM records WHERE collection = ? AND id > ? AND number = 0"
        rows = db.execute(sql, (collection, known.mark[0])).fetchall()
        lines = [_searchable(document) + b"\n" for _, document in rows]
        lengths = np.append(lengths[stay], np.array([len(line) for line in lines], dtype=np.int64))
        ids = np.append(known.records[stay], np.array([id_ for id_, _ in rows], dtype=np.int64))
        known = _Keys(mark, b"".join([*kept, *lines]), np.cumsum(lengths), ids)
        cache.put(key, known, (len(known.joined) + 16 * len(ids)) // TEXT_BYTES, TEXTS_REMEMBERED)
    shorter, ends = _searchable(number), set[int]()
    for part in (shorter, number.encode()) if number.startswith("0") else (shorter[1:],):
        holders = re.finditer(re.escape(part) + b".*\n", known.joined)  # two to four times as fast as bytes.find
        ends.update(holder.end() for holder in islice(holders, HOLDERS + 1))
    found: list[int] = known.records[np.searchsorted(known.ends, sorted(ends))].tolist()
    return found if len(found) <= HOLDERS else None


def _gone(db: sqlite3.Connection, collection: int, since: Mark, mark: Mark) -> NDArray[np.int64] | None:
    """Return the records deleted after `since`, and 0 if metadata changed; None if the tombstones are gone or `since`
    is newer than the transaction at `mark`."""
    sql = "SELECT record FROM tombstones WHERE collection = ? AND seq > ?"
    gone = np.array([id_ for (id_,) in db.execute(sql, (collection, since[1]))], dtype=np.int64)
    (pruned,) = db.execute("SELECT pruned FROM collections WHERE id = ?", (collection,)).fetchone()
    return None if since[0] > mark[0] or since[1] > mark[1] or pruned > since[1] else gone


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
    gone = None if known is None else _gone(db, collection, known.mark, mark)
    if known is None or gone is None or (compiled.sql and (gone == 0).any()):
        known, gone = _Texts((0, 0), np.empty(0, np.int64), np.empty(0, np.int32)), np.empty(0, np.int64)
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


def holding(db: sqlite3.Connection, collection: int, word: Word, texts: _Texts) -> Positions:
    """Return the positions of texts with the word. FTS5 gets quoted words of letters, digits and blanks only."""
    phrases = " OR ".join(f'"{phrase}"' for phrase in word.alternatives)
    first, last = int(texts.ids[0]), int(texts.ids[-1])
    # `scope` doubles the time, and is needed only where these ids are mostly of other rows.
    scope = f'scope : "c{collection:d}" AND ' if last - first >= SPARSE * len(texts.ids) else ""
    # As one text: SQLite's step for each row takes the interpreter lock and most of the time.
    sql = "SELECT group_concat(rowid) FROM keywords WHERE keywords MATCH ? AND rowid BETWEEN ? AND ?"
    (ids,) = db.execute(sql, (f"{scope}text : ({phrases})", first, last)).fetchone()
    return places_of(np.fromstring(ids, np.int64, sep=",") if ids else np.empty(0, np.int64), texts.ids)


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
    found = dict[Word, NDArray[np.uint8]]()
    for word in wanted:
        if texts.holding.get(word, 0) <= most_common(count):  # skip words known to be common
            found[word] = texts.having(db, collection, word)
    chosen = [wanted[place] for place in worth_it(wanted, [texts.holding[word] for word in wanted], count)]
    all_scores = texts.scores(
        {word: found[word] if word in found else texts.having(db, collection, word) for word in chosen}
    )
    # Read down the ranking until `k` documents pass the filter. A step never splits rows of equal score.
    best = dict[str, Hit]()
    above, read, step, hit = np.inf, 0, 2 * k + 16, int(np.count_nonzero(all_scores))
    sql = "SELECT document, number, id FROM records"
    while read < hit and len(best) < k:
        least = kth_largest(all_scores, min(read + step, hit))
        places = np.flatnonzero((all_scores >= least) & (all_scores < above))
        some = dict(zip(texts.ids[places].tolist(), all_scores[places].tolist(), strict=True))
        rows = by_ids(db, sql, "id", list(some), only(condition))
        for negative, document, number, id_ in sorted((-some[id_], *row, id_) for *row, id_ in rows):
            if document not in best and len(best) < k:
                best[document] = Hit(document, -negative, "", {}, number, id_)
        above, read, step = least, read + len(places), step * 4
    return hits(db, list(best.values()))
