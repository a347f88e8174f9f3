"""Which texts are computed together: windows of a call, and batches of a window, by tokens. Knows numbers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

WINDOW_TEXTS = 8192
WINDOW_CHARACTERS = 1 << 20
"""Texts are tokenised, sorted and planned window by window: long enough for even batches, short enough to overlap."""


def plan_batches(lengths: Sequence[int], budget: int, multiple: int = 8, *, packed: bool = False) -> list[list[int]]:
    """Positions of `lengths` in batches of similar length, longest first.

    A batch costs its longest length, rounded up to `multiple`, times its size; where batches are `packed`, the sum of
    its lengths. That is within `budget`, unless a single text alone is above it. Every position stands in exactly one
    batch.
    """
    order = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    batches: list[list[int]] = []
    used = width = 0
    for position in order:
        own = max(1, lengths[position]) if packed else padded(lengths[position], multiple)
        more = own if packed else width
        if batches and used + more <= budget:
            batches[-1].append(position)
            used += more
        else:
            batches.append([position])
            used = width = own
    return batches


def padded(length: int, multiple: int) -> int:
    return max(1, -(-length // multiple)) * multiple


def windows_of(texts: Sequence[str]) -> Iterator[list[int]]:
    """Positions of `texts` in order, cut where a window has enough texts or characters."""
    window: list[int] = []
    characters = 0
    for position, text in enumerate(texts):
        window.append(position)
        characters += len(text)
        if len(window) >= WINDOW_TEXTS or characters >= WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window
