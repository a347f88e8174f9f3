"""`owl-sap sync --scale ray` and `scale check` as an operator runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.adversity.scene import NAME, Scene
from tests.scaling.conftest import Start
from tests.scaling.nodes import head, kill, second

pytestmark = pytest.mark.not_fast
ROW_BY_ROW = {"OWL_SAP_SYNC__PAGE_ROWS": "1", "OWL_SAP_SYNC__WINDOW": "1"}
ON_RAY = ("--scale", "ray", "--actors", "2")


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=200)
    assert "Traceback" not in errors, errors
    return process.returncode, out, errors


def until_stored(scene: Scene, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while (status := scene.store().status(NAME)) is None or status.rows < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.proves(2)
@pytest.mark.parametrize("scene", ["local", "hana"], indirect=True)
def test_a_stopped_sync_is_continued_by_the_next(scene: Scene, start: Start) -> None:
    ranges = {"OWL_SAP_SCALE__RANGES": "true"}  # without effect on a local store
    process = start("sync", NAME, "--json", *ON_RAY, **ROW_BY_ROW, **ranges)
    until_stored(scene, process)
    process.send_signal(signal.SIGTERM)
    code, out, errors = ended(process)
    assert code == 143, errors
    assert "finishing the current batch" in errors
    stopped = json.loads(out)[0]
    assert stopped["stopped"]
    code, out, errors = ended(start("sync", NAME, "--json", *ON_RAY, **ranges))
    assert code == 0, errors
    report = json.loads(out)[0]
    assert 0 < report["upserted"] < scene.rows
    assert report["upserted"] + report["unchanged"] + report["empty"] == scene.rows
    assert scene.sync().unchanged == report["upserted"] + report["unchanged"]  # the process here finds the same vectors
    assert json.loads(ended(start("verify", NAME, "--json"))[1])["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_workers_read_and_write_key_ranges(scene: Scene, start: Start) -> None:
    given = {"OWL_SAP_SCALE__RANGES": "true", "OWL_SAP_SYNC__PAGE_ROWS": "20"}
    code, out, errors = ended(start("sync", NAME, "--json", *ON_RAY, **given))
    assert code == 0, errors
    report = json.loads(out)[0]
    assert (report["read"], report["unchanged"], report["notes"]) == (scene.rows, 0, [])
    assert report["upserted"] + report["empty"] == scene.rows
    assert scene.run(f'SELECT COUNT(*) FROM "{scene.schema}"."OWL_LEASE_PARTS"') == [
        (0,)
    ]  # made for ranges, which ended
    assert json.loads(ended(start("verify", NAME, "--json"))[1])["ok"]
    settings = {"OWL_SAP_SCALE__ENGINE": "ray", "OWL_SAP_SCALE__ACTORS": "2"}
    code, out, errors = ended(start("generations", NAME, "--build", "--json", **settings, **given))
    assert code == 0, errors
    built = json.loads(out)
    assert (built["generation"], built["upserted"], built["quarantined"]) == (2, report["upserted"], 0)
    assert json.loads(ended(start("verify", NAME, "--generation", "2", "--json"))[1])["ok"]


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for below in map(int, child.read_text().split()):
            found |= {below} | descendants(below)
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def until_ended(pids: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := {pid: command(pid) for pid in pids if command(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_settings_name_ray_but_only_sync_starts_it(start: Start) -> None:
    code = (
        "import sys; from app.src.settings import load; from app.src.service.service import Service\n"
        "service = Service(load(None, {('scale', 'engine'): 'ray'}).settings)\n"
        "assert service.parts.embedder.engine.embed(['pump']).shape == (1, 64)\n"
        "service.close(); assert 'ray' not in sys.modules, 'ray was imported'"
    )
    process = start("status")
    ended(process)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"OWL_SAP_EMBEDDING__MODEL": "hash:64"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_options_that_contradict_each_other_are_refused(start: Start) -> None:
    code, _, errors = ended(start("sync", NAME, "--actors", "2"))
    assert (code, "--actors needs --scale ray" in errors) == (2, True)
    code, _, errors = ended(start("demo", "--serve", "--scale", "ray"))
    assert (code, "--scale off with --serve" in errors) == (2, True)


def test_a_command_ends_while_ray_starts(start: Start, short_folder: Path) -> None:
    process = start("scale", "check", "--actors", "1", TMPDIR=str(short_folder))
    deadline = time.monotonic() + 120
    while not list(short_folder.glob("owl-ray-*/r/session_*/sockets")):  # made by ray.init, which then takes seconds
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out, _ = ended(process)
    assert (code, out) == (143, "")


@pytest.mark.slow
@pytest.mark.proves(37)
@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_a_killed_driver_ends_its_local_cluster_and_the_next_sync_continues(
    scene: Scene, start: Start, short_folder: Path
) -> None:
    given = {"OWL_SAP_SCALE__RANGES": "true", "TMPDIR": str(short_folder)}
    process = start("sync", NAME, *ON_RAY, **given, **ROW_BY_ROW)
    until_stored(scene, process)
    cluster = descendants(process.pid)
    assert len(cluster) >= 4, "two workers, raylet and GCS"
    process.kill()
    process.wait()
    (left,) = short_folder.glob("owl-ray-*")
    os.utime(left, (0, 0))  # it is no longer that of a process which is about to lock it
    until_ended({pid for pid in cluster if "Agent" not in command(pid)}, 20)
    stored = scene.content()
    code, out, errors = ended(start("sync", NAME, "--json", *ON_RAY, **given))  # waits for the lease of the killed one
    assert code == 0, errors
    report = json.loads(out)[0]
    assert (report["unchanged"], report["unchanged"] + report["upserted"] + report["empty"]) == (
        len(stored),
        scene.rows,
    )
    assert not list(short_folder.glob("owl-ray-*"))
    assert json.loads(ended(start("verify", NAME, "--json"))[1])["ok"]
    until_ended(cluster, 120)  # Ray's agents look for the head for a minute


@pytest.mark.slow
@pytest.mark.proves(36)
def test_a_running_cluster_needs_its_token(start: Start, short_folder: Path) -> None:
    right, wrong = short_folder / "right", short_folder / "wrong"
    for file, letter in ((right, "a"), (wrong, "b")):
        file.write_text(letter * 64)
        file.chmod(0o600)
    with head(short_folder / "ray", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(right)) as (address, _):

        def check(token: Path) -> tuple[int, str, str]:
            given = {"OWL_SAP_SCALE__ADDRESS": address, "OWL_SAP_SCALE__TOKEN_PATH": str(token)}
            return ended(start("scale", "check", "--json", **given))

        code, out, errors = check(right)
        assert code == 0, errors
        found: dict[str, Any] = json.loads(out)
        assert found["address"] == address
        assert len(found["workers"]) == 1
        assert re.match("hash:64@", found["fingerprints"][0])
        code, _, errors = check(wrong)
        assert (code, "cannot be used" in errors) == (3, True), errors


@pytest.mark.slow
@pytest.mark.proves(36)
def test_a_cluster_without_authentication_is_refused(start: Start, short_folder: Path) -> None:
    token = short_folder / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    with head(short_folder / "ray", RAY_AUTH_MODE="disabled") as (address, _):
        given = {"OWL_SAP_SCALE__ADDRESS": address, "OWL_SAP_SCALE__TOKEN_PATH": str(token)}
        code, _, errors = ended(start("sync", NAME, "--scale", "ray", **given))
    assert (code, "if the Ray cluster" in errors) == (3, True), errors


@pytest.mark.slow
@pytest.mark.proves(33, 34)
@pytest.mark.parametrize("killed", ["node", "head"])
def test_a_killed_part_of_the_cluster_costs_no_row(killed: str, scene: Scene, start: Start, short_folder: Path) -> None:
    token = short_folder / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with (
        head(short_folder / "head", 1, **auth) as (address, first),
        second(short_folder / "node", address, 1, **auth) as other,
    ):
        given = {"OWL_SAP_SCALE__ADDRESS": address, "OWL_SAP_SCALE__TOKEN_PATH": str(token)}
        soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
        process = start("sync", NAME, "--json", *ON_RAY, **given, **soon, **ROW_BY_ROW)
        until_stored(scene, process)
        kill(other if killed == "node" else first)
        out, errors = process.communicate(timeout=200)
    assert (process.returncode == 0) == (killed == "node"), errors
    report = scene.sync(lease_wait=60.0)  # of a process that ended without giving it back
    assert report.unchanged >= 5
    if killed == "node":
        assert report.upserted == 0
        assert json.loads(out)[0]["quarantined"] == 0
    assert json.loads(ended(start("verify", NAME, "--json"))[1])["ok"]


@pytest.mark.slow
def test_the_demo_on_two_workers(start: Start) -> None:
    model = {"OWL_SAP_EMBEDDING__MODEL": "all-MiniLM-L6-v2"}
    code, out, errors = ended(start("demo", "--json", *ON_RAY, **model))
    assert code == 0, errors
    assert json.loads(out)["ok"]
