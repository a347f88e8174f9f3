"""Convert sqlglot expressions to SQLite text with a HANA type; an untyped parameter takes its neighbour's type.

Each supported kind of node has its own function. Nodes without a function are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from sqlglot import exp

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.registry import Registry
from hana_emulator.sql.functions import signatures
from hana_emulator.sql.functions.store import plain_decimal, to_decimal, utf16_length
from hana_emulator.sql.language import datatypes
from hana_emulator.sql.language.dialect import HanaCast, Score, parameter_number
from hana_emulator.sql.language.names import hana_identifier, literal
from hana_emulator.sql.query import coercion
from hana_emulator.sql.query.scope import Binding, Bound, Scope, typed_parameter
from hana_emulator.sql.storage.word_index import HOLDERS_FUNCTION
from hana_emulator.types import (
    BIGINT,
    BINARIES,
    BOOLEAN,
    DEFAULT_PARAMETER,
    DOUBLE,
    FLOATS,
    INTEGER,
    LOBS,
    NUMBERS,
    STRINGS,
    VECTORS,
    HanaType,
    TypeCode,
)

_COMPARISONS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.LT: "<",
    exp.LTE: "<=",
}
_ARITHMETIC: dict[type[exp.Expr], str] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/"}
_CHECKED_BY_CAST = VECTORS | {TypeCode.TINYINT, TypeCode.SMALLINT, TypeCode.INTEGER, TypeCode.REAL}
_BYTES = BINARIES | {TypeCode.BLOB}
NILADIC = frozenset(
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
_LONGEST_NUMBER = 4_000  # Digits of a literal; Python converts at most 4,300
_DECIMAL_FUNCTIONS = {"+": "owl_add", "-": "owl_subtract", "*": "owl_multiply", "/": "owl_divide", "%": "owl_modulo"}

Handler = Callable[[Binding, Scope, exp.Expr], Bound]
# By kind of node; `aggregates.py` and `calls.py` add their own.
BINDERS: Registry[type[exp.Expr], Handler] = Registry()


def bind(binding: Binding, scope: Scope, node: exp.Expr, hint: HanaType | None = None) -> Bound:
    """Bind `node`; `hint` is the type that a bare `?` takes here."""
    number = parameter_number(node)
    if number is not None:
        binding.parameter(number, hint)
        return Bound(f"?{number}", hint, parameter=number, constant=True)
    handler = BINDERS.get(type(node))
    if handler is None:
        raise not_supported(f"{type(node).__name__.upper()} in an expression")
    bound = handler(binding, scope, node)
    scope.trace[id(node)] = bound.sql
    return bound


def bind_all(binding: Binding, scope: Scope, nodes: Sequence[exp.Expr]) -> list[Bound]:
    """Bind alternatives such as CASE branches; untyped parameters take the type of the first typed one."""
    bounds = [bind(binding, scope, node) for node in nodes]
    kind = datatypes.unify(bound.type for bound in bounds)
    return [typed_parameter(binding, bound, kind) for bound in bounds]


def bind_pair(binding: Binding, scope: Scope, left: exp.Expr, right: exp.Expr) -> tuple[Bound, Bound]:
    """Bind both sides of an operator; an untyped parameter takes the other side's type."""
    first, second = bind(binding, scope, left), bind(binding, scope, right)
    return typed_parameter(binding, first, second.type), typed_parameter(binding, second, first.type)


def condition(binding: Binding, scope: Scope, node: exp.Expr) -> str:
    bound = bind(binding, scope, node)
    if bound.type is not None and bound.type.code is not TypeCode.BOOLEAN:
        raise syntax_error(f"expected a condition, not a value of type {bound.type.name}")
    return bound.sql


def compare(operator: str, left: Bound, right: Bound) -> str:
    first, second = coercion.comparable(left, right)
    return f"{first} {operator} {second}"


def _predicate(sql: str, *parts: Bound) -> Bound:
    return Bound(sql, BOOLEAN, any(part.nullable for part in parts), constant=all(part.constant for part in parts))


