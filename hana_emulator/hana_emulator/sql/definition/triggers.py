"""Parse CREATE and DROP TRIGGER, and compile row triggers to SQLite; they run on a `Workbench`.

Source: SAP HANA Cloud SQL Reference Guide, CREATE TRIGGER; error codes from SAP's list of SQL error codes (445, 446,
451, 465). Statements that would fire a trigger with an invalid body fail.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sqlglot import exp

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.sql.catalog import schema_objects
from hana_emulator.sql.catalog.catalog import Relation
from hana_emulator.sql.catalog.rights import Touch
from hana_emulator.sql.catalog.schema_objects import Trigger
from hana_emulator.sql.definition import trigger_bodies
from hana_emulator.sql.definition.workbench import Definition, Workbench
from hana_emulator.sql.language.names import encode, hana_identifier, literal, quoted
from hana_emulator.sql.language.reader import Name, Parsers, TokenReader
from hana_emulator.sql.query import queries, writes
from hana_emulator.sql.query.scope import Binding, Scope, Source, SourceColumn
from hana_emulator.sql.query.writes import WritePlan
from hana_emulator.sql.storage.changes import ENFORCING_FUNCTION
from hana_emulator.sql.storage.failures import ERROR_MARK

_PREFIX = "owl fired "
_EVENTS = ("INSERT", "UPDATE", "DELETE")
_ABSENT = {"INSERT": "OLD", "DELETE": "NEW"}  # The form of the row that an event lacks
_WRITERS: dict[type[exp.Expr], Callable[[Binding, exp.Expr], WritePlan]] = {
    exp.Insert: writes.bind_insert,  # type: ignore[dict-item]
    exp.Update: writes.bind_update,  # type: ignore[dict-item]
    exp.Delete: writes.bind_delete,  # type: ignore[dict-item]
}


# --- as written -------------------------------------------------------------------------------------------------------


def _create_trigger(replacing: bool, reader: TokenReader) -> Definition:
    name = reader.name()
    if reader.peek("INSTEAD", "OF"):
        raise not_supported("INSTEAD OF triggers")
    timing = "BEFORE" if reader.take("BEFORE") else "AFTER"
    if timing == "AFTER":
        reader.expect("AFTER")
    events: list[str] = []
    columns: list[str] = []
    while not events or reader.take("OR"):
        event = next((event for event in _EVENTS if reader.take(event)), None)
        if event is None or event in events:
            raise reader.error("INSERT, UPDATE or DELETE, each once")
        events.append(event)
        if event == "UPDATE" and reader.take("OF"):
            columns = reader.several(reader.identifier)
    reader.expect("ON")
    table = reader.name()
    rows = _referencing(reader)
    for event in events:
        if _ABSENT.get(event) in rows:
            raise not_supported(f"REFERENCING {_ABSENT[event]} in a trigger for {event}, which has no such row")
    if reader.take("FOR", "EACH"):
        if reader.peek("STATEMENT"):
            raise not_supported("triggers FOR EACH STATEMENT")
        reader.expect("ROW")
    if reader.peek("ORDER"):
        raise not_supported("ORDER of triggers")
    body = _body(reader)
    trigger_bodies.statements(body, rows.values())
    draft = Trigger(
        id=0,
        schema="",
        name=name.name,
        relation=0,
        timing=timing,
        events=tuple(events),
        columns=tuple(columns),
        new_row=rows.get("NEW", ""),
        old_row=rows.get("OLD", ""),
        body=body,
        definition=reader.sql.strip(),
        definition_schema="",
        owner="",
    )
    return lambda bench: _create(bench, name, table, draft, replacing=replacing)


def _referencing(reader: TokenReader) -> dict[str, str]:
    rows: dict[str, str] = {}
    if not reader.take("REFERENCING"):
        return rows
    while True:
        form = "NEW" if reader.take("NEW") else "OLD"
        if form == "OLD":
            reader.expect("OLD")
        if reader.peek("TABLE"):
            raise not_supported("transition tables (REFERENCING NEW TABLE, OLD TABLE)")
        reader.take("ROW")
        reader.take("AS")
        variable = reader.identifier()
        if form in rows or variable in rows.values():
            raise syntax_error(f"REFERENCING names {form} or {hana_identifier(variable)} twice")
        rows[form] = variable
        if not reader.take(","):
            return rows


def _body(reader: TokenReader) -> str:
    """Return the text between BEGIN and the final END."""
    reader.expect("BEGIN")
    reader.take("SEQUENTIAL", "EXECUTION")
    begin, end = reader.tokens[reader.index - 1], len(reader.tokens) - 1
    if end < reader.index:
        raise reader.error("statements and END")
    reader.index = end
    reader.expect("END")
    return reader.sql[begin.end + 1 : reader.tokens[end].start]


# --- CREATE, DROP -----------------------------------------------------------------------------------------------------


def _create(bench: Workbench, label: Name, table: Name, draft: Trigger, *, replacing: bool) -> None:
    schema, name = bench.place(label)
    encode(name)
    relation = bench.table(table)
    if relation.temporary is not None:
        raise not_supported("triggers of temporary tables")
    bench.touches.add(relation.touch("TRIGGER"))
    if (schema, name) in bench.catalog.objects.triggers:
        if not replacing:
            raise HanaError(446, f"cannot use duplicate trigger name: {hana_identifier(name)}")
        bench.connection.execute("DELETE FROM owl_triggers WHERE schema = ? AND name = ?", (schema, name))
    for column in draft.columns:
        relation.column(column)
    trigger = replace(draft, schema=schema, relation=relation.id, definition_schema=bench.schema, owner=bench.user)
    trigger = replace(trigger, id=schema_objects.put_trigger(bench.connection, trigger))
    statements, _, touches = _compile(bench, relation, trigger)
    bench.touches |= touches
    _fire(bench.connection, relation, trigger, statements)
    # SQLite compiles a trigger's body when it plans a statement that fires the trigger.
    column = quoted((*draft.columns, relation.columns[0].name)[0])
    firing = {
        "INSERT": f"EXPLAIN INSERT INTO {relation.sqlite_name} DEFAULT VALUES",
        "UPDATE": f"EXPLAIN UPDATE {relation.sqlite_name} SET {column} = {column}",
        "DELETE": f"EXPLAIN DELETE FROM {relation.sqlite_name}",
    }
    try:
        for event in trigger.events:
            bench.connection.execute(firing[event]).close()
    except sqlite3.OperationalError:
        raise not_supported("a statement of this form in the body of a trigger") from None
    _take_out(bench.connection)


PARSERS: Parsers[Definition] = Parsers()


@PARSERS("DROP", "TRIGGER")
def _drop_trigger(reader: TokenReader) -> Definition:
    name = reader.name()

    def run(bench: Workbench) -> None:
        schema, trigger = bench.place(name)
        text = "DELETE FROM owl_triggers WHERE schema = ? AND name = ?"
        if not bench.connection.execute(text, (schema, trigger)).rowcount:
            raise _unknown(trigger)

    return run


def _unknown(name: str) -> HanaError:
    return HanaError(445, f"invalid trigger name: {hana_identifier(name)}")


# --- in SQLite --------------------------------------------------------------------------------------------------------


def _compile(bench: Workbench, relation: Relation, trigger: Trigger) -> tuple[list[str], dict[int, bool], set[Touch]]:
    """Return a body's SQLite statements, the tables it writes (True if it inserts) and the privileges it needs. Raises
    HanaError 7, 257, 259, 260 ..., and 451 if the body writes the trigger's own table."""
    statements, written, touches = list[str](), dict[int, bool](), set[Touch]()
    rows = {"NEW": trigger.new_row, "OLD": trigger.old_row}
    sources = [_transition(relation, trigger, form, variable) for form, variable in rows.items() if variable]
    for tree in trigger_bodies.statements(trigger.body, [name for name in rows.values() if name]):
        binding = Binding(
            bench.catalog.seen_by(0),
            trigger.definition_schema,
            queries.bind_query,
            touches=touches,
            outer=Scope(sources=sources),
        )
        binder = _WRITERS.get(type(tree))
        if binder is None:
            raise syntax_error("INSERT, UPDATE or DELETE is expected in the body of a trigger")
        plan = binder(binding, tree)
        if plan.table.id == relation.id:
            raise HanaError(
                451, f"modification of subject table in trigger not allowed: {hana_identifier(plan.table.name)}"
            )
        if plan.table.temporary is not None:
            raise not_supported("writing a temporary table in a trigger")
        if plan.chosen_identity:
            raise not_supported("a chosen value for an identity column in a trigger")
        touches.add(plan.table.touch(plan.function.name))
        written[plan.table.id] = written.get(plan.table.id, False) or plan.inserts
        statements.extend(step.sql for step in plan.steps)
    return statements, written, touches


