"""A cache of what filters kept, for the searches of many callers who may see different rows."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from connector.stores import filters

FILTERS = 512

T = TypeVar("T")


class FilterCache(Generic[T]):
    """Keeps the values used last: at most FILTERS, with at most as many rows in total as `put` allows. Thread-safe."""

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
        """Return a short key: a filter may have megabytes of values."""
        return hashlib.sha256(repr((collection, compiled.sql, compiled.parameters)).encode()).digest()

    def get(self, key: bytes) -> T | None:
        with self._lock:
            if key in self._values:
                self._values[key] = self._values.pop(key)
            return self._values.get(key)

    def put(self, key: bytes, value: T, most_rows: int) -> None:
        """Store a value and drop the least recently used ones; this one stays whatever its size."""
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
