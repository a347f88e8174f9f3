"""Measure requests per second and latency of the REST service under load from this process. The service is started with
the user's model, or is already running; optionally compare it with a server that speaks OpenAI's protocol.

`python -m app.src.benchmark.serve FOLDER [CONFIG]` starts the service.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from app.src.benchmark.harness import Figure, PeerUnavailable, Report, Say, Work, interleaved, machine, percentiles
from app.src.benchmark.workloads import texts
from app.src.demo import announced

OURS, THEIRS = "ours", "theirs"
CLIENTS = (1, 8)
_ANSWER_SECONDS = 60.0


def measure(  # noqa: PLR0913 - the options of the verb
    config: Path | None,
    say: Say,
    *,
    url: str | None = None,
    against: str | None = None,
    model: str | None = None,
    rounds: int = 3,
    seconds: float = 1.5,
) -> Report:
    """Measure under load for `seconds` per round. `config`: the settings file of a service to start if there is no
    `url`. `against`: the address of another server, and its `model`. Raises PeerUnavailable if a server fails,
    Unavailable if ours does not start."""
    about = {"rounds": rounds, "seconds": seconds, "request": "one short text", "url": url or "started for this"}
    report = Report("serve", machine(), about | ({} if against is None else {"against": against}))
    with ExitStack() as held:
        if url is None:
            say("starting the service")
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-"))
            command = [sys.executable, "-m", "app.src.benchmark.serve", folder, *([str(config)] if config else [])]
            url = str(held.enter_context(announced(command, Path.cwd()))[1]["url"])
        short = texts(0.1)["short"]
        servers = {OURS: (url, _bodies(short, None))}
        if against is not None:
            servers[THEIRS] = (against, _bodies(short, model))
        milliseconds: dict[str, list[float]] = {}

        def load(name: str, clients: int) -> float:
            """Return the seconds per request of all clients together."""
            start, (address, bodies) = time.perf_counter(), servers[name]
            with ThreadPoolExecutor(clients) as pool:
                each = pool.map(lambda at: client(address, bodies, at * 7, start + seconds), range(clients))
                took = list(itertools.chain.from_iterable(each))
            milliseconds[name] += took
            return (time.perf_counter() - start) / max(1, len(took))

        for clients in CLIENTS:
            say(f"{clients} clients: {rounds} rounds of {seconds} s")
            milliseconds |= {name: [] for name in servers}
            works: dict[str, Work] = {name: partial(load, name, clients) for name in servers}
            done = interleaved(works, rounds, pause=0.1)
            for name in servers:
                found = percentiles(milliseconds[name], 50, 95)
                more = {"p50_ms": found["p50"], "p95_ms": found["p95"], "requests": len(milliseconds[name])}
                rates = [1 / one for one in done.took[name]]
                report.figures.append(Figure(f"{name}, {clients} clients", rates, "requests/s", more=more))
            if THEIRS in servers:
                report.figures.append(done.ratio(f"{clients} clients: requests/s, {OURS} / {THEIRS}", THEIRS, OURS))
    return report


def _bodies(texts: Sequence[str], model: str | None) -> list[bytes]:
    named = {"encoding_format": "base64"} | ({} if model is None else {"model": model})
    return [json.dumps({"input": text} | named).encode() for text in texts]


def client(url: str, bodies: Sequence[bytes], first: int, until: float) -> list[float]:
    """Send requests to POST /v1/embeddings on one connection until time `until`; return the milliseconds of each.
    Raises PeerUnavailable."""
    parts = urlsplit(url if "://" in url else f"//{url}")
    if parts.scheme not in ("", "http") or not parts.hostname:
        raise PeerUnavailable(f"{url} is not the address of a service; use http://HOST:PORT")
    path = parts.path.rstrip("/") + "/v1/embeddings"
    took: list[float] = []
    with closing(http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=_ANSWER_SECONDS)) as connection:
        for body in itertools.islice(itertools.cycle(bodies), first, None):
            start = time.perf_counter()
            if start >= until:
                break
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise PeerUnavailable(f"{url} does not answer ({type(error).__name__})") from None
            if response.status != 200 or b"embedding" not in answer[:500]:
                raise PeerUnavailable(f"{url}{path} answers with status {response.status} and no vectors")
            took.append((time.perf_counter() - start) * 1000)
    return took


if __name__ == "__main__":
    # Serve the user's model and limits over an empty store; the user's own store and state stay untouched.
    from app.src.api import server
    from app.src.service.service import Service
    from app.src.settings import Settings, load
    from app.src.settings.model import StateSettings, StoreSettings

    own, wanted = Path(sys.argv[1]), load(Path(sys.argv[2]) if len(sys.argv) > 2 else None).settings
    settings = Settings(
        embedding=wanted.embedding,
        api=wanted.api.model_copy(update={"run_schedules": False, "job_workers": 0}),
        store=StoreSettings(kind="local", path=own / "store"),
        state=StateSettings(path=own / "state"),
    )
    with closing(Service(settings)) as service:
        server.serve(service, "127.0.0.1", 0, lambda url: print(json.dumps({"url": url}), flush=True))  # noqa: T201
