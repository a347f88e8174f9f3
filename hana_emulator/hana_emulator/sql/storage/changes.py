"""Record which rows a transaction has changed, and restore them: SQLite's side of row locks.

Triggers of each table report changed rows to `owl_touch`. Inserted rows have the highest rowids. Tables are identified
by their SQLite names.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hana_emulator.errors import not_supported
from hana_emulator.sql.language.names import literal
from hana_emulator.sql.storage.locks import Key

TOUCH_FUNCTION = "owl_touch"
# For the WHEN of triggers that enforce constraints: false while a parked transaction's rows are restored
ENFORCING_FUNCTION = "owl_enforcing"
# For triggers of a table's foreign keys to itself. Arguments: a query that must return no row at the end of the
# statement, the error (see `failures.ERROR_MARK`) if it returns one, and the query's parameters
POSTPONE_FUNCTION = "owl_postpone"
_TRIGGER = "owl_touched"
_CHUNK = 20_000
_ROWID_NAMES = ("_rowid_", "rowid", "oid")
Row = tuple[object, ...]
Image = dict[int, Row]  # Rows by rowid, with the values of all stored columns in the order of `Shape.columns`


ForeignKey = tuple[str, Sequence[str], Sequence[str]]  # (parent table, own columns, parent columns)


@dataclass(frozen=True, slots=True)
class Parent:
    """A foreign key: positions of its columns in `Shape.columns`, the parent table and its columns (quoted)."""

    table: str
    columns: tuple[int, ...]
    parent_columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """A table in SQLite. `rowid` is a name of the rowid that no column hides; `keys` are positions in `columns`."""

    table: str
    rowid: str
    columns: tuple[str, ...]
    keys: tuple[tuple[int, ...], ...]
    parents: tuple[Parent, ...]
    # Position of the column that is the rowid, if any: then rowids are data, and rows may be inserted at any rowid
    identity: int | None

    @property
    def name(self) -> str:
        return _quoted(self.table)

    def keys_of(self, rows: Iterable[Row]) -> set[Key]:
        """The unique keys of the rows. Keys with NULL are omitted, since they never conflict."""
        found: set[Key] = set()
        for row in rows:
            for number, places in enumerate(self.keys):
                values = tuple(row[place] for place in places)
                if None not in values:
                    found.add((number, values))
        return found

    def vacated(self, before: Image, after: Image) -> set[int]:
        """Rows of `before` that are deleted in `after` or have a different key there."""
        return {
            rowid
            for rowid, row in before.items()
            if (now := after.get(rowid)) is None or (now != row and self.keys_of((row,)) - self.keys_of((now,)))
        }


@dataclass(slots=True)
class Changes:
    """A transaction's rows in one table: `rowids` were changed or deleted; it inserted all rows above `above`."""

    rowids: set[int] = field(default_factory=set)
    above: int | None = None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# --- shapes and triggers ----------------------------------------------------------------------------------------------


def read_shape(connection: sqlite3.Connection, table: str, references: Iterable[ForeignKey] = ()) -> Shape:
    """Read a table's shape: keys from SQLite, foreign keys (triggers in SQLite) from the catalogue."""
    described = connection.execute("SELECT name, type, pk FROM pragma_table_info(?)", (table,)).fetchall()
    names = [name for name, _, _ in described]
    places = {name: place for place, name in enumerate(names)}
    indexes = connection.execute('SELECT name FROM pragma_index_list(?) WHERE "unique" = 1', (table,)).fetchall()
    keys = []
    for (index,) in indexes:
        columns = connection.execute("SELECT name FROM pragma_index_info(?) ORDER BY seqno", (index,)).fetchall()
        if all(name in places for (name,) in columns):  # generated columns are not listed, and not restored
            keys.append(tuple(places[name] for (name,) in columns))
    rowid_column = next((name for name, kind, key in described if _is_rowid(kind, key)), None)
    if rowid_column is not None:
        keys.append((places[rowid_column],))
    return Shape(
        table,
        _rowid_name(table, names),
        tuple(map(_quoted, names)),
        tuple(keys),
        tuple(
            Parent(parent, tuple(places[name] for name in own), tuple(map(_quoted, keys)))
            for parent, own, keys in references
        ),
        None if rowid_column is None else places[rowid_column],
    )


def _rowid_name(table: str, columns: Sequence[str]) -> str:
    taken = {name.lower() for name in columns}
    free = next((name for name in _ROWID_NAMES if name not in taken), None)
    if free is None:
        raise not_supported(f"columns named {', '.join(_ROWID_NAMES)} all in one table: {table}")
    return free


def install_triggers(connection: sqlite3.Connection) -> None:
    """Create the current triggers of all tables, after renames and rebuilds and in files of older versions."""
    tables: dict[str, list[tuple[str, bool]]] = {}
    for table, column, kind, key in connection.execute(
        "SELECT t.name, c.name, c.type, c.pk FROM sqlite_master t, pragma_table_info(t.name) c"
        " WHERE t.type = 'table' AND substr(t.name, 1, 1) = '~'"
    ):
        tables.setdefault(table, []).append((column, _is_rowid(kind, key)))
    wanted: dict[str, str] = {}
    for table, columns in tables.items():
        rowid = _rowid_name(table, [name for name, _ in columns])
        old, new = (f"SELECT {TOUCH_FUNCTION}({literal(table)}, {side}.{rowid});" for side in ("OLD", "NEW"))
        if not any(is_rowid for _, is_rowid in columns):
            new = ""
        # An INSERT trigger would slow down loading an identity table.
        for event, body in (("DELETE", old), ("UPDATE", f"{old} {new}")):
            name = f"{_TRIGGER} {event} {table}"
            wanted[name] = f"CREATE TRIGGER {_quoted(name)} AFTER {event} ON {_quoted(table)} BEGIN {body} END"
    found = dict(
        connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND substr(name, 1, ?) = ?",
            (len(_TRIGGER), _TRIGGER),
        ).fetchall()
    )
    stale = {name for name, sql in found.items() if wanted.get(name) != sql}
    for name in sorted(stale):
        connection.execute(f"DROP TRIGGER {_quoted(name)}")
    for name in sorted(wanted.keys() - (found.keys() - stale)):
        connection.execute(wanted[name])


