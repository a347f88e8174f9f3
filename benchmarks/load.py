"""Send the service more requests than it can compute: answers must stay correct, refusals fast and memory bounded.

    python benchmarks/load.py [--rounds 3] [--connections 1000] [--out benchmarks/results/load.json]

`owl-sap serve` runs in another process with the real model; this process runs all clients, on the same cores. Each
request carries a key. Every answer is compared with vectors computed here beforehand and with the exact nearest rows,
computed by NumPy. The searched rows are synced once from the HANA emulator into a local store. `api.max_wait` and
`embedding.max_wait` are 1 s.

    crowd   1,000 persistent connections with about one request a second each, searches and embeddings mixed: several
            times what this machine can compute. Goals: no wrong answer, no connection lost, p99 of accepted requests
            <= 3 s (waiting for a thread and for the engine, 1 s each, and computing), p99 of refusals <= 100 ms, growth
            <= 200 MB over the memory with four clients
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tomlkit
import uvloop

from app.src.benchmark.harness import Figure, Report, machine
from app.src.benchmark.sync import TEMPLATE, MaterialsInEmulator
from app.src.benchmark.workloads import material, material_text
from app.src.core.loading import EngineOptions, load_engine
from app.src.demo import announced
from benchmarks.program import at_most, main, resident_bytes
from connector.model import Vectors

MODEL = "all-MiniLM-L6-v2"
PACKAGES = ("numpy", "torch", "fastapi", "starlette", "uvicorn", "httptools", "uvloop", "pydantic", "orjson")
COLLECTION = "materials"
MAX_WAIT = 1.0
FEW = 4
K = 5
TOLERANCE = (
    1e-3  # of a vector element and of a score: batches of another size round differently, in fp32 by less than 1e-5
)
MB = 1e6
TARGETS = {
    **dict.fromkeys(("wrong answers", "failures", "connections lost"), at_most(0)),
    "accepted p99": at_most(1000 * (2 * MAX_WAIT + 1)),
    "refused p99": at_most(100),
    "four clients afterwards, p99 / before": at_most(2),
    "server grows by at most": at_most(200),
}
ANYTHING = float("inf")  # counts and peaks may differ between rounds by any amount
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_RETRY = re.compile(rb"\r\nretry-after: \d+\r\n", re.IGNORECASE)

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Question:
    """The bytes of a request, and a check of the body of its answer."""

    kind: str
    content: bytes
    right: Callable[[bytes], bool]


@dataclass(slots=True)
class Tally:
    """Results of requests. Seconds from the first byte sent to the last received, by kind of question. `failures`:
    responses that are neither an answer nor a refusal with Retry-After. `lost`: connections closed by the server."""

    accepted: dict[str, list[float]] = field(default_factory=dict)
    refused: list[float] = field(default_factory=list)
    wrong: int = 0
    failures: list[str] = field(default_factory=list)
    lost: int = 0

    @property
    def seconds(self) -> list[float]:
        return [one for each in self.accepted.values() for one in each]

    def count(self, question: Question, head: bytes, body: bytes, seconds: float) -> None:
        status = int(head[9:12])
        if status == 200:
            self.accepted.setdefault(question.kind, []).append(seconds)
            self.wrong += not question.right(body)
        elif status == 429 and _RETRY.search(head):
            self.refused.append(seconds)
        else:
            self.failures.append(f"{question.kind}: status {status}")


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Crowd:
    """Persistent connections. `pause`: mean seconds between an answer and the next request, plus or minus half."""

    address: Address
    questions: Sequence[Question]
    pause: float
    lines: list[Line] = field(default_factory=list)

    async def connect(self, count: int) -> None:
        for start in range(0, count, 50):
            some = (asyncio.open_connection(*self.address) for _ in range(min(50, count - start)))
            self.lines += await asyncio.gather(*some)

    def close(self) -> None:
        for _, writer in self.lines:
            writer.close()

    async def ask(self, seconds: float, seed: int = 0) -> Tally:
        """Ask on every connection, one question at a time, for `seconds`, and wait for the last answers."""
        tally = Tally()
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self._client(at, until, seed + at, tally) for at in range(len(self.lines))))
        return tally

    async def _client(self, at: int, until: float, seed: int, tally: Tally) -> None:
        rng = random.Random(seed)
        await asyncio.sleep(rng.random() * self.pause)
        while (start := time.perf_counter()) < until:
            question = rng.choice(self.questions)
            reader, writer = self.lines[at]
            try:
                writer.write(question.content)
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
            except (OSError, EOFError) as error:
                tally.lost += 1
                tally.failures.append(f"{question.kind}: {type(error).__name__}")
                writer.close()
                await asyncio.sleep(0.1)
                self.lines[at] = await asyncio.open_connection(*self.address)
                continue
            tally.count(question, head, body, time.perf_counter() - start)
            await asyncio.sleep(self.pause * (0.5 + rng.random()))


@asynccontextmanager
async def lag_watched(lags: list[float]) -> AsyncIterator[None]:
    """Append this event loop's delay every 20 ms: the delay that the clients add to a figure."""

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.02)
            lags.append(time.perf_counter() - start - 0.02)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


