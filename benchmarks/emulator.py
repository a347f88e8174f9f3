"""How fast is the HANA emulator through the real hdbcli?

    python benchmarks/emulator.py [PART ...] [--rounds 5] [--queries 20] [--out benchmarks/results/emulator.json]

    rows       100,000 rows of a number and 200 characters     >= 50,000 a second in, >= 100,000 a second out
    vectors    100,000 vectors of 384 numbers                  >= 50,000 a second in
               exact search of the ten best, checked           p50 <= 60 ms

The server is a child process of its own for each part. What hdbcli itself costs is in every figure.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hdbcli import dbapi

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark.harness import (  # noqa: E402  # noqa: E402
    Figure,
    Part,
    Report,
    at_least,
    at_most,
    machine,
    main,
)
from app.src.benchmark.processes import MaterialsInEmulator  # noqa: E402

ROWS = 100_000
DIMENSION = 384
BATCH = 10_000


@contextmanager
def emulator() -> Iterator[Any]:
    """Connect to a fresh emulator with an empty data folder."""
    with tempfile.TemporaryDirectory() as folder, MaterialsInEmulator(Path(folder)) as started:
        login = {name: started.login[name] for name in ("port", "user", "password")} | {"reconnect": "false"}
        with closing(dbapi.connect(address=started.login["host"], autocommit=False, **login)) as connection:
            yield connection


def per_second(
    name: str, target: float, action: Callable[[], object], repeats: int, prepare: Callable[[], object] | None = None
) -> Figure:
    """Measure ROWS things per second over `repeats` runs; `prepare` runs before each, untimed."""
    rates = []
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        began = time.perf_counter()
        action()
        rates.append(ROWS / (time.perf_counter() - began))
    return Figure(name, rates, "rows/s", at_least(target))


def insert(connection: Any, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """By `executemany`, in one transaction."""
    cursor = connection.cursor()
    for start in range(0, len(rows), BATCH):
        cursor.executemany(sql, rows[start : start + BATCH])
    connection.commit()


def emptied(connection: Any, sql: str) -> None:
    connection.cursor().execute(sql)
    connection.commit()


def rows_in_and_out(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """(BIGINT, NVARCHAR of 200 characters), in and out."""
    with emulator() as connection:
        cursor = connection.cursor()
        cursor.execute('CREATE COLUMN TABLE "R" (ID BIGINT PRIMARY KEY, S NVARCHAR(200))')
        rows = [(n, f"{n:08}" * 25) for n in range(ROWS)]

        def read() -> None:
            cursor.execute('SELECT ID, S FROM "R"')
            assert len(cursor.fetchall()) == ROWS

        def write() -> None:
            insert(connection, 'INSERT INTO "R" VALUES (?, ?)', rows)

        yield per_second("rows in", 50_000, write, given.rounds, lambda: emptied(connection, 'DELETE FROM "R"'))
        yield per_second("rows out", 100_000, read, given.rounds)


def unit_vectors() -> np.ndarray[Any, np.dtype[np.float32]]:
    random = np.random.default_rng(7)
    matrix = random.standard_normal((ROWS, DIMENSION), dtype=np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix


def vectors_in_and_searched(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """REAL_VECTOR(384) as fvecs in; exact top 10 with a bound query vector."""
    matrix = unit_vectors()
    prefix = DIMENSION.to_bytes(4, "little")
    rows = [(n, prefix + vector.tobytes()) for n, vector in enumerate(matrix)]
    with emulator() as connection:
        connection.cursor().execute(f'CREATE COLUMN TABLE "V" (ID BIGINT PRIMARY KEY, V REAL_VECTOR({DIMENSION}))')

        def write() -> None:
            insert(connection, 'INSERT INTO "V" VALUES (?, ?)', rows)

        yield per_second("vectors in", 50_000, write, given.rounds, lambda: emptied(connection, 'DELETE FROM "V"'))
        yield measure_search(connection, matrix, prefix, given.queries)


def measure_search(
    connection: Any, matrix: np.ndarray[Any, np.dtype[np.float32]], prefix: bytes, queries: int
) -> Figure:
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
    more = {
        "rows": ROWS,
        "dimension": DIMENSION,
        "k": 10,
        "queries": queries,
        "first_ms": round(times[0], 1),
        "max_ms": round(max(times[1:]), 1),
        "exact_results": right == queries + 1,
    }
    return Figure("search, p50", [statistics.median(times[1:])], "ms", at_most(60), more=more)


def on_this(part: Part) -> Part:
    """Says what the emulator was made of."""

    def run(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        report.machine |= machine(("hdbcli", "numpy", "sqlglot")) | {"sqlite": sqlite3.sqlite_version}
        yield from part(given, report)

    return run


PARTS = {"rows": on_this(rows_in_and_out), "vectors": on_this(vectors_in_and_searched)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queries", type=int, default=20)


if __name__ == "__main__":
    main("emulator", __doc__ or "", PARTS, add_options)
