"""The engine as the connector and every surface use it: texts queued by lane, search texts remembered, errors
translated. Knows engine, batcher and metrics; no HANA, no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from app.src.observe.metrics import Metrics
from app.src.service.query_cache import QueryCache
from connector.errors import TextsNotEmbeddable
from connector.model import Vectors

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine
    from app.src.core.lanes import Lane

QUERY_CACHE_BYTES = 16 << 20


class _Counted:
    """What the batcher tells, as metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def queued(self, lane: Lane, texts: int) -> None:
        self._metrics.embed_queue.labels(lane).inc(texts)

    def began(self, lane: Lane, waited: float) -> None:
        self._metrics.embed_wait_seconds.labels(lane).observe(waited)

    def batch(self, lane: Lane, texts: int, tokens: int) -> None:
        self._metrics.embed_batch_texts.labels(lane).observe(texts)
        self._metrics.embed_batch_tokens.labels(lane).observe(tokens)

    def refused(self) -> None:
        self._metrics.embed_refused.inc()


class EngineEmbedder:
    """`connector.protocols.Embedder`, and what services need beside it. Thread-safe.

    `max_wait`: seconds that who waits for an answer may have to queue, None for any; `cache_bytes`: for the vectors of
    search texts.
    """

    def __init__(
        self,
        engine: EmbeddingEngine,
        metrics: Metrics | None = None,
        *,
        max_wait: float | None = None,
        cache_bytes: int = QUERY_CACHE_BYTES,
    ) -> None:
        from app.src.core.batcher import Batcher

        metrics = self._metrics = metrics or Metrics()
        self.engine = engine
        self.batcher = Batcher(engine, max_wait=max_wait, watcher=_Counted(metrics))
        self.dimension = engine.dimension
        self.model = engine.model
        self.fingerprint = engine.fingerprint
        self.max_tokens = engine.max_tokens
        self._queries = QueryCache(cache_bytes, metrics)

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """In the lane bulk, behind whoever waits for an answer."""
        with _translated():
            return self.batcher.embed(list(texts), lane="bulk")

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        with _translated():
            return self.batcher.embed_counted(list(texts), lane="bulk")

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """In the lane interactive; remembered, so that the same text again costs nothing.
        Raises EngineOverloaded beside the connector's errors."""
        with _translated():
            return self._queries.get(text, lambda: self.batcher.embed([text], lane="interactive")[0])

    def check_query(self, text: str) -> None:
        """Raises EngineOverloaded where `embed_query` would now. Takes no time."""
        if not self._queries.holds(text):
            self.batcher.check_room([text])

    def embed(self, texts: Sequence[str], *, normalize: bool = True) -> Vectors:
        """Vectors in the order of the texts, shape (n, dimension): in the lane interactive or, for many texts, in turns
        with the bulk work. Raises the engine's own errors."""
        start = time.perf_counter()
        vectors = self.batcher.embed(texts, normalize=normalize)
        self._count(len(texts), start)
        return vectors

    def embed_later(
        self,
        texts: Sequence[str],
        *,
        normalize: bool = True,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Future[Vectors]:
        """As `embed`, without waiting: texts are tokenised here and queued. Cancelled, they leave the queue. `counted`
        as in `Batcher.submit`."""
        start = time.perf_counter()

        def ended(future: Future[Vectors]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._count(len(texts), start)

        queued = self.batcher.submit(texts, normalize=normalize, counted=counted)
        queued.add_done_callback(ended)
        return queued

    def _count(self, texts: int, start: float) -> None:
        self._metrics.embedded_texts.inc(texts)
        self._metrics.embed_seconds.observe(time.perf_counter() - start)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self.engine.count_tokens(list(texts))

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        return self.engine.split(text, max_tokens, overlap)

    def close(self) -> None:
        """Whoever waits gets EngineClosed; the batch in hand is finished."""
        self.batcher.close()
        self._queries.clear()
        self.engine.close()


@contextmanager
def _translated() -> Iterator[None]:
    from app.src.core.backends import NonFinite

    try:
        yield
    except NonFinite as error:
        raise TextsNotEmbeddable(str(error), indices=error.indices) from error
