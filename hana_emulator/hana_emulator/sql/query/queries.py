"""Convert SELECT, set operations, FROM clauses, views and WITH from sqlglot trees to one typed SQLite query."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sqlglot import exp

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.sql.catalog import row_ids, system_views
from hana_emulator.sql.catalog.catalog import Relation
from hana_emulator.sql.catalog.schema_objects import SESSION_COLUMN
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.datatypes import unify
from hana_emulator.sql.language.names import MAX_IDENTIFIER, hana_identifier, quoted
from hana_emulator.sql.query import (
    aggregates,
    calls,  # noqa: F401 (registers function calls with `expressions`)
    expressions,
)
from hana_emulator.sql.query.coercion import coerce, refuse_lob, sort_key
from hana_emulator.sql.query.expressions import identifier
from hana_emulator.sql.query.scope import Binding, Bound, BoundQuery, CommonTable, Scope, Source, SourceColumn
from hana_emulator.types import BIGINT, DEFAULT_PARAMETER, INTEGER, Column

_MAX_VIEW_DEPTH = 16
_POSITION = re.compile("[0-9]{1,9}")
# Error codes for a table, column, sequence or schema that does not exist
_GONE = frozenset({259, 260, 313, 362})
# A comparison of a column with a parameter, without a conversion or collation
_ABOVE = re.compile(r'\((t\d+\."(?:[^"]|"")+") > (\?\d+)\)')
_EQUAL = re.compile(r'\((t\d+\."(?:[^"]|"")+") = (\?\d+)\)')
_LOWEST = "-9e999"  # below every number and text of SQLite
_CONDITIONS = (exp.Predicate, exp.Connector, exp.Not)
_SET_OPERATORS: dict[type[exp.Expr], str] = {exp.Union: "UNION", exp.Except: "EXCEPT", exp.Intersect: "INTERSECT"}


@dataclass(slots=True)
class SelectParts:
    scope: Scope
    items: list[Bound] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    with_: str = ""
    distinct: bool = False
    source: str = ""
    where: str = ""
    groups: list[str] = field(default_factory=list)
    having: str = ""
    order: list[str] = field(default_factory=list)
    limit: str = ""
    offset: str = ""

    def render(self) -> str:
        items = ", ".join(f"{item.sql} AS c{index}" for index, item in enumerate(self.items, 1))
        clauses = [
            f"{self.with_}SELECT {'DISTINCT ' if self.distinct else ''}{items} FROM {self.source}",
            f"WHERE {self.where}" if self.where else "",
            f"GROUP BY {', '.join(self.groups)}" if self.groups else "",
            f"HAVING {self.having}" if self.having else "",
            f"ORDER BY {', '.join(self.order)}" if self.order else "",
            limits(self.limit, self.offset),
        ]
        return " ".join(clause for clause in clauses if clause)


def limits(limit: str, offset: str) -> str:
    if not limit and not offset:
        return ""
    return f"LIMIT {limit or '-1'}" + (f" OFFSET {offset}" if offset else "")


def bind_query(binding: Binding, node: exp.Expr, parent: Scope | None) -> BoundQuery:
    """Bind a complete query. Raises HanaError 257, 259, 260, 266, 268, 276, 362."""
    node = expressions.unwrapped(node)
    if isinstance(node, exp.Select):
        parts = bind_select(binding, node, parent)
        return BoundQuery(parts.render(), tuple(parts.columns))
    if type(node) in _SET_OPERATORS:
        return _bind_set(binding, node, parent)
    raise not_supported(f"{type(node).__name__.upper()} as a query")


def bind_select(binding: Binding, node: exp.Select, parent: Scope | None) -> SelectParts:
    scope = Scope(parent)
    parts = SelectParts(scope, with_=_bind_with(binding, scope, node))
    if not node.expressions:
        raise syntax_error("SELECT needs at least one expression")
    if node.args.get("from_") is None:
        raise syntax_error("SELECT needs a FROM clause (FROM DUMMY where no table is read)")
    parts.source = bind_sources(binding, scope, node)
    if node.args.get("where") is not None:
        parts.where = expressions.condition(binding, scope, node.args["where"].this)
        if scope.aggregates:
            raise HanaError(275, "aggregate function not allowed in WHERE clause")
        parts.where = " AND ".join([parts.where, *_starts(scope, node.args["where"].this)])
    group = node.args.get("group")
    parts.groups = [_group_key(binding, scope, key) for key in group.expressions] if group is not None else []
    _bind_items(binding, node, parts)
    if node.args.get("having") is not None:
        parts.having = expressions.condition(binding, scope, node.args["having"].this)
    _bind_order(binding, node, parts)
    if scope.aggregates or parts.groups:
        # HANA rejects a column that is neither grouped nor aggregated; SQLite would return any row's value.
        pending: list[exp.Expr] = [item.this if isinstance(item, exp.Alias) else item for item in node.expressions]
        if node.args.get("having") is not None:
            pending.append(node.args["having"].this)
        own = {entry.read(source.alias) for source in parts.scope.sources for entry in source.readable}
        while pending:
            current = pending.pop()
            text = parts.scope.trace.get(id(current))
            if (
                text in parts.groups
                or aggregates.is_aggregate(current)
                or isinstance(current, (exp.Window, exp.Subquery))
            ):
                continue
            star = isinstance(current, exp.Star) or (
                isinstance(current, exp.Column) and isinstance(current.this, exp.Star)
            )
            if star or (isinstance(current, exp.Column) and text in own):
                raise HanaError(276, f"not a GROUP BY expression: '{current.name}' column must be in group by clause")
            pending.extend(current.iter_expressions())
    parts.limit, parts.offset = _bind_limits(binding, scope, node)
    return parts


def _starts(scope: Scope, node: exp.Expr) -> Iterator[str]:
    """Yield conditions that a WHERE condition implies and that show SQLite where a page starts in an index. From
    `A > ? OR (A = ? AND B > ?)` alone, SQLite reads every row before the page."""
    pending = [node]
    while pending:
        current = expressions.unwrapped(pending.pop())
        if isinstance(current, exp.And):
            pending += [current.expression, current.this]
        elif len(columns := _lowest(scope, current)) > 1:
            names, values = zip(*columns, strict=True)
            yield f"({', '.join(names)}) >= ({', '.join(values)})"


def _lowest(scope: Scope, node: exp.Expr) -> list[tuple[str, str]]:
    """Return columns and values: `node` is true only for rows that are, as a tuple, at or above the values. [] for a
    condition of another form. The parameters may be NULL, and those of one column may differ."""
    node = expressions.unwrapped(node)
    if isinstance(node, exp.GT):
        found = _ABOVE.fullmatch(scope.trace.get(id(node), ""))
        return [(found[1], found[2])] if found else []
    if not isinstance(node, exp.Or):
        return []
    first, second = expressions.unwrapped(node.this), expressions.unwrapped(node.expression)
    if not (isinstance(first, exp.GT) and isinstance(second, exp.And)):
        return []
    above, rest = _lowest(scope, first), _lowest(scope, second.expression)
    equal = _EQUAL.fullmatch(scope.trace.get(id(expressions.unwrapped(second.this)), ""))
    if not above or not equal or equal[1] != above[0][0] or not rest:
        return []
    one, other = above[0][1], equal[2]
    start = f"coalesce(min({one}, {other}), {_LOWEST})"
    return [(equal[1], start), *((name, f"iif({one} = {other}, {value}, {_LOWEST})") for name, value in rest)]


def _group_key(binding: Binding, scope: Scope, node: exp.Expr) -> str:
    bound = expressions.bind(binding, scope, node)
    refuse_lob(bound)
    if bound.constant or scope.aggregates:
        raise HanaError(275, "GROUP BY takes expressions over columns, without aggregate functions")
    return bound.sql


# --- select list ------------------------------------------------------------------------------------------------------


def _bind_items(binding: Binding, node: exp.Select, parts: SelectParts) -> None:
    parts.distinct = node.args.get("distinct") is not None
    for item in node.expressions:
        if isinstance(item, exp.Star):
            _expand(parts, parts.scope.matching(""))
        elif isinstance(item, exp.Column) and isinstance(item.this, exp.Star):
            _expand(parts, parts.scope.matching(identifier(item.args.get("table")), identifier(item.args.get("db"))))
        else:
            inner = item.this if isinstance(item, exp.Alias) else item
            if isinstance(expressions.unwrapped(inner), _CONDITIONS):
                raise syntax_error("a condition is not a value; use CASE WHEN ... THEN ... END")
            bound = expressions.bind(binding, parts.scope, inner)
            parts.items.append(bound)
            parts.columns.append(_result_column(item, bound))
    for index, (bound, column) in enumerate(zip(parts.items, parts.columns, strict=True), 1):
        if parts.distinct:
            refuse_lob(bound)
        parts.scope.outputs.setdefault(column.name, replace(bound, sql=f"c{index}", column=None))


def _expand(parts: SelectParts, sources: Sequence[Source]) -> None:
    for source in sources:
        for entry in source.columns:
            parts.items.append(Bound(entry.read(source.alias), entry.column.type, entry.column.nullable, entry.column))
            parts.columns.append(entry.column)


def _result_column(item: exp.Expr, bound: Bound) -> Column:
    """Name the column; as in HANA, without an alias an expression is named after its text."""
    if isinstance(item, exp.Alias):
        name = identifier(item.args["alias"])
    elif bound.column is not None:
        name = bound.column.name
    else:
        try:
            text = item.sql()
        except ValueError:
            text = type(item).__name__.upper()
        name = text.replace(f":{dialect.PARAMETER_PREFIX}", "?")[:MAX_IDENTIFIER]
    if bound.column is not None:
        return replace(bound.column, name=name)
    return Column(name, bound.type or DEFAULT_PARAMETER, bound.nullable)


# --- ORDER BY, LIMIT --------------------------------------------------------------------------------------------------


def _bind_order(binding: Binding, node: exp.Expr, parts: SelectParts) -> None:
    order = node.args.get("order")
    for key in order.expressions if order is not None else []:
        position = _position(key.this, parts.columns)
        if position is None and isinstance(key.this, exp.Column) and key.this.args.get("table") is None:
            name = identifier(key.this.this)
            position = next((place for place, column in enumerate(parts.columns, 1) if column.name == name), None)
        if position is not None:
            bound = Bound(str(position), parts.items[position - 1].type)
        else:
            bound = expressions.bind(binding, parts.scope, key.this)
        parts.order.append(aggregates.ordering(sort_key(bound), key))


def _position(node: exp.Expr, columns: Sequence[Column]) -> int | None:
    if not isinstance(node, exp.Literal) or node.is_string:
        return None
    if not _POSITION.fullmatch(node.this) or not 1 <= int(node.this) <= len(columns):
        raise HanaError(277, f"invalid column number in ORDER BY: {node.this[:20]}")
    return int(node.this)


def _bind_limits(binding: Binding, scope: Scope, node: exp.Expr) -> tuple[str, str]:
    texts = []
    for clause in (node.args.get("limit"), node.args.get("offset")):
        if clause is None:
            texts.append("")
            continue
        value = clause.args.get("expression") or clause.this
        if isinstance(value, exp.Paren):
            value = value.this
        if not (isinstance(value, exp.Literal) and not value.is_string) and dialect.parameter_number(value) is None:
            raise syntax_error("TOP, LIMIT and OFFSET take a number or a parameter")
        texts.append(expressions.bind(binding, scope, value, INTEGER).sql)
    return texts[0], texts[1]


# --- FROM -------------------------------------------------------------------------------------------------------------


def bind_sources(binding: Binding, scope: Scope, node: exp.Expr) -> str:
    pieces = [bind_source(binding, scope, node.args["from_"].this)]
    for join in node.args.get("joins") or []:
        side, kind = (str(join.args.get(part) or "").upper() for part in ("side", "kind"))
        known = len(scope.sources)
        source = bind_source(binding, scope, join.this)
        on = join.args.get("on")
        if side and on is None:
            raise syntax_error(f"{side} JOIN needs ON")
        text = f" ON {expressions.condition(binding, scope, on)}" if on is not None else ""
        if side in ("LEFT", "FULL"):
            scope.sources[known:] = [source.outer() for source in scope.sources[known:]]
        if side in ("RIGHT", "FULL"):
            scope.sources[:known] = [source.outer() for source in scope.sources[:known]]
        words = f"{side} JOIN" if side else "CROSS JOIN" if kind == "CROSS" or on is None else "JOIN"
        pieces.append(f"{words} {source}{text}")
    return " ".join(pieces)


def bind_source(binding: Binding, scope: Scope, node: exp.Expr) -> str:
    alias_node = node.args.get("alias")
    name = identifier(alias_node.this) if alias_node is not None and alias_node.this is not None else ""
    if isinstance(node, exp.Subquery):
        # A derived table sees WITH entries and the outer query, not other FROM entries.
        query = binding.bind_query(binding, node.this, Scope(scope.parent, common=scope.common))
        return _add_derived(binding, scope, name, query)
    if not isinstance(node, exp.Table):
        raise not_supported("this kind of table expression")
    if isinstance(node.this, exp.Anonymous):
        raise HanaError(328, f"invalid name of function or procedure: {node.this.this}")
    if not isinstance(node.this, exp.Identifier):
        raise not_supported("this kind of table expression")
    return bind_table(binding, scope, node, name)


def bind_table(binding: Binding, scope: Scope, node: exp.Table, alias: str = "") -> str:
    """Add the table, view, WITH entry or SYS view that `node` names to the scope; return its FROM text."""
    name, schema = identifier(node.this), identifier(node.args.get("db"))
    common = None if schema else scope.common_table(name)
    if common is not None:
        binding.count(common.sources)
        source = _numbered(binding, alias or name, "", common.columns)
        scope.sources.append(source)
        return f"{common.alias} AS {source.alias}"
    found = binding.catalog.meant(schema, binding.schema, name)
    system = system_views.find(schema, name) if found is None else None
    if system is not None:
        columns = tuple(SourceColumn(column, quoted(column.name)) for column in system.columns)
        scope.sources.append(Source(binding.alias(), alias or name, "SYS", columns))
        return f"({system.sql}) AS {scope.sources[-1].alias}"
    relation = found or binding.catalog.relation(schema or binding.schema, name)
    if not binding.view_depth:
        binding.touches.add(relation.touch("SELECT"))
    if not alias and relation.name != name:
        alias = name  # columns can be qualified by the synonym's name
    if relation.is_view:
        return _add_derived(binding, scope, alias or name, bind_view(binding, relation), relation)
    return add_table(binding, scope, relation, alias)


def add_table(binding: Binding, scope: Scope, relation: Relation, alias: str = "", *, whole: bool = False) -> str:
    """Add `relation` to the scope; return its FROM text. `whole` includes other sessions' rows, for writes."""
    columns = tuple(SourceColumn(column, quoted(column.name)) for column in relation.result_columns())
    row_id = None
    if relation.next_row_id:
        row_id = SourceColumn(Column(row_ids.NAME, BIGINT, False, relation.name, relation.schema), row_ids.COLUMN)
    own = relation.sqlite_name if whole and binding.outer is not None else binding.alias()
    stored = "" if relation.is_shared_by_sessions or relation.hides_rowid else relation.table_key
    source = Source(own, alias or relation.name, "" if alias else relation.schema, columns, row_id, stored)
    scope.sources.append(source)
    if relation.is_shared_by_sessions and not whole:
        return f"(SELECT * FROM {relation.sqlite_name} AS g WHERE {own_rows('g')}) AS {source.alias}"
    return own if own == relation.sqlite_name else f"{relation.sqlite_name} AS {own}"


