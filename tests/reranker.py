"""A reranker of an operator's own, for tests."""

from __future__ import annotations

from collections.abc import Sequence


def scores(query: str, texts: Sequence[str]) -> list[float]:
    """The share of the query's words that a text holds."""
    words = query.lower().split()
    return [sum(word in text.lower().split() for word in words) / max(len(words), 1) for text in texts]
