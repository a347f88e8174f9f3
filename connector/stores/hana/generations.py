"""Generations in the HANA store: rows of OWL_STATE beside the one that serves, each with a vector table of its own.
Knows the pool and the state tables, no search.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from connector import failpoints
from connector.errors import RowRejected, UnknownColumn, UnknownTable
from connector.hana.connection import Session
from connector.model import Generation, GenerationState, Lease, Recipe, generation_name
from connector.protocols import Embedder
from connector.stores import records
from connector.stores.generation_rules import (
    DROPPED,
    Candidate,
    free_number,
    half_dropped,
    is_active,
    metadata_names_text,
    no_collection,
    no_generation,
    resumable,
)
from connector.stores.hana.collections import Collections
from connector.stores.hana.tables import GenerationSql, VectorSql, table_name, table_taken
from connector.stores.hana.upgrade import HanaUpgrade
from connector.stores.lease import lost
from connector.stores.records import ModelStamp


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    table: str
    number: int
    stamp: ModelStamp
    checkpoint: str | None
    last_sync: datetime | None
    epoch: int
    spec: str | None = None
    created: datetime | None = None
    retired: datetime | None = None
    highest: int | None = None

    @property
    def state(self) -> GenerationState:
        if "@" not in self.name:
            return "active"
        return "building" if self.retired is None else "retired"

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.name, self.number, self.state, self.stamp, self.spec)


class HanaGenerations:
    """A `Generations`. `ensure_table`: makes a vector table of a dimension where it is missing. `lease`: owns a
    generation that is to be dropped."""

    def __init__(
        self,
        collections: Collections,
        *,
        ensure_table: Callable[[VectorSql, int], None],
        upgrade: HanaUpgrade,
        lease: Callable[[str], AbstractContextManager[Lease]],
    ) -> None:
        self._collections = collections
        self._pool = collections.pool
        self._schema = collections.schema
        self._ensure_table = ensure_table
        self._upgrade = upgrade
        self._lease = lease
        self._sql = GenerationSql(self._schema)

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        return [self._generation(collection, row, counted) for row in self._rows(collection)]

    def free_number(self, collection: str) -> int:
        """One that no generation of the collection has or had."""
        return free_number((row.number, row.highest or 0) for row in self._rows(collection))

    def _rows(self, collection: str) -> list[_Row]:
        """By number; [] where nothing was ever stored."""
        doing = f"looking at the generations of {collection!r}"
        try:
            rows = self._pool.read(self._sql.find_all(), _names_of(collection), doing=doing)
        except UnknownTable:
            return []
        except UnknownColumn:  # the state table of an earlier version, which only looking leaves as it is
            rows = self._pool.read(self._sql.find_first(), (collection,), doing=doing)
        return [_row(*row) for row in rows]

    def _generation(self, collection: str, row: _Row, counted: bool) -> Generation:
        rows = None
        if counted:
            table = VectorSql(self._schema, row.table)
            try:
                rows = int(self._pool.read(table.count(), doing=f"counting {row.name!r}")[0][2])
            except UnknownTable:
                rows = 0
        return Generation(
            name=row.name,
            number=row.number,
            state=row.state,
            model=row.stamp.id,
            fingerprint=row.stamp.fingerprint,
            dimension=row.stamp.dimension,
            table=row.table,
            rows=rows,
            created=records.in_utc(row.created),
            retired=records.in_utc(row.retired),
            last_sync=records.in_utc(row.last_sync),
            recipe=records.recipe_of(collection, row.spec),
        )

    # -------------------------------------------------------------------------------------------------- beginning

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        self._upgrade()
        stamp = ModelStamp.of(embedder)
        while True:
            rows = self._rows(collection)
            if not any(row.state == "active" for row in rows):
                raise no_collection(collection)
            found = resumable(collection, [row.candidate for row in rows], stamp, recipe)
            if found is not None:
                if found.state == "retired":
                    self._pool.execute(self._sql.revive(), (found.name,), doing=f"building {found.name!r} on")
                return found.name
            number = free_number((row.number, row.highest or 0) for row in rows)
            with suppress(RowRejected):  # another worker has begun one: look again
                self._add(collection, number, stamp, recipe)

    def _add(self, collection: str, number: int, stamp: ModelStamp, recipe: Recipe) -> None:
        """The table first: what a crash leaves is an empty table, which the next attempt takes."""
        name, table = generation_name(collection, number), VectorSql(self._schema, table_name(collection, number))
        owners = self._pool.read(self._sql.find_by_table(), (table.name,), doing="looking for a free table")
        if owners and owners[0][0] != name:
            raise table_taken(collection, owners[0][0], table.name)
        self._ensure_table(table, stamp.dimension)
        known = metadata_names_text(self._collections.names, collection)
        text = records.recipe_text(recipe)
        values = (name, table.name, number, stamp.id, stamp.fingerprint, stamp.dimension, known, text)
        self._pool.execute(self._sql.insert(), values, doing=f"registering {name!r}")

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        text = records.recipe_text(recipe)
        self._upgrade()
        known = [row.spec for row in self._rows(collection) if row.number == number]
        if known and known[0] != text:  # by its number, for a switch may change its name now
            values = (text, number, collection, generation_name(collection, number))
            self._pool.execute(self._sql.record_spec(), values, doing=f"recording what {collection!r} is made by")

    # -------------------------------------------------------------------------------------------------- switching

    def switch(self, collection: str, number: int) -> None:
        """Run again after a lost reply it finds the switch made."""
        if not self._upgrade():
            raise no_generation(collection, number, [])

        def work(session: Session) -> None:
            found = session.query(self._sql.lock_all(), _names_of(collection), doing="locking the generations")
            rows = {row.number: row for row in (_row(*each) for each in found)}
            target = rows.get(number)
            if target is None:
                raise no_generation(collection, number, list(rows))
            if target.state == "active":
                return
            if target.stamp.fingerprint == DROPPED:
                raise half_dropped(collection, number)
            epoch = max(row.epoch for row in rows.values()) + 1  # of either name, no earlier lease has it
            for row in rows.values():
                if row.state == "active":
                    retired = generation_name(collection, row.number)
                    values = (retired, records.to_compare_whole(row.checkpoint), epoch, collection)
                    session.execute(self._sql.retire(), values, doing="retiring a generation")
                    session.execute(self._sql.move_quarantine(), (retired, collection), doing="moving its quarantine")
            failpoints.reach("mid_alias_swap")
            values = (collection, records.to_compare_whole(target.checkpoint), epoch, target.name)
            session.execute(self._sql.serve(), values, doing="switching to a generation")
            session.execute(self._sql.move_quarantine(), (collection, target.name), doing="moving its quarantine")

        self._pool.in_transaction(work, doing=f"switching {collection!r} to generation {number}")
        self._collections.forget()

    # --------------------------------------------------------------------------------------------------- dropping

    def drop(self, collection: str, number: int) -> None:
        rows = {row.number: row for row in self._rows(collection)}
        if number not in rows:
            raise no_generation(collection, number, list(rows))
        if rows[number].state == "active":
            raise is_active(collection, number)
        self._upgrade()
        with self._lease(rows[number].name) as lease:
            self._drop(collection, lease)
        self._collections.forget()

    def _drop(self, collection: str, lease: Lease) -> None:
        """Marked first: cut short, it can be dropped again, but neither built on nor switched to."""
        marked = self._pool.execute(self._sql.mark_dropped(), (DROPPED, lease.collection, lease.epoch))
        if marked != 1:
            raise lost(lease)
        (row,) = (row for row in self._rows(collection) if row.name == lease.collection)
        with suppress(UnknownTable):  # dropped before, and cut short then
            self._pool.execute(VectorSql(self._schema, row.table).drop(), doing=f"dropping {lease.collection!r}")
        highest = self.free_number(collection) - 1

        def work(session: Session) -> None:
            session.execute(self._sql.keep_highest(), (highest, collection), doing="dropping a generation")
            session.execute(self._sql.drop_quarantine(), (lease.collection,), doing="dropping a generation")
            session.execute(self._sql.delete(), (lease.collection,), doing="dropping a generation")

        self._pool.in_transaction(work, doing=f"dropping {lease.collection!r}")


def _names_of(collection: str) -> tuple[str, str]:
    """The name, and the pattern of its other generations' names; `_` is a wildcard and may stand in a name."""
    escaped = collection.replace("\\", "\\\\").replace("_", "\\_").replace("%", "\\%")
    return collection, generation_name(escaped, 0)[:-1] + "%"


def _row(name: str, table: str, number: int, *more: Any) -> _Row:
    model, fingerprint, dimension, *rest = more
    return _Row(name, table, number, ModelStamp(model, fingerprint, dimension), *rest)
