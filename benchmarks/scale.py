"""How well does a sync keep several engines busy?

    python benchmarks/scale.py [PART ...] [--rounds 3] [--rows 20000] [--windows 3] [--out FILE]

The source is the emulator, not HANA: a child process on the same cores. The store is local.

    sleeping    first sync with engines that sleep 2 ms for each text in place of computing: the time they need, divided
                by that of the sync                                         >= 0.90 with 4 engines, >= 0.80 with 8
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from app.src.benchmark.harness import Figure, Report, at_least, interleaved, main
from app.src.benchmark.sync import TEMPLATE, MaterialsInEmulator
from app.src.core.backends import Pause, TokenBatch, Vectors
from app.src.core.backends.hashing import HashingBackend
from app.src.core.engine import EmbeddingEngine
from app.src.core.pool import EnginePool
from app.src.service.wiring import EngineEmbedder
from connector.hana.source import HanaSource
from connector.model import CollectionSpec
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, sync

SECONDS = 0.002  # of sleep for each text
ENGINES = (4, 8)
TARGETS = {"sleeping, 4 engines": at_least(0.9), "sleeping, 8 engines": at_least(0.8)}


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--windows", type=int, default=3, help="windows of changed rows embedded at a time")


if __name__ == "__main__":
    main("scale", __doc__ or "", {"sleeping": sleeping}, add_options)
