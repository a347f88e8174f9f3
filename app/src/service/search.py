"""Search a collection by meaning, by words or by both, under the caller's row rights. Steps: the query's vector, the
store's rankings, reranking, choice, passages, explanation."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from app.src.access.principal import OPERATOR, Principal
from app.src.access.rows import Nothing, Rights
from app.src.observe.metrics import Metrics
from app.src.service.collections import Collections, VisibleView
from app.src.service.generations import Generations
from app.src.service.languages import KnownLanguages, note_on_text
from app.src.service.relevance import FLOOR, Calibration, Calibrations, by_words
from app.src.service.rerank import NO_RERANKER, Reranker
from app.src.service.wiring import EngineEmbedder
from connector.discovery import languages
from connector.document.document import metadata_names, named_key, parse_id
from connector.document.values import is_dats, iso_date
from connector.errors import UnknownRow
from connector.hana.catalog import did_you_mean
from connector.model import CollectionSpec, CollectionStatus, Column, Filter, Hit, IndexUse, StoredText
from connector.stores.coverage import Coverage, asked_words, content_words
from connector.stores.filters import Kind, parse, terms
from connector.stores.ranking import blend, groups, mmr, units
from connector.stores.records import FOREIGN, shown_id, stored_ids
from connector.stores.scan import single_threaded
from connector.stores.words import words

if TYPE_CHECKING:
    from app.src.service.background import Background

Mode = Literal["vector", "keyword", "hybrid"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEEP, DEEPEST = 50, 4000  # hits of each ranking for fusion and MMR: four times `k` within these bounds
MOST_PASSAGES = 20  # of one hit
# Weight of a row's translation in its closeness, and of the words that only the translation holds.
TRANSLATION, TRANSLATED_WORDS = 0.3, 0.7
TRANSLATED, MOST_TRANSLATIONS = 50, 500  # hits of each ranking whose translations are read; chunks of these
GROUPED = 1_000  # most hits that groups are made of: each is compared with the first of every group
PORTION = 20  # hits whose chunks are read at once: rows may be long, and all their vectors are read
_NUMBERS = 2  # most words of a query that are looked up in keys
_SHORTEST_NUMBER = 4
_CANCELLED = 1e-6  # length of a mean of unit vectors below which its direction is noise


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search. `mode` None: hybrid for a text, vector for a vector or a row.

    `min_score`: leave out hits with a lower score (hybrid: a lower cosine, because its scores have no fixed scale).
    `mmr_lambda` from 0 to 1: choose diverse hits (`connector.stores.ranking.mmr`); None or 1: the best ones.
    `group`: show near-identical hits as one, the best; `k` counts groups.
    `depth`: hits of each ranking that hybrid, MMR and groups choose from, at least `k`, at most DEEPEST; None: by DEEP.
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
    group: bool = False

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
    """`key` by column name, {} for a row that others wrote. `passages`, best first, None if only one was asked for.
    `relevance` from 0 to 1, below FLOOR probably irrelevant; None unless the query is a text the model understands.
    `similar`: how many hits are grouped under this one; None if no groups were asked for."""

    id: str
    key: Mapping[str, Any]
    score: float
    text: str
    metadata: Mapping[str, Any]
    passages: list[Passage] | None = None
    relevance: float | None = None
    similar: int | None = None

    def as_dict(self) -> dict[str, Any]:
        optional = [name for name in ("passages", "similar") if getattr(self, name) is None]
        return {name: value for name, value in asdict(self).items() if name not in optional}


@dataclass(frozen=True, slots=True)
class Found:
    """`hits`: best first, with MMR in the order chosen. `took_ms` by stage. `notes`: hints for the caller.
    `stale_since`: UTC time since which changes may be missing. `rows`: how many rows the caller may see."""

    hits: list[FoundHit]
    took_ms: dict[str, float]
    notes: list[str] = field(default_factory=list)
    stale_since: str | None = None
    rows: Literal["all", "some", "none"] = "all"
    explain: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Ranked:
    """`hits`: best first. `cosines`, `vectors`: by hit id, of the chunk shown, where known. `near`, `worded`: hits by
    meaning and by words, best first. `words`: the words searched for. `keyed`: count of rows found by numbers in
    keys."""

    hits: list[Hit]
    cosines: dict[str, float] = field(default_factory=dict)
    near: list[Hit] = field(default_factory=list)
    worded: list[Hit] = field(default_factory=list)
    words: tuple[str, ...] = ()
    keyed: int = 0
    vectors: dict[str, NDArray[np.float64]] = field(default_factory=dict)


def explanation(ranked: _Ranked, hits: Sequence[Hit], ids: Sequence[str], index: IndexUse) -> dict[str, Any]:
    """Explain how `hits`, named by `ids`, were found: the size of each ranking, and the rank of each hit in it."""
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


def hybrid(
    view: VisibleView,
    text: str,
    vector: NDArray[np.float32],
    depth: int,
    where: Filter | None,
    calibration: Calibration,
) -> _Ranked:
    """Blend candidates found by meaning, by words and by numbers in their keys into one ranking. A row is also judged
    by its translations: the rows whose key differs in the language alone."""
    words = content_words(text)
    near = view.search(vector, depth, where)
    worded = view.keyword(" ".join(words), depth, where) if words else []
    chosen = {(hit.id, hit.number): hit for hit in (*near, *worded)}
    # Users paste material numbers, which the template need not contain.
    keyed: dict[str, Hit] = {}
    known = {hit.id for hit in chosen.values()}
    for word in [word for word in words if _number(word)][:_NUMBERS]:
        for number in dict.fromkeys((_number(word), _number(word).upper())):
            for row in view.keyed(number, depth, where):
                if row.id not in known and Coverage((word,)).of(row.id):
                    keyed.setdefault(row.id, row)
    candidates = [*chosen.values(), *keyed.values()]
    if not candidates:
        return _Ranked([], words=words)
    others = {hit.id: calibration.translations(hit.id) for hit in candidates}
    asked = list(dict.fromkeys(id_ for hit in (*near[:TRANSLATED], *worded[:TRANSLATED]) for id_ in others[hit.id]))
    translations = (view.texts(asked) if asked else [])[:MOST_TRANSLATIONS]
    vectors = units(view.vectors([*candidates, *translations]))
    with single_threaded():
        close = calibration.nearness(vector[None, :], vectors)[:, 0].tolist()
    coverage, count = Coverage(words), len(candidates)
    share = [coverage.of(f"{hit.text} {hit.id}") for hit in candidates]
    translated = dict[str, list[tuple[float, float]]]()  # by row id: closeness and coverage of each chunk
    for other, near_ in zip(translations, close[count:], strict=True):
        translated.setdefault(other.id, []).append((near_, coverage.of(other.text)))
    for place, hit in enumerate(candidates):
        if found := [pair for id_ in others[hit.id] for pair in translated.get(id_, ())]:
            nearest, held = map(max, zip(*found, strict=True))
            close[place] += TRANSLATION * (nearest - close[place])
            share[place] = max(share[place], TRANSLATED_WORDS * held)
    hits = blend(candidates, close[:count], share)
    cosines: list[float] = (vectors[:count] @ vector.astype(np.float64)).tolist()
    of_chunk = {(hit.id, hit.number): place for place, hit in enumerate(candidates)}
    places = {hit.id: of_chunk[hit.id, hit.number] for hit in hits}
    shown = {id_: cosines[place] for id_, place in places.items()}
    known_vectors = {id_: vectors[place] for id_, place in places.items()}
    return _Ranked(hits, shown, near, worded, words, len(keyed), known_vectors)


def _number(word: str) -> str:
    """Return the longest part of a word that has a digit and may be a number in a key, or ""."""
    parts = [part for part in word.split() if len(part) >= _SHORTEST_NUMBER and any(map(str.isdigit, part))]
    return max(parts, key=len, default="")


@dataclass(slots=True)
class _Request:
    """One search of one generation. `vector`: the query's, None in mode keyword. `seconds`: duration by stage.
    `foreign`: the model does not know the query's language."""

    spec: CollectionSpec
    stored: CollectionStatus
    view: VisibleView
    query: Query
    k: int
    where: Filter | None
    options: SearchOptions
    mode: Mode
    rerank: bool
    vector: NDArray[np.float32] | None = None
    calibration: Calibration | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    foreign: bool = False

    @property
    def text(self) -> str:
        return self.query if isinstance(self.query, str) else ""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


