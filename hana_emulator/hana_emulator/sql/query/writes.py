"""Convert INSERT, UPSERT, UPDATE, DELETE and MERGE from sqlglot trees to SQLite steps.

Parameters that go straight into a column are converted in Python; `owl_store` converts other values in SQLite.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sqlglot import exp

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.seam import FunctionCode, StorageRow
from hana_emulator.sql.catalog import row_ids
from hana_emulator.sql.catalog.catalog import Relation, TableColumn, writable
from hana_emulator.sql.catalog.schema_objects import SESSION_COLUMN
from hana_emulator.sql.functions.store import Convert, converter
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.datatypes import is_floating, is_text
from hana_emulator.sql.language.names import literal, quoted
from hana_emulator.sql.query import expressions, queries
from hana_emulator.sql.query.coercion import coerce
from hana_emulator.sql.query.expressions import identifier
from hana_emulator.sql.query.scope import Binding, Bound, Scope
from hana_emulator.types import DATETIMES, INTEGERS, VECTORS, TypeCode

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NUMBERED = re.compile(r"\?(\d+)")


@dataclass(frozen=True, slots=True)
class Step:
    """One SQLite statement and how many leading parameters of the row it takes."""

    sql: str
    parameters: int


def step(sql: str) -> Step:
    """A step for `sql`. SQLite requires exactly as many values as the largest `?k`."""
    return Step(sql, max((int(number) for number in _NUMBERED.findall(_QUOTED.sub("", sql))), default=0))


@dataclass(slots=True)
class WritePlan:
    """How to run a write for one row of parameters.

    `steps` run in order; the result is the sum of their row counts. `fallback` runs only if the steps touch no row.
    For MERGE, `collect` is read before the steps, and `insert_collected` then writes its rows.
    """

    function: FunctionCode
    table: Relation
    steps: list[Step]
    converters: dict[int, Convert] = field(default_factory=dict)
    fallback: Step | None = None
    collect: Step | None = None
    insert_collected: str = ""
    # True for INSERT ... VALUES: every parameter row gives exactly one row, so a batch can go in one call.
    one_row: bool = False
    # The quoted identity column, if it is SQLite's rowid and the statement gives inserted rows a value for it
    chosen_identity: str = ""

    @property
    def inserts(self) -> bool:
        return self.function is FunctionCode.INSERT or self.collect is not None

    def convert(self, rows: Sequence[StorageRow]) -> Sequence[StorageRow]:
        """Convert parameter rows to their columns' storage values. Raises HanaError 274, 303, 314, 339."""
        if not self.converters or not rows:
            return rows
        converters = [self.converters.get(number) for number in range(1, len(rows[0]) + 1)]
        columns = [
            list(column) if convert is None else list(map(convert, column))
            for convert, column in zip(converters, zip(*rows, strict=True), strict=True)
        ]
        return list(zip(*columns, strict=True))

    @property
    def numbers_rows(self) -> bool:
        """Whether SQLite's rowid is the table's identity."""
        return any(column.is_rowid for column in self.table.columns)


@dataclass(slots=True)
class _Target:
    binding: Binding
    relation: Relation
    converters: dict[int, Convert] = field(default_factory=dict)

    def value(self, scope: Scope, node: exp.Expr, column: TableColumn) -> str:
        number = dialect.parameter_number(node)
        if number in self.converters:  # the same parameter again: its value is already converted for the first column
            known = self.binding.parameters[number].type
            return stored(Bound(f"?{number}", known, parameter=number, constant=True), column)
        if number is not None:
            self.binding.parameter(number, column.type, column.name)
            self.converters[number] = converter(column.type, column.name)
            return f"?{number}"
        return stored(expressions.bind(self.binding, scope, node, column.type), column)


def default_of(binding: Binding, column: TableColumn) -> str | None:
    """The SQLite text of a column's default; None if it has none. Raises HanaError 336 for an invalid default."""
    if column.default is None:
        return None
    scope = Scope()
    tree = dialect.parse_condition(column.default)
    bound = expressions.bind(binding, scope, tree, column.type)
    if scope.aggregates or (expressions.mentions_sequence(tree) and not column.identity):
        raise HanaError(336, f"invalid default value: of {column.name}")
    return stored(bound, column)


