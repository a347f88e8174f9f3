"""One engine, many callers: queues texts by lane, has them computed in one thread, small requests together, and gives
each caller his own vectors or his own error. Knows the engine and who waits; no HANA, no HTTP, no settings, no metrics.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .backends import EngineClosed, EngineError, NonFinite, OutOfMemory, TokenIds, Vectors
from .computing import Running, normalized, usable
from .engine import EmbeddingEngine, strings
from .lanes import LANES, Lane, LaneQueue, Pace, Piece, Request, Turns

REQUEST_TEXTS = 2048
REQUEST_CHARACTERS = 1 << 20
"""A large call is queued in parts of so much, each tokenised while the ones before it are computed."""
AHEAD = 2
"""Parts of one call that may be queued at a time."""
SMALL_SHARE = 0.25
"""Of the tokens of one batch: a request above it would keep others waiting, and takes its turn with the bulk work."""
STEP_SECONDS = 0.005
"""What a step of bulk work, after which interactive work may go before it, should take at most; of all that the device
has been given of it, where it is given batches ahead..."""
LEAST_SHARE = 0.25
"""... but not less than this share of a full batch: smaller ones cost more than they save, most of all where the
machine is busy otherwise, and every step takes long whatever it holds..."""
LATELY_SECONDS = 10.0
"""... while anybody interactive has been here so lately; otherwise batches are as large as the device likes."""
IDLE_SECONDS = 30.0
"""The thread ends when there was nothing to do for so long."""
_WATCH_SECONDS = 1.0
"""How often those who wait make sure that there still is a thread."""


class EngineOverloaded(EngineError):
    """The queue is so long that the wait would pass its bound. `seconds`: how long what is queued will take, by the
    speed measured; None where nobody has measured."""

    retryable = True
    seconds: float | None = None

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class WorkerDied(EngineError):
    """The thread that computes ended in the midst of this call's batch."""

    retryable = True  # another thread has taken over


class Watcher(Protocol):
    """Told what happens, in the thread in which it does; must return at once and never raise."""

    def queued(self, lane: Lane, texts: int) -> None:
        """So many more wait (negative: fewer)."""
        ...

    def began(self, lane: Lane, waited: float) -> None:
        """A request has its first text in a batch, so many seconds after it came."""
        ...

    def batch(self, lane: Lane, texts: int, tokens: int) -> None:
        """So many, with so many tokens together, are computed from now on."""
        ...

    def refused(self) -> None:
        """A request would have waited too long."""
        ...


