"""Generations of a collection: rules shared by all stores, over rows of their state tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeVar

from connector.errors import GenerationChanged, GenerationRefused, UnknownCollection, UnknownGeneration
from connector.model import Checkpoint, CollectionStatus, Generation, GenerationState, Recipe, is_generation
from connector.stores.records import ModelStamp, recipe_of, same_spec

Row = TypeVar("Row", "Collection", Generation)
DROPPED = ""  # the fingerprint of a generation whose deletion has started; no model has this fingerprint


@dataclass(frozen=True, slots=True)
class Collection:
    """One generation in the store's state table. `name`: NAME@N, or NAME for the active one. `names`: source column to
    metadata name if they differ, for filters. `spec`: the recipe as JSON. `highest`: the highest number, set when an
    older generation was dropped. `id`: of the row, in the local store."""

    name: str
    table: str
    number: int
    stamp: ModelStamp
    checkpoint: Checkpoint
    names: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    spec: str | None = None
    created: datetime | None = None
    retired: datetime | None = None
    highest: int | None = None
    id: int = 0

    @property
    def state(self) -> GenerationState:
        if not is_generation(self.name):
            return "active"
        return "building" if self.retired is None else "retired"

    def generation(self, collection: str, rows: int | None) -> Generation:
        return Generation(
            name=self.name,
            number=self.number,
            state=self.state,
            model=self.stamp.id,
            fingerprint=self.stamp.fingerprint,
            dimension=self.stamp.dimension,
            table=self.table,
            rows=rows,
            created=self.created,
            retired=self.retired,
            last_sync=self.checkpoint.last_sync,
            recipe=recipe_of(collection, self.spec),
        )

    def status(
        self,
        store: Literal["hana", "local"],
        schema: str | None,
        *,
        rows: int,
        chunks: int,
        quarantined: int,
        foreign: int = 0,
    ) -> CollectionStatus:
        return CollectionStatus(
            collection=self.name,
            store=store,
            schema=schema,
            table=self.table,
            generation=self.number,
            model=self.stamp.id,
            dimension=self.stamp.dimension,
            rows=rows,
            chunks=chunks,
            foreign=foreign,
            empty=self.checkpoint.empty,
            quarantined=quarantined,
            last_sync=self.checkpoint.last_sync,
            key=self.checkpoint.key,
            checkpoint=self.checkpoint,
        )


def resumable(collection: str, rows: Sequence[Collection], stamp: ModelStamp, recipe: Recipe) -> Collection | None:
    """Return the newest unfinished generation of this model; the next sync applies a changed recipe to it. Otherwise
    return the newest retired generation of this model and recipe. Raises UnknownCollection if none is active."""
    if not any(row.state == "active" for row in rows):
        raise UnknownCollection(f"the store has no collection {collection!r}; `sync` creates it")
    newest_first = sorted((row for row in rows if row.stamp == stamp), key=lambda row: -row.number)
    building = [row for row in newest_first if row.state == "building"]
    retired = (row for row in newest_first if row.state == "retired" and same_spec(collection, row.spec, recipe))
    return building[0] if building else next(retired, None)


def free_number(rows: Sequence[Collection]) -> int:
    """Return a number that no generation of the collection has or ever had."""
    return max((max(row.number, row.highest or 0) for row in rows), default=0) + 1


def numbered(collection: str, rows: Sequence[Row], number: int) -> Row:
    """Return the generation with this number. Raises UnknownGeneration."""
    for row in rows:
        if row.number == number:
            return row
    if not rows:
        raise UnknownGeneration(f"{collection!r} was never synced and has no generations")
    known = ", ".join(str(row.number) for row in sorted(rows, key=lambda row: row.number))
    raise UnknownGeneration(f"{collection!r} has no generation {number}; there are: {known}")


def droppable(collection: str, rows: Sequence[Collection], number: int) -> Collection:
    """Return the generation with this number. Raises UnknownGeneration, and GenerationRefused for the active one."""
    row = numbered(collection, rows, number)
    if row.state == "active":
        raise GenerationRefused(
            f"generation {number} of {collection!r} serves the searches and is not dropped: switch to another first"
        )
    return row


def switching(
    collection: str, rows: Sequence[Collection], number: int
) -> tuple[Collection, list[Collection], int] | None:
    """Return the generation to activate, those to retire, and the lease epoch that all get; None if that generation is
    already active. Raises UnknownGeneration, GenerationRefused."""
    target = numbered(collection, rows, number)
    if target.state == "active":
        return None
    if target.stamp.fingerprint == DROPPED:
        raise GenerationRefused(
            f"generation {number} of {collection!r} was being dropped; drop it again to finish that"
        )
    epoch = max(row.epoch for row in rows) + 1  # above every earlier lease of either name
    return target, [row for row in rows if row.state == "active"], epoch


def changed(collection: str, expected: int, active: int) -> GenerationChanged:
    return GenerationChanged(
        f"{collection!r} is served by generation {active} now, no longer by {expected}: search again"
    )
