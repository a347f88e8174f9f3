"""A local Ray cluster with two workers of this machine: vectors, a killed worker, signals, shares of a GPU."""

from __future__ import annotations

import os
import pickle
import platform
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import EngineError
from app.src.core.engine import Engine
from app.src.core.loading import EngineOptions, load_engine
from app.src.scaling.cluster import Cluster, Placement
from app.src.scaling.worker import Worker
from app.src.service.ranges import Order, RangeWorkers
from app.src.service.wiring import EngineEmbedder
from app.src.settings.model import ScaleSettings
from connector.errors import ConfigurationError
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.model import CollectionSpec, Row, TableRef
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.sync.ranges import RangeReport, RangeTask
from connector.sync.run import Ends, SyncOptions, SyncReport, sync
from connector.sync.verify import verify
from hana_emulator.testing import Emulator
from tests.connector.conftest import MATERIALS, MemorySource

pytestmark = pytest.mark.not_fast

OPTIONS = EngineOptions(model="hash:384")
SPEC = CollectionSpec("materials", MATERIALS, "{MAKTX}", metadata=("MTART",))
ROWS = 3000


@pytest.fixture(scope="module")
def cluster(emulator: Emulator) -> Iterator[Cluster]:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HANA_PASSWORD", emulator.password)
        cluster = Cluster(ScaleSettings(actors=2, threads=1), gpus=1)
        assert signal.getsignal(signal.SIGTERM) is handler
        yield cluster
    import ray

    running = [each.process for kind in ray._private.worker._global_node.all_processes.values() for each in kind]
    cluster.close()
    assert running
    assert None not in [process.returncode for process in running]


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> Engine:
    return cluster.engine(OPTIONS)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_engine(OPTIONS) as engine:
        yield engine


def synced(engine: Engine, folder: Path, *, rows: int = ROWS, kill: int = 0) -> tuple[SyncReport, dict[str, bytes]]:
    """Sync rows; kill the process `kill` at the first page. Return the report, and the stored vectors by id."""
    source = MemorySource()
    for number in range(rows):
        source.put("100", f"{number:06}", MAKTX=f"pump number {number} with a seal of steel", MTART=f"T{number % 7}")
    if kill:
        pages, alive = source.pages, [kill]

        def killing(*arguments: Any, **more: Any) -> Iterator[list[Row]]:
            for number, page in enumerate(pages(*arguments, **more)):
                if number == 1 and alive:
                    os.kill(alive.pop(), signal.SIGKILL)
                yield page

        source.pages = killing  # type: ignore[method-assign]
    store = LocalStore(folder)
    try:
        ends = Ends(source, store, EngineEmbedder(engine))  # type: ignore[arg-type]
        report = sync(SPEC, ends, SyncOptions(page_rows=500, window=500, windows=3))
        assert verify(SPEC, ends).ok
        records = [record for page in store.records("materials") for record in page]
        found = {str(record.id): np.asarray(record.vector, np.float32).tobytes() for record in records}
    finally:
        store.close()
    return report, found


def test_a_sync_stores_what_it_stores_in_process(pool: Engine, engine: Engine, tmp_path: Path) -> None:
    report, rows = synced(pool, tmp_path / "ray")
    expected_report, expected = synced(engine, tmp_path / "here")
    assert pool.fingerprint == engine.fingerprint
    assert rows == expected
    assert len(rows) == report.upserted == expected_report.upserted == ROWS


@pytest.mark.proves(32)
def test_a_killed_worker_is_replaced_and_costs_no_row(
    cluster: Cluster, pool: Engine, engine: Engine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed, before = cluster.reports()[0]["pid"], pool.stats().repeated_blocks
    report, rows = synced(pool, tmp_path / "ray", kill=killed)
    _, expected = synced(engine, tmp_path / "here")
    assert rows == expected
    assert (report.upserted, report.quarantined) == (ROWS, 0)
    assert pool.stats().repeated_blocks > before
    pids = {each["pid"] for each in cluster.reports()}  # waits for the new worker
    assert len(pids) == 2
    assert killed not in pids
    assert not pool.failed
    assert capfd.readouterr().out == ""


class Unreadable(Exception):
    """Python calls a pickled error's class with `args`."""

    def __init__(self, *, needed: int) -> None:
        super().__init__("text")


def unreadable(_worker: Worker) -> Exception:
    return Unreadable(needed=1)


def test_an_answer_that_cannot_be_read_costs_no_worker(cluster: Cluster, pool: Engine) -> None:
    pids = {each["pid"] for each in cluster.reports()}
    with pytest.raises(EngineError, match=r"Unreadable.__init__.*takes 1 positional argument"):
        cluster._workers[0].call("run", unreadable).result(60)
    assert {each["pid"] for each in cluster.reports()} == pids


@pytest.mark.proves(32)
def test_all_workers_killed_at_once_are_waited_for(cluster: Cluster, pool: Engine, engine: Engine) -> None:
    texts = [f"valve {number} of line {number % 31}" for number in range(4000)]
    expected = engine.embed(texts, "bulk")
    pids = [report["pid"] for report in cluster.reports()]
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(pool.embed, texts, "bulk")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert np.array_equal(found.result(120), expected)


@pytest.fixture
def hana_ends(
    pool: Engine, emulator: Emulator, hana_schema: str, hana: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ends]:
    """A table of `ROWS` rows and a store in the emulator, with settings for workers in this folder."""
    hana.cursor().execute('CREATE COLUMN TABLE "MARA" ("MATNR" INTEGER PRIMARY KEY, "MAKTX" NVARCHAR(60))')
    rows = [(number, f"pump number {number} with a seal of steel") for number in range(ROWS)]
    hana.cursor().executemany('INSERT INTO "MARA" VALUES (?, ?)', rows)
    hana.commit()
    settings = f"""
        hana = {{ host = "{emulator.host}", port = {emulator.port}, user = "{emulator.user}", encrypt = false }}
        store = {{ kind = "hana", schema = "{hana_schema}" }}
    """
    (tmp_path / "owl-sap.toml").write_text(settings)
    (tmp_path / ".env").write_text(f"HANA_PASSWORD={emulator.password}")
    monkeypatch.chdir(tmp_path)
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, encrypt=False)) as connections:
        yield Ends(HanaSource(connections), HanaStore(connections, hana_schema), EngineEmbedder(pool))


