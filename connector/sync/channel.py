"""What stands between the threads of one run: a queue bounded in bytes and items, ended by its senders or given up by
whoever waits; and the threads themselves, ended together. Knows nothing of what goes through.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """Nothing more will come, or nothing more is wanted."""


class Channel(Generic[T]):
    """Items in the order in which they were put. Of what waits, at most `max_items` and `max_bytes`; an item larger
    than that passes alone."""

    def __init__(self, max_bytes: int, max_items: int, senders: int = 1) -> None:
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._senders = senders
        self._waiting: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, item: T, size: int) -> None:
        """`size` in bytes. Waits for room. Raises Closed once nobody will take it."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up() or self._has_room(size))
            if self._given_up():
                raise Closed
            self._waiting.append((item, size))
            self._bytes += size
            self._changed.notify_all()

    def get(self) -> T:
        """Waits for an item. Raises the error that a sender ended with, after what was put before it; Closed when all
        senders have ended, or at once after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._given_up() or not self._senders)
            if not self._waiting:
                raise self._error or Closed
            item, size = self._waiting.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return item

    def end(self, error: BaseException | None = None) -> None:
        """Called once by each sender. After an error the other senders are not listened to any more."""
        with self._changed:
            self._senders -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what waits; whoever puts or gets is told so."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._bytes = 0
            self._changed.notify_all()

    def _given_up(self) -> bool:
        return self._closed or self._error is not None

    def _has_room(self, size: int) -> bool:
        if not self._waiting:
            return True
        return len(self._waiting) < self._max_items and self._bytes + size <= self._max_bytes


class Crew:
    """The threads of one run. All are daemons: a process that must end does not wait for them."""

    PATIENCE = 2.0
    """Seconds for which `leave` waits. What hangs longer does so in a library, and ends when that returns."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def leave(self) -> None:
        """Join, but not for ever."""
        deadline = time.monotonic() + self.PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
