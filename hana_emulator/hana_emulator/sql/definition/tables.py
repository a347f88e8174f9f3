"""Parse CREATE, DROP and TRUNCATE TABLE, also for temporary tables; they run on a `Workbench`."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog import row_ids, schema_objects
from hana_emulator.sql.catalog.catalog import Catalog, Relation, TableColumn
from hana_emulator.sql.catalog.schema_objects import (
    GLOBAL,
    IDENTITY_SEQUENCE,
    LOCAL,
    SESSION_COLUMN,
    Check,
    Reference,
    Sequence,
    Temporary,
)
from hana_emulator.sql.definition import constraints, views
from hana_emulator.sql.definition.table_drafts import ReferenceDraft, TableDraft, table_body
from hana_emulator.sql.definition.workbench import Definition, Workbench, drop_table, refuse_taken
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.names import hana_identifier, quoted
from hana_emulator.sql.language.reader import Name, Parsers, TokenReader
from hana_emulator.sql.query import queries
from hana_emulator.sql.query.writes import default_of
from hana_emulator.types import TypeCode


@dataclass(frozen=True, slots=True)
class _Creation:
    """CREATE ... TABLE up to the name. `scope` is '' for a permanent table."""

    name: Name
    store: str
    scope: str
    if_absent: bool

    def needless(self, bench: Workbench) -> bool:
        return self.if_absent and bench.catalog.find(*bench.place(self.name)) is not None


# --- CREATE TABLE -----------------------------------------------------------------------------------------------------


def _create_table(store: str, scope: str, reader: TokenReader) -> Definition:
    if_absent = reader.take("IF", "NOT", "EXISTS")
    creation = _Creation(reader.name(), store, scope, if_absent)
    if reader.take("LIKE"):
        model = reader.name()
        with_data = _with_data(reader, otherwise=False)

        def copy(bench: Workbench) -> None:
            if creation.needless(bench):
                return
            source = bench.table(model)
            bench.touches.add(source.touch("SELECT"))
            keys = [key for key in source.constraints if key.primary_key or not scope]
            numbers = {one.next_value: one for one in bench.catalog.objects.sequences.values()}
            identity = next((numbers.get(column.default or "") for column in source.columns if column.identity), None)
            columns = [replace(column, default=None) if column.identity else column for column in source.columns]
            created = _create(bench, creation, TableDraft(columns, keys, identity=identity))
            if with_data:
                names = ", ".join(quoted(column.name) for column in source.writable_columns)
                text = f"INSERT INTO {created.sqlite_name} ({names}) SELECT {names} FROM {source.sqlite_name}"
                bench.connection.execute(text)

        return copy
    # Only the list before AS has bare names; column definitions also have types.
    following = reader.tokens[reader.index + 2 : reader.index + 3]
    names = reader.identifiers() if reader.peek("(") and following and following[0].text in (",", ")") else []
    if reader.take("AS"):
        return _create_as(creation, names, reader.enclosed(), _with_data(reader, otherwise=True))
    draft = table_body(reader)
    comment = reader.string() if reader.take("COMMENT") else None
    if reader.take("ON", "COMMIT", "DELETE", "ROWS"):
        raise not_supported("ON COMMIT DELETE ROWS")
    if scope:
        reader.take("ON", "COMMIT", "PRESERVE", "ROWS")

    def run(bench: Workbench) -> None:
        if not creation.needless(bench):
            _create(bench, creation, draft, comment)

    return run


def _create_as(creation: _Creation, names: list[str], text: str, with_data: bool) -> Definition:
    def run(bench: Workbench) -> None:
        if creation.needless(bench):
            return
        query = queries.bind_query(bench.binding(), dialect.parse(text), None)
        labels = names or [column.name for column in query.columns]
        if len(labels) != len(query.columns):
            raise HanaError(426, "number of columns mismatch: the column list and the query differ")
        columns = [
            TableColumn(label, found.type, found.nullable) for label, found in zip(labels, query.columns, strict=True)
        ]
        created = _create(bench, creation, TableDraft(columns))
        if with_data:
            into = ", ".join(quoted(label) for label in labels)
            bench.connection.execute(f"INSERT INTO {created.sqlite_name} ({into}) {query.sql}")

    return run


def _with_data(reader: TokenReader, *, otherwise: bool) -> bool:
    if reader.take("WITH", "NO", "DATA"):
        return False
    return reader.take("WITH", "DATA") or otherwise


def _create(bench: Workbench, creation: _Creation, draft: TableDraft, comment: str | None = None) -> Relation:
    """Create the table. Raises HanaError 397 if a local temporary table lacks the # or another table has it."""
    schema, table = bench.place(creation.name)
    scope = creation.scope
    if table.startswith("#") is not (scope == LOCAL):
        raise HanaError(
            397, f"invalid object name: {hana_identifier(table)} (# starts the name of a local temporary table)"
        )
    temporary = Temporary(scope, bench.catalog.session if scope == LOCAL else 0, schema) if scope else None
    refuse_taken(bench, schema, table)
    relation = with_draft(Relation(0, schema, table, (), temporary=temporary, store=creation.store), draft)
    relation = with_identity(bench, relation, draft)
    for column in relation.columns:
        default_of(bench.binding(), column)
    number = catalogue.add_relation(bench.connection, relation, comment)
    relation = replace(relation, id=number)
    bench.connection.execute(sqlite_table(relation, relation.sqlite_name, constraints.formulas(bench, relation)))
    if draft.identity is not None and any(column.is_rowid for column in relation.columns):
        begin_identity(bench.connection, relation, draft.identity.start)
    constraints.create_keys(bench.connection, relation)
    bench.refresh()
    attach(bench, relation, draft.references, draft.checks)
    constraints.impose(bench, bench.catalog.by_id(number))
    return relation


