"""A real Prometheus with the project's own configuration, scraping a served API, a worker and a recorded exporter."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from app.src.access.keys import Grant, create
from app.src.access.principal import Scope
from app.src.core import nvml
from app.src.observe.metrics import CONTENT_TYPE, Metrics, gpu_samples
from app.src.service.wiring import EngineEmbedder
from hana_emulator.testing import Emulator
from tests.adversity.scene import NAME, Scene
from tests.monitoring.names import PROMETHEUS, ROOT, read_yaml
from tests.ports import free_port
from tests.surface.conftest import hashing as hashing
from tests.surface.conftest import make_scene as make_scene

RECORDED = ROOT / "tests/monitoring/dcgm_t4.prom"
PATIENCE = 60.0
EVERY = "500ms"
USED: tuple[Scope, ...] = ("metrics", "admin", "search")


def tool(name: str) -> Path:
    """Debian's promtool or prometheus. Without it the test is skipped by name; with CI=true it fails."""
    command = f"source scripts/lib/prometheus.sh && ensure_prometheus && prometheus_bin {name}"
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    if found.returncode != 0:
        why = f"{name} cannot be had here: {found.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return Path(found.stdout.strip())


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def fake_card() -> dict[str, Any]:
    """What GET /v1/gpu would answer on a T4 under load, by hand: not the recorded exporter's card."""
    state = nvml.GpuState(
        index=0,
        name="Tesla T4",
        uuid="GPU-own",
        memory_total_bytes=16_106_127_360,
        memory_used_bytes=9_563_013_120,
        utilization_percent=97,
        memory_utilization_percent=41,
        temperature_celsius=71,
        power_watts=69.8,
        power_limit_watts=70.0,
        sm_clock_mhz=1005,
        throttle=nvml.throttles(0x4),
        temperature_slowdown_celsius=93,
        ecc_uncorrected_errors=0,
        throttled_abnormally=False,
    )
    return asdict(nvml.GpuSnapshot((state,), "580.95.05", "13.0"))


@contextmanager
def answering(text: Callable[[], bytes]) -> Iterator[str]:
    """An exporter on a free port: its host and port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # Prometheus ends in the midst of a scrape
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@dataclass
class Monitored:
    """`api` and `worker`: what is scraped. `keys`: an API key of each scope that is used here."""

    prometheus: httpx.Client
    api: str
    worker: str
    keys: dict[str, str]

    def asking(self, scope: str) -> dict[str, str]:
        """The header of somebody with that scope."""
        return {"Authorization": f"Bearer {self.keys[scope]}"}

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result now. Raises AssertionError with what Prometheus says of it."""
        answer = self.prometheus.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{answer.get('error')}: {expression}"
        result = answer["data"]["result"]
        return result if answer["data"]["resultType"] == "vector" else [{"value": result}]

    def drawn(self, expression: str, seconds: int = 30) -> list[dict[str, Any]]:
        """As a panel draws it, with a point each second."""
        now = time.time()
        wanted = {"query": expression, "start": now - seconds, "end": now, "step": 1}
        answer = self.prometheus.post("/api/v1/query_range", data=wanted).json()
        assert answer["status"] == "success", f"{answer.get('error')}: {expression}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


