"""Whatever a client sends ends in a clean error or a closed connection, and the server goes on serving the others."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulator_wire import (
    HANDSHAKE,
    Answer,
    ScriptedDatabase,
    WireClient,
    parse_answer,
    request_packet,
)
from hana_emulator.seam import FunctionCode, Outcome, Statement
from hana_emulator.server import Server
from hana_emulator.types import BIGINT, DATE, DOUBLE, INTEGER, NCLOB, TIMESTAMP, Column, HanaType, Parameter, TypeCode

KINDS = [INTEGER, HanaType(TypeCode.NVARCHAR, 20), NCLOB, HanaType(TypeCode.DECIMAL, 10, 2), DATE, TIMESTAMP, DOUBLE]
MESSAGES = [2, 3, 13, 16, 17, 18, 65, 66, 67, 68, 69, 70, 71, 77, 82]
PARTS = [3, 5, 6, 10, 12, 13, 17, 18, 28, 30, 32, 33, 42, 45, 47, 48, 49, 50, 64, 67]
QUICKLY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    database = ScriptedDatabase()
    inserted = Statement("INSERT", FunctionCode.INSERT, tuple(Parameter(kind) for kind in KINDS))
    database.add(inserted, lambda _, rows: Outcome([1] * len(rows)))
    chosen = Statement("SELECT", FunctionCode.SELECT, (), (Column("N", BIGINT),))
    database.add(chosen, lambda *_: Outcome(rows=iter([(number,) for number in range(50_000)])))
    one = Statement("PING", FunctionCode.SELECT, (), (Column("N", BIGINT),))
    database.add(one, lambda *_: Outcome(rows=iter([(1,)])))
    server = Server(database)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def connect(server: Server) -> WireClient:
    client = WireClient(socket.create_connection(server.address, timeout=5))
    client.login(methods=(b"SCRAMSHA256",))  # the quicker one
    return client


@pytest.fixture(scope="module")
def neighbour(server: Server) -> Iterator[WireClient]:
    """A session that was there before and must live on."""
    client = connect(server)
    yield client
    client.socket.close()


def replies(sock: socket.socket) -> list[Answer]:
    """Everything the server says until it closes the connection, after the client has said all it will."""
    sock.shutdown(socket.SHUT_WR)
    data = b""
    try:
        while piece := sock.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    answers = []
    while len(data) >= 32:
        size = 32 + struct.unpack_from("<I", data, 12)[0]
        assert len(data) >= size, "a torn reply"
        answers.append(parse_answer(data[:size]))
        data = data[size:]
    assert not data
    return answers


def assert_serves(neighbour: WireClient) -> None:
    assert neighbour.execute("PING").count(5) == 1


def hostile(server: Server, *packets: bytes) -> list[Answer]:
    """A logged-in client that sends `packets`, and all it is told."""
    client = connect(server)
    with client.socket:
        try:
            for packet in packets:
                client.socket.sendall(packet)
        except (BrokenPipeError, ConnectionResetError):
            return []
        return replies(client.socket)


def assert_clean(answers: list[Answer]) -> None:
    """No answer tells of a fault inside the server."""
    for answer in answers:
        if answer.kind == 5:
            assert "internal error" not in answer.error()[1], answer.error()


# ---------------------------------------------------------------------------------------------------------- any bytes


@QUICKLY
@given(data=st.binary(max_size=300))
def test_any_bytes_instead_of_a_handshake(server: Server, neighbour: WireClient, data: bytes) -> None:
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        try:
            answer = sock.recv(64)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or data.startswith(b"\xff\xff\xff\xff")
    assert_serves(neighbour)


@QUICKLY
@given(data=st.binary(max_size=300))
def test_any_bytes_after_the_handshake(server: Server, neighbour: WireClient, data: bytes) -> None:
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(HANDSHAKE + data)
        assert len(WireClient(sock).read(8)) == 8
        assert_clean(replies(sock))
    assert_serves(neighbour)


@QUICKLY
@given(body=st.binary(max_size=300))
def test_any_body_of_an_honest_packet(server: Server, neighbour: WireClient, body: bytes) -> None:
    header = struct.pack("<qiIIhBxI4x", 1, 1, len(body), 1 << 20, 1, 0, 0)
    answers = hostile(server, header + body)
    assert [answer.kind for answer in answers] == [5]
    assert answers[0].error()[0] == 1033
    assert_serves(neighbour)


parts = st.lists(
    st.tuples(st.sampled_from(PARTS), st.integers(-(2**31), 2**31 - 1), st.binary(max_size=60)), max_size=3
)


@settings(QUICKLY, max_examples=100)
@given(message=st.one_of(st.sampled_from(MESSAGES), st.integers(-128, 127)), chosen=parts)
def test_any_parts_in_any_message(
    server: Server, neighbour: WireClient, message: int, chosen: list[tuple[int, int, bytes]]
) -> None:
    """Frames are right, contents are not: the argument count may say anything."""
    packet = request_packet(message, [(kind, max(-32768, count), data) for kind, count, data in chosen])
    answers = hostile(server, packet)
    assert len(answers) <= 1
    assert_clean(answers)
    assert_serves(neighbour)


@settings(QUICKLY, max_examples=100)
@given(count=st.integers(0, 3), data=st.binary(max_size=120))
def test_any_parameters_of_a_prepared_statement(server: Server, neighbour: WireClient, count: int, data: bytes) -> None:
    first = struct.pack("<q", 1)
    answers = hostile(
        server, request_packet(3, [(3, 1, b"INSERT")]), request_packet(13, [(10, 1, first), (32, count, data)])
    )
    assert answers[0].function_code == FunctionCode.INSERT
    assert_clean(answers)
    assert_serves(neighbour)


@QUICKLY
@given(at=st.integers(32, 71), value=st.integers(0, 255))
def test_any_byte_of_a_good_request_replaced(server: Server, neighbour: WireClient, at: int, value: int) -> None:
    packet = bytearray(request_packet(2, [(3, 1, b"SELECT")]))
    packet[at] = value
    assert_clean(hostile(server, bytes(packet)))
    assert_serves(neighbour)


# ------------------------------------------------------------------------------------------------- truncated, absurd

SELECT = request_packet(2, [(3, 1, b"SELECT")])


@pytest.mark.parametrize("length", range(len(SELECT)))
def test_a_packet_cut_at_any_length(server: Server, length: int) -> None:
    """The client goes in the middle of it: no answer, no thread left waiting."""
    assert hostile(server, SELECT[:length]) == []


@pytest.mark.parametrize("length", range(len(HANDSHAKE)))
def test_a_handshake_cut_at_any_length(server: Server, length: int) -> None:
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(HANDSHAKE[:length])
        assert replies(sock) == []


LIMIT = 2**31 - 1
ABSURD = [
    # (what, offset in the packet, format, value, is it answered before the connection ends?)
    ("packet: nothing follows", 12, "<I", 0, True),
    ("packet: shorter than a segment header", 12, "<I", 23, True),
    ("packet: one byte short", 12, "<I", len(SELECT) - 33, True),
    ("packet: longer than what comes", 12, "<I", 4096, False),
    ("packet: above the limit", 12, "<I", 256 * 1024 * 1024 + 1, False),
    ("packet: all ones", 12, "<I", 2**32 - 1, False),
    ("packet: no segment", 20, "<h", 0, False),
    ("packet: two segments", 20, "<h", 2, False),
    ("packet: minus one segments", 20, "<h", -1, False),
    ("packet: compressed", 22, "<B", 2, False),
    ("segment: length 0", 32, "<i", 0, True),
    ("segment: length 23", 32, "<i", 23, True),
    ("segment: negative length", 32, "<i", -1, True),
    ("segment: one more than there is", 32, "<i", len(SELECT) - 31, True),
    ("segment: largest length", 32, "<i", LIMIT, True),
    ("segment: smallest length", 32, "<i", -LIMIT - 1, True),
    ("segment: a reply", 44, "<b", 2, True),
    ("segment: an error", 44, "<b", 5, True),
    ("segment: no part", 40, "<h", 0, True),
    ("segment: one part too many", 40, "<h", 2, True),
    ("segment: largest count of parts", 40, "<h", 32767, True),
    ("segment: negative count of parts", 40, "<h", -1, True),
    ("part: negative length", 64, "<i", -1, True),
    ("part: smallest length", 64, "<i", -LIMIT - 1, True),
    ("part: largest length", 64, "<i", LIMIT, True),
    ("part: to the end of the padding and one more", 64, "<i", 9, True),
]


@pytest.mark.parametrize(
    ("offset", "form", "value", "answered"), [row[1:] for row in ABSURD], ids=[r[0] for r in ABSURD]
)
def test_absurd_numbers_in_headers(
    server: Server, neighbour: WireClient, offset: int, form: str, value: int, answered: bool
) -> None:
    packet = bytearray(SELECT)
    struct.pack_into(form, packet, offset, value)
    answers = hostile(server, bytes(packet))
    assert [answer.error()[0] for answer in answers] == ([1033] if answered else [])
    assert_serves(neighbour)


COUNTS = [-1, -32768, 2, 32767, 40_000, LIMIT]


@pytest.mark.parametrize("count", COUNTS)
def test_absurd_counts_of_parameter_rows_are_no_work(server: Server, neighbour: WireClient, count: int) -> None:
    """A count says how many rows follow; when they do not, that is found without making room for them."""
    one = b"".join([b"\x83", b"\x8b", b"\x9a", b"\x85", b"\xbf", b"\xbd", b"\x87"])
    prepared = request_packet(3, [(3, 1, b"INSERT")])
    answers = hostile(server, prepared, request_packet(13, [(10, 1, struct.pack("<q", 1)), (32, count, one)]))
    assert [answer.kind for answer in answers] == [2, 5]
    assert answers[1].error()[0] == 1033
    assert_serves(neighbour)


@pytest.mark.parametrize("size", [-LIMIT - 1, -1, 0, 1, 32_767, LIMIT])
def test_absurd_fetch_sizes(server: Server, size: int) -> None:
    client = connect(server)
    with client.socket:
        first = client.execute("SELECT")
        page = client.ask(71, (13, 1, first.part(13)), (45, 1, struct.pack("<i", size)))
        assert 1 <= page.count(5) <= 50_000 - first.count(5)
        assert page.count(5) <= max(1, size)


@pytest.mark.parametrize("message", [13, 69, 70, 71])
def test_ids_that_were_never_given(server: Server, neighbour: WireClient, message: int) -> None:
    kind = 10 if message in (13, 70) else 13
    for id_ in (b"", b"\0" * 7, b"\xff" * 8, b"\0" * 9):
        assert_clean([neighbour.ask(message, (kind, 1, id_))])
    assert_serves(neighbour)
