"""Child processes of benchmarks: the emulator with a table of materials, and a service."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from app.src.benchmark.workloads import material
from app.src.demo import EmulatorProcess
from connector.errors import Unavailable
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import TableRef

TEMPLATE = "{MAKTX}. {LTEXT}"  # of materials
_BATCH = 10_000
_START_SECONDS = 120.0
_MATERIALS = (
    '("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MAKTX" NVARCHAR(40), "LTEXT" NVARCHAR(500), "MTART" NVARCHAR(4), '
    '"MATKL" NVARCHAR(9), "CHANGED_AT" TIMESTAMP, PRIMARY KEY ("MANDT", "MATNR"))'
)


class MaterialsInEmulator:
    """An emulator as a context, reached through the real hdbcli. `login`: host, port, user and password."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = ExitStack()

    def __enter__(self) -> MaterialsInEmulator:
        process = EmulatorProcess(self._folder, sample=False)
        self._held.callback(process.stop)
        self.schema: str = process.greeting["schema"]
        self.login: dict[str, Any] = {name: process.greeting[name] for name in ("host", "port", "user", "password")}
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def pool(self) -> HanaPool:
        """Return a connection pool that is closed with the emulator."""
        return self._held.enter_context(HanaPool(ConnectionOptions(encrypt=False, **self.login)))

    def table(self, rows: int) -> TableRef:
        """Return a table of so many materials, created when first asked for."""
        table, pool = TableRef(self.schema, f"MATERIALS_{rows}"), self.pool()
        asked = (table.schema, table.name)
        if pool.read("SELECT 1 FROM SYS.TABLES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?", asked):
            return table
        pool.execute(f"CREATE COLUMN TABLE {table} {_MATERIALS}")
        for start in range(0, rows, _BATCH):
            some = [material(number) for number in range(start, min(start + _BATCH, rows))]
            with pool.transaction() as session:
                session.execute_many(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?)", some)  # noqa: S608
        return table


@contextmanager
def announced(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, log: IO[Any] | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a child and yield it with the JSON of its first line; it is ended afterwards. `environment` None: as here.
    Raises Unavailable with its last words when it does not announce itself."""
    with ExitStack() as held:
        log = log or held.enter_context(tempfile.TemporaryFile())
        process = held.enter_context(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        )
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
            line = process.stdout.readline() if readable else ""
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                raise Unavailable(f"the child process did not start: {_last_words(log)}") from None
            yield process, found
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _last_words(log: IO[Any]) -> str:
    if not log.readable():
        return "see its log"
    log.seek(0)
    words = log.read()
    lines = (words if isinstance(words, str) else words.decode(errors="replace")).strip().splitlines()
    return lines[-1] if lines else f"no answer within {_START_SECONDS:.0f} s"


def serve_command(config: Path | None = None) -> list[str]:
    """Return the command of `owl-sap serve` on a free port."""
    chosen = [] if config is None else ["--config", str(config)]
    return [sys.executable, "-m", "app", *chosen, "serve", "--port", "0"]


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process (Linux), by default of this one."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
