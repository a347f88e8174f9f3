"""Coverage-guided fuzzing of everything that reads bytes of clients: `python -m tests.fuzz.packet_target CORPUS...`

The first byte of an input chooses the reader. Only ProtocolError and HanaError may come out of one.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(include=["hana_emulator"]):
    from hana_emulator import cesu8
    from hana_emulator.errors import HanaError
    from hana_emulator.protocol import authentication, lobs, options, packet
    from hana_emulator.protocol.codes import PartKind, ProtocolError
    from hana_emulator.protocol.input import ParameterDecoder
    from hana_emulator.protocol.output import row_encoder
    from hana_emulator.protocol.packet import Part
    from hana_emulator.types import Column, HanaType, Parameter, TypeCode

_SIZED = {
    TypeCode.DECIMAL: (15, 3),
    TypeCode.REAL_VECTOR: (3, 0),
    TypeCode.NVARCHAR: (20, 0),
    TypeCode.VARCHAR: (20, 0),
}
_CODES = [
    *(TypeCode.TINYINT, TypeCode.SMALLINT, TypeCode.INTEGER, TypeCode.BIGINT, TypeCode.DECIMAL, TypeCode.REAL),
    *(TypeCode.DOUBLE, TypeCode.NVARCHAR, TypeCode.VARBINARY, TypeCode.NCLOB, TypeCode.CLOB, TypeCode.BLOB),
    *(TypeCode.BOOLEAN, TypeCode.DATE, TypeCode.TIME, TypeCode.SECONDDATE, TypeCode.TIMESTAMP),
    *(TypeCode.REAL_VECTOR, TypeCode.HALF_VECTOR),
]
TYPES = [HanaType(code, *_SIZED.get(code, (0, 0))) for code in _CODES]
TYPES += [HanaType(TypeCode.DECIMAL, 34, 32_767), HanaType(TypeCode.REAL_VECTOR)]
_CHALLENGE = authentication.Challenge("OWL", b"SCRAMSHA256", bytes(64), bytes(16), bytes(48))


def _request(data: bytes) -> None:
    if len(data) >= packet.PACKET_HEADER_SIZE:
        with contextlib.suppress(ProtocolError):
            packet.parse_packet_header(data[: packet.PACKET_HEADER_SIZE])
    request = packet.parse_request(data[packet.PACKET_HEADER_SIZE :])
    for kind in PartKind:
        request.find(kind)


def _parameters(data: bytes) -> None:
    """Whatever is decoded can be sent back, or is refused by name: never a value that the encoder stumbles over."""
    if len(data) < 3:
        return
    count = data[2] if data[2] < 200 else 2**31 - 1
    kinds = [TYPES[data[0] % len(TYPES)], TYPES[data[1] % len(TYPES)]]
    for types in (kinds[:1], kinds):
        rows = ParameterDecoder([Parameter(kind) for kind in types]).rows(data[3:], count)
        store = lobs.LobStore()
        encode = row_encoder([Column("C", kind) for kind in types], store)
        for row in rows:
            if not any(isinstance(value, lobs.LobInput) for value in row):
                encode(row)


def _options(data: bytes) -> None:
    count = struct.unpack_from("<i", data)[0] if len(data) >= 4 else 1
    part = Part(PartKind.CONNECTOPTIONS, data[4:], count)
    with contextlib.suppress(ProtocolError):
        options.parse_options(part)
    options.parse_client_info(part)


def _login(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        authentication.begin(data)
    _CHALLENGE.verify(data, "secret")


def _lobs(data: bytes) -> None:
    store = lobs.LobStore()
    store.keep(lobs.LobValue("text 😀 text".encode("utf-16-le"), True))
    store.keep(lobs.LobValue(b"bytes", False))
    for kind, read in ((PartKind.READLOBREQUEST, store.read), (PartKind.FINDLOBREQUEST, store.find)):
        with contextlib.suppress(ProtocolError, HanaError):
            read(Part(kind, data))
    list(lobs.parse_write_request(Part(PartKind.WRITELOBREQUEST, data[1:], data[0] if data else 0)))


def _text(data: bytes) -> None:
    with contextlib.suppress(UnicodeDecodeError):
        text = cesu8.decode(data)
        assert cesu8.decode(cesu8.encode(text)) == text


READERS: list[Callable[[bytes], None]] = [_request, _parameters, _options, _login, _lobs, _text]


def run(data: bytes) -> None:
    if data:
        with contextlib.suppress(ProtocolError, HanaError):
            READERS[data[0] % len(READERS)](data[1:])


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
