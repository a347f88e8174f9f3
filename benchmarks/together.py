"""How long does a search take while a bulk load runs through the same engine, and what does it cost the load?

    python benchmarks/together.py [PART ...] [--rounds 5] [--rows 20000] [--out benchmarks/results/together.json]

One process with one engine and a local store that holds all rows. One client searches, thinks for a while (--think,
0.1 s), and searches again, never twice the same. Each round measures it alone, then the load alone, then both, then the
load alone again; every round loads its share of the rows. The p95 is that of all searches of all rounds.

    embedding  the load embeds documents, a thousand at a time, as a sync does   p95 <= 3 x idle, load loses <= 15 %
    sync       the load is a whole sync into the same store, rendering and writing included          (told, no bar)
    greedy     as embedding, with a client that never thinks                                        (told, no bar)
    rest       `owl-sap serve`, a child process: searches over HTTP beside a job that POST started    (told, no bar)

For `rest` the rows come from the HANA emulator, a child process on the same cores, through the real hdbcli; for the
others from memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.access.principal import OPERATOR  # noqa: E402
from app.src.benchmark.harness import Figure, Part, Report, at_most, main  # noqa: E402  # noqa: E402
from app.src.benchmark.processes import MaterialsInEmulator, announced, serve_command  # noqa: E402
from app.src.benchmark.workloads import material, material_text  # noqa: E402
from app.src.service.search import SearchOptions  # noqa: E402
from app.src.service.service import Service  # noqa: E402
from app.src.settings import Settings  # noqa: E402
from connector.model import Column, Key, KeyRange, Query, Row, Table, TableRef  # noqa: E402

MODEL = "all-MiniLM-L6-v2"
BY_MEANING = SearchOptions("vector")
WINDOW, TURNS = 1000, 3
SEARCHES = 60  # of the client alone, each round
FOLLOW_SECONDS = 0.05  # between two looks at a job: it costs the service little, and a load takes seconds
TARGETS = {"embedding, p95 beside the load / idle": at_most(3), "embedding, load loses": at_most(0.15)}


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
    return [material_text(number) for number in numbers]


def shares(given: argparse.Namespace) -> list[range]:
    """The rows of each round's load: behind those that are searched."""
    share = given.rows // given.rounds
    return [range(given.rows + number * share, given.rows + (number + 1) * share) for number in range(given.rounds)]


def collections(given: argparse.Namespace) -> dict[str, range]:
    """Each time a load is synced, that is into a collection of its own."""
    found = {"searched": range(given.rows)}
    for number, load in enumerate(shares(given)):
        found |= {f"load-{number}-{turn}": load for turn in range(TURNS)}
    return found


def settings(folder: Path, given: argparse.Namespace) -> Settings:
    return Settings.model_validate(
        {
            "store": {"kind": "local", "path": folder},
            "embedding": {"model": MODEL, "device": "cpu", "precision": given.precision},
            "collections": [
                {"name": name, "source": f"S.FROM_{numbers.start}_TO_{numbers.stop}", "template": "{MAKTX}. {LTEXT}"}
                for name, numbers in collections(given).items()
            ],
        }
    )


