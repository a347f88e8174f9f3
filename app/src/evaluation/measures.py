"""The measures of one ranking against the rows that are right, and their means. Pure arithmetic.

`found` says of each hit, best first, whether it is right; `right` how many right rows there are (1 and more).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

HIT_RANKS = (1, 3, 10)


def recall(found: Sequence[bool], right: int, k: int) -> float:
    """The share of the right rows that stand among the first `k`. With more than `k` right rows it cannot reach 1."""
    return sum(found[:k]) / right


def hit(found: Sequence[bool], k: int) -> float:
    """1 when a right row stands among the first `k`, else 0 (success@k)."""
    return float(any(found[:k]))


def reciprocal_rank(found: Sequence[bool]) -> float:
    """1 / rank of the first right row, 0 where there is none. Its mean is MRR (Voorhees, TREC-8, 1999)."""
    return next((1.0 / rank for rank, right in enumerate(found, 1) if right), 0.0)


def ndcg(found: Sequence[bool], right: int, k: int) -> float:
    """Normalised discounted cumulative gain at `k`: the sum of 1 / log2(rank + 1) over the right rows among the first
    `k`, as a share of what the best order would have. Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR
    techniques", TOIS 2002, with the discount of Burges and others, ICML 2005."""
    gained = sum(1.0 / math.log2(rank + 1) for rank, is_right in enumerate(found[:k], 1) if is_right)
    best = sum(1.0 / math.log2(rank + 1) for rank in range(1, min(right, k) + 1))
    return gained / best


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one query, or means over several. `recall` and `ndcg` at the k that was asked for."""

    recall: float
    hit_1: float
    hit_3: float
    hit_10: float
    mrr: float
    ndcg: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


MEASURES = tuple(each.name for each in fields(Figures))


def figures(found: Sequence[bool], right: int, k: int) -> Figures:
    """`found` should be max(k, 10) long, as far as there are so many hits."""
    first, third, tenth = (hit(found, rank) for rank in HIT_RANKS)
    return Figures(recall(found, right, k), first, third, tenth, reciprocal_rank(found), ndcg(found, right, k))


def mean(each: Iterable[Figures]) -> Figures:
    """Raises ValueError for none."""
    rows = list(each)
    if not rows:
        raise ValueError("there is nothing to take a mean of")
    return Figures(*(math.fsum(getattr(row, name) for row in rows) / len(rows) for name in MEASURES))
