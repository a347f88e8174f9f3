"""Ranges of activations for 8 bits: the greatest magnitude, a percentile, or the cut whose 8-bit distribution diverges
least from the observed one (Kullback and Leibler). Magnitudes only: TensorRT's ranges are symmetric around zero.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Algorithm = Literal["minmax", "entropy", "percentile"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
# As `[tensorrt] algorithm`: what is calibrated without naming one is what serves without naming one
# (docs/decisions/0020).
DEFAULT: Algorithm = "minmax"

# At least half of them are in use, however the range has grown: 2,048, as NVIDIA's calibrator has.
BINS = 4096
LEVELS = 128  # magnitudes of signed 8 bits
PERCENTILE = 99.99
_STRIDE = 8  # every so many bins a cut is tried
_LEAST = 1e-12  # range of numbers that are all zero


class Histogram:
    """Counts of magnitudes. When a number exceeds the range, the range doubles and neighbouring bins are merged, so no
    count is lost and all bins keep one width."""

    def __init__(self, bins: int = BINS) -> None:
        if bins < 2 or bins % 2:
            raise ValueError("the number of bins must be even")
        self.counts: NDArray[np.int64] = np.zeros(bins, np.int64)
        self.greatest = 0.0
        self._limit = 0.0
        self._zeros = 0

    @property
    def width(self) -> float:
        """Of a bin."""
        return self._limit / len(self.counts)

    @property
    def total(self) -> int:
        return int(self.counts.sum()) + self._zeros

    def add(self, numbers: NDArray[Any]) -> None:
        """Raises ValueError for numbers that are not finite."""
        sizes = np.abs(np.asarray(numbers), dtype=np.float32).ravel()
        if not sizes.size:
            return
        greatest = float(sizes.max())
        if not np.isfinite(greatest):
            raise ValueError("activations are not finite")
        if greatest < _LEAST and not self._limit:
            self._zeros += sizes.size
            return
        self._reach(greatest)
        places = (sizes * np.float32(len(self.counts) / self._limit)).astype(np.int32)
        np.minimum(places, len(self.counts) - 1, out=places)
        self.counts += np.bincount(places, minlength=len(self.counts))

    def _reach(self, greatest: float) -> None:
        if not self._limit:
            self._limit = greatest
            self.counts[0] += self._zeros
            self._zeros = 0
        while self._limit < greatest:
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate([pairs, np.zeros_like(pairs)])
            self._limit *= 2.0
        self.greatest = max(self.greatest, greatest)


def threshold(seen: Histogram, algorithm: Algorithm) -> float:
    """Return the magnitude, above 0, that the outermost 8-bit number represents. Raises ValueError when nothing was
    counted, and for an unknown algorithm."""
    if not seen.total:
        raise ValueError("nothing was seen to calibrate on")
    if seen.greatest < _LEAST:
        return _LEAST
    match algorithm:
        case "minmax":
            return seen.greatest
        case "percentile":
            return percentile(seen)
        case "entropy":
            return entropy(seen)
        case _:
            raise ValueError(f"unknown algorithm {algorithm!r}; use {', '.join(ALGORITHMS)}")


def percentile(seen: Histogram, share: float = PERCENTILE) -> float:
    """Return the magnitude below which `share` per cent lie, interpolated within a bin."""
    if not 0.0 < share <= 100.0:
        raise ValueError("a percentile must be above 0 and at most 100")
    upto = np.cumsum(seen.counts)
    wanted = share / 100.0 * float(upto[-1])
    at = int(np.searchsorted(upto, wanted))
    before = float(upto[at - 1]) if at else 0.0
    inside = (wanted - before) / float(seen.counts[at])
    return float(min(seen.greatest, (at + inside) * seen.width))


def entropy(seen: Histogram, levels: int = LEVELS) -> float:
    """Return the cut with the least divergence; of equal ones the largest, so that nothing is cut without need."""
    used = int(np.flatnonzero(seen.counts)[-1]) + 1
    if used <= levels:
        return seen.greatest
    counts = seen.counts[:used].astype(np.float64)
    cuts = [*range(levels, used, _STRIDE), used]
    divergences = np.array([divergence(counts, cut, levels) for cut in cuts])
    best = len(cuts) - 1 - int(np.argmin(divergences[::-1]))
    return float(min(seen.greatest, cuts[best] * seen.width))


def divergence(counts: NDArray[np.float64], cut: int, levels: int) -> float:
    """Return the divergence between the observed counts, clipped at bin `cut`, and the same bins quantised to `levels`
    even levels, each level's counts spread over its non-empty bins. Infinite where a non-empty bin becomes empty."""
    inside = counts[:cut]
    seen = inside.copy()
    seen[-1] += counts[cut:].sum()
    starts = np.arange(levels) * cut // levels
    filled = seen > 0
    of_level = np.add.reduceat(inside, starts) / np.maximum(np.add.reduceat(filled.astype(np.float64), starts), 1.0)
    quantised = np.repeat(of_level, np.diff([*starts, cut]))[filled]
    truth = seen[filled]
    if not quantised.all():
        return float("inf")
    truth, quantised = truth / truth.sum(), quantised / quantised.sum()
    return float(np.sum(truth * np.log(truth / quantised)))
