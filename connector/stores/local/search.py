"""Vector search of the local store. Each collection's vectors are cached in memory as immutable snapshots, extended by
new rows from SQLite. Results are exact, filtered or not.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from connector import cancellation
from connector.errors import BadFilter
from connector.model import Filter, Hit, Vectors
from connector.stores import filters, records
from connector.stores.local.tables import Records
from connector.stores.scan.int8_scan import best_scan
from connector.stores.scan.vector_scan import (
    Positions,
    Ranking,
    ScanCopy,
    ScanView,
    SharedScans,
    VectorScan,
    exact_scores,
)
from connector.stores.state import Collection

SELECTIVE_SHARE = 10
"""A filter that matches fewer than one in this many rows is answered from the matching rows."""
SELECTIVE_ROWS = 2000
SPARE = 4
"""Rows to read beyond `k` at first: enough if documents have one chunk each."""
REMEMBERED_ROWS = 4
"""The filter cache holds this many times the collection's rows, 8 bytes each."""

FILTER_SECONDS = 60.0
"""Time limit for the filter of one search. SQLite evaluates it row by row and blocks a thread; Python functions in it
block all. HANA uses `communication_timeout`."""
_STEPS = 20_000
"""SQLite instructions between two clock checks, about a millisecond; each check takes the interpreter lock."""

FILTERS = 512
"""The most entries in a filter cache."""

T = TypeVar("T")
Mark = tuple[int, int]
"""The last record id and the last tombstone that a transaction can see, of all collections. Both only increase."""
PAGE = 8192
_LOAD = (
    "SELECT r.id, v.vector FROM records r JOIN vectors v ON v.record = r.id "
    "WHERE r.collection = ? AND r.id > ? ORDER BY r.id"
)
_SLACK = 1.25
_EPSILON = 4 * float(np.finfo(np.float32).eps)


