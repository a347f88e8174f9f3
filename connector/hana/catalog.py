"""Read HANA's catalogue (SYS views, never a table's rows), and check a collection's names against it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from connector.errors import ConfigurationError, NoKey, PermissionRefused, UnknownColumn, UnknownTable
from connector.hana.connection import HanaPool
from connector.model import CollectionSpec, Column, Table, TableRef

LOB_TYPES = frozenset({"NCLOB", "CLOB", "BLOB", "TEXT", "BINTEXT"})
VECTOR_TYPES = frozenset({"REAL_VECTOR", "HALF_VECTOR"})
# HANA cannot order by these types, so such columns cannot be keys.
NOT_COMPARABLE = LOB_TYPES | VECTOR_TYPES | {"ST_GEOMETRY", "ST_POINT", "ARRAY"}

_COLUMN = "COLUMN_NAME, DATA_TYPE_NAME, LENGTH, SCALE, IS_NULLABLE, COMMENTS, POSITION"
FIND_TABLE = "SELECT TABLE_NAME, COMMENTS FROM SYS.TABLES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?"
_VIEW = "SELECT VIEW_NAME, COMMENTS FROM SYS.VIEWS WHERE SCHEMA_NAME = ? AND VIEW_NAME = ?"
FIND_COLUMNS = f"SELECT {_COLUMN} FROM SYS.TABLE_COLUMNS WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? ORDER BY POSITION"  # noqa: S608
_VIEW_COLUMNS = f"SELECT {_COLUMN} FROM SYS.VIEW_COLUMNS WHERE SCHEMA_NAME = ? AND VIEW_NAME = ? ORDER BY POSITION"  # noqa: S608
_PRIMARY_KEY = (
    "SELECT COLUMN_NAME FROM SYS.CONSTRAINTS WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? "
    "AND IS_PRIMARY_KEY = 'TRUE' ORDER BY POSITION"
)
FIND_SCHEMA = "SELECT SCHEMA_NAME FROM SYS.SCHEMAS WHERE SCHEMA_NAME = ?"
_SCHEMAS = "SELECT SCHEMA_NAME FROM SYS.SCHEMAS ORDER BY SCHEMA_NAME"
_TABLES = "SELECT TABLE_NAME FROM SYS.TABLES WHERE SCHEMA_NAME = ? ORDER BY TABLE_NAME"
_VIEWS = "SELECT VIEW_NAME FROM SYS.VIEWS WHERE SCHEMA_NAME = ? ORDER BY VIEW_NAME"
_VISIBLE = (
    "SELECT SCHEMA_NAME, NAME, KIND, COMMENTS FROM ("
    "SELECT SCHEMA_NAME, TABLE_NAME AS NAME, 'table' AS KIND, COMMENTS FROM SYS.TABLES "
    "WHERE IS_TEMPORARY = 'FALSE' AND IS_USER_DEFINED_TYPE = 'FALSE' "
    "UNION ALL SELECT SCHEMA_NAME, VIEW_NAME AS NAME, 'view' AS KIND, COMMENTS FROM SYS.VIEWS) AS T WHERE {schemas} "
    "AND (UPPER(NAME) LIKE UPPER(?) ESCAPE '\\' OR UPPER(COMMENTS) LIKE UPPER(?) ESCAPE '\\') "
    "ORDER BY SCHEMA_NAME, NAME LIMIT ? OFFSET ?"
)
_OF_SCHEMA = _VISIBLE.format(schemas="SCHEMA_NAME = ?")
_OF_ALL = _VISIBLE.format(schemas="SCHEMA_NAME <> 'SYS' AND SCHEMA_NAME NOT LIKE '\\_SYS\\_%' ESCAPE '\\'")
_LISTING = "listing tables"
_NAMES_AT_ONCE = 64  # names per look-up statement; a fixed number keeps the statement text the same
# Look-ups by name. {kind} is TABLE or VIEW, {names} a parameter for each name.
_COUNT_COLUMNS = (
    "SELECT {kind}_NAME, COUNT(*) FROM SYS.{kind}_COLUMNS "
    "WHERE SCHEMA_NAME = ? AND {kind}_NAME IN ({names}) GROUP BY {kind}_NAME"
)
_RECORD_COUNTS = "SELECT TABLE_NAME, RECORD_COUNT FROM SYS.M_TABLES WHERE SCHEMA_NAME = ? AND TABLE_NAME IN ({names})"
_THERE = "SELECT TABLE_NAME FROM SYS.TABLES WHERE SCHEMA_NAME = ? AND TABLE_NAME IN ({names}) ORDER BY TABLE_NAME"
_COLUMNS_OF = (
    f"SELECT {{kind}}_NAME, {_COLUMN} "  # noqa: S608
    "FROM SYS.{kind}_COLUMNS WHERE SCHEMA_NAME = ? AND {kind}_NAME IN ({names}) ORDER BY {kind}_NAME, POSITION"
)
_LARGEST = (
    "SELECT TABLE_NAME, RECORD_COUNT FROM SYS.M_TABLES WHERE SCHEMA_NAME = ? AND RECORD_COUNT > 0 "
    "ORDER BY RECORD_COUNT DESC, TABLE_NAME LIMIT ?"
)
_UNIQUE_CONSTRAINTS = (
    "SELECT CONSTRAINT_NAME, COLUMN_NAME FROM SYS.CONSTRAINTS WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? "
    "AND IS_PRIMARY_KEY = 'FALSE' AND IS_UNIQUE_KEY = 'TRUE' ORDER BY CONSTRAINT_NAME, POSITION"
)
_UNIQUE_INDEXES = (
    "SELECT INDEX_NAME, COLUMN_NAME FROM SYS.INDEX_COLUMNS WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? "
    "AND CONSTRAINT IN ('UNIQUE', 'NOT NULL UNIQUE') ORDER BY INDEX_NAME, POSITION"
)
_COMMENTS = (
    "SELECT COLUMN_NAME, COMMENTS FROM SYS.{kind}_COLUMNS WHERE SCHEMA_NAME = ? AND COLUMN_NAME IN ({names}) "
    "AND LENGTH(COMMENTS) > 0 GROUP BY COLUMN_NAME, COMMENTS ORDER BY COUNT(*), COMMENTS DESC"
)
_TABLES_BY_KEY = (
    "SELECT TABLE_NAME, COLUMN_NAME FROM SYS.CONSTRAINTS WHERE SCHEMA_NAME = ? AND IS_PRIMARY_KEY = 'TRUE' "
    "AND TABLE_NAME IN (SELECT TABLE_NAME FROM SYS.CONSTRAINTS WHERE SCHEMA_NAME = ? AND IS_PRIMARY_KEY = 'TRUE' "
    "AND COLUMN_NAME = ?) ORDER BY TABLE_NAME, POSITION"
)


def describe(pool: HanaPool, ref: TableRef) -> Table:
    """Return the table or view with columns, key and comments. Raises UnknownTable with the nearest names."""
    place = (ref.schema, ref.name)
    doing = f"looking up {ref}"
    if found := pool.read(FIND_TABLE, place, doing=doing):
        columns = _columns(pool.read(FIND_COLUMNS, place, doing=doing))
        key = tuple(row[0] for row in pool.read(_PRIMARY_KEY, place, doing=doing))
        table = Table(ref, columns, key, comment=found[0][1] or "")
    elif found := pool.read(_VIEW, place, doing=doing):
        columns = _columns(pool.read(_VIEW_COLUMNS, place, doing=doing))
        table = Table(ref, columns, is_view=True, comment=found[0][1] or "")
    else:
        raise UnknownTable(_unknown(pool, ref))
    pool.note_types(str(ref), [(column.name, column.type_name) for column in table.columns])
    return table


def tables(
    pool: HanaPool, schema: str | None = None, text: str = "", *, limit: int = 200, offset: int = 0
) -> list[dict[str, Any]]:
    """Return the tables (not temporary ones) and views that this user can see, ordered by schema and name. Each has
    `schema`, `name`, `kind`, `comment`, number of `columns`, and `rows`, HANA's own count (None for a view or if the
    user may not see it).

    `schema` None: all schemas except SYS and _SYS_... . Name or comment must contain `text`, in any case. Raises
    UnknownTable for an unknown schema.
    """
    pattern = "%" + re.sub(r"([\\%_])", r"\\\1", text) + "%"
    last = (pattern, pattern, limit, offset)
    sql, parameters = (_OF_ALL, last) if schema is None else (_OF_SCHEMA, (schema, *last))
    found = pool.read(sql, parameters, doing=_LISTING)
    if schema is not None and not found and (missing := _no_schema(pool, schema)):
        raise UnknownTable(missing)
    entries: list[dict[str, Any]] = []
    for place, group in groupby(found, key=itemgetter(0)):
        listed: list[dict[str, Any]] = [
            {"schema": place, "name": name, "kind": kind, "comment": comment or ""} for _, name, kind, comment in group
        ]
        of_tables = [entry["name"] for entry in listed if entry["kind"] == "table"]
        of_views = [entry["name"] for entry in listed if entry["kind"] == "view"]
        columns = dict(_look_up(pool, _COUNT_COLUMNS, "TABLE", place, of_tables))
        columns |= dict(_look_up(pool, _COUNT_COLUMNS, "VIEW", place, of_views))
        rows = record_counts(pool, place, of_tables)
        for entry in listed:
            entry |= {"columns": columns.get(entry["name"], 0), "rows": rows.get(entry["name"])}
        entries += listed
    return entries


def record_counts(pool: HanaPool, schema: str, names: Sequence[str]) -> dict[str, int]:
    """Return HANA's own row counts by table; {} if the user may not see them."""
    try:
        return dict(_look_up(pool, _RECORD_COUNTS, "TABLE", schema, names))
    except (PermissionRefused, UnknownTable, UnknownColumn):
        return {}


