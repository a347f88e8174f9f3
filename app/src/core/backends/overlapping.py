"""How a backend lets its device compute while the host does something else: a batch is launched now and asked for
later, so that the next one is made ready, launched even, before this one is done. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from . import TokenIds, Vectors


class Pending(Protocol):
    """A batch on its way."""

    def result(self) -> Vectors:
        """Waits for the vectors, as `Backend.forward` gives them. Raises what went wrong, OutOfMemory among it, however
        late the device told. From any thread; it may be left out."""
        ...


@runtime_checkable
class Overlapping(Protocol):
    """A backend whose device works on its own. `ahead`: how many batches should be launched beside the one that is
    waited for; 0 when none should, as when it was switched off."""

    ahead: int

    def begin(self, batch: Sequence[TokenIds]) -> Pending:
        """As `Backend.forward`, without waiting. Batches end in the order in which they began. Not from two threads at
        once; `forward` may be called between."""
        ...