class FilterCache(Generic[T]):
    """Cache the most recently used values: at most FILTERS, and at most the rows that `put` allows. Thread-safe."""

    def __init__(self, rows_of: Callable[[T], int]) -> None:
        self._rows_of = rows_of
        self._values: dict[bytes, T] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def rows(self) -> int:
        with self._lock:
            return sum(map(self._rows_of, self._values.values()))

    @staticmethod
    def key(compiled: filters.Compiled, collection: int = 0) -> bytes:
        """Return a short key; a filter may have megabytes of values."""
        return hashlib.sha256(repr((collection, compiled.sql, compiled.parameters)).encode()).digest()

    def get(self, key: bytes) -> T | None:
        with self._lock:
            if key in self._values:
                self._values[key] = self._values.pop(key)
            return self._values.get(key)

    def put(self, key: bytes, value: T, most_rows: int) -> None:
        """Store a value and drop the least recently used ones. Never drops the new value."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            rows = sum(map(self._rows_of, self._values.values()))
            for oldest in list(self._values)[:-1]:
                if rows <= most_rows and len(self._values) <= FILTERS:
                    break
                rows -= self._rows_of(self._values.pop(oldest))

    def copy(self) -> FilterCache[T]:
        other = FilterCache(self._rows_of)
        with self._lock:
            other._values = dict(self._values)
        return other


def read_mark(db: sqlite3.Connection) -> Mark:
    found = dict(db.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    return found.get("records", 0), found.get("tombstones", 0)


def unit_rows(blobs: Sequence[object], dimension: int) -> tuple[Vectors, NDArray[np.bool_]]:
    """Return stored vectors (n, d) scaled to length 1, and which of them are usable; unusable rows are zeros. Damaged
    vectors must not add NaN or wrong cosines to the scores."""
    size = 4 * dimension
    if not all(type(blob) is bytes and len(blob) == size for blob in blobs):
        blank = b"\0" * size
        blobs = [blob if isinstance(blob, bytes) and len(blob) == size else blank for blob in blobs]
    data = b"".join(cast(Sequence[bytes], blobs))
    vectors = np.frombuffer(data, dtype="<f4").reshape(len(blobs), dimension)
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    usable: NDArray[np.bool_] = np.isfinite(lengths) & (lengths > 0)
    odd = ~usable | (np.abs(lengths - 1.0) > _EPSILON)
    if odd.any():
        vectors = vectors.copy()
        vectors[~usable] = 0
        odd &= usable
        vectors[odd] = vectors[odd] / lengths[odd, None]
    return vectors, usable


@dataclass(frozen=True, slots=True)
class Kept:
    """Ascending positions of the rows with ids up to `seen` that match a filter; None if too many to cache."""

    places: NDArray[np.int64] | None
    seen: int


def _no_filters() -> FilterCache[Kept]:
    return FilterCache(lambda kept: 0 if kept.places is None else len(kept.places))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows in id order. Row i of `view` is the unit vector of record `ids[i]`; ignore it unless `alive[i]`."""

    mark: Mark
    ids: NDArray[np.int64]
    alive: NDArray[np.bool_]
    live: int
    view: ScanView
    filtered: FilterCache[Kept] = field(compare=False)
    """Matching rows by filter. The next snapshot inherits the valid entries."""

    @property
    def allowed(self) -> NDArray[np.bool_] | None:
        """Return which rows are alive; None: all."""
        return None if self.live == len(self.ids) else self.alive

    def is_newer(self, mark: Mark) -> bool:
        """Return whether the snapshot has changes that a transaction at `mark` cannot see."""
        return self.mark[0] > mark[0] or self.mark[1] > mark[1]

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of those `ids` that are alive."""
        if not len(self.ids):
            return np.empty(0, np.int64)
        found = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        known: NDArray[np.int64] = found[(self.ids[found] == ids) & self.alive[found]].astype(np.int64)
        return known


class Buffer:
    """The rows of successive snapshots of one collection. New rows are appended after those of earlier snapshots, and
    compaction makes a new buffer, so snapshots in use never change.

    Not thread-safe: call `extend` under the collection's lock. Discard the buffer after an error.
    """

    def __init__(self, collection: int, dimension: int, scan: VectorScan) -> None:
        self._collection = collection
        self._dimension = dimension
        self._scan = scan
        self._clear()

    def _clear(self) -> None:
        self._used = 0
        self._ids = np.empty(0, np.int64)
        self._copy: ScanCopy = self._scan.copy(self._dimension)

    def empty(self) -> Snapshot:
        return self._view((0, 0), np.empty(0, np.bool_), 0)

    def extend(self, db: sqlite3.Connection, last: Snapshot, mark: Mark) -> Snapshot:
        """Return the snapshot at `mark`, which `db`'s open transaction sees. `last`: the newest snapshot so far."""
        if self._pruned(db) > last.mark[1] and last.mark != (0, 0):
            self._clear()
            last = self.empty()
        buried, described = self._tombstones(db, last)
        alive, live = last.alive, last.live
        if len(buried):
            alive = alive.copy()
            alive[buried] = False
            live -= len(buried)
        added = self._load(db, last.mark[0]) if mark[0] > last.mark[0] else []
        if added:
            alive = np.concatenate([alive, *added])
            live += sum(int(some.sum()) for some in added)
        if live * 2 < len(alive):
            return self._compact(mark, alive, live)
        # Cached filters remain valid for older rows, unless metadata changed.
        return self._view(mark, alive, live, None if described else last.filtered.copy())

    def _view(
        self, mark: Mark, alive: NDArray[np.bool_], live: int, filtered: FilterCache[Kept] | None = None
    ) -> Snapshot:
        kept = _no_filters() if filtered is None else filtered
        return Snapshot(mark, self._ids[: self._used], alive, live, self._copy.view(), kept)

    def _pruned(self, db: sqlite3.Connection) -> int:
        row = db.execute("SELECT pruned FROM collections WHERE id = ?", (self._collection,)).fetchone()
        return int(row[0]) if row else 0

    def _tombstones(self, db: sqlite3.Connection, last: Snapshot) -> tuple[NDArray[np.int64], bool]:
        """Return the positions of rows deleted since `last`, and whether any metadata changed."""
        sql = "SELECT record FROM tombstones WHERE collection = ? AND seq > ?"
        ids = np.array([id_ for (id_,) in db.execute(sql, (self._collection, last.mark[1]))], dtype=np.int64)
        return np.unique(last.positions(ids)), bool((ids == 0).any())

    def _load(self, db: sqlite3.Connection, after: int) -> list[NDArray[np.bool_]]:
        """Append the records after id `after`. Return, per page, which rows have a usable vector."""
        cursor = db.execute(_LOAD, (self._collection, after))
        usable = []
        while rows := cursor.fetchmany(PAGE):
            usable.append(self._append(rows))
        return usable

    def _append(self, rows: Sequence[tuple[int, bytes]]) -> NDArray[np.bool_]:
        start, end = self._used, self._used + len(rows)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids[:start], np.empty(max(PAGE, int(end * _SLACK) - start), np.int64)])
        vectors, usable = unit_rows([vector for _, vector in rows], self._dimension)
        self._ids[start:end] = [id_ for id_, _ in rows]
        self._copy.append(vectors)
        self._used = end
        return usable

    def _compact(self, mark: Mark, alive: NDArray[np.bool_], live: int) -> Snapshot:
        self._ids = self._ids[: self._used][alive]
        self._copy = self._copy.kept(alive)
        self._used = live
        return self._view(mark, np.ones(live, np.bool_), live)


