"""Measure requests per second and latency of the REST service under load from this process. The service is started with
the user's model, or is already running; optionally compare it with a server with OpenAI's protocol.

`python -m app.src.benchmark.serve FOLDER [CONFIG]` starts the service.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from app.src.benchmark.harness import Figure, Report, Say, Work, WorkFailed, interleaved, machine, percentiles
from app.src.benchmark.workloads import texts
from app.src.demo import announced
from connector.errors import ConfigurationError

OURS, THEIRS = "ours", "theirs"
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ServeBenchmark:
    """`url`: of a running service; None: start one. `against`: the address of another server, and its `model`.
    `seconds`: of load per round, for each number of `clients`."""

    url: str | None = None
    against: str | None = None
    model: str | None = None
    rounds: int = 3
    seconds: float = 1.5
    clients: Sequence[int] = (1, 8)


class RequestFailed(ConfigurationError):
    """The service did not return vectors."""


def measure(options: ServeBenchmark, config: Path | None, say: Say) -> Report:
    """Measure under load. `config`: the settings file of a service to start. Raises RequestFailed, Unavailable. If the
    other server fails under load, its figures are failed."""
    about = {"rounds": options.rounds, "seconds": options.seconds, "request": "one short text"}
    report = Report("serve", machine(), about)
    with _service(options.url, config, say) as url:
        report.options["url"] = "started for this" if options.url is None else url
        endpoints = {OURS: Endpoint(url, None)}
        if options.against is not None:
            report.options["against"] = options.against
            endpoints[THEIRS] = Endpoint(options.against, options.model)
        for clients in options.clients:
            say(f"{clients} clients: {options.rounds} rounds of {options.seconds} s")
            report.figures += _under_load(endpoints, clients, options)
            if report.failed:
                endpoints.pop(THEIRS, None)
    return report


class Endpoint:
    """A server that answers POST /v1/embeddings. Raises RequestFailed for an invalid address."""

    def __init__(self, url: str, model: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"//{url}")
        if parts.scheme not in ("", "http") or not parts.hostname:
            raise RequestFailed(f"{url} is not the address of a service; use http://HOST:PORT")
        self.name = url
        self._host, self._port = parts.hostname, parts.port or 80
        self._path = parts.path.rstrip("/") + "/v1/embeddings"
        named = {} if model is None else {"model": model}
        self._bodies = [
            json.dumps({"input": text, "encoding_format": "base64"} | named).encode() for text in texts(0.1)[0].texts
        ]

    def client(self, first: int, until: float) -> list[float]:
        """Send requests on one connection until time `until`; return the milliseconds of each."""
        took: list[float] = []
        with closing(http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER_SECONDS)) as connection:
            for body in itertools.islice(itertools.cycle(self._bodies), first, None):
                start = time.perf_counter()
                if start >= until:
                    return took
                try:
                    connection.request("POST", self._path, body, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    answer = response.read()
                except (OSError, http.client.HTTPException) as error:
                    raise RequestFailed(f"{self.name} does not answer ({type(error).__name__})") from None
                if response.status != 200 or b"embedding" not in answer[:500]:
                    raise RequestFailed(f"{self.name}{self._path} answers with status {response.status} and no vectors")
                took.append((time.perf_counter() - start) * 1000)
        return took


def _under_load(endpoints: dict[str, Endpoint], clients: int, options: ServeBenchmark) -> list[Figure]:
    milliseconds: dict[str, list[float]] = {name: [] for name in endpoints}

    def load(name: str) -> Work:
        def run() -> float:
            """Return the seconds per request of all clients together. Only the other server may fail."""
            start = time.perf_counter()
            try:
                with ThreadPoolExecutor(clients) as pool:
                    each = pool.map(lambda at: endpoints[name].client(at * 7, start + options.seconds), range(clients))
                    took = list(itertools.chain.from_iterable(each))
            except RequestFailed as error:
                if name == THEIRS:
                    raise WorkFailed(str(error)) from error
                raise
            milliseconds[name] += took
            return (time.perf_counter() - start) / max(1, len(took))

        return run

    rounds = interleaved({name: load(name) for name in endpoints}, options.rounds, pause=0.1)
    figures = []
    for name, times in milliseconds.items():
        label = f"{name}, {clients} clients"
        if name in rounds.failed:
            figures.append(rounds.figure(label, name, "requests/s"))
            continue
        found = percentiles(times, 50, 95)
        more = {"p50_ms": found["p50"], "p95_ms": found["p95"], "requests": len(times)}
        figures.append(Figure(label, [1 / seconds for seconds in rounds.took[name]], "requests/s", more=more))
    if len(endpoints) > 1:
        figures.append(rounds.ratio(f"{clients} clients: requests/s, {OURS} / {THEIRS}", THEIRS, OURS))
    return figures


@contextmanager
def _service(url: str | None, config: Path | None, say: Say) -> Iterator[str]:
    if url is not None:
        yield url
        return
    say("starting the service")
    with tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-") as folder:
        command = [sys.executable, "-m", "app.src.benchmark.serve", folder]
        command += [] if config is None else [str(config)]
        with announced(command, Path.cwd()) as (_, greeting):
            yield greeting["url"]


def _run_service(folder: Path, config: Path | None) -> None:
    """Serve the user's model and limits over an empty store, without touching anything else of the user's."""
    from app.src.api import server
    from app.src.service.service import Service
    from app.src.settings import Settings, StateSettings, StoreSettings, load

    wanted = load(config).settings
    settings = Settings(
        embedding=wanted.embedding,
        api=wanted.api.model_copy(update={"run_schedules": False, "job_workers": 0}),
        store=StoreSettings(kind="local", path=folder / "store"),
        state=StateSettings(path=folder / "state"),
    )
    with closing(Service(settings)) as service:
        server.serve(service, "127.0.0.1", 0, lambda url: print(json.dumps({"url": url}), flush=True))  # noqa: T201


if __name__ == "__main__":
    _run_service(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
