"""The engine with metrics, cached query vectors and the connector's errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from app.src.core.backends import NonFinite
from app.src.observe.metrics import Metrics
from connector.errors import TextsNotEmbeddable
from connector.model import ModelSource, Vectors
from connector.sync.embedding import VectorCache

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine
    from app.src.core.queue import Lane

QUERY_CACHE_BYTES = 16 << 20


class EngineEmbedder:
    """`connector.protocols.Embedder` and further methods for services. Thread-safe. `max_wait`: seconds that a request
    with a waiting caller may queue, None: no limit; `cache_bytes`: of cached query vectors."""

    def __init__(
        self,
        engine: EmbeddingEngine,
        metrics: Metrics | None = None,
        *,
        max_wait: float | None = None,
        cache_bytes: int = QUERY_CACHE_BYTES,
        source: ModelSource | None = None,
    ) -> None:
        """`source`: where the engine was loaded from."""
        from app.src.core.queue import Watcher  # core is imported with the engine only

        counters = self._metrics = metrics or Metrics()

        class _QueueMetrics(Watcher):
            def queued(self, lane: Lane, texts: int) -> None:
                counters.embed_queue.labels(lane).inc(texts)

            def began(self, lane: Lane, waited: float) -> None:
                counters.embed_wait_seconds.labels(lane).observe(waited)

            def batch(self, lane: Lane, texts: int, tokens: int) -> None:
                counters.embed_batch_texts.labels(lane).observe(texts)
                counters.embed_batch_tokens.labels(lane).observe(tokens)

            def refused(self) -> None:
                counters.embed_refused.inc()

        self.engine = engine
        engine.configure_queue(max_wait=max_wait, watcher=_QueueMetrics())
        # Pinned, to load exactly this model again.
        self.source = replace(source or ModelSource(engine.model), weights_sha256=engine.weights_sha256)
        self.dimension = engine.dimension
        self.model = engine.model
        self.fingerprint = engine.fingerprint
        self.max_tokens = engine.max_tokens
        self._queries = VectorCache(cache_bytes)  # of query texts; the texts themselves are not kept
        self._queries_lock = threading.Lock()

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Embed in the bulk lane."""
        with _translated():
            return self.engine.embed(list(texts), lane="bulk")

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        with _translated():
            return self.engine.embed_counted(list(texts), lane="bulk")

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Embed in the interactive lane, or return the cached vector. Raises EngineOverloaded."""
        key, metrics = VectorCache.key(text), self._metrics
        with self._queries_lock:
            known = self._queries.get(key)
        metrics.query_cache.labels("miss" if known is None else "hit").inc()
        if known is not None:
            return known.copy()
        with _translated():
            vector: NDArray[np.float32] = self.engine.embed([text], lane="interactive")[0].copy()
        with self._queries_lock:
            self._queries.put(key, vector)
        return vector.copy()

    def check_query(self, text: str) -> None:
        """Raise EngineOverloaded if `embed_query` would now. Returns at once."""
        with self._queries_lock:
            known = self._queries.get(VectorCache.key(text))
        if known is None:
            self.engine.check_room([text])

    def embed(self, texts: Sequence[str], *, normalize: bool = True) -> Vectors:
        """Embed for a waiting caller: in the interactive lane, or alternating with bulk if large. Raises the engine's
        errors."""
        return self.embed_later(texts, normalize=normalize).result()

    def embed_later(
        self,
        texts: Sequence[str],
        *,
        normalize: bool = True,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Future[Vectors]:
        """Tokenise and queue; the future may be cancelled. `counted` as in `Engine.submit`."""

        def ended(future: Future[Vectors]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._metrics.embedded_texts.inc(len(texts))

        queued = self.engine.submit(texts, normalize=normalize, counted=counted)
        queued.add_done_callback(ended)
        return queued

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self.engine.count_tokens(list(texts))

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        return self.engine.split(text, max_tokens, overlap)

    def close(self) -> None:
        """Finish the current batch and fail waiting calls with EngineClosed."""
        self.engine.close()
        with self._queries_lock:
            self._queries.clear()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except NonFinite as error:
        raise TextsNotEmbeddable(str(error), indices=error.indices) from error
