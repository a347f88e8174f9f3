"""Parse ALTER TABLE, RENAME TABLE and RENAME COLUMN; they run on a `Workbench`.

SQLite can alter little, so most changes rebuild the table and copy the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from sqlglot.tokenizer_core import Token, TokenType

from hana_emulator.errors import HanaError, not_supported
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog import row_ids
from hana_emulator.sql.catalog.catalog import Relation
from hana_emulator.sql.catalog.schema_objects import SESSION_COLUMN
from hana_emulator.sql.definition import constraints
from hana_emulator.sql.definition.table_drafts import TableDraft, table_body, table_constraint
from hana_emulator.sql.definition.tables import attach, begin_identity, sqlite_table, with_draft, with_identity
from hana_emulator.sql.definition.workbench import (
    Definition,
    Workbench,
    drop_identities,
    refuse_taken,
    refuse_used_by_sessions,
)
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.names import encode, hana_identifier, quoted, quoted_key, quoted_table, table_key
from hana_emulator.sql.language.reader import Name, Parsers, TokenReader
from hana_emulator.sql.query.scope import Bound
from hana_emulator.sql.query.writes import default_of, stored

Alteration = Callable[[Workbench, Relation], None]

PARSERS: Parsers[Definition] = Parsers()
_ALTERATIONS: Parsers[Alteration] = Parsers()  # Keyed by the words that follow the table's name


@PARSERS("ALTER", "TABLE")
def _alter_table(reader: TokenReader) -> Definition:
    name = reader.name()
    alteration = _ALTERATIONS.parse(reader)
    if alteration is None:
        raise not_supported("ALTER TABLE other than ADD, DROP and ALTER of columns and constraints")

    def run(bench: Workbench) -> None:
        relation = bench.table(name)
        refuse_used_by_sessions(bench, relation)
        with constraints.lifted(bench, relation):
            alteration(bench, relation)

    return run


@_ALTERATIONS("ADD")
def _add(reader: TokenReader) -> Alteration:
    """Add columns or constraints. Existing rows get a new column's default and must satisfy new constraints."""
    draft = TableDraft()
    if reader.peek("(") or not table_constraint(reader, draft):
        draft = table_body(reader)

    def run(bench: Workbench, relation: Relation) -> None:
        known = {column.name for column in relation.columns}
        for column in draft.columns:
            if column.name in known:
                raise HanaError(308, f"column name already exists: {column.name}")
        changed = with_identity(bench, with_draft(relation, draft), draft)
        if changed != relation:
            added = [column for column in changed.writable_columns if column.name not in known and not column.is_rowid]
            values = {column.name: default_of(bench.binding(), column) or "NULL" for column in added}
            _rebuild(bench, relation, changed, values)
            bench.refresh()
        references, checks = attach(bench, changed, draft.references, draft.checks)
        constraints.check_rows(bench, bench.catalog.by_id(relation.id), references, checks)

    return run


@_ALTERATIONS("DROP", "PRIMARY", "KEY")
def _drop_primary_key(reader: TokenReader) -> Alteration:
    def run(bench: Workbench, relation: Relation) -> None:
        if not relation.key:
            raise HanaError(366, f"table {hana_identifier(relation.name)} does not have a primary key")
        _drop_keys(bench, relation, [key.name for key in relation.constraints if key.primary_key])

    return run


@_ALTERATIONS("DROP", "CONSTRAINT")
def _drop_constraint(reader: TokenReader) -> Alteration:
    name = reader.identifier()

    def run(bench: Workbench, relation: Relation) -> None:
        if any(key.name == name for key in relation.constraints):
            _drop_keys(bench, relation, [name])
            return
        for table in ("owl_references", "owl_checks"):
            text = f"DELETE FROM {table} WHERE relation = ? AND name = ?"
            if bench.connection.execute(text, (relation.id, name)).rowcount:
                return
        raise HanaError(397, f"invalid object name: {hana_identifier(relation.name)} has no constraint {name}")

    return run


def _drop_keys(bench: Workbench, relation: Relation, names: Sequence[str]) -> None:
    for key in relation.constraints:
        if key.name in names:
            _refuse_referenced(bench, relation, key.columns)
    kept = tuple(key for key in relation.constraints if key.name not in names)
    _rebuild(bench, relation, replace(relation, constraints=kept), {})


def _refuse_referenced(bench: Workbench, relation: Relation, columns: Sequence[str]) -> None:
    """Raise HanaError 417 if a foreign key uses one of the columns."""
    for child, reference in bench.catalog.children_of(relation):
        if set(reference.parent_columns) & set(columns):
            raise HanaError(
                417,
                f"can't drop without CASCADE specification: {hana_identifier(reference.name)} of {child.name} refers"
                " to it",
            )