@dataclass
class Client:
    """A client that searches: `ask` returns the number of hits. `seconds`: of each search, in order."""

    ask: Callable[[str], int]
    think: float
    seconds: list[float] = field(default_factory=list)
    _asked: int = 0

    def search(self) -> None:
        self._asked += 1
        started = time.perf_counter()
        hits = self.ask(f"hydraulic pump that leaks at flange {self._asked}")
        self.seconds.append(time.perf_counter() - started)
        assert hits == 10

    def alone(self) -> list[float]:
        self.seconds = []
        for _ in range(SEARCHES):
            self.search()
            time.sleep(self.think)
        return self.seconds

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Search on a thread while the context is open."""
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
            self.service.parts.embedder.embed_documents(texts[start : start + WINDOW])

    def sync(self, number: int) -> None:
        """Every time into a collection of its own."""
        name = f"load-{number}-{self._synced[number]}"
        self._synced[number] += 1
        report = self.service.sync.run(name)
        assert report.upserted == len(self.texts[number]), report


def beside(part: str, client: Client, load: Callable[[int], None], rounds: int) -> Iterator[Figure]:
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
    steady = [p95(some) for some in idle]
    ratios = [p95(some) / none for some, none in zip(busy, steady, strict=True)]
    all_idle, all_busy = [one for each in idle for one in each], [one for each in busy for one in each]
    label = f"{part}, p95 beside the load / idle"
    more = {
        "by_round": [round(one, 3) for one in ratios],
        "idle_ms": in_ms(all_idle),
        "beside_ms": in_ms(all_busy),
    }
    yield Figure(label, [p95(all_busy) / p95(all_idle)], "x", TARGETS.get(label), steady=steady, more=more)
    label = f"{part}, load loses"
    yield Figure(label, lost, "", TARGETS.get(label), steady=steady)
    yield Figure(f"{part}, load alone", alone, "s", steady=steady)


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def in_ms(values: Sequence[float]) -> dict[str, Any]:
    found = {"p50": statistics.median(values), "p95": p95(values), "max": max(values)}
    return {name: round(value * 1000, 1) for name, value in found.items()} | {"searches": len(values)}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------ in one process


@dataclass
class World:
    """A service over rows in memory, made when first needed."""

    folder: Path
    _service: Service | None = None

    def service(self, given: argparse.Namespace) -> Service:
        if self._service is None:
            self._service = Service(settings(self.folder, given), source=Materials())
            self._service.sync.run("searched")
        return self._service

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    def part(self, part: str, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        service = self.service(given)
        report.options |= {"model": MODEL, "precision": service.parts.engine.precision}
        report.machine["source"] = "memory"
        loads = Loads(service, [texts_of(each) for each in shares(given)])
        think = 0.0 if part == "greedy" else given.think
        client = Client(
            lambda text: len(service.search.run("searched", text, options=BY_MEANING, principal=OPERATOR).hits), think
        )
        client.alone()
        yield from beside(part, client, loads.sync if part == "sync" else loads.embed, given.rounds)


# ------------------------------------------------------------------------------------------------------------ over HTTP


def rest(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, MaterialsInEmulator(Path(folder)) as emulator:
        table = emulator.table(2 * given.rows)
        config = Path(folder, "owl-sap.toml")
        config.write_text(tomlkit.dumps(configuration(Path(folder), emulator, table.name, given)), encoding="utf-8")
        with serving(config) as address, closing(http.client.HTTPConnection(address, timeout=120)) as connection:
            api = Api(connection, address)
            api.sync("searched")
            report.details["rest"] = {"precision": api.get("/v1/info").get("precision"), "source": "the emulator"}
            client = Client(api.hits, given.think)
            client.alone()
            turns: Counter[int] = Counter()

            def load(number: int) -> None:
                api.sync(f"load-{number}-{turns[number]}")
                turns[number] += 1

            yield from beside("rest", client, load, given.rounds)


def configuration(folder: Path, emulator: MaterialsInEmulator, table: str, given: argparse.Namespace) -> dict[str, Any]:
    """What `owl-sap serve` reads. The collections are ranges of keys of one table."""
    return {
        "hana": emulator.login | {"encrypt": False},
        "store": {"kind": "local", "path": str(folder / "vectors")},
        "embedding": {"model": MODEL, "device": "cpu", "precision": given.precision},
        "collections": [
            {
                "name": name,
                "source": f"{emulator.schema}.{table}",
                "where": f"\"MATNR\" >= '{numbers.start:018}' AND \"MATNR\" < '{numbers.stop:018}'",
                "template": "{MAKTX}. {LTEXT}",
            }
            for name, numbers in collections(given).items()
        ],
    }


@contextmanager
def serving(config: Path) -> Iterator[str]:
    """Start a service, and yield its address as host:port."""
    inside = os.environ | {"PYTHONPATH": str(ROOT)}
    with announced(serve_command(config), config.parent, inside) as (_, greeting):
        yield greeting["url"].removeprefix("http://")


@dataclass
class Api:
    """`connection` belongs to the searching client; requests about jobs open one each."""

    connection: http.client.HTTPConnection
    address: str

    def hits(self, text: str) -> int:
        return len(
            self._answer(self.connection, "POST", "/v1/collections/searched/search", {"query": text, "mode": "vector"})[
                "hits"
            ]
        )

    def get(self, path: str) -> Any:
        return self._once("GET", path)

    def sync(self, name: str) -> None:
        """Until the job is over."""
        job = self._once("POST", f"/v1/collections/{name}/sync")["job"]
        while (found := self._once("GET", f"/v1/jobs/{job}"))["state"] in ("queued", "running", "waiting"):
            time.sleep(FOLLOW_SECONDS)
        assert found["state"] == "succeeded", found

    def _once(self, method: str, path: str) -> Any:
        with closing(http.client.HTTPConnection(self.address, timeout=120)) as connection:
            return self._answer(connection, method, path)

    def _answer(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            found = json.load(response)
        assert response.status < 300, (method, path, found)
        return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--think", type=float, default=0.1, help="seconds between a search and the next")
    parser.add_argument("--precision", default="auto")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, closing(World(Path(place))) as world:
        parts: dict[str, Part] = {name: partial(world.part, name) for name in ("embedding", "sync", "greedy")}
        parts["rest"] = rest
        main("together", __doc__ or "", parts, add_options)
