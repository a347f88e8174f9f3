"""How well texts are found by the queries that belong to them: recall@10 and mean reciprocal rank. Knows vectors only
through the function that makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from app.src.training.pairs import Pair

K = 10
MOST_TEXTS = 20_000
"""Texts that are searched: those of the held-out pairs, filled up with texts of the training."""
_BLOCK = 256

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts to unit vectors, in order."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over `queries`, searching among `texts`. `recall_at_10`: share of a query's texts among its first ten.
    `mrr`: 1 / rank of the first of them. What scores the same as a text that is sought counts as ranked before it, so
    that a model which gives one vector for everything finds nothing."""

    recall_at_10: float
    mrr: float
    queries: int
    texts: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)

    def worse_than(self, other: Figures) -> bool:
        """By recall; where that is equal, by rank."""
        return (self.recall_at_10, self.mrr) < (other.recall_at_10, other.mrr)


@dataclass(frozen=True, slots=True)
class Trial:
    """What is asked, and what is searched. `sought`: of each query the places of its texts in `texts`."""

    queries: list[str]
    texts: list[str]
    sought: list[list[int]]

    @classmethod
    def of(cls, held_out: Sequence[Pair], others: Sequence[Pair]) -> Trial:
        """`others`: pairs whose texts are searched too, and sought by nobody."""
        answers = (pair.text for pair in held_out)
        distractors = (pair.text for pair in others)
        texts: dict[str, int] = {}
        for text in answers:
            texts.setdefault(text, len(texts))
        for text in distractors:
            if len(texts) >= MOST_TEXTS:
                break
            texts.setdefault(text, len(texts))
        sought: dict[str, list[int]] = {}
        for pair in held_out:
            sought.setdefault(pair.query, []).append(texts[pair.text])
        return cls(list(sought), list(texts), list(sought.values()))

    def run(self, embed: Embed) -> Figures:
        queries, texts = embed(self.queries), embed(self.texts)
        recalls, ranks = [], []
        for start in range(0, len(queries), _BLOCK):
            scores = queries[start : start + _BLOCK] @ texts.T
            for row, sought in zip(scores, self.sought[start : start + _BLOCK], strict=True):
                found = ranks_of(row, sought)
                recalls.append(float(np.mean(found <= K)))
                ranks.append(1.0 / float(found.min()))
        return Figures(float(np.mean(recalls)), float(np.mean(ranks)), len(queries), len(texts))


def ranks_of(scores: NDArray[np.float32], sought: Sequence[int]) -> NDArray[np.int64]:
    """Of each text that is sought its rank from 1: among themselves as they score, behind everything else that scores
    as high or higher."""
    own = np.sort(scores[list(sought)])[::-1]
    others = np.sort(np.delete(scores, list(sought)))
    before = len(others) - np.searchsorted(others, own, side="left")
    ranks: NDArray[np.int64] = before + np.arange(1, len(own) + 1)
    return ranks
