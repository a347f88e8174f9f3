"""Generations in the local store: rows of `collections` over the same tables of records."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime

from connector import failpoints
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
from connector.stores.lease import lost
from connector.stores.local.sqlite_file import SqliteFile, undamaged
from connector.stores.records import ModelStamp

DELETE_PAGE = 5000
"""Records deleted in one transaction: other writers wait no longer than that takes."""
_COLUMNS = "id, name, generation, model, fingerprint, dimension, checkpoint, last_sync, lease_epoch"
_LATER_COLUMNS = ("spec", "created", "retired", "highest")  # missing in a file of an earlier layout opened read-only
_OF_COLLECTION = "name = :name OR substr(name, 1, length(:name) + 1) = :name || '@'"


@dataclass(frozen=True, slots=True)
class _Row(GenerationRow):
    id: int = 0


class LocalGenerations:
    """A `Generations`. `names`: as in LocalStore. `lease` owns a generation that is to be dropped; `forget` is called
    with its name afterwards."""

    def __init__(
        self,
        file: SqliteFile,
        names: Mapping[str, Mapping[str, str]],
        *,
        lease: Callable[[str], AbstractContextManager[Lease]],
        forget: Callable[[str], None],
    ) -> None:
        self._file = file
        self._names = names
        self._lease = lease
        self._forget = forget

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        sql = "SELECT count(DISTINCT document) FROM records WHERE collection = ?"
        with self._file.read() as db, undamaged("the record of a generation"):
            return [
                row.generation(collection, db.execute(sql, (row.id,)).fetchone()[0] if counted else None)
                for row in _rows(db, collection)
            ]

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        stamp = ModelStamp.of(embedder)
        with self._file.write() as db:
            rows = _rows(db, collection)
            found = resumable(collection, rows, stamp, recipe)
            if found is not None:
                db.execute("UPDATE collections SET retired = NULL WHERE name = ?", (found.name,))
                return found.name
            number = free_number(rows)
            name, names = generation_name(collection, number), metadata_names_text(self._names, collection)
            model, text = (stamp.id, stamp.fingerprint, stamp.dimension), records.recipe_text(recipe)
            db.execute(
                "INSERT INTO collections (name, generation, model, fingerprint, dimension, names, spec, created) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (name, number, *model, names, text, _now()),
            )
            return name

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        text = records.recipe_text(recipe)
        with self._file.read() as db:
            known = [row.spec for row in _rows(db, collection) if row.number == number]
        if known and known[0] != text:
            with self._file.write() as db:
                for row in _rows(db, collection):
                    if row.number == number:
                        db.execute("UPDATE collections SET spec = ? WHERE id = ?", (text, row.id))

    def switch(self, collection: str, number: int) -> None:
        sql = (
            "UPDATE collections SET name = ?, retired = ?, checkpoint = ?, lease_epoch = ?, lease_owner = NULL, "
            "lease_until = NULL WHERE name = ?"
        )
        with self._file.write() as db:
            switch = Switch.to(collection, _rows(db, collection), number)
            if switch is None:
                return

            def rename(row: GenerationRow, name: str, retired: str | None) -> None:
                checkpoint = records.to_compare_whole(row.checkpoint)
                db.execute(sql, (name, retired, checkpoint, switch.epoch, row.name))

            for row in switch.retiring:
                rename(row, generation_name(collection, row.number), _now())
            failpoints.reach("mid_alias_swap")
            rename(switch.target, collection, None)

    def drop(self, collection: str, number: int) -> None:
        """Mark it first and delete page by page: after an interruption it can be dropped again, but neither built on
        nor switched to."""
        with self._file.read() as db:
            name = droppable(collection, _rows(db, collection), number).name
        with self._lease(name) as lease:
            with self._file.write() as db:
                mark = "UPDATE collections SET fingerprint = ?, checkpoint = NULL, last_sync = NULL WHERE id = ?"
                db.execute(mark, (DROPPED, _owned(db, lease).id))
            while self._delete_page(lease):
                pass
            with self._file.write() as db:
                row, highest = _owned(db, lease), next_number(db, collection) - 1
                db.execute("UPDATE collections SET highest = ? WHERE name = ?", (highest, collection))
                db.execute("DELETE FROM tombstones WHERE collection = ?", (row.id,))
                db.execute("DELETE FROM collections WHERE id = ?", (row.id,))
        self._forget(name)

    def _delete_page(self, lease: Lease) -> bool:
        sql = "DELETE FROM records WHERE id IN (SELECT id FROM records WHERE collection = ? LIMIT ?)"
        with self._file.write() as db:
            return db.execute(sql, (_owned(db, lease).id, DELETE_PAGE)).rowcount > 0


def next_number(db: sqlite3.Connection, collection: str) -> int:
    return free_number(_rows(db, collection))


def _rows(db: sqlite3.Connection, collection: str) -> list[_Row]:
    """Return them by number."""
    there = {name for (name,) in db.execute("SELECT name FROM pragma_table_info('collections')")}
    later = ", ".join(name if name in there else "NULL" for name in _LATER_COLUMNS)
    sql = f"SELECT {_COLUMNS}, {later} FROM collections WHERE {_OF_COLLECTION} ORDER BY generation"  # noqa: S608
    rows = []
    with undamaged("the record of a generation"):
        for id_, name, number, *stamp, checkpoint, last_sync, epoch, spec, created, retired, highest in db.execute(
            sql, {"name": collection}
        ):
            times = (datetime.fromisoformat(text) if text else None for text in (last_sync, created, retired))
            synced, began, ended = times
            known = ModelStamp(*stamp)
            rows.append(
                _Row(name, "records", number, known, checkpoint, synced, epoch, spec, began, ended, highest, id=id_)
            )
    return rows


def _owned(db: sqlite3.Connection, lease: Lease) -> _Row:
    """Return the row inside the transaction that writes. Raises LeaseLost, also after a switch."""
    for row in _rows(db, lease.collection):
        if row.name == lease.collection and row.epoch == lease.epoch:
            return row
    raise lost(lease)


def _now() -> str:
    return datetime.now(UTC).isoformat()
