"""How a backend tells what batches take of its device's memory. Knows no backend."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..memory import TokenCost


@runtime_checkable
class Measurable(Protocol):
    """A backend on a device whose memory batches can exhaust."""

    def token_cost(self) -> TokenCost | None:
        """Measured with two batches, now; None where nothing came of it."""
        ...

    def used_bytes(self) -> int:
        """What this process has of the device's memory, for weights and whatever else stays."""
        ...
