"""Generations in the HANA store: rows of OWL_STATE, each with a vector table of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from connector import failpoints
from connector.errors import RowRejected, UnknownColumn, UnknownTable
from connector.hana.connection import Session
from connector.model import Generation, Lease, Recipe, generation_name
from connector.protocols import Embedder
from connector.stores import records
from connector.stores.generations import (
    DROPPED,
    GenerationRow,
    Switch,
    droppable,
    free_number,
    metadata_names_text,
    resumable,
)
from connector.stores.hana.state import Collections
from connector.stores.hana.tables import GenerationSql, VectorSql, table_name, table_taken
from connector.stores.lease import lost
from connector.stores.records import ModelStamp


class HanaGenerations:
    """A `Generations`. `ensure_table` creates a vector table of a dimension where it is missing. `lease` owns a
    generation that is to be dropped."""

    def __init__(
        self,
        collections: Collections,
        *,
        ensure_table: Callable[[VectorSql, int], None],
        lease: Callable[[str], AbstractContextManager[Lease]],
    ) -> None:
        self._collections = collections
        self._pool = collections.pool
        self._schema = collections.schema
        self._ensure_table = ensure_table
        self._lease = lease
        self._sql = GenerationSql(self._schema)

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        return [row.generation(collection, self._count(row) if counted else None) for row in self._rows(collection)]

    def _count(self, row: GenerationRow) -> int:
        try:
            sql = VectorSql(self._schema, row.table).count()
            return int(self._pool.read(sql, doing=f"counting {row.name!r}")[0][2])
        except UnknownTable:
            return 0

    def free_number(self, collection: str) -> int:
        return free_number(self._rows(collection))

    def _rows(self, collection: str) -> list[GenerationRow]:
        """Return them by number; [] where nothing was ever stored."""
        doing = f"looking at the generations of {collection!r}"
        try:
            rows = self._pool.read(self._sql.find_all(), _names_of(collection), doing=doing)
        except UnknownTable:
            return []
        except UnknownColumn:  # a state table of an earlier version, which a reader leaves unchanged
            rows = self._pool.read(self._sql.find_first(), (collection,), doing=doing)
        return [_row(*row) for row in rows]

    # -------------------------------------------------------------------------------------------------- beginning

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        self._collections.upgrade()
        stamp = ModelStamp.of(embedder)
        while True:
            rows = self._rows(collection)
            found = resumable(collection, rows, stamp, recipe)
            if found is not None:
                if found.state == "retired":
                    self._pool.execute(self._sql.revive(), (found.name,), doing=f"building {found.name!r} on")
                return found.name
            with suppress(RowRejected):  # another worker has begun one: look again
                self._add(collection, free_number(rows), stamp, recipe)

    def _add(self, collection: str, number: int, stamp: ModelStamp, recipe: Recipe) -> None:
        """Create the table first: a crash then leaves an empty table, which the next attempt takes."""
        name, table = generation_name(collection, number), VectorSql(self._schema, table_name(collection, number))
        owners = self._pool.read(self._sql.find_by_table(), (table.name,), doing="looking for a free table")
        if owners and owners[0][0] != name:
            raise table_taken(collection, owners[0][0], table.name)
        self._ensure_table(table, stamp.dimension)
        names, text = metadata_names_text(self._collections.names, collection), records.recipe_text(recipe)
        values = (name, table.name, number, stamp.id, stamp.fingerprint, stamp.dimension, names, text)
        self._pool.execute(self._sql.insert(), values, doing=f"registering {name!r}")

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        text = records.recipe_text(recipe)
        self._collections.upgrade()
        known = [row.spec for row in self._rows(collection) if row.number == number]
        if known and known[0] != text:  # by number, because a switch may change the name now
            values = (text, number, collection, generation_name(collection, number))
            self._pool.execute(self._sql.record_spec(), values, doing=f"recording the recipe of {collection!r}")

    # ------------------------------------------------------------------------------------- switching and dropping

    def switch(self, collection: str, number: int) -> None:
        """A repetition after a lost reply finds the switch made."""
        if not self._collections.upgrade():
            Switch.to(collection, [], number)

        def work(session: Session) -> None:
            found = session.query(self._sql.lock_all(), _names_of(collection), doing="locking the generations")
            switch = Switch.to(collection, [_row(*row) for row in found], number)
            if switch is None:
                return

            def rename(sql: str, row: GenerationRow, name: str) -> None:
                values = (name, records.to_compare_whole(row.checkpoint), switch.epoch, row.name)
                session.execute(sql, values, doing="switching generations")
                session.execute(self._sql.move_quarantine(), (name, row.name), doing="moving a quarantine")

            for row in switch.retiring:
                rename(self._sql.retire(), row, generation_name(collection, row.number))
            failpoints.reach("mid_alias_swap")
            rename(self._sql.serve(), switch.target, collection)

        self._pool.in_transaction(work, doing=f"switching {collection!r} to generation {number}")
        self._collections.forget()

    def drop(self, collection: str, number: int) -> None:
        """Mark it first: after an interruption it can be dropped again, but neither built on nor switched to."""
        row = droppable(collection, self._rows(collection), number)
        self._collections.upgrade()
        doing = f"dropping {row.name!r}"
        with self._lease(row.name) as lease:
            if self._pool.execute(self._sql.mark_dropped(), (DROPPED, lease.collection, lease.epoch)) != 1:
                raise lost(lease)
            rows = self._rows(collection)
            table = next(each.table for each in rows if each.name == row.name)
            with suppress(UnknownTable):  # an interrupted drop has removed it
                self._pool.execute(VectorSql(self._schema, table).drop(), doing=doing)

            def work(session: Session) -> None:
                session.execute(self._sql.keep_highest(), (free_number(rows) - 1, collection), doing=doing)
                session.execute(self._sql.drop_quarantine(), (row.name,), doing=doing)
                session.execute(self._sql.delete(), (row.name,), doing=doing)

            self._pool.in_transaction(work, doing=doing)
        self._collections.forget()


def _names_of(collection: str) -> tuple[str, str]:
    """Return the name, and the LIKE pattern of its other generations' names; `_` is a wildcard."""
    escaped = collection.replace("\\", "\\\\").replace("_", "\\_").replace("%", "\\%")
    return collection, generation_name(escaped, 0)[:-1] + "%"


def _row(name: str, table: str, number: int, *more: Any) -> GenerationRow:
    model, fingerprint, dimension, checkpoint, last_sync, epoch, *later = more
    spec, created, retired, highest = later or (None, None, None, None)
    return GenerationRow(
        name,
        table,
        number,
        ModelStamp(model, fingerprint, dimension),
        checkpoint,
        records.in_utc(last_sync),
        epoch,
        spec,
        records.in_utc(created),
        records.in_utc(retired),
        highest,
    )
