"""`owl-sap worker`, schedules and waiting, as processes on the emulator: what a deployment does that splits API and
worker.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from tests.adversity.scene import NAME, Scene

pytest.importorskip("hdbcli")

Cli = Callable[..., Any]
API_ALONE = {"OWL_SAP_API__JOB_WORKERS": "0", "OWL_SAP_API__RUN_SCHEDULES": "false"}
IMPATIENT = {"OWL_SAP_SYNC__LONGEST_WAIT": "0.5s"}


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene("local")


def scheduled(scene: Scene, schedule: str) -> None:
    with (scene.folder / "owl-sap.toml").open("a", encoding="utf-8") as file:
        file.write(f"schedule = {{ {schedule} }}\n")


@contextmanager
def running(scene: Scene, *verb: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process and its first line."""
    with scene.spawn(*verb, env=more) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def api(scene: Scene, **more: str) -> Iterator[httpx.Client]:
    with (
        running(scene, "serve", "--port", "0", **more) as (_, first),
        httpx.Client(base_url=first["url"], timeout=30) as client,
    ):
        yield client


def ended(client: httpx.Client, job: str) -> dict[str, Any]:
    with connect_sse(client, "GET", f"/v1/jobs/{job}/events") as source:
        record: dict[str, Any] = json.loads(list(source.iter_sse())[-1].data)
    return record


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_api_asks_and_the_worker_works(scene: Scene) -> None:
    scheduled(scene, 'cron = "15 2 * * *", timezone = "Europe/Berlin"')
    with api(scene, **API_ALONE) as client, running(scene, "worker") as (process, first):
        assert first["worker"].startswith(f"{process.pid}-")
        assert first["collections"] == 1
        job = client.post(f"/v1/collections/{NAME}/sync", json={"full": True}).json()["job"]
        record = ended(client, job)
        assert (record["state"], record["attempts"]) == ("succeeded", 1)
        assert record["result"]["read"] == scene.rows
        (shown,) = client.get("/v1/collections").json()
        due = datetime.fromisoformat(shown["next_sync"])
        assert due > datetime.now(UTC)
        assert (due.minute, due.second) == (15, 0)
        assert json.loads(scene.cli("status", "--json")[1])[0]["next_sync"] == shown["next_sync"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        _, errors = process.communicate()
        assert errors == ""


@pytest.mark.slow
def test_a_service_and_a_worker_keep_one_schedule(scene: Scene) -> None:
    """With the real clock: both start syncs, and no two within a second."""
    scheduled(scene, 'every = "1s"')
    with api(scene) as client, running(scene, "worker") as (process, _):
        until(lambda: len(client.get("/v1/jobs", params={"state": "succeeded"}).json()) >= 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        jobs = client.get("/v1/jobs").json()
    assert {job["kind"] for job in jobs} == {"sync"}
    created = sorted(job["created"] for job in jobs)
    pauses = [after - before for before, after in pairwise(created)]
    assert min(pauses) >= 1.0
    assert scene.cli("verify", NAME)[0] == 0


@pytest.mark.slow
def test_a_maintenance_window_is_waited_out_and_search_goes_on(scene: Scene) -> None:
    """1888, as HANA Cloud says it, for every statement on the table."""
    assert scene.cli("sync", NAME)[0] == 0
    order = {"match": f'FROM "{scene.schema}"."ROWS"', "action": "error", "code": 1888, "text": "down", "count": None}
    scene.run(f"ALTER SYSTEM INJECT FAULT '{json.dumps(order)}'")
    try:
        with api(scene, **API_ALONE) as client, running(scene, "worker", **IMPATIENT) as (_, _):
            job = client.post(f"/v1/collections/{NAME}/sync").json()["job"]
            until(lambda: client.get(f"/v1/jobs/{job}").json()["attempts"] >= 2)
            while (record := client.get(f"/v1/jobs/{job}").json())["state"] != "waiting":
                time.sleep(0.02)
            assert "code 1888" in record["note"]
            assert record["next_try"] is not None
            shown = client.get(f"/v1/collections/{NAME}").json()
            assert shown["stale_since"] is not None
            assert shown["stale_since"] == shown["last_sync"]
            found = client.post(f"/v1/collections/{NAME}/search", json={"query": "pump"}).json()
            assert (len(found["hits"]), found["stale_since"]) == (10, shown["last_sync"])
            code, _, told = scene.cli("search", NAME, "pump")
            assert (code, f"since the last complete sync at {shown['last_sync']}" in told) == (0, True)
            scene.run("ALTER SYSTEM CLEAR FAULTS")
            record = ended(client, job)
            assert (record["state"], record["note"]) == ("succeeded", None)
            assert client.get(f"/v1/collections/{NAME}").json()["stale_since"] is None
    finally:
        scene.run("ALTER SYSTEM CLEAR FAULTS")


def test_a_worker_refuses_what_cannot_work(cli: Cli, tmp_path: Path) -> None:
    local = {"OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": "vectors", "OWL_SAP_EMBEDDING__MODEL": "hash:16"}
    nothing = cli("worker", **local)
    assert (nothing.code, nothing.out) == (2, "")
    assert "owl-sap.toml" in nothing.err
    block = '[[collections]]\nname = "a"\nsource = "S.T"\ntemplate = "{X}"\n'
    (tmp_path / "owl-sap.toml").write_text(block)
    model = cli("worker", **local | {"OWL_SAP_EMBEDDING__MODEL": "./nowhere"})
    assert (model.code, model.out) == (2, "")
    (tmp_path / "file").write_text("in the way")
    folder = cli("worker", **local, OWL_SAP_STATE__PATH="file/state")
    assert (folder.code, "[state] path" in folder.err) == (2, True)


def test_one_collections_failure_never_stops_anothers(scene: Scene) -> None:
    """`--all`: each gets its line, the highest exit code counts."""
    toml = (scene.folder / "owl-sap.toml").read_text()
    broken = toml.replace('name = "rows"', 'name = "broken"').replace(".ROWS", ".NOT_THERE")
    (scene.folder / "owl-sap.toml").write_text(broken + toml)
    code, out, errors = scene.cli("sync", "--all", "--json")
    reports = {report["collection"]: report for report in json.loads(out)}
    assert list(reports) == ["broken", "rows"]
    assert code == 2
    assert "NOT_THERE" in reports["broken"]["error"]
    assert "broken: " in errors
    assert (reports["rows"]["error"], reports["rows"]["read"]) == (None, scene.rows)


# The worker with a card that fails at the batch of this number, and at every one after it.
FAILING = """
import sys
from app.src.cli import main
from app.src.core.backends import DeviceFailed
from app.src.core.backends.hashing import HashingBackend

left, forward = int(sys.argv.pop(1)), HashingBackend.forward

def fail(*arguments, **options):
    global left
    left -= 1
    if left < 1:
        raise DeviceFailed("the GPU computes nothing more in this process: CUDA error: unspecified launch failure")
    return forward(*arguments, **options)

HashingBackend.forward = fail
main()
"""


def failing(scene: Scene, batch: int, *verb: str, **more: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", FAILING, str(batch), *verb]
    return subprocess.Popen(words, cwd=scene.folder, env=scene.variables() | more, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.proves(20, 29)
def test_a_worker_whose_gpu_fails_ends_and_the_next_one_goes_on(scene: Scene) -> None:
    """With 4, which its supervisor restarts; no row is set aside, and what was stored is kept."""
    batchwise = {"OWL_SAP_SYNC__PAGE_ROWS": "3", "OWL_SAP_SYNC__WINDOW": "3"}
    job = ""
    with api(scene, **API_ALONE) as client:
        job = client.post(f"/v1/collections/{NAME}/sync", json={"full": True}).json()["job"]
        with failing(scene, 5, "worker", **batchwise) as process:
            _, errors = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in errors) == (4, False), errors
        assert "unspecified launch failure" in errors
        assert "for a supervisor to start it again" in errors
        left = client.get(f"/v1/jobs/{job}").json()
        assert (left["state"], left["attempts"], left["error"]) == ("queued", 1, None)
        assert "unspecified launch failure" in left["note"]
        assert client.get(f"/v1/collections/{NAME}/quarantine").json() == []
        stored = len(scene.sound())
        assert 0 < stored < scene.rows
        with running(scene, "worker"):
            record = ended(client, job)
    assert (record["state"], record["attempts"]) == ("succeeded", 2), record["error"]
    assert (record["result"]["unchanged"], record["result"]["quarantined"]) == (stored, 0)
    assert scene.cli("verify", NAME)[0] == 0


def test_a_sync_of_the_command_line_says_what_to_do(scene: Scene) -> None:
    with failing(scene, 2, "sync", NAME, OWL_SAP_SYNC__PAGE_ROWS="3", OWL_SAP_SYNC__WINDOW="3") as process:
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (4, False), errors
    assert "unspecified launch failure" in errors
    assert "OWL-4014" in errors
    assert scene.cli("sync", NAME)[0] == 0
    assert scene.cli("verify", NAME)[0] == 0