@dataclass(frozen=True, slots=True)
class _Unwatched:
    def queued(self, lane: Lane, texts: int) -> None: ...

    def began(self, lane: Lane, waited: float) -> None: ...

    def batch(self, lane: Lane, texts: int, tokens: int) -> None: ...

    def refused(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch that was begun. `part`: what was still wanted of it then; `passed`: the seconds that had passed for other
    batches in the midst of some."""

    lane: Lane
    batch: list[Piece]
    part: Sequence[Piece]
    running: Running | None
    begun: float
    passed: float


class Batcher:
    """Thread-safe. Its thread is started by the first call and is the only one that computes."""

    def __init__(
        self,
        engine: EmbeddingEngine,
        *,
        max_wait: float | None = None,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_wait`: seconds that an interactive request may have to wait before it is refused; None: any."""
        self._engine = engine
        self._max_wait = max_wait
        self._watcher: Watcher = watcher or _Unwatched()
        self._clock = clock
        self._changed = threading.Condition()
        self._lanes = {lane: LaneQueue() for lane in LANES}
        self._turns, self._pace = Turns(), Pace()
        self._thread: threading.Thread | None = None
        self._in_hand: list[list[Piece]] = []
        """Batches being computed: one and, on a device that works on its own, one behind it; or the interactive one
        that went before it in its midst."""
        self._passed_seconds = 0.0
        self._landed = -math.inf
        """When the last batch was done."""
        self._seen = -math.inf
        self._moved = -math.inf
        """When something was last computed, or begun after there was nothing to do."""
        self._deaths = 0
        """Of the thread, since it last computed something."""
        self._closed = False

    # ------------------------------------------------------------------------------------------------- what callers do

    def embed(self, texts: Sequence[str], lane: Lane | None = None, *, normalize: bool = True) -> Vectors:
        """As `EmbeddingEngine.embed`, when it is its turn. Interrupted, what is still queued of it is dropped.

        Without `lane` it is interactive up to SMALL_SHARE of what one batch holds, else bulk. Raises as the engine's,
        and EngineOverloaded (interactive only), WorkerDied.
        """
        unique, rows = _unique(texts)
        vectors, _ = self._computed(unique, lane)
        self._engine.count_texts(len(texts), len(unique))
        return _result(rows, normalize, vectors)

    def embed_counted(self, texts: Sequence[str], lane: Lane | None = None) -> tuple[Vectors, list[int]]:
        """As `embed`, with the tokens of each whole text (`EmbeddingEngine.embed_counted`)."""
        unique, rows = _unique(texts)
        vectors, lengths = self._computed(unique, lane)
        counts = self._engine.whole_lengths(unique, lengths)[rows].tolist()
        self._engine.count_texts(len(texts), len(unique))
        return _result(rows, True, vectors), counts

    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None = None,
        *,
        normalize: bool = True,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Future[Vectors]:
        """Tokenise here and now, and queue; the result is that of `embed`, and so are its errors. A future that is
        cancelled leaves the queue at once. `counted` is told the tokens of each whole text before they are queued, and
        what it raises comes out. Raises EngineOverloaded, EngineClosed."""
        unique, rows = _unique(texts)
        tokens = self._engine.tokenize(unique)
        if counted is not None:
            lengths = np.fromiter(map(len, tokens), dtype=np.intp, count=len(tokens))
            counted(self._engine.whole_lengths(unique, lengths)[rows].tolist())
        vectors = np.empty((len(unique), self._engine.dimension), dtype=np.float32)
        self._engine.count_texts(len(texts), len(unique))
        request = Request(
            tokens,
            lane or self._lane_of(tokens),
            vectors,
            self._clock(),
            finish=partial(_result, rows, normalize),
            bounded=lane != "bulk",  # too large for the interactive lane it may be, but somebody waits
        )
        return self._enqueue(request).future

    def check_room(self, texts: Sequence[str]) -> None:
        """Raises EngineOverloaded where these would be refused now, as far as that shows without tokenising: for who
        would have to wait until they can be tokenised. Takes no time."""
        if sum(map(len, texts)) <= self._engine.token_budget * SMALL_SHARE:  # no token is shorter than a character
            self._refuse_if_crowded("interactive")  # without the lock: whoever queues is asked again

    def queued(self, lane: Lane) -> tuple[int, int]:
        """Texts and tokens that wait; not those being computed."""
        with self._changed:
            return self._lanes[lane].texts, self._lanes[lane].tokens

    @property
    def deaths(self) -> int:
        """How often the thread has ended unexpectedly since it last computed something. It is started again each
        time."""
        return self._deaths

    def stalled(self) -> float:
        """Seconds for which a batch is in hand and nothing comes of it; 0.0 while there is none."""
        with self._changed:
            return self._clock() - self._moved if self._in_hand else 0.0

    def close(self) -> None:
        """End everybody's waiting with EngineClosed, and wait for the batch in hand. The engine stays open."""
        with self._changed:
            self._closed = True
            waiting = [request for lane in self._lanes.values() for request in lane.drain()]
            thread = self._thread
            self._changed.notify_all()
        for request in waiting:
            self._fail(request, EngineClosed(f"the engine of {self._engine.model} is closed"))
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # --------------------------------------------------------------------------------------------------- in the queue

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"the engine of {self._engine.model} is closed")

    def _lane_of(self, tokens: Sequence[TokenIds]) -> Lane:
        small = sum(map(len, tokens)) <= self._engine.token_budget * SMALL_SHARE
        return "interactive" if small else "bulk"

    def _computed(self, texts: Sequence[str], lane: Lane | None) -> tuple[Vectors, NDArray[np.intp]]:
        """Vectors, not yet looked at, and lengths in tokens. Part by part: tokenised in this thread while the parts
        before it are computed in the other."""
        self._check_open()
        vectors = np.empty((len(texts), self._engine.dimension), dtype=np.float32)
        lengths = np.zeros(len(texts), dtype=np.intp)
        pending: deque[Future[Vectors]] = deque()
        parts = _parts(texts)
        try:
            for start, end in parts:
                tokens = self._engine.tokenize(texts[start:end])
                lengths[start:end] = [len(ids) for ids in tokens]
                lane = lane or ("bulk" if len(parts) > 1 else self._lane_of(tokens))
                part = Request(tokens, lane, vectors[start:end], self._clock(), bounded=lane == "interactive")
                pending.append(self._enqueue(part).future)
                while len(pending) > AHEAD:
                    self._await(pending[0])
                    pending.popleft()
            while pending:
                self._await(pending[0])
                pending.popleft()
        finally:
            for future in pending:
                future.cancel()
        return vectors, lengths

    def _await(self, future: Future[Vectors]) -> None:
        while not wait([future], timeout=_WATCH_SECONDS).done:
            with self._changed:
                lost = self._ensure_thread()
            self._lose(lost)
        future.result()

    def _enqueue(self, request: Request) -> Request:
        lane, lost = request.lane, list[Request]()
        with self._changed:
            self._check_open()
            if lane == "interactive":
                self._seen = request.arrived
            if request.bounded:
                self._refuse_if_crowded(lane)
            if request.missing:
                lost = self._ensure_thread()
                self._lanes[lane].add(request)
                self._watcher.queued(lane, request.missing)
                self._changed.notify()
        self._lose(lost)
        if not request.missing:
            self._complete(request)
            return request
        request.future.add_done_callback(partial(self._cancelled, request))
        return request

    def _refuse_if_crowded(self, lane: Lane) -> None:
        if self._max_wait is None:
            return
        seconds = self._pace.wait(self._lanes[lane].bounded_tokens)
        if seconds > self._max_wait:
            self._watcher.refused()
            raise EngineOverloaded(
                f"the embedding engine is busy for another {seconds:.0f} s, and {self._max_wait:g} s is the longest "
                "wait allowed (setting embedding.max_wait): try again later",
                seconds=seconds,
            )

    def _cancelled(self, request: Request, future: Future[Vectors]) -> None:
        if future.cancelled():
            self._end(request)

    def _end(self, request: Request) -> bool:
        """Take it out of the queue; False when somebody else has ended it before."""
        with self._changed:
            if request.over:
                return False
            request.over = True
            left = request.queued_texts
            self._lanes[request.lane].forget(request)
        if left:
            self._watcher.queued(request.lane, -left)
        return True

    def _fail(self, request: Request, error: BaseException) -> None:
        if self._end(request) and request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def _complete(self, request: Request) -> None:
        try:
            result = request.vectors if request.finish is None else request.finish(request.vectors)
        except Exception as error:
            self._fail(request, error)
            return
        if self._end(request) and request.future.set_running_or_notify_cancel():
            request.future.set_result(result)

    # ----------------------------------------------------------------------------------------------------- the thread

    def _ensure_thread(self) -> list[Request]:
        """Start one if there is none; the requests whose batch the one before took with it. Called under the lock."""
        if self._closed or (self._thread is not None and self._thread.is_alive()):
            return []
        lost = self._left_in_hand()
        self._thread = threading.Thread(target=self._work, name="owl-sap-engine", daemon=True)
        self._thread.start()
        return lost

    def _left_in_hand(self) -> list[Request]:
        lost = [piece.request for batch in self._in_hand for piece in batch]
        self._in_hand = []
        return list(dict.fromkeys(lost))

    def _lose(self, requests: Sequence[Request], cause: BaseException | None = None) -> None:
        for request in requests:
            error = WorkerDied("the thread that computes has ended unexpectedly, and this batch with it; try again")
            error.__cause__ = cause
            self._fail(request, error)

    def _work(self) -> None:
        """Where the device works on its own, the next batch is begun before the one in hand is waited for."""
        flying: deque[_Flight] = deque()
        try:
            while True:
                found = self._next(wait=not flying)
                if found is not None:
                    flying.append(self._launch(*found))
                elif not flying:
                    return
                if found is None or len(flying) > self._engine.ahead:
                    self._land(flying.popleft())
        except BaseException as error:  # what is an Exception has become the error of a request before
            with self._changed:
                lost = self._left_in_hand()
                self._thread = None
                self._deaths += 1
                if any(lane.texts for lane in self._lanes.values()):
                    self._ensure_thread()
            self._lose(lost, error)

    def _next(self, *, wait: bool = True) -> tuple[Lane, list[Piece]] | None:
        """The next batch, as soon as there is one; None: the thread is to end. Without `wait` None when there is
        none."""
        with self._changed:
            waited = True
            while not self._closed:
                texts = {lane: queue.texts for lane, queue in self._lanes.items()}
                lane = self._turns.choose(interactive=texts["interactive"] > 0, bulk=texts["bulk"] > 0)
                if lane is not None:
                    if batch := self._take(lane):
                        return lane, batch
                    if 0 < sum(queue.texts for queue in self._lanes.values()) < sum(texts.values()):
                        continue  # who could not be planned for was told; others wait
                if not wait:
                    return None
                if not waited:
                    break
                waited = self._changed.wait(IDLE_SECONDS)
            if wait:
                self._thread = None
            return None

    def _take(self, lane: Lane) -> list[Piece]:
        budget = self._engine.token_budget
        most = budget
        if lane == "bulk" and self._clock() - self._seen < LATELY_SECONDS:
            step = self._pace.tokens_in("bulk", STEP_SECONDS) * self._engine.steps
            most = int(min(budget, max(step, self._engine.full_batch * LEAST_SHARE) / (1 + self._engine.ahead)))
        try:
            batch = self._lanes[lane].take(self._engine.plan, budget, most)
        except Exception as error:  # memory; whoever waits here is told, or texts that nobody has would be waited for
            for request in self._lanes[lane].drain():
                self._fail(request, error)
            return []
        if batch:
            if not self._in_hand:
                self._moved = self._clock()
            self._in_hand.append(batch)
        return batch

    def _let_pass(self) -> None:
        """In the midst of a batch of bulk work, at a place where it can wait: interactive work goes before it."""
        while self._lanes["interactive"].texts:  # read without the lock: a moment later is soon enough
            with self._changed:
                if self._closed or self._turns.choose(interactive=True, bulk=True) != "interactive":
                    return
                batch = self._take("interactive")
            if batch:
                self._land(self._launch("interactive", batch), nested=True)

    def _launch(self, lane: Lane, batch: list[Piece]) -> _Flight:
        now = self._clock()
        self._watcher.queued(lane, -len(batch))
        self._watcher.batch(lane, len(batch), sum(piece.length for piece in batch))
        for request in {piece.request: None for piece in batch}:
            if not request.begun:
                request.begun = True
                self._watcher.began(lane, now - request.arrived)
        passed = self._passed_seconds
        part = [piece for piece in batch if not piece.request.over]
        return _Flight(lane, batch, part, self._begin(lane, part) if part else None, now, passed)

    def _begin(self, lane: Lane, part: Sequence[Piece]) -> Running:
        return self._engine.begin([piece.tokens for piece in part], self._let_pass if lane == "bulk" else None)

    def _land(self, flight: _Flight, *, nested: bool = False) -> None:
        """`nested`: in the midst of another one."""
        if flight.running is not None:
            self._settle(flight.lane, flight.part, flight.running)
        now = self._clock()
        own = now - max(flight.begun, self._landed) - (self._passed_seconds - flight.passed)
        with self._changed:
            self._in_hand = [batch for batch in self._in_hand if batch is not flight.batch]
            self._moved = now
            if nested:
                self._passed_seconds += now - flight.begun
            else:
                self._landed = now
            self._pace.ran(flight.lane, sum(piece.length for piece in flight.batch), own)
            self._turns.ran(flight.lane, own, bulk=nested or self._lanes["bulk"].texts > 0)

    # --------------------------------------------------------------------------------------------------- on the device

    def _settle(self, lane: Lane, part: Sequence[Piece], running: Running) -> None:
        """Every text of the batch gets its vector, or its request an error that is no other request's. What is computed
        again is waited for at once."""
        pending: deque[tuple[Sequence[Piece], Running | None]] = deque([(part, running)])
        while pending:
            part, begun = pending.popleft()
            if begun is None:
                part = [piece for piece in part if not piece.request.over]
                if not part:
                    continue
                begun = self._begin(lane, part)
            try:
                vectors = begun.result()
            except OutOfMemory as error:
                if len(part) > 1:
                    smaller = self._engine.smaller([piece.length for piece in part])
                    pending.extendleft(([part[place] for place in places], None) for places in reversed(smaller))
                else:
                    self._fail(part[0].request, error)
            except Exception as error:
                apart = _by_request(part)
                if len(apart) > 1:
                    pending.extendleft((each, None) for each in reversed(apart))
                else:
                    self._fail(part[0].request, error)
            else:
                self._deliver(part, vectors)

    def _deliver(self, batch: Sequence[Piece], vectors: Vectors) -> None:
        self._moved, self._deaths = self._clock(), 0
        for piece, vector in zip(batch, vectors, strict=True):
            request = piece.request
            request.vectors[piece.place] = vector
            request.missing -= 1
            if not request.missing:
                self._complete(request)


