"""Compare vectors with reference vectors of the same texts: cosines, shared nearest neighbours, and the accuracy gate
that decides whether a quantised model may serve.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .backends import Vectors

NEIGHBOURS = 10
_TIE = 1e-6  # exact scores closer than this are equal: either neighbour is right
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Agreement:
    """`overlap`: mean share of a text's nearest other texts that are found, too."""

    mean_cosine: float
    least_cosine: float
    overlap: float


def agreement(found: Vectors, exact: Vectors, neighbours: int = NEIGHBOURS) -> Agreement:
    """Compare (n, d) arrays row by row; lengths are ignored. A row that is zero or not finite in either has cosine -1.

    A found neighbour is right if its reference score is at least that of the last true neighbour. With fewer than
    `neighbours` other texts all of them count; with none the overlap is 1.
    """
    ours, theirs = _unit(found), _unit(exact)
    cosines = np.einsum("ij,ij->i", ours, theirs)
    cosines[~(ours.any(1) & theirs.any(1))] = -1.0
    count = min(neighbours, len(ours) - 1)
    shares: list[float] = []
    for start in range(0, len(theirs), _BLOCK) if count > 0 else ():
        rows = np.arange(start, min(start + _BLOCK, len(theirs)))
        own = (np.arange(len(rows)), rows)
        truth, scores = theirs[rows] @ theirs.T, ours[rows] @ ours.T
        truth[own] = scores[own] = -np.inf
        last = np.partition(truth, -count, axis=1)[:, -count] - _TIE
        best = np.argpartition(scores, -count, axis=1)[:, -count:]
        shares += (np.take_along_axis(truth, best, axis=1) >= last[:, None]).mean(axis=1).tolist()
    return Agreement(float(cosines.mean()), float(cosines.min()), float(np.mean(shares)) if shares else 1.0)


def directed(vectors: Vectors) -> NDArray[np.bool_]:
    """Return which rows are finite and not zero."""
    squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
    found: NDArray[np.bool_] = np.isfinite(squares) & (squares > 0)
    return found


def _unit(vectors: Vectors) -> NDArray[np.float64]:
    good = directed(vectors)
    unit: NDArray[np.float64] = np.where(good[:, None], vectors, 0).astype(np.float64)
    unit[good] /= np.linalg.norm(unit[good], axis=1, keepdims=True)
    return unit


LEAST_TEXTS = 32  # with fewer texts a share of neighbours means little


@dataclass(frozen=True, slots=True)
class Bar:
    """Minimum figures of a candidate. `int8_share`: of the linear layers' multiplications in 8 bits; with few, a model
    is not worth its own index."""

    mean_cosine: float = 0.99
    overlap: float = 0.90
    int8_share: float = 0.5
    neighbours: int = NEIGHBOURS


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison. `overlap`: see `Agreement`. `reason`: for people, with every bar that was missed."""

    accepted: bool
    reason: str
    texts: int
    mean_cosine: float | None
    worst_cosine: float | None
    overlap: float | None
    int8_share: float | None
    neighbours: int
    bar: Bar

    def by(self, bar: Bar) -> Verdict:
        """Return the verdict by another bar. Without figures it stays refused."""
        if self.mean_cosine is None or self.worst_cosine is None or self.overlap is None:
            return self
        missed = []
        if self.mean_cosine < bar.mean_cosine:
            missed.append(f"mean cosine {self.mean_cosine:.4f} is below {bar.mean_cosine:g}")
        if self.overlap < bar.overlap:
            missed.append(f"overlap of neighbours {self.overlap:.3f} is below {bar.overlap:g}")
        if self.int8_share is not None and self.int8_share < bar.int8_share:
            missed.append(
                f"only {self.int8_share:.0%} of the linear layers' products are in 8 bits;"
                f" {bar.int8_share:.0%} are required"
            )
        figures = (
            f"cosine to fp32 {self.mean_cosine:.4f} on average, {self.worst_cosine:.4f} at the least,"
            f" {self.overlap:.3f} of the first {self.neighbours}"
        )
        reason = f"accepted: {figures}" if not missed else f"refused: {'; '.join(missed)} ({figures})"
        return replace(self, accepted=not missed, reason=reason, bar=bar)

    @classmethod
    def from_dict(cls, given: dict[str, object]) -> Verdict:
        """Read what `asdict` made."""
        values: dict[str, Any] = dict(given)
        return cls(**values | {"bar": Bar(**values["bar"])})


def judge(exact: Vectors, candidate: Vectors, int8_share: float | None = None, bar: Bar | None = None) -> Verdict:
    """Compare (n, d) arrays of distinct texts row by row. `int8_share` None: not checked.

    Refuses a candidate with any row that is zero or not finite.
    """
    bar = bar or Bar()
    if exact.shape != candidate.shape or exact.ndim != 2:
        raise ValueError(f"vectors must have one shape, not {exact.shape} and {candidate.shape}")
    neighbours = min(bar.neighbours, len(exact) - 1)
    if len(exact) < max(LEAST_TEXTS, bar.neighbours + 1):
        reason = f"refused: {len(exact)} different texts to judge by, at least {LEAST_TEXTS} are needed"
        return Verdict(False, reason, len(exact), None, None, None, int8_share, max(neighbours, 0), bar)
    spoilt = int(np.count_nonzero(~directed(candidate) | ~directed(exact)))
    if spoilt:
        reason = f"refused: {spoilt} of {len(exact)} texts have no finite vector"
        return Verdict(False, reason, len(exact), None, None, None, int8_share, neighbours, bar)
    near = agreement(candidate, exact, neighbours)
    figures = (near.mean_cosine, near.least_cosine, near.overlap)
    return Verdict(False, "", len(exact), *figures, int8_share, neighbours, bar).by(bar)
