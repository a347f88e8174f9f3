"""What does a sync cost beside embedding alone? Generated rows in the HANA emulator, a child process, come through
the real driver into a local store; against it the engine alone, on the same texts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.src.benchmark.machine import machine
from app.src.benchmark.report import Report
from app.src.benchmark.side_by_side import Target, interleaved, wall
from app.src.benchmark.workloads import material
from app.src.demo import StandIn
from app.src.service.wiring import EngineEmbedder
from app.src.settings import SyncSettings
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.model import CollectionSpec, TableRef
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, sync

_TEMPLATE = "{MAKTX}. {LTEXT}"
_BATCH = 10_000
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SyncBenchmark:
    rounds: int = 3
    rows: int = 2_000
    target: Target | None = None


def measure(embedder: EngineEmbedder, wanted: SyncSettings, options: SyncBenchmark, say: Say) -> Report:
    """Raises Unavailable when the emulator does not start."""
    run = SyncOptions(page_rows=wanted.page_rows, window=wanted.window, readers=wanted.readers, owner="benchmark")
    kept = {"page_rows": run.page_rows, "window": run.window, "readers": run.readers}
    about = {"model": embedder.model, "rows": options.rows, "rounds": options.rounds, "source": "the emulator"}
    report = Report("sync", machine(), about | kept)
    rows = [material(number) for number in range(options.rows)]
    texts = [f"{name}. {more}" for _, _, name, more, _ in rows]
    with tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-") as folder:
        say(f"starting the emulator and loading {options.rows} rows")
        with _stand_in(Path(folder)) as (pool, schema):
            table = _load(pool, schema, rows)
            runs = _Runs(pool, embedder, table, Path(folder), run)
            say(f"{options.rounds} rounds of the engine alone and a whole sync")
            works = {"engine": wall(lambda: embedder.embed_documents(texts)), "sync": wall(lambda: runs(len(rows)))}
            rounds = interleaved(works, options.rounds)
            rate = round(options.rows / rounds.median("sync"))
            more = {"rows_per_second": rate, "stages": runs.stages}
            report.figures.append(rounds.ratio("sync / engine alone", "sync", "engine", options.target, **more))
    return report


@contextmanager
def _stand_in(folder: Path) -> Iterator[tuple[HanaPool, str]]:
    process = StandIn(folder, sample=False)
    try:
        greeting = process.greeting
        login = {name: greeting[name] for name in ("host", "port", "user", "password")}
        with HanaPool(ConnectionOptions(encrypt=False, **login)) as pool:
            yield pool, greeting["schema"]
    finally:
        process.stop()


def _load(pool: HanaPool, schema: str, rows: Sequence[tuple[str, ...]]) -> TableRef:
    table = TableRef(schema, "MATERIALS")
    pool.execute(
        f'CREATE COLUMN TABLE {table} ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MAKTX" NVARCHAR(40), '
        '"LTEXT" NVARCHAR(500), "MTART" NVARCHAR(4), PRIMARY KEY ("MANDT", "MATNR"))'
    )
    for start in range(0, len(rows), _BATCH):
        with pool.transaction() as session:
            session.execute_many(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)", rows[start : start + _BATCH])  # noqa: S608
    return table


class _Runs:
    """First syncs, each into an empty store of its own. `stages`: busy seconds of the last one."""

    def __init__(
        self, pool: HanaPool, embedder: EngineEmbedder, table: TableRef, folder: Path, options: SyncOptions
    ) -> None:
        self._pool = pool
        self._embedder = embedder
        self._spec = CollectionSpec("benchmark", table, _TEMPLATE, metadata=("MTART",))
        self._folder = folder
        self._options = options
        self._count = 0
        self.stages: dict[str, float] = {}

    def __call__(self, rows: int) -> None:
        self._count += 1
        with closing(LocalStore(self._folder / f"store-{self._count}")) as store:
            report = sync(self._spec, Ends(HanaSource(self._pool), store, self._embedder), self._options)
        if report.upserted != rows:
            raise RuntimeError(f"{report.upserted} of {rows} rows were stored")
        self.stages = {name: round(seconds, 3) for name, seconds in report.stages.items()}