def stored(bound: Bound, column: TableColumn) -> str:
    """The SQLite text of a value converted for `column`, with the checks that its type needs."""
    source, target = bound.type, column.type
    if source is None:
        return bound.sql
    moved = bound.sql if is_text(source) and not is_text(target) else coerce(bound, target).sql
    if not is_text(source) and source.code in DATETIMES and target.code in DATETIMES:
        return moved
    if source.code is target.code and _fits(bound, column):
        return moved
    return f"owl_store({moved}, {int(target.code)}, {target.length}, {target.scale}, {literal(column.name)})"


def _fits(bound: Bound, column: TableColumn) -> bool:
    source, target = bound.type, column.type
    assert source is not None
    if target.code is TypeCode.DECIMAL:
        return is_floating(target) or source == target
    if target.code in INTEGERS:
        return target.code is TypeCode.BIGINT or bound.column is not None
    if target.code in VECTORS:
        return target.length in (0, source.length)
    return target.length == 0 or (0 < source.length <= target.length and bound.column is not None)


def bind_insert(binding: Binding, node: exp.Insert) -> WritePlan:
    target, columns = _insert_target(binding, node)
    source = expressions.unwrapped(node.expression)
    one_row = isinstance(source, exp.Values)
    if one_row:
        if len(source.expressions) != 1:
            raise syntax_error("INSERT takes one row of VALUES")
        values = source.expressions[0]
        nodes = values.expressions if isinstance(values, exp.Tuple) else [values]
        _check_count(len(nodes), len(columns))
        scope = Scope(binding.outer)
        sqls = [target.value(scope, value, column) for value, column in zip(nodes, columns, strict=True)]
        if scope.aggregates:
            raise HanaError(275, "aggregate function not allowed in VALUES")
        form = "VALUES ({})"
    else:
        query = queries.bind_query(binding, source, binding.outer)
        _check_count(len(query.columns), len(columns))
        results = enumerate(zip(query.columns, columns, strict=True), 1)
        sqls = [stored(Bound(f"c{index}", result.type), column) for index, (result, column) in results]
        form = f"SELECT {{}} FROM ({query.sql.replace('{', '{{').replace('}', '}}')}) WHERE 1"
    names, defaults = _defaults(target, columns)
    names = [quoted(column.name) for column in columns] + names
    text = f"INSERT INTO {target.relation.sqlite_name} ({', '.join(names)}) {form.format(', '.join(sqls + defaults))}"
    return WritePlan(
        FunctionCode.INSERT,
        target.relation,
        [step(text)],
        target.converters,
        one_row=one_row,
        chosen_identity=_chosen_identity(columns),
    )


def _chosen_identity(columns: Sequence[TableColumn]) -> str:
    return next((quoted(column.name) for column in columns if column.is_rowid), "")


def _insert_target(binding: Binding, node: exp.Insert) -> tuple[_Target, list[TableColumn]]:
    schema = node.this
    table = schema.this if isinstance(schema, exp.Schema) else schema
    relation = written_table(binding, table)
    if isinstance(schema, exp.Schema):
        columns = [relation.column(identifier(name)) for name in schema.expressions]
    else:
        columns = relation.writable_columns
    if len({column.name for column in columns}) != len(columns):
        raise HanaError(264, "a column is named twice in INSERT")
    always = next((column for column in columns if column.identity == "ALWAYS"), None)
    if always is not None and isinstance(schema, exp.Schema):
        raise HanaError(396, f"{always.name} is GENERATED ALWAYS AS IDENTITY and takes no value")
    refuse_generated(columns)
    return _Target(binding, relation), columns


def refuse_generated(columns: Sequence[TableColumn]) -> None:
    """Raise HanaError 396 if a statement gives a value to a generated column."""
    for column in columns:
        if column.formula is not None:
            raise HanaError(396, f"{column.name} is GENERATED ALWAYS AS an expression and takes no value")


def written_table(binding: Binding, node: exp.Expr, *, deleting: bool = False) -> Relation:
    if not isinstance(node, exp.Table):
        raise syntax_error("a table name is expected")
    name, schema = identifier(node.this), identifier(node.args.get("db"))
    found = binding.catalog.meant(schema, binding.schema, name)
    if (found.schema if found is not None else schema) == "SYS" and not (found and deleting):
        raise HanaError(258, "insufficient privilege: SYS cannot be written")
    return writable(found or binding.catalog.relation(schema or binding.schema, name))


