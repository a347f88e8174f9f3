"""Handling of Ctrl-C and SIGTERM. During writes, the process finishes the current batch on the first signal, and ends
at once on a second Ctrl-C. Everything else ends at once and cleans up, even if a library waits and ignores signals."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from app.src.cli.exits import INTERRUPTED, TERMINATED

# GRACE: seconds within which shutdown must begin: Python's handlers run only when the current library call (hdbcli,
# SQLite) returns. CLEANUP: further seconds within which it must finish.
GRACE, CLEANUP = 2.0, 10.0
_LAST_WORDS = 0.5  # seconds to wait for threads that are about to end
_TOLD = b"finishing the current batch; Ctrl-C again stops at once (nothing is lost: the next run continues)\n"
_DONE = b"\0"


class _Interrupted:
    """`code`: the exit code of the signal, or None. `heard`: the main thread has been asked to end at once. `told`: the
    message for the first signal."""

    def __init__(self, told: bytes) -> None:
        self._told, self.heard = told, False
        self.code: int | None = None

    def __call__(self) -> bool:
        """Return whether the work should stop. The connector takes this object as `stop`."""
        return self.code is not None

    def receive(self, number: int, _: FrameType | None) -> None:
        again = self.code is not None
        self.code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if again and number == signal.SIGINT:
            self.heard = True
            raise KeyboardInterrupt
        # Not through sys.stderr: the signal may have interrupted a write to it.
        os.write(2, self._told)


@contextmanager
def interruptible(told: bytes = _TOLD) -> Iterator[_Interrupted]:
    interrupted = _Interrupted(told)
    before = {kind: signal.signal(kind, interrupted.receive) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class _Leave:
    """A signal handler that raises an exception, or calls `cancel` if set. `heard`: the handler was called."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.heard = False
        self.cancel: Callable[[], object] | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.heard = True
        if self.cancel is not None:
            self.cancel()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(self.code)


@contextmanager
def orderly(code: int = TERMINATED) -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the block, so that whatever the block started is stopped."""
    before = signal.signal(signal.SIGTERM, _Leave(code))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def not_held_up() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt in the block, and end the process within `GRACE` seconds of a signal even if
    the main thread hangs. For the main thread only."""
    pipe = os.pipe()  # moved above 2: if stdin is closed, a pipe end gets its descriptor
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in pipe)
    for end in pipe:
        os.close(end)
    os.set_blocking(writing, False)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, _Leave(INTERRUPTED))
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(reading, done), name="signals", daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup)
        os.write(writing, _DONE)
        watch.join()
        os.close(writing)
        os.close(reading)


@contextmanager
def cancelling(cancel: Callable[[], object]) -> Iterator[None]:
    """Make SIGTERM and Ctrl-C call `cancel`, and raise their exception only at the end of the block: an event loop
    cannot handle a signal's exception inside a task."""
    kinds = (signal.SIGINT, signal.SIGTERM)
    leaves = {kind: found for kind in kinds if isinstance(found := signal.getsignal(kind), _Leave)}
    for handler in leaves.values():
        handler.cancel = cancel
    try:
        yield
    finally:
        for handler in leaves.values():
            handler.cancel = None
        for kind, handler in leaves.items():
            if handler.heard:
                handler(kind, None)


def leave_behind_what_hangs(code: int) -> None:
    """End the process if threads still wait for a driver: at exit, Python would wait for them. Call this last."""
    own = threading.current_thread()
    by = time.monotonic() + _LAST_WORDS
    for thread in threading.enumerate():
        if thread is not own and not thread.daemon:
            thread.join(max(0.0, by - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


def _watch(reading: int, done: threading.Event) -> None:
    """Read each signal's number from the pipe, where it arrives at once; end the process if the main thread hangs."""
    interrupts = 0
    while (number := os.read(reading, 1)) != _DONE:
        interrupts += number[0] == signal.SIGINT
        handler: object = signal.getsignal(number[0])
        handler = getattr(handler, "__self__", handler)
        again = number[0] == signal.SIGINT and interrupts > 1
        if isinstance(handler, _Leave) or (isinstance(handler, _Interrupted) and again):
            ended = done.wait(GRACE) or (handler.heard and done.wait(CLEANUP))
            if not ended:
                os._exit(handler.code if isinstance(handler, _Leave) else INTERRUPTED)