def _is_rowid(kind: str, key: int) -> bool:
    return key == 1 and kind.upper() == "INTEGER"


# --- reading ----------------------------------------------------------------------------------------------------------


def _chunks(rowids: Iterable[int]) -> Iterator[str]:
    """The rowids, ascending, as JSON arrays for SQL joins."""
    ordered = sorted(rowids)
    for start in range(0, len(ordered), _CHUNK):
        yield json.dumps(ordered[start : start + _CHUNK])


def highest(connection: sqlite3.Connection, shape: Shape) -> int:
    """The highest rowid. Later rows are above it, except those with an explicit lower identity value."""
    (found,) = connection.execute(f"SELECT max({shape.rowid}) FROM {shape.name}").fetchone()
    if shape.identity is not None:
        (given,) = connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = ?", (shape.table,)).fetchone()
        return max(found or 0, given or 0)
    return found or 0


def rows_at(connection: sqlite3.Connection, shape: Shape, rowids: Iterable[int]) -> Image:
    sql = (
        f"SELECT {shape.rowid}, {', '.join(shape.columns)} FROM {shape.name}"
        f" WHERE {shape.rowid} IN (SELECT value FROM json_each(?))"
    )
    return {row[0]: row[1:] for chunk in _chunks(rowids) for row in connection.execute(sql, (chunk,))}


def rows_above(connection: sqlite3.Connection, shape: Shape, rowid: int) -> Image:
    sql = f"SELECT {shape.rowid}, {', '.join(shape.columns)} FROM {shape.name} WHERE {shape.rowid} > ?"
    return {row[0]: row[1:] for row in connection.execute(sql, (rowid,))}


def rowids_above(connection: sqlite3.Connection, shape: Shape, rowid: int) -> set[int]:
    sql = f"SELECT {shape.rowid} FROM {shape.name} WHERE {shape.rowid} > ?"
    return {found for (found,) in connection.execute(sql, (rowid,))}


def image(connection: sqlite3.Connection, shape: Shape, changes: Changes) -> Image:
    """The current rows of a transaction, without deleted rows."""
    found = rows_at(connection, shape, changes.rowids)
    if changes.above is not None:
        found |= rows_above(connection, shape, changes.above)
    return found


def parent_rows(connection: sqlite3.Connection, parent: Parent, parent_shape: Shape, rows: Iterable[Row]) -> set[int]:
    """Return the rowids of the parent rows that `rows` refer to by one foreign key."""
    keys = {tuple(row[place] for place in parent.columns) for row in rows}
    condition = " AND ".join(f"{column} = ?" for column in parent.parent_columns)
    sql = f"SELECT {parent_shape.rowid} FROM {parent_shape.name} WHERE {condition}"
    return {row[0] for key in keys if None not in key for row in connection.execute(sql, key)}


# --- restoring --------------------------------------------------------------------------------------------------------


def children_first(shapes: Iterable[Shape]) -> list[Shape]:
    """Sort tables before those that their foreign keys refer to; the order within a cycle is arbitrary."""
    left, ordered = list(shapes), []
    while left:
        referred = {parent.table for shape in left for parent in shape.parents if parent.table != shape.table}
        free = [shape for shape in left if shape.table not in referred] or left[:1]
        ordered += free
        left = [shape for shape in left if shape not in free]
    return ordered


def delete_rows(connection: sqlite3.Connection, shape: Shape, rowids: Iterable[int]) -> None:
    """Delete rows; rows of the same table that refer to a row are deleted before it."""
    sql, left = f"DELETE FROM {shape.name} WHERE {shape.rowid} = ?", sorted(rowids)
    while left:
        refused = []
        for rowid in left:
            try:
                connection.execute(sql, (rowid,))
            except sqlite3.IntegrityError:
                refused.append(rowid)
                if len(refused) == len(left):
                    raise
        left = refused


def insert_rows(connection: sqlite3.Connection, shape: Shape, rows: Image) -> None:
    holders = ", ".join("?" for _ in shape.columns)
    columns = ", ".join(shape.columns)
    connection.executemany(
        f"INSERT INTO {shape.name} ({shape.rowid}, {columns}) VALUES (?, {holders})",
        [(rowid, *row) for rowid, row in rows.items()],
    )


def update_rows(connection: sqlite3.Connection, shape: Shape, rows: Image) -> None:
    """Update existing rows. Rows that exchange unique keys pass through unused keys."""
    changes = ", ".join(f"{column} = ?" for column in shape.columns)
    sql = f"UPDATE {shape.name} SET {changes} WHERE {shape.rowid} = ?"
    values = [(*row, rowid) for rowid, row in rows.items()]
    connection.execute("SAVEPOINT owl_exchange")
    try:
        connection.executemany(sql, values)
    except sqlite3.IntegrityError:
        connection.execute("ROLLBACK TO owl_exchange")
        unique = sorted({place for places in shape.keys for place in places} - {shape.identity})
        away = ", ".join(f"{shape.columns[place]} = char(0) || 'owl' || {shape.rowid}" for place in unique)
        connection.executemany(f"UPDATE {shape.name} SET {away} WHERE {shape.rowid} = ?", [(rowid,) for rowid in rows])
        connection.executemany(sql, values)
    finally:
        connection.execute("RELEASE owl_exchange")
