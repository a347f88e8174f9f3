"""Table functions in FROM: JSON_TABLE and SERIES_GENERATE_....

Each becomes json_each over a function that returns all rows as one JSON array. It may read earlier FROM entries.
"""

from __future__ import annotations

import json

from sqlglot import exp

from hana_emulator.errors import HanaError, not_supported
from hana_emulator.sql.language.clauses import JsonColumn, JsonTable
from hana_emulator.sql.language.datatypes import FLOATING_DECIMAL, type_named
from hana_emulator.sql.language.names import literal
from hana_emulator.sql.query import expressions
from hana_emulator.sql.query.calls import rules_of
from hana_emulator.sql.query.coercion import coerce, text_of
from hana_emulator.sql.query.scope import Binding, Scope, Source, SourceColumn
from hana_emulator.types import (
    BIGINT,
    DATE,
    DEFAULT_PARAMETER,
    DOUBLE,
    INTEGER,
    LOBS,
    NCLOB,
    TIMESTAMP,
    VECTORS,
    Column,
    HanaType,
    TypeCode,
)

_SERIES: dict[str, HanaType] = {
    "TINYINT": HanaType(TypeCode.TINYINT, 3),
    "SMALLINT": HanaType(TypeCode.SMALLINT, 5),
    "INTEGER": INTEGER,
    "BIGINT": BIGINT,
    "DECIMAL": FLOATING_DECIMAL,
    "DATE": DATE,
    "TIME": HanaType(TypeCode.TIME, 8),
    "SECONDDATE": HanaType(TypeCode.SECONDDATE, 19),
    "TIMESTAMP": TIMESTAMP,
}


def bind_table_function(binding: Binding, scope: Scope, node: exp.Expr, alias: str) -> str:
    """Add the function's columns to the scope; return its FROM text. Raises HanaError 328 for an unknown name."""
    if isinstance(node, JsonTable):
        columns, call = _json_table(binding, scope, node)
    elif isinstance(node, exp.Anonymous) and str(node.this).upper().startswith("SERIES_GENERATE_"):
        columns, call = _series(binding, scope, node)
    elif isinstance(node, exp.Anonymous):
        raise HanaError(328, f"invalid name of function or procedure: {node.this}")
    else:
        raise not_supported("this kind of table expression")
    entries = tuple(SourceColumn(column, "value", place) for place, column in enumerate(columns))
    source = Source(binding.alias(), alias, "", entries)
    scope.sources.append(source)
    return f"json_each({call}) AS {source.alias}"


# --- JSON_TABLE -------------------------------------------------------------------------------------------------------


def _json_table(binding: Binding, scope: Scope, node: JsonTable) -> tuple[list[Column], str]:
    document = text_of(expressions.bind(binding, scope, node.this, NCLOB))
    path = text_of(expressions.bind(binding, scope, node.args["path"], DEFAULT_PARAMETER))
    columns: list[Column] = []
    spec = _described(node.args["columns"], columns)
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise HanaError(322, "duplicate column name in JSON_TABLE")
    strict = int(bool(node.args.get("strict")))
    text = literal(json.dumps(spec))
    return columns, f"hana_json_table({document.sql}, {path.sql}, {text}, {len(columns)}, {strict})"


def _described(written: tuple[JsonColumn, ...], columns: list[Column]) -> list[object]:
    """The columns in the form that `builtin.json_rules` reads. Adds all of them, nested ones too, to `columns`."""
    spec: list[object] = []
    for column in written:
        if column.nested:
            spec.append([column.path, _described(column.nested, columns)])
            continue
        kind = type_named(*column.type) if column.type is not None else BIGINT
        if kind.code in VECTORS or (kind.code in LOBS and kind.code not in (TypeCode.NCLOB, TypeCode.CLOB)):
            raise HanaError(266, f"inconsistent datatype: a column of JSON_TABLE is no {kind.name}")
        size = [int(kind.code), kind.length, kind.scale]
        spec.append([len(columns), column.path, size, rules_of(column.rules, scalar=not column.as_json)])
        columns.append(Column(column.name, kind))
    return spec


# --- SERIES_GENERATE_... ----------------------------------------------------------------------------------------------


def _series(binding: Binding, scope: Scope, node: exp.Anonymous) -> tuple[list[Column], str]:
    name = str(node.this).upper()
    kind = _SERIES.get(name.removeprefix("SERIES_GENERATE_"))
    if kind is None:
        raise HanaError(328, f"invalid name of function or procedure: {name}")
    if len(node.expressions) != 3:
        raise HanaError(316, f"wrong number of arguments in function invocation: {name}")
    timed = kind.code in (DATE.code, TypeCode.TIME, TypeCode.SECONDDATE, TIMESTAMP.code)
    bounds = [
        expressions.bind(binding, scope, argument, DEFAULT_PARAMETER if timed and not index else kind)
        for index, argument in enumerate(node.expressions)
    ]
    increment = text_of(bounds[0]) if timed else bounds[0]
    arguments = ", ".join([increment.sql, *(coerce(bound, kind).sql for bound in bounds[1:])])
    columns = [
        Column("GENERATED_PERIOD_START", kind),
        Column("GENERATED_PERIOD_END", kind),
        Column("ELEMENT_NUMBER", BIGINT),
        Column("FRACTION_OF_MIN_MAX_RANGE", DOUBLE),
    ]
    return columns, f"hana_{name.lower()}({arguments})"
