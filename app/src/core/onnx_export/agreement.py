"""How near vectors are to exact ones of the same texts, by their directions and by which neighbours they find. What
chooses layers and what judges the outcome ask here, so that both mean the same. Knows vectors only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..backends import Vectors

NEIGHBOURS = 10
_TIE = 1e-6
"""Exact scores nearer than this are one score: of two equally good neighbours either may be found."""
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Agreement:
    """`overlap`: the mean share of the nearest other texts that are found too, each text asking."""

    mean_cosine: float
    least_cosine: float
    overlap: float


def agreement(found: Vectors, exact: Vectors, neighbours: int = NEIGHBOURS) -> Agreement:
    """Both (n, d), row i for text i, of any length. A row that is not finite, or all zero, in either has cosine -1.
    Where there are fewer others than `neighbours`, all of them count; without any the overlap is 1."""
    ours, theirs = _unit(found), _unit(exact)
    cosines = np.einsum("ij,ij->i", ours, theirs)
    cosines[~(ours.any(1) & theirs.any(1))] = -1.0
    count = min(neighbours, len(ours) - 1)
    overlap = float(np.mean(list(_shares(ours, theirs, count)))) if count > 0 else 1.0
    return Agreement(float(cosines.mean()), float(cosines.min()), overlap)


def directed(vectors: Vectors) -> NDArray[np.bool_]:
    """Which rows are finite and not zero."""
    squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
    found: NDArray[np.bool_] = np.isfinite(squares) & (squares > 0)
    return found


def _unit(vectors: Vectors) -> NDArray[np.float64]:
    good = directed(vectors)
    unit: NDArray[np.float64] = np.where(good[:, None], vectors, 0).astype(np.float64)
    unit[good] /= np.linalg.norm(unit[good], axis=1, keepdims=True)
    return unit


def _shares(found: NDArray[np.float64], exact: NDArray[np.float64], count: int) -> Iterator[float]:
    """For each text, the share of the neighbours found that are no farther, by the exact vectors, than the last of the
    true ones."""
    for start in range(0, len(exact), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(exact)))
        own = (np.arange(len(rows)), rows)
        truth, scores = exact[rows] @ exact.T, found[rows] @ found.T
        truth[own] = scores[own] = -np.inf
        last = np.partition(truth, -count, axis=1)[:, -count] - _TIE
        best = np.argpartition(scores, -count, axis=1)[:, -count:]
        yield from (np.take_along_axis(truth, best, axis=1) >= last[:, None]).mean(axis=1)
