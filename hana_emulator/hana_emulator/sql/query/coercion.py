"""Implicit conversions between HANA types, written as SQLite text. Without them, '1' = 1 is false in SQLite.

`conversions.py` registers the `owl_...` functions.
"""

from __future__ import annotations

from dataclasses import replace

from hana_emulator.errors import HanaError
from hana_emulator.sql.functions.conversions import DECIMAL_COLLATION
from hana_emulator.sql.language.datatypes import FLOATING_DECIMAL, is_text, nvarchar, text_length
from hana_emulator.sql.query.scope import Bound
from hana_emulator.types import (
    BINARIES,
    BOOLEAN,
    CHARACTER_LOBS,
    DATETIMES,
    DOUBLE,
    FLOATS,
    INTEGERS,
    LOBS,
    NUMBERS,
    VECTORS,
    HanaType,
    TypeCode,
)

_MIDNIGHT = "00:00:00"
_MOMENT_FUNCTIONS = {
    TypeCode.DATE: "owl_date",
    TypeCode.TIME: "owl_time",
    TypeCode.SECONDDATE: "owl_seconddate",
    TypeCode.TIMESTAMP: "owl_timestamp",
}


def coerce(bound: Bound, target: HanaType) -> Bound:
    """Convert `bound` to the kind of `target`; lengths are not checked. Raises HanaError 266 if that is impossible."""
    source = bound.type
    if source is None or (source.code is target.code and source.code is not TypeCode.DECIMAL):
        return replace(bound, type=target, column=None)
    sql = _converted(bound.sql, source, target)
    return Bound(sql, target, bound.nullable, parameter=bound.parameter, constant=bound.constant)


def _converted(sql: str, source: HanaType, target: HanaType) -> str:
    code = target.code
    if is_text(target):
        return as_text(sql, source)
    if code in INTEGERS:
        return sql if source.code in INTEGERS else f"owl_integer({_numeric(sql, source, target)})"
    if code in FLOATS:
        return f"owl_double({sql})" if is_text(source) else f"CAST({_numeric(sql, source, target)} AS REAL)"
    if code is TypeCode.DECIMAL:
        same = source.code is TypeCode.DECIMAL and source.scale == target.scale
        return sql if same else f"owl_decimal({_numeric(sql, source, target)}, {target.length}, {target.scale})"
    if code is TypeCode.BOOLEAN:
        text = f"CAST({sql} AS REAL)" if source.code is TypeCode.DECIMAL else _numeric(sql, source, target)
        return f"owl_boolean({text})"
    if code in DATETIMES:
        return _moment(sql, source, code)
    if code in BINARIES or code is TypeCode.BLOB:
        if is_text(source):
            return f"hana_to_binary({sql})"
        if source.code in BINARIES | {TypeCode.BLOB}:
            return sql
        raise _inconsistent(source, target)
    if is_text(source) or source.code in BINARIES | VECTORS | {TypeCode.BLOB}:
        return f"hana_to_{target.name.lower()}({sql})"
    raise _inconsistent(source, target)


def _numeric(sql: str, source: HanaType, target: HanaType) -> str:
    if source.code in NUMBERS or source.code is TypeCode.BOOLEAN or is_text(source):
        return sql
    raise _inconsistent(source, target)


def _inconsistent(source: HanaType, target: HanaType) -> HanaError:
    return HanaError(266, f"inconsistent datatype: {source.name} cannot become {target.name}")


def as_text(sql: str, source: HanaType) -> str:
    if is_text(source) or source.code is TypeCode.DECIMAL or source.code in DATETIMES:
        return sql
    if source.code is TypeCode.BOOLEAN:
        return f"CASE {sql} WHEN 1 THEN 'TRUE' WHEN 0 THEN 'FALSE' END"
    if source.code in INTEGERS:
        return f"CAST({sql} AS TEXT)"
    if source.code in VECTORS:
        return f"hana_to_nvarchar({sql})"
    return f"owl_text({sql})"


