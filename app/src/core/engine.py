"""The embedding engine: texts in, unit vectors out, in the same order."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from .agreement import squares
from .backends import Backend, InputType, ModelUnsupported, NonFinite, TokenBatch, Vectors
from .device import DeviceProfile, Precision
from .memory import MemoryLimits, T4MemoryManager
from .queue import SMALL_SHARE, BatchRunner, EmbeddingQueue, EngineStats, Lane, Request, Watcher
from .tokens import piece_spans

# A large call is queued in parts of this size, or of a token budget if larger, each tokenised while earlier parts are
# computed.
REQUEST_TEXTS = 2048
REQUEST_CHARACTERS = 1 << 20
# A folder with the name of a packaged model is called ./NAME. For the first packaged model fingerprints have held that
# since long; for later ones it would rebuild collections that were made before they were packaged.
_SHOWN_FIRST = "./all-MiniLM-L6-v2"
QUEUED_PARTS = 2  # of one call, besides the part being tokenised; more if the device can compute them at once
CHARACTERS = 4.0  # of a token, assumed before the first large part was tokenised


class Device(Protocol):
    """A queue and the device that computes it; of several devices, the attributes are those of the first one."""

    precision: Precision
    precision_reason: str
    path: str
    path_reason: str
    profile: DeviceProfile

    @abstractmethod
    def check_room(self, texts: Sequence[str]) -> None:
        """Raise EngineOverloaded if it is certain without tokenising that these texts would be refused now."""

    @abstractmethod
    def configure_queue(self, *, max_wait: float | None = None, watcher: Watcher | None = None) -> None:
        """Set the queue's observer, and the expected wait (s) above which it refuses requests (None: no limit)."""

    @property
    @abstractmethod
    def token_budget(self) -> int:
        """Return the current token budget of a batch."""

    @property
    @abstractmethod
    def planned_tokens(self) -> int:
        """Return the token budget without reductions after OutOfMemory."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the totals since loading."""

    @abstractmethod
    def stalled(self) -> float:
        """Return the seconds that a batch has been in progress without any result; 0.0 if none is in progress."""

    @property
    @abstractmethod
    def deaths(self) -> int:
        """Return how often the computing thread ended unexpectedly since it last computed a batch."""

    @property
    @abstractmethod
    def failed(self) -> str:
        """Return why the device computes nothing more in this process; "" while it works. Then all calls that compute
        raise DeviceFailed."""

    @abstractmethod
    def close(self) -> None:
        """Fail waiting calls with EngineClosed, wait for the batch in progress, free model and memory."""


