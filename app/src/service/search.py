"""Search as every surface offers it: by meaning, by words or by both, narrowed and spread, with keys by column name.
Knows the parts, no HTTP and no terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from app.src.access.rows import Nothing
from app.src.access.rows import seen as _seen
from app.src.observe.metrics import Metrics
from app.src.service import passages
from app.src.service.blending import Blending, Narrow, Ranked, explanation
from app.src.service.passages import Passage, Sought
from app.src.service.rerank import Reranked, Reranker
from app.src.service.serving import in_one_generation
from app.src.service.wiring import EngineEmbedder, Parts
from connector.errors import ConfigurationError, DatabaseError, UnknownCollection, UnknownRow
from connector.model import CollectionSpec, CollectionStatus, Filter, Hit, Vectors

Mode = Literal["vector", "keyword", "hybrid"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEEP, DEEPEST = 50, 4000
"""Hits of each ranking that fusion and MMR choose from: four times `k`, within these bounds."""
_CANCELLED = 1e-6
"""Length of the mean of unit vectors that point to opposite sides: its direction is chance."""
_STATUS_SECONDS = 5.0
"""How long search remembers which model a collection was made with: asking counts its rows."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search. `min_score`: hits below it are left out, by their score in the modes vector and keyword, by their
    cosine in hybrid, whose scores say nothing about how good a hit is. `mmr_lambda` from 0 to 1: choose hits that
    differ from each other (`connector.stores.ranking.mmr`) among the best `depth`; None or 1: the best ones.
    `mode` None: hybrid for a text, vector for a vector or a row.
    `passages`: so many chunks of each hit (1: its `text` is the best one). `explain`: say how the hits were found.
    `rerank`: whether the configured reranker puts them in order; None: where there is one and the query is a text.

    Raises ValueError for what is no mode and out of range.
    """

    mode: Mode | None = None
    min_score: float | None = None
    mmr_lambda: float | None = None
    depth: int | None = None
    """Hits of each ranking that hybrid and MMR choose from, at least `k`, at most DEEPEST; None: by DEEP."""
    passages: int = 1
    explain: bool = False
    rerank: bool | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise ValueError(f'there is no search mode "{self.mode}"; there are: {", ".join(MODES)}')
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise ValueError("min_score must be a finite number")
        if self.mmr_lambda is not None and not 0 <= self.mmr_lambda <= 1:
            raise ValueError(
                f"mmr_lambda is {self.mmr_lambda:g}; it must be from 0 (most diverse) to 1 (most relevant)"
            )
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth is {self.depth}; it must be at least 1")
        if not 1 <= self.passages <= passages.MOST:
            raise ValueError(f"passages is {self.passages}; it must be from 1 to {passages.MOST}")


@dataclass(frozen=True, slots=True)
class Like:
    """Rows like the one with this id, which is no hit itself: by the mean of its chunks' vectors, made as long as one
    again. For unit vectors that is the direction whose cosines with all of them have the largest sum."""

    id: str


Asked = str | Sequence[float] | Like
"""What is looked for: a text, a vector, or what a row is like."""


def mode_of(query: Asked, mode: Mode | None) -> Mode:
    """`mode`, or the default: hybrid for a text, vector for a vector or a row."""
    return mode or ("hybrid" if isinstance(query, str) else "vector")


@dataclass(frozen=True, slots=True)
class FoundHit:
    """A search result as users see it: `key` by column name; {} for a row that others wrote."""

    id: str
    key: Mapping[str, Any]
    score: float
    text: str
    metadata: Mapping[str, Any]
    passages: list[Passage] | None = None
    """The one found first; None unless several were asked for."""

    def as_dict(self) -> dict[str, Any]:
        shown = asdict(self)
        return shown if self.passages is not None else {name: shown[name] for name in shown if name != "passages"}


@dataclass(frozen=True, slots=True)
class Found:
    """Hits, best first (with MMR: in the order chosen), how long each stage took in milliseconds, and what the asker
    may have overlooked. `stale_since`: UTC time since when rows may have changed unseen; None while syncs get through.
    `rows`: how many of the collection's rows the asker may see.
    """

    hits: list[FoundHit]
    took_ms: dict[str, float]
    notes: list[str] = field(default_factory=list)
    stale_since: str | None = None
    rows: Literal["all", "some", "none"] = "all"
    explain: dict[str, Any] | None = None
    """How the hits were found, where that was asked for."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Which rows a search is about: of those that the asker may see (`within`, as `access.rows.visible` says) those
    that `where` holds for."""

    where: Filter | None
    within: Filter | Nothing | None

    @property
    def rows(self) -> Filter | None:
        """`within`, where it is not Nothing. Raises ValueError there: no filter says that."""
        if isinstance(self.within, Nothing):
            raise ValueError("nothing may be seen, so nothing is to be searched")
        return self.within


class _Stages:
    """How long each stage took, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Searching:
    """Thread-safe. `stored` says what a collection holds, None when it was never synced; `embedder` which model the
    queries to that are embedded by."""

    def __init__(
        self,
        parts: Parts,
        metrics: Metrics,
        stored: Callable[[str], CollectionStatus | None],
        embedder: Callable[[CollectionStatus], EngineEmbedder],
        reranking: Reranker,
    ) -> None:
        self._parts = parts
        self._reranking = reranking
        self._metrics = metrics
        self._stored = stored
        self._embedder_for = embedder
        self._blending = Blending()
        self._known: dict[str, tuple[float, CollectionStatus]] = {}
        self._embedders: dict[str, tuple[tuple[int, str], EngineEmbedder]] = {}

    def forget(self, name: str) -> None:
        """Another generation may serve."""
        self._known.pop(name, None)

    def written(self, name: str) -> None:
        """Its rows have changed."""
        self.forget(name)
        self._blending.written(name)

    def search(
        self,
        spec: CollectionSpec,
        query: Asked,
        k: int,
        narrowed: Narrowed,
        options: SearchOptions,
    ) -> Found:
        """Raises as `Service.search` does."""
        if isinstance(query, str) and not query.strip():
            raise ValueError("the search text is empty")
        mode = mode_of(query, options.mode)
        if not isinstance(query, str) and mode != "vector":
            given = "the id of a row" if isinstance(query, Like) else "a vector"
            raise ValueError(f"mode {mode} searches words: give a text as the query, not {given}")
        reranks = self._reranks(query, options)
        if self.never_written(spec):
            if isinstance(query, Like):
                raise _no_row(spec.name)
            return Found([], {}, ["the collection is still empty: it was not synced or written to yet"])
        if isinstance(narrowed.within, Nothing):
            if isinstance(query, Like):
                raise _no_row(spec.name)
            notes = _notes(spec, narrowed.where, query, mode, True)  # a wrong filter is wrong for everybody
            return Found([], {}, [narrowed.within.why, *notes], rows="none")
        if isinstance(query, Like):
            query = _stored(spec, query)
        asked, wanted = query, replace(options, mode=mode, rerank=reranks)
        return in_one_generation(
            self, spec.name, lambda stored: self._searched(spec, stored, asked, k, narrowed, wanted)
        )

    def check_room(self, name: str, text: str) -> None:
        """Raises EngineOverloaded where a search by the meaning of `text` would, as far as that is known: for who would
        have to wait until he may search. Takes no time."""
        known = self._embedders.get(name)
        if known is not None:
            known[1].check_query(text)

    def _reranks(self, query: Asked, options: SearchOptions) -> bool:
        if options.rerank and not self._reranking.on:
            raise ValueError("no reranker is configured: set [search] rerank (docs/search.md)")
        if options.rerank and not isinstance(query, str):
            raise ValueError("reranking needs a text as the query: give one, or leave rerank out")
        return self._reranking.on and isinstance(query, str) and options.rerank is not False

    def _searched(
        self,
        spec: CollectionSpec,
        stored: CollectionStatus,
        query: Asked,
        k: int,
        narrowed: Narrowed,
        options: SearchOptions,
    ) -> Found:
        """Raises GenerationChanged when another than `stored` takes over."""
        stages, vector, mode = _Stages(), None, mode_of(query, options.mode)
        if mode != "keyword":
            with stages.timed("embed"):
                vector = self._query_vector(query, stored, narrowed)
        spread = options.mmr_lambda is not None and options.mmr_lambda < 1
        depth = max(k, min(options.depth or max(DEEP, 4 * k), DEEPEST)) if spread or mode == "hybrid" else k
        if options.rerank:
            depth = max(depth, self._reranking.settings.rerank_depth)
        itself = query.id if isinstance(query, Like) else None
        with stages.timed("store"):
            ranked = self._ranked(stored, query, vector, depth + (itself is not None), narrowed, options)
            hits = [hit for hit in ranked.hits if hit.id != itself]
        candidates = len(hits)
        reranked = self._reranked(stored, query, hits, options, stages)
        hits = reranked.hits
        if spread:
            with stages.timed("rank"):
                hits = self._spread(stored, reranked, k, options)
        columns, texts = self.key_columns(spec, stored), None
        if options.passages > 1:
            with stages.timed("passages"):
                sought = Sought(query if isinstance(query, str) else "", vector, options.passages)
                texts = passages.of_hits(self._parts.store, stored, hits[:k], sought, narrowed.rows)
        found = [
            _found(hit, columns, spec, None if texts is None else texts[place]) for place, hit in enumerate(hits[:k])
        ]
        for stage, seconds in stages.seconds.items():
            self._metrics.search_seconds.labels(spec.name, stage).observe(seconds)
        took = {stage: round(seconds * 1000, 3) for stage, seconds in stages.seconds.items()}
        explained = None
        if options.explain:
            index = self._parts.store.view(spec.name, stored.generation, narrowed.rows).index_use(depth, narrowed.where)
            explained = explanation(ranked, hits[:k], [hit.id for hit in found], index)
            explained |= {"mode": mode, "stages": took, "candidates": candidates}
            explained["reranker"] = self._told(reranked, hits[:k], [hit.id for hit in found], options)
        return Found(
            found,
            took,
            [
                *_notes(spec, narrowed.where, query, mode, bool(hits)),
                *self._cut(query, stored, mode),
                *(note for note in (ranked.note, reranked.note) if note is not None),
            ],
            rows="all" if narrowed.within is None else "some",
            explain=explained,
        )

    # --------------------------------------------------------------------------------------------------- the rankings

    def _ranked(
        self,
        stored: CollectionStatus,
        query: Asked,
        vector: NDArray[np.float32] | None,
        depth: int,
        narrowed: Narrowed,
        options: SearchOptions,
    ) -> Ranked:
        """Up to `depth` hits of the mode, best first, none below the smallest score; hybrid has more."""
        store, least = self._parts.store, options.min_score
        name, serving = stored.collection, stored.generation
        where, within = narrowed.where, narrowed.rows
        if options.mode == "hybrid" and vector is not None:
            ranked = self._blending.hybrid(store, stored, (str(query), vector), depth, Narrow(where, within))
            if least is None:
                return ranked
            return replace(ranked, hits=[hit for hit in ranked.hits if ranked.cosines[hit.id] >= least])
        near = [] if vector is None else store.view(name, serving, within).search(vector, depth, where)
        worded = [] if options.mode == "vector" else store.view(name, serving, within).keyword(str(query), depth, where)
        near, worded = _seen(near, within), _seen(worded, within)
        return Ranked([hit for hit in near or worded if least is None or hit.score >= least], {}, near, worded)

    def _vectors(self, stored: CollectionStatus, hits: Sequence[Hit]) -> Vectors:
        return self._parts.store.view(stored.collection, stored.generation).vectors(hits)

    def _reranked(
        self, stored: CollectionStatus, query: Asked, hits: list[Hit], options: SearchOptions, stages: _Stages
    ) -> Reranked:
        """Of hits that may all be seen."""
        if not options.rerank:
            return Reranked(hits)
        with stages.timed("rerank"):
            return self._reranking.rerank(stored.collection, str(query), hits)

    def _told(
        self, reranked: Reranked, hits: Sequence[Hit], ids: Sequence[str], options: SearchOptions
    ) -> dict[str, Any] | None:
        """What the reranker did, for `explain`; None where it was not asked."""
        if not options.rerank:
            return None
        return {
            "by": self._reranking.settings.kind,
            "depth": len(reranked.scores),
            "why_not": reranked.note,
            "scores": {id_: reranked.scores.get(hit.id) for hit, id_ in zip(hits, ids, strict=True)},
        }

    def _spread(self, stored: CollectionStatus, reranked: Reranked, k: int, options: SearchOptions) -> list[Hit]:
        """By MMR. Relevance is the reranker's, from 0 to 1; without one the score: where words count it becomes the
        share of the best one, and a cosine is on MMR's scale already."""
        from connector.stores.ranking import mmr

        hits, relevance = reranked.hits, reranked.relevance
        if relevance is None:
            relevance = np.array([hit.score for hit in hits], dtype=np.float64)
            if options.mode != "vector" and len(relevance) and relevance.max() > 0:
                relevance /= relevance.max()
        chosen = mmr(relevance, self._vectors(stored, hits), k, options.mmr_lambda or 0.0)
        return [hits[place] for place in chosen]

    # ----------------------------------------------------------------------------------------------- what is stored

    def never_written(self, spec: CollectionSpec) -> bool:
        """Has nobody written to it yet? Which is no error where clients do: they may ask first."""
        if not spec.written_by_clients:
            return False
        try:
            self.serving(spec.name)
        except UnknownCollection:
            return True
        return False

    def serving(self, name: str) -> CollectionStatus:
        """What is stored, a few seconds old at most. Raises UnknownCollection when nothing ever was."""
        asked, status = self._known.get(name, (-math.inf, None))
        if status is None or time.monotonic() - asked >= _STATUS_SECONDS:
            status = self._stored(name)
            if status is None:
                raise UnknownCollection(f'the collection "{name}" was never synced; run: owl-sap sync {name}')
            self._known[name] = (time.monotonic(), status)
        return status

    def _query_vector(self, query: Asked, stored: CollectionStatus, narrowed: Narrowed) -> NDArray[np.float32]:
        if isinstance(query, Like):
            return self._like(query, stored, narrowed.rows)
        if not isinstance(query, str):
            return unit_vector(query, stored.dimension)
        return self._embedder(stored).embed_query(query)

    def _like(self, like: Like, stored: CollectionStatus, within: Filter | None) -> NDArray[np.float32]:
        """Raises UnknownRow for a row that is not there and, in the same words, for one that may not be seen; and
        ValueError for one without a vector, which others may have written."""
        name, store = stored.collection, self._parts.store
        chunks = _seen(store.view(name, stored.generation, within).texts([like.id]), within)
        if not chunks:
            raise _no_row(name)
        vectors = store.view(name, stored.generation).vectors(chunks).astype(np.float64)
        lengths = np.linalg.norm(vectors, axis=1)
        usable = np.isfinite(lengths) & (lengths > 0)
        known = vectors[usable] / lengths[usable, None]
        if not len(known):
            raise ValueError("that row has no vector, so similar rows cannot be found")
        mean = known.mean(axis=0)
        return unit_vector(mean.tolist() if np.linalg.norm(mean) > _CANCELLED else known[0].tolist(), stored.dimension)

    def _embedder(self, stored: CollectionStatus) -> EngineEmbedder:
        """Looked up once: the model of a generation never changes."""
        key = (stored.generation, stored.model)
        known = self._embedders.get(stored.collection)
        if known is None or known[0] != key:
            known = self._embedders[stored.collection] = key, self._embedder_for(stored)
        return known[1]

    def _cut(self, query: Asked, stored: CollectionStatus, mode: Mode) -> list[str]:
        """The model looks at the beginning of a long text only, and nobody should have to find that out."""
        if mode == "keyword" or not isinstance(query, str):
            return []
        embedder = self._embedder(stored)
        if len(query) <= embedder.max_tokens:  # no token is shorter than a character
            return []
        (tokens,) = embedder.count_tokens([query])
        if tokens <= embedder.max_tokens:
            return []
        return [f"the search text has {tokens} tokens; the model uses only the first {embedder.max_tokens}"]

    def key_columns(self, spec: CollectionSpec, stored: CollectionStatus) -> tuple[str, ...]:
        """Names of the key columns: those by which the rows were stored, whatever the settings name by now. Before a
        first complete run, with the source away, positions stand in for them."""
        if stored.key or spec.key:
            return stored.key or spec.key
        try:
            return self._parts.source.describe(spec.source).primary_key
        except (DatabaseError, ConfigurationError):
            return ()


