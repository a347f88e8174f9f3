"""The emulator served to the real, unmodified hdbcli: what the codec's own tests cannot show."""

from __future__ import annotations

import datetime
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest

from hana_emulator.testing import Emulator

dbapi = pytest.importorskip("hdbcli.dbapi")

EMOJI = "Ä😀€ x"
ROUND_TRIPS: list[tuple[str, list[Any]]] = [
    ("TINYINT", [0, 255]),
    ("SMALLINT", [-32768, 32767]),
    ("INTEGER", [-(2**31), 2**31 - 1]),
    ("BIGINT", [-(2**63), 2**63 - 1]),
    ("REAL", [1.5, -0.0]),
    ("DOUBLE", [1e300, -1.7976931348623157e308, 5e-324]),
    ("BOOLEAN", [True, False]),
    ("DECIMAL(20,4)", [Decimal("1234.5678"), Decimal("-0.0001"), Decimal("0.0000")]),
    ("DECIMAL(38,2)", [Decimal("123456789012345678901234567890123456.78"), Decimal("-1.00")]),
    ("DECIMAL", [Decimal("1.5E-7"), Decimal("1234567890123456789012345678901234")]),
    ("NVARCHAR(400)", ["", " trailing  ", EMOJI * 60, "x" * 245, "y" * 246]),
    ("VARCHAR(20)", ["abc"]),
    ("NVARCHAR(5000)", ["z" * 5000]),
    ("NCLOB", ["", EMOJI, "ä" * 4095 + "😀", "ä" * 4096 + "😀b"]),
    ("CLOB", ["plain"]),
    ("DATE", [datetime.date(2024, 2, 29), datetime.date(9999, 12, 31), datetime.date(1900, 1, 1)]),
    ("TIME", [datetime.time(0, 0, 0), datetime.time(23, 59, 59)]),
    ("SECONDDATE", [datetime.datetime(2024, 1, 1, 12, 30, 59)]),
    (
        "TIMESTAMP",
        [datetime.datetime(2024, 1, 1, 12, 0, 0, 123456), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999)],
    ),
    ("VARBINARY(300)", [b"", b"\x00\xff" * 130]),
    ("BLOB", [b"", bytes(range(256)) * 17]),
]


def plain(row: Any) -> tuple[Any, ...]:
    """hdbcli's row as a tuple, memory views as bytes."""
    return tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)


