"""What a container runs, as a container runs it: the commands of Dockerfile.t4 and of the compose file, taken from
these files, as processes on this machine. No image was built.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trustme
from ruamel.yaml import YAML

from app.src.cli import processes
from app.src.cli.processes import until_over
from app.src.core import first_look
from app.src.core.device import DeviceProfile, DeviceUnavailable
from app.src.core.nvml import GpuSnapshot
from app.src.jobs.journal import JobOptions
from app.src.jobs.records import FileRecords
from app.src.jobs.runner import Jobs
from app.src.observe import Fault, gpu, health
from app.src.settings import ApiSettings, EmbeddingSettings, Settings
from app.src.settings.model import WorkerSettings
from connector.errors import ConfigurationError
from tests.adversity.scene import NAME, Scene
from tests.forked import owl_sap
from tests.ports import free_port
from tests.surface.conftest import completed

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile.t4").read_text(encoding="utf-8")
SERVICES = YAML(typ="safe").load((ROOT / "docker-compose.t4-optimized.yml").read_text(encoding="utf-8"))["services"]
Cli = Callable[..., Any]


def command(word: str) -> list[str]:
    """The JSON after CMD, ENTRYPOINT or HEALTHCHECK."""
    joined = DOCKERFILE.replace("\\\n", " ")
    found = re.search(rf"^{word}.*?(\[.*\])$", joined, re.M)
    assert found
    words: list[str] = json.loads(found[1])
    return words


def here(words: list[str]) -> list[str]:
    """The arguments of `owl-sap` in a command of the image."""
    assert words[:3] == ["python", "-m", "app"]
    return words[3:]


HEALTHCHECK = command("HEALTHCHECK")
SERVE = command("ENTRYPOINT") + command("CMD")
WORKER = command("ENTRYPOINT") + SERVICES["worker"]["command"]
WORKER_HEALTH = SERVICES["worker"]["healthcheck"]["test"][1:]


def run(words: list[str], folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return completed(*here(words), cwd=folder, env=variables)


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    pytest.importorskip("hdbcli")
    return make_scene("local", rows=8)


@contextmanager
def started(words: list[str], folder: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with owl_sap(*here(words), cwd=folder, env=variables, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_images_command_serves_with_keys_on_all_addresses_and_its_healthcheck_knows(
    scene: Scene, tmp_path: Path
) -> None:
    """As compose has it: keys, 0.0.0.0, another port than the default, and nothing else told to the check."""
    keys = tmp_path / "keys.json"
    variables = scene.variables() | {"OWL_SAP_ACCESS__KEYS": str(keys), "OWL_SAP_API__HOST": "0.0.0.0"}
    variables |= {"OWL_SAP_API__PORT": str(free_port()), "OWL_SAP_STATE__PATH": "state"}
    made = run(["python", "-m", "app", "keys", "create", "app", "--scope", "search"], scene.folder, variables)
    assert made.returncode == 0, made.stderr
    before = run(HEALTHCHECK, scene.folder, variables)
    assert (before.returncode, "does not answer" in before.stderr) == (1, True)
    with started(SERVE, scene.folder, variables) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["url"].endswith(variables["OWL_SAP_API__PORT"])
        well = run(HEALTHCHECK, scene.folder, variables)
        assert (well.returncode, "is ready" in well.stderr) == (0, True), well.stderr
        process.terminate()  # to the process that was started: it has become the service
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
    assert errors.splitlines()[0] == "the CPU computes: the model hash:64 runs on CPUs only"


def test_a_worker_is_well_by_its_heartbeat_and_ends_after_its_jobs(scene: Scene) -> None:
    beat = scene.folder / "heartbeat"
    variables = scene.variables() | {"OWL_SAP_STATE__PATH": "state", "OWL_SAP_WORKER__HEARTBEAT": str(beat)}
    variables["WORKER_MAX_TASKS_PER_CHILD"] = "1"
    jobs = Jobs(FileRecords(scene.folder / "state"), lambda _run: {}, JobOptions(workers=0))
    try:
        with started(WORKER, scene.folder, variables) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["collections"] == 1
            well = run(WORKER_HEALTH, scene.folder, variables)
            assert (well.returncode, "was at work" in well.stderr) == (0, True), well.stderr
            first, second = jobs.start(NAME), jobs.start("another")
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0
        assert errors.splitlines()[-1] == "1 jobs done (worker.max_jobs): exiting, to be restarted"
        assert [jobs.get(job.id).state for job in (first, second)] == ["succeeded", "queued"]
        assert not beat.exists()
    finally:
        jobs.close()


def test_a_missing_gpu_ends_the_start_with_one_line(cli: Cli) -> None:
    wanted = cli("start", "worker", USE_GPU="true", OWL_SAP_EMBEDDING__MODEL="hash:16")
    assert (wanted.code, wanted.out) == (1, "")
    (line,) = wanted.err.splitlines()
    assert "a GPU is required, but the model hash:16 runs on CPUs only; fix: " in line
    silent = cli("health", "worker")
    assert (silent.code, "OWL_SAP_WORKER__HEARTBEAT" in silent.err) == (1, True)


# ------------------------------------------------------------------------------------------------------- the first look


def t4(_embedding: EmbeddingSettings, _seconds: float) -> dict[str, Any]:
    reason = "compute capability 7.5 has tensor cores for fp16, none for bf16 or tf32"
    return {"kind": "cuda", "name": "Tesla T4", "capability": "7.5", "precision": "fp16", "reason": reason}


def no_card(_embedding: EmbeddingSettings, _seconds: float) -> dict[str, Any]:
    return {"kind": "cpu", "name": "CPU", "capability": None, "precision": "fp32", "reason": "a CPU"}


def hanging(_embedding: EmbeddingSettings, _seconds: float) -> dict[str, Any]:
    raise Fault("torch and the driver gave no answer in 60 s", "look at nvidia-smi")


@pytest.fixture
def with_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What driver and packages say is good; what torch says is each test's."""
    monkeypatch.setattr(gpu, "why_no_gpu", lambda _embedding: None)


