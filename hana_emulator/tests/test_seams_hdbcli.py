"""Where parts of the emulator meet, through the real hdbcli, without and with TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from emulator_background import Background
from emulator_sql import Sql
from hana_emulator.sql.database import Database
from hana_emulator.testing import Emulator, running

dbapi = pytest.importorskip("hdbcli.dbapi")


PLAIN, TLS = pytest.param((), id="plain"), pytest.param(("--tls",), id="tls", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[PLAIN, TLS])
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    with running(*request.param) as started:
        yield started


@pytest.fixture
def client(emulator: Emulator) -> Iterator[Any]:
    with closing(emulator.connect(autocommit=True)) as connection:
        yield connection
        tables = rows(connection, "SELECT TABLE_NAME FROM SYS.TABLES WHERE SCHEMA_NAME = CURRENT_SCHEMA")
        for (name,) in tables:
            run(connection, f"DROP TABLE {name} CASCADE")


def run(connection: Any, text: str, *parameters: Any) -> int:
    cursor = connection.cursor()
    cursor.execute(text, parameters) if parameters else cursor.execute(text)
    return int(cursor.rowcount)


def rows(connection: Any, text: str) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    cursor.execute(text)
    return [tuple(row) for row in cursor.fetchall()]


def test_a_prepared_query_tells_the_driver_its_new_columns(client: Any, emulator: Emulator) -> None:
    run(client, "CREATE TABLE T (K INTEGER PRIMARY KEY, N INTEGER)")
    run(client, "INSERT INTO T VALUES (1, 5)")
    with closing(emulator.connect(autocommit=True)) as other:
        cursor = other.cursor()
        cursor.prepare("SELECT * FROM T WHERE K = ?")

        def again() -> list[tuple[Any, ...]]:
            cursor.executeprepared([1])
            return [tuple(row) for row in cursor.fetchall()]

        assert again() == [(1, 5)]
        run(client, "ALTER TABLE T ADD (X NVARCHAR(5) DEFAULT 'x')")
        assert again() == [(1, 5, "x")]
        assert [column[0] for column in cursor.description] == ["K", "N", "X"]
        run(client, "ALTER TABLE T ALTER (N NVARCHAR(9))")
        assert again() == [(1, "5", "x")]
        run(client, "ALTER TABLE T ALTER (K NVARCHAR(9))")
        assert again() == [("1", "5", "x")]


def test_commands_of_the_server_can_be_prepared(client: Any, emulator: Emulator) -> None:
    """As SQLAlchemy and the like send everything."""
    cursor = client.cursor()
    cursor.execute('ALTER SYSTEM INJECT FAULT \'{"match": "FROM DUMMY", "action": "error", "code": 131}\'', ())
    with pytest.raises(dbapi.Error) as caught:
        rows(client, "SELECT * FROM DUMMY")
    assert caught.value.errorcode == 131
    cursor.execute("ALTER SYSTEM CLEAR FAULTS", ())
    other = emulator.connect()
    ((number,),) = rows(other, "SELECT CURRENT_CONNECTION FROM DUMMY")
    cursor.execute(f"ALTER SYSTEM DISCONNECT SESSION '{number}'", ())
    with pytest.raises(dbapi.Error) as caught:
        rows(other, "SELECT * FROM DUMMY")
    assert caught.value.errorcode == -10807
    other.close()


def test_sessions_of_others_are_ended_with_a_privilege_only(client: Any, emulator: Emulator) -> None:
    run(client, 'CREATE USER GUEST PASSWORD "Secret-1" NO FORCE_FIRST_PASSWORD_CHANGE')
    ((number,),) = rows(client, "SELECT CURRENT_CONNECTION FROM DUMMY")
    login = {"user": "GUEST", "password": "Secret-1", "autocommit": True}
    with closing(emulator.connect(**login)) as guest:
        for word in ("CANCEL", "DISCONNECT"):
            with pytest.raises(dbapi.Error) as caught:
                run(guest, f"ALTER SYSTEM {word} SESSION '{number}'")
            assert caught.value.errorcode == 258
        own = emulator.connect(**login)
        ((number,),) = rows(own, "SELECT CURRENT_CONNECTION FROM DUMMY")
        run(guest, f"ALTER SYSTEM DISCONNECT SESSION '{number}'")
        own.close()
    run(client, "DROP USER GUEST CASCADE")
    assert rows(client, "SELECT * FROM DUMMY") == [("X",)]


def test_a_batch_reports_every_kind_of_constraint_by_row(client: Any, emulator: Emulator) -> None:
    run(client, "CREATE TABLE P (K INTEGER PRIMARY KEY)")
    run(
        client,
        "CREATE TABLE C (K INTEGER PRIMARY KEY, P INTEGER REFERENCES P, N INTEGER CHECK (N > 0),"
        " R INTEGER REFERENCES C)",
    )
    run(client, "INSERT INTO P VALUES (1)")
    batch = [
        (1, 1, 1, 1),  # refers to itself
        (2, 9, 1, None),
        (3, 1, -1, None),
        (4, 1, 1, 5),  # refers to a row that comes later
        (5, 1, 1, None),
        (6, 1, None, 5),
        (6, 1, None, None),
    ]
    cursor = client.cursor()
    with pytest.raises(dbapi.ExecuteManyError) as caught:
        cursor.executemany("INSERT INTO C VALUES (?, ?, ?, ?)", batch, batcherrors=True)
    assert [(error.rownumber, error.errorcode) for error in caught.value.errors] == [
        (2, 461),
        (3, 677),
        (4, 461),
        (7, 301),
    ]
    with pytest.raises(dbapi.ExecuteManyError) as caught:
        cursor.executemany("DELETE FROM C WHERE K = ?", [(5,), (6,), (1,)], batcherrors=True)
    assert [(error.rownumber, error.errorcode) for error in caught.value.errors] == [(1, 462)]
    assert rows(client, "SELECT K FROM C") == [(5,)]


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ({"action": "error", "code": 131}, 131),
        pytest.param({"action": "error", "code": 301}, 301, marks=pytest.mark.slow),
        pytest.param({"action": "drop_before"}, -10807, marks=pytest.mark.slow),
        ({"action": "drop_after"}, -10807),
        pytest.param({"action": "delay", "seconds": 0.1}, 0, marks=pytest.mark.slow),
        ({"action": "slow", "bytes": 3, "seconds": 0.001}, 0),
    ],
    ids=lambda value: str(value),
)
def test_faults_strike_a_batch_of_long_lobs_once(
    client: Any, emulator: Emulator, action: dict[str, Any], code: int
) -> None:
    run(client, "CREATE TABLE L (K INTEGER PRIMARY KEY, T NCLOB)")
    run(client, f"ALTER SYSTEM INJECT FAULT '{json.dumps({'match': 'INTO L', **action})}'")
    with closing(emulator.connect()) as writer:
        found = 0
        try:
            writer.cursor().executemany("INSERT INTO L VALUES (?, ?)", [(1, "x" * 300_000), (2, "y" * 400_000)])
            writer.commit()
        except dbapi.Error as error:
            found = error.errorcode
        assert found == code
    assert rows(client, "SELECT K, LENGTH(T) FROM L") == ([] if code else [(1, 300_000), (2, 400_000)])
    assert rows(client, "SELECT MATCHES, HITS FROM SYS.M_EMULATOR_FAULTS") == [(1, 1)]
    run(client, "ALTER SYSTEM CLEAR FAULTS")


HOLDER = """
import json, sys, time
from hdbcli import dbapi
connection = dbapi.connect(**json.loads(sys.argv[1]))
connection.cursor().execute("UPDATE T SET N = 2")
print("locked", flush=True)
time.sleep(60)
"""


def test_a_killed_client_lets_go_whatever_the_line(client: Any, emulator: Emulator) -> None:
    run(client, "CREATE TABLE T (N INTEGER)")
    run(client, "INSERT INTO T VALUES (1)")
    options = {
        "address": emulator.host,
        "port": emulator.port,
        "user": emulator.user,
        "password": emulator.password,
        "autocommit": False,
        **({} if emulator.trust_store is None else emulator.tls),
    }
    command = [sys.executable, "-c", HOLDER, json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        waiting = Background(lambda: run(client, "UPDATE T SET N = 3"))
        waiting.assert_lasts()
        holder.kill()
        assert waiting.result() == 1
    assert rows(client, "SELECT N FROM T") == [(3,)]


def test_stopping_while_a_session_waits_for_a_parked_one_is_quick_and_keeps_nothing_open(tmp_path: Path) -> None:
    with running("--data", str(tmp_path)) as started, closing(started.connect()) as a, closing(started.connect()) as b:
        run(a, "CREATE TABLE T (N INTEGER PRIMARY KEY)")
        run(a, "INSERT INTO T VALUES (1)")
        run(b, "INSERT INTO T VALUES (2)")
        waiting = Background(lambda: run(b, "INSERT INTO T VALUES (1)"))
        waiting.assert_lasts()
        assert started.stop() == 0
        with suppress(dbapi.Error):  # what it waits for may have ended before its own line
            waiting.result()
    with closing(Database(tmp_path, started.user, started.password, started.schema)) as database:
        assert Sql(database.connect(started.user)).rows("SELECT * FROM T") == []
