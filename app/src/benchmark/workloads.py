"""Workloads, reproducible by seed: SAP-like texts, rows of materials, and vectors that cluster like those of real
texts.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from connector.model import Vectors

_NOUNS = (
    *("hydraulic pump", "ball valve", "shaft seal", "roller bearing", "gear box", "oil filter", "pressure sensor"),
    *("hexagon bolt", "gasket", "conveyor belt", "electric motor", "housing", "cable gland", "compressor", "coupling"),
)
_PHRASES = (
    *("stainless steel", "DIN 933", "M8x20", "leaks at the flange", "makes noise under load", "was replaced"),
    *("customer complaint", "delivery late", "vibration above limit", "checked by maintenance", "plant 1000"),
    *("order blocked", "temperature rises", "as per drawing", "spare part missing", "next inspection in May"),
    *("cleaned and greased", "see notification", "80 bar", "galvanised", "for the export market", "damaged in transit"),
)
_TOKENS_PER_PHRASE = 3.6
TOPICS, GROUPS = 64, 24  # vectors lie in groups of different sizes, 24 groups per topic


def sap_like_texts(rng: random.Random, count: int, mean: float, spread: float, limits: tuple[int, int]) -> list[str]:
    """Return material texts and notifications whose lengths in tokens are log-normal (`mean`, `spread` of the
    logarithm) within `limits`."""
    least, most = limits
    texts = []
    for _ in range(count):
        tokens = min(most, max(least, int(rng.lognormvariate(mean, spread))))
        more = max(0, round(tokens / _TOKENS_PER_PHRASE) - 2)
        phrases = [rng.choice(_NOUNS), *(rng.choice(_PHRASES) for _ in range(more))]
        texts.append(f"{', '.join(phrases)} {rng.randrange(10**5)}")
    return texts


def texts(scale: float = 1.0, seed: int = 11) -> dict[str, list[str]]:
    """Return `short`, 800 texts of 5 to 40 tokens, `skewed`, 200 of 10 to 250, and `long`, 60 of 180 to 250, all
    multiplied by `scale`. Another seed gives other texts of the same kinds."""
    rng = random.Random(seed)
    short = sap_like_texts(rng, max(1, round(800 * scale)), 2.8, 0.5, (5, 40))
    skewed = sap_like_texts(rng, max(1, round(200 * scale)), 4.0, 0.8, (10, 250))
    long = sap_like_texts(rng, max(1, round(60 * scale)), 5.3, 0.15, (180, 250))
    return {"short": short, "skewed": skewed, "long": long}


def material(number: int) -> tuple[str, str, str, str, str, str, str]:
    """Return MANDT, MATNR, MAKTX, LTEXT, MTART, MATKL and CHANGED_AT of a material: about 20 tokens, few duplicate
    texts."""
    rng = random.Random(number)
    return (
        "100",
        f"{number:018}",
        f"{rng.choice(_NOUNS)} {rng.randrange(10**4)}",
        ", ".join(rng.choice(_PHRASES) for _ in range(4)),
        rng.choice(("FERT", "HALB", "ROH")),
        f"{number % 97:03}",
        f"2026-01-01 00:00:00.{number % 10**6:06}",
    )


def material_text(number: int) -> str:
    """Return a material's text as `sync.TEMPLATE` renders it."""
    _, _, name, more, *_ = material(number)
    return f"{name}. {more}"


def clustered(dimension: int, *rows: int) -> list[Vectors]:
    """Return one array of unit vectors per number in `rows`, all around the same centres. As with vectors of texts,
    many are close together and most are orthogonal to the rest."""
    rng = np.random.default_rng(7)
    # Some directions matter more than others, as in every trained model.
    spread = (1.0 / np.sqrt(1.0 + 0.02 * np.arange(dimension))).astype(np.float32)

    def around(centres: Vectors, width: float) -> Vectors:
        noise: Vectors = rng.standard_normal(centres.shape, dtype=np.float32) * spread
        noise *= np.float32(width)
        noise += centres
        return noise

    topics = around(np.zeros((TOPICS, dimension), np.float32), 1.0)
    centres = around(np.repeat(topics, GROUPS, axis=0), 0.7)
    sizes = 1.0 / np.arange(1, len(centres) + 1) ** 0.8
    shares = rng.permutation(sizes / sizes.sum())
    found = [around(centres[rng.choice(len(centres), size=count, p=shares)], 1.2) for count in rows]
    for each in found:
        each /= np.linalg.norm(each, axis=1, keepdims=True)
    return found


def exact_best(vectors: Vectors, queries: Vectors, k: int) -> NDArray[np.int64]:
    """Return the positions of each query's exact `k` best vectors, by dot products in double precision."""
    found = []
    for query in queries:
        near = np.argpartition(vectors @ query, -min(4 * k, len(vectors)))[-min(4 * k, len(vectors)) :]
        scores = vectors[near].astype(np.float64) @ query.astype(np.float64)
        found.append(near[np.argsort(-scores, kind="stable")[:k]])
    return np.stack(found)


def overlap(found: NDArray[np.int64], expected: NDArray[np.int64]) -> float:
    """Return the mean share of `expected` in `found`, ignoring order."""
    shares = [len(set(a.tolist()) & set(b.tolist())) / len(b) for a, b in zip(found, expected, strict=True)]
    return float(np.mean(shares))
