"""Constraints, sequences, synonyms, triggers and temporary tables: rows in SQLite and their immutable form."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType

from hana_emulator.sql.language.names import quoted_key

LOCAL, GLOBAL = "LOCAL", "GLOBAL"
IDENTITY_SEQUENCE = "_SYS_SEQUENCE_"
# Column of a global temporary table for the session that owns the row; encoded names have no lower-case letters
SESSION_COLUMN = "owl_session"

# `owl_visible`: the tables and views that SYS views may show to a session, with the schema that the session uses
STORAGE = """
CREATE TABLE IF NOT EXISTS owl_references(
  relation INTEGER NOT NULL REFERENCES owl_relations(id) ON DELETE CASCADE, name TEXT NOT NULL,
  parent INTEGER NOT NULL REFERENCES owl_relations(id) ON DELETE CASCADE, position INTEGER NOT NULL,
  column_name TEXT NOT NULL, parent_column TEXT NOT NULL, on_delete TEXT NOT NULL, on_update TEXT NOT NULL,
  PRIMARY KEY(relation, name, position));
CREATE TABLE IF NOT EXISTS owl_checks(
  relation INTEGER NOT NULL REFERENCES owl_relations(id) ON DELETE CASCADE, name TEXT NOT NULL,
  condition TEXT NOT NULL, PRIMARY KEY(relation, name));
