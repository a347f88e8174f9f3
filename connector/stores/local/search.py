"""Vector search of the local store. Each collection's vectors are cached in memory as immutable snapshots; the next
snapshot adds new rows from SQLite. Results are exact, with and without a filter.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from connector import cancellation
from connector.errors import BadFilter
from connector.model import Filter, Hit, Vectors
from connector.stores import filters, records
from connector.stores.local.tables import by_ids, only
from connector.stores.scan import Column, Positions, Ranking, ScanView, SharedScans, VectorScan, exact_scores

SELECTIVE_SHARE = 10  # if a filter matches at most one row in this many, only the matching rows are scored
SELECTIVE_ROWS = 2000
SPARE = 4  # rows to read beyond `k` at first: enough if documents have one chunk each
REMEMBERED_ROWS = 4  # the filter cache holds this many times the collection's rows, 8 bytes each
FILTER_SECONDS = 60.0
"""Time limit for the filter of one search, which SQLite evaluates row by row. HANA uses `communication_timeout`."""
_STEPS = 20_000  # SQLite instructions between two clock checks: about 1 ms; each check takes the interpreter lock
FILTERS = 512  # maximum number of entries in a filter cache

T = TypeVar("T")
Mark = tuple[int, int]  # the last record id and the last tombstone that a transaction can see; both only increase
PAGE = 8192
_EPSILON = 4 * float(np.finfo(np.float32).eps)


class FilterCache(Generic[T]):
    """Cache the most recently used values: at most FILTERS, and at most the rows that `put` allows. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[bytes, tuple[int, T]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self._values.values())

    @staticmethod
    def key(compiled: filters.Compiled, collection: int = 0) -> bytes:
        """Return a short key; a filter may have megabytes of values."""
        return hashlib.sha256(repr((collection, compiled.sql, compiled.parameters)).encode()).digest()

    def get(self, key: bytes) -> T | None:
        with self._lock:
            found = self._values.pop(key, None)
            if found is None:
                return None
            self._values[key] = found
            return found[1]

    def put(self, key: bytes, value: T, rows: int, most_rows: int) -> None:
        """Store a value and drop the least recently used ones. Never drops the new value."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = rows, value
            while len(self._values) > 1 and (len(self._values) > FILTERS or self.rows > most_rows):
                del self._values[next(iter(self._values))]


def read_mark(db: sqlite3.Connection) -> Mark:
    found = dict(db.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    return found.get("records", 0), found.get("tombstones", 0)


def places_of(ids: NDArray[np.int64], among: NDArray[np.int64]) -> Positions:
    """Return the positions of `ids` in `among`, which is sorted; ids that it lacks are omitted."""
    if not len(among):
        return np.empty(0, np.int64)
    found = np.minimum(np.searchsorted(among, ids), len(among) - 1)
    here: Positions = found[among[found] == ids]
    return here


def unit_rows(blobs: Sequence[object], dimension: int) -> tuple[Vectors, NDArray[np.bool_]]:
    """Return stored vectors (n, d) scaled to length 1, and which of them are usable; unusable rows are zeros. Damaged
    vectors must not add NaN or wrong cosines to the scores."""
    size = 4 * dimension
    whole = [blob if isinstance(blob, bytes) and len(blob) == size else b"\0" * size for blob in blobs]
    vectors = np.frombuffer(b"".join(whole), dtype="<f4").reshape(len(blobs), dimension)
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    usable: NDArray[np.bool_] = np.isfinite(lengths) & (lengths > 0)
    odd = ~usable | (np.abs(lengths - 1.0) > _EPSILON)
    if odd.any():
        vectors, lengths[~usable] = vectors.copy(), np.inf
        vectors[~usable] = 0
        vectors[odd] /= lengths[odd, None]
    return vectors, usable


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows in id order. Row i of `view` is the unit vector of record `ids[i]`; ignore it unless `alive[i]`. `filtered`
    caches per filter the ascending positions of matching rows (None: too many to cache) and the mark at which they were
    read; snapshots with the same first rows share this cache."""

    mark: Mark
    ids: NDArray[np.int64]
    alive: NDArray[np.bool_]
    live: int
    view: ScanView
    filtered: FilterCache[tuple[Positions | None, Mark]]