class Search:
    """Thread-safe."""

    def __init__(
        self,
        reranker: Reranker,
        collections: Collections,
        generations: Generations,
        rights: Rights,
        background: Background,
        metrics: Metrics,
    ) -> None:
        self._collections = collections
        self._generations = generations
        self._rights = rights
        self._background = background
        self._metrics = metrics
        self._calibrations = Calibrations()
        self._reranker = reranker
        self._embedders: dict[str, tuple[tuple[int, str], EngineEmbedder]] = {}

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
        """Return the `k` best source rows that `principal` may see. Mode keyword loads no model. With `explain`, only
        administrators see the store's plan, which shows the whole system.

        Raises UnknownCollection (also before the first sync), UnknownRow, ModelMismatch, BadFilter, and ValueError for
        a blank text, an invalid vector, and a vector or row as the query in mode keyword or hybrid.
        """
        spec = self._collections.spec(name)
        within = self._rights.visible(name, principal)
        mode, is_text = mode_of(query, options.mode), isinstance(query, str)
        if isinstance(query, str) and not query.strip():
            raise ValueError("the search text is empty")
        if not is_text and mode != "vector":
            given = "the id of a row" if isinstance(query, Like) else "a vector"
            raise ValueError(f"mode {mode} searches words: give a text as the query, not {given}")
        if options.rerank and not (self._reranker.on and is_text):
            raise ValueError(
                "reranking needs a text as the query: give one, or leave rerank out"
                if self._reranker.on
                else NO_RERANKER
            )
        rerank = self._reranker.on and is_text and options.rerank is not False

        def search(view: VisibleView, stored: CollectionStatus) -> Found:
            asked = query
            if isinstance(query, Like):  # the row's id as the store has it
                asked = Like(next(iter(stored_ids(spec, [query.id])), ""))
            return self._in(_Request(spec, stored, view, asked, k, where, options, mode, rerank))

        found = self._collections.read(name, within, search)
        if found is None:
            if isinstance(query, Like):
                raise _no_row(name)
            found = Found([], {}, ["the collection is still empty: it was not synced or written to yet"])
            if isinstance(within, Nothing):  # an invalid filter is an error for every caller
                found = Found([], {}, [within.why, *_notes(spec, where, query, mode, True)], rows="none")
        if found.explain is not None and not principal.may("admin"):
            found.explain["index"]["detail"] = "the store's plan is shown to the scope admin"
        return replace(found, stale_since=self._background.stale_since(name))

    def operators_ids(
        self, name: str, text: str, k: int, where: Filter | None, mode: Mode, rerank: bool | None
    ) -> tuple[list[str], list[str]]:
        """Search as the operator, who sees every row. Return the store's ids and the notes."""
        found = self.run(name, text, k, where, SearchOptions(mode, rerank=rerank), principal=OPERATOR)
        return stored_ids(self._collections.spec(name), [hit.id for hit in found.hits]), found.notes

    def check_room(self, name: str, text: str) -> None:
        """Raise EngineOverloaded if the queue is certain to refuse `text` now. Returns at once, so that a request is
        refused before it waits for a thread."""
        known = self._embedders.get(name)
        if known is not None:
            known[1].check_query(text)

    def _in(self, request: _Request) -> Found:
        """Run one request. Raises GenerationChanged when another generation becomes active."""
        spec, options, view = request.spec, request.options, request.view
        diverse, depth = options.mmr_lambda is not None and options.mmr_lambda < 1, request.k
        if diverse or options.group or request.mode == "hybrid":
            depth = max(request.k, min(options.depth or max(DEEP, 4 * request.k), DEEPEST))
        if request.rerank:
            depth = max(depth, self._reranker.settings.rerank_depth)
        itself = request.query.id if isinstance(request.query, Like) else None
        if request.mode != "keyword":
            with request.timed("embed"):
                request.vector = self._query_vector(request)
        with request.timed("store"):
            self._calibrate(request)
            ranked = self._ranked(request, depth + (itself is not None))
            candidates = [hit for hit in ranked.hits if hit.id != itself]
        hits, scores, failure = candidates, dict[str, float](), None
        if request.rerank:
            with request.timed("rerank"):
                hits, scores, failure = self._reranker.rerank(spec.name, request.text, candidates)
        similar = dict[str, int]()
        if options.group:
            with request.timed("group"):
                hits, similar = _grouped(request, hits, ranked.vectors, len(hits) if diverse else request.k)
        if diverse:
            with request.timed("rank"):
                hits = _diverse(request, hits, scores)
        hits, passages = hits[: request.k], None
        if options.passages > 1:
            with request.timed("passages"):
                passages = _passages(request, hits)
        columns, found = self._collections.key_columns(spec.name, request.stored), []
        for place, hit in enumerate(hits):
            key = {} if hit.id.startswith(FOREIGN) else named_key(parse_id(hit.id), columns)
            more = None if passages is None else passages[place]
            judged, others = _relevance(request, hit), similar.get(hit.id)
            found.append(FoundHit(shown_id(spec, hit.id), key, hit.score, hit.text, hit.metadata, more, judged, others))
        for stage, seconds in request.seconds.items():
            self._metrics.search_seconds.labels(spec.name, stage).observe(seconds)
        took = {stage: round(seconds * 1000, 3) for stage, seconds in request.seconds.items()}
        explained = None
        if options.explain:
            ids = [hit.id for hit in found]
            explained = explanation(ranked, hits, ids, view.index_use(depth, request.where))
            by_id = {
                id_: round(scores[hit.id], 6) if hit.id in scores else None for hit, id_ in zip(hits, ids, strict=True)
            }
            used = self._reranker.settings
            reranked = {"by": used.kind, "name": used.name, "depth": len(scores), "why_not": failure, "scores": by_id}
            explained |= {"mode": request.mode, "stages": took, "candidates": len(candidates)}
            explained["reranker"] = reranked if request.rerank else None
        notes = _notes(spec, request.where, request.query, request.mode, bool(candidates)) + request.notes
        if found and all(hit.relevance is not None and hit.relevance < FLOOR for hit in found):
            notes.insert(0, "nothing relevant found; the nearest rows follow")
        notes += [] if failure is None else [failure]
        return Found(found, took, notes, rows="all" if view.within is None else "some", explain=explained)

    def _calibrate(self, request: _Request) -> None:
        """Set the request's calibration if relevance, hybrid or groups need it."""
        if request.vector is not None and isinstance(request.query, str):
            embedder, key = self._embedder(request.stored), request.stored.key
            request.calibration = self._calibrations.of(request.view, embedder, key)
        elif request.options.group:
            request.calibration = self._calibrations.of(request.view, None)

    def _ranked(self, request: _Request, depth: int) -> _Ranked:
        """Return up to `depth` hits, best first, none below `min_score`; hybrid may return more."""
        view, where, vector, least = request.view, request.where, request.vector, request.options.min_score
        if vector is None:
            worded = view.keyword(request.text, depth, where)
            ranked = _Ranked(worded, worded=worded)
        elif request.mode == "vector":
            near = view.search(vector, depth, where)
            ranked = _Ranked(near, near=near)
        else:
            ranked = hybrid(view, request.text, vector, depth, where, request.calibration or Calibration(None))
        if least is None:
            return ranked
        kept = [hit for hit in ranked.hits if ranked.cosines.get(hit.id, hit.score) >= least]
        return replace(ranked, hits=kept)

    def _query_vector(self, request: _Request) -> NDArray[np.float32]:
        query, view, dimension = request.query, request.view, request.stored.dimension
        if isinstance(query, str):
            embedder = self._embedder(request.stored)
            foreign = note_on_text(request.spec.name, query, KnownLanguages.of_loaded(embedder))
            request.notes, request.foreign = request.notes + foreign, bool(foreign)
            most, tokens = embedder.max_tokens, 0
            if len(query) > most:  # no token is shorter than a character
                (tokens,) = embedder.count_tokens([query])
            if tokens > most:
                request.notes.append(f"the search text has {tokens} tokens; the model uses only the first {most}")
            return embedder.embed_query(query)
        if not isinstance(query, Like):
            return unit_vector(query, dimension)
        # The mean of the row's unit vectors has the largest sum of cosines with them.
        chunks = view.texts([query.id])
        if not chunks:  # the same message for an unknown and an invisible row
            raise _no_row(request.spec.name)
        vectors = units(view.vectors(chunks))
        known = vectors[np.any(vectors != 0, axis=1)]
        if not len(known):  # another program may have written the row
            raise ValueError("that row has no vector, so similar rows cannot be found")
        mean = known.mean(axis=0)
        return unit_vector(mean.tolist() if np.linalg.norm(mean) > _CANCELLED else known[0].tolist(), dimension)

    def _embedder(self, stored: CollectionStatus) -> EngineEmbedder:
        """Return the model for queries, cached: the model of a generation never changes."""
        key = (stored.generation, stored.model)
        known = self._embedders.get(stored.collection)
        if known is None or known[0] != key:
            if KnownLanguages.of(stored.model.rpartition("@")[0]).codes:  # beside the model, which takes longer
                threading.Thread(target=languages.load, daemon=True).start()
            known = self._embedders[stored.collection] = key, self._generations.query_embedder(stored)
        return known[1]


