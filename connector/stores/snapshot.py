"""The vectors of one collection in memory: immutable views over buffers that only grow, extended by what SQLite has
gained. A cache: SQLite stays the truth, and a snapshot can be thrown away at any time. Knows two tables, no search.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from connector.model import Vectors

Mark = tuple[int, int]
"""The last record id and the last tombstone a transaction can see, of all collections. Both only ever grow."""
PAGE = 8192
_COUNT = "SELECT count(*) FROM records WHERE collection = ? AND id > ?"
_LOAD = (
    "SELECT r.id, v.vector FROM records r JOIN vectors v ON v.record = r.id "
    "WHERE r.collection = ? AND r.id > ? ORDER BY r.id"
)
_SLACK = 1.25
_EPSILON = 4 * float(np.finfo(np.float32).eps)


def read_mark(db: sqlite3.Connection) -> Mark:
    found = dict(db.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    return found.get("records", 0), found.get("tombstones", 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows in id order. `vectors[i]` is the unit vector of record `ids[i]`, to be ignored unless `alive[i]`."""

    mark: Mark
    ids: NDArray[np.int64]
    vectors: Vectors
    alive: NDArray[np.bool_]
    live: int
    filtered: dict[Hashable, NDArray[np.int64]] = field(default_factory=dict, compare=False)
    """Positions that filters kept, by filter: as true as the snapshot, because every change makes a new one."""

    def is_newer(self, mark: Mark) -> bool:
        """Whether it shows changes that a transaction with `mark` cannot see."""
        return self.mark[0] > mark[0] or self.mark[1] > mark[1]

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of those `ids` that are alive here, others left out."""
        if not len(self.ids):
            return np.empty(0, np.int64)
        found = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        known: NDArray[np.int64] = found[(self.ids[found] == ids) & self.alive[found]].astype(np.int64)
        return known


class Buffer:
    """Room for the rows of successive snapshots of one collection. Rows are appended behind those that earlier
    snapshots see; a larger buffer or a compacted one is a new one, so a snapshot in use never changes.

    Not thread-safe: `extend` is called under the collection's lock. After an error it is not to be used again.
    """

    def __init__(self, collection: int, dimension: int) -> None:
        self._collection = collection
        self._dimension = dimension
        self._used = 0
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        self._ids = np.empty(capacity, np.int64)
        self._vectors = np.empty((capacity, self._dimension), np.float32)

    def empty(self) -> Snapshot:
        return self._view((0, 0), np.empty(0, np.bool_))

    def extend(self, db: sqlite3.Connection, last: Snapshot, mark: Mark) -> Snapshot:
        """The snapshot for `mark`, which `db`'s open transaction sees. `last` is the newest one made so far."""
        if self._pruned(db) > last.mark[1] and last.mark != (0, 0):
            self._used = 0
            self._allocate(0)
            last = self.empty()
        bury = self._tombstones(db, last.mark[1])
        alive = last.alive.copy()
        alive[last.positions(bury)] = False
        alive = np.concatenate([alive, *self._load(db, last.mark[0])])
        if alive.sum() * 2 < len(alive):
            alive = self._compact(alive)
        return self._view(mark, alive)

    def _view(self, mark: Mark, alive: NDArray[np.bool_]) -> Snapshot:
        used = self._used
        return Snapshot(mark, self._ids[:used], self._vectors[:used], alive, int(alive.sum()))

    def _pruned(self, db: sqlite3.Connection) -> int:
        row = db.execute("SELECT pruned FROM collections WHERE id = ?", (self._collection,)).fetchone()
        return int(row[0]) if row else 0

    def _tombstones(self, db: sqlite3.Connection, after: int) -> NDArray[np.int64]:
        sql = "SELECT record FROM tombstones WHERE collection = ? AND seq > ?"
        return np.array([record for (record,) in db.execute(sql, (self._collection, after))], dtype=np.int64)

    def _load(self, db: sqlite3.Connection, after: int) -> list[NDArray[np.bool_]]:
        """Append the records above `after`; for each page, which of its rows hold a usable vector."""
        count = db.execute(_COUNT, (self._collection, after)).fetchone()[0]
        self._reserve(self._used + int(count))
        cursor = db.execute(_LOAD, (self._collection, after))
        usable = []
        while rows := cursor.fetchmany(PAGE):
            usable.append(self._append(rows))
        return usable

    def _append(self, rows: Sequence[tuple[int, bytes]]) -> NDArray[np.bool_]:
        start, end = self._used, self._used + len(rows)
        self._reserve(end)
        size = 4 * self._dimension
        blank = b"\0" * size
        data = b"".join(vector if isinstance(vector, bytes) and len(vector) == size else blank for _, vector in rows)
        vectors = np.frombuffer(data, dtype="<f4").reshape(len(rows), self._dimension)
        with np.errstate(invalid="ignore", over="ignore"):
            lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
        usable: NDArray[np.bool_] = np.isfinite(lengths) & (lengths > 0)
        self._ids[start:end] = [id_ for id_, _ in rows]
        self._vectors[start:end] = vectors
        # A damaged row must not bring NaN into the scores; one of another length would have a wrong cosine.
        self._vectors[start:end][~usable] = 0
        odd = usable & (np.abs(lengths - 1.0) > _EPSILON)
        self._vectors[start:end][odd] = vectors[odd] / lengths[odd, None]
        self._used = end
        return usable

    def _reserve(self, capacity: int) -> None:
        if capacity <= len(self._ids):
            return
        ids, vectors, used = self._ids, self._vectors, self._used
        self._allocate(capacity if not used else int(capacity * _SLACK))
        self._ids[:used], self._vectors[:used] = ids[:used], vectors[:used]

    def _compact(self, alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
        used = len(alive)
        ids, vectors = self._ids[:used][alive], self._vectors[:used][alive]
        self._used = len(ids)
        self._ids, self._vectors = ids, vectors
        return np.ones(self._used, np.bool_)