def own_rows(alias: str) -> str:
    return f"{alias}.{SESSION_COLUMN} = hana_current_connection()"


def _numbered(binding: Binding, name: str, schema: str, columns: Sequence[Column]) -> Source:
    entries = tuple(SourceColumn(column, f"c{index}") for index, column in enumerate(columns, 1))
    return Source(binding.alias(), name, schema, entries)


def _add_derived(binding: Binding, scope: Scope, name: str, query: BoundQuery, relation: Relation | None = None) -> str:
    columns = relation.result_columns() if relation is not None else query.columns
    source = _numbered(binding, name, relation.schema if relation is not None else "", columns)
    scope.sources.append(source)
    return f"({query.sql}) AS {source.alias}"


def bind_view(binding: Binding, relation: Relation) -> BoundQuery:
    """Bind a view with the columns it was created with. Raises HanaError 391 if the view is no longer valid."""
    if binding.view_depth >= _MAX_VIEW_DEPTH:
        raise HanaError(391, f"invalidated view: {relation.name} (views nested too deeply)")
    schema, binding.schema = binding.schema, relation.definition_schema
    binding.view_depth += 1
    try:
        query = binding.bind_query(binding, dialect.parse(relation.definition or ""), None)
    except HanaError as error:
        if error.code not in _GONE:
            raise
        raise HanaError(391, f"invalidated view: {hana_identifier(relation.name)} ({error.text})") from None
    finally:
        binding.schema = schema
        binding.view_depth -= 1
    if len(query.columns) == len(relation.columns):
        return query
    # HANA expands `*` when it creates the view, so columns added later are not included.
    names = [column.name for column in query.columns]
    places = [names.index(column.name) for column in relation.columns if names.count(column.name) == 1]
    if len(places) < len(relation.columns):
        raise HanaError(391, f"invalidated view: {relation.name} (its columns have changed)")
    items = ", ".join(f"c{place + 1} AS c{index}" for index, place in enumerate(places, 1))
    return BoundQuery(f"SELECT {items} FROM ({query.sql})", tuple(query.columns[place] for place in places))


