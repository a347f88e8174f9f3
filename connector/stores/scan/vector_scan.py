"""Exact nearest neighbours in memory: the protocols of a scan, the choice of the best scores, and the scan by NumPy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from connector.model import Vectors

BLOCK_ROWS = 65_536
"""Rows per block. A matrix of blocks grows without copying; a block is large enough for full memory speed."""
_GROUP = 32
"""Scores per group; only the greatest of a group takes part in finding a bound on the best scores."""

Positions = NDArray[np.int64]
Scores = NDArray[np.float32]


class Ranking(Protocol):
    """The approximate scores of one query over rows. Not thread-safe."""

    def best(self, count: int) -> tuple[NDArray[np.int64], float]:
        """Return, ascending, all rows whose true score may be among the best `count`, ties included, and a floor below
        1 that every other row's true score stays below (-inf: no other rows). True scores are dot products in exact
        arithmetic. May be called again with another count."""
        ...


class ScanView(Protocol):
    """The rows of a `ScanCopy` at one moment. Immutable and thread-safe."""

    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]:
        """Scan all rows once for all `queries` (q, d), unit vectors. `allowed` (n,): the rows to rank, None: all."""
        ...

    def rank_rows(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> Ranking:
        """Rank only `rows`, which ascend. The ranking uses their numbers among all rows."""
        ...


class ScanCopy(Protocol):
    """The vectors of one collection in the scan's own format. Rows are only appended, so views remain valid. Not
    thread-safe. Discard it after an error."""

    def append(self, vectors: Vectors) -> None:
        """Append rows (n, d) float32: unit vectors, or zeros for rows that are never allowed in `rank`."""
        ...

    def kept(self, rows: NDArray[np.bool_]) -> ScanCopy:
        """Return a new copy with only these rows (n,); views of this copy remain valid."""
        ...

    def view(self) -> ScanView:
        """Return a view of the rows appended so far."""
        ...


class VectorScan(Protocol):
    """Exact search over vectors in memory: float32 by NumPy, integers, or on a GPU. The store rescores the rows of a
    `Ranking` from its file in double precision, so every scan gives the same hits."""

    def copy(self, dimension: int) -> ScanCopy:
        """Return an empty copy."""
        ...


class _SingleThreadedBlas:
    """Limit NumPy's BLAS to one thread while searches compute, because concurrent searches would compete for cores
    (measured with 4 readers: 552 searches/s with one BLAS thread, 66 with two). Counted, because the limit applies to
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


single_threaded = _SingleThreadedBlas()


# ------------------------------------------------------------------------------------------------------------- blocks


class Blocks:
    """Rows of one width and type in blocks of BLOCK_ROWS. Appending moves no existing rows."""

    def __init__(self, width: int, dtype: type[np.generic]) -> None:
        self.rows = 0
        self._width = width
        self._dtype = dtype
        self._blocks: list[NDArray[Any]] = []

    def append(self, rows: NDArray[Any]) -> None:
        done = 0
        while done < len(rows):
            block, place = divmod(self.rows, BLOCK_ROWS)
            if block == len(self._blocks):  # unused pages take no memory
                self._blocks.append(np.empty((BLOCK_ROWS, self._width), self._dtype))
            some = rows[done : done + BLOCK_ROWS - place]
            self._blocks[block][place : place + len(some)] = some
            self.rows += len(some)
            done += len(some)

    def view(self) -> tuple[NDArray[Any], ...]:
        """Return all rows in blocks; only the last may be shorter."""
        last = self.rows - BLOCK_ROWS * (len(self._blocks) - 1)
        return tuple(block[:last] if block is self._blocks[-1] else block for block in self._blocks)


