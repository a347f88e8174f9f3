"""Exact nearest neighbours over vectors in memory, held as two planes of 8-bit integers and scanned by SimSIMD: a
quarter of the memory traffic of float32, with a proven bound on every score's error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from connector.model import Vectors
from connector.processors import processors

BLOCK_ROWS = 65_536  # a matrix of blocks grows without copying; a block is large enough for full memory speed
_PART_ROWS = 16_384  # rows in one call: after each, the thread waits for the interpreter lock
_GROUP = 32  # scores per group; `kth_largest` finds its bound from the largest score of each group

Positions = NDArray[np.int64]
_Part = tuple[int, NDArray[np.int8]]  # the number of the first row, and the rows


class Ranking(Protocol):
    """The approximate scores of one query over rows. Not thread-safe."""

    def best(self, count: int) -> tuple[NDArray[np.int64], float]:
        """Return the ascending numbers of all rows whose true score may be among the best `count`, ties included, and a
        floor below 1: the true score of every other row is lower (-inf: no other rows). True scores are dot products in
        exact arithmetic. Callers may call this again with another count."""


class ScanView(Protocol):
    """The rows of a `ScanCopy` at one moment. Immutable and thread-safe."""

    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]:
        """Scan all rows once for all `queries` (q, d), unit vectors. `allowed` (n,): rows to rank; None: all."""

    def rank_rows(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> Ranking:
        """Rank only `rows`, ascending row numbers. The ranking returns these numbers, not positions in `rows`."""


class ScanCopy(Protocol):
    """The vectors of one collection in the scan's own format. Rows are only appended, so views remain valid. Not
    thread-safe. Discard it after an error."""

    def append(self, vectors: Vectors) -> None:
        """Append rows (n, d) float32: unit vectors, or zeros for rows that are never allowed in `rank`."""

    def kept(self, rows: NDArray[np.bool_]) -> ScanCopy:
        """Return a new copy with only these rows (n,); this copy and its views remain valid. Raises MemoryError
        without room for it."""

    def view(self) -> ScanView:
        """Return a view of the rows appended so far."""


class VectorScan(Protocol):
    """Exact search over vectors in memory, with integers or on a GPU. The store rescores the rows of a
    `Ranking` from its file in double precision, so every scan gives the same hits."""

    def copy(self, dimension: int) -> ScanCopy:
        """Return an empty copy."""


class _SingleThreadedBlas:
    """Limit NumPy's BLAS to one thread while searches compute, because concurrent searches would compete for cores
    (measured with 4 readers: 552 searches/s with one BLAS thread, 66 with two). Counts its users, because the limit
    applies to the whole process."""

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


class _Cores:
    """Divides the cores that this process may use between the searches of all its threads."""

    def __init__(self) -> None:
        self.count = processors()
        self._lock = threading.Lock()
        self._busy = 0
        self._searches = 0

    @property
    def share(self) -> int:
        """Return the cores for each search that runs now, at least one."""
        return max(1, self.count // max(1, self._searches))

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Count one search: others use fewer cores in the block, also while this one does not scan."""
        with self._lock:
            self._searches += 1
        try:
            yield
        finally:
            with self._lock:
                self._searches -= 1

    def each(self, parts: Sequence[_Part], work: Callable[[_Part], None]) -> None:
        """Call `work` with each part, on this thread and on idle cores of the search's share, at most one for two
        parts. Raises the first error after all have ended."""
        turns, errors, helpers = iter(parts), list[BaseException](), list[threading.Thread]()

        def run() -> None:
            try:
                for part in turns:  # threads share the iterator
                    if errors:
                        return
                    work(part)
            except BaseException as error:
                errors.append(error)

        with self._lock:
            used = max(1, min(self.share, self.count - self._busy, len(parts) // 2))
            self._busy += used
        try:
            # Not a pool, because its threads would not survive a fork. A start takes a tenth of a part's time.
            with suppress(RuntimeError):  # no more threads: those that run do all
                for _ in range(used - 1):
                    helper = threading.Thread(target=run, name="scan", daemon=True)
                    helper.start()
                    helpers.append(helper)
            run()
            for helper in helpers:
                helper.join()
        finally:
            with self._lock:
                self._busy -= used
        if errors:
            raise errors[0]


_cores = _Cores()
searching = _cores.searching


# ------------------------------------------------------------------------------------------------------------- blocks


class Blocks:
    """Rows of 8-bit integers in blocks of BLOCK_ROWS. Appending moves no existing rows."""

    def __init__(self, width: int) -> None:
        self._rows = 0
        self._width = width
        self._blocks: list[NDArray[np.int8]] = []

    def append(self, rows: NDArray[np.int8]) -> None:
        done = 0
        while done < len(rows):
            block, place = divmod(self._rows, BLOCK_ROWS)
            if block == len(self._blocks):  # unused pages take no memory
                self._blocks.append(np.empty((BLOCK_ROWS, self._width), np.int8))
            some = rows[done : done + BLOCK_ROWS - place]
            self._blocks[block][place : place + len(some)] = some
            self._rows += len(some)
            done += len(some)

    def view(self) -> tuple[NDArray[np.int8], ...]:
        """Return all rows in blocks; only the last may be shorter."""
        last = self._rows - BLOCK_ROWS * (len(self._blocks) - 1)
        return tuple(block[:last] if block is self._blocks[-1] else block for block in self._blocks)


class Column:
    """A few numbers per row: `width` arrays. Growing allocates new arrays, so earlier views remain valid."""

    def __init__(self, width: int, kind: type[np.generic] = np.float32) -> None:
        self._rows = 0
        self._numbers: NDArray[Any] = np.empty((width, 0), kind)

    def append(self, numbers: NDArray[Any]) -> None:
        """Append rows (width, n)."""
        end = self._rows + numbers.shape[1]
        if end > self._numbers.shape[1]:
            larger = np.empty((len(numbers), max(1024, end + end // 4)), self._numbers.dtype)
            larger[:, : self._rows] = self.view()
            self._numbers = larger
        self._numbers[:, self._rows : end] = numbers
        self._rows = end

    def view(self) -> NDArray[Any]:
        return self._numbers[:, : self._rows]


def take(blocks: Sequence[NDArray[Any]], rows: Positions) -> NDArray[Any]:
    """Return the rows with these numbers, which must ascend and exist."""
    if len(blocks) == 1:
        return blocks[0].take(rows, axis=0)
    ends = np.searchsorted(rows, np.arange(1, len(blocks) + 1) * BLOCK_ROWS)
    starts = [0, *ends[:-1]]
    found = np.empty((len(rows), *blocks[0].shape[1:]), blocks[0].dtype)
    for place, (block, start, end) in enumerate(zip(blocks, starts, ends, strict=True)):
        if start < end:  # "clip": NumPy would buffer `out` for "raise"
            np.take(block, rows[start:end] - place * BLOCK_ROWS, axis=0, out=found[start:end], mode="clip")
    return found


# ------------------------------------------------------------------------------------------------------------ choosing


def kth_largest(scores: NDArray[Any], count: int) -> float:
    """Return the `count`-th largest score; 1 <= count <= number of scores.

    First find the `count`-th largest of the group maxima. Only few scores reach this bound.
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


# ------------------------------------------------------------------------------------------------ scan in 8 bits

# A unit vector x is stored as s1 c1 + s2 c2 + r2, with codes c of -127..127; the second plane encodes the residual of
# the first. A query is q = t1 d1 + t2 d2 + p2. With r1 = s2 c2 + r2 and p1 = t2 d2 + p2, Cauchy-Schwarz gives
#   |q x - s1 c1 t1 d1|                           <= |t1 d1| |r1| + |p1| |x|               of the first planes
#   |q x - (s1 c1 + s2 c2) (t1 d1 + t2 d2)|       <= |t1 d1 + t2 d2| |r2| + |p2| |x|       of both
# where |x| <= 1, |t1 d1| <= 1 + |p1| and |t1 d1 + t2 d2| <= 1 + |p2|, up to rounding. The norms |r1| and |r2| are
# measured and stored per row; products of codes are integers. The scan uses the first plane; both planes rank the rows
# that remain.
_Planes = tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]
_LEVELS = 127
_ROUNDING = 4e-6  # bounds all rounding errors: lengths within 5e-7 of 1, and ten float32 operations on scores near 1
_WIDER = 1 + 1e-5  # A measured norm times this is never below the true one
_BELOW_ONE = 1 - 2e-6  # upper limit of floors: `exact_scores` clips scores to 1, so rows at 1 tie
_TINY = 1e-30
# Rows quantised, or multiplied without SimSIMD, at a time, so that temporaries fit the cache (twice as fast as 4,096).
_ROWS_AT_ONCE = 512
_REFINED_AT_ONCE = 16_384  # Rows refined at a time. Otherwise many ties would need the memory of a full copy.


@cache
def _kernel() -> Callable[..., Any] | None:
    """Return SimSIMD's function for products of 8-bit integers; None if it is missing or wrong on this processor. The
    check includes extreme values."""
    try:
        kernel: Callable[..., Any] = import_module("simsimd").cdist
        rng = np.random.default_rng(8)
        for dimension in (1, 63, 384, 1024):
            rows = rng.integers(-_LEVELS, _LEVELS + 1, (33, dimension), np.int8)
            rows[0], rows[1] = _LEVELS, -_LEVELS
            queries = rows[:4].copy()
            products = np.asarray(kernel(queries, rows, "dot", out_dtype="f32"))
            if not np.array_equal(products, queries.astype(np.int32) @ rows.T.astype(np.int32)):
                return None
    except Exception:
        # SimSIMD only adds speed: after any error, NumPy computes the same products.
        return None
    return kernel


def _dots(queries: NDArray[np.int8], rows: NDArray[np.int8]) -> NDArray[np.float32]:
    """Compute products (m, n) on one thread. They are integers, rounded above 2**24."""
    kernel = _kernel()
    if kernel is not None:  # without the interpreter lock; given `out`, SimSIMD 6.5 loses a reference to None
        return np.asarray(kernel(queries, rows, "dot", out_dtype="f32"))
    products = np.empty((len(queries), len(rows)), np.float32)
    with single_threaded():
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            products[:, some] = queries.astype(np.float64) @ rows[some].T
    return products


def _quantised(vectors: Vectors) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    """Return codes (2, n, d) and scales (2, n) by plane, and errors (2, n) after the first plane and after both."""
    rows, dimension = vectors.shape
    codes = np.empty((2, rows, dimension), np.int8)
    scales, errors = np.empty((2, rows), np.float32), np.empty((2, rows), np.float32)
    for start in range(0, rows, _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        rest = vectors[some].astype(np.float32)
        for plane in (0, 1):
            scale = np.maximum(rest.max(axis=1), -rest.min(axis=1)) / np.float32(_LEVELS)
            scale[scale < _TINY] = 0  # the remainder is then part of the error
            steps = rest * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[:, None]
            np.rint(steps, out=steps)
            codes[plane, some], scales[plane, some] = steps, scale
            steps *= scale[:, None]
            rest -= steps
            errors[plane, some] = np.sqrt(np.einsum("ij,ij->i", rest, rest)) * np.float32(_WIDER) + np.float32(1e-6)
    return codes, scales, errors


class _Query:
    """A quantised query: codes (2, d), and by plane the scale and the error that quantising the query adds."""

    def __init__(self, query: NDArray[np.float32]) -> None:
        codes, scales, errors = _quantised(query[None])
        self.codes = codes[:, 0]
        self.scales = scales[:, 0].astype(np.float64)
        self.errors = errors[:, 0].astype(np.float64) * _WIDER + _ROUNDING
        self.norms = 1 + self.errors


class _Int8Ranking:
    """`lower`: per row, a lower bound of the true score from the first plane, without the query's own error; -inf for
    excluded rows. `rows`: the numbers of these rows; None: all rows."""

    def __init__(self, view: _Int8View, query: _Query, lower: NDArray[np.float32], rows: Positions | None) -> None:
        self._view = view
        self._query = query
        self._lower = lower
        self._rows = rows

    def best(self, count: int) -> tuple[Positions, float]:
        lower, query, errors = self._lower, self._query, self._view.errors
        count = min(count, len(lower))
        if not count:
            return np.empty(0, np.int64), -np.inf
        last = min(kth_largest(lower, count), _BELOW_ONE)
        if last == -np.inf:
            return self._named(np.flatnonzero(lower > -np.inf)), -np.inf
        # Find the rows whose true score may reach `last`: first by the greatest error, then by each row's own error.
        bound, twice = last - 2 * float(query.errors[0]), 2 * float(query.norms[0])
        places = np.flatnonzero(lower >= np.float32(bound - twice * self._view.coarsest))
        own = np.float32(twice) * errors[0][self._named(places)]
        rows = self._named(places[lower[places] + own >= np.float32(bound)])
        scores = np.zeros(len(rows))  # by both planes
        for start in range(0, len(rows), _REFINED_AT_ONCE):
            some = rows[start : start + _REFINED_AT_ONCE]
            for codes, scales in zip(self._view.codes, self._view.scales, strict=True):
                products = query.scales @ _dots(query.codes, take(codes, some))
                scores[start : start + len(some)] += scales[some] * products
        wrong = query.norms[1] * errors[1][rows] + query.errors[1]
        bound = min(kth_largest(scores - wrong, min(count, len(scores))), _BELOW_ONE)
        return rows[scores + wrong >= bound], max(last - float(query.errors[0]), bound)

    def _named(self, places: Positions) -> Positions:
        return places if self._rows is None else self._rows[places]


class _Int8View:
    """The rows of a copy, by plane: codes in blocks, scales and errors. `coarsest`: the greatest error of the first
    plane."""

    def __init__(self, codes: _Planes, columns: NDArray[np.float32], coarsest: float) -> None:
        self.codes, self.scales, self.errors = codes, columns[:2], columns[2:]
        self.coarsest = coarsest

    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]:
        asked = [_Query(query) for query in queries]
        lower = np.empty((len(asked), self.scales.shape[1]), np.float32)
        codes = np.stack([query.codes[0] for query in asked])

        def scan(part: _Part) -> None:
            first, rows = part
            some = slice(first, first + len(rows))
            lower[:, some] = _dots(codes, rows)
            for query, row in zip(asked, lower, strict=True):
                _bound_below(query, row[some], self.scales[0][some], self.errors[0][some])

        size = _PART_ROWS if _cores.share > 1 else BLOCK_ROWS
        parts = [
            (BLOCK_ROWS * place + start, block[start : start + size])
            for place, block in enumerate(self.codes[0])
            for start in range(0, len(block), size)
        ]
        _cores.each(parts, scan)
        if allowed is not None:
            lower[:, ~allowed] = -np.inf
        return [_Int8Ranking(self, query, row, None) for query, row in zip(asked, lower, strict=True)]

    def rank_rows(self, query: NDArray[np.float32], rows: Positions) -> Ranking:
        asked, lower = _Query(query), np.empty(len(rows), np.float32)
        if len(rows):
            lower[:] = _dots(asked.codes[:1], take(self.codes[0], rows))[0]
            _bound_below(asked, lower, self.scales[0][rows], self.errors[0][rows])
        return _Int8Ranking(self, asked, lower, rows)


def _bound_below(
    query: _Query, products: NDArray[np.float32], scales: NDArray[np.float32], errors: NDArray[np.float32]
) -> None:
    """Turn products of the first planes into lower bounds, in place."""
    products *= np.float32(query.scales[0])
    products *= scales
    products -= np.float32(query.norms[0]) * errors


class _Int8Copy:
    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._codes = Blocks(dimension), Blocks(dimension)
        self._columns = Column(4)  # scales and errors
        self._coarsest = 0.0

    def append(self, vectors: Vectors) -> None:
        codes, scales, errors = _quantised(vectors)
        for blocks, rows in zip(self._codes, codes, strict=True):
            blocks.append(rows)
        self._columns.append(np.concatenate([scales, errors]))
        self._coarsest = max(self._coarsest, float(errors[0].max(initial=0.0)))

    def kept(self, rows: NDArray[np.bool_]) -> _Int8Copy:
        other, view = _Int8Copy(self._dimension), self.view()
        for theirs, blocks in zip(other._codes, view.codes, strict=True):
            for place, block in enumerate(blocks):
                theirs.append(block[rows[place * BLOCK_ROWS : place * BLOCK_ROWS + len(block)]])
        other._columns.append(self._columns.view()[:, rows])
        other._coarsest = self._coarsest
        return other

    def view(self) -> _Int8View:
        first, second = self._codes
        return _Int8View((first.view(), second.view()), self._columns.view(), self._coarsest)


class Int8Scan:
    """A `VectorScan` with integer products. Needs 2 x dimension + 16 bytes per row."""

    def copy(self, dimension: int) -> _Int8Copy:
        return _Int8Copy(dimension)


# ------------------------------------------------------------------------------------------------------ shared passes

TOGETHER = 16  # queries per pass; each needs 4 bytes per row


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
        self._free = passes or _cores.count
        self._changed = threading.Condition()
        self._waiting: list[_Asked] = []

    def rank(self, view: ScanView, query: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> Ranking:
        asked, together = _Asked(view, query, allowed), list[_Asked]()
        with self._changed:
            self._waiting.append(asked)
            try:
                self._changed.wait_for(
                    lambda: asked.answer is not None or (self._free and self._waiting[:1] == [asked])
                )
                if asked.answer is None:
                    alike = [each for each in self._waiting if each.view is view and each.allowed is allowed]
                    together = alike[:TOGETHER]
                    self._free -= 1
            finally:  # also after Ctrl-C; a pass of another search may already include this one
                leaving = together or [asked]
                self._waiting = [each for each in self._waiting if each not in leaving]
                self._changed.notify_all()  # another search is now the first in line
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