@_ALTERATIONS("DROP")
def _drop_columns(reader: TokenReader) -> Alteration:
    """Drop columns, with single-column indexes and constraints on them. Raises HanaError 260, 311, 350, 351, 417."""
    names = reader.identifiers()

    def run(bench: Workbench, relation: Relation) -> None:
        for name in names:
            relation.column(name)
            if name in relation.key:
                raise HanaError(350, f"cannot drop columns in the primary-key column list: {name}")
        kept = tuple(column for column in relation.columns if column.name not in names)
        if not kept:
            raise HanaError(311, "cannot drop all columns in a table")
        _refuse_referenced(bench, relation, names)
        used = [key.columns for key in relation.constraints]
        used += [reference.columns for reference in relation.references]
        used += [index.columns for index in bench.catalog.indexes_of(relation)]
        for columns in used:
            if len(columns) > 1 and set(columns) & set(names):
                raise HanaError(351, f"column is referenced in a multi-column constraint: {', '.join(columns)}")
        for name in names:
            for table in ("owl_references", "owl_indexes"):
                bench.connection.execute(
                    f"DELETE FROM {table} WHERE relation = ? AND column_name = ?", (relation.id, name)
                )
        staying = {column.name for column in kept}
        for check in relation.checks:
            mentioned = {_name_of(token) for token in dialect.tokenize(check.condition)}
            if not mentioned & set(names):
                continue
            if mentioned & staying:
                raise HanaError(351, f"column is referenced in a multi-column constraint: {check.name}")
            values = (relation.id, check.name)
            bench.connection.execute("DELETE FROM owl_checks WHERE relation = ? AND name = ?", values)
        keys = tuple(key for key in relation.constraints if not set(key.columns) & set(names))
        drop_identities(bench, [relation.column(name) for name in names])
        _rebuild(bench, relation, replace(relation, columns=kept, constraints=keys), {})

    return run


def _switch_triggers(enabled: bool, reader: TokenReader) -> Alteration:
    """Enable or disable one trigger of the table, or all. Raises HanaError 445."""
    name = "" if reader.at_end else reader.identifier()

    def run(bench: Workbench, relation: Relation) -> None:
        bench.touches.add(relation.touch("ALTER"))
        text = "UPDATE owl_triggers SET enabled = ? WHERE relation = ? AND ? IN ('', name)"
        if not bench.connection.execute(text, (enabled, relation.id, name)).rowcount and name:
            raise HanaError(445, f"invalid trigger name: {hana_identifier(name)}")

    return run


_ALTERATIONS |= {(word, "TRIGGER"): partial(_switch_triggers, word == "ENABLE") for word in ("ENABLE", "DISABLE")}


@_ALTERATIONS("ALTER")
def _alter_columns(reader: TokenReader) -> Alteration:
    """Change columns; unspecified nullability, default and comment stay. Raises HanaError 260, and 274, 287, 303, 314
    or 339 if rows do not fit the new type."""
    draft = table_body(reader)
    if draft.constraints or draft.references or draft.checks:
        raise not_supported("constraints in ALTER TABLE ALTER; use ADD CONSTRAINT")
    if any(column.formula is not None for column in draft.columns):
        raise not_supported("changing the expression of a generated column")

    def run(bench: Workbench, relation: Relation) -> None:
        values, columns = {}, {column.name: column for column in relation.columns}
        for column in draft.columns:
            old = relation.column(column.name)
            if column.identity != old.identity or old.formula is not None:
                raise not_supported("changing an identity or a generated column")
            new = replace(
                column,
                nullable=draft.nullability.get(column.name, old.nullable) and column.name not in relation.key,
                default=column.default if column.default is not None else old.default,
                comment=column.comment if column.comment is not None else old.comment,
            )
            default_of(bench.binding(), new)
            columns[column.name] = new
            values[column.name] = stored(Bound(quoted(column.name), old.type), new)
        changed = replace(relation, columns=tuple(columns.values()))
        # Keys and foreign keys in both directions must allow the new types.
        for key in changed.constraints:
            constraints.check_key(changed, key)
        for reference in changed.references:
            parent = changed if reference.parent == changed.id else bench.catalog.by_id(reference.parent)
            constraints.check_reference(changed, parent, reference)
        for child, reference in bench.catalog.children_of(changed):
            if child.id != changed.id:
                constraints.check_reference(child, changed, reference)
        _rebuild(bench, relation, changed, values)

    return run


