"""Contents computed from the rows of a column, kept for all sessions. For another version of the table only the rows
that changed are read.

A session gets what its own snapshot holds, whether that is newer or older than what is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Generic, Protocol, Self, TypeVar

from hana_emulator.sql.storage.row_versions import RowVersions, Version

Key = tuple[str, str]
"""(table, column), in the spelling that the caller always uses."""
Rows = Iterable[tuple[int, Any]]
"""(rowid, value), ascending or not."""
Read = Callable[[AbstractSet[int] | None], Rows]
"""Reads the column in the caller's snapshot: of these rows, those that exist; all rows for None."""


class Content(Protocol):
    """What is computed; it never changes."""

    @property
    def nbytes(self) -> int: ...

    def changed(self, rowids: AbstractSet[int], rows: Rows) -> Self:
        """The same for a state in which, of the rows `rowids`, there are `rows`."""


C = TypeVar("C", bound=Content)


class ColumnCache(Generic[C]):
    """Thread-safe. Keeps one version of each column: the newest. Those used last stay, up to `max_bytes` together; a
    larger one is used but not kept."""

    def __init__(self, versions: RowVersions, build: Callable[[Rows], C], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._versions = versions
        self._build = build
        self._kept: OrderedDict[Key, tuple[Version, C]] = OrderedDict()
        self._lock = threading.Lock()
        self._builders: dict[Key, threading.Lock] = {}

    def at(self, key: Key, version: Version, read: Read) -> C:
        """The content of `key` at `version`; only one thread computes for a key at a time."""
        with self._builder(key):
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
        """After a definition: no version from before it is asked for again."""
        with self._lock:
            self._kept.clear()
            self._builders.clear()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(content.nbytes for _, content in self._kept.values())

    def _builder(self, key: Key) -> threading.Lock:
        with self._lock:
            return self._builders.setdefault(key, threading.Lock())

    def _keep(self, key: Key, version: Version, content: C) -> None:
        with self._lock:
            self._kept.pop(key, None)
            if content.nbytes > self.max_bytes:
                return
            self._kept[key] = version, content
            while sum(kept.nbytes for _, kept in self._kept.values()) > self.max_bytes:
                self._kept.popitem(last=False)