def with_draft(relation: Relation, draft: TableDraft) -> Relation:
    """`relation` with the columns and keys of `draft` added. Raises HanaError 260, 264, 272, 294, 368, 457."""
    columns = [*relation.columns, *draft.columns]
    names = [column.name for column in columns]
    for name in names:
        if names.count(name) > 1:
            raise HanaError(272, f"duplicate column name: {name}")
    keys = list(relation.constraints)
    for constraint in draft.constraints:
        if constraint.primary_key and any(key.primary_key for key in keys):
            raise HanaError(294, "cannot have more than one primary key")
        if relation.temporary and not relation.is_shared_by_sessions and not constraint.primary_key:
            raise HanaError(368, "unique constraint not allowed on temporary table")
        taken = {key.name for key in keys}
        free = next(name for number in count() if (name := f"_SYS_TREE_UNIQUE_{number}") not in taken)
        label = constraint.name or ("_SYS_TREE_PRIMARY_KEY" if constraint.primary_key else free)
        if label in taken:
            raise HanaError(457, f"duplicate constraint name: {hana_identifier(label)}")
        keys.append(replace(constraint, name=label))
    primary = next((key.columns for key in keys if key.primary_key), ())
    columns = [replace(c, nullable=False) if c.name in primary else c for c in columns]
    if len([column for column in columns if column.identity]) > 1:
        raise syntax_error("a table has at most one identity column")
    changed = replace(relation, columns=tuple(columns), constraints=tuple(keys))
    for constraint in keys:
        constraints.check_key(changed, constraint)
    return changed


