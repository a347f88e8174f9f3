"""What does REST cost, with an engine that takes no time?

    python benchmarks/rest.py [PART ...] [--rounds 7] [--seconds 1.5] [--out benchmarks/results/rest.json]

The server is a child process with one worker (`rest_server.py`); this process asks, on the other core, over keep-alive
connections on loopback: prepared bytes out, answers counted and thrown away, so that asking is never the limit. CPU
seconds are those of the whole server process, all threads, by the kernel's clock for it; they and the ratios hold on a
shared machine too, requests a second on a quiet one only. Rounds take turns; the median counts; `disturbed` says that
the rounds scatter because something else was running.

    small   requests a second for one short text, and CPU microseconds of each
            >= 1,500 requests a second over /embed and over OpenAI's route, also where the service wants a key, which
            each request then carries, counted against its rate (`with a key`)
            beside it uvicorn alone on the same bytes (`bare`), hash:384 behind the engine's queue (`hashed`), and a
            search that takes no time
    forms   CPU milliseconds of a request for 256 texts x 384 floats    base64 <= 1.7, JSON floats <= 4.5, raw <= 0.6
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark.harness import (  # noqa: E402  # noqa: E402
    Figure,
    Report,
    at_least,
    at_most,
    machine,
    main,
)
from app.src.benchmark.processes import announced  # noqa: E402

PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "pydantic", "orjson")
CONNECTIONS = 8
TEXTS, DIMENSION = 256, 384
MANY = 60  # requests of a round with many texts
TARGETS = {
    "small, embed": at_least(1500),
    "small, embed with a key": at_least(1500),
    "small, openai": at_least(1500),
    "small, openai with a key": at_least(1500),
    "forms, base64, CPU of each": at_most(1.7),
    "forms, floats, CPU of each": at_most(4.5),
    "forms, raw, CPU of each": at_most(0.6),
}
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


# ----------------------------------------------------------------------------------------------------------- requests


TOKEN = b"KEY-OF-THE-SERVER"  # in a request, where the server's own key goes


def post(path: str, body: Any, accept: str = "application/json") -> bytes:
    """The bytes of a request as clients send it: the headers of httpx, and a token."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\nAccept-Encoding: gzip, deflate\r\n"
        f"Connection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\nAuthorization: Bearer {TOKEN.decode()}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def texts(count: int) -> list[str]:
    """About 20 tokens each."""
    return [
        f"hydraulic pump {number}. stainless steel, DIN 933, leaks at the flange, released" for number in range(count)
    ]


OPENAI = {"input": "hydraulic pump leaks", "model": "hash:384", "encoding_format": "base64"}
SMALL = {
    "bare": post("/embed", {"inputs": "hydraulic pump leaks at the flange"}),
    "embed": post("/embed", {"inputs": "hydraulic pump leaks at the flange"}),
    "embed with a key": post("/embed", {"inputs": "hydraulic pump leaks at the flange"}),
    "hashed": post("/embed", {"inputs": "hydraulic pump leaks at the flange"}),
    "openai": post("/v1/embeddings", OPENAI),
    "openai with a key": post("/v1/embeddings", OPENAI),
    "search": post(
        "/v1/collections/materials/search",
        {"query": "hydraulic pump leaks at the flange", "k": 10, "mode": "vector"},
    ),
    "search by vector": post("/v1/collections/materials/search", {"vector": [0.05103104] * DIMENSION, "k": 10}),
}
FORMS = {
    "base64": post("/v1/embeddings", {"input": texts(TEXTS), "encoding_format": "base64"}),
    "floats": post("/v1/embeddings", {"input": texts(TEXTS)}),
    "embed floats": post("/embed", {"inputs": texts(TEXTS)}),
    "raw": post("/embed", {"inputs": texts(TEXTS)}, "application/octet-stream"),
}


# ------------------------------------------------------------------------------------------------------------- asking


