"""The ways to find changes, each with what it needs in the database and what its checkpoint promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connector.hana import HanaPool
from connector.model import ChangeSpec, Checkpoint, CollectionSpec

if TYPE_CHECKING:
    from tests.proof.ground import Ground

Install = Callable[[CollectionSpec, HanaPool, str], None]
OpenIds = Callable[["Ground", Checkpoint], set[str]]


def _nothing(spec: CollectionSpec, pool: HanaPool, user: str) -> None:
    """It needs nothing in the database."""


def _everything(ground: Ground, checkpoint: Checkpoint) -> set[str]:
    """Between two complete runs its checkpoint promises nothing about single rows."""
    return set(ground.versions)


ROUND = (
    *("after_lease", "after_read", "after_render", "after_embed", "before_apply", "mid_upsert", "after_apply"),
    *("before_checkpoint", "mid_checkpoint", "after_checkpoint"),
)
"""The failpoints on the way of every run."""
ONCE = ("after_lease", "before_checkpoint", "after_checkpoint")
"""Of these a run passes no more than one."""


@dataclass(frozen=True)
class Method:
    """`passes`: the failpoints on its way, `once` those that one run passes a single time. `open_ids`: rows of which
    the checkpoint does not yet say that they are stored."""

    spec: ChangeSpec
    passes: tuple[str, ...] = ROUND
    once: tuple[str, ...] = ONCE
    install: Install = _nothing
    open_ids: OpenIds = _everything


WHOLE = ((*ROUND, "mid_delete"), (*ONCE, "mid_checkpoint"))
"""Of runs that see every row: they delete what they did not see, and have one checkpoint, at their end."""

METHODS = {"full": Method(ChangeSpec(), *WHOLE)}
