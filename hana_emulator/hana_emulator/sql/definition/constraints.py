"""Keys, foreign keys and checks as unique indexes and triggers in SQLite, created from the catalogue.

SQLite's own constraints cannot be added or dropped, and their errors do not identify the constraint. Actions run row by
row, and RESTRICT checks the rows present at that moment. Self-referencing foreign keys are checked after the statement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from sqlglot import exp

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.sql.catalog.catalog import Constraint, Relation, TableColumn
from hana_emulator.sql.catalog.schema_objects import SESSION_COLUMN, Check, Reference
from hana_emulator.sql.definition.workbench import Workbench
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.datatypes import is_text
from hana_emulator.sql.language.names import encode, hana_identifier, literal, quoted
from hana_emulator.sql.query import expressions
from hana_emulator.sql.query.scope import Scope, Source, SourceColumn
from hana_emulator.sql.query.writes import default_of, stored
from hana_emulator.sql.storage.changes import ENFORCING_FUNCTION, POSTPONE_FUNCTION
from hana_emulator.sql.storage.failures import ERROR_MARK
from hana_emulator.types import INTEGERS, LOBS, VECTORS

_TRIGGERS, _KEYS, _HELPING = "owl trigger ", "owl key ", "owl helping "


# --- checks of definitions --------------------------------------------------------------------------------------------


def check_key(relation: Relation, constraint: Constraint) -> None:
    """Raise HanaError 260 or 264 for columns that cannot be part of a key."""
    for name in constraint.columns:
        if relation.column(name).type.code in LOBS | VECTORS:
            raise HanaError(264, f"invalid datatype: {name} cannot be part of a key")


def check_reference(relation: Relation, parent: Relation, reference: Reference) -> None:
    """Raise HanaError 260, 266, 365, 367 or 7 for an invalid foreign key."""
    if len(reference.columns) != len(reference.parent_columns):
        raise HanaError(
            367, f"number of referencing columns must match referenced columns: {hana_identifier(reference.name)}"
        )
    if relation.temporary or parent.temporary:
        raise not_supported("foreign keys of temporary tables")
    for own, other in zip(reference.columns, reference.parent_columns, strict=True):
        one, two = relation.column(own).type, parent.column(other).type
        if not (one.code is two.code or {one.code, two.code} <= INTEGERS or (is_text(one) and is_text(two))):
            raise HanaError(266, f"inconsistent datatype: {own} is {one.name}, {parent.name}.{other} is {two.name}")
    keys = [set(constraint.columns) for constraint in parent.constraints]
    if set(reference.parent_columns) not in keys:
        columns = ", ".join(reference.parent_columns)
        raise HanaError(365, f"no matching unique or primary key for this column list: {parent.name} ({columns})")


def check_condition(bench: Workbench, relation: Relation, check: Check) -> str:
    """The SQLite condition for a row named NEW. Raises HanaError 257 or 260, 7 for a subquery or a sequence."""
    tree = dialect.parse_condition(check.condition)
    if tree.find(exp.Query) is not None or expressions.mentions_sequence(tree):
        raise not_supported("a subquery or a sequence in a CHECK constraint")
    scope = _row(relation, "NEW")
    text = expressions.condition(bench.binding(), scope, tree)
    if scope.aggregates:
        raise syntax_error("an aggregate function is not allowed in a CHECK constraint")
    return text


def _row(relation: Relation, alias: str) -> Scope:
    columns = tuple(SourceColumn(column, quoted(column.name)) for column in relation.result_columns())
    return Scope(sources=[Source(alias, relation.name, relation.schema, columns)])


def formulas(bench: Workbench, relation: Relation) -> dict[str, str]:
    """The SQLite expressions of the generated columns, by name. Raises HanaError 257, 260, 266; 7 for a subquery, a
    sequence, and, when SQLite reads them, a function whose result changes."""
    return {column.name: _formula(bench, relation, column) for column in relation.columns if column.formula is not None}


def _formula(bench: Workbench, relation: Relation, column: TableColumn) -> str:
    tree = dialect.parse_condition(column.formula or "")
    if tree.find(exp.Query) is not None or expressions.mentions_sequence(tree):
        raise not_supported("a subquery or a sequence in a generated column")
    scope = _row(replace(relation, columns=tuple(relation.writable_columns)), "")
    bound = expressions.bind(bench.binding(), scope, tree, column.type)
    if scope.aggregates or tree.find(exp.Window, exp.Placeholder) is not None:
        raise syntax_error("an aggregate, a window or a parameter is not allowed in a generated column")
    return stored(bound, column)


# --- keys -------------------------------------------------------------------------------------------------------------


def create_keys(connection: sqlite3.Connection, relation: Relation, sqlite_name: str = "") -> None:
    """Create a unique index for each key except that of the identity column, which is SQLite's rowid. Raises
    sqlite3.IntegrityError for duplicate rows."""
    identity = tuple(column.name for column in relation.columns if column.is_rowid)
    for constraint in relation.constraints:
        if constraint.columns == identity:
            continue
        columns = ", ".join(key_columns(relation, constraint.columns))
        name = _name(_KEYS, relation, constraint.name)
        connection.execute(f"CREATE UNIQUE INDEX {name} ON {sqlite_name or relation.sqlite_name} ({columns})")


def key_columns(relation: Relation, columns: Sequence[str]) -> list[str]:
    """The SQLite columns of a key; in a global temporary table they include the session."""
    names = [quoted(name) for name in columns]
    return [SESSION_COLUMN, *names] if relation.is_shared_by_sessions else names


def _name(kind: str, relation: Relation, name: str, more: str = "") -> str:
    return '"' + f"{kind}{relation.id} {encode(name)}{more}".replace('"', '""') + '"'


# --- triggers ---------------------------------------------------------------------------------------------------------


@contextmanager
def lifted(bench: Workbench, *changing: Relation) -> Iterator[None]:
    """Suspend foreign keys and checks of the tables `changing`, and foreign keys that refer to these tables;
    restore all from the catalogue afterwards."""
    numbers = {relation.id for relation in changing}
    numbers |= {child.id for relation in changing for child, _ in bench.catalog.children_of(relation)}
    for number in numbers:
        for kind, prefix in (("trigger", _TRIGGERS), ("index", _HELPING)):
            text = "SELECT name FROM sqlite_schema WHERE type = ? AND name LIKE ?"
            for (name,) in bench.connection.execute(text, (kind, f"{prefix}{number} %")).fetchall():
                bench.connection.execute(f"DROP {kind} " + '"' + name.replace('"', '""') + '"')
    yield
    bench.refresh()
    for relation in bench.catalog.relations.values():
        if relation.id in numbers:
            impose(bench, relation)


def impose(bench: Workbench, relation: Relation) -> None:
    """Create the triggers for the checks and foreign keys of `relation`."""
    for check in relation.checks:
        failed = f"NOT ({check_condition(bench, relation, check)})"
        body = _refusal(677, f"check constraint violation: {hana_identifier(check.name)} of {_shown(relation)}")
        for event in ("INSERT", "UPDATE"):
            trigger = _name(_TRIGGERS, relation, check.name, f" {event}")
            bench.connection.execute(_trigger(trigger, event, relation, failed, body))
    for reference in relation.references:
        for text in _reference_triggers(bench, relation, bench.catalog.by_id(reference.parent), reference):
            bench.connection.execute(text)


def _trigger(name: str, event: str, relation: Relation, when: str, body: str) -> str:
    """The CREATE TRIGGER statement. The trigger is inactive while a parked transaction's rows are restored."""
    when = f"WHEN {ENFORCING_FUNCTION}() AND ({when})"
    return f"CREATE TRIGGER {name} AFTER {event} ON {relation.sqlite_name} {when} BEGIN {body}; END"