class Asker:
    """One connection that sends the same request again as soon as its answer is whole."""

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request, self._left, self._head = request, 0, b""

    def ask(self) -> None:
        self.socket.sendall(self._request)

    def answered(self, buffer: memoryview) -> bool:
        """Read what is there. True once an answer is whole. Raises for any status but 200."""
        got = self.socket.recv_into(buffer)
        if not got:
            raise ConnectionError("the server closed the connection")
        if self._left:
            self._left -= got
            return self._left == 0
        self._head += buffer[:got]
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return False
        found = _LENGTH.search(self._head, 0, end + 2)
        if not self._head.startswith(b"HTTP/1.1 200 ") or found is None:
            raise ConnectionError(self._head[:500].decode(errors="replace"))
        self._left = end + 4 + int(found[1]) - len(self._head)
        self._head = b""
        return self._left == 0


def ask(address: tuple[str, int], request: bytes, connections: int, enough: Callable[[int], bool]) -> int:
    """Ask over so many connections until `enough`(answers so far); how many answers there were."""
    answers, buffer = 0, memoryview(bytearray(1 << 20))
    with ExitStack() as held, selectors.DefaultSelector() as selector:
        for _ in range(connections):
            asker = Asker(address, request)
            held.enter_context(asker.socket)
            selector.register(asker.socket, selectors.EVENT_READ, asker)
            asker.ask()
        waiting = connections
        while waiting:
            for key, _ in selector.select():
                asker = key.data
                if asker.answered(buffer):
                    answers += 1
                    if enough(answers):
                        waiting -= 1
                    else:
                        asker.ask()
    return answers


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    address: tuple[str, int]
    key: bytes

    def cpu(self) -> float:
        """CPU seconds of the process so far, all threads. The number of the clock is what clock_getcpuclockid(3) makes
        of a process id on Linux (MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED in the kernel's posix-timers)."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def measure(self, request: bytes, connections: int, enough: Callable[[int], bool]) -> tuple[float, float]:
        """Requests a second, CPU seconds of each."""
        request = request.replace(TOKEN, self.key)
        before, start = self.cpu(), time.perf_counter()
        answers = ask(self.address, request, connections, enough)
        return answers / (time.perf_counter() - start), (self.cpu() - before) / answers


@contextmanager
def serving(kind: str) -> Iterator[Server]:
    command = [sys.executable, str(ROOT / "benchmarks" / "rest_server.py"), kind]
    with announced(command, ROOT) as (process, greeting):
        host, _, port = greeting["url"].removeprefix("http://").rpartition(":")
        yield Server(process.pid, (host, int(port)), greeting["key"].encode())


def for_seconds(seconds: float) -> Callable[[int], bool]:
    end = time.perf_counter() + seconds
    return lambda _: time.perf_counter() >= end


# ---------------------------------------------------------------------------------------------------------- the parts


def small(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    report.machine |= machine(PACKAGES)
    rates: dict[str, list[float]] = {name: [] for name in SMALL}
    costs: dict[str, list[float]] = {name: [] for name in SMALL}
    with ExitStack() as held:
        servers = {kind: held.enter_context(serving(kind)) for kind in ("full", "keyed", "bare", "hashed")}
        for turn in range(given.rounds + 1):
            for name, request in SMALL.items():
                server = servers["keyed" if name.endswith(" with a key") else name if name in servers else "full"]
                rate, cost = server.measure(request, CONNECTIONS, for_seconds(given.seconds if turn else 0.5))
                if turn:  # the first warms up
                    rates[name].append(rate)
                    costs[name].append(cost * 1e6)
    least = statistics.median(costs["bare"])
    for name in SMALL:
        yield Figure(f"small, {name}", rates[name], "requests/s", TARGETS.get(f"small, {name}"))
        more = {"over_bare": round(statistics.median(costs[name]) / least, 2)}
        yield Figure(f"small, {name}, CPU of each", costs[name], "µs", more=more)


def forms(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    report.machine |= machine(PACKAGES)
    costs: dict[str, list[float]] = {name: [] for name in FORMS}
    with serving("full") as product:
        for turn in range(given.rounds + 1):
            for name, request in FORMS.items():
                _, cost = product.measure(request, 1, lambda answers: answers >= MANY)
                if turn:
                    costs[name].append(cost * 1e3)
    for name, spent in costs.items():
        label = f"forms, {name}, CPU of each"
        yield Figure(label, spent, "ms", TARGETS.get(label), more={"texts": TEXTS, "dimension": DIMENSION})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rounds=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a round with small requests")


if __name__ == "__main__":
    main("rest", __doc__ or "", {"small": small, "forms": forms}, add_options)
