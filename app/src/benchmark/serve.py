"""How many requests a second does the REST service answer, and how long does one take? A service with the user's model,
or one that runs already, under load from this process; beside it, if wanted, another that speaks OpenAI's protocol.
"""

from __future__ import annotations

import http.client
import itertools
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import numpy as np

from app.src.benchmark.machine import machine
from app.src.benchmark.report import Report
from app.src.benchmark.side_by_side import Figure, Work, WorkFailed, interleaved, significant
from app.src.benchmark.workloads import texts
from connector.errors import ConfigurationError, Unavailable

OURS, THEIRS = "ours", "theirs"
_START_SECONDS = 120.0
_ANSWER_SECONDS = 60.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeBenchmark:
    """`url`: of a service that runs; None: one is started. `against`: the address of another. `seconds`: of load in one
    round, for each number of `clients`."""

    url: str | None = None
    against: str | None = None
    model: str | None = None
    rounds: int = 3
    seconds: float = 1.5
    clients: Sequence[int] = (1, 8)


class RequestFailed(ConfigurationError):
    """The service gave something else than vectors."""


def measure(options: ServeBenchmark, config: Path | None, say: Say) -> Report:
    """`config`: the settings file of a service to be started. Raises RequestFailed, Unavailable. Another server that
    fails under load gets figures that say so."""
    report = Report(
        "serve", machine(), {"rounds": options.rounds, "seconds": options.seconds, "request": "one short text"}
    )
    with _service(options.url, config, say) as url:
        report.options["url"] = "started for this" if options.url is None else url
        places = {OURS: Place(url, None)}
        if options.against is not None:
            report.options["against"] = options.against
            places[THEIRS] = Place(options.against, options.model)
        for clients in options.clients:
            say(f"{clients} clients: {options.rounds} rounds of {options.seconds} s")
            report.figures += _under_load(places, clients, options)
            places = {name: place for name, place in places.items() if name == OURS or not report.failed}
    return report


class Place:
    """An address that answers POST /v1/embeddings, and the milliseconds its answers took. Raises RequestFailed for an
    address that is none."""

    def __init__(self, url: str, model: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"//{url}")
        if parts.scheme not in ("", "http") or not parts.hostname:
            raise RequestFailed(f"{url} is no address of a service: http://HOST:PORT is wanted")
        self.name = url
        self._host, self._port = parts.hostname, parts.port or 80
        self._path = parts.path.rstrip("/") + "/v1/embeddings"
        self._bodies = [self._body(text, model) for text in texts(0.1)[0].texts]
        self.milliseconds: list[float] = []

    @staticmethod
    def _body(text: str, model: str | None) -> bytes:
        asked = {"input": text, "encoding_format": "base64"}
        return json.dumps(asked if model is None else asked | {"model": model}).encode()

    def client(self, first: int, until: float) -> list[float]:
        """One client, one request after the other on one connection, until the clock says so; milliseconds of each."""
        took: list[float] = []
        with closing(http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER_SECONDS)) as connection:
            for body in itertools.islice(itertools.cycle(self._bodies), first, None):
                start = time.perf_counter()
                if start >= until:
                    return took
                self._ask(connection, body)
                took.append((time.perf_counter() - start) * 1000)
        return took

    def _ask(self, connection: http.client.HTTPConnection, body: bytes) -> None:
        try:
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"{self.name} does not answer ({type(error).__name__})") from None
        if response.status != 200 or b"embedding" not in answer[:500]:
            raise RequestFailed(f"{self.name}{self._path} answers with status {response.status} and no vectors")


def _under_load(places: dict[str, Place], clients: int, options: ServeBenchmark) -> list[Figure]:
    works = {name: _load(place, clients, options.seconds) for name, place in places.items()}
    if THEIRS in works:
        works[THEIRS] = _may_fail(works[THEIRS])
    for place in places.values():
        place.milliseconds.clear()
    rounds = interleaved(works, options.rounds, pause=0.1)
    figures = []
    for name, place in places.items():
        if name in rounds.failed:
            figures.append(rounds.figure(f"{name}, {clients} clients", name, "requests/s"))
            continue
        took = place.milliseconds
        p50, p95 = (significant(float(np.percentile(took, share))) for share in (50, 95))
        rates = [1 / seconds for seconds in rounds.took[name]]
        more = {"p50_ms": p50, "p95_ms": p95, "requests": len(took)}
        figures.append(Figure(f"{name}, {clients} clients", rates, "requests/s", more=more))
    if len(places) > 1:
        figures.append(rounds.ratio(f"{clients} clients: requests/s, {OURS} / {THEIRS}", THEIRS, OURS))
    return figures


def _may_fail(work: Work) -> Work:
    """The other server's, which shall not end what is measured of ours."""

    def run() -> float:
        try:
            return work()
        except RequestFailed as error:
            raise WorkFailed(str(error)) from error

    return run


def _load(place: Place, clients: int, seconds: float) -> Work:
    """Seconds a request, of all clients together."""

    def run() -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            each = pool.map(lambda at: place.client(at * 7, start + seconds), range(clients))
            took = list(itertools.chain.from_iterable(each))
        place.milliseconds += took
        return (time.perf_counter() - start) / max(1, len(took))

    return run


@contextmanager
def _service(url: str | None, config: Path | None, say: Say) -> Iterator[str]:
    if url is not None:
        yield url
        return
    say("starting the service")
    with tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-") as folder, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "app.src.benchmark.served", folder]
        command += [] if config is None else [str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                yield _announced(process, log)
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def _announced(process: subprocess.Popen[str], log: IO[bytes]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
    line = process.stdout.readline() if readable else ""
    try:
        url: str = json.loads(line)["url"]
    except (ValueError, KeyError):
        log.seek(0)
        words = log.read().decode(errors="replace").strip().splitlines()
        raise Unavailable(f"the service did not start: {words[-1] if words else 'it said nothing'}") from None
    return url
