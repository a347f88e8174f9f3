"""LOB pieces by UTF-16 units, locators, searching and writing."""

from __future__ import annotations

import struct

import pytest

from hana_emulator import cesu8
from hana_emulator.errors import HanaError
from hana_emulator.protocol import lobs
from hana_emulator.protocol.codes import PartKind, ProtocolError
from hana_emulator.protocol.lobs import INLINE, LobStore, LobValue
from hana_emulator.protocol.output import field_encoder
from hana_emulator.protocol.packet import Part
from hana_emulator.types import HanaType, TypeCode


def read(store: LobStore, locator: bytes, offset: int, length: int) -> tuple[int, bytes]:
    """(options, data) of one READLOB; offset 1-based as on the wire."""
    reply = store.read(Part(PartKind.READLOBREQUEST, locator + struct.pack("<qi4x", offset, length)))
    assert reply.kind == PartKind.READLOBREPLY
    assert reply.data[:8] == locator
    options, size = struct.unpack_from("<Bi", reply.data, 8)
    assert len(reply.data) == 16 + size
    return options, reply.data[16:]


def test_pieces_count_utf16_units_and_may_cut_a_pair() -> None:
    store = LobStore()
    locator = store.keep(LobValue(cesu8.units("a😀bc"), character=True))
    assert read(store, locator, 1, 2) == (2, b"a\xed\xa0\xbd")
    assert read(store, locator, 3, 2) == (2, b"\xed\xb8\x80b")
    assert read(store, locator, 5, 99) == (6, b"c")
    assert read(store, locator, 6, 1) == (6, b"")


def test_binary_pieces_count_bytes() -> None:
    store = LobStore()
    locator = store.keep(LobValue(b"\x00\x01\x02", character=False))
    assert read(store, locator, 2, 1) == (2, b"\x01")
    assert read(store, locator, 2, 2) == (6, b"\x01\x02")


@pytest.mark.parametrize("extra", [0, 1])
def test_a_character_lob_is_inline_up_to_the_limit(extra: int) -> None:
    text = "x" * (INLINE - 2) + "😀" + "y" * extra
    store = LobStore()
    data = field_encoder(HanaType(TypeCode.NCLOB), store)(text)
    kind, options, units, size, locator, chunk = struct.unpack_from("<BB2xqq8si", data)
    assert (kind, units, size) == (3, INLINE + extra, INLINE + 4 + extra)
    assert options == (2 if extra else 6)
    assert data[32:] == cesu8.encode(text[: INLINE - 1])
    assert chunk == len(data) - 32
    if extra:
        assert read(store, locator, INLINE + 1, 10) == (6, b"y")
    else:
        assert locator == bytes(8)


def test_a_long_blob_begins_inline() -> None:
    store = LobStore()
    data = field_encoder(HanaType(TypeCode.BLOB), store)(bytes(INLINE) + b"end")
    kind, options, units, size, locator, chunk = struct.unpack_from("<BB2xqq8si", data)
    assert (kind, options, units, size, chunk) == (1, 2, INLINE + 3, INLINE + 3, INLINE)
    assert read(store, locator, INLINE + 1, 100) == (6, b"end")


def test_the_oldest_values_are_forgotten_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobs, "KEPT_BYTES", 10)
    store = LobStore()
    first, second, third = (store.keep(LobValue(bytes(5), character=False)) for _ in range(3))
    with pytest.raises(HanaError, match="locator"):
        read(store, first, 1, 1)
    assert read(store, second, 1, 5)[0] == read(store, third, 1, 5)[0] == 6
    huge = store.keep(LobValue(bytes(50), character=False))
    assert read(store, huge, 1, 50)[0] == 6
    assert store.taken == 65


@pytest.mark.parametrize(
    ("text", "pattern", "offset", "expected"),
    [
        ("aä😀x😀x", "😀x", 0, 2),
        ("aä😀x😀x", "😀x", 3, 5),
        ("abc", "nix", 0, -1),
        ("\u4100\u0041", "A", 0, 1),  # 00 41 41 00: the bytes 41 00 ... only count on a unit's border
        ("\u0041\u4100", "\u4100", 0, 1),
        ("䄀䄀", "䅁", 0, -1),
    ],
)
def test_find_counts_units(text: str, pattern: str, offset: int, expected: int) -> None:
    store = LobStore()
    locator = store.keep(LobValue(cesu8.units(text), character=True))
    wanted = cesu8.encode(pattern)
    request = locator + struct.pack("<qi", offset, len(wanted)) + wanted + bytes(40)
    assert store.find(Part(PartKind.FINDLOBREQUEST, request)).data == struct.pack("<q", expected)


def test_find_in_a_blob() -> None:
    store = LobStore()
    locator = store.keep(LobValue(b"\x00\x01\x02\x01", character=False))
    request = locator + struct.pack("<qi", 2, 1) + b"\x01"
    assert store.find(Part(PartKind.FINDLOBREQUEST, request)).data == struct.pack("<q", 3)


def test_broken_requests() -> None:
    store = LobStore()
    locator = store.keep(LobValue(b"abc", character=False))
    for data in (b"short", locator + struct.pack("<qi", 0, 1), locator + struct.pack("<qi", 1, -1)):
        with pytest.raises(ProtocolError):
            store.read(Part(PartKind.READLOBREQUEST, data))
    with pytest.raises(ProtocolError):
        store.find(Part(PartKind.FINDLOBREQUEST, b"short"))
    with pytest.raises(HanaError):
        read(store, bytes(8), 1, 1)


def test_write_request_pieces() -> None:
    data = b"LOCATOR1" + struct.pack("<Bqi", 2, -1, 3) + b"abc" + b"LOCATOR2" + struct.pack("<Bqi", 6, 0, 0)
    pieces = list(lobs.parse_write_request(Part(PartKind.WRITELOBREQUEST, data, 2)))
    assert pieces == [(b"LOCATOR1", b"abc", False), (b"LOCATOR2", b"", True)]
    for broken in (data[:10], data[:-1], b"LOCATOR1" + struct.pack("<Bqi", 2, -1, 9)):
        with pytest.raises(ProtocolError):
            list(lobs.parse_write_request(Part(PartKind.WRITELOBREQUEST, broken, 2)))


def test_write_reply_lists_open_locators() -> None:
    assert lobs.write_reply([b"LOCATOR1", b"LOCATOR2"]) == Part(PartKind.WRITELOBREPLY, b"LOCATOR1LOCATOR2", 2)
