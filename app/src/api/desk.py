"""Between the routes and the service: threads, common limits, JSON answers, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import Any, Generic, TypeVar

import orjson
from fastapi import Request, Response

from app.src.access.rates import Rates
from app.src.api.errors import ClientLeft, Crowded, TooMuch, Unprocessable
from app.src.api.limiting import principal_of
from app.src.api.turns import Turn, Turns
from app.src.service.readiness import Readiness
from app.src.service.service import Service
from connector.cancellation import Cancellation, cancelled_by
from connector.model import Vectors

Result = TypeVar("Result")
READY_WITHIN = 5.0
"""Seconds. Who watches a service waits about so long, and takes silence for an end."""
_LOOK_AFTER = 0.05
"""Seconds after which it is asked whether the client still waits: most work is done by then, and asking costs more."""


class Json(Response):
    """JSON written by orjson, which takes NumPy arrays and dataclasses, and writes NaN as null (none gets this far)."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        try:
            return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:
            return _odd(content)


def _odd(content: Any) -> bytes:
    """What orjson refuses: halves of characters, which are escaped, and integers beyond 64 bits. Others may have
    written them into the metadata of a row, and one row must not keep all others from who asks."""
    text = json.dumps(content, default=_plain)
    return json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":")).encode()


def _plain(part: Any) -> Any:
    return asdict(part) if is_dataclass(part) and not isinstance(part, type) else part.tolist()


