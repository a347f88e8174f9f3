"""Shared by all routes: request bodies and their validation, threads for service calls, JSON answers.

A 2 MB body may hold hundreds of thousands of invalid elements, and describing them all would block the event loop for
seconds. So each list is validated only up to its first fault.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, Tag, model_validator
from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from app.src.access.rates import Rates
from app.src.api.errors import MOST_FAULTS, Refused
from app.src.api.guard import caller, once_more
from app.src.observe.checks import Readiness
from app.src.service.service import Service
from connector.cancellation import Cancellation, cancelled_by
from connector.model import Vectors

Result = TypeVar("Result")

MOST_ITEMS = 65_536  # in one list; HANA's vectors have up to 65,000 numbers


BOUNDED = Field(max_length=MOST_ITEMS, fail_fast=True)
Texts = Annotated[list[str], BOUNDED, Tag("list[str]")]
Numbers = Annotated[list[int], BOUNDED, Tag("list[int]")]
ListsOfNumbers = Annotated[list[Numbers], BOUNDED, Tag("list[list[int]]")]


class Body(BaseModel):
    """A request body. Strict: a number is not a string, a boolean not a number; floats are finite."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, given: Any) -> Any:
        """Drop most unknown members; the rest are still rejected."""
        if not isinstance(given, dict) or len(given) <= MOST_FAULTS:
            return given
        unknown = islice((name for name in given if name not in cls.model_fields), MOST_FAULTS)
        return {name: given[name] for name in cls.model_fields if name in given} | dict.fromkeys(unknown)


def one_of_members(**given: dict[str, Any]) -> ConfigDict:
    """Describe in OpenAPI that exactly one of these members is required. `given`: the JSON Schema of each."""
    return ConfigDict(
        json_schema_extra={"oneOf": [{"required": [name], "properties": {name: how}} for name, how in given.items()]}
    )


@contextmanager
def answered(kind: type[Exception], refusal: str) -> Iterator[None]:
    """Raise Refused with the kind `refusal` for an error of class `kind`, where the request is at fault."""
    try:
        yield
    except kind as error:
        raise Refused(refusal, str(error)) from error


class DirectRoute(APIRoute):
    """A fast route for an endpoint `(request: Request, body: SomeModel, **path_parameters: str) -> Response`. It
    validates the body in one step and resolves no dependencies. FastAPI handles an invalid body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive)
        content = await request.body()
        body: BaseModel | None = None
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
            assert self.body_field is not None
            model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]
            with suppress(ValueError):
                # Accepts only JSON that FastAPI's parser (the standard library) reads the same way.
                body = model.model_validate(from_json(content))
        if body is None:
            await super().handle(scope, once_more(content, receive), send)
            return
        response = await self.endpoint(request=request, body=body, **scope["path_params"])
        await response(scope, receive, send)


def direct(routes: APIRouter, path: str, **options: Any) -> Callable[[Callable[..., Any]], None]:
    """Register an endpoint as a DirectRoute for POST."""
    return partial(routes.add_api_route, path, methods=["POST"], route_class_override=DirectRoute, **options)


class Json(Response):
    """JSON by orjson, which accepts NumPy arrays and dataclasses."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        try:
            return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:
            # orjson rejects unpaired surrogates and integers beyond 64 bits. A row's metadata from another writer may
            # contain them, and one row must not hide all others.
            text = json.dumps(content, default=lambda part: part.tolist() if hasattr(part, "tolist") else asdict(part))
            return json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":")).encode()


