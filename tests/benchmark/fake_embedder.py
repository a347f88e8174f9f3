"""A worker for tests, run by the worker protocol: vectors without a model, as long as its name says
(hash:N)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from embedding import Encode, serve


def load(model: str, device: str, threads: int, cache: Path) -> tuple[Encode, tuple[str, ...], dict[str, Any]]:
    print("libraries print to stdout")
    if not model.startswith("hash:"):
        raise ValueError(f"no model {model}")
    dimension = int(model.removeprefix("hash:"))

    def encode(texts: list[str], setting: Any) -> Any:
        rows = []
        for text in texts:
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
            rows.append(np.random.default_rng(seed).standard_normal(dimension))
        vectors = np.array(rows)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return encode, ("slow", "fast"), {"precision": "fp64"}


if __name__ == "__main__":
    serve(("numpy",), load)
