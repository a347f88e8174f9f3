"""SIGTERM while everything is under way at once: the process ends in bounded time with 0, whoever waits is told, and
the job is queued again.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from hana_emulator.testing import Emulator
from tests.adversity.scene import NAME, Scene
from tests.adversity.test_faults_on_order import hits, order

ALLOWED, MARGIN = 0.5, 2.0
"""Seconds: the setting, and what closing may take beyond it."""
BUSY = 15.0
"""... and for a machine that does other things too. What hangs would do so for a minute."""
SLOW = {"OWL_SAP_SYNC__PAGE_ROWS": "1", "OWL_SAP_SYNC__WINDOW": "1", "OWL_SAP_STATE__PATH": "state"}


@pytest.fixture
def scene(emulator: Emulator, hana_schema: str, tmp_path: Path) -> Iterator[Scene]:
    engine = load_engine(EngineOptions(model="hash:64"))
    scene = Scene(emulator, hana_schema, "local", tmp_path / "scene", EngineEmbedder(engine), rows=3000)
    yield scene
    scene.run("ALTER SYSTEM CLEAR FAULTS")
    scene.close()
    engine.close()


@contextmanager
def serving(scene: Scene, allowed: float = ALLOWED) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    variables = SLOW | {"OWL_SAP_API__SHUTDOWN_SECONDS": str(allowed)}
    with scene.spawn("serve", "--port", "0", env=variables) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            with httpx.Client(base_url=url, timeout=60) as client:
                yield process, client
        finally:
            process.kill()


def hanging(scene: Scene, client: httpx.Client) -> tuple[threading.Thread, list[httpx.Response]]:
    """A request whose statement HANA answers after a minute, on its way."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as own, suppress(httpx.HTTPError):
            answers.append(own.get("/v1/tables"))

    order(scene, match=r"FROM SYS\.TABLES", action="delay", seconds=60)
    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: hits(scene) == 1)
    assert not answers
    return thread, answers


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(process: subprocess.Popen[str]) -> float:
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    return time.monotonic() - start


@pytest.mark.proves(2, 29)
def test_everything_at_once(scene: Scene) -> None:
    """A request that hangs in HANA, a body that does not come, an idle connection, a stream, and a job at work."""
    with serving(scene) as (process, client):
        job = client.post(f"/v1/collections/{NAME}/sync").json()["job"]
        until(lambda: client.get(f"/v1/jobs/{job}").json()["progress"]["done"] >= 5)
        waiting, answers = hanging(scene, client)
        events: list[str] = []
        following = threading.Thread(target=follow, args=(client.base_url, job, events))
        following.start()
        until(lambda: len(events) > 2)
        with slow_body(client) as slow:
            seconds = ended(process)
            assert seconds < ALLOWED + MARGIN + BUSY
            answer = slow.recv(65_536)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 503"), answer
        waiting.join(60)
        following.join(60)
        assert not following.is_alive()
        assert [answer.status_code for answer in answers] == [503]
        assert "the service is shutting down" in answers[0].json()["detail"]
        assert "retry-after" in answers[0].headers
        assert "event: state" in events[:2]
        _, errors = process.communicate()
        assert "Traceback" not in errors
    code, out, _ = scene.cli("jobs", "show", job, "--json", env=SLOW)
    record = json.loads(out)
    assert (code, record["state"]) == (0, "queued"), record
    assert "interrupted" in record["note"]
    assert scene.content() != {}, "what it had done is kept"


def follow(url: httpx.URL, job: str, events: list[str]) -> None:
    with (
        httpx.Client(base_url=url, timeout=30) as client,
        suppress(httpx.HTTPError),
        client.stream("GET", f"/v1/jobs/{job}/events") as stream,
    ):
        for line in stream.iter_lines():
            events.append(line)  # noqa: PERF402 - kept also when it is cut off


@contextmanager
def slow_body(client: httpx.Client) -> Iterator[socket.socket]:
    """A connection whose body does not come. The service has asked for it: one that still waits to be accepted when the
    listener closes is reset by the kernel.
    """
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30) as connection:
        connection.sendall(head)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 100 ")
        yield connection


def test_a_request_that_ends_in_time_gets_its_answer(scene: Scene) -> None:
    with serving(scene, allowed=50) as (process, client):
        answers: list[Any] = []
        order(scene, match=r"FROM SYS\.TABLES", action="delay", seconds=0.6)

        def ask() -> None:
            with httpx.Client(base_url=client.base_url, timeout=60) as own:
                answers.append(own.get("/v1/tables").status_code)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: hits(scene) == 1)
        assert ended(process) < 30, "nothing hangs, so nothing is waited for"
        thread.join(60)
        assert answers == [200]