def schemas(pool: HanaPool) -> list[str]:
    """Return the schemas that this user can see, without HANA's own."""
    names = [str(row[0]) for row in pool.read(_SCHEMAS, doing="listing schemas")]
    return [name for name in names if name != "SYS" and not name.startswith("_SYS_")]


def largest_tables(pool: HanaPool, schema: str, limit: int) -> dict[str, int]:
    """Return HANA's own row counts of the largest tables; {} if the user may not see them."""
    try:
        return dict(pool.read(_LARGEST, (schema, limit), doing=f"looking for large tables of {schema}"))
    except (PermissionRefused, UnknownTable, UnknownColumn):
        return {}


def tables_named(pool: HanaPool, schema: str, names: Iterable[str]) -> list[str]:
    """Return the names that are tables of the schema."""
    return [str(row[0]) for row in _look_up(pool, _THERE, "TABLE", schema, list(names))]


def columns_of(pool: HanaPool, schema: str, names: Sequence[str], *, views: bool) -> dict[str, tuple[Column, ...]]:
    """Return the columns of several tables, or of several views, by name."""
    rows = _look_up(pool, _COLUMNS_OF, "VIEW" if views else "TABLE", schema, names)
    return {name: _columns(row[1:] for row in group) for name, group in groupby(rows, key=itemgetter(0))}