class Column:
    """One number per row, contiguous. Growing allocates a new array, so earlier views remain valid."""

    def __init__(self) -> None:
        self._rows = 0
        self._numbers = np.empty(0, np.float32)

    def append(self, numbers: NDArray[np.float32]) -> None:
        end = self._rows + len(numbers)
        if end > len(self._numbers):
            larger = np.empty(max(1024, end + end // 4), np.float32)
            larger[: self._rows] = self._numbers[: self._rows]
            self._numbers = larger
        self._numbers[self._rows : end] = numbers
        self._rows = end

    def view(self) -> NDArray[np.float32]:
        return self._numbers[: self._rows]


def take(blocks: Sequence[NDArray[Any]], rows: Positions) -> NDArray[Any]:
    """Return rows by their ascending numbers."""
    if len(blocks) == 1:
        return blocks[0].take(rows, axis=0)
    ends = np.searchsorted(rows, np.arange(1, len(blocks) + 1) * BLOCK_ROWS)
    starts = [0, *ends[:-1]]
    parts = [
        block.take(rows[start:end] - place * BLOCK_ROWS, axis=0)
        for place, (block, start, end) in enumerate(zip(blocks, starts, ends, strict=True))
        if start < end
    ]
    return np.concatenate(parts) if parts else np.empty((0, 0))


def kept_rows(blocks: Sequence[NDArray[Any]], rows: NDArray[np.bool_]) -> Iterator[NDArray[Any]]:
    """Yield the rows of each block to keep."""
    for place, block in enumerate(blocks):
        yield block[rows[place * BLOCK_ROWS : place * BLOCK_ROWS + len(block)]]


# ------------------------------------------------------------------------------------------------------------ choosing


def kth_largest(scores: NDArray[Any], count: int) -> float:
    """Return the `count`-th largest score; 1 <= count <= number of scores.

    First find the `count`-th largest among the maxima of groups: a bound that few scores reach.
    """
    groups = len(scores) // _GROUP
    if groups > 2 * count:
        heads = scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        bound = np.partition(heads, groups - count)[groups - count]
        scores = scores[scores >= bound]
    return float(np.partition(scores, len(scores) - count)[len(scores) - count])


def shortlist(scores: Scores, count: int, error: float) -> tuple[Positions, float]:
    """Return the same as `Ranking.best` if each score is wrong by at most `error`. Excludes rows scored -inf."""
    count = min(count, len(scores))
    if not count:
        return np.empty(0, dtype=np.int64), -np.inf
    last = kth_largest(scores, count)
    if last == -np.inf:
        return np.flatnonzero(scores > -np.inf), -np.inf
    return np.flatnonzero(scores >= np.float32(last - 2 * error)), last - error


def exact_scores(rows: Vectors, query: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return cosines of unit vectors in double precision. Unlike a matrix product, gives equal rows equal scores at any
    position."""
    products = rows.astype(np.float64) * query.astype(np.float64)
    scores: NDArray[np.float64] = np.clip(products.sum(axis=1), -1.0, 1.0)
    return scores


# --------------------------------------------------------------------------------------------------------------- NumPy


def scan_error(dimension: int) -> float:
    """Return the greatest error of a float32 dot product of two unit vectors."""
    return float(max(dimension, 16) * np.finfo(np.float32).eps)


class _Scored:
    """A ranking of rows by float32 scores."""

    def __init__(self, scores: Scores, error: float, rows: Positions | None = None) -> None:
        self._scores = scores
        self._error = error
        self._rows = rows

    def best(self, count: int) -> tuple[Positions, float]:
        chosen, floor = shortlist(self._scores, count, self._error)
        return (chosen if self._rows is None else self._rows[chosen]), floor


class _NumpyView:
    def __init__(self, blocks: tuple[Vectors, ...], rows: int, error: float) -> None:
        self._blocks = blocks
        self._rows = rows
        self._error = error

    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]:
        scores = np.empty((len(queries), self._rows), dtype=np.float32)
        with single_threaded():
            start = 0
            for block in self._blocks:
                part = scores[:, start : start + len(block)]
                start += len(block)
                if len(queries) == 1:
                    np.matmul(block, queries[0], out=part[0])
                else:
                    np.matmul(block, queries.T, out=part.T)
        if allowed is not None:
            scores[:, ~allowed] = -np.inf
        return [_Scored(row, self._error) for row in scores]

    def rank_rows(self, query: NDArray[np.float32], rows: Positions) -> Ranking:
        with single_threaded():
            scores = take(self._blocks, rows) @ query if len(rows) else np.empty(0, np.float32)
        return _Scored(scores, self._error, rows)


class _NumpyCopy:
    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._vectors = Blocks(dimension, np.float32)

    def append(self, vectors: Vectors) -> None:
        self._vectors.append(vectors)

    def kept(self, rows: NDArray[np.bool_]) -> _NumpyCopy:
        other = _NumpyCopy(self._dimension)
        for some in kept_rows(self._vectors.view(), rows):
            other.append(some)
        return other

    def view(self) -> _NumpyView:
        return _NumpyView(self._vectors.view(), self._vectors.rows, scan_error(self._dimension))


class NumpyScan:
    """A `VectorScan` by float32 matrix products: 4 bytes x dimension per row."""

    def copy(self, dimension: int) -> _NumpyCopy:
        return _NumpyCopy(dimension)


# ------------------------------------------------------------------------------------------------------ shared passes

TOGETHER = 16
"""Queries per pass; each needs 4 bytes per row."""


@dataclass(slots=True, eq=False)
class _Asked:
    view: ScanView
    query: NDArray[np.float32]
    allowed: NDArray[np.bool_] | None
    woken: threading.Event = field(default_factory=threading.Event)
    leads: bool = False
    ranking: Ranking | None = None
    error: BaseException | None = None

    def joins(self, other: _Asked) -> bool:
        return self.view is other.view and self.allowed is other.allowed


class SharedScans:
    """Concurrent searches share passes: those that arrive during a pass run together in the next one. At most `passes`
    run at once, by default one per core. Thread-safe."""

    def __init__(self, passes: int | None = None) -> None:
        self._passes = passes or os.cpu_count() or 1
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: list[_Asked] = []

    def rank(self, view: ScanView, query: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> Ranking:
        asked = _Asked(view, query, allowed)
        with self._lock:
            asked.leads = self._running < self._passes
            if asked.leads:
                self._running += 1
            else:
                self._waiting.append(asked)
        if not asked.leads:
            self._wait(asked)
        if asked.leads:
            self._lead(asked)
        if asked.error is not None:
            raise asked.error
        assert asked.ranking is not None
        return asked.ranking

    def _wait(self, asked: _Asked) -> None:
        try:
            asked.woken.wait()
        except BaseException:  # for example Ctrl-C: release the waiting searches
            with self._lock:
                if asked in self._waiting:
                    self._waiting.remove(asked)
                elif asked.leads:
                    self._hand_over()
            raise

    def _lead(self, first: _Asked) -> None:
        """Run one pass for `first` and the searches waiting for the same rows, then hand over to the next one."""
        with self._lock:
            joining = [other for other in self._waiting if other.joins(first)][: TOGETHER - 1]
            self._waiting = [other for other in self._waiting if other not in joining]
        together = [first, *joining]
        try:
            rankings = first.view.rank(np.stack([asked.query for asked in together]), first.allowed)
            for asked, ranking in zip(together, rankings, strict=True):
                asked.ranking = ranking
        except BaseException as error:
            for asked in together:
                asked.error = error
        finally:
            with self._lock:
                self._hand_over()
            for asked in joining:
                asked.woken.set()

    def _hand_over(self) -> None:
        """Let the longest-waiting search lead. Call under the lock."""
        if not self._waiting:
            self._running -= 1
            return
        following = self._waiting.pop(0)
        following.leads = True
        following.woken.set()
