"""Bind aggregates and window functions as SQLite calls; `accumulators.py` computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlglot import exp

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.registry import Registry
from hana_emulator.sql.functions.signatures import wrong_arguments
from hana_emulator.sql.language import datatypes
from hana_emulator.sql.language.names import literal
from hana_emulator.sql.query import expressions
from hana_emulator.sql.query.coercion import coerce, sort_key, text_of
from hana_emulator.sql.query.scope import Binding, Bound, Scope
from hana_emulator.types import (
    BIGINT,
    DEFAULT_PARAMETER,
    DOUBLE,
    FLOATS,
    INTEGER,
    INTEGERS,
    NCLOB,
    NUMBERS,
    VECTORS,
    HanaType,
    TypeCode,
)

_RANKS = ("ROW_NUMBER", "RANK", "DENSE_RANK", "NTILE")
_SHARES = ("PERCENT_RANK", "CUME_DIST")
_NEIGHBOURS = ("LAG", "LEAD", "FIRST_VALUE", "LAST_VALUE", "NTH_VALUE")
_SPREADS = {
    "STDDEV": "owl_stddev",
    "STDDEV_SAMP": "owl_stddev",
    "STDDEV_POP": "owl_stddev_pop",
    "VAR": "owl_var",
    "VAR_SAMP": "owl_var",
    "VAR_POP": "owl_var_pop",
    "MEDIAN": "owl_median",
}
_PERCENTILES = ("PERCENTILE_CONT", "PERCENTILE_DISC")


def is_aggregate(node: exp.Expr) -> bool:
    if isinstance(node, exp.WithinGroup):
        return True
    return isinstance(node, exp.Anonymous) and str(node.this).upper() in AGGREGATES


def call(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    scope.aggregates = True
    return AGGREGATES[name](binding, scope, name, arguments)


def _single(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> tuple[str, Bound]:
    """The DISTINCT prefix and the only argument of an aggregate."""
    if len(arguments) != 1:
        raise wrong_arguments(name)
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


Aggregate = Callable[[Binding, Scope, str, Sequence[exp.Expr]], Bound]
AGGREGATES: Registry[str, Aggregate] = Registry()


@AGGREGATES("COUNT")
def _count(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) == 1 and isinstance(arguments[0], exp.Star):
        return Bound("count(*)", BIGINT, nullable=False)
    prefix, bound = _single(binding, scope, name, arguments)
    if bound.type is not None and bound.type.code in VECTORS:  # by a public log of a lab; HANA's code is unknown
        raise HanaError(7, f"feature not supported: COUNT of a {bound.type.name}")
    return Bound(f"count({prefix}{sort_key(bound) if prefix else bound.sql})", BIGINT, nullable=False)


def numeric(name: str, bound: Bound) -> Bound:
    if bound.type is not None and datatypes.is_text(bound.type):
        return coerce(bound, datatypes.FLOATING_DECIMAL)
    if bound.type is None:
        return bound.typed(DOUBLE)
    if bound.type.code not in NUMBERS:
        raise HanaError(266, f"inconsistent datatype: {name} takes a number")
    return bound


@AGGREGATES("SUM")
def _sum(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    prefix, bound = _single(binding, scope, name, arguments)
    bound = numeric(name, bound)
    assert bound.type is not None
    if bound.type.code is TypeCode.DECIMAL:
        scale = bound.type.scale
        kind = HanaType(TypeCode.DECIMAL, 38 if scale < 38 else datatypes.DECIMAL_PRECISION, scale)
        # SQLite allows DISTINCT with one argument only, so the scale is set afterwards.
        summed = (
            f"owl_sum({bound.sql}, {scale})"
            if not prefix
            else f"owl_decimal(owl_sum(DISTINCT {bound.sql}), {kind.length}, {kind.scale})"
        )
        return Bound(summed, kind)
    return Bound(f"sum({prefix}{bound.sql})", BIGINT if bound.type.code in INTEGERS else DOUBLE)


@AGGREGATES("AVG")
def _average(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    prefix, bound = _single(binding, scope, name, arguments)
    bound = numeric(name, bound)
    if bound.type is not None and bound.type.code in FLOATS:
        return Bound(f"avg({prefix}{bound.sql})", DOUBLE)
    return Bound(f"owl_avg({prefix}{bound.sql})", datatypes.FLOATING_DECIMAL)


@AGGREGATES("MIN", "MAX")
def _extreme(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    prefix, bound = _single(binding, scope, name, arguments)
    return Bound(f"{name.lower()}({prefix}{sort_key(bound)})", bound.type)


@AGGREGATES(*_SPREADS)
def _spread(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    prefix, bound = _single(binding, scope, name, arguments)
    return Bound(f"{_SPREADS[name]}({prefix}{coerce(numeric(name, bound), DOUBLE).sql})", DOUBLE)


@AGGREGATES("CORR")
def _pair(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 2:
        raise wrong_arguments(name)
    sides = [_single(binding, scope, name, [argument])[1] for argument in arguments]
    return Bound(f"owl_corr({', '.join(coerce(numeric(name, side), DOUBLE).sql for side in sides)})", DOUBLE)


@AGGREGATES("STRING_AGG")
def _string_agg(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    if not 1 <= len(arguments) <= 2:
        raise wrong_arguments(name)
    nodes, flags, keys = list(arguments), "", list[str]()
    if isinstance(nodes[-1], exp.Order):
        order = nodes[-1]
        nodes[-1] = order.this
        for key in order.expressions:  # in the form that `accumulators.ordered` reads
            bound = expressions.bind(binding, scope, key.this)
            exact = bound.type is not None and bound.type.code is TypeCode.DECIMAL
            flags += "D" if key.args.get("desc") else "A"
            flags += ("F" if key.args.get("nulls_first") else "L") + ("N" if exact else "T")
            keys.append(bound.sql)
    text = text_of(expressions.bind(binding, scope, nodes[0]))
    separator = text_of(expressions.bind(binding, scope, nodes[1])).sql if len(nodes) > 1 else "''"
    return Bound(f"owl_string_agg({', '.join([text.sql, separator, literal(flags), *keys])})", NCLOB)


@expressions.BINDERS(exp.WithinGroup)
def within_group(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    """Bind PERCENTILE_CONT(share) or PERCENTILE_DISC(share) WITHIN GROUP (ORDER BY number)."""
    name = str(node.this.this).upper() if isinstance(node.this, exp.Anonymous) else ""
    keys = node.expression.expressions
    if name not in _PERCENTILES or len(node.this.expressions) != 1 or len(keys) != 1:
        raise not_supported("WITHIN GROUP but for PERCENTILE_CONT and PERCENTILE_DISC of one sort key")
    share = coerce(expressions.bind(binding, scope, node.this.expressions[0], DOUBLE), DOUBLE)
    if not share.constant:
        raise syntax_error(f"the share of {name} is a constant")
    value = coerce(numeric(name, _single(binding, scope, name, [keys[0].this])[1]), DOUBLE)
    scope.aggregates = True
    return Bound(f"owl_{name.lower()}({value.sql}, {share.sql}, {int(bool(keys[0].args.get('desc')))})", DOUBLE)


# --- window functions -------------------------------------------------------------------------------------------------


@expressions.BINDERS(exp.Window)
def window(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    """Bind function(...) OVER (PARTITION BY ... ORDER BY ... [ROWS ...])."""
    if not isinstance(node.this, exp.Anonymous | exp.WithinGroup):
        raise not_supported("this window function")
    outer = scope.aggregates
    if str(node.this.this).upper() == "CROSS_ENCODE":
        return _cross_encode(binding, scope, node)
    if isinstance(node.this, exp.WithinGroup):
        function = within_group(binding, scope, node.this)
    else:
        function = _window_function(binding, scope, str(node.this.this).upper(), node.this.expressions)
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
        spec = node.args["spec"]

        def bound(value: object, side: str | None) -> str:
            text = value.sql() if isinstance(value, exp.Expr) else str(value)
            return f"{text} {side}" if side else text

        start = bound(spec.args.get("start") or "CURRENT ROW", spec.args.get("start_side"))
        end = spec.args.get("end")
        kind = str(spec.args.get("kind") or "ROWS")
        parts.append(
            f"{kind} BETWEEN {start} AND {bound(end, spec.args.get('end_side'))}" if end else f"{kind} {start}"
        )
    return Bound(f"{function.sql} OVER ({' '.join(parts)})", function.type, function.nullable)


def _cross_encode(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    """CROSS_ENCODE(document, query, model) OVER (). COUNT(*) lets SQLite refuse it where no window function may be."""
    binding.catalog.require_function("CROSS_ENCODE")
    if len(node.this.expressions) != 3:
        raise wrong_arguments("CROSS_ENCODE")
    if any(node.args.get(part) for part in ("partition_by", "order", "spec")):
        raise not_supported("CROSS_ENCODE with a window other than OVER ()")
    kinds = (NCLOB, NCLOB, DEFAULT_PARAMETER)
    bounds = [
        text_of(expressions.bind(binding, scope, argument, kind))
        for argument, kind in zip(node.this.expressions, kinds, strict=True)
    ]
    call = f"hana_cross_encode({', '.join(bound.sql for bound in bounds)})"
    return Bound(f"CASE WHEN count(*) OVER () THEN {call} END", DOUBLE)


def _window_function(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    if name in AGGREGATES:
        return AGGREGATES[name](binding, scope, name, arguments)
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
    """The SQL of one ORDER BY key. As in HANA, NULLs come first in ascending order by default."""
    descending = bool(node.args.get("desc"))
    first = bool(node.args.get("nulls_first"))
    placed = "" if first is not descending else (" NULLS FIRST" if first else " NULLS LAST")
    return f"{key} DESC{placed}" if descending else f"{key}{placed}"
