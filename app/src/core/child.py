"""An engine in a child process, as a member of a pool: there the GIL of this process does not limit it."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from .backends import EngineClosed, InputType, Vectors
from .backends.torch.backend import EngineOptions
from .device import DeviceProfile, Precision
from .queue import EngineStats, Lane, Watcher, WorkerDied

# The child has this process' import path.
_COMMAND = "import sys; sys.path[:] = sys.argv[2:]; from app.src.core.child_process import serve; serve(sys.argv[1])"
STATE_SECONDS = 1.0  # how often the child reports its state
SILENT_SECONDS = 10.0  # from which the child counts as stalled, by its last report or because there is none
CLOSE_SECONDS = 30.0  # for the batch in progress


class State(NamedTuple):
    """What the child's engine says about itself."""

    stats: EngineStats = EngineStats()
    token_budget: int = 0
    planned_tokens: int = 0
    stalled: float = 0.0
    deaths: int = 0
    failed: str = ""


@dataclass(eq=False, slots=True)
class _Call:
    queued: Future[list[int]] = field(default_factory=Future)
    answer: Future[Vectors] = field(default_factory=Future)


class ChildEngine:
    """Starts the process; `load` waits for its model. Thread-safe.

    Texts, vectors and errors pass through a socket that only the two processes have. The child ends with this process,
    however that ends, and ignores Ctrl-C and SIGTERM, which this process handles. A dead child is not started again.
    """

    # Known after `load`.
    fingerprint: str
    profile: DeviceProfile
    precision: Precision
    precision_reason: str
    path: str
    path_reason: str

    def __init__(self, options: EngineOptions) -> None:
        """`options.device`: one device."""
        self._device = str(options.device)
        self._watcher = Watcher()
        self._lock = threading.Lock()  # of the calls
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._loaded: Future[dict[str, Any]] = Future()
        self._calls: dict[int, _Call] = {}
        self._state, self._heard = State(), time.monotonic()
        self._failed = ""
        self._closed = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # MCP speaks over this process's own
                start_new_session=True,  # Ctrl-C reaches this process only
            )
        self._connection = Connection(ours.detach())
        self._reader = threading.Thread(target=self._read, name=f"owl-sap-engine-{self._device}", daemon=True)
        self._reader.start()
        self._post(options)

    def load(self) -> None:
        """Wait for the model. Raises the errors of `load_engine`, and WorkerDied."""
        for name, fact in self._loaded.result().items():
            setattr(self, name, fact)

    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None,
        *,
        input_type: InputType,
        normalize: bool,
        counted: Callable[[list[int]], None] | None,
    ) -> Future[Vectors]:
        """As `Engine.submit`, but work in the bulk lane is tokenised later, and `counted` is called then."""
        number, call = next(self._numbers), _Call()
        with self._lock:
            if self._closed or self._failed:
                raise self._gone()
            self._calls[number] = call
        self._post(("submit", number, lane, (list(texts), input_type, normalize, counted is not None)))
        call.answer.add_done_callback(lambda done: self._cancel(number, lane) if done.cancelled() else None)
        if lane == "bulk":
            call.queued.add_done_callback(lambda done: counted and not done.exception() and counted(done.result()))
            return call.answer
        try:
            counts = call.queued.result()
            if counted is not None:
                counted(counts)
        except BaseException:
            call.answer.cancel()
            raise
        return call.answer

    def configure_queue(self, *, max_wait: float | None = None, watcher: Watcher | None = None) -> None:
        self._watcher = watcher or self._watcher
        self._post(("max_wait", 0, None, max_wait))

    def check_room(self, texts: Sequence[str]) -> None:
        """Do nothing: only the child knows its queue."""

    @property
    def token_budget(self) -> int:
        return self._state.token_budget

    @property
    def planned_tokens(self) -> int:
        return self._state.planned_tokens

    def stats(self) -> EngineStats:
        return self._state.stats

    @property
    def deaths(self) -> int:
        return self._state.deaths

    @property
    def failed(self) -> str:
        return self._failed or self._state.failed

    def stalled(self) -> float:
        seconds = self._state.stalled + time.monotonic() - self._heard
        return seconds if seconds > SILENT_SECONDS else 0.0

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._post(("close", 0, None, None))
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    # -- messages

    def _cancel(self, number: int, lane: Lane | None) -> None:
        with self._lock:
            self._calls.pop(number, None)
        self._post(("cancel", number, lane, None))

    def _post(self, message: object) -> None:
        with self._sending, suppress(OSError):  # when the child is dead, the reader fails the calls
            self._connection.send(message)

    def _read(self) -> None:
        try:
            while True:
                kind, number, content, self._state, events = self._connection.recv()
                self._heard = time.monotonic()
                for name, *event in events:
                    getattr(self._watcher, name)(*event)
                if kind == "loaded":
                    self._loaded.set_result(content)
                elif kind == "queued":
                    if (call := self._calls.get(number)) is not None:
                        call.queued.set_result(content)
                elif kind in ("done", "failed"):
                    with self._lock:
                        call = self._calls.pop(number, None)
                    if number == 0:
                        self._loaded.set_exception(content)
                    elif call is not None:
                        _settle(call, content)
        except (OSError, EOFError):
            self._end()

    def _end(self) -> None:
        """Fail all calls after the child's end."""
        self._process.wait()
        with self._sending:
            self._connection.close()
        with self._lock:
            self._failed = f"its process ended with exit status {self._process.returncode}"
            calls, self._calls = list(self._calls.values()), {}
        if not self._loaded.done():
            self._loaded.set_exception(self._gone())
        for call in calls:
            _settle(call, self._gone())

    def _gone(self) -> EngineClosed | WorkerDied:
        if self._closed:
            return EngineClosed(f"the engine of {self._device} is closed")
        return WorkerDied(f"the engine of {self._device} has failed: {self._failed}; try again")


def _settle(call: _Call, content: Vectors | BaseException) -> None:
    if isinstance(content, BaseException) and not call.queued.done():
        call.queued.set_exception(content)
    if call.answer.set_running_or_notify_cancel():
        if isinstance(content, BaseException):
            call.answer.set_exception(content)
        else:
            call.answer.set_result(content)
