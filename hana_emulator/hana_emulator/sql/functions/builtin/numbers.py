"""Numeric conversions and functions. DECIMAL values are stored as text, so any text is read as a decimal."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from hana_emulator.errors import HanaError, invalid_number

Number = int | float | Decimal

_NUMBER = re.compile(r"[-+.0-9eE]+")
_BITS = {"TINYINT": (0, 255), "SMALLINT": (-(2**15), 2**15 - 1), "INTEGER": (-(2**31), 2**31 - 1)}
_BITS["BIGINT"] = (-(2**63), 2**63 - 1)


def overflow(detail: str) -> HanaError:
    return HanaError(314, f"numeric overflow: {detail}")


def division_by_zero() -> HanaError:
    return HanaError(304, "division by zero undefined")


def decimal_text(value: Decimal) -> str:
    """The storage form of a decimal: plain digits, no exponent, no negative zero."""
    return format(abs(value) if value.is_zero() else value, "f")


def digits(text: str) -> str:
    """The stripped text, or '' if HANA rejects it. Unlike HANA, Python reads 'inf', '1_000' and non-ASCII digits."""
    stripped = text.strip()
    return stripped if _NUMBER.fullmatch(stripped) else ""


def bounded(value: Decimal) -> Decimal:
    """`value` within the range of a 128-bit decimal: overflow raises 314, underflow returns 0."""
    if value.is_finite() and value and not -6143 <= value.adjusted() <= 6144:
        if value.adjusted() > 0:
            raise overflow("DECIMAL")
        return Decimal(0)
    return value


def number(value: Any) -> Number:
    """Return a storage value as a number; text converts exactly. Raises HanaError 339 without the value in its text."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        try:
            found = bounded(Decimal(digits(value)))
        except InvalidOperation:
            found = Decimal("NaN")
        if found.is_finite():
            return found
    raise invalid_number("not a numeric string")


def to_double(value: Any) -> float:
    try:
        found = float(number(value))
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise overflow("DOUBLE")
    return found


def to_real(value: Any) -> float:
    """The nearest single-precision number."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", to_double(value)))[0])
    except OverflowError:
        raise overflow("REAL") from None


def to_integer(type_name: str) -> Callable[[Any], int]:
    """Return a conversion to a HANA integer type. It truncates fractions and raises 314 on overflow."""
    low, high = _BITS[type_name]

    def convert(value: Any) -> int:
        found = int(number(value))
        if not low <= found <= high:
            raise overflow(type_name)
        return found

    return convert


def to_decimal(value: Any) -> str:
    """All digits of the value; for a float, the fewest that read back as the same float."""
    found = number(value)
    return decimal_text(Decimal(repr(found)) if isinstance(found, float) else Decimal(found))


def sign(value: Any) -> int:
    found = number(value)
    return (found > 0) - (found < 0)


def power(base: Any, exponent: Any) -> float:
    return _float_function("POWER", math.pow, base, exponent)


def logarithm(base: Any, value: Any) -> float:
    """LOG(base, x), in HANA's argument order."""
    return _float_function("LOG", lambda b, x: math.log(x, b), base, value)


def function_of(name: str, function: Callable[[float], float]) -> Callable[[Any], float]:
    return lambda value: _float_function(name, function, value)


def _float_function(name: str, function: Callable[..., float], *arguments: Any) -> float:
    try:
        return function(*(to_double(argument) for argument in arguments))
    except (ValueError, ZeroDivisionError):
        raise HanaError(306, f"invalid argument: {name} is not defined for this value") from None
    except OverflowError:
        raise overflow(name) from None


def arc_tangent(ordinate: Any, abscissa: Any) -> float:
    return _float_function("ATAN2", math.atan2, ordinate, abscissa)


def bit_not(value: Any) -> int:
    return ~int(number(value))


def bit_count(value: Any) -> int:
    """Count the set bits of a BIGINT in two's complement (64 bits)."""
    return (int(number(value)) & (2**64 - 1)).bit_count()


def bit_and(left: Any, right: Any) -> int:
    return int(number(left)) & int(number(right))


def bit_or(left: Any, right: Any) -> int:
    return int(number(left)) | int(number(right))


def bit_xor(left: Any, right: Any) -> int:
    return int(number(left)) ^ int(number(right))
