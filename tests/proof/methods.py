"""The ways to find changes, each with what it needs in the database and what its checkpoint promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connector.hana import HanaPool
from connector.model import ChangeSpec, Checkpoint, CollectionSpec
from connector.source import HanaSource

if TYPE_CHECKING:
    from tests.proof.ground import Ground

Install = Callable[[CollectionSpec, HanaSource, HanaPool], None]
OpenIds = Callable[["Ground", Checkpoint], set[str]]


def _nothing(spec: CollectionSpec, source: HanaSource, pool: HanaPool) -> None:
    """It needs nothing in the database."""


def _everything(ground: Ground, checkpoint: Checkpoint) -> set[str]:
    """Between two complete runs its checkpoint promises nothing about single rows."""
    return set(ground.versions)


@dataclass(frozen=True)
class Method:
    """`open_ids`: rows of which the checkpoint does not yet say that they are stored."""

    spec: ChangeSpec
    install: Install = _nothing
    open_ids: OpenIds = _everything


METHODS = {"full": Method(ChangeSpec())}