def _bind_with(binding: Binding, scope: Scope, node: exp.Expr) -> str:
    clause = node.args.get("with_")
    if clause is None:
        return ""
    entries = []
    for entry in clause.expressions:
        before = binding.sources
        query = binding.bind_query(binding, entry.this, scope)
        names, columns = entry.args["alias"].args.get("columns") or [], query.columns
        if names and len(names) != len(columns):
            raise HanaError(269, "the column list of WITH must name every column of its query")
        if names:
            columns = tuple(replace(one, name=identifier(name)) for name, one in zip(names, columns, strict=True))
        common = CommonTable(binding.alias("w"), columns, binding.sources - before)
        scope.common[identifier(entry.args["alias"].this)] = common
        entries.append(f"{common.alias} AS ({query.sql})")
    return f"WITH {', '.join(entries)} "


# --- UNION, EXCEPT, INTERSECT -----------------------------------------------------------------------------------------


def _bind_set(binding: Binding, node: exp.Expr, parent: Scope | None) -> BoundQuery:
    scope = Scope(parent)
    with_ = _bind_with(binding, scope, node)
    sides = [binding.bind_query(binding, side, scope) for side in _sides(node)]
    if len({len(side.columns) for side in sides}) > 1:
        raise HanaError(268, "both sides of a set operation need as many columns")
    columns = [
        replace(
            each[0],
            type=unify([column.type for column in each]) or each[0].type,
            nullable=any(column.nullable for column in each),
        )
        for each in zip(*(side.columns for side in sides), strict=True)
    ]
    everything = node.args.get("distinct") is False
    if everything and not isinstance(node, exp.Union):
        raise not_supported("EXCEPT ALL and INTERSECT ALL")
    operator = _SET_OPERATORS[type(node)] + (" ALL" if everything else "")
    branches = f" {operator} ".join(_branch(side, columns, everything) for side in sides)
    parts = SelectParts(scope, [Bound(f"c{i}", column.type) for i, column in enumerate(columns, 1)], columns)
    parts.source, parts.with_ = f"({branches})", with_
    _bind_order(binding, node, parts)
    parts.limit, parts.offset = _bind_limits(binding, scope, node)
    return BoundQuery(parts.render(), tuple(columns))


def _sides(node: exp.Expr) -> list[exp.Expr]:
    """Return the operands of a set operation: two, or all of a chain of UNION ALL, which would nest too deeply."""
    sides = [node.args["expression"]]
    while _is_union_all(node) and _is_union_all(node.this):
        if any(node.this.args.get(part) for part in ("with_", "order", "limit", "offset")):
            break
        node = node.this
        sides.append(node.args["expression"])
    return [node.this, *reversed(sides)]


def _is_union_all(node: exp.Expr) -> bool:
    return type(node) is exp.Union and node.args.get("distinct") is False


def _branch(query: BoundQuery, columns: Sequence[Column], everything: bool) -> str:
    items = []
    for index, (own, target) in enumerate(zip(query.columns, columns, strict=True), 1):
        bound = Bound(f"c{index}", own.type)
        if not everything:
            refuse_lob(bound)
        items.append(f"{coerce(bound, target.type).sql} AS c{index}")
    return f"SELECT {', '.join(items)} FROM ({query.sql})"
