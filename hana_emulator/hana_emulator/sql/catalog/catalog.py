"""The catalogue of schemas, tables, views, columns and indexes: rows in SQLite and an immutable snapshot.

A change of structure writes rows in its transaction; the next snapshot reads them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType

from hana_emulator.errors import HanaError, invalid_schema, invalid_table
from hana_emulator.sql.catalog import rights, row_ids, schema_objects
from hana_emulator.sql.catalog.rights import Rights, Touch
from hana_emulator.sql.catalog.schema_objects import (
    GLOBAL,
    LOCAL,
    Check,
    Reference,
    SchemaObjects,
    Temporary,
    temporary_schema,
)
from hana_emulator.sql.language.names import hana_identifier, quoted_table, table_key
from hana_emulator.types import Column, HanaType, TypeCode

SYSTEM_SCHEMAS = ("SYS", "PUBLIC")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS owl_users(name TEXT PRIMARY KEY, password TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS owl_schemas(name TEXT PRIMARY KEY, owner TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS owl_relations(
  id INTEGER PRIMARY KEY AUTOINCREMENT, schema TEXT NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL,
  store TEXT NOT NULL, comment TEXT, definition TEXT, definition_schema TEXT, created TEXT NOT NULL,
  UNIQUE(schema, name));
CREATE TABLE IF NOT EXISTS owl_columns(
  relation INTEGER NOT NULL REFERENCES owl_relations(id) ON DELETE CASCADE, position INTEGER NOT NULL,
  name TEXT NOT NULL, type INTEGER NOT NULL, length INTEGER NOT NULL, scale INTEGER NOT NULL,
  nullable INTEGER NOT NULL, defaults TEXT, identity TEXT, comment TEXT, formula TEXT, virtual INTEGER NOT NULL,
  PRIMARY KEY(relation, position), UNIQUE(relation, name));
CREATE TABLE IF NOT EXISTS owl_constraints(
  relation INTEGER NOT NULL REFERENCES owl_relations(id) ON DELETE CASCADE, name TEXT NOT NULL,
  primary_key INTEGER NOT NULL, position INTEGER NOT NULL, column_name TEXT NOT NULL,
  PRIMARY KEY(relation, name, position));
CREATE TABLE IF NOT EXISTS owl_indexes(
  schema TEXT NOT NULL, name TEXT NOT NULL, relation INTEGER NOT NULL REFERENCES owl_relations(id) ON DELETE CASCADE,
  kind TEXT NOT NULL, uniqueness TEXT, options TEXT, position INTEGER NOT NULL, column_name TEXT NOT NULL,
  descending INTEGER NOT NULL DEFAULT 0, PRIMARY KEY(schema, name, position));
"""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column as declared. `default` is HANA SQL; `identity` is 'BY DEFAULT', 'ALWAYS' or None. The `formula` of a
    generated column is HANA SQL; it is computed when a row is written, or, if `virtual`, when it is read."""

    name: str
    type: HanaType
    nullable: bool = True
    default: str | None = None
    identity: str | None = None
    comment: str | None = None
    formula: str | None = None
    virtual: bool = False

    @property
    def is_rowid(self) -> bool:
        """Whether SQLite's rowid is the identity; an identity with other options has a sequence as its default."""
        return self.identity is not None and self.default is None


@dataclass(frozen=True, slots=True)
class Constraint:
    name: str
    columns: tuple[str, ...]
    primary_key: bool


@dataclass(frozen=True, slots=True)
class Index:
    """A secondary index; `kind` is as in SYS.INDEXES.INDEX_TYPE. HNSW indexes are only recorded: search is exact."""

    schema: str
    name: str
    relation: int
    kind: str
    columns: tuple[str, ...]
    unique: bool = False
    # Stored with the index, but not loaded into a snapshot of the catalogue
    descending: frozenset[str] = frozenset()
    similarity: str | None = None  # Function of an HNSW index, loaded from its options