def _rebuild(bench: Workbench, old: Relation, new: Relation, values: Mapping[str, str]) -> None:
    """Rebuild the table as `new` and copy the rows; `values` has the SQLite text of changed columns. Raises HanaError
    301 if the rows violate a new key."""
    connection, passing = bench.connection, '"owl rebuilt"'
    indexes = connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = ? AND name LIKE '#%'",
        (old.table_key,),
    ).fetchall()
    known = {column.name for column in old.columns}
    carried = [column for column in new.writable_columns if column.name in values or column.name in known]
    hidden = [SESSION_COLUMN] if new.is_shared_by_sessions else [row_ids.COLUMN] if new.next_row_id else []
    targets = [quoted(column.name) for column in carried] + hidden
    sources = [values.get(column.name, quoted(column.name)) for column in carried] + hidden
    sequence = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (old.table_key,)).fetchone()
    connection.execute(sqlite_table(new, passing, constraints.formulas(bench, new)))
    connection.execute(
        f"INSERT INTO {passing} ({', '.join(targets)}) SELECT {', '.join(sources)} FROM {old.sqlite_name}"
    )
    connection.execute(f"DROP TABLE {old.sqlite_name}")
    connection.execute(f"ALTER TABLE {passing} RENAME TO {old.sqlite_name}")
    if sequence is not None:
        begin_identity(connection, new, sequence[0] + 1)
    catalogue.write_structure(connection, new)
    constraints.create_keys(connection, new)
    bench.refresh()
    kept = {f"#{table_key(index.schema, index.name)}" for index in bench.catalog.indexes_of(new)}
    for name, text in indexes:
        if name in kept:
            connection.execute(text)


# --- renaming ---------------------------------------------------------------------------------------------------------


@PARSERS("RENAME", "TABLE")
def _rename_table(reader: TokenReader) -> Definition:
    old = reader.name()
    reader.expect("TO")
    new = reader.name()

    def run(bench: Workbench) -> None:
        relation = bench.table(old)
        refuse_taken(bench, relation.schema, new.name)
        if relation.temporary is not None or new.name.startswith("#"):
            raise not_supported("RENAME TABLE of a temporary table")
        target = quoted_table(relation.schema, new.name)
        with constraints.lifted(bench, relation):
            bench.connection.execute(f"ALTER TABLE {relation.sqlite_name} RENAME TO {target}")
            bench.connection.execute("UPDATE owl_relations SET name = ? WHERE id = ?", (new.name, relation.id))

    return run


@PARSERS("RENAME", "COLUMN")
def _rename_column(reader: TokenReader) -> Definition:
    parts = reader.dotted()
    if len(parts) not in (2, 3):
        raise reader.error("table.column")
    reader.expect("TO")
    new = reader.identifier()

    def run(bench: Workbench) -> None:
        relation = bench.table(Name(parts[0] if len(parts) == 3 else "", parts[-2]))
        old = relation.column(parts[-1]).name
        encode(new)
        if any(column.name == new for column in relation.columns):
            raise HanaError(308, f"column name already exists: {new}")
        with constraints.lifted(bench, relation):
            connection, values = bench.connection, (new, relation.id, old)
            connection.execute(f"ALTER TABLE {relation.sqlite_name} RENAME COLUMN {quoted(old)} TO {quoted(new)}")
            connection.execute("UPDATE owl_columns SET name = ? WHERE relation = ? AND name = ?", values)
            for table in ("owl_constraints", "owl_indexes", "owl_references"):
                connection.execute(f"UPDATE {table} SET column_name = ? WHERE relation = ? AND column_name = ?", values)
            text = "UPDATE owl_references SET parent_column = ? WHERE parent = ? AND parent_column = ?"
            connection.execute(text, values)
            for check in relation.checks:
                text = "UPDATE owl_checks SET condition = ? WHERE relation = ? AND name = ?"
                connection.execute(text, (_renamed(check.condition, old, new), relation.id, check.name))
            for column in relation.columns:
                if column.formula is not None:
                    text = "UPDATE owl_columns SET formula = ? WHERE relation = ? AND name = ?"
                    connection.execute(text, (_renamed(column.formula, old, new), relation.id, column.name))

    return run


def _renamed(expression: str, old: str, new: str) -> str:
    """The expression with column `old` called `new`."""
    pieces, position = [], 0
    for token in dialect.tokenize(expression):
        if _name_of(token) == old:
            pieces += [expression[position : token.start], quoted_key(new)]
            position = token.end + 1
    return "".join([*pieces, expression[position:]])


def _name_of(token: Token) -> str:
    """The name that a token may represent; '' for a string or a number."""
    if token.token_type is TokenType.IDENTIFIER:
        return str(token.text)
    return "" if token.token_type in (TokenType.STRING, TokenType.NUMBER) else str(token.text).upper()