def _grouped(
    request: _Request, hits: list[Hit], known: Mapping[str, NDArray[np.float64]], most: int
) -> tuple[list[Hit], dict[str, int]]:
    """Return the first hit of each group of alike hits, at most `most`, and the number of others in it by hit id. Looks
    at the first GROUPED hits. `known`: vectors by hit id; others are read."""
    calibration, hits = request.calibration or Calibration(None), hits[:GROUPED]
    vectors = [known[hit.id] for hit in hits if hit.id in known]
    given = np.array(vectors) if vectors and len(vectors) == len(hits) else request.view.vectors(hits)
    with single_threaded():
        alike = groups([hit.text for hit in hits], given, calibration.backdrop, most)
    return [hits[group[0]] for group in alike], {hits[group[0]].id: len(group) - 1 for group in alike}


def _diverse(request: _Request, hits: list[Hit], scores: Mapping[str, float]) -> list[Hit]:
    """Return `k` hits chosen by MMR. `scores`: of the reranker, by hit id. MMR expects the range of cosines, so other
    scores are scaled: the best becomes 1."""
    relevance = np.array([hit.score for hit in hits], dtype=np.float64)
    if scores:
        least, width = min(scores.values()), max(scores.values()) - min(scores.values())
        # If all scores are equal, each becomes 1. Hits that were not reranked become 0.
        ranks = {id_: (score - least) / width if width else 1.0 for id_, score in scores.items()}
        relevance = np.array([ranks.get(hit.id, 0.0) for hit in hits])
    elif request.mode != "vector" and relevance.max(initial=0.0) > 0:
        relevance /= relevance.max()
    lam = request.options.mmr_lambda or 0.0
    return [hits[place] for place in mmr(relevance, request.view.vectors(hits), request.k, lam)]


