"""Metadata parts: a result's columns and the declared types of a statement's parameters."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hana_emulator import cesu8
from hana_emulator.protocol.codes import DataFormat, FirstFormatCode, PartKind
from hana_emulator.protocol.decimals import FLOATING_SCALE, fixed_scale
from hana_emulator.protocol.packet import Part
from hana_emulator.types import MAX_LENGTH, Column, HanaType, Parameter, TypeCode

_COLUMN = struct.Struct("<Bbhh2xIIII")
_PARAMETER = struct.Struct("<BbBxIhh4x")
_NO_NAME = 0xFFFFFFFF
_NOT_NULL, _NULLABLE = 1, 2
_MODE_IN = 1
_LONGEST_NAME = 255
# Types whose wire form differs between protocol versions are announced as the equivalent basic type. The last three
# hold Unicode in HANA Cloud, and clients decode CESU-8 only in the N types. Source: go-hdb,
# `driver/internal/types/types.go`, "since hdb version 4: char equals nchar".
_ON_THE_WIRE = {
    TypeCode.ALPHANUM: TypeCode.NVARCHAR,
    TypeCode.SHORTTEXT: TypeCode.NVARCHAR,
    TypeCode.TEXT: TypeCode.NCLOB,
    TypeCode.CHAR: TypeCode.NCHAR,
    TypeCode.VARCHAR: TypeCode.NVARCHAR,
    TypeCode.CLOB: TypeCode.NCLOB,
}
_FIRST_FORMAT = {
    TypeCode.DATE: FirstFormatCode.DATE,
    TypeCode.TIME: FirstFormatCode.TIME,
    TypeCode.SECONDDATE: FirstFormatCode.TIMESTAMP,
    TypeCode.TIMESTAMP: FirstFormatCode.TIMESTAMP,
}
# Greatest precision of each fixed-point type. Source: go-hdb, `driver/columntype_test.go`.
_FIXED = ((18, TypeCode.FIXED8), (28, TypeCode.FIXED12), (38, TypeCode.FIXED16))


def wire_code(type_: HanaType, data_format: int = DataFormat.LATEST) -> int:
    """The type code of `type_` for a client with this data format."""
    code = type_.code
    if code is TypeCode.DECIMAL and data_format >= DataFormat.FIXED and fixed_scale(type_) is not None:
        return next(fixed for precision, fixed in _FIXED if type_.length <= precision)
    if code is TypeCode.BOOLEAN and data_format < DataFormat.BOOLEAN:
        return TypeCode.TINYINT
    if code in _FIRST_FORMAT and data_format < DataFormat.DATES:
        return _FIRST_FORMAT[code]
    return _ON_THE_WIRE.get(code, code)


def _wire_scale(type_: HanaType) -> int:
    return FLOATING_SCALE if type_.code is TypeCode.DECIMAL and fixed_scale(type_) is None else type_.scale


def _nullability(nullable: bool) -> int:
    return _NULLABLE if nullable else _NOT_NULL


class _NamePool:
    """Names stored after the fixed-size entries, without duplicates, addressed by offset."""

    def __init__(self) -> None:
        self._offsets: dict[str, int] = {}
        self._pieces: list[bytes] = []
        self._size = 0

    def offset(self, name: str) -> int:
        if not name:
            return _NO_NAME
        if name not in self._offsets:
            text = cesu8.encode(name)[:_LONGEST_NAME]
            self._offsets[name] = self._size
            self._pieces.append(bytes([len(text)]) + text)
            self._size += 1 + len(text)
        return self._offsets[name]

    def data(self) -> bytes:
        return b"".join(self._pieces)


def result_metadata(columns: Sequence[Column], data_format: int = DataFormat.LATEST) -> Part:
    pool = _NamePool()
    entries = [
        _COLUMN.pack(
            _nullability(column.nullable),
            wire_code(column.type, data_format),
            _wire_scale(column.type),
            min(column.type.length, MAX_LENGTH),
            pool.offset(column.table),
            pool.offset(column.schema),
            pool.offset(column.name),
            pool.offset(column.name),
        )
        for column in columns
    ]
    return Part(PartKind.RESULTSETMETADATA, b"".join(entries) + pool.data(), len(columns))


def parameter_metadata(parameters: Sequence[Parameter], data_format: int = DataFormat.LATEST) -> Part:
    pool = _NamePool()
    entries = [
        _PARAMETER.pack(
            _nullability(parameter.nullable),
            wire_code(parameter.type, data_format),
            _MODE_IN,
            pool.offset(parameter.name),
            min(parameter.type.length, MAX_LENGTH),
            _wire_scale(parameter.type),
        )
        for parameter in parameters
    ]
    return Part(PartKind.PARAMETERMETADATA, b"".join(entries) + pool.data(), len(parameters))
