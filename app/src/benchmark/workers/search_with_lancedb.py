"""LanceDB: its flat, exact search over a table without an index. It chooses its threads itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from searching import Find, serve


def build(vectors: Any, folder: Path) -> Find:
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


if __name__ == "__main__":
    serve(("lancedb", "pyarrow"), build)
