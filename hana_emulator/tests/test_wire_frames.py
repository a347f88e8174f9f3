"""Frames, options, text encoding and logins against bytes written by hand from the protocol's description."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator_wire import Proof, fields, request_packet, split_fields
from hana_emulator import cesu8
from hana_emulator.protocol import authentication, packet
from hana_emulator.protocol.codes import PartAttribute, PartKind, ProtocolError
from hana_emulator.protocol.options import option_part, parse_options
from hana_emulator.protocol.packet import Part, Reply


def test_reply_packet_bytes() -> None:
    part = Part(PartKind.ROWSAFFECTED, b"\x01\x00\x00\x00", 1)
    expected = bytes.fromhex(
        "0500000000000000 09000000 30000000 00001000 0100 00 00 00000000 00000000"  # packet: 48 bytes follow
        "30000000 00000000 0100 0100 02 00 0200 0000000000000000"  # segment: reply, function code INSERT
        "0c 00 0100 00000000 04000000 08000000 01000000 00000000"  # part, data, padding
    )
    assert packet.build_reply(5, 9, Reply(2, (part,))) == expected


def test_error_reply_has_kind_five() -> None:
    assert packet.build_reply(0, 0, Reply(0, (), error=True))[32 + 12] == 5


@pytest.mark.parametrize(
    ("count", "header"),
    [(32767, "ff7f 00000000"), (32768, "ffff 00800000"), (50000, "ffff 50c30000")],
)
def test_big_argument_counts_use_the_second_field(count: int, header: str) -> None:
    data = packet.build_reply(0, 0, Reply(0, (Part(PartKind.RESULTSET, b"", count, PartAttribute.NEXT),)))
    assert data[56:64] == bytes.fromhex("05 02" + header)


def test_request_with_padding_and_autocommit() -> None:
    body = request_packet(13, [(10, 1, b"12345678"), (32, 40000, b"abc")], commit=1)[32:]
    request = packet.parse_request(body)
    assert (request.message_type, request.autocommit) == (13, True)
    assert request.part(PartKind.STATEMENTID).data == b"12345678"
    assert request.part(PartKind.PARAMETERS) == Part(32, b"abc", 40000, 0)
    assert request.find(PartKind.COMMAND) is None
    with pytest.raises(ProtocolError, match="COMMAND"):
        request.part(PartKind.COMMAND)


def test_last_part_may_lack_its_padding() -> None:
    body = bytearray(request_packet(2, [(3, 1, b"abc")])[32:-5])
    struct.pack_into("<i", body, 0, len(body))
    assert packet.parse_request(bytes(body)).part(PartKind.COMMAND).data == b"abc"


def test_packet_header_fields_and_refusals() -> None:
    good = struct.pack("<qiIIhBxI4x", 77, 3, 100, 1 << 20, 1, 0, 0)
    assert packet.parse_packet_header(good) == (3, 100)
    for segments, options, length, message in [
        (1, 2, 100, "compressed"),
        (2, 0, 100, "2 segments"),
        (1, 0, 300_000_000, "longer"),
    ]:
        header = struct.pack("<qiIIhBxI4x", 77, 3, length, 1 << 20, segments, options, 0)
        with pytest.raises(ProtocolError, match=message):
            packet.parse_packet_header(header)


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (0, "<i", 99999),  # segment longer than the packet
        (0, "<i", 3),  # shorter than its own header
        (8, "<h", 9),  # more parts than there are
        (12, "<b", 2),  # not a request
        (24 + 8, "<i", 1000),  # part longer than the packet
        (24 + 8, "<i", -1),
    ],
)
def test_broken_requests_are_protocol_errors(offset: int, form: str, value: int) -> None:
    body = bytearray(request_packet(2, [(3, 1, b"SELECT 1")])[32:])
    struct.pack_into(form, body, offset, value)
    with pytest.raises(ProtocolError):
        packet.parse_request(bytes(body))


@given(st.binary(max_size=120))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    for parse in (packet.parse_request, authentication.begin, authentication.parse_fields):
        try:
            parse(data)
        except ProtocolError:
            continue


def test_handshake() -> None:
    packet.check_handshake(bytes.fromhex("ffffffff 0400140400 0100 01 0101"))
    packet.check_handshake(bytes.fromhex("ffffffff 0414000401 0000 01 0101"))
    with pytest.raises(ProtocolError, match="no HANA handshake"):
        packet.check_handshake(b"GET / HTTP/1.1")
    assert bytes.fromhex("04 1400 04 0100 0000") == packet.HANDSHAKE_REPLY


def test_option_bytes() -> None:
    part = option_part(PartKind.CONNECTOPTIONS, {1: 258, 4: True, 45: "Aä", 9: 1.0})
    assert part.count == 4
    assert part.data == bytes.fromhex("01 03 02010000  04 1c 01  2d 1d 0300 41c3a4  09 07 000000000000f03f")


def test_option_parsing_knows_every_type() -> None:
    data = bytes.fromhex("01 04 ffffffffffffffff  02 01 ff  03 21 0200 00ff  04 1e 0100 41  05 1c 00")
    assert parse_options(Part(42, data, 5)) == {1: -1, 2: 255, 3: "\x00\xff", 4: "A", 5: False}
    for broken, count in [("01", 1), ("01 03 0100", 1), ("01 63 00", 1), ("04 1d 0100 ff", 1)]:
        with pytest.raises(ProtocolError):
            parse_options(Part(42, bytes.fromhex(broken), count))


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", ""),
        ("Az", "41 7a"),
        ("ä€", "c3a4 e282ac"),
        ("😀", "eda0bd edb880"),
        ("a\U0010ffffb", "61 edafbf edbfbf 62"),
        ("\ud83d", "eda0bd"),
        ("힣", "ed9ea3"),  # lead byte ed without being a surrogate
    ],
)
def test_cesu8_both_ways(text: str, data: str) -> None:
    assert cesu8.encode(text) == bytes.fromhex(data)
    assert cesu8.decode(bytes.fromhex(data)) == text


@given(st.text())
def test_cesu8_round_trip(text: str) -> None:
    assert cesu8.decode(cesu8.encode(text)) == text
    assert cesu8.from_units(cesu8.units(text)) == cesu8.encode(text)


def test_cesu8_refuses_what_is_no_text() -> None:
    with pytest.raises(UnicodeDecodeError):
        cesu8.decode(b"\x80\x01\x00\x00\xff")


@pytest.mark.parametrize("prefix", ["f6 2c01", "ff 012c"])
def test_long_fields_in_both_spellings(prefix: str) -> None:
    data = bytes.fromhex("0200 01 41" + prefix) + bytes(300)
    assert authentication.parse_fields(data) == [b"A", bytes(300)]


def test_field_list_bytes() -> None:
    assert authentication.build_fields([b"ab", b""]) == bytes.fromhex("0200 02 6162 00")
    assert authentication.build_fields([bytes(246)])[:5] == bytes.fromhex("0100 f6 f600")
    assert authentication.parse_fields(bytes.fromhex("0001 01 41")) == [b"A"]  # node-hdb's big-endian count
    for broken in ("", "02", "0100", "0100 05 41", "0100 f6"):
        with pytest.raises(ProtocolError):
            authentication.parse_fields(bytes.fromhex(broken))


@pytest.mark.parametrize("method", [b"SCRAMPBKDF2SHA256", b"SCRAMSHA256"])
def test_scram_accepts_only_the_right_password(method: bytes) -> None:
    challenge = authentication.begin(fields(b"OWL", b"LDAP", b"x", method, bytes(range(64))))
    assert challenge is not None
    name, inner = split_fields(challenge.reply())
    salt, nonce, *rest = split_fields(inner)
    assert (name, len(salt), len(nonce)) == (method, 16, 48)
    assert rest == ([(15000).to_bytes(4, "big")] if method == b"SCRAMPBKDF2SHA256" else [])
    proof = Proof("right")
    salted = proof.salted(salt, 15000 if rest else None)
    data = fields(b"OWL", method, fields(proof.client(salted, salt, nonce)))
    answer = challenge.verify(data, "right")
    assert answer is not None
    server = fields(proof.server(salted, salt, nonce)) if rest else b""
    assert split_fields(answer) == [method, server]
    assert challenge.verify(data, "wrong") is None
    assert challenge.verify(data, None) is None
    assert challenge.verify(fields(b"OTHER", method, split_fields(data)[2]), "right") is None


def test_every_challenge_is_new() -> None:
    request = fields(b"OWL", b"SCRAMSHA256", bytes(64))
    first, second = authentication.begin(request), authentication.begin(request)
    assert first is not None
    assert second is not None
    assert first.salt == second.salt
    assert first.nonce != second.nonce
    assert first.nonce != second.nonce


def test_pbkdf2_is_preferred_and_other_methods_are_refused() -> None:
    both = authentication.begin(fields(b"U", b"SCRAMSHA256", b"a", b"SCRAMPBKDF2SHA256", b"b"))
    assert both is not None
    assert (both.method, both.client_challenge) == (b"SCRAMPBKDF2SHA256", b"b")
    assert authentication.begin(fields(b"U", b"LDAP", b"a")) is None
    with pytest.raises(ProtocolError):
        authentication.begin(fields(b"U"))
