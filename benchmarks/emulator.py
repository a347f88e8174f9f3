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
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hana_emulator", "--data", folder, "--parent-pid", str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
            assert process.stdout is not None
            info = json.loads(process.stdout.readline())
            connection = dbapi.connect(
                address=info["host"],
                port=info["port"],
                user=info["user"],
                password=info["password"],
                autocommit=False,
                reconnect="false",
            )
            try:
                yield connection
            finally:
                connection.close()
                process.terminate()
                process.wait(30)


def per_second(count: int, action: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and extremes of `count` things per second over `repeats` runs."""
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        rates.append(count / (time.perf_counter() - began))
    return {"median": round(statistics.median(rates)), "min": round(min(rates)), "max": round(max(rates))}


def insert(connection: Any, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Into the emptied table, in one transaction."""
    cursor = connection.cursor()
    for start in range(0, len(rows), BATCH):
        cursor.executemany(f'INSERT INTO "{table}" VALUES (?, ?)', rows[start : start + BATCH])
    connection.commit()


def measure_rows(connection: Any, repeats: int) -> dict[str, Any]:
    """(BIGINT, NVARCHAR of 200 characters), in and out."""
    cursor = connection.cursor()
    rows = [(n, f"{n:08}" * 25) for n in range(ROWS)]

    def write() -> None:
        cursor.execute('CREATE COLUMN TABLE "R" (ID BIGINT PRIMARY KEY, S NVARCHAR(200))')
        insert(connection, "R", rows)

    def read() -> None:
        cursor.execute('SELECT ID, S FROM "R"')
        assert len(cursor.fetchall()) == ROWS

    writes = []
    for turn in range(repeats):
        if turn:
            cursor.execute('DROP TABLE "R"')
        writes.append(per_second(ROWS, write, 1)["median"])
    rates = {"median": statistics.median(writes), "min": min(writes), "max": max(writes)}
    return {"insert_rows_per_second": rates, "fetch_rows_per_second": per_second(ROWS, read, repeats)}


def measure_vectors(connection: Any, queries: int) -> dict[str, Any]:
    """REAL_VECTOR(384) as fvecs in; exact top 10 with a bound query vector."""
    cursor = connection.cursor()
    random = np.random.default_rng(7)
    matrix = random.standard_normal((ROWS, DIMENSION), dtype=np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    prefix = DIMENSION.to_bytes(4, "little")
    rows = [(n, prefix + vector.tobytes()) for n, vector in enumerate(matrix)]
    cursor.execute(f'CREATE COLUMN TABLE "V" (ID BIGINT PRIMARY KEY, V REAL_VECTOR({DIMENSION}))')
    rates = per_second(ROWS, lambda: insert(connection, "V", rows), 1)
    sql = 'SELECT TOP ? ID, COSINE_SIMILARITY(V, TO_REAL_VECTOR(?)) AS SCORE FROM "V" ORDER BY SCORE DESC'
    times, right = [], 0
    for wanted in random.integers(ROWS, size=queries + 1):
        began = time.perf_counter()
        cursor.execute(sql, (10, prefix + matrix[wanted].tobytes()))
        found = [row[0] for row in cursor.fetchall()]
        times.append(1000 * (time.perf_counter() - began))
        exact = np.argsort(-(matrix @ matrix[wanted]))[:10]
        right += set(found) == set(exact.tolist())
    return {
        "insert_vectors_per_second": rates,
        "search": {
            "rows": ROWS,
            "dimension": DIMENSION,
            "k": 10,
            "queries": queries,
            "first_ms": round(times[0], 1),
            "p50_ms": round(statistics.median(times[1:]), 1),
            "max_ms": round(max(times[1:]), 1),
            "exact_results": right == queries + 1,
        },
    }


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
        figures = measure_rows(connection, options.repeats) | measure_vectors(connection, options.queries)
    document = {"what": "the stand-in through hdbcli", "targets": TARGETS, **figures, "machine": machine()}
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
