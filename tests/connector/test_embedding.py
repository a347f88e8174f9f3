"""The vectors that a run remembers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from connector.model import VectorCache
from connector.sync.embedding import TextEmbedder
from connector.sync.options import StageClock
from tests.connector.conftest import WordEmbedder


class Meeting(WordEmbedder):
    """Computes nothing before two calls came."""

    def __init__(self):
        super().__init__()
        self.together = threading.Barrier(2)

    def embed_counted(self, texts):
        self.together.wait(60)
        return super().embed_counted(texts)


def test_two_calls_at_a_time_share_the_cache_and_the_counts():
    embed = TextEmbedder(Meeting(), StageClock())
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(embed, [["oil pump", "seal"], ["valve of steel", "seal"]])
    assert (embed.embedded, embed.reused, embed.tokens) == (4, 0, 7)
    assert np.array_equal(first[0][1], second[0][1])
    # This computes nothing, or it would wait for a second call.
    vectors, sound = embed(["valve of steel", "oil pump", "seal"])
    assert sound == [True] * 3
    assert np.array_equal(vectors, [second[0][0], first[0][0], first[0][1]])
    assert (embed.embedded, embed.reused) == (4, 3)


def test_the_cache_is_bounded_by_what_it_really_needs():
    """Vectors of 8 numbers take 32 bytes, and Python several times that to hold one."""
    cache = VectorCache(max_bytes=100_000)
    keys = [VectorCache.key(str(number)) for number in range(1000)]
    for key in keys:
        cache.put(key, np.ones(8, np.float32))
    kept = [key for key in keys if cache.get(key) is not None]
    assert kept == keys[-len(kept) :]
    assert 300 <= len(kept) <= 400
