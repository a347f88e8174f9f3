"""Measures of one ranking, their means, and the significance of a difference between two searches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

HIT_RANKS = (1, 3, 10)
MEASURES = ("recall", "hit_1", "hit_3", "hit_10", "mrr", "ndcg")
RESAMPLES = 10_000
_BLOCK = 500


def figures(ranks: Sequence[int], relevant: int, k: int) -> dict[str, float]:
    """Measure one ranking, which should be max(k, 10) hits deep. `ranks`: ranks of the relevant rows found,
    from 1. `relevant`: the number of relevant rows, at least 1.

    `recall`: share of the relevant rows among the first `k`. `hit_N`: 1 if a relevant row is among the first N, else 0.
    `mrr`: 1 / rank of the first, 0 for none; the mean is MRR (Voorhees, TREC-8, 1999). `ndcg`: the sum of
    1 / log2(rank + 1) up to `k`, divided by the sum for the best order; Järvelin and Kekäläinen, "Cumulated gain-based
    evaluation of IR techniques", TOIS 2002, with the discount of Burges and others, ICML 2005.
    """

    def gain(some: Iterable[int]) -> float:
        return math.fsum(1.0 / math.log2(rank + 1) for rank in some if rank <= k)

    first = min(ranks, default=math.inf)
    return {
        "recall": sum(rank <= k for rank in ranks) / relevant,
        **{f"hit_{depth}": float(first <= depth) for depth in HIT_RANKS},
        "mrr": 1.0 / first,
        "ndcg": gain(ranks) / gain(range(1, relevant + 1)),
    }


def mean(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Average every measure."""
    rows = list(each)
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in MEASURES}


def ranks_by_score(scores: NDArray[np.float32], relevant: Sequence[int]) -> NDArray[np.int64]:
    """Return the ranks of the `relevant` positions, best first. Other rows with an equal score rank first, so that a
    model with the same vector for every text finds nothing."""
    own = np.sort(scores[list(relevant)])[::-1]
    others = np.sort(np.delete(scores, list(relevant)))
    before = len(others) - np.searchsorted(others, own, side="left")
    ranks: NDArray[np.int64] = before + np.arange(1, len(own) + 1)
    return ranks


def paired(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Compare two searches by the paired bootstrap; deterministic. Return the `difference` of the means over the same
    queries, second minus first, its 95 % interval `low` to `high`, `p`, and the number of `queries`.

    Queries are drawn with replacement, each with both its values: Efron and Tibshirani, "An introduction to the
    bootstrap", 1993, ch. 13 and 16; for search Sakai, "Evaluating evaluation metrics based on the bootstrap", SIGIR
    2006. `p` (two-sided): share of resamples, centred on zero, with a difference at least as large as the observed
    one; its minimum is the chance that all differing queries differ in the same direction. Raises ValueError for lists
    of unequal length, or empty.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"{len(first)} and {len(second)} values cannot be paired")
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    random, count = np.random.default_rng(20_260_101), len(differences)
    blocks = [random.integers(0, count, (_BLOCK, count)) for _ in range(RESAMPLES // _BLOCK)]
    means = np.concatenate([differences[block].mean(axis=1) for block in blocks])
    observed = float(differences.mean())
    low, high = np.percentile(means, [2.5, 97.5])
    far = np.abs(means - observed) >= abs(observed) - 1e-12
    least = min(1.0, 2.0 * 0.5 ** np.count_nonzero(differences))
    found = {"difference": observed, "low": low, "high": high, "p": max(far.mean(), least)}
    return {name: round(float(value), 4) for name, value in found.items()} | {"queries": count}