def _passages(request: _Request, hits: Sequence[Hit]) -> list[list[Passage]]:
    """Return for each hit its own chunk, then the other chunks of its row, best first; in mode keyword only others that
    contain a word of the query. If the row has just been deleted, only the hit's chunk remains."""
    view, coverage_of = request.view, Coverage(asked_words(request.text))

    def scores(chunks: Sequence[Hit] | Sequence[StoredText]) -> list[float]:
        if not chunks:
            return []
        if request.vector is None:
            return [round(coverage_of.of(chunk.text), 6) for chunk in chunks]
        cosines: list[float] = (units(view.vectors(chunks)) @ request.vector.astype(np.float64)).tolist()
        return cosines

    answer = []
    for start in range(0, len(hits), PORTION):
        some = hits[start : start + PORTION]
        chunks = view.texts([hit.id for hit in some])
        of_row: dict[str, list[Passage]] = {}
        for chunk, score in zip(chunks, scores(chunks), strict=True):
            if request.vector is not None or score > 0:
                of_row.setdefault(chunk.id, []).append(Passage(chunk.text, score, chunk.number))
        for hit, score in zip(some, scores(some), strict=True):
            others = [each for each in of_row.get(hit.id, []) if each.chunk != hit.number]
            others.sort(key=lambda each: (-each.score, each.chunk))
            answer.append([Passage(hit.text, score, hit.number), *others][: request.options.passages])
    return answer


