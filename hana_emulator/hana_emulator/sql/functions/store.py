"""Convert and check values for storage in a column, as HANA does on INSERT and UPDATE.

Works on storage values only. Messages name the column and the limit, never the value.
"""

from __future__ import annotations

import datetime
import math
import re
import struct
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation, localcontext
from functools import lru_cache

from hana_emulator import cesu8
from hana_emulator.errors import HanaError, invalid_number, value_too_large
from hana_emulator.registry import Registry
from hana_emulator.seam import Storage
from hana_emulator.sql.functions.builtin.numbers import bounded, digits
from hana_emulator.sql.language.datatypes import FLOATING_SCALE
from hana_emulator.types import BINARIES, CHARACTER_LOBS, FLOATS, INTEGERS, STRINGS, VECTORS, HanaType, TypeCode

Convert = Callable[[Storage], Storage]

_RANGES = {
    TypeCode.TINYINT: (0, 255),
    TypeCode.SMALLINT: (-(2**15), 2**15 - 1),
    TypeCode.INTEGER: (-(2**31), 2**31 - 1),
    TypeCode.BIGINT: (-(2**63), 2**63 - 1),
}
_DATE = re.compile(r"(\d{4})[-/.]?(\d{1,2})[-/.]?(\d{1,2})")
_TIME = re.compile(r"(\d{1,2}):?(\d{2})(?::?(\d{2}))?(?:\.(\d{1,9}))?")
_TRUE, _FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")


@lru_cache(maxsize=4096)
def converter(kind: HanaType, column: str) -> Convert:
    """Return a function that converts a storage value to `kind`. It raises HanaError 274, 303, 314 or 339 and names
    `column`."""
    make = _MAKERS.get(kind.code)
    if make is None:
        raise HanaError(7, f"feature not supported: storing {kind.name} (by this emulator)")
    convert = make(kind, column)

    def checked(value: Storage) -> Storage:
        return None if value is None else convert(value)

    return checked


_MAKERS: Registry[TypeCode, Callable[[HanaType, str], Convert]] = Registry()


@_MAKERS(*INTEGERS)
def _integer(kind: HanaType, column: str) -> Convert:
    low, high = _RANGES[kind.code]

    def convert(value: Storage) -> Storage:
        if type(value) is not int:
            # HANA truncates a decimal for an integer column.
            value = int(to_decimal(value, column))
        if not low <= value <= high:
            raise HanaError(314, f"numeric overflow: {column} takes {kind.name} from {low} to {high}")
        return value

    return convert


def to_decimal(value: Storage, where: str) -> Decimal:
    """Convert a numeric storage value to Decimal. Raises HanaError 339."""
    try:
        if isinstance(value, str):
            number = bounded(Decimal(digits(value)))
        elif isinstance(value, (int, float)):
            number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
        else:
            raise invalid_number(f"{where} is not a number")
    except InvalidOperation:
        raise invalid_number(f"not a valid number string for {where}") from None
    if not number.is_finite():
        raise invalid_number(f"not a finite number for {where}")
    return number


@_MAKERS(TypeCode.DECIMAL)
def _decimal(kind: HanaType, column: str) -> Convert:
    def convert(value: Storage) -> Storage:
        return decimal_text(to_decimal(value, column), kind, column)

    return convert


def decimal_text(number: Decimal, kind: HanaType, where: str) -> str:
    """Return a DECIMAL's canonical text, rounded half up to the scale. Raises HanaError 314 for too many digits."""
    with localcontext() as context:
        context.prec = 80
        if kind.scale == FLOATING_SCALE:
            return plain_decimal(number, kind.length)
        rounded = number.quantize(Decimal(1).scaleb(-kind.scale), rounding=ROUND_HALF_UP)
    if rounded and rounded.adjusted() >= kind.length - kind.scale:
        raise HanaError(314, f"numeric overflow: {where} takes DECIMAL({kind.length},{kind.scale})")
    return f"{rounded:f}" if rounded else f"{abs(rounded):f}"


def plain_decimal(number: Decimal, precision: int = 34) -> str:
    """Return the text with at most `precision` digits, no exponent and no trailing zeros after the point."""
    with localcontext() as context:
        context.prec = precision
        number = bounded(+number)
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@_MAKERS(*FLOATS)
def _float(kind: HanaType, column: str) -> Convert:
    def convert(value: Storage) -> Storage:
        if type(value) is not float:
            try:
                value = float(digits(value) if isinstance(value, str) else value)  # type: ignore[arg-type]
            except (TypeError, ValueError):
                raise invalid_number(f"not a valid number string for {column}") from None
        if not math.isfinite(value):
            raise HanaError(314, f"numeric overflow: {column} takes finite numbers")
        if kind.code is TypeCode.REAL:
            try:
                value = struct.unpack("<f", struct.pack("<f", value))[0]
            except OverflowError:
                raise HanaError(314, f"numeric overflow: {column} takes REAL") from None
        return value

    return convert


