"""Signals to the commands as a shell or a container sends them: exit codes, what is kept, and how long it takes."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from httpx_sse import connect_sse

from tests.adversity.proxy import EXECUTE, Fault, Proxy, Strike
from tests.adversity.scene import NAME, Scene

pytest.importorskip("hdbcli")

ROWS = 3000
QUICK_AGAIN = {"OWL_SAP_SYNC__PAGE_ROWS": "1000", "OWL_SAP_SYNC__WINDOW": "1000"}
SLOW = {"OWL_SAP_SYNC__PAGE_ROWS": "1", "OWL_SAP_SYNC__WINDOW": "1"}


@pytest.fixture(params=["local"])
def scene(request: pytest.FixtureRequest, make_scene: Callable[..., Scene]) -> Scene:
    return make_scene(request.param, rows=ROWS)


def until_stored(scene: Scene, some: int = 5) -> int:
    """Wait until a run has stored some rows."""
    deadline = time.monotonic() + 60
    while True:
        if (scene.folder / "vectors" / "vectors.sqlite").exists() or scene.kind == "hana":
            status = scene.store().status(NAME)
            if status is not None and status.rows >= some:
                return status.rows
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def interrupted(scene: Scene, *arguments: str, signals: tuple[int, ...], stored: int = 5) -> Iterator[list[object]]:
    """Runs a verb row by row, sends the signals in the middle. Yields exit code, output, errors, seconds to the end."""
    with scene.spawn(*arguments, env=SLOW) as process:
        until_stored(scene, stored)
        start = time.monotonic()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)
        out, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors, errors
        yield [process.returncode, out, errors, time.monotonic() - start]


@pytest.mark.parametrize(
    ("scene", "number", "code"),
    [
        ("local", signal.SIGINT, 130),
        ("hana", signal.SIGTERM, 143),
        pytest.param("local", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("hana", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
    indirect=["scene"],
)
@pytest.mark.proves(2)
def test_a_sync_keeps_what_it_has_and_the_next_goes_on(scene: Scene, number: signal.Signals, code: int) -> None:
    with interrupted(scene, "sync", NAME, "--json", signals=(number,)) as (ended, out, errors, seconds):
        assert ended == code
        (report,) = json.loads(str(out))
        assert report["stopped"]
        assert 0 < report["upserted"] < ROWS
        assert "continue with: owl-sap sync rows" in str(errors)
        assert float(str(seconds)) < 15
    done, again, _ = scene.verb("sync", NAME, "--json")
    (rest,) = json.loads(again)
    assert (done, rest["unchanged"]) == (0, report["upserted"]), "at once: the lease was given back"
    assert scene.verb("verify", NAME)[0] == 0


@pytest.mark.parametrize(
    ("number", "code", "repair"),
    [pytest.param(signal.SIGINT, 130, [], marks=pytest.mark.slow), (signal.SIGTERM, 143, ["--repair"])],
)
def test_a_verify_ends_without_a_verdict(scene: Scene, number: signal.Signals, code: int, repair: list[str]) -> None:
    assert scene.verb("sync", NAME)[0] == 0
    with scene.spawn("verify", NAME, "--json", *repair, env=SLOW) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["done"] < ROWS, "it is in the middle"
        process.send_signal(number)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert "not everything was compared" in errors
    assert "Traceback" not in errors
    assert scene.verb("verify", NAME)[0] == 0


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [
        pytest.param(["status"], signal.SIGINT, 130, marks=pytest.mark.slow),
        (["search", NAME, "pump"], signal.SIGTERM, 143),
    ],
)
def test_a_verb_that_waits_for_a_silent_hana_ends_in_seconds(
    make_scene: Callable[..., Scene], verb: list[str], number: signal.Signals, code: int
) -> None:
    """The driver does not return while it waits for an answer, and Python's handlers wait with it."""
    scene = make_scene("hana")
    assert scene.verb("sync", NAME)[0] == 0
    with Proxy(scene.emulator.port) as proxy:
        proxy.strike(Strike(EXECUTE, 1, Fault.STALL))
        with scene.spawn(*verb, port=proxy.port) as process:
            assert proxy.fired.wait(60)
            start = time.monotonic()
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - start < 20
    assert "Traceback" not in errors


