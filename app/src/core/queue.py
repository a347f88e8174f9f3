"""The queue before a device: requests wait in two lanes, one thread computes their texts in batches within a token
budget, and each request gets its own vectors or its own error.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np

from .agreement import usable
from .backends import Backend, DeviceFailed, EngineClosed, EngineError, OutOfMemory, Pause, Running, TokenBatch, Vectors
from .device import ELEMENT_BYTES
from .memory import MemoryLimits, T4MemoryManager, memory_of
from .tokens import padded, plan_batches

Lane = Literal["interactive", "bulk"]  # interactive: a caller waits; bulk: a sync, a file or a large request
LANES: tuple[Lane, ...] = get_args(Lane)
# A request above this share of a batch's tokens joins the bulk lane, so that it does not delay small ones.
SMALL_SHARE = 0.25
# Texts worth this many token budgets are sorted by length and planned together, across all requests of a lane.
WINDOW = 4
# Interactive batches may run this long while bulk requests wait; then one bulk batch runs.
RUN_SECONDS = 0.1
# Interactive requests overtake bulk work after every step. A step, including batches launched ahead, lasts at most
# STEP_SECONDS, but is at least LEAST_SHARE of a full batch, because smaller steps cost more than they save. Batches are
# full again after RECENT_SECONDS without an interactive request.
STEP_SECONDS = 0.005
LEAST_SHARE = 0.25
RECENT_SECONDS = 10.0
IDLE_SECONDS = 30.0  # the thread ends after being idle for so long
_WATCH_SECONDS = 1.0  # how often waiting callers check that the thread is alive
_DECAY = 0.9  # weight of the previous average at each new batch
LEAST_MEASURED_TOKENS = 64  # smaller batches do not show the speed of full ones
_log = logging.getLogger(__name__)

UNPADDED = ("packed", "hashing")  # paths on which a batch costs the sum of its lengths


class EngineOverloaded(EngineError):
    """A request would wait longer than allowed. `seconds`: estimated time of the queued work; None if unknown."""

    retryable = True

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class WorkerDied(EngineError):
    """The computing thread ended during this request's batch."""

    retryable = True  # another thread has started


class Watcher:
    """Observer of a queue, called in the thread that causes the event. Its methods return at once and never raise."""

    def queued(self, lane: Lane, texts: int) -> None:
        """Report that `texts` more texts wait; fewer if negative."""

    def began(self, lane: Lane, waited: float) -> None:
        """Report that a request's first text entered a batch, `waited` seconds after the request arrived."""

    def batch(self, lane: Lane, texts: int, tokens: int) -> None:
        """Report that a batch starts."""

    def refused(self) -> None:
        """Report that a request was refused because it would have waited too long."""


# -------------------------------------------------------------------------------------------------- one batch at a time


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since loading. `tokens` counts computed tokens, special ones included; seconds are busy seconds.

    `recomputed`: rows computed again in fp32 because they were zero or not finite.
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


