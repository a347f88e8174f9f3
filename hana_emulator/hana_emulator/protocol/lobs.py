"""LOBs on the wire: locators for reading, requested pieces and written pieces."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from hana_emulator import cesu8
from hana_emulator.errors import HanaError
from hana_emulator.protocol.codes import LobOption, PartKind, ProtocolError
from hana_emulator.protocol.packet import Part

INLINE = 4096  # Units of a LOB that are sent in its row; clients read the rest piece by piece
# Bytes of LOBs kept for locators; beyond them the oldest are dropped, as clients read a row's LOBs soon after the row
KEPT_BYTES = 256 * 1024 * 1024

_READ_REQUEST = struct.Struct("<8sqi")
_READ_REPLY = struct.Struct("<8sBi3x")
_FIND_REQUEST = struct.Struct("<8sqi")
_FIND_REPLY = struct.Struct("<q")
_WRITE_REQUEST = struct.Struct("<8sBqi")


@dataclass(frozen=True, slots=True)
class LobValue:
    """A LOB behind a locator. Character LOBs are kept as UTF-16, because offsets count its units."""

    data: bytes
    character: bool

    def piece(self, offset: int, length: int) -> tuple[bytes, bool]:
        """Up to `length` units as wire bytes from the 0-based unit `offset`, and whether they are the last."""
        width = 2 if self.character else 1
        end = (offset + length) * width
        raw = self.data[offset * width : end]
        return (cesu8.from_units(raw) if self.character else raw), end >= len(self.data)

    def find(self, pattern: bytes, offset: int) -> int:
        """The 0-based unit where `pattern` (wire bytes) first occurs at or after `offset`; -1 if absent."""
        if not self.character:
            return self.data.find(pattern, offset)
        wanted = cesu8.units(cesu8.decode(pattern))
        at = self.data.find(wanted, 2 * offset)
        while at % 2:  # odd: a match across two units, or -1 (absent)
            if at < 0:
                return -1
            at = self.data.find(wanted, at + 1)
        return at // 2


class LobStore:
    """The LOBs that the client may still read, by locator. `taken` counts all bytes ever stored."""

    def __init__(self) -> None:
        self._values: dict[bytes, LobValue] = {}
        self._next = 1
        self._kept = 0
        self.taken = 0

    def new_locator(self) -> bytes:
        locator = struct.pack("<q", self._next)
        self._next += 1
        return locator

    def keep(self, value: LobValue) -> bytes:
        locator = self.new_locator()
        self._values[locator] = value
        self.taken += len(value.data)
        self._kept += len(value.data)
        while self._kept > KEPT_BYTES and len(self._values) > 1:
            self._kept -= len(self._values.pop(next(iter(self._values))).data)
        return locator

    def read(self, part: Part) -> Part:
        """The READLOBREPLY part for a READLOBREQUEST part."""
        try:
            locator, offset, length = _READ_REQUEST.unpack_from(part.data)
        except struct.error:
            raise ProtocolError("LOB read request is too short") from None
        if length < 0:
            raise ProtocolError("LOB read request of negative length")
        data, last = self._value(locator, offset - 1).piece(offset - 1, length)
        options = LobOption.DATA | (LobOption.LAST if last else 0)
        return Part(PartKind.READLOBREPLY, _READ_REPLY.pack(locator, options, len(data)) + data)

    def find(self, part: Part) -> Part:
        """The FINDLOBREPLY part for a FINDLOBREQUEST part. As observed with hdbcli, offset and result are 0-based."""
        try:
            locator, offset, length = _FIND_REQUEST.unpack_from(part.data)
        except struct.error:
            raise ProtocolError("LOB find request is too short") from None
        pattern = part.data[_FIND_REQUEST.size : _FIND_REQUEST.size + max(length, 0)]
        try:
            position = self._value(locator, offset).find(pattern, offset)
        except UnicodeDecodeError:
            raise ProtocolError("LOB pattern is not CESU-8") from None
        return Part(PartKind.FINDLOBREPLY, _FIND_REPLY.pack(position))

    def _value(self, locator: bytes, offset: int) -> LobValue:
        value = self._values.get(locator)
        if value is None:
            raise HanaError(2, "general error: LOB locator is unknown or no longer kept")
        if offset < 0:
            raise ProtocolError("LOB offset is negative")
        return value


@dataclass(slots=True)
class LobInput:
    """A LOB parameter value whose first data came with its row; WRITELOB brings the rest."""

    code: int
    data: bytearray


def parse_write_request(part: Part) -> Iterator[tuple[bytes, bytes, bool]]:
    """Locator and data of each piece of a WRITELOBREQUEST part, and whether the piece is the last. Offsets are ignored,
    because clients only append."""
    position = 0
    for _ in range(part.count):
        try:
            locator, options, _offset, length = _WRITE_REQUEST.unpack_from(part.data, position)
        except struct.error:
            raise ProtocolError("LOB write request is too short") from None
        start = position + _WRITE_REQUEST.size
        position = start + length
        if length < 0 or position > len(part.data):
            raise ProtocolError("LOB piece ends after its part")
        yield locator, part.data[start:position], bool(options & LobOption.LAST)


def write_reply(locators: list[bytes]) -> Part:
    return Part(PartKind.WRITELOBREPLY, b"".join(locators), len(locators))
