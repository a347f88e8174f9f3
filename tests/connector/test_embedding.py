"""The vectors that a run remembers."""

from __future__ import annotations

import numpy as np

from connector.model import VectorCache


def test_the_cache_is_bounded_by_what_it_really_needs():
    """Vectors of 8 numbers take 32 bytes, and Python several times that to hold one."""
    cache = VectorCache(max_bytes=100_000)
    keys = [VectorCache.key(str(number)) for number in range(1000)]
    for key in keys:
        cache.put(key, np.ones(8, np.float32))
    kept = [key for key in keys if cache.get(key) is not None]
    assert kept == keys[-len(kept) :]
    assert 300 <= len(kept) <= 400