class Engine(Device, ABC):
    """One model behind a queue, on one device or on several. Thread-safe.

    `input_type` chooses the model's prompt, which is put before each text. Token counts and limits exclude it.
    `path`, `matryoshka`, `languages` and `licence`: see ModelInfo.
    """

    model: str
    dimension: int
    max_tokens: int  # of the longest text, without special tokens and prompts; longer texts are cut
    fingerprint: str  # an id of everything that determines the vectors
    prompts: dict[InputType, str]
    matryoshka: Sequence[int]
    weights_sha256: str
    languages: tuple[str, ...]
    licence: str
    memory: T4MemoryManager  # of this process

    def embed(
        self,
        texts: Sequence[str],
        lane: Lane | None = None,
        *,
        input_type: InputType = "document",
        normalize: bool = True,
    ) -> Vectors:
        """Return float32 (n, dimension): row i for text i, finite and, unless `normalize` is off, of length 1.

        Texts above `max_tokens` are cut. Identical texts are computed once. Without `lane` a small call is interactive,
        a larger one bulk. An interrupted call leaves the queue. Raises NonFinite with all texts that have no vector,
        OutOfMemory if a single text does not fit, EngineOverloaded (interactive only), WorkerDied, EngineClosed,
        DeviceFailed.
        """
        unique, rows = _unique(texts)
        vectors, _counts = self._computed(unique, lane, input_type, counted=False)
        self.count(texts=len(texts), computed_texts=len(unique))
        return _result(rows, normalize, vectors)

    def embed_counted(
        self, texts: Sequence[str], lane: Lane | None = None, *, input_type: InputType = "document"
    ) -> tuple[Vectors, list[int]]:
        """Return the vectors, and the token count of each whole text."""
        unique, rows = _unique(texts)
        vectors, counts = self._computed(unique, lane, input_type, counted=True)
        self.count(texts=len(texts), computed_texts=len(unique))
        return _result(rows, True, vectors), counts[rows].tolist()

    @abstractmethod
    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None = None,
        *,
        input_type: InputType = "document",
        normalize: bool = True,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Future[Vectors]:
        """Tokenise and queue; the future has the result and errors of `embed`, and may be cancelled.

        `counted` gets the token counts of the whole texts before they are queued; its exceptions reach the caller.
        """

    @abstractmethod
    def _computed(
        self, texts: Sequence[str], lane: Lane | None, input_type: InputType, *, counted: bool
    ) -> tuple[Vectors, NDArray[np.intp]]:
        """Return raw vectors of distinct texts; and, if `counted`, the token count of each whole text."""

    @abstractmethod
    def count(self, **more: int) -> None:
        """Add to fields of the statistics."""

    @abstractmethod
    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the token count of each whole text, without special tokens."""

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        """Return substrings of at most `max_tokens` tokens that together cover `text`.

        Each begins up to `overlap` tokens before the end of the previous one. Cuts are at white space, else at words.
        """
        if max_tokens < 1 or not 0 <= overlap < max_tokens:
            raise ValueError(f"cannot split by {max_tokens} tokens with {overlap} overlapping: need 0 <= overlap < max")
        return [text[begin:stop] for begin, stop in self.piece_spans(text, max_tokens, overlap)]

    @abstractmethod
    def piece_spans(self, text: str, max_tokens: int, overlap: int) -> Iterator[tuple[int, int]]:
        """Yield the first character of each piece of `split`, and one after its last."""

    @property
    def members(self) -> Sequence[Device]:
        """Return the engine of each device."""
        return [self]

    @property
    def failures(self) -> list[str]:
        """Return for each of the `members` why it computes nothing more; "" while it works."""
        return [self.failed]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EmbeddingEngine(Engine):
    """The engine of one device."""

    ready = True  # another thread starts at once

    def __init__(
        self, backend: Backend, limits: MemoryLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        info = backend.info
        self.model, self.dimension = info.name, info.dimension
        self.prompts = {"query": info.query_prompt, "document": info.document_prompt}
        prompts = [prompt for prompt in self.prompts.values() if prompt]
        self.max_tokens = info.max_tokens - max(backend.count(prompts), default=0)
        if self.max_tokens < 1:
            raise ModelUnsupported(
                f"model {info.name!r}: a prompt leaves no room for texts in {info.max_tokens} tokens"
            )
        self.matryoshka, self.weights_sha256 = info.matryoshka, info.weights_sha256
        self.precision, self.precision_reason = info.precision, info.precision_reason
        self.path, self.path_reason = info.path, info.path_reason
        self.languages, self.licence = info.languages, info.licence
        self.profile = backend.profile
        # All float precisions are one family: their vectors agree to a cosine of 0.999, so a collection built on a GPU
        # serves a CPU. int8 is another family, and so is each calibration.
        family = info.variant or ("int8" if info.precision == "int8" else "float")
        sums = f"{info.weights_sha256[:16]}.{info.tokenizer_sha256[:8]}"
        name = info.name if info.name == _SHOWN_FIRST else info.name.removeprefix("./")
        self.fingerprint = f"{name}@{sums}/{info.pooling}/{self.max_tokens}/unit/{family}"
        if prompts:
            digest = hashlib.sha256("\0".join(self.prompts.values()).encode("utf-8", "surrogatepass"))
            self.fingerprint += f"/prompts-{digest.hexdigest()[:16]}"
        self._backend = backend
        self._characters = CHARACTERS  # of a token of the last large part
        self._runner = BatchRunner(backend, limits)
        self._queue = EmbeddingQueue(self._runner, clock=clock)
        self.memory = self._runner.memory
        self.queued = self._queue.queued

    @property
    def token_budget(self) -> int:
        return self.memory.token_budget

    @property
    def planned_tokens(self) -> int:
        return self.memory.planned_tokens

    # -- vectors

    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None = None,
        *,
        input_type: InputType = "document",
        normalize: bool = True,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Future[Vectors]:
        unique, rows = _unique(texts)
        tokens = self._tokenize(unique, input_type)
        if counted is not None:
            counted(self._whole_lengths(unique, tokens.lengths, input_type)[rows].tolist())
        self.count(texts=len(texts), computed_texts=len(unique))
        request = Request(
            tokens,
            lane or self._queue.lane_of(tokens.tokens),
            np.empty((len(unique), self.dimension), dtype=np.float32),
            self._queue.clock(),
            finish=partial(_result, rows, normalize),
            bounded=lane != "bulk",  # a caller waits, even if the request's size puts it in the bulk lane
        )
        return self._queue.add(request)

    def _computed(
        self, texts: Sequence[str], lane: Lane | None, input_type: InputType, *, counted: bool
    ) -> tuple[Vectors, NDArray[np.intp]]:
        self._runner.check_open()
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        lengths = np.zeros(len(texts), dtype=np.intp)
        pending: deque[Request] = deque()
        parts = divided(texts, least=int(self._characters * self.token_budget))
        try:
            for start, end in parts:
                tokens = self._tokenize(texts[start:end], input_type)
                lengths[start:end] = tokens.lengths
                if end - start >= REQUEST_TEXTS:
                    self._characters = sum(map(len, texts[start:end])) / max(1, tokens.tokens)
                lane = lane or ("bulk" if len(parts) > 1 else self._queue.lane_of(tokens.tokens))
                bounded = lane == "interactive"
                request = Request(tokens, lane, vectors[start:end], self._queue.clock(), bounded=bounded)
                self._queue.add(request)
                pending.append(request)
                while len(pending) > QUEUED_PARTS and end < len(texts):
                    if not self._queue.wait_for_room(pending, self._runner.appetite):
                        break
                    pending.popleft().future.result()
            for request in pending:
                self._queue.wait_for(request.future)
        finally:
            for request in pending:
                request.future.cancel()
        return vectors, self._whole_lengths(texts, lengths, input_type) if counted else lengths

    def count(self, **more: int) -> None:
        self._runner.count(**more)

    def _tokenize(self, texts: Sequence[str], input_type: InputType) -> TokenBatch:
        self._runner.check_open()
        if input_type not in self.prompts:
            raise ValueError(f'input_type must be "query" or "document", not {input_type!r}')
        started = time.perf_counter()
        prompt = self.prompts[input_type]
        tokens = self._backend.tokenize([prompt + text for text in texts] if prompt else texts)
        self._runner.count(tokenize_seconds=time.perf_counter() - started)
        return tokens

    # -- tokens

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        self._runner.check_open(computing=False)
        return self._backend.count(strings(texts))

    def piece_spans(self, text: str, max_tokens: int, overlap: int) -> Iterator[tuple[int, int]]:
        self._runner.check_open(computing=False)
        count = self._backend.count
        return piece_spans(text, self._backend.offsets(text), max_tokens, overlap, lambda piece: count([piece])[0])

    def _whole_lengths(
        self, texts: Sequence[str], lengths: NDArray[np.intp], input_type: InputType
    ) -> NDArray[np.intp]:
        """Return token counts as `count_tokens` does; without a prompt, tokenise only texts again that may have been
        cut. Behind a prompt a text may begin with other tokens than alone."""
        if self.prompts[input_type]:
            return np.asarray(self._backend.count(texts), dtype=np.intp)
        whole = lengths - self._backend.info.special_tokens
        full = np.flatnonzero(whole >= self.max_tokens).tolist()
        if full:
            whole[full] = self._backend.count([texts[place] for place in full])
        return whole

    # -- the queue

    def configure_queue(self, *, max_wait: float | None = None, watcher: Watcher | None = None) -> None:
        self._queue.max_wait = max_wait
        self._queue.watcher = watcher or self._queue.watcher

    def check_room(self, texts: Sequence[str]) -> None:
        if sum(map(len, texts)) <= self.token_budget * SMALL_SHARE:  # a token has at least one character
            self._queue.refuse_if_crowded("interactive")  # without the lock: queueing checks again

    def stats(self) -> EngineStats:
        return self._runner.stats()

    def stalled(self) -> float:
        return self._queue.stalled()

    @property
    def deaths(self) -> int:
        return self._queue.deaths

    @property
    def failed(self) -> str:
        return self._runner.failed

    def close(self) -> None:
        self._queue.close()
        self._runner.close()


def strings(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError("a list of texts is wanted, not one string")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"text {index} is {type(text).__name__}, not a string")
    return list(texts)


def _unique(texts: Sequence[str]) -> tuple[list[str], NDArray[np.intp]]:
    """Return the distinct texts, and for each text its position among them."""
    places: dict[str, int] = {}
    rows = np.fromiter((places.setdefault(text, len(places)) for text in strings(texts)), np.intp, len(texts))
    return list(places), rows


def _result(rows: NDArray[np.intp], normalize: bool, vectors: Vectors) -> Vectors:
    """Expand the vectors of the distinct texts to a row for each text. Raises NonFinite."""
    lengths = squares(vectors)
    good = np.isfinite(lengths) & (lengths > 0)
    if not good.all():
        raise NonFinite([int(index) for index in np.flatnonzero(~good[rows])])
    if normalize:
        norms = np.sqrt(lengths)
        if norms.max(initial=1) < 1e38:  # division in float32 is twice as fast
            norms = norms.astype(np.float32)
        vectors /= norms[:, None]
    return vectors[rows] if len(vectors) < len(rows) else vectors


def divided(texts: Sequence[str], most: int | None = None, *, least: int = 0) -> list[tuple[int, int]]:
    """Return the start and end of each part of a large call. `most`: characters, less than REQUEST_CHARACTERS; `least`:
    characters of each part but the last, even above the limits."""
    most = most or REQUEST_CHARACTERS
    ends, start, characters = [], 0, 0
    for place, text in enumerate(texts):
        characters += len(text)
        if characters >= least and (place + 1 - start >= REQUEST_TEXTS or characters >= most):
            ends.append((start, place + 1))
            start, characters = place + 1, 0
    return [*ends, (start, len(texts))] if start < len(texts) else ends
