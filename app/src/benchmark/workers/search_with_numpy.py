"""NumPy: one matrix-vector product in fp32 and a partition, which is what a person would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from searching import Find, best, serve


def build(vectors: Any, folder: Path) -> Find:
    return lambda query, k: best(vectors @ query, k)


if __name__ == "__main__":
    serve(("numpy",), build)
