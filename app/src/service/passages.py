"""The passages of hits: which chunks of a row answer, best first. Knows the store, no engine and no configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from app.src.access.rows import seen
from connector.model import CollectionStatus, Filter, Hit, StoredText
from connector.stores.coverage import Coverage, asked_words
from connector.stores.ranking import units
from connector.stores.store import VectorStore

MOST = 20
"""Passages of one hit."""
PORTION = 20
"""Hits whose chunks are looked at together: rows may be long, and all of each is read with its vectors."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk of a row. `score`: its cosine with the search text; in mode keyword the share of the words it holds.
    `chunk` counts from 0."""

    text: str
    score: float
    chunk: int


@dataclass(frozen=True)
class Sought:
    """What passages are compared with: the vector, or where there is none (mode keyword) the words."""

    text: str
    vector: NDArray[np.float32] | None
    count: int

    @cached_property
    def share(self) -> Coverage:
        """Of the words, for one thread."""
        return Coverage(asked_words(self.text))


def of_hits(
    store: VectorStore, stored: CollectionStatus, hits: Sequence[Hit], sought: Sought, within: Filter | None
) -> list[list[Passage]]:
    """Of each hit up to `count` passages: the chunk that was found first, then its others as they score; in mode
    keyword only those with a word. A row that is gone meanwhile has the one that was found. Raises as the store."""
    return [
        best
        for start in range(0, len(hits), PORTION)
        for best in _of_some(store, stored, hits[start : start + PORTION], sought, within)
    ]


def _of_some(
    store: VectorStore, stored: CollectionStatus, hits: Sequence[Hit], sought: Sought, within: Filter | None
) -> list[list[Passage]]:
    chunks = seen(store.view(stored.collection, stored.generation, within).texts([hit.id for hit in hits]), within)
    of_row: dict[str, list[Passage]] = {}
    for chunk, score in zip(chunks, _scores(store, stored, chunks, sought), strict=True):
        of_row.setdefault(chunk.id, []).append(Passage(chunk.text, score, chunk.number))
    own = _scores(store, stored, hits, sought)
    return [
        _best(Passage(hit.text, score, hit.number), of_row.get(hit.id, []), sought)
        for hit, score in zip(hits, own, strict=True)
    ]


def _best(found: Passage, others: Sequence[Passage], sought: Sought) -> list[Passage]:
    rest = [each for each in others if each.chunk != found.chunk and (sought.vector is not None or each.score > 0)]
    rest.sort(key=lambda each: (-each.score, each.chunk))
    return [found, *rest][: sought.count]


def _scores(
    store: VectorStore, stored: CollectionStatus, chunks: Sequence[Hit] | Sequence[StoredText], sought: Sought
) -> list[float]:
    if not chunks:
        return []
    if sought.vector is None:
        return [round(sought.share.of(chunk.text), 6) for chunk in chunks]
    vectors = units(store.view(stored.collection, stored.generation).vectors(chunks))
    cosines: list[float] = (vectors @ sought.vector.astype(np.float64)).tolist()
    return cosines
