"""How fast is search in the local store, against the least that NumPy could do?

    python benchmarks/search.py [PART ...] [--rounds 5] [--sizes 100000 1000000] [--out benchmarks/results/search.json]

The measure is one float32 matrix-vector product of NumPy over the same rows, one BLAS thread, without choosing the
best of its scores. Each way takes turns with it, 25 queries each; the median of a turn
counts, and the median of the rounds. A figure whose rounds scatter is marked `disturbed`: other work was running; its
`cpu_ratio`, of CPU seconds, still holds. Vectors cluster like those of texts; the cosines of the best, the tenth and
the median row are in the details. OPENBLAS_CORETYPE is removed from the environment, because it would slow NumPy down.

    scan        passing over all rows and naming all that may be the best, over the product             <= 0.6
    store       a whole search in the store: SQLite, exact scores, ten hits with their texts, over the product  <= 0.6
    filters     whole searches: a filter keeps 1 % or 50 % of the rows, at random, near the query or far from it;
                1 % at random over the product                                                          <= 0.1
    together    searches a second with 1, 2, 4, 8 threads, over those of one thread
    visible     milliseconds from another process's commit to the end of the search that shows it       <= 100
    keyword     milliseconds of keyword and hybrid searches over 100,000 texts; one common word among three
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark.harness import (  # noqa: E402
    Figure,
    Part,
    Report,
    Work,
    at_most,
    interleaved,
    machine,
    main,
    percentiles,
    ratio_of_last,
)
from app.src.benchmark.search import COLLECTION, filled  # noqa: E402
from app.src.benchmark.workloads import TOPICS, Clusters, exact_best, material_text  # noqa: E402
from app.src.service.hybrid import Hybrid, RowFilter  # noqa: E402
from connector.model import ChangeSet, Chunk, Filter  # noqa: E402
from connector.stores.local.store import LocalStore  # noqa: E402
from connector.stores.scan.int8_scan import best_scan  # noqa: E402

DIMENSION, TOP, QUERIES = 384, 10, 25
KEYWORD_ROWS = 200_000  # larger stores get short texts, which build faster, and no keyword part
TARGETS = {"scan": at_most(0.6), "store": at_most(0.6), "filters, 1 %": at_most(0.1), "visible, worst": at_most(100)}
_KIND = ("FERT", "HALB", "ROH", "HIBE")


class Scene:
    """A store of so many rows, the rows themselves, and queries like them."""

    def __init__(self, folder: Path, rows: int) -> None:
        clusters = Clusters(DIMENSION)
        self.rows, self.folder = rows, folder
        self.matrix, self.topics = clusters.draw_with_topics(rows)
        self.queries, self.asked = clusters.draw_with_topics(QUERIES)
        started = time.perf_counter()
        self.store = filled(folder, self.matrix, self._chunk)
        self.build_seconds = time.perf_counter() - started
        started = time.perf_counter()
        self.search(0)
        self.first_seconds = time.perf_counter() - started
        for number, best in enumerate(exact_best(self.matrix, self.queries[::8], TOP)):
            assert self.search(8 * number) == [f"k{row}" for row in best], "not the exact ten"

    def _chunk(self, number: int) -> Chunk:
        text = f"{material_text(number)} M-{number:06}" if self.rows <= KEYWORD_ROWS else f"row {number}"
        mixed = (number * 7919) % 10_007
        metadata = {"TENANT": mixed % 100, "NUMBER": mixed // 100 % 100, "TOPIC": int(self.topics[number])}
        return Chunk(f"k{number}", 0, text, metadata | {"MTART": _KIND[number % 4]}, b"h" * 32)

    def search(self, query: int, where: Filter | None = None) -> list[str]:
        return [hit.id for hit in self.store.view(COLLECTION).search(self.queries[query], TOP, where)]

    def product(self, query: int) -> None:
        np.matmul(self.matrix, self.queries[query])

    def cosines(self) -> list[float]:
        """Return the medians over the queries of the best, the tenth and the median row."""
        found = np.sort(self.matrix[: 10**5] @ self.queries.T, axis=0)[::-1]
        return [round(float(np.median(found[place])), 2) for place in (0, 9, len(found) // 2)]


class Scenes:
    """Stores by their number of rows, made when first needed; a context."""

    def __init__(self) -> None:
        self._made: dict[int, Scene] = {}
        self._held = ExitStack()

    def __enter__(self) -> Scenes:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def of(self, rows: int) -> Scene:
        if rows not in self._made:
            folder = self._held.enter_context(tempfile.TemporaryDirectory())
            scene = self._made[rows] = Scene(Path(folder), rows)
            self._held.callback(scene.store.close)
            print(f"{rows} rows: built in {scene.build_seconds:.1f} s", file=sys.stderr)
        return self._made[rows]


# --------------------------------------------------------------------------------------------------------- measuring


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def against_product(scene: Scene, ways: Mapping[str, Callable[[int], object]], rounds: int) -> dict[str, Figure]:
    """Measure the median time of each way over that of the product."""
    times: dict[str, list[float]] = {name: [] for name in ("product", *ways)}
    busy: dict[str, list[float]] = {name: [] for name in times}

    def work(name: str, way: Callable[[int], object]) -> Work:
        def run() -> float:
            for query in range(QUERIES):
                before = time.thread_time()
                times[name].append(milliseconds(lambda: way(query)))  # noqa: B023
                busy[name].append(time.thread_time() - before)
            return statistics.median(times[name][-QUERIES:]) / 1000

        return run

    done = interleaved({name: work(name, way) for name, way in {"product": scene.product, **ways}.items()}, rounds)
    return {
        name: done.ratio(
            name,
            name,
            "product",
            TARGETS.get(name),
            cpu_ratio=ratio_of_last(busy[name], busy["product"], rounds * QUERIES),
            **shown(times[name]),
            product_ms=shown(times["product"]),
        )
        for name in ways
    }


def shown(times: Sequence[float]) -> dict[str, float]:
    return {f"{name}_ms": value for name, value in percentiles(times, 50, 95).items()}


# ---------------------------------------------------------------------------------------------------------- the parts


def scan(scene: Scene, rounds: int) -> Iterator[Figure]:
    copy = best_scan().copy(DIMENSION)
    for start in range(0, scene.rows, 8192):
        copy.append(scene.matrix[start : start + 8192])
    view = copy.view()

    def one(query: int) -> object:
        (ranking,) = view.rank(scene.queries[query : query + 1], None)
        return ranking.best(2 * TOP + 16)

    listed = [len(one(query)[0]) for query in range(QUERIES)]  # type: ignore[index]
    found = against_product(scene, {"scan": one}, rounds)["scan"]
    by = {"named_rows": statistics.median(listed), "by": type(best_scan()).__name__}
    yield replace(found, more=dict(found.more) | by)


def store(scene: Scene, rounds: int) -> Iterator[Figure]:
    yield from against_product(scene, {"store": scene.search}, rounds).values()


def filters(scene: Scene, rounds: int) -> Iterator[Figure]:
    own, other = scene.asked, (scene.asked + TOPICS // 2) % TOPICS
    ways: dict[str, Callable[[int], Filter]] = {
        "filters, 1 %": lambda query: {"TENANT": 7},
        "filters, 50 %": lambda query: {"NUMBER": {"$lt": 50}},
        "filters, near": lambda query: {"TOPIC": int(own[query])},
        "filters, far": lambda query: {"TOPIC": int(other[query])},
    }
    cold = {name: milliseconds(lambda: scene.search(1, where(1))) for name, where in ways.items()}  # noqa: B023
    found = against_product(
        scene,
        # Four queries: with more filters than the store caches, all of them would be cold.
        {name: lambda query, where=where: scene.search(query % 4, where(query % 4)) for name, where in ways.items()},  # type: ignore[misc]
        rounds,
    )
    for name, each in found.items():
        yield replace(each, more=dict(each.more) | {"cold_ms": round(cold[name], 1)})


def together(scene: Scene, rounds: int) -> Iterator[Figure]:
    seconds = 1.0 if scene.rows <= 200_000 else 3.0
    rates: dict[int, list[float]] = {threads: [] for threads in (1, 2, 4, 8)}
    for _ in range(rounds):
        for threads, found in rates.items():
            found.append(_rate(scene, threads, seconds))
    alone = rates.pop(1)
    yield Figure("together, 1 thread", alone, "searches/s")
    for threads, found in rates.items():
        ratios = [rate / one for rate, one in zip(found, alone, strict=True)]
        more = {"per_second": round(statistics.median(found), 1)}
        yield Figure(f"together, {threads} threads", ratios, more=more)


def _rate(scene: Scene, threads: int, seconds: float) -> float:
    done, end = [0] * threads, time.perf_counter() + seconds

    def run(place: int) -> None:
        query = place
        while time.perf_counter() < end:
            scene.search(query % QUERIES)
            done[place] += 1
            query += 1

    workers = [threading.Thread(target=run, args=(place,)) for place in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - started)


def visible(scene: Scene, rounds: int) -> Iterator[Figure]:
    """The writer is another process; both read the system's monotonic clock."""
    took, alone = [], []
    command = [sys.executable, __file__, "--writer", str(scene.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        for number in range(4 * max(rounds, 3)):
            vector = scene.queries[number % QUERIES]
            process.stdin.write(json.dumps([number, vector.tolist()]) + "\n")
            process.stdin.flush()
            committed = float(process.stdout.readline())
            hits = scene.store.view(COLLECTION).search(vector, TOP)
            took.append((time.monotonic() - committed) * 1000)
            assert hits[0].id == f"new{number % 3}", "not seen"
            alone.append(milliseconds(lambda: scene.search(0)))
        process.stdin.close()
        process.wait(30)
    more = {"p50_ms": round(statistics.median(took), 2), "without_a_write": shown(alone)}
    yield Figure("visible, worst", [max(took)], "ms", TARGETS["visible, worst"], more=more)


def writer(folder: str) -> None:
    """Write the vectors that stdin names, and print when each was committed."""
    with closing(LocalStore(Path(folder))) as own, own.lease(COLLECTION, "writer", 5) as lease:
        print("ready", flush=True)
        for line in sys.stdin:
            number, vector = json.loads(line)
            chunk = Chunk(f"new{number % 3}", 0, "new", {}, b"h" * 32)
            own.apply(lease, ChangeSet([chunk], np.array([vector], np.float32)))
            print(time.monotonic(), flush=True)


def keyword(scene: Scene, rounds: int) -> Iterator[Figure]:
    if scene.rows > KEYWORD_ROWS:
        return
    rng = np.random.default_rng(5)
    asked = [" ".join(material_text(10**6 + number).replace(",", "").split()[:3]) for number in range(QUERIES)]
    exact = [f"M-{rng.integers(0, scene.rows):06}" for _ in range(QUERIES)]

    def words(query: int) -> object:
        return scene.store.view(COLLECTION).keyword(asked[query], TOP)

    def number(query: int) -> object:
        (hit, *_) = scene.store.view(COLLECTION).keyword(exact[query], TOP)
        assert hit.text.endswith(exact[query])
        return hit

    ranking, stored = Hybrid(), scene.store.status(COLLECTION)
    assert stored is not None

    def hybrid(query: int) -> object:
        return ranking.search(scene.store, stored, (asked[query], scene.queries[query]), 50, RowFilter(None, None))

    ways = {"keyword, three words": words, "keyword, a number": number, "keyword, hybrid": hybrid}
    yield from against_product(scene, ways, rounds).values()


def over_sizes(part: Callable[[Scene, int], Iterator[Figure]], scenes: Scenes) -> Part:
    """Run the part over every size of store that was asked for."""

    def run(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        for rows in given.sizes:
            label, scene = f"{rows:,} rows", scenes.of(rows)
            report.details[label] = {
                "cosines": scene.cosines(),
                "build_seconds": round(scene.build_seconds, 1),
                "first_search_seconds": round(scene.first_seconds, 2),
            }
            for each in part(scene, given.rounds):
                yield replace(each, name=f"{label}, {each.name}")
        blas = [f"{one['internal_api']} {one.get('architecture')}" for one in threadpool_info()]
        report.machine |= machine(("numpy", "simsimd")) | {"blas": blas}
        report.options["dimension"] = DIMENSION

    return run


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])


if __name__ == "__main__":
    if "--writer" in sys.argv:
        writer(sys.argv[-1])
    else:
        slowing = {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
        if slowing & set(os.environ):
            kept = {name: value for name, value in os.environ.items() if name not in slowing}
            os.execve(sys.executable, [sys.executable, *sys.argv], kept)
        with threadpool_limits(1, user_api="blas"), Scenes() as made:
            parts = (scan, store, filters, together, visible, keyword)
            main("search", __doc__ or "", {part.__name__: over_sizes(part, made) for part in parts}, add_options)
