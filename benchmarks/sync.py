"""How fast is a sync, and what does it cost when nothing or one row has changed?

    python benchmarks/sync.py [PART ...] [--rounds 5] [--rows 200000] [--out benchmarks/results/sync.json]

The source is the emulator, not HANA: a child process on the same cores, reached through the real hdbcli. Where possible
a figure is the ratio of two measurements taken in turns, the median of the rounds; its `cpu_ratio` divides the CPU
seconds of this process, without the emulator's. A figure whose rounds scatter is marked `disturbed`: other work was
running. Even an idle machine varies by 10 % from second to second, so short rounds (fewer --rows) judge nothing.

    overlap    time of a first sync of 20,000 rows with the real model, divided by that of embedding the same texts
               <= 1.05 into the local store, <= 1.08 into the emulator, whose own work shares the cores
    rate       rows a second of a first sync with hash:384                      >= 20,000 local, >= 12,000 in HANA
    unchanged  time of a sync of unchanged rows, divided by a bare scan      <= 1.15 local, <= 1.6 in HANA
    memory     memory of a sync of all rows minus that of a sync of a tenth of them            < 100 MB
    one        seconds of a sync by watermark after one row has changed                            < 1
    delta      seconds of a sync by a delta table with a record for each row, after one row has changed and one was
               deleted                                                <= 1; of these in the source <= 0.05
    inside     CPU seconds of this process for a first sync whose rows stay in the emulator, which computes the vectors,
               divided by those with the real model in this process; 3,000 rows, of which none is fetched   <= 0.05
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from app.src.benchmark.harness import Figure, Report, Work, interleaved, significant
from app.src.benchmark.sync import TEMPLATE, MaterialsInEmulator
from app.src.benchmark.workloads import material_text
from app.src.core.engine import Engine
from app.src.core.loading import EngineOptions, load_engine
from app.src.service.hana_engine import HanaEngine
from app.src.service.wiring import EngineEmbedder
from benchmarks.program import at_least, at_most, main
from connector.hana.embedding import HanaModel
from connector.hana.source import HanaSource
from connector.model import ChangeSpec, CollectionSpec, DatabaseModel
from connector.protocols import Embedder, Source
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.store import VectorStore
from connector.sync.run import Ends, SyncOptions, SyncReport, sync

# Names in statements are constants of this file.
# ruff: noqa: S608
HASHING, MODEL, HANA_MODEL = "hash:384", "all-MiniLM-L6-v2", "SAP_NEB.20240715"
STORES = ("local", "hana")
OVERLAP_ROWS = 20_000
INSIDE_ROWS = 3_000
PAUSE = 0.5  # seconds before each part of an overlap: idle threads of the engine's pool first stop spinning
COLUMNS = ("MANDT", "MATNR", "MAKTX", "LTEXT", "MTART", "MATKL")
OPTIONS, FULL = SyncOptions(), ChangeSpec()
T = TypeVar("T")
Cost = tuple[float, float]  # seconds, and CPU seconds of this process
TARGETS = {  # by part, or by part and store
    "overlap, local": at_most(1.05),
    "overlap, hana": at_most(1.08),
    "rate, local": at_least(20_000),
    "rate, hana": at_least(12_000),
    "unchanged, local": at_most(1.15),
    "unchanged, hana": at_most(1.6),
    "memory": at_most(100),
    "one": at_most(1),
    "source": at_most(0.05),  # before "delta", which is part of the same names
    "delta": at_most(1),
    "inside": at_most(0.05),
}


def timed(work: Callable[[], T]) -> tuple[T, Cost]:
    """Return the result of `work` and its cost."""
    start, busy = time.perf_counter(), time.process_time()
    result = work()
    return result, (time.perf_counter() - start, time.process_time() - busy)


@dataclass
class Scene:
    """An emulator with tables of materials, an engine, and stores to sync to."""

    emulator: MaterialsInEmulator
    folder: Path
    engine: Engine
    held: ExitStack
    _count: int = 0

    def spec(self, rows: int, changes: ChangeSpec = FULL) -> CollectionSpec:
        self._count += 1
        table = self.emulator.table(rows)
        return CollectionSpec(f"bench-{self._count}", table, TEMPLATE, metadata=("MTART", "MATKL"), changes=changes)

    def ends(self, kind: str) -> Ends:
        """Return source, store and embedder: a new local store, or one in the source's schema."""
        self._count += 1
        store: VectorStore = (
            HanaStore(self.emulator.pool(), self.emulator.schema)
            if kind == "hana"
            else self.held.enter_context(closing(LocalStore(self.folder / f"store-{self._count}")))
        )
        return Ends(HanaSource(self.emulator.pool()), store, EngineEmbedder(self.engine))

    def drop(self, spec: CollectionSpec) -> None:
        """Drop the collection's table and state in HANA, so that earlier rounds do not slow down later ones."""
        schema, name = self.emulator.schema, spec.name.upper().replace("-", "_")
        pool = self.emulator.pool()
        pool.execute(f'DROP TABLE "{schema}"."OWL_{name}_G1"')
        pool.execute(f'DELETE FROM "{schema}"."OWL_STATE" WHERE "COLLECTION" = ?', (spec.name,))

    def scan(self, rows: int) -> None:
        """Read every row without the connector: the same pages of the same columns."""
        head = f"SELECT {', '.join(COLUMNS)} FROM {self.emulator.table(rows)}"
        tail, page = "ORDER BY MANDT, MATNR LIMIT ?", OPTIONS.page_rows
        pool, seen = self.emulator.pool(), 0
        found = pool.read(f"{head} {tail}", (page,))
        while found:
            seen += len(found)
            client, number = found[-1][0], found[-1][1]
            after = (client, client, number, page)
            found = pool.read(f"{head} WHERE (MANDT > ? OR (MANDT = ? AND MATNR > ?)) {tail}", after)
        assert seen == rows, f"{seen} of {rows} rows"

    def first_sync(self, kind: str, rows: int, embedder: Embedder | None = None) -> tuple[SyncReport, Cost]:
        spec, ends = self.spec(rows), self.ends(kind)
        if embedder is not None:
            ends = replace(ends, embedder=embedder)
        report, cost = timed(lambda: sync(spec, ends, OPTIONS))
        assert report.upserted == rows, report
        if kind == "hana":
            self.drop(spec)
        return report, cost

    def synced(self, kind: str, rows: int, changes: ChangeSpec = FULL) -> Callable[[], SyncReport]:
        """Sync a collection once, and return a function that syncs it again."""
        spec, ends = self.spec(rows, changes), self.ends(kind)
        sync(spec, ends, OPTIONS)
        return lambda: sync(spec, ends, OPTIONS)


