"""One transaction on a SQLite connection: its changes, its savepoints, and its rows while it is parked.

SQLite allows one writing transaction at a time. An idle transaction can be parked: its rows are kept in memory and
SQLite is rolled back. Its next statement first restores the rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hana_emulator.errors import HanaError
from hana_emulator.sql.storage import changes as rows
from hana_emulator.sql.storage.changes import Changes, Image, Shape
from hana_emulator.sql.storage.locks import Claims, Holder, Key

STATEMENT = "owl_statement"  # The innermost savepoint while a statement runs; a user's savepoint may have the same name
Shapes = Callable[[str], Shape]
Layer = Mapping[str, Image]


@dataclass(slots=True)
class _Parked:
    """`layers`: rows at each savepoint, oldest first, then the current rows; `base`: rowids in the committed state."""

    layers: list[dict[str, Image]]
    base: dict[str, set[int]]


class Transaction(Holder):
    """A transaction. Only the thread with the turn to write uses it."""

    def __init__(self, connection: sqlite3.Connection, shapes: Shapes, identities: dict[str, int]) -> None:
        super().__init__()
        self.connection = connection
        # By table, the rows that triggers report; None if no statement collects them
        self.touched: dict[str, set[int]] | None = None
        # Whether rows are being restored: constraints were already checked when the rows were written
        self.restoring = False
        self.weight = 0  # Approximate number of rows written
        self.lost: HanaError | None = None  # Why parking failed; the transaction has then been rolled back
        self._shapes = shapes
        self._identities = identities
        self._changes: dict[str, Changes] = {}
        self._locked: dict[str, set[int]] = {}
        self._exclusive: set[str] = set()
        self._savepoints: list[str] = []
        self._parked: _Parked | None = None
        self._begin()

    def _begin(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        for table, value in self._identities.items():
            sql = "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?"
            if not self.connection.execute(sql, (value, table)).rowcount:
                self.connection.execute("INSERT INTO sqlite_sequence(seq, name) VALUES (?, ?)", (value, table))

    @property
    def is_parked(self) -> bool:
        return self._parked is not None

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    @property
    def tables(self) -> set[str]:
        return set(self._changes)

    def written(self, table: str) -> set[int]:
        """The rows inserted, changed or deleted in the table; may include a few others."""
        changes, shape = self._changes[table], self._shapes(table)
        if changes.above is None:
            return changes.rowids
        return changes.rowids | rows.rowids_above(self.connection, shape, changes.above)

    @property
    def undone_by_sqlite(self) -> bool:
        return not self.is_parked and not self.connection.in_transaction

    # ----------------------------------------------------------------------------------------------------- statements

    @contextmanager
    def statement(self) -> Iterator[dict[str, set[int]]]:
        """Run a statement; an exception undoes only that statement. Yields the rows it touches."""
        self.connection.execute(f"SAVEPOINT {STATEMENT}")
        touched: dict[str, set[int]] = {}
        self.touched = touched
        try:
            yield touched
        except BaseException:
            self.touched = None
            if self.connection.in_transaction:
                self.connection.execute(f"ROLLBACK TO {STATEMENT}")
                self.connection.execute(f"RELEASE {STATEMENT}")
            raise
        self.touched = None
        self.connection.execute(f"RELEASE {STATEMENT}")
        for table, rowids in touched.items():
            self._changes.setdefault(table, Changes()).rowids |= rowids

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run several statements; an exception undoes all of them."""
        self.connection.execute("SAVEPOINT owl_together")
        try:
            yield
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK TO owl_together")
                self.connection.execute("RELEASE owl_together")
            raise
        self.connection.execute("RELEASE owl_together")

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Undo everything done inside the block."""
        known, self.touched = self.touched, None
        self.connection.execute("SAVEPOINT owl_probe")
        try:
            yield
        finally:
            self.touched = known
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK TO owl_probe")
                self.connection.execute("RELEASE owl_probe")

    @contextmanager
    def unconstrained(self) -> Iterator[None]:
        """Suspend foreign keys and checks, including their actions."""
        self.restoring = True
        try:
            yield
        finally:
            self.restoring = False

    def mark(self, table: str) -> None:
        """Record the highest rowid before rows are inserted."""
        changes = self._changes.setdefault(table, Changes())
        if changes.above is None:
            changes.above = rows.highest(self.connection, self._shapes(table))

    def lock_rows(self, table: str, rowids: set[int]) -> None:
        """Lock rows. The transaction's own uncommitted rows need no lock."""
        changes = self._changes.get(table)
        above = changes.above if changes is not None else None
        mine = rowids if above is None else {rowid for rowid in rowids if rowid <= above}
        self._locked.setdefault(table, set()).update(mine)

    def lock_table(self, table: str) -> None:
        self._exclusive.add(table)

    # ----------------------------------------------------------------------------------------------------- savepoints

    def savepoint(self, name: str) -> None:
        self.connection.execute(f"SAVEPOINT {name}")
        self._savepoints.append(name)

    def rollback_to(self, name: str) -> None:
        """Undo changes since a savepoint. Raises ValueError for an unknown savepoint, like `release`."""
        place = self._place(name)
        self.connection.execute(f"ROLLBACK TO {name}")
        del self._savepoints[place + 1 :]

    def release(self, name: str) -> None:
        place = self._place(name)
        self.connection.execute(f"RELEASE {name}")
        del self._savepoints[place:]

    def _place(self, name: str) -> int:
        return len(self._savepoints) - 1 - self._savepoints[::-1].index(name)

    # ------------------------------------------------------------------------------------------- parking and resuming

    def park(self) -> dict[str, Claims]:
        """Keep all rows in memory, roll SQLite back, and return the claims that remain."""
        shapes = {table: self._shapes(table) for table in self._changes}
        layers = [self._image(shapes)]
        keys = self._keys(shapes, layers[0])
        # Keep identity values that were used; as in HANA, a rollback does not return them.
        for table in [table for table, shape in shapes.items() if shape.identity is not None]:
            for (value,) in self.connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)):
                self._identities[table] = max(value, self._identities.get(table, 0))
        for name in reversed(self._savepoints):
            self.connection.execute(f"ROLLBACK TO {name}")
            self.connection.execute(f"RELEASE {name}")
            layers.append(self._image(shapes))
            for table, more in self._keys(shapes, layers[-1]).items():
                keys[table] |= more
        self.connection.execute("ROLLBACK")
        base = self._image(shapes)
        claims: dict[str, Claims] = {
            table: Claims(set(base[table]), shape.vacated(base[table], layers[0][table]), keys[table])
            for table, shape in shapes.items()
        }
        self._parked = _Parked(layers[::-1], {table: set(image) for table, image in base.items()})
        for table, rowids in self._locked.items():
            claims.setdefault(table, Claims()).rows |= rowids
        for table, rowids in self._parents(shapes, layers[0]).items():
            claims.setdefault(table, Claims()).parents |= rowids
        for table in self._exclusive:
            claims.setdefault(table, Claims()).exclusive = True
        return claims

    def _image(self, shapes: Mapping[str, Shape]) -> dict[str, Image]:
        return {table: rows.image(self.connection, shapes[table], found) for table, found in self._changes.items()}

    @staticmethod
    def _keys(shapes: Mapping[str, Shape], layer: Layer) -> dict[str, set[Key]]:
        return {table: shapes[table].keys_of(image.values()) for table, image in layer.items()}

    def _parents(self, shapes: Mapping[str, Shape], layer: Layer) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for table, image in layer.items():
            for parent in shapes[table].parents:
                shape = self._shapes(parent.table)
                rowids = rows.parent_rows(self.connection, parent, shape, image.values())
                found.setdefault(parent.table, set()).update(rowids)
        return found

    def resume(self) -> None:
        """Restore all rows. Other transactions may have changed and inserted other rows since."""
        parked = self._parked
        assert parked is not None
        self._begin()
        try:
            self.connection.execute("PRAGMA defer_foreign_keys = ON")
            with self.unconstrained():
                layers = self._renumbered(parked)
                before: dict[str, set[int]] = parked.base
                for layer, name in zip(layers, [*self._savepoints, None], strict=True):
                    # Delete in all tables first, then update, then insert. A table comes before those it refers to,
                    # because RESTRICT is not deferred.
                    shapes = rows.children_first(self._shapes(table) for table in layer)
                    for shape in shapes:
                        rows.delete_rows(self.connection, shape, before[shape.table] - layer[shape.table].keys())
                    for shape in shapes:
                        known, image = before[shape.table], layer[shape.table]
                        kept = {rowid: row for rowid, row in image.items() if rowid in known}
                        rows.update_rows(self.connection, shape, kept)
                    for shape in reversed(shapes):
                        known, image = before[shape.table], layer[shape.table]
                        added = {rowid: row for rowid, row in image.items() if rowid not in known}
                        rows.insert_rows(self.connection, shape, added)
                    before = {table: set(image) for table, image in layer.items()}
                    if name is not None:
                        self.connection.execute(f"SAVEPOINT {name}")
            self.connection.execute("PRAGMA defer_foreign_keys = OFF")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        self._parked = None

    def _renumbered(self, parked: _Parked) -> list[dict[str, Image]]:
        """The layers with inserted rows renumbered above all existing rows, except where rowids are identities."""
        layers = [dict(layer) for layer in parked.layers]
        for table, changes in self._changes.items():
            if changes.above is None:
                continue
            base, shape = parked.base[table], self._shapes(table)
            inserted = sorted({rowid for layer in layers for rowid in layer[table]} - base)
            changes.rowids, changes.above = set(base), rows.highest(self.connection, shape)
            if shape.identity is not None:
                changes.rowids.update(inserted)
                continue
            numbers = {rowid: changes.above + place for place, rowid in enumerate(inserted, 1)}
            for layer in layers:
                layer[table] = {numbers.get(rowid, rowid): row for rowid, row in layer[table].items()}
        return layers

    def rollback(self) -> None:
        self._parked = None
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")