@dataclass(frozen=True, slots=True)
class Relation:
    """A table (`definition` is None) or a view (its HANA SQL, resolved with `definition_schema` as current schema)."""

    id: int
    schema: str
    name: str
    columns: tuple[TableColumn, ...]
    definition: str | None = None
    definition_schema: str = ""
    constraints: tuple[Constraint, ...] = ()
    references: tuple[Reference, ...] = ()
    checks: tuple[Check, ...] = ()
    temporary: Temporary | None = None
    store: str = "COLUMN"

    @property
    def is_view(self) -> bool:
        return self.definition is not None

    @property
    def writable_columns(self) -> list[TableColumn]:
        """The columns that a statement may give values to: all but generated ones."""
        return [column for column in self.columns if column.formula is None]

    def touch(self, privilege: str) -> Touch:
        return Touch(privilege, self.schema, self.name, self.id)

    @property
    def key(self) -> tuple[str, ...]:
        return next((constraint.columns for constraint in self.constraints if constraint.primary_key), ())

    @property
    def refers_to_itself(self) -> bool:
        return any(reference.parent == self.id for reference in self.references)

    @property
    def constraint_names(self) -> set[str]:
        return {
            *(key.name for key in self.constraints),
            *(reference.name for reference in self.references),
            *(check.name for check in self.checks),
        }

    @property
    def stored_schema(self) -> str:
        """The schema under which the relation is stored; a session's local temporary tables have their own."""
        if self.temporary is None or self.temporary.scope != LOCAL:
            return self.schema
        return temporary_schema(self.temporary.session, self.schema)

    @property
    def is_shared_by_sessions(self) -> bool:
        """Whether this is a global temporary table, in which each row belongs to one session."""
        return self.temporary is not None and self.temporary.scope == GLOBAL

    @property
    def hides_rowid(self) -> bool:
        """Whether a column has the name of SQLite's rowid."""
        return any(column.name == "_ROWID_" for column in self.columns)

    @property
    def next_row_id(self) -> str:
        """SQLite expression for a new `"$rowid$"`; '' for views, row tables and temporary tables, which lack it."""
        if self.store != "COLUMN" or self.is_view or self.temporary is not None:
            return ""
        return f"{row_ids.FUNCTION}({self.id})"

    @property
    def row_id_renewal(self) -> list[str]:
        """Assignments that each UPDATE adds: a changed row is a new version with a new id."""
        return [f"{row_ids.COLUMN} = {self.next_row_id}"] if self.next_row_id else []

    @property
    def sqlite_name(self) -> str:
        return quoted_table(self.stored_schema, self.name)

    @property
    def table_key(self) -> str:
        return table_key(self.stored_schema, self.name)

    def column(self, name: str) -> TableColumn:
        for column in self.columns:
            if column.name == name:
                return column
        raise HanaError(260, f"invalid column name: {name}")

    def result_columns(self) -> tuple[Column, ...]:
        return tuple(Column(c.name, c.type, c.nullable, self.name, self.schema) for c in self.columns)


@dataclass(frozen=True, slots=True)
class Catalog:
    """One immutable state of the catalogue."""

    version: int
    schemas: frozenset[str]
    relations: Mapping[tuple[str, str], Relation] = field(default_factory=lambda: MappingProxyType({}))
    indexes: Mapping[tuple[str, str], Index] = field(default_factory=lambda: MappingProxyType({}))
    users: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    rights: Rights = field(default_factory=Rights)
    objects: SchemaObjects = field(default_factory=SchemaObjects)
    session: int = 0  # The session whose local temporary tables `find` returns
    # By SQLite key of a table: keys of the tables into which triggers may insert after a write to it; see `_fired`
    fired: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    # Functions that the instance lacks, by name, with the error that a statement with one of them gets
    lacking: Mapping[str, HanaError] = field(default_factory=lambda: MappingProxyType({}))

    def require_function(self, name: str) -> None:
        if name in self.lacking:
            raise HanaError(self.lacking[name].code, self.lacking[name].text)

    def seen_by(self, session: int) -> Catalog:
        return replace(self, session=session)

    def require_schema(self, name: str) -> str:
        if name not in self.schemas and name not in SYSTEM_SCHEMAS:
            raise invalid_schema(name)
        return name

    def find(self, schema: str, name: str) -> Relation | None:
        """Find a table or view; a name with # is a local temporary table of this catalogue's session."""
        if name.startswith("#"):
            schema = temporary_schema(self.session, schema)
        return self.relations.get((schema, name))

    def meant(self, schema: str, current: str, name: str) -> Relation | None:
        """Find the table or view that a name refers to, directly or through a synonym. An empty `schema` means the
        schema `current`, then the public synonyms."""
        found = self.find(schema or current, name) or self._of_synonym(schema or current, name)
        return found or (None if schema else self._of_synonym("PUBLIC", name))

    def _of_synonym(self, schema: str, name: str) -> Relation | None:
        target = self.objects.synonyms.get((schema, name))
        return self.find(*target) if target is not None else None

    def by_id(self, number: int) -> Relation:
        return next(relation for relation in self.relations.values() if relation.id == number)

    def children_of(self, relation: Relation) -> list[tuple[Relation, Reference]]:
        """The foreign keys that refer to `relation`, each with its table."""
        return [
            (child, reference)
            for child in self.relations.values()
            for reference in child.references
            if reference.parent == relation.id
        ]

    def relation(self, schema: str, name: str) -> Relation:
        """Find a table or view. Raises HanaError 362 for an unknown schema, 259 for an unknown name."""
        self.require_schema(schema)
        found = self.find(schema, name)
        if found is None:
            raise invalid_table(f"{hana_identifier(name)} in schema {schema}")
        return found

    def table(self, schema: str, name: str) -> Relation:
        """Find a table. Raises HanaError 7 for a view."""
        return writable(self.relation(schema, name))

    def foreign_keys_of(self, table: str) -> list[tuple[str, Sequence[str], Sequence[str]]]:
        """List the foreign keys of a table (by SQLite key): the parent's SQLite key, own columns, parent's columns."""
        relation = next((one for one in self.relations.values() if one.table_key == table), None)
        references = relation.references if relation is not None else ()
        return [(self.by_id(one.parent).table_key, one.columns, one.parent_columns) for one in references]

    def indexes_of(self, relation: Relation) -> list[Index]:
        return [index for index in self.indexes.values() if index.relation == relation.id]


