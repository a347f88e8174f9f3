"""Split off held-out pairs, and measure how well a model finds their texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.src.evaluation.measures import ranks_by_score, recall, reciprocal_rank
from app.src.training.pairs import Pair
from connector.errors import ConfigurationError

HELD_OUT = 0.1  # share of the pairs
MOST_HELD_OUT = 1000  # enough for stable figures
LEAST = 20  # pairs; with fewer the figures are meaningless
K = 10
MOST_TEXTS = 20_000  # texts to search: of the held-out pairs first, then of the training pairs
_BLOCK = 256

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts -> unit vectors, in order."""


def split(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs to train on and the held-out ones, by groups that share a text, so that no held-out text occurs
    in the training. Depends on the pairs and the seed, not on their order. Raises ConfigurationError for too few pairs,
    or if nearly all share texts."""
    if len(pairs) < LEAST:
        raise ConfigurationError(f"{len(pairs)} pairs to learn from; at least {LEAST} are needed")
    wanted = min(max(1, round(HELD_OUT * len(pairs))), MOST_HELD_OUT)

    def digest(number: int) -> bytes:
        return hashlib.blake2b("\0".join((str(seed), *pairs[number])).encode(), digest_size=16).digest()

    order = sorted(_groups(pairs), key=lambda group: min(map(digest, group)))
    chosen: set[int] = set()
    for group in order:
        # A larger group would fill most of the held-out part with one text.
        if len(chosen) < wanted and len(group) <= max(1, wanted // 2):
            chosen.update(group)
    training = [pair for number, pair in enumerate(pairs) if number not in chosen]
    if not chosen or not training:
        raise ConfigurationError(
            "the pairs cannot be split into a training part and a held-out part, because nearly all share a text with "
            "each other; add pairs with other queries and texts"
        )
    return training, [pair for number, pair in enumerate(pairs) if number in chosen]


def _groups(pairs: Sequence[Pair]) -> list[list[int]]:
    """Return the indexes of pairs, grouped by shared texts (union-find)."""
    parent = list(range(len(pairs)))

    def root(member: int) -> int:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    first: dict[str, int] = {}
    for number, pair in enumerate(pairs):
        for text in pair:
            parent[root(number)] = root(first.setdefault(text, number))
    groups: dict[int, list[int]] = {}
    for number in range(len(pairs)):
        groups.setdefault(root(number), []).append(number)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over `queries`, searching among `texts`: recall in the first ten, and reciprocal rank of the first relevant
    text."""

    recall_at_10: float
    mrr: float
    queries: int
    texts: int

    def worse_than(self, other: Figures) -> bool:
        """Compare by recall, then by rank."""
        return (self.recall_at_10, self.mrr) < (other.recall_at_10, other.mrr)


@dataclass(frozen=True, slots=True)
class Trial:
    """A search among `texts`. `relevant`: per query, the indexes of its texts."""

    queries: list[str]
    texts: list[str]
    relevant: list[list[int]]

    @classmethod
    def of(cls, held_out: Sequence[Pair], others: Sequence[Pair]) -> Trial:
        """Return the trial of the held-out queries; texts of `others` are searched too, and never relevant."""
        texts: dict[str, int] = {}
        for pair in held_out:
            texts.setdefault(pair.text, len(texts))
        for pair in others:
            if len(texts) >= MOST_TEXTS:
                break
            texts.setdefault(pair.text, len(texts))
        relevant: dict[str, list[int]] = {}
        for pair in held_out:
            relevant.setdefault(pair.query, []).append(texts[pair.text])
        return cls(list(relevant), list(texts), list(relevant.values()))

    def run(self, embed: Embed) -> Figures:
        queries, texts = embed(self.queries), embed(self.texts)
        recalls, reciprocals = [], []
        for start in range(0, len(queries), _BLOCK):
            scores = queries[start : start + _BLOCK] @ texts.T
            for row, relevant in zip(scores, self.relevant[start : start + _BLOCK], strict=True):
                ranks = ranks_by_score(row, relevant).tolist()
                recalls.append(recall(ranks, len(relevant), K))
                reciprocals.append(reciprocal_rank(ranks))
        return Figures(float(np.mean(recalls)), float(np.mean(reciprocals)), len(queries), len(texts))
