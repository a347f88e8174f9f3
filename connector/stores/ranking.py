"""Rankings: hybrid scores from cosines and word coverage, maximal marginal relevance, groups of alike rows, the overlap
of two rankings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.model import Hit
from connector.stores.coverage import parts_of
from connector.stores.records import best_per_document

# The score gained by a row with all words of the search text, and the exponent of its share: half the words give an
# eighth. Tuned on one half of benchmarks/queries (docs/search.md).
WORDS_WEIGHT, WORDS_POWER = 0.5, 3.0
FEWEST_ROWS = 100  # with fewer rows, the backdrop cannot be separated from the content
# Closeness is this share of the cosine, and for the rest the cosine without the backdrop.
COSINE_SHARE, HUBNESS = 0.5, 0.3
# Rows are alike if they share this part of their words, numbers apart; less suffices if their vectors without the
# backdrop have this cosine. Of the demo's rows, no pair about different things shares 0.7 of its words; with three
# models, the two lower bounds together join one wrong pair.
ALIKE_WORDS, ALIKE_WORDS_NEAR, ALIKE_NEAR = 0.8, 0.5, 0.6


def units(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return the rows (n, d) scaled to length 1; zeros for rows without a direction."""
    rows = vectors.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    usable = np.isfinite(lengths) & (lengths > 1e-9)
    unit: NDArray[np.float64] = np.divide(rows, lengths, out=np.zeros_like(rows), where=usable)
    return unit


@dataclass(frozen=True, slots=True)
class Backdrop:
    """The common part of a collection's vectors: their mean, and the direction of greatest variance, which reflects
    language and kind of row rather than the subject. Mu and Viswanath, "All-but-the-top", ICLR 2018.
    """

    mean: NDArray[np.float64]
    direction: NDArray[np.float64]

    @classmethod
    def of(cls, vectors: NDArray[np.floating[Any]]) -> Backdrop | None:
        """Return the backdrop of a sample (n, d); None for fewer than FEWEST_ROWS or equal rows. Costs n * d * d."""
        if len(vectors) < FEWEST_ROWS:
            return None
        rows = vectors.astype(np.float64)
        mean = rows.mean(axis=0)
        values, directions = np.linalg.eigh((rows - mean).T @ (rows - mean))
        return cls(mean, directions[:, -1]) if values[-1] > 1e-9 else None

    def without(self, vectors: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return each row (n, d) without the backdrop, as unit vectors; zeros if nothing remains."""
        rest = np.asarray(vectors, np.float64) - self.mean
        rest -= np.outer(rest @ self.direction, self.direction)
        return units(rest)


def closeness(
    queries: NDArray[np.floating[Any]], vectors: NDArray[np.floating[Any]], backdrop: Backdrop | None
) -> NDArray[np.float64]:
    """Return the closeness (n, m) of unit vectors (n, d) to unit queries (m, d): the cosine; with a backdrop the
    weighted mean of the cosines with and without it."""
    rows, asked = vectors.astype(np.float64), queries.astype(np.float64)
    close: NDArray[np.float64] = rows @ asked.T
    if backdrop is not None:
        without = backdrop.without(rows) @ backdrop.without(asked).T
        close = COSINE_SHARE * close + (1 - COSINE_SHARE) * without
    return close


def without_hubs(close: NDArray[np.float64], unrelated: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the closeness (n, m), less HUBNESS times each row's mean closeness (n, u) to unrelated queries: some rows
    ("hubs") are close to every query. Radovanović, Nanopoulos and Ivanović, "Hubs in space", JMLR 2010."""
    corrected: NDArray[np.float64] = close - HUBNESS * unrelated.mean(axis=1, keepdims=True)
    return corrected


def blend(
    candidates: Sequence[Hit], close: Sequence[float] | NDArray[np.float64], covered: Sequence[float]
) -> list[Hit]:
    """Return each document once, by its best chunk. The score is closeness + WORDS_WEIGHT * coverage ** WORDS_POWER;
    ties by id, then by chunk. Unlike ranks, a sum of scores keeps distances: Bruch, Gai and Ingber, "An analysis of
    fusion functions for hybrid retrieval", TOIS 2023."""
    scored = [
        replace(hit, score=float(near) + WORDS_WEIGHT * share**WORDS_POWER)
        for hit, near, share in zip(candidates, close, covered, strict=True)
    ]
    return best_per_document(scored, len(scored))


def mmr(relevance: NDArray[np.float64], vectors: NDArray[np.float32], k: int, balance: float) -> list[int]:
    """Return the positions of up to `k` candidates in the order chosen. Each step picks the greatest balance *
    relevance - (1 - balance) * (greatest cosine with a chosen one). The first is by relevance alone; ties by position.
    Carbonell and Goldstein, "The use of MMR", SIGIR 1998.

    `relevance` (n,) should be in cosine's range. `vectors` (n, d) may have any length; zeros are similar to nothing.
    `balance`: 0 (only different) to 1 (only relevant). Costs k * n * d multiplications.
    """
    count = len(relevance)
    if not count or k < 1:
        return []
    unit = units(vectors)
    free = np.ones(count, dtype=np.bool_)
    nearest = np.full(count, -np.inf)
    chosen = [int(np.argmax(relevance))]
    while len(chosen) < min(k, count):
        free[chosen[-1]] = False
        nearest = np.maximum(nearest, unit @ unit[chosen[-1]])
        value = balance * relevance - (1.0 - balance) * nearest
        chosen.append(int(np.argmax(np.where(free, value, -np.inf))))
    return chosen


def groups(
    texts: Sequence[str], vectors: NDArray[np.floating[Any]], backdrop: Backdrop | None, most: int
) -> list[list[int]]:
    """Return the positions of alike rows, grouped by the first of each group in the given order, at most `most` groups.
    `vectors` (n, d) as stored. Compares each row with the groups that share a word with it."""
    words = [frozenset(word for word in parts_of(text) if not any(map(str.isdigit, word))) for text in texts]
    rest = None if backdrop is None else backdrop.without(units(vectors))
    found: list[list[int]] = []
    holding: dict[str, list[int]] = {}  # word -> the groups whose first row has it
    for place, mine in enumerate(words):
        shared = Counter(chain.from_iterable(holding.get(word, ()) for word in mine))
        for group, both in sorted(shared.items()):
            first = found[group][0]
            share = both / (len(mine) + len(words[first]) - both)
            near = share >= ALIKE_WORDS_NEAR and rest is not None and rest[place] @ rest[first] >= ALIKE_NEAR
            if near or share >= ALIKE_WORDS:
                found[group].append(place)
                break
        else:
            if len(found) < most:
                for word in mine:
                    holding.setdefault(word, []).append(len(found))
                found.append([place])
    return found


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Return the share of ids common to two rankings, from 0 to 1; 1 if both are empty."""
    longest = max(len(first), len(second))
    return len(set(first) & set(second)) / longest if longest else 1.0