@pytest.mark.usefixtures("with_card")
def test_a_card_is_named_with_its_precision_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ask_torch", t4)
    assert gpu.first_look(EmbeddingSettings()) == (
        "Tesla T4 (compute capability 7.5) computes in fp16: "
        "compute capability 7.5 has tensor cores for fp16, none for bf16 or tf32"
    )


@pytest.mark.usefixtures("with_card")
@pytest.mark.parametrize("ask", [no_card, hanging])
@pytest.mark.parametrize("wanted", [{"expect_gpu": True}, {"device": "cuda:1"}])
def test_a_card_that_torch_does_not_use_ends_the_start_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[..., dict[str, Any]], wanted: dict[str, Any]
) -> None:
    monkeypatch.setattr(gpu, "ask_torch", ask)
    with pytest.raises(Fault) as caught:
        gpu.first_look(EmbeddingSettings(**wanted))
    assert "nvidia-smi" in caught.value.fix
    assert gpu.first_look(EmbeddingSettings()).startswith("the CPU computes: torch ")


def test_torch_is_asked_only_where_there_may_be_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "snapshot_within", lambda _seconds: GpuSnapshot(reason="there is no NVIDIA driver here"))
    monkeypatch.setattr(gpu, "ask_torch", lambda *_: pytest.fail("torch costs seconds"))
    said = gpu.first_look(EmbeddingSettings())
    assert said == "the CPU computes: there is no NVIDIA driver here"


@pytest.mark.not_fast
def test_a_child_that_hangs_or_fails_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Fault, match=r"no answer in 0\.001 s"):
        gpu.ask_torch(EmbeddingSettings(), 0.001)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Fault, match="torch ended with 1"):
        gpu.ask_torch(EmbeddingSettings(), 60)


@pytest.mark.slow
def test_torch_is_asked_in_a_process_of_its_own() -> None:
    assert gpu.ask_torch(EmbeddingSettings(device="cpu", precision="fp32"), 60)["precision"] == "fp32"
    with pytest.raises(Fault, match="fp16 cannot be used"):
        gpu.ask_torch(EmbeddingSettings(device="cpu", precision="fp16"), 60)


def test_a_card_that_is_listed_and_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for a card without kernels: nothing on it can be read."""
    monkeypatch.setattr(first_look, "detect", lambda _device: DeviceProfile.of_card("Tesla T4"))
    monkeypatch.setattr(DeviceProfile, "torch_name", property(lambda _self: "meta"))
    with pytest.raises(DeviceUnavailable, match="does not compute"):
        first_look.look()


# -------------------------------------------------------------------------------------------------------- health checks


@pytest.fixture
def answering() -> Iterator[Callable[..., int]]:
    """`answering(status, body, certificate)`: the port of a server that answers so, by https if there is one."""
    servers = []

    def make(status: int, body: bytes, certificate: trustme.LeafCert | None = None) -> int:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/health/ready"
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            certificate.configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return server.server_port

    yield make
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_the_service_is_asked_where_it_listens(host: str, answering: Callable[[int, bytes], int]) -> None:
    assert "is ready" in health.of_service(ApiSettings(host=host, port=answering(200, b"{}")))


def test_a_service_with_tls_is_known_by_its_own_certificate(answering: Callable[..., int], tmp_path: Path) -> None:
    """Its authority is not known here, and its name is not loopback's."""
    mine, other = (trustme.CA().issue_cert("search.example") for _ in range(2))
    for name, each in (("mine.pem", mine), ("other.pem", other)):
        each.cert_chain_pems[0].write_to_path(tmp_path / name)
    port = answering(200, b"{}", mine)

    def with_certificate(name: str) -> ApiSettings:
        return ApiSettings(port=port, tls_certificate=tmp_path / name, tls_key=tmp_path / "key.pem")

    assert "is ready" in health.of_service(with_certificate("mine.pem"))
    with pytest.raises(Fault, match="does not answer"):
        health.of_service(with_certificate("other.pem"))
    with pytest.raises(Fault, match="cannot be read"):
        health.of_service(with_certificate("nowhere.pem"))


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (503, b'{"status": "unavailable", "checks": {"engine": true, "store": false}}', r"\(503: store\)"),
        (503, b"not json", r"\(503\)"),
        (503, b"[]", r"\(503\)"),
        (401, b'{"checks": null}', r"\(401\)"),
        (302, b"", r"\(302\)"),
    ],
)
def test_a_service_that_is_not_ready(
    status: int, body: bytes, told: str, answering: Callable[[int, bytes], int]
) -> None:
    with pytest.raises(Fault, match=told):
        health.of_service(ApiSettings(port=answering(status, body)))


