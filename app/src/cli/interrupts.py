"""Ctrl-C and SIGTERM while a sync runs: the first asks it to finish the batch in hand, a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from app.src.cli.exits import INTERRUPTED, TERMINATED

_TOLD = b"finishing the batch in hand; Ctrl-C again stops at once (nothing is lost: the next sync goes on)\n"


class Interrupted:
    """`code`: the exit code that the signal asks for; None while there was none."""

    def __init__(self) -> None:
        self.code: int | None = None

    def __call__(self) -> bool:
        """Should the work stop? The connector's `stop`."""
        return self.code is not None

    def receive(self, number: int, _: FrameType | None) -> None:
        again = self.code is not None
        self.code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Not through a stream: the signal may have come in the middle of a write to it.
        os.write(2, _TOLD)


@contextmanager
def interruptible() -> Iterator[Interrupted]:
    interrupted = Interrupted()
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, interrupted.receive) for kind in kinds}
    try:
        yield interrupted
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def orderly() -> Iterator[None]:
    """SIGTERM leaves the block as an exception does, so that what was started in it is stopped."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
