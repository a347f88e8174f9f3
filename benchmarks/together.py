"""How long does a search take while a bulk load runs through the same engine, and what does it cost the load?

    python benchmarks/together.py [PART ...] [--rounds 5] [--rows 20000] [--out benchmarks/results/together.json]

One process with one engine and a local store that holds all rows. No HANA and no stand-in: rows come from memory. One
client searches, thinks for a while (--think, 0.1 s), and searches again, never twice the same. Each round measures it
alone, then the load alone, then both, then the load alone again; every round loads its share of the rows.

    embedding  the load embeds documents, a thousand at a time, as a sync does   p95 <= 3 x idle, load loses <= 15 %
    sync       the load is a whole sync into the same store, rendering and writing included          (told, no bar)
    greedy     as embedding, with a client that never thinks                                        (told, no bar)

Predicted before it was built (two cores, all-MiniLM-L6-v2): an idle search takes 5 ms, of which the engine has 4.
Behind whole batches of 1,024 tokens it would wait for 60 ms in bf16 and 125 ms in fp32, on average half of that: p95 at
10 to 20 times idle. Batches small enough for 3 times idle would hold 100 to 200 tokens and cost the load 10 to 20 %.
Between two layers of a batch the wait is a sixth at most: about 2.5 times idle, and the load loses what the searches
themselves take, 5 to 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark.machine import machine  # noqa: E402
from app.src.benchmark.side_by_side import SCATTER  # noqa: E402
from app.src.service import Service  # noqa: E402
from app.src.settings import Settings  # noqa: E402
from benchmarks.sync import material  # noqa: E402
from connector.model import Column, Key, KeyRange, Query, Row, Table, TableRef  # noqa: E402

MODEL = "all-MiniLM-L6-v2"
WINDOW, TURNS = 1000, 3
SEARCHES = 60
"""Of the client alone, each round."""
TARGETS = {"p95 ratio": 3.0, "load loses": 0.15}


# -------------------------------------------------------------------------------------------------------- the scenery


class Materials:
    """A source in memory. The table FROM_9_TO_12 has the materials 9, 10 and 11, as `sync.py` makes them."""

    capture: Any = None

    def describe(self, ref: TableRef) -> Table:
        columns = (Column("MATNR", "NVARCHAR", 18), Column("MAKTX", "NVARCHAR", 40), Column("LTEXT", "NVARCHAR", 500))
        return Table(ref, columns, primary_key=("MATNR",))

    def now(self) -> datetime:
        return datetime.now(UTC)

    def count(self, query: Query) -> int:
        return len(_numbers(query))

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        numbers = _numbers(query)
        for start in range(0, len(numbers), size):
            yield [_row(number) for number in numbers[start : start + size]]

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        return [KeyRange()]

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        return [_row(int(str(key[0]))) for key in keys]


def _numbers(query: Query) -> range:
    _, start, _, end = query.table.name.split("_")
    return range(int(start), int(end))


def _row(number: int) -> Row:
    _, key, text, more, *_ = material(number)
    return Row((key,), {"MATNR": key, "MAKTX": text, "LTEXT": more})


def texts_of(numbers: Sequence[int]) -> list[str]:
    return [f"{text}. {more}" for _, _, text, more, *_ in map(material, numbers)]


def settings(folder: Path, rows: int, loads: Sequence[range], precision: str) -> Settings:
    blocks = [("searched", range(rows))]
    blocks += [(f"load-{number}-{turn}", load) for number, load in enumerate(loads) for turn in range(TURNS)]
    return Settings.model_validate(
        {
            "store": {"kind": "local", "path": folder},
            "embedding": {"model": MODEL, "device": "cpu", "precision": precision},
            "collections": [
                {"name": name, "source": f"S.FROM_{numbers.start}_TO_{numbers.stop}", "template": "{MAKTX}. {LTEXT}"}
                for name, numbers in blocks
            ],
        }
    )


@dataclass
class Client:
    """Somebody who searches. Seconds of each search, in order."""

    service: Service
    think: float
    seconds: list[float] = field(default_factory=list)
    _asked: int = 0

    def search(self) -> None:
        self._asked += 1
        started = time.perf_counter()
        found = self.service.search("searched", f"hydraulic pump that leaks at flange {self._asked}")
        self.seconds.append(time.perf_counter() - started)
        assert len(found.hits) == 10

    def alone(self) -> list[float]:
        self.seconds = []
        for _ in range(SEARCHES):
            self.search()
            time.sleep(self.think)
        return self.seconds

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Searches beside whatever goes on meanwhile."""
        self.seconds, over = [], threading.Event()

        def work() -> None:
            while not over.is_set():
                self.search()
                over.wait(self.think)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


