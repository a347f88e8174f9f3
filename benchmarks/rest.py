"""What does REST cost, with an engine that takes no time?

    python benchmarks/rest.py [PART ...] [--rounds 7] [--seconds 1.5] [--out benchmarks/results/rest.json]

The server is a child process with one worker (`--server`): the product's own application over an embedder that returns
prepared vectors. This process sends prepared requests from the other core, over keep-alive connections on loopback,
and counts and discards the answers. CPU seconds are those of the whole server process. They and the ratios also hold on
a shared machine; requests a second hold only on a quiet one. Rounds take turns; figures are medians.

    small   requests a second for one short text, and CPU microseconds of each, over /embed and OpenAI's route (>= 1,500
            a second), also with authentication (`with a key`); for comparison uvicorn alone (`bare`)
    forms   CPU milliseconds of a request for 256 texts x 384 floats    base64 <= 1.7, JSON floats <= 4.5, raw <= 0.6
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import selectors
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from app.src.access import keys
from app.src.api.server import serve
from app.src.benchmark.harness import Figure, Report, machine
from app.src.demo import announced
from app.src.service.service import Service
from app.src.settings import Settings
from benchmarks.program import at_least, at_most, main

PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "pydantic", "orjson")
CONNECTIONS = 8
TEXTS, DIMENSION = 256, 384
MODEL = f"hash:{DIMENSION}"
MANY = 60  # requests per round with many texts
RATE = at_least(1500)
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
TOKEN = b"KEY-OF-THE-SERVER"  # placeholder in a request for the server's own key


def post(path: str, body: Any, accept: str = "application/json") -> bytes:
    """Return the bytes of a request with the headers of httpx and a token."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\nAccept-Encoding: gzip, deflate\r\n"
        f"Connection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\nAuthorization: Bearer {TOKEN.decode()}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


MANY_TEXTS = [f"hydraulic pump {at}. stainless steel, DIN 933, leaks at the flange, released" for at in range(TEXTS)]
EMBED = post("/embed", {"inputs": "hydraulic pump leaks at the flange"})
OPENAI = post("/v1/embeddings", {"input": "hydraulic pump leaks", "model": MODEL, "encoding_format": "base64"})
SMALL = {
    "bare": EMBED,
    "embed": EMBED,
    "embed with a key": EMBED,
    "openai": OPENAI,
    "openai with a key": OPENAI,
}
FORMS = {
    "base64": (post("/v1/embeddings", {"input": MANY_TEXTS, "encoding_format": "base64"}), at_most(1.7)),
    "floats": (post("/v1/embeddings", {"input": MANY_TEXTS}), at_most(4.5)),
    "raw": (post("/embed", {"inputs": MANY_TEXTS}, "application/octet-stream"), at_most(0.6)),
}


# --------------------------------------------------------------------------------------------------------- the clients


