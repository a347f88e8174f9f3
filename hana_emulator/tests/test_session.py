"""A session over a socket pair: requests of hdbcli's shapes in, exact reply parts out; the SQL side is scripted."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from emulator_wire import (
    HANDSHAKE,
    LoneHost,
    ScriptedConnection,
    ScriptedDatabase,
    WireClient,
    fields,
    request_packet,
    served,
    split_fields,
)
from hana_emulator.errors import HanaError
from hana_emulator.line import Line
from hana_emulator.seam import FunctionCode, Outcome, Statement
from hana_emulator.session import Session
from hana_emulator.types import Column, HanaType, Parameter, TypeCode

N = Column("N", HanaType(TypeCode.INTEGER))
INSERT = Statement(
    "INSERT", FunctionCode.INSERT, (Parameter(HanaType(TypeCode.INTEGER)), Parameter(HanaType(TypeCode.NCLOB)))
)
UTF8_LOB = bytes.fromhex("03 01000000 1a")
"""INTEGER 1, then the type byte of an NCLOB."""


def number_rows(count: int) -> Outcome:
    return Outcome(rows=iter([(n,) for n in range(count)]))


@pytest.fixture
def database() -> ScriptedDatabase:
    database = ScriptedDatabase()
    database.add(Statement("DDL", FunctionCode.DDL), lambda *_: Outcome())
    database.add(INSERT, lambda _c, rows: Outcome([1] * len(rows)))
    for count in (0, 3, 32, 33, 100_000):
        database.add(Statement(f"SELECT {count}", FunctionCode.SELECT, (), (N,)), lambda *_, n=count: number_rows(n))
    return database


@pytest.fixture
def client(database: ScriptedDatabase) -> Iterator[WireClient]:
    with served(database) as client:
        client.login()
        yield client


def fail(database: ScriptedDatabase, error: Exception) -> None:
    def action(_connection: ScriptedConnection, _rows: object) -> Outcome:
        raise error

    database.add(Statement("FAIL", FunctionCode.UPDATE), action)


# --- login


@pytest.mark.parametrize("method", [b"SCRAMPBKDF2SHA256", b"SCRAMSHA256"])
@pytest.mark.parametrize("user", ["OWL", "owl", '"OWL"'])
def test_login(database: ScriptedDatabase, method: bytes, user: str) -> None:
    with served(database) as client:
        answer = client.login(user=user, methods=[method])
        assert (answer.kind, answer.function_code, answer.session_id) == (2, 14, 1000)
        name, proof = split_fields(answer.part(33))
        assert name == method
        assert proof == (fields(client.expected_server_proof) if method == b"SCRAMPBKDF2SHA256" else b"")
        assert answer.part(42)[:6] == bytes.fromhex("01 03 e8030000")  # connection id 1000
        assert database.connections[0].calls == [("user", "OWL")]
        assert client.execute("DDL").session_id == 1000


@pytest.mark.parametrize(("user", "password"), [("OWL", "wrong"), ("NOBODY", "sEcret-1"), ('"owl"', "sEcret-1")])
def test_wrong_password_and_unknown_user_are_the_same_error(
    database: ScriptedDatabase, user: str, password: str
) -> None:
    with served(database) as client:
        answer = client.login(user=user, password=password)
        assert answer.error() == (10, "authentication failed")
        assert answer.session_id == 0
        assert not database.connections


def test_a_failed_login_may_be_tried_again(database: ScriptedDatabase) -> None:
    with served(database) as client:
        client.login(password="wrong")
        client.handshake = lambda: b""  # type: ignore[method-assign]
        assert client.login().function_code == 14


def test_without_a_known_method_login_fails(database: ScriptedDatabase) -> None:
    with served(database) as client:
        assert client.login(methods=[b"JWT"]).error()[0] == 10


def test_a_proof_cannot_be_replayed(database: ScriptedDatabase) -> None:
    with served(database) as client:
        client.handshake()
        answer = client.ask(66, (33, 1, fields(b"OWL", b"SCRAMSHA256", fields(bytes(32)))))
        assert answer.error()[0] == 1033


def test_database_info_says_already_here_before_login(database: ScriptedDatabase) -> None:
    with served(database) as client:
        client.handshake()
        answer = client.ask(82, (67, 2, bytes.fromhex("01 1d 0100 58 05 1d 0000")))
        assert answer.part(67) == bytes.fromhex("04 1c 01")
        client.handshake = lambda: b""  # type: ignore[method-assign]
        assert client.login().function_code == 14


@pytest.mark.parametrize("message", [2, 13, 67, 99])
def test_nothing_is_served_before_login(database: ScriptedDatabase, message: int) -> None:
    with served(database) as client:
        client.handshake()
        assert client.ask(message, (3, 1, b"DDL")).error()[0] == 1033
        with pytest.raises(EOFError):
            client.read(1)


# --- statements


def test_direct_select_reply(client: WireClient) -> None:
    answer = client.execute("SELECT 3")
    assert answer.function_code == 5
    assert answer.kinds() == [48, 13, 5]
    assert answer.part(5) == bytes.fromhex("01 00000000 01 01000000 01 02000000")
    assert answer.attributes(5) == 1 | 4 | 16  # last, first, closed
    assert len(answer.part(13)) == 8


def test_an_empty_result_says_row_not_found(client: WireClient) -> None:
    answer = client.execute("SELECT 0")
    assert answer.attributes(5) == 1 | 4 | 8 | 16
    assert answer.count(5) == 0


def test_packet_count_is_echoed(client: WireClient) -> None:
    client.socket.sendall(request_packet(2, [(3, 1, b"DDL")], count=4711))
    assert client.answer().packet_count == 4711


def test_paging_until_closed(client: WireClient) -> None:
    answer = client.execute("SELECT 100000")
    result_id = answer.part(13)
    assert answer.attributes(5) == 2 | 4
    seen = [value for (value,) in struct.iter_unpack("<xi", answer.part(5))]
    while not answer.attributes(5) & 1:
        answer = client.ask(71, (13, 1, result_id), (45, 1, struct.pack("<i", 32767)))
        assert answer.function_code == 10
        assert answer.kinds() == [5]
        page = [value for (value,) in struct.iter_unpack("<xi", answer.part(5))]
        assert len(page) == answer.count(5) <= 32767
        seen += page
    assert answer.attributes(5) == 1 | 16
    assert seen == list(range(100_000))
    assert client.ask(71, (13, 1, result_id)).error()[0] == 2


def test_fetch_size_is_respected_and_results_can_be_closed(client: WireClient) -> None:
    result_id = client.execute("SELECT 100000").part(13)
    answer = client.ask(71, (13, 1, result_id), (45, 1, struct.pack("<i", 5)))
    assert (answer.count(5), answer.attributes(5)) == (5, 2)
    assert client.ask(69, (13, 1, result_id)).function_code == 19
    assert client.ask(71, (13, 1, result_id)).error()[0] == 2


def test_results_survive_commit_and_other_results(client: WireClient) -> None:
    first = client.execute("SELECT 100000")
    client.execute("SELECT 3")
    client.ask(67)
    answer = client.ask(71, (13, 1, first.part(13)), (45, 1, struct.pack("<i", 1)))
    assert struct.unpack("<xi", answer.part(5)) == (first.count(5),)


def test_prepare_describes_and_execute_runs(client: WireClient, database: ScriptedDatabase) -> None:
    statement_id, answer = client.prepare("INSERT")
    assert (answer.function_code, answer.kinds()) == (2, [10, 47])
    assert answer.count(47) == 2
    rows = bytes.fromhex("03 01000000 9a 03 02000000 1a 06 01000000 00000000 61")
    answer = client.ask(13, (10, 1, statement_id), (32, 2, rows))
    assert answer.function_code == 2
    assert answer.part(12) == struct.pack("<2i", 1, 1)
    assert answer.flags() == {4}  # write transaction started
    assert database.connections[0].calls[-1] == ("execute", "INSERT", [(1, None), (2, "a")], False)
    assert client.ask(13, (10, 1, statement_id), (32, 1, rows[:6])).flags() == set()


def test_prepare_describes_that_there_are_no_parameters(client: WireClient) -> None:
    """node-hdb fails at a reply without the part."""
    _, answer = client.prepare("DDL")
    assert (answer.kinds(), answer.count(47), answer.part(47)) == ([10, 47], 0, b"")


@pytest.mark.parametrize("rows", [0, 1])
def test_a_statement_without_parameters_takes_a_part_of_no_rows(
    client: WireClient, database: ScriptedDatabase, rows: int
) -> None:
    statement_id, _ = client.prepare("DDL")
    assert client.ask(13, (10, 1, statement_id), (32, rows, b"")).function_code == 1
    assert database.connections[0].calls[-1] == ("execute", "DDL", [()], False)


def test_a_batch_of_no_rows_does_not_end_the_connection(client: WireClient) -> None:
    statement_id, _ = client.prepare("INSERT")
    assert client.ask(13, (10, 1, statement_id), (32, 0, b"")).part(12) == b""
    assert client.execute("SELECT 3").count(5) == 3


@pytest.mark.parametrize("count", [2, 4])
def test_client_information_counts_pairs_or_texts(client: WireClient, database: ScriptedDatabase, count: int) -> None:
    """hdbcli and go-hdb count the pairs, node-hdb the texts."""
    part = (57, count, b"\x01A\x03one\x01B\xf6\x03\x00two")
    assert client.ask(2, part, (3, 1, b"SELECT 3")).count(5) == 3
    assert database.connections[0].calls[1:3] == [("variable", "A", "one"), ("variable", "B", "two")]


@pytest.mark.parametrize(
    ("count", "data"), [(1, b"\x01A"), (3, b"\x01A\x01b"), (1, b"\x01A\x05b"), (1, b"\x01A\x01\xff")]
)
def test_broken_client_information_closes_with_a_clean_error(client: WireClient, count: int, data: bytes) -> None:
    assert client.ask(2, (57, count, data), (3, 1, b"SELECT 3")).error()[0] == 1033


def test_the_first_page_has_32_rows(client: WireClient) -> None:
    answer = client.execute("SELECT 33")
    assert (answer.count(5), answer.attributes(5)) == (32, 2 | 4)
    answer = client.ask(71, (13, 1, answer.part(13)))
    assert (answer.count(5), answer.attributes(5)) == (1, 1 | 16)
    answer = client.execute("SELECT 32")
    assert (answer.count(5), answer.attributes(5)) == (32, 1 | 4 | 16)


# --- what the connect options agree on

DATES = (Column("T", HanaType(TypeCode.TIMESTAMP)), Column("D", HanaType(TypeCode.DECIMAL, 15, 5)))


@pytest.mark.parametrize(
    ("options", "answered", "codes"),
    [
        ([(23, 1)], 1, [16, 5]),
        ([(12, 4)], 4, [61, 5]),
        ([(12, 1), (23, 8)], 8, [61, 81]),
        ([(23, 99)], 10, [61, 81]),
        ([], 10, [61, 81]),
    ],
)
def test_results_have_the_data_format_of_the_client(
    database: ScriptedDatabase, options: list[tuple[int, int]], answered: int, codes: list[int]
) -> None:
    row = ("2000-01-01 23:59:58.0000000", "1.00000")
    database.add(Statement("DATES", FunctionCode.SELECT, (), DATES), lambda *_: Outcome(rows=iter([row])))
    data = b"".join(struct.pack("<bbi", key, 3, value) for key, value in options)
    with served(database) as client:
        answer = client.login(options=(42, len(options), data))
        assert struct.pack("<bbi", 23, 3, answered) in answer.part(42)
        described, result = client.execute("DATES").part(48), client.execute("DATES").part(5)
        assert [described[1], described[25]] == codes
        assert len(result) == {16: 8, 61: 8}[codes[0]] + {5: 16, 81: 9}[codes[1]]
        assert result.startswith(bytes.fromhex("d087 00 01 97 3b 90e2")) == (codes[0] == 16)


def test_compression_and_features_are_refused_in_so_many_words(database: ScriptedDatabase) -> None:
    """node-hdb takes its own flags (0x300) for agreed when the reply does not name the option."""
    with served(database) as client:
        answer = client.login(options=(42, 1, struct.pack("<bbi", 49, 3, 0x300)))
        assert struct.pack("<bbi", 49, 3, 0) + struct.pack("<bbi", 53, 3, 0) in answer.part(42)


def test_autocommit_is_a_property_of_the_request(client: WireClient, database: ScriptedDatabase) -> None:
    statement_id, _ = client.prepare("INSERT")
    answer = client.ask(13, (10, 1, statement_id), (32, 1, bytes.fromhex("03 01000000 9a")), commit=1)
    assert answer.flags() == {1}
    assert database.connections[0].calls[-1][3] is True


def test_prepared_query_sends_its_metadata_once(client: WireClient) -> None:
    statement_id, answer = client.prepare("SELECT 3")
    assert (answer.kinds(), answer.count(47), answer.part(47)) == ([10, 47, 48], 0, b"")
    answer = client.ask(13, (10, 1, statement_id))
    assert answer.kinds() == [13, 5]
    assert answer.count(5) == 3


def test_dropped_statements_are_gone(client: WireClient) -> None:
    statement_id, _ = client.prepare("SELECT 3")
    assert client.ask(70, (10, 1, statement_id)).function_code == 0
    assert client.ask(13, (10, 1, statement_id)).error()[0] == 2


def test_ddl_reply_has_no_row_counts(client: WireClient) -> None:
    answer = client.execute("DDL")
    assert (answer.function_code, answer.kinds(), answer.flags()) == (1, [64], {1})


def test_commit_and_rollback(client: WireClient, database: ScriptedDatabase) -> None:
    answer = client.ask(67, (43, 1, bytes.fromhex("01 1c 00")))
    assert (answer.function_code, answer.flags()) == (11, {1})
    answer = client.ask(68)
    assert (answer.function_code, answer.flags()) == (12, {0})
    assert database.connections[0].calls[-2:] == ["commit", "rollback"]


# --- errors


def test_error_segment(client: WireClient) -> None:
    answer = client.execute("nonsense")
    assert answer.kind == 5
    text = b"sql syntax error: unscripted"
    assert answer.part(6) == struct.pack("<iiib5s", 257, 3, len(text), 1, b"42000") + text + b"\0"
    assert client.execute("SELECT 3").count(5) == 3


@pytest.mark.parametrize(("code", "rolls_back"), [(131, False), (133, False), (139, False), (2048, True)])
def test_errors_that_end_the_transaction_roll_back_and_say_so(
    client: WireClient, database: ScriptedDatabase, code: int, rolls_back: bool
) -> None:
    fail(database, HanaError(code, "transaction rolled back", rolls_back=rolls_back))
    answer = client.execute("FAIL")
    assert answer.error()[0] == code
    assert answer.flags() == {0}
    assert database.connections[0].calls[-1] == "rollback"


def test_other_errors_leave_the_transaction_alone(client: WireClient, database: ScriptedDatabase) -> None:
    fail(database, HanaError(301, "unique constraint violated"))
    answer = client.execute("FAIL")
    assert answer.kinds() == [6]
    assert "rollback" not in database.connections[0].calls


def test_a_fault_of_the_server_tells_its_place_but_no_values(
    client: WireClient, database: ScriptedDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    fail(database, ValueError("row text of a customer"))
    code, text = client.execute("FAIL").error()
    assert code == 2
    assert "ValueError at action:" in text
    assert "customer" not in text + caplog.text
    assert client.execute("SELECT 3").count(5) == 3


def test_an_unknown_message_is_refused_and_the_session_lives(client: WireClient) -> None:
    assert client.ask(99).error()[0] == 7
    assert client.execute("SELECT 3").count(5) == 3


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(request_packet(2, []), id="missing part"),
        pytest.param(request_packet(2, [(3, 1, b"\xff\xfe")]), id="statement is no text"),
        pytest.param(request_packet(13, [(10, 1, b"x")])[:32] + bytes(48), id="no segment"),
    ],
)
def test_malformed_packets_close_with_a_clean_error(
    database: ScriptedDatabase, packet: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with served(database) as client, caplog.at_level(logging.WARNING):
        client.login()
        client.socket.sendall(packet)
        code, text = client.answer().error()
        assert (code, text.split(":")[0]) == (1033, "error while parsing protocol")
        with pytest.raises(EOFError):
            client.read(1)
    assert database.connections[0].closed.is_set()
    assert "session 1000 closed" in caplog.text


def test_parameters_that_lie_about_their_size_close_the_connection(client: WireClient) -> None:
    statement_id, _ = client.prepare("INSERT")
    assert client.ask(13, (10, 1, statement_id), (32, 9, b"\x03\x01")).error()[0] == 1033


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1", HANDSHAKE[:5]])
def test_other_protocols_are_hung_up_on(database: ScriptedDatabase, greeting: bytes) -> None:
    with served(database) as client:
        client.socket.sendall(greeting)
        client.socket.shutdown(socket.SHUT_WR)
        with pytest.raises((EOFError, ConnectionResetError)):
            client.read(1)


def test_an_oversized_packet_is_refused_before_it_is_read(client: WireClient) -> None:
    client.socket.sendall(struct.pack("<qiIIhBxI4x", 1, 1, 2**31, 0, 1, 0, 0))
    with pytest.raises(EOFError):
        client.read(1)


# --- end of the connection


def test_disconnect(client: WireClient, database: ScriptedDatabase) -> None:
    assert client.ask(77).function_code == 18
    with pytest.raises(EOFError):
        client.read(1)
    assert database.connections[0].closed.wait(5)


def test_a_dropped_client_closes_its_sql_session(client: WireClient, database: ScriptedDatabase) -> None:
    client.socket.close()
    assert database.connections[0].closed.wait(5)


def test_cancel_is_forwarded_to_the_named_session(database: ScriptedDatabase) -> None:
    ours, theirs = socket.socketpair()
    host = LoneHost(database)
    session = Session(Line(theirs), host)
    thread = threading.Thread(target=session.run)
    thread.start()
    with ours, theirs:
        client = WireClient(ours)
        client.login()
        host.sessions[1000] = session
        answer = client.execute("ALTER SYSTEM CANCEL SESSION '1000'")
        assert answer.function_code == 1
        assert database.connections[0].cancelled.is_set()
        assert client.execute(" alter system cancel session '5';").error()[0] == 2
        client.socket.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert not thread.is_alive()


# --- LOBs


def lob_row(data: bytes, *, options: int, length: int | None = None) -> bytes:
    size = len(data) if length is None else length
    return UTF8_LOB + struct.pack("<Bii", options, size, 0) + data


def write(locator: bytes, data: bytes, *, last: bool) -> tuple[int, int, bytes]:
    return 28, 1, locator + struct.pack("<Bqi", 6 if last else 2, -1, len(data)) + data


def test_a_long_lob_is_written_in_pieces_then_executed(client: WireClient, database: ScriptedDatabase) -> None:
    calls = database.connections[0].calls
    statement_id, _ = client.prepare("INSERT")
    answer = client.ask(13, (10, 1, statement_id), (32, 1, lob_row(b"abc\xc3", options=2)), commit=1)
    assert answer.part(12) == struct.pack("<i", -1)
    locator = answer.part(30)
    assert len(locator) == 8
    answer = client.ask(17, write(locator, b"\xa4de", last=False), commit=1)
    assert (answer.function_code, answer.part(30)) == (15, locator)
    assert len(calls) == 1
    answer = client.ask(17, write(locator, b"f", last=True), commit=1)
    assert (answer.part(30), answer.flags()) == (b"", {1})
    assert calls[-1] == ("execute", "INSERT", [(1, "abcädef")], True)
    assert client.ask(17, write(locator, b"f", last=True)).error()[0] == 2


def test_finished_rows_before_an_open_lob_run_together_with_it(client: WireClient, database: ScriptedDatabase) -> None:
    """node-hdb strings the counts of both replies together: each row must be counted once."""
    statement_id, _ = client.prepare("INSERT")
    rows = lob_row(b"one", options=6) + lob_row(b"tw", options=2)
    first = client.ask(13, (10, 1, statement_id), (32, 2, rows))
    last = client.ask(17, write(first.part(30), b"o", last=True))
    assert first.part(12) + last.part(12) == struct.pack("<2i", 1, 1)
    assert database.connections[0].calls[-1][2] == [(1, "one"), (1, "two")]


def test_an_error_of_the_delayed_statement_reaches_the_client(client: WireClient, database: ScriptedDatabase) -> None:
    def refuse(_connection: ScriptedConnection, _rows: object) -> Outcome:
        raise HanaError(301, "unique constraint violated")

    database.add(INSERT, refuse)
    statement_id, _ = client.prepare("INSERT")
    locator = client.ask(13, (10, 1, statement_id), (32, 1, lob_row(b"", options=0))).part(30)
    assert client.ask(17, write(locator, b"x", last=True)).error()[0] == 301


@pytest.mark.parametrize("end", [67, 68])
def test_open_lobs_end_with_the_transaction(client: WireClient, database: ScriptedDatabase, end: int) -> None:
    statement_id, _ = client.prepare("INSERT")
    locator = client.ask(13, (10, 1, statement_id), (32, 1, lob_row(b"a", options=2))).part(30)
    client.ask(end)
    assert client.ask(17, write(locator, b"x", last=True)).error()[0] == 2
    assert not [call for call in database.connections[0].calls if call[0] == "execute"]


def test_queries_do_not_take_open_lobs(client: WireClient, database: ScriptedDatabase) -> None:
    query = Statement("QUERY ?", FunctionCode.SELECT, (Parameter(HanaType(TypeCode.NCLOB)),), (N,))
    database.add(query, lambda *_: number_rows(1))
    statement_id, _ = client.prepare("QUERY ?")
    locator = client.ask(13, (10, 1, statement_id), (32, 1, lob_row(b"a", options=2)[5:])).part(30)
    assert client.ask(17, write(locator, b"x", last=True)).error()[0] == 7


@pytest.mark.parametrize("message", [16, 17])
def test_lobs_are_read_by_either_message_number(client: WireClient, database: ScriptedDatabase, message: int) -> None:
    text = "ä" * 5000
    column = Column("T", HanaType(TypeCode.NCLOB))
    database.add(Statement("LOB", FunctionCode.SELECT, (), (column,)), lambda *_: Outcome(rows=iter([(text,)])))
    row = client.execute("LOB").part(5)
    locator, inline = row[20:28], row[32:]
    assert inline.decode() == text[:4096]
    answer = client.ask(message, (17, 1, locator + struct.pack("<qi4x", 4097, 1_047_552)))
    assert answer.function_code == 16
    assert answer.part(18)[:9] == locator + b"\x06"
    assert answer.part(18)[16:].decode() == text[4096:]
    found = client.ask(18, (49, 1, locator + struct.pack("<qi", 4990, 2) + "ä".encode()))
    assert found.part(50) == struct.pack("<q", 4990)
