"""Cached vectors of search texts: bounded in bytes, thread-safe, one cache for each model. It contains no texts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from app.src.observe.metrics import Metrics
from connector.sync.embedding import VectorCache


class QueryCache:
    """Text -> vector, evicting the least recently used. With 0 bytes it stores nothing."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self._cache = VectorCache(max_bytes)
        self._metrics = metrics
        self._lock = threading.Lock()

    def get(self, text: str, compute: Callable[[], NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the vector; `compute` is called for an unknown text, and its errors are not cached."""
        key = VectorCache.key(text)
        with self._lock:
            known = self._cache.get(key)
        self._metrics.query_cache.labels("miss" if known is None else "hit").inc()
        if known is not None:
            return known.copy()
        vector = compute().copy()
        with self._lock:
            before = self._cache.bytes
            self._cache.put(key, vector)
            self._metrics.query_cache_bytes.inc(self._cache.bytes - before)
        return vector.copy()

    def holds(self, text: str) -> bool:
        with self._lock:
            return self._cache.get(VectorCache.key(text)) is not None

    def clear(self) -> None:
        with self._lock:
            self._metrics.query_cache_bytes.dec(self._cache.bytes)
            self._cache.clear()
