"""Search one collection by meaning, by words or by both, under the caller's row rights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from app.src.access.principal import OPERATOR, Principal
from app.src.access.rows import Nothing, Rights, seen
from app.src.observe.metrics import Metrics
from app.src.service.background import Background
from app.src.service.collections import Collections
from app.src.service.generations import Generations
from app.src.service.hybrid import Hybrid, Ranked, RowFilter, explanation
from app.src.service.rerank import Reranked, Reranker
from app.src.service.wiring import EngineEmbedder, Parts
from connector.errors import UnknownRow
from connector.model import CollectionSpec, CollectionStatus, Filter, Hit, StoredText
from connector.stores.coverage import Coverage, asked_words
from connector.stores.ranking import mmr, units

Mode = Literal["vector", "keyword", "hybrid"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEEP, DEEPEST = 50, 4000  # hits of each ranking that fusion and MMR choose from: four times `k` within these bounds
MOST_PASSAGES = 20  # of one hit
PORTION = 20  # hits whose chunks are read together: rows may be long, and all their vectors are read
_CANCELLED = 1e-6  # length of a mean of unit vectors that cancel each other out: its direction is chance
_NO_PLAN = "the store's plan is shown to the scope admin"


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search. `mode` None: hybrid for a text, vector for a vector or a row.

    `min_score`: leave out hits with a lower score (hybrid: a lower cosine, because its scores have no fixed scale).
    `mmr_lambda` from 0 to 1: choose diverse hits (`connector.stores.ranking.mmr`); None or 1: the best ones.
    `depth`: hits of each ranking that hybrid and MMR choose from, at least `k`, at most DEEPEST; None: by DEEP.
    `passages`: chunks of each hit. `explain`: say how the hits were found.
    `rerank`: use the configured reranker; None: if there is one and the query is a text.

    Raises ValueError for an unknown mode and numbers out of range.
    """

    mode: Mode | None = None
    min_score: float | None = None
    mmr_lambda: float | None = None
    depth: int | None = None
    passages: int = 1
    explain: bool = False
    rerank: bool | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise ValueError(f'unknown search mode "{self.mode}"; there are: {", ".join(MODES)}')
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise ValueError("min_score must be a finite number")
        if self.mmr_lambda is not None and not 0 <= self.mmr_lambda <= 1:
            raise ValueError(
                f"mmr_lambda is {self.mmr_lambda:g}; it must be from 0 (most diverse) to 1 (most relevant)"
            )
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth is {self.depth}; it must be at least 1")
        if not 1 <= self.passages <= MOST_PASSAGES:
            raise ValueError(f"passages is {self.passages}; it must be from 1 to {MOST_PASSAGES}")


@dataclass(frozen=True, slots=True)
class Like:
    """A query for rows like the one with this id, by the mean of its chunks' vectors."""

    id: str


Query = str | Sequence[float] | Like
_DEFAULTS = SearchOptions()


def mode_of(query: Query, mode: Mode | None) -> Mode:
    """Return `mode`, or the default: hybrid for a text, vector for a vector or a row."""
    return mode or ("hybrid" if isinstance(query, str) else "vector")


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk of a row; `chunk` counts from 0. `score`: its cosine with the query; in mode keyword the share of the
    query's words that it holds."""

    text: str
    score: float
    chunk: int


@dataclass(frozen=True, slots=True)
class FoundHit:
    """`key` by column name, {} for a row that others wrote. `passages`, best first, None if only one was asked for."""

    id: str
    key: Mapping[str, Any]
    score: float
    text: str
    metadata: Mapping[str, Any]
    passages: list[Passage] | None = None

    def as_dict(self) -> dict[str, Any]:
        shown = asdict(self)
        return shown if self.passages is not None else {name: shown[name] for name in shown if name != "passages"}