def test_a_service_that_never_answers_or_listens_anywhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(Fault, match="TimeoutError"):
            health.of_service(ApiSettings(port=silent.getsockname()[1]), patience=0.1)
        assert time.monotonic() - start < 5
    with pytest.raises(Fault, match="port is 0"):
        health.of_service(ApiSettings(port=0))


def test_a_heartbeat_ages_when_the_worker_is_not_well(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    settings = WorkerSettings(heartbeat=path)
    with health.beating(path) as beat:
        born = path.stat().st_mtime
        assert "was at work" in health.of_worker(settings)
        with pytest.raises(Fault, match="61 s old"):
            health.of_worker(settings, lambda: born + health.STALE_SECONDS + 1)
        time.sleep(0.02)
        beat()
        assert path.stat().st_mtime > born
    with pytest.raises(Fault, match="no worker is at work"):
        health.of_worker(settings)


@pytest.mark.slow
def test_a_dead_workers_heartbeat_is_not_that_of_the_next_one(scene: Scene) -> None:
    """It died a moment ago, and the next one gets no further than to its model."""
    beat = scene.folder / "heartbeat"
    beat.touch()
    wrong = {"OWL_SAP_WORKER__HEARTBEAT": str(beat), "OWL_SAP_EMBEDDING__MODEL": str(scene.folder / "no-model")}
    ended = run(WORKER, scene.folder, scene.variables() | wrong)
    assert "no such folder" in ended.stderr
    assert not beat.exists()


def test_a_heartbeat_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    wrong = health.beating(tmp_path / "nowhere" / "beat")
    with pytest.raises(ConfigurationError, match=r"\[worker\] heartbeat: .* cannot be written"), wrong:
        pass


class Ended:
    """A service as the worker's loop sees it: `spent` after so many looks, then or before that beyond help."""

    looked_ago = 0.0
    settings = Settings()

    def __init__(self, spent: int, stuck_at: int | None = None) -> None:
        self.looks, self.spent, self.stuck_at = 0, spent, stuck_at
        self.probes = 0
        self.jobs = self.readiness = self

    def wait_spent(self, _seconds: float) -> bool:
        self.looks += 1
        return self.looks > self.spent

    def beyond_help(self) -> str | None:
        return "the engine stands still" if self.looks == self.stuck_at else None


def test_a_worker_ends_when_its_engine_is_beyond_help() -> None:
    assert until_over(cast("Any", Ended(3)), None, 0.0) is None
    assert until_over(cast("Any", Ended(9, stuck_at=2)), None, 0.0) == "the engine stands still"
    assert until_over(cast("Any", Ended(3, stuck_at=4)), None, 0.0) == "the engine stands still", "not: all jobs done"


@pytest.mark.parametrize("model", ["hash:16", "hana:SAP_NEB.20240715"])
def test_a_worker_shows_no_life_while_its_own_engine_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    beat, seen = tmp_path / "beat", list[bool]()

    class Sick(Ended):
        settings = Settings.model_construct(embedding=EmbeddingSettings(model=model))

        def probe_engine(self) -> None:
            self.probes += 1
            if self.probes in (2, 3):
                raise RuntimeError("no answer")

        def wait_spent(self, seconds: float) -> bool:
            seen.append(beat.stat().st_mtime > 1)
            os.utime(beat, (1, 1))
            return super().wait_spent(seconds)

    monkeypatch.setattr(processes, "_PROBE_SECONDS", 0.0)
    assert until_over(cast("Any", Sick(4)), beat, 0.0) is None
    sick = model.startswith("hana:")  # a new process would meet the same HANA
    assert seen == [True, True, sick, sick, True]
