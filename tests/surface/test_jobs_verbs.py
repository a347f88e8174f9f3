"""`owl-sap jobs` beside a service: two processes, one folder of records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.adversity.scene import Scene

pytest.importorskip("hdbcli")

SLOW = {"OWL_SAP_SYNC__PAGE_ROWS": "1", "OWL_SAP_SYNC__WINDOW": "1"}


@pytest.fixture
def scene(make_scene: Callable[..., Scene], request: pytest.FixtureRequest) -> Scene:
    return make_scene("local", rows=3000 if "url" in request.fixturenames else 30)


@pytest.fixture
def url(scene: Scene) -> Iterator[str]:
    """Of a service that syncs row by row: slow enough to be met in the middle."""
    with scene.spawn("serve", "--port", "0", env=SLOW) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            assert process.wait(60) == 0


def begun(url: str) -> str:
    return str(httpx.post(f"{url}/v1/collections/rows/sync", timeout=60).json()["job"])


def document(scene: Scene, *arguments: str, code: int = 0) -> Any:
    done, out, errors = scene.verb("jobs", *arguments, "--json")
    assert done == code, errors
    return json.loads(out)


def ended(scene: Scene, job: str) -> Any:
    deadline = time.monotonic() + 120
    while (shown := document(scene, "show", job))["finished"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return shown


def test_another_process_lists_and_cancels_the_services_job(scene: Scene, url: str) -> None:
    job = begun(url)
    (listed,) = document(scene, "list")
    assert (listed["id"], listed["kind"], listed["collection"]) == (job, "sync", "rows")
    assert listed["state"] in ("queued", "running")
    assert document(scene)[0]["id"] == job, "without a verb: list"
    code, out, _ = scene.verb("status", "rows", "--json")
    assert (code, json.loads(out)[0]["job"]) == (0, job)
    assert document(scene, "cancel", job)["id"] == job
    shown = ended(scene, job)
    assert shown["state"] == "cancelled"
    assert 0 < shown["result"]["upserted"] < 3000
    assert shown == httpx.get(f"{url}/v1/jobs/{job}", timeout=60).json()
    assert document(scene, "list", "--state", "running") == []
    assert document(scene, "list", "--collection", "rows", "--limit", "1")[0]["id"] == job


def test_refusals(scene: Scene) -> None:
    assert document(scene, "list") == []
    assert not (scene.folder / "vectors").exists(), "looking makes nothing"
    for verb in ("show", "cancel"):
        code, out, errors = scene.verb("jobs", verb, "nope")
        assert (code, out) == (2, "")
        assert "no job 'nope'" in errors
    assert scene.verb("jobs", "list", "--state", "odd")[0] == 2
    assert scene.verb("jobs", "list", "--limit", "0")[0] == 2


def test_what_is_over_cannot_be_cancelled(scene: Scene) -> None:
    with scene.spawn("serve", "--port", "0") as process:
        assert process.stdout is not None
        job = begun(json.loads(process.stdout.readline())["url"])
        assert ended(scene, job)["state"] == "succeeded"
        code, _, errors = scene.verb("jobs", "cancel", job)
        process.terminate()
        process.communicate(timeout=60)
    assert code == 1
    assert "succeeded" in errors


def test_a_folder_that_cannot_be_used_names_the_setting(scene: Scene) -> None:
    (scene.folder / "file").write_text("in the way")
    elsewhere = {"OWL_SAP_STATE__PATH": "file/state"}
    code, out, errors = scene.cli("serve", "--port", "0", env=elsewhere)
    assert (code, out) == (2, "")
    assert "OWL_SAP_STATE__PATH" in errors
    assert scene.verb("jobs", "list", env=elsewhere)[0] == 0, "there are none"
    (scene.folder / "broken").mkdir()
    (scene.folder / "broken" / "jobs.sqlite").write_text("no database")
    code, _, errors = scene.verb("jobs", "list", env={"OWL_SAP_STATE__PATH": "broken"})
    assert code == 2
    assert "job records" in errors