def _is_text(text: str) -> bool:
    """Can it be written as UTF-8? Fast, for this is asked on the event loop."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Call(Generic[Result]):
    """One call that waits for its turn; a thread makes it then. `future` has its result."""

    turn: Turn

    def __init__(self, call: Callable[[], Result], turns: Turns) -> None:
        self._call = call
        self._turns = turns
        self.future: Future[Result] = Future()
        self.cancellation = Cancellation()

    def __call__(self, turn: Turn) -> None:
        if not self.future.set_running_or_notify_cancel():
            self._turns.end(turn)
            return
        try:
            with cancelled_by(self.cancellation):
                result = self._call()
        except BaseException as error:
            self._turns.end(turn)  # before anybody hears of it, and asks for the next
            self.future.set_exception(error)
        else:
            self._turns.end(turn)
            self.future.set_result(result)

    def overdue(self) -> None:
        """It has waited as long as it may."""
        error = self._turns.overdue(self.turn)
        if error is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Desk:
    """The service behind a bounded number of threads, so that waiting never blocks the event loop."""

    def __init__(self, service: Service, rates: Rates | None = None) -> None:
        self.service = service
        self._rates = rates or Rates()
        self.limits = service.settings.api
        self._threads = ThreadPoolExecutor(self.limits.threads, "owl-sap-request")
        self._turns = Turns(self.limits.threads, self.limits.max_wait, told_apart=service.access.configured)
        self._writers = max(1, self.limits.threads // 2)
        self._writing = asyncio.Semaphore(self._writers)
        # Health has threads of its own: it must answer while every other thread waits for HANA.
        self._health = ThreadPoolExecutor(1, "owl-sap-health")
        self._probe: tuple[asyncio.Future[Readiness], Readiness] | None = None
        # What asks neither engine nor store: jobs, followed and cancelled, and metrics. It must answer just then when
        # all other threads, those for health too, wait for a HANA that does not answer.
        self._looks = ThreadPoolExecutor(4, "owl-sap-look")
        # To cancel a statement is a request to HANA, which may not answer.
        self._cancels = ThreadPoolExecutor(1, "owl-sap-cancel")

    def close(self) -> None:
        """Once no request is served any more; what still runs is waited for by nobody."""
        for threads in (self._threads, self._health, self._looks, self._cancels):
            threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: Callable[[], Result], request: Request | None = None) -> Result:
        """The result of `call`. With `request`, which `call` only reads for, its client is watched: if it leaves before
        a thread was free, `call` is never made; when it leaves later, and when the request's time is over, what `call`
        reads is interrupted. ClientLeft is raised for a client that left. Raises Crowded for a request that would wait
        too long for a thread, or has."""
        begun = self._begun(call, request)
        try:
            return await self._ended(begun, request)
        except (ClientLeft, asyncio.CancelledError):
            if request is not None:
                begun.cancellation.prevent()  # at once: the cancellation before may still wait for HANA
                with suppress(RuntimeError):  # the service has ended meanwhile
                    self._cancels.submit(begun.cancellation.cancel)
            raise

    async def write(self, call: Callable[[], Result], request: Request | None = None) -> Result:
        """As `run`, for what may have to wait until others have written. No more than half of the threads do that at a
        time, whoever still waits for its answer; the next wait here, without a thread, and after api.max_wait they are
        refused: Crowded."""
        await self._may_write(request)
        try:
            begun = self._begun(call, request)
        except BaseException:
            self._writing.release()
            raise
        loop = asyncio.get_running_loop()

        def free(_: Future[Result]) -> None:
            with suppress(RuntimeError):  # the service has ended meanwhile
                loop.call_soon_threadsafe(self._writing.release)

        begun.future.add_done_callback(free)
        return await self._ended(begun, request)

    async def _may_write(self, request: Request | None) -> None:
        """Takes one of the places of those who write. Raises Crowded and ClientLeft; then none is taken."""
        place = asyncio.ensure_future(self._writing.acquire())
        try:
            async with asyncio.timeout(self.limits.max_wait):
                await (place if request is None else _watched(place, request))
        except BaseException as error:
            if not place.cancel() and not place.cancelled():  # had, just when nobody waited for it any more
                self._writing.release()
            if not isinstance(error, TimeoutError):
                raise
            raise Crowded(
                f"{self._writers} requests write already, and none has ended within {self.limits.max_wait:g} s "
                "(setting api.max_wait): try again later",
                seconds=self.limits.max_wait,
            ) from None

    def _begun(self, call: Callable[[], Result], request: Request | None) -> _Call[Result]:
        """Raises Crowded."""
        begun = _Call(call, self._turns)
        caller = "" if request is None else principal_of(request.scope).identity
        begun.turn = self._turns.come(caller, lambda turn: self._threads.submit(begun, turn))
        return begun

    async def _ended(self, begun: _Call[Result], request: Request | None) -> Result:
        work = asyncio.wrap_future(begun.future)
        timer = asyncio.get_running_loop().call_later(self.limits.max_wait, begun.overdue)
        try:
            return await (work if request is None else _watched(work, request))
        finally:
            timer.cancel()
            self._turns.leave(begun.turn)

    async def probe(self) -> Readiness:
        """Readiness, in READY_WITHIN seconds whatever hangs. Whoever asks meanwhile gets the same answer: what hangs
        holds one thread, not one for each who asks."""
        if self._probe is None or self._probe[0].done():
            readiness = Readiness()
            work = asyncio.get_running_loop().run_in_executor(self._health, self.service.ready, readiness)
            self._probe = work, readiness
        work, readiness = self._probe
        await asyncio.wait((work,), timeout=READY_WITHIN)
        if work.done():
            return work.result()
        late = readiness.unanswered(READY_WITHIN)
        self.service.metrics.tell_ready(late.checks)  # whoever watches by metrics is told what the one who asked is
        return late

    async def look(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._looks, call)

    def spend(self, request: Request, tokens: list[int], *, whole: bool = False) -> None:
        """Of whoever asks, by the length of each text: what the model looks at, or, where texts are cut into pieces,
        the `whole` of it. Raises RateExceeded; from any thread."""
        most = max(tokens, default=0) if whole else self.service.engine.max_tokens
        self._rates.spend(principal_of(request.scope), sum(min(count, most) for count in tokens))

    def check_texts(self, texts: list[str], *, name: str) -> None:
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
            if not text.isascii() and not _is_text(text):
                raise Unprocessable(f"{name}[{position}] holds half a surrogate pair, which is no text", param=name)

    async def embed(self, request: Request, texts: Sequence[str], queue: Callable[[], Future[Vectors]]) -> Vectors:
        """The vectors of `texts` that `queue`, which tokenises in a thread, gets in line for. Waiting there takes no
        thread; where it is too long already, that is said before a thread is waited for. When the client leaves, its
        texts leave the line, also when it left while they were tokenised."""
        if (loaded := self.service.parts.embedder_if_loaded) is not None:
            loaded.engine.check_room(texts)
        queued: list[Future[Vectors]] = []
        left = False

        def queue_if_wanted() -> Future[Vectors]:
            queued.append(queue())
            if left:
                queued[0].cancel()
            return queued[0]

        try:
            return await _watched(asyncio.wrap_future(await self.run(queue_if_wanted, request)), request)
        finally:
            left = True  # before looking: the thread looks after it has queued, so one of both sees the other
            for future in queued:
                future.cancel()  # nothing where it is done


async def _watched(work: asyncio.Future[Result], request: Request) -> Result:
    """The result of `work`, which is cancelled when the client leaves first: then ClientLeft is raised."""
    watches: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    timer = loop.call_later(_LOOK_AFTER, lambda: watches.append(loop.create_task(_until_left(request, work))))
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
