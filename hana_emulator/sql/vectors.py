"""Scores of a query vector against a whole column at once, over matrices cached for all sessions. Knows no SQL.

A matrix is valid for one version token of its table; who changes rows must come with another token.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hana_emulator.sql.builtin import fvecs

Key = tuple[str, str]
"""(table, column), in whatever spelling the caller uses throughout."""
Load = Callable[[], Iterable[tuple[int, bytes | None]]]
"""Reads (rowid, fvecs bytes or None) of every row; called only when the cache has no matrix of that version."""
Rowids = NDArray[np.int64]
Scores = NDArray[np.float32]

DEFAULT_BYTES = 1 << 30
_BLOCK_ROWS = 8_192
_TINY = 1e-25
"""Below this length products of float32 elements lose digits, or vanish."""


class Metric(Enum):
    """The two functions that HANA's clients search with."""

    COSINE_SIMILARITY = "COSINE_SIMILARITY"
    L2DISTANCE = "L2DISTANCE"


@dataclass(slots=True)
class Matrix:
    """The vectors of one dimension: `values` (n, d) float32, `norms` (n,) float64, `rowids` (n,) ascending."""

    rowids: Rowids
    values: NDArray[np.float32]
    norms: NDArray[np.float64]

    @property
    def nbytes(self) -> int:
        return self.rowids.nbytes + self.values.nbytes + self.norms.nbytes


@dataclass(slots=True)
class Column:
    """A column's vectors by dimension, and the rows that have none (ascending)."""

    version: Hashable
    matrices: dict[int, Matrix]
    nulls: Rowids

    @property
    def nbytes(self) -> int:
        return self.nulls.nbytes + sum(matrix.nbytes for matrix in self.matrices.values())

    def matrix(self, dimension: int) -> Matrix | None:
        """The matrix to score a query of that dimension against; None when no row has a vector. Raises 8 when rows of
        another dimension exist, as the scalar function would at such a row."""
        other = next((found for found in self.matrices if found != dimension), None)
        if other is not None:
            raise fvecs.different_dimensions(other, dimension)
        return self.matrices.get(dimension)


class VectorCache:
    """Thread-safe. Keeps the matrices used last, up to `max_bytes` together; a larger one is used but not kept."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self._columns: OrderedDict[Key, Column] = OrderedDict()
        self._lock = threading.Lock()
        self._builders: dict[Key, threading.Lock] = {}

    def scores(self, key: Key, version: Hashable, load: Load, query: bytes, metric: Metric) -> tuple[Rowids, Scores]:
        """Rowids (ascending) and their scores; rows without a vector are left out. Never NaN.

        Raises 8 when any row of the column has another dimension than the query, whether a filter keeps it or not.
        """
        return _scores(self.column(key, version, load), query, metric)

    def column(self, key: Key, version: Hashable, load: Load) -> Column:
        """The vectors of `key` at `version`, from the cache or loaded; only one thread loads a key at a time."""
        with self._builder(key):
            found = self._cached(key, version)
            if found is None:
                found = build(version, load())
                self._keep(key, found)
        return found

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(column.nbytes for column in self._columns.values())

    def _builder(self, key: Key) -> threading.Lock:
        with self._lock:
            return self._builders.setdefault(key, threading.Lock())

    def _cached(self, key: Key, version: Hashable) -> Column | None:
        with self._lock:
            found = self._columns.get(key)
            if found is None or found.version != version:
                return None
            self._columns.move_to_end(key)
            return found

    def _keep(self, key: Key, column: Column) -> None:
        with self._lock:
            self._columns.pop(key, None)
            if column.nbytes > self.max_bytes:
                return
            self._columns[key] = column
            while sum(kept.nbytes for kept in self._columns.values()) > self.max_bytes:
                self._columns.popitem(last=False)


def build(version: Hashable, rows: Iterable[tuple[int, bytes | None]]) -> Column:
    """A column's matrices from its rows, in any order. Raises 8 for bytes that are no vector."""
    nulls: list[int] = []
    by_length: dict[int, tuple[list[int], list[bytes]]] = {}
    for rowid, data in rows:
        if data is None:
            nulls.append(rowid)
            continue
        rowids, pieces = by_length.setdefault(len(data), ([], []))
        rowids.append(rowid)
        pieces.append(data)
    matrices = dict(_matrix(length, *by_length.pop(length)) for length in list(by_length))
    return Column(version, matrices, np.sort(np.asarray(nulls, np.int64)))


def _matrix(length: int, rowids: list[int], pieces: list[bytes]) -> tuple[int, Matrix]:
    dimension = fvecs.decode(pieces[0]).size
    width = (length - 4) // dimension
    raw = np.frombuffer(b"".join(pieces), np.uint8).reshape(len(pieces), length)
    if (raw[:, :4] != raw[0, :4]).any():
        raise fvecs.bad_vector("not the binary form of a vector (little-endian dimension, then that many floats)")
    values = np.ascontiguousarray(raw[:, 4:]).view(f"<f{width}").astype(np.float32, copy=False)
    order, found = np.asarray(rowids, np.int64), values
    if (np.diff(order) < 0).any():
        sorting = np.argsort(order)
        order, found = order[sorting], values[sorting]
    return dimension, Matrix(order, found, _norms(found))


def _norms(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """In double precision: squares of large float32 values overflow. Block by block, to spare memory."""
    return np.concatenate([_block_norms(values[start : start + _BLOCK_ROWS]) for start in _starts(len(values))])


def _starts(count: int) -> range:
    return range(0, count, _BLOCK_ROWS)


def _block_norms(block: NDArray[Any]) -> NDArray[np.float64]:
    norms: NDArray[np.float64] = np.linalg.norm(block.astype(np.float64), axis=1)
    return norms


def _scores(column: Column, query: bytes, metric: Metric) -> tuple[Rowids, Scores]:
    vector = fvecs.decode(query)
    matrix = column.matrix(vector.size)
    if matrix is None:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    compute = _cosine if metric is Metric.COSINE_SIMILARITY else _distance
    return matrix.rowids, compute(matrix, vector)


def _cosine(matrix: Matrix, vector: NDArray[np.float32]) -> Scores:
    """0 where either side is a zero vector; where float32 overflows or underflows, once more in double precision."""
    exact = vector.astype(np.float64)
    norm = float(np.linalg.norm(exact))
    if not norm:
        return np.zeros(len(matrix.rowids), np.float32)
    norms = np.where(matrix.norms > 0, matrix.norms, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        dots = (matrix.values @ (exact / norm).astype(np.float32)).astype(np.float64)
    broken = np.flatnonzero(~np.isfinite(dots) | (norms < _TINY))
    dots[broken] = matrix.values[broken].astype(np.float64) @ (exact / norm)
    return np.clip(dots / norms, -1.0, 1.0).astype(np.float32)


def _distance(matrix: Matrix, vector: NDArray[np.float32]) -> Scores:
    """Differences, not |a|^2 + |b|^2 - 2ab: that loses all digits of near neighbours."""
    exact = vector.astype(np.float64)
    blocks = [_block_norms(matrix.values[start : start + _BLOCK_ROWS] - exact) for start in _starts(len(matrix.rowids))]
    limit = float(np.finfo(np.float32).max)
    return np.minimum(np.concatenate(blocks), limit).astype(np.float32)
