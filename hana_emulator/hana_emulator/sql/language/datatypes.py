"""HANA's types by name, and the types of expressions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.types import (
    BIGINT,
    BINARIES,
    CHARACTER_LOBS,
    DATETIMES,
    DOUBLE,
    FLOATS,
    INTEGERS,
    LOBS,
    MAX_LENGTH,
    NUMBERS,
    STRINGS,
    VECTORS,
    HanaType,
    TypeCode,
)

FLOATING_SCALE = 32_767  # The wire protocol's scale of a DECIMAL declared without one: any number of fraction digits
DECIMAL_PRECISION = 34
FLOATING_DECIMAL = HanaType(TypeCode.DECIMAL, DECIMAL_PRECISION, FLOATING_SCALE)
MAX_NVARCHAR = 5_000
MAX_VECTOR_DIMENSION = 65_000

_FIXED_LENGTH = {
    TypeCode.TINYINT: 3,
    TypeCode.SMALLINT: 5,
    TypeCode.INTEGER: 10,
    TypeCode.BIGINT: 19,
    TypeCode.REAL: 7,
    TypeCode.DOUBLE: 15,
    TypeCode.BOOLEAN: 1,
    TypeCode.DATE: 10,
    TypeCode.TIME: 8,
    TypeCode.SECONDDATE: 19,
    TypeCode.TIMESTAMP: 27,
    TypeCode.NCLOB: 0,
    TypeCode.CLOB: 0,
    TypeCode.BLOB: 0,
    TypeCode.TEXT: 0,
}
_SIZED = {  # default length, maximum length
    TypeCode.NVARCHAR: (1, MAX_NVARCHAR),
    TypeCode.VARCHAR: (1, MAX_NVARCHAR),
    TypeCode.NCHAR: (1, 2_000),
    TypeCode.CHAR: (1, 2_000),
    TypeCode.ALPHANUM: (1, 127),
    TypeCode.SHORTTEXT: (1, MAX_NVARCHAR),
    TypeCode.VARBINARY: (1, MAX_NVARCHAR),
    TypeCode.BINARY: (1, 2_000),
    TypeCode.REAL_VECTOR: (0, MAX_VECTOR_DIMENSION),
    TypeCode.HALF_VECTOR: (0, MAX_VECTOR_DIMENSION),
}
# sqlalchemy-hana declares its DateTime as DATETIME and reads it back with fractional seconds
_ALIASES = {
    "INT": "INTEGER",
    "DEC": "DECIMAL",
    "NUMERIC": "DECIMAL",
    "CHARACTER": "CHAR",
    "LONGDATE": "TIMESTAMP",
    "DAYDATE": "DATE",
    "SECONDTIME": "TIME",
    "DATETIME": "TIMESTAMP",
}
# The types listed in SYS.DATA_TYPES
CATALOGUE_NAMES = (
    *("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "DECIMAL", "SMALLDECIMAL", "REAL", "DOUBLE", "BOOLEAN"),
    *("CHAR", "VARCHAR", "NCHAR", "NVARCHAR", "ALPHANUM", "SHORTTEXT", "BINARY", "VARBINARY"),
    *("CLOB", "NCLOB", "BLOB", "TEXT", "DATE", "TIME", "SECONDDATE", "TIMESTAMP", "REAL_VECTOR", "HALF_VECTOR"),
)


def type_named(name: str, sizes: Sequence[int] = ()) -> HanaType:
    """Return the type that DDL or CAST writes as `name(sizes)`. Raises HanaError 1, 257 or 264."""
    plain = _ALIASES.get(name.upper(), name.upper())
    if plain == "FLOAT":
        return type_named("REAL" if sizes and sizes[0] <= 24 else "DOUBLE")
    if plain in ("DECIMAL", "SMALLDECIMAL"):
        return _decimal(plain, sizes)
    try:
        code = TypeCode[plain]
    except KeyError:
        raise HanaError(264, f"invalid datatype: {name}") from None
    if code in _FIXED_LENGTH:
        if sizes and code is not TypeCode.TEXT:
            raise syntax_error(f"{plain} takes no length")
        return HanaType(code, _FIXED_LENGTH[code], 7 if code is TypeCode.TIMESTAMP else 0)
    if code not in _SIZED:
        raise HanaError(264, f"invalid datatype: {name}")
    default, greatest = _SIZED[code]
    length = sizes[0] if sizes else default
    if len(sizes) > 1 or (sizes and not 1 <= length <= greatest):
        raise HanaError(1, f"general error: the length of {plain} must be between 1 and {greatest}")
    return HanaType(code, length)


def _decimal(name: str, sizes: Sequence[int]) -> HanaType:
    if name == "SMALLDECIMAL" or not sizes:
        if sizes:
            raise syntax_error("SMALLDECIMAL takes no precision")
        return HanaType(TypeCode.DECIMAL, 16 if name == "SMALLDECIMAL" else DECIMAL_PRECISION, FLOATING_SCALE)
    precision, scale = sizes[0], sizes[1] if len(sizes) > 1 else 0
    if len(sizes) > 2 or not 1 <= precision <= 38 or not 0 <= scale <= precision:
        raise HanaError(1, f"general error: DECIMAL({precision},{scale}) is out of range")
    return HanaType(TypeCode.DECIMAL, precision, scale)


def nvarchar(length: int) -> HanaType:
    return HanaType(TypeCode.NVARCHAR, max(1, min(length, MAX_LENGTH)))


def is_text(kind: HanaType) -> bool:
    return kind.code in STRINGS or kind.code in CHARACTER_LOBS


def is_floating(kind: HanaType) -> bool:
    """Whether the type is a DECIMAL in which each value keeps its own scale."""
    return kind.code is TypeCode.DECIMAL and kind.scale == FLOATING_SCALE


def text_length(kind: HanaType) -> int:
    """The maximum number of characters of a value of this type as text."""
    if kind.code is TypeCode.DECIMAL:
        return kind.length + 2
    if kind.code in LOBS or kind.code in VECTORS:
        return MAX_NVARCHAR
    return {TypeCode.DOUBLE: 25, TypeCode.REAL: 25, TypeCode.BOOLEAN: 5}.get(kind.code, max(kind.length, 1) + 1)


def unify(kinds: Iterable[HanaType | None]) -> HanaType | None:
    """The common type of all branches of a CASE, COALESCE or UNION; None if all are NULL."""
    known = [kind for kind in kinds if kind is not None]
    return reduce(_unify_two, known) if known else None


def _unify_two(left: HanaType, right: HanaType) -> HanaType:
    if left.code is right.code:
        return _unify_same(left, right)
    codes = {left.code, right.code}
    if codes <= NUMBERS:
        return _unify_numbers(left, right)
    if codes <= STRINGS | CHARACTER_LOBS:
        lob = next((kind for kind in (left, right) if kind.code in CHARACTER_LOBS), None)
        return lob or nvarchar(max(left.length, right.length))
    if codes <= BINARIES | {TypeCode.BLOB}:
        return HanaType(TypeCode.BLOB) if TypeCode.BLOB in codes else left.sized(max(left.length, right.length))
    if codes <= DATETIMES - {TypeCode.TIME}:
        later = (TypeCode.DATE, TypeCode.SECONDDATE, TypeCode.TIMESTAMP)
        return max(left, right, key=lambda kind: later.index(kind.code))
    for text, other in ((left, right), (right, left)):
        if is_text(text) and other.code not in VECTORS | BINARIES:
            return text if text.code in CHARACTER_LOBS else nvarchar(max(text.length, text_length(other)))
    raise HanaError(266, f"inconsistent datatype: {left.name} and {right.name} do not go together")


def _unify_same(left: HanaType, right: HanaType) -> HanaType:
    if left.code is not TypeCode.DECIMAL:
        same = left.length == right.length or left.code not in VECTORS
        return left.sized(max(left.length, right.length) if same else 0, left.scale)
    if is_floating(left) or is_floating(right):
        return FLOATING_DECIMAL
    scale = max(left.scale, right.scale)
    digits = max(left.length - left.scale, right.length - right.scale)
    return HanaType(TypeCode.DECIMAL, min(38, digits + scale), scale)


def _unify_numbers(left: HanaType, right: HanaType) -> HanaType:
    codes = {left.code, right.code}
    if codes & FLOATS:
        return DOUBLE
    if TypeCode.DECIMAL not in codes:
        return max(left, right, key=lambda kind: kind.code)
    return _unify_same(as_decimal(left), as_decimal(right))


def as_decimal(kind: HanaType) -> HanaType:
    """The DECIMAL that can hold every value of an integer type; the floating DECIMAL for other types."""
    if kind.code is TypeCode.DECIMAL:
        return kind
    return HanaType(TypeCode.DECIMAL, kind.length, 0) if kind.code in INTEGERS else FLOATING_DECIMAL


def arithmetic(operator: str, left: HanaType | None, right: HanaType | None) -> HanaType:
    """The type of `left operator right`. Integers give BIGINT, but '/' always gives DECIMAL (7/2 is 3.5)."""
    kinds = [FLOATING_DECIMAL if kind is None or is_text(kind) else kind for kind in (left, right)]
    wrong = next((kind for kind in kinds if kind.code not in NUMBERS), None)
    if wrong is not None:
        raise HanaError(266, f"inconsistent datatype: {wrong.name} is not a number")
    if any(kind.code in FLOATS for kind in kinds):
        return DOUBLE
    if all(kind.code in INTEGERS for kind in kinds):
        return FLOATING_DECIMAL if operator == "/" else BIGINT
    one, two = as_decimal(kinds[0]), as_decimal(kinds[1])
    if operator in "/%" or is_floating(one) or is_floating(two):
        return FLOATING_DECIMAL
    if operator == "*":
        scale, digits = one.scale + two.scale, one.length + two.length
    else:
        scale = max(one.scale, two.scale)
        digits = max(one.length - one.scale, two.length - two.scale) + scale + 1
    return HanaType(TypeCode.DECIMAL, digits, scale) if digits <= 38 else FLOATING_DECIMAL
