"""Child processes of benchmarks: the emulator with a table of materials, and a service."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from app.src.benchmark.workloads import material
from app.src.demo import emulator
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import TableRef

TEMPLATE = "{MAKTX}. {LTEXT}"  # of materials
_BATCH = 10_000
_MATERIALS = (
    '("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MAKTX" NVARCHAR(40), "LTEXT" NVARCHAR(500), "MTART" NVARCHAR(4), '
    '"MATKL" NVARCHAR(9), "CHANGED_AT" TIMESTAMP, PRIMARY KEY ("MANDT", "MATNR"))'
)


class MaterialsInEmulator:
    """An emulator as a context, connected through the real hdbcli. `login`: host, port, user and password."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = ExitStack()

    def __enter__(self) -> MaterialsInEmulator:
        greeting = self._held.enter_context(emulator(self._folder))
        self.schema: str = greeting["schema"]
        self.login: dict[str, Any] = {name: greeting[name] for name in ("host", "port", "user", "password")}
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def pool(self) -> HanaPool:
        """Return a connection pool that is closed with the emulator."""
        return self._held.enter_context(HanaPool(ConnectionOptions(encrypt=False, **self.login)))

    def table(self, rows: int) -> TableRef:
        """Return a table of `rows` materials, created on first use."""
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


def serve_command(config: Path | None = None) -> list[str]:
    """Return the command of `owl-sap serve` on a free port."""
    chosen = [] if config is None else ["--config", str(config)]
    return [sys.executable, "-m", "app", *chosen, "serve", "--port", "0"]


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process (Linux) in bytes, by default of this one."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
