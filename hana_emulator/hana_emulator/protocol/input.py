"""Decode parameter rows from wire bytes to storage values, with one compiled decoder for each parameter.

Clients may send types other than the declared ones (NVARCHAR and DECIMAL as STRING, vectors as VARBINARY), so values
are read by wire type and then converted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from hana_emulator import cesu8
from hana_emulator.errors import HanaError, invalid_number
from hana_emulator.protocol import decimals, temporal
from hana_emulator.protocol.codes import FirstFormatCode, LobOption, ProtocolError
from hana_emulator.protocol.lobs import LobInput
from hana_emulator.registry import Registry
from hana_emulator.seam import Storage
from hana_emulator.types import (
    BINARIES,
    CHARACTER_LOBS,
    DATETIMES,
    FLOATS,
    INTEGERS,
    LOBS,
    STRINGS,
    VECTORS,
    HanaType,
    Parameter,
    TypeCode,
)

# (part data, position after the type byte) -> (value, position after it)
Reader = Callable[[bytes, int], tuple[Any, int]]
Converter = Callable[[Any, HanaType], Storage]
LobHeader = tuple[int, bool, int]  # type code, whether its data is complete, and their length; no value is a tuple
ParameterRow = list[Any]  # Storage values, and a `LobInput` for each LOB that has not arrived completely

_NULL = 0x80
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_LOB_HEADER = struct.Struct("<Bii")
_NULL_LENGTH = 255
_TEXT_CODES = frozenset({8, 9, 10, 11, 29, 30, 52, 55})
_BINARY_CODES = frozenset({12, 13, 33, 96, 97})
_READERS: Registry[int, Reader] = Registry()
_CONVERTERS: Registry[TypeCode, Converter] = Registry()


def _span(data: bytes, position: int) -> tuple[int, int]:
    """Start and end of a length-prefixed value; start is -1 for NULL."""
    size = data[position]
    if size <= 245:
        start = position + 1
    elif size == 246:
        (size,), start = _U16.unpack_from(data, position + 1), position + 3
    elif size == 247:
        (size,), start = _I32.unpack_from(data, position + 1), position + 5
    elif size == _NULL_LENGTH:
        return -1, position + 1
    else:
        raise ProtocolError(f"length prefix {size} is unknown")
    end = start + size
    if not start <= end <= len(data):
        raise ProtocolError("a parameter value extends beyond its part")
    return start, end


@_READERS(*_TEXT_CODES)
def _read_text(data: bytes, position: int) -> tuple[str | None, int]:
    start, end = position + 1, position + 1 + data[position]
    if data[position] > 245 or end > len(data):
        start, end = _span(data, position)
        if start < 0:
            return None, end
    raw = data[start:end]
    return (raw.decode() if raw.isascii() else cesu8.decode(raw)), end


@_READERS(*_BINARY_CODES)
def _read_binary(data: bytes, position: int) -> tuple[bytes | None, int]:
    start, end = _span(data, position)
    return (None if start < 0 else data[start:end]), end


@_READERS(TypeCode.BOOLEAN)
def _read_boolean(data: bytes, position: int) -> tuple[int | None, int]:
    """Source: node-hdb, `Writer.js`, and go-hdb, `typecode.go`; hdbcli sends 0 or 2 and marks NULL in the type byte."""
    found = {0: 0, 1: None, 2: 1}
    if data[position] not in found:
        raise ProtocolError(f"BOOLEAN parameter of value {data[position]}; 0, 1 (NULL) or 2 expected")
    return found[data[position]], position + 1


@_READERS(TypeCode.DECIMAL)
def _read_decimal(data: bytes, position: int) -> tuple[Decimal | None, int]:
    return decimals.decode(data[position : position + 16]), position + 16


_LAST = int(LobOption.LAST)  # an enum's own `&` is slow, and every LOB of every row needs it


@_READERS(*LOBS)
def _read_lob(data: bytes, position: int) -> tuple[LobHeader, int]:
    """Read only the header: LOB data follows the row, and its positions are unreliable."""
    options, length, _position = _LOB_HEADER.unpack_from(data, position)
    if length < 0:
        raise ProtocolError("the length of a LOB parameter is negative")
    return (data[position - 1], options & _LAST != 0, length), position + _LOB_HEADER.size


def _read_number(form: str) -> Reader:
    unpack, size = struct.Struct(form).unpack_from, struct.calcsize(form)
    return lambda data, position: (unpack(data, position)[0], position + size)


def _read_temporal(form: str, null: int, text: Callable[[int], str]) -> Reader:
    unpack, size = struct.Struct(form).unpack_from, struct.calcsize(form)

    def read(data: bytes, position: int) -> tuple[str | None, int]:
        number = unpack(data, position)[0]
        return (None if number in (null, 0) else text(number)), position + size

    return read


def _read_first_format(size: int, text: Callable[[bytes, int], str | None]) -> Reader:
    return lambda data, position: (text(data, position), position + size)


_READERS |= {
    TypeCode.TINYINT: _read_number("<B"),
    TypeCode.SMALLINT: _read_number("<h"),
    TypeCode.INTEGER: _read_number("<i"),
    TypeCode.BIGINT: _read_number("<q"),
    TypeCode.REAL: _read_number("<f"),
    TypeCode.DOUBLE: _read_number("<d"),
    TypeCode.DATE: _read_temporal("<i", temporal.NULL_DATE, temporal.date_text),
    TypeCode.TIME: _read_temporal("<i", temporal.NULL_TIME, temporal.time_text),
    TypeCode.SECONDDATE: _read_temporal("<q", temporal.NULL_SECONDDATE, temporal.seconddate_text),
    TypeCode.TIMESTAMP: _read_temporal("<q", temporal.NULL_TIMESTAMP, temporal.timestamp_text),
    FirstFormatCode.DATE: _read_first_format(temporal.FIRST_FORMAT_SIZE, temporal.first_format_date_text),
    FirstFormatCode.TIME: _read_first_format(temporal.FIRST_FORMAT_SIZE, temporal.first_format_time_text),
    FirstFormatCode.TIMESTAMP: _read_first_format(2 * temporal.FIRST_FORMAT_SIZE, temporal.first_format_timestamp_text),
}
# By declared type: the wire codes whose decoded value is already the storage value; other values are converted
_STRAIGHT: dict[TypeCode, frozenset[int]] = {
    **{code: frozenset({code}) for code in (*DATETIMES, TypeCode.BOOLEAN)},
    **{code: frozenset(codes) for codes in (INTEGERS, FLOATS, LOBS) for code in codes},
    **dict.fromkeys(STRINGS, _TEXT_CODES),
    **dict.fromkeys(BINARIES, _BINARY_CODES),
}


@_CONVERTERS(*INTEGERS)
def _to_integer(value: Any, type_: HanaType) -> int:
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError):
        raise invalid_number("a parameter is not an integer") from None


@_CONVERTERS(*FLOATS)
def _to_float(value: Any, type_: HanaType) -> float:
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        raise invalid_number("a parameter is not a number") from None


@_CONVERTERS(TypeCode.DECIMAL)
def _to_decimal(value: Any, type_: HanaType) -> str:
    return decimals.parse(str(value), decimals.fixed_scale(type_))


@_CONVERTERS(TypeCode.BOOLEAN)
def _to_boolean(value: Any, type_: HanaType) -> int:
    if isinstance(value, str):
        if value.upper() not in ("TRUE", "FALSE", "1", "0"):
            raise invalid_number("a parameter is not a BOOLEAN")
        return int(value.upper() in ("TRUE", "1"))
    return int(bool(value))


@_CONVERTERS(*STRINGS, *CHARACTER_LOBS)
def _to_text(value: Any, type_: HanaType) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@_CONVERTERS(*BINARIES, TypeCode.BLOB)
def _to_binary(value: Any, type_: HanaType) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@_CONVERTERS(*VECTORS)
def _to_vector(value: Any, type_: HanaType) -> bytes:
    """Check the fvecs format: a 4-byte dimension, then that many floats of the declared width."""
    if not isinstance(value, bytes) or len(value) < 4:
        raise HanaError(2048, "column store error: a vector parameter is not a vector")
    dimension = int.from_bytes(value[:4], "little")
    if len(value) != 4 + dimension * (2 if type_.code is TypeCode.HALF_VECTOR else 4):
        raise HanaError(
            2048, f"column store error: a vector parameter of {len(value)} bytes declares dimension {dimension}"
        )
    if type_.length not in (0, dimension):
        raise HanaError(2048, f"column store error: vector of dimension {dimension}, {type_.length} expected")
    return value


@_CONVERTERS(*DATETIMES)
def _to_moment(value: Any, type_: HanaType) -> str:
    """Return date or time in the declared format: truncate a longer value, add midnight to a date."""
    if not isinstance(value, str):
        raise HanaError(303, "invalid DATE, TIME or TIMESTAMP value")
    text = value.replace("T", " ")
    if type_.code is TypeCode.TIME:
        return text[11:19] if text[4:5] == "-" else text[:8]
    if type_.code is TypeCode.DATE:
        return text[:10]
    whole = text if len(text) > 10 else f"{text} 00:00:00"
    return whole[:19] if type_.code is TypeCode.SECONDDATE else f"{whole[:19]}.{whole[20:27].ljust(7, '0')}"


def _decoder(type_: HanaType) -> tuple[dict[int, Reader], Reader]:
    """Return the readers of values that need no conversion, by wire type, and a decoder for all others. The decoder
    takes the position of the type byte."""

    def read_fixed(data: bytes, position: int) -> tuple[Decimal, int]:
        end = position + decimals.FIXED_SIZES[data[position - 1]]
        return decimals.from_fixed(int.from_bytes(data[position:end], "little", signed=True), type_.scale), end

    readers = _READERS | dict.fromkeys(decimals.FIXED_SIZES, read_fixed)
    straight = {code: readers[code] for code in _STRAIGHT.get(type_.code, ())}
    convert = _CONVERTERS[type_.code]

    def decode(data: bytes, position: int) -> tuple[Any, int]:
        code = data[position]
        position += 1
        if code & _NULL:
            return None, position
        if code not in readers:
            raise ProtocolError(f"parameter of unknown wire type {code}")
        value, position = readers[code](data, position)
        if value is None or value.__class__ is tuple:
            return value, position
        return convert(value, type_), position

    return straight, decode


def _lob_decoder(type_: HanaType) -> Callable[[int, bytes], Storage]:
    """Return a function from a complete LOB's type code and data to the parameter's storage value."""
    if type_.code is TypeCode.BLOB or type_.code in BINARIES:
        return lambda code, data: data
    convert, is_text = _CONVERTERS[type_.code], type_.code in CHARACTER_LOBS

    def decode(code: int, data: bytes) -> Storage:
        if is_text and looks_like_vector(data):
            return data
        try:
            return convert(data if code == TypeCode.BLOB else cesu8.decode(data), type_)
        except UnicodeDecodeError:
            raise ProtocolError("a character LOB is not CESU-8") from None

    return decode


class ParameterDecoder:
    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._decoders = [_decoder(parameter.type) for parameter in parameters]
        self._lob_decoders = [_lob_decoder(parameter.type) for parameter in parameters]

    def rows(self, data: bytes, count: int) -> list[ParameterRow]:
        """Decode `count` rows in order. Raises ProtocolError for missing or extra bytes, HanaError for invalid values.

        A statement without parameters gets one empty row, for a count of 0 or 1.
        """
        if not self._decoders:
            if count not in (0, 1):
                raise ProtocolError(f"{count} parameter rows for a statement without parameters")
            count = 1
        rows: list[ParameterRow] = []
        position = 0
        try:
            for _ in range(count):
                row, position = self._row(data, position)
                rows.append(row)
        except (IndexError, struct.error):
            raise ProtocolError("parameters end inside a value") from None
        except UnicodeDecodeError:
            raise ProtocolError("a text parameter is not CESU-8") from None
        except (ValueError, OverflowError):
            raise HanaError(303, "invalid DATE, TIME or TIMESTAMP value: a parameter is out of range") from None
        if position != len(data):
            raise ProtocolError(f"{len(data) - position} bytes follow the last parameter row")
        return rows

    def _row(self, data: bytes, position: int) -> tuple[ParameterRow, int]:
        """One row and the position after it; data of LOBs follows the row's other values."""
        row: ParameterRow = []
        lobs = []
        for straight, decode in self._decoders:
            reader = straight.get(data[position])
            value, position = reader(data, position + 1) if reader else decode(data, position)
            if value.__class__ is tuple:
                lobs.append(len(row))
            row.append(value)
        for index in lobs:
            code, complete, length = row[index]
            end = position + length
            if end > len(data):
                raise ProtocolError("LOB data extends beyond its part")
            piece = data[position:end]
            position = end
            row[index] = self._lob_decoders[index](code, piece) if complete else LobInput(code, bytearray(piece))
        return row, position

    def lob_value(self, index: int, lob: LobInput) -> Storage:
        """The storage value of parameter `index`, whose LOB is complete."""
        return self._lob_decoders[index](lob.code, bytes(lob.data))


def looks_like_vector(data: bytes) -> bool:
    """Whether bytes for `TO_REAL_VECTOR(?)`, declared as NCLOB to accept text, are fvecs.

    Text passes this check only if its third and fourth bytes are NUL and its length matches its first two bytes.
    """
    if len(data) < 6 or data[2:4] != b"\0\0":
        return False
    dimension = int.from_bytes(data[:2], "little")
    return dimension > 0 and len(data) in (4 + 2 * dimension, 4 + 4 * dimension)
