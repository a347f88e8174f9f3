"""Packet, segment and part frames, and the handshake."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from hana_emulator.protocol.codes import PartAttribute, PartKind, ProtocolError

HANDSHAKE_REQUEST_SIZE = 14
# Product version, protocol version, filler: all SAP clients accept this reply
HANDSHAKE_REPLY = bytes([0x04, 0x14, 0x00, 0x04, 0x01, 0x00, 0x00, 0x00])

PACKET_HEADER_SIZE = 32
# Longer packets are rejected before memory is allocated for them (hdbcli's default packet is 1 MB)
MAX_PACKET = 256 * 1024 * 1024

_PACKET = struct.Struct("<qiIIhBxI4x")
_REQUEST_SEGMENT = struct.Struct("<iihhbbbB8x")
_REPLY_SEGMENT = struct.Struct("<iihhbxh8x")
_PART = struct.Struct("<bbhiii")
_COMPRESSED = 2
_REQUEST, _REPLY, _ERROR = 1, 2, 5
_BIG_COUNT = 32_767


@dataclass(frozen=True, slots=True)
class Part:
    """`count` is the number of arguments in `data` (rows of a result set, entries of an option list ...)."""

    kind: int
    data: bytes
    count: int = 1
    attributes: int = PartAttribute.NONE


@dataclass(frozen=True, slots=True)
class Request:
    """A request segment. `autocommit`: commit after success. `message_type` may be unknown."""

    message_type: int
    autocommit: bool
    parts: tuple[Part, ...]

    def find(self, kind: PartKind) -> Part | None:
        return next((part for part in self.parts if part.kind == kind), None)

    def part(self, kind: PartKind) -> Part:
        found = self.find(kind)
        if found is None:
            raise ProtocolError(f"message type {self.message_type} lacks its {kind.name} part")
        return found


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply segment; with `error` its first part is an ERROR part."""

    function_code: int
    parts: tuple[Part, ...] = ()
    error: bool = False


def check_handshake(data: bytes) -> None:
    """Raise ProtocolError unless this is a HANA handshake; versions are ignored."""
    if len(data) != HANDSHAKE_REQUEST_SIZE or data[:4] != b"\xff\xff\xff\xff":
        raise ProtocolError("no HANA handshake (is this a TLS or HTTP client?)")


def parse_packet_header(data: bytes) -> tuple[int, int]:
    """The packet's number, and how many bytes follow the header."""
    _session_id, packet_count, length, _size, segments, options, _compressed = _PACKET.unpack(data)
    if options & _COMPRESSED:
        raise ProtocolError("compressed packet, though compression was never agreed")
    if segments != 1:
        raise ProtocolError(f"{segments} segments in a packet, 1 expected")
    if length > MAX_PACKET:
        raise ProtocolError(f"packet of {length} bytes is longer than {MAX_PACKET}")
    return packet_count, length


def parse_request(body: bytes) -> Request:
    """Parse the only segment of a request, from the bytes after the packet header."""
    if len(body) < _REQUEST_SEGMENT.size:
        raise ProtocolError("packet ends inside the segment header")
    length, _offset, count, _number, kind, message_type, commit, _options = _REQUEST_SEGMENT.unpack_from(body)
    if kind != _REQUEST:
        raise ProtocolError(f"segment kind {kind}, {_REQUEST} (request) expected")
    if not _REQUEST_SEGMENT.size <= length <= len(body):
        raise ProtocolError(f"segment length {length} does not fit a packet of {len(body)} bytes")
    return Request(message_type, bool(commit), tuple(_parts(body, length, count)))


def _parts(body: bytes, end: int, count: int) -> Iterator[Part]:
    position = _REQUEST_SEGMENT.size
    for _ in range(count):
        start = position + _PART.size
        if start > end:
            raise ProtocolError("packet ends inside a part header")
        kind, attributes, arguments, big_arguments, length, _size = _PART.unpack_from(body, position)
        if not 0 <= length <= end - start:
            raise ProtocolError(f"part of kind {kind} has length {length}, {end - start} bytes are left")
        yield Part(kind, body[start : start + length], big_arguments if arguments == -1 else arguments, attributes)
        position = start + _padded(length)


def _padded(length: int) -> int:
    return (length + 7) & ~7


def build_reply(session_id: int, packet_count: int, reply: Reply) -> bytes:
    """Build a packet. The AUTHENTICATE reply needs session id 0, the CONNECT reply the new id."""
    pieces = []
    for part in reply.parts:
        size = len(part.data)
        small, big = (part.count, 0) if part.count <= _BIG_COUNT else (-1, part.count)
        head = _PART.pack(part.kind, part.attributes, small, big, size, _padded(size))
        pieces += [head, part.data, bytes(_padded(size) - size)]
    parts = b"".join(pieces)
    length = _REPLY_SEGMENT.size + len(parts)
    kind = _ERROR if reply.error else _REPLY
    return b"".join(
        (
            _PACKET.pack(session_id, packet_count, length, max(length, 1 << 20), 1, 0, 0),
            _REPLY_SEGMENT.pack(length, 0, len(reply.parts), 1, kind, reply.function_code),
            parts,
        )
    )
