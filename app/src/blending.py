"""Hybrid search: candidates near in meaning, with the words, and by the number in their key; blended into one ranking.
Knows the store, no engine and no configuration.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.src.access.rows import seen
from connector.coverage import content_words, coverage, parts_of
from connector.model import CollectionStatus, Filter, Hit, IndexUse
from connector.protocols import VectorStore
from connector.ranking import Backdrop, blend, closeness, units

SAMPLED = 2_000
"""Rows whose vectors tell what a collection has in common."""
REMEMBERED_SECONDS = 600.0
REMEMBERED = 256
"""Backdrops, of collections and of what may be seen of them."""
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
    ranking found, best first; `words` that were looked for; `keyed`: how many rows the numbers in keys added."""

    hits: list[Hit]
    cosines: dict[str, float] = field(default_factory=dict)
    near: list[Hit] = field(default_factory=list)
    worded: list[Hit] = field(default_factory=list)
    words: tuple[str, ...] = ()
    keyed: int = 0


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


_Seen = tuple[str, int, str]
"""A collection, its generation, and which of its rows may be seen."""


class Blending:
    """Thread-safe. What the rows that somebody may see have in common is remembered for ten minutes, unless they
    change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backdrops: dict[_Seen, tuple[float, Backdrop | None]] = {}
        self._making: defaultdict[_Seen, threading.Lock] = defaultdict(threading.Lock)
        self._forgotten: Counter[str] = Counter()

    def hybrid(
        self,
        store: VectorStore,
        stored: CollectionStatus,
        query: tuple[str, NDArray[np.float32]],
        depth: int,
        narrow: Narrow,
    ) -> Ranked:
        """`query`: the text and its vector. Raises as the store does."""
        (text, vector), serving = query, stored.generation
        name, where, within = stored.collection, narrow.where, narrow.within
        words = content_words(text)
        near = store.search(name, vector, depth, where, serving, within)
        worded = store.keyword(name, " ".join(words), depth, where, serving, within) if words else []
        near, worded = seen(near, within), seen(worded, within)
        chosen = {(hit.id, hit.number): hit for hit in (*near, *worded)}
        ids = {hit.id for hit in chosen.values()}
        keyed = [hit for hit in self._keyed(store, stored, words, depth, narrow) if hit.id not in ids]
        candidates = [*chosen.values(), *keyed]
        if not candidates:
            return Ranked([], words=words)
        vectors = units(store.vectors(name, candidates, serving))
        close = closeness(vector, vectors, self._backdrop(store, stored, within))
        covered = [coverage(words, parts_of(f"{hit.text} {hit.id}")) for hit in candidates]
        hits = blend(candidates, close, covered)
        cosines = (vectors @ vector.astype(np.float64)).tolist()
        of_chunk = {(hit.id, hit.number): cosine for hit, cosine in zip(candidates, cosines, strict=True)}
        known = {hit.id: of_chunk[hit.id, hit.number] for hit in hits}
        return Ranked(hits, known, near, worded, words, len(keyed))

    def _keyed(
        self, store: VectorStore, stored: CollectionStatus, words: Sequence[str], count: int, narrow: Narrow
    ) -> list[Hit]:
        """Rows whose key holds one of the words that look like a number: people paste numbers of materials, and no
        template needs to name them."""
        numbers = [word for word in words if _number(word)][:_NUMBERS]
        found: dict[str, Hit] = {}
        for word in numbers:
            for number in dict.fromkeys((_number(word), _number(word).upper())):
                rows = store.keyed(stored.collection, number, count, narrow.where, stored.generation, narrow.within)
                for row in seen(rows, narrow.within):
                    if coverage((word,), parts_of(row.id)):
                        found.setdefault(row.id, row)
        return list(found.values())

    def _backdrop(self, store: VectorStore, stored: CollectionStatus, within: Filter | None) -> Backdrop | None:
        """Of the rows that may be seen: others would move every score. Who asks for another one does not wait."""
        key = (stored.collection, stored.generation, json.dumps(within, sort_keys=True))
        with self._lock:
            making, forgotten = self._making[key], self._forgotten[stored.collection]
        with making:
            asked, known = self._backdrops.get(key, (-REMEMBERED_SECONDS, None))
            if time.monotonic() - asked < REMEMBERED_SECONDS:
                return known
            sample = store.sample(stored.collection, SAMPLED, stored.generation, within, texts=False).chosen
            vectors = units(store.vectors(stored.collection, seen(sample, within), stored.generation))
            known = Backdrop.of(vectors[np.any(vectors != 0, axis=1)])
            with self._lock:
                if forgotten == self._forgotten[stored.collection]:
                    self._remember(key, known)
            return known

    def _remember(self, key: _Seen, known: Backdrop | None) -> None:
        self._backdrops.pop(key, None)
        self._backdrops[key] = time.monotonic(), known
        for oldest in list(self._backdrops)[:-REMEMBERED]:
            del self._backdrops[oldest]
            self._making.pop(oldest, None)

    def forget(self, name: str) -> None:
        """Its rows have changed."""
        with self._lock:
            self._forgotten[name] += 1
            for key in [key for key in self._backdrops if key[0] == name]:
                del self._backdrops[key]
                self._making.pop(key, None)


def _number(word: str) -> str:
    """What of a word may be looked for as a number in keys: the longest part with a digit, or nothing."""
    parts = [part for part in word.split() if len(part) >= _SHORTEST_NUMBER and any(map(str.isdigit, part))]
    return max(parts, key=len, default="")
