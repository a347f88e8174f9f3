"""Which pairs are held out to see what a training was good for: whole groups of pairs that share a text, by a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from app.src.training.pairs import Pair
from connector.errors import ConfigurationError

HELD_OUT = 0.1
"""Share of the pairs."""
MOST_HELD_OUT = 1000
"""Pairs: the figures are steady enough with these."""
LEAST = 20
"""Pairs to begin with at all; of fewer, neither side tells anything."""


@dataclass(frozen=True, slots=True)
class Split:
    training: list[Pair]
    held_out: list[Pair]


def split(pairs: Sequence[Pair], seed: int) -> Split:
    """No text of a held-out pair is met in the training, neither as query nor as answer. Depends on the pairs and the
    seed alone, not on their order. Raises ConfigurationError when there are too few, or all hang together."""
    if len(pairs) < LEAST:
        raise ConfigurationError(f"there are {len(pairs)} pairs to learn from; at least {LEAST} are needed")
    wanted = min(max(1, round(HELD_OUT * len(pairs))), MOST_HELD_OUT)
    groups = _groups(pairs)
    salt = str(seed).encode()
    order = sorted(groups, key=lambda group: min(_digest(salt, pairs[member]) for member in group))
    chosen: set[int] = set()
    for group in order:
        # Larger groups would make most of the held-out part one and the same text.
        if len(chosen) < wanted and len(group) <= max(1, wanted // 2):
            chosen.update(group)
    training = [pair for number, pair in enumerate(pairs) if number not in chosen]
    if not chosen or not training:
        raise ConfigurationError(
            "the pairs cannot be split into some to learn from and some to measure by, because nearly all share a "
            "text with one another: more different queries and texts are needed"
        )
    return Split(training, [pair for number, pair in enumerate(pairs) if number in chosen])


def _digest(salt: bytes, pair: Pair) -> bytes:
    whole = hashlib.blake2b(salt, digest_size=16)
    for text in pair:
        whole.update(b"\0" + text.encode())
    return whole.digest()


def _groups(pairs: Sequence[Pair]) -> list[list[int]]:
    """Numbers of the pairs that hang together by shared texts."""
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
