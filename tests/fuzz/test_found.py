"""What fuzzing has found in the emulator, each once more: by damaged packets, random statements, atheris."""

from __future__ import annotations

import gc
import json
import socket
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from emulator_sql import USER, Sql, open_database
from emulator_wire import ScriptedDatabase, served
from hana_emulator.errors import HanaError
from hana_emulator.faults import CONNECT, Fault, FaultList
from hana_emulator.line import Line
from hana_emulator.protocol.codes import PartKind, ProtocolError
from hana_emulator.protocol.input import ParameterDecoder
from hana_emulator.protocol.options import parse_options
from hana_emulator.protocol.packet import Part
from hana_emulator.seam import FunctionCode, Outcome, Statement
from hana_emulator.types import BIGINT, Column
from tests.fuzz.packets import EXECUTE_DIRECT
from tests.fuzz.statements import TABLES
from tests.fuzz.verdict import run_statement


@pytest.fixture(scope="module")
def sql() -> Iterator[Sql]:
    """For all: most statements are refused, and what the others do hinders nobody."""
    database = open_database()
    session = Sql(database.connect(USER))
    for text in TABLES:
        session.run(text)
    yield session
    database.close()


# ------------------------------------------------------------------------------------------------------------- packets


def test_rows_of_no_parameters_are_not_counted_to_two_billion() -> None:
    with pytest.raises(ProtocolError, match="without parameters"):
        ParameterDecoder([]).rows(b"", 2**31 - 1)


def test_an_option_of_negative_length_does_not_lead_backwards() -> None:
    part = Part(PartKind.CONNECTOPTIONS, bytes.fromhex("00 21 fcff de00"), 2**31 - 1)
    with pytest.raises(ProtocolError, match="ends after"):
        parse_options(part)


def test_a_promised_packet_takes_no_memory() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"x" * 1_000)
    ours.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    try:
        with ours, theirs, pytest.raises(OSError, match="closed"):
            Line(theirs).receive(256 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_results_are_let_go_of_when_their_session_ends() -> None:
    """They kept a connection of SQLite each until the garbage collector came."""
    closed = []

    def rows() -> Iterator[tuple[int]]:
        try:
            while True:
                yield (1,)
        finally:
            closed.append(True)

    database = ScriptedDatabase()
    statement = Statement("MANY", FunctionCode.SELECT, (), (Column("N", BIGINT),))
    database.add(statement, lambda *_: Outcome(rows=rows()))
    gc.disable()
    try:
        with served(database) as client:
            client.login()
            assert client.execute("MANY").kind != 5
        assert closed
    finally:
        gc.enable()


@pytest.mark.parametrize("text", ["ALTER SYSTEM CANCEL SESSION '1'", "ALTER SYSTEM CLEAR FAULTS"])
def test_blanks_behind_a_command_of_the_session(text: str) -> None:
    """The time of the expression that recognises it grew with their square."""
    with served(ScriptedDatabase()) as client:
        client.login()
        began = time.monotonic()
        answer = client.ask(EXECUTE_DIRECT, (3, 1, (text + " " * 200_000 + "x").encode()))
        assert answer.error()[0] == 257
        assert time.monotonic() - began < 20


def test_an_evil_expression_in_a_fault_takes_itself_off() -> None:
    fault = Fault.parse(json.dumps({"match": "(a|aa)+$", "action": "error", "code": 131}))
    other = Fault.parse(json.dumps({"match": CONNECT, "action": "error", "code": 10}))
    faults = FaultList([fault, other])
    assert faults.strike("a" * 60 + "b") is None
    began = time.thread_time()
    assert faults.strike(CONNECT) == other
    assert faults.strike("a" * 60 + "b") is None
    assert time.thread_time() - began < 0.4


# ---------------------------------------------------------------------------------------------------------- statements

FOUND = [
    # from the grammar and its damage
    ("SELECT 1 FROM DUMMY LIMIT 99999999999999999999", 339),
    ("SELECT TOP 99999999999999999999 1 FROM DUMMY", 339),
    (f"SELECT {'9' * 5_000} FROM DUMMY", 314),
    (f"CREATE TABLE N1 (A NVARCHAR({'9' * 5_000}))", 257),
    (f"COMMENT ON TABLE T IS {'9' * 5_000}", 257),
    ("ALTER SYSTEM CANCEL SESSION '²'", 1093),
    (f"ALTER SYSTEM CANCEL SESSION '{'9' * 5_000}'", 1093),
    ("SELECT TO_DATE('2020', 'YYYY YYYY') FROM DUMMY", 306),
    (f"SELECT JSON_QUERY('{'[' * 900}{']' * 900}', '$[0]') FROM DUMMY", 306),
    (f"SELECT TO_REAL_VECTOR('{'[' * 5_000}') FROM DUMMY", 306),
    (f"SELECT COALESCE({', '.join(['NULL'] * 500)}) FROM DUMMY", 2048),
    ("EXPLAIN PLAN SET STATEMENT_NAME = '\0' FOR SELECT A FROM T", 0),
    # from atheris
    ("EXPLAIN PLAN SET STATEMENT_NAME = '\0\udcfb' FOR SELECT A FROM T", 2),
    ("SELECT A FROM T UNION SELECT 1 FROM DUMMY ORDER BY -1", 277),
    (f"SELECT A FROM T ORDER BY {'9' * 5_000}", 277),
    ("UPDATE T SETSELECT", 257),
]


@pytest.mark.parametrize(("text", "code"), FOUND, ids=range(len(FOUND)))
def test_statements(sql: Sql, text: str, code: int) -> None:
    found = run_statement(sql, text)
    assert (0 if found is None else found.code) == code


@pytest.mark.parametrize(
    "text",
    [
        "/*" * 100 + "SELECT 'hush-hush' FROM DUMMY",
        "COMMENT ON TABLE 'hush-hush'",
        "ALTER TABLE 'hush-hush' ADD (A INTEGER)",
        "GRANT 'hush-hush' ON T TO X",
    ],
)
def test_messages_of_the_reader_repeat_no_text(sql: Sql, text: str) -> None:
    with pytest.raises(HanaError) as caught:
        sql.run(text)
    assert "hush" not in caught.value.text


def test_plans_of_long_statements_are_not_kept(sql: Sql) -> None:
    for number in range(5):
        sql.value(f"SELECT LENGTH('{number}{'a' * 200_000}') FROM DUMMY")
    database = sql.session._database
    assert not [key for key in database._plans if len(key[0]) > 100_000]
