"""EXPLAIN PLAN: the operators of a statement, as rows for EXPLAIN_PLAN_TABLE.

The emulator runs statements through SQLite and NumPy, and every search is exact. The plan shows what HANA would choose
by its documented rules; each row says so. Operators have HANA's names where these are known.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sqlglot import exp

from hana_emulator.errors import HanaError, not_supported
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog import schema_objects
from hana_emulator.sql.catalog.catalog import Catalog, Relation, TableColumn
from hana_emulator.sql.catalog.schema_objects import GLOBAL, Temporary
from hana_emulator.sql.definition import tables
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.datatypes import nvarchar
from hana_emulator.sql.language.names import literal, quoted
from hana_emulator.sql.language.reader import is_word
from hana_emulator.sql.query import vector_index
from hana_emulator.sql.query.expressions import identifier, unwrapped
from hana_emulator.sql.query.writes import Step, step
from hana_emulator.types import BIGINT, DOUBLE, INTEGER, TIMESTAMP, HanaType

PLACE = ("SYS", "EXPLAIN_PLAN_TABLE")
_DISCLAIMER = "emulator: computed exactly; the plan shows what HANA would do"
_LONGEST = 200
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
    """Create EXPLAIN_PLAN_TABLE, a global temporary table of SYS with a public synonym; inside a transaction."""
    if catalog.find(*PLACE) is not None:
        return
    columns = tuple(TableColumn(name, kind) for name, kind in _COLUMNS.items())
    relation = Relation(0, *PLACE, columns, temporary=Temporary(GLOBAL, 0, PLACE[0]), store="ROW")
    connection.execute(tables.sqlite_table(relation, relation.sqlite_name))
    catalogue.add_relation(connection, relation, None)
    schema_objects.add_synonym(connection, ("PUBLIC", PLACE[1]), PLACE, "SYS")


@dataclass(slots=True)
class _Operator:
    """One node of a plan; `relation` is set if it reads or writes a table."""

    name: str
    details: str = ""
    properties: str = ""
    engine: str = "HEX"
    relation: Relation | None = None
    inputs: list[_Operator] = field(default_factory=list)


def steps(catalog: Catalog, schema: str, sql: str, name: str | None) -> list[Step]:
    """SQLite statements that write the plan of a prepared SELECT, INSERT, UPDATE, DELETE or MERGE."""
    tokens = dialect.tokenize(sql)
    if is_word(tokens[0], "UPSERT") or is_word(tokens[0], "REPLACE"):
        raise not_supported("EXPLAIN PLAN of UPSERT")
    tree = dialect.parse(dialect.number_parameters(sql, tokens))
    planner = _Planner(catalog, schema, dialect.hints(tokens))
    root = planner.statement(tree)
    target = catalog.relation(*PLACE)
    return [step(_insert(target, name, row)) for row in _numbered(root)]


@dataclass(frozen=True, slots=True)
class _Row:
    """An operator and its place in the plan."""

    operator: _Operator
    number: int
    parent: int | None
    level: int
    position: int


def _numbered(root: _Operator) -> Iterator[_Row]:
    """Operators in depth-first order, each before its inputs."""
    pending: list[tuple[_Operator, int | None, int, int]] = [(root, None, 1, 1)]
    number = 0
    while pending:
        operator, parent, level, position = pending.pop(0)
        number += 1
        yield _Row(operator, number, parent, level, position)
        pending = [(child, number, level + 1, place) for place, child in enumerate(operator.inputs, 1)] + pending


def _insert(target: Relation, name: str | None, row: _Row) -> str:
    operator = row.operator
    relation = operator.relation

    def text(value: str | None) -> str:
        return literal(value) if value else "NULL"

    size = f"(SELECT CAST(COUNT(*) AS REAL) FROM {relation.sqlite_name})" if relation and not relation.is_view else ""
    values = {
        "STATEMENT_NAME": text(name),
        "OPERATOR_NAME": literal(operator.name),
        "OPERATOR_DETAILS": literal("; ".join(filter(None, (operator.details, _DISCLAIMER)))),
        "OPERATOR_PROPERTIES": text(operator.properties),
        "EXECUTION_ENGINE": literal(operator.engine),
        "DATABASE_NAME": "'EMULATOR'",
        "SCHEMA_NAME": text(relation.schema if relation else None),
        "TABLE_NAME": text(relation.name if relation else None),
        "TABLE_TYPE": text(("VIEW" if relation.is_view else "COLUMN TABLE") if relation else None),
        "TABLE_SIZE": size or "NULL",
        "OPERATOR_ID": str(row.number),
        "PARENT_OPERATOR_ID": str(row.parent) if row.parent is not None else "NULL",
        "LEVEL": str(row.level),
        "POSITION": str(row.position),
        "HOST": "'localhost'",
        "TIMESTAMP": "hana_current_timestamp()",
        "CONNECTION_ID": "hana_current_connection()",
    }
    names = ", ".join(quoted(column) for column in values)
    return f"INSERT INTO {target.sqlite_name} ({names}) VALUES ({', '.join(values.values())})"


# --- from the syntax tree to operators --------------------------------------------------------------------------------

_WRITES: dict[type[exp.Expr], str] = {
    exp.Insert: "INSERT",
    exp.Update: "UPDATE",
    exp.Delete: "DELETE",
    exp.Merge: "MERGE",
}
_SETS: dict[type[exp.Expr], str] = {exp.Union: "UNION", exp.Except: "EXCEPT", exp.Intersect: "INTERSECT"}


@dataclass(frozen=True, slots=True)
class _Planner:
    """Builds operators; `common` are the visible WITH entries."""

    catalog: Catalog
    schema: str
    hints: frozenset[str]
    common: tuple[tuple[str, exp.Expr], ...] = ()

    def statement(self, tree: exp.Expr) -> _Operator:
        tree = unwrapped(tree)
        if isinstance(tree, exp.Query):
            return self.query(tree)
        word = _WRITES.get(type(tree))
        if word is None:
            raise HanaError(327, "cannot explain plan of given statement")
        target = tree.this.this if isinstance(tree.this, exp.Schema) else tree.this
        written = self.source(target)
        operator = _Operator(word, relation=written.relation)
        source = tree.args.get("expression") or tree.args.get("using")
        if isinstance(source, exp.Query | exp.Table | exp.Subquery):
            operator.inputs.append(self.source(source))
        elif word in ("UPDATE", "DELETE"):
            where = tree.args.get("where")
            operator.inputs.append(_above("FILTER", written, _text(where.this) if where is not None else ""))
        return operator

    def query(self, tree: exp.Expr) -> _Operator:
        tree = unwrapped(tree)
        with_ = tree.args.get("with_")
        if with_ is not None:
            entries = tuple((identifier(entry.args["alias"].this), entry.this) for entry in with_.expressions)
            return replace(self, common=self.common + entries)._plain(tree)
        return self._plain(tree)

    def _plain(self, tree: exp.Expr) -> _Operator:
        if isinstance(tree, exp.Select):
            below = self.source(tree.args["from_"].this)
            use = vector_index.use(self.catalog, tree, below.relation, self.hints)
            if use is not None:
                below.details, below.properties = use.details, use.properties
                below.name = "HNSW INDEX SEARCH" if use.index is not None else below.name
            for join in tree.args.get("joins") or []:
                kind = str(join.args.get("side") or join.args.get("kind") or "INNER").upper()
                below = _Operator("JOIN", f"{kind} JOIN", inputs=[below, self.source(join.this)])
            where, group, having = (tree.args.get(part) for part in ("where", "group", "having"))
            below = _above("FILTER", below, _text(where.this) if where is not None else "")
            if group is not None:
                below = _above("AGGREGATION", below, ", ".join(_text(key) for key in group.expressions))
            below = _above("FILTER", below, _text(having.this) if having is not None else "")
            if tree.args.get("distinct") is not None:
                below = _Operator("DISTINCT", inputs=[below])
            listed = ", ".join(item.alias_or_name or _text(item) for item in tree.expressions)
            return _Operator("PROJECT", listed, inputs=[self._sorted(tree, below)])
        word = _SETS[type(tree)] + ("" if tree.args.get("distinct") else " ALL")
        sides = [self.query(tree.this), self.query(tree.args["expression"])]
        return self._sorted(tree, _Operator(word, inputs=sides))

    def _sorted(self, tree: exp.Expr, below: _Operator) -> _Operator:
        order, limit = tree.args.get("order"), tree.args.get("limit")
        if order is not None:
            below = _above("ORDER BY", below, ", ".join(_text(key) for key in order.expressions))
        if limit is not None:
            count = limit.args.get("expression") or limit.this
            below = _above("LIMIT", below, f"NUM RECORDS: {_text(count)}")
        return below

    def source(self, node: exp.Expr) -> _Operator:
        if not isinstance(node, exp.Table):
            return self.query(node.this if isinstance(node, exp.Subquery) else node)
        if not isinstance(node.this, exp.Identifier):
            return _Operator("TABLE FUNCTION", _text(node.this), engine="ROW")
        name, schema = identifier(node.this), identifier(node.args.get("db"))
        known = [entry for label, entry in self.common if label == name and not schema]
        if known:
            return self.query(known[-1])
        relation = self.catalog.meant(schema, self.schema, name)
        if relation is None:
            return _Operator("ROW SEARCH", name, engine="ROW")
        if relation.is_view:
            inner = replace(self, schema=relation.definition_schema, common=())
            return _Operator("VIEW", relation=relation, inputs=[inner.query(dialect.parse(relation.definition or ""))])
        return _Operator("COLUMN TABLE", relation=relation)


def _text(node: exp.Expr) -> str:
    """The node's text with parameters as written; vectors and long texts are shortened."""
    try:
        text = node.sql()
    except ValueError:
        text = type(node).__name__.upper()
    return re.sub(rf":{dialect.PARAMETER_PREFIX}\d+", "?", text)[:_LONGEST]


def _above(name: str, below: _Operator, details: str) -> _Operator:
    """`below` under an operator `name`, or `below` alone if the operator would do nothing."""
    return _Operator(name, details, inputs=[below]) if details else below
