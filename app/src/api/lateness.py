"""How late the event loop is: what holds it up holds up every request, and no figure of a single one says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_SECONDS = 0.5


@contextmanager
def watched(tell: Callable[[float], None], every: float = EVERY_SECONDS) -> Iterator[None]:
    """While it lasts, `tell` hears every so many seconds how many seconds the running loop came too late."""
    loop = asyncio.get_running_loop()
    # By the clock itself: uvloop's own stands still while a callback runs.
    due = time.monotonic() + every
    timer: asyncio.TimerHandle | None = None

    def looked() -> None:
        nonlocal due, timer
        now = time.monotonic()
        tell(max(0.0, now - due))
        due, timer = now + every, loop.call_later(every, looked)

    timer = loop.call_later(every, looked)
    try:
        yield
    finally:
        timer.cancel()
