"""Exact nearest neighbours over vectors held as two planes of 8-bit integers, scanned by SimSIMD's kernels: a quarter
of the memory traffic of float32, with a proven bound on every score's error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.model import Vectors
from connector.stores.scan.vector_scan import (
    Blocks,
    Column,
    NumpyScan,
    Positions,
    Ranking,
    VectorScan,
    kept_rows,
    kth_largest,
    take,
)

# A unit vector x is stored as s1 c1 + s2 c2 + r2, with codes c of -127..127; the second plane encodes the residual of
# the first. A query is q = t1 d1 + t2 d2 + p2. With r1 = s2 c2 + r2 and p1 = t2 d2 + p2, Cauchy-Schwarz gives
#   |q x - s1 c1 t1 d1|                           <= |t1 d1| |r1| + |p1| |x|               of the first planes
#   |q x - (s1 c1 + s2 c2) (t1 d1 + t2 d2)|       <= |t1 d1 + t2 d2| |r2| + |p2| |x|       of both
# where |x| <= 1, |t1 d1| <= 1 + |p1| and |t1 d1 + t2 d2| <= 1 + |p2|, up to rounding. The norms |r1| and |r2| are
# measured and stored per row; products of codes are integers. The scan uses the first plane; both planes rank the rows
# that remain.
_LEVELS = 127
_ROUNDING = 4e-6
"""Bounds all rounding errors: lengths off 1 by 5e-7, and ten float32 operations on scores of about 1."""
_WIDER = 1 + 1e-5
"""A measured norm times this is never below the true one."""
_BELOW_ONE = 1 - 2e-6
"""Upper limit of floors: true scores are cut off at 1, so rows at 1 tie."""
_TINY = 1e-30
_ROWS_AT_ONCE = 512
"""Rows quantised at a time, so that temporaries fit the cache (twice as fast as 4,096 at 384 dimensions)."""
_REFINED_AT_ONCE = 16_384
"""Rows refined at a time. Otherwise many ties would need the memory of a full copy."""


@dataclass(frozen=True, slots=True)
class _Quantised:
    """`codes` (2, n, d) int8; `scales` and `errors` (2, n) float32, after the first plane and after both."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    errors: NDArray[np.float32]


def _quantised(vectors: Vectors) -> _Quantised:
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
    return _Quantised(codes, scales, errors)


class _Query:
    """A query in codes (2, d). By plane: the scale, and what the query's quantisation adds to every error."""

    def __init__(self, query: NDArray[np.float32]) -> None:
        coded = _quantised(query[None])
        self.codes = coded.codes[:, 0]
        self.scales = coded.scales[:, 0].astype(np.float64)
        self.errors = coded.errors[:, 0].astype(np.float64) * _WIDER + _ROUNDING
        self.norms = 1 + self.errors


@dataclass(frozen=True, slots=True)
class _Planes:
    """The rows of a view, by plane: codes in blocks, scales and errors."""

    codes: tuple[tuple[NDArray[np.int8], ...], ...]
    scales: tuple[NDArray[np.float32], ...]
    errors: tuple[NDArray[np.float32], ...]
    coarsest: float
    """The greatest error of the first plane."""


