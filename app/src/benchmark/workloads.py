"""What is measured on: texts like those of SAP tables, rows of materials, and vectors that lie together as those of
real texts do. The same for the same seed; nothing is read from anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.model import Vectors

_NOUNS = (
    *("hydraulic pump", "ball valve", "shaft seal", "roller bearing", "gear box", "oil filter", "pressure sensor"),
    *("hexagon bolt", "gasket", "conveyor belt", "electric motor", "housing", "cable gland", "compressor", "coupling"),
)
_REST = (
    *("stainless steel", "DIN 933", "M8x20", "leaks at the flange", "makes noise under load", "was replaced"),
    *("customer complaint", "delivery late", "vibration above limit", "checked by maintenance", "plant 1000"),
    *("order blocked", "temperature rises", "as per drawing", "spare part missing", "next inspection in May"),
    *("cleaned and greased", "see notification", "80 bar", "galvanised", "for the export market", "damaged in transit"),
)
_TOKENS_A_PHRASE = 3.6
_TOPICS, _GROUPS = 64, 24
"""Vectors lie in groups of unlike sizes, groups in topics."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    texts: list[str]


def sap_like(rng: random.Random, tokens: int) -> str:
    """A material text or notification of about so many tokens."""
    phrases = [rng.choice(_NOUNS), *(rng.choice(_REST) for _ in range(max(0, round(tokens / _TOKENS_A_PHRASE) - 2)))]
    return f"{', '.join(phrases)} {rng.randrange(10**5)}"


def texts(scale: float = 1.0, seed: int = 11) -> list[Workload]:
    """`short`: 800 of 5 to 40 tokens; `skewed`: 200 of 10 to 250; times `scale`."""
    rng = random.Random(seed)
    short = [
        sap_like(rng, min(40, max(5, int(rng.lognormvariate(2.8, 0.5))))) for _ in range(max(1, round(800 * scale)))
    ]
    skewed = [
        sap_like(rng, min(250, max(10, int(rng.lognormvariate(4.0, 0.8))))) for _ in range(max(1, round(200 * scale)))
    ]
    return [Workload("short", short), Workload("skewed", skewed)]


def material(number: int) -> tuple[str, str, str, str, str]:
    """MANDT, MATNR, MAKTX, LTEXT and MTART of a material: about 20 tokens of text, few of them alike."""
    rng = random.Random(number)
    words = ", ".join(rng.choice(_REST) for _ in range(4))
    return (
        "100",
        f"{number:018}",
        f"{rng.choice(_NOUNS)} {rng.randrange(10**4)}",
        words,
        rng.choice(("FERT", "HALB", "ROH")),
    )


class Clusters:
    """Unit vectors around centres, as those of texts: many near each other, most at right angles to the rest."""

    def __init__(self, dimension: int, seed: int = 7) -> None:
        self._rng = np.random.default_rng(seed)
        self._dimension = dimension
        # Some directions matter more than others, as in every trained model.
        self._spread = (1.0 / np.sqrt(1.0 + 0.02 * np.arange(dimension))).astype(np.float32)
        topics = self._around(np.zeros((_TOPICS, dimension), np.float32), 1.0)
        self._centres = self._around(np.repeat(topics, _GROUPS, axis=0), 0.7)
        sizes = 1.0 / np.arange(1, len(self._centres) + 1) ** 0.8
        self._shares = self._rng.permutation(sizes / sizes.sum())

    def _around(self, centres: Vectors, width: float) -> Vectors:
        noise: Vectors = self._rng.standard_normal(centres.shape, dtype=np.float32) * self._spread
        noise *= np.float32(width)
        noise += centres
        return noise

    def draw(self, rows: int) -> Vectors:
        chosen = self._rng.choice(len(self._centres), size=rows, p=self._shares)
        found: Vectors = self._around(self._centres[chosen], 1.2)
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        return found

    def blocks(self, rows: int, size: int = 10_000) -> Iterator[Vectors]:
        for start in range(0, rows, size):
            yield self.draw(min(size, rows - start))


def exact_best(vectors: Vectors, queries: Vectors, k: int) -> NDArray[np.int64]:
    """Positions of the true `k` best of each query, by products in double precision."""
    found = []
    for query in queries:
        near = np.argpartition(vectors @ query, -min(4 * k, len(vectors)))[-min(4 * k, len(vectors)) :]
        scores = vectors[near].astype(np.float64) @ query.astype(np.float64)
        found.append(near[np.argsort(-scores, kind="stable")[:k]])
    return np.stack(found)


def overlap(found: NDArray[np.int64], wanted: NDArray[np.int64]) -> float:
    """Mean share of `wanted` that was found, whatever the order."""
    shares = [len(set(a.tolist()) & set(b.tolist())) / len(b) for a, b in zip(found, wanted, strict=True)]
    return float(np.mean(shares))
