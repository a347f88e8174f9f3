"""Compare exact search in the local store and in other libraries: the same vectors and results, one query at a time,
each peer in its own process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from app.src.benchmark.harness import (
    Figure,
    Report,
    Say,
    Target,
    Work,
    interleaved,
    machine,
    percentiles,
    ratio_of_last,
    significant,
)
from app.src.benchmark.peers import DEFAULT_FOLDER, PeerProcess, in_rounds, left_out, peer
from app.src.benchmark.workloads import Clusters, exact_best, overlap
from connector.model import ChangeSet, Chunk, Vectors
from connector.stores.local.store import LocalStore

OURS = "ours"
K = 10
PAUSE = 0.25
COLLECTION = "benchmark"
_BATCH = 5_000


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`target`: of the ratio to NumPy."""

    peers: Sequence[str] = ("numpy",)
    rounds: int = 5
    rows: int = 100_000
    queries: int = 30
    dimension: int = 384
    folder: Path = DEFAULT_FOLDER
    target: Target | None = None


def measure(options: SearchOptions, say: Say) -> Report:
    """Measure all peers. One that does not start is skipped with a note (PeerUnavailable if none remains); one that
    fails later gets a failed figure."""
    about = {"rows": options.rows, "dimension": options.dimension, "k": K, "rounds": options.rounds}
    report = Report("search", machine(("numpy",)), about | {"queries": options.queries})
    peers = [peer(name, "search") for name in dict.fromkeys(options.peers)]
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-")))
        processes = {each.name: PeerProcess(each, options.folder) for each in peers}
        clusters = Clusters(options.dimension)
        vectors, queries = clusters.draw(options.rows), clusters.draw(options.queries)
        np.save(folder / "vectors.npy", vectors)
        np.save(folder / "queries.npy", queries)
        for name, process in list(processes.items()):
            say(f"{name}: {options.rows} vectors")
            place = folder / name
            place.mkdir()
            with left_out(report, processes, name):
                held.enter_context(process)
                built = process.ask("build", vectors=str(folder / "vectors.npy"), folder=str(place))
                report.peers[name] = process.versions | {"build_seconds": significant(built["build_seconds"])}
        say(f"local store: {options.rows} vectors")
        store = held.enter_context(closing(filled(folder / "store", vectors)))
        busy: dict[str, list[float]] = {name: [] for name in (OURS, *processes)}
        milliseconds: list[float] = []

        def ours() -> float:
            """Return the seconds of the median query."""
            took, spent = [], []
            for query in queries:
                start, before = time.perf_counter(), time.process_time()
                store.view(COLLECTION).search(query, K)
                took.append(time.perf_counter() - start)
                spent.append(time.process_time() - before)
            milliseconds.extend(1000 * one for one in took)
            busy[OURS].append(float(np.median(spent)))
            return float(np.median(took))

        def theirs(name: str) -> float:
            out = folder / f"{name}.npy"
            found = processes[name].ask("search", queries=str(folder / "queries.npy"), k=K, out=str(out))
            busy[name].append(float(np.median(found["cpu_milliseconds"])) / 1000)
            return float(np.median(found["milliseconds"])) / 1000

        works: dict[str, Work] = {OURS: ours}
        works |= {name: in_rounds(lambda name=name: theirs(name)) for name in processes}  # type: ignore[misc]
        say(f"{options.rounds} rounds of {', '.join(works)}")
        rounds = interleaved(works, options.rounds, pause=PAUSE)
        expected = exact_best(vectors, queries, K)
        times = percentiles(milliseconds[-options.rounds * options.queries :], 50, 95)
        hits = [[int(hit.id.strip("[]")) for hit in store.view(COLLECTION).search(query, K)] for query in queries]
        more = {"p95": times["p95"], "recall": significant(overlap(np.array(hits), expected))}
        report.figures.append(Figure(OURS, [times["p50"]], "ms", more=more))
        for name in processes:
            more = {}
            if name not in rounds.failed:
                more = {
                    "cpu_ratio": ratio_of_last(busy[OURS], busy[name], options.rounds),
                    "milliseconds": significant(1000 * rounds.median(OURS)),
                    "their_milliseconds": significant(1000 * rounds.median(name)),
                    "their_recall": significant(overlap(np.load(folder / f"{name}.npy"), expected)),
                }
            target = options.target if name == "numpy" else None
            report.figures.append(rounds.ratio(f"{OURS} / {name}", OURS, name, target, **more))
    return report


def _plain_chunk(number: int) -> Chunk:
    return Chunk(f"[{number}]", 0, f"row {number}", {"TENANT": number % 100}, bytes(32))


def filled(folder: Path, vectors: Vectors, chunk: Callable[[int], Chunk] = _plain_chunk) -> LocalStore:
    """Return a local store with these vectors; `chunk` returns the nth row's chunk."""
    store = LocalStore(folder)
    model: Any = SimpleNamespace(
        model="vectors of a benchmark", fingerprint="benchmark", max_tokens=1, dimension=vectors.shape[1]
    )
    store.open(COLLECTION, model)
    with store.lease(COLLECTION, "benchmark", 5) as lease:
        for start in range(0, len(vectors), _BATCH):
            some = vectors[start : start + _BATCH]
            store.apply(lease, ChangeSet(chunks=[chunk(start + at) for at in range(len(some))], vectors=some))
    return store
