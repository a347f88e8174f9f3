"""Rankings made of rankings: reciprocal rank fusion, and a choice of hits that are relevant and differ from each other;
and how alike two rankings are. Pure: knows hits and vectors, no store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from connector.model import Hit

RANK_CONSTANT = 60
"""Cormack, Clarke and Buettcher, "Reciprocal rank fusion outperforms Condorcet and individual rank learning methods",
SIGIR 2009."""


def fuse(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """All hits of `rankings` (best first, each document once in each) by the sum of 1 / (60 + rank), rank from 1; ties
    by id. The sum is the hit's score: at most 1/61 for each ranking. Of a document found by several, the chunk that
    ranks highest is shown, that of the earlier ranking when they rank alike.
    """
    scores: dict[str, float] = {}
    shown: dict[str, tuple[int, Hit]] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, start=1):
            scores[hit.id] = scores.get(hit.id, 0.0) + 1.0 / (RANK_CONSTANT + rank)
            if hit.id not in shown or rank < shown[hit.id][0]:
                shown[hit.id] = rank, hit
    fused = [replace(hit, score=scores[id_]) for id_, (_, hit) in shown.items()]
    return sorted(fused, key=lambda hit: (-hit.score, hit.id))


def mmr(relevance: NDArray[np.float64], vectors: NDArray[np.float32], k: int, balance: float) -> list[int]:
    """Places of up to `k` candidates in the order chosen: each time the one with the greatest
    balance * relevance - (1 - balance) * (its greatest cosine with one already chosen); the first by relevance alone,
    ties by place. Carbonell and Goldstein, "The use of MMR", SIGIR 1998.

    `relevance` (n,) should lie in cosine's range; `vectors` (n, d) of any length, zeros being similar to nothing;
    `balance` from 0 (only different) to 1 (only relevant). Takes k * n * d multiplications.
    """
    count = len(relevance)
    if not count or k < 1:
        return []
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros(vectors.shape), where=lengths > 0)
    free = np.ones(count, dtype=np.bool_)
    nearest = np.full(count, -np.inf)
    chosen = [int(np.argmax(relevance))]
    while len(chosen) < min(k, count):
        free[chosen[-1]] = False
        nearest = np.maximum(nearest, unit @ unit[chosen[-1]])
        value = balance * relevance - (1.0 - balance) * nearest
        chosen.append(int(np.argmax(np.where(free, value, -np.inf))))
    return chosen


PERSISTENCE = 0.9
"""Of rank-biased overlap: how likely a reader is to look at the next rank. The first ten ranks then have 86 % of it."""


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """The share of two rankings' ids that both have, from 0 to 1; 1 for two empty ones."""
    longest = max(len(first), len(second))
    return len(set(first) & set(second)) / longest if longest else 1.0


def rank_biased_overlap(first: Sequence[str], second: Sequence[str], persistence: float = PERSISTENCE) -> float:
    """From 0 (nothing in common) to 1 (the same ids in the same order); upper ranks count more. Extrapolated from the
    depth that there is: Webber, Moffat and Zobel, "A similarity measure for indefinite rankings", TOIS 2010, eq. 32.
    """
    depth = max(len(first), len(second))
    if not depth:
        return 1.0
    total, agreement = 0.0, 0.0
    for rank in range(1, depth + 1):
        agreement = len(set(first[:rank]) & set(second[:rank])) / rank
        total += agreement * persistence**rank
    return agreement * persistence**depth + (1 - persistence) / persistence * total