# ---------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class Loads:
    """Bulk work in shares; the same share may be done again and again."""

    service: Service
    texts: Sequence[Sequence[str]]
    _synced: Counter[int] = field(default_factory=Counter)

    def embed(self, number: int) -> None:
        texts = self.texts[number]
        for start in range(0, len(texts), WINDOW):
            self.service.embedder.embed_documents(texts[start : start + WINDOW])

    def sync(self, number: int) -> None:
        """Every time into a collection of its own."""
        name = f"load-{number}-{self._synced[number]}"
        self._synced[number] += 1
        report = self.service.sync(name)
        assert report.upserted == len(self.texts[number]), report


def beside(client: Client, load: Callable[[int], None], rounds: int) -> dict[str, Any]:
    """Latency of the client alone and beside the load, and what that costs the load."""
    idle: list[list[float]] = []
    busy: list[list[float]] = []
    lost: list[float] = []
    alone: list[float] = []
    for number in range(rounds):
        idle.append(client.alone())
        before = seconds(lambda: load(number))  # noqa: B023
        with client.at_work():
            both = seconds(lambda: load(number))  # noqa: B023
        busy.append(client.seconds)
        after = seconds(lambda: load(number))  # noqa: B023
        lost.append(1 - (before + after) / 2 / both)
        alone.append((before + after) / 2)
    ratios = [p95(some) / p95(none) for some, none in zip(busy, idle, strict=True)]
    all_idle, all_busy = [one for each in idle for one in each], [one for each in busy for one in each]
    return {
        "p95 ratio": {"all": round(p95(all_busy) / p95(all_idle), 2), **rounded(ratios)},
        "load loses": rounded(lost),
        "load alone s": rounded(alone),
        "idle ms": in_ms(all_idle),
        "beside ms": in_ms(all_busy),
        "disturbed": max(map(p95, idle)) > SCATTER * min(map(p95, idle)),
    }


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def rounded(rounds: Sequence[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(rounds), 3), "rounds": [round(one, 3) for one in rounds]}


def in_ms(values: Sequence[float]) -> dict[str, Any]:
    found = {"p50": statistics.median(values), "p95": p95(values), "max": max(values)}
    return {name: round(value * 1000, 1) for name, value in found.items()} | {"searches": len(values)}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


PARTS = ("embedding", "sync", "greedy")


def run(parts: Sequence[str], rounds: int, rows: int, given: argparse.Namespace) -> dict[str, Any]:
    share = rows // rounds
    shares = [range(rows + number * share, rows + (number + 1) * share) for number in range(rounds)]
    load_before, results = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory() as folder:
        service = Service(settings(Path(folder), rows, shares, given.precision), source=Materials())
        try:
            service.sync("searched")
            loads = Loads(service, [texts_of(each) for each in shares])
            for name in parts:
                client = Client(service, 0.0 if name == "greedy" else given.think)
                client.alone()
                results[name] = beside(client, loads.sync if name == "sync" else loads.embed, rounds)
                print(name, results[name], file=sys.stderr)
            precision = service.engine.precision
        finally:
            service.close()
    about = machine() | {"source": "memory", "load_average": [load_before, os.getloadavg()[0]]}
    options = {"rows": rows, "think seconds": given.think, "precision": precision, "model": MODEL}
    return {"machine": about, "options": options, "targets": TARGETS, "results": results}


def judged(results: dict[str, Any]) -> list[str]:
    """The bars are for the part `embedding` alone."""
    found = results.get("embedding")
    if found is None:
        return []
    reached = {"p95 ratio": found["p95 ratio"]["all"], "load loses": found["load loses"]["median"]}
    return [
        f"{name}: {reached[name]} against {most}: {'met' if reached[name] <= most else 'MISSED'}"
        + (" (disturbed)" if found["disturbed"] else "")
        for name, most in TARGETS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--think", type=float, default=0.1, help="seconds between a search and the next")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    report = run(given.parts or PARTS, given.rounds, given.rows, given)
    text = json.dumps(report, indent=2)
    print(text)
    for line in judged(report["results"]):
        print(line, file=sys.stderr)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
