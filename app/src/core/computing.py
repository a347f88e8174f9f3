"""One batch at a time, or one ahead of another where the device works on its own: launched, waited for, and rows that
are not finite computed again in fp32.

Knows a backend, its memory and who counts; nothing of texts, of planning or of who waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .backends import Backend, EngineClosed, ModelUnsupported, TokenIds, Vectors
from .backends.overlapping import Overlapping, Pending
from .backends.pausing import Interruptible
from .backends.telling_tokens import TellsTokens

Pause = Callable[[], None]
Result = Callable[[], Vectors]


class Done(Protocol):
    """Told of a batch that went well: its tokens, the seconds for which the device was busy with it, and how many rows
    were computed again."""

    def __call__(self, tokens: Sequence[TokenIds], seconds: float, recomputed: int) -> None: ...


class Running:
    """A batch that the device was given. What went wrong with it, at once or later, is raised by `result`."""

    def __init__(self, result: Result) -> None:
        self._result = result

    def result(self) -> Vectors:
        """Float32 (n, dimension), not normalised, rows without a finite vector included. To be called once. Raises
        OutOfMemory, EngineClosed, and what the backend raises."""
        return self._result()


class Computing:
    """Thread-safe: whoever comes while a batch is launched waits, and `close` does too."""

    def __init__(self, backend: Backend, done: Done) -> None:
        self._backend = backend
        self._done = done
        self._interruptible = backend if isinstance(backend, Interruptible) else None
        self._overlapping = backend if isinstance(backend, Overlapping) and backend.ahead else None
        self._device = threading.Lock()
        self._passing: int | None = None
        """The thread in which a batch lets another one pass, which is then within the lock already."""
        self._ended = 0.0
        """When the device had finished the last batch that was waited for."""
        self._closed = False

    @property
    def steps(self) -> int:
        """In how many parts of about equal length a batch can be interrupted; 1: not at all."""
        return 1 if self._interruptible is None else 1 + self._interruptible.pauses

    @property
    def ahead(self) -> int:
        """How many batches should run beside the one that is waited for; 0: `begin` returns when its batch is done."""
        return 0 if self._overlapping is None else self._overlapping.ahead

    def begin(self, tokens: Sequence[TokenIds], pause: Pause | None = None) -> Running:
        """Launch a batch. `pause` is called now and then in its midst, by backends that can; it may itself begin
        one."""
        try:
            if self._overlapping is None:
                return Running(partial(_given, self._run(tokens, pause)))
            with self._device:
                self.check_open()
                started = time.perf_counter()
                pending = self._overlapping.begin(tokens)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # it is kept, the tensors of its forward pass must not be
            return Running(partial(_raised, error))
        return Running(partial(self._landed, tokens, pending, started))

    def token_vectors(self, tokens: Sequence[TokenIds]) -> list[Vectors]:
        """Of one batch, as `TellsTokens.token_vectors`. Raises EngineClosed, and ModelUnsupported for a backend that
        has no vectors of tokens."""
        with self._device:
            self.check_open()
            if not isinstance(self._backend, TellsTokens):
                info = self._backend.info
                raise ModelUnsupported(f"the model {info.name}, computed by {info.path}, has no vectors of its tokens")
            return self._backend.token_vectors(tokens)

    def check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"the engine of {self._backend.info.name} is closed")

    def close(self) -> None:
        """Wait for a batch that is being computed or launched, then let go of model and memory."""
        with self._device:
            if not self._closed:
                self._closed = True
                self._backend.close()

    # -- where the host computes, or waits

    def _run(self, tokens: Sequence[TokenIds], pause: Pause | None) -> Vectors:
        passes = self._passing == threading.get_ident()
        with contextlib.nullcontext() if passes else self._device:
            self.check_open()
            paused: list[float] = []
            started = time.perf_counter()
            with self._pausing(None if pause is None else partial(self._let_pass, pause, paused)):
                vectors = self._backend.forward(tokens)
            vectors, recomputed = self._mended(tokens, vectors)
            seconds = time.perf_counter() - started - sum(paused)
        self._done(tokens, seconds, recomputed)
        return vectors

    def _let_pass(self, pause: Pause, paused: list[float]) -> None:
        started = time.perf_counter()
        self._passing = threading.get_ident()
        try:
            pause()
        finally:
            self._passing = None
            paused.append(time.perf_counter() - started)

    @contextlib.contextmanager
    def _pausing(self, pause: Pause | None) -> Iterator[None]:
        """Batches nest: each has its own way to pause, and most have none."""
        backend = self._interruptible
        if backend is None:
            yield
            return
        before, backend.pause = backend.pause, pause
        try:
            yield
        finally:
            backend.pause = before

    # -- where the device works on its own

    def _landed(self, tokens: Sequence[TokenIds], pending: Pending, started: float) -> Vectors:
        """Waited for without the lock, so that others launch meanwhile."""
        vectors = pending.result()
        if not usable(vectors).all():
            with self._device:
                self.check_open()
                vectors, recomputed = self._mended(tokens, vectors)
        else:
            recomputed = 0
        ended = time.perf_counter()
        seconds = ended - max(started, self._ended)  # before that it was busy with another batch
        self._ended = ended
        self._done(tokens, max(0.0, seconds), recomputed)
        return vectors

    def _mended(self, tokens: Sequence[TokenIds], vectors: Vectors) -> tuple[Vectors, int]:
        """Rows that are not finite computed again, alone and in fp32; how many. Called under the lock."""
        bad = np.flatnonzero(~usable(vectors)).tolist()
        if bad:
            vectors = np.array(vectors)
            for row in bad:
                vectors[row] = self._backend.forward([tokens[row]], exact=True)[0]
        return vectors, len(bad)


def _given(vectors: Vectors) -> Vectors:
    return vectors


def _raised(error: Exception) -> Vectors:
    raise error


def usable(vectors: Vectors) -> NDArray[np.bool_]:
    """Which rows are finite and not zero (so that they can be normalised)."""
    squares = _squares(vectors)
    return np.isfinite(squares) & (squares > 0)


def normalized(vectors: Vectors) -> Vectors:
    """Each row of length 1, in place; all are `usable`."""
    vectors /= np.sqrt(_squares(vectors))[:, None]
    return vectors


def _squares(vectors: Vectors) -> NDArray[np.float64]:
    """Squared lengths of the rows, in float64, where no finite float32 row overflows."""
    squares: NDArray[np.float64] = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
    return squares