def _unique(texts: Sequence[str]) -> tuple[list[str], NDArray[np.intp]]:
    """The different ones, and for each text which of them it is."""
    places: dict[str, int] = {}
    rows = np.fromiter((places.setdefault(text, len(places)) for text in strings(texts)), np.intp, len(texts))
    return list(places), rows


def _by_request(batch: Sequence[Piece]) -> list[list[Piece]]:
    found: dict[Request, list[Piece]] = {}
    for piece in batch:
        found.setdefault(piece.request, []).append(piece)
    return list(found.values())


def _result(rows: NDArray[np.intp], normalize: bool, vectors: Vectors) -> Vectors:
    """What a caller gets of the vectors of his distinct texts. Raises NonFinite."""
    good = usable(vectors)
    if not good.all():
        raise NonFinite([int(index) for index in np.flatnonzero(~good[rows])])
    found = normalized(vectors) if normalize else vectors
    return found[rows] if len(found) < len(rows) else found


def _parts(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Where the parts of a large call begin and end."""
    ends, start, characters = [], 0, 0
    for place, text in enumerate(texts):
        characters += len(text)
        if place + 1 - start >= REQUEST_TEXTS or characters >= REQUEST_CHARACTERS:
            ends.append((start, place + 1))
            start, characters = place + 1, 0
    return [*ends, (start, len(texts))] if start < len(texts) else ends
