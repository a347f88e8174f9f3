"""Exact nearest neighbours in memory: scores by NumPy in large blocks, the best of them without sorting all.
Knows arrays only: no store, no SQL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from connector.model import Vectors

BLOCK_ROWS = 65_536
"""Rows a matrix product sees at once: large enough for full memory speed, small enough to keep temporaries small."""


class _SingleThreadedBlas:
    """Holds NumPy's BLAS at one thread while anybody scans: with more, concurrent searches fight for the cores
    (measured with 4 readers: 552 searches/s with one BLAS thread, 66 with two). Counted, because the limit belongs to
    the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._limit: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._limit = _controller().limit(limits=1, user_api="blas")
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._limit.restore_original_limits()


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


_single_threaded = _SingleThreadedBlas()


def numpy_scan(matrix: Vectors, query: NDArray[np.float32]) -> NDArray[np.float32]:
    """matrix (n, d), query (d,) -> (n,) dot products, float32. Never NaN: such a score is -inf."""
    scores = np.empty(len(matrix), dtype=np.float32)
    with _single_threaded(), np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(matrix), BLOCK_ROWS):
            np.matmul(matrix[start : start + BLOCK_ROWS], query, out=scores[start : start + BLOCK_ROWS])
    scores[np.isnan(scores)] = -np.inf
    return scores


def scan_error(dimension: int) -> float:
    """By how much a float32 dot product of two unit vectors can be wrong at most."""
    return float(max(dimension, 16) * np.finfo(np.float32).eps)


def shortlist(scores: NDArray[np.float32], count: int, error: float) -> tuple[NDArray[np.int64], float]:
    """Positions of every row that may be among the best `count`, when each score is wrong by at most `error`; and a
    floor: the true score of every row left out is below it. Rows scored -inf are never among them.

    Order is none in particular. All rows tied with the last one are included, so what follows can break ties its way.
    """
    count = min(count, len(scores))
    if not count:
        return np.empty(0, dtype=np.int64), -np.inf
    last = float(scores[np.argpartition(scores, len(scores) - count)[len(scores) - count]])
    if last == -np.inf:
        return np.flatnonzero(scores > -np.inf), -np.inf
    return np.flatnonzero(scores >= np.float32(last - 2 * error)), last - error


def exact_scores(rows: Vectors, query: NDArray[np.float32]) -> NDArray[np.float64]:
    """Cosines of unit vectors in double precision. Equal rows have equal scores wherever they stand, which a matrix
    product does not promise."""
    products = rows.astype(np.float64) * query.astype(np.float64)
    scores: NDArray[np.float64] = np.clip(products.sum(axis=1), -1.0, 1.0)
    return scores
