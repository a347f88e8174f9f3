"""SIGKILL of the service in the middle of a job: the record says so, the collection is free, a new sync heals."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from httpx_sse import connect_sse

from app.src.core.engine import EngineOptions, load_engine
from app.src.parts import EngineEmbedder
from tests.adversity.scene import NAME, Scene
from tests.emulator.process import Emulator

SLOW = {"OWL_SAP_SYNC__PAGE_ROWS": "1", "OWL_SAP_SYNC__WINDOW": "1", "OWL_SAP_STATE__PATH": "state"}
ROWS = 2000


@pytest.fixture(params=["hana", "local"])
def scene(request: pytest.FixtureRequest, emulator: Emulator, hana_schema: str, tmp_path: Path) -> Iterator[Scene]:
    engine = load_engine(EngineOptions(model="hash:64"))
    scene = Scene(emulator, hana_schema, request.param, tmp_path / "scene", EngineEmbedder(engine), rows=ROWS)
    yield scene
    scene.close()
    engine.close()


@contextmanager
def service(scene: Scene, **more: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    with scene.spawn("serve", "--port", "0", env=SLOW | more) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            with httpx.Client(base_url=url, timeout=30) as client:
                yield process, client
        finally:
            process.kill()


def begun(client: httpx.Client, verb: str = "sync") -> str:
    response = client.post(f"/v1/collections/{NAME}/{verb}")
    assert response.status_code == 202, response.text
    return str(response.json()["job"])


def until_progress(client: httpx.Client, job: str) -> None:
    deadline = time.monotonic() + 60
    while client.get(f"/v1/jobs/{job}").json()["progress"]["done"] < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.covers("serve", "GET /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/events")
def test_the_record_says_so_and_a_new_sync_converges(scene: Scene) -> None:
    with service(scene) as (process, client):
        killed = begun(client)
        until_progress(client, killed)
        with connect_sse(client, "GET", f"/v1/jobs/{killed}/events") as following:
            stream = following.iter_sse()
            last = int(next(stream).id)
        process.kill()
    scene.sound()
    with service(scene, OWL_SAP_SYNC__PAGE_ROWS="500", OWL_SAP_SYNC__WINDOW="500") as (_, client):
        record = client.get(f"/v1/jobs/{killed}").json()
        assert record["state"] == "failed"
        assert record["error"].startswith("interrupted")
        assert record["finished"] is not None
        with connect_sse(client, "GET", f"/v1/jobs/{killed}/events", headers={"Last-Event-ID": str(last)}) as following:
            events = list(following.iter_sse())
        assert [int(event.id) for event in events] == list(range(last + 1, last + 1 + len(events)))
        assert json.loads(events[-1].data) == record
        assert client.get(f"/v1/collections/{NAME}").json()["job"] is None
        scene.expire_lease()
        again = begun(client)
        with connect_sse(client, "GET", f"/v1/jobs/{again}/events") as following:
            result = json.loads(list(following.iter_sse())[-1].data)
        assert result["state"] == "succeeded", result["error"]
        assert result["result"]["unchanged"] >= record["progress"]["done"] * 0.9 - 1, "every 30th row is empty"
        verified = begun(client, "verify")
        with connect_sse(client, "GET", f"/v1/jobs/{verified}/events") as following:
            assert json.loads(list(following.iter_sse())[-1].data)["result"]["ok"]


@pytest.mark.parametrize("scene", ["local"], indirect=True)
def test_one_that_shares_the_folder_sees_it_too_and_takes_over(scene: Scene) -> None:
    """Two services, one folder of records: while one works the other refuses, once it is killed the other may."""
    with service(scene) as (worker, first), service(scene) as (_, second):
        job = begun(first)
        until_progress(second, job)
        assert second.post(f"/v1/collections/{NAME}/sync").status_code == 409
        with connect_sse(second, "GET", f"/v1/jobs/{job}/events") as following:
            stream = following.iter_sse()
            next(stream)
            worker.kill()
            events = list(stream)
        assert events[-1].event == "result", "a follower elsewhere is told"
        assert json.loads(events[-1].data)["state"] == "failed"
        scene.expire_lease()
        next_one = begun(second)
        second.post(f"/v1/jobs/{next_one}/cancel")


@pytest.mark.parametrize("scene", ["local"], indirect=True)
def test_a_stopped_process_is_not_taken_for_dead(scene: Scene) -> None:
    import signal

    with service(scene) as (worker, first), service(scene) as (_, second):
        job = begun(first)
        until_progress(second, job)
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        assert second.get(f"/v1/jobs/{job}").json()["state"] == "running"
        assert second.post(f"/v1/collections/{NAME}/sync").status_code == 409
        worker.send_signal(signal.SIGCONT)
        assert second.post(f"/v1/jobs/{job}/cancel").status_code == 202
        with connect_sse(second, "GET", f"/v1/jobs/{job}/events") as following:
            assert json.loads(list(following.iter_sse())[-1].data)["state"] == "cancelled"
