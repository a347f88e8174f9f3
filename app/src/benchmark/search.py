"""How fast is an exact search of the local store against other engines, over the same vectors with the same answers?
Each peer in a process of its own, one query after the other.
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

from app.src.benchmark.environments import DEFAULT_FOLDER, peer
from app.src.benchmark.machine import machine
from app.src.benchmark.peers import PeerProcess, in_rounds, left_out
from app.src.benchmark.report import Report
from app.src.benchmark.side_by_side import Figure, Target, Work, interleaved, significant
from app.src.benchmark.workloads import Clusters, exact_best, overlap
from connector.model import ChangeSet, Chunk, Vectors
from connector.stores.local.store import LocalStore

OURS = "ours"
K = 10
PAUSE = 0.25
_COLLECTION = "benchmark"
_BATCH = 5_000
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SearchOptions:
    peers: Sequence[str] = ("numpy",)
    rounds: int = 5
    rows: int = 100_000
    queries: int = 30
    dimension: int = 384
    folder: Path = DEFAULT_FOLDER
    target: Target | None = None
    """Of the ratio to NumPy."""


def measure(options: SearchOptions, say: Say) -> Report:
    """A peer that does not start is left out and noted; raises PeerUnavailable when none is left. One that fails later
    gets a figure that says so."""
    wanted = {"rows": options.rows, "dimension": options.dimension, "k": K, "rounds": options.rounds}
    report = Report("search", machine(("numpy",)), wanted | {"queries": options.queries})
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
        ours = Ours(store, queries)
        busy: dict[str, list[float]] = {name: [] for name in processes}
        works: dict[str, Work] = {OURS: ours.work} | {
            name: _theirs(process, folder, busy[name]) for name, process in processes.items()
        }
        say(f"{options.rounds} rounds of {', '.join(works)}")
        rounds = interleaved(works, options.rounds, pause=PAUSE)
        wanted_rows = exact_best(vectors, queries, K)
        exact = overlap(ours.rows(), wanted_rows)
        report.figures.append(_own(ours, options.rounds * options.queries, exact))
        for name in processes:
            label, target = f"{OURS} / {name}", options.target if name == "numpy" else None
            if name in rounds.failed:
                report.figures.append(rounds.ratio(label, OURS, name, target))
                continue
            recall = overlap(np.load(folder / f"{name}.npy"), wanted_rows)
            report.figures.append(
                rounds.ratio(
                    label,
                    OURS,
                    name,
                    target,
                    cpu_ratio=_cpu_ratio(ours.busy, busy[name], options.rounds),
                    milliseconds=significant(1000 * rounds.median(OURS)),
                    their_milliseconds=significant(1000 * rounds.median(name)),
                    their_recall=significant(recall),
                )
            )
    return report


class Ours:
    """The local store, asked the same queries again and again; keeps how long each took."""

    def __init__(self, store: LocalStore, queries: Vectors) -> None:
        self._store = store
        self._queries = queries
        self.took: list[float] = []
        self.busy: list[float] = []
        """Median CPU seconds of each round."""

    def work(self) -> float:
        """Seconds of the median query."""
        took, busy = [], []
        for query in self._queries:
            start, before = time.perf_counter(), time.process_time()
            self._store.view(_COLLECTION).search(query, K)
            took.append(time.perf_counter() - start)
            busy.append(time.process_time() - before)
        self.took += took
        self.busy.append(float(np.median(busy)))
        return float(np.median(took))

    def rows(self) -> NDArray[np.int64]:
        found = [self._store.view(_COLLECTION).search(query, K) for query in self._queries]
        return np.array([[int(hit.id.strip("[]")) for hit in hits] for hits in found])


def _own(ours: Ours, counted: int, exact: float) -> Figure:
    """The milliseconds themselves. The rounds are percentiles here, which scatter by nature."""
    took = 1000 * np.array(ours.took[-counted:])
    p50, p95 = (significant(float(np.percentile(took, share))) for share in (50, 95))
    return Figure(OURS, [p50], "ms", more={"p95": p95, "recall": significant(exact)})


def _cpu_ratio(ours: list[float], theirs: list[float], rounds: int) -> float:
    """As the ratio, of CPU seconds: what is left of it where others compute on the same machine."""
    return significant(float(np.median(np.array(ours[-rounds:]) / np.maximum(theirs[-rounds:], 1e-9))))


def _theirs(process: PeerProcess, folder: Path, busy: list[float]) -> Work:
    def run() -> float:
        out = folder / f"{process.peer.name}.npy"
        found = process.ask("search", queries=str(folder / "queries.npy"), k=K, out=str(out))
        busy.append(float(np.median(found["cpu_milliseconds"])) / 1000)
        return float(np.median(found["milliseconds"])) / 1000

    return in_rounds(run)


class _Model:
    """What the store wants to know of the model whose vectors it holds."""

    model = "vectors made for a benchmark"
    fingerprint = "benchmark"
    max_tokens = 1

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension


def filled(folder: Path, vectors: Vectors) -> LocalStore:
    """A local store with these vectors; document n is the nth."""
    store = LocalStore(folder)
    try:
        model: Any = _Model(vectors.shape[1])
        store.open(_COLLECTION, model)
        with store.lease(_COLLECTION, "benchmark", 5) as lease:
            for start in range(0, len(vectors), _BATCH):
                some = vectors[start : start + _BATCH]
                chunks = [
                    Chunk(f"[{start + at}]", 0, f"row {start + at}", {"TENANT": (start + at) % 100}, bytes(32))
                    for at in range(len(some))
                ]
                store.apply(lease, ChangeSet(chunks=chunks, vectors=some))
    except BaseException:
        store.close()
        raise
    return store
