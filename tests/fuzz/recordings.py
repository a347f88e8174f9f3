"""Real sessions of hdbcli, recorded: every kind of request that it sends, with every type it knows."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from hana_emulator.testing import Emulator
from tests.fuzz.packets import after_login, command, split

TABLES = (
    "CREATE TABLE FUZZED (K INTEGER PRIMARY KEY, T TINYINT, S SMALLINT, B BIGINT, D DECIMAL(15,3), F DECIMAL, R REAL,"
    " X DOUBLE, N NVARCHAR(40), V VARBINARY(40), L BOOLEAN, A DATE, C TIME, E SECONDDATE, M TIMESTAMP, G NCLOB,"
    " H BLOB, Q REAL_VECTOR(3))",
    "CREATE TABLE NUMBERS (N INTEGER)",
    "INSERT INTO FUZZED (K, N) VALUES (-1, 'untouched')",
)
_EVERYTHING = f"INSERT INTO FUZZED VALUES ({', '.join('?' * 18)})"
_VECTOR = bytes.fromhex("03000000 0000803f 00000040 00004040")
_LONG = "ä😀 text " * 20_000


def _row(key: int) -> list[Any]:
    return [
        *(key, 7, -7, 2**40, Decimal("12.345"), Decimal("1E-5"), 1.5, -2.5, "naïve 😀", b"\x00\xff", True),
        *(date(2024, 2, 29), time(23, 59, 59), datetime(2024, 2, 29, 1, 2, 3), datetime(2024, 2, 29, 1, 2, 3, 456_789)),
        *("text", b"\x01\x02", _VECTOR),
    ]


def _types(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute(_EVERYTHING, _row(1))
    cursor.execute(_EVERYTHING, [2, *[None] * 17])
    cursor.executemany(_EVERYTHING, [_row(key) for key in range(3, 9)])
    cursor.execute("SELECT * FROM FUZZED WHERE K > ? AND N LIKE ? ORDER BY K", [0, "%"])
    assert len(cursor.fetchall()) == 7
    cursor.execute("SELECT K FROM FUZZED WHERE M >= ? AND A = ? AND D < ?", [datetime(2020, 1, 1), date.max, 5])
    hana.rollback()


def _lobs(hana: Any) -> None:
    cursor = hana.cursor()
    insert = "INSERT INTO FUZZED (K, G, H) VALUES (?, ?, ?)"
    cursor.execute(insert, [1, _LONG, b"\xff" * 1_200_000])
    cursor.executemany(insert, [[2, "short", None], [3, None, b""]])
    cursor.execute("SELECT G, H FROM FUZZED WHERE K = 1")
    text, data = cursor.fetchone(True)
    assert text.read(100, 5_000)
    assert text.find("text", 4, 9_000) > 0
    assert len(data.read()) == 1_200_000
    hana.rollback()


def _pages(hana: Any) -> None:
    cursor, other = hana.cursor(), hana.cursor()
    cursor.execute("SELECT A.N, B.N FROM NUMBERS A, NUMBERS B")
    other.execute("SELECT COUNT(*) FROM NUMBERS")
    assert len(cursor.fetchmany(40_000)) == 40_000
    assert other.fetchone()
    other.close()
    cursor.close()
    hana.rollback()


def _faults(hana: Any) -> None:
    from hdbcli import dbapi

    cursor = hana.cursor()
    with contextlib.suppress(dbapi.Error):
        cursor.executemany("INSERT INTO FUZZED (K) VALUES (?)", [[1], [2], [1], [3]])
    for wrong in ("SELECT * FROM NOWHERE", "SELEC", "INSERT INTO FUZZED (K) VALUES (NULL)"):
        with contextlib.suppress(dbapi.Error):
            cursor.execute(wrong)
    cursor.execute("SAVEPOINT A")
    cursor.execute("UPDATE FUZZED SET N = 'x' WHERE K >= 0")
    cursor.execute("DELETE FROM FUZZED WHERE K >= 0")
    cursor.execute("ROLLBACK TO SAVEPOINT A")
    cursor.execute("SELECT * FROM FUZZED FOR UPDATE")
    hana.rollback()


SESSIONS: dict[str, Callable[[Any], None]] = {"types": _types, "lobs": _lobs, "pages": _pages, "faults": _faults}


def create_tables(emulator: Emulator) -> None:
    with contextlib.closing(emulator.connect(autocommit=True)) as hana:
        cursor = hana.cursor()
        for statement in TABLES:
            cursor.execute(statement)
        cursor.executemany("INSERT INTO NUMBERS VALUES (?)", [[number] for number in range(300)])


@contextlib.contextmanager
def _recorder(port: int, folder: Path) -> Iterator[int]:
    script = Path(__file__).with_name("recorder.py")
    process = subprocess.Popen([sys.executable, str(script), str(port), str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def record(emulator: Emulator, folder: Path) -> dict[str, list[bytes]]:
    """The packets that each session sent after its login. The sessions commit nothing."""
    with _recorder(emulator.port, folder) as port:
        for run in SESSIONS.values():
            hana = emulator.connect(port=port)
            run(hana)
            hana.close()
    return {name: after_login(split((folder / f"{n}.bin").read_bytes())) for n, name in enumerate(SESSIONS)}


def commands(recorded: dict[str, list[bytes]]) -> frozenset[bytes]:
    found = (command(packet) for packets in recorded.values() for packet in packets)
    return frozenset(text for text in found if text is not None)