@dataclass(frozen=True, slots=True)
class Found:
    """`hits`: best first, with MMR in the order chosen. `took_ms` by stage. `notes`: what the caller may have
    overlooked. `stale_since`: UTC time since when rows may have changed unseen. `rows`: which the caller may see."""

    hits: list[FoundHit]
    took_ms: dict[str, float]
    notes: list[str] = field(default_factory=list)
    stale_since: str | None = None
    rows: Literal["all", "some", "none"] = "all"
    explain: dict[str, Any] | None = None


class _Stages:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class _Request:
    """One search of one generation. `vector`: of the query, None in mode keyword."""

    spec: CollectionSpec
    stored: CollectionStatus
    query: Query
    vector: NDArray[np.float32] | None
    k: int
    rows: RowFilter
    options: SearchOptions
    mode: Mode
    rerank: bool

    @property
    def text(self) -> str:
        return self.query if isinstance(self.query, str) else ""

    @property
    def diverse(self) -> bool:
        return self.options.mmr_lambda is not None and self.options.mmr_lambda < 1

    def depth(self, rerank_depth: int) -> int:
        """How many hits to take from each ranking."""
        depth = self.k
        if self.diverse or self.mode == "hybrid":
            depth = max(self.k, min(self.options.depth or max(DEEP, 4 * self.k), DEEPEST))
        return max(depth, rerank_depth) if self.rerank else depth