def _relevance(request: _Request, hit: Hit) -> float | None:
    """Return a hit's relevance; None for a query that is not a text, because its vector may be of any kind, and for a
    text in a language that the model does not know."""
    if not isinstance(request.query, str) or request.foreign:
        return None
    if request.mode == "keyword":
        return round(by_words(Coverage(asked_words(request.text)).of(hit.text)), 4)
    known = request.calibration
    scale = None if known is None else known.cosine if request.mode == "vector" else known.near
    return None if scale is None else round(scale.relevance(hit.score), 4)


def _no_row(name: str) -> UnknownRow:
    return UnknownRow(f'"{name}" has no row with this id that you may see')


def _notes(spec: CollectionSpec, where: Filter | None, query: Query, mode: Mode, found: bool) -> list[str]:
    """Return notes on the filter and the words. An undeclared field gets only a note, because rows written by other
    programs may have it."""
    notes: list[str] = []
    declared = f"filters use metadata; this collection has: {', '.join(spec.metadata) or 'none'}"
    names = metadata_names(spec.metadata)
    unknown = sorted({term.field for term in terms(parse(where, names))} - set(names.values()))
    if spec.written_by_clients:  # metadata that clients write is not declared
        unknown, declared = [], "filters use the metadata that clients sent"
    if unknown:
        near = did_you_mean(unknown[0], [*names, *names.values()])
        notes.append(f'"{spec.name}" declares no metadata named {", ".join(unknown)}; {declared}.{near}'.rstrip("."))
    elif where and not found:
        notes.append(f"no rows found; check the filter: {declared}")
    # ABAP's date 20240131 is stored as 2024-01-31. As text, 20240131 is greater than every stored day of 2024.
    dates = (
        f'SAP\'s dates are stored as {day}; the filter compares {term.field} with the text "{text}"'
        for term in (() if spec.written_by_clients else terms(parse(where, names)))
        if term.kind is Kind.TEXT and term.operator not in ("$like", "$contains")
        for text in map(str, term.values)
        if (day := iso_date(text)) and is_dats(Column(term.field, "NVARCHAR", len(text)))
    )
    notes += islice(dates, 1)
    if isinstance(query, str) and mode != "vector" and not words(query):
        notes.append("the search text has no letter or digit, so there is no word to search for")
    return notes


def unit_vector(numbers: Sequence[float], dimension: int) -> NDArray[np.float32]:
    """Return a query vector scaled to length 1. Raises ValueError for an invalid one."""
    vector = np.asarray(numbers, dtype=np.float64)
    if vector.shape != (dimension,):
        raise ValueError(f"the vector has {vector.size} numbers; this collection has {dimension}")
    largest = float(np.abs(vector).max(initial=0.0))
    if not math.isfinite(largest) or largest == 0.0:
        raise ValueError("the vector must be finite and not all zeros")
    scaled = vector / largest  # squares of large numbers would overflow
    return (scaled / np.linalg.norm(scaled)).astype(np.float32)