def _refusal(code: int, message: str) -> str:
    return f"SELECT RAISE(ABORT, {literal(f'{ERROR_MARK}{code}:{message}')})"


def _postponed(child: Relation, own: Sequence[str], keys: Sequence[str], row: str, message: str) -> str:
    """SQL that postpones a check to the end of the statement: no row with the key of `row` may lack a parent row."""
    having = " AND ".join(f"c.{column} = ?{place}" for place, column in enumerate(own, 1))
    there = " AND ".join(f"p.{key} = ?{place}" for place, key in enumerate(keys, 1))
    table = child.sqlite_name
    query = f"SELECT 1 FROM {table} AS c WHERE {having} AND NOT EXISTS (SELECT 1 FROM {table} AS p WHERE {there})"
    values = ", ".join(f"{row}.{column}" for column in (own if row == "NEW" else keys))
    return f"SELECT {POSTPONE_FUNCTION}({literal(query)}, {literal(message)}, {values})"


def _shown(relation: Relation) -> str:
    return f"{hana_identifier(relation.schema)}.{hana_identifier(relation.name)}"


def _reference_triggers(bench: Workbench, child: Relation, parent: Relation, reference: Reference) -> Iterator[str]:
    label = hana_identifier(reference.name)
    own, keys = [quoted(name) for name in reference.columns], [quoted(name) for name in reference.parent_columns]

    def refusal(code: int, message: str, row: str) -> str:
        if child.id == parent.id:
            return _postponed(child, own, keys, row, f"{ERROR_MARK}{code}:{message}")
        return _refusal(code, message)

    orphan = refusal(
        461, f"foreign key constraint violation: {label} of {_shown(child)}, no such key in {_shown(parent)}", "NEW"
    )
    used = refusal(
        462,
        f"failed on update or delete by foreign key constraint violation: {label} of {_shown(child)} refers to the"
        f" row of {_shown(parent)}",
        "OLD",
    )
    yield f"CREATE INDEX {_name(_HELPING, child, reference.name)} ON {child.sqlite_name} ({', '.join(own)})"

    def name(event: str) -> str:
        return _name(_TRIGGERS, child, reference.name, f" {event}")

    missing = _missing(parent, keys, own)
    yield _trigger(name("insert"), "INSERT", child, missing, orphan)
    yield _trigger(name("update"), f"UPDATE OF {', '.join(own)}", child, missing, orphan)
    children = " AND ".join(f"{one} = OLD.{two}" for one, two in zip(own, keys, strict=True))
    exists = f"EXISTS (SELECT 1 FROM {child.sqlite_name} WHERE {children})"
    actions = {
        "RESTRICT": used,
        "SET NULL": _update(child, [f"{column} = NULL" for column in own], children),
        "SET DEFAULT": _update(
            child,
            [
                f"{column} = {default_of(bench.binding(), child.column(name)) or 'NULL'}"
                for column, name in zip(own, reference.columns, strict=True)
            ],
            children,
        ),
    }
    delete = actions.get(reference.on_delete, f"DELETE FROM {child.sqlite_name} WHERE {children}")
    yield _trigger(name("parent delete"), "DELETE", parent, exists, delete)
    followed = _update(child, [f"{one} = NEW.{two}" for one, two in zip(own, keys, strict=True)], children)
    update = actions.get(reference.on_update, followed)
    changed = " OR ".join(f"OLD.{key} IS NOT NEW.{key}" for key in keys)
    event = f"UPDATE OF {', '.join(keys)}"
    yield _trigger(name("parent update"), event, parent, f"({changed}) AND {exists}", update)


