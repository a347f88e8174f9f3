"""Cancel the reads of one thread from another thread. Searches and reads stop; writes continue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from connector.errors import Cancelled

_here = threading.local()


class Cancellation:
    """Cancels the calls that one thread makes; `cancel` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], object] | None = None
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def prevent(self) -> None:
        """Prevent further statements without interrupting a running one; return at once."""
        self._cancelled.set()

    def cancel(self) -> None:
        """Interrupt the running statement and prevent further ones. May wait for the database: do not call on an event
        loop."""
        self.prevent()
        with self._lock:
            if self._interrupt is not None:
                self._interrupt()

    def check(self) -> None:
        """Raise Cancelled if cancelled."""
        if self.cancelled:
            raise Cancelled("the request was cancelled because its caller has left")

    def pause(self, seconds: float) -> None:
        """Wait; raise Cancelled as soon as the call is cancelled."""
        self._cancelled.wait(seconds)
        self.check()

    @contextmanager
    def calling(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Run a statement in the block. `cancel` calls `interrupt` during the block, never after it. Raises Cancelled
        before the block if already cancelled."""
        with self._lock:
            self.check()
            outer, self._interrupt = self._interrupt, interrupt
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = outer


def current() -> Cancellation:
    """Return the cancellation of this thread's call."""
    found: Cancellation | None = getattr(_here, "cancellation", None)
    return found or Cancellation()


@contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """Let only this cancellation cancel this thread's calls in the block."""
    outer = getattr(_here, "cancellation", None)
    _here.cancellation = cancellation
    try:
        yield
    finally:
        _here.cancellation = outer