class Connection:
    """Repeats one request; sends it again when the answer is complete."""

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request, self._left, self._head = request, 0, b""

    def ask(self) -> None:
        self.socket.sendall(self._request)

    def answered(self, buffer: memoryview) -> bool:
        """Read available bytes. Return whether an answer is complete. Raises ConnectionError for any status but 200."""
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
    """Ask over `connections` connections until `enough`(answers so far) is true; return the number of answers."""
    answers, buffer = 0, memoryview(bytearray(1 << 20))
    with ExitStack() as held, selectors.DefaultSelector() as selector:
        for _ in range(connections):
            connection = Connection(address, request)
            held.enter_context(connection.socket)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.ask()
        waiting = connections
        while waiting:
            for key, _ in selector.select():
                connection = key.data
                if connection.answered(buffer):
                    answers += 1
                    if enough(answers):
                        waiting -= 1
                    else:
                        connection.ask()
    return answers


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    address: tuple[str, int]
    key: bytes

    def _cpu(self) -> float:
        """Return the CPU seconds of the process so far, all threads. Computes the clock id as clock_getcpuclockid(3)
        does on Linux (MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED in the kernel's posix-timers)."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def measure(self, request: bytes, connections: int, enough: Callable[[int], bool]) -> tuple[float, float]:
        """Return requests per second and CPU seconds per request."""
        before, start = self._cpu(), time.perf_counter()
        answers = ask(self.address, request.replace(TOKEN, self.key), connections, enough)
        return answers / (time.perf_counter() - start), (self._cpu() - before) / answers


@contextmanager
def serving(kind: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:  # for records of jobs
        command = [sys.executable, str(Path(__file__).resolve()), "--server", kind]
        with announced(command, Path(folder)) as (process, greeting):
            host, _, port = greeting["url"].removeprefix("http://").rpartition(":")
            yield Server(process.pid, (host, int(port)), greeting["key"].encode())


def small(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    report.machine |= machine(PACKAGES)
    rates: dict[str, list[float]] = {name: [] for name in SMALL}
    costs: dict[str, list[float]] = {name: [] for name in SMALL}
    with ExitStack() as held:
        servers = {kind: held.enter_context(serving(kind)) for kind in ("full", "keyed", "bare")}
        for turn in range(given.rounds + 1):
            for name, request in SMALL.items():
                server = servers["keyed" if name.endswith(" with a key") else "bare" if name == "bare" else "full"]
                end = time.perf_counter() + (given.seconds if turn else 0.5)
                rate, cost = server.measure(request, CONNECTIONS, lambda _: time.perf_counter() >= end)  # noqa: B023
                if turn:  # the first warms up
                    rates[name].append(rate)
                    costs[name].append(cost * 1e6)
    least = statistics.median(costs["bare"])
    for name in SMALL:
        yield Figure(f"small, {name}", rates[name], "requests/s", None if name == "bare" else RATE)
        more = {"over_bare": round(statistics.median(costs[name]) / least, 2)}
        yield Figure(f"small, {name}, CPU of each", costs[name], "µs", more=more)


def forms(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    report.machine |= machine(PACKAGES)
    costs: dict[str, list[float]] = {name: [] for name in FORMS}
    with serving("full") as product:
        for turn in range(given.rounds + 1):
            for name, (request, _) in FORMS.items():
                _, cost = product.measure(request, 1, lambda answers: answers >= MANY)
                if turn:
                    costs[name].append(cost * 1e3)
    for name, (_, target) in FORMS.items():
        more = {"texts": TEXTS, "dimension": DIMENSION}
        yield Figure(f"forms, {name}, CPU of each", costs[name], "ms", target, more=more)


# ---------------------------------------------------------------------------------------------------------- the server


def product(keyed: bool) -> None:
    """Run `owl-sap serve` without the queue; its embedder returns the same random unit vectors for all texts."""
    settings: dict[str, Any] = {"store": {"kind": "local", "path": "vectors"}, "embedding": {"model": MODEL}}
    key = "x" * 43
    if keyed:
        file = Path("keys.json").absolute()
        settings["access"] = {"keys": file}
        _, key = keys.create(file, keys.Grant("rest", ("admin",), rate="100000000/day", concurrency=10_000))
    found = np.random.default_rng(1).standard_normal((TEXTS, DIMENSION))
    vectors = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)

    def embed(texts: Sequence[str], **_: Any) -> Any:
        return vectors[: len(texts)]

    def embed_later(texts: Sequence[str], *, counted: Callable[[list[int]], None] | None = None, **_: Any) -> Any:
        if counted is not None:
            counted([4] * len(texts))
        done: Future[Any] = Future()
        done.set_result(embed(texts))
        return done

    with contextlib.closing(Service(Settings.model_validate(settings))) as service:
        embedder = service.parts.embedder
        embedder.embed, embedder.embed_later = embed, embed_later  # type: ignore[method-assign]
        serve(service, "127.0.0.1", 0, lambda url: print(json.dumps({"url": url, "key": key}), flush=True))


def bare() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Read a request and answer with two bytes: the minimum cost of any application on this server."""
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-length", b"2"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"[]"})

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    print(json.dumps({"url": f"http://127.0.0.1:{listening.getsockname()[1]}", "key": "x" * 43}), flush=True)
    uvicorn.Server(config).run([listening])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rounds=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="duration of a round of the part small")


if __name__ == "__main__":
    if "--server" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if sys.argv[-1] == "bare":
            bare()
        else:
            product(keyed=sys.argv[-1] == "keyed")
    else:
        main("rest", __doc__ or "", {"small": small, "forms": forms}, add_options)