def writable(relation: Relation) -> Relation:
    if relation.is_view:
        raise HanaError(7, f"feature not supported: writing into view {hana_identifier(relation.name)}")
    return relation


def reindexed(before: Catalog, after: Catalog) -> set[str]:
    """The tables, by SQLite name, whose indexes differ. HNSW indexes exist only in the catalogue."""
    tables = {relation.id: relation.table_key for relation in before.relations.values()}
    return {
        tables[index.relation]
        for index in {*before.indexes.values()} ^ {*after.indexes.values()}
        if index.relation in tables
    }


def referred_anew(before: Catalog, after: Catalog) -> set[str]:
    """The tables, by SQLite name, that an existing table refers to by a new foreign key."""
    was = {relation.id: relation for relation in before.relations.values()}
    return {
        after.by_id(reference.parent).table_key
        for relation in after.relations.values()
        if relation.id in was
        for reference in {*relation.references} - {*was[relation.id].references}
    }


def triggered_anew(before: Catalog, after: Catalog) -> set[str]:
    """The tables, by SQLite name, with added or removed triggers."""
    was, now = ({(one.id, one.enabled): one for one in each.objects.triggers.values()} for each in (before, after))
    tables = {relation.id: relation.table_key for relation in before.relations.values()}
    differing = [(was.get(key) or now[key]).relation for key in was.keys() ^ now.keys()]
    return {tables[number] for number in differing if number in tables}


def create_storage(connection: sqlite3.Connection) -> None:
    connection.executescript(_SCHEMA + schema_objects.STORAGE)
    rights.create_storage(connection)


def load(connection: sqlite3.Connection, version: int, lacking: Mapping[str, HanaError]) -> Catalog:
    columns: dict[int, list[TableColumn]] = {}
    for (
        relation,
        name,
        code,
        length,
        scale,
        nullable,
        default,
        identity,
        comment,
        formula,
        virtual,
    ) in connection.execute(
        "SELECT relation, name, type, length, scale, nullable, defaults, identity, comment, formula, virtual"
        " FROM owl_columns ORDER BY relation, position"
    ):
        kind = HanaType(TypeCode(code), length, scale)
        column = TableColumn(name, kind, bool(nullable), default, identity, comment, formula, bool(virtual))
        columns.setdefault(relation, []).append(column)
    constraints: dict[int, list[Constraint]] = {}
    keyed = connection.execute(
        "SELECT relation, name, primary_key, column_name FROM owl_constraints ORDER BY relation, name, position"
    )
    for (number, name, primary_key), rows in groupby(keyed, itemgetter(0, 1, 2)):
        found = Constraint(name, tuple(row[3] for row in rows), bool(primary_key))
        constraints.setdefault(number, []).append(found)
    indexes: dict[tuple[str, str], Index] = {}
    indexed = connection.execute(
        "SELECT schema, name, relation, kind, uniqueness, options ->> '$.function', column_name FROM owl_indexes"
        " ORDER BY schema, name, position"
    )
    for (schema, name, number, kind, unique, function), rows in groupby(indexed, itemgetter(0, 1, 2, 3, 4, 5)):
        indexed_columns = tuple(row[6] for row in rows)
        index = Index(schema, name, number, kind, indexed_columns, unique is not None, similarity=function)
        indexes[schema, name] = index
    objects = schema_objects.load(connection)
    relations = {}
    for number, schema, name, store, definition, definition_schema in connection.execute(
        "SELECT id, schema, name, store, definition, definition_schema FROM owl_relations"
    ):
        temporary = objects.temporary.get(number)
        relations[schema, name] = Relation(
            id=number,
            schema=temporary.schema if temporary is not None else schema,
            name=name,
            columns=tuple(columns.get(number, ())),
            definition=definition,
            definition_schema=definition_schema or "",
            constraints=tuple(constraints.get(number, ())),
            references=objects.references.get(number, ()),
            checks=objects.checks.get(number, ()),
            temporary=temporary,
            store=store,
        )
    catalog = Catalog(
        version=version,
        schemas=frozenset(name for (name,) in connection.execute("SELECT name FROM owl_schemas")),
        relations=MappingProxyType(relations),
        indexes=MappingProxyType(indexes),
        users=MappingProxyType(dict(connection.execute("SELECT name, password FROM owl_users").fetchall())),
        rights=rights.load(connection),
        objects=objects,
        lacking=lacking,
    )
    return replace(catalog, fired=MappingProxyType(_fired(catalog))) if objects.triggers else catalog


