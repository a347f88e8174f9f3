"""What does the service do with more than it can? Whatever comes, answers stay right, refusals quick, memory bounded.

    python benchmarks/load.py [PART ...] [--rounds 3] [--connections 1000] [--out benchmarks/results/load.json]

`owl-sap serve` is a process of its own with the real model; this process has all the clients, on the same cores. Every
answer is compared with what it must be: vectors computed here beforehand, the true nearest rows by NumPy. The searched
rows come from the HANA emulator, once, into a local store. `api.max_wait` and `embedding.max_wait` are 1 s.

    crowd   1,000 connections that stay, a request each every second or so, search and embed mixed: several times
            what this machine computes. Bars: no wrong answer, no connection lost, p99 of accepted requests <= 3 s
            (waiting for a thread and for the engine, 1 s each, and computing), p99 of refusals <= 100 ms
    slow    four ordinary clients beside 220 that send a byte a second, of their header or their body, or that ask
            for much and never read. Bars: no wrong answer, p99 <= 3 x alone
    huge    bodies of 100 MB, their length told or in chunks, beside the four. Bars: each is refused with 413, in 1 s

In every part the server may grow by 200 MB at its highest, over what it was with the four clients alone.

--sync syncs other rows at the same time; --authenticate sends a key with each request.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tomlkit
import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark.harness import (  # noqa: E402  # noqa: E402
    Figure,
    Part,
    Report,
    Target,
    at_most,
    machine,
    main,
)
from app.src.benchmark.processes import (  # noqa: E402
    TEMPLATE,
    HighestMemory,
    MaterialsInEmulator,
    announced,
    resident_bytes,
    serve_command,
)
from app.src.benchmark.workloads import material, material_text  # noqa: E402
from app.src.core.engine import EmbeddingEngine  # noqa: E402
from app.src.core.loading import EngineOptions, load_engine  # noqa: E402
from app.src.settings import ApiSettings  # noqa: E402
from benchmarks.load_clients import Address, Crowd, Huge, Question, Slow, Tally, lag_watched, send_huge  # noqa: E402
from connector.model import Vectors  # noqa: E402

MODEL = "all-MiniLM-L6-v2"
PACKAGES = ("numpy", "torch", "fastapi", "starlette", "uvicorn", "httptools", "uvloop", "pydantic", "orjson")
COLLECTION, BESIDE = "materials", "beside"
MAX_WAIT, READ_TIMEOUT = 1.0, 5.0
FEW = 4
K, MOST_K = 5, 1000
# Of a number of a vector and of a score: batches of other companies round otherwise, in fp32 by less than 1e-5.
TOLERANCE = 1e-3
HUGE_BYTES = 100 * 10**6
MB = 1e6
GROWTH = at_most(200)
ANYTHING = float("inf")  # rounds of counts and of peaks may scatter as they like


# -------------------------------------------------------------------------------------------------- what is asked


def post(path: str, body: Any, headers: Sequence[str] = ()) -> bytes:
    content = json.dumps(body).encode()
    return head(path, (*headers, f"Content-Length: {len(content)}")) + b"\r\n" + content


def head(path: str, headers: Sequence[str]) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers)
    return "".join(f"{line}\r\n" for line in lines).encode()


def query(number: int) -> str:
    """Like the texts of rows, and none of them."""
    _, _, name, more, *_ = material(10**7 + number)
    return f"{name} {more}"


@dataclass(frozen=True, slots=True)
class Known:
    """What must be found: `rows` are the vectors of the stored rows, `keys` their ids."""

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
            """As many rows as asked for, none twice, each among the true nearest, with its own score."""
            hits = orjson.loads(body)["hits"]
            scored = [(score_of.get(hit["key"]["MATNR"], ANYTHING), hit["score"]) for hit in hits]
            distinct = {hit["key"]["MATNR"] for hit in hits}
            fitting = all(abs(own - told) <= TOLERANCE and own >= least for own, told in scored)
            return len(hits) == len(distinct) == K and fitting

        path = f"/v1/collections/{COLLECTION}/search"
        return Question("search", post(path, {"query": text, "k": K, "mode": "vector"}, self.headers), right)


# ----------------------------------------------------------------------------------------------------- the server


@dataclass
class Running:
    """`calm`: requests of a few clients before anything else; `idle_bytes`: what the server held after them."""

    pid: int
    address: Address
    headers: Sequence[str]
    calm: Tally = field(default_factory=Tally)
    idle_bytes: int = 0

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@dataclass
class World:
    """The emulator, the store that is filled from it once, and what is known of it. Made when first needed."""

    emulator: MaterialsInEmulator
    folder: Path
    engine: EmbeddingEngine
    given: argparse.Namespace
    questions: list[Question] = field(default_factory=list)
    _headers: list[str] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.folder / "owl-sap.toml"

    @property
    def log(self) -> Path:
        """What the last server wrote beside its address."""
        return self.folder / "serve.log"

    def prepare(self) -> None:
        if self.questions:
            return
        self.config.write_text(tomlkit.dumps(configuration(self.emulator, self.folder, self.given)), encoding="utf-8")
        if self.given.authenticate:
            self._headers.append(f"Authorization: Bearer {new_key(self.config)}")
        with self.serving() as server:
            synced(server, COLLECTION)
        numbers = range(self.given.rows)
        texts = [material_text(number) for number in numbers]
        asked = [query(number) for number in range(self.given.questions)]
        embed = self.engine.embed
        known = Known(embed(texts), [f"{number:018}" for number in numbers], self._headers)
        vectors = embed(asked)
        self.questions += map(known.embed, asked, vectors)
        self.questions += map(known.search, asked, vectors)
        gc.collect()
        gc.freeze()  # else collecting torch's objects would stop the clients

    @contextmanager
    def serving(self) -> Iterator[Running]:
        """Start a service with the usual limit of 1,024 open files, which it must raise itself."""
        command = ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "-", *serve_command(self.config)]
        inside = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("w+") as log, announced(command, self.folder, inside, log) as (process, greeting):
            host, _, port = greeting["url"].removeprefix("http://").rpartition(":")
            yield Running(process.pid, (host, int(port)), self._headers)

    @contextmanager
    def warmed(self) -> Iterator[Running]:
        """After a few clients have asked for a while; with a sync beside, where one is wanted."""
        self.prepare()
        with self.serving() as server:
            asyncio_run(lambda: ask_few(server, self.questions, 1))
            server.calm = asyncio_run(lambda: ask_few(server, self.questions, self.given.seconds))
            server.idle_bytes = resident_bytes(server.pid)
            if self.given.sync:
                told(server, "POST", f"/v1/collections/{BESIDE}/sync")
            yield server


def configuration(emulator: MaterialsInEmulator, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    api = {"max_wait": MAX_WAIT}
    if "read_timeout" in ApiSettings.model_fields:
        api["read_timeout"] = READ_TIMEOUT
    table = emulator.table(2 * given.rows if given.sync else given.rows)
    block = {"source": f"{table.schema}.{table.name}", "template": TEMPLATE}
    some = f"\"MATNR\" < '{given.rows:018}'"
    others = f"\"MATNR\" >= '{given.rows:018}'"
    return {
        "hana": emulator.login | {"encrypt": False},
        "store": {"kind": "local", "path": str(folder / "vectors")},
        "embedding": {
            "model": given.model,
            "device": "cpu",
            "precision": "fp32",
            "max_wait": MAX_WAIT,
            "query_cache_mb": 0,  # every search text is computed
        },
        "api": api,
        "access": {"keys": str(folder / "keys.json")} if given.authenticate else {},
        "collections": [block | {"name": COLLECTION, "where": some}, block | {"name": BESIDE, "where": others}],
    }


def new_key(config: Path) -> str:
    """Create a key without limits of its own, because the service's limits are measured here."""
    command = [sys.executable, "-m", "app", "--config", str(config), "keys", "create", "load", "--json"]
    command += ["--scope", "admin", "--every-row", "--rate", "100000000/day", "--concurrency", "100000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=config.parent, env=environment, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout)["key"])


def told(server: Running, method: str, path: str) -> Any:
    """The answer to one request."""
    headers = dict(line.split(": ", 1) for line in server.headers)
    with closing(http.client.HTTPConnection(*server.address, timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        found = json.load(response)
    assert response.status < 300, (method, path, found)
    return found


def synced(server: Running, name: str) -> None:
    job = told(server, "POST", f"/v1/collections/{name}/sync")["job"]
    while (found := told(server, "GET", f"/v1/jobs/{job}"))["state"] in ("queued", "running", "waiting"):
        time.sleep(0.1)
    assert found["state"] == "succeeded", found


# ------------------------------------------------------------------------------------------------------- the parts


def asyncio_run(work: Callable[[], Any]) -> Any:
    return uvloop.run(work())


async def ask_few(server: Running, questions: Sequence[Question], seconds: float, seed: int = 1) -> Tally:
    crowd = Crowd(server.address, questions, pause=0)
    await crowd.connect(FEW)
    try:
        return await crowd.ask(seconds, seed)
    finally:
        crowd.close()


def quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else 0.0


def in_ms(values: Sequence[float]) -> dict[str, Any]:
    found = {f"p{share}": quantile(values, share / 100) for share in (50, 95, 99)} | {"max": max(values, default=0.0)}
    return {name: round(value * 1000, 1) for name, value in found.items()} | {"requests": len(values)}


def figure(name: str, values: Sequence[float], unit: str = "", target: Target | None = None, **more: Any) -> Figure:
    return Figure(name, list(values), unit, target, scatter=ANYTHING, more=more)


def memory(part: str, server: Running, peak: HighestMemory) -> Iterator[Figure]:
    grown = [(peak.highest - server.idle_bytes) / MB]
    about = {"before_mb": round(server.idle_bytes / MB, 1), "after_mb": round(resident_bytes(server.pid) / MB, 1)}
    yield figure(f"{part}, server grows by at most", grown, "MB", GROWTH, **about)


def answers(part: str, tallies: Sequence[Tally]) -> Iterator[Figure]:
    compared = sum(len(tally.seconds) for tally in tallies)
    yield figure(f"{part}, wrong answers", [tally.wrong for tally in tallies], "", at_most(0), compared=compared)
    failed = [failure for tally in tallies for failure in tally.failures]
    kinds = {kind: failed.count(kind) for kind in sorted(set(failed))}
    yield figure(f"{part}, failures", [len(tally.failures) for tally in tallies], "", at_most(0), kinds=kinds)


def crowd(world: World, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    tallies: list[Tally] = []
    lags: list[float] = []

    async def come() -> None:
        there = Crowd(server.address, world.questions, given.pause)
        await there.connect(given.connections)
        try:
            async with lag_watched(lags):
                for number in range(given.rounds):
                    tallies.append(await there.ask(given.seconds, seed=1000 * number))
                    files.append(server.open_files())
        finally:
            there.close()

    files: list[int] = []
    with world.warmed() as server:
        before = server.open_files()
        with HighestMemory(server.pid) as peak:
            asyncio_run(come)
            time.sleep(2)
            yield from memory("crowd", server, peak)
        again = asyncio_run(lambda: ask_few(server, world.questions, given.seconds))
        left = server.open_files() - before
    calm = quantile(server.calm.seconds, 0.99)
    by_kind = {
        kind: in_ms([one for tally in tallies for one in tally.accepted.get(kind, [])]) for kind in ("embed", "search")
    }
    report.details["crowd"] = {
        "four_clients_ms": in_ms(server.calm.seconds),
        "four_clients_afterwards_ms": in_ms(again.seconds),
        "accepted_ms": by_kind,
        "refused_ms": in_ms([one for tally in tallies for one in tally.refused]),
        "clients_own_lag_ms": in_ms(lags),
        "open_files": {"before": before, "most": max(files), "left_afterwards": left},
    }
    yield from answers("crowd", [*tallies, again])
    yield figure(
        "crowd, connections lost", [tally.lost for tally in tallies], "", at_most(0), connections=given.connections
    )
    yield figure("crowd, accepted", [len(tally.seconds) / given.seconds for tally in tallies], "requests/s")
    yield figure("crowd, refused", [len(tally.refused) / given.seconds for tally in tallies], "requests/s")
    for share in (0.5, 0.95, 0.99):
        target = at_most(1000 * (2 * MAX_WAIT + 1)) if share == 0.99 else None
        name = f"crowd, accepted p{100 * share:.0f}"
        yield figure(name, [1000 * quantile(tally.seconds, share) for tally in tallies], "ms", target)
    yield figure(
        "crowd, accepted p99 / that of four clients", [quantile(tally.seconds, 0.99) / calm for tally in tallies], "x"
    )
    if all(tally.refused for tally in tallies):
        refusals = [1000 * quantile(tally.refused, 0.99) for tally in tallies]
        yield figure("crowd, refused p99", refusals, "ms", at_most(100))
    else:
        yield Figure(
            "crowd, refused p99", (), "ms", at_most(100), error="no request was refused: the crowd is too small"
        )
    yield figure(
        "crowd, four clients afterwards, p99 / before", [quantile(again.seconds, 0.99) / calm], "x", at_most(2)
    )


def slow(world: World, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with world.warmed() as server:
        held = post(
            f"/v1/collections/{COLLECTION}/search", {"query": query(0), "k": MOST_K, "mode": "vector"}, server.headers
        )
        # Readers are few, for what they ask for is work: it is their reading that is to be slow.
        count = {"header": given.slow, "body": given.slow, "reader": max(1, given.slow // 5)}
        those = Slow(server.address, head("/embed", server.headers), held)

        async def both() -> Tally:
            beside = asyncio.create_task(those.run(count, given.seconds * 2))
            await asyncio.sleep(given.seconds * 0.75)  # what the readers asked for has been found, and waits
            tally = await ask_few(server, world.questions, given.seconds)
            await beside
            return tally

        with HighestMemory(server.pid) as peak:
            tally = asyncio_run(both)
            yield from memory("slow", server, peak)
    report.details["slow"] = {"alone_ms": in_ms(server.calm.seconds), "beside_ms": in_ms(tally.seconds)}
    yield from answers("slow", [tally])
    ratio = quantile(tally.seconds, 0.99) / quantile(server.calm.seconds, 0.99)
    yield figure("slow, p99 of others / alone", [ratio], "x", at_most(3))
    for kind, number in count.items():
        share = those.closed.get(kind, 0) / number
        yield figure(f"slow, {kind}, closed by the server", [share], "", seconds=given.seconds * 2, clients=number)


def huge(world: World, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    found = {"declared": Huge(), "chunked": Huge()}

    async def flood() -> Tally:
        begun = [
            send_huge(server.address, header, given.huge_bytes, declared=kind == "declared", huge=huge)
            for kind, huge in found.items()
            for _ in range(given.huge)
        ]
        beside = asyncio.create_task(ask_few(server, world.questions, given.seconds))
        await asyncio.gather(*begun)
        return await beside

    with world.warmed() as server:
        header = head("/embed", server.headers)
        with HighestMemory(server.pid) as peak:
            tally = asyncio_run(flood)
            time.sleep(1)
            yield from memory("huge", server, peak)
    report.details["huge"] = {"alone_ms": in_ms(server.calm.seconds), "beside_ms": in_ms(tally.seconds)}
    yield from answers("huge", [tally])
    for kind, those in found.items():
        about = {"bytes": given.huge_bytes, "bodies": given.huge}
        why = sorted(set(those.unanswered))
        yield figure(f"huge, {kind}, not answered with 413", [len(those.unanswered)], "", at_most(0), why=why, **about)
        sent = round(statistics.median(those.sent) / MB, 1)
        slowest = [1000 * max(those.seconds)]
        yield figure(f"huge, {kind}, slowest refusal", slowest, "ms", at_most(1000), sent_mb_by_then=sent)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rounds=3)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round, and of the four clients alone")
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between an answer and the next request")
    parser.add_argument("--slow", type=int, default=100, help="slow clients of each of three kinds")
    parser.add_argument("--huge", type=int, default=20, help="huge bodies of each of two kinds")
    parser.add_argument("--huge-bytes", type=int, default=HUGE_BYTES)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=400, help="different ones, of each of two kinds")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--sync", action="store_true", help="a job syncs as many other rows at the same time")
    parser.add_argument("--authenticate", action="store_true", help="with a key, made by `owl-sap keys create`")


@dataclass
class Held:
    """One world for all parts, made for the first of them."""

    stack: ExitStack
    _world: World | None = None

    def world(self, given: argparse.Namespace) -> World:
        if self._world is None:
            engine = self.stack.enter_context(load_engine(EngineOptions(given.model, device="cpu", precision="fp32")))
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            self._world = World(self.stack.enter_context(MaterialsInEmulator(folder)), folder, engine, given)
        return self._world

    def part(self, measured: Callable[[World, argparse.Namespace, Report], Iterator[Figure]]) -> Part:
        def run(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
            report.machine |= machine(PACKAGES) | {"source": "the emulator, once, into a local store"}
            yield from measured(self.world(given), given, report)

        return run


if __name__ == "__main__":
    with ExitStack() as opened:
        held = Held(opened)
        main("load", __doc__ or "", {part.__name__: held.part(part) for part in (crowd, slow, huge)}, add_options)
