"""Search of the local store: the in-memory index of a collection, and its exact best documents, filtered or not.
Reads within the transaction it is given; writes nothing.
"""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.model import Hit
from connector.protocols import VectorScan
from connector.stores import filter_sql, filters
from connector.stores.local_records import Candidate, Records, best_documents
from connector.stores.scan import exact_scores, scan_error, shortlist
from connector.stores.snapshot import Buffer, Snapshot, read_mark

SELECTIVE_SHARE = 10
"""A filter that keeps less than one row in this many is answered from the rows it keeps."""
SELECTIVE_ROWS = 2000
REMEMBERED = 16
"""Filters whose rows a snapshot remembers; each may keep up to 8 bytes a row."""

Positions = NDArray[np.int64]


class CollectionIndex:
    """The newest snapshot of a collection, shared by all threads and replaced by reference."""

    def __init__(self, collection: int, dimension: int) -> None:
        self._collection = collection
        self._dimension = dimension
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._buffer = Buffer(self._collection, self._dimension)
        self._newest = self._buffer.empty()

    def snapshot(self, db: sqlite3.Connection) -> Snapshot | None:
        """Exactly what `db`'s open transaction sees; None when that is older than what is in memory."""
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


class Search:
    """Searches one collection within one transaction."""

    def __init__(self, db: sqlite3.Connection, collection: int, snapshot: Snapshot, scan: VectorScan) -> None:
        self._db = db
        self._collection = collection
        self._snapshot = snapshot
        self._scan = scan
        self._records = Records(db)

    def __call__(self, query: NDArray[np.float32], k: int, condition: filters.Condition | None) -> list[Hit]:
        """The best `k` documents for a unit vector, exactly: by true cosine, ties by document id."""
        if k < 1 or not self._snapshot.live:
            return []
        if condition is None:
            return self._records.hits(self._walk(query, k, None, self._snapshot.live) or [])
        few = max(SELECTIVE_ROWS, self._snapshot.live // SELECTIVE_SHARE)
        kept = self._matching(condition, few + 1)
        if len(kept) <= few:
            return self._records.hits(self._among(query, k, kept) or [])
        best = self._walk(query, k, condition, few)
        if best is None:  # what the filter keeps lies far from the query
            best = self._among(query, k, self._matching(condition, -1))
        return self._records.hits(best or [])

    # ------------------------------------------------------------------------------------------------------ ranking

    def _walk(
        self, query: NDArray[np.float32], k: int, condition: filters.Condition | None, limit: int
    ) -> list[Candidate] | None:
        """Down the ranking of all rows until `k` documents fit; None when more than `limit` rows had to be looked at
        and there are more."""
        snapshot = self._snapshot
        scores = self._scan(snapshot.vectors, query)
        scores[~snapshot.alive] = -np.inf
        return self._settle(query, k, scores, _Pool(None, condition, snapshot.live, limit))

    def _among(self, query: NDArray[np.float32], k: int, kept: Positions) -> list[Candidate] | None:
        """The best of the rows at `kept`."""
        scores = self._scan(self._snapshot.vectors[kept], query)
        return self._settle(query, k, scores, _Pool(kept, None, len(kept), len(kept)))

    def _settle(
        self, query: NDArray[np.float32], k: int, scores: NDArray[np.float32], pool: _Pool
    ) -> list[Candidate] | None:
        error = scan_error(len(query))
        wanted = 2 * k + 16
        while True:
            chosen, floor = shortlist(scores, wanted, error)
            positions = chosen if pool.kept is None else pool.kept[chosen]
            best = best_documents(self._candidates(positions, query, pool.condition), k)
            if wanted >= pool.rows:
                return best
            if len(best) == k and best[-1].score >= floor:
                return best
            if wanted >= pool.limit:
                return None
            wanted = min(wanted * 8, pool.limit)

    def _candidates(
        self, positions: Positions, query: NDArray[np.float32], condition: filters.Condition | None
    ) -> list[Candidate]:
        scores = exact_scores(self._snapshot.vectors[positions], query).tolist()
        by_record = dict(zip(self._snapshot.ids[positions].tolist(), scores, strict=True))
        return self._records.candidates(by_record, condition)

    # ------------------------------------------------------------------------------------------------------ reading

    def _matching(self, condition: filters.Condition, limit: int) -> Positions:
        """Places of the rows that fit, at most `limit` (-1: all). Remembered: the same filters come again and again."""
        compiled = filter_sql.to_sqlite(condition)
        remembered, key = self._snapshot.filtered, (compiled.sql, compiled.parameters, limit)
        found = remembered.get(key)
        if found is None:
            found = self._select(compiled, limit)
            if len(remembered) >= REMEMBERED:
                remembered.clear()
            remembered[key] = found
        return found

    def _select(self, compiled: filter_sql.Compiled, limit: int) -> Positions:
        sql = f"SELECT id FROM records WHERE collection = ? AND ({compiled.sql}) LIMIT ?"  # noqa: S608 - names checked
        rows = self._db.execute(sql, (self._collection, *compiled.parameters, limit))
        ids = np.array([id_ for (id_,) in rows], dtype=np.int64)
        return self._snapshot.positions(np.sort(ids))


@dataclass(frozen=True, slots=True)
class _Pool:
    """Which rows are scored (`kept`, None: all) and checked (`condition`), how many of them live, and how many may be
    looked at."""

    kept: Positions | None
    condition: filters.Condition | None
    rows: int
    limit: int
