"""What change capture asks of the emulator, through the real hdbcli: triggers and their log, `"$rowid$"`, hashes,
late commits, and changes of structure under prepared statements."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hana_emulator.testing import Emulator, running

dbapi = pytest.importorskip("hdbcli.dbapi")


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with running() as started:
        yield started


@pytest.fixture
def connection(emulator: Emulator) -> Iterator[Any]:
    opened = emulator.connect()
    run(opened, "CREATE COLUMN TABLE T (K INTEGER PRIMARY KEY, V NVARCHAR(40), AT TIMESTAMP)")
    yield opened
    opened.rollback()
    run(opened, "DROP TABLE T CASCADE")
    opened.close()


def run(connection: Any, text: str, *parameters: Any) -> int:
    with closing(connection.cursor()) as cursor:
        cursor.execute(text, parameters)
        return int(cursor.rowcount)


def rows(connection: Any, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
    with closing(connection.cursor()) as cursor:
        cursor.execute(text, parameters)
        return [tuple(row) for row in cursor.fetchall()]


def code(connection: Any, text: str, *parameters: Any) -> int:
    with pytest.raises(dbapi.Error) as caught:
        run(connection, text, *parameters)
    return int(caught.value.errorcode)


@pytest.fixture
def logged(connection: Any) -> Iterator[Any]:
    run(
        connection,
        "CREATE COLUMN TABLE L (ID BIGINT GENERATED ALWAYS AS IDENTITY, K INTEGER, OP NVARCHAR(1), AT TIMESTAMP)",
    )
    for event, row, name in (("INSERT", "NEW", "I"), ("UPDATE", "NEW", "U"), ("DELETE", "OLD", "D")):
        run(
            connection,
            f"CREATE TRIGGER T{name} AFTER {event} ON T REFERENCING {row} ROW AS R FOR EACH ROW\nBEGIN\n"
            f"  INSERT INTO L (K, OP, AT) VALUES (:r.K, '{name}', CURRENT_UTCTIMESTAMP);\nEND;",
        )
    yield connection
    connection.rollback()
    run(connection, "DROP TABLE L")


def test_a_batch_fills_the_log_and_reports_its_own_rows(logged: Any) -> None:
    with closing(logged.cursor()) as cursor:
        cursor.executemany("INSERT INTO T VALUES (?, ?, ?)", [(key, f"v{key}", None) for key in range(500)])
        assert cursor.rowcount == 500
        cursor.executemany("UPDATE T SET V = ? WHERE K = ?", [("x", key) for key in range(0, 500, 100)])
        assert cursor.rowcount == 5
    assert run(logged, "DELETE FROM T WHERE K >= 490") == 10
    logged.commit()
    counted = dict(rows(logged, "SELECT OP, COUNT(*) FROM L GROUP BY OP"))
    assert counted == {"I": 500, "U": 5, "D": 10}
    ((lowest, highest, moments),) = rows(logged, "SELECT MIN(ID), MAX(ID), COUNT(DISTINCT AT) FROM L")
    assert highest - lowest == 514
    assert moments <= 3


def test_a_rolled_back_batch_leaves_no_log(logged: Any) -> None:
    with closing(logged.cursor()) as cursor, pytest.raises(dbapi.Error):
        cursor.executemany("INSERT INTO T VALUES (?, ?, ?)", [(1, "a", None), (1, "b", None)])
    logged.rollback()
    assert rows(logged, "SELECT * FROM L") == []


def test_the_error_of_a_trigger_reaches_the_client(logged: Any) -> None:
    run(logged, "RENAME TABLE L TO ELSEWHERE")
    assert code(logged, "INSERT INTO T VALUES (1, 'a', NULL)") == 465
    assert rows(logged, "SELECT COUNT(*) FROM T") == [(0,)]
    run(logged, "RENAME TABLE ELSEWHERE TO L")
    assert run(logged, "INSERT INTO T VALUES (1, 'a', NULL)") == 1


def test_a_late_commit(logged: Any, emulator: Emulator) -> None:
    """What A writes first, with the lower timestamp and the lower id, is seen after what B has written later."""
    with closing(emulator.connect()) as a, closing(emulator.connect()) as b:
        run(a, "INSERT INTO T VALUES (1, 'early', CURRENT_UTCTIMESTAMP)")
        time.sleep(0.002)
        run(b, "INSERT INTO T VALUES (2, 'late', CURRENT_UTCTIMESTAMP)")
        b.commit()
        ((key, mark),) = rows(logged, "SELECT K, AT FROM T")
        ((position,),) = rows(logged, "SELECT MAX(ID) FROM L")
        logged.commit()
        assert key == 2
        a.commit()
    assert rows(logged, "SELECT K FROM T WHERE AT > ?", mark) == []  # a watermark without delay would miss it
    assert rows(logged, "SELECT K FROM T WHERE AT > ADD_SECONDS(?, -5)  ORDER BY AT", mark) == [(1,), (2,)]
    assert rows(logged, "SELECT K FROM L WHERE ID > ?", position) == []  # so would a reader of the log by position
    assert rows(logged, "SELECT K, OP FROM L ORDER BY ID") == [(1, "I"), (2, "I")]


def test_a_window_of_timestamp_and_key(connection: Any) -> None:
    moment = "2024-05-06 07:08:09.1234567"
    with closing(connection.cursor()) as cursor:
        cursor.executemany("INSERT INTO T VALUES (?, 'x', ?)", [(1, moment), (2, moment), (3, "2024-05-06 07:08:10")])
    window = (
        "SELECT TOP 10 K FROM T WHERE (AT > ? OR (AT = ? AND K > ?)) AND AT <= ADD_SECONDS(CURRENT_UTCTIMESTAMP, -0.5)"
        " ORDER BY AT, K"
    )
    assert rows(connection, window, moment, moment, 1) == [(2,), (3,)]
    ((shift,),) = rows(
        connection,
        "SELECT NANO100_BETWEEN(ADD_SECONDS(AT, -0.5), AT) FROM T WHERE K = 1",
    )
    assert shift == 5_000_000
    ((now, later),) = rows(connection, "SELECT CURRENT_UTCTIMESTAMP, ADD_SECONDS(CURRENT_UTCTIMESTAMP, 1) FROM DUMMY")
    assert (later - now).total_seconds() == 1


@pytest.mark.slow
def test_row_ids_over_the_wire_and_over_a_restart(tmp_path: Path) -> None:
    snapshot = 'SELECT K, "$rowid$" FROM T ORDER BY K'
    with running("--data", str(tmp_path)) as first, closing(first.connect()) as opened:
        run(opened, "CREATE COLUMN TABLE T (K INTEGER PRIMARY KEY, V NVARCHAR(9))")
        with closing(opened.cursor()) as cursor:
            cursor.executemany("INSERT INTO T VALUES (?, ?)", [(1, "a"), (2, "b"), (3, "c")])
        run(opened, "UPDATE T SET V = 'x' WHERE K = 1")
        opened.commit()
        before = dict(rows(opened, snapshot))
        with closing(opened.cursor()) as cursor:
            cursor.execute(snapshot)
            assert [(name, kind) for name, kind, *_ in cursor.description] == [("K", 3), ("$rowid$", 4)]
        first.process.kill()
    with running("--data", str(tmp_path)) as second, closing(second.connect()) as opened:
        assert dict(rows(opened, snapshot)) == before
        run(opened, "DELETE FROM T WHERE K = 1")
        run(opened, "INSERT INTO T VALUES (1, 'again')")
        opened.commit()
        assert dict(rows(opened, snapshot))[1] > before[1]
        ((highest,),) = rows(opened, 'SELECT MAX("$rowid$") FROM T')
        run(opened, "TRUNCATE TABLE T")
        run(opened, "INSERT INTO T VALUES (1, 'reloaded')")
        assert rows(opened, 'SELECT MAX("$rowid$") FROM T')[0][0] < highest


TEXTS = ["", "plain", "Größe", "\U0001f600 and \U00010348", "a\U0001f600b"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["sha256", pytest.param("md5", marks=pytest.mark.slow)])
def test_hashes_are_of_cesu_8(connection: Any, text: str, name: str) -> None:
    """UTF-8 of each half of a surrogate pair by itself."""
    units = text.encode("utf-16-be")
    surrogates = "".join(chr(int.from_bytes(units[at : at + 2], "big")) for at in range(0, len(units), 2))
    data = surrogates.encode("utf-8", "surrogatepass")
    run(connection, "INSERT INTO T VALUES (1, ?, NULL)", text)
    ((stored, bound, binary),) = rows(
        connection,
        "SELECT {0}(TO_BINARY(V)), {0}(TO_BINARY(TO_NVARCHAR(?))), TO_BINARY(V) FROM T".format(f"HASH_{name.upper()}"),
        text,
    )
    assert bytes(binary) == data
    assert bytes(stored) == bytes(bound) == hashlib.new(name, data).digest()


def test_a_row_hash_with_lengths_and_nulls(connection: Any) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.executemany(
            "INSERT INTO T VALUES (?, ?, ?)",
            [(1, "ab", None), (2, None, None), (3, "", "2024-01-02 03:04:05"), (11, "ab", None)],
        )
    part = "COALESCE(TO_NVARCHAR(LENGTH(TO_NVARCHAR({0}))) || ':' || TO_NVARCHAR({0}), 'N')"
    whole = "TO_BINARY({}), TO_BINARY({}), TO_BINARY({})".format(*(part.format(name) for name in ("K", "V", "AT")))
    found = dict(rows(connection, f"SELECT K, HASH_SHA256({whole}) FROM T"))
    expected = {1: "1:12:abN", 2: "1:2NN", 3: "1:30:27:2024-01-02 03:04:05.0000000", 11: "2:112:abN"}
    assert {key: bytes(value) for key, value in found.items()} == {
        key: hashlib.sha256(text.encode()).digest() for key, text in expected.items()
    }
    assert rows(connection, "SELECT HASH_SHA256(TO_BINARY(V), TO_BINARY('x')) FROM T WHERE K = 2") == [(None,)]
    ((joined, text),) = rows(
        connection,
        "SELECT BINTOHEX(TO_BINARY('a') || HEXTOBIN('00ff')), BINTOHEX(CONCAT(X'01', TO_BINARY('é'))) FROM DUMMY",
    )
    assert (joined, text) == ("6100FF", "01C3A9")
    assert code(connection, "SELECT HASH_SHA256(V) FROM T") == 266


def test_windows_that_cut_a_table_into_ranges(connection: Any) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.executemany("INSERT INTO T VALUES (?, 'x', NULL)", [(key,) for key in range(10, 0, -1)])
    ranges = rows(
        connection,
        "SELECT N, MIN(K), MAX(K), COUNT(*) FROM (SELECT K, NTILE(3) OVER (ORDER BY K) AS N FROM T)"
        " GROUP BY N ORDER BY N",
    )
    assert ranges == [(1, 1, 4, 4), (2, 5, 7, 3), (3, 8, 10, 3)]
    assert rows(
        connection,
        "SELECT K FROM (SELECT K, ROW_NUMBER() OVER (ORDER BY K) AS P, COUNT(*) OVER () AS C, MIN(K) OVER () AS L,"
        " MAX(K) OVER (ORDER BY K ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS H FROM T)"
        " WHERE MOD(P, 4) = 1 AND C = 10 AND L = 1 AND H = K ORDER BY K",
    ) == [(1,), (5,), (9,)]
    for view in ("M_TABLES", "M_CS_TABLES"):
        assert rows(connection, f"SELECT RECORD_COUNT FROM {view} WHERE TABLE_NAME = 'T'") == [(10,)]
    assert len(rows(connection, "SELECT DATABASE_NAME, VERSION FROM SYS.M_DATABASE")) == 1


CHANGES = [
    ("ALTER TABLE T ADD (W INTEGER DEFAULT 7)", "ALTER TABLE T DROP (W)", None, 3),
    ("ALTER TABLE T DROP (V)", "ALTER TABLE T ADD (V NVARCHAR(40))", 260, 1),
    ("RENAME COLUMN T.V TO U", "RENAME COLUMN T.U TO V", 260, 2),
    ("RENAME TABLE T TO U", "RENAME TABLE U TO T", 259, 2),
    ("ALTER TABLE T ALTER (V NVARCHAR(2))", "ALTER TABLE T ALTER (V NVARCHAR(40))", None, 2),
]


@pytest.mark.parametrize(("change", "back", "failing", "width"), CHANGES)
def test_prepared_statements_see_a_changed_structure_at_once(
    connection: Any, emulator: Emulator, change: str, back: str, failing: int | None, width: int
) -> None:
    run(connection, "ALTER TABLE T DROP (AT)")
    run(connection, "INSERT INTO T VALUES (1, 'ab')")
    connection.commit()
    named, whole = "SELECT K, V FROM T WHERE K > ?", "SELECT * FROM T WHERE K > ?"
    with (
        closing(emulator.connect(autocommit=True)) as other,
        closing(other.cursor()) as first,
        closing(other.cursor()) as second,
    ):
        for cursor, text in ((first, named), (second, whole)):
            cursor.execute(text, (0,))
            assert len(cursor.fetchall()) == 1
        run(connection, change)
        if failing is None:
            first.execute(named, (0,))
            assert [tuple(row) for row in first.fetchall()] == [(1, "ab")]
        else:
            with pytest.raises(dbapi.Error) as caught:
                first.execute(named, (0,))
            assert caught.value.errorcode == failing
        if failing == 259:
            with pytest.raises(dbapi.Error) as caught:
                second.execute(whole, (0,))
            assert caught.value.errorcode == 259
        else:
            second.execute(whole, (0,))
            assert [len(row) for row in second.fetchall()] == [width]
        run(connection, back)
        first.execute(named, (0,))
        assert len(first.fetchall()) == 1
