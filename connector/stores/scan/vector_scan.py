"""Exact nearest neighbours in memory: the protocols of a scan, the choice of the best scores, and the scan by NumPy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        self._controller: ThreadpoolController | None = None
        self._limit: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._controller = self._controller or ThreadpoolController()
                self._limit = self._controller.limit(limits=1, user_api="blas")
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._limit.restore_original_limits()


single_threaded = _SingleThreadedBlas()


# ------------------------------------------------------------------------------------------------------------- blocks


class Blocks:
    """Rows of one shape and type in blocks of BLOCK_ROWS. Appending moves no existing rows."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self.rows = 0
        self._shape = shape
        self._dtype = dtype
        self._blocks: list[NDArray[Any]] = []

    def append(self, rows: NDArray[Any]) -> None:
        done = 0
        while done < len(rows):
            block, place = divmod(self.rows, BLOCK_ROWS)
            if block == len(self._blocks):  # unused pages take no memory
                self._blocks.append(np.empty((BLOCK_ROWS, *self._shape), self._dtype))
            some = rows[done : done + BLOCK_ROWS - place]
            self._blocks[block][place : place + len(some)] = some
            self.rows += len(some)
            done += len(some)

    def view(self) -> tuple[NDArray[Any], ...]:
        """Return all rows in blocks; only the last may be shorter."""
        last = self.rows - BLOCK_ROWS * (len(self._blocks) - 1)
        return tuple(block[:last] if block is self._blocks[-1] else block for block in self._blocks)

    def append_kept(self, other: Blocks, rows: NDArray[np.bool_]) -> None:
        """Append the rows of `other` for which `rows` is true."""
        for place, block in enumerate(other.view()):
            self.append(block[rows[place * BLOCK_ROWS : place * BLOCK_ROWS + len(block)]])


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
    return np.concatenate(parts or [blocks[0][:0]])


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


def exact_scores(rows: Vectors, query: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return cosines of unit vectors in double precision. Unlike a matrix product, gives equal rows equal scores at any
    position."""
    products = rows.astype(np.float64) * query.astype(np.float64)
    scores: NDArray[np.float64] = np.clip(products.sum(axis=1), -1.0, 1.0)
    return scores


# --------------------------------------------------------------------------------------------------------------- NumPy


class NumpyRanking:
    """A `Ranking` of `rows` (None: all) by float32 scores, each wrong by at most `error`; -inf for excluded rows."""

    def __init__(self, scores: NDArray[np.float32], error: float, rows: Positions | None = None) -> None:
        self._scores = scores
        self._error = error
        self._rows = rows

    def best(self, count: int) -> tuple[Positions, float]:
        count = min(count, len(self._scores))
        last = kth_largest(self._scores, count) if count else -np.inf
        least = last - 2 * self._error if last > -np.inf else np.finfo(np.float32).min
        chosen = np.flatnonzero(self._scores >= np.float32(least))
        return (chosen if self._rows is None else self._rows[chosen]), last - self._error


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
        return [NumpyRanking(row, self._error) for row in scores]

    def rank_rows(self, query: NDArray[np.float32], rows: Positions) -> Ranking:
        with single_threaded():
            scores = take(self._blocks, rows) @ query if len(rows) else np.empty(0, np.float32)
        return NumpyRanking(scores, self._error, rows)


class _NumpyCopy:
    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._vectors = Blocks((dimension,), np.float32)

    def append(self, vectors: Vectors) -> None:
        self._vectors.append(vectors)

    def kept(self, rows: NDArray[np.bool_]) -> _NumpyCopy:
        other = _NumpyCopy(self._dimension)
        other._vectors.append_kept(self._vectors, rows)
        return other

    def view(self) -> _NumpyView:
        # the greatest error of a float32 dot product of two unit vectors
        error = float(max(self._dimension, 16) * np.finfo(np.float32).eps)
        return _NumpyView(self._vectors.view(), self._vectors.rows, error)


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
    answer: Ranking | BaseException | None = None


class SharedScans:
    """Concurrent searches share passes: those that arrive during a pass run together in the next one. At most `passes`
    run at once, by default one per core. Thread-safe."""

    def __init__(self, passes: int | None = None) -> None:
        self._free = passes or os.cpu_count() or 1
        self._changed = threading.Condition()
        self._waiting: list[_Asked] = []

    def rank(self, view: ScanView, query: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> Ranking:
        asked, together = _Asked(view, query, allowed), list[_Asked]()
        with self._changed:
            self._waiting.append(asked)
            try:
                self._changed.wait_for(lambda: asked.answer is not None or (self._free and asked in self._waiting))
                if asked.answer is None:
                    alike = [each for each in self._waiting if each.view is view and each.allowed is allowed]
                    together = [asked, *(each for each in alike if each is not asked)][:TOGETHER]
                    self._free -= 1
            finally:  # also after Ctrl-C, unless another search has taken this one along
                leaving = together or [asked]
                self._waiting = [each for each in self._waiting if each not in leaving]
        if together:
            answers: Sequence[Ranking | BaseException]
            try:
                answers = view.rank(np.stack([each.query for each in together]), allowed)
            except BaseException as error:
                answers = [error] * len(together)
            with self._changed:
                for each, answer in zip(together, answers, strict=True):
                    each.answer = answer
                self._free += 1
                self._changed.notify_all()
        if isinstance(asked.answer, BaseException):
            raise asked.answer
        assert asked.answer is not None
        return asked.answer