def configuration(folder: Path, token: str, targets: dict[str, list[str]]) -> Path:
    """The project's own file with other addresses, another token file, and every second."""
    config = read_yaml(PROMETHEUS / "prometheus.yml")
    token_file = folder / "metrics_token"
    token_file.write_text(f"{token}\n")
    config["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), EVERY)
    config["rule_files"] = [str(PROMETHEUS / path) for path in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        for found in job.pop("dns_sd_configs", ()):  # the name of a container: here it leads to the first service
            meta = {"__meta_dns_name": found["names"][0]}
            job["static_configs"].append({"targets": targets[job["job_name"]], "labels": meta})
        if "authorization" in job:
            assert job["authorization"]["credentials_file"] == "/run/secrets/metrics_token"
            job["authorization"]["credentials_file"] = str(token_file)
    path = folder / "prometheus.yml"
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump(config, file)
    return path


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Asked to end, it does so with 0 and has complained of nothing."""
    with process:
        try:
            yield process
            process.terminate()
            _, errors = process.communicate(timeout=60)
            told = [line for line in (errors or "").splitlines() if not line.startswith(("Console: ", "REST: "))]
            assert (process.returncode, told) == (0, [])
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    read: dict[str, Any] = json.loads(process.stdout.readline())
    return read


def traffic(api: httpx.Client) -> None:
    """Some of everything that is counted."""
    for query in ("pump of plant 3", "pump of plant 3", "part 7"):
        assert api.post(f"/v1/collections/{NAME}/search", json={"query": query}).status_code == 200
    assert api.post("/embed", json={"inputs": ["pump", "plant", "part"]}).status_code == 200
    assert api.post("/embed", json={"inputs": []}).status_code == 422
    assert api.get("/health/ready").status_code == 200


@pytest.fixture(scope="session")
def monitored(
    emulator: Emulator, hashing: EngineEmbedder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Monitored]:
    """The API without workers, a worker, and Prometheus over both and a T4's recorded exporter."""
    program, folder = tool("prometheus"), tmp_path_factory.mktemp("monitored")
    connection = emulator.connect(autocommit=True)
    connection.cursor().execute('CREATE SCHEMA "MONITORED"')
    own = Metrics()
    own.sources["gpu"] = lambda: gpu_samples(fake_card())
    with ExitStack() as stack:
        stack.callback(connection.close)
        stack.callback(lambda: connection.cursor().execute('DROP SCHEMA "MONITORED" CASCADE'))
        scene = Scene(emulator, "MONITORED", "local", folder / "scene", hashing)
        stack.callback(scene.close)
        keys = {
            scope: create(folder / "keys.json", Grant(scope, (scope,)))[1] for scope in ("metrics", "admin", "search")
        }
        guarded = {"OWL_SAP_ACCESS__KEYS": str(folder / "keys.json")}
        alone = {"OWL_SAP_API__JOB_WORKERS": "0", "OWL_SAP_API__RUN_SCHEDULES": "false"}
        api = stack.enter_context(ended(scene.spawn("serve", "--port", "0", env=guarded | alone)))
        worker = stack.enter_context(ended(scene.spawn("worker", env=guarded | {"OWL_SAP_WORKER__METRICS_PORT": "0"})))
        dcgm = stack.enter_context(answering(RECORDED.read_bytes))
        card = stack.enter_context(answering(own.render))
        url, scraped = first_line(api)["url"], first_line(worker)["metrics"]
        admin = {"Authorization": f"Bearer {keys['admin']}"}
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30, headers=admin))
        port = free_port()
        targets = {
            "owl-sap-api": [url.removeprefix("http://")],
            "owl-sap-worker": [scraped.removeprefix("http://").removesuffix("/metrics"), card],
            "dcgm-exporter": [dcgm],
            "prometheus": [f"127.0.0.1:{port}"],
        }
        arguments = {
            "config.file": configuration(folder, keys["metrics"], targets),
            "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{port}",
            "log.level": "warn",
        }
        command = [str(program), *(f"--{name}={value}" for name, value in arguments.items())]
        log = stack.enter_context((folder / "prometheus.log").open("w"))
        stack.enter_context(ended(subprocess.Popen(command, stdout=log, stderr=log)))
        prometheus = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30))
        monitored = Monitored(prometheus, url, scraped, keys)
        _fill(monitored, client)
        yield monitored


def _fill(monitored: Monitored, api: httpx.Client) -> None:
    """Before, between and after scrapes, so that everything that is counted has moved while it was watched."""
    until(lambda: _ready(monitored.prometheus), "Prometheus did not start")
    for _ in range(2):
        job = api.post(f"/v1/collections/{NAME}/sync", json={"full": True}).json()["job"]
        until(partial(_succeeded, api, job), "the worker did not sync")
        traffic(api)
        wanted = _scrapes(monitored) + 2
        until(partial(_scraped, monitored, wanted), "Prometheus does not scrape")
    since = time.time() + 1  # a rule looks at a moment up to one interval before it is evaluated
    until(partial(_evaluated, monitored, since), "Prometheus does not evaluate the rules")


def _succeeded(api: httpx.Client, job: str) -> bool:
    return bool(api.get(f"/v1/jobs/{job}").json()["state"] == "succeeded")


def _scraped(monitored: Monitored, least: float) -> bool:
    return _scrapes(monitored) >= least


def _evaluated(monitored: Monitored, since: float) -> bool:
    """Whether every group of rules has been evaluated after `since`, in seconds of the epoch."""
    groups = monitored.prometheus.get("/api/v1/rules").json()["data"]["groups"]
    return all(datetime.fromisoformat(group["lastEvaluation"]).timestamp() > since for group in groups)


def _scrapes(monitored: Monitored) -> float:
    """Those that had an answer, of the target with the fewest: one that timed out saw no counter."""
    result = monitored.query("min(sum_over_time(up[1h]))")  # a minute of them is soon full
    return float(result[0]["value"][1]) if result else 0.0


def _ready(prometheus: httpx.Client) -> bool:
    try:
        return prometheus.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False
