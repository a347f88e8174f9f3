"""Versions of tables, and which rows changed between two of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Rowids = NDArray[np.int64]

MOST_CHANGES = 100_000  # Maximum number of commits plus changed rows recorded for one table


class Version(NamedTuple):
    """A state of a table's rows. Each definition changes `epoch`, which all tables share."""

    epoch: int
    number: int


class RowVersions:
    """Thread-safe record of changed rows, for tables whose version was requested since the last definition."""

    def __init__(self, most_changes: int = MOST_CHANGES) -> None:
        self._most_changes = most_changes
        self._epoch = 0
        self._numbers: dict[str, int] = {}
        # By table: the version number after each commit, ascending without gaps, and the rows that the commit changed
        self._changes: dict[str, deque[tuple[int, Rowids]]] = {}
        self._sizes: dict[str, int] = {}  # By table: the number of commits plus rows in `_changes`
        self._lock = threading.Lock()

    def current(self, table: str) -> Version:
        """The current version; starts to record changes of `table`. Call with the database's `commit_lock`."""
        with self._lock:
            self._changes.setdefault(table, deque())
            return Version(self._epoch, self._numbers.get(table, 0))

    def advance(self, table: str, changed: Callable[[], Iterable[int]]) -> None:
        """Begin a new version of the table; `changed` is called only if needed. Call with `commit_lock`."""
        with self._lock:
            self._numbers[table] = number = self._numbers.get(table, 0) + 1
            changes = self._changes.get(table)
            if changes is None:
                return
            changes.append((number, np.fromiter(changed(), np.int64)))
            size = self._sizes.get(table, 0) + 1 + len(changes[-1][1])
            while size > self._most_changes:
                size -= 1 + len(changes.popleft()[1])
            self._sizes[table] = size

    def begin_epoch(self) -> None:
        """Invalidate all versions after a definition. Call with `commit_lock`."""
        with self._lock:
            self._epoch += 1
            self._changes.clear()
            self._sizes.clear()

    def between(self, table: str, one: Version, other: Version) -> set[int] | None:
        """The rows that may differ between two versions, in either order; None if unknown."""
        older, newer = sorted((one, other))
        with self._lock:
            if older.epoch != newer.epoch or newer.epoch != self._epoch:
                return None
            changes = self._changes.get(table, ())
            found = [rowids for number, rowids in changes if older.number < number <= newer.number]
        if len(found) != newer.number - older.number:
            return None
        return set(np.concatenate(found).tolist()) if found else set()
