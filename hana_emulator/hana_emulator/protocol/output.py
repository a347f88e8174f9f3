"""Encode result rows from storage values to wire bytes, with one encoder for each column."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from hana_emulator import cesu8
from hana_emulator.errors import HanaError
from hana_emulator.protocol import decimals, temporal
from hana_emulator.protocol.codes import DataFormat, FirstFormatCode, LobOption
from hana_emulator.protocol.decimals import FIXED_SIZES
from hana_emulator.protocol.lobs import INLINE, LobStore, LobValue
from hana_emulator.protocol.metadata import wire_code
from hana_emulator.seam import StorageRow
from hana_emulator.types import LOBS, Column, HanaType, TypeCode

FieldEncoder = Callable[[Any], bytes]
RowEncoder = Callable[[StorageRow], bytes]

PAGE_BYTES = 256 * 1024
PAGE_LOB_BYTES = 32 * 1024 * 1024  # A page also ends when the LOBs kept for its locators reach this size

_MISTYPED = (struct.error, TypeError, ValueError, AttributeError, ArithmeticError)
_NULL_FLAG = b"\x00"
_NULL_BYTES = b"\xff"
_SHORT = [bytes([n]) for n in range(246)]
_pack_i16 = struct.Struct("<BH").pack
_pack_i32 = struct.Struct("<BI").pack


def prefixed(data: bytes) -> bytes:
    """Prefix `data` with its length: one byte up to 245; byte 246 and i16 up to 32,767; else byte 247 and i32."""
    size = len(data)
    if size <= 245:
        return _SHORT[size] + data
    if size <= 32_767:
        return _pack_i16(246, size) + data
    return _pack_i32(247, size) + data


def _text(value: str | None) -> bytes:
    if value is None:
        return _NULL_BYTES
    return prefixed(value.encode() if value.isascii() else cesu8.encode(value))


def _binary(value: bytes | None) -> bytes:
    return _NULL_BYTES if value is None else prefixed(value)


def _integer(form: str) -> FieldEncoder:
    pack = struct.Struct(form).pack
    return lambda value: _NULL_FLAG if value is None else pack(1, value)


def _float(form: str) -> FieldEncoder:
    pack = struct.Struct(form).pack
    null = b"\xff" * struct.calcsize(form)
    return lambda value: null if value is None else pack(value)


def _temporal(form: str, null: int, number: Callable[[str], int]) -> FieldEncoder:
    pack = struct.Struct(form).pack
    absent = pack(null)
    return lambda value: absent if value is None else pack(number(value))


def _first_format(pack: Callable[[str], bytes], size: int) -> FieldEncoder:
    absent = bytes(size)
    return lambda value: absent if value is None else pack(value)


_LOB_KIND = {TypeCode.BLOB: 1, TypeCode.NCLOB: 3}
_pack_lob = struct.Struct("<BB2xqq8si").pack
_NO_LOCATOR = bytes(8)
_WHOLE = LobOption.DATA | LobOption.LAST


_ENCODERS: dict[int, FieldEncoder] = {
    TypeCode.TINYINT: _integer("<BB"),
    TypeCode.SMALLINT: _integer("<Bh"),
    TypeCode.INTEGER: _integer("<Bi"),
    TypeCode.BIGINT: _integer("<Bq"),
    TypeCode.REAL: _float("<f"),
    TypeCode.DOUBLE: _float("<d"),
    TypeCode.BOOLEAN: lambda value: b"\x01" if value is None else b"\x02" if value else b"\x00",
    TypeCode.DECIMAL: lambda value: decimals.NULL_DECIMAL if value is None else decimals.encode(value),
    TypeCode.DATE: _temporal("<i", temporal.NULL_DATE, temporal.date_number),
    TypeCode.TIME: _temporal("<i", temporal.NULL_TIME, temporal.time_number),
    TypeCode.SECONDDATE: _temporal("<q", temporal.NULL_SECONDDATE, temporal.seconddate_number),
    TypeCode.TIMESTAMP: _temporal("<q", temporal.NULL_TIMESTAMP, temporal.timestamp_number),
    FirstFormatCode.DATE: _first_format(temporal.first_format_date, temporal.FIRST_FORMAT_SIZE),
    FirstFormatCode.TIME: _first_format(temporal.first_format_time, temporal.FIRST_FORMAT_SIZE),
    FirstFormatCode.TIMESTAMP: _first_format(temporal.first_format_timestamp, 2 * temporal.FIRST_FORMAT_SIZE),
    **dict.fromkeys((TypeCode.NCHAR, TypeCode.NVARCHAR, TypeCode.STRING), _text),
    **dict.fromkeys((TypeCode.BINARY, TypeCode.VARBINARY, TypeCode.REAL_VECTOR, TypeCode.HALF_VECTOR), _binary),
}


def field_encoder(type_: HanaType, store: LobStore, data_format: int = DataFormat.LATEST) -> FieldEncoder:
    code = wire_code(type_, data_format)
    if code in LOBS:
        kind = _LOB_KIND[TypeCode(code)]
        null = bytes([kind, LobOption.NULL])

        def whole(units: int, data: bytes) -> bytes:
            return _pack_lob(kind, _WHOLE, units, len(data), _NO_LOCATOR, len(data)) + data

        def partial(value: LobValue, units: int, size: int) -> bytes:
            data, _last = value.piece(0, INLINE)
            return _pack_lob(kind, LobOption.DATA, units, size, store.keep(value), len(data)) + data

        def characters(value: str | None) -> bytes:
            if value is None:
                return null
            if len(value) <= INLINE and value.isascii():
                return whole(len(value), value.encode())
            units = cesu8.units(value)
            count = len(units) // 2
            data = cesu8.encode(value)
            return whole(count, data) if count <= INLINE else partial(LobValue(units, True), count, len(data))

        def binary(value: bytes | None) -> bytes:
            if value is None:
                return null
            size = len(value)
            return whole(size, value) if size <= INLINE else partial(LobValue(value, False), size, size)

        return binary if code == TypeCode.BLOB else characters
    if code in FIXED_SIZES:
        return lambda value: (
            _NULL_FLAG
            if value is None
            else b"\x01" + decimals.to_fixed(value, type_.scale).to_bytes(FIXED_SIZES[code], "little", signed=True)
        )
    return _ENCODERS[code]


def row_encoder(columns: Sequence[Column], store: LobStore, data_format: int = DataFormat.LATEST) -> RowEncoder:
    """An encoder for rows. It raises HanaError 2048 if a value does not have its column's declared type; the error
    names the column and the two types, never the value."""
    encoders = [field_encoder(column.type, store, data_format) for column in columns]

    def encode(row: StorageRow) -> bytes:
        try:
            return b"".join([encoder(value) for encoder, value in zip(encoders, row, strict=True)])
        except _MISTYPED:
            fault = f"row of {len(row)} values for {len(columns)} columns"
        for column, encoder, value in zip(columns, encoders, row, strict=False):
            try:
                encoder(value)
            except _MISTYPED:
                fault = f"column {column.name} is {column.type.name}, value is {type(value).__name__}"
                break
        raise HanaError(2048, f"column store error: {fault}")

    return encode


class ResultSet:
    """An open cursor: encodes the next page of rows on demand."""

    def __init__(
        self,
        rows: Iterator[StorageRow],
        columns: Sequence[Column],
        store: LobStore,
        data_format: int = DataFormat.LATEST,
    ) -> None:
        self._rows = rows
        self._encode = row_encoder(columns, store, data_format)
        self._store = store
        self._waiting: tuple[StorageRow, ...] = ()
        self.exhausted = False

    def page(self, max_rows: int) -> tuple[bytes, int]:
        """Encode up to `max_rows` rows (fewer if the page is full); return them and their number. Sets `exhausted`."""
        encode, store, pieces, size = self._encode, self._store, [], 0
        lob_limit = store.taken + PAGE_LOB_BYTES
        for row in islice(chain(self._waiting, self._rows), max_rows):
            piece = encode(row)
            pieces.append(piece)
            size += len(piece)
            if size >= PAGE_BYTES or store.taken >= lob_limit:
                break
        self._waiting = tuple(islice(self._rows, 1))
        self.exhausted = not self._waiting
        return b"".join(pieces), len(pieces)

    def close(self) -> None:
        """Release the source of the rows without waiting for the garbage collector."""
        if isinstance(self._rows, Generator):
            self._rows.close()