class Search:
    """Thread-safe. Raises SettingsError when the configured reranker does not exist."""

    def __init__(
        self,
        parts: Parts,
        collections: Collections,
        generations: Generations,
        rights: Rights,
        background: Background,
        metrics: Metrics,
    ) -> None:
        self._parts = parts
        self._collections = collections
        self._generations = generations
        self._rights = rights
        self._background = background
        self._metrics = metrics
        self._hybrid = Hybrid()
        self._reranker = Reranker(parts.settings, metrics)
        self._reranks = self._reranker.on
        self._embedders: dict[str, tuple[tuple[int, str], EngineEmbedder]] = {}
        collections.on_change(self._hybrid.changed)

    def run(
        self,
        name: str,
        query: Query,
        k: int = 10,
        where: Filter | None = None,
        options: SearchOptions = _DEFAULTS,
        *,
        principal: Principal,
    ) -> Found:
        """Return the `k` best source rows that `principal` may see for a text, a vector, or a row. Mode keyword loads
        no model. With `explain`, only administrators see the store's plan, which shows the whole system.

        Raises UnknownCollection (also before the first sync), UnknownRow, ModelMismatch, BadFilter, and ValueError for
        a blank text, a vector without a direction, and a vector or row where words are searched.
        """
        spec = self._collections.spec(name)
        within = self._rights.visible(name, principal)
        mode, rerank = self._checked(query, options)
        if self._collections.is_empty(spec):
            if isinstance(query, Like):
                raise _no_row(name)
            found = Found([], {}, ["the collection is still empty: it was not synced or written to yet"])
        elif isinstance(within, Nothing):
            if isinstance(query, Like):
                raise _no_row(name)
            notes = _notes(spec, where, query, mode, True)  # a wrong filter is an error for every caller
            found = Found([], {}, [within.why, *notes], rows="none")
        else:
            asked, rows = _stored(spec, query), RowFilter(where, within)

            def search(stored: CollectionStatus) -> Found:
                return self._in(_Request(spec, stored, asked, None, k, rows, options, mode, rerank))

            found = self._collections.in_one_generation(name, search)
        if found.explain is not None and not principal.may("admin"):
            index = found.explain["index"] | {"detail": _NO_PLAN}
            found = replace(found, explain=found.explain | {"index": index})
        return replace(found, stale_since=self._background.stale_since(name))

    def operators_ids(
        self, name: str, text: str, k: int, where: Filter | None, mode: Mode, rerank: bool | None
    ) -> tuple[list[str], list[str]]:
        """Search as the operator, who sees every row; return the ids as the store has them, and the notes."""
        from connector.sync.documents import stored_ids

        found = self.run(name, text, k, where, SearchOptions(mode, rerank=rerank), principal=OPERATOR)
        return stored_ids(self._collections.spec(name), [hit.id for hit in found.hits]), found.notes

    def check_room(self, name: str, text: str) -> None:
        """Raise EngineOverloaded if the queue would refuse to embed `text` now, as far as that is known. Takes no
        time, so that a request is refused before it waits for a thread."""
        known = self._embedders.get(name)
        if known is not None:
            known[1].check_query(text)

    def _checked(self, query: Query, options: SearchOptions) -> tuple[Mode, bool]:
        """The mode, and whether to rerank. Raises ValueError."""
        if isinstance(query, str) and not query.strip():
            raise ValueError("the search text is empty")
        mode = mode_of(query, options.mode)
        if not isinstance(query, str) and mode != "vector":
            given = "the id of a row" if isinstance(query, Like) else "a vector"
            raise ValueError(f"mode {mode} searches words: give a text as the query, not {given}")
        if options.rerank and not self._reranks:
            raise ValueError("no reranker is configured: set [search] rerank (docs/search.md)")
        if options.rerank and not isinstance(query, str):
            raise ValueError("reranking needs a text as the query: give one, or leave rerank out")
        return mode, self._reranks and isinstance(query, str) and options.rerank is not False

    def _in(self, request: _Request) -> Found:
        """Raises GenerationChanged when another generation becomes active."""
        spec, stored, query, options = request.spec, request.stored, request.query, request.options
        stages = _Stages()
        if request.mode != "keyword":
            with stages.timed("embed"):
                request = replace(request, vector=self._query_vector(request))
        depth = request.depth(self._reranker.settings.rerank_depth)
        itself = query.id if isinstance(query, Like) else None
        with stages.timed("store"):
            ranked = self._ranked(request, depth + (itself is not None))
            candidates = [hit for hit in ranked.hits if hit.id != itself]
        reranked = Reranked(candidates)
        if request.rerank:
            with stages.timed("rerank"):
                reranked = self._reranker.rerank(spec.name, request.text, candidates)
        hits = reranked.hits
        if request.diverse:
            with stages.timed("rank"):
                hits = self._diverse(request, reranked)
        hits, passages = hits[: request.k], None
        if options.passages > 1:
            with stages.timed("passages"):
                passages = self._passages(request, hits)
        columns = self._collections.key_columns(spec.name, stored)
        found = [
            _found(hit, columns, spec, None if passages is None else passages[place]) for place, hit in enumerate(hits)
        ]
        for stage, seconds in stages.seconds.items():
            self._metrics.search_seconds.labels(spec.name, stage).observe(seconds)
        took = {stage: round(seconds * 1000, 3) for stage, seconds in stages.seconds.items()}
        explained = None
        if options.explain:
            ids = [hit.id for hit in found]
            where, within = request.rows.where, request.rows.within
            index = self._parts.store.view(spec.name, stored.generation, within).index_use(depth, where)
            explained = explanation(ranked, hits, ids, index)
            explained |= {"mode": request.mode, "stages": took, "candidates": len(candidates)}
            explained["reranker"] = self._reranker_explained(reranked, hits, ids) if request.rerank else None
        notes = [
            *_notes(spec, request.rows.where, query, request.mode, bool(candidates)),
            *self._note_on_length(request),
            *([reranked.note] if reranked.note is not None else []),
        ]
        return Found(found, took, notes, rows="all" if request.rows.within is None else "some", explain=explained)

    # --------------------------------------------------------------------------------------------------- the rankings

    def _ranked(self, request: _Request, depth: int) -> Ranked:
        """Up to `depth` hits, best first, none below `min_score`; hybrid gives more."""
        store, stored, rows, least = self._parts.store, request.stored, request.rows, request.options.min_score
        name, active, where, within = stored.collection, stored.generation, rows.where, rows.within
        if request.mode == "hybrid" and request.vector is not None:
            ranked = self._hybrid.search(store, stored, (request.text, request.vector), depth, rows)
            if least is None:
                return ranked
            return replace(ranked, hits=[hit for hit in ranked.hits if ranked.cosines[hit.id] >= least])
        vector, text = request.vector, request.text
        near = [] if vector is None else store.view(name, active, within).search(vector, depth, where)
        worded = store.view(name, active, within).keyword(text, depth, where) if vector is None else []
        near, worded = seen(near, within), seen(worded, within)
        return Ranked([hit for hit in near or worded if least is None or hit.score >= least], {}, near, worded)

    def _diverse(self, request: _Request, reranked: Reranked) -> list[Hit]:
        """Choose by MMR. Relevance is the reranker's; without one the score, in modes with words as a share of the best
        one: a cosine is on MMR's scale already."""
        hits, relevance = reranked.hits, reranked.relevance
        if relevance is None:
            relevance = np.array([hit.score for hit in hits], dtype=np.float64)
            if request.mode != "vector" and len(relevance) and relevance.max() > 0:
                relevance /= relevance.max()
        vectors = self._parts.store.view(request.stored.collection, request.stored.generation).vectors(hits)
        return [hits[place] for place in mmr(relevance, vectors, request.k, request.options.mmr_lambda or 0.0)]

    def _reranker_explained(self, reranked: Reranked, hits: Sequence[Hit], ids: Sequence[str]) -> dict[str, Any]:
        return {
            "by": self._reranker.settings.kind,
            "depth": len(reranked.scores),
            "why_not": reranked.note,
            "scores": {id_: reranked.scores.get(hit.id) for hit, id_ in zip(hits, ids, strict=True)},
        }

    # ---------------------------------------------------------------------------------------------------- passages

    def _passages(self, request: _Request, hits: Sequence[Hit]) -> list[list[Passage]]:
        """For each hit: the chunk found first, then the others of its row, best first; in mode keyword only those with
        a word. A row that was deleted meanwhile keeps the chunk that was found."""
        store, stored, within = self._parts.store, request.stored, request.rows.within
        coverage = Coverage(asked_words(request.text))

        def scores(chunks: Sequence[Hit] | Sequence[StoredText]) -> list[float]:
            if not chunks:
                return []
            if request.vector is None:
                return [round(coverage.of(chunk.text), 6) for chunk in chunks]
            vectors = units(store.view(stored.collection, stored.generation).vectors(chunks))
            cosines: list[float] = (vectors @ request.vector.astype(np.float64)).tolist()
            return cosines

        answer = []
        for start in range(0, len(hits), PORTION):
            some = hits[start : start + PORTION]
            ids = [hit.id for hit in some]
            chunks = seen(store.view(stored.collection, stored.generation, within).texts(ids), within)
            of_row: dict[str, list[Passage]] = {}
            for chunk, score in zip(chunks, scores(chunks), strict=True):
                if request.vector is not None or score > 0:
                    of_row.setdefault(chunk.id, []).append(Passage(chunk.text, score, chunk.number))
            for hit, score in zip(some, scores(some), strict=True):
                others = [each for each in of_row.get(hit.id, []) if each.chunk != hit.number]
                others.sort(key=lambda each: (-each.score, each.chunk))
                answer.append([Passage(hit.text, score, hit.number), *others][: request.options.passages])
        return answer

    # --------------------------------------------------------------------------------------------------- the query

    def _query_vector(self, request: _Request) -> NDArray[np.float32]:
        query = request.query
        if isinstance(query, Like):
            return self._like(query, request.stored, request.rows.within)
        if not isinstance(query, str):
            return unit_vector(query, request.stored.dimension)
        return self._embedder(request.stored).embed_query(query)

    def _like(self, like: Like, stored: CollectionStatus, within: Filter | None) -> NDArray[np.float32]:
        """The mean of the row's unit vectors: of all directions its cosines with them have the largest sum. Raises
        UnknownRow for an unknown row and, in the same words, for an invisible one; ValueError for one without a vector,
        which others may have written."""
        name, store = stored.collection, self._parts.store
        chunks = seen(store.view(name, stored.generation, within).texts([like.id]), within)
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
        """Remembered: the model of a generation never changes."""
        key = (stored.generation, stored.model)
        known = self._embedders.get(stored.collection)
        if known is None or known[0] != key:
            known = self._embedders[stored.collection] = key, self._generations.query_embedder(stored)
        return known[1]

    def _note_on_length(self, request: _Request) -> list[str]:
        if request.mode == "keyword" or not request.text:
            return []
        embedder = self._embedder(request.stored)
        if len(request.text) <= embedder.max_tokens:  # no token is shorter than a character
            return []
        (tokens,) = embedder.count_tokens([request.text])
        if tokens <= embedder.max_tokens:
            return []
        return [f"the search text has {tokens} tokens; the model uses only the first {embedder.max_tokens}"]


