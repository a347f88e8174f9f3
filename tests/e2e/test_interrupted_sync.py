"""A sync that is killed, cut off, or meets another one: the next run makes the store whole, and nothing is lost or
doubled on the way. Over the emulator, for both stores."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from connector.hana.connection import ConnectionOptions, HanaPool, load_driver
from connector.hana.source import HanaSource
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.store import VectorStore
from connector.sync.run import Ends, sync
from connector.sync.verify import verify
from tests.e2e import sync_child

REPOSITORY = Path(__file__).resolve().parents[2]

ROWS = 600
KILLS = {"hana": (9, 24, 38, 60), "local": (9, 24, 250, 250, 250)}
"""Events after which a run is killed: in the making of the tables and of the word index, then all over a run (SQLite
counts what its word index does, too; 250 are far from enough for the rows that are left). Threads read and write at the
same time, so that the same number does not always mean the same statement."""


@pytest.fixture
def notes(hana_schema, run_sql) -> None:
    run_sql('CREATE COLUMN TABLE "NOTES" ("ID" INTEGER PRIMARY KEY, "TXT" NVARCHAR(200), "N" INTEGER)')
    run_sql('INSERT INTO "NOTES" VALUES (?,?,?)', *[(n, f"note number {n}", n % 7) for n in range(ROWS)])


@pytest.fixture(params=["hana", "local"])
def folder(request, tmp_path: Path) -> str:
    """Of the local store; empty for the store in the emulator."""
    return str(tmp_path / "store") if request.param == "local" else ""


def login(emulator) -> dict[str, Any]:
    return {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}


def start(emulator, schema: str, folder: str, kill_at: int = 0) -> subprocess.Popen[str]:
    wanted = {"login": login(emulator), "schema": schema, "folder": folder, "kill_at": kill_at}
    command = [sys.executable, "-m", "tests.e2e.sync_child", json.dumps(wanted)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def chunks(store: VectorStore) -> Counter[tuple[str, int]]:
    return Counter((chunk.id, chunk.number) for page in store.stored("notes") for chunk in page)


@pytest.mark.slow
@pytest.mark.proves(1)
def test_killed_at_any_event_the_next_run_heals(emulator, hana_schema, notes, folder, open_pool, hashing, run_sql):
    pool = open_pool(emulator)
    store: VectorStore | None = None
    done = []
    for kill_at in KILLS["local" if folder else "hana"]:
        process = start(emulator, hana_schema, folder, kill_at)
        process.communicate(timeout=120)
        assert process.returncode == -9, "it came to its end before"
        time.sleep(sync_child.TIMES.ttl)
        if store is None:
            store = LocalStore(Path(folder)) if folder else HanaStore(pool, hana_schema)
        if store.status("notes") is not None:
            assert set(chunks(store).values()) <= {1}, "a row is doubled"
            assert store.status("notes").last_sync is None, "the checkpoint is ahead"
            done.append(len(chunks(store)))
    assert store is not None
    assert done == sorted(done), "a row was lost"
    assert 0 < done[-1] < ROWS
    report = report_of(start(emulator, hana_schema, folder))
    assert (report["read"], report["quarantined"], report["deleted"]) == (ROWS, 0, 0)
    assert len(chunks(store)) == ROWS
    assert verify(sync_child.spec(hana_schema), Ends(HanaSource(pool), store, hashing)).ok
    again = report_of(start(emulator, hana_schema, folder))
    assert (again["unchanged"], again["upserted"]) == (ROWS, 0)
    store.close()


@pytest.mark.slow
def test_of_two_at_once_one_waits_and_finds_nothing_to_do(emulator, hana_schema, notes, folder):
    both = [start(emulator, hana_schema, folder) for _ in range(2)]
    reports = [report_of(process) for process in both]
    assert sorted(report["upserted"] for report in reports) == [0, ROWS]
    assert sorted(report["unchanged"] for report in reports) == [0, ROWS]


# ------------------------------------------------------------------------------------------- connections, catalogue


class KnownConnections:
    """The real driver, remembering which sessions it opened."""

    def __init__(self) -> None:
        self._driver = load_driver()
        self.Error = self._driver.Error
        self.ids: list[int] = []

    def connect(self, **properties: Any) -> Any:
        connection = self._driver.connect(**properties)
        cursor = connection.cursor()
        cursor.execute("SELECT CURRENT_CONNECTION FROM DUMMY")
        self.ids.append(int(cursor.fetchall()[0][0]))
        return connection


def test_sessions_disconnected_while_writing_cost_nothing(emulator, hana_schema, hashing):
    with closing(emulator.connect(autocommit=True, currentSchema=hana_schema)) as killer:
        cursor = killer.cursor()
        cursor.execute('CREATE COLUMN TABLE "NOTES" ("ID" INTEGER PRIMARY KEY, "TXT" NVARCHAR(200), "N" INTEGER)')
        cursor.executemany('INSERT INTO "NOTES" VALUES (?,?,?)', [(n, f"note {n}", 1) for n in range(ROWS)])
        driver, inserts = KnownConnections(), 0

        def disconnect(sql: str) -> None:
            nonlocal inserts
            if not sql.startswith("INSERT") or "VEC_VECTOR" not in sql:
                return
            inserts += 1
            while inserts in (1, 3) and driver.ids:  # in the middle of a transaction
                cursor.execute(f"ALTER SYSTEM DISCONNECT SESSION '{driver.ids.pop()}'")

        options = ConnectionOptions(**login(emulator), encrypt=False)
        with HanaPool(options, driver=driver, on_statement=disconnect) as pool:
            ends = Ends(HanaSource(pool), HanaStore(pool, hana_schema), hashing)
            report = sync(sync_child.spec(hana_schema), ends, sync_child.OPTIONS)
            assert inserts > 3
            assert (report.upserted, report.quarantined) == (ROWS, 0)
            assert set(chunks(ends.store).values()) == {1}
            assert verify(sync_child.spec(hana_schema), ends).ok


def test_a_table_dropped_while_it_is_read_deletes_nothing(emulator, hana_schema, notes, open_pool, hashing, run_sql):
    pages = 0

    def drop(sql: str) -> None:
        nonlocal pages
        pages += '"NOTES"' in sql and "LIMIT" in sql
        if pages == 4:
            run_sql('DROP TABLE "NOTES"')

    pool = open_pool(emulator)
    ends = Ends(HanaSource(pool), HanaStore(pool, hana_schema), hashing)
    sync(sync_child.spec(hana_schema), ends, sync_child.OPTIONS)
    dropping = Ends(HanaSource(open_pool(emulator, on_statement=drop)), ends.store, hashing)
    report = sync(sync_child.spec(hana_schema), dropping, sync_child.OPTIONS)
    assert (report.paused, report.deleted) == ("schema_changed", 0)
    assert "NOTES" in report.notes[0]
    assert len(chunks(ends.store)) == ROWS