def _look_up(pool: HanaPool, sql: str, kind: str, schema: str, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows for all names. Repeats the last name to fill up a statement."""
    sql = sql.format(kind=kind, names=", ".join("?" * _NAMES_AT_ONCE))
    for start in range(0, len(names), _NAMES_AT_ONCE):
        batch = list(names[start : start + _NAMES_AT_ONCE])
        batch += batch[-1:] * (_NAMES_AT_ONCE - len(batch))
        yield from pool.read(sql, (schema, *batch), doing=_LISTING)


def comments_by_name(pool: HanaPool, schema: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the most frequent comment that the schema's tables have for a column of each name, ties by alphabet."""
    return dict(_look_up(pool, _COMMENTS, "TABLE", schema, columns))


def unique_keys(pool: HanaPool, table: Table) -> list[tuple[str, ...]]:
    """Return the unique constraints and indexes over NOT NULL columns (NULL may occur twice), fewest columns first."""
    place = (table.ref.schema, table.ref.name)
    found: dict[tuple[str, str], list[str]] = {}
    for sql in (_UNIQUE_CONSTRAINTS, _UNIQUE_INDEXES):
        for name, column in pool.read(sql, place, doing=f"looking up the keys of {table.ref}"):
            found.setdefault((sql, str(name)), []).append(str(column))
    nullable = {column.name for column in table.columns if column.nullable}
    keys = {tuple(columns) for columns in found.values() if nullable.isdisjoint(columns)}
    return sorted(keys, key=lambda key: (len(key), key))


def tables_with_key(pool: HanaPool, schema: str, column: str) -> dict[str, tuple[str, ...]]:
    """Return the tables of the schema with `column` in their primary key, each with that key."""
    found: dict[str, tuple[str, ...]] = {}
    for name, part in pool.read(_TABLES_BY_KEY, (schema, schema, column), doing=f"looking for keys with {column}"):
        found[str(name)] = (*found.get(str(name), ()), str(part))
    return found


def _columns(rows: Iterable[Sequence[Any]]) -> tuple[Column, ...]:
    return tuple(
        Column(name, type_name, length or 0, scale or 0, nullable == "TRUE", comment or "")
        for name, type_name, length, scale, nullable, comment, _ in rows
    )


def _unknown(pool: HanaPool, ref: TableRef) -> str:
    doing = f"looking for names like {ref}"
    if missing := _no_schema(pool, ref.schema):
        return f"{ref}: {missing}"
    known = [row[0] for names in (_TABLES, _VIEWS) for row in pool.read(names, (ref.schema,), doing=doing)]
    hint = (
        did_you_mean(ref.name, known)
        or " If it exists, the user lacks SELECT on it: `owl-sap grants` prints the GRANT."
    )
    return f"{ref}: schema {ref.schema!r} has no table or view {ref.name!r} that this user can see.{hint}"


def _no_schema(pool: HanaPool, schema: str) -> str:
    doing = f"looking for schema {schema!r}"
    if pool.read(FIND_SCHEMA, (schema,), doing=doing):
        return ""
    known = [row[0] for row in pool.read(_SCHEMAS, doing=doing)]
    return f"there is no schema {schema!r} that this user can see.{did_you_mean(schema, known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the nearest names, or ""; mentions case if only case differs."""
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
    """Raise UnknownColumn for the first name that is not a column of the table. `setting`: for the message."""
    known = [column.name for column in table.columns]
    for name in names:
        if name not in known:
            raise UnknownColumn(f"`{setting}`: {table.ref} has no column {name!r}.{did_you_mean(name, known)}")


def refuse_view(table: Table, needs: str) -> None:
    """Raise ConfigurationError for a view. `needs`: what the method needs that views lack."""
    if table.is_view:
        raise ConfigurationError(
            f'`changes.method`: {table.ref} is a view, and only tables have {needs}; use "full" with hash = "server", '
            '"watermark" or "delta"'
        )


def resolve_key(spec: CollectionSpec, table: Table) -> tuple[str, ...]:
    """Return the configured `key`, else the primary key. Raises NoKey if neither works."""
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
