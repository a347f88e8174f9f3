"""A model for the emulator's VECTOR_EMBEDDING: `hana-emulator --embedder tests.hana_models:embed`. Texts with common
words are close. It rejects texts with the word poison, and has only zeros for those with the word mute."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIMENSION = 64


def embed(texts: Sequence[str], text_type: str) -> list[NDArray[np.float64]]:
    if any("poison" in text for text in texts):
        raise ValueError("a text with the word poison")
    return [np.zeros(DIMENSION) if "mute" in text else _embed(text, text_type) for text in texts]


def _embed(text: str, text_type: str) -> NDArray[np.float64]:
    """Not of length 1, as vectors of some services are not; queries differ a little from documents."""
    words = [*text.lower().split(), *[text_type] * (text_type == "QUERY")] or [""]
    return 2.0 * np.sum([_direction(word) for word in words], axis=0)


def _direction(word: str) -> NDArray[np.float64]:
    seed = int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).standard_normal(DIMENSION)
