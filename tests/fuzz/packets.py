"""Request packets as bytes: cutting a stream into packets, damaging them, and a model of how a server reads them.

Written from the protocol's description; shares no code with the codec under test.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

HANDSHAKE_SIZE = 14
HEADER_SIZE = 32
_LENGTH_AT, _SEGMENTS_AT, _OPTIONS_AT = 12, 20, 22
_PARTS_AT, _MESSAGE_AT, COMMIT_AT = 40, 45, 46
_LONGEST = 256 * 1024 * 1024
EXECUTE_DIRECT, PREPARE, AUTHENTICATE, CONNECT, COMMIT, DISCONNECT = 2, 3, 65, 66, 67, 77
_COMMAND_PART = 3


def size_of(header: bytes) -> int:
    return int(HEADER_SIZE + struct.unpack_from("<I", header, _LENGTH_AT)[0])


def split(stream: bytes) -> list[bytes]:
    """The packets of a recorded connection, without its handshake."""
    packets, position = [], HANDSHAKE_SIZE
    while position < len(stream):
        size = size_of(stream[position : position + HEADER_SIZE])
        packets.append(stream[position : position + size])
        position += size
    return packets


def message_type(packet: bytes) -> int:
    return packet[_MESSAGE_AT] if len(packet) > _MESSAGE_AT else 0


def after_login(packets: Sequence[bytes]) -> list[bytes]:
    """What a client sent once it was logged in, without its goodbye."""
    first = [message_type(packet) for packet in packets].index(CONNECT) + 1
    return [packet for packet in packets[first:] if message_type(packet) != DISCONNECT]


def command(packet: bytes) -> bytes | None:
    """The statement text of a packet, None when it has none."""
    (count,) = struct.unpack_from("<h", packet, _PARTS_AT)
    position = HEADER_SIZE + 24
    for _ in range(count):
        if position + 16 > len(packet):
            return None
        kind, _attributes, _small, _big, length = struct.unpack_from("<bbhii", packet, position)
        if kind == _COMMAND_PART:
            return packet[position + 16 : position + 16 + length]
        position += 16 + max(length, 0) + -length % 8
    return None


@dataclass
class Reading:
    """How a server reads what is sent to it: `sent` takes bytes and gives the whole packets among them. After `broken`
    it reads no more: a header that no server of this protocol accepts."""

    pending: bytearray = field(default_factory=bytearray)
    broken: bool = False

    def sent(self, data: bytes) -> Iterator[bytes]:
        self.pending += data
        while not self.broken and len(self.pending) >= HEADER_SIZE:
            header = bytes(self.pending[:HEADER_SIZE])
            (segments,) = struct.unpack_from("<h", header, _SEGMENTS_AT)
            size = size_of(header)
            if segments != 1 or header[_OPTIONS_AT] & 2 or size > HEADER_SIZE + _LONGEST:
                self.broken = True
            elif len(self.pending) < size:
                return
            else:
                yield bytes(self.pending[:size])
                del self.pending[:size]


def may_commit(packet: bytes, known: frozenset[bytes]) -> bool:
    """Whether a server could rightly commit something because of `packet`: a COMMIT, autocommit, or a statement that
    nobody wrote (`known` are those of the recording; none of them commits by itself)."""
    kind = message_type(packet)
    if kind == COMMIT or len(packet) <= COMMIT_AT or packet[COMMIT_AT]:
        return True
    return kind in (EXECUTE_DIRECT, PREPARE) and command(packet) not in known


# ------------------------------------------------------------------------------------------------------------- damage

_NUMBERS = [0, 1, 2, 3, 7, 8, 16, 127, 128, 245, 246, 247, 255, 256, 32_767, 32_768, 65_535, 2**24, 2**31 - 1, 2**31]
_SIGNED = [*_NUMBERS, 2**32 - 1, 2**32 - 8, 2**63 - 1, 2**63, 2**64 - 1]
Change = tuple[Any, ...]
places = st.one_of(st.integers(0, 120), st.integers(0, 10_000))
"""Most damage goes to the head of a packet, where its structure is."""
changes: st.SearchStrategy[Change] = st.one_of(
    st.tuples(st.just("flip"), places, places, st.integers(1, 255)),
    st.tuples(st.just("number"), places, places, st.sampled_from([1, 2, 4, 8]), st.sampled_from(_SIGNED)),
    st.tuples(st.just("insert"), places, places, st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("delete"), places, places, st.integers(1, 40)),
    st.tuples(st.just("cut"), places, places),
    st.tuples(st.just("resize"), places, places, st.binary(max_size=20)),
    st.tuples(st.just("twice"), places),
    st.tuples(st.just("drop"), places),
    st.tuples(st.just("swap"), places, places),
    st.tuples(st.just("stop"), places, places),
)
damages = st.lists(changes, min_size=1, max_size=5)


def damaged(packets: Sequence[bytes], damage: Sequence[Change]) -> list[bytes]:
    """The packets after all changes; places are taken modulo what there is."""
    changed = list(packets)
    for what, *details in damage:
        if changed:
            _CHANGES[what](changed, details[0] % len(changed), *details[1:])
    return changed


def _flip(packets: list[bytes], at: int, place: int, bits: int) -> None:
    data = bytearray(packets[at])
    if data:
        data[place % len(data)] ^= bits
    packets[at] = bytes(data)


def _number(packets: list[bytes], at: int, place: int, width: int, number: int) -> None:
    data = bytearray(packets[at])
    if len(data) >= width:
        start = place % (len(data) - width + 1)
        data[start : start + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    packets[at] = bytes(data)


def _insert(packets: list[bytes], at: int, place: int, what: bytes) -> None:
    start = place % (len(packets[at]) + 1)
    packets[at] = packets[at][:start] + what + packets[at][start:]


def _delete(packets: list[bytes], at: int, place: int, count: int) -> None:
    start = place % (len(packets[at]) + 1)
    packets[at] = packets[at][:start] + packets[at][start + count :]


def _cut(packets: list[bytes], at: int, place: int) -> None:
    packets[at] = packets[at][: place % (len(packets[at]) + 1)]


def _resize(packets: list[bytes], at: int, place: int, what: bytes) -> None:
    """Bytes inserted or cut off at the end, and the packet's and segment's lengths made to fit: damage that the frame
    does not give away."""
    data = bytearray(packets[at])
    if len(data) <= HEADER_SIZE + 24:
        return
    start = HEADER_SIZE + 24 + place % (len(data) - HEADER_SIZE - 23)
    data = data[:start] + what + data[start:] if what else data[:start]
    for offset in (_LENGTH_AT, HEADER_SIZE):
        struct.pack_into("<I", data, offset, len(data) - HEADER_SIZE)
    packets[at] = bytes(data)


def _twice(packets: list[bytes], at: int) -> None:
    packets.insert(at, packets[at])


def _drop(packets: list[bytes], at: int) -> None:
    del packets[at]


def _swap(packets: list[bytes], at: int, other: int) -> None:
    other %= len(packets)
    packets[at], packets[other] = packets[other], packets[at]


def _stop(packets: list[bytes], at: int, place: int) -> None:
    """The client is gone in the middle of a packet."""
    _cut(packets, at, place)
    del packets[at + 1 :]


_CHANGES: dict[str, Any] = {
    "flip": _flip,
    "number": _number,
    "insert": _insert,
    "delete": _delete,
    "cut": _cut,
    "resize": _resize,
    "twice": _twice,
    "drop": _drop,
    "swap": _swap,
    "stop": _stop,
}