def _transition(relation: Relation, trigger: Trigger, form: str, variable: str) -> Source:
    """Return a transition variable's source. BEFORE INSERT it omits the identity column, which has no value yet."""
    nameless = trigger.timing == "BEFORE" and "INSERT" in trigger.events
    columns = tuple(
        SourceColumn(column, quoted(column.name))
        for column, declared in zip(relation.result_columns(), relation.columns, strict=True)
        if not (nameless and (declared.is_rowid or declared.formula))
    )
    return Source(form, trigger_bodies.row_name(variable), "", columns, qualified=True)


def _fire(connection: sqlite3.Connection, relation: Relation, trigger: Trigger, statements: list[str]) -> None:
    """Create the trigger in SQLite. It is inactive while a parked transaction's rows are restored."""
    body = "; ".join(statements)
    for event in trigger.events:
        name = _quoted_text(f"{_PREFIX}{trigger.id} {event}")
        only = f" OF {', '.join(map(quoted, trigger.columns))}" if event == "UPDATE" and trigger.columns else ""
        connection.execute(
            f"CREATE TRIGGER {name} {trigger.timing} {event}{only} ON {relation.sqlite_name}"
            f" WHEN {ENFORCING_FUNCTION}() BEGIN {body}; END"
        )


def _quoted_text(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def lift(bench: Workbench) -> None:
    """Remove all triggers from SQLite: definitions must not fire them, and they prevent SQLite from renaming."""
    if bench.catalog.objects.triggers:
        _take_out(bench.connection)


def _take_out(connection: sqlite3.Connection) -> None:
    found = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND substr(name, 1, ?) = ?", (len(_PREFIX), _PREFIX)
    )
    for (name,) in found.fetchall():
        connection.execute(f"DROP TRIGGER {_quoted_text(name)}")


