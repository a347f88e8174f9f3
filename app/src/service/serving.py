"""What serves of a collection, and reading it as one whole while another generation may take over. Knows no store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from connector.errors import GenerationChanged
from connector.model import CollectionSpec, CollectionStatus

TRIES = 3
"""So often something is read anew because another generation took over in its midst."""

Result = TypeVar("Result")


class Serving(Protocol):
    """What search knows of a collection."""

    def serving(self, name: str) -> CollectionStatus:
        """A few seconds old at most. Raises UnknownCollection when it was never synced."""
        ...

    def never_written(self, spec: CollectionSpec) -> bool:
        """Of a collection that clients write; of one that was never synced False."""
        ...

    def forget(self, name: str) -> None:
        """Another generation may serve."""
        ...

    def key_columns(self, spec: CollectionSpec, stored: CollectionStatus) -> tuple[str, ...]: ...


def in_one_generation(serving: Serving, name: str, read: Callable[[CollectionStatus], Result]) -> Result:
    """`read`, of what serves from its first step to its last: anew when another generation takes over in its midst.
    Raises GenerationChanged when that goes on, and as `Serving.serving`."""
    for _ in range(TRIES - 1):
        try:
            return read(serving.serving(name))
        except GenerationChanged:
            serving.forget(name)
    return read(serving.serving(name))
