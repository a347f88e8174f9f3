"""The vectors of one collection in memory: immutable snapshots, extended by what SQLite has gained. A cache that can be
dropped at any time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from connector.model import Vectors
from connector.stores.local.filter_cache import FilterCache
from connector.stores.scan.vector_scan import ScanCopy, ScanView, VectorScan

Mark = tuple[int, int]
"""The last record id and the last tombstone a transaction can see, of all collections. Both only ever grow."""
PAGE = 8192
_LOAD = (
    "SELECT r.id, v.vector FROM records r JOIN vectors v ON v.record = r.id "
    "WHERE r.collection = ? AND r.id > ? ORDER BY r.id"
)
_SLACK = 1.25
_EPSILON = 4 * float(np.finfo(np.float32).eps)


def read_mark(db: sqlite3.Connection) -> Mark:
    found = dict(db.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    return found.get("records", 0), found.get("tombstones", 0)


def unit_rows(blobs: Sequence[object], dimension: int) -> tuple[Vectors, NDArray[np.bool_]]:
    """Return stored vectors (n, d) with length 1, and which of them are usable: the others are zeros. A damaged vector
    must not bring NaN into the scores; one of another length would have a wrong cosine."""
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
    """The places, ascending, of the rows with ids up to `seen` that match a filter; None for too many to keep."""

    places: NDArray[np.int64] | None
    seen: int


def _no_filters() -> FilterCache[Kept]:
    return FilterCache(lambda kept: 0 if kept.places is None else len(kept.places))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows in id order. `view` holds the unit vector of record `ids[i]` as row i, to be ignored unless `alive[i]`."""

    mark: Mark
    ids: NDArray[np.int64]
    alive: NDArray[np.bool_]
    live: int
    view: ScanView
    filtered: FilterCache[Kept] = field(compare=False)
    """Matching rows by filter. The next snapshot takes over what is still valid."""

    @property
    def allowed(self) -> NDArray[np.bool_] | None:
        """The rows that count, None: all."""
        return None if self.live == len(self.ids) else self.alive

    def is_newer(self, mark: Mark) -> bool:
        """Return whether it has changes that a transaction with `mark` cannot see."""
        return self.mark[0] > mark[0] or self.mark[1] > mark[1]

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of those `ids` that are alive here."""
        if not len(self.ids):
            return np.empty(0, np.int64)
        found = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        known: NDArray[np.int64] = found[(self.ids[found] == ids) & self.alive[found]].astype(np.int64)
        return known


class Buffer:
    """The rows of successive snapshots of one collection. Rows are appended behind those that earlier snapshots see; a
    compacted buffer is a new one, so a snapshot in use never changes.

    Not thread-safe: `extend` is called under the collection's lock. After an error it is not to be used again.
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
        """The snapshot for `mark`, which `db`'s open transaction sees. `last` is the newest one made so far."""
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
        # Cached filters stay valid except for added and deleted rows, unless metadata changed.
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
        """Return the places of rows deleted since, and whether any metadata has changed."""
        sql = "SELECT record FROM tombstones WHERE collection = ? AND seq > ?"
        ids = np.array([id_ for (id_,) in db.execute(sql, (self._collection, last.mark[1]))], dtype=np.int64)
        return np.unique(last.positions(ids)), bool((ids == 0).any())

    def _load(self, db: sqlite3.Connection, after: int) -> list[NDArray[np.bool_]]:
        """Append the records above `after`. Return which rows of each page have a usable vector."""
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
