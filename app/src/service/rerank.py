"""The step after the ranking: the best hits put in order once more by a reranker, within a bound of time. Whatever goes
wrong with it leaves the order as it was. Knows hits and engines, no store; never logs a text.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from app.src.observe.metrics import Metrics
from app.src.settings import EmbeddingSettings, SearchSettings, Settings, SettingsError
from connector.model import Hit

if TYPE_CHECKING:
    from app.src.core.cross_encoder import CrossEncoding
    from app.src.core.engine import EmbeddingEngine

LATE_WEIGHT = 0.3
"""Of late interaction beside a hit's own score, from 0028: it is a mean of cosines, as that is mostly a cosine."""
AT_ONCE = 4
"""Rerankings at a time, those that nobody waits for any more included: a reranker that hangs costs no more threads."""
_log = logging.getLogger(__name__)


class Reranker(Protocol):
    """What `package.module:function` names. Called from several threads."""

    def __call__(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """Of each text a finite number, greater for a better answer to `query`; on any scale."""
        ...


@dataclass(frozen=True, slots=True)
class Reranked:
    """`hits`: all that were given, those that were reranked first; their scores are those of the search. `relevance`
    from 0 to 1, of each, for a choice of hits that differ (MMR); None where the order is as before. `scores`: what the
    reranker said, by id. `note`: why the order is as before, although it should not be."""

    hits: list[Hit]
    relevance: NDArray[np.float64] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    note: str | None = None


class RerankFailed(Exception):
    """The message is for people and holds no text of a row."""


class Reranking:
    """Thread-safe. What the settings name is looked up when it is made: SettingsError for what is not there. A
    cross-encoder is loaded by the first search."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings.search
        self._embedding = settings.embedding
        self._metrics = metrics
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._loading = threading.Lock()
        self._cross: CrossEncoding | None = None
        self._function = _checked(settings)

    @property
    def on(self) -> bool:
        return self.settings.kind != "off"

    def rerank(
        self, collection: str, query: str, hits: Sequence[Hit], engine: Callable[[], EmbeddingEngine], *, bm25: bool
    ) -> Reranked:
        """The first `rerank_depth` of `hits`, best first, in the reranker's order, the others behind them as they were.
        `engine`: the one of the collection's vectors. `bm25`: scores are BM25's, on no scale of their own. Raises
        nothing that a reranker can be blamed for."""
        top = list(hits[: self.settings.rerank_depth])
        if not top:
            return Reranked(list(hits))
        try:
            scores = self._scores(query, [hit.text for hit in top], engine)
        except RerankFailed as failed:
            outcome = "timeout" if isinstance(failed, _TooLate) else "failed"
            self._metrics.reranks.labels(collection, outcome).inc()
            return Reranked(list(hits), note=f"the hits are not reranked: {failed}")
        self._metrics.reranks.labels(collection, "done").inc()
        values = scores
        if self.settings.kind == "late-interaction":
            own = np.array([hit.score for hit in top], dtype=np.float64)
            best = own.max()
            values = (own / best if bm25 and best > 0 else own) + LATE_WEIGHT * scores
        order = sorted(range(len(top)), key=lambda place: (-values[place], place))
        relevance = np.zeros(len(hits))
        relevance[: len(top)] = _shares(values[order])
        told = {hit.id: round(float(score), 6) for hit, score in zip(top, scores, strict=True)}
        return Reranked([*(top[place] for place in order), *hits[len(top) :]], relevance, told)

    def _scores(self, query: str, texts: Sequence[str], engine: Callable[[], EmbeddingEngine]) -> NDArray[np.float64]:
        reranker = self._loaded(engine)
        found = self._within(lambda: reranker(query, texts))
        try:
            scores = np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError):
            raise RerankFailed("the reranker gave something else than numbers") from None
        if scores.shape != (len(texts),):
            raise RerankFailed(f"the reranker gave numbers of shape {scores.shape} for {len(texts)} texts")
        if not np.isfinite(scores).all():
            raise RerankFailed("the reranker gave numbers that are not finite")
        return scores

    def _within(self, work: Callable[[], Any]) -> Any:
        """In a thread of its own, which nobody waits for longer than that: Python cannot end it."""
        if not self._room.acquire(timeout=self.settings.rerank_seconds):
            raise _TooLate(f"{AT_ONCE} rerankings are under way already")
        ended, outcome = threading.Event(), _Outcome()

        def run() -> None:
            try:
                outcome.value = work()
            except Exception as error:
                outcome.error = error
            finally:
                self._room.release()
                ended.set()

        threading.Thread(target=run, name="rerank", daemon=True).start()
        if not ended.wait(self.settings.rerank_seconds):
            _log.warning("a reranking took longer than %g s", self.settings.rerank_seconds)
            raise _TooLate(f"it took longer than {self.settings.rerank_seconds:g} s ([search] rerank_seconds)")
        if outcome.error is not None:
            raise _failed(outcome.error)
        return outcome.value

    def _loaded(self, engine: Callable[[], EmbeddingEngine]) -> Reranker:
        if self._function is not None:
            return self._function
        try:
            if self.settings.kind == "cross-encoder":
                return self._cross_encoder().scores
            from app.src.core.late_interaction import late_interaction

            known = engine()
        except Exception as error:
            raise _failed(error) from error
        return lambda query, texts: late_interaction(known, query, texts)

    def _cross_encoder(self) -> CrossEncoding:
        from app.src.core.cross_encoder import CrossEncoding
        from app.src.core.device import detect

        with self._loading:
            if self._cross is None:
                device = detect(self._embedding.device).torch_name
                self._cross = CrossEncoding(self.settings.folder, device)
            return self._cross


class _TooLate(RerankFailed):
    pass


@dataclass(slots=True)
class _Outcome:
    value: Any = None
    error: Exception | None = None


def _failed(error: Exception) -> RerankFailed:
    """Of the engine's own errors the message; of others, which may quote a text, the class alone."""
    from app.src.core.backends import EngineError

    said = str(error) if isinstance(error, EngineError) else type(error).__name__
    _log.warning("a reranking failed: %s", said)
    return RerankFailed(said)


def _shares(values: NDArray[np.float64]) -> NDArray[np.float64]:
    least, greatest = values.min(), values.max()
    return (values - least) / (greatest - least) if greatest > least else np.ones(len(values))


# ---------------------------------------------------------------------------------------------- what the settings name


def _checked(settings: Settings) -> Reranker | None:
    """The operator's function, if it is one. Raises SettingsError."""
    search = settings.search
    if search.kind == "function":
        return _function(search)
    if search.kind == "cross-encoder":
        _check_folder(search)
    if search.kind == "late-interaction":
        _check_model(settings.embedding, settings.tensorrt.enabled)
    return None


def _check_model(embedding: EmbeddingSettings, graphs: bool) -> None:
    if embedding.hashing:
        raise SettingsError(
            f'[search] rerank = "late-interaction" needs the vectors of single words, which "{embedding.model}" does'
            ' not have; take another [embedding] model, or rerank = "off"'
        )
    if graphs:
        raise SettingsError(
            '[search] rerank = "late-interaction" needs the vectors of single words, which a graph of TensorRT does not'
            ' give; set [tensorrt] enabled = false, or rerank = "off"'
        )


def _check_folder(search: SearchSettings) -> None:
    from app.src.core.backends import EngineError
    from app.src.core.cross_encoder import check_folder

    try:
        check_folder(search.folder)
    except EngineError as error:
        raise SettingsError(f"[search] rerank: {error}") from None


def _function(search: SearchSettings) -> Reranker:
    """Imports the operator's module: his own code, trusted as his configuration is."""
    module_name, _, name = search.rerank.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise SettingsError(
            f'[search] rerank: the module "{module_name}" cannot be imported ({type(error).__name__}); it must be'
            " installed, or lie on PYTHONPATH"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        near = difflib.get_close_matches(name, [each for each in vars(module) if not each.startswith("_")], n=1)
        hint = f'; did you mean "{module_name}:{near[0]}"?' if near else ""
        raise SettingsError(f'[search] rerank: the module "{module_name}" has no "{name}"{hint}')
    if not callable(found):
        raise SettingsError(f'[search] rerank: "{search.rerank}" is no function')
    function: Reranker = found
    return function
