"""Score texts by how well they answer a query: with a cross-encoder, the operator's own function, a model in HANA or a
service over HTTP. Add a kind of reranker in `_scorer`."""

from __future__ import annotations

import http.client
import importlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
from pydantic import BaseModel, ConfigDict

from app.src.core.backends import EngineError
from app.src.core.device import detect
from app.src.core.memory import MemoryLimits
from app.src.observe.metrics import Metrics
from app.src.service.wiring import Parts
from app.src.settings import Settings, SettingsError
from app.src.settings.model import SearchSettings
from connector import cancellation
from connector.errors import ConnectorError
from connector.model import Hit

if TYPE_CHECKING:
    from app.src.core.cross_encoder import CrossEncoding

# Concurrent rerankings, including abandoned ones: most threads that a hanging reranker can block. Requests for scores
# have slots of their own, so that they never take those of searches.
SEARCHES_AT_ONCE, REQUESTS_AT_ONCE = 4, 2
NO_RERANKER = "no reranker is configured: set [search] rerank (docs/search.md)"
_MOST_BYTES = 8 << 20  # of an HTTP reranker's answer, which may repeat the texts
_LOADING_SECONDS = 60.0  # for the first reranking of `probe`, which loads a cross-encoder
_log = logging.getLogger(__name__)

Scorer = Callable[[str, Sequence[str]], Sequence[float | None]]
"""(query, texts) -> one finite number per text, greater is better, on any scale; None for a text without a score.
Called from several threads."""


class RerankFailed(ConnectorError):
    """The reranker gave no scores. The message quotes no text. `outcome`: failed or timeout."""

    def __init__(self, message: str, *, outcome: str = "failed", code: int = 0) -> None:
        super().__init__(message, code=code)
        self.outcome = outcome


class Reranker:
    """Thread-safe. Raises SettingsError for a folder, function or HANA that does not exist. The first use loads a
    cross-encoder."""

    def __init__(self, parts: Parts, metrics: Metrics) -> None:
        self.settings = parts.settings.search
        self._metrics = metrics
        self._searches = threading.BoundedSemaphore(SEARCHES_AT_ONCE)
        self._requests = threading.BoundedSemaphore(REQUESTS_AT_ONCE)
        self._score = _scorer(parts)
        self.on = self._score is not None

    def rerank(
        self, collection: str, query: str, hits: Sequence[Hit]
    ) -> tuple[list[Hit], dict[str, float], str | None]:
        """Return the hits, the reranker's scores by id, and None. The first `rerank_depth` hits are in the reranker's
        order, those that it gives no score last; all keep their search scores. After a failure: the hits in their old
        order, no scores, and the reason."""
        top = list(hits[: self.settings.rerank_depth])
        if not top:
            return [], {}, None
        try:
            scores = self._scores(query, [hit.text for hit in top], self._searches)
        except RerankFailed as error:
            self._metrics.reranks.labels(collection, error.outcome).inc()
            _log.warning("a reranking failed: %s", error)
            return list(hits), {}, f"the hits are not reranked: {error}"
        self._metrics.reranks.labels(collection, "done").inc()
        by_id = {hit.id: score for hit, score in zip(top, scores, strict=True) if score is not None}
        return [*(top[place] for place in falling(scores)), *hits[len(top) :]], by_id, None

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text of a request, greater is better, on the reranker's scale. Raises
        RerankFailed."""
        found = self._scores(query, texts, self._requests, advice="; send fewer documents")
        known = [score for score in found if score is not None]
        if len(known) < len(texts):
            raise RerankFailed(f"the reranker gave no score for documents[{found.index(None)}]; leave it out")
        return known

    def _scores(
        self, query: str, texts: Sequence[str], slots: threading.Semaphore, *, loading: bool = False, advice: str = ""
    ) -> list[float | None]:
        """Return a score for each text, None where the reranker gives none. `loading`: allow it the time to load.
        `advice`: ends the message if it takes too long. Raises RerankFailed, and Cancelled if the caller leaves."""
        score, call = self._score, cancellation.Cancellation()
        seconds = _LOADING_SECONDS if loading else self.settings.rerank_seconds
        limit = f"{seconds:g} s" + (" to load" if loading else " ([search] rerank_seconds)")
        outcome: Future[Sequence[float | None]] = Future()
        if score is None:
            raise RerankFailed(NO_RERANKER)

        def run() -> None:
            try:
                with cancellation.cancelled_by(call):
                    outcome.set_result(score(query, texts))
            except Exception as error:
                outcome.set_exception(error)
            finally:
                slots.release()

        if not slots.acquire(timeout=seconds):
            raise RerankFailed(f"it waited longer than {limit} for other rerankings", outcome="timeout")
        # A daemon thread, abandoned after `seconds`: Python cannot end a thread. Its statement, connection or next
        # batch is ended.
        threading.Thread(target=run, name="rerank", daemon=True).start()
        try:
            with cancellation.current().calling(call.cancel):
                given = outcome.result(seconds)
            scores = np.asarray(given, dtype=np.float64)  # None becomes NaN
        except Exception as error:
            late = not outcome.done()
            if late:
                threading.Thread(target=call.cancel, name="rerank-cancel", daemon=True).start()
            cancellation.current().check()  # the caller left
            if late:
                raise RerankFailed(f"it took longer than {limit}{advice}", outcome="timeout") from None
            # Name only the class of other errors: their message may quote a row.
            known = isinstance(error, EngineError | ConnectorError)
            raise RerankFailed(str(error) if known else type(error).__name__) from None
        if scores.shape == (len(texts),):
            found = [None if one is None else float(score) for one, score in zip(given, scores, strict=True)]
            numbers = [score for score in found if score is not None]
            if numbers and np.isfinite(numbers).all():
                return found
        raise RerankFailed(f"the reranker gave no finite number for each of {len(texts)} texts")

    def probe(self) -> float:
        """Load the reranker, let it compare two texts, and return how many seconds that took. Raises RerankFailed."""
        texts = ("hydraulic oil pump", "office chair")
        self._scores("oil pump", texts, self._requests, loading=True)
        start = time.perf_counter()
        self._scores("oil pump", texts, self._requests)
        return time.perf_counter() - start


def falling(scores: Sequence[float | None]) -> list[int]:
    """Return the places of the scores, the greatest first, None last; equal ones in their order."""
    return sorted(range(len(scores)), key=lambda place: (scores[place] is None, -(scores[place] or 0.0), place))


# ----------------------------------------------------------------------------------------------- the kinds of rerankers


def _scorer(parts: Parts) -> Scorer | None:
    """Return the configured reranker, None without one. Raises SettingsError."""
    settings = parts.settings
    search = settings.search
    match search.kind:
        case "function":
            return _function(search)
        case "cross-encoder":
            return _cross_encoder(settings)
        case "http":
            return _http(search)
        case "hana":
            if not settings.store_hana.configured:
                raise SettingsError(f'[search] rerank: "{search.rerank}" needs a HANA: set [hana] host')

            def scores(query: str, texts: Sequence[str]) -> Sequence[float | None]:
                from connector.hana.reranking import cross_encode

                return cross_encode(parts.store_pool, search.name, query, texts)

            return scores
        case "off":
            return None


def _function(search: SearchSettings) -> Scorer:
    """Import the operator's function, which is trusted like the rest of the configuration."""
    module_name, _, name = search.rerank.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise SettingsError(
            f'[search] rerank: the module "{module_name}" cannot be imported ({type(error).__name__}); it must'
            " be installed, or lie on PYTHONPATH"
        ) from error
    score: Scorer | None = getattr(module, name, None)
    if not callable(score):
        raise SettingsError(f'[search] rerank: the module "{module_name}" has no function "{name}"')
    return score


