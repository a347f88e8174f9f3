"""Option lists: typed key/value pairs of the connect, transaction flags and similar parts."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from hana_emulator import cesu8
from hana_emulator.protocol.codes import PartKind, ProtocolError
from hana_emulator.protocol.packet import Part

Option = bool | int | float | str
_BOOLEAN, _TINYINT, _INT, _BIGINT, _DOUBLE, _STRING, _NSTRING, _BSTRING = 28, 1, 3, 4, 7, 29, 30, 33
_FIXED = {
    _BOOLEAN: struct.Struct("<?"),
    _TINYINT: struct.Struct("<B"),
    _INT: struct.Struct("<i"),
    _BIGINT: struct.Struct("<q"),
    _DOUBLE: struct.Struct("<d"),
}
_KEY = struct.Struct("<bb")
_LENGTH = struct.Struct("<h")


def option_part(kind: PartKind, options: Mapping[int, Option]) -> Part:
    data = b"".join(_encode(key, value) for key, value in options.items())
    return Part(kind, data, len(options))


def _encode(key: int, value: Option) -> bytes:
    if isinstance(value, str):
        text = value.encode()
        return _KEY.pack(key, _STRING) + _LENGTH.pack(len(text)) + text
    code = _BOOLEAN if isinstance(value, bool) else _INT if isinstance(value, int) else _DOUBLE
    return _KEY.pack(key, code) + _FIXED[code].pack(value)


def parse_options(part: Part) -> dict[int, Option]:
    """Parse an option list. Raises ProtocolError if the list is too short or an option has an unknown type."""
    options: dict[int, Option] = {}
    position = 0
    try:
        for _ in range(part.count):
            key, code = _KEY.unpack_from(part.data, position)
            options[key], position = _decode(part.data, position + _KEY.size, code)
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"option list of part {part.kind} is broken: {error}") from None
    return options


def _decode(data: bytes, position: int, code: int) -> tuple[Option, int]:
    if fixed := _FIXED.get(code):
        value: Option = fixed.unpack_from(data, position)[0]
        return value, position + fixed.size
    if code not in (_STRING, _NSTRING, _BSTRING):
        raise ProtocolError(f"option of unknown type {code}")
    (length,) = _LENGTH.unpack_from(data, position)
    start = position + _LENGTH.size
    if not 0 <= length <= len(data) - start:
        raise ProtocolError("an option ends after its part")
    raw = data[start : start + length]
    text = raw.decode("latin-1" if code == _BSTRING else "utf-8")
    return text, start + length


# --- CLIENTINFO: session variables in a driver's request --------------------------------------------------------------

_WIDE_LENGTHS = {246: struct.Struct("<H"), 247: struct.Struct("<I")}


def parse_client_info(part: Part) -> dict[str, str]:
    """Parse the part to {name: value}. Raises ProtocolError for invalid data or a wrong count.

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