# ------------------------------------------------------------------------------------------ questions and right answers


def post(path: str, body: Any, headers: Sequence[str] = ()) -> bytes:
    content = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers)
    head = "".join(f"{line}\r\n" for line in (*lines, f"Content-Length: {len(content)}"))
    return head.encode() + b"\r\n" + content


@dataclass(frozen=True, slots=True)
class Known:
    """The correct answers: `rows` are the vectors of the stored rows, `keys` their ids."""

    rows: Vectors
    keys: Sequence[str]
    headers: Sequence[str]

    def embed(self, text: str, vector: Vectors) -> Question:
        def right(body: bytes) -> bool:
            found = np.frombuffer(body, "<f4")
            return found.shape == vector.shape and bool(np.abs(found - vector).max() <= TOLERANCE)

        headers = ("Accept: application/octet-stream", *self.headers)
        return Question("embed", post("/embed", {"inputs": [text]}, headers), right)

    def search(self, text: str, vector: Vectors) -> Question:
        scores = self.rows @ vector
        least = float(np.sort(scores)[-K]) - TOLERANCE
        score_of = dict(zip(self.keys, scores.tolist(), strict=True))

        def right(body: bytes) -> bool:
            """Return whether the answer has as many rows as requested, all among the nearest, with correct scores."""
            hits = orjson.loads(body)["hits"]
            scored = [(score_of.get(hit["key"]["MATNR"], ANYTHING), hit["score"]) for hit in hits]
            distinct = {hit["key"]["MATNR"] for hit in hits}
            fitting = all(abs(own - given) <= TOLERANCE and own >= least for own, given in scored)
            return len(hits) == len(distinct) == K and fitting

        path = f"/v1/collections/{COLLECTION}/search"
        return Question("search", post(path, {"query": text, "k": K, "mode": "vector"}, self.headers), right)


# ---------------------------------------------------------------------------------------------------------- the server


def prepared(folder: Path, given: argparse.Namespace) -> list[Question]:
    """Write owl-sap.toml, sync the rows once, and return the questions with their correct answers."""
    config = folder / "owl-sap.toml"
    with MaterialsInEmulator(folder) as emulator:
        settings = {
            "hana": emulator.login | {"encrypt": False},
            "store": {"kind": "local", "path": str(folder / "vectors")},
            "embedding": {
                "model": given.model,
                "device": "cpu",
                "precision": "fp32",
                "max_wait": MAX_WAIT,
                "query_cache_mb": 0,  # compute every search text
            },
            "api": {"max_wait": MAX_WAIT},
            "access": {"keys": str(folder / "keys.json")},
            "collections": [{"name": COLLECTION, "source": str(emulator.table(given.rows)), "template": TEMPLATE}],
        }
        config.write_text(tomlkit.dumps(settings), encoding="utf-8")
        verb = [sys.executable, "-m", "app", "--config", str(config)]
        subprocess.run([*verb, "sync", COLLECTION, "--json"], cwd=folder, capture_output=True, check=True)
        # A key without its own limits, because the service's limits are measured.
        create = ["keys", "create", "load", "--json", "--scope", "admin", "--every-row"]
        create += ["--rate", "100000000/day", "--concurrency", "100000"]
        key = json.loads(subprocess.run([*verb, *create], cwd=folder, capture_output=True, check=True).stdout)["key"]
    with load_engine(EngineOptions(given.model, device="cpu", precision="fp32")) as engine:
        rows = engine.embed([material_text(number) for number in range(given.rows)])
        known = Known(rows, [f"{number:018}" for number in range(given.rows)], [f"Authorization: Bearer {key}"])
        others = (material(10**7 + number) for number in range(given.questions))
        asked = [f"{name} {more}" for _, _, name, more, *_ in others]
        documents, queries = engine.embed(asked), engine.embed(asked, input_type="query")
    gc.collect()
    gc.freeze()  # otherwise collecting torch's objects would pause the clients
    return [*map(known.embed, asked, documents), *map(known.search, asked, queries)]


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, Address]]:
    """Start a service with the usual limit of 1,024 open files, which it must raise; yield process id and address."""
    serve = [sys.executable, "-m", "app", "--config", str(folder / "owl-sap.toml"), "serve", "--port", "0"]
    command = ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "-", *serve]
    with announced(command, folder) as (process, greeting):
        host, _, port = greeting["url"].removeprefix("http://").rpartition(":")
        yield process.pid, (host, int(port))