@contextmanager
def answering(db: sqlite3.Connection, condition: filters.Condition | None, where: Filter | None) -> Iterator[None]:
    """Limit a search's reads in time and translate their errors. `where`: the caller's filter; `condition`: with the
    row filter. Raises BadFilter if a stored value cannot be read as the filter's kind or the filter takes too long, and
    Cancelled."""
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


class CollectionIndex:
    """The newest snapshot of a collection, shared by all threads and replaced atomically."""

    def __init__(self, collection: int, dimension: int, scan: VectorScan) -> None:
        self._collection = collection
        self._dimension = dimension
        self._scan = scan
        self._lock = threading.Lock()
        self.scans = SharedScans()
        self._forget()

    def _forget(self) -> None:
        self._buffer = Buffer(self._collection, self._dimension, self._scan)
        self._newest = self._buffer.empty()

    def snapshot(self, db: sqlite3.Connection) -> Snapshot | None:
        """Return the snapshot that `db`'s open transaction sees; None if the cached one is newer."""
        mark = read_mark(db)
        if self._newest.mark == mark:
            return self._newest
        with self._lock:
            newest = self._newest
            if newest.mark == mark:
                return newest
            if newest.is_newer(mark):
                return None
            try:
                self._newest = self._buffer.extend(db, newest, mark)
            except BaseException:
                self._forget()
                raise
            return self._newest


class Indexes:
    """The index of each collection, created on first search. Thread-safe. `scan`: None: the fastest available."""

    def __init__(self, scan: VectorScan | None) -> None:
        self._scan = scan
        self._lock = threading.Lock()
        self._known: dict[str, tuple[tuple[int, int], CollectionIndex]] = {}

    def of(self, found: Collection) -> CollectionIndex:
        """Return the collection's index. After a switch, replaces the index of the previous generation."""
        with self._lock:
            key = (found.id, found.stamp.dimension)
            known = self._known.get(found.name)
            if known is None or known[0] != key:
                known = self._known[found.name] = key, CollectionIndex(*key, self._scan or best_scan())
            return known[1]

    def forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)

    def clear(self) -> None:
        self._known.clear()