class CollectionIndex:
    """The newest snapshot of a collection, shared by all threads and replaced atomically. New rows are appended after
    those of earlier snapshots, and compaction makes a new copy, so snapshots in use never change."""

    def __init__(self, collection: int, dimension: int, scan: VectorScan) -> None:
        self.of = collection, dimension
        self._scan = scan
        self._lock = threading.Lock()
        self.scans = SharedScans()
        self._clear()

    def _clear(self) -> None:
        self._copy, self._ids = self._scan.copy(self.of[1]), Column(1, np.int64)
        nothing = np.empty(0, np.int64), np.empty(0, np.bool_)
        self._newest = Snapshot((0, 0), *nothing, 0, self._copy.view(), FilterCache())

    def snapshot(self, db: sqlite3.Connection) -> Snapshot | None:
        """Return the snapshot that `db`'s open transaction sees; None if the cached one is newer."""
        mark = read_mark(db)
        if self._newest.mark == mark:
            return self._newest
        with self._lock:
            newest = self._newest
            if newest.mark != mark:
                if newest.mark[0] > mark[0] or newest.mark[1] > mark[1]:
                    return None
                try:
                    self._extend(db, mark)
                except BaseException:
                    self._clear()
                    raise
            return self._newest

    def _extend(self, db: sqlite3.Connection, mark: Mark) -> None:
        collection, dimension = self.of
        (pruned,) = db.execute("SELECT pruned FROM collections WHERE id = ?", (collection,)).fetchone()
        if pruned > self._newest.mark[1] and self._newest.mark != (0, 0):
            self._clear()
        last = self._newest
        sql = "SELECT record FROM tombstones WHERE collection = ? AND seq > ?"
        gone = np.array([id_ for (id_,) in db.execute(sql, (collection, last.mark[1]))], dtype=np.int64)
        sql = (
            "SELECT r.id, v.vector FROM records r JOIN vectors v ON v.record = r.id "
            "WHERE r.collection = ? AND r.id > ? ORDER BY r.id"
        )
        alive, cursor = [last.alive], db.execute(sql, (collection, last.mark[0]))
        while rows := cursor.fetchmany(PAGE):
            vectors, usable = unit_rows([vector for _, vector in rows], dimension)
            self._copy.append(vectors)
            self._ids.append(np.array([[id_ for id_, _ in rows]], np.int64))
            alive.append(usable)
        if len(alive) == 1 and not len(gone):  # only other collections changed
            self._newest = replace(last, mark=mark)
            return
        all_alive = np.concatenate(alive)
        all_alive[places_of(gone, last.ids)] = False
        live = int(np.count_nonzero(all_alive))
        described = bool((gone == 0).any())  # changed metadata makes cached filters invalid
        filtered = FilterCache() if described else last.filtered
        if live * 2 < len(all_alive):
            with suppress(MemoryError):  # a GPU without room for a second copy; the next change tries again
                copy, ids = self._copy.kept(all_alive), Column(1, np.int64)
                ids.append(self._ids.view()[:, all_alive])
                all_alive = np.ones(live, np.bool_)
                self._copy, self._ids, filtered = copy, ids, FilterCache()
        self._newest = Snapshot(mark, self._ids.view()[0], all_alive, live, self._copy.view(), filtered)


@contextmanager
def answering(db: sqlite3.Connection, condition: filters.Condition | None, where: Filter | None) -> Iterator[None]:
    """Limit the time of a search's reads and translate their errors. `where`: the caller's filter; `condition`: that
    filter with the row filter. Raises Cancelled, and BadFilter if a stored value cannot be read as the filter's kind or
    the filter takes too long."""
    call = cancellation.current()
    deadline = time.monotonic() + FILTER_SECONDS if where else math.inf
    db.set_progress_handler(lambda: call.cancelled or time.monotonic() > deadline, _STEPS)
    try:
        with call.calling(db.interrupt):
            yield
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            call.check()
            raise BadFilter(
                f"the filter has taken {FILTER_SECONDS:g} s over the rows of this collection and was given up: use "
                "fewer conditions ($in in place of many under $or), or words in the search text"
            ) from None
        if condition is not None and filters.is_unreadable(error):
            raise filters.not_comparable(condition) from None
        raise
    finally:
        db.set_progress_handler(None, 0)


