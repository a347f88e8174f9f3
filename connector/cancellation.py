"""Ends what a thread reads from another thread, once nobody waits for the answer. Searches and reads look here; what
writes goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from connector.errors import Cancelled

_here = threading.local()


class Cancellation:
    """Of one call, made in one thread and cancelled from any. A store that reads for it says with `calling` how its
    statement is interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], object] | None = None
        self.cancelled = False
        """Lets no statement begin, and ends what looks at it by itself."""

    def cancel(self) -> None:
        """Interrupt the statement that runs now; let none begin. May wait for the database, so not on an event loop."""
        self.cancelled = True
        with self._lock:
            if self._interrupt is not None:
                self._interrupt()

    def check(self) -> None:
        """Raises Cancelled."""
        if self.cancelled:
            raise Cancelled("nobody waits for the answer of this request any more, so it was given up")

    @contextmanager
    def calling(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Around a statement. `interrupt` is called at most once, never after the end of the block. Raises Cancelled
        before the block where that was before it."""
        with self._lock:
            self.check()
            outer, self._interrupt = self._interrupt, interrupt
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = outer


def current() -> Cancellation:
    """Of this thread's call."""
    found: Cancellation | None = getattr(_here, "cancellation", None)
    return found or Cancellation()


@contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """What this thread calls in the block is cancelled by it, and by nothing else."""
    outer = getattr(_here, "cancellation", None)
    _here.cancellation = cancellation
    try:
        yield
    finally:
        _here.cancellation = outer