def _check_count(given: int, wanted: int) -> None:
    if given < wanted:
        raise HanaError(268, f"not enough values: {given} for {wanted} columns")
    if given > wanted:
        raise HanaError(269, f"too many values: {given} for {wanted} columns")


def _defaults(target: _Target, given: Sequence[TableColumn]) -> tuple[list[str], list[str]]:
    """Names and default values of the columns that the statement omits."""
    named = {column.name for column in given}
    found = [(c, default_of(target.binding, c)) for c in target.relation.columns if c.name not in named]
    kept = [(quoted(column.name), sql) for column, sql in found if sql is not None]
    return [name for name, _ in kept], [sql for _, sql in kept]


def bind_upsert(binding: Binding, node: exp.Insert, where: exp.Expr | None, by_key: bool) -> WritePlan:
    """Bind UPSERT: by primary key (WITH PRIMARY KEY or a query), by a condition, or as a plain INSERT."""
    plan = bind_insert(binding, node)
    if where is not None:
        return _upsert_where(binding, node, where, plan)
    if not by_key and plan.one_row:
        return plan
    _, columns = _insert_target(binding, node)
    relation, key = plan.table, plan.table.key
    if not key:
        raise HanaError(
            7, f"feature not supported: UPSERT WITH PRIMARY KEY into {relation.name}, which has no primary key"
        )
    names = [quoted(column.name) for column in columns if column.name not in key] or [quoted(key[0])]
    names += [row_ids.COLUMN] if relation.next_row_id else []
    changes = ", ".join(f"{name} = excluded.{name}" for name in names)
    unique = [SESSION_COLUMN] if relation.is_shared_by_sessions else []
    unique += [quoted(name) for name in key]
    plan.steps = [step(f"{plan.steps[0].sql} ON CONFLICT ({', '.join(unique)}) DO UPDATE SET {changes}")]
    return plan


def _upsert_where(binding: Binding, node: exp.Insert, where: exp.Expr, plan: WritePlan) -> WritePlan:
    values = expressions.unwrapped(node.expression)
    if not isinstance(values, exp.Values):
        raise syntax_error("UPSERT ... WHERE takes VALUES")
    target, columns = _insert_target(binding, node)
    scope = Scope()
    table = queries.add_table(binding, scope, target.relation, whole=True)
    pairs = zip(columns, values.expressions[0].expressions, strict=True)
    changed = [f"{quoted(column.name)} = {target.value(scope, value, column)}" for column, value in pairs]
    changes = ", ".join([*changed, *target.relation.row_id_renewal])
    condition = expressions.condition(binding, scope, where)
    update = f"UPDATE {table} SET {changes} WHERE {_own_rows(target, scope, condition)}"
    return replace(plan, steps=[step(update)], fallback=plan.steps[0], one_row=False)


def bind_update(binding: Binding, node: exp.Update) -> WritePlan:
    target, scope, table = _written(binding, node.this)
    sources = node.args.get("from_")
    joined = f" FROM {queries.bind_sources(binding, scope, node)}" if sources is not None else ""
    changes = _changes(target, scope, node.expressions)
    text = f"UPDATE {table} SET {changes}{joined}{_where(target, scope, node)}"
    return WritePlan(FunctionCode.UPDATE, target.relation, [step(text)], target.converters)


def _written(binding: Binding, node: exp.Expr, *, deleting: bool = False) -> tuple[_Target, Scope, str]:
    relation = written_table(binding, node, deleting=deleting)
    alias = node.args.get("alias")
    scope = Scope(binding.outer)
    name = identifier(alias.this) if alias is not None else ""
    table = queries.add_table(binding, scope, relation, name, whole=True)
    return _Target(binding, relation), scope, table


