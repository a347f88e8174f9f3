"""Score a query vector against a whole column at once, with the column's vectors in matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hana_emulator.registry import Registry
from hana_emulator.sql.functions.builtin import fvecs
from hana_emulator.sql.storage import row_blocks
from hana_emulator.sql.storage.row_versions import Rowids

Scores = NDArray[np.float32]
Vector = NDArray[np.float32]

MOST_BYTES = 1 << 30  # Maximum size of the cached vectors of all columns
_TINY = 1e-25  # For shorter vectors, products of float32 elements lose digits or become 0


class Metric(Enum):
    COSINE_SIMILARITY = "COSINE_SIMILARITY"
    L2DISTANCE = "L2DISTANCE"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A block of vectors of one dimension: `values` (n, d) float32, `norms` (n,) float64, `rowids` (n,) ascending."""

    rowids: Rowids
    values: NDArray[np.float32]
    norms: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Vector]]) -> Matrix:
        values = np.stack([vector for _, vector in rows])
        return cls(np.array([rowid for rowid, _ in rows], np.int64), values, _norms(values))

    @property
    def nbytes(self) -> int:
        return self.rowids.nbytes + self.values.nbytes + self.norms.nbytes

    def rows(self) -> Iterable[tuple[int, Vector]]:
        return zip(self.rowids.tolist(), self.values, strict=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A column's vectors by dimension, and the rows without a vector (ascending)."""

    matrices: Mapping[int, Sequence[Matrix]]
    nulls: Rowids

    @classmethod
    def build(cls, rows: Iterable[tuple[int, bytes | None]]) -> Column:
        """Build from rows in any order. Raises HanaError 8 for bytes that are not a vector."""
        return cls({}, np.zeros(0, np.int64)).changed(frozenset(), rows)

    @property
    def nbytes(self) -> int:
        return self.nulls.nbytes + sum(block.nbytes for blocks in self.matrices.values() for block in blocks)

    def changed(self, rowids: AbstractSet[int], rows: Iterable[tuple[int, bytes | None]]) -> Column:
        nulls: list[int] = []
        new: dict[int, list[tuple[int, Vector]]] = {dimension: [] for dimension in self.matrices}
        for rowid, data in rows:
            if data is None:
                nulls.append(rowid)
            else:
                vector = fvecs.decode(data)
                new.setdefault(vector.size, []).append((rowid, vector))
        matrices = {
            dimension: row_blocks.changed(self.matrices.get(dimension, ()), rowids, vectors, Matrix.of)
            for dimension, vectors in new.items()
        }
        kept = np.setdiff1d(self.nulls, np.fromiter(rowids, np.int64))
        return Column(
            {dimension: blocks for dimension, blocks in matrices.items() if blocks},
            np.union1d(kept, np.array(nulls, np.int64)),
        )

    def scores(self, query: bytes, metric: Metric) -> tuple[Rowids, Scores]:
        """Rowids (ascending) and their scores, never NaN; rows without a vector are omitted.

        Raises HanaError 8 if any row's dimension differs from the query's, even if a filter excludes that row.
        """
        vector = fvecs.decode(query)
        other = next((found for found in self.matrices if found != vector.size), None)
        if other is not None:
            raise fvecs.different_dimensions(other, vector.size)
        blocks = self.matrices.get(vector.size)
        if not blocks:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        return (
            np.concatenate([block.rowids for block in blocks]),
            np.concatenate([_SCORES[metric](block, vector) for block in blocks]),
        )


def _norms(block: NDArray[Any]) -> NDArray[np.float64]:
    """Norms in double precision, because squares of large float32 values overflow."""
    norms: NDArray[np.float64] = np.linalg.norm(block.astype(np.float64), axis=1)
    return norms


_SCORES: Registry[Metric, Callable[[Matrix, Vector], Scores]] = Registry()


@_SCORES(Metric.COSINE_SIMILARITY)
def _cosine(matrix: Matrix, vector: Vector) -> Scores:
    """Cosines; 0 for zero vectors. Recomputed in double precision if float32 overflows or underflows."""
    exact = vector.astype(np.float64)
    norm = float(np.linalg.norm(exact))
    if not norm:
        return np.zeros(len(matrix.rowids), np.float32)
    norms = np.where(matrix.norms > 0, matrix.norms, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        # einsum, because BLAS rounds equal rows differently depending on their place in the block.
        unit = (exact / norm).astype(np.float32)
        dots: NDArray[np.float64] = np.einsum("ij,j->i", matrix.values, unit).astype(np.float64)
    broken = np.flatnonzero(~np.isfinite(dots) | (norms < _TINY))
    dots[broken] = matrix.values[broken].astype(np.float64) @ (exact / norm)
    return np.clip(dots / norms, -1.0, 1.0).astype(np.float32)


@_SCORES(Metric.L2DISTANCE)
def _distance(matrix: Matrix, vector: Vector) -> Scores:
    """Compute from differences: |a|^2 + |b|^2 - 2ab loses all digits for near neighbours."""
    limit = float(np.finfo(np.float32).max)
    return np.minimum(_norms(matrix.values - vector.astype(np.float64)), limit).astype(np.float32)
