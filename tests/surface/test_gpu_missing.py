"""USE_GPU=true where the CPU computes: every process that computes says so once, at its start, in one line with the
fix; so do metrics, readiness and doctor. On a machine with a GPU the model of these tests is the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.adversity.scene import Scene

pytest.importorskip("hdbcli")

Cli = Callable[..., Any]
WANTED = {"USE_GPU": "true"}


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene("local", rows=8)


def warnings(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if "WARNING" in line]


def is_loud(errors: str) -> bool:
    """One line, with the reason and the fix."""
    (line,) = warnings(errors)
    assert line.startswith("WARNING: a GPU is required (USE_GPU=true), but the CPU is used: ")
    assert "hash:64 runs on CPUs only" in line
    assert line.endswith("Fix: choose another model, or USE_GPU=false")
    return True


def test_sync_says_so_once_and_syncs(scene: Scene) -> None:
    code, out, errors = scene.cli("sync", "--all", "--json", env=WANTED)
    assert (code, json.loads(out)[0]["upserted"]) == (0, 7)
    assert is_loud(errors)
    assert warnings(scene.cli("sync", "--all")[2]) == [], "nobody asked for one"


def test_serve_says_so_before_it_answers_and_in_metrics_and_readiness(scene: Scene) -> None:
    with scene.spawn("serve", "--port", "0", env=WANTED) as process:
        assert process.stdout is not None
        with httpx.Client(base_url=json.loads(process.stdout.readline())["url"], timeout=60) as client:
            metrics = client.get("/metrics").text
            ready = client.get("/health/ready")
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert is_loud(errors)
    assert "owl_sap_gpu_wanted_but_missing 1.0" in metrics
    assert (ready.status_code, ready.json()["status"]) == (200, "ok"), "the CPU computes the same vectors"
    assert ready.json()["checks"] == {"engine": True, "store": True, "gpu": False}
    assert "USE_GPU=false" in ready.json()["note"]


def test_worker_says_so(scene: Scene) -> None:
    with scene.spawn("worker", env=WANTED) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["collections"] == 1
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert is_loud(errors)


def test_doctor_finds_a_fault_and_looks_at_the_rest_all_the_same(cli: Cli) -> None:
    variables = {"OWL_SAP_EMBEDDING__MODEL": "hash:64", "OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": "v"}
    run = cli("doctor", "--json", OWL_SAP_API__PORT="0", **variables, **WANTED)
    checks = {each["check"]: each for each in run.json}
    assert run.code == 1
    assert not checks["settings"]["ok"]
    assert "hash:64 runs on CPUs only" in checks["settings"]["detail"]
    assert "USE_GPU=false" in checks["settings"]["fix"]
    assert all(checks[name]["ok"] for name in ("model", "store writable"))
