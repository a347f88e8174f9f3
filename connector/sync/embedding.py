"""Texts of chunks in, vectors out: each distinct text once, those the engine refuses left out. Knows the protocols of
`model.py` only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from connector.errors import TextsNotEmbeddable
from connector.model import Vectors
from connector.protocols import Embedder
from connector.stores.records import UNIT_TOLERANCE
from connector.sync.clock import StageClock

Vector = NDArray[np.float32]
_ENTRY_BYTES = 256
"""What Python needs for one cached vector beside its numbers: array, key, place in the table (measured, rounded up)."""
_PROBE = "a plain word"


class VectorCache:
    """Vectors by text; bounded in bytes, the least recently used out first. Not thread-safe."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()
        self._max_bytes = max_bytes
        self.bytes = 0

    @staticmethod
    def key(text: str) -> bytes:
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def get(self, key: bytes) -> Vector | None:
        vector = self._vectors.get(key)
        if vector is not None:
            self._vectors.move_to_end(key)
        return vector

    def put(self, key: bytes, vector: Vector) -> None:
        self._forget(self._vectors.pop(key, None))
        self._vectors[key] = vector
        self.bytes += vector.nbytes + _ENTRY_BYTES
        while self.bytes > self._max_bytes:
            self._forget(self._vectors.popitem(last=False)[1])

    def clear(self) -> None:
        self._vectors.clear()
        self.bytes = 0

    def _forget(self, vector: Vector | None) -> None:
        if vector is not None:
            self.bytes -= vector.nbytes + _ENTRY_BYTES


@dataclass(slots=True)
class Embedded:
    """`vectors` by `VectorCache.key` of the text; a text without a finite vector of length 1 is missing. `tokens`: of
    what the engine gave vectors for."""

    vectors: dict[bytes, Vector] = field(default_factory=dict)
    embedded_texts: int = 0
    reused_texts: int = 0
    tokens: int = 0


class TextEmbedder:
    """One per run: the cache of vectors lives as long as it does."""

    def __init__(self, embedder: Embedder, clock: StageClock) -> None:
        self._embedder = embedder
        self._clock = clock
        self._cache = VectorCache()

    def __call__(self, texts: Sequence[str]) -> Embedded:
        """Infrastructure errors are raised, and so is TextsNotEmbeddable when the engine gives no vector to anything,
        not even to a plain word: then it is ill, not the texts."""
        known: dict[bytes, Vector] = {}
        fresh: dict[bytes, str] = {}
        for text in texts:
            key = VectorCache.key(text)
            cached = self._cache.get(key)
            if cached is not None:
                known[key] = cached
            else:
                fresh.setdefault(key, text)
        embedded, tokens = self._embed(fresh)
        if fresh and not embedded:
            self._check_engine(len(fresh))
        for key, vector in embedded.items():
            self._cache.put(key, vector.copy())  # a row of a window's matrix would keep all of that
        return Embedded(known | embedded, len(embedded), len(texts) - len(fresh), tokens)

    def _embed(self, fresh: dict[bytes, str]) -> tuple[dict[bytes, Vector], int]:
        if not fresh:
            return {}, 0
        with self._clock("embed", len(fresh)):
            while fresh:
                try:
                    vectors, tokens = self._embedder.embed_counted(list(fresh.values()))
                    return self._sound(fresh, vectors), sum(tokens)
                except TextsNotEmbeddable as error:
                    bad = set(error.indices)
                    good = {key: text for i, (key, text) in enumerate(fresh.items()) if i not in bad}
                    if len(good) == len(fresh):
                        raise
                    fresh = good
        return {}, 0

    def _sound(self, fresh: dict[bytes, str], vectors: Vectors) -> dict[bytes, Vector]:
        """The store would refuse the others, and with them whatever is written together with them."""
        if vectors.shape != (len(fresh), self._embedder.dimension):
            raise ValueError(f"the engine gave vectors of shape {vectors.shape} for {len(fresh)} texts")
        whole = _are_units(vectors)
        return {key: vector for key, vector, sound in zip(fresh, vectors, whole, strict=True) if sound}

    def _check_engine(self, count: int) -> None:
        try:
            # Not as a query: that may be remembered from when the engine was well.
            healthy = all(_are_units(self._embedder.embed_documents([_PROBE])))
        except TextsNotEmbeddable:
            healthy = False
        if not healthy:
            raise TextsNotEmbeddable(
                f"the model gives no finite vector to any of {count} texts, nor to a plain word; no row goes to "
                "quarantine. Check the device and the precision: owl-sap doctor",
                indices=range(count),
            )


def _are_units(vectors: Vectors) -> list[bool]:
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    return [bool(near) for near in np.abs(lengths - 1.0) <= UNIT_TOLERANCE]  # a NaN length is not <= anything
