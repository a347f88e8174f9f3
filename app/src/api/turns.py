"""Who waits for one of a number of threads, and how long the next one would have to. Knows no HTTP and no thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.src.api.errors import Crowded

_NEWEST = 0.05
"""Weight of the last call in the mean: about twenty of them count."""


@dataclass(slots=True, eq=False)
class Turn:
    """Of a request that waits for a thread, since then; `over`: it has one, or wants none any more."""

    since: float
    begun: float = 0.0
    over: bool = False


class Turns:
    """Thread-safe. No more are let in than get a thread within `max_wait` seconds: by how many wait, and at which pace
    calls have ended lately; and, where they do not end at all, by how long the first of those who wait has waited.

    The pace of a call is its seconds over the number of calls at the same time: what as many threads computed together.
    One call alone says nothing of what all threads could do, so after a quiet time a burst is let in with caution.
    """

    def __init__(self, threads: int, max_wait: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = threads
        self._max_wait = max_wait
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[Turn] = deque()
        self._waiting = 0
        self._busy = 0
        self._calls = 0
        self._pace = 0.0
        """Mean seconds from one end of a call to the next, while there are calls."""

    def come(self) -> Turn:
        """Raises Crowded for one who would wait too long."""
        with self._lock:
            now = self._clock()
            while self._queue and self._queue[0].over:
                self._queue.popleft()
            waited = now - self._queue[0].since if self._queue else 0.0
            expected = self._waiting * self._pace
            if max(waited, expected) > self._max_wait:
                raise Crowded(self._why(waited, expected), seconds=max(waited, expected))
            turn = Turn(now)
            self._queue.append(turn)
            self._waiting += 1
            return turn

    def begin(self, turn: Turn) -> None:
        with self._lock:
            self._leave(turn)
            turn.begun = self._clock()
            self._busy += 1

    def end(self, turn: Turn) -> None:
        with self._lock:
            self._calls += 1
            pace = (self._clock() - turn.begun) / self._busy
            self._pace += (pace - self._pace) * max(_NEWEST, 1 / self._calls)
            self._busy -= 1

    def leave(self, turn: Turn) -> None:
        """He wants none any more; nothing where he has one."""
        with self._lock:
            self._leave(turn)

    def _leave(self, turn: Turn) -> None:
        self._waiting -= not turn.over
        turn.over = True

    def _why(self, waited: float, expected: float) -> str:
        so_far = f"the next has waited for {waited:.0f} s"
        if expected > waited:
            so_far = f"{self._waiting} wait, so that one more would wait for {expected:.1f} s"
        return (
            f"{self._threads} requests are worked on, and {so_far}; at most {self._max_wait:g} s are allowed (setting "
            "api.max_wait): try again later"
        )
