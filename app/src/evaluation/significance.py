"""Is one search better than another, or was it luck? The paired bootstrap over queries. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 10_000
_SEED = 20_260_101
_BLOCK = 500


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two means over the same queries, second minus first. `low`, `high`: 95 % of the resamples lie between them.
    `p`: how often a resample centred on no difference is at least so far off (two-sided), and never less than so many
    queries can show: the chance that all that differ do so in the same direction. A hint, no proof."""

    difference: float
    low: float
    high: float
    p: float
    queries: int

    @property
    def sure(self) -> bool:
        return self.p < 0.05

    def as_dict(self) -> dict[str, float | int]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def paired(first: Sequence[float], second: Sequence[float], resamples: int = RESAMPLES) -> Difference:
    """Queries are drawn with replacement, each with both its values: Efron and Tibshirani, "An introduction to the
    bootstrap", 1993, ch. 13 and 16; for search Sakai, "Evaluating evaluation metrics based on the bootstrap", SIGIR
    2006. The same figures give the same answer. Raises ValueError for lists of unequal length, or empty."""
    if len(first) != len(second) or not len(first):
        raise ValueError(f"{len(first)} and {len(second)} values cannot be paired")
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    random, count = np.random.default_rng(_SEED), len(differences)
    means = np.concatenate(
        [
            differences[random.integers(0, count, (min(_BLOCK, resamples - start), count))].mean(axis=1)
            for start in range(0, resamples, _BLOCK)
        ]
    )
    observed = float(differences.mean())
    low, high = np.percentile(means, [2.5, 97.5])
    far = np.abs(means - observed) >= abs(observed) - 1e-12
    least = min(1.0, 2.0 * 0.5 ** np.count_nonzero(differences))
    return Difference(observed, float(low), float(high), max(float(far.mean()), least), count)