class Killing:
    """Kills a process as soon as rows are stored."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def event(self, name: str) -> None: ...

    def progress(self, done: int, total: int) -> None:
        if done and self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._pid = 0


@pytest.mark.proves(32)
def test_workers_share_the_key_ranges_of_a_sync_and_one_is_killed(
    cluster: Cluster, pool: Engine, engine: Engine, hana_ends: Ends, hana_schema: str
) -> None:
    spec = CollectionSpec("materials", TableRef(hana_schema, "MARA"), "{MAKTX}")
    options = SyncOptions(page_rows=250, window=250)
    workers, killed = RangeWorkers(pool.members, None), cluster.reports()[0]["pid"]
    report = sync(spec, hana_ends, options, Killing(killed), workers=workers)
    assert (report.read, report.quarantined, report.notes) == (ROWS, 0, [])
    assert report.upserted + report.unchanged == ROWS  # rows of the killed worker are unchanged for the next one
    assert killed not in {each["pid"] for each in cluster.reports()}
    stored = {record.id: record.text for page in hana_ends.store.records(spec.name) for record in page}
    assert len(stored) == ROWS
    here = replace(hana_ends, embedder=EngineEmbedder(engine))
    assert verify(spec, here).ok
    assert sync(spec, here, options).unchanged == ROWS


def test_an_order_for_a_worker_holds_no_login(pool: Engine, hana_ends: Ends, emulator: Emulator) -> None:
    sent: list[bytes] = []

    class Listening(RangeWorkers):
        def submit(self, task: RangeTask) -> Future[RangeReport]:
            sent.append(pickle.dumps(Order(*self._order, self._members[0].options, task)))
            return super().submit(task)

    spec = CollectionSpec("materials", TableRef(hana_ends.store._schema, "MARA"), "{MAKTX}")
    sync(spec, hana_ends, SyncOptions(page_rows=1000), workers=Listening(pool.members, None))
    assert sent
    assert not [order for order in sent if emulator.password.encode() in order]


def test_workers_whose_settings_name_a_local_store_are_refused(
    pool: Engine, hana_ends: Ends, hana_schema: str, tmp_path: Path
) -> None:
    settings = tmp_path / "local.toml"
    settings.write_text('store = { kind = "local", path = "vectors" }')
    spec = CollectionSpec("materials", TableRef(hana_schema, "MARA"), "{MAKTX}")
    with pytest.raises(ConfigurationError, match=rf"^{platform.node()}: .* name a local store"):
        sync(spec, hana_ends, SyncOptions(page_rows=250), workers=RangeWorkers(pool.members, settings))


def test_two_halves_of_a_gpu_are_the_same_gpu(cluster: Cluster) -> None:
    workers = cluster.start(Placement(2, 2, 0, 0.5))
    assert [worker.call("report").result()["gpus"] for worker in workers] == ["0", "0"]
    third = cluster.start(Placement(1, 1, 0, 0.5))[0]
    report = third.call("report")
    assert [worker.call("report").result()["gpus"] for worker in workers] == ["0", "0"]
    assert not report.done()
    workers[0].close()  # makes room
    assert report.result(120)["gpus"] == "0"
    for worker in (*workers, third):
        worker.close()


def test_the_session_folder_is_not_open_to_other_users(cluster: Cluster) -> None:
    import ray

    folder = Path(ray._private.worker._global_node.get_session_dir_path())
    assert folder.parent.parent.stat().st_mode & 0o777 == 0o700


def test_secrets_of_the_environment_are_in_no_file(cluster: Cluster, pool: Engine, emulator: Emulator) -> None:
    import ray

    hidden = os.environ["RAY_AUTH_TOKEN"].encode(), emulator.password.encode()
    folder = Path(ray._private.worker._global_node.get_session_dir_path())
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if any(secret in file.read_bytes() for secret in hidden)]
