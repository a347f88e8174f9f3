"""Generations in the local store: rows of `collections` beside the one that serves, over the same tables of records.
Each method is a transaction of its own. Knows no search.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from connector import failpoints
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
from connector.stores.lease import lost
from connector.stores.local.sqlite_file import SqliteFile, undamaged
from connector.stores.records import ModelStamp

DELETE_PAGE = 5000
"""Records deleted in one transaction: other writers wait no longer than that takes."""
_COLUMNS = "id, name, generation, model, fingerprint, dimension, checkpoint, last_sync, lease_epoch"
_LATER_COLUMNS = ("spec", "created", "retired", "highest")
"""Not there in a file of an earlier layout that is only read."""
_OF_COLLECTION = "name = :name OR substr(name, 1, length(:name) + 1) = :name || '@'"


@dataclass(frozen=True, slots=True)
class _Row:
    id: int
    name: str
    number: int
    stamp: ModelStamp
    checkpoint: str | None
    last_sync: str | None
    epoch: int
    spec: str | None
    created: str | None
    retired: str | None
    highest: int | None

    @property
    def state(self) -> GenerationState:
        if "@" not in self.name:
            return "active"
        return "retired" if self.retired else "building"

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.name, self.number, self.state, self.stamp, self.spec)


class LocalGenerations:
    """A `Generations`. `names`: as in LocalStore. `lease`: owns a generation that is to be dropped. `forget`: called
    with its name when it is gone."""

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
        with self._file.read() as db:
            return [_generation(db, collection, row, counted) for row in _rows(db, collection)]

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        stamp = ModelStamp.of(embedder)
        with self._file.write() as db:
            rows = _rows(db, collection)
            if not any(row.state == "active" for row in rows):
                raise no_collection(collection)
            found = resumable(collection, [row.candidate for row in rows], stamp, recipe)
            if found is not None:
                db.execute("UPDATE collections SET retired = NULL WHERE name = ?", (found.name,))
                return found.name
            number = next_number(db, collection)
            name = generation_name(collection, number)
            db.execute(
                "INSERT INTO collections (name, generation, model, fingerprint, dimension, names, spec, created) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    name,
                    number,
                    stamp.id,
                    stamp.fingerprint,
                    stamp.dimension,
                    metadata_names_text(self._names, collection),
                    records.recipe_text(recipe),
                    _now(),
                ),
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
        with self._file.write() as db:
            rows = {row.number: row for row in _rows(db, collection)}
            target = rows.get(number)
            if target is None:
                raise no_generation(collection, number, list(rows))
            if target.state == "active":
                return
            if target.stamp.fingerprint == DROPPED:
                raise half_dropped(collection, number)
            epoch = max(row.epoch for row in rows.values()) + 1  # of either name, no earlier lease has it
            sql = (
                "UPDATE collections SET name = ?, retired = ?, checkpoint = ?, lease_epoch = ?, lease_owner = NULL, "
                "lease_until = NULL WHERE id = ?"
            )
            for row in rows.values():
                if row.state == "active":
                    retired = generation_name(collection, row.number)
                    db.execute(sql, (retired, _now(), records.to_compare_whole(row.checkpoint), epoch, row.id))
            failpoints.reach("mid_alias_swap")
            db.execute(sql, (collection, None, records.to_compare_whole(target.checkpoint), epoch, target.id))

    def drop(self, collection: str, number: int) -> None:
        with self._file.read() as db:
            rows = {row.number: row for row in _rows(db, collection)}
        if number not in rows:
            raise no_generation(collection, number, list(rows))
        if rows[number].state == "active":
            raise is_active(collection, number)
        name = rows[number].name
        with self._lease(name) as lease:
            self._drop(collection, lease)
        self._forget(name)

    def _drop(self, collection: str, lease: Lease) -> None:
        """Page by page, marked first: cut short, it can be dropped again, but neither built on nor switched to."""
        with self._file.write() as db:
            row = _owned(db, lease)
            mark = "UPDATE collections SET fingerprint = ?, checkpoint = NULL, last_sync = NULL WHERE id = ?"
            db.execute(mark, (DROPPED, row.id))
        while self._delete_page(lease):
            pass
        with self._file.write() as db:
            row = _owned(db, lease)
            highest = next_number(db, collection) - 1
            db.execute("UPDATE collections SET highest = ? WHERE name = ?", (highest, collection))
            db.execute("DELETE FROM tombstones WHERE collection = ?", (row.id,))
            db.execute("DELETE FROM collections WHERE id = ?", (row.id,))

    def _delete_page(self, lease: Lease) -> bool:
        with self._file.write() as db:
            row = _owned(db, lease)
            return (
                db.execute(
                    "DELETE FROM records WHERE id IN (SELECT id FROM records WHERE collection = ? LIMIT ?)",
                    (row.id, DELETE_PAGE),
                ).rowcount
                > 0
            )


def next_number(db: sqlite3.Connection, collection: str) -> int:
    """One that no generation of the collection has or had."""
    return free_number((row.number, row.highest or 0) for row in _rows(db, collection))


def _rows(db: sqlite3.Connection, collection: str) -> list[_Row]:
    """By number."""
    there = {name for (name,) in db.execute("SELECT name FROM pragma_table_info('collections')")}
    later = ", ".join(name if name in there else "NULL" for name in _LATER_COLUMNS)
    sql = f"SELECT {_COLUMNS}, {later} FROM collections WHERE {_OF_COLLECTION} ORDER BY generation"  # noqa: S608
    return [_row(row) for row in db.execute(sql, {"name": collection})]


def _row(row: tuple[Any, ...]) -> _Row:
    id_, name, number, model, fingerprint, dimension, *more = row
    return _Row(id_, name, number, ModelStamp(model, fingerprint, dimension), *more)


def _owned(db: sqlite3.Connection, lease: Lease) -> _Row:
    """Inside the transaction that writes; a switch meanwhile has taken name and lease away."""
    rows = [row for row in _rows(db, lease.collection) if row.name == lease.collection]
    if not rows or rows[0].epoch != lease.epoch:
        raise lost(lease)
    return rows[0]


def _generation(db: sqlite3.Connection, collection: str, row: _Row, counted: bool) -> Generation:
    rows = None
    if counted:
        sql = "SELECT count(DISTINCT document) FROM records WHERE collection = ?"
        (rows,) = db.execute(sql, (row.id,)).fetchone()
    with undamaged("what is recorded of a generation"):
        return Generation(
            name=row.name,
            number=row.number,
            state=row.state,
            model=row.stamp.id,
            fingerprint=row.stamp.fingerprint,
            dimension=row.stamp.dimension,
            table="records",
            rows=rows,
            created=_moment(row.created),
            retired=_moment(row.retired),
            last_sync=_moment(row.last_sync),
            recipe=records.recipe_of(collection, row.spec),
        )


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