def _no_row(name: str) -> UnknownRow:
    return UnknownRow(f'"{name}" has no row with this id that you may see')


def _stored(spec: CollectionSpec, query: Query) -> Query:
    """The query, with the id of a row as the store has it. Raises UnknownRow for what cannot be an id."""
    if not isinstance(query, Like):
        return query
    from connector.sync.documents import stored_ids

    found = stored_ids(spec, [query.id])
    if not found:
        raise _no_row(spec.name)
    return Like(found[0])


def _notes(spec: CollectionSpec, where: Filter | None, query: Query, mode: Mode, found: bool) -> list[str]:
    """Notes on the filter and the words. A field that is not declared is no error: rows that others wrote may have
    it."""
    from connector.document.document import metadata_names
    from connector.hana.catalog import did_you_mean
    from connector.stores.filters import compared
    from connector.stores.words import words

    notes: list[str] = []
    declared = f"filters use metadata; this collection has: {', '.join(spec.metadata) or 'none'}"
    names = metadata_names(spec.metadata)
    unknown = sorted({term.field for term in compared(where, names)} - set(names.values()))
    if spec.written_by_clients:  # their metadata is not declared
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
    """ABAP's 20240131 is stored as 2024-01-31, and as text it is greater than every day of its year."""
    from connector.document.values import is_dats, iso_date
    from connector.model import Column
    from connector.stores.filters import Kind, compared

    for term in compared(where, names):
        values = term.values if term.kind is Kind.TEXT and term.operator not in ("$like", "$contains") else ()
        for text in map(str, values):
            day = iso_date(text)
            if day and is_dats(Column(term.field, "NVARCHAR", len(text))):
                return [f'SAP\'s dates are stored as {day}; the filter compares {term.field} with the text "{text}"']
    return []


def _found(hit: Hit, columns: Sequence[str], spec: CollectionSpec, passages: list[Passage] | None) -> FoundHit:
    from connector.document.document import parse_id
    from connector.sync.documents import shown_id
    from connector.sync.quarantine import named_key

    if hit.id.startswith("record:"):
        return FoundHit(hit.id, {}, hit.score, hit.text, hit.metadata, passages)
    key = named_key(parse_id(hit.id), columns)
    return FoundHit(shown_id(spec, hit.id), key, hit.score, hit.text, hit.metadata, passages)


def unit_vector(numbers: Sequence[float], dimension: int) -> NDArray[np.float32]:
    """Return a query vector scaled to length 1. Raises ValueError saying what is wrong with it."""
    vector = np.asarray(numbers, dtype=np.float64)
    if vector.shape != (dimension,):
        raise ValueError(f"the vector has {vector.size} numbers; this collection has {dimension}")
    largest = float(np.abs(vector).max(initial=0.0))
    if not math.isfinite(largest) or largest == 0.0:
        raise ValueError("the vector must be finite and not all zeros")
    scaled = vector / largest  # or the squares of large numbers overflow
    return (scaled / np.linalg.norm(scaled)).astype(np.float32)
