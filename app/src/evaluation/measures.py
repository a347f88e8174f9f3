"""Measures of one ranking, their means, and the significance of a difference between two searches.

`ranks`: the ranks of the relevant rows found, from 1. `relevant`: the number of relevant rows, at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

HIT_RANKS = (1, 3, 10)
RESAMPLES = 10_000
_SEED = 20_260_101
_BLOCK = 500


def recall(ranks: Iterable[int], relevant: int, k: int) -> float:
    """Return the share of relevant rows among the first `k`. Below 1 where there are more than `k` relevant rows."""
    return sum(rank <= k for rank in ranks) / relevant


def hit(ranks: Iterable[int], k: int) -> float:
    """Return 1 when a relevant row is among the first `k`, else 0 (success@k)."""
    return float(any(rank <= k for rank in ranks))


def reciprocal_rank(ranks: Iterable[int]) -> float:
    """Return 1 / rank of the first relevant row, 0 without any. Its mean is MRR (Voorhees, TREC-8, 1999)."""
    return 1.0 / min(ranks, default=math.inf)


def ndcg(ranks: Iterable[int], relevant: int, k: int) -> float:
    """Return the normalised discounted cumulative gain at `k`: the sum of 1 / log2(rank + 1), over that of the best
    order. Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 2002, with the discount of
    Burges and others, ICML 2005."""
    best = math.fsum(1.0 / math.log2(rank + 1) for rank in range(1, min(relevant, k) + 1))
    return math.fsum(1.0 / math.log2(rank + 1) for rank in ranks if rank <= k) / best


@dataclass(frozen=True, slots=True)
class Figures:
    """The measures of one query, or their means. `recall` and `ndcg` at the requested k."""

    recall: float
    hit_1: float
    hit_3: float
    hit_10: float
    mrr: float
    ndcg: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


MEASURES = tuple(each.name for each in fields(Figures))


def figures(ranks: Sequence[int], relevant: int, k: int) -> Figures:
    """Measure one ranking, which should be max(k, 10) hits deep."""
    first, third, tenth = (hit(ranks, depth) for depth in HIT_RANKS)
    return Figures(recall(ranks, relevant, k), first, third, tenth, reciprocal_rank(ranks), ndcg(ranks, relevant, k))


def mean(each: Iterable[Figures]) -> Figures:
    """Average every measure. Raises ValueError without figures."""
    rows = list(each)
    if not rows:
        raise ValueError("nothing to average")
    return Figures(*(math.fsum(getattr(row, name) for row in rows) / len(rows) for name in MEASURES))


def ranks_by_score(scores: NDArray[np.float32], relevant: Sequence[int]) -> NDArray[np.int64]:
    """Return the ranks of the `relevant` positions, best first. Other rows with an equal score rank first, so that a
    model with the same vector for every text finds nothing."""
    own = np.sort(scores[list(relevant)])[::-1]
    others = np.sort(np.delete(scores, list(relevant)))
    before = len(others) - np.searchsorted(others, own, side="left")
    ranks: NDArray[np.int64] = before + np.arange(1, len(own) + 1)
    return ranks


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two means over the same queries, second minus first, with its 95 % interval `low` to `high`.
    `p` (two-sided): how often a resample centred on no difference is at least as large. Its minimum is the chance that
    all differing queries differ in the same direction."""

    difference: float
    low: float
    high: float
    p: float
    queries: int

    @property
    def significant(self) -> bool:
        return self.p < 0.05

    def as_dict(self) -> dict[str, float | int]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def paired(first: Sequence[float], second: Sequence[float], resamples: int = RESAMPLES) -> Difference:
    """Compare two searches by the paired bootstrap; deterministic. Queries are drawn with replacement, each with both
    its values: Efron and Tibshirani, "An introduction to the bootstrap", 1993, ch. 13 and 16; for search Sakai,
    "Evaluating evaluation metrics based on the bootstrap", SIGIR 2006. Raises ValueError for lists of unequal length,
    or empty."""
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
