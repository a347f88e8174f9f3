"""An engine in a child process, as a member of a pool: there the GIL of this process does not limit it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .backends import EngineClosed, InputType, Vectors
from .backends.torch.backend import EngineOptions
from .child_process import Calls, ChildProcess
from .device import DeviceProfile, Precision
from .engine import Engine
from .queue import EngineStats, Lane, Watcher, WorkerDied

REPORT_SECONDS = 1.0  # how often the child reports its state
SILENT_SECONDS = 10.0  # from which the child counts as stalled, by its last report or because there is none
CLOSE_SECONDS = 30.0  # for the batch in progress
EVENTS = ("queued", "began", "batch", "refused")  # of a Watcher


class ChildEngine:
    """Starts the process; `load` waits for its model. Thread-safe. See ChildProcess."""

    # Known after `load`.
    fingerprint: str
    profile: DeviceProfile
    precision: Precision
    precision_reason: str
    path: str
    path_reason: str
    ready = True  # a dead one does not come back

    def __init__(self, load: Callable[[EngineOptions], Engine], options: EngineOptions) -> None:
        """`load`: a function of a module; the child calls it. `options.device`: one device."""
        self._device = str(options.device)
        self._watcher = Watcher()
        self._closed = False
        self.token_budget = self.planned_tokens = self.deaths = 0
        self._failed, self._stats, self._stalled, self._heard = "", EngineStats(), 0.0, time.monotonic()
        self._queued = Counter[Lane]()  # texts that wait in the child
        self._child = ChildProcess(serve, reported=self._report, lost=self._lose_queue, error=self._error)
        self._loaded = self._child.call(load, options)

    def load(self) -> None:
        """Wait for the model. Raises the errors of `load_engine`, and WorkerDied."""
        vars(self).update(self._loaded.result())

    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None,
        *,
        input_type: InputType,
        normalize: bool,
        counted: Callable[[list[int]], None] | None,
    ) -> Future[Vectors]:
        """As `Engine.submit`, but work in the bulk lane is tokenised later; then `counted` is called, and errors are
        the future's."""
        content = "submit", lane, list(texts), input_type, normalize, counted is not None
        if lane == "bulk":
            return self._child.call(*content, progress=counted)
        queued = Future[list[int]]()
        answer = self._child.call(*content, progress=queued.set_result)
        answer.add_done_callback(lambda _: queued.cancel())  # if it was refused
        try:
            counts = queued.result()
            if counted is not None:
                counted(counts)
        except BaseException:
            if not answer.cancel():
                answer.result()  # raises its error
            raise
        return answer

    def configure_queue(self, *, max_wait: float | None = None, watcher: Watcher | None = None) -> None:
        self._watcher = watcher or self._watcher
        self._child.call("max_wait", max_wait)

    def check_room(self, texts: Sequence[str]) -> None:
        """Do nothing: only the child knows its queue."""

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def failed(self) -> str:
        child = self._child
        return f"its process ended with exit status {child.process.returncode}" if child.ended else self._failed

    def stalled(self) -> float:
        seconds = self._stalled + time.monotonic() - self._heard
        return seconds if seconds > SILENT_SECONDS else 0.0

    def close(self) -> None:
        self._closed = True
        self._child.close(CLOSE_SECONDS if self._loaded.done() else 0)

    def _report(self, report: tuple[dict[str, Any], list[tuple[Any, ...]]]) -> None:
        state, events = report
        vars(self).update(state, _heard=time.monotonic())
        for name, *event in events:
            if name == "queued":
                lane, texts = event
                self._queued[lane] += texts
            getattr(self._watcher, name)(*event)

    def _lose_queue(self) -> None:
        for lane, texts in self._queued.items():
            self._watcher.queued(lane, -texts)

    def _error(self) -> EngineClosed | WorkerDied:
        if self._closed:
            return EngineClosed(f"the engine of {self._device} is closed")
        return WorkerDied(f"the engine of {self._device} has failed: {self.failed}; try again")


# ------------------------------------------------------------------------------------------------ in the child process


def serve(calls: Calls) -> None:
    """Load an engine and compute until the parent closes it. Bulk work is tokenised in one thread, other work in
    another, so that it does not wait."""
    messages = iter(calls)
    number, (load, options) = next(messages)
    try:
        engine: Engine = load(options)
    except Exception as error:
        calls.answer(number, error)
        return
    answers = _Answers(calls, engine)
    answers.send(number, {name: getattr(engine, name) for name in ChildEngine.__annotations__})
    threading.Thread(target=answers.repeat_reports, daemon=True).start()
    bulk, other = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    for number, content in messages:
        if content is None:
            for threads in (bulk, other):
                threads.submit(answers.cancel, number)
        elif content[0] == "submit":
            (bulk if content[1] == "bulk" else other).submit(answers.submit, number, *content[1:])
        else:
            engine.configure_queue(max_wait=content[1], watcher=answers.watcher)
            answers.send(number, None)
    engine.close()


class _Answers:
    """Submits calls to the engine, and sends answers, each after a report. Thread-safe."""

    def __init__(self, calls: Calls, engine: Engine) -> None:
        self.watcher = Watcher()
        self._calls, self._engine = calls, engine
        self._running: dict[int, Future[Vectors]] = {}
        self._reporting = threading.Lock()
        self._events: deque[tuple[Any, ...]] = deque()  # since the last report
        for name in EVENTS:
            setattr(self.watcher, name, lambda *event, name=name: self._events.append((name, *event)))

    def submit(
        self, number: int, lane: Lane | None, texts: list[str], input_type: InputType, normalize: bool, count: bool
    ) -> None:
        counts: list[int] = []
        counted = counts.extend if count else None
        try:
            future = self._engine.submit(texts, lane, input_type=input_type, normalize=normalize, counted=counted)
        except Exception as error:
            self.send(number, error)
            return
        self._running[number] = future
        if count or lane != "bulk":
            self.send(number, counts, last=False)
        future.add_done_callback(lambda future: self._done(number, future))

    def cancel(self, number: int) -> None:
        if (future := self._running.get(number)) is not None:
            future.cancel()

    def _done(self, number: int, future: Future[Vectors]) -> None:
        del self._running[number]
        if not future.cancelled():
            self.send(number, future.exception() or future.result())

    def send(self, number: int, content: object, *, last: bool = True) -> None:
        self.report()
        self._calls.answer(number, content, last=last)

    def report(self) -> None:
        engine = self._engine
        state = {name: getattr(engine, name) for name in ("token_budget", "planned_tokens", "deaths")}
        state |= {"_failed": engine.failed, "_stats": engine.stats(), "_stalled": engine.stalled()}
        with self._reporting:
            events = [self._events.popleft() for _ in range(len(self._events))]
            self._calls.answer(0, (state, events))

    def repeat_reports(self) -> None:
        while True:
            time.sleep(REPORT_SECONDS)
            self.report()
