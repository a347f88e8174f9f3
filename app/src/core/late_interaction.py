"""Late interaction: how well each word of a query finds its like in a text, by the vectors that the embedding model
gives the tokens of both. Knows an engine; no store, no search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .backends import Vectors
from .engine import EmbeddingEngine


def late_interaction(engine: EmbeddingEngine, query: str, texts: Sequence[str]) -> list[float]:
    """Of each text, from -1 to 1: for every token of the query the greatest cosine with a token of the text, and of
    these the mean. The scoring of ColBERT (Khattab and Zaharia, SIGIR 2020), with a model that was trained for one
    vector a text and not for this; so special tokens, which ColBERT trains, take no part. Costs one pass of the model
    over query and texts. Raises as `EmbeddingEngine.token_vectors`.
    """
    if not texts:
        return []
    asked, *held = engine.token_vectors([query, *texts])
    return max_similarity(asked, held)


def max_similarity(asked: Vectors, held: Sequence[Vectors]) -> list[float]:
    """`asked` (q, d) against each of `held` (n, d), n > 0; a vector of zeros is like nothing."""
    starts = np.cumsum([0, *(len(each) for each in held[:-1])])
    cosines = _unit(np.concatenate(held)) @ _unit(asked).T
    best: list[float] = np.maximum.reduceat(cosines, starts, axis=0).mean(axis=1, dtype=np.float64).tolist()
    return best


def _unit(vectors: Vectors) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return unit
