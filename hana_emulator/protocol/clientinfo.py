"""The CLIENTINFO part: session variables that a driver sends with a request (setclientinfo and the like)."""

from __future__ import annotations

import struct

from hana_emulator import cesu8
from hana_emulator.protocol.codes import ProtocolError
from hana_emulator.protocol.packet import Part

_WIDE_LENGTHS = {246: struct.Struct("<H"), 247: struct.Struct("<I")}


def parse(part: Part) -> dict[str, str]:
    """Name and value of each pair. Raises ProtocolError where the part ends early."""
    position = 0

    def text() -> str:
        nonlocal position
        length = part.data[position]
        position += 1
        if wide := _WIDE_LENGTHS.get(length):
            (length,) = wide.unpack_from(part.data, position)
            position += wide.size
        raw = part.data[position : position + length]
        if len(raw) < length:
            raise IndexError
        position += length
        return cesu8.decode(raw)

    try:
        return {text(): text() for _ in range(part.count)}
    except (IndexError, struct.error, UnicodeDecodeError):
        raise ProtocolError("client information is broken") from None