class _Int8Ranking:
    """`lower`: per row, a lower bound of the true score from the first plane, without the query's own error; -inf for
    excluded rows. `rows`: their numbers, None: all."""

    def __init__(self, planes: _Planes, query: _Query, lower: NDArray[np.float32], rows: Positions | None) -> None:
        self._planes = planes
        self._query = query
        self._lower = lower
        self._rows = rows

    def best(self, count: int) -> tuple[Positions, float]:
        count = min(count, len(self._lower))
        if not count:
            return np.empty(0, np.int64), -np.inf
        error = float(self._query.errors[0])
        last = min(kth_largest(self._lower, count), _BELOW_ONE)
        if last == -np.inf:
            return self._named(np.flatnonzero(self._lower > -np.inf)), -np.inf
        rows = self._named(self._reaching(last - 2 * error))
        scores, errors = self._refined(rows)
        bound = min(kth_largest(scores - errors, min(count, len(scores))), _BELOW_ONE)
        return rows[scores + errors >= bound], max(last - error, bound)

    def _reaching(self, bound: float) -> Positions:
        """Return the positions of rows whose true score may reach `bound`, without the query's own error."""
        twice = 2 * float(self._query.norms[0])
        places = np.flatnonzero(self._lower >= np.float32(bound - twice * self._planes.coarsest))
        errors = self._planes.errors[0][self._named(places)]
        return places[self._lower[places] + np.float32(twice) * errors >= np.float32(bound)]

    def _named(self, places: Positions) -> Positions:
        return places if self._rows is None else self._rows[places]

    def _refined(self, rows: Positions) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return scores by both planes, and the error bound of each."""
        query, planes = self._query, self._planes
        scores = np.zeros(len(rows))
        for start in range(0, len(rows), _REFINED_AT_ONCE):
            some = rows[start : start + _REFINED_AT_ONCE]
            for codes, scales in zip(planes.codes, planes.scales, strict=True):
                products = query.scales @ _dots(query.codes, take(codes, some))
                scores[start : start + len(some)] += scales[some] * products
        return scores, query.norms[1] * planes.errors[1][rows] + query.errors[1]


class _Int8View:
    def __init__(self, planes: _Planes) -> None:
        self._planes = planes

    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]:
        planes, asked = self._planes, [_Query(query) for query in queries]
        lower = np.empty((len(asked), len(planes.scales[0])), np.float32)
        codes = np.stack([query.codes[0] for query in asked])
        start = 0
        for block in planes.codes[0]:
            # Make few calls: after each, this thread waits for the interpreter lock.
            lower[:, start : start + len(block)] = _dots(codes, block)
            start += len(block)
        for query, row in zip(asked, lower, strict=True):
            _bound_below(query, row, planes.scales[0], planes.errors[0])
        if allowed is not None:
            lower[:, ~allowed] = -np.inf
        return [_Int8Ranking(planes, query, row, None) for query, row in zip(asked, lower, strict=True)]

    def rank_rows(self, query: NDArray[np.float32], rows: Positions) -> Ranking:
        planes, asked, lower = self._planes, _Query(query), np.empty(len(rows), np.float32)
        if len(rows):
            lower[:] = _dots(asked.codes[:1], take(planes.codes[0], rows))[0]
            _bound_below(asked, lower, planes.scales[0][rows], planes.errors[0][rows])
        return _Int8Ranking(planes, asked, lower, rows)


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
        self._codes = Blocks(dimension, np.int8), Blocks(dimension, np.int8)
        self._scales = Column(), Column()
        self._errors = Column(), Column()
        self._coarsest = 0.0

    def append(self, vectors: Vectors) -> None:
        coded = _quantised(vectors)
        for plane in (0, 1):
            self._codes[plane].append(coded.codes[plane])
            self._scales[plane].append(coded.scales[plane])
            self._errors[plane].append(coded.errors[plane])
        self._coarsest = max(self._coarsest, float(coded.errors[0].max(initial=0.0)))

    def kept(self, rows: NDArray[np.bool_]) -> _Int8Copy:
        other = _Int8Copy(self._dimension)
        for plane in (0, 1):
            for some in kept_rows(self._codes[plane].view(), rows):
                other._codes[plane].append(some)
            other._scales[plane].append(self._scales[plane].view()[rows])
            other._errors[plane].append(self._errors[plane].view()[rows])
        other._coarsest = self._coarsest
        return other

    def view(self) -> _Int8View:
        codes = tuple(part.view() for part in self._codes)
        scales, errors = (tuple(part.view() for part in parts) for parts in (self._scales, self._errors))
        return _Int8View(_Planes(codes, scales, errors, self._coarsest))


class Int8Scan:
    """A `VectorScan` by integer products: 2 bytes x dimension + 16 per row. Requires `available`."""

    def copy(self, dimension: int) -> _Int8Copy:
        return _Int8Copy(dimension)


# -------------------------------------------------------------------------------------------------------------- kernels


@cache
def _library() -> Any:
    return import_module("simsimd")


def _dots(queries: NDArray[np.int8], rows: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return products (m, n) on one thread, without the interpreter lock. Integers, rounded above 2**24."""
    # Do not use cdist's `out` argument: it leaks a reference to None (SimSIMD 6.5).
    return np.asarray(_library().cdist(queries, rows, "dot", out_dtype="f32"))


@cache
def available() -> bool:
    """Return whether SimSIMD is installed and its kernel is correct on this processor, including extreme values."""
    try:
        rng = np.random.default_rng(8)
        for dimension in (1, 63, 384, 1024):
            rows = rng.integers(-_LEVELS, _LEVELS + 1, (33, dimension), np.int8)
            rows[0], rows[1] = _LEVELS, -_LEVELS
            queries = rows[:4].copy()
            if not np.array_equal(_dots(queries, rows), queries.astype(np.int32) @ rows.T.astype(np.int32)):
                return False
    except Exception:
        # SimSIMD only adds speed: after any error, the scan without it returns the same hits.
        return False
    return True


def best_scan() -> VectorScan:
    """Return the fastest scan available without a GPU."""
    return Int8Scan() if available() else NumpyScan()
