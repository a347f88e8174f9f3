"""Split off held-out pairs, and measure how well a model finds their texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.src.core.backends import InputType
from app.src.evaluation.measures import figures, mean, ranks_by_score
from app.src.training.pairs import Pair
from connector.errors import ConfigurationError

HELD_OUT = 0.1  # share of the pairs
MOST_HELD_OUT = 1000  # enough for stable figures
LEAST = 20  # pairs; with fewer the figures are meaningless
K = 10
MOST_TEXTS = 20_000  # texts to search: those of held-out pairs first, then those of training pairs
_BLOCK = 256

# Texts, queries or documents -> unit vectors, in order.
Embed = Callable[[Sequence[str], InputType], NDArray[np.float32]]


def split(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return the training pairs and the held-out pairs. Pairs that share a text stay together, so that no held-out text
    occurs in the training. Depends on the pairs and the seed, not on the pairs' order. Raises ConfigurationError for
    too few pairs, or if nearly all share texts."""
    if len(pairs) < LEAST:
        raise ConfigurationError(f"{len(pairs)} pairs to learn from; at least {LEAST} are needed")
    wanted = min(max(1, round(HELD_OUT * len(pairs))), MOST_HELD_OUT)
    parent = list(range(len(pairs)))  # union-find

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

    def digest(number: int) -> bytes:
        return hashlib.blake2b("\0".join((str(seed), *pairs[number])).encode(), digest_size=16).digest()

    chosen: set[int] = set()
    for group in sorted(groups.values(), key=lambda group: min(map(digest, group))):
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


def measured(held_out: Sequence[Pair], others: Sequence[Pair], embed: Embed) -> dict[str, Any]:
    """Search the texts of all pairs for each held-out query. Return the means `recall_at_10` and `mrr` (reciprocal rank
    of the first relevant text), and the counts `queries` and `texts`. Texts of `others` are never relevant."""
    places: dict[str, int] = {}
    for pair in (*held_out, *others):
        if len(places) < MOST_TEXTS:
            places.setdefault(pair.text, len(places))
    relevant: dict[str, list[int]] = {}
    for pair in held_out:
        relevant.setdefault(pair.query, []).append(places[pair.text])
    queries, texts = embed(list(relevant), "query"), embed(list(places), "document")
    each = []
    for start in range(0, len(queries), _BLOCK):
        scores = queries[start : start + _BLOCK] @ texts.T
        for row, sought in zip(scores, list(relevant.values())[start : start + _BLOCK], strict=True):
            each.append(figures(ranks_by_score(row, sought).tolist(), len(sought), K))
    found = mean(each)
    return {"recall_at_10": found["recall"], "mrr": found["mrr"], "queries": len(queries), "texts": len(texts)}
