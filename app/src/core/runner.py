"""Batches on one backend: planned by tokens, computed one at a time or one ahead, repaired in fp32, and counted."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .backends import Backend, EngineClosed, Pause, Pending, TokenBatch, Vectors
from .memory import MemoryLimits, T4MemoryManager
from .tokens import padded, plan_batches

UNPADDED = ("packed", "hashing")  # paths on which a batch costs the sum of its lengths


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since loading. `tokens` counts computed ones, special tokens included; seconds are busy seconds.

    `recomputed`: rows computed again in fp32 because they were not finite.
    """

    texts: int = 0
    computed_texts: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    tokenize_seconds: float = 0.0
    compute_seconds: float = 0.0
    out_of_memory: int = 0
    recomputed: int = 0

    @property
    def padding_ratio(self) -> float:
        """Computed tokens per token of a text; 1.0 without padding."""
        return self.padded_tokens / self.tokens if self.tokens else 1.0


@dataclass(frozen=True, slots=True)
class Running:
    """A started batch."""

    _result: Callable[[], Vectors]

    def result(self) -> Vectors:
        """Wait for float32 (n, dimension), not normalised, with rows that are not finite. Call it once.

        Raises OutOfMemory, EngineClosed, and other errors of the backend, whenever they happened.
        """
        return self._result()


class BatchRunner:
    """Thread-safe: a second batch waits while one is computed or launched, and so does `close`."""

    def __init__(self, backend: Backend, limits: MemoryLimits | None = None) -> None:
        self.backend = backend
        info, measured = backend.info, backend.token_cost()
        self.memory = T4MemoryManager(
            backend.profile, limits, used_bytes=backend.used_bytes(), free_bytes=backend.free_bytes()
        )
        self.memory.plan_for(info.shape, info.precision, measured)
        self.ahead = backend.ahead
        self.steps = 1 + backend.pauses  # parts of about equal length, between which a batch can be interrupted
        self._packed = info.path in UNPADDED
        self._multiple = backend.profile.padding_multiple(info.precision)
        self._device = threading.Lock()
        self._pausing_thread: int | None = None  # it computes a batch within another one, which holds the lock
        self._ended = 0.0  # when the device finished the last batch that was waited for
        self._closed = False
        self._counting = threading.Lock()
        self._stats = EngineStats()

    # -- planning

    @property
    def token_budget(self) -> int:
        """Tokens of one batch, now."""
        return self.memory.token_budget

    @property
    def full_batch(self) -> int:
        """Tokens of one batch while memory does not run out."""
        return self.memory.planned_tokens

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return positions in batches that the device takes, longest first."""
        return self._planned(lengths, self.memory.token_budget)

    def smaller(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide a batch that ran out of memory, and plan later batches smaller, too."""
        plan = self._planned(lengths, self.memory.shrink(self._cost(lengths)))
        if len(plan) == 1:  # the least budget still takes it whole
            plan = [plan[0][: len(lengths) // 2], plan[0][len(lengths) // 2 :]]
        return plan

    def _planned(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        return plan_batches(lengths, budget, self._multiple, packed=self._packed)

    def _cost(self, lengths: Sequence[int]) -> int:
        """Return what a batch counts against the budget."""
        return sum(lengths) if self._packed else padded(max(lengths), self._multiple) * len(lengths)

    # -- computing

    def begin(self, batch: TokenBatch, pause: Pause | None = None) -> Running:
        """Start a batch. `pause` is called `steps` - 1 times within it, and may itself begin one.

        If `ahead` is 0, the batch is done when this returns.
        """
        try:
            if not self.ahead:
                vectors = self._compute(batch, pause)
                return Running(lambda: vectors)
            with self._device:
                self.check_open()
                started = time.perf_counter()
                pending = self.backend.launch(batch)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # the error is kept, its tensors must not be
            return Running(partial(_raise, error))
        return Running(partial(self._land, batch, pending, started))

    def _compute(self, batch: TokenBatch, pause: Pause | None) -> Vectors:
        within_another = self._pausing_thread == threading.get_ident()
        with contextlib.nullcontext() if within_another else self._device:
            self.check_open()
            paused: list[float] = []
            started = time.perf_counter()
            vectors = self.backend.forward(batch, pause=pause and partial(self._pause, pause, paused))
            vectors, recomputed = self._repaired(batch, vectors)
            seconds = time.perf_counter() - started - sum(paused)
        self._count_batch(batch, seconds, recomputed)
        return vectors

    def _pause(self, pause: Pause, paused: list[float]) -> None:
        started = time.perf_counter()
        self._pausing_thread = threading.get_ident()
        try:
            pause()
        finally:
            self._pausing_thread = None
            paused.append(time.perf_counter() - started)

    def _land(self, batch: TokenBatch, pending: Pending, started: float) -> Vectors:
        """Wait without the lock, so that the next batch can be launched meanwhile."""
        vectors, recomputed = pending.result(), 0
        if not usable(vectors).all():
            with self._device:
                self.check_open()
                vectors, recomputed = self._repaired(batch, vectors)
        ended = time.perf_counter()
        seconds = ended - max(started, self._ended)  # before that the device was busy with another batch
        self._ended = ended
        self._count_batch(batch, max(0.0, seconds), recomputed)
        return vectors

    def _repaired(self, batch: TokenBatch, vectors: Vectors) -> tuple[Vectors, int]:
        """Compute rows that are not finite again, alone and in fp32; return how many. Called under the lock."""
        bad = np.flatnonzero(~usable(vectors)).tolist()
        if bad:
            vectors = np.array(vectors)
            for row in bad:
                vectors[row] = self.backend.forward(batch.select([row]), exact=True)[0]
        return vectors, len(bad)

    # -- counting, end

    def stats(self) -> EngineStats:
        with self._counting:
            return replace(self._stats, out_of_memory=self.memory.out_of_memory_count)

    def count(self, **more: float) -> None:
        """Add to fields of the statistics."""
        with self._counting:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + more[name] for name in more})

    def _count_batch(self, batch: TokenBatch, seconds: float, recomputed: int) -> None:
        lengths = batch.lengths.tolist()
        cost = self._cost(lengths)
        self.memory.succeeded(cost)
        self.count(batches=1, tokens=sum(lengths), padded_tokens=cost, compute_seconds=seconds, recomputed=recomputed)

    def check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"the engine of {self.backend.info.name} is closed")

    def close(self) -> None:
        """Wait for a batch that is being computed or launched, then free model and memory."""
        with self._device:
            if not self._closed:
                self._closed = True
                self.backend.close()


def _raise(error: Exception) -> Vectors:
    raise error


def usable(vectors: Vectors) -> NDArray[np.bool_]:
    """Return which rows are finite and not zero, so that they can be normalised."""
    squares = _squares(vectors)
    return np.isfinite(squares) & (squares > 0)


def normalized(vectors: Vectors) -> Vectors:
    """Scale each row to length 1, in place. All rows must be `usable`."""
    vectors /= np.sqrt(_squares(vectors))[:, None]
    return vectors


def _squares(vectors: Vectors) -> NDArray[np.float64]:
    """Return squared lengths in float64, where no finite float32 row overflows."""
    squares: NDArray[np.float64] = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
    return squares
