"""How long does a search take while a bulk load runs through the same engine, and how much does it slow the load?

    python benchmarks/together.py [--rounds 5] [--rows 20000] [--out benchmarks/results/together.json]

One process has one engine and a local store that holds all rows. One client searches, waits (--think, 0.1 s) and
searches again, each time with a new query. Each round measures the client alone, the load alone, both, then the load
alone again. Every round loads its share of new texts, a thousand at a time, as a sync does. The p95 covers all searches
of all rounds.

    embedding    p95 beside the load over that without it <= 3; the load loses <= 15 % of its speed
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.src.access.principal import OPERATOR
from app.src.benchmark.harness import Figure, Report, wall
from app.src.benchmark.sync import TEMPLATE, MaterialsInEmulator
from app.src.benchmark.workloads import material_text
from app.src.service.search import SearchOptions
from app.src.service.service import Service
from app.src.settings import Settings
from benchmarks.program import at_most, main

MODEL = "all-MiniLM-L6-v2"
WINDOW = 1000
TARGETS = {"p95 beside the load / idle": at_most(3), "load loses": at_most(0.15)}
SEARCHES = 60  # searches of the client alone, per round


@dataclass
class Client:
    """A client that searches. `seconds`: of each search, in order."""

    service: Service
    think: float
    seconds: list[float] = field(default_factory=list)
    _asked: int = 0

    def search(self) -> None:
        self._asked += 1
        text, options = f"hydraulic pump that leaks at flange {self._asked}", SearchOptions("vector")
        started = time.perf_counter()
        found = self.service.search.run("searched", text, options=options, principal=OPERATOR)
        self.seconds.append(time.perf_counter() - started)
        assert len(found.hits) == 10

    def alone(self) -> list[float]:
        self.seconds = []
        for _ in range(SEARCHES):
            self.search()
            time.sleep(self.think)
        return self.seconds

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Search on a thread while the context is open."""
        self.seconds, over = [], threading.Event()

        def work() -> None:
            while not over.is_set():
                self.search()
                over.wait(self.think)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def embedding(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    share = given.rows // given.rounds
    idle: list[list[float]] = []
    busy: list[list[float]] = []
    lost: list[float] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as folder, synced(Path(folder), given) as service:
        report.options |= {"model": MODEL, "precision": service.parts.engine.precision}
        client = Client(service, given.think)
        client.alone()
        for number in range(given.rounds):
            texts = [material_text(given.rows + number * share + at) for at in range(share)]

            def load(texts: Sequence[str] = texts) -> None:
                for start in range(0, len(texts), WINDOW):
                    service.parts.embedder.embed_documents(texts[start : start + WINDOW])

            idle.append(client.alone())
            before = wall(load)()
            with client.at_work():
                both = wall(load)()
            busy.append(client.seconds)
            unhindered = (before + wall(load)()) / 2
            lost.append(1 - unhindered / both)
            alone.append(unhindered)
    all_idle, all_busy = [one for each in idle for one in each], [one for each in busy for one in each]
    more = {"idle_ms": in_ms(all_idle), "beside_ms": in_ms(all_busy)}
    ratio = p95(all_busy) / p95(all_idle)
    yield Figure(
        "embedding, p95 beside the load / idle", [ratio], "x", TARGETS["p95 beside the load / idle"], more=more
    )
    yield Figure("embedding, load loses", lost, "", TARGETS["load loses"], scatter=math.inf)
    yield Figure("embedding, load alone", alone, "s")


@contextmanager
def synced(folder: Path, given: argparse.Namespace) -> Iterator[Service]:
    """Open a service whose local store holds the rows."""
    with MaterialsInEmulator(folder) as emulator:
        settings = Settings.model_validate(
            {
                "hana": emulator.login | {"encrypt": False},
                "store": {"kind": "local", "path": folder / "vectors"},
                "embedding": {"model": MODEL, "device": "cpu", "precision": given.precision},
                "collections": [
                    {"name": "searched", "source": str(emulator.table(given.rows)), "template": TEMPLATE},
                ],
            }
        )
        service = Service(settings)
        with closing(service):
            service.sync.run("searched")
            yield service


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def in_ms(values: Sequence[float]) -> dict[str, Any]:
    found = {"p50": statistics.median(values), "p95": p95(values), "max": max(values)}
    return {name: round(value * 1000, 1) for name, value in found.items()} | {"searches": len(values)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--think", type=float, default=0.1, help="seconds between a search and the next")
    parser.add_argument("--precision", default="auto")


if __name__ == "__main__":
    main("together", __doc__ or "", {"embedding": embedding}, add_options)