class Search:
    """Searches one collection within one transaction."""

    def __init__(self, db: sqlite3.Connection, collection: int, snapshot: Snapshot, scans: SharedScans) -> None:
        self._db = db
        self._collection = collection
        self._snapshot = snapshot
        self._scans = scans
        self._records = Records(db)

    def __call__(self, query: NDArray[np.float32], k: int, condition: filters.Condition | None) -> list[Hit]:
        """Return the exact best `k` documents by cosine for a unit vector, ties by document id."""
        snapshot = self._snapshot
        if k < 1 or not snapshot.live:
            return []
        if condition is None:
            return self._records.hits(self._of_all(query, k, None, snapshot.live) or [])
        few = max(SELECTIVE_ROWS, snapshot.live // SELECTIVE_SHARE)
        kept = self._matching(condition, few)
        if kept is None:
            best = self._of_all(query, k, condition, few)
            if best is not None:
                return self._records.hits(best)
            # the best rows of the scan did not match the filter
            kept = self._matching(condition, None)
            assert kept is not None
        return self._records.hits(self._of_kept(query, k, kept) or [])

    # ------------------------------------------------------------------------------------------------------ ranking

    def _of_kept(self, query: NDArray[np.float32], k: int, kept: Positions) -> list[Hit] | None:
        """Return the best of the rows at positions `kept`. If they are many, scan all rows, which is cheaper."""
        snapshot = self._snapshot
        if len(kept) * SELECTIVE_SHARE <= max(len(snapshot.ids), SELECTIVE_ROWS * SELECTIVE_SHARE):
            ranking = snapshot.view.rank_rows(query, kept)
        else:
            allowed = np.zeros(len(snapshot.ids), np.bool_)
            allowed[kept] = True
            ranking = self._scans.rank(snapshot.view, query, allowed)
        return self._settle(query, k, ranking, None, len(kept), len(kept))

    def _of_all(
        self, query: NDArray[np.float32], k: int, condition: filters.Condition | None, limit: int
    ) -> list[Hit] | None:
        snapshot = self._snapshot
        ranking = self._scans.rank(snapshot.view, query, snapshot.allowed)
        return self._settle(query, k, ranking, condition, snapshot.live, limit)

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
        while True:
            chosen, floor = ranking.best(wanted)
            found = self._records.with_vectors(self._snapshot.ids[chosen].tolist(), condition)
            vectors, _ = unit_rows([row[3] for row in found], len(query))
            scores = exact_scores(vectors, query).tolist()
            candidates = (
                Hit(document, score, "", {}, number, record)
                for score, (document, number, record, _) in zip(scores, found, strict=True)
            )
            best = records.best_per_document(candidates, k)
            if wanted >= rows or (len(best) == k and best[-1].score >= floor):
                return best
            if wanted >= limit:
                return None
            wanted = min(wanted * 4, limit)

    # ------------------------------------------------------------------------------------------------------ reading

    def _matching(self, condition: filters.Condition, few: int | None) -> Positions | None:
        """Return the positions of matching rows; None if there are more than `few` (None: no limit). Cached per filter:
        a repeated filter reads only new rows."""
        compiled = filters.to_sqlite(condition)
        snapshot = self._snapshot
        key = FilterCache.key(compiled)
        known = snapshot.filtered.get(key)
        if known is None or known.places is None:
            if known is not None and few is not None:
                return None
            known = Kept(np.empty(0, np.int64), 0)
        if known.places is not None and known.seen < snapshot.mark[0]:  # add the rows written since
            limit = -1 if known.seen or few is None else few + 1
            sql = f"SELECT id FROM records WHERE collection = ? AND id > ? AND ({compiled.sql}) LIMIT ?"  # noqa: S608 - names checked
            rows = self._db.execute(sql, (self._collection, known.seen, *compiled.parameters, limit))
            ids, seen = np.array([id_ for (id_,) in rows], dtype=np.int64), snapshot.mark[0]
            together = None
            if len(ids) != limit:
                together = np.concatenate([known.places, snapshot.positions(np.sort(ids))])
            known = Kept(together, seen)
            snapshot.filtered.put(key, known, REMEMBERED_ROWS * len(snapshot.ids))
        places = known.places
        if places is None or snapshot.live == len(snapshot.ids):
            return places
        return places[snapshot.alive[places]]
