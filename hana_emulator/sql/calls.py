"""Function calls: aggregates, window functions, conditional functions here; everything else by its signature.

The signatures and the Python behind them live in `functions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlglot import exp

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.sql import datatypes, expressions, functions
from hana_emulator.sql.coercion import coerce, sort_key, text_of
from hana_emulator.sql.scope import Binding, Bound, Scope
from hana_emulator.types import (
    BIGINT,
    BINARIES,
    BOOLEAN,
    DEFAULT_PARAMETER,
    DOUBLE,
    FLOATS,
    INTEGER,
    INTEGERS,
    LOBS,
    NCLOB,
    NUMBERS,
    VECTORS,
    HanaType,
    TypeCode,
)

_NILADIC = frozenset(
    {
        "CURRENT_CONNECTION",
        "CURRENT_DATE",
        "CURRENT_SCHEMA",
        "CURRENT_TIME",
        "CURRENT_TIMESTAMP",
        "CURRENT_TRANSACTION_ISOLATION_LEVEL",
        "CURRENT_USER",
        "CURRENT_UTCDATE",
        "CURRENT_UTCTIME",
        "CURRENT_UTCTIMESTAMP",
        "SESSION_USER",
        "SYSUUID",
    }
)

_RANKS = ("ROW_NUMBER", "RANK", "DENSE_RANK", "NTILE")
_SHARES = ("PERCENT_RANK", "CUME_DIST")
_NEIGHBOURS = ("LAG", "LEAD", "FIRST_VALUE", "LAST_VALUE", "NTH_VALUE")
_SPREADS = {"STDDEV": "owl_stddev", "VAR": "owl_var", "MEDIAN": "owl_median"}


def is_niladic(name: str) -> bool:
    return name in _NILADIC


def niladic(name: str) -> Bound:
    return by_signature(name, [])


def call(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    """A call of the HANA function `name`. Raises HanaError 328 for a name nobody knows."""
    if name in _AGGREGATES:
        scope.aggregates = True
        return _AGGREGATES[name](binding, scope, name, arguments)
    if name in _SPECIAL:
        return _SPECIAL[name](binding, scope, arguments)
    if name not in functions.SIGNATURES:
        raise HanaError(328, f"invalid name of function or procedure: {name}")
    signature = functions.SIGNATURES[name]
    bounds = [
        expressions.bind(binding, scope, argument, signature.parameter(index) or DEFAULT_PARAMETER)
        for index, argument in enumerate(arguments)
    ]
    return by_signature(name, bounds)


def by_signature(name: str, arguments: Sequence[Bound]) -> Bound:
    signature = functions.SIGNATURES[name]
    if not signature.accepts(len(arguments)):
        raise _wrong_arguments(name)
    sqls = [_argument(argument, signature.parameter(index)) for index, argument in enumerate(arguments)]
    kinds = [argument.type or DEFAULT_PARAMETER for argument in arguments]
    constant = all(argument.constant for argument in arguments)
    return Bound(f"{signature.function(kinds)}({', '.join(sqls)})", signature.result_type(kinds), constant=constant)


def _wrong_arguments(name: str) -> HanaError:
    return HanaError(316, f"wrong number of arguments in function invocation: {name}")


def _argument(argument: Bound, declared: HanaType | None) -> str:
    """An argument as the Python function wants it; what the type system knows and SQLite does not is settled here."""
    kind = argument.type
    if kind is None or kind.code in BINARIES | VECTORS | LOBS:
        return argument.sql
    if declared is None:
        return text_of(argument).sql if kind.code is TypeCode.BOOLEAN else argument.sql
    if datatypes.is_text(declared):
        return text_of(argument).sql
    if declared.code in NUMBERS and datatypes.is_text(kind):
        return coerce(argument, DOUBLE if declared.code in FLOATS else datatypes.FLOATING_DECIMAL).sql
    if declared.code in FLOATS and kind.code is TypeCode.DECIMAL:
        return coerce(argument, DOUBLE).sql
    return argument.sql


# --- aggregates -------------------------------------------------------------------------------------------------------


def _single(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> tuple[str, Bound]:
    """The DISTINCT prefix and the one argument of an aggregate."""
    if len(arguments) != 1:
        raise _wrong_arguments(name)
    argument, prefix = arguments[0], ""
    if isinstance(argument, exp.Distinct):
        if len(argument.expressions) != 1:
            raise not_supported(f"{name}(DISTINCT ...) of several columns")
        argument, prefix = argument.expressions[0], "DISTINCT "
    outer, scope.aggregates = scope.aggregates, False
    bound = expressions.bind(binding, scope, argument)
    if scope.aggregates:
        raise HanaError(294, f"nested aggregate function in {name}")
    scope.aggregates = outer
    return prefix, bound


def _count(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) == 1 and isinstance(arguments[0], exp.Star):
        return Bound("count(*)", BIGINT, nullable=False)
    prefix, bound = _single(binding, scope, name, arguments)
    return Bound(f"count({prefix}{sort_key(bound) if prefix else bound.sql})", BIGINT, nullable=False)


def _numeric(name: str, bound: Bound) -> Bound:
    if bound.type is not None and datatypes.is_text(bound.type):
        return coerce(bound, datatypes.FLOATING_DECIMAL)
    if bound.type is None:
        return bound.typed(DOUBLE)
    if bound.type.code not in NUMBERS:
        raise HanaError(266, f"inconsistent datatype: {name} takes a number")
    return bound


def _sum(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    prefix, bound = _single(binding, scope, name, arguments)
    bound = _numeric(name, bound)
    assert bound.type is not None
    if bound.type.code is TypeCode.DECIMAL:
        scale = bound.type.scale
        kind = HanaType(TypeCode.DECIMAL, 38 if scale < 38 else datatypes.DECIMAL_PRECISION, scale)
        summed = f"owl_sum({bound.sql}, {scale})" if not prefix else _distinct_sum(bound, kind)
        return Bound(summed, kind)
    return Bound(f"sum({prefix}{bound.sql})", BIGINT if bound.type.code in INTEGERS else DOUBLE)


def _distinct_sum(bound: Bound, kind: HanaType) -> str:
    """SQLite takes DISTINCT with one argument only, so the scale is set afterwards."""
    return f"owl_decimal(owl_sum(DISTINCT {bound.sql}), {kind.length}, {kind.scale})"


def _average(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    prefix, bound = _single(binding, scope, name, arguments)
    bound = _numeric(name, bound)
    if bound.type is not None and bound.type.code in FLOATS:
        return Bound(f"avg({prefix}{bound.sql})", DOUBLE)
    return Bound(f"owl_avg({prefix}{bound.sql})", datatypes.FLOATING_DECIMAL)


def _extreme(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    prefix, bound = _single(binding, scope, name, arguments)
    return Bound(f"{name.lower()}({prefix}{sort_key(bound)})", bound.type)


def _spread(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    prefix, bound = _single(binding, scope, name, arguments)
    return Bound(f"{_SPREADS[name]}({prefix}{coerce(_numeric(name, bound), DOUBLE).sql})", DOUBLE)


def _string_agg(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    """STRING_AGG(text[, separator] [ORDER BY one key])."""
    if not 1 <= len(arguments) <= 2:
        raise _wrong_arguments(name)
    nodes, order = list(arguments), None
    if isinstance(nodes[-1], exp.Order):
        order = nodes[-1].expressions
        nodes[-1] = nodes[-1].this
    text = text_of(expressions.bind(binding, scope, nodes[0]))
    separator = text_of(expressions.bind(binding, scope, nodes[1])).sql if len(nodes) > 1 else "''"
    key, descending = "NULL", 0
    if order:
        if len(order) > 1:
            raise not_supported("STRING_AGG with several sort keys")
        key, descending = expressions.bind(binding, scope, order[0].this).sql, int(bool(order[0].args.get("desc")))
    return Bound(f"owl_string_agg({text.sql}, {separator}, {key}, {descending})", NCLOB)


Aggregate = Callable[[Binding, Scope, str, Sequence[exp.Expr]], Bound]
_AGGREGATES: dict[str, Aggregate] = {
    "COUNT": _count,
    "SUM": _sum,
    "AVG": _average,
    "MIN": _extreme,
    "MAX": _extreme,
    "STRING_AGG": _string_agg,
    **dict.fromkeys(_SPREADS, _spread),
}


def is_aggregate(node: exp.Expr) -> bool:
    return isinstance(node, exp.Anonymous) and str(node.this).upper() in _AGGREGATES


# --- window functions -------------------------------------------------------------------------------------------------


def window(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    """function(...) OVER (PARTITION BY ... ORDER BY ... [ROWS ...])."""
    name, arguments = str(node.this.this).upper(), node.this.expressions
    outer = scope.aggregates
    function = _window_function(binding, scope, name, arguments)
    scope.aggregates = outer
    parts = []
    if node.args.get("partition_by"):
        keys = [sort_key(expressions.bind(binding, scope, key)) for key in node.args["partition_by"]]
        parts.append(f"PARTITION BY {', '.join(keys)}")
    if node.args.get("order") is not None:
        keys = [
            ordering(sort_key(expressions.bind(binding, scope, key.this)), key)
            for key in node.args["order"].expressions
        ]
        parts.append(f"ORDER BY {', '.join(keys)}")
    if node.args.get("spec") is not None:
        parts.append(_frame(node.args["spec"]))
    return Bound(f"{function.sql} OVER ({' '.join(parts)})", function.type, function.nullable)


def _window_function(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    if name in _AGGREGATES:
        return _AGGREGATES[name](binding, scope, name, arguments)
    bounds = [expressions.bind(binding, scope, argument, INTEGER) for argument in arguments]
    sql = f"{name.lower()}({', '.join(bound.sql for bound in bounds)})"
    if name in _RANKS:
        return Bound(sql, BIGINT, nullable=False)
    if name in _SHARES:
        return Bound(sql, DOUBLE, nullable=False)
    if name in _NEIGHBOURS and bounds:
        return Bound(sql, bounds[0].type)
    raise not_supported(f"window function {name}")


def ordering(key: str, node: exp.Expr) -> str:
    """One ORDER BY key; NULLs come first in ascending order, as in HANA and SQLite alike, unless said otherwise."""
    descending = bool(node.args.get("desc"))
    first = bool(node.args.get("nulls_first"))
    placed = "" if first is not descending else (" NULLS FIRST" if first else " NULLS LAST")
    return f"{key} DESC{placed}" if descending else f"{key}{placed}"


def _frame(spec: exp.Expr) -> str:
    def bound(value: object, side: str | None) -> str:
        text = value.sql() if isinstance(value, exp.Expr) else str(value)
        return f"{text} {side}" if side else text

    start = bound(spec.args.get("start") or "CURRENT ROW", spec.args.get("start_side"))
    end = spec.args.get("end")
    kind = str(spec.args.get("kind") or "ROWS")
    return f"{kind} BETWEEN {start} AND {bound(end, spec.args.get('end_side'))}" if end else f"{kind} {start}"


# --- conditional functions --------------------------------------------------------------------------------------------


def _coalesce(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) < 2:
        raise syntax_error("COALESCE and IFNULL need at least two arguments")
    kind, values = expressions.unified(expressions.bind_all(binding, scope, arguments))
    sql = f"coalesce({', '.join(value.sql for value in values)})"
    constant = all(value.constant for value in values)
    return Bound(sql, kind, all(value.nullable for value in values), constant=constant)


def _nullif(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 2:
        raise syntax_error("NULLIF needs two arguments")
    left, right = expressions.bind_pair(binding, scope, *arguments)
    return Bound(f"CASE WHEN {expressions.compare('=', left, right)} THEN NULL ELSE {left.sql} END", left.type)


def _map(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    """MAP(subject, search, result, ... [, default])."""
    if len(arguments) < 3:
        raise syntax_error("MAP needs at least three arguments")
    rest = list(arguments[1:])
    branches = [exp.If(this=search, true=result) for search, result in zip(rest[::2], rest[1::2], strict=False)]
    default = rest[-1] if len(rest) % 2 else None
    return expressions.bind(binding, scope, exp.Case(this=arguments[0], ifs=branches, default=default))


def _extremum(function: str) -> Special:
    def bind(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
        if not arguments:
            raise _wrong_arguments("GREATEST" if function == "max" else "LEAST")
        kind, values = expressions.unified(expressions.bind_all(binding, scope, arguments))
        if len(values) < 2:
            return values[0]
        return Bound(f"{function}({', '.join(sort_key(value) for value in values)})", kind)

    return bind


def _concat(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 2:
        raise _wrong_arguments("CONCAT")
    bounds = expressions.bind_all(binding, scope, arguments)
    return expressions.concatenated([text_of(bound) for bound in bounds])


def _to_decimal(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    """TO_DECIMAL(value[, precision, scale]) with literal sizes."""
    sizes = [int(size.this) for size in arguments[1:] if isinstance(size, exp.Literal) and size.this.isdigit()]
    if not 1 <= len(arguments) <= 3 or len(sizes) != len(arguments) - 1:
        raise syntax_error("TO_DECIMAL takes a value, a precision and a scale")
    kind = datatypes.type_named("DECIMAL", sizes)
    return coerce(expressions.bind(binding, scope, arguments[0], DEFAULT_PARAMETER), kind)


def _to_boolean(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 1:
        raise _wrong_arguments("TO_BOOLEAN")
    return coerce(expressions.bind(binding, scope, arguments[0], DEFAULT_PARAMETER), BOOLEAN)


def _rounded(function: str, most: int) -> Special:
    """ROUND, FLOOR, CEIL and ABS keep the kind of number they get; decimals stay exact."""

    def bind(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
        if not 1 <= len(arguments) <= most:
            raise _wrong_arguments(function.upper())
        value = _numeric(function.upper(), expressions.bind(binding, scope, arguments[0], DOUBLE))
        digits = coerce(expressions.bind(binding, scope, arguments[1], INTEGER), INTEGER).sql if arguments[1:] else "0"
        assert value.type is not None
        kind = datatypes.FLOATING_DECIMAL if value.type.code is TypeCode.DECIMAL else value.type
        flavour = "integer" if kind.code in INTEGERS else "decimal" if kind.code is TypeCode.DECIMAL else "double"
        return Bound(
            f"owl_{function}('{flavour}', {value.sql}, {digits})", kind, value.nullable, constant=value.constant
        )

    return bind


def _mod(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 2:
        raise _wrong_arguments("MOD")
    return expressions.calculate("%", *expressions.bind_pair(binding, scope, *arguments))


Special = Callable[[Binding, Scope, Sequence[exp.Expr]], Bound]
_SPECIAL: dict[str, Special] = {
    "COALESCE": _coalesce,
    "IFNULL": _coalesce,
    "NULLIF": _nullif,
    "MAP": _map,
    "GREATEST": _extremum("max"),
    "LEAST": _extremum("min"),
    "CONCAT": _concat,
    "TO_DECIMAL": _to_decimal,
    "TO_BOOLEAN": _to_boolean,
    "ROUND": _rounded("round", 2),
    "ABS": _rounded("abs", 1),
    "FLOOR": _rounded("floor", 1),
    "CEIL": _rounded("ceil", 1),
    "CEILING": _rounded("ceil", 1),
    "MOD": _mod,
}