@pytest.mark.proves(2)
def test_a_second_ctrl_c_ends_a_sync_that_hangs(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene("local")
    with Proxy(scene.emulator.port) as proxy:
        proxy.strike(Strike(EXECUTE, 20, Fault.STALL))
        with scene.spawn("sync", NAME, port=proxy.port, env=SLOW) as process:
            assert proxy.fired.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            while "finishing the current batch" not in (line := process.stderr.readline()):  # two at once would be one
                assert line, "it has ended without a word"
            time.sleep(0.5)
            assert process.poll() is None, "the first one asks"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    scene.expire_lease()
    assert scene.verb("sync", NAME)[0] == 0
    assert scene.verb("verify", NAME)[0] == 0


@contextmanager
def serving(scene: Scene, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with scene.spawn("serve", "--port", "0", env=SLOW | more) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.proves(2)
def test_a_service_with_a_job_and_a_follower_ends_with_0_and_records_it(scene: Scene, number: signal.Signals) -> None:
    with serving(scene) as (process, url):
        job = httpx.post(f"{url}/v1/collections/rows/sync", timeout=60).json()["job"]
        until_stored(scene)
        seen: list[str] = []

        def follow() -> None:
            with (
                httpx.Client(timeout=30) as client,
                connect_sse(client, "GET", f"{url}/v1/jobs/{job}/events") as source,
            ):
                try:
                    for event in source.iter_sse():
                        seen.append(event.event)  # noqa: PERF401 - kept also when it is cut off
                except httpx.HTTPError:
                    seen.append("cut off")

        follower = threading.Thread(target=follow)
        follower.start()
        while not seen:
            assert follower.is_alive()
            time.sleep(0.02)
        start = time.monotonic()
        process.send_signal(number)
        assert process.wait(60) == 0
        assert time.monotonic() - start < 20
        follower.join(60)
        assert seen[0] == "state"
        _, errors = process.communicate()
        assert "Traceback" not in errors
    code, out, _ = scene.verb("jobs", "show", job, "--json")
    record = json.loads(out)
    assert (code, record["state"], record["error"]) == (0, "queued", None)
    assert "the service ended" in record["note"]
    stored = scene.store().status(NAME)
    assert stored is not None
    code, out, _ = scene.verb("sync", NAME, "--json")
    assert (code, json.loads(out)[0]["unchanged"]) == (0, stored.rows)
    with (
        serving(scene, **QUICK_AGAIN) as (_, url),
        httpx.Client(base_url=url, timeout=30) as client,
        connect_sse(client, "GET", f"/v1/jobs/{job}/events") as source,
    ):
        record = json.loads(list(source.iter_sse())[-1].data)
    assert (record["id"], record["state"], record["attempts"]) == (job, "succeeded", 2)
    assert record["result"]["unchanged"] + record["result"]["empty"] == ROWS


@pytest.mark.proves(2, 29)
def test_a_service_whose_job_hangs_ends_all_the_same(make_scene: Callable[..., Scene]) -> None:
    """HANA is silent in the middle of the job: it is recorded as interrupted, and the service does not wait for it."""
    scene = make_scene("local")
    with Proxy(scene.emulator.port) as proxy:
        proxy.strike(Strike(EXECUTE, 20, Fault.STALL))
        with serving(scene, HANA_PORT=str(proxy.port), OWL_SAP_API__SHUTDOWN_SECONDS="1") as (process, url):
            job = httpx.post(f"{url}/v1/collections/rows/sync", timeout=60).json()["job"]
            assert proxy.fired.wait(60)
            start = time.monotonic()
            process.terminate()
            assert process.wait(60) == 0
            assert time.monotonic() - start < 25
    code, out, _ = scene.verb("jobs", "show", job, "--json")
    record = json.loads(out)
    assert (code, record["state"]) == (0, "queued")
    assert "interrupted" in record["note"]
    scene.expire_lease()
    assert scene.verb("sync", NAME)[0] == 0
    assert scene.verb("verify", NAME)[0] == 0
