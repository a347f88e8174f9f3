"""Which request gets one of a number of threads next, and how long a new one would have to wait. Knows no HTTP and no
thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from app.src.api.errors import Crowded

_NEWEST = 0.05
"""Weight of the last call in the mean: about twenty of them count."""
MOST_CALLERS = 1_000
"""Whose pace is kept; beyond it that of callers without a request is forgotten."""


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one caller."""

    waiting: deque[Turn] = field(default_factory=deque)
    overdue: float | None = None
    """Since when the first waited of those that have waited too long since this caller last got a thread."""
    busy: int = 0
    calls: int = 0
    pace: float = 0.0
    """Mean seconds from one end of a call to the next, while there are calls."""


@dataclass(slots=True, eq=False)
class Turn:
    """Of a request that waits for a thread since `since`. `start` is called when it gets one."""

    line: _Line
    start: Callable[[Turn], object]
    since: float
    begun: float | None = None


class Turns:
    """Thread-safe. Callers share the threads: of those who wait, the one who holds the fewest threads is next, and who
    came first among equals. The last free thread is for a caller who holds none, so no caller alone holds all of them.

    No more requests of a caller are let in than get a thread within `max_wait` seconds: by how many wait, and at which
    pace its calls have ended lately; and, where they do not end at all, by how long the first of them has waited.

    The pace of a call is its seconds over the number of calls at the same time: what as many threads computed together.
    One call alone says nothing of what all threads could do, so after a quiet time a burst is let in with caution.
    """

    def __init__(
        self, threads: int, max_wait: float, clock: Callable[[], float] = time.monotonic, *, told_apart: bool = True
    ) -> None:
        """`told_apart`: whether there are several callers. Otherwise, and of one thread, none is kept free."""
        self._threads = threads
        self._free = threads
        self._kept = 1 if told_apart and threads > 1 else 0
        self._max_wait = max_wait
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}

    def come(self, caller: str, start: Callable[[Turn], object]) -> Turn:
        """`start` is called as soon as there is a thread, which may be now. `end` must follow that, or `leave` precede
        it. Raises Crowded for a request that would wait too long; then nothing follows."""
        with self._lock:
            line = self._line(caller)
            now = self._clock()
            since = line.waiting[0].since if line.waiting else now
            waited = now - (since if line.overdue is None else line.overdue)
            expected = len(line.waiting) * line.pace
            first = not line.waiting and (not line.busy or self._may_begin(line))
            if not first and max(waited, expected) > self._max_wait:
                raise Crowded(self._why(line, waited, expected), seconds=max(waited, expected))
            turn = Turn(line, start, now)
            line.waiting.append(turn)
            self._next()
            return turn

    def end(self, turn: Turn) -> None:
        """Its call has ended."""
        with self._lock:
            line, begun = turn.line, turn.begun
            assert begun is not None
            line.calls += 1
            pace = (self._clock() - begun) / line.busy
            line.pace += (pace - line.pace) * max(_NEWEST, 1 / line.calls)
            line.busy -= 1
            self._free += 1
            self._next()

    def leave(self, turn: Turn) -> bool:
        """It wants no thread any more. False, and nothing is done, where it has had one or left before."""
        with self._lock:
            if turn not in turn.line.waiting:
                return False
            turn.line.waiting.remove(turn)
            return True

    def overdue(self, turn: Turn) -> Crowded | None:
        """After `max_wait`: the refusal of a request that still waits, and leaves by that."""
        if not self.leave(turn):
            return None
        with self._lock:
            line = turn.line
            line.overdue = turn.since if line.overdue is None else line.overdue
            waited = max(self._clock() - turn.since, self._max_wait)
            return Crowded(self._why(line, waited, 0.0), seconds=waited)

    def _line(self, caller: str) -> _Line:
        line = self._lines.get(caller)
        if line is None:
            if len(self._lines) >= MOST_CALLERS:
                self._lines = {name: one for name, one in self._lines.items() if one.waiting or one.busy}
            line = self._lines[caller] = _Line()
        return line

    def _may_begin(self, line: _Line) -> bool:
        return self._free > (self._kept if line.busy else 0)

    def _next(self) -> None:
        while lines := [line for line in self._lines.values() if line.waiting and self._may_begin(line)]:
            line = min(lines, key=lambda one: (one.busy, one.waiting[0].since))
            turn = line.waiting.popleft()
            line.overdue = None
            turn.begun = self._clock()
            line.busy += 1
            self._free -= 1
            turn.start(turn)

    def _why(self, line: _Line, waited: float, expected: float) -> str:
        so_far = f"the next has waited for {waited:.0f} s"
        if expected > waited:
            so_far = f"{len(line.waiting)} wait, so that one more would wait for {expected:.1f} s"
        return (
            f"{line.busy} requests of yours are worked on, and {so_far}; at most {self._max_wait:g} s are allowed "
            "(setting api.max_wait): try again later"
        )