def query(connection: Any, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    cursor.execute(sql, parameters)
    return [plain(row) for row in cursor.fetchall()]


def fvecs(*values: float) -> bytes:
    return struct.pack(f"<I{len(values)}f", len(values), *values)


@pytest.mark.parametrize(("type_", "values"), ROUND_TRIPS)
def test_values_come_back_as_they_went(hana: Any, type_: str, values: list[Any]) -> None:
    cursor = hana.cursor()
    cursor.execute(f"CREATE COLUMN TABLE T (N INTEGER, V {type_})")
    cursor.executemany("INSERT INTO T VALUES (?, ?)", list(enumerate([*values, None])))
    assert query(hana, "SELECT V FROM T ORDER BY N") == [(value,) for value in [*values, None]]


def test_types_are_described(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute(
        "CREATE COLUMN TABLE T (I INTEGER NOT NULL, B BIGINT, S NVARCHAR(33), D DECIMAL(12,3), P TIMESTAMP,"
        " C NCLOB, V REAL_VECTOR(7), H HALF_VECTOR(5))"
    )
    cursor.execute("SELECT * FROM T")
    assert [column[0] for column in cursor.description] == list("IBSDPCVH")
    assert [column[1] for column in cursor.description] == [3, 4, 11, 5, 16, 26, 96, 97]
    assert cursor.description[2][3] == 33
    assert cursor.description[3][4:6] == (12, 3)
    assert [bool(column[6]) for column in cursor.description] == [False] + [True] * 7
    assert cursor.fetchall() == []
    assert cursor.fetchone() is None


@pytest.mark.parametrize("type_", ["REAL_VECTOR", "HALF_VECTOR"])
@pytest.mark.parametrize(("output", "kind"), [("memoryview", memoryview), ("list", list), ("tuple", tuple)])
def test_vectors_in_every_output_form(
    emulator: Emulator, hana_schema: str, type_: str, output: str, kind: type
) -> None:
    connection = emulator.connect(currentSchema=hana_schema, vectoroutputtype=output)
    cursor = connection.cursor()
    cursor.execute(f"CREATE COLUMN TABLE V (N INTEGER, V {type_}(3))")
    half = type_ == "HALF_VECTOR"
    raw = struct.pack("<I3e" if half else "<I3f", 3, 1, -0.5, 2)
    inputs = [raw, memoryview(raw), [1.0, -0.5, 2.0], (1.0, -0.5, 2.0), None]
    cursor.executemany("INSERT INTO V VALUES (?, ?)", list(enumerate(inputs)))
    cursor.execute("SELECT V FROM V ORDER BY N")
    values = [row[0] for row in cursor.fetchall()]
    assert values.pop() is None
    assert [type(value) for value in values] == [kind] * 4
    expected: Any = raw if kind is memoryview else kind((1.0, -0.5, 2.0))
    assert all((bytes(value) if kind is memoryview else value) == expected for value in values)
    connection.close()


def test_a_vector_of_wrong_dimension_is_refused(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE COLUMN TABLE V (V REAL_VECTOR(3))")
    with pytest.raises(dbapi.Error, match="length 3"):
        cursor.execute("INSERT INTO V VALUES (?)", ([1.0, 2.0],))


@pytest.mark.parametrize(
    "value", ["[1, 0]", fvecs(1, 0), memoryview(fvecs(1, 0)), fvecs(2, 0)], ids=["text", "bytes", "view", "longer"]
)
def test_a_query_vector_is_taken_as_text_and_as_bytes(hana: Any, value: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE COLUMN TABLE V (N INTEGER, V REAL_VECTOR(2))")
    cursor.executemany("INSERT INTO V VALUES (?, ?)", [(1, [0.0, 1.0]), (2, [1.0, 0.0])])
    sql = "SELECT TOP 1 N, COSINE_SIMILARITY(V, TO_REAL_VECTOR(?)) AS S FROM V ORDER BY S DESC"
    assert query(hana, sql, (value,)) == [(2, 1.0)]


def test_executemany_and_paging_keep_every_row_in_order(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE COLUMN TABLE T (N BIGINT PRIMARY KEY, S NVARCHAR(200))")
    rows = [(n, f"{n:05}😀" * 10) for n in range(15_000)]
    assert sum(cursor.executemany("INSERT INTO T VALUES (?, ?)", rows)) == 15_000
    hana.commit()
    cursor.execute("SELECT * FROM T ORDER BY N")
    first = cursor.fetchmany(10)
    hana.commit()  # cursors are held over commit
    assert [plain(row) for row in first + cursor.fetchall()] == rows


@pytest.mark.parametrize("wanted", [1, 7])
def test_small_fetch_sizes(hana: Any, wanted: int) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE COLUMN TABLE T (S NVARCHAR(5000))")
    cursor.executemany("INSERT INTO T VALUES (?)", [(f"{n:04}" * 1000,) for n in range(200)])
    cursor.execute("SELECT S FROM T ORDER BY S")
    cursor.setfetchsize(wanted)
    seen = []
    while batch := cursor.fetchmany(wanted):
        seen += [row[0][:4] for row in batch]
    assert seen == [f"{n:04}" for n in range(200)]


BIG_TEXT = EMOJI * 12_000
"""60,000 characters, 72,000 UTF-16 units, more than a packet of 64 KB takes: pieces cut surrogate pairs somewhere."""
BIG_BYTES = bytes(range(256)) * 500


@pytest.mark.parametrize("autocommit", [True, False])
def test_lobs_beyond_one_packet(emulator: Emulator, hana_schema: str, autocommit: bool) -> None:
    connection = emulator.connect(currentSchema=hana_schema, autocommit=autocommit, packetSize="65536")
    cursor = connection.cursor()
    cursor.execute("CREATE COLUMN TABLE L (N INTEGER, T NCLOB, B BLOB)")
    rows = [(1, BIG_TEXT, BIG_BYTES), (2, "small", b"x"), (3, None, BIG_BYTES), (4, BIG_TEXT, None)]
    cursor.executemany("INSERT INTO L VALUES (?, ?, ?)", rows)
    connection.commit()
    assert query(connection, "SELECT * FROM L ORDER BY N") == rows
    cursor.execute("UPDATE L SET T = ? WHERE N > 1", (BIG_TEXT + "!",))
    connection.commit()
    assert query(connection, "SELECT COUNT(*), MIN(LENGTH(T)) FROM L WHERE N > 1")[0][0] == 3
    assert query(connection, "SELECT T FROM L WHERE N = 3") == [(BIG_TEXT + "!",)]
    connection.close()


def test_lobs_as_streams(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE COLUMN TABLE L (N INTEGER, T NCLOB)")
    lob = dbapi.LOB()
    cursor.execute("INSERT INTO L VALUES (?, ?)", (1, lob))
    for piece in ("abc" * 400_000, "ä😀", "end"):
        lob.write(piece)
    lob.close()
    hana.commit()
    cursor.execute("SELECT T FROM L")
    (stream,) = cursor.fetchone(True)
    assert stream.read(3) == "abc"
    assert stream.find("ä😀", 3) == 1_200_001
    assert stream.find("nowhere", 7) is None
    assert stream.read(6, 1_200_001) == "ä😀end"
    stream.close()


def test_commit_rollback_and_what_others_see(emulator: Emulator, hana: Any, hana_schema: str) -> None:
    other = emulator.connect(currentSchema=hana_schema)
    cursor = hana.cursor()
    cursor.execute("CREATE COLUMN TABLE T (N INTEGER PRIMARY KEY)")
    cursor.execute("INSERT INTO T VALUES (1)")
    assert query(other, "SELECT * FROM T") == []
    with pytest.raises(dbapi.IntegrityError):
        cursor.execute("INSERT INTO T VALUES (1)")
    cursor.execute("INSERT INTO T VALUES (2)")
    hana.commit()
    assert query(other, "SELECT N FROM T ORDER BY N") == [(1,), (2,)]
    cursor.execute("DELETE FROM T")
    assert cursor.rowcount == 2
    hana.rollback()
    assert query(hana, "SELECT COUNT(*) FROM T") == [(2,)]
    other.close()


def test_autocommit_needs_no_commit(emulator: Emulator, hana: Any, hana_schema: str) -> None:
    writer = emulator.connect(currentSchema=hana_schema, autocommit=True)
    writer.cursor().execute("CREATE COLUMN TABLE T (N INTEGER)")
    writer.cursor().execute("INSERT INTO T VALUES (?)", (1,))
    writer.rollback()
    assert query(hana, "SELECT * FROM T") == [(1,)]
    writer.close()


@pytest.mark.parametrize(("user", "password"), [("OWL", "wrong"), ("OWL", ""), ("STRANGER", "Owl-Stand-in-1")])
def test_wrong_password_is_code_ten(emulator: Emulator, user: str, password: str) -> None:
    with pytest.raises(dbapi.Error) as error:
        emulator.connect(user=user, password=password or " ")
    assert (error.value.errorcode, error.value.errortext) == (10, "authentication failed")


@pytest.mark.parametrize(
    ("sql", "code", "kind"),
    [
        ("SELEC 1 FROM DUMMY", 257, dbapi.ProgrammingError),
        ("SELECT 1 FROM NOWHERE", 259, dbapi.ProgrammingError),
        ("SELECT NOTHING FROM DUMMY", 260, dbapi.ProgrammingError),
        ("SET SCHEMA NOWHERE", 362, dbapi.Error),
    ],
)
def test_errors_carry_hanas_code(hana: Any, sql: str, code: int, kind: type[Exception]) -> None:
    with pytest.raises(dbapi.Error) as error:
        hana.cursor().execute(sql)
    assert error.value.errorcode == code
    assert type(error.value) is kind
    assert query(hana, "SELECT 1 FROM DUMMY") == [(1,)]


def test_client_properties_of_a_connection(emulator: Emulator) -> None:
    connection = emulator.connect(databaseName="OWL")
    connection.setclientinfo("APPLICATION", "test 😀")
    assert query(connection, "SELECT 1 FROM DUMMY") == [(1,)]
    assert connection.isconnected()
    connection.close()
    assert not connection.isconnected()


def test_named_parameters_and_repeated_execution(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE COLUMN TABLE T (N INTEGER, S NVARCHAR(9))")
    for n in range(3):
        cursor.execute("INSERT INTO T VALUES (:n, :s)", {"n": n, "s": f"s{n}"})
    for n in range(3):
        cursor.execute("SELECT S FROM T WHERE N = ?", (n,))
        assert [plain(row) for row in cursor.fetchall()] == [(f"s{n}",)]


def in_background(action: Callable[[], object], seconds: float = 0.3) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


@contextmanager
def again_and_again(cancel: Callable[[], object]) -> Iterator[None]:
    """Beside the block until it ends: what is not at the server yet is not cancelled."""
    over = threading.Event()

    def act() -> None:
        while not over.wait(0.3):
            cancel()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def locked(emulator: Emulator, hana: Any, hana_schema: str) -> Any:
    """A second connection that would have to wait for `hana`'s open write, a row with N = 1."""
    hana.cursor().execute("CREATE COLUMN TABLE T (N INTEGER PRIMARY KEY)")
    hana.cursor().execute("INSERT INTO T VALUES (1)")
    return emulator.connect(currentSchema=hana_schema)


def test_a_writer_waits_for_the_lock(hana: Any, locked: Any) -> None:
    began = time.monotonic()
    timer = in_background(hana.rollback)
    locked.cursor().execute("INSERT INTO T VALUES (1)")
    assert time.monotonic() - began >= 0.25
    timer.join()
    locked.rollback()


def test_a_dropped_client_gives_its_lock_back_at_once(emulator: Emulator, hana: Any, locked: Any) -> None:
    """Its connection is cut from the server's side, with an open write: nothing of it remains."""
    ((victim,),) = query(hana, "SELECT CURRENT_CONNECTION FROM DUMMY")
    emulator.connect(autocommit=True).cursor().execute(f"ALTER SYSTEM DISCONNECT SESSION '{victim}'")
    began = time.monotonic()
    locked.cursor().execute("INSERT INTO T VALUES (1)")
    assert time.monotonic() - began < 8, "less than the lock timeout"
    locked.rollback()
    with pytest.raises(dbapi.Error) as error:
        query(hana, "SELECT 1 FROM DUMMY")
    assert error.value.errorcode == -10807


WAITING_CLIENT = """
import sys
from hdbcli import dbapi
host, port, user, password, schema = sys.argv[1:]
connection = dbapi.connect(address=host, port=int(port), user=user, password=password, currentSchema=schema)
print("ready", flush=True)
connection.cursor().execute("INSERT INTO T VALUES (1)")
connection.commit()
"""


def test_a_client_killed_while_it_waits_for_a_lock_writes_nothing(
    emulator: Emulator, hana: Any, locked: Any, hana_schema: str
) -> None:
    login = [emulator.host, str(emulator.port), emulator.user, emulator.password, hana_schema]
    with subprocess.Popen([sys.executable, "-c", WAITING_CLIENT, *login], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        assert client.poll() is None
        client.kill()
    time.sleep(0.5)
    hana.rollback()
    time.sleep(0.2)
    assert query(locked, "SELECT N FROM T") == []


def test_cancel_stops_a_waiting_statement(hana: Any, locked: Any) -> None:
    began = time.monotonic()
    with again_and_again(locked.cancel), pytest.raises(dbapi.Error) as error:
        locked.cursor().execute("INSERT INTO T VALUES (1)")
    assert error.value.errorcode == 139
    assert time.monotonic() - began < 8, "less than the lock timeout"
    hana.rollback()
    assert query(locked, "SELECT COUNT(*) FROM T") == [(0,)]


def test_cancelled_write_ends_its_transaction(hana: Any, emulator: Emulator, hana_schema: str) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE COLUMN TABLE T (N INTEGER PRIMARY KEY)")
    cursor.executemany("INSERT INTO T VALUES (?)", [(n,) for n in range(1500)])
    with again_and_again(hana.cancel), pytest.raises(dbapi.Error) as error:
        cursor.execute("DELETE FROM T WHERE N = (SELECT COUNT(*) FROM T A, T B, T C WHERE A.N + B.N + C.N < 0)")
    assert error.value.errorcode == 139
    other = emulator.connect(currentSchema=hana_schema)
    other.cursor().execute("INSERT INTO T VALUES (1)")
    other.commit()
    cursor.execute("INSERT INTO T VALUES (2)")
    hana.rollback()
    assert query(other, "SELECT N FROM T") == [(1,)]


def test_many_connections_work_at_once(emulator: Emulator, hana: Any, hana_schema: str) -> None:
    hana.cursor().execute("CREATE COLUMN TABLE T (WHO INTEGER, N INTEGER)")
    failures: list[BaseException] = []

    def work(who: int) -> None:
        try:
            connection = emulator.connect(currentSchema=hana_schema)
            cursor = connection.cursor()
            for n in range(5):
                cursor.executemany("INSERT INTO T VALUES (?, ?)", [(who, 100 * n + m) for m in range(100)])
                connection.commit()
                assert query(connection, "SELECT COUNT(*) FROM T WHERE WHO = ?", (who,)) == [(100 * (n + 1),)]
            connection.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert query(hana, "SELECT COUNT(*), COUNT(DISTINCT WHO) FROM T") == [(4000, 8)]