@dataclass(frozen=True, slots=True)
class Search:
    """Searches one collection within one transaction."""

    _db: sqlite3.Connection
    _collection: int
    _snapshot: Snapshot
    _scans: SharedScans

    def __call__(self, query: NDArray[np.float32], k: int, condition: filters.Condition | None) -> list[Hit]:
        """Return the exact best `k` documents by cosine for a unit vector, ties by document id."""
        snapshot, best, kept = self._snapshot, None, None
        few = live = snapshot.live
        if k < 1 or not live:
            return []
        if condition is not None:
            few = max(SELECTIVE_ROWS, live // SELECTIVE_SHARE)
            kept = self._matching(condition, few)
        if kept is None:
            allowed = None if live == len(snapshot.ids) else snapshot.alive
            ranking = self._scans.rank(snapshot.view, query, allowed)
            best = self._settle(query, k, ranking, condition, live, few)
            if best is None and condition is not None:  # too few of the best rows matched the filter
                kept = self._matching(condition, None)
        if kept is not None:
            if len(kept) * SELECTIVE_SHARE <= max(len(snapshot.ids), SELECTIVE_ROWS * SELECTIVE_SHARE):
                ranking = snapshot.view.rank_rows(query, kept)
            else:  # scanning all rows is cheaper
                allowed = np.zeros(len(snapshot.ids), np.bool_)
                allowed[kept] = True
                ranking = self._scans.rank(snapshot.view, query, allowed)
            best = self._settle(query, k, ranking, None, len(kept), len(kept))
        return best or []

    def _settle(
        self,
        query: NDArray[np.float32],
        k: int,
        ranking: Ranking,
        condition: filters.Condition | None,
        rows: int,
        limit: int,
    ) -> list[Hit] | None:
        """Read down the ranking of `rows` rows until `k` documents pass `condition`; None if `limit` rows did not
        suffice. Compute scores exactly from the stored vectors."""
        wanted = k + SPARE
        sql = "SELECT document, number, id, text, meta, vector FROM records JOIN vectors ON record = id"
        while True:
            chosen, floor = ranking.best(wanted)
            found = list(by_ids(self._db, sql, "id", self._snapshot.ids[chosen].tolist(), only(condition)))
            vectors, _ = unit_rows([row[5] for row in found], len(query))
            scores = exact_scores(vectors, query).tolist()
            candidates = (
                Hit(document, score, text, {}, number, record)
                for score, (document, number, record, text, *_) in zip(scores, found, strict=True)
            )
            best = records.best_per_document(candidates, k)
            if wanted >= rows or (len(best) == k and best[-1].score >= floor):
                described = {row[2]: row[4] for row in found}
                return [replace(hit, metadata=records.metadata_of(described[hit.record])) for hit in best]
            if wanted >= limit:
                return None
            wanted = min(wanted * 4, limit)

    def _matching(self, condition: filters.Condition, few: int | None) -> Positions | None:
        """Return the positions of matching rows; None if there are more than `few` (None: no limit). Cached per filter:
        a repeated filter reads only new rows."""
        compiled, snapshot = filters.to_sqlite(condition), self._snapshot
        key = FilterCache.key(compiled)
        places, (seen, buried) = snapshot.filtered.get(key) or (np.empty(0, np.int64), (0, 0))
        newer = seen > snapshot.mark[0] or buried > snapshot.mark[1]  # lacks rows deleted since this snapshot
        if places is None and few is not None and not newer:
            return None
        if places is None or newer:
            places, seen = np.empty(0, np.int64), 0
        if seen < snapshot.mark[0]:  # add the rows written since
            limit = -1 if seen or few is None else few + 1
            sql = f"SELECT id FROM records WHERE collection = ? AND id > ? AND ({compiled.sql}) LIMIT ?"  # noqa: S608 - names checked
            rows = self._db.execute(sql, (self._collection, seen, *compiled.parameters, limit))
            ids = np.array([id_ for (id_,) in rows], dtype=np.int64)
            places = None if len(ids) == limit else np.concatenate([places, places_of(np.sort(ids), snapshot.ids)])
            if not newer:
                size = 0 if places is None else len(places)
                snapshot.filtered.put(key, (places, snapshot.mark), size, REMEMBERED_ROWS * len(snapshot.ids))
        return None if places is None else places[snapshot.alive[places]]
