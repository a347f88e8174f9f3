"""Reorder the best hits of a search with a cross-encoder or the operator's own function. Add a kind of reranker in
`_scorer`."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from app.src.core.backends import EngineError
from app.src.core.device import detect
from app.src.core.memory import MemoryLimits
from app.src.observe.metrics import Metrics
from app.src.settings import Settings, SettingsError
from connector.model import Hit

if TYPE_CHECKING:
    from app.src.core.cross_encoder import CrossEncoding

AT_ONCE = 4  # concurrent rerankings, including abandoned ones: most threads that a hanging reranker can block
_log = logging.getLogger(__name__)

Scorer = Callable[[str, Sequence[str]], Sequence[float]]
"""(query, texts) -> one finite number per text, greater is better, on any scale. Called from several threads."""


class Reranker:
    """Thread-safe. Raises SettingsError for a folder or function that does not exist. The first search loads a
    cross-encoder."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings.search
        self._metrics = metrics
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._score: Scorer | None = None
        search = settings.search
        if search.kind == "function":  # the operator's module, trusted like the rest of the configuration
            module_name, _, name = search.rerank.partition(":")
            try:
                module = importlib.import_module(module_name)
            except Exception as error:
                raise SettingsError(
                    f'[search] rerank: the module "{module_name}" cannot be imported ({type(error).__name__}); it must'
                    " be installed, or lie on PYTHONPATH"
                ) from error
            self._score = getattr(module, name, None)
            if not callable(self._score):
                raise SettingsError(f'[search] rerank: the module "{module_name}" has no function "{name}"')
        elif search.kind == "cross-encoder":
            from app.src.core.cross_encoder import check_folder

            try:
                check_folder(search.folder)
            except EngineError as error:
                raise SettingsError(f"[search] rerank: {error}") from None
            loading = threading.Lock()
            loaded: list[CrossEncoding] = []

            def scores(query: str, texts: Sequence[str]) -> Sequence[float]:
                from app.src.core.cross_encoder import CrossEncoding

                limits = MemoryLimits(settings.embedding.memory_fraction, settings.embedding.reserve_mb << 20)
                with loading:
                    if not loaded:
                        loaded.append(CrossEncoding(search.folder, detect(settings.embedding.device), limits))
                return loaded[0].scores(query, texts)

            self._score = scores
        self.on = self._score is not None

    def rerank(
        self, collection: str, query: str, hits: Sequence[Hit]
    ) -> tuple[list[Hit], dict[str, float], str | None]:
        """Return the hits, the reranker's scores by id, and None. The first `rerank_depth` hits are in the reranker's
        order; all keep their search scores. After a failure: the hits in their old order, no scores, and the reason."""
        top, seconds, why = list(hits[: self.settings.rerank_depth]), self.settings.rerank_seconds, ""
        outcome: Future[Sequence[float]] = Future()
        scores = np.empty(0)

        def run() -> None:
            try:
                assert self._score is not None
                outcome.set_result(self._score(query, [hit.text for hit in top]))
            except Exception as error:
                outcome.set_exception(error)
            finally:
                self._room.release()

        if not top:
            return [], {}, None
        if not self._room.acquire(timeout=seconds):
            ended, why = "timeout", f"{AT_ONCE} rerankings are under way already"
        else:
            # A daemon thread, abandoned after `rerank_seconds`: Python cannot end a thread.
            threading.Thread(target=run, name="rerank", daemon=True).start()
            try:
                ended, scores = "done", np.asarray(outcome.result(seconds), dtype=np.float64)
                if scores.shape != (len(top),) or not np.isfinite(scores).all():
                    ended, why = "failed", f"the reranker gave no finite number for each of {len(top)} texts"
            except Exception as error:
                # Name only the class of other errors: their message may quote a row.
                ended, why = "failed", str(error) if isinstance(error, EngineError) else type(error).__name__
                if not outcome.done():
                    ended, why = "timeout", f"it took longer than {seconds:g} s ([search] rerank_seconds)"
        self._metrics.reranks.labels(collection, ended).inc()
        if why:
            _log.warning("a reranking failed: %s", why)
            return list(hits), {}, f"the hits are not reranked: {why}"
        order = sorted(range(len(top)), key=lambda place: (-scores[place], place))
        by_id = {hit.id: float(score) for hit, score in zip(top, scores, strict=True)}
        return [*(top[place] for place in order), *hits[len(top) :]], by_id, None
