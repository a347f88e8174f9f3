"""Bind function calls: conditional functions, rounding, and regular expressions.

Aggregates are bound in `aggregates.py`, all other functions by their signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlglot import exp

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.registry import Registry
from hana_emulator.sql.functions import signatures
from hana_emulator.sql.functions.signatures import wrong_arguments
from hana_emulator.sql.language import datatypes
from hana_emulator.sql.language.dialect import LikeRegexpr, ReplaceRegexpr
from hana_emulator.sql.query import aggregates, expressions
from hana_emulator.sql.query.coercion import coerce, sort_key, text_of
from hana_emulator.sql.query.scope import Binding, Bound, Scope
from hana_emulator.types import (
    BOOLEAN,
    DEFAULT_PARAMETER,
    DOUBLE,
    INTEGER,
    INTEGERS,
    NCLOB,
    TypeCode,
)

_EXTRACTED = {"DAY": "DAYOFMONTH"} | {part: part for part in ("YEAR", "MONTH", "HOUR", "MINUTE", "SECOND")}


def call(binding: Binding, scope: Scope, name: str, arguments: Sequence[exp.Expr]) -> Bound:
    """Bind a call of the HANA function `name`. Raises HanaError 328 for an unknown name."""
    binding.catalog.require_function(name)
    if name in aggregates.AGGREGATES:
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
    return expressions.by_signature(name, bounds)


@expressions.BINDERS(exp.Anonymous)
def _call(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    return call(binding, scope, str(node.this).upper(), node.expressions)


@expressions.BINDERS(exp.Trim)
def _trim(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    names = {"LEADING": "LTRIM", "TRAILING": "RTRIM"}
    name = names.get((node.args.get("position") or "").upper(), "TRIM")
    sign = node.args.get("expression")
    return call(binding, scope, name, [node.this] + ([sign] if sign is not None else []))


@expressions.BINDERS(exp.Extract)
def _extract(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    part = str(node.this.this).upper()
    if part not in _EXTRACTED:
        raise syntax_error("EXTRACT takes YEAR, MONTH, DAY, HOUR, MINUTE or SECOND")
    return call(binding, scope, _EXTRACTED[part], [node.expression])


# --- conditional functions --------------------------------------------------------------------------------------------

Special = Callable[[Binding, Scope, Sequence[exp.Expr]], Bound]
_SPECIAL: Registry[str, Special] = Registry()


@_SPECIAL("COALESCE", "IFNULL")
def _coalesce(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) < 2:
        raise syntax_error("COALESCE and IFNULL need at least two arguments")
    kind, values = expressions.unified(expressions.bind_all(binding, scope, arguments))
    sql = f"coalesce({', '.join(value.sql for value in values)})"
    constant = all(value.constant for value in values)
    return Bound(sql, kind, all(value.nullable for value in values), constant=constant)


@_SPECIAL("NULLIF")
def _nullif(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 2:
        raise syntax_error("NULLIF needs two arguments")
    left, right = expressions.bind_pair(binding, scope, *arguments)
    return Bound(f"CASE WHEN {expressions.compare('=', left, right)} THEN NULL ELSE {left.sql} END", left.type)


@_SPECIAL("VECTOR_EMBEDDING")
def _vector_embedding(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    """VECTOR_EMBEDDING(text, type, model[, remote source]); the remote source is an identifier or a text."""
    signature = signatures.SIGNATURES["VECTOR_EMBEDDING"]
    named = [
        exp.Literal.string(expressions.identifier(node.this)) if isinstance(node, exp.Column) else node
        for node in arguments[3:]
    ]
    bounds = [
        expressions.bind(binding, scope, argument, signature.parameter(index))
        for index, argument in enumerate([*arguments[:3], *named])
    ]
    return expressions.by_signature("VECTOR_EMBEDDING", bounds)


@_SPECIAL("MAP")
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


@_SPECIAL("CONCAT")
def _concat(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 2:
        raise wrong_arguments("CONCAT")
    bounds = expressions.bind_all(binding, scope, arguments)
    return expressions.concatenated(bounds)


@_SPECIAL("TO_DECIMAL")
def _to_decimal(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    """TO_DECIMAL(value[, precision, scale]) with literal sizes."""
    sizes = [int(size.this) for size in arguments[1:] if isinstance(size, exp.Literal) and size.this.isdigit()]
    if not 1 <= len(arguments) <= 3 or len(sizes) != len(arguments) - 1:
        raise syntax_error("TO_DECIMAL takes a value, a precision and a scale")
    kind = datatypes.type_named("DECIMAL", sizes)
    return coerce(expressions.bind(binding, scope, arguments[0], DEFAULT_PARAMETER), kind)


@_SPECIAL("TO_BOOLEAN")
def _to_boolean(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 1:
        raise wrong_arguments("TO_BOOLEAN")
    return coerce(expressions.bind(binding, scope, arguments[0], DEFAULT_PARAMETER), BOOLEAN)


def _rounded(function: str, most: int) -> Special:
    """Bind ROUND, FLOOR, CEIL or ABS. The result is the same kind of number as the argument; decimals stay exact."""

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


@_SPECIAL("MOD")
def _mod(binding: Binding, scope: Scope, arguments: Sequence[exp.Expr]) -> Bound:
    if len(arguments) != 2:
        raise wrong_arguments("MOD")
    return expressions.calculate("%", *expressions.bind_pair(binding, scope, *arguments))


_SPECIAL |= {
    "GREATEST": _extremum("max"),
    "LEAST": _extremum("min"),
    "ROUND": _rounded("round", 2),
    "ABS": _rounded("abs", 1),
    "FLOOR": _rounded("floor", 1),
    "CEIL": _rounded("ceil", 1),
    "CEILING": _rounded("ceil", 1),
}


# --- regular expressions ----------------------------------------------------------------------------------------------


@expressions.BINDERS(ReplaceRegexpr)
def _replace_regexpr(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    pattern, subject = (
        text_of(expressions.bind(binding, scope, part, DEFAULT_PARAMETER)) for part in (node.expression, node.this)
    )
    arguments = [pattern, _text(binding, scope, node, "flag"), subject, _text(binding, scope, node, "replacement")]
    for clause, default in (("start", 1), ("occurrence", 0)):  # without OCCURRENCE every match is replaced
        part = node.args.get(clause) or exp.Literal.number(default)
        arguments.append(coerce(expressions.bind(binding, scope, part, INTEGER), INTEGER))
    kind = NCLOB if subject.type is not None and subject.type.code is NCLOB.code else DEFAULT_PARAMETER
    sql = f"hana_replace_regexpr({', '.join(argument.sql for argument in arguments)})"
    return Bound(sql, kind, constant=all(argument.constant for argument in arguments))


@expressions.BINDERS(LikeRegexpr)
def _like_regexpr(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    text, pattern = (
        text_of(expressions.bind(binding, scope, part, DEFAULT_PARAMETER)) for part in (node.this, node.expression)
    )
    flag = _text(binding, scope, node, "flag")
    sql = f"(hana_like_regexpr({text.sql}, {pattern.sql}, {flag.sql}) = 1)"
    return Bound(sql, BOOLEAN, constant=text.constant and pattern.constant and flag.constant)


def _text(binding: Binding, scope: Scope, node: exp.Expr, clause: str) -> Bound:
    part = node.args.get(clause)
    if part is None:
        return Bound("''", DEFAULT_PARAMETER, nullable=False, constant=True)
    return text_of(expressions.bind(binding, scope, part, DEFAULT_PARAMETER))
