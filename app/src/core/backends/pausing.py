"""How a backend lets other work pass: a batch of bulk work takes tens of milliseconds, and a search should not wait for
the whole of it. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Interruptible(Protocol):
    """A backend that calls `pause` so many times in the midst of `forward`, where another `forward` may go before."""

    pauses: int
    pause: Callable[[], None] | None