class HighestMemory:
    """The highest resident memory of a process while the context is open, read twenty times a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.highest = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        with suppress(OSError, IndexError):
            while not self._over.wait(0.05):
                self.highest = max(self.highest, resident_bytes(self._pid))

    def __enter__(self) -> HighestMemory:
        self.highest = resident_bytes(self._pid)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# ------------------------------------------------------------------------------------------------------------ the part


def quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else 0.0


def in_ms(values: Sequence[float]) -> dict[str, Any]:
    found = {f"p{share}": quantile(values, share / 100) for share in (50, 95, 99)} | {"max": max(values, default=0.0)}
    return {name: round(value * 1000, 1) for name, value in found.items()} | {"requests": len(values)}


def figure(name: str, values: Sequence[float], unit: str = "", **more: Any) -> Figure:
    return Figure(f"crowd, {name}", list(values), unit, TARGETS.get(name), scatter=ANYTHING, more=more)


def crowd(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    report.machine |= machine(PACKAGES) | {"source": "the emulator, once, into a local store"}
    tallies: list[Tally] = []
    lags: list[float] = []
    files: list[int] = []

    async def few(seconds: float) -> Tally:
        some = Crowd(address, questions, pause=0)
        await some.connect(FEW)
        try:
            return await some.ask(seconds, seed=1)
        finally:
            some.close()

    async def many() -> None:
        there = Crowd(address, questions, given.pause)
        await there.connect(given.connections)
        try:
            async with lag_watched(lags):
                for number in range(given.rounds):
                    tallies.append(await there.ask(given.seconds, seed=1000 * number))
                    files.append(open_files(pid))
        finally:
            there.close()

    with tempfile.TemporaryDirectory() as folder:
        questions = prepared(Path(folder), given)
        with serving(Path(folder)) as (pid, address):
            uvloop.run(few(1))
            before = uvloop.run(few(given.seconds))
            idle, files_before = resident_bytes(pid), open_files(pid)
            with HighestMemory(pid) as peak:
                uvloop.run(many())
                time.sleep(2)
                grown = [(peak.highest - idle) / MB]
                memory = {"before_mb": round(idle / MB, 1), "after_mb": round(resident_bytes(pid) / MB, 1)}
            after = uvloop.run(few(given.seconds))
            files_left = open_files(pid) - files_before
    yield figure("server grows by at most", grown, "MB", **memory)
    report.details["crowd"] = {
        "four_clients_ms": in_ms(before.seconds),
        "four_clients_afterwards_ms": in_ms(after.seconds),
        "accepted_ms": {
            kind: in_ms([one for tally in tallies for one in tally.accepted.get(kind, [])])
            for kind in ("embed", "search")
        },
        "refused_ms": in_ms([one for tally in tallies for one in tally.refused]),
        "clients_own_lag_ms": in_ms(lags),
        "open_files": {"before": files_before, "most": max(files), "left_afterwards": files_left},
    }
    yield from figures(given, tallies, before, after)


def figures(given: argparse.Namespace, tallies: Sequence[Tally], before: Tally, after: Tally) -> Iterator[Figure]:
    """Compare the rounds of the crowd with four clients before and after them."""
    every, calm = [*tallies, after], quantile(before.seconds, 0.99)
    compared = sum(len(tally.seconds) for tally in every)
    yield figure("wrong answers", [tally.wrong for tally in every], compared=compared)
    kinds = Counter(failure for tally in every for failure in tally.failures)
    yield figure("failures", [len(tally.failures) for tally in every], kinds=kinds)
    lost = [tally.lost for tally in tallies]
    yield figure("connections lost", lost, connections=given.connections)
    yield figure("accepted", [len(tally.seconds) / given.seconds for tally in tallies], "requests/s")
    yield figure("refused", [len(tally.refused) / given.seconds for tally in tallies], "requests/s")
    for share in (0.5, 0.95, 0.99):
        times = [1000 * quantile(tally.seconds, share) for tally in tallies]
        yield figure(f"accepted p{100 * share:.0f}", times, "ms")
    slower = statistics.median(quantile(tally.seconds, 0.99) for tally in tallies) / calm
    yield figure("accepted p99 / that of four clients", [slower], "x")
    if all(tally.refused for tally in tallies):
        refusals = [1000 * quantile(tally.refused, 0.99) for tally in tallies]
        yield figure("refused p99", refusals, "ms")
    else:
        reason = "no request was refused: the crowd is too small"
        yield Figure("crowd, refused p99", (), "ms", TARGETS["refused p99"], error=reason)
    yield figure("four clients afterwards, p99 / before", [quantile(after.seconds, 0.99) / calm], "x")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rounds=3)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of a round, and of the four clients alone")
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between an answer and the next request")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=400, help="distinct queries of each of the two kinds")
    parser.add_argument("--model", default=MODEL)


if __name__ == "__main__":
    main("load", __doc__ or "", {"crowd": crowd}, add_options)