@BINDERS(*_COMPARISONS)
def _comparison(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    if isinstance(node.this, exp.Tuple) or isinstance(node.expression, exp.Tuple):
        raise syntax_error("row values can only be compared with IN")
    if isinstance(node, exp.GT) and isinstance(node.this, Score) and node.expression == exp.Literal.number(0):
        found = _holds(binding, scope, node.this)
        if found is not None:
            return found
    left, right = bind_pair(binding, scope, node.this, node.expression)
    return _predicate(f"({compare(_COMPARISONS[type(node)], left, right)})", left, right)


@BINDERS(exp.And, exp.Or)
def _logical(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    """Balance AND and OR chains, because SQLite and Python limit the depth of an expression."""
    word = "AND" if isinstance(node, exp.And) else "OR"
    pending, parts = [node], list[str]()
    while pending:
        current = pending.pop()
        if type(current) is type(node):
            pending += [current.args["expression"], current.this]
        else:
            parts.append(condition(binding, scope, current))
    return Bound(_balanced(parts, word), BOOLEAN)


def _balanced(parts: list[str], word: str) -> str:
    while len(parts) > 1:
        joined = [f"({one} {word} {two})" for one, two in zip(parts[::2], parts[1::2], strict=False)]
        parts = joined + parts[len(joined) * 2 :]
    return parts[0]


@BINDERS(exp.Not)
def _not(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    return Bound(f"(NOT {condition(binding, scope, node.this)})", BOOLEAN)


@BINDERS(exp.Paren)
def _paren(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    inner = bind(binding, scope, node.this)
    return replace(inner, sql=f"({inner.sql})", column=None)


@BINDERS(exp.In)
def _in(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    query = node.args.get("query")
    if isinstance(node.this, exp.Tuple):
        lefts = [bind(binding, scope, part) for part in node.this.expressions]
        if query is not None:
            inner = binding.bind_query(binding, unwrapped(query), scope)
            names = [Bound(f"c{i}", column.type) for i, column in enumerate(inner.columns, 1)]
            tests = _tuple_equal(lefts, names)
            return Bound(f"EXISTS (SELECT 1 FROM ({inner.sql}) WHERE {tests})", BOOLEAN)
        rows = []
        for option in node.expressions:
            values = option.expressions if isinstance(option, exp.Tuple) else [option]
            rights = [bind(binding, scope, v, left.type) for v, left in zip(values, lefts, strict=False)]
            rows.append(_tuple_equal(lefts, rights))
        return Bound(_balanced([f"({row})" for row in rows], "OR"), BOOLEAN)
    if query is not None:
        left = bind(binding, scope, node.this)
        inner = binding.bind_query(binding, unwrapped(query), scope)
        if len(inner.columns) != 1:
            raise HanaError(269, "too many values: the subquery of IN must return one column")
        left = typed_parameter(binding, left, inner.columns[0].type)
        first, second = coercion.comparable(left, Bound("c1", inner.columns[0].type))
        return Bound(f"({first} IN (SELECT {second} FROM ({inner.sql})))", BOOLEAN)
    nodes = node.expressions
    if not nodes:
        raise syntax_error("IN needs a list of values or a query")
    left = bind(binding, scope, node.this)
    options = [bind(binding, scope, option, left.type) for option in nodes]
    left = typed_parameter(binding, left, datatypes.unify(option.type for option in options))
    pairs = [coercion.comparable(left, option) for option in options]
    tested = {pair[0] for pair in pairs}
    if len(tested) == 1:
        sql = f"({tested.pop()} IN ({', '.join(pair[1] for pair in pairs)}))"
    else:
        sql = _balanced([f"({one} = {two})" for one, two in pairs], "OR")
    return _predicate(sql, left, *options)


def _tuple_equal(lefts: Sequence[Bound], rights: Sequence[Bound]) -> str:
    if len(lefts) != len(rights):
        raise HanaError(268, "not enough values: both sides of IN need the same number")
    return " AND ".join(compare("=", left, right) for left, right in zip(lefts, rights, strict=True))


@BINDERS(exp.Between)
def _between(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    tested, low, high = (bind(binding, scope, node.args[part]) for part in ("this", "low", "high"))
    kind = datatypes.unify((low.type, high.type))
    tested = typed_parameter(binding, tested, kind)
    low, high = (typed_parameter(binding, side, tested.type or kind) for side in (low, high))
    return _predicate(f"({compare('>=', tested, low)} AND {compare('<=', tested, high)})", tested, low, high)


@BINDERS(exp.Like)
def _like(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    text, pattern = bind_pair(binding, scope, node.this, node.expression)
    text, pattern = coercion.text_of(text), coercion.text_of(pattern)
    word = "NOT LIKE" if node.args.get("negate") else "LIKE"
    return _predicate(f"({text.sql} {word} {pattern.sql})", text, pattern)


@BINDERS(exp.Escape)
def _escape(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    if not isinstance(node.this, exp.Like):
        raise syntax_error("ESCAPE belongs to LIKE")
    like = bind(binding, scope, node.this)
    sign = bind(binding, scope, node.expression)
    return replace(like, sql=f"({like.sql[1:-1]} ESCAPE {sign.sql})")


@BINDERS(exp.Is)
def _is(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    if not isinstance(node.expression, exp.Null):
        raise syntax_error("IS takes NULL or NOT NULL")
    return Bound(f"({bind(binding, scope, node.this).sql} IS NULL)", BOOLEAN, nullable=False)


@BINDERS(exp.Exists)
def _exists(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    return Bound(f"EXISTS ({binding.bind_query(binding, unwrapped(node.this), scope).sql})", BOOLEAN, nullable=False)


@BINDERS(exp.Subquery)
def _scalar_query(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    inner = binding.bind_query(binding, unwrapped(node), scope)
    if len(inner.columns) != 1:
        raise HanaError(269, "too many values: a scalar subquery must give one column")
    return Bound(f"({inner.sql})", inner.columns[0].type)


def unwrapped(node: exp.Expr) -> exp.Expr:
    while isinstance(node, (exp.Subquery, exp.Paren)) and not node.args.get("alias"):
        node = node.this
    return node


@BINDERS(*_ARITHMETIC)
def _arithmetic(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    operator = _ARITHMETIC[type(node)]
    return calculate(operator, *bind_pair(binding, scope, node.this, node.expression))


def calculate(operator: str, left: Bound, right: Bound) -> Bound:
    """Bind `left operator right` with HANA's result type. At run time, overflow raises 314 and division by zero 304."""
    kind = datatypes.arithmetic(operator, left.type, right.type)
    nullable, constant = left.nullable or right.nullable, left.constant and right.constant
    if kind.code is TypeCode.BIGINT and operator != "%":
        sql = f"owl_bigint({left.sql} {operator} {right.sql})"
    elif kind.code is TypeCode.DOUBLE and operator in "+-*":
        sql = f"owl_double({coercion.coerce(left, DOUBLE).sql} {operator} {coercion.coerce(right, DOUBLE).sql})"
    elif kind.code is TypeCode.DECIMAL:
        size = f"{kind.length}, {kind.scale}"
        sql = f"{_DECIMAL_FUNCTIONS[operator]}({left.sql}, {right.sql}, {size})"
    else:
        name = "owl_divide_double" if operator == "/" else "owl_remainder"
        sql = f"{name}({coercion.coerce(left, kind).sql}, {coercion.coerce(right, kind).sql})"
    return Bound(sql, kind, nullable, constant=constant)


@BINDERS(exp.Neg)
def _negative(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    if isinstance(node.this, exp.Literal) and not node.this.is_string:
        return number_literal("-" + node.this.this)
    inner = bind(binding, scope, node.this)
    return calculate("-", Bound("0", INTEGER, nullable=False, constant=True), inner)


@BINDERS(exp.DPipe)
def _concatenation(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    return concatenated(bind_pair(binding, scope, node.this, node.expression))


def concatenated(sides: Sequence[Bound]) -> Bound:
    """Concatenate binaries as a binary, anything else as text."""
    length = sum(side.type.length if side.type else 0 for side in sides)
    nullable, constant = any(side.nullable for side in sides), all(side.constant for side in sides)
    if all(side.type is not None and side.type.code in BINARIES for side in sides):
        joined = " || ".join(side.sql for side in sides)
        kind = HanaType(TypeCode.VARBINARY, min(length, datatypes.MAX_NVARCHAR))
        return Bound(f"CAST({joined} AS BLOB)", kind, nullable, constant=constant)
    parts = [coercion.text_of(side) for side in sides]
    lob = next((part.type for part in parts if coercion.is_character_lob(part)), None)
    length = sum(part.type.length if part.type else 0 for part in parts)
    sql = "(" + " || ".join(part.sql for part in parts) + ")"
    return Bound(sql, lob or datatypes.nvarchar(length or DEFAULT_PARAMETER.length), nullable, constant=constant)


@BINDERS(exp.Case)
def _case(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    subject, branches, default = node.this, node.args["ifs"], node.args.get("default")
    tests = [
        (
            condition(binding, scope, branch.this)
            if subject is None
            else compare("=", *bind_pair(binding, scope, subject, branch.this))
        )
        for branch in branches
    ]
    nodes = [branch.args["true"] for branch in branches] + ([default] if default is not None else [])
    kind, values = unified(bind_all(binding, scope, nodes))
    pieces = [f"WHEN {test} THEN {value.sql}" for test, value in zip(tests, values, strict=False)]
    if default is not None:
        pieces.append(f"ELSE {values[-1].sql}")
    nullable = default is None or any(value.nullable for value in values)
    return Bound(f"CASE {' '.join(pieces)} END", kind, nullable)


def unified(values: Sequence[Bound]) -> tuple[HanaType | None, list[Bound]]:
    """The common type of all branches, and the branches converted to it."""
    kind = datatypes.unify(value.type for value in values)
    if kind is None:
        return None, list(values)
    return kind, [coercion.coerce(value, kind) for value in values]


@BINDERS(HanaCast)
def _cast(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    kind = datatypes.type_named(node.args["to"], [int(size.this) for size in node.expressions])
    if kind.code in STRINGS and not node.expressions:
        kind = kind.sized(DEFAULT_PARAMETER.length)
    by_bytes = kind.code in BINARIES | LOBS | VECTORS
    return cast(bind(binding, scope, node.this, kind if by_bytes else DEFAULT_PARAMETER), kind)


@BINDERS(exp.Cast)
def _typed_literal(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    """DATE '...', TIME '...' or TIMESTAMP '...'. The form value::type is rejected."""
    if not isinstance(node.this, exp.Literal) or not node.this.is_string:
        raise syntax_error("use CAST(value AS type)")
    return cast(bind(binding, scope, node.this), datatypes.type_named(node.args["to"].this.name))


def cast(value: Bound, kind: HanaType) -> Bound:
    """Convert `value` as CAST does: text is cut to the length; numbers and vectors must fit the type."""
    moved = coercion.coerce(value, kind)
    if value.type is None:
        return moved
    if datatypes.is_text(kind) and kind.length:
        return replace(moved, sql=f"hana_left({moved.sql}, {kind.length})")
    if kind.code in _CHECKED_BY_CAST and value.type != kind:
        size = f"{int(kind.code)}, {kind.length}, {kind.scale}"
        return replace(moved, sql=f"owl_store({moved.sql}, {size}, 'an expression')")
    return moved


@BINDERS(exp.Literal, exp.National)
def _literal(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    return (
        Bound(literal(node.this), datatypes.nvarchar(utf16_length(node.this)), nullable=False, constant=True)
        if node.args.get("is_string", True)
        else number_literal(node.this)
    )


def number_literal(text: str) -> Bound:
    if "e" in text.lower():
        try:
            number = float(text)
        except ValueError:
            raise HanaError(
                257, "sql syntax error: the exponent of a number is missing"
            ) from None  # sqlglot accepts "1e"
        if math.isinf(number):
            raise HanaError(314, "numeric overflow: a literal does not fit DOUBLE")
        return Bound(repr(number), DOUBLE, nullable=False, constant=True)
    if "." in text:
        digits, _, fraction = text.lstrip("-").partition(".")
        kind = HanaType(TypeCode.DECIMAL, max(1, len(digits) + len(fraction)), len(fraction))
        decimal = to_decimal(text, "a literal")
        return Bound(literal(f"{decimal or abs(decimal):f}"), kind, nullable=False, constant=True)
    if len(text) > _LONGEST_NUMBER:
        raise HanaError(314, "numeric overflow: a literal has too many digits")
    value = int(text)
    if -(2**31) <= value < 2**31:
        return Bound(text, INTEGER, nullable=False, constant=True)
    if -(2**63) <= value < 2**63:
        return Bound(text, BIGINT, nullable=False, constant=True)
    kind = HanaType(TypeCode.DECIMAL, 38, 0)
    return Bound(literal(plain_decimal(to_decimal(text, "a literal"), 38)), kind, nullable=False, constant=True)


@BINDERS(exp.HexString)
def _hex(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    digits = node.this
    if len(digits) % 2 or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        raise syntax_error("a hexadecimal literal needs an even number of hexadecimal digits")
    return Bound(f"x'{digits}'", HanaType(TypeCode.VARBINARY, max(1, len(digits) // 2)), nullable=False, constant=True)


@BINDERS(exp.Null)
def _null(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    return Bound("NULL", None, constant=True)


@BINDERS(exp.Boolean)
def _boolean(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    return Bound("1" if node.this else "0", BOOLEAN, nullable=False, constant=True)


def identifier(node: exp.Expr | None) -> str:
    """The name of an identifier, upper-cased unless it is quoted; '' for None."""
    if node is None:
        return ""
    if not isinstance(node, exp.Identifier):
        raise syntax_error("expected a name")
    return str(node.this) if node.quoted else str(node.this).upper()


@BINDERS(exp.Column)
def _column(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    if isinstance(node.this, exp.Star):
        raise syntax_error("* is not allowed here")
    name, table, schema = (identifier(node.args.get(part)) for part in ("this", "table", "db"))
    if not table and not node.this.quoted and name in NILADIC:
        return by_signature(name, [])
    return _sequence_value(binding, scope, name, table, schema) or scope.resolve(name, table, schema)


_PSEUDO_COLUMNS = ("NEXTVAL", "CURRVAL")


def mentions_sequence(node: exp.Expr) -> bool:
    """Whether `node` may contain NEXTVAL or CURRVAL."""
    return any(column.name.upper() in _PSEUDO_COLUMNS and column.table for column in node.find_all(exp.Column))


def _sequence_value(binding: Binding, scope: Scope, name: str, table: str, schema: str) -> Bound | None:
    """Bind sequence.NEXTVAL or sequence.CURRVAL; None for other columns. Raises HanaError 313."""
    if name not in _PSEUDO_COLUMNS or not table:
        return None
    with suppress(HanaError):
        return scope.resolve(name, table, schema)
    sequence = binding.catalog.objects.sequences.get((schema or binding.schema, table))
    if sequence is None:
        raise HanaError(313, f"invalid sequence: {hana_identifier(table)}")
    label = literal(sequence.name)
    if name == "CURRVAL":
        return Bound(f"owl_currval({sequence.id}, {label})", BIGINT, nullable=False)
    values = (
        sequence.start, sequence.increment, sequence.minimum, sequence.maximum, int(sequence.cycles), sequence.version
    )  # fmt: skip
    text = ", ".join(map(str, values))
    return Bound(f"owl_nextval({sequence.id}, {label}, {text})", BIGINT, nullable=False)


@BINDERS(Score)
def _score(binding: Binding, scope: Scope, node: exp.Expr) -> Bound:
    term = bind(binding, scope, node.this, DEFAULT_PARAMETER)
    columns = [bind(binding, scope, column) for column in node.expressions]
    scores = [f"ifnull(hana_score({term.sql}, {coercion.text_of(column).sql}), 0.0)" for column in columns]
    return Bound(scores[0] if len(scores) == 1 else f"max({', '.join(scores)})", DOUBLE)


def _holds(binding: Binding, scope: Scope, node: Score) -> Bound | None:
    """Return SCORE(...) > 0 as a look-up in the word index of a stored column; None if the index does not apply."""
    term, *columns = (bind(binding, scope, part, DEFAULT_PARAMETER) for part in (node.this, *node.expressions))
    if len(columns) != 1 or not term.constant:
        return None
    (column,) = columns
    for source in scope.sources:
        if source.table and any(entry.read(source.alias) == column.sql for entry in source.columns):
            if coercion.text_of(column).sql != column.sql:
                return None
            binding.word_indexes.add(source.table)
            name = column.sql.removeprefix(f"{source.alias}.")
            rowids = f"{HOLDERS_FUNCTION}({literal(source.table)}, {literal(name)}, {term.sql})"
            return Bound(f"({source.alias}._rowid_ IN (SELECT value FROM json_each({rowids})))", BOOLEAN)
    return None


# --- calls by signature -----------------------------------------------------------------------------------------------


def by_signature(name: str, arguments: Sequence[Bound]) -> Bound:
    signature = signatures.SIGNATURES[name]
    if not signature.accepts(len(arguments)):
        raise signatures.wrong_arguments(name)
    sqls = [_argument(argument, signature.parameter(index)) for index, argument in enumerate(arguments)]
    kinds = [argument.type or DEFAULT_PARAMETER for argument in arguments]
    constant = all(argument.constant for argument in arguments)
    return Bound(f"{signature.function(kinds)}({', '.join(sqls)})", signature.result_type(kinds), constant=constant)


def _argument(argument: Bound, declared: HanaType | None) -> str:
    """Return the SQLite text of an argument, with a conversion where SQLite does not know the HANA type."""
    kind = argument.type
    if kind is not None and declared is not None and declared.code in BINARIES and kind.code not in _BYTES:
        raise HanaError(266, f"inconsistent datatype: expected a binary value, not {kind.name}; use TO_BINARY()")
    if kind is None or kind.code in BINARIES | VECTORS | LOBS:
        return argument.sql
    if declared is None:
        return coercion.text_of(argument).sql if kind.code is TypeCode.BOOLEAN else argument.sql
    if datatypes.is_text(declared):
        return coercion.text_of(argument).sql
    if declared.code in NUMBERS and datatypes.is_text(kind):
        return coercion.coerce(argument, DOUBLE if declared.code in FLOATS else datatypes.FLOATING_DECIMAL).sql
    if declared.code in FLOATS and kind.code is TypeCode.DECIMAL:
        return coercion.coerce(argument, DOUBLE).sql
    return argument.sql
