"""What HANA's catalogue says about a table or view, and whether a collection's names fit it.
Reads the SYS views only; never a row of the table itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from connector.errors import NoKey, UnknownColumn, UnknownTable
from connector.hana import HanaPool
from connector.model import CollectionSpec, Column, Table, TableRef

LOB_TYPES = frozenset({"NCLOB", "CLOB", "BLOB", "TEXT", "BINTEXT"})
VECTOR_TYPES = frozenset({"REAL_VECTOR", "HALF_VECTOR"})
NOT_COMPARABLE = LOB_TYPES | VECTOR_TYPES | {"ST_GEOMETRY", "ST_POINT", "ARRAY"}
"""Types that HANA cannot order by, so no column of theirs can be a key."""

FIND_TABLE = "SELECT TABLE_NAME, COMMENTS FROM SYS.TABLES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?"
_VIEW = "SELECT VIEW_NAME, COMMENTS FROM SYS.VIEWS WHERE SCHEMA_NAME = ? AND VIEW_NAME = ?"
FIND_COLUMNS = (
    "SELECT COLUMN_NAME, DATA_TYPE_NAME, LENGTH, SCALE, IS_NULLABLE, COMMENTS, POSITION "
    "FROM SYS.TABLE_COLUMNS WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? ORDER BY POSITION"
)
_VIEW_COLUMNS = (
    "SELECT COLUMN_NAME, DATA_TYPE_NAME, LENGTH, SCALE, IS_NULLABLE, COMMENTS, POSITION "
    "FROM SYS.VIEW_COLUMNS WHERE SCHEMA_NAME = ? AND VIEW_NAME = ? ORDER BY POSITION"
)
_PRIMARY_KEY = (
    "SELECT COLUMN_NAME FROM SYS.CONSTRAINTS WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? "
    "AND IS_PRIMARY_KEY = 'TRUE' ORDER BY POSITION"
)
FIND_SCHEMA = "SELECT SCHEMA_NAME FROM SYS.SCHEMAS WHERE SCHEMA_NAME = ?"
_SCHEMAS = "SELECT SCHEMA_NAME FROM SYS.SCHEMAS ORDER BY SCHEMA_NAME"
_TABLES = "SELECT TABLE_NAME FROM SYS.TABLES WHERE SCHEMA_NAME = ? ORDER BY TABLE_NAME"
_VIEWS = "SELECT VIEW_NAME FROM SYS.VIEWS WHERE SCHEMA_NAME = ? ORDER BY VIEW_NAME"


def describe(pool: HanaPool, ref: TableRef) -> Table:
    """The table or view with columns, primary key and comments. Raises UnknownTable with the nearest names."""
    place = (ref.schema, ref.name)
    doing = f"looking up {ref}"
    if found := pool.read(FIND_TABLE, place, doing=doing):
        columns = _columns(pool.read(FIND_COLUMNS, place, doing=doing))
        key = tuple(row[0] for row in pool.read(_PRIMARY_KEY, place, doing=doing))
        return Table(ref, columns, key, comment=found[0][1] or "")
    if found := pool.read(_VIEW, place, doing=doing):
        columns = _columns(pool.read(_VIEW_COLUMNS, place, doing=doing))
        return Table(ref, columns, is_view=True, comment=found[0][1] or "")
    raise UnknownTable(_unknown(pool, ref))


def _columns(rows: Iterable[Sequence[object]]) -> tuple[Column, ...]:
    return tuple(
        Column(
            name=str(name),
            type_name=str(type_name),
            length=int(str(length or 0)),
            scale=int(str(scale or 0)),
            nullable=nullable == "TRUE",
            comment=str(comment or ""),
        )
        for name, type_name, length, scale, nullable, comment, _ in rows
    )


def _unknown(pool: HanaPool, ref: TableRef) -> str:
    doing = f"looking for names like {ref}"
    if not pool.read(FIND_SCHEMA, (ref.schema,), doing=doing):
        known = [row[0] for row in pool.read(_SCHEMAS, doing=doing)]
        return f"{ref}: there is no schema {ref.schema!r} that this user can see.{did_you_mean(ref.schema, known)}"
    known = [row[0] for names in (_TABLES, _VIEWS) for row in pool.read(names, (ref.schema,), doing=doing)]
    hint = did_you_mean(ref.name, known) or " Does the user have SELECT on it?"
    return f"{ref}: schema {ref.schema!r} has no table or view {ref.name!r} that this user can see.{hint}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' with the nearest names, or ''. Says so when only upper and lower case differ."""
    names = list(known)
    same = [other for other in names if other.lower() == name.lower() and other != name]
    if same:
        return f" Did you mean {same[0]!r}? Names are case-sensitive."
    folded: dict[str, str] = {}
    for other in names:
        folded.setdefault(other.lower(), other)
    near = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.6)]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def check_columns(table: Table, names: Iterable[str], setting: str) -> None:
    """Raises UnknownColumn for the first name that is no column of the table; `setting` is where it was written."""
    known = [column.name for column in table.columns]
    for name in names:
        if name not in known:
            raise UnknownColumn(f"`{setting}`: {table.ref} has no column {name!r}.{did_you_mean(name, known)}")


def resolve_key(spec: CollectionSpec, table: Table) -> tuple[str, ...]:
    """The key columns: `key` as configured, else the primary key. Raises NoKey where neither can serve."""
    if not spec.key and not table.primary_key:
        kind = "a view" if table.is_view else "a table without a primary key"
        raise NoKey(f'{table.ref} is {kind}: name the columns that identify a row, key = ["...", ...]')
    check_columns(table, spec.key, "key")
    if len(set(spec.key)) < len(spec.key):
        raise NoKey(f"`key` names a column twice: {', '.join(spec.key)}")
    key = spec.key or table.primary_key
    for name in key:
        column = table.column(name)
        if column is not None and column.type_name in NOT_COMPARABLE:
            raise NoKey(f"`key`: column {name!r} of {table.ref} is a {column.type_name}, which cannot identify a row")
    return key