def _changes(target: _Target, scope: Scope, nodes: Sequence[exp.Expr]) -> str:
    changes = []
    if not nodes:
        raise syntax_error("SET takes column = value")
    for node in nodes:
        if not isinstance(node, exp.EQ) or not isinstance(node.this, exp.Column):
            raise syntax_error("SET takes column = value")
        column = target.relation.column(identifier(node.this.this))
        if column.identity == "ALWAYS":
            raise HanaError(396, f"{column.name} is GENERATED ALWAYS AS IDENTITY and takes no value")
        refuse_generated([column])
        changes.append(f"{quoted(column.name)} = {target.value(scope, node.expression, column)}")
    return ", ".join([*changes, *target.relation.row_id_renewal])


def _where(target: _Target, scope: Scope, node: exp.Expr) -> str:
    where = node.args.get("where")
    condition = expressions.condition(target.binding, scope, where.this) if where is not None else ""
    condition = _own_rows(target, scope, condition)
    return f" WHERE {condition}" if condition else ""


def _own_rows(target: _Target, scope: Scope, condition: str) -> str:
    """`condition`, limited to this session's rows if the target is a global temporary table."""
    if not target.relation.is_shared_by_sessions:
        return condition
    own = queries.own_rows(scope.sources[0].alias)
    return f"({condition}) AND {own}" if condition else own


def bind_delete(binding: Binding, node: exp.Delete) -> WritePlan:
    target, scope, table = _written(binding, node.this, deleting=True)
    text = f"DELETE FROM {table}{_where(target, scope, node)}"
    return WritePlan(FunctionCode.DELETE, target.relation, [step(text)])


# --- MERGE ------------------------------------------------------------------------------------------------------------


def bind_merge(binding: Binding, node: exp.Merge) -> WritePlan:
    """Bind MERGE INTO t USING s ON ... WHEN [NOT] MATCHED [AND ...] THEN UPDATE | DELETE | INSERT."""
    target, scope, table = _written(binding, node.this)
    relation, source = target.relation, queries.bind_source(binding, scope, node.args["using"])
    if source.startswith("("):  # a query or view, which SQLite might compute again for every row of the table
        query, _, alias = source.rpartition(" AS ")
        source = f"(WITH u AS MATERIALIZED {query} SELECT * FROM u) AS {alias}"
    on = _own_rows(target, scope, expressions.condition(binding, scope, node.args["on"]))
    plan = WritePlan(FunctionCode.UPDATE, relation, [], target.converters)

    def matching(branch: exp.Expr) -> str:
        extra = branch.args.get("condition")
        return f" AND {expressions.condition(binding, scope, extra)}" if extra is not None else ""

    for branch in node.args["whens"].expressions:
        action = branch.args["then"]
        if branch.args.get("matched"):
            if isinstance(action, exp.Update):
                changes = _changes(target, scope, action.expressions)
                text = f"UPDATE {table} SET {changes} FROM {source} WHERE {on}{matching(branch)}"
            elif str(action).upper() == "DELETE":
                text = f"DELETE FROM {table} WHERE EXISTS (SELECT 1 FROM {source} WHERE {on}{matching(branch)})"
            else:
                raise syntax_error("WHEN MATCHED takes UPDATE or DELETE")
            plan.steps.append(step(text))
            continue
        if not isinstance(action, exp.Insert) or plan.collect is not None:
            raise syntax_error("WHEN NOT MATCHED takes one INSERT")
        named = action.this.expressions if isinstance(action.this, exp.Tuple) else []
        labels = [identifier(name.this if isinstance(name, exp.Column) else name) for name in named]
        columns = [relation.column(label) for label in labels] or relation.writable_columns
        refuse_generated(columns)
        values = action.expression
        nodes = values.expressions if isinstance(values, exp.Tuple) else [values]
        _check_count(len(nodes), len(columns))
        sqls = [target.value(scope, value, column) for value, column in zip(nodes, columns, strict=True)]
        names, defaults = _defaults(target, columns)
        unmatched = f"NOT EXISTS (SELECT 1 FROM {table} WHERE {on}){matching(branch)}"
        plan.collect = step(f"SELECT {', '.join(sqls + defaults)} FROM {source} WHERE {unmatched}")
        plan.chosen_identity = _chosen_identity(columns)
        into = ", ".join([quoted(column.name) for column in columns] + names)
        holders = ", ".join("?" for _ in sqls + defaults)
        plan.insert_collected = f"INSERT INTO {relation.sqlite_name} ({into}) VALUES ({holders})"
    return plan
