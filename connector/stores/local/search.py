"""Vector search of the local store: the in-memory indexes of collections, and the exact best documents, filtered or
not.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector import cancellation
from connector.errors import BadFilter
from connector.model import Filter, Hit
from connector.stores import filters
from connector.stores.local.filter_cache import FilterCache
from connector.stores.local.snapshot import Buffer, Kept, Snapshot, read_mark, unit_rows
from connector.stores.local.tables import Candidate, Collection, Records, best_documents
from connector.stores.scan.int8_scan import best_scan
from connector.stores.scan.shared_scans import SharedScans
from connector.stores.scan.vector_scan import Ranking, VectorScan, exact_scores

SELECTIVE_SHARE = 10
"""A filter that matches less than one row in this many is answered from the matching rows."""
SELECTIVE_ROWS = 2000
SPARE = 4
"""Rows read first beyond `k`: enough where documents are one chunk each."""
REMEMBERED_ROWS = 4
"""The filter cache holds this many times the collection's rows, 8 bytes each."""

FILTER_SECONDS = 60.0
"""Time limit of one search's filter. It is evaluated row by row, blocks a thread and, where it calls Python functions,
all others; HANA's statements end by `communication_timeout`."""
_STEPS = 20_000
"""SQLite instructions between two looks at the clock, about a millisecond; each look takes the interpreter's lock."""

Positions = NDArray[np.int64]


@contextmanager
def answering(db: sqlite3.Connection, condition: filters.Condition | None, where: Filter | None) -> Iterator[None]:
    """Limit and translate the reads of a search. `where`: the caller's filter; `condition`: that and the row filter.
    Raises BadFilter for a stored value that cannot be read as the filter's kind, and for a filter that takes too long;
    Cancelled where this thread's call is cancelled."""
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
    """The newest snapshot of a collection, shared by all threads and replaced by reference."""

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
        """Return exactly what `db`'s open transaction sees; None when that is older than the memory."""
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
    """The index of each collection, made at its first search. Thread-safe. `scan`: None for the fastest that works."""

    def __init__(self, scan: VectorScan | None) -> None:
        self._scan = scan
        self._lock = threading.Lock()
        self._known: dict[str, tuple[tuple[int, int], CollectionIndex]] = {}

    def of(self, found: Collection) -> CollectionIndex:
        """After a switch this replaces the index of the generation that was active."""
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
        """Return the exact best `k` documents for a unit vector by cosine, ties by document id."""
        snapshot = self._snapshot
        if k < 1 or not snapshot.live:
            return []
        if condition is None:
            return self._records.hits(self._of_all(query, k, _Pool(None, snapshot.live, snapshot.live)) or [])
        few = max(SELECTIVE_ROWS, snapshot.live // SELECTIVE_SHARE)
        kept = self._matching(condition, few)
        if kept is None:
            best = self._of_all(query, k, _Pool(condition, snapshot.live, few))
            if best is not None:
                return self._records.hits(best)
            # the matching rows are far from the query
            kept = self._matching(condition, None)
            assert kept is not None
        return self._records.hits(self._of_kept(query, k, kept) or [])

    # ------------------------------------------------------------------------------------------------------ ranking

    def _of_all(self, query: NDArray[np.float32], k: int, pool: _Pool) -> list[Candidate] | None:
        snapshot = self._snapshot
        return self._settle(query, k, self._scans.rank(snapshot.view, query, snapshot.allowed), pool)

    def _of_kept(self, query: NDArray[np.float32], k: int, kept: Positions) -> list[Candidate] | None:
        """Return the best of the rows at `kept`. Gathering many costs more than scanning all."""
        snapshot, pool = self._snapshot, _Pool(None, len(kept), len(kept))
        if len(kept) * SELECTIVE_SHARE <= max(len(snapshot.ids), SELECTIVE_ROWS * SELECTIVE_SHARE):
            return self._settle(query, k, snapshot.view.rank_rows(query, kept), pool)
        allowed = np.zeros(len(snapshot.ids), np.bool_)
        allowed[kept] = True
        return self._settle(query, k, self._scans.rank(snapshot.view, query, allowed), pool)

    def _settle(self, query: NDArray[np.float32], k: int, ranking: Ranking, pool: _Pool) -> list[Candidate] | None:
        """Go down the ranking until `k` documents pass; None when `pool.limit` rows were read and there are more."""
        wanted = k + SPARE
        while True:
            chosen, floor = ranking.best(wanted)
            best = best_documents(self._candidates(chosen, query, pool.condition), k)
            if wanted >= pool.rows:
                return best
            if len(best) == k and best[-1].score >= floor:
                return best
            if wanted >= pool.limit:
                return None
            wanted = min(wanted * 4, pool.limit)

    def _candidates(
        self, positions: Positions, query: NDArray[np.float32], condition: filters.Condition | None
    ) -> list[Candidate]:
        """Return the rows that pass the filter with their true scores, from the stored vectors."""
        found = self._records.with_vectors(self._snapshot.ids[positions].tolist(), condition)
        vectors, _ = unit_rows([row[3] for row in found], len(query))
        scores = exact_scores(vectors, query).tolist()
        return [Candidate(score, *row[:3]) for score, row in zip(scores, found, strict=True)]

    # ------------------------------------------------------------------------------------------------------ reading

    def _matching(self, condition: filters.Condition, few: int | None) -> Positions | None:
        """Return the places of the matching rows; None when they are more than `few` (None: no limit). Cached per
        filter: a repeated filter reads only new rows."""
        compiled = filters.to_sqlite(condition)
        snapshot = self._snapshot
        key = FilterCache.key(compiled)
        known = snapshot.filtered.get(key)
        if known is None or known.places is None:
            if known is not None and few is not None:
                return None
            known = Kept(np.empty(0, np.int64), 0)
        if known.seen < snapshot.mark[0]:
            known = self._brought_up(known, compiled, few)
            snapshot.filtered.put(key, known, REMEMBERED_ROWS * len(snapshot.ids))
        places = known.places
        if places is None or snapshot.live == len(snapshot.ids):
            return places
        return places[snapshot.alive[places]]

    def _brought_up(self, known: Kept, compiled: filters.Compiled, few: int | None) -> Kept:
        """Return `known` with the rows added since."""
        assert known.places is not None
        limit = -1 if known.seen or few is None else few + 1
        sql = f"SELECT id FROM records WHERE collection = ? AND id > ? AND ({compiled.sql}) LIMIT ?"  # noqa: S608 - names checked
        rows = self._db.execute(sql, (self._collection, known.seen, *compiled.parameters, limit))
        ids = np.array([id_ for (id_,) in rows], dtype=np.int64)
        seen = self._snapshot.mark[0]
        if len(ids) == limit:
            return Kept(None, seen)
        return Kept(np.concatenate([known.places, self._snapshot.positions(np.sort(ids))]), seen)


@dataclass(frozen=True, slots=True)
class _Pool:
    """The ranked rows: the `condition` still to be checked, how many there are, and how many may be read."""

    condition: filters.Condition | None
    rows: int
    limit: int
