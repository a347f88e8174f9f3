"""How good is search on the labelled queries of benchmarks/queries, and what does each mode cost?

    python benchmarks/quality.py [found] [latency] [--rounds 3] [--out benchmarks/results/quality.json]

    found     hit@1, hit@3, hit@10, MRR and nDCG@10 of vector, keyword and hybrid, over
              all queries and over the halves of decision 0028; hybrid's hit@3 over all                   >= 0.895
    latency   milliseconds of one search, k = 10, query embedded each time: median and 95th percentile over every
              fifth query

Searches the demo's two collections through the product, in the HANA emulator. The emulator reads every row for a
ranking, so its share of a search's time differs from HANA's.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from app.src.access.principal import OPERATOR
from app.src.benchmark.harness import Figure, Report, at_least, interleaved, main
from app.src.demo import Demo
from app.src.evaluation.measures import mean
from app.src.evaluation.queries import read
from app.src.evaluation.run import Mode
from app.src.service.search import SearchOptions
from app.src.settings import EmbeddingSettings, Settings

QUERIES = Path(__file__).with_name("queries")
EVERY = 5  # time every fifth query
GOAL = at_least(0.895)
MODES: tuple[Mode, ...] = ("vector", "keyword", "hybrid")


def found(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with synced() as demo:
        for mode in MODES:
            outcomes: list[dict[str, Any]] = []
            for name in demo.names:
                measured = demo.service.evaluation.evaluate(name, QUERIES / f"{name}.jsonl", (mode,))
                outcomes += measured["modes"][mode]["outcomes"]
            # The first byte of the text's SHA-256, even or odd, decides the half, as in decision 0028.
            halves: dict[str, list[dict[str, Any]]] = {"tuned on": [], "other half": []}
            for one in outcomes:
                odd = hashlib.sha256(one["query"].encode()).digest()[0] % 2
                halves["other half" if odd else "tuned on"].append(one)
            figures = {name: mean(each) for name, each in {"all": outcomes, **halves}.items()}
            report.details[mode] = {
                name: {measure: round(value, 4) for measure, value in each.items()} for name, each in figures.items()
            }
            for name, each in figures.items():
                target = GOAL if (mode, name) == ("hybrid", "all") else None
                yield Figure(f"{mode}, {name}: hit@3", [each["hit_3"]], "share", target)
            yield Figure(f"{mode}, all: hit@1", [figures["all"]["hit_1"]], "share")


def latency(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with synced() as demo:
        texts = [(name, query.text) for name in demo.names for query in read(QUERIES / f"{name}.jsonl")][::EVERY]
        slowest: dict[str, list[float]] = {mode: [] for mode in MODES}

        def work(mode: Mode) -> Callable[[], float]:
            def run() -> float:
                taken = []
                for name, text in texts:
                    start = time.perf_counter()
                    demo.service.search.run(name, text, options=SearchOptions(mode), principal=OPERATOR)
                    taken.append(1000 * (time.perf_counter() - start))
                slowest[mode].append(float(np.percentile(taken, 95)))
                return float(np.median(taken))

            return run

        rounds = interleaved({mode: work(mode) for mode in MODES}, given.rounds)
        for mode in MODES:
            yield rounds.figure(f"{mode}: a search", mode, "ms")
            yield Figure(f"{mode}: a search, 95th percentile", slowest[mode][-given.rounds :], "ms")


@contextmanager
def synced() -> Iterator[Demo]:
    """Sync the demo with the query cache off: otherwise only the first mode would embed."""
    with Demo(Settings(embedding=EmbeddingSettings(query_cache_mb=0))) as demo:
        for name in demo.names:
            demo.service.sync.run(name)
        yield demo


if __name__ == "__main__":
    main("quality", __doc__ or "", {"found": found, "latency": latency})
