"""How fast is a sync, and what does it cost when nothing or one row has changed?

    python benchmarks/sync.py [PART ...] [--rounds 5] [--rows 200000] [--out benchmarks/results/sync.json]

The source is the emulator, never HANA itself, reached through the real hdbcli; it runs as a child process on the same
cores, so that reading, writing and computing share them. Every figure that can be is a ratio of two things measured in
turns within one run; the median of the rounds counts. Where the rounds scatter, something else was running: the figure
is marked `disturbed` and says nothing.

    overlap    a first sync of 20,000 rows with the real model, over its embedding alone on the same texts
               <= 1.08 into the local store, <= 1.10 into the emulator, whose own work shares the cores
    rate       rows a second of a first sync with hash:384                      >= 10,000 local, >= 6,000 in HANA
    unchanged  a sync of unchanged rows, over a bare keyset scan of the same columns  <= 2.5 local, <= 3.5 in HANA
    memory     how much more a process needs for a sync of all rows than of a tenth of them             < 100 MB
    one        seconds of a sync by watermark that finds one changed row among all                            < 1
    readers    two readers over one, of unchanged rows and of a first sync; predicted: 0.9 and no gain on 2 cores
    methods    full comparison with hashes made by the server, and rowid, over the ordinary full comparison
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hdbcli import dbapi

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark.machine import machine  # noqa: E402
from app.src.benchmark.report import Part, Report, main  # noqa: E402
from app.src.benchmark.side_by_side import Figure, at_least, at_most  # noqa: E402
from app.src.core.engine import EmbeddingEngine  # noqa: E402
from app.src.core.loading import EngineOptions, load_engine  # noqa: E402
from app.src.service.wiring import EngineEmbedder  # noqa: E402
from connector.hana.connection import ConnectionOptions, HanaPool  # noqa: E402
from connector.hana.source import HanaSource  # noqa: E402
from connector.model import ChangeSpec, CollectionSpec, TableRef  # noqa: E402
from connector.stores.hana.store import HanaStore  # noqa: E402
from connector.stores.local.store import LocalStore  # noqa: E402
from connector.stores.store import VectorStore  # noqa: E402
from connector.sync.run import Ends, SyncOptions, SyncReport, sync  # noqa: E402

HASHING, MODEL = "hash:384", "all-MiniLM-L6-v2"
OVERLAP_ROWS = 20_000
KEY, COLUMNS = ("MANDT", "MATNR"), ("MANDT", "MATNR", "MAKTX", "LTEXT", "MTART", "MATKL")
OPTIONS, FULL = SyncOptions(), ChangeSpec()
TARGETS = {
    "overlap, local": at_most(1.08),
    "overlap, hana": at_most(1.1),
    "rate, local": at_least(10_000),
    "rate, hana": at_least(6_000),
    "unchanged, local": at_most(2.5),
    "unchanged, hana": at_most(3.5),
    "memory": at_most(100),
    "one": at_most(1),
}
"""By part, or by part and store."""
# Names put into statements are this file's own.
# ruff: noqa: S608
_KIND, _STATE = ("FERT", "HALB", "ROH", "HIBE"), ("released", "blocked", "in trial", "to be phased out")
_NOUN = ("hydraulic pump", "ball valve", "shaft seal", "roller bearing", "gear box", "oil filter", "hexagon bolt")
_REST = ("stainless steel", "DIN 933", "M8x20", "leaks at the flange", "was replaced", "80 bar", "for export")


def material(number: int) -> tuple[Any, ...]:
    """A row like those of MARA and MAKT, the same for the same number: about 20 tokens of text, few of them alike."""
    rng = random.Random(number)
    words = ", ".join(rng.choice(_REST) for _ in range(3))
    text = f"{rng.choice(_NOUN)} {rng.randrange(10**4)}"
    changed = f"2026-01-01 00:00:00.{number % 10**6:06}"
    return (
        "100",
        f"{number:018}",
        text,
        f"{words}, {rng.choice(_STATE)}",
        rng.choice(_KIND),
        f"{number % 97:03}",
        changed,
    )


@dataclass
class Scene:
    """A stand-in of its own with tables of materials, and stores to sync them to."""

    login: dict[str, Any]
    folder: Path
    engine: EmbeddingEngine
    _held: ExitStack = field(default_factory=ExitStack)
    _stores: int = 0

    def connect(self) -> Any:
        login: dict[str, Any] = {name: self.login[name] for name in ("port", "user", "password")} | {
            "reconnect": "false"
        }
        return dbapi.connect(address=self.login["host"], autocommit=False, **login)

    def pool(self) -> HanaPool:
        login = {name: self.login[name] for name in ("host", "port", "user", "password")}
        return self._held.enter_context(HanaPool(ConnectionOptions(encrypt=False, **login)))

    def close(self) -> None:
        self._held.close()

    def table(self, rows: int) -> TableRef:
        """A table of so many materials, made when first asked for."""
        ref = TableRef(self.login["schema"], f"MATERIALS_{rows}")
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT 1 FROM SYS.TABLES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?", (ref.schema, ref.name))
            if not cursor.fetchall():
                cursor.execute(
                    f'CREATE COLUMN TABLE {ref} ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MAKTX" NVARCHAR(40), '
                    '"LTEXT" NVARCHAR(500), "MTART" NVARCHAR(4), "MATKL" NVARCHAR(9), "CHANGED_AT" TIMESTAMP, '
                    'PRIMARY KEY ("MANDT", "MATNR"))'
                )
                for start in range(0, rows, 10_000):
                    some = [material(number) for number in range(start, min(start + 10_000, rows))]
                    cursor.executemany(f"INSERT INTO {ref} VALUES (?, ?, ?, ?, ?, ?, ?)", some)
                connection.commit()
        return ref

    def spec(self, rows: int, changes: ChangeSpec = FULL) -> CollectionSpec:
        self._stores += 1
        name = f"bench-{self._stores}"
        return CollectionSpec(name, self.table(rows), "{MAKTX}. {LTEXT}", metadata=("MTART", "MATKL"), changes=changes)

    def store(self, kind: str) -> VectorStore:
        """A store of its own folder, or the schema of the source."""
        if kind == "hana":
            return HanaStore(self.pool(), self.login["schema"])
        self._stores += 1
        return self._held.enter_context(closing(LocalStore(self.folder / f"store-{self._stores}")))

    def ends(self, kind: str) -> Ends:
        return Ends(HanaSource(self.pool()), self.store(kind), EngineEmbedder(self.engine))

    def drop(self, spec: CollectionSpec) -> None:
        schema, name = self.login["schema"], spec.name.upper().replace("-", "_")
        with closing(self.connect()) as connection:
            connection.cursor().execute(f'DROP TABLE "{schema}"."OWL_{name}_G1"')
            connection.cursor().execute(f'DELETE FROM "{schema}"."OWL_STATE" WHERE "COLLECTION" = ?', (spec.name,))
            connection.commit()

    def scan(self, rows: int) -> None:
        """What any program would have to do to see every row: the same pages of the same columns, as hdbcli gives
        them."""
        head = f"SELECT {', '.join(COLUMNS)} FROM {self.table(rows)}"
        tail, page = "ORDER BY MANDT, MATNR LIMIT ?", OPTIONS.page_rows
        with closing(self.connect()) as connection:
            cursor, seen = connection.cursor(), 0
            cursor.execute(f"{head} {tail}", (page,))
            while found := cursor.fetchall():
                seen += len(found)
                client, number = found[-1][0], found[-1][1]
                after = (client, client, number, page)
                cursor.execute(f"{head} WHERE (MANDT > ? OR (MANDT = ? AND MATNR > ?)) {tail}", after)
        assert seen == rows, f"{seen} of {rows} rows"


@contextmanager
def scene(model: str) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder, load_engine(EngineOptions(model, device="cpu")) as engine:
        command = [sys.executable, "-m", "hana_emulator", "--data", folder, "--parent-pid", str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            made = Scene(json.loads(process.stdout.readline()), Path(folder), engine)
            try:
                yield made
            finally:
                made.close()
                process.terminate()
                process.wait(30)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def first_sync(stage: Scene, kind: str, rows: int) -> SyncReport:
    spec = stage.spec(rows)
    report = sync(spec, stage.ends(kind), OPTIONS)
    assert report.upserted == rows, report
    if kind == "hana":
        stage.drop(spec)  # what earlier rounds left behind must not slow later ones
    return report


def synced(stage: Scene, kind: str, rows: int, changes: ChangeSpec = FULL) -> Callable[[], SyncReport]:
    """A collection that was synced once; what comes back syncs it again."""
    spec, ends = stage.spec(rows, changes), stage.ends(kind)
    sync(spec, ends, OPTIONS)
    return lambda: sync(spec, ends, OPTIONS)


# ---------------------------------------------------------------------------------------------------------- the parts


def overlap(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """The whole sync against its busiest stage, which is embedding, given all texts at once."""
    rows = min(given.rows, OVERLAP_ROWS)
    texts = [f"{text}. {more}" for _, _, text, more, *_ in map(material, range(rows))]
    found: dict[str, list[float]] = {"local": [], "hana": []}
    with scene(MODEL) as stage:
        stage.engine.embed(texts[:500])
        stage.table(rows)
        for _ in range(given.rounds):
            before = seconds(lambda: stage.engine.embed(texts))
            for kind, ratios in found.items():
                whole = seconds(lambda: first_sync(stage, kind, rows))  # noqa: B023
                after = seconds(lambda: stage.engine.embed(texts))
                ratios.append(2 * whole / (before + after))
                before = after
        about = {"rows": rows, "model": MODEL, "precision": stage.engine.precision}
    for kind, ratios in found.items():
        yield figure("overlap", kind, ratios, "x", **about)


def rate(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Rows a second of a first sync, and the seconds that each stage of the last one was busy."""
    rows = max(given.rows // 4, 1)
    found: dict[str, list[float]] = {"local": [], "hana": []}
    stages: dict[str, dict[str, float]] = {}
    with scene(HASHING) as stage:
        stage.table(rows)
        for _ in range(given.rounds):
            for kind, rates in found.items():
                synced = first_sync(stage, kind, rows)
                rates.append(synced.rows_per_second)
                stages[kind] = synced.stages
    for kind, rates in found.items():
        yield figure("rate", kind, rates, "rows/s", rows=rows, stages=stages[kind])


def unchanged(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """A sync that finds nothing to do against the scan before and after it."""
    rows = given.rows
    found: dict[str, list[float]] = {"local": [], "hana": []}
    with scene(HASHING) as stage:
        again = {kind: synced(stage, kind, rows) for kind in found}
        times = [seconds(lambda: stage.scan(rows))]
        for _ in range(given.rounds):
            for kind, ratios in found.items():
                done = again[kind]()
                assert done.unchanged == rows
                assert not done.embedded_texts
                times.append(seconds(lambda: stage.scan(rows)))
                ratios.append(2 * done.seconds / (times[-2] + times[-1]))
    scan = round(statistics.median(times), 3)
    for kind, ratios in found.items():
        yield figure("unchanged", kind, ratios, "x", rows=rows, scan_seconds=scan)


def memory(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Largest resident set of a child process that syncs once and once more, in MB: all rows less a tenth of them."""
    with scene(HASHING) as stage:
        for kind in ("local", "hana"):
            few, many = (
                [_child(stage, kind, number) for _ in range(max(1, given.rounds // 2))]
                for number in (given.rows // 10, given.rows)
            )
            growth = [larger - smaller for smaller, larger in zip(few, many, strict=True)]
            yield figure("memory", kind, growth, "MB", rows=given.rows, few=few, many=many)


def _child(stage: Scene, kind: str, rows: int) -> float:
    stage.table(rows)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", json.dumps([stage.login, folder, kind, rows])]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def child(login: dict[str, Any], folder: str, kind: str, rows: int) -> None:
    with load_engine(EngineOptions(HASHING)) as engine:
        stage = Scene(login, Path(folder), engine, _stores=time.time_ns())  # names that no other child has
        with closing(stage):
            again = synced(stage, kind, rows)
            assert again().unchanged == rows
    print(peak_megabytes())


def peak_megabytes() -> float:
    """Of this program. The kernel's ru_maxrss would go back to before exec, to the process that started this one."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return round(int(re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024, 1)


def one(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Seconds until one changed row is stored. Not where this version compares everything all the same."""
    changes = ChangeSpec(method="watermark", column="CHANGED_AT", delay=0.0)
    rows = given.rows
    with scene(HASHING) as stage, closing(stage.connect()) as connection:
        for kind in ("local", "hana"):
            again, took, complete = synced(stage, kind, rows, changes), [], False
            again()  # the mark is now behind every row
            for number in range(max(given.rounds, 1)):
                sql = (
                    f'UPDATE {stage.table(rows)} SET "MAKTX" = ?, "CHANGED_AT" = CURRENT_UTCTIMESTAMP WHERE "MATNR" = ?'
                )
                connection.cursor().execute(sql, (f"changed {kind} {number}", f"{number * 7:018}"))
                connection.commit()
                found = again()
                assert found.upserted == 1, found
                took.append(found.seconds)
                complete = found.complete
            if complete:
                report.notes.append(f"one, {kind}: everything was compared, no figure")
            else:
                yield figure("one", kind, took, "s", rows=rows)


def methods(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Syncs of unchanged rows: other ways to find that out, over the ordinary full comparison, local store."""
    ways = {
        "full": FULL,
        "server hash": ChangeSpec(hash="server"),
        "rowid": ChangeSpec(method="rowid"),
    }
    with scene(HASHING) as stage:
        again = {name: synced(stage, "local", given.rows, changes) for name, changes in ways.items()}
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(given.rounds):
            for name, run in again.items():
                took[name].append(run().seconds)
    whole = took.pop("full")
    for name, times in took.items():
        ratios = [own / full for own, full in zip(times, whole, strict=True)]
        yield figure("methods", name, ratios, "x", rows=given.rows)


def readers(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Syncs of unchanged rows and first syncs of half as many: two readers over one, local store."""
    rows, counts = given.rows, (1, 2)
    found: dict[str, list[float]] = {"unchanged": [], "first": []}
    with scene(HASHING) as stage:
        spec, ends = stage.spec(rows), stage.ends("local")
        sync(spec, ends, OPTIONS)

        def again(count: int) -> float:
            return sync(spec, ends, replace(OPTIONS, readers=count)).seconds

        def first(count: int) -> float:
            return sync(stage.spec(rows // 2), stage.ends("local"), replace(OPTIONS, readers=count)).seconds

        first(1)
        for _ in range(given.rounds):
            for name, work in (("unchanged", again), ("first", first)):
                one, two = map(work, counts)
                found[name].append(two / one)
    for name, ratios in found.items():
        yield figure("readers", name, ratios, "x", rows=rows)


def figure(part: str, what: str, rounds: Sequence[float], unit: str, **more: Any) -> Figure:
    name = f"{part}, {what}"
    return Figure(name, rounds, unit, TARGETS.get(name, TARGETS.get(part)), more=more)


def on_the_stand_in(part: Part) -> Part:
    """Says where the rows came from, and how many at a time."""

    def run(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        report.machine["source"] = "the emulator, a child process on the same cores"
        report.machine |= machine(("hdbcli", "sqlglot"))
        report.options |= {"page_rows": OPTIONS.page_rows, "window": OPTIONS.window}
        yield from part(given, report)

    return run


PARTS = {part.__name__: on_the_stand_in(part) for part in (overlap, rate, unchanged, memory, one, methods, readers)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=200_000)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*json.loads(sys.argv[-1]))
    else:
        main("sync", __doc__ or "", PARTS, add_options)
