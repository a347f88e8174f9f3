"""The CLIENTINFO part: session variables in a driver's request (setclientinfo and similar)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from hana_emulator import cesu8
from hana_emulator.protocol.codes import ProtocolError
from hana_emulator.protocol.packet import Part

_WIDE_LENGTHS = {246: struct.Struct("<H"), 247: struct.Struct("<I")}


def parse(part: Part) -> dict[str, str]:
    """Parse the part to {name: value}. Raises ProtocolError if it is too short or too long.

    hdbcli and go-hdb count pairs in the part, node-hdb counts texts.
    """
    try:
        texts = list(_texts(part.data))
    except (IndexError, struct.error, UnicodeDecodeError):
        raise ProtocolError("client information is broken") from None
    if len(texts) % 2 or len(texts) not in (part.count, 2 * part.count):
        raise ProtocolError(f"client information counts {part.count} entries and holds {len(texts)} texts")
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _texts(data: bytes) -> Iterator[str]:
    position = 0
    while position < len(data):
        length = data[position]
        position += 1
        if wide := _WIDE_LENGTHS.get(length):
            (length,) = wide.unpack_from(data, position)
            position += wide.size
        raw = data[position : position + length]
        if len(raw) < length:
            raise IndexError
        position += length
        yield cesu8.decode(raw)