def _fired(catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """Map tables to those into which triggers insert after a write, also through other triggers or foreign keys."""
    tables = {relation.id: relation for relation in catalog.relations.values()}
    following: dict[int, set[int]] = {}
    inserted: dict[int, set[int]] = {}
    for trigger in catalog.objects.triggers.values():
        following.setdefault(trigger.relation, set()).update(number for number, _ in trigger.writes)
        inserted.setdefault(trigger.relation, set()).update(number for number, inserts in trigger.writes if inserts)
    for relation in tables.values():
        for reference in relation.references:
            following.setdefault(reference.parent, set()).add(relation.id)
    found = {}
    for start in following:
        reached, pending = {start}, [start]
        while pending:
            more = following.get(pending.pop(), set()) - reached
            reached |= more
            pending += more
        targets = {number for table in reached for number in inserted.get(table, ())}
        if targets and start in tables:
            found[tables[start].table_key] = tuple(sorted(tables[n].table_key for n in targets if n in tables))
    return found


def add_relation(connection: sqlite3.Connection, relation: Relation, comment: str | None) -> int:
    """Write a new table or view with all its parts; return its id. The caller has checked that the name is free."""
    cursor = connection.execute(
        "INSERT INTO owl_relations(schema, name, kind, store, comment, definition, definition_schema, created)"
        " VALUES (?,?,?,?,?,?,?, strftime('%Y-%m-%d %H:%M:%f0000', 'now'))",
        (
            relation.stored_schema,
            relation.name,
            "VIEW" if relation.is_view else "TABLE",
            relation.store,
            comment,
            relation.definition,
            relation.definition_schema,
        ),
    )
    number = cursor.lastrowid or 0
    write_structure(connection, replace(relation, id=number))
    for reference in relation.references:
        schema_objects.add_reference(connection, number, reference)
    for check in relation.checks:
        schema_objects.add_check(connection, number, check)
    if relation.temporary is not None:
        schema_objects.add_temporary(connection, number, relation.temporary)
    return number


def write_structure(connection: sqlite3.Connection, relation: Relation) -> None:
    for table in ("owl_columns", "owl_constraints"):
        connection.execute(f"DELETE FROM {table} WHERE relation = ?", (relation.id,))
    for position, column in enumerate(relation.columns, 1):
        add_column(connection, relation.id, position, column)
    for constraint in relation.constraints:
        connection.executemany(
            "INSERT INTO owl_constraints(relation, name, primary_key, position, column_name) VALUES (?,?,?,?,?)",
            [(relation.id, constraint.name, constraint.primary_key, i, c) for i, c in enumerate(constraint.columns, 1)],
        )


def add_column(connection: sqlite3.Connection, relation: int, position: int, column: TableColumn) -> None:
    connection.execute(
        "INSERT INTO owl_columns(relation, position, name, type, length, scale, nullable, defaults, identity, comment,"
        " formula, virtual) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            relation,
            position,
            column.name,
            int(column.type.code),
            column.type.length,
            column.type.scale,
            column.nullable,
            column.default,
            column.identity,
            column.comment,
            column.formula,
            column.virtual,
        ),
    )


def add_index(connection: sqlite3.Connection, index: Index, options: str | None) -> None:
    connection.executemany(
        "INSERT INTO owl_indexes(schema, name, relation, kind, uniqueness, options, position, column_name, descending)"
        " VALUES (?,?,?,?,?,?,?,?,?)",
        [
            (
                index.schema,
                index.name,
                index.relation,
                index.kind,
                "UNIQUE" if index.unique else None,
                options,
                position,
                column,
                column in index.descending,
            )
            for position, column in enumerate(index.columns, 1)
        ],
    )
