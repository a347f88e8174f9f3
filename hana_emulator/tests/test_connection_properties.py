"""What hdbcli offers on a connection or a statement, against the emulator: packet size, current schema, session
variables, parameters by name, LOBs read and written in pieces.
"""

from __future__ import annotations

import struct
from contextlib import closing
from typing import Any

import pytest

from hana_emulator.protocol.codes import PartKind, ProtocolError
from hana_emulator.protocol.options import parse_client_info
from hana_emulator.protocol.packet import Part
from hana_emulator.testing import Emulator

dbapi = pytest.importorskip("hdbcli.dbapi")

CONTEXT = "SELECT SESSION_CONTEXT(?) FROM DUMMY"


def value(connection: Any, sql: str, *parameters: Any) -> Any:
    cursor = connection.cursor()
    cursor.execute(sql, parameters)
    return cursor.fetchone()[0]


@pytest.mark.parametrize(
    ("size", "compress"),
    [
        (65_536, "true"),
        (16_777_216, "false"),
        pytest.param(65_536, "false", marks=pytest.mark.slow),
        pytest.param(1_048_576, "true", marks=pytest.mark.slow),
        pytest.param(1_048_576, "false", marks=pytest.mark.slow),
        pytest.param(16_777_216, "true", marks=pytest.mark.slow),
    ],
)
def test_packet_sizes(emulator: Emulator, hana_schema: str, size: int, compress: str) -> None:
    options = {"packetSize": str(size), "compress": compress, "currentSchema": hana_schema}
    with closing(emulator.connect(**options)) as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE P (N INTEGER, T NVARCHAR(5000), L NCLOB)")
        rows = [(number, "ä" * 4_000, "b" * 9_000) for number in range(300)]
        cursor.executemany("INSERT INTO P VALUES (?, ?, ?)", rows)
        connection.commit()
        cursor.execute("SELECT N, T, L FROM P ORDER BY N")
        assert [tuple(row) for row in cursor.fetchall()] == rows


@pytest.mark.parametrize("name", ["currentSchema", "CURRENTSCHEMA"])
def test_the_current_schema(emulator: Emulator, hana_schema: str, name: str) -> None:
    with closing(emulator.connect(**{name: hana_schema})) as connection:
        assert value(connection, "SELECT CURRENT_SCHEMA FROM DUMMY") == hana_schema


def test_a_current_schema_that_is_not_there(emulator: Emulator) -> None:
    with pytest.raises(dbapi.Error) as caught, closing(emulator.connect(currentSchema="NOWHERE")) as connection:
        connection.cursor().execute("SELECT 1 FROM DUMMY")
    assert caught.value.errorcode == 362


@pytest.mark.parametrize(
    "options",
    [
        {"sessionVariable:APPLICATION": "owl 😀"},
        {"SESSIONVARIABLE:APPLICATION": "owl 😀"},
        {"sessionvariables": {"APPLICATION": "owl 😀"}},
    ],
)
def test_session_variables_of_a_connection(emulator: Emulator, options: dict[str, Any]) -> None:
    with closing(emulator.connect(**options)) as connection, closing(emulator.connect()) as other:
        assert value(connection, CONTEXT, "APPLICATION") == "owl 😀"
        assert value(connection, CONTEXT, "NOSUCH") is None
        assert value(other, CONTEXT, "APPLICATION") != "owl 😀"


@pytest.mark.parametrize("text", ["later", "x" * 245, "x" * 246, "ä" * 500, "y" * 40_000])
def test_client_information_set_later(emulator: Emulator, text: str) -> None:
    with closing(emulator.connect()) as connection:
        connection.setclientinfo("MINE", text)
        assert value(connection, CONTEXT, "MINE") == text
        connection.setclientinfo("MINE", "again")
        assert value(connection, CONTEXT, "MINE") == "again"


def test_client_information_in_its_widest_form() -> None:
    name, text = b"\x01N", b"\xf7" + struct.pack("<I", 70_000) + b"z" * 70_000
    assert parse_client_info(Part(PartKind.CLIENTINFO, name + text, 1)) == {"N": "z" * 70_000}


@pytest.mark.parametrize("data", [b"", b"\x05ab", b"\x01N", b"\x01N\xf6", b"\x01N\x02a", b"\x01\xff\x01a"])
def test_broken_client_information_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_client_info(Part(PartKind.CLIENTINFO, data, 1))