def _missing(parent: Relation, keys: Sequence[str], own: Sequence[str], row: str = "NEW") -> str:
    """A condition that is true if the key is missing from the parent; a key with NULL is never missing."""
    whole = " AND ".join(f"{row}.{column} IS NOT NULL" for column in own)
    same = " AND ".join(f"p.{key} = {row}.{column}" for key, column in zip(keys, own, strict=True))
    return f"{whole} AND NOT EXISTS (SELECT 1 FROM {parent.sqlite_name} AS p WHERE {same})"


def _update(child: Relation, changes: Sequence[str], condition: str) -> str:
    return f"UPDATE {child.sqlite_name} SET {', '.join([*changes, *child.row_id_renewal])} WHERE {condition}"


# --- existing rows ----------------------------------------------------------------------------------------------------


def check_rows(bench: Workbench, relation: Relation, references: Sequence[Reference], checks: Sequence[Check]) -> None:
    """Check existing rows against new constraints. Raises HanaError 461 or 677."""
    for reference in references:
        parent = bench.catalog.by_id(reference.parent)
        own, keys = [quoted(name) for name in reference.columns], [quoted(name) for name in reference.parent_columns]
        if _any_row(bench, relation, _missing(parent, keys, own)):
            raise HanaError(461, f"foreign key constraint violation: {hana_identifier(reference.name)} (rows break it)")
    for check in checks:
        if _any_row(bench, relation, f"NOT ({check_condition(bench, relation, check)})"):
            raise HanaError(677, f"check constraint violation: {hana_identifier(check.name)} (rows break it)")


def _any_row(bench: Workbench, relation: Relation, condition: str) -> bool:
    text = f"SELECT EXISTS (SELECT 1 FROM {relation.sqlite_name} AS NEW WHERE {condition})"
    return bool(bench.connection.execute(text).fetchone()[0])


def refuse_used_rows(bench: Workbench, relation: Relation) -> None:
    """Raise HanaError 462 if rows of another table refer to this one; use before deleting all rows."""
    for child, reference in bench.catalog.children_of(relation):
        whole = " AND ".join(f"{quoted(column)} IS NOT NULL" for column in reference.columns)
        if child.id != relation.id and _any_row(bench, child, whole):
            raise HanaError(
                462,
                "failed on update or delete by foreign key constraint violation:"
                f" {hana_identifier(reference.name)} of {_shown(child)}",
            )