def with_identity(bench: Workbench, relation: Relation, draft: TableDraft) -> Relation:
    """`relation` with a new sequence as the default of its identity column, if SQLite's rowid, which rises by one from
    a positive number, cannot be the identity."""
    identity = draft.identity
    plain = Sequence(0, "", "")
    if identity is None or (
        identity.start > 0 and plain == replace(identity, start=1, cache=0, id=0, schema="", name="")
    ):
        return relation
    if relation.temporary is not None:
        raise not_supported("steps and bounds of an identity in a temporary table")
    taken = {name for schema, name in bench.catalog.objects.sequences if schema == relation.schema}
    name = next(name for number in count(1) if (name := f"{IDENTITY_SEQUENCE}{number}_#0_#") not in taken)
    sequence = replace(identity, id=0, schema=relation.schema, name=name, version=1)
    schema_objects.put_sequence(bench.connection, sequence)
    bench.refresh()
    named = {column.name for column in draft.columns if column.identity}
    columns = [replace(c, default=sequence.next_value) if c.name in named else c for c in relation.columns]
    return replace(relation, columns=tuple(columns))


def sqlite_table(relation: Relation, name: str, formulas: Mapping[str, str]) -> str:
    """CREATE TABLE for SQLite under `name`. Columns have no SQLite type, so that SQLite converts no value. Keys are
    indexes created later. `formulas`: the SQLite expressions of generated columns (`constraints.formulas`)."""
    pieces = []
    for column in relation.columns:
        if column.is_rowid:
            kind = " INTEGER PRIMARY KEY AUTOINCREMENT"
        else:
            collation = " COLLATE hana_decimal" if column.type.code is TypeCode.DECIMAL else ""
            kind = f"{'' if column.nullable else ' NOT NULL'}{collation}"
        if column.formula is not None:
            word = "VIRTUAL" if column.virtual else "STORED"
            kind += f" GENERATED ALWAYS AS ({formulas[column.name]}) {word}"
        pieces.append(quoted(column.name) + kind)
    if relation.is_shared_by_sessions:
        pieces.append(f"{SESSION_COLUMN} DEFAULT (hana_current_connection())")
    if relation.next_row_id:
        pieces.append(f"{row_ids.COLUMN} DEFAULT ({relation.next_row_id})")
    return f"CREATE TABLE {name} ({', '.join(pieces)})"


def begin_identity(connection: sqlite3.Connection, relation: Relation, number: int) -> None:
    connection.execute("DELETE FROM sqlite_sequence WHERE name = ?", (relation.table_key,))
    connection.execute("INSERT INTO sqlite_sequence(name, seq) VALUES (?,?)", (relation.table_key, number - 1))


def attach(
    bench: Workbench, relation: Relation, references: Collection[ReferenceDraft], checks: Collection[Check]
) -> tuple[list[Reference], list[Check]]:
    """Write foreign keys and checks to the catalogue; `constraints.impose` activates them. Raises HanaError 257, 259,
    260, 266, 365, 366, 367, 457."""
    names = relation.constraint_names

    def label(name: str, sign: str) -> str:
        number = 0
        while not name and f"_SYS_CONSTRAINT_{relation.id}_#{number}_#{sign}" in names:
            number += 1
        chosen = name or f"_SYS_CONSTRAINT_{relation.id}_#{number}_#{sign}"
        if chosen in names:
            raise HanaError(457, f"duplicate constraint name: {hana_identifier(chosen)}")
        names.add(chosen)
        return chosen

    kept = [_reference(bench, relation, replace(draft, name=label(draft.name, "F0"))) for draft in references]
    for reference in kept:
        schema_objects.add_reference(bench.connection, relation.id, reference)
    conditions = [Check(label(draft.name, "C0"), draft.condition) for draft in checks]
    for check in conditions:
        constraints.check_condition(bench, relation, check)
        schema_objects.add_check(bench.connection, relation.id, check)
    bench.refresh()
    return kept, conditions


def _reference(bench: Workbench, relation: Relation, draft: ReferenceDraft) -> Reference:
    schema = draft.parent.schema or relation.schema
    parent = bench.catalog.table(bench.catalog.require_schema(schema), draft.parent.name)
    if parent.id != relation.id:
        bench.touches.add(parent.touch("REFERENCES"))
    if not draft.parent_columns and not parent.key:
        raise HanaError(366, f"referenced table does not have a primary key: {hana_identifier(parent.name)}")
    reference = Reference(
        draft.name, draft.columns, parent.id, draft.parent_columns or parent.key, draft.on_delete, draft.on_update
    )
    constraints.check_reference(relation, parent, reference)
    return reference