def _cross_encoder(settings: Settings) -> Scorer:
    from app.src.core.cross_encoder import check_folder

    folder, embedding = settings.search.folder, settings.embedding
    try:
        check_folder(folder)
    except EngineError as error:
        raise SettingsError(f"[search] rerank: {error}") from None
    loading = threading.Lock()
    loaded: list[CrossEncoding] = []

    def scores(query: str, texts: Sequence[str]) -> Sequence[float]:
        from app.src.core.cross_encoder import CrossEncoding

        limits = MemoryLimits(embedding.memory_fraction, embedding.reserve_mb << 20)
        with loading:
            if not loaded:
                loaded.append(CrossEncoding(folder, detect(embedding.device), limits))
        return loaded[0].scores(query, texts, cancellation.current().check)

    return scores


class _Scored(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    index: int
    relevance_score: float


class _Answer(BaseModel):
    results: list[_Scored]


def _http(search: SearchSettings) -> Scorer:
    """Return a reranker that speaks the protocol of Cohere, Jina and our own POST /rerank. Follows no redirect, uses no
    proxy, and opens a connection for each call."""
    address, seconds = urlsplit(search.rerank), search.rerank_seconds
    connect = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    port = address.port or connect.default_port  # without one, part of an IPv6 address would be taken for it
    path = (address.path or "/") + (f"?{address.query}" if address.query else "")
    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "owl-sap-connector"}
    if search.rerank_key is not None:
        headers["Authorization"] = f"Bearer {search.rerank_key.get_secret_value()}"
    named = {} if search.rerank_model is None else {"model": search.rerank_model}

    def ask(body: bytes) -> tuple[int, bytes]:
        with closing(connect(search.host, port, timeout=seconds)) as connection:
            connection.connect()
            line: socket.socket = connection.sock
            with cancellation.current().calling(lambda: line.shutdown(socket.SHUT_RDWR)):
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read(_MOST_BYTES)  # a longer one is cut, and so is not JSON

    def scores(query: str, texts: Sequence[str]) -> Sequence[float]:
        body = {**named, "query": query, "documents": list(texts), "top_n": len(texts)}
        try:
            status, content = ask(json.dumps(body).encode())
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: an invalid host name
            why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            raise RerankFailed(f"{search.host} cannot be reached, or does not answer ({why})") from None
        if status != http.client.OK:
            raise RerankFailed(
                f"{search.host} answered with HTTP {status}: check [search] rerank, rerank_key and rerank_model; "
                "redirects are not followed"
            )
        try:
            results = _Answer.model_validate_json(content).results
        except ValueError:
            results = []
        found = {each.index: each.relevance_score for each in results}
        if len(results) != len(texts) or set(found) != set(range(len(texts))):
            what = 'one {"index", "relevance_score"} in "results"'
            raise RerankFailed(f"{search.host} did not answer with {what} for each of {len(texts)} texts")
        return [found[place] for place in range(len(texts))]

    return scores
