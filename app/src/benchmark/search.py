"""Compare exact search in the local store and in other libraries: the same vectors and results, one query at a time,
each peer in its own process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from app.src.benchmark.harness import Figure, Report, Say, Target, Work, interleaved, machine, percentiles, significant
from app.src.benchmark.peers import DEFAULT_FOLDER, PeerProcess
from app.src.benchmark.workloads import clustered, exact_best, overlap
from connector.model import ChangeSet, Chunk, Vectors
from connector.stores.local.store import LocalStore

OURS = "ours"
K = 10
PAUSE = 0.25
COLLECTION = "benchmark"
_BATCH = 5_000


def measure(  # noqa: PLR0913 - the options of the verb
    peers: Sequence[str],
    say: Say,
    *,
    rounds: int = 5,
    rows: int = 100_000,
    queries: int = 30,
    dimension: int = 384,
    folder: Path = DEFAULT_FOLDER,
    target: Target | None = None,
) -> Report:
    """Measure all peers; `target`: for the ratio to NumPy. Raises PeerUnavailable if a peer fails."""
    about = {"rows": rows, "dimension": dimension, "k": K, "rounds": rounds, "queries": queries}
    report = Report("search", machine(("numpy",)), about)
    processes = {process.name: process for process in (PeerProcess(name, "search", folder) for name in peers)}
    with ExitStack() as held:
        place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-")))
        vectors, asked = clustered(dimension, rows, queries)
        np.save(place / "vectors.npy", vectors)
        np.save(place / "queries.npy", asked)
        for name, process in processes.items():
            say(f"{name}: {rows} vectors")
            (place / name).mkdir()
            held.enter_context(process)
            built = process.ask("build", vectors=str(place / "vectors.npy"), folder=str(place / name))
            report.peers[name] = process.versions | {"build_seconds": significant(built["build_seconds"])}
        say(f"local store: {rows} vectors")
        store = held.enter_context(closing(filled(place / "store", vectors)))
        milliseconds: list[float] = []

        def ours() -> tuple[float, float]:
            """Return the seconds and CPU seconds of the median query."""
            took, spent = [], []
            for query in asked:
                start, before = time.perf_counter(), time.process_time()
                store.view(COLLECTION).search(query, K)
                took.append(time.perf_counter() - start)
                spent.append(time.process_time() - before)
            milliseconds.extend(1000 * one for one in took)
            return float(np.median(took)), float(np.median(spent))

        def theirs(name: str) -> tuple[float, float]:
            out = place / f"{name}.npy"
            found = processes[name].ask("search", queries=str(place / "queries.npy"), k=K, out=str(out))
            return float(np.median(found["milliseconds"])) / 1000, float(np.median(found["cpu_milliseconds"])) / 1000

        works: dict[str, Work] = {OURS: ours, **{name: partial(theirs, name) for name in processes}}
        say(f"{rounds} rounds of {', '.join(works)}")
        done = interleaved(works, rounds, pause=PAUSE)
        expected = exact_best(vectors, asked, K)
        times = percentiles(milliseconds[-rounds * queries :], 50, 95)
        hits = [[int(hit.id.strip("[]")) for hit in store.view(COLLECTION).search(query, K)] for query in asked]
        more = {"p95": times["p95"], "recall": significant(overlap(np.array(hits), expected))}
        report.figures.append(Figure(OURS, [times["p50"]], "ms", more=more))
        for name in processes:
            more = {
                "milliseconds": significant(1000 * done.median(OURS)),
                "their_milliseconds": significant(1000 * done.median(name)),
                "their_recall": significant(overlap(np.load(place / f"{name}.npy"), expected)),
            }
            wanted = target if name == "numpy" else None
            report.figures.append(done.ratio(f"{OURS} / {name}", OURS, name, wanted, **more))
    return report


def filled(folder: Path, vectors: Vectors, chunk: Callable[[int], Chunk] | None = None) -> LocalStore:
    """Return a local store with these vectors; `chunk` returns the nth row's chunk."""
    store = LocalStore(folder)
    model: Any = SimpleNamespace(
        model="vectors of a benchmark",
        fingerprint="benchmark",
        max_tokens=1,
        dimension=vectors.shape[1],
        database_model=None,
    )
    chunk = chunk or (lambda number: Chunk(f"[{number}]", 0, f"row {number}", {"TENANT": number % 100}, bytes(32)))
    store.open(COLLECTION, model)
    with store.lease(COLLECTION, "benchmark", 5) as lease:
        for start in range(0, len(vectors), _BATCH):
            some = vectors[start : start + _BATCH]
            store.apply(lease, ChangeSet(chunks=[chunk(start + at) for at in range(len(some))], vectors=some))
    return store
