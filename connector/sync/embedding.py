"""Embed texts for a run: each distinct text once, except those that the engine rejects."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from connector.errors import TextsNotEmbeddable
from connector.model import Vector, VectorCache, Vectors
from connector.protocols import Embedder
from connector.stores.records import UNIT_TOLERANCE
from connector.sync.options import StageClock


class TextEmbedder:
    """Embeds texts and caches their vectors for one run. Counts `embedded` and `reused` texts, and the `tokens` of the
    embedded ones; the writer counts those that the database embeds. Thread-safe; calls at the same time may embed the
    same text twice."""

    def __init__(self, embedder: Embedder, clock: StageClock) -> None:
        self._embedder = embedder
        self._clock = clock
        self._cache = VectorCache()
        self._lock = threading.Lock()  # of the cache and the counts
        self.embedded = self.reused = self.tokens = 0

    def __call__(self, texts: Sequence[str]) -> tuple[Vectors | None, list[bool]]:
        """Return the vectors of the texts, and for each text whether its vector is finite and of length 1. If not, the
        engine gave no such vector, and the row has no meaning. None: the database embeds the texts when they are
        written, each of them.

        Raises infrastructure errors. Raises TextsNotEmbeddable if the engine gives no vector for any new text, nor for
        a plain word: then the engine is at fault.
        """
        if self._embedder.database_model is not None:
            return None, [True] * len(texts)
        keys = list(map(VectorCache.key, texts))
        fresh = dict(zip(keys, texts, strict=True))
        with self._lock:
            known = {key: cached for key in fresh if (cached := self._cache.get(key)) is not None}
        for key in known:
            del fresh[key]
        embedded: dict[bytes, Vector] = {}
        tokens: Sequence[int] = ()
        vectors = np.empty((0, self._embedder.dimension), np.float32)
        left = fresh
        with self._clock("embed"):
            while left:
                try:
                    vectors, tokens = self._embedder.embed_counted(list(left.values()))
                except TextsNotEmbeddable as error:
                    bad = set(error.indices)
                    good = {key: text for place, (key, text) in enumerate(left.items()) if place not in bad}
                    if len(good) == len(left):
                        raise
                    left = good
                    continue
                if vectors.shape != (len(left), self._embedder.dimension):
                    raise ValueError(f"the engine gave vectors of shape {vectors.shape} for {len(left)} texts")
                sound = zip(left, vectors, _are_units(vectors), strict=True)
                embedded = {key: vector for key, vector, unit in sound if unit}
                break
        if fresh and not embedded:
            self._check_engine(len(fresh))
        with self._lock:
            for key, vector in embedded.items():
                self._cache.put(key, vector.copy())  # copy: a view would keep the whole window's matrix in memory
            self.embedded += len(embedded)
            self.reused += len(texts) - len(fresh)
            self.tokens += sum(tokens)
        if len(embedded) == len(keys):  # the usual case: the texts are distinct and new
            return vectors, [True] * len(keys)
        known |= embedded
        found = np.empty((len(keys), self._embedder.dimension), np.float32)
        for place, key in enumerate(keys):
            if key in known:
                found[place] = known[key]
        return found, [key in known for key in keys]

    def _check_engine(self, count: int) -> None:
        """Raise TextsNotEmbeddable unless the engine, which gave no vector to `count` texts, embeds a plain word."""
        try:
            # Embed it as a document: query vectors may come from a cache filled before the engine failed.
            healthy = all(_are_units(self._embedder.embed_documents(["a plain word"])))
        except TextsNotEmbeddable:
            healthy = False
        if not healthy:
            raise TextsNotEmbeddable(
                f"the model gave no finite vector to any of {count} texts, nor to a plain word; no row was "
                "quarantined. Check the device and the precision: owl-sap doctor",
                indices=range(count),
            )


def _are_units(vectors: Vectors) -> list[bool]:
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    units: list[bool] = (np.abs(lengths - 1.0) <= UNIT_TOLERANCE).tolist()  # `<=` is false for NaN
    return units
