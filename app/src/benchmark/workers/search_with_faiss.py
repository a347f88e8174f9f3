"""faiss: its exact index over inner products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from searching import Find, serve


def build(vectors: Any, folder: Path) -> Find:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return lambda query, k: index.search(query[None], k)[1][0]


if __name__ == "__main__":
    serve(("faiss-cpu", "numpy"), build)
