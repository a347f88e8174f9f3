"""Threads between the routes and the service: which request gets one next, how long a request may wait, and what
happens when a client leaves.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Generic, TypeVar

import orjson
from fastapi import Request, Response

from app.src.access.rates import Rates
from app.src.api.errors import ClientLeft, Crowded, TooMuch, Unprocessable
from app.src.api.guard import principal_of
from app.src.observe.checks import Readiness
from app.src.service.service import Service
from connector.cancellation import Cancellation, cancelled_by
from connector.model import Vectors

Result = TypeVar("Result")
READY_WITHIN = 5.0  # seconds that probes of readiness wait, as monitors do
# Callers whose pace is kept; beyond it that of callers without a request is forgotten.
MOST_CALLERS = 1_000
_PACE_WEIGHT = 0.05  # of the last call in the mean: about twenty calls count
# Seconds after which a request's connection is watched: most work is done by then, and watching costs more.
_WATCH_AFTER = 0.05


class Json(Response):
    """JSON written by orjson, which takes NumPy arrays and dataclasses."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        try:
            return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:
            # orjson rejects unpaired surrogates and integers beyond 64 bits. Another writer may have stored them in a
            # row's metadata, and one row must not hide all others.
            text = json.dumps(content, default=_plain)
            return json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":")).encode()


def _plain(part: Any) -> Any:
    return asdict(part) if is_dataclass(part) and not isinstance(part, type) else part.tolist()


# ----------------------------------------------------------------------------------------- the queue for threads


