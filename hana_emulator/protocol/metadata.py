"""Metadata parts: what columns a result has and what types a statement's parameters are declared as."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hana_emulator import cesu8
from hana_emulator.protocol.codes import PartKind
from hana_emulator.protocol.decimals import FLOATING_SCALE, LONGEST_MANTISSA, fixed_scale
from hana_emulator.protocol.packet import Part
from hana_emulator.types import MAX_LENGTH, Column, HanaType, Parameter, TypeCode

_COLUMN = struct.Struct("<Bbhh2xIIII")
_PARAMETER = struct.Struct("<BbBxIhh4x")
_NO_NAME = 0xFFFFFFFF
_NOT_NULL, _NULLABLE = 1, 2
_MODE_IN = 1
_LONGEST_NAME = 255
_ON_THE_WIRE = {
    TypeCode.ALPHANUM: TypeCode.NVARCHAR,
    TypeCode.SHORTTEXT: TypeCode.NVARCHAR,
    TypeCode.TEXT: TypeCode.NCLOB,
}
"""Types whose own wire forms differ between protocol versions are announced as the plain type they hold."""


def wire_code(type_: HanaType) -> TypeCode:
    """The type code that announces and encodes values of `type_`."""
    if type_.code is TypeCode.DECIMAL and type_.length > LONGEST_MANTISSA and fixed_scale(type_) is not None:
        return TypeCode.FIXED16
    return _ON_THE_WIRE.get(type_.code, type_.code)


def _wire_scale(type_: HanaType) -> int:
    return FLOATING_SCALE if type_.code is TypeCode.DECIMAL and fixed_scale(type_) is None else type_.scale


def _nullability(nullable: bool) -> int:
    return _NULLABLE if nullable else _NOT_NULL


class _NamePool:
    """Names behind the fixed entries, each once, addressed by offset."""

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


def result_metadata(columns: Sequence[Column]) -> Part:
    pool = _NamePool()
    entries = [
        _COLUMN.pack(
            _nullability(column.nullable),
            wire_code(column.type),
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


def parameter_metadata(parameters: Sequence[Parameter]) -> Part:
    pool = _NamePool()
    entries = [
        _PARAMETER.pack(
            _nullability(parameter.nullable),
            wire_code(parameter.type),
            _MODE_IN,
            pool.offset(parameter.name),
            min(parameter.type.length, MAX_LENGTH),
            _wire_scale(parameter.type),
        )
        for parameter in parameters
    ]
    return Part(PartKind.PARAMETERMETADATA, b"".join(entries) + pool.data(), len(parameters))