CREATE TABLE IF NOT EXISTS owl_temporary(
  relation INTEGER PRIMARY KEY REFERENCES owl_relations(id) ON DELETE CASCADE, scope TEXT NOT NULL,
  session INTEGER NOT NULL, schema TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS owl_sequences(
  id INTEGER PRIMARY KEY AUTOINCREMENT, schema TEXT NOT NULL, name TEXT NOT NULL, start INTEGER NOT NULL,
  increment INTEGER NOT NULL, minimum INTEGER NOT NULL, maximum INTEGER NOT NULL, cycles INTEGER NOT NULL,
  cache INTEGER NOT NULL, version INTEGER NOT NULL, created TEXT NOT NULL,
  UNIQUE(schema, name));
CREATE TABLE IF NOT EXISTS owl_synonyms(
  schema TEXT NOT NULL, name TEXT NOT NULL, object_schema TEXT NOT NULL, object_name TEXT NOT NULL,
  owner TEXT NOT NULL, created TEXT NOT NULL, PRIMARY KEY(schema, name));
CREATE TABLE IF NOT EXISTS owl_functions(
  schema TEXT NOT NULL, name TEXT NOT NULL, parameters TEXT NOT NULL, query TEXT NOT NULL, PRIMARY KEY(schema, name));
CREATE TABLE IF NOT EXISTS owl_invalid_views(
  relation INTEGER PRIMARY KEY REFERENCES owl_relations(id) ON DELETE CASCADE);
CREATE TABLE IF NOT EXISTS owl_triggers(
  id INTEGER PRIMARY KEY AUTOINCREMENT, schema TEXT NOT NULL, name TEXT NOT NULL,
  relation INTEGER NOT NULL REFERENCES owl_relations(id) ON DELETE CASCADE, timing TEXT NOT NULL, events TEXT NOT NULL,
  columns TEXT NOT NULL, new_row TEXT NOT NULL, old_row TEXT NOT NULL, body TEXT NOT NULL, definition TEXT NOT NULL,
  definition_schema TEXT NOT NULL, owner TEXT NOT NULL, enabled INTEGER NOT NULL DEFAULT 1,
  valid INTEGER NOT NULL DEFAULT 1, created TEXT NOT NULL, UNIQUE(schema, name));
CREATE TABLE IF NOT EXISTS owl_trigger_writes(
  trigger INTEGER NOT NULL REFERENCES owl_triggers(id) ON DELETE CASCADE, written INTEGER NOT NULL,
  inserts INTEGER NOT NULL);
DROP VIEW IF EXISTS owl_visible;
CREATE VIEW owl_visible AS
  SELECT r.id, COALESCE(t.schema, r.schema) AS schema, r.name, r.kind, r.store, r.comment, r.definition,
    r.definition_schema, r.created, t.scope AS temporary, t.session
  FROM owl_relations r LEFT JOIN owl_temporary t ON t.relation = r.id
  WHERE r.schema <> 'SYS' AND (t.session IS NULL OR t.session IN (0, hana_current_connection()));
"""


@dataclass(frozen=True, slots=True)
class Reference:
    """A foreign key: `columns` of its table refer to `parent_columns` of the table with id `parent`."""

    name: str
    columns: tuple[str, ...]
    parent: int
    parent_columns: tuple[str, ...]
    on_delete: str = "RESTRICT"
    on_update: str = "RESTRICT"


@dataclass(frozen=True, slots=True)
class Check:
    """A condition in HANA SQL that must not be false for any row."""

    name: str
    condition: str


@dataclass(frozen=True, slots=True)
class Temporary:
    """A table whose rows belong to a session: LOCAL to `session`, or GLOBAL with rows of each session (`session` 0)."""

    scope: str
    session: int
    schema: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence; a new `version` restarts it at `start`."""

    id: int
    schema: str
    name: str
    start: int = 1
    increment: int = 1
    minimum: int = 1
    maximum: int = 4611686018427387903
    cycles: bool = False
    cache: int = 0
    version: int = 1

    @property
    def is_of_identity(self) -> bool:
        """Whether it belongs to an identity column and goes with it."""
        return self.name.startswith(IDENTITY_SEQUENCE)

    @property
    def next_value(self) -> str:
        """HANA SQL for its next value."""
        return f"{quoted_key(self.schema)}.{quoted_key(self.name)}.NEXTVAL"


@dataclass(frozen=True, slots=True)
class Trigger:
    """A trigger as written. `events` are INSERT, UPDATE, DELETE; `columns` is the list after UPDATE OF; `new_row` and
    `old_row` are the names of the transition variables or ''. `body` is the text between BEGIN and END, resolved with
    `definition_schema` as current schema."""

    id: int
    schema: str
    name: str
    relation: int
    timing: str
    events: tuple[str, ...]
    columns: tuple[str, ...]
    new_row: str
    old_row: str
    body: str
    definition: str
    definition_schema: str
    owner: str
    enabled: bool = True
    # (id of a table that the body writes, whether the body inserts into it); set when the trigger is compiled
    writes: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class TableFunction:
    """A function that returns the rows of `query`, in which `:name` is a parameter."""

    parameters: tuple[str, ...]
    query: str


@dataclass(frozen=True, slots=True)
class SchemaObjects:
    """All objects of this module in one catalogue state; constraints and temporary tables by relation id."""

    references: Mapping[int, tuple[Reference, ...]] = field(default_factory=lambda: MappingProxyType({}))
    checks: Mapping[int, tuple[Check, ...]] = field(default_factory=lambda: MappingProxyType({}))
    temporary: Mapping[int, Temporary] = field(default_factory=lambda: MappingProxyType({}))
    sequences: Mapping[tuple[str, str], Sequence] = field(default_factory=lambda: MappingProxyType({}))
    synonyms: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    triggers: Mapping[tuple[str, str], Trigger] = field(default_factory=lambda: MappingProxyType({}))
    functions: Mapping[tuple[str, str], TableFunction] = field(default_factory=lambda: MappingProxyType({}))


def temporary_schema(session: int, schema: str) -> str:
    """The schema that stores a session's local temporary tables of `schema`; no HANA name has this prefix."""
    return f"#{session} {schema}"


def load(connection: sqlite3.Connection) -> SchemaObjects:
    checks: dict[int, tuple[Check, ...]] = {}
    for relation, name, condition in connection.execute(
        "SELECT relation, name, condition FROM owl_checks ORDER BY relation, name"
    ):
        checks[relation] = (*checks.get(relation, ()), Check(name, condition))
    references: dict[int, tuple[Reference, ...]] = {}
    columns = connection.execute(
        "SELECT relation, name, parent, on_delete, on_update, column_name, parent_column FROM owl_references"
        " ORDER BY relation, name, position"
    )
    for (relation, name, parent, *actions), rows in groupby(columns, itemgetter(0, 1, 2, 3, 4)):
        own, others = zip(*(row[5:] for row in rows), strict=True)
        references[relation] = (*references.get(relation, ()), Reference(name, own, parent, others, *actions))
    written: dict[int, tuple[tuple[int, bool], ...]] = {}
    for trigger, relation, inserts in connection.execute("SELECT trigger, written, inserts FROM owl_trigger_writes"):
        written[trigger] = (*written.get(trigger, ()), (relation, bool(inserts)))
    triggers: dict[tuple[str, str], Trigger] = {}
    for row in connection.execute(
        "SELECT id, schema, name, relation, timing, events, columns, new_row, old_row, body, definition,"
        " definition_schema, owner, enabled FROM owl_triggers ORDER BY id"
    ):
        lists = (tuple(row[5].split(",")), tuple(json.loads(row[6])))
        values = (*row[:5], *lists, *row[7:], written.get(row[0], ()))
        triggers[row[1:3]] = Trigger(*values)
    return SchemaObjects(
        references=MappingProxyType(references),
        checks=MappingProxyType(checks),
        temporary=MappingProxyType(
            {
                relation: Temporary(scope, session, schema)
                for relation, scope, session, schema in connection.execute(
                    "SELECT relation, scope, session, schema FROM owl_temporary"
                )
            }
        ),
        sequences=MappingProxyType(
            {
                row[1:3]: Sequence(*row)
                for row in connection.execute(
                    "SELECT id, schema, name, start, increment, minimum, maximum, cycles, cache, version"
                    " FROM owl_sequences"
                )
            }
        ),
        triggers=MappingProxyType(triggers),
        functions=MappingProxyType(
            {
                (schema, name): TableFunction(tuple(json.loads(parameters)), query)
                for schema, name, parameters, query in connection.execute(
                    "SELECT schema, name, parameters, query FROM owl_functions"
                )
            }
        ),
        synonyms=MappingProxyType(
            {
                (schema, name): (object_schema, object_name)
                for schema, name, object_schema, object_name in connection.execute(
                    "SELECT schema, name, object_schema, object_name FROM owl_synonyms"
                )
            }
        ),
    )


def put_trigger(connection: sqlite3.Connection, trigger: Trigger) -> int:
    """Write a new trigger; return its number."""
    cursor = connection.execute(
        "INSERT INTO owl_triggers(schema, name, relation, timing, events, columns, new_row, old_row, body, definition,"
        " definition_schema, owner, created)"
        " VALUES (?,?,?,?,?,?,?,?,?,?,?,?, strftime('%Y-%m-%d %H:%M:%f0000', 'now'))",
        (
            *(trigger.schema, trigger.name, trigger.relation, trigger.timing),
            *(",".join(trigger.events), json.dumps(trigger.columns), trigger.new_row, trigger.old_row),
            *(trigger.body, trigger.definition, trigger.definition_schema, trigger.owner),
        ),
    )
    return cursor.lastrowid or 0


def put_writes(connection: sqlite3.Connection, trigger: int, writes: Mapping[int, bool], *, valid: bool) -> None:
    """Record which tables a compiled trigger writes, and whether the trigger is valid."""
    connection.execute("UPDATE owl_triggers SET valid = ? WHERE id = ?", (valid, trigger))
    connection.execute("DELETE FROM owl_trigger_writes WHERE trigger = ?", (trigger,))
    connection.executemany(
        "INSERT INTO owl_trigger_writes VALUES (?,?,?)",
        [(trigger, relation, inserts) for relation, inserts in writes.items()],
    )


def add_reference(connection: sqlite3.Connection, relation: int, reference: Reference) -> None:
    connection.executemany(
        "INSERT INTO owl_references(relation, name, parent, position, column_name, parent_column, on_delete, on_update)"
        " VALUES (?,?,?,?,?,?,?,?)",
        [
            (relation, reference.name, reference.parent, position, *pair, reference.on_delete, reference.on_update)
            for position, pair in enumerate(zip(reference.columns, reference.parent_columns, strict=True), 1)
        ],
    )


def add_check(connection: sqlite3.Connection, relation: int, check: Check) -> None:
    connection.execute("INSERT INTO owl_checks VALUES (?,?,?)", (relation, check.name, check.condition))


def add_temporary(connection: sqlite3.Connection, relation: int, temporary: Temporary) -> None:
    values = (relation, temporary.scope, temporary.session, temporary.schema)
    connection.execute("INSERT INTO owl_temporary VALUES (?,?,?,?)", values)


def put_sequence(connection: sqlite3.Connection, sequence: Sequence) -> None:
    """Insert a sequence with id 0, or update an existing one."""
    values = (
        sequence.schema, sequence.name, sequence.start, sequence.increment, sequence.minimum, sequence.maximum,
        sequence.cycles, sequence.cache, sequence.version,
    )  # fmt: skip
    names = "schema, name, start, increment, minimum, maximum, cycles, cache, version"
    if sequence.id:
        changes = ", ".join(f"{name.strip()} = ?" for name in names.split(","))
        connection.execute(f"UPDATE owl_sequences SET {changes} WHERE id = ?", (*values, sequence.id))
    else:
        text = f"INSERT INTO owl_sequences({names}, created) VALUES (?,?,?,?,?,?,?,?,?,"
        connection.execute(f"{text} strftime('%Y-%m-%d %H:%M:%f0000', 'now'))", values)


def add_synonym(connection: sqlite3.Connection, place: tuple[str, str], target: tuple[str, str], owner: str) -> None:
    connection.execute(
        "INSERT INTO owl_synonyms VALUES (?,?,?,?,?, strftime('%Y-%m-%d %H:%M:%f0000', 'now'))",
        (*place, *target, owner),
    )


def add_function(connection: sqlite3.Connection, place: tuple[str, str], function: TableFunction) -> None:
    values = (*place, json.dumps(function.parameters), function.query)
    connection.execute("INSERT INTO owl_functions VALUES (?,?,?,?)", values)
