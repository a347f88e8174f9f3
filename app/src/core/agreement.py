"""Compare vectors with reference vectors of the same texts: cosines, shared nearest neighbours, and the accuracy gate
that decides whether a quantised model may serve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .backends import Vectors

NEIGHBOURS = 10
_TIE = 1e-6  # exact scores closer than this count as equal: either neighbour is right
_BLOCK = 512


def agreement(found: Vectors, exact: Vectors) -> tuple[float, float, float]:
    """Compare (n, d) arrays row by row, ignoring vector lengths. Return the mean cosine, the least cosine, and the mean
    share of a text's nearest neighbours in `exact` that are also its nearest in `found`. A row that is zero or not
    finite in either array has cosine -1.

    A found neighbour is right if its reference score is at least that of the last true neighbour. With fewer than
    NEIGHBOURS other texts, all of them are neighbours; for a single text the share is 1.
    """

    def unit(vectors: Vectors) -> NDArray[np.float64]:
        good = usable(vectors)
        rows: NDArray[np.float64] = np.where(good[:, None], vectors, 0).astype(np.float64)
        rows[good] /= np.linalg.norm(rows[good], axis=1, keepdims=True)
        return rows

    ours, theirs = unit(found), unit(exact)
    cosines = np.einsum("ij,ij->i", ours, theirs)
    cosines[~(ours.any(1) & theirs.any(1))] = -1.0
    count = min(NEIGHBOURS, len(ours) - 1)
    shares: list[float] = []
    for start in range(0, len(theirs), _BLOCK) if count > 0 else ():
        rows = np.arange(start, min(start + _BLOCK, len(theirs)))
        own = (np.arange(len(rows)), rows)
        truth, scores = theirs[rows] @ theirs.T, ours[rows] @ ours.T
        truth[own] = scores[own] = -np.inf
        last = np.partition(truth, -count, axis=1)[:, -count] - _TIE
        best = np.argpartition(scores, -count, axis=1)[:, -count:]
        shares += (np.take_along_axis(truth, best, axis=1) >= last[:, None]).mean(axis=1).tolist()
    return float(cosines.mean()), float(cosines.min()), float(np.mean(shares)) if shares else 1.0


def squares(vectors: Vectors) -> NDArray[np.float64]:
    """Return squared lengths in float64, where no finite float32 row overflows."""
    found: NDArray[np.float64] = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
    return found


def usable(vectors: Vectors) -> NDArray[np.bool_]:
    """Return which rows are finite and not zero, so that they can be normalised."""
    with np.errstate(all="ignore"):
        short = np.einsum("ij,ij->i", vectors, vectors)  # six times as fast as in float64
    found: NDArray[np.bool_] = np.isfinite(short) & (short > 0)
    unsure = np.flatnonzero(~found)  # the squares may have overflowed, or vanished
    exact = squares(vectors[unsure])
    found[unsure] = np.isfinite(exact) & (exact > 0)
    return found


# The accuracy gate of a quantised model, measured on held-out texts.
LEAST_TEXTS = 32  # with fewer texts a share of neighbours means little
LEAST_COSINE = 0.99  # on average, to fp32
LEAST_SINGLE = 0.95  # of each text
LEAST_OVERLAP = 0.93  # share of fp32's nearest neighbours that are found too


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison. `overlap`: see `agreement`. `reason`: a sentence with every threshold missed."""

    accepted: bool
    reason: str
    texts: int
    mean_cosine: float | None = None
    worst_cosine: float | None = None
    overlap: float | None = None


def judge(exact: Vectors, candidate: Vectors) -> Verdict:
    """Compare (n, d) arrays of distinct texts row by row. Refuses any row that is zero or not finite."""
    if exact.shape != candidate.shape or exact.ndim != 2:
        raise ValueError(f"vectors must have one shape, not {exact.shape} and {candidate.shape}")
    texts = len(exact)
    if texts < LEAST_TEXTS:
        return Verdict(False, f"refused: {texts} different texts, at least {LEAST_TEXTS} are needed to judge", texts)
    spoilt = int(np.count_nonzero(~usable(candidate) | ~usable(exact)))
    if spoilt:
        return Verdict(False, f"refused: {spoilt} of {texts} texts have no finite vector", texts)
    mean, least, overlap = agreement(candidate, exact)
    missed = []
    if mean < LEAST_COSINE:
        missed.append(f"mean cosine {mean:.4f} is below {LEAST_COSINE:g}")
    if least < LEAST_SINGLE:
        missed.append(f"least cosine {least:.4f} is below {LEAST_SINGLE:g}")
    if overlap < LEAST_OVERLAP:
        missed.append(f"overlap of neighbours {overlap:.3f} is below {LEAST_OVERLAP:g}")
    figures = f"cosine to fp32 {mean:.4f} on average, {least:.4f} at the least, {overlap:.3f} of the first {NEIGHBOURS}"
    reason = f"refused: {'; '.join(missed)} ({figures})" if missed else f"accepted: {figures}"
    return Verdict(not missed, reason, texts, mean, least, overlap)
