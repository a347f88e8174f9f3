"""How fast is the stand-in for HANA through the real hdbcli? Rows out, rows in, vectors in, exact search.

`python benchmarks/emulator.py [--out FILE]` prints one JSON document. The server runs as a child process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from hdbcli import dbapi

ROOT = Path(__file__).resolve().parents[1]
ROWS = 100_000
DIMENSION = 384
BATCH = 10_000
TARGETS = {
    "fetch_rows_per_second": 100_000,
    "insert_rows_per_second": 50_000,
    "insert_vectors_per_second": 50_000,
    "search_p50_ms": 60,
}


@contextmanager
def emulator() -> Iterator[Any]:
    """A connection to a fresh stand-in with an empty data folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hana_emulator", "--data", folder, "--parent-pid", str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            info = json.loads(process.stdout.readline())
            login: dict[str, Any] = {key: info[key] for key in ("port", "user", "password")} | {"reconnect": "false"}
            connection = dbapi.connect(address=info["host"], autocommit=False, **login)
            try:
                yield connection
            finally:
                connection.close()
                process.terminate()
                process.wait(30)


def per_second(
    action: Callable[[], object], repeats: int, prepare: Callable[[], object] | None = None
) -> dict[str, int]:
    """Median and extremes of ROWS things per second over `repeats` runs; `prepare` runs before each, untimed."""
    rates = []
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        began = time.perf_counter()
        action()
        rates.append(ROWS / (time.perf_counter() - began))
    return {"median": round(statistics.median(rates)), "min": round(min(rates)), "max": round(max(rates))}


def insert(connection: Any, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """By `executemany`, in one transaction."""
    cursor = connection.cursor()
    for start in range(0, len(rows), BATCH):
        cursor.executemany(sql, rows[start : start + BATCH])
    connection.commit()


def emptied(connection: Any, sql: str) -> None:
    connection.cursor().execute(sql)
    connection.commit()


def measure_rows(connection: Any, repeats: int) -> dict[str, Any]:
    """(BIGINT, NVARCHAR of 200 characters), in and out."""
    cursor = connection.cursor()
    cursor.execute('CREATE COLUMN TABLE "R" (ID BIGINT PRIMARY KEY, S NVARCHAR(200))')
    rows = [(n, f"{n:08}" * 25) for n in range(ROWS)]

    def read() -> None:
        cursor.execute('SELECT ID, S FROM "R"')
        assert len(cursor.fetchall()) == ROWS

    sql = 'INSERT INTO "R" VALUES (?, ?)'
    inserts = per_second(lambda: insert(connection, sql, rows), repeats, lambda: emptied(connection, 'DELETE FROM "R"'))
    return {"insert_rows_per_second": inserts, "fetch_rows_per_second": per_second(read, repeats)}


def unit_vectors() -> np.ndarray[Any, np.dtype[np.float32]]:
    random = np.random.default_rng(7)
    matrix = random.standard_normal((ROWS, DIMENSION), dtype=np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix


def measure_vectors(connection: Any, repeats: int, queries: int) -> dict[str, Any]:
    """REAL_VECTOR(384) as fvecs in; exact top 10 with a bound query vector."""
    matrix = unit_vectors()
    prefix = DIMENSION.to_bytes(4, "little")
    rows = [(n, prefix + vector.tobytes()) for n, vector in enumerate(matrix)]
    connection.cursor().execute(f'CREATE COLUMN TABLE "V" (ID BIGINT PRIMARY KEY, V REAL_VECTOR({DIMENSION}))')
    sql = 'INSERT INTO "V" VALUES (?, ?)'
    rates = per_second(lambda: insert(connection, sql, rows), repeats, lambda: emptied(connection, 'DELETE FROM "V"'))
    return {"insert_vectors_per_second": rates, "search": measure_search(connection, matrix, prefix, queries)}


def measure_search(
    connection: Any, matrix: np.ndarray[Any, np.dtype[np.float32]], prefix: bytes, queries: int
) -> dict[str, Any]:
    """Times of the first query (it fills the cache) and of `queries` more; every result is checked."""
    cursor = connection.cursor()
    sql = 'SELECT TOP ? ID, COSINE_SIMILARITY(V, TO_REAL_VECTOR(?)) AS SCORE FROM "V" ORDER BY SCORE DESC'
    times, right = [], 0
    for wanted in range(0, ROWS, ROWS // (queries + 1))[: queries + 1]:
        began = time.perf_counter()
        cursor.execute(sql, (10, prefix + matrix[wanted].tobytes()))
        found = {row[0] for row in cursor.fetchall()}
        times.append(1000 * (time.perf_counter() - began))
        right += found == set(np.argsort(-(matrix @ matrix[wanted]))[:10].tolist())
    return {
        "rows": ROWS,
        "dimension": DIMENSION,
        "k": 10,
        "queries": queries,
        "first_ms": round(times[0], 1),
        "p50_ms": round(statistics.median(times[1:]), 1),
        "max_ms": round(max(times[1:]), 1),
        "exact_results": right == queries + 1,
    }


def commit() -> str | None:
    """The commit measured, None outside git."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip() or None if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{name: version(name) for name in ("hdbcli", "numpy", "sqlglot")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the document to this file too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--queries", type=int, default=20)
    options = parser.parse_args()
    with emulator() as connection:
        figures = measure_rows(connection, options.repeats) | measure_vectors(
            connection, options.repeats, options.queries
        )
    document = {
        "what": "the stand-in through hdbcli",
        "commit": commit(),
        "targets": TARGETS,
        **figures,
        "machine": machine(),
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