def _no_row(name: str) -> UnknownRow:
    return UnknownRow(f'"{name}" has no row with this id that you may see')


def _stored(spec: CollectionSpec, like: Like) -> Like:
    """By the id that the store has of it. Raises UnknownRow for what cannot be one."""
    from connector.sync.documents import stored_ids

    found = stored_ids(spec, [like.id])
    if not found:
        raise _no_row(spec.name)
    return Like(found[0])


def _notes(spec: CollectionSpec, where: Filter | None, query: Asked, mode: Mode, found: bool) -> list[str]:
    """A field that no row of ours can have is no error, because rows that others wrote may have it."""
    from connector.document.document import metadata_names
    from connector.hana.catalog import did_you_mean
    from connector.stores.filters import fields
    from connector.stores.words import words

    notes: list[str] = []
    declared = f"filters use metadata; this collection has: {', '.join(spec.metadata) or 'none'}"
    names = metadata_names(spec.metadata)
    unknown = sorted(set(fields(where, names)) - set(names.values()))
    if spec.written_by_clients:  # whose metadata nobody has declared
        unknown, declared = [], "filters use the metadata that clients sent"
    if unknown:
        near = did_you_mean(unknown[0], [*names, *names.values()])
        notes.append(f'"{spec.name}" declares no metadata named {", ".join(unknown)}; {declared}.{near}'.rstrip("."))
    elif where and not found:
        notes.append(f"no rows found; check the filter: {declared}")
    if not spec.written_by_clients:
        notes.extend(_dates_without_dashes(where, names))
    if isinstance(query, str) and mode != "vector" and not words(query):
        notes.append("the search text has no letter or digit, so there is no word to search for")
    return notes


