"""Function calls: conditional functions and rounding here, aggregates by `aggregates.py`, the rest by its signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlglot import exp

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.sql import aggregates, datatypes, expressions, signatures
from hana_emulator.sql.coercion import coerce, sort_key, text_of
from hana_emulator.sql.scope import Binding, Bound, Scope
from hana_emulator.sql.signatures import wrong_arguments
from hana_emulator.types import (
    BINARIES,
    BOOLEAN,
    DEFAULT_PARAMETER,
    DOUBLE,
    FLOATS,
    INTEGER,
    INTEGERS,
    LOBS,
    NUMBERS,
    VECTORS,
    HanaType,
    TypeCode,
)

_BYTES = BINARIES | {TypeCode.BLOB}
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


def is_niladic(name: str) -> bool:
    return name in _NILADIC


def niladic(name: str) -> Bound:
    return by_signature(name, [])


def call(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    """A call of the HANA function `name`. Raises HanaError 328 for a name nobody knows."""
    if aggregates.is_aggregate_name(name, arguments):
        return aggregates.call(binding, scope, name, arguments)
    if name in _SPECIAL:
        return _SPECIAL[name](binding, scope, arguments)
    if name not in signatures.SIGNATURES:
        raise HanaError(328, f"invalid name of function or procedure: {name}")
    signature = signatures.SIGNATURES[name]
    bounds = [
        expressions.bind(binding, scope, argument, signature.parameter(index) or DEFAULT_PARAMETER)
        for index, argument in enumerate(arguments)
    ]
    return by_signature(name, bounds)


def by_signature(name: str, arguments: Sequence[Bound]) -> Bound:
    signature = signatures.SIGNATURES[name]
    if not signature.accepts(len(arguments)):
        raise wrong_arguments(name)
    sqls = [_argument(argument, signature.parameter(index)) for index, argument in enumerate(arguments)]
    kinds = [argument.type or DEFAULT_PARAMETER for argument in arguments]
    constant = all(argument.constant for argument in arguments)
    return Bound(f"{signature.function(kinds)}({', '.join(sqls)})", signature.result_type(kinds), constant=constant)


def _argument(argument: Bound, declared: HanaType | None) -> str:
    """An argument as the Python function wants it; what the type system knows and SQLite does not is settled here."""
    kind = argument.type
    if kind is not None and declared is not None and declared.code in BINARIES and kind.code not in _BYTES:
        raise HanaError(266, f"inconsistent datatype: a binary is wanted, not {kind.name}; use TO_BINARY()")
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
            raise wrong_arguments("GREATEST" if function == "max" else "LEAST")
        kind, values = expressions.unified(expressions.bind_all(binding, scope, arguments))
        if len(values) < 2:
            return values[0]
        return Bound(f"{function}({', '.join(sort_key(value) for value in values)})", kind)

    return bind


def _concat(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 2:
        raise wrong_arguments("CONCAT")
    bounds = expressions.bind_all(binding, scope, arguments)
    return expressions.concatenated(bounds)


def _to_decimal(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    """TO_DECIMAL(value[, precision, scale]) with literal sizes."""
    sizes = [int(size.this) for size in arguments[1:] if isinstance(size, exp.Literal) and size.this.isdigit()]
    if not 1 <= len(arguments) <= 3 or len(sizes) != len(arguments) - 1:
        raise syntax_error("TO_DECIMAL takes a value, a precision and a scale")
    kind = datatypes.type_named("DECIMAL", sizes)
    return coerce(expressions.bind(binding, scope, arguments[0], DEFAULT_PARAMETER), kind)


def _to_boolean(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 1:
        raise wrong_arguments("TO_BOOLEAN")
    return coerce(expressions.bind(binding, scope, arguments[0], DEFAULT_PARAMETER), BOOLEAN)


def _rounded(function: str, most: int) -> Special:
    """ROUND, FLOOR, CEIL and ABS keep the kind of number they get; decimals stay exact."""

    def bind(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
        if not 1 <= len(arguments) <= most:
            raise wrong_arguments(function.upper())
        value = aggregates.numeric(function.upper(), expressions.bind(binding, scope, arguments[0], DOUBLE))
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
        raise wrong_arguments("MOD")
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
