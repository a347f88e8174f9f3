"""Exact search in the local store and in other libraries: the same vectors, the same answers, one query after another,
each peer in a process of its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Measure all peers. One that does not start is left out with a note (PeerUnavailable when none remains); one that
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
        ours = Ours(held.enter_context(closing(filled(folder / "store", vectors))), queries)
        busy: dict[str, list[float]] = {name: [] for name in processes}
        works: dict[str, Work] = {OURS: ours.work}
        works |= {name: _theirs(process, folder, busy[name]) for name, process in processes.items()}
        say(f"{options.rounds} rounds of {', '.join(works)}")
        rounds = interleaved(works, options.rounds, pause=PAUSE)
        expected = exact_best(vectors, queries, K)
        times = percentiles([1000 * one for one in ours.took[-options.rounds * options.queries :]], 50, 95)
        more = {"p95": times["p95"], "recall": significant(overlap(ours.rows(), expected))}
        report.figures.append(Figure(OURS, [times["p50"]], "ms", more=more))
        for name in processes:
            label, target = f"{OURS} / {name}", options.target if name == "numpy" else None
            if name in rounds.failed:
                report.figures.append(rounds.ratio(label, OURS, name, target))
                continue
            report.figures.append(
                rounds.ratio(
                    label,
                    OURS,
                    name,
                    target,
                    cpu_ratio=ratio_of_last(ours.busy, busy[name], options.rounds),
                    milliseconds=significant(1000 * rounds.median(OURS)),
                    their_milliseconds=significant(1000 * rounds.median(name)),
                    their_recall=significant(overlap(np.load(folder / f"{name}.npy"), expected)),
                )
            )
    return report


class Ours:
    """The local store, asked the same queries every round. `took`: seconds of each; `busy`: median CPU seconds of each
    round."""

    def __init__(self, store: LocalStore, queries: Vectors) -> None:
        self._store = store
        self._queries = queries
        self.took: list[float] = []
        self.busy: list[float] = []

    def work(self) -> float:
        """Return the seconds of the median query."""
        took, busy = [], []
        for query in self._queries:
            start, before = time.perf_counter(), time.process_time()
            self._store.view(COLLECTION).search(query, K)
            took.append(time.perf_counter() - start)
            busy.append(time.process_time() - before)
        self.took += took
        self.busy.append(float(np.median(busy)))
        return float(np.median(took))

    def rows(self) -> NDArray[np.int64]:
        found = [self._store.view(COLLECTION).search(query, K) for query in self._queries]
        return np.array([[int(hit.id.strip("[]")) for hit in hits] for hits in found])


def _theirs(process: PeerProcess, folder: Path, busy: list[float]) -> Work:
    def run() -> float:
        out = folder / f"{process.peer.name}.npy"
        found = process.ask("search", queries=str(folder / "queries.npy"), k=K, out=str(out))
        busy.append(float(np.median(found["cpu_milliseconds"])) / 1000)
        return float(np.median(found["milliseconds"])) / 1000

    return in_rounds(run)


class _Model:
    """The properties of a model that a store records."""

    model = "vectors made for a benchmark"
    fingerprint = "benchmark"
    max_tokens = 1

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension


def _plain_chunk(number: int) -> Chunk:
    return Chunk(f"[{number}]", 0, f"row {number}", {"TENANT": number % 100}, bytes(32))


def filled(folder: Path, vectors: Vectors, chunk: Callable[[int], Chunk] = _plain_chunk) -> LocalStore:
    """Return a local store with these vectors; `chunk` returns the nth row's chunk."""
    store = LocalStore(folder)
    try:
        model: Any = _Model(vectors.shape[1])
        store.open(COLLECTION, model)
        with store.lease(COLLECTION, "benchmark", 5) as lease:
            for start in range(0, len(vectors), _BATCH):
                some = vectors[start : start + _BATCH]
                chunks = [chunk(start + at) for at in range(len(some))]
                store.apply(lease, ChangeSet(chunks=chunks, vectors=some))
    except BaseException:
        store.close()
        raise
    return store
