"""What every worker that searches vectors answers to: take unit vectors in, search one query after the other on one
thread. A worker hands over how to build; what that gives finds the positions of the best rows of one query.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # one thread a query, for all; read when NumPy is imported

import numpy as np  # noqa: E402
from answering import answer, timed  # noqa: E402

Find = Callable[[Any, int], Any]
"""A query (d,) and k -> positions of the rows, best first."""


class Worker:
    def __init__(self, build: Callable[[Any, Path], Find]) -> None:
        self._build = build

    def build(self, vectors: str, folder: str) -> dict[str, Any]:
        self._vectors = np.load(vectors)
        self._find, took = timed(lambda: self._build(self._vectors, Path(folder)))
        return {"build_seconds": took["seconds"]}

    def search(self, queries: str, k: int, out: str | None = None) -> dict[str, Any]:
        """Milliseconds of each query, and of CPU time of all threads."""
        milliseconds, busy, rows = [], [], []
        for query in np.load(queries):
            start, before = time.perf_counter(), time.process_time()
            found = self._find(query, k)
            milliseconds.append((time.perf_counter() - start) * 1000)
            busy.append((time.process_time() - before) * 1000)
            rows.append(np.asarray(found, dtype=np.int64))
        if out is not None:
            np.save(out, np.stack(rows))
        return {"milliseconds": milliseconds, "cpu_milliseconds": busy}


def serve(packages: Sequence[str], build: Callable[[Any, Path], Find]) -> None:
    worker = Worker(build)
    answer(packages, build=worker.build, search=worker.search)


def best(scores: Any, k: int) -> Any:
    """Positions of the largest, best first."""
    some = np.argpartition(scores, len(scores) - k)[len(scores) - k :] if k < len(scores) else np.arange(len(scores))
    return some[np.argsort(-scores[some])]
