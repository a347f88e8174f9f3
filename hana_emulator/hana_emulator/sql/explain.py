"""EXPLAIN PLAN: the tables that a statement reads and writes, as rows for EXPLAIN_PLAN_TABLE.

Every search of the emulator is exact. The plan shows whether HANA would use an HNSW index, by its documented rules: the
index must match the function and direction of SELECT TOP k ... ORDER BY function(column, vector) on one table, and no
hint may forbid it. WHERE is allowed, although HANA does not document whether it prevents use of the index.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from sqlglot import exp

from hana_emulator.errors import not_supported
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog import schema_objects
from hana_emulator.sql.catalog.catalog import Catalog, Relation, TableColumn
from hana_emulator.sql.catalog.schema_objects import GLOBAL, Temporary
from hana_emulator.sql.definition import tables
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.datatypes import nvarchar
from hana_emulator.sql.language.names import literal, quoted
from hana_emulator.sql.language.reader import is_word
from hana_emulator.sql.query.expressions import identifier, unwrapped
from hana_emulator.sql.query.writes import Step, step
from hana_emulator.types import BIGINT, DOUBLE, INTEGER, TIMESTAMP, HanaType

PLACE = ("SYS", "EXPLAIN_PLAN_TABLE")
_DISCLAIMER = "emulator: computed exactly; the plan shows what HANA would do"
_DESCENDING = {"COSINE_SIMILARITY": True, "L2DISTANCE": False}
_WRITES: dict[type[exp.Expr], str] = {
    exp.Insert: "INSERT",
    exp.Update: "UPDATE",
    exp.Delete: "DELETE",
    exp.Merge: "MERGE",
}
_NAME = nvarchar(256)
_COLUMNS: dict[str, HanaType] = {
    "STATEMENT_NAME": _NAME,
    "OPERATOR_NAME": nvarchar(32),
    "OPERATOR_DETAILS": nvarchar(5_000),
    "OPERATOR_PROPERTIES": nvarchar(5_000),
    "EXECUTION_ENGINE": nvarchar(7),
    "DATABASE_NAME": _NAME,
    "SCHEMA_NAME": _NAME,
    "TABLE_NAME": _NAME,
    "TABLE_TYPE": nvarchar(16),
    "TABLE_SIZE": DOUBLE,
    "OUTPUT_SIZE": DOUBLE,
    "SUBTREE_COST": DOUBLE,
    "OPERATOR_ID": INTEGER,
    "PARENT_OPERATOR_ID": INTEGER,
    "LEVEL": INTEGER,
    "POSITION": INTEGER,
    "HOST": _NAME,
    "PORT": INTEGER,
    "TIMESTAMP": TIMESTAMP,
    "CONNECTION_ID": BIGINT,
}


def create_storage(connection: sqlite3.Connection, catalog: Catalog) -> None:
    """Create EXPLAIN_PLAN_TABLE, a global temporary table of SYS with a public synonym. Call inside a transaction."""
    if catalog.find(*PLACE) is not None:
        return
    columns = tuple(TableColumn(name, kind) for name, kind in _COLUMNS.items())
    relation = Relation(0, *PLACE, columns, temporary=Temporary(GLOBAL, 0, PLACE[0]), store="ROW")
    connection.execute(tables.sqlite_table(relation, relation.sqlite_name, {}))
    catalogue.add_relation(connection, relation, None)
    schema_objects.add_synonym(connection, ("PUBLIC", PLACE[1]), PLACE, "SYS")


class _Operator(NamedTuple):
    """One row of a plan; `relation` is set if it reads or writes a table."""

    name: str
    details: str = ""
    properties: str = ""
    relation: Relation | None = None


def steps(catalog: Catalog, schema: str, sql: str, name: str | None) -> list[Step]:
    """SQLite statements that write the plan of a prepared SELECT, INSERT, UPDATE, DELETE or MERGE."""
    tokens = dialect.tokenize(sql)
    if is_word(tokens[0], "UPSERT") or is_word(tokens[0], "REPLACE"):
        raise not_supported("EXPLAIN PLAN of UPSERT")
    tree = dialect.parse(dialect.number_parameters(sql, tokens))
    operators = [_Operator("PROJECT")]
    written = None
    if type(tree) in _WRITES:
        written = tree.this.this if isinstance(tree.this, exp.Schema) else tree.this
        target = catalog.meant(identifier(written.args.get("db")), schema, identifier(written.this))
        operators = [_Operator(_WRITES[type(tree)], relation=target)]
    operators += _reads(catalog, schema, tree, dialect.hints(tokens), written)
    place = catalog.relation(*PLACE)
    return [step(_insert(place, name, number, operator)) for number, operator in enumerate(operators, 1)]


def _reads(
    catalog: Catalog, schema: str, tree: exp.Expr, hints: frozenset[str], written: exp.Expr | None = None
) -> Iterator[_Operator]:
    """One operator for each table or view that the tree reads; a view is followed by the tables behind it."""
    common = {identifier(entry.args["alias"].this) for entry in tree.find_all(exp.CTE)}
    for table in tree.find_all(exp.Table, bfs=False):
        name, given = identifier(table.this), identifier(table.args.get("db"))
        if table is written or (name in common and not given):
            continue
        relation = catalog.meant(given, schema, name)
        if relation is None:
            yield _Operator("ROW SEARCH", name)
        elif relation.is_view:
            yield _Operator("VIEW", relation=relation)
            yield from _reads(catalog, relation.definition_schema, dialect.parse(relation.definition or ""), hints)
        else:
            select = table.parent.parent if isinstance(table.parent, exp.From) else None
            found = _vector_search(catalog, select, relation, hints) if isinstance(select, exp.Select) else None
            yield found or _Operator("COLUMN TABLE", relation=relation)


def _vector_search(catalog: Catalog, select: exp.Select, relation: Relation, hints: frozenset[str]) -> _Operator | None:
    """Describe HANA's plan of a vector search: an index, or exact with the reasons. None for any other SELECT."""
    order = select.args.get("order")
    if order is None or select.args.get("joins"):
        return None
    call = _sort_key(select)
    if not isinstance(call, exp.Anonymous) or str(call.this).upper() not in _DESCENDING or len(call.expressions) != 2:
        return None
    function, operands = str(call.this).upper(), [unwrapped(operand) for operand in call.expressions]
    names = [identifier(operand.this) for operand in operands if isinstance(operand, exp.Column)]
    constant = not any(one.find(exp.Column) for one in operands if not isinstance(one, exp.Column))
    if len(names) != 1 or not constant or all(column.name != names[0] for column in relation.columns):
        return None
    indexes = [one for one in catalog.indexes_of(relation) if one.similarity and one.columns == (names[0],)]
    fitting = [index for index in indexes if index.similarity == function]
    descending = bool(order.expressions[0].args.get("desc"))
    built_for = indexes[0].similarity if indexes else ""
    known = {
        "there is neither TOP nor LIMIT": select.args.get("limit") is None,
        "there are further sort keys": len(order.expressions) > 1,
        "rows are grouped": any(select.args.get(part) is not None for part in ("group", "having", "distinct")),
        "the hint NO_VECTOR_INDEX forbids an index": "NO_VECTOR_INDEX" in hints,
        f"{function} is sorted {'descending' if descending else 'ascending'}": descending != _DESCENDING[function],
        f"{names[0]} has no HNSW index": not indexes,
        f"the HNSW index of {names[0]} is for {built_for}": bool(indexes and not fitting),
    }
    reasons = [reason for reason, holds in known.items() if holds]
    search = f"{function} on {names[0]}"
    if reasons:
        details = f"{search}: exact search, since {', '.join(reasons)}"
        return _Operator("COLUMN TABLE", details, "EXACT VECTOR SEARCH", relation)
    index = f"{fitting[0].schema}.{fitting[0].name}"
    return _Operator("HNSW INDEX SEARCH", f"{search}: HNSW index {index}", f"VECTOR INDEX: {index}", relation)