def _dates_without_dashes(where: Filter | None, names: Mapping[str, str]) -> list[str]:
    """ABAP's 20240131 is stored as 2024-01-31, and greater than every day of its year when compared as text."""
    from connector.document.values import is_dats, iso_date
    from connector.model import Column
    from connector.stores.filters import texts_compared

    for name, text in texts_compared(where, names):
        day = iso_date(text)
        if day and is_dats(Column(name, "NVARCHAR", len(text))):
            return [f'SAP\'s dates are stored as {day}; the filter compares {name} with the text "{text}"']
    return []


def _found(hit: Hit, columns: Sequence[str], spec: CollectionSpec, texts: list[Passage] | None = None) -> FoundHit:
    from connector.document.document import parse_id
    from connector.sync.documents import shown_id
    from connector.sync.quarantine import named_key

    if hit.id.startswith("record:"):
        return FoundHit(hit.id, {}, hit.score, hit.text, hit.metadata, texts)
    key = named_key(parse_id(hit.id), columns)
    return FoundHit(shown_id(spec, hit.id), key, hit.score, hit.text, hit.metadata, texts)


def unit_vector(numbers: Sequence[float], dimension: int) -> NDArray[np.float32]:
    """A query vector of length 1. Raises ValueError saying what is wrong with it."""
    vector = np.asarray(numbers, dtype=np.float64)
    if vector.shape != (dimension,):
        raise ValueError(f"the vector has {vector.size} numbers; this collection has {dimension}")
    largest = float(np.abs(vector).max(initial=0.0))
    if not math.isfinite(largest) or largest == 0.0:
        raise ValueError("the vector must be finite and not all zeros")
    scaled = vector / largest  # or the squares of large numbers overflow
    return (scaled / np.linalg.norm(scaled)).astype(np.float32)
