"""Search of the local store: the in-memory index of a collection, and the exact best documents with or without a filter.
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
from connector.stores import filters, records
from connector.stores.scan import exact_scores, scan_error, shortlist
from connector.stores.snapshot import Buffer, Snapshot, read_mark

IN_LIMIT = 500
"""Ids in one IN list: short statements that SQLite prepares once."""
SELECTIVE_SHARE = 10
"""A filter that keeps less than one row in this many is answered from the rows it keeps."""
SELECTIVE_ROWS = 2000

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
class Search:
    """A question: a unit vector, how many documents, and which may be among them."""

    query: NDArray[np.float32]
    k: int
    condition: filters.Condition | None
