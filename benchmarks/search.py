"""How fast is search in the local store, compared with the minimum work in NumPy?

    python benchmarks/search.py [PART ...] [--rounds 5] [--sizes 100000 1000000] [--out benchmarks/results/search.json]

Figures are times over that of one float32 matrix-vector product of NumPy over the same rows, one BLAS thread, without
selecting the best scores. Each search takes turns with the product, 25 queries a turn; a figure is the median over
rounds of the turns' medians. If the rounds scatter, it is marked `disturbed`: other work was running; its `cpu_ratio`,
of CPU seconds, still holds. Vectors cluster like those of texts. OPENBLAS_CORETYPE is removed from the environment,
because it would slow NumPy down.

    store       a whole search in the store: scan, SQLite, exact scores, ten hits with their texts
                <= 0.40 of 100,000 rows, <= 0.25 of a million
    filters     the same with a filter that keeps 1 % (<= 0.05) or 50 % of the rows, at random
    visible     milliseconds from another process's commit to the end of the search that shows it       <= 100
    keyword     keyword and hybrid searches over 100,000 texts; one common word among three
    service     median hybrid search of the service over the median search by vector, 100,000 rows        <= 3
    peers       milliseconds over those of other libraries, each in its own process: `owl-sap benchmark search`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from app.src.access.principal import OPERATOR
from app.src.benchmark.harness import Figure, Report, Work, interleaved, machine, percentiles
from app.src.benchmark.search import COLLECTION, filled, measure
from app.src.benchmark.sync import TEMPLATE, MaterialsInEmulator
from app.src.benchmark.workloads import clustered, exact_best, material_text
from app.src.evaluation.run import Mode
from app.src.service.collections import VisibleView
from app.src.service.relevance import Calibrations
from app.src.service.search import SearchOptions, hybrid
from app.src.service.service import Service
from app.src.settings import Settings
from benchmarks.program import Part, at_most, available, main
from connector.model import ChangeSet, Chunk, Filter
from connector.stores.local.store import LocalStore

DIMENSION, TOP, QUERIES = 384, 10, 25
KEYWORD_ROWS = 200_000  # larger stores get short texts, which are faster to build, and no keyword part
TARGETS = {"filters, 1 %": at_most(0.05), "visible, worst": at_most(100), "service, hybrid / vector": at_most(3)}
STORE = {100_000: at_most(0.4), 1_000_000: at_most(0.25)}
_KIND = ("FERT", "HALB", "ROH", "HIBE")


class Scene:
    """A store with `rows` rows, their vectors, and queries like them."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.rows, self.folder = rows, folder
        self.matrix, self.queries = clustered(DIMENSION, rows, QUERIES)

        def chunk(number: int) -> Chunk:
            text = f"{material_text(number)} M-{number:06}" if rows <= KEYWORD_ROWS else f"row {number}"
            mixed = (number * 7919) % 10_007
            metadata = {"TENANT": mixed % 100, "NUMBER": mixed // 100 % 100}
            return Chunk(f"k{number}", 0, text, metadata | {"MTART": _KIND[number % 4]}, b"h" * 32)

        started = time.perf_counter()
        self.store = filled(folder, self.matrix, chunk)
        self.build_seconds = time.perf_counter() - started
        started = time.perf_counter()
        self.search(0)
        self.first_seconds = time.perf_counter() - started
        for number, best in enumerate(exact_best(self.matrix, self.queries[::8], TOP)):
            assert self.search(8 * number) == [f"k{row}" for row in best], "not the exact ten"

    def search(self, query: int, where: Filter | None = None) -> list[str]:
        return [hit.id for hit in self.store.view(COLLECTION).search(self.queries[query], TOP, where)]

    def product(self, query: int) -> None:
        np.matmul(self.matrix, self.queries[query])


class Scenes:
    """Stores by number of rows, created on first use; a context manager."""

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


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def against_product(scene: Scene, ways: Mapping[str, Callable[[int], object]], rounds: int) -> dict[str, Figure]:
    """Return the median time of each way divided by that of the product."""
    times: dict[str, list[float]] = {name: [] for name in ("product", *ways)}

    def work(name: str, way: Callable[[int], object]) -> Work:
        def run() -> tuple[float, float]:
            busy = []
            for query in range(QUERIES):
                before = time.process_time()
                times[name].append(milliseconds(lambda: way(query)))  # noqa: B023
                busy.append(time.process_time() - before)
            return statistics.median(times[name][-QUERIES:]) / 1000, statistics.median(busy)

        return run

    done = interleaved({name: work(name, way) for name, way in {"product": scene.product, **ways}.items()}, rounds)
    return {
        name: done.ratio(
            name,
            name,
            "product",
            TARGETS.get(name),
            **shown(times[name]),
            product_ms=shown(times["product"]),
        )
        for name in ways
    }


def shown(times: Sequence[float]) -> dict[str, float]:
    return {f"{name}_ms": value for name, value in percentiles(times, 50, 95).items()}


def store(scene: Scene, rounds: int) -> Iterator[Figure]:
    for figure in against_product(scene, {"store": scene.search}, rounds).values():
        yield replace(figure, target=STORE.get(scene.rows))


def filters(scene: Scene, rounds: int) -> Iterator[Figure]:
    kept: dict[str, Filter] = {"filters, 1 %": {"TENANT": 7}, "filters, 50 %": {"NUMBER": {"$lt": 50}}}
    cold = {name: milliseconds(lambda: scene.search(1, where)) for name, where in kept.items()}  # noqa: B023
    ways = {name: partial(scene.search, where=where) for name, where in kept.items()}
    for name, each in against_product(scene, ways, rounds).items():
        yield replace(each, more=dict(each.more) | {"cold_ms": round(cold[name], 1)})


def visible(scene: Scene, rounds: int) -> Iterator[Figure]:
    """Measure with the writer in another process; both read the system's monotonic clock."""
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
    """Write the vectors read from stdin, and print when each was committed."""
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

    stored = scene.store.status(COLLECTION)
    assert stored is not None
    view, calibrations = VisibleView(scene.store, stored, None), Calibrations()

    ways = {
        "keyword, three words": words,
        "keyword, a number": number,
        "keyword, hybrid": lambda query: hybrid(
            view, asked[query], scene.queries[query], 50, None, calibrations.of(view, None)
        ),
    }
    yield from against_product(scene, ways, rounds).values()


def service(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Search a service by vector and hybrid, with an embedder that takes no time."""
    with tempfile.TemporaryDirectory() as folder, MaterialsInEmulator(Path(folder)) as emulator, ExitStack() as held:
        collection = {"name": "searched", "source": str(emulator.table(given.sizes[0])), "template": TEMPLATE}
        settings = {
            "hana": emulator.login | {"encrypt": False},
            "store": {"kind": "local", "path": Path(folder) / "vectors"},
            "embedding": {"model": f"hash:{DIMENSION}"},
            "collections": [collection],
        }
        searched = held.enter_context(closing(Service(Settings.model_validate(settings))))
        searched.sync.run("searched")
        asked = [material_text(10**6 + number) for number in range(QUERIES)]

        def work(mode: Mode) -> float:
            options = SearchOptions(mode)
            return statistics.median(
                milliseconds(lambda: searched.search.run("searched", text, options=options, principal=OPERATOR))  # noqa: B023
                for text in asked
            )

        rounds = interleaved({mode: partial(work, mode) for mode in ("vector", "hybrid")}, given.rounds)
    name = "service, hybrid / vector"
    label = f"{given.sizes[0]:,} rows, {name}"
    yield rounds.ratio(label, "hybrid", "vector", TARGETS[name], vector_ms=rounds.median("vector"))


def peers(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    names = available(("numpy", "sqlite-vec", "usearch", "lancedb", "faiss"), "search", report)
    say = partial(print, file=sys.stderr, flush=True)
    found = measure(names, say, rounds=given.rounds, rows=given.sizes[0], target=at_most(0.4))
    report.peers |= found.peers
    report.notes += found.notes
    for figure in found.figures:
        yield replace(figure, name=f"peers, {figure.name}")


def over_sizes(part: Callable[[Scene, int], Iterator[Figure]], scenes: Scenes) -> Part:
    """Run the part over every requested store size."""

    def run(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        for rows in given.sizes:
            label, scene = f"{rows:,} rows", scenes.of(rows)
            report.details[label] = {
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
            parts = {part.__name__: over_sizes(part, made) for part in (store, filters, visible, keyword)}
            main("search", __doc__ or "", parts | {"service": service, "peers": peers}, add_options)
