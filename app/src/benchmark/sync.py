"""Compare a first sync, from materials in the emulator to a local store, with only embedding the same texts."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from app.src.benchmark.harness import Report, Say, interleaved, machine, wall
from app.src.benchmark.workloads import material, material_text
from app.src.demo import emulator
from app.src.service.wiring import EngineEmbedder
from app.src.settings.model import SyncSettings
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.model import CollectionSpec, TableRef
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, SyncReport, sync

TEMPLATE = "{MAKTX}. {LTEXT}"  # of materials
_BATCH = 10_000
_MATERIALS = (
    '("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MAKTX" NVARCHAR(40), "LTEXT" NVARCHAR(500), "MTART" NVARCHAR(4), '
    '"MATKL" NVARCHAR(9), "CHANGED_AT" TIMESTAMP, PRIMARY KEY ("MANDT", "MATNR"))'
)


class MaterialsInEmulator:
    """A context that runs an emulator, connected through the real hdbcli. `login`: host, port, user and password."""

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
        """Return a connection pool that closes with the emulator."""
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


def measure(embedder: EngineEmbedder, settings: SyncSettings, count: int, rows: int, say: Say) -> Report:
    """Sync `rows` rows into an empty store each round. Raises Unavailable if the emulator does not start."""
    run = SyncOptions(page_rows=settings.page_rows, window=settings.window, readers=settings.readers, owner="benchmark")
    kept = {"page_rows": run.page_rows, "window": run.window, "readers": run.readers}
    about = {"model": embedder.model, "rows": rows, "rounds": count, "source": "the emulator"}
    report = Report("sync", machine(), about | kept)
    texts = [material_text(number) for number in range(rows)]
    last: list[SyncReport] = []
    with tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-") as folder:
        say(f"starting the emulator and loading {rows} rows")
        with MaterialsInEmulator(Path(folder)) as hana:
            spec = CollectionSpec("benchmark", hana.table(rows), TEMPLATE, metadata=("MTART",))
            source = HanaSource(hana.pool())

            def whole() -> None:
                with tempfile.TemporaryDirectory(dir=folder) as place, closing(LocalStore(Path(place))) as store:
                    done = sync(spec, Ends(source, store, embedder), run)
                if done.upserted != rows:
                    raise RuntimeError(f"{done.upserted} of {rows} rows were stored")
                last[:] = [done]

            say(f"{count} rounds of the engine alone and a whole sync")
            works = {"engine": wall(lambda: embedder.embed_documents(texts)), "sync": wall(whole)}
            rounds = interleaved(works, count)
    stages = {name: round(seconds, 3) for name, seconds in last[0].stages.items()}
    rate = round(rows / rounds.median("sync"))
    report.figures.append(rounds.ratio("sync / engine alone", "sync", "engine", rows_per_second=rate, stages=stages))
    return report
