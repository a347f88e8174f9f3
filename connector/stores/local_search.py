"""Search of the local store: the in-memory index of a collection, and its exact best documents, filtered or not.
Reads within the transaction it is given; writes nothing.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.model import Hit, VectorScan
from connector.stores import filter_sql, filters, records
from connector.stores.scan import exact_scores, scan_error, shortlist
from connector.stores.snapshot import Buffer, Snapshot, read_mark

IN_LIMIT = 500
"""Ids in one IN list: short statements that SQLite prepares once."""
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


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A record by its score, its text not yet read."""

    score: float
    document: str
    number: int
    record: int

    @property
    def rank(self) -> tuple[float, str, int]:
        return -self.score, self.document, self.number


class Search:
    """Searches one collection within one transaction."""

    def __init__(self, db: sqlite3.Connection, collection: int, snapshot: Snapshot, scan: VectorScan) -> None:
        self._db = db
        self._collection = collection
        self._snapshot = snapshot
        self._scan = scan

    def __call__(self, query: NDArray[np.float32], k: int, condition: filters.Condition | None) -> list[Hit]:
        """The best `k` documents for a unit vector, exactly: by true cosine, ties by document id."""
        if k < 1 or not self._snapshot.live:
            return []
        if condition is None:
            return self._hits(self._walk(query, k, None, self._snapshot.live))
        few = max(SELECTIVE_ROWS, self._snapshot.live // SELECTIVE_SHARE)
        kept = self._matching(condition, few + 1)
        if len(kept) <= few:
            return self._hits(self._among(query, k, kept))
        best = self._walk(query, k, condition, few)
        if best is None:  # what the filter keeps lies far from the query
            best = self._among(query, k, self._matching(condition, -1))
        return self._hits(best)

    # ------------------------------------------------------------------------------------------------------ ranking

    def _walk(
        self, query: NDArray[np.float32], k: int, condition: filters.Condition | None, limit: int
    ) -> list[_Candidate] | None:
        """Down the ranking of all rows until `k` documents fit; None when more than `limit` rows had to be looked at
        and there are more."""
        snapshot = self._snapshot
        scores = self._scan(snapshot.vectors, query)
        scores[~snapshot.alive] = -np.inf
        return self._settle(query, k, scores, _Pool(None, condition, snapshot.live, limit))

    def _among(self, query: NDArray[np.float32], k: int, kept: Positions) -> list[_Candidate] | None:
        """The best of the rows at `kept`."""
        scores = self._scan(self._snapshot.vectors[kept], query)
        return self._settle(query, k, scores, _Pool(kept, None, len(kept), len(kept)))

    def _settle(
        self, query: NDArray[np.float32], k: int, scores: NDArray[np.float32], pool: _Pool
    ) -> list[_Candidate] | None:
        error = scan_error(len(query))
        wanted = 2 * k + 16
        while True:
            chosen, floor = shortlist(scores, wanted, error)
            positions = chosen if pool.kept is None else pool.kept[chosen]
            best = _best(self._candidates(positions, query, pool.condition), k)
            if wanted >= pool.rows:
                return best
            if len(best) == k and best[-1].score >= floor:
                return best
            if wanted >= pool.limit:
                return None
            wanted = min(wanted * 8, pool.limit)

    def _candidates(
        self, positions: Positions, query: NDArray[np.float32], condition: filters.Condition | None
    ) -> list[_Candidate]:
        scores = exact_scores(self._snapshot.vectors[positions], query).tolist()
        by_id = dict(zip(self._snapshot.ids[positions].tolist(), scores, strict=True))
        sql = "SELECT document, number, id FROM records WHERE id IN ({})"
        parameters: tuple[Any, ...] = ()
        if condition is not None:
            compiled = filter_sql.to_sqlite(condition)
            sql, parameters = f"{sql} AND ({compiled.sql})", compiled.parameters
        return [_Candidate(by_id[row[2]], *row) for row in self._rows(sql, list(by_id), parameters)]

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

    def _hits(self, best: Sequence[_Candidate] | None) -> list[Hit]:
        best = best or []
        sql = "SELECT id, text, meta FROM records WHERE id IN ({})"
        found = {row[0]: row[1:] for row in self._rows(sql, [candidate.record for candidate in best], ())}
        return [
            Hit(one.document, one.score, found[one.record][0], records.metadata_of(found[one.record][1]), one.number)
            for one in best
        ]

    def _rows(self, sql: str, ids: Sequence[int], parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(ids), IN_LIMIT):
            some = ids[start : start + IN_LIMIT]
            yield from self._db.execute(sql.format(", ".join("?" * len(some))), (*some, *parameters))


@dataclass(frozen=True, slots=True)
class _Pool:
    """Which rows are scored (`kept`, None: all) and checked (`condition`), how many of them live, and how many may be
    looked at."""

    kept: Positions | None
    condition: filters.Condition | None
    rows: int
    limit: int


def _best(candidates: Sequence[_Candidate], k: int) -> list[_Candidate]:
    """The best chunk of each of the best `k` documents."""
    best: dict[str, _Candidate] = {}
    for candidate in sorted(candidates, key=lambda one: one.rank):
        best.setdefault(candidate.document, candidate)
        if len(best) == k:
            break
    return list(best.values())