@_MAKERS(TypeCode.BOOLEAN)
def _boolean(kind: HanaType, column: str) -> Convert:
    def convert(value: Storage) -> Storage:
        if isinstance(value, str):
            lowered = value.strip().lower()
            if lowered in _TRUE:
                return 1
            if lowered in _FALSE:
                return 0
            raise HanaError(266, f"inconsistent datatype: not a boolean for {column}")
        return 1 if value else 0

    return convert


@_MAKERS(*STRINGS)
def _text(kind: HanaType, column: str) -> Convert:
    limit = kind.length

    def convert(value: Storage) -> Storage:
        text = value if type(value) is str else as_text(value)
        if len(text) * 2 > limit and utf16_length(text) > limit:
            raise value_too_large(f"{column} takes at most {limit} characters")
        return text

    return convert


def utf16_length(text: str) -> int:
    """Return the length as HANA counts it: a character above U+FFFF counts as two."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


@_MAKERS(*CHARACTER_LOBS)
def _lob_text(kind: HanaType, column: str) -> Convert:
    return lambda value: value if type(value) is str else as_text(value)


def as_text(value: Storage) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return repr(value) if isinstance(value, float) else str(value)


@_MAKERS(*BINARIES, TypeCode.BLOB)
def _binary(kind: HanaType, column: str) -> Convert:
    limit = kind.length

    def convert(value: Storage) -> Storage:
        data = value if type(value) is bytes else cesu8.encode(as_text(value))
        if limit and len(data) > limit:
            raise value_too_large(f"{column} takes at most {limit} bytes")
        return data

    return convert


@_MAKERS(*VECTORS)
def _vector(kind: HanaType, column: str) -> Convert:
    width = 4 if kind.code is TypeCode.REAL_VECTOR else 2

    def convert(value: Storage) -> Storage:
        if type(value) is not bytes:
            raise HanaError(266, f"inconsistent datatype: {column} takes {kind.name}; use TO_{kind.name}()")
        dimension = int.from_bytes(value[:4], "little")
        if dimension == 0 or len(value) != 4 + width * dimension:
            raise HanaError(20004, f"vector data has a wrong binary layout for {column}")
        if kind.length and dimension != kind.length:
            raise HanaError(20005, f"vector of dimension {dimension} for {column}, which requires {kind.length}")
        return value

    return convert


@_MAKERS(TypeCode.DATE, TypeCode.TIME, TypeCode.SECONDDATE, TypeCode.TIMESTAMP)
def _moment(kind: HanaType, column: str) -> Convert:
    if kind.code is TypeCode.SECONDDATE:
        return lambda value: timestamp_text(as_text(value), column)[:19]
    parse = {TypeCode.DATE: date_text, TypeCode.TIME: time_text}.get(kind.code, timestamp_text)
    return lambda value: parse(as_text(value), column)


def date_text(text: str, where: str) -> str:
    """Return 'YYYY-MM-DD' from any date or timestamp that HANA can read. Raises HanaError 303."""
    text = text.strip()
    match = _DATE.match(text)
    if match is None or not (match.end() == len(text) or text[match.end()] in " T"):
        raise HanaError(303, f"invalid DATE, TIME or TIMESTAMP value: not a date for {where}")
    try:
        return datetime.date(*map(int, match.groups())).isoformat()
    except ValueError:
        raise HanaError(303, f"invalid DATE, TIME or TIMESTAMP value: no such day for {where}") from None


def _time_parts(text: str, where: str) -> tuple[str, str]:
    match = _TIME.fullmatch(text.strip())
    if match is None or int(match[1]) > 23 or int(match[2]) > 59 or int(match[3] or 0) > 59:
        raise HanaError(303, f"invalid DATE, TIME or TIMESTAMP value: not a time for {where}")
    return f"{int(match[1]):02}:{match[2]}:{match[3] or '00'}", (match[4] or "").ljust(7, "0")[:7]


def time_text(text: str, where: str) -> str:
    stripped = text.strip()
    if len(stripped) > 10 and stripped[10] in " T":
        stripped = stripped[11:]
    return _time_parts(stripped, where)[0]


def timestamp_text(text: str, where: str) -> str:
    """Return 'YYYY-MM-DD HH:MM:SS.fffffff' from a date or timestamp. Raises HanaError 303."""
    stripped = text.strip()
    if len(stripped) == 27 and stripped[4] == "-" and stripped[19] == ".":
        date_text(stripped, where)
        return stripped
    day = date_text(stripped, where)
    rest = re.split(r"[ T]", stripped, maxsplit=1)[1:]
    if len(stripped) == 14 and stripped.isdigit():
        rest = [stripped[8:]]
    clock, fraction = _time_parts(rest[0].removesuffix("Z"), where) if rest else ("00:00:00", "0000000")
    return f"{day} {clock}.{fraction}"
