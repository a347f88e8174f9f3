"""A child process that answers calls over a socket that only the two processes have."""

from __future__ import annotations

import itertools
import logging
import os
import pickle  # nosec B403 # between this process and its own child only
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from .device import EngineError

# The child has this process' import path.
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[2:]; from {run.__module__} import run; "
    "from {serve.__module__} import {serve.__name__} as serve; run(serve, int(sys.argv[1]))"
)
Progress = Callable[[Any], object]
_log = logging.getLogger(__name__)
ENDED = (EOFError, OSError, pickle.UnpicklingError)  # the last one within a message


class ChildProcess:
    """Runs `serve` in a process and calls it. Thread-safe. Calls and answers are pickled.

    The child ends with this process, however that ends, and ignores Ctrl-C and SIGTERM, which this process handles. A
    dead child is not started again.
    """

    def __init__(
        self,
        serve: Callable[[Calls], None],
        *,
        reported: Callable[[Any], None] = lambda _: None,
        lost: Callable[[], None] = lambda: None,
        error: Callable[[], Exception] = EOFError,
        stderr: int | None = None,
    ) -> None:
        """`reported` gets what the child reports unasked; `lost` is called when it has ended; `error` makes the error
        of a call that it cannot answer."""
        self._reported, self._lost, self._error = reported, lost, error
        self._calls: dict[int, tuple[Future[Any], Progress | None]] = {}
        self._numbers = itertools.count(1)
        self.ended = False
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND.format(run=run, serve=serve), str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # MCP speaks over this process's own
                stderr=stderr,
                start_new_session=True,  # Ctrl-C reaches this process only
            )
        self._messages = _Messages(ours)
        self._reader = threading.Thread(target=self._read, name="owl-sap-child", daemon=True)
        self._reader.start()

    @property
    def waiting(self) -> int:
        """Return the number of calls without an answer."""
        return len(self._calls)

    def call(self, *content: object, progress: Progress | None = None) -> Future[Any]:
        """Return the future answer; cancelling it cancels the call. `progress` gets earlier answers, in the thread that
        reads; its error is the call's."""
        number, future = next(self._numbers), Future[Any]()
        message = _pickled((number, content))
        self._calls[number] = future, progress
        self._send(message)
        if self.ended:  # perhaps before the call was noted
            self._fail_calls()
        future.add_done_callback(partial(self._cancel, number))
        return future

    def close(self, seconds: float) -> None:
        """Let `serve` return, and wait for the end of the process; kill it after `seconds`."""
        kill = threading.Thread(target=self._kill_after, args=(seconds,), daemon=True)
        kill.start()  # also ends a `_send` to a child that does not read
        if seconds:
            self._send(_pickled(None))
        kill.join()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _kill_after(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _cancel(self, number: int, future: Future[Any]) -> None:
        if future.cancelled() and self._calls.pop(number, None) is not None:
            self._send(_pickled((number, None)))

    def _send(self, message: bytes) -> None:
        try:
            self._messages.send(message)
        except (*ENDED, ValueError):
            pass  # of a dead child (closed files): the reader fails its calls
        except BaseException:  # such as Ctrl-C: the child may have a part of the message, and would misread the next
            self.process.kill()
            raise

    def _read(self) -> None:
        try:
            while True:
                self._take(*self._messages.receive())
        except ENDED:
            pass
        except Exception as error:  # for want of memory, for example; later answers would never be read
            _log.error("ending a process because its answer cannot be read: %s", type(error).__name__)
            self.process.kill()
        self.process.wait()
        self._messages.close()
        self.ended = True
        self._lost()
        self._fail_calls()

    def _take(self, number: int, content: Any, last: bool) -> None:
        if not number:
            self._reported(content)
        elif (call := self._calls.pop(number, None) if last else self._calls.get(number)) is not None:
            future, progress = call
            try:
                if not last and progress is not None:
                    progress(content)
            except Exception as error:
                content, last = error, self._calls.pop(number, None) is not None
            if last:
                _settle(future, content)

    def _fail_calls(self) -> None:
        with suppress(KeyError):  # none is left
            while True:
                _number, (future, _progress) = self._calls.popitem()
                _settle(future, self._error())


def _settle(future: Future[Any], content: Any) -> None:
    if future.set_running_or_notify_cancel():
        if isinstance(content, BaseException):
            future.set_exception(content)
        else:
            future.set_result(content)


def _pickled(message: object) -> bytes:
    return pickle.dumps(message, 5)


class _Messages:
    """Pickles over a socket. Sending is thread-safe. Raises ENDED if the other process has ended."""

    def __init__(self, end: socket.socket) -> None:
        self._in, self._out = end.makefile("rb"), end.makefile("wb")
        end.close()  # the files keep it open
        self._sending = threading.Lock()

    def send(self, pickled: bytes) -> None:
        with self._sending:
            self._out.write(pickled)
            self._out.flush()

    def receive(self) -> Any:
        return pickle.load(self._in)  # nosec B301 # nosemgrep: owl-pickle - from the other of the two processes

    def close(self) -> None:
        with self._sending, suppress(*ENDED):
            self._in.close()
            self._out.close()


class Calls(_Messages):
    """The parent's calls, in the child process. Answering is thread-safe."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield number and content of each call until the parent closes; content None cancels a call."""
        while (message := self.receive()) is not None:
            yield message

    def answer(self, number: int, content: object, *, last: bool = True) -> None:
        """Answer a call with a value or an error, or report something as number 0."""
        if isinstance(content, Exception):
            known = isinstance(content, EngineError) or type(content).__module__ == "builtins"
            content = content if known else EngineError(f"{type(content).__name__}: {content}")
        try:
            message = _pickled((number, content, last))
        except Exception as error:  # of a value in an error
            message = _pickled((number, EngineError(f"{type(content).__name__}, not shown: {error}"), last))
        self.send(message)


def run(serve: Callable[[Calls], None], descriptor: int) -> None:
    """Serve the parent over its socket, in the child process, until `serve` returns or the parent has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all processes of a service
    with suppress(*ENDED):
        serve(Calls(socket.socket(fileno=descriptor)))
    os._exit(0)  # without waiting for threads, one of which may hang in the driver