@contextmanager
def scene(model: str) -> Iterator[Scene]:
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        engine = held.enter_context(load_engine(EngineOptions(model, device="cpu")))
        emulator = held.enter_context(MaterialsInEmulator(folder))
        yield Scene(emulator, folder, engine, held)


def overlap(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Divide the time of a whole sync by that of embedding all its texts at once."""
    rows = min(given.rows, OVERLAP_ROWS)
    texts = [material_text(number) for number in range(rows)]
    with scene(MODEL) as stage:
        stage.emulator.table(rows)
        works: dict[str, Work] = {"engine": lambda: timed(lambda: stage.engine.embed(texts))[1]}
        works |= {kind: lambda kind=kind: stage.first_sync(kind, rows)[1] for kind in STORES}  # type: ignore[misc]
        rounds = interleaved(works, given.rounds, pause=PAUSE)
        about = {"rows": rows, "model": MODEL, "precision": stage.engine.precision}
    for kind in STORES:
        label = f"overlap, {kind}"
        yield rounds.ratio(label, kind, "engine", TARGETS[label], **about)


def rate(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Measure rows per second of a first sync, and the busy seconds of each stage of the last one."""
    rows = max(given.rows // 4, 1)
    done: dict[str, list[SyncReport]] = {kind: [] for kind in STORES}

    def work(kind: str) -> float:
        done[kind].append(stage.first_sync(kind, rows)[0])
        return done[kind][-1].seconds

    with scene(HASHING) as stage:
        stage.emulator.table(rows)
        interleaved({kind: lambda kind=kind: work(kind) for kind in STORES}, given.rounds)  # type: ignore[misc]
    for kind, reports in done.items():
        rates = [one.rows_per_second for one in reports[-given.rounds :]]
        yield figure("rate", kind, rates, "rows/s", rows=rows, stages=reports[-1].stages)


def unchanged(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Divide the time of a sync without changes by that of a bare scan."""
    rows = given.rows
    with scene(HASHING) as stage:
        again = {kind: stage.synced(kind, rows) for kind in STORES}

        def work(kind: str) -> Cost:
            done, cost = timed(again[kind])
            assert (done.unchanged, done.embedded_texts) == (rows, 0)
            return cost

        works: dict[str, Work] = {"scan": lambda: timed(lambda: stage.scan(rows))[1]}
        works |= {kind: lambda kind=kind: work(kind) for kind in STORES}  # type: ignore[misc]
        rounds = interleaved(works, given.rounds)
    for kind in STORES:
        label = f"unchanged, {kind}"
        yield rounds.ratio(label, kind, "scan", TARGETS[label], rows=rows)


def memory(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Measure the peak memory, in MB, of a child that syncs all rows twice, minus that for a tenth of them."""
    with scene(HASHING) as stage:
        for kind in STORES:
            peaks: dict[int, list[float]] = {}
            for rows in (given.rows // 10, given.rows):
                stage.emulator.table(rows)
                for _ in range(max(1, given.rounds // 2)):
                    with tempfile.TemporaryDirectory() as folder:
                        reached = [stage.emulator.login, stage.emulator.schema, folder, kind, rows]
                        command = [sys.executable, __file__, "--child", json.dumps(reached)]
                        done = subprocess.run(command, capture_output=True, text=True, check=True)
                    peaks.setdefault(rows, []).append(float(done.stdout))
            few, many = peaks.values()
            growth = [larger - smaller for smaller, larger in zip(few, many, strict=True)]
            yield figure("memory", kind, growth, "MB", rows=given.rows, few=few, many=many)


def child(login: dict[str, Any], schema: str, folder: str, kind: str, rows: int) -> None:
    with ExitStack() as held, load_engine(EngineOptions(HASHING)) as engine:
        emulator = MaterialsInEmulator(Path(folder))
        emulator.login, emulator.schema = login, schema
        held.callback(emulator.__exit__)
        unique = time.time_ns()
        again = Scene(emulator, Path(folder), engine, held, unique).synced(kind, rows)
        assert again().unchanged == rows
    # ru_maxrss also counts the memory that the parent process had before exec.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    print(round(int(re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024, 1))


def one(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Measure the seconds until one changed row is stored."""
    changes, rows = ChangeSpec(method="watermark", column="CHANGED_AT", delay=0.0), given.rows
    with scene(HASHING) as stage:
        table, pool = stage.emulator.table(rows), stage.emulator.pool()
        sql = f'UPDATE {table} SET "MAKTX" = ?, "CHANGED_AT" = CURRENT_UTCTIMESTAMP WHERE "MATNR" = ?'
        for kind in STORES:
            again, took = stage.synced(kind, rows, changes), []
            again()  # moves the watermark past every row
            for number in range(max(given.rounds, 1)):
                pool.execute(sql, (f"changed {kind} {number}", f"{number * 7:018}"))
                found = again()
                assert (found.upserted, found.complete) == (1, False), found
                took.append(found.seconds)
            yield figure("one", kind, took, "s", rows=rows)


def delta(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Measure the seconds until one changed row is stored and one deleted row is gone, and those of reading them."""
    changes, rows = ChangeSpec("delta", delay=0.0), given.rows
    with scene(HASHING) as stage:
        table, pool = stage.emulator.table(rows), stage.emulator.pool()
        records = f'{table.schema}."{table.name}_Delta"'
        columns = '"MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "Change_Type" NVARCHAR(1), "Change_Date" TIMESTAMP'
        pool.execute(f"CREATE COLUMN TABLE {records} ({columns})")
        pool.execute(f'INSERT INTO {records} SELECT "MANDT", "MATNR", \'L\', "CHANGED_AT" FROM {table}')
        change = f'UPDATE {table} SET "MAKTX" = ? WHERE "MATNR" = ?'
        record = f"INSERT INTO {records} VALUES ('100', ?, ?, CURRENT_UTCTIMESTAMP)"
        for place, kind in enumerate(STORES):
            spec, ends = stage.spec(rows, changes), stage.ends(kind)
            took: list[float] = []
            reading: list[float] = []
            sync(spec, ends, OPTIONS)
            sync(spec, ends, OPTIONS)  # prepares the statements of later runs
            for number in range(max(given.rounds, 1)):
                first = 2 * (place * given.rounds + number)
                changed, deleted = f"{first:018}", f"{first + 1:018}"
                pool.execute(change, (f"changed {kind} {number}", changed))
                pool.execute(f'DELETE FROM {table} WHERE "MATNR" = ?', (deleted,))
                for key, type_ in ((changed, "U"), (deleted, "D")):
                    pool.execute(record, (key, type_))
                with timed_reads(ends.source) as seconds:
                    found, (whole, _) = timed(partial(sync, spec, ends, OPTIONS))
                assert (found.method, found.read, found.upserted, found.deleted) == ("delta", 1, 1, 1), found
                took.append(whole)
                reading.append(sum(seconds))
            yield figure("delta", kind, took, "s", rows=rows)
            yield Figure(f"delta, {kind}, source", reading, "s", TARGETS["source"], more={"rows": rows})


def inside(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Compare the CPU seconds of this process for syncs with the emulator's model and with an engine of its own."""
    rows = min(given.rows, INSIDE_ROWS)
    with scene(MODEL) as stage:
        stage.emulator.table(rows)
        theirs = EngineEmbedder(HanaEngine(HanaModel(stage.emulator.pool(), DatabaseModel(HANA_MODEL))))

        def work(embedder: Embedder | None, fetched: int) -> Cost:
            done, cost = stage.first_sync("hana", rows, embedder)
            assert done.loaded == fetched, done
            return cost

        works: dict[str, Work] = {"engine": lambda: work(None, rows), "inside": lambda: work(theirs, 0)}
        rounds = interleaved(works, given.rounds)
    shares = [few / many for few, many in zip(rounds.busy["inside"], rounds.busy["engine"], strict=True)]
    seconds = {f"{name} seconds": significant(rounds.median(name)) for name in works}
    yield Figure("inside", shares, target=TARGETS["inside"], more={"rows": rows, "model": HANA_MODEL, **seconds})


@contextmanager
def timed_reads(source: Source) -> Iterator[list[float]]:
    """Collect the seconds of each statement that the source sends."""
    assert isinstance(source, HanaSource)
    seconds: list[float] = []
    pool = source._pool
    read = pool.read

    def timed_read(*arguments: Any, **more: Any) -> Any:
        start = time.perf_counter()
        try:
            return read(*arguments, **more)
        finally:
            seconds.append(time.perf_counter() - start)

    with patch.object(pool, "read", timed_read):
        yield seconds


def figure(part: str, kind: str, rounds: Sequence[float], unit: str, **more: Any) -> Figure:
    name = f"{part}, {kind}"
    return Figure(name, rounds, unit, TARGETS.get(name, TARGETS.get(part)), more=more)


PARTS = {part.__name__: part for part in (overlap, rate, unchanged, memory, one, delta, inside)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=200_000)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*json.loads(sys.argv[-1]))
    else:
        main("sync", __doc__ or "", PARTS, add_options)
