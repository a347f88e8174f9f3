"""One collection to be maltreated: a table in the emulator, a store of either kind, the command line beside it.

Says what must hold after any interruption: `sound` at once, `converges` after one more run.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from app.src.cli import app as owl_sap
from app.src.service.wiring import EngineEmbedder
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.model import ChunkSpec, CollectionSpec, KeyRange, Row, TableRef
from connector.model import Query as SourceQuery
from connector.retry import RetryPolicy
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.state import LeaseTimes
from connector.stores.store import VectorStore
from connector.sync.run import Ends, SyncOptions, SyncReport, sync
from connector.sync.verify import verify
from hana_emulator.testing import Emulator
from tests.forked import owl_sap as start_owl_sap

REPOSITORY = Path(__file__).resolve().parents[2]

NAME = "rows"
PAGE = 20
ROWS = 120
"""Six pages; every tenth row is long and becomes several chunks, every 30th is empty."""
EMPTY = ROWS // 30
PATIENT = LeaseTimes(ttl=60, renew=5, poll=0.02)
"""Nobody loses a lease because the machine did something else for a while; `expire_lease` is for who must."""
HASTY = RetryPolicy(attempts=4, first_wait=0.01, longest_wait=0.05)
PERSISTENT = RetryPolicy(attempts=50, first_wait=0.01, longest_wait=0.05)
"""For timeouts so short that a busy machine meets them now and then."""
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OWL_SAP_", "HANA_", "T4_GPU_", "USE_GPU"))
}
TOML = """
[[collections]]
name = "rows"
source = "{schema}.ROWS"
template = "{{TXT}}"
metadata = ["GRP"]
chunk = {{ max_tokens = 12, overlap = 2 }}
"""
Content = dict[str, tuple[tuple[int, str, bytes], ...]]
"""By document id: (chunk number, text, hash) of its chunks."""


def text_of(number: int) -> str | None:
    if number % 30 == 7:
        return None
    words = f"pump {number} of plant {number % 7}"
    return f"{words}, " + " ".join(f"part{part}" for part in range(30)) if number % 10 == 3 else words


@dataclass
class Scene:
    """`kind` is the store's: hana or local. `folder` holds the configuration and the local store."""

    emulator: Emulator
    schema: str
    kind: str
    folder: Path
    embedder: EngineEmbedder
    rows: int = ROWS
    first_session: int = 0
    """Sessions with lower numbers belong to others."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _connection: Any = None

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.first_session = self.run("SELECT CURRENT_CONNECTION FROM DUMMY")[0][0] + 1
        (self.folder / "owl-sap.toml").write_text(TOML.format(schema=self.schema), encoding="utf-8")
        self.run(
            f'CREATE COLUMN TABLE "{self.schema}"."ROWS" ("K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(2000), '
            '"GRP" NVARCHAR(3))'
        )
        rows = [(number, text_of(number), f"G{number % 3}") for number in range(self.rows)]
        self.run(f'INSERT INTO "{self.schema}"."ROWS" VALUES (?, ?, ?)', *rows)

    def close(self) -> None:
        self._stack.close()

    @property
    def spec(self) -> CollectionSpec:
        table = TableRef(self.schema, "ROWS")
        return CollectionSpec(NAME, table, "{TXT}", metadata=("GRP",), chunk=ChunkSpec(max_tokens=12, overlap=2))

    # ------------------------------------------------------------------------------------------- the ends, in here

    def pool(self, port: int | None = None, **more: Any) -> HanaPool:
        """A pool of its own; `port` leads through a proxy."""
        login = ConnectionOptions(
            host=self.emulator.host,
            port=port or self.emulator.port,
            user=self.emulator.user,
            password=self.emulator.password,
            encrypt=False,
            communication_timeout=more.pop("communication_timeout", 30.0),
        )
        return self._stack.enter_context(HanaPool(login, retry=more.pop("retry", HASTY), **more))

    def store(self, port: int | None = None, times: LeaseTimes = PATIENT, **more: Any) -> VectorStore:
        if self.kind == "hana":
            return HanaStore(self.pool(port, **more), self.schema, lease_times=times)
        store = LocalStore(self.folder / "vectors", lease_times=times)
        self._stack.callback(store.close)
        return store

    def ends(self, port: int | None = None, **more: Any) -> Ends:
        return Ends(HanaSource(self.pool(port, **more)), self.store(port, **more), self.embedder)

    def sync(self, ends: Ends | None = None, **options: Any) -> SyncReport:
        chosen = {"page_rows": PAGE, "window": PAGE, "lease_wait": 10.0, "max_deletes": 0.2} | options
        return sync(self.spec, ends or self.ends(), SyncOptions(**chosen))

    # --------------------------------------------------------------------------------------------- the command line

    def variables(self, port: int | None = None) -> dict[str, str]:
        login = {"HANA_HOST": self.emulator.host, "HANA_USER": self.emulator.user, "HANA_ENCRYPT": "false"}
        store = {"OWL_SAP_STORE__KIND": self.kind, "OWL_SAP_EMBEDDING__MODEL": "hash:64", "PYTHONPATH": str(REPOSITORY)}
        place = {"PATH": "vectors"} if self.kind == "local" else {"SCHEMA": self.schema}
        pages = {"OWL_SAP_SYNC__PAGE_ROWS": str(PAGE), "OWL_SAP_SYNC__WINDOW": str(PAGE)}
        port_and_password = {"HANA_PORT": str(port or self.emulator.port), "HANA_PASSWORD": self.emulator.password}
        named = {f"OWL_SAP_STORE__{name}": value for name, value in place.items()}
        return ENVIRONMENT | login | store | pages | port_and_password | named

    def spawn(self, *arguments: str, port: int | None = None, **more: Any) -> subprocess.Popen[str]:
        """`owl-sap ARGUMENTS` as a child process."""
        return start_owl_sap(
            *arguments,
            cwd=self.folder,
            env=self.variables(port) | more.pop("env", {}),
            stdout=subprocess.PIPE,
            stderr=more.pop("stderr", subprocess.PIPE),
            text=True,
            **more,
        )

    def cli(self, *arguments: str, **more: Any) -> tuple[int, str, str]:
        """Exit code, output, errors of `owl-sap ARGUMENTS` as a child process."""
        with self.spawn(*arguments, **more) as process:
            out, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors, errors
        return process.returncode, out, errors

    def verb(self, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """The same in this process, which saves the second that a start takes. In the main thread only."""
        with chdir(self.folder), patch.dict(os.environ, self.variables() | dict(env or {}), clear=True):
            result = CliRunner().invoke(owl_sap, arguments, prog_name="owl-sap")
        assert isinstance(result.exception, SystemExit | None), result.exception
        return result.exit_code, result.stdout, result.stderr

    # ---------------------------------------------------------------------------------------------- what is there

    def run(self, sql: str, *rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        """One statement in the emulator, autocommitted; `rows` are its parameters, one execution each."""
        with self._connected() as connection, closing(connection.cursor()) as cursor:
            if rows:
                cursor.executemany(sql, [tuple(row) for row in rows])
            else:
                cursor.execute(sql)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """The scene's own connection, or a new one while another thread uses that: a login takes 15 ms."""
        if not self._busy.acquire(blocking=False):
            with closing(self.emulator.connect(autocommit=True, currentSchema=self.schema)) as connection:
                yield connection
            return
        try:
            if self._connection is None or not self._connection.isconnected():
                self._connection = self.emulator.connect(autocommit=True, currentSchema=self.schema)
                self._stack.callback(self._connection.close)
            yield self._connection
        finally:
            self._busy.release()

    def disconnect(self) -> None:
        """Forget the scene's own connection, whose emulator has gone."""
        self._connection = None

    def expire_lease(self) -> None:
        """As if the 30 seconds had passed for which a dead worker keeps its lease."""
        if self.kind == "hana":
            if self.run(f"SELECT 1 FROM SYS.TABLES WHERE SCHEMA_NAME = '{self.schema}' AND TABLE_NAME = 'OWL_STATE'"):
                self.run(f'UPDATE "{self.schema}"."OWL_STATE" SET "LEASE_UNTIL" = NULL')
        elif (path := self.folder / "vectors" / "vectors.sqlite").exists():
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("UPDATE collections SET lease_until = NULL")

    def content(self, store: VectorStore | None = None) -> Content:
        store = store or self.store()
        if store.status(NAME) is None:
            return {}
        found: dict[str, list[tuple[int, str, bytes]]] = {}
        for page in store.records(NAME):
            for record in page:
                assert record.id is not None
                found.setdefault(record.id, []).append(
                    (record.number or 0, record.text or "", record.content_hash or b"")
                )
        return {id_: tuple(sorted(chunks)) for id_, chunks in found.items()}

    def truth(self) -> set[str]:
        """Ids of the rows that should be stored, from the table itself."""
        return {json.dumps([key]) for (key,) in self.run('SELECT "K" FROM "ROWS" WHERE "TXT" IS NOT NULL')}

    def sound(self) -> Content:
        """What must hold right after an interruption: documents whole or absent, none twice, and a checkpoint only
        where a run has come to its end."""
        store = self.store()
        content = self.content(store)
        for id_, chunks in content.items():
            assert [number for number, _, _ in chunks] == list(range(len(chunks))), f"{id_} is torn or doubled"
        status = store.status(NAME)
        if status is not None and status.last_sync is not None:
            set_aside = {row.id for row in store.quarantine(NAME)}
            assert set(content) == self.truth() - set_aside, "the checkpoint is ahead of the data"
        return content

    def converges(self) -> SyncReport:
        """One more run makes the store equal to the source, keeps what was right, and leaves nothing to do."""
        before = self.sound()
        self.expire_lease()
        ends = self.ends()
        report = self.sync(ends)
        assert report.read == report.upserted + report.unchanged + report.empty + report.quarantined + report.superseded
        after = self.content(ends.store)
        assert set(after) == self.truth()
        assert report.unchanged == sum(after.get(id_) == chunks for id_, chunks in before.items())
        checked = verify(self.spec, ends)
        assert (checked.ok, checked.drift) == (True, 0)
        again = self.sync(ends)
        assert (again.unchanged, again.embedded_texts, again.deleted) == (len(after), 0, 0)
        return report


class WatchedSource(HanaSource):
    """Calls `before_page(n)` (from 1) before each page is read."""

    def __init__(self, pool: HanaPool, before_page: Callable[[int], object]) -> None:
        super().__init__(pool)
        self._before_page = before_page

    def pages(self, query: SourceQuery, size: int, within: KeyRange | None = None) -> Iterator[Sequence[Row]]:
        self._before_page(1)
        for number, page in enumerate(super().pages(query, size, within), start=2):
            yield page
            self._before_page(number)
