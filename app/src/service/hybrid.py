"""Hybrid search: candidates by meaning, by words and by the numbers in their keys, blended into one ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.src.access.rows import seen
from app.src.service.single_flight_cache import Bounds, SingleFlightCache, key_of
from connector.model import CollectionStatus, Filter, Hit, IndexUse
from connector.stores.coverage import Coverage, content_words, coverage, parts_of
from connector.stores.ranking import Backdrop, blend, closeness, units
from connector.stores.scan.vector_scan import single_threaded
from connector.stores.store import VectorStore

SAMPLED = 2_000  # rows whose vectors show what a collection has in common
# Backdrops, by collection and row filter. One costs several searches, and a few more rows hardly change it.
REMEMBERED = Bounds(most=256, seconds=600.0, worth=50.0)
_NUMBERS = 2  # at most this many words of a search text are looked for in keys
_SHORTEST_NUMBER = 4


@dataclass(frozen=True, slots=True)
class RowFilter:
    """The rows to search: the caller's filter, `where`, among those that row rights leave visible, `within`."""

    where: Filter | None
    within: Filter | None


@dataclass(frozen=True, slots=True)
class Ranked:
    """`hits`, best first. `cosines`: of the chunk shown, by id, where known. `near`, `worded`: hits of each ranking,
    best first. `words`: those searched for. `keyed`: rows added by numbers in keys."""

    hits: list[Hit]
    cosines: dict[str, float] = field(default_factory=dict)
    near: list[Hit] = field(default_factory=list)
    worded: list[Hit] = field(default_factory=list)
    words: tuple[str, ...] = ()
    keyed: int = 0


def explanation(ranked: Ranked, hits: Sequence[Hit], ids: Sequence[str], index: IndexUse) -> dict[str, Any]:
    """Say how `hits`, named by `ids`, were found: the size of each ranking, and the place of each hit in it."""
    places = {
        name: {hit.id: {"rank": rank, "score": round(hit.score, 6)} for rank, hit in enumerate(ranking, 1)}
        for name, ranking in (("vector", ranked.near), ("keyword", ranked.worded))
    }
    return {
        "rankings": {"vector": len(ranked.near), "keyword": len(ranked.worded), "key": ranked.keyed},
        "words": list(ranked.words),
        "index": {"used": index.used, "detail": index.detail},
        "hits": [
            {
                "id": id_,
                "score": hit.score,
                "cosine": ranked.cosines.get(hit.id),
                **{name: found.get(hit.id) for name, found in places.items()},
            }
            for hit, id_ in zip(hits, ids, strict=True)
        ],
    }


class Hybrid:
    """Thread-safe. Remembers what the visible rows of a collection have in common."""

    def __init__(self) -> None:
        self._backdrops: SingleFlightCache[Backdrop | None] = SingleFlightCache(REMEMBERED)

    def search(
        self,
        store: VectorStore,
        stored: CollectionStatus,
        query: tuple[str, NDArray[np.float32]],
        depth: int,
        rows: RowFilter,
    ) -> Ranked:
        """`query`: the text and its vector. Raises as the store does."""
        (text, vector), serving = query, stored.generation
        name, where, within = stored.collection, rows.where, rows.within
        words = content_words(text)
        near = store.view(name, serving, within).search(vector, depth, where)
        worded = store.view(name, serving, within).keyword(" ".join(words), depth, where) if words else []
        near, worded = seen(near, within), seen(worded, within)
        chosen = {(hit.id, hit.number): hit for hit in (*near, *worded)}
        ids = {hit.id for hit in chosen.values()}
        keyed = [hit for hit in self._keyed(store, stored, words, depth, rows) if hit.id not in ids]
        candidates = [*chosen.values(), *keyed]
        if not candidates:
            return Ranked([], words=words)
        vectors = units(store.view(name, serving).vectors(candidates))
        backdrop = self._backdrop(store, stored, within)
        with single_threaded():
            close = closeness(vector, vectors, backdrop)
        share = Coverage(words)
        covered = [share.of(f"{hit.text} {hit.id}") for hit in candidates]
        hits = blend(candidates, close, covered)
        cosines = (vectors @ vector.astype(np.float64)).tolist()
        of_chunk = {(hit.id, hit.number): cosine for hit, cosine in zip(candidates, cosines, strict=True)}
        known = {hit.id: of_chunk[hit.id, hit.number] for hit in hits}
        return Ranked(hits, known, near, worded, words, len(keyed))

    def _keyed(
        self, store: VectorStore, stored: CollectionStatus, words: Sequence[str], count: int, rows: RowFilter
    ) -> list[Hit]:
        """Return rows whose key holds a word that looks like a number: users paste material numbers, which the template
        need not contain."""
        numbers = [word for word in words if _number(word)][:_NUMBERS]
        found: dict[str, Hit] = {}
        for word in numbers:
            for number in dict.fromkeys((_number(word), _number(word).upper())):
                view = store.view(stored.collection, stored.generation, rows.within)
                keyed = view.keyed(number, count, rows.where)
                for row in seen(keyed, rows.within):
                    if coverage((word,), parts_of(row.id)):
                        found.setdefault(row.id, row)
        return list(found.values())

    def _backdrop(self, store: VectorStore, stored: CollectionStatus, within: Filter | None) -> Backdrop | None:
        """Only of the visible rows: others would change every score."""

        def made() -> Backdrop | None:
            sample = store.view(stored.collection, stored.generation, within).sample(SAMPLED, texts=False).chosen
            vectors = units(store.view(stored.collection, stored.generation).vectors(seen(sample, within)))
            with single_threaded():
                return Backdrop.of(vectors[np.any(vectors != 0, axis=1)])

        # None: too few rows, and another process may be filling the collection.
        return self._backdrops.get(key_of(stored, within), made, lasts=lambda backdrop: backdrop is not None)

    def changed(self, name: str) -> None:
        """The collection was written to."""
        self._backdrops.changed(name)


def _number(word: str) -> str:
    """Return the longest part of a word that has a digit and may be a number in a key, or ""."""
    parts = [part for part in word.split() if len(part) >= _SHORTEST_NUMBER and any(map(str.isdigit, part))]
    return max(parts, key=len, default="")