@dataclass(slots=True, eq=False)
class _Caller:
    """One caller's requests. `overdue`: since when the first of its requests waited that were refused for waiting too
    long since it last got a thread. `pace`: mean seconds between the ends of its calls while it has calls."""

    waiting: deque[Ticket] = field(default_factory=deque)
    overdue: float | None = None
    busy: int = 0
    calls: int = 0
    pace: float = 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits for a thread since `since`; `start` is called when it gets one."""

    caller: _Caller
    start: Callable[[Ticket], object]
    since: float
    begun: float | None = None


class FairQueue:
    """Shares threads fairly among callers. Thread-safe.

    The next thread goes to the waiting caller with the fewest threads, and to the earliest request among equals. The
    last free thread is for a caller without any, so no caller holds all of them.

    A caller's request is refused if it would wait longer than `max_wait` seconds. The estimate is the number of its
    waiting requests times its pace, or how long its first request has waited where no call ends. The pace of a call is
    its seconds divided by the caller's concurrent calls; a single call says nothing of what all threads could do, so
    after a quiet time a burst is admitted with caution.
    """

    def __init__(
        self,
        threads: int,
        max_wait: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        several_callers: bool = True,
    ) -> None:
        """Without `several_callers`, or with one thread, no thread is kept free."""
        self._threads = threads
        self._free = threads
        self._kept = 1 if several_callers and threads > 1 else 0
        self._max_wait = max_wait
        self._clock = clock
        self._lock = threading.Lock()
        self._callers: dict[str, _Caller] = {}

    def enter(self, identity: str, start: Callable[[Ticket], object]) -> Ticket:
        """Queue a request. `start` is called as soon as a thread is free, possibly now; `finish` must follow that, or
        `leave` precede it. Raises Crowded for a request that would wait too long."""
        with self._lock:
            caller = self._caller(identity)
            now = self._clock()
            since = caller.waiting[0].since if caller.waiting else now
            waited = now - (since if caller.overdue is None else caller.overdue)
            expected = len(caller.waiting) * caller.pace
            first = not caller.waiting and (not caller.busy or self._may_begin(caller))
            if not first and max(waited, expected) > self._max_wait:
                raise Crowded(self._refusal(caller, waited, expected), seconds=max(waited, expected))
            ticket = Ticket(caller, start, now)
            caller.waiting.append(ticket)
            self._start_next()
            return ticket

    def finish(self, ticket: Ticket) -> None:
        """Free the thread of a call that has ended."""
        with self._lock:
            caller, begun = ticket.caller, ticket.begun
            assert begun is not None
            caller.calls += 1
            pace = (self._clock() - begun) / caller.busy
            caller.pace += (pace - caller.pace) * max(_PACE_WEIGHT, 1 / caller.calls)
            caller.busy -= 1
            self._free += 1
            self._start_next()

    def leave(self, ticket: Ticket) -> bool:
        """Remove a waiting request. Returns False, without effect, if it had a thread or has left."""
        with self._lock:
            if ticket not in ticket.caller.waiting:
                return False
            ticket.caller.waiting.remove(ticket)
            return True

    def expire(self, ticket: Ticket) -> Crowded | None:
        """Remove a request that still waits after `max_wait`, and return its refusal."""
        if not self.leave(ticket):
            return None
        with self._lock:
            caller = ticket.caller
            caller.overdue = ticket.since if caller.overdue is None else caller.overdue
            waited = max(self._clock() - ticket.since, self._max_wait)
            return Crowded(self._refusal(caller, waited, 0.0), seconds=waited)

    def _caller(self, identity: str) -> _Caller:
        caller = self._callers.get(identity)
        if caller is None:
            if len(self._callers) >= MOST_CALLERS:
                self._callers = {name: each for name, each in self._callers.items() if each.waiting or each.busy}
            caller = self._callers[identity] = _Caller()
        return caller

    def _may_begin(self, caller: _Caller) -> bool:
        return self._free > (self._kept if caller.busy else 0)

    def _start_next(self) -> None:
        while able := [each for each in self._callers.values() if each.waiting and self._may_begin(each)]:
            caller = min(able, key=lambda each: (each.busy, each.waiting[0].since))
            ticket = caller.waiting.popleft()
            caller.overdue = None
            ticket.begun = self._clock()
            caller.busy += 1
            self._free -= 1
            ticket.start(ticket)

    def _refusal(self, caller: _Caller, waited: float, expected: float) -> str:
        state = f"the next one has waited {waited:.0f} s"
        if expected > waited:
            state = f"{len(caller.waiting)} are waiting, so another would wait {expected:.1f} s"
        return (
            f"{caller.busy} of your requests are running, and {state}; the limit is {self._max_wait:g} s "
            "(setting api.max_wait): try again later"
        )


# ----------------------------------------------------------------------------------------------------------- executors


class _Call(Generic[Result]):
    """A call that waits for a thread and then runs there. `future` has its result."""

    ticket: Ticket

    def __init__(self, call: Callable[[], Result], queue: FairQueue) -> None:
        self._call = call
        self._queue = queue
        self.future: Future[Result] = Future()
        self.cancellation = Cancellation()

    def __call__(self, ticket: Ticket) -> None:
        if not self.future.set_running_or_notify_cancel():
            self._queue.finish(ticket)
            return
        try:
            with cancelled_by(self.cancellation):
                result = self._call()
        except BaseException as error:
            self._queue.finish(ticket)  # before the caller sees the result and sends its next request
            self.future.set_exception(error)
        else:
            self._queue.finish(ticket)
            self.future.set_result(result)

    def expire(self) -> None:
        error = self._queue.expire(self.ticket)
        if error is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Executors:
    """Runs the service's calls in bounded numbers of threads, so that waiting never blocks the event loop."""

    def __init__(self, service: Service, rates: Rates | None = None) -> None:
        self.service = service
        self._rates = rates or Rates()
        self.limits = service.settings.api
        self._threads = ThreadPoolExecutor(self.limits.threads, "owl-sap-request")
        self._queue = FairQueue(self.limits.threads, self.limits.max_wait, several_callers=service.access.configured)
        self._writers = max(1, self.limits.threads // 2)
        self._writing = asyncio.Semaphore(self._writers)
        # Health has its own thread: it must answer while all others wait for HANA.
        self._health = ThreadPoolExecutor(1, "owl-sap-health")
        self._probe: tuple[asyncio.Future[Readiness], Readiness] | None = None
        # For job records and metrics, which need neither engine nor store, and must answer while HANA hangs.
        self._quick = ThreadPoolExecutor(4, "owl-sap-look")
        # Cancelling a statement is a request to HANA, which may not answer.
        self._cancels = ThreadPoolExecutor(1, "owl-sap-cancel")

    def close(self) -> None:
        """Discard what still runs. Call it once no request is served any more."""
        for threads in (self._threads, self._health, self._quick, self._cancels):
            threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: Callable[[], Result], request: Request | None = None) -> Result:
        """Return the result of `call`, run in a thread. Raises Crowded for a request that would wait too long, or did.

        Give the `request` of a call that only reads: if its client leaves before a thread is free, `call` never runs;
        later, and when the request times out, its reads are interrupted. Then ClientLeft is raised.
        """
        begun = self._begin(call, request)
        try:
            return await self._end(begun, request)
        except (ClientLeft, asyncio.CancelledError):
            if request is not None:
                begun.cancellation.prevent()  # at once: the thread that cancels may still wait for HANA
                with suppress(RuntimeError):  # the service has ended
                    self._cancels.submit(begun.cancellation.cancel)
            raise

    async def write(self, call: Callable[[], Result], request: Request | None = None) -> Result:
        """Run a `call` that may wait for other writers. Writers get at most half of the threads; further ones wait
        here without a thread, and are refused after api.max_wait: Crowded."""
        await self._may_write(request)
        try:
            begun = self._begin(call, request)
        except BaseException:
            self._writing.release()
            raise
        loop = asyncio.get_running_loop()

        def free(_: Future[Result]) -> None:
            with suppress(RuntimeError):  # the service has ended
                loop.call_soon_threadsafe(self._writing.release)

        begun.future.add_done_callback(free)
        return await self._end(begun, request)

    async def _may_write(self, request: Request | None) -> None:
        """Take one of the writers' places. Raises Crowded and ClientLeft without taking one."""
        place = asyncio.ensure_future(self._writing.acquire())
        try:
            async with asyncio.timeout(self.limits.max_wait):
                await (place if request is None else _watched(place, request))
        except BaseException as error:
            if not place.cancel() and not place.cancelled():  # taken just before the failure
                self._writing.release()
            if not isinstance(error, TimeoutError):
                raise
            raise Crowded(
                f"{self._writers} requests are writing, and none ended within {self.limits.max_wait:g} s "
                "(setting api.max_wait): try again later",
                seconds=self.limits.max_wait,
            ) from None

    def _begin(self, call: Callable[[], Result], request: Request | None) -> _Call[Result]:
        begun = _Call(call, self._queue)
        identity = "" if request is None else principal_of(request.scope).identity
        begun.ticket = self._queue.enter(identity, lambda ticket: self._threads.submit(begun, ticket))
        return begun

    async def _end(self, begun: _Call[Result], request: Request | None) -> Result:
        work = asyncio.wrap_future(begun.future)
        timer = asyncio.get_running_loop().call_later(self.limits.max_wait, begun.expire)
        try:
            return await (work if request is None else _watched(work, request))
        finally:
            timer.cancel()
            self._queue.leave(begun.ticket)

    async def probe(self) -> Readiness:
        """Return readiness within READY_WITHIN seconds. Concurrent probes share one thread and its answer, so a probe
        that hangs holds one thread only."""
        if self._probe is None or self._probe[0].done():
            readiness = Readiness()
            work = asyncio.get_running_loop().run_in_executor(self._health, self.service.readiness.check, readiness)
            self._probe = work, readiness
        work, readiness = self._probe
        await asyncio.wait((work,), timeout=READY_WITHIN)
        if work.done():
            return work.result()
        late = readiness.unanswered(READY_WITHIN)
        self.service.metrics.tell_ready(late.checks)  # the metrics show the same
        return late

    async def look(self, call: Callable[[], Result]) -> Result:
        """Run a quick `call` that needs neither engine nor store."""
        return await asyncio.get_running_loop().run_in_executor(self._quick, call)

    def spend(self, request: Request, tokens: list[int], *, whole: bool = False) -> None:
        """Charge the caller for texts of these lengths: for what the model reads of each, or for the `whole` text
        where it is cut into chunks. Raises RateExceeded. Thread-safe."""
        most = max(tokens, default=0) if whole else self.service.parts.engine.max_tokens
        self._rates.spend(principal_of(request.scope), sum(min(count, most) for count in tokens))

    def check_texts(self, texts: list[str], *, name: str) -> None:
        """Check the number, length and encoding of texts; `name` is the body's field. Raises Unprocessable, TooMuch."""
        if not texts:
            raise Unprocessable(f"{name} is empty", param=name)
        if len(texts) > self.limits.max_inputs:
            limit = self.limits.max_inputs
            raise TooMuch(f"{len(texts)} texts; at most {limit} (setting api.max_inputs)", param=name)
        limit = self.limits.max_text_chars
        for position, text in enumerate(texts):
            if len(text) > limit:
                what = f"{name}[{position}] has {len(text)} characters"
                raise TooMuch(f"{what}; at most {limit} (api.max_text_chars)", param=name)
            try:
                text.encode()
            except UnicodeEncodeError:
                raise Unprocessable(f"{name}[{position}] contains an unpaired surrogate", param=name) from None

    async def embed(self, request: Request, texts: Sequence[str], queue: Callable[[], Future[Vectors]]) -> Vectors:
        """Return the vectors of `texts`, which `queue` tokenises in a thread and queues for the engine.

        Waiting in the engine's queue takes no thread. A full queue is refused before a thread is waited for. When the
        client leaves, its texts leave the queue, even if it left while they were tokenised.
        """
        if (loaded := self.service.parts.embedder_if_loaded) is not None:
            loaded.engine.check_room(texts)
        queued: list[Future[Vectors]] = []
        left = False

        def queue_unless_left() -> Future[Vectors]:
            queued.append(queue())
            if left:
                queued[0].cancel()
            return queued[0]

        try:
            return await _watched(asyncio.wrap_future(await self.run(queue_unless_left, request)), request)
        finally:
            left = True  # before looking: the thread looks after it has queued, so one of them sees the other
            for future in queued:
                future.cancel()  # no effect on a finished one


async def _watched(work: asyncio.Future[Result], request: Request) -> Result:
    """Return the result of `work`. If the client leaves first, cancel it and raise ClientLeft."""
    watches: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    timer = loop.call_later(_WATCH_AFTER, lambda: watches.append(loop.create_task(_until_left(request, work))))
    try:
        return await work
    except asyncio.CancelledError:
        if any(watch.done() for watch in watches):
            raise ClientLeft("the client closed the connection before the answer was ready") from None
        raise
    finally:
        timer.cancel()
        for watch in watches:
            watch.cancel()


async def _until_left(request: Request, work: asyncio.Future[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    work.cancel()
