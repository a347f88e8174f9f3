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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

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

    `recomputed`: rows computed again in fp32 because they were zero or not finite. `blocks`: parts of calls that a pool
    gave to its engines; `repeated_blocks`: those given again because an engine died.
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
    blocks: int = 0
    repeated_blocks: int = 0


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
        self.memory.plan_for(info.shape, info.precision, measured, packed=info.path == "packed")
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

    @property
    def appetite(self) -> int:
        """Return how many tokens of a call should wait: a window, the batch in progress and those ahead of it."""
        return (WINDOW + 1 + self.ahead) * self.memory.token_budget

    def plan(self, lengths: NDArray[np.intp], budget: int | None = None) -> list[NDArray[np.intp]]:
        """Return positions grouped into batches that fit the device, longest first."""
        budget = self.memory.token_budget if budget is None else budget
        return plan_batches(lengths, budget, self._multiple, packed=self._packed)

    def smaller(self, lengths: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Split a batch that ran out of memory, and plan later batches smaller, too."""
        plan = self.plan(lengths, self.memory.shrink(self._cost(lengths)))
        if len(plan) == 1:  # the batch fits even the smallest budget
            plan = [plan[0][: len(lengths) // 2], plan[0][len(lengths) // 2 :]]
        return plan

    def _cost(self, lengths: NDArray[np.intp]) -> int:
        """Return how many tokens of the budget a batch uses."""
        return int(lengths.sum()) if self._packed else padded(int(lengths.max()), self._multiple) * len(lengths)

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
        cost = self._cost(batch.lengths)
        self.memory.succeeded(cost)
        self.count(batches=1, tokens=batch.tokens, padded_tokens=cost, compute_seconds=seconds, recomputed=recomputed)

    def check_open(self, *, computing: bool = True) -> None:
        if self._closed:
            raise self.closed_error()
        if self.failed and computing:
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
    planned: int = 0  # texts that were put into batches, the longest first
    _order: NDArray[np.intp] = field(init=False)  # positions, the longest text first
    _costs: NDArray[np.intp] = field(init=False)  # tokens of the texts up to each position of `_order`

    def __post_init__(self) -> None:
        lengths = self.tokens.lengths
        self.missing = len(lengths)
        self._order = np.argsort(lengths, kind="stable")[::-1]
        self._costs = np.maximum(lengths[self._order], 1).cumsum()

    @property
    def waits(self) -> bool:
        return self.planned < len(self._order) and not self.over

    def take(self, tokens: int) -> tuple[NDArray[np.intp], int]:
        """Plan the longest texts that wait until they have so many tokens, at least one; return their positions and
        tokens."""
        start, done = self.planned, int(self._costs[self.planned - 1]) if self.planned else 0
        end = int(np.searchsorted(self._costs, done + tokens)) + 1
        self.planned = min(end, len(self._order))
        return self._order[start : self.planned], int(self._costs[self.planned - 1]) - done


class Texts:
    """Texts of one or more requests, in an order. Text i is text `places[i]` of the request `requests[owners[i]]`."""

    __slots__ = ("lengths", "owners", "places", "requests")

    def __init__(
        self, requests: Sequence[Request], owners: NDArray[np.intp], places: NDArray[np.intp], lengths: NDArray[np.intp]
    ) -> None:
        self.requests, self.owners, self.places, self.lengths = requests, owners, places, lengths

    @classmethod
    def of(cls, parts: Sequence[tuple[Request, NDArray[np.intp]]]) -> Texts:
        """Join texts of different requests."""
        if not parts:
            return cls((), *[np.zeros(0, dtype=np.intp)] * 3)
        return cls(
            [request for request, _ in parts],
            np.repeat(np.arange(len(parts)), [len(places) for _, places in parts]),
            np.concatenate([places for _, places in parts]),
            np.concatenate([request.tokens.lengths[places] for request, places in parts]),
        )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, which: slice | NDArray[np.intp] | NDArray[np.bool_]) -> Texts:
        requests, owners = self.requests, self.owners[which]
        if len(requests) > 1:
            present, owners = np.unique(owners, return_inverse=True)
            requests = [requests[owner] for owner in present.tolist()]
        return Texts(requests, owners, self.places[which], self.lengths[which])

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def wanted(self) -> Texts:
        """Return the texts of requests that are not over."""
        over = [request.over for request in self.requests]
        return self[~np.array(over)[self.owners]] if any(over) else self

    def by_request(self) -> Iterator[tuple[Request, NDArray[np.intp]]]:
        """Yield each request and the indices of its texts."""
        if len(self.requests) <= 1:
            yield from ((request, np.arange(len(self))) for request in self.requests)
            return
        order = np.argsort(self.owners, kind="stable")
        ends = np.bincount(self.owners, minlength=len(self.requests)).cumsum()
        yield from zip(self.requests, np.split(order, ends[:-1]), strict=True)

    def batch(self) -> TokenBatch:
        """Copy the token ids."""
        if len(self.requests) == 1:
            return self.requests[0].tokens.select(self.places)
        parts, count = [], 0
        indices = np.empty(len(self), dtype=np.intp)
        for request, own in self.by_request():
            tokens, places = request.tokens, self.places[own]
            if 2 * len(own) < len(tokens):
                tokens, places = tokens.select(places), np.arange(len(own))
            indices[own] = places + count
            parts.append(tokens)
            count += len(tokens)
        return TokenBatch.joined(parts).select(indices)


Plan = Callable[[NDArray[np.intp]], list[NDArray[np.intp]]]  # lengths of texts -> their positions, by batches


class LaneQueue:
    """The waiting texts of one lane. `bounded_tokens`: those of bounded requests."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._planned: deque[Texts] = deque()
        self.texts = 0
        self.tokens = 0
        self.bounded_tokens = 0

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self._count(request, len(request.tokens), request.tokens.tokens)

    def forget(self, request: Request) -> None:
        """Stop counting a request that is over."""
        self._count(request, -request.queued_texts, -request.queued_tokens)

    def take(self, plan: Plan, budget: int, most: int) -> Texts:
        """Return the next batch, with at most `most` tokens or a single text; an empty one if no text waits.

        `plan` divides a window of WINDOW times `budget` tokens into batches. Requests share a window equally, in the
        order of arrival, so a small request never waits for the whole of a large one.
        """
        while self._planned or self._plan(plan, WINDOW * budget):
            batch = self._planned.popleft().wanted()
            # The batch may have been planned for a larger budget, before memory ran out.
            end = max(1, int(np.searchsorted(batch.lengths.cumsum(), most, side="right")))
            if end < len(batch):
                self._planned.appendleft(batch[end:])
                batch = batch[:end]
            for request, own in batch.by_request():
                self._count(request, -len(own), -int(batch.lengths[own].sum()))
            if len(batch):
                return batch
        return Texts.of([])

    def drain(self) -> list[Request]:
        """Remove and return all requests that are not over."""
        planned = (request for batch in self._planned for request in batch.requests)
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

    def _plan(self, plan: Plan, window: int) -> bool:
        """Plan one window; False if no text waits."""
        share = max(1, window // max(1, len(self._requests)))
        parts: list[tuple[Request, NDArray[np.intp]]] = []
        for _ in range(len(self._requests)):
            if window <= 0:
                break
            request = self._requests.popleft()
            if request.waits:
                places, tokens = request.take(min(share, window))
                parts.append((request, places))
                window -= tokens
            if request.waits:
                self._requests.append(request)
        texts = Texts.of(parts)
        try:
            planned = [texts[places] for places in plan(texts.lengths)]
        except BaseException:
            self._planned.append(texts)  # so that `drain` returns their requests
            raise
        if len(planned) > 1 and len(self._requests) == 1 and planned[-1].requests == [self._requests[0]]:
            self._requests[0].planned -= len(planned.pop())  # the next window fills this batch up
        self._planned.extend(planned)
        return bool(parts)


# ----------------------------------------------------------------------------------------------------------- the queue


@dataclass(frozen=True, slots=True)
class _Batch:
    """A started batch. `wanted`: texts of unfinished requests; `passed_seconds`: the queue's total at the start."""

    lane: Lane
    texts: Texts
    wanted: Texts
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
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._taken = threading.Condition(lock)  # texts left the queue
        self._lanes = {lane: LaneQueue() for lane in LANES}
        self._rate = 0.0  # average tokens per second of recent batches; 0: unknown
        self._run_seconds = 0.0  # of interactive batches in a row while bulk texts waited
        self._thread: threading.Thread | None = None
        # Batches in progress: one, and possibly the next one launched ahead, or an interactive one within a bulk one.
        self._in_progress: list[Texts] = []
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

    def wait_for_room(self, requests: Sequence[Request], tokens: int) -> bool:
        """Wait until fewer `tokens` of these requests wait (False), or the first request is done (True)."""
        while True:
            with self._changed:
                if requests[0].future.done():
                    return True
                if sum(request.queued_tokens for request in requests) < tokens:
                    return False
                lost = self._ensure_thread()
                self._taken.wait(_WATCH_SECONDS)
            self._lose(lost)

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
            left = request.queued_texts
            self._lanes[request.lane].forget(request)
            self._taken.notify_all()
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
        lost = dict.fromkeys(request for batch in self._in_progress for request in batch.requests)
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

    def _next(self, *, wait: bool = True) -> tuple[Lane, Texts] | None:
        """Return the next batch, or None if no text is ready; with `wait`, None means that the thread must end."""
        with self._changed:
            while not self._closed:
                before = self._waiting()
                if before:
                    bulk = self._lanes["bulk"].texts > 0
                    first = self._lanes["interactive"].texts and not (bulk and self._run_seconds >= RUN_SECONDS)
                    lane: Lane = "interactive" if first else "bulk"
                    if len(batch := self._take(lane)):
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

    def _take(self, lane: Lane) -> Texts:
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
            return Texts.of([])
        if len(batch):
            if not self._in_progress:
                self._progress_at = self.clock()
            self._in_progress.append(batch)
            self._taken.notify_all()
        return batch

    def _pass_interactive(self) -> None:
        """Compute interactive batches at a pause within a bulk batch."""
        while self._lanes["interactive"].texts:  # read without the lock: the next pause looks again
            with self._changed:
                if self._closed or self._run_seconds >= RUN_SECONDS:
                    return
                texts = self._take("interactive")
            if len(texts):
                self._land(self._start("interactive", texts), nested=True)

    def _start(self, lane: Lane, texts: Texts) -> _Batch:
        now = self.clock()
        self.watcher.queued(lane, -len(texts))
        self.watcher.batch(lane, len(texts), texts.tokens)
        for request in texts.requests:
            if not request.begun:
                request.begun = True
                self.watcher.began(lane, now - request.arrived)
        passed = self._passed_seconds
        wanted = texts.wanted()
        return _Batch(lane, texts, wanted, self._begin(lane, wanted), now, passed)

    def _begin(self, lane: Lane, texts: Texts) -> Running | None:
        if not len(texts):
            return None
        return self._runner.begin(texts.batch(), self._pass_interactive if lane == "bulk" else None)

    def _land(self, batch: _Batch, *, nested: bool = False) -> None:
        """Wait for a batch and deliver it. `nested`: it ran within another one."""
        self._settle(batch.lane, batch.wanted, batch.running)
        now = self.clock()
        own = now - max(batch.begun, self._landed) - (self._passed_seconds - batch.passed_seconds)
        with self._changed:
            self._in_progress = [texts for texts in self._in_progress if texts is not batch.texts]
            self._progress_at = now
            if nested:
                self._passed_seconds += now - batch.begun
            else:
                self._landed = now
            tokens = batch.texts.tokens
            if tokens >= LEAST_MEASURED_TOKENS and own > 0:
                self._rate = self._rate * _DECAY + tokens / own * (1 - _DECAY) if self._rate else tokens / own
            in_a_row = batch.lane == "interactive" and (nested or self._lanes["bulk"].texts > 0)
            self._run_seconds = self._run_seconds + own if in_a_row else 0.0

    def _settle(self, lane: Lane, texts: Texts, running: Running | None) -> None:
        """Give every text its vector or fail its request, never because of an error in another request.

        A batch that ran out of memory is split. If the device failed, all requests fail; if the error is retryable,
        such as a lost connection, the batch's requests. After any other error they are computed one by one.
        """
        pending: deque[tuple[Texts, Running | None]] = deque([(texts, running)])
        while pending:
            texts, begun = pending.popleft()
            if begun is None:
                texts = texts.wanted()
                begun = self._begin(lane, texts)
            if begun is None:
                continue
            try:
                vectors = begun()
            except Exception as error:
                if isinstance(error, DeviceFailed):
                    self._fail_device(error)
                    return
                traceback.clear_frames(error.__traceback__)  # else the error would keep the batch's tensors alive
                if isinstance(error, OutOfMemory):
                    plan = self._runner.smaller(texts.lengths) if len(texts) > 1 else []
                elif getattr(error, "retryable", False):  # of no text; each try may take minutes
                    plan = []
                else:
                    plan = [own for _, own in texts.by_request()] if len(texts.requests) > 1 else []
                if plan:
                    pending.extendleft((texts[places], None) for places in reversed(plan))
                else:
                    for request in texts.requests:
                        self._fail(request, error)
            else:
                self._progress_at, self.deaths = self.clock(), 0
                self._deliver(texts, vectors)

    def _deliver(self, texts: Texts, vectors: Vectors) -> None:
        if len(vectors) != len(texts):
            raise ValueError(f"the backend returned {len(vectors)} vectors for {len(texts)} texts")
        for request, own in texts.by_request():
            request.vectors[texts.places[own]] = vectors if len(own) == len(vectors) else vectors[own]
            request.missing -= len(own)
            if not request.missing:
                self._complete(request)
