"""Attacks that once stopped the service or took its memory, on processes as they are deployed: trailers and chunks
without end, and bodies with hundreds of thousands of faults. Bounds are generous; what they keep out was 10 to 100
times as much.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.surface.conftest import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MB = 1 << 20
SENT = 30 * MB
GROWTH = 10 * MB
WORST_PROBE = 5.0
"""Seconds, on a machine that does other things too."""
CPU_OF_A_BODY = 0.5
"""Seconds of all threads together; on an idle machine it takes 0.03. Once it took 4 to 53."""
PIECE = 64 * 1024
HEAD = (
    b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "trailers": (b"0\r\n", b"a: b\r\n" * (PIECE // 6)),
    "one trailer": (b"0\r\na: ", b"b" * PIECE),
    "an extension": (b"1;", b"x" * PIECE),
    "chunks of one byte": (b"", b"1\r\nx\r\n" * (PIECE // 6)),
    "requests ahead": (b"0\r\n\r\n", b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * (PIECE // 46)),
}
"""What comes behind the head, and what then comes again and again."""


@dataclass
class Attacked:
    process: subprocess.Popen[str]
    url: str
    probe: str

    @property
    def memory(self) -> int:
        """Resident bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu(self) -> float:
        """Seconds, of all threads."""
        behind = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(behind[11]) + int(behind[12])) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def probed(self) -> Iterator[Probes]:
        """Asked again and again meanwhile, over one connection, as whoever watches a service does."""
        probes, over = Probes(), threading.Event()

        def ask() -> None:
            with httpx.Client(timeout=300) as client:
                while not (over.is_set() and probes.statuses):
                    start = time.monotonic()
                    probes.statuses.add(client.get(self.url + self.probe).status_code)
                    probes.worst = max(probes.worst, time.monotonic() - start)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield probes
        finally:
            over.set()
            asking.join()

    def flood(self, first: bytes, again: bytes) -> int:
        """How many bytes were sent, of at most SENT; a connection that is ended is made anew."""
        where, sent = urlsplit(self.url), 0
        while sent < SENT:
            address = (where.hostname or "", where.port or 0)
            with suppress(ConnectionResetError, BrokenPipeError), socket.create_connection(address, 120) as connection:
                connection.sendall(HEAD + first)
                while sent < SENT:
                    sent += len(again)
                    connection.sendall(again)
        return sent


@dataclass
class Probes:
    worst: float = 0.0
    statuses: set[int] = field(default_factory=set)


@pytest.fixture(scope="module", params=["serve", "worker"])
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as process:
        yield process


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with running("serve", tmp_path_factory.mktemp("bodies")) as process:
        yield process


@contextmanager
def running(verb: str, folder: Path) -> Iterator[Attacked]:
    store, model = str(folder / "vectors"), "hash:64"
    own = {"OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": store, "OWL_SAP_EMBEDDING__MODEL": model}
    (folder / "owl-sap.toml").write_text('[[collections]]\nname = "notes"\ndocuments = true\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "app", verb],
        cwd=folder,
        env=environment(**own, OWL_SAP_API__PORT="0", OWL_SAP_WORKER__METRICS_PORT="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        url = told["url"] if verb == "serve" else told["metrics"].removesuffix("/metrics")
        yield Attacked(process, url, "/health/live" if verb == "serve" else "/metrics")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("flood", FLOODS)
def test_what_comes_beside_a_body_takes_no_memory_and_keeps_nobody_waiting(attacked: Attacked, flood: str) -> None:
    attacked.flood(*FLOODS[flood])  # once before, for what is loaded and kept from then on
    before = attacked.memory
    with attacked.probed() as probes, ExitStack() as stack:
        for _ in range(4):
            attacker = threading.Thread(target=attacked.flood, args=FLOODS[flood])
            attacker.start()
            stack.callback(attacker.join)
    grown = attacked.memory - before
    print(f"{flood}: {grown / MB:.1f} MB more, worst probe {probes.worst:.2f} s")
    assert grown < GROWTH
    assert probes.statuses == {200}
    assert probes.worst < WORST_PROBE


def listed(name: str, item: str, bytes_: int) -> bytes:
    return f'{{"{name}": [{",".join([item] * (bytes_ // (len(item) + 1) - 10))}]}}'.encode()


def members(name: str, bytes_: int) -> bytes:
    return json.dumps({"query": "a", "inputs": "a"} | {f"{name}{number}": 0 for number in range(bytes_ // 12)}).encode()


BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "input": ("/v1/embeddings", lambda size: listed("input", "{}", size)),
    "lists of input": ("/v1/embeddings", lambda size: listed("input", '["",""]', size)),
    "inputs": ("/embed", lambda size: listed("inputs", "1", size)),
    "vector": ("/v1/collections/notes/search", lambda size: listed("vector", '""', size)),
    "members": ("/v1/collections/notes/search", lambda size: members("x", size)),
    "documents": ("/v1/collections/notes/documents", lambda size: listed("documents", "{}", size)),
    "members of documents": (
        "/v1/collections/notes/documents",
        lambda size: listed("documents", '{"a":0,"b":0,"c":0,"d":0,"e":0}', size),
    ),
    "texts to rerank": ("/v1/rerank", lambda size: listed("documents", "{}", size)),
    "ids": ("/v1/collections/notes/documents/delete", lambda size: listed("ids", "0", size)),
    "keys": ("/v1/collections/notes/quarantine/retry", lambda size: listed("keys", "0", size)),
    "queries": ("/v1/collections/notes/generations", lambda size: listed("queries", "0", size)),
    "members of a sync": ("/v1/collections/notes/sync", lambda size: members("x", size)),
}


@pytest.mark.parametrize("size", [2_000_000, 150_000], ids=["2 MB", "150 kB"])
@pytest.mark.parametrize("what", BODIES)
def test_a_faulty_body_stops_nobody(service: Attacked, what: str, size: int) -> None:
    """The small ones have not too many values, and are parsed."""
    path, body = BODIES[what]
    content = body(size)
    with httpx.Client(base_url=service.url, timeout=300) as client:
        ask = {"content": content, "headers": {"Content-Type": "application/json"}}
        assert client.post(path, **ask).status_code in (413, 422)  # type: ignore[arg-type]
        before = service.cpu
        answers = [client.post(path, **ask) for _ in range(3)]  # type: ignore[arg-type]
        spent = (service.cpu - before) / 3
    print(f"{what}, {len(content)} bytes: {1000 * spent:.0f} ms of CPU")
    assert {answer.status_code for answer in answers} <= {413, 422}
    assert all(len(answer.content) < 20_000 for answer in answers)
    assert spent < CPU_OF_A_BODY
