"""Convert DECIMAL between the protocol's forms (16 bytes, scaled integers) and canonical text."""

from __future__ import annotations

from decimal import ROUND_DOWN, Context, Decimal, InvalidOperation

from hana_emulator.errors import HanaError, invalid_number
from hana_emulator.types import HanaType, TypeCode

NULL_DECIMAL = bytes(15) + b"\x70"
# Bytes of the scaled integers
FIXED_SIZES: dict[int, int] = {TypeCode.FIXED8: 8, TypeCode.FIXED12: 12, TypeCode.FIXED16: 16}

FLOATING_SCALE = 32_767  # Sent as the scale of a DECIMAL declared without a scale; each value has its own

_BIAS = 6176
_MANTISSA_BITS = 113
_EXACT = Context(prec=80, rounding=ROUND_DOWN)


def fixed_scale(type_: HanaType) -> int | None:
    """Fraction digits of a DECIMAL type; None for a floating one."""
    return type_.scale if type_.length and type_.scale != FLOATING_SCALE else None


def canonical(value: Decimal, scale: int | None) -> str:
    """Format in plain digits; a `scale` gives exactly that many fraction digits, truncated like HANA."""
    if scale is not None:
        try:
            value = value.quantize(Decimal(1).scaleb(-scale), context=_EXACT)
        except InvalidOperation:
            raise HanaError(314, "numeric overflow: too many digits for DECIMAL") from None
    text = format(value, "f")
    return text[1:] if text.startswith("-") and not value else text


def parse(text: str, scale: int | None) -> str:
    """Canonical text of a client's number ("123.45", "1E+3")."""
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        raise invalid_number("a DECIMAL parameter holds no number") from None
    if not value.is_finite():
        raise invalid_number("a DECIMAL parameter is not finite")
    return canonical(value, scale)


def encode(value: str | int | float) -> bytes:
    """Encode as sign bit, 14-bit biased exponent, 113-bit mantissa, little-endian."""
    sign, digits, exponent = Decimal(str(value)).as_tuple()
    if not isinstance(exponent, int):
        raise HanaError(314, "numeric overflow: DECIMAL result is not finite")
    mantissa = int("".join(map(str, digits)))
    while mantissa >> _MANTISSA_BITS:
        mantissa, exponent = mantissa // 10, exponent + 1
    number = sign << 127 | (exponent + _BIAS) << _MANTISSA_BITS | mantissa
    return number.to_bytes(16, "little")


def decode(data: bytes) -> Decimal | None:
    number = int.from_bytes(data, "little")
    if data[15] & 0x70 == 0x70:
        return None
    mantissa = number & ((1 << _MANTISSA_BITS) - 1)
    exponent = (number >> _MANTISSA_BITS & 0x3FFF) - _BIAS
    value = Decimal(mantissa).scaleb(exponent, _EXACT)
    return value.copy_negate() if number >> 127 else value  # unary minus would round to 28 digits


def to_fixed(value: str | int | float, scale: int) -> int:
    """Convert to an integer number of 10**-scale."""
    return int(Decimal(str(value)).scaleb(scale, _EXACT))


def from_fixed(number: int, scale: int) -> Decimal:
    return Decimal(number).scaleb(-scale, _EXACT)
