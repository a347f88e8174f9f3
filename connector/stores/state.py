"""The state tables that every store keeps, with the same columns: generations, leases, checkpoints, the quarantine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from connector.errors import (
    GenerationChanged,
    LeaseLost,
    StoreCorrupt,
    UnknownCollection,
    UnknownGeneration,
    UnknownTable,
)
from connector.model import Checkpoint, Generation, GenerationState, Lease, generation_name, is_generation
from connector.stores import records
from connector.stores.records import ModelStamp

T = TypeVar("T")
Row = TypeVar("Row", "Collection", Generation)
LOOKUP_SIZES = (1, 8, 64, 512)  # Ids per look-up statement. Few sizes give few statement texts in HANA's plan cache.
Query = Callable[[str, Sequence[Any]], Sequence[Sequence[Any]]]
# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608


class Session(Protocol):
    """An open transaction. `doing` describes the statement in error messages."""

    def query(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = ...) -> list[Any]: ...

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = ...) -> int:
        """Return the number of affected rows."""

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]], *, doing: str = ...) -> None: ...


class Database(Protocol):
    """The database operations that the state tables need: `HanaPool`, or SQLite in the local store."""

    def read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = ...) -> list[Any]: ...

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = ...) -> int:
        """Run one statement as a transaction. Raises RowRejected if a row with that key exists."""

    def in_transaction(self, work: Callable[[Session], T], *, doing: str = ..., overloaded: int | None = None) -> T:
        """Run `work`, which must be idempotent, as one transaction. `overloaded`: attempts while the database is
        overloaded."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Times in seconds. `ttl`: how long a lease outlives a crashed worker. `renew`: between two renewals, well below
    `ttl`. `poll`: between two attempts to take a lease."""

    ttl: float = 30.0
    renew: float = 8.0
    poll: float = 0.25


@dataclass(frozen=True, slots=True)
class Collection:
    """One generation in the state table. `name`: NAME@N, or NAME for the active one. `names`: source column to metadata
    name if they differ, for filters. `spec`: the recipe as JSON. `highest`: the highest number, set when another
    generation was dropped. `id`: the number of the row, in the local store."""

    name: str
    table: str
    number: int
    stamp: ModelStamp
    names: Mapping[str, str]
    checkpoint: Checkpoint
    epoch: int
    spec: str | None
    created: datetime | None
    retired: datetime | None
    highest: int | None
    id: int

    @property
    def state(self) -> GenerationState:
        if not is_generation(self.name):
            return "active"
        return "building" if self.retired is None else "retired"


@dataclass(frozen=True, slots=True)
class StateTables:
    """The state tables of a store, and the SQL in which its database differs. `place`: where the tables are, for
    messages. `later`: the time in ? seconds. `expired`: a condition on LEASE_UNTIL. `corrupt`: returns the error for a
    row that cannot be read. `id`: the column of the row's number. `lock`: the end of a SELECT that locks rows."""

    place: str
    state: str
    quarantine: str
    now: str
    later: str
    expired: str
    corrupt: Callable[[str], StoreCorrupt]
    id: str
    lock: str = ""

    @property
    def renewal(self) -> str:
        """Return the first statement of every write. It also locks the row, so no other worker takes the lease before
        the commit."""
        return f'UPDATE {self.state} SET "LEASE_UNTIL" = {self.later} WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'

    def find(self, query: Query, name: str) -> Collection | None:
        return next(iter(self._rows(query, '"COLLECTION" = ?', (name,))), None)

    def generations(self, query: Query, collection: str) -> list[Collection]:
        """Return the generations in order of number; [] if the collection was never opened."""
        found = self._rows(query, OF_COLLECTION, names_of(collection))
        return [row for row in found if row.name.partition("@")[0] == collection]  # SQLite's LIKE ignores case

    def _rows(self, query: Query, condition: str, parameters: Sequence[str]) -> list[Collection]:
        sql = (
            'SELECT "COLLECTION", "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", "DIMENSION", "META_NAMES", '
            f'"CHECKPOINT", "LAST_SYNC", "LEASE_EPOCH", "SPEC", "CREATED_AT", "RETIRED_AT", "HIGHEST", {self.id} '
            f'FROM {self.state} WHERE {condition} ORDER BY "GENERATION"'
        )
        try:
            rows = query(sql, parameters)
        except UnknownTable:
            return []
        with self.readable("the record of a collection"):
            return [_collection(tuple(row)) for row in rows]

    def unknown(self, name: str) -> UnknownCollection:
        return UnknownCollection(f"{self.place} has no collection {name!r}; `sync` creates it")

    @contextmanager
    def readable(self, what: str) -> Iterator[None]:
        """Raise StoreCorrupt if stored values cannot be parsed."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise self.corrupt(f"{what} cannot be read") from None


@lru_cache
def _collection(row: tuple[Any, ...]) -> Collection:
    name, table, number, *stamp, aliases, text, synced, epoch, spec, created, retired, highest, id_ = row
    state = json.loads(aliases or "{}"), records.checkpoint_of(text, moment(synced)), epoch, spec
    return Collection(name, table, number, ModelStamp(*stamp), *state, moment(created), moment(retired), highest, id_)


def moment(value: datetime | float | None) -> datetime | None:
    """Return a stored time in UTC. HANA stores UTC without a zone, SQLite seconds since 1970."""
    if value is None:
        return None
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else datetime.fromtimestamp(value, UTC)


OF_COLLECTION = """"COLLECTION" = ? OR "COLLECTION" LIKE ? ESCAPE '\\'"""


def names_of(collection: str) -> tuple[str, str]:
    """Return the name, and a LIKE pattern for the names of its other generations, with wildcards escaped."""
    escaped = collection.replace("\\", "\\\\").replace("_", "\\_").replace("%", "\\%")
    return collection, generation_name(escaped, 0)[:-1] + "%"


def portions(ids: Sequence[T]) -> Iterator[list[T]]:
    """Split ids into lists of LOOKUP_SIZES, repeating the last id to fill the last list."""
    start = 0
    while start < len(ids):
        size = next((n for n in LOOKUP_SIZES if n >= len(ids) - start), LOOKUP_SIZES[-1])
        some = list(ids[start : start + size])
        yield some + [some[-1]] * (size - len(some))
        start += size


def free_number(rows: Sequence[Collection]) -> int:
    """Return a number that no generation of the collection has ever had."""
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


def changed(collection: str, expected: int, active: int) -> GenerationChanged:
    return GenerationChanged(
        f"{collection!r} now has the active generation {active} instead of {expected}: search again"
    )


def lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"another worker has taken over collection {lease.collection!r}; nothing of this change was written"
    )
