"""sqlite-vec: its exact virtual table, in a file. Through apsw: many a Python's sqlite3 loads no extension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from searching import Find, serve


def build(vectors: Any, folder: Path) -> Find:
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


if __name__ == "__main__":
    serve(("sqlite-vec", "apsw"), build)
