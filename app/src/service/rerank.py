"""Reorder the best hits of a search by a cross-encoder or by the operator's own function. Add a kind of reranker in
`_scorer`."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from app.src.observe.metrics import Metrics
from app.src.settings import Settings, SettingsError
from connector.model import Hit

if TYPE_CHECKING:
    from app.src.core.cross_encoder import CrossEncoding

AT_ONCE = 4  # concurrent rerankings, abandoned ones included, so that one that hangs takes no more threads
_log = logging.getLogger(__name__)

Scorer = Callable[[str, Sequence[str]], Sequence[float]]
"""(query, texts) -> one finite number per text, greater is better, on any scale. Called from several threads."""


@dataclass(frozen=True, slots=True)
class Reranked:
    """`hits`: all, the reranked ones first, with the scores of the search. `relevance`: from 0 to 1 per hit; None if
    the order did not change. `scores`: the reranker's, by id. `note`: why it failed."""

    hits: list[Hit]
    relevance: NDArray[np.float64] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    note: str | None = None


class RerankFailed(Exception):
    """Reranking failed. The message contains no text of a row."""


class Reranker:
    """Thread-safe. Raises SettingsError for a folder or function that does not exist. The first search loads a
    cross-encoder."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings.search
        self._metrics = metrics
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._score = _scorer(settings)
        self.on = self._score is not None

    def rerank(self, collection: str, query: str, hits: Sequence[Hit]) -> Reranked:
        """Return the first `rerank_depth` of `hits` in the reranker's order, then the others. A failure keeps the order
        and sets `note`."""
        top = list(hits[: self.settings.rerank_depth])
        if not top:
            return Reranked(list(hits))
        try:
            scores = np.asarray(self._in_time(query, [hit.text for hit in top]), dtype=np.float64)
            if scores.shape != (len(top),) or not np.isfinite(scores).all():
                raise RerankFailed(f"the reranker gave no finite number for each of {len(top)} texts")
        except (RerankFailed, TimeoutError, TypeError, ValueError) as failed:
            late = isinstance(failed, TimeoutError)
            self._metrics.reranks.labels(collection, "timeout" if late else "failed").inc()
            # NumPy's message may quote the reranker's answer.
            why = str(failed) if late or isinstance(failed, RerankFailed) else "the reranker gave no numbers"
            return Reranked(list(hits), note=f"the hits are not reranked: {why}")
        self._metrics.reranks.labels(collection, "done").inc()
        order = sorted(range(len(top)), key=lambda place: (-scores[place], place))
        ranked, least, greatest = scores[order], scores.min(), scores.max()
        relevance = np.zeros(len(hits))
        relevance[: len(top)] = (ranked - least) / (greatest - least) if greatest > least else 1.0
        by_id = {hit.id: round(float(score), 6) for hit, score in zip(top, scores, strict=True)}
        return Reranked([*(top[place] for place in order), *hits[len(top) :]], relevance, by_id)

    def _in_time(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """Run in a daemon thread and abandon it after `rerank_seconds`: Python cannot end a thread."""
        assert self._score is not None
        score, seconds = self._score, self.settings.rerank_seconds
        if not self._room.acquire(timeout=seconds):
            raise TimeoutError(f"{AT_ONCE} rerankings are under way already")
        outcome: Future[Sequence[float]] = Future()

        def run() -> None:
            from app.src.core.backends import EngineError

            try:
                outcome.set_result(score(query, texts))
            except Exception as error:
                # Name only the class of other errors: their message may quote a row.
                reason = str(error) if isinstance(error, EngineError) else type(error).__name__
                _log.warning("a reranking failed: %s", reason)
                outcome.set_exception(RerankFailed(reason))
            finally:
                self._room.release()

        threading.Thread(target=run, name="rerank", daemon=True).start()
        try:
            return outcome.result(seconds)
        except TimeoutError:
            _log.warning("a reranking took longer than %g s", seconds)
            raise TimeoutError(f"it took longer than {seconds:g} s ([search] rerank_seconds)") from None


def _scorer(settings: Settings) -> Scorer | None:
    """Return what `[search] rerank` names, None for "off". Raises SettingsError."""
    search = settings.search
    if search.kind == "function":  # the operator's module, trusted like the rest of the configuration
        module_name, _, name = search.rerank.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise SettingsError(
                f'[search] rerank: the module "{module_name}" cannot be imported ({type(error).__name__}); it must be'
                " installed, or lie on PYTHONPATH"
            ) from error
        function: Scorer | None = getattr(module, name, None)
        if function is None:
            raise SettingsError(f'[search] rerank: the module "{module_name}" has no "{name}"')
        if not callable(function):
            raise SettingsError(f'[search] rerank: "{search.rerank}" is not a function')
        return function
    if search.kind != "cross-encoder":
        return None
    from app.src.core.backends import EngineError
    from app.src.core.cross_encoder import check_folder

    try:
        check_folder(search.folder)
    except EngineError as error:
        raise SettingsError(f"[search] rerank: {error}") from None
    loading = threading.Lock()
    loaded: list[CrossEncoding] = []

    def scores(query: str, texts: Sequence[str]) -> Sequence[float]:
        from app.src.core.cross_encoder import CrossEncoding
        from app.src.core.device import detect

        with loading:
            if not loaded:
                loaded.append(CrossEncoding(search.folder, detect(settings.embedding.device).torch_name))
        return loaded[0].scores(query, texts)

    return scores