def install(bench: Workbench) -> None:
    """Create the catalogue's triggers in SQLite. An invalid one rejects the statements that fire it."""
    if bench.connection.execute("SELECT 1 FROM owl_triggers LIMIT 1").fetchone() is None:
        return
    bench.refresh()
    for trigger in bench.catalog.objects.triggers.values():
        relation = bench.catalog.by_id(trigger.relation)
        try:
            for column in trigger.columns:
                relation.column(column)
            statements, written, _ = _compile(bench, relation, trigger)
        except HanaError as error:
            schema_objects.put_writes(bench.connection, trigger.id, {}, valid=False)
            text = f"Cannot execute trigger: {hana_identifier(trigger.schema)}.{hana_identifier(trigger.name)}"
            refusal = f"SELECT RAISE(ABORT, {literal(f'{ERROR_MARK}465:{text} ({error.text})')})"
            trigger, statements = replace(trigger, columns=()), [refusal]
        else:
            schema_objects.put_writes(bench.connection, trigger.id, written, valid=True)
        if trigger.enabled:
            _fire(bench.connection, relation, trigger, statements)


PARSERS |= {
    ("CREATE", "TRIGGER"): partial(_create_trigger, False),
    ("CREATE", "OR", "REPLACE", "TRIGGER"): partial(_create_trigger, True),
}