def _sort_key(select: exp.Select) -> exp.Expr:
    """The first sort key, given directly or by alias or position."""
    key = unwrapped(select.args["order"].expressions[0].this)
    if isinstance(key, exp.Literal) and not key.is_string and 1 <= int(key.this) <= len(select.expressions):
        key = select.expressions[int(key.this) - 1]
    elif isinstance(key, exp.Column):
        name = identifier(key.this)
        named = [e for e in select.expressions if isinstance(e, exp.Alias) and identifier(e.args["alias"]) == name]
        key = named[0] if named else key
    return unwrapped(key.this if isinstance(key, exp.Alias) else key)


def _insert(target: Relation, name: str | None, number: int, operator: _Operator) -> str:
    relation = operator.relation

    def text(value: str | None) -> str:
        return literal(value) if value else "NULL"

    size = f"(SELECT CAST(COUNT(*) AS REAL) FROM {relation.sqlite_name})" if relation and not relation.is_view else ""
    values = {
        "STATEMENT_NAME": text(name),
        "OPERATOR_NAME": literal(operator.name),
        "OPERATOR_DETAILS": literal("; ".join(filter(None, (operator.details, _DISCLAIMER)))),
        "OPERATOR_PROPERTIES": text(operator.properties),
        "EXECUTION_ENGINE": literal("ROW" if operator.name == "ROW SEARCH" else "HEX"),
        "DATABASE_NAME": "'EMULATOR'",
        "SCHEMA_NAME": text(relation.schema if relation else None),
        "TABLE_NAME": text(relation.name if relation else None),
        "TABLE_TYPE": text(("VIEW" if relation.is_view else "COLUMN TABLE") if relation else None),
        "TABLE_SIZE": size or "NULL",
        "OPERATOR_ID": str(number),
        "PARENT_OPERATOR_ID": "1" if number > 1 else "NULL",
        "LEVEL": "2" if number > 1 else "1",
        "POSITION": str(max(number - 1, 1)),
        "HOST": "'localhost'",
        "TIMESTAMP": "hana_current_timestamp()",
        "CONNECTION_ID": "hana_current_connection()",
    }
    names = ", ".join(quoted(column) for column in values)
    return f"INSERT INTO {target.sqlite_name} ({names}) VALUES ({', '.join(values.values())})"