def test_parameters_by_name(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE TABLE N (A INTEGER, B NVARCHAR(20), V REAL_VECTOR(2))")
    for number, text in ((1, "one"), (2, ":a")):
        cursor.execute("INSERT INTO N VALUES (:a, :b, :v)", {"b": text, "a": number, "v": [1.0, float(number)]})
    cursor.execute("SELECT A FROM N WHERE B = :b OR (A = :a AND :a > 0) ORDER BY A", {"a": 1, "b": ":a"})
    assert [row[0] for row in cursor.fetchall()] == [1, 2]
    cursor.execute("""SELECT ':b', "A" /* :c */ FROM N WHERE A = :a -- :d""", {"a": 2})
    assert tuple(cursor.fetchone()) == (":b", 2)
    cursor.execute(
        "SELECT TOP :k A FROM N ORDER BY COSINE_SIMILARITY(V, TO_REAL_VECTOR(:q)) DESC", {"k": 1, "q": "[1, 2]"}
    )
    assert cursor.fetchone()[0] == 2


def test_a_text_lob_written_and_read_in_pieces(emulator: Emulator, hana_schema: str) -> None:
    """Pieces of odd sizes, so that packets cut surrogate pairs in two. Reads end between characters: hdbcli itself
    cannot return half of one."""
    text = "aä😀" * 70_001
    connection = emulator.connect(currentSchema=hana_schema, packetSize="65536")
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE L (N INTEGER, T NCLOB)")
    lob = dbapi.LOB()
    cursor.execute("INSERT INTO L VALUES (?, ?)", (1, lob))
    for start in range(0, len(text), 9_991):
        lob.write(text[start : start + 9_991])
    lob.close()
    connection.commit()
    cursor.execute("SELECT T FROM L")
    (stream,) = cursor.fetchone(True)
    read, position, units = [], 1, 30_000
    while position <= len(text) // 3 * 4:
        read.append(stream.read(units, position))
        position += units
    assert "".join(read) == text
    stream.close()
    connection.close()


def test_a_binary_lob_written_and_read_in_pieces(hana: Any) -> None:
    data = bytes(range(251)) * 12_000
    cursor = hana.cursor()
    cursor.execute("CREATE TABLE L (N INTEGER, A BLOB, B BLOB)")
    first, second = dbapi.LOB(), dbapi.LOB()
    cursor.execute("INSERT INTO L VALUES (?, ?, ?)", (1, first, second))
    for start in range(0, len(data), 400_000):
        first.write(data[start : start + 400_000])
        second.write(data[start : start + 400_000][::-1])
    first.close()
    second.close()
    hana.commit()
    cursor.execute("SELECT A, B FROM L")
    one, two = cursor.fetchone(True)
    assert bytes(one.read(len(data))) == data
    assert bytes(two.read(10, 400_000 - 9)) == data[:10][::-1]
    one.close()
    two.close()


def test_half_vectors_are_searched_and_compared(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE TABLE H (N INTEGER, V HALF_VECTOR(4))")
    vectors = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.25], [1.0, 1.0, 0.0, 0.0]]
    cursor.executemany("INSERT INTO H VALUES (?, ?)", [(n, struct.pack("<I4e", 4, *v)) for n, v in enumerate(vectors)])
    cursor.execute(
        "SELECT TOP 1 N, COSINE_SIMILARITY(V, TO_HALF_VECTOR(?)) S FROM H ORDER BY S DESC", ("[0, 1, 0, 0.25]",)
    )
    number, score = cursor.fetchone()
    assert (number, round(score, 3)) == (1, 1.0)
    cursor.execute("SELECT TO_NVARCHAR(V) FROM H WHERE N = 0")
    assert [float(part) for part in cursor.fetchone()[0].strip("[]").split(",")] == vectors[0]
    cursor.execute("CREATE HNSW VECTOR INDEX I ON H (V) SIMILARITY FUNCTION L2DISTANCE")
    cursor.execute("SELECT TOP 1 N, L2DISTANCE(V, TO_HALF_VECTOR(?)) D FROM H ORDER BY D", ("[1, 1, 0, 0.5]",))
    assert tuple(cursor.fetchone()) == (2, 0.5)
    cursor.execute("UPDATE H SET V = TO_REAL_VECTOR(?) WHERE N = 0", ("[0.1, 2, 3, 4]",))
    cursor.execute(
        "SELECT V, TO_REAL_VECTOR(V), CAST(TO_REAL_VECTOR(V) AS HALF_VECTOR(4)), CARDINALITY(V) FROM H WHERE N = 0"
    )
    half, real, again, count = cursor.fetchone()
    assert bytes(half) == bytes(again) == struct.pack("<I4e", 4, 0.1, 2, 3, 4)
    assert (bytes(real), count) == (struct.pack("<I4f", 4, 0.0999755859375, 2, 3, 4), 4)
