"""Workers that search vectors exactly, one per library. Each takes unit vectors, then searches one query at a time,
on one thread where the library allows it. Run in the peer's environment as `searching.py NAME`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # one thread per query for all libraries; read when NumPy is imported

import numpy as np  # noqa: E402
from answering import ENGINES, answer, engine, timed  # noqa: E402

# A query (d,) and k -> positions of the rows, best first.
Find = Callable[[Any, int], Any]


def serve(packages: Sequence[str], index: Callable[[Any, Path], Find]) -> None:
    """Answer the measuring process: build an index once, then search it for files of queries."""
    find: Find

    def build(vectors: str, folder: str) -> dict[str, Any]:
        nonlocal find
        find, took = timed(lambda: index(np.load(vectors), Path(folder)))
        return {"build_seconds": took["seconds"]}

    def search(queries: str, k: int, out: str) -> dict[str, Any]:
        """Return the milliseconds of each query, and its CPU milliseconds summed over all threads."""
        found, times = zip(*(timed(lambda: find(query, k)) for query in np.load(queries)), strict=True)  # noqa: B023
        np.save(out, np.stack([np.asarray(rows, dtype=np.int64) for rows in found]))
        return {
            "milliseconds": [1000 * took["seconds"] for took in times],
            "cpu_milliseconds": [1000 * took["cpu_seconds"] for took in times],
        }

    answer(packages, build=build, search=search)


def best(scores: Any, k: int) -> Any:
    """Return the positions of the `k` largest scores, best first."""
    some = np.argpartition(scores, len(scores) - k)[len(scores) - k :] if k < len(scores) else np.arange(len(scores))
    return some[np.argsort(-scores[some])]


@engine("sqlite-vec", "sqlite-vec", "apsw")
def in_sqlite(vectors: Any, folder: Path) -> Find:
    """Search sqlite-vec's exact virtual table in a file through apsw; Python's sqlite3 often cannot load extensions."""
    import apsw
    import sqlite_vec

    db = apsw.Connection(str(folder / "vectors.db"))
    db.enable_load_extension(True)
    db.load_extension(sqlite_vec.loadable_path())
    db.execute(f"CREATE VIRTUAL TABLE rows USING vec0(vector float[{vectors.shape[1]}])")
    with db:
        db.executemany("INSERT INTO rows(rowid, vector) VALUES (?, ?)", enumerate(row.tobytes() for row in vectors))
    sql = "SELECT rowid FROM rows WHERE vector MATCH ? AND k = ? ORDER BY distance"
    return lambda query, k: [row for (row,) in db.execute(sql, (query.tobytes(), k))]


@engine("usearch", "usearch", "numpy")
def in_usearch(vectors: Any, folder: Path) -> Find:
    """Scan int8 copies exactly and rerank the best hundred in fp32: usearch's fastest method with nearly full
    recall."""
    from usearch.index import MetricKind, search

    def int8(rows: Any) -> Any:
        """Scale each vector to the full range. Cosines do not depend on the scale."""
        largest = np.abs(rows).max(axis=-1, keepdims=True)
        return np.rint(rows * (127 / np.maximum(largest, 1e-12))).astype(np.int8)

    small = int8(vectors)

    def find(query: Any, k: int) -> Any:
        found = search(small, int8(query), max(k, 100), MetricKind.Cos, exact=True, threads=1)
        rows = np.asarray(found.keys, dtype=np.int64)
        return rows[best(vectors[rows] @ query, k)]

    return find


@engine("lancedb", "lancedb", "pyarrow")
def in_lancedb(vectors: Any, folder: Path) -> Find:
    """Search by an exact scan over a table without an index. LanceDB chooses its number of threads."""
    import lancedb
    import pyarrow as pa

    width = vectors.shape[1]
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), width)
    rows = pa.table({"row": pa.array(range(len(vectors)), pa.int64()), "vector": column})
    table = lancedb.connect(str(folder / "lance")).create_table("rows", rows)

    def find(query: Any, k: int) -> Any:
        found = table.search(query).distance_type("dot").select(["row"]).limit(k).to_arrow()
        return found["row"].to_numpy()

    return find


@engine("faiss", "faiss-cpu", "numpy")
def in_faiss(vectors: Any, folder: Path) -> Find:
    """Search an exact index by inner product."""
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return lambda query, k: index.search(query[None], k)[1][0]


@engine("numpy", "numpy")
def numpy_product(vectors: Any, folder: Path) -> Find:
    """Search by one matrix-vector product in fp32 and a partition."""
    return lambda query, k: best(vectors @ query, k)


if __name__ == "__main__":
    serve(*ENGINES[sys.argv[-1]])
