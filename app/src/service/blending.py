"""Hybrid search: candidates near in meaning, with the words, and by the number in their key; blended into one ranking.
Knows the store, no engine and no configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.src.access.rows import seen
from app.src.service.single_flight_cache import Bounds, Remembered, seen_of
from connector.errors import WordsNotSearchable
from connector.model import CollectionStatus, Filter, Hit, IndexUse
from connector.stores.coverage import Coverage, content_words, coverage, parts_of
from connector.stores.ranking import Backdrop, blend, closeness, units
from connector.stores.scan.vector_scan import single_threaded
from connector.stores.store import VectorStore

SAMPLED = 2_000
"""Rows whose vectors tell what a collection has in common."""
REMEMBERED = Bounds(most=256, seconds=600.0, worth=50.0)
"""Backdrops, of collections and of what may be seen of them. One costs several times what a search does, and a few more
rows hardly change it."""
_NUMBERS = 2
"""Words of a search text that are looked for in keys, at most."""
_SHORTEST_NUMBER = 4


@dataclass(frozen=True, slots=True)
class Narrow:
    """Which rows take part, as `VectorStore.search` has it."""

    where: Filter | None
    within: Filter | None


@dataclass(frozen=True, slots=True)
class Ranked:
    """`hits` best first. `cosines` by id, of the chunk shown, as far as they are known; `near` and `worded`: what each
    ranking found, best first; `words` that were looked for; `keyed`: how many rows the numbers in keys added; `note`:
    why words were not looked for."""

    hits: list[Hit]
    cosines: dict[str, float] = field(default_factory=dict)
    near: list[Hit] = field(default_factory=list)
    worded: list[Hit] = field(default_factory=list)
    words: tuple[str, ...] = ()
    keyed: int = 0
    note: str | None = None


def explanation(ranked: Ranked, hits: Sequence[Hit], ids: Sequence[str], index: IndexUse) -> dict[str, Any]:
    """How `hits` were found, named by `ids`: what each ranking gave, and where each hit stood in it."""
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


class Blending:
    """Thread-safe. What the rows that somebody may see have in common is remembered within REMEMBERED."""

    def __init__(self) -> None:
        self._backdrops: Remembered[Backdrop | None] = Remembered(REMEMBERED)

    def hybrid(
        self,
        store: VectorStore,
        stored: CollectionStatus,
        query: tuple[str, NDArray[np.float32]],
        depth: int,
        narrow: Narrow,
    ) -> Ranked:
        """`query`: the text and its vector. A store that cannot look for words gives the rows nearest in meaning, and a
        note. Raises as the store does."""
        (text, vector), serving = query, stored.generation
        name, where, within = stored.collection, narrow.where, narrow.within
        words = content_words(text)
        near = store.view(name, serving, within).search(vector, depth, where)
        worded: list[Hit] = []
        note: str | None = None
        try:
            worded = store.view(name, serving, within).keyword(" ".join(words), depth, where) if words else []
        except WordsNotSearchable as error:
            note = f"the hits were found by meaning alone: {error}"
        near, worded = seen(near, within), seen(worded, within)
        chosen = {(hit.id, hit.number): hit for hit in (*near, *worded)}
        ids = {hit.id for hit in chosen.values()}
        keyed = [hit for hit in self._keyed(store, stored, words, depth, narrow) if hit.id not in ids]
        candidates = [*chosen.values(), *keyed]
        if not candidates:
            return Ranked([], words=words, note=note)
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
        return Ranked(hits, known, near, worded, words, len(keyed), note)

    def _keyed(
        self, store: VectorStore, stored: CollectionStatus, words: Sequence[str], count: int, narrow: Narrow
    ) -> list[Hit]:
        """Rows whose key holds one of the words that look like a number: people paste numbers of materials, and no
        template needs to name them."""
        numbers = [word for word in words if _number(word)][:_NUMBERS]
        found: dict[str, Hit] = {}
        for word in numbers:
            for number in dict.fromkeys((_number(word), _number(word).upper())):
                view = store.view(stored.collection, stored.generation, narrow.within)
                rows = view.keyed(number, count, narrow.where)
                for row in seen(rows, narrow.within):
                    if coverage((word,), parts_of(row.id)):
                        found.setdefault(row.id, row)
        return list(found.values())

    def _backdrop(self, store: VectorStore, stored: CollectionStatus, within: Filter | None) -> Backdrop | None:
        """Of the rows that may be seen: others would move every score."""

        def made() -> Backdrop | None:
            sample = store.view(stored.collection, stored.generation, within).sample(SAMPLED, texts=False).chosen
            vectors = units(store.view(stored.collection, stored.generation).vectors(seen(sample, within)))
            with single_threaded():
                return Backdrop.of(vectors[np.any(vectors != 0, axis=1)])

        # None is of few rows, and another process may be filling the collection.
        return self._backdrops.get(seen_of(stored, within), made, lasts=lambda backdrop: backdrop is not None)

    def written(self, name: str) -> None:
        """Its rows have changed."""
        self._backdrops.written(name)


def _number(word: str) -> str:
    """What of a word may be looked for as a number in keys: the longest part with a digit, or nothing."""
    parts = [part for part in word.split() if len(part) >= _SHORTEST_NUMBER and any(map(str.isdigit, part))]
    return max(parts, key=len, default="")
