"""How a backend shows what it pools: the vectors of single tokens. Knows no backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from . import TokenIds, Vectors


@runtime_checkable
class TellsTokens(Protocol):
    """A backend that gives the vectors of single tokens too."""

    def token_vectors(self, batch: Sequence[TokenIds]) -> list[Vectors]:
        """Of each text float32 (its tokens, hidden) without special ones, not normalised; never from two threads at
        once. Raises ModelUnsupported, OutOfMemory."""
        ...