def _moment(sql: str, source: HanaType, code: TypeCode) -> str:
    if is_text(source):
        return f"{_MOMENT_FUNCTIONS[code]}({sql})"
    whole = source.code in (TypeCode.SECONDDATE, TypeCode.TIMESTAMP)
    if source.code not in DATETIMES or (TypeCode.TIME in (source.code, code) and not whole):
        raise HanaError(266, f"inconsistent datatype: {source.name} cannot become {code.name}")
    if code is TypeCode.DATE:
        return f"substr({sql}, 1, 10)"
    if code is TypeCode.TIME:
        return f"substr({sql}, 12, 8)"
    if code is TypeCode.SECONDDATE:
        return f"({sql} || ' {_MIDNIGHT}')" if source.code is TypeCode.DATE else f"substr({sql}, 1, 19)"
    tail = f" {_MIDNIGHT}.0000000" if source.code is TypeCode.DATE else ".0000000"
    return f"({sql} || '{tail}')"


def comparable(left: Bound, right: Bound) -> tuple[str, str]:
    """Convert two values to a common kind and return their SQLite texts. Raises HanaError 266 if they have none."""
    if left.type is None or right.type is None:
        refuse_lob(left)
        refuse_lob(right)
        return left.sql, right.sql
    common = comparison_type(left.type, right.type)
    if common is None:
        return left.sql, right.sql
    texts = [
        side.sql
        if kind.code is common.code or (kind.code in INTEGERS and common.code in FLOATS)
        else coerce(side, common).sql
        for side, kind in ((left, left.type), (right, right.type))
    ]
    if common.code is TypeCode.DECIMAL:
        texts = [f"{text} COLLATE {DECIMAL_COLLATION}" for text in texts]
    return texts[0], texts[1]


def refuse_lob(bound: Bound) -> None:
    """Raise HanaError 266 for a LOB: HANA cannot compare, sort or group LOBs; LIKE and IS NULL are allowed."""
    if bound.type is not None and bound.type.code in LOBS:
        raise HanaError(
            266, f"inconsistent datatype: {bound.type.name} is not allowed in a comparison, ORDER BY or GROUP BY"
        )


def comparison_type(left: HanaType, right: HanaType) -> HanaType | None:
    """The kind in which two values are compared; None if their storage values compare without conversion."""
    codes = {left.code, right.code}
    if codes & LOBS:
        raise HanaError(266, "inconsistent datatype: a LOB is not allowed in a comparison; use LIKE or TO_NVARCHAR()")
    if codes & VECTORS:
        if len(codes) > 1:
            raise HanaError(266, "inconsistent datatype: a vector compares with a vector of its own type only")
        return None
    for one, other in ((left, right), (right, left)):
        if is_text(one) and not is_text(other):
            if other.code in FLOATS:
                return DOUBLE
            if other.code in NUMBERS:
                return FLOATING_DECIMAL
            return BOOLEAN if other.code is TypeCode.BOOLEAN else other
    if codes <= NUMBERS | {TypeCode.BOOLEAN}:
        if TypeCode.DECIMAL not in codes:
            return None
        return DOUBLE if codes & FLOATS else FLOATING_DECIMAL
    if codes <= DATETIMES:
        return None if len(codes) == 1 else HanaType(TypeCode.TIMESTAMP, 27, 7)
    if codes <= BINARIES or is_text(left):
        return None
    raise HanaError(266, f"inconsistent datatype: {left.name} and {right.name} cannot be compared")


def sort_key(bound: Bound) -> str:
    """The form of `bound` that ORDER BY, GROUP BY, MIN and MAX need."""
    refuse_lob(bound)
    if bound.type is not None and bound.type.code is TypeCode.DECIMAL:
        return f"{bound.sql} COLLATE {DECIMAL_COLLATION}"
    return bound.sql


def text_of(bound: Bound) -> Bound:
    """`bound` as text; strings and character LOBs are unchanged."""
    if bound.type is None or is_text(bound.type):
        return bound
    kind = nvarchar(text_length(bound.type))
    return Bound(as_text(bound.sql, bound.type), kind, bound.nullable, constant=bound.constant)


def is_character_lob(bound: Bound) -> bool:
    return bound.type is not None and bound.type.code in CHARACTER_LOBS
