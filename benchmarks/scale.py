"""How well does a sync keep several engines busy, and what does a Ray cluster cost?

    python benchmarks/scale.py [PART ...] [--rounds 3] [--rows 20000] [--windows 3] [--out FILE]

The source is the emulator, not HANA: a child process on the same cores. The store is local.

    sleeping    first sync with engines that sleep 2 ms for each text in place of computing: the time they need, divided
                by that of the sync                                         >= 0.90 with 4 engines, >= 0.80 with 8
    overhead    embedding with the real model by two actors of one thread each, over two threads of this process:
                time <= 1.15, CPU seconds of all processes <= 1.10; milliseconds of this process for 1,000 texts <= 15

`overhead` embeds a thousand texts at a time, on the cluster --windows times at once, as syncs do. It neither reads nor
writes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np

from app.src.benchmark.harness import Figure, Report, interleaved
from app.src.benchmark.sync import TEMPLATE, MaterialsInEmulator
from app.src.benchmark.workloads import material_text
from app.src.core.backends import Pause, TokenBatch, Vectors
from app.src.core.backends.hashing import HashingBackend
from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.pool import EnginePool
from app.src.scaling.cluster import Cluster
from app.src.service.wiring import EngineEmbedder
from app.src.settings.model import ScaleSettings
from benchmarks.program import at_least, at_most, main
from connector.hana.source import HanaSource
from connector.model import CollectionSpec
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, sync

SECONDS = 0.002  # of sleep for each text
ENGINES = (4, 8)
MODEL, ACTORS = "all-MiniLM-L6-v2", 2
PAUSE = 0.5  # seconds before each round: idle threads of the engine's pool first stop spinning
TARGETS = {
    "sleeping, 4 engines": at_least(0.9),
    "sleeping, 8 engines": at_least(0.8),
    "overhead, time": at_most(1.15),
    "overhead, CPU of all": at_most(1.10),
    "overhead, CPU of this process": at_most(15),
}


class Sleeping(HashingBackend):
    """Tokenises, then sleeps in place of computing. All vectors are equal."""

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        time.sleep(SECONDS * len(batch))
        return np.full((len(batch), self.info.dimension), self.info.dimension**-0.5, np.float32)


def sleeping(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Divide the seconds that the engines must sleep by those of a whole sync."""
    options = SyncOptions(windows=given.windows)
    with tempfile.TemporaryDirectory() as folder, MaterialsInEmulator(Path(folder)) as emulator:
        spec = CollectionSpec("materials", emulator.table(given.rows), TEMPLATE, metadata=("MTART", "MATKL"))
        source = HanaSource(emulator.pool())

        def first_sync(count: int) -> float:
            members = [EmbeddingEngine(Sleeping("hash:384")) for _ in range(count)]
            with (
                EnginePool(members[0], members) as pool,
                tempfile.TemporaryDirectory(dir=folder) as place,
                closing(LocalStore(Path(place))) as store,
            ):
                done = sync(spec, Ends(source, store, EngineEmbedder(pool)), options)
            assert done.upserted == given.rows, done
            return done.seconds

        rounds = interleaved({str(count): partial(first_sync, count) for count in ENGINES}, given.rounds)
    for count in ENGINES:
        name = f"sleeping, {count} engines"
        shares = [given.rows * SECONDS / count / seconds for seconds in rounds.took[str(count)]]
        yield Figure(name, shares, target=TARGETS[name])


def cpu_of_all() -> float:
    """Return the CPU seconds of this process and of all below it, the cluster's included (Linux)."""
    parents, ticks = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))

    def below(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and below(parents[pid]))

    return sum(count for pid, count in ticks.items() if below(pid)) / os.sysconf("SC_CLK_TCK")


def overhead(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Divide the cost of embedding on a local cluster by that in this process; also give this process's part of it."""
    texts = [material_text(number) for number in range(given.rows)]
    size = SyncOptions().window
    windows = [texts[start : start + size] for start in range(0, len(texts), size)]
    options = EngineOptions(MODEL, device="cpu", threads=ACTORS)
    own: list[float] = []  # milliseconds of this process for 1,000 texts on the cluster

    def embed(engine: Engine) -> tuple[float, float]:
        start, busy, busy_here = time.perf_counter(), cpu_of_all(), time.process_time()
        with ThreadPoolExecutor(given.windows if engine is cluster else 1) as threads:
            list(threads.map(engine.embed_counted, windows))
        seconds, here = time.perf_counter() - start, time.process_time() - busy_here
        if engine is not cluster:
            return seconds, here
        own.append(here * 1e6 / len(texts))
        return seconds, cpu_of_all() - busy

    with (
        load_engine(options) as alone,
        closing(Cluster(ScaleSettings(actors=ACTORS, threads=1))) as ray,
        ray.engine(options) as cluster,
    ):
        works = {"cluster": partial(embed, cluster), "alone": partial(embed, alone)}
        rounds = interleaved(works, given.rounds, pause=PAUSE)
    name = "overhead, time"
    yield rounds.ratio(name, "cluster", "alone", TARGETS[name])
    name = "overhead, CPU of all"
    ratios = [above / below for above, below in zip(rounds.busy["cluster"], rounds.busy["alone"], strict=True)]
    yield Figure(name, ratios, target=TARGETS[name])
    name = "overhead, CPU of this process"
    yield Figure(name, own[-given.rounds :], "ms", TARGETS[name])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--windows", type=int, default=3, help="windows of changed rows embedded at a time")


if __name__ == "__main__":
    main("scale", __doc__ or "", {"sleeping": sleeping, "overhead": overhead}, add_options)
