"""A service over a table in memory, the local store and the test embedder; and clients of its REST application."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from app.src.api.server import bound, configuration, create_app
from app.src.jobs.records import FileRecords, Records
from app.src.jobs.store_records import StoreRecords
from app.src.service.service import Service
from app.src.settings import Settings
from connector.errors import ConnectorError, UnknownTable
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import Column, Key, KeyRange, Query, Row, Table, TableRef
from connector.protocols import Capture
from connector.stores.state import LeaseTimes
from hana_emulator.testing import Emulator

MATERIALS = TableRef("S", "MARA")
Place = Callable[[], Records]
TEXTS = {
    "1": "gearbox bearing steel",
    "2": "garden hose rubber",
    "3": "hydraulic oil pump",
    "4": "office chair with wheels",
}


class TableSource:
    """S.MARA in memory. `failure` is raised by every call; `gate`, when cleared, holds pages back; `asked`: for one."""

    def __init__(self) -> None:
        columns = (Column("MATNR", "NVARCHAR", 18), Column("MAKTX", "NVARCHAR", 40), Column("MTART", "NVARCHAR", 4))
        self.table = Table(MATERIALS, columns, primary_key=("MATNR",))
        self.rows_by_key: dict[str, dict[str, Any]] = {
            key: {"MATNR": key, "MAKTX": text, "MTART": "FERT" if key < "3" else "ROH"} for key, text in TEXTS.items()
        }
        self.failure: ConnectorError | None = None
        self.gate, self.asked = threading.Event(), threading.Event()
        self.gate.set()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def describe(self, ref: TableRef) -> Table:
        self._check()
        if ref != MATERIALS:
            raise UnknownTable(f"there is no table {ref}")
        return self.table

    def now(self) -> datetime:
        return datetime.now(UTC)

    def count(self, query: Query) -> int:
        return len(self.rows_by_key)

    @property
    def capture(self) -> Capture:
        raise NotImplementedError("nothing but full comparisons here")

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        for key in sorted(self.rows_by_key):
            self.asked.set()
            assert self.gate.wait(60)
            self._check()
            yield [Row((key,), self.rows_by_key[key])]

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        return [KeyRange()]

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        return [Row(key, self.rows_by_key[str(key[0])]) for key in keys if str(key[0]) in self.rows_by_key]


@pytest.fixture(params=["file", "hana"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Makes records as one of several processes has them: all in one folder, or in one schema of the emulator."""
    if request.param == "file":
        yield lambda: FileRecords(tmp_path / "state")
        return
    emulator: Emulator = request.getfixturevalue("emulator")
    schema: str = request.getfixturevalue("hana_schema")
    login = ConnectionOptions(
        host=emulator.host, port=emulator.port, user=emulator.user, password=emulator.password, encrypt=False
    )
    with HanaPool(login) as pool:
        yield lambda: StoreRecords(lambda: pool, lambda: schema, LeaseTimes(renew=0.2))


@pytest.fixture
def source() -> TableSource:
    return TableSource()


def settings_in(folder: Path) -> Settings:
    """Small limits, the test embedder, and a local store under `folder`."""
    block = {"name": "materials", "source": "S.MARA", "template": "{MAKTX}", "metadata": ["MTART"]}
    return Settings.model_validate(
        {
            "store": {"kind": "local", "path": folder / "vectors"},
            "embedding": {"model": "hash:64"},
            "api": {"max_body_bytes": 20_000, "max_inputs": 4, "max_text_chars": 9_000, "max_k": 50},
            "collections": [block, block | {"name": "never"}],
        }
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path)


@pytest.fixture
def make_service(settings: Settings, source: TableSource) -> Iterator[Callable[[], Service]]:
    made: list[Service] = []

    def make() -> Service:
        made.append(Service(settings, source=source))
        return made[-1]

    yield make
    source.gate.set()
    for service in made:
        service.close()


@pytest.fixture
def service(make_service: Callable[[], Service]) -> Service:
    return make_service()


class PromptServer(uvicorn.Server):
    """Ends when it is told to: uvicorn's own looks ten times a second, and waits as long again for what is over."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for each in (*self.servers, *(sockets or ())):
            each.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


@contextmanager
def serving(service: Service) -> Iterator[httpx.Client]:
    """The application behind a real HTTP server, in a thread so that tests can reach into the service."""
    with contextlib.closing(bound("127.0.0.1", 0)) as listener:
        server = PromptServer(configuration(create_app(service), service))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as client:
        yield client


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for those of the module's tests that change nothing: `materials` is synced."""
    with contextlib.closing(Service(settings_in(tmp_path_factory.mktemp("shared")), source=TableSource())) as service:
        service.sync.run("materials")
        yield service


@pytest.fixture(scope="module")
def shared(shared_service: Service) -> Iterator[httpx.Client]:
    """A client of that service, for requests that change nothing."""
    with serving(shared_service) as client:
        yield client


@pytest.fixture
def synced(service: Service) -> Service:
    service.sync.run("materials")
    return service


@pytest.fixture(scope="module")
def tables_service(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Over the emulator, with a local store and the hashing model: for what is asked of HANA's tables."""
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")} | {"encrypt": False}
    store = {"kind": "local", "path": tmp_path_factory.mktemp("tables") / "vectors"}
    service = Service(Settings.model_validate({"hana": login, "store": store, "embedding": {"model": "hash:8"}}))
    yield service
    service.close()


@pytest.fixture(scope="module")
def tables_schema(request: pytest.FixtureRequest, administrator: Any, emulator: Emulator) -> Iterator[tuple[str, Any]]:
    """A schema that the module's tests share, and a connection to it."""
    name = f"OF_{request.module.__name__.rpartition('.')[2].upper()}"
    administrator.execute(f'CREATE SCHEMA "{name}"')
    connection = emulator.connect(currentSchema=name)
    yield name, connection
    connection.close()
    administrator.execute(f'DROP SCHEMA "{name}" CASCADE')