class BatchRunner:
    """Plans batches by tokens for one backend, computes them one at a time or one ahead, repairs in fp32, and counts.

    Thread-safe: a second batch waits while one is computed or launched, and so does `close`.
    """

    def __init__(self, backend: Backend, limits: MemoryLimits | None = None) -> None:
        self.backend = backend
        info, measured = backend.info, backend.token_cost()
        used, free = backend.used_bytes(), backend.free_bytes()
        device = memory_of(backend.profile)
        self.memory = T4MemoryManager(limits=limits, used_bytes=used, free_bytes=free, device=device)
        self.memory.plan_for(info.shape, info.precision, measured)
        self.ahead = backend.ahead
        self.steps = 1 + backend.pauses  # parts of about equal length, between which a batch can be interrupted
        self._packed = info.path in UNPADDED
        self._multiple = backend.profile.padding_multiple(info.precision)
        self._device = threading.Lock()
        self._pausing_thread: int | None = None  # computes a nested batch under the lock of the outer one
        self._ended = 0.0  # when the device finished the last batch that was waited for
        self._closed = False
        self.failed = ""  # why the device computes nothing more
        self._counting = threading.Lock()
        self._stats = EngineStats()

    def plan(self, lengths: Sequence[int], budget: int | None = None) -> list[list[int]]:
        """Return positions grouped into batches that fit the device, longest first."""
        budget = self.memory.token_budget if budget is None else budget
        return plan_batches(lengths, budget, self._multiple, packed=self._packed)

    def smaller(self, lengths: Sequence[int]) -> list[list[int]]:
        """Split a batch that ran out of memory, and plan later batches smaller, too."""
        plan = self.plan(lengths, self.memory.shrink(self._cost(lengths)))
        if len(plan) == 1:  # the batch fits even the smallest budget
            plan = [plan[0][: len(lengths) // 2], plan[0][len(lengths) // 2 :]]
        return plan

    def _cost(self, lengths: Sequence[int]) -> int:
        """Return how many tokens of the budget a batch uses."""
        return sum(lengths) if self._packed else padded(max(lengths), self._multiple) * len(lengths)

    def begin(self, batch: TokenBatch, pause: Pause | None = None) -> Running:
        """Launch a batch; if `ahead` is 0, calling the result computes it. `pause` is called `steps` - 1 times
        during the batch, and may itself begin another one."""
        if not self.ahead:
            return lambda: self._compute(batch, pause)
        failed: Future[Vectors] = Future()
        try:
            with self._device:
                self.check_open()
                return partial(self._land, batch, time.perf_counter(), self.backend.launch(batch))
        except Exception as error:
            failed.set_exception(error)
            return failed.result

    def _compute(self, batch: TokenBatch, pause: Pause | None) -> Vectors:
        paused = 0.0

        def interrupted() -> None:
            nonlocal paused
            assert pause is not None
            started = time.perf_counter()
            self._pausing_thread = threading.get_ident()
            try:
                pause()
            finally:
                self._pausing_thread = None
                paused += time.perf_counter() - started

        within_another = self._pausing_thread == threading.get_ident()
        with contextlib.nullcontext() if within_another else self._device:
            self.check_open()
            started = time.perf_counter()
            vectors = self.backend.forward(batch, pause=pause and interrupted)
            vectors, recomputed = self._repaired(batch, vectors)
            seconds = time.perf_counter() - started - paused
        self._count_batch(batch, seconds, recomputed)
        return vectors

    def _land(self, batch: TokenBatch, started: float, running: Running) -> Vectors:
        """Wait for a launched batch without the lock, so that the next one can be launched."""
        vectors, recomputed = running(), 0
        if not usable(vectors).all():
            with self._device:
                self.check_open()
                vectors, recomputed = self._repaired(batch, vectors)
        ended = time.perf_counter()
        seconds = ended - max(started, self._ended)  # until `_ended` the device was busy with another batch
        self._ended = ended
        self._count_batch(batch, max(0.0, seconds), recomputed)
        return vectors

    def _repaired(self, batch: TokenBatch, vectors: Vectors) -> tuple[Vectors, int]:
        """Recompute rows that are not `usable` in fp32, and return how many. Called under the lock. Raises OutOfMemory
        for a single row only; these batches do not change the budget."""
        bad = np.flatnonzero(~usable(vectors))
        if len(bad):
            vectors = np.array(vectors)
            budget = self.memory.token_budget * ELEMENT_BYTES[self.backend.info.precision] // ELEMENT_BYTES["fp32"]
            parts = deque(bad[places] for places in self.plan(batch.lengths[bad].tolist(), budget))
            while parts:
                rows = parts.popleft()
                try:
                    vectors[rows] = self.backend.forward(batch.select(rows.tolist()), exact=True)
                except OutOfMemory:
                    if len(rows) == 1:
                        raise
                    parts.extendleft(np.array_split(rows, 2))
        return vectors, len(bad)

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
            raise self.closed_error()
        if self.failed:
            raise DeviceFailed(self.failed)

    def closed_error(self) -> EngineClosed:
        return EngineClosed(f"the engine of {self.backend.info.name} is closed")

    def close(self) -> None:
        """Wait for a batch that is being computed or launched, then free model and memory."""
        with self._device:
            if not self._closed:
                self._closed = True
                self.backend.close()
                self.memory.close()


# ------------------------------------------------------------------------------------------------------------ requests


@dataclass(eq=False, slots=True)
class Request:
    """Texts of one caller, as token ids. `vectors`, row i for text i, is filled batch by batch.

    `finish` turns `vectors` into the result. It must be fast: it runs in the queue's thread. `bounded`: the request is
    rejected if it would wait too long.
    """

    tokens: TokenBatch
    lane: Lane
    vectors: Vectors
    arrived: float
    future: Future[Vectors] = field(default_factory=Future)
    finish: Callable[[Vectors], Vectors] | None = None
    bounded: bool = False
    over: bool = False  # answered, failed or cancelled: the rest is not computed
    begun: bool = False
    missing: int = 0  # texts without a vector
    queued_texts: int = 0
    queued_tokens: int = 0
    unplanned: list[Piece] = field(default_factory=list)  # shortest first

    def __post_init__(self) -> None:
        lengths = self.tokens.lengths.tolist()
        self.missing = len(lengths)
        pieces = (Piece(self, place, length) for place, length in enumerate(lengths))
        self.unplanned = sorted(pieces, key=lambda piece: piece.length)

    @property
    def waits(self) -> bool:
        return bool(self.unplanned) and not self.over


class Piece(NamedTuple):
    """One text of a request."""

    request: Request
    place: int
    length: int


class LaneQueue:
    """The waiting texts of one lane. `bounded_tokens`: those of bounded requests."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._planned: deque[list[Piece]] = deque()
        self.texts = 0
        self.tokens = 0
        self.bounded_tokens = 0

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self._count(request, len(request.tokens), request.tokens.tokens)

    def forget(self, request: Request) -> None:
        """Stop counting a request that is over."""
        self._count(request, -request.queued_texts, -request.queued_tokens)

    def take(self, plan: Callable[[Sequence[int]], list[list[int]]], budget: int, most: int) -> list[Piece]:
        """Return the next batch, with at most `most` tokens or a single text; [] if no text waits.

        `plan` divides a window of WINDOW times `budget` tokens into batches. Requests share a window equally, in the
        order of arrival, so a small request never waits for the whole of a large one.
        """
        while self._planned or self._plan(plan, WINDOW * budget):
            batch = [piece for piece in self._planned.popleft() if not piece.request.over]
            used = 0  # the batch may have been planned for a larger budget, before memory ran out
            for place, piece in enumerate(batch):
                used += piece.length
                if used > most and place:
                    self._planned.appendleft(batch[place:])
                    batch = batch[:place]
                    break
            for piece in batch:
                self._count(piece.request, -1, -piece.length)
            if batch:
                return batch
        return []

    def drain(self) -> list[Request]:
        """Remove and return all requests that are not over."""
        planned = (piece.request for batch in self._planned for piece in batch)
        found = [request for request in dict.fromkeys([*planned, *self._requests]) if not request.over]
        self._requests.clear()
        self._planned.clear()
        return found

    def _count(self, request: Request, texts: int, tokens: int) -> None:
        request.queued_texts += texts
        request.queued_tokens += tokens
        self.texts += texts
        self.tokens += tokens
        self.bounded_tokens += tokens if request.bounded else 0

    def _plan(self, plan: Callable[[Sequence[int]], list[list[int]]], window: int) -> bool:
        """Plan one window; False if no text waits."""
        share = max(1, window // max(1, len(self._requests)))
        pieces: list[Piece] = []
        for _ in range(len(self._requests)):
            if window <= 0:
                break
            request = self._requests.popleft()
            left = min(share, window)
            while request.waits and left > 0:  # at least one, the longest first
                pieces.append(request.unplanned.pop())
                left -= max(1, pieces[-1].length)
                window -= max(1, pieces[-1].length)
            if request.waits:
                self._requests.append(request)
        try:
            planned = [[pieces[place] for place in batch] for batch in plan([piece.length for piece in pieces])]
        except BaseException:
            self._planned.append(pieces)  # so that `drain` returns their requests
            raise
        if len(planned) > 1 and len(self._requests) == 1 and all(piece.request.waits for piece in planned[-1]):
            self._requests[0].unplanned += reversed(planned.pop())  # the next window fills this batch up
        self._planned.extend(planned)
        return bool(pieces)


# ----------------------------------------------------------------------------------------------------------- the queue


@dataclass(frozen=True, slots=True)
class _Batch:
    """A started batch. `wanted`: pieces of unfinished requests; `passed_seconds`: the queue's total at the start."""

    lane: Lane
    pieces: list[Piece]
    wanted: Sequence[Piece]
    running: Running | None
    begun: float
    passed_seconds: float


class EmbeddingQueue:
    """A thread-safe queue. Its first request starts the one thread that computes."""

    def __init__(self, runner: BatchRunner, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_wait: float | None = None  # seconds that a bounded request may wait; None: no limit
        self.watcher = Watcher()
        self.clock = clock
        self.deaths = 0  # how often the thread ended unexpectedly since it last computed a batch
        self._runner = runner
        self._changed = threading.Condition()
        self._lanes = {lane: LaneQueue() for lane in LANES}
        self._rate = 0.0  # average tokens per second of recent batches; 0: unknown
        self._run_seconds = 0.0  # of interactive batches in a row while bulk texts waited
        self._thread: threading.Thread | None = None
        # Batches in progress: one, and possibly the next one launched ahead, or an interactive one within a bulk one.
        self._in_progress: list[list[Piece]] = []
        self._passed_seconds = 0.0  # of interactive batches computed within bulk ones
        self._landed = -math.inf  # when the last batch was done
        self._interactive_at = -math.inf  # when the last interactive request arrived
        self._progress_at = -math.inf  # when a batch was last computed, or started after an idle time
        self._closed = False

    # -- for callers

    def add(self, request: Request) -> Future[Vectors]:
        """Queue a request. Cancelling its future removes it. Raises EngineOverloaded, EngineClosed,
        DeviceFailed."""
        lane, lost = request.lane, list[Request]()
        with self._changed:
            if self._closed:
                raise self._runner.closed_error()
            self._runner.check_open()
            if lane == "interactive":
                self._interactive_at = request.arrived
            if request.bounded:
                self.refuse_if_crowded(lane)
            if request.missing:
                lost = self._ensure_thread()
                self._lanes[lane].add(request)
                self.watcher.queued(lane, request.missing)
                self._changed.notify()
        self._lose(lost)
        if request.missing:
            request.future.add_done_callback(lambda future: self._end(request) if future.cancelled() else None)
        else:
            self._complete(request)
        return request.future

    def wait_for(self, future: Future[Vectors]) -> None:
        """Wait, restarting the thread if it vanished, as after a fork. Raises the request's error."""
        while not wait([future], timeout=_WATCH_SECONDS).done:
            with self._changed:
                lost = self._ensure_thread()
            self._lose(lost)
        future.result()

    def lane_of(self, tokens: int) -> Lane:
        return "interactive" if tokens <= self._runner.memory.token_budget * SMALL_SHARE else "bulk"

    def refuse_if_crowded(self, lane: Lane) -> None:
        """Raise EngineOverloaded if a bounded request of this lane would wait too long now."""
        seconds = self.expected_wait(lane)
        if self.max_wait is not None and seconds > self.max_wait:
            self.watcher.refused()
            raise EngineOverloaded(
                f"the embedding engine is busy for another {seconds:.0f} s, and {self.max_wait:g} s is the longest "
                "wait allowed (setting embedding.max_wait): try again later",
                seconds=seconds,
            )

    def expected_wait(self, lane: Lane) -> float:
        """Return the seconds that the device needs for the bounded requests of this lane; 0 if unknown."""
        return self._lanes[lane].bounded_tokens / self._rate if self._rate else 0.0

    def queued(self, lane: Lane) -> tuple[int, int]:
        """Return the number of waiting texts and tokens, without those being computed."""
        with self._changed:
            return self._lanes[lane].texts, self._lanes[lane].tokens

    def stalled(self) -> float:
        """Return the seconds that a batch has been in progress without any result; 0.0 if none is in progress."""
        with self._changed:
            return self.clock() - self._progress_at if self._in_progress else 0.0

    def close(self) -> None:
        """Fail waiting requests with EngineClosed, and wait for the batch in progress."""
        with self._changed:
            self._closed = True
            waiting = [request for lane in self._lanes.values() for request in lane.drain()]
            thread = self._thread
            self._changed.notify_all()
        for request in waiting:
            self._fail(request, self._runner.closed_error())
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # -- ends of requests

    def _end(self, request: Request) -> bool:
        """Remove a request from the queue; return False if it was already over."""
        with self._changed:
            if request.over:
                return False
            request.over = True
            request.unplanned.clear()
            left = request.queued_texts
            self._lanes[request.lane].forget(request)
        if left:
            self.watcher.queued(request.lane, -left)
        return True

    def _fail(self, request: Request, error: BaseException) -> None:
        if self._end(request) and request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def _fail_device(self, error: DeviceFailed) -> None:
        """Fail the requests that wait, those in progress and all later ones."""
        with self._changed:
            if not self._runner.failed:
                self._runner.failed = str(error)
                _log.error("the engine of %s has failed: %s", self._runner.backend.info.name, error)
            left = self._abandoned() + [request for lane in self._lanes.values() for request in lane.drain()]
        for request in left:
            self._fail(request, DeviceFailed(str(error)))

    def _complete(self, request: Request) -> None:
        try:
            result = request.vectors if request.finish is None else request.finish(request.vectors)
        except Exception as error:
            self._fail(request, error)
            return
        if self._end(request) and request.future.set_running_or_notify_cancel():
            request.future.set_result(result)

    def _lose(self, requests: Sequence[Request], cause: BaseException | None = None) -> None:
        for request in requests:
            error = WorkerDied("the thread that computes has ended unexpectedly, and this batch with it; try again")
            error.__cause__ = cause
            self._fail(request, error)

    # -- the thread

    def _ensure_thread(self) -> list[Request]:
        """Start a thread if none is alive; return requests whose batch a dead thread left. Called under the lock."""
        if self._closed or (self._thread is not None and self._thread.is_alive()):
            return []
        lost = self._abandoned()
        self._thread = threading.Thread(target=self._work, name="owl-sap-engine", daemon=True)
        self._thread.start()
        return lost

    def _waiting(self) -> int:
        return sum(lane.texts for lane in self._lanes.values())

    def _abandoned(self) -> list[Request]:
        lost = dict.fromkeys(piece.request for batch in self._in_progress for piece in batch)
        self._in_progress = []
        return list(lost)

    def _work(self) -> None:
        """Repeat: launch as many batches as the device takes ahead, then wait for the oldest."""
        started: deque[_Batch] = deque()
        try:
            while True:
                found = self._next(wait=not started)
                if found is not None:
                    started.append(self._start(*found))
                elif not started:
                    return
                if found is None or len(started) > self._runner.ahead:
                    self._land(started.popleft())
        except BaseException as error:  # `_settle` handles the errors of requests
            with self._changed:
                lost = self._abandoned()
                self._thread = None
                self.deaths += 1
                if self._waiting():
                    self._ensure_thread()
            self._lose(lost, error)

    def _next(self, *, wait: bool = True) -> tuple[Lane, list[Piece]] | None:
        """Return the next batch, or None if no text is ready; with `wait`, None means that the thread must end."""
        with self._changed:
            while not self._closed:
                before = self._waiting()
                if before:
                    bulk = self._lanes["bulk"].texts > 0
                    first = self._lanes["interactive"].texts and not (bulk and self._run_seconds >= RUN_SECONDS)
                    lane: Lane = "interactive" if first else "bulk"
                    if batch := self._take(lane):
                        return lane, batch
                    if 0 < self._waiting() < before:
                        continue  # requests that could not be planned have failed; others still wait
                if not wait:
                    return None
                if not self._changed.wait(IDLE_SECONDS) and not self._waiting():
                    break
            if wait:
                self._thread = None
            return None

    def _take(self, lane: Lane) -> list[Piece]:
        runner, budget = self._runner, self._runner.memory.token_budget
        most = budget
        if lane == "bulk" and self.clock() - self._interactive_at < RECENT_SECONDS:
            step = (STEP_SECONDS * self._rate or math.inf) * runner.steps
            most = int(min(budget, max(step, runner.memory.planned_tokens * LEAST_SHARE) / (1 + runner.ahead)))
        try:
            batch = self._lanes[lane].take(runner.plan, budget, most)
        except Exception as error:  # such as MemoryError; without an answer these requests would wait forever
            for request in self._lanes[lane].drain():
                self._fail(request, error)
            return []
        if batch:
            if not self._in_progress:
                self._progress_at = self.clock()
            self._in_progress.append(batch)
        return batch

    def _pass_interactive(self) -> None:
        """Compute interactive batches at a pause within a bulk batch."""
        while self._lanes["interactive"].texts:  # read without the lock: the next pause looks again
            with self._changed:
                if self._closed or self._run_seconds >= RUN_SECONDS:
                    return
                pieces = self._take("interactive")
            if pieces:
                self._land(self._start("interactive", pieces), nested=True)

    def _start(self, lane: Lane, pieces: list[Piece]) -> _Batch:
        now = self.clock()
        self.watcher.queued(lane, -len(pieces))
        self.watcher.batch(lane, len(pieces), sum(piece.length for piece in pieces))
        for request in {piece.request: None for piece in pieces}:
            if not request.begun:
                request.begun = True
                self.watcher.began(lane, now - request.arrived)
        passed = self._passed_seconds
        wanted = [piece for piece in pieces if not piece.request.over]
        return _Batch(lane, pieces, wanted, self._begin(lane, wanted), now, passed)

    def _begin(self, lane: Lane, pieces: Sequence[Piece]) -> Running | None:
        if not pieces:
            return None
        batch = TokenBatch.gather((piece.request.tokens, piece.place) for piece in pieces)
        return self._runner.begin(batch, self._pass_interactive if lane == "bulk" else None)

    def _land(self, batch: _Batch, *, nested: bool = False) -> None:
        """Wait for a batch and deliver it. `nested`: it ran within another one."""
        self._settle(batch.lane, batch.wanted, batch.running)
        now = self.clock()
        own = now - max(batch.begun, self._landed) - (self._passed_seconds - batch.passed_seconds)
        with self._changed:
            self._in_progress = [pieces for pieces in self._in_progress if pieces is not batch.pieces]
            self._progress_at = now
            if nested:
                self._passed_seconds += now - batch.begun
            else:
                self._landed = now
            tokens = sum(piece.length for piece in batch.pieces)
            if tokens >= LEAST_MEASURED_TOKENS and own > 0:
                self._rate = self._rate * _DECAY + tokens / own * (1 - _DECAY) if self._rate else tokens / own
            in_a_row = batch.lane == "interactive" and (nested or self._lanes["bulk"].texts > 0)
            self._run_seconds = self._run_seconds + own if in_a_row else 0.0

    def _settle(self, lane: Lane, pieces: Sequence[Piece], running: Running | None) -> None:
        """Give every text its vector or fail its request, never because of an error in another request.

        A batch that ran out of memory is split. If the device failed, all requests fail. After any other error the
        batch's requests are computed one by one.
        """
        pending: deque[tuple[Sequence[Piece], Running | None]] = deque([(pieces, running)])
        while pending:
            pieces, begun = pending.popleft()
            if begun is None:
                pieces = [piece for piece in pieces if not piece.request.over]
                begun = self._begin(lane, pieces)
            if begun is None:
                continue
            try:
                vectors = begun()
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # else the error would keep the batch's tensors alive
                if isinstance(error, DeviceFailed):
                    self._fail_device(error)
                    return
                if isinstance(error, OutOfMemory):
                    plan = self._runner.smaller([piece.length for piece in pieces]) if len(pieces) > 1 else []
                    parts = [[pieces[place] for place in places] for places in plan]
                else:
                    by_request: dict[Request, list[Piece]] = {}
                    for piece in pieces:
                        by_request.setdefault(piece.request, []).append(piece)
                    parts = list(by_request.values()) if len(by_request) > 1 else []
                if parts:
                    pending.extendleft((part, None) for part in reversed(parts))
                else:
                    self._fail(pieces[0].request, error)
            else:
                self._progress_at, self.deaths = self.clock(), 0
                for piece, vector in zip(pieces, vectors, strict=True):
                    piece.request.vectors[piece.place] = vector
                    piece.request.missing -= 1
                    if not piece.request.missing:
                        self._complete(piece.request)