# Limit of callers whose pace is kept; above it, the pace of callers without a request is dropped.
MOST_CALLERS = 1_000


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that has waited for a thread since `since`; `start` is called when it gets one."""

    caller: _Caller
    start: Callable[[Ticket], object]
    since: float
    begun: float | None = None


@dataclass(slots=True, eq=False)
class _Caller:
    """One caller's requests. `overdue`: when the first request was queued that has timed out since the caller last
    got a thread. `pace`: mean seconds between the ends of its calls while it has calls."""

    waiting: deque[Ticket] = field(default_factory=deque)
    overdue: float | None = None
    busy: int = 0
    calls: int = 0
    pace: float = 0.0


class FairQueue:
    """Shares threads fairly among callers, on one event loop. The next thread goes to the waiting caller with the
    fewest threads; among equals, to the earliest request. The last free thread is reserved for a caller without any, so
    no caller holds all of them.

    A request is refused if it would wait longer than `max_wait` seconds. The estimate is the number of the caller's
    waiting requests times its pace, or how long its first request has waited, if that is longer. The pace of a call is
    its seconds divided by the caller's concurrent calls: a single call says nothing about the capacity of all threads.
    """

    def __init__(
        self,
        threads: int,
        max_wait: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        several_callers: bool = True,
    ) -> None:
        """Without `several_callers`, or with one thread, no thread is reserved."""
        self._free, self._kept = threads, int(several_callers and threads > 1)
        self._max_wait, self._clock = max_wait, clock
        self._callers: dict[str, _Caller] = {}

    def enter(self, identity: str, start: Callable[[Ticket], object]) -> Ticket:
        """Queue a request. `start` is called as soon as a thread is free, possibly at once; after that, call
        `finish`. To give up before, call `leave`. Raises Refused for a request that would wait too long."""
        if identity not in self._callers and len(self._callers) >= MOST_CALLERS:
            self._callers = {name: each for name, each in self._callers.items() if each.waiting or each.busy}
        caller = self._callers.setdefault(identity, _Caller())
        now, waiting = self._clock(), caller.waiting
        waited = now - (caller.overdue or (waiting[0].since if waiting else now))
        first = not waiting and (not caller.busy or self._may_begin(caller))
        if not first and max(waited, len(waiting) * caller.pace) > self._max_wait:
            raise self._crowded(caller, waited)
        ticket = Ticket(caller, start, now)
        waiting.append(ticket)
        self._start_next()
        return ticket

    def finish(self, ticket: Ticket) -> None:
        """Free the thread of a call that has ended."""
        caller, begun = ticket.caller, ticket.begun
        assert begun is not None
        caller.calls += 1
        pace = (self._clock() - begun) / caller.busy
        caller.pace += (pace - caller.pace) * max(0.05, 1 / caller.calls)  # about the last twenty calls count
        caller.busy -= 1
        self._free += 1
        self._start_next()

    def leave(self, ticket: Ticket) -> bool:
        """Remove a waiting request. Returns False, without effect, if it already had a thread or was removed."""
        waits = ticket in ticket.caller.waiting
        if waits:
            ticket.caller.waiting.remove(ticket)
        return waits

    def expire(self, ticket: Ticket) -> Refused:
        """Remove a request that still waits after `max_wait`, and return its refusal."""
        self.leave(ticket)
        caller = ticket.caller
        caller.overdue = caller.overdue or ticket.since
        return self._crowded(caller, max(self._clock() - ticket.since, self._max_wait))

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

    def _crowded(self, caller: _Caller, waited: float) -> Refused:
        expected = len(caller.waiting) * caller.pace
        state = f"the next one has waited {waited:.0f} s"
        if expected > waited:
            state = f"{len(caller.waiting)} are waiting, so another would wait {expected:.1f} s"
        return Refused(
            "Crowded",
            f"{caller.busy} of your requests are running, and {state}; the limit is {self._max_wait:g} s "
            "(setting api.max_wait): try again later",
            seconds=max(waited, expected),
        )


READY_WITHIN = 5.0  # seconds that a readiness probe waits, as monitors do


class Executors:
    """Runs the service's calls in bounded numbers of threads, so that waiting never blocks the event loop."""

    def __init__(self, service: Service, rates: Rates | None = None) -> None:
        self.service = service
        self._rates = rates or Rates()
        self.limits = service.settings.api
        self._several_callers = service.access.configured
        self._threads = ThreadPoolExecutor(self.limits.threads, "owl-sap-request")
        self._queue = FairQueue(self.limits.threads, self.limits.max_wait, several_callers=self._several_callers)
        # Writers wait for each other, so they get at most half of the threads.
        self._writers = FairQueue(max(1, self.limits.threads // 2), self.limits.max_wait, several_callers=False)
        # Health has its own thread, because it must answer while all others wait for HANA.
        self._health = ThreadPoolExecutor(1, "owl-sap-health")
        self._probe: tuple[asyncio.Future[Readiness], Readiness] | None = None
        # For job records and metrics, which need neither engine nor store and must answer while HANA hangs.
        self._quick = ThreadPoolExecutor(4, "owl-sap-look")
        # Cancelling a statement is a request to HANA, which may not answer.
        self._cancels = ThreadPoolExecutor(1, "owl-sap-cancel")

    def close(self) -> None:
        """Cancel queued calls without waiting for running ones. Call it after the last request."""
        for threads in (self._threads, self._health, self._quick, self._cancels):
            threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: Callable[[], Result], request: Request | None = None, *, writes: bool = False) -> Result:
        """Return the result of `call`, run in a thread. Raises Refused for a request that waits too long, or whose
        client leaves before a thread is free. If the client leaves later or the request times out, a reading call is
        interrupted; a call that `writes` or has no `request` continues."""
        cancellation = Cancellation()

        def cancellable() -> Result:
            with cancelled_by(cancellation):
                return call()

        async with _unless_left(request):
            try:
                return await self._in_thread(cancellable, request, writes)
            except asyncio.CancelledError:
                if request is not None and not writes:
                    cancellation.prevent()  # at once: the cancelling thread may still wait for HANA
                    with suppress(RuntimeError):  # the service has ended
                        self._cancels.submit(cancellation.cancel)
                raise

    async def _in_thread(self, call: Callable[[], Result], request: Request | None, writes: bool = False) -> Result:
        held: list[tuple[FairQueue, Ticket]] = []

        def ended(_: Any = None) -> None:
            for queue, ticket in held:
                queue.finish(ticket)

        try:
            for queue in (self._writers, self._queue) if writes else (self._queue,):
                ticket = await self._turn(queue, request)
                held.append((queue, ticket))
        except BaseException:
            ended()
            raise

        work = asyncio.wrap_future(self._threads.submit(call))
        work.add_done_callback(ended)  # before the caller sees the result and sends its next request
        if not writes:  # the client left, so the read's error reaches no caller
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(work)  # the thread continues when the request is cancelled

    async def _turn(self, queue: FairQueue, request: Request | None) -> Ticket:
        """Return the ticket once it has a thread. Raises Refused."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        identity = caller(request).identity if request is not None and self._several_callers else ""
        ticket = queue.enter(identity, lambda _: None if turn.done() else turn.set_result(None))
        try:
            if not turn.done():
                async with asyncio.timeout(self.limits.max_wait):
                    await turn
        except BaseException as error:
            late = isinstance(error, TimeoutError)
            if ticket.begun is not None:  # it got a thread just before the error
                if late:
                    return ticket
                queue.finish(ticket)
            elif late:
                raise queue.expire(ticket) from None
            queue.leave(ticket)
            raise
        return ticket

    async def probe(self) -> Readiness:
        """Return readiness within READY_WITHIN seconds. Concurrent probes share one thread, which may hang."""
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
        """Run a quick `call` in a thread; it must need neither engine nor store."""
        return await asyncio.get_running_loop().run_in_executor(self._quick, call)

    def spend(self, request: Request, tokens: list[int], *, whole: bool = False) -> None:
        """Charge the caller for texts with these token counts: for the tokens that the model reads of each, or, with
        `whole`, for all of them, because the texts are cut into chunks or read by another model. Raises RateExceeded.
        Thread-safe."""
        if self._several_callers:
            most = max(tokens, default=0) if whole else self.service.parts.engine.max_tokens
            self._rates.spend(caller(request), sum(min(count, most) for count in tokens))

    def check_texts(self, given: str | list[str], *, name: str) -> None:
        """Check the number, length and encoding of a text or of texts; `name` is the body's field. Raises Refused."""
        texts = [given] if isinstance(given, str) else given
        most, limit = self.limits.max_inputs, self.limits.max_text_chars
        if not texts:
            raise Refused("Unprocessable", f"{name} is empty", param=name)
        if len(texts) > most:
            raise Refused("TooMuch", f"{len(texts)} texts; at most {most} (setting api.max_inputs)", param=name)
        for position, text in enumerate(texts):
            where = name if isinstance(given, str) else f"{name}[{position}]"
            if len(text) > limit:
                what = f"{where} has {len(text)} characters"
                raise Refused("TooMuch", f"{what}; at most {limit} (api.max_text_chars)", param=name)
            try:
                text.encode()
            except UnicodeEncodeError:
                what = f"{where} contains an unpaired surrogate"
                raise Refused("Unprocessable", what, param=name) from None

    async def embed(self, request: Request, texts: Sequence[str], queue: Callable[[], Future[Vectors]]) -> Vectors:
        """Return the vectors of `texts`. `queue` tokenises them in a thread and queues them for the engine, where they
        wait without a thread. A full queue refuses the request before tokenising. When the client leaves, even during
        tokenising, its texts leave the queue."""
        if (engine := self.service.parts.engine_if_loaded()) is not None:
            engine.check_room(texts)
        queued: list[Future[Vectors]] = []
        left = False

        def queue_unless_left() -> Future[Vectors]:
            queued.append(queue())
            if left:
                queued[0].cancel()
            return queued[0]

        try:
            async with _unless_left(request):
                return await asyncio.wrap_future(await self._in_thread(queue_unless_left, request))
        finally:
            left = True  # set before reading `queued`; the thread reads `left` after queueing, so one of them cancels
            for future in queued:
                future.cancel()  # no effect on a finished one


@asynccontextmanager
async def _unless_left(request: Request | None) -> AsyncIterator[None]:
    """Cancel the block and raise Refused if the client leaves. Without a request, never cancel."""
    if request is None:
        yield
        return
    loop, task, left = asyncio.get_running_loop(), asyncio.current_task(), False
    watches: list[asyncio.Task[None]] = []
    assert task is not None

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    # Start watching late: most calls finish earlier, and watching costs more than a timer.
    timer = loop.call_later(0.05, lambda: watches.append(loop.create_task(watch())))
    try:
        yield
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise Refused("ClientLeft", "the client closed the connection before the answer was ready") from None
        raise
    finally:
        timer.cancel()
        for each in watches:
            each.cancel()
