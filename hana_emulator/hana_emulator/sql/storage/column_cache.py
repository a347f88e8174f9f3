"""Cache content computed from a column's rows, for all sessions. A new version reads only the changed rows.

A session gets the content of its own snapshot, which may be newer or older than the cached one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Generic, Protocol, Self, TypeVar

from hana_emulator.sql.storage.row_versions import RowVersions, Version

Key = tuple[str, str]  # (table, column); callers must always use the same spelling
Rows = Iterable[tuple[int, Any]]  # (rowid, value), ascending or not
# Reads the column in the caller's snapshot: those of the given rows that exist, or all rows for None
Read = Callable[[AbstractSet[int] | None], Rows]


class Content(Protocol):
    @property
    def nbytes(self) -> int: ...

    def changed(self, rowids: AbstractSet[int], rows: Rows) -> Self:
        """The content after the rows `rowids` have become `rows`; rowids without a row are deleted."""


C = TypeVar("C", bound=Content)


class ColumnCache(Generic[C]):
    """Thread-safe cache of the newest version of each column. The least recently used content is dropped if the
    total exceeds `max_bytes`; content larger than that is not cached."""

    def __init__(self, versions: RowVersions, build: Callable[[Rows], C], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._versions = versions
        self._build = build
        self._kept: OrderedDict[Key, tuple[Version, C]] = OrderedDict()
        self._lock = threading.Lock()
        self._builders: dict[Key, threading.Lock] = {}

    def at(self, key: Key, version: Version, read: Read) -> C:
        """The content of `key` at `version`; only one thread computes for a key at a time."""
        with self._lock:
            builder = self._builders.setdefault(key, threading.Lock())
        with builder:
            before, content = self._kept.get(key, (version, None))
            if content is None:
                content = self._build(read(None))
            elif before != version:
                rowids = self._versions.between(key[0], before, version)
                content = self._build(read(None)) if rowids is None else content.changed(rowids, read(rowids))
            if version >= before:
                self._keep(key, version, content)
        return content

    def clear(self) -> None:
        """Clear the cache after a definition: earlier versions are no longer requested."""
        with self._lock:
            self._kept.clear()
            self._builders.clear()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(content.nbytes for _, content in self._kept.values())

    def _keep(self, key: Key, version: Version, content: C) -> None:
        with self._lock:
            self._kept.pop(key, None)
            if content.nbytes > self.max_bytes:
                return
            self._kept[key] = version, content
            while sum(kept.nbytes for _, kept in self._kept.values()) > self.max_bytes:
                self._kept.popitem(last=False)