# --- DROP, TRUNCATE ---------------------------------------------------------------------------------------------------

PARSERS: Parsers[Definition] = Parsers()


@PARSERS("DROP", "TABLE")
def _drop_table(reader: TokenReader) -> Definition:
    if_there = reader.take("IF", "EXISTS")
    name = reader.name()
    option = "CASCADE" if reader.take("CASCADE") else "RESTRICT" if reader.take("RESTRICT") else ""

    def run(bench: Workbench) -> None:
        if if_there and bench.catalog.find(*bench.place(name)) is None:
            return
        relation = bench.table(name)
        others = [child for child, _ in bench.catalog.children_of(relation) if child.id != relation.id]
        seen_in = views.dependent(bench, relation)
        if option == "RESTRICT" and (others or seen_in):
            raise HanaError(419, f"can't drop with RESTRICT specification: {(others + seen_in)[0].name} depends on it")
        if others and option != "CASCADE":
            raise HanaError(
                417, f"can't drop without CASCADE specification: a foreign key of {others[0].name} refers to it"
            )
        with constraints.lifted(bench, relation):
            for view in seen_in if option == "CASCADE" else []:
                views.drop(bench, view)
            drop_table(bench, relation)

    return run


@PARSERS("TRUNCATE", "TABLE")
def _truncate(reader: TokenReader) -> Definition:
    name = reader.name()

    def run(bench: Workbench) -> None:
        relation = bench.table(name)
        bench.touches.add(relation.touch("DELETE"))
        constraints.refuse_used_rows(bench, relation)
        own = f" WHERE {queries.own_rows(relation.sqlite_name)}" if relation.is_shared_by_sessions else ""
        with constraints.lifted(bench, relation):
            bench.connection.execute(f"DELETE FROM {relation.sqlite_name}{own}")
        if relation.next_row_id:
            bench.truncated.append(relation.id)

    return run


PARSERS |= {
    ("CREATE", *scope_words, *store_words, "TABLE"): partial(_create_table, store, scope)
    for scope_words, scope in (((), ""), (("LOCAL", "TEMPORARY"), LOCAL), (("GLOBAL", "TEMPORARY"), GLOBAL))
    for store_words, store in (((), "COLUMN"), (("COLUMN",), "COLUMN"), (("ROW",), "ROW"))
}


# --- temporary tables at the end of a session, and at the next start --------------------------------------------------


def belongs_to(catalog: Catalog, session: int) -> bool:
    return any(entry.scope == LOCAL and entry.session == session for entry in catalog.objects.temporary.values())


def sweep(bench: Workbench) -> None:
    """A definition that drops the session's local temporary tables and deletes its rows from global ones."""
    for relation in bench.catalog.relations.values():
        if relation.temporary is None:
            continue
        if relation.temporary.scope != LOCAL:
            text = f"DELETE FROM {relation.sqlite_name} WHERE {SESSION_COLUMN} = ?"
            bench.connection.execute(text, (bench.catalog.session,))
        elif relation.temporary.session == bench.catalog.session:
            drop_table(bench, relation)


def sweep_all(connection: sqlite3.Connection, catalog: Catalog) -> None:
    """Drop or empty the temporary tables of all earlier sessions. Call inside a transaction."""
    for relation in catalog.relations.values():
        if relation.temporary is not None and relation.temporary.scope == LOCAL:
            connection.execute(f"DROP TABLE {relation.sqlite_name}")
            connection.execute("DELETE FROM owl_relations WHERE id = ?", (relation.id,))
        elif relation.temporary is not None:
            connection.execute(f"DELETE FROM {relation.sqlite_name}")
