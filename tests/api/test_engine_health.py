"""An engine whose thread dies, or which hangs, and a store that hangs: readiness says so in bounded time, whoever waits
is told at once, and liveness turns red once only a new process helps.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from httpx import Client

from app.src.api import requests, server
from app.src.core.backends import DeviceFailed
from app.src.core.backends.hashing import HashingBackend
from app.src.core.queue import WorkerDied
from app.src.observe import checks as probes
from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import TableSource, serving
from tests.api.test_limits import problem


class Clock:
    """Stands still, but for what it is told."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return 1000.0 + self.ahead


@pytest.fixture
def client(synced: Service) -> Iterator[Client]:
    with serving(synced) as client:
        yield client


@pytest.fixture
def clock(synced: Service, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The queue's."""
    clock = Clock()
    monkeypatch.setattr(synced.parts.embedder.engine._queue, "clock", clock)  # type: ignore[attr-defined]
    return clock


@pytest.fixture
def gate(synced: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Batches wait until it is set."""
    begin, gate = synced.parts.engine._runner.begin, threading.Event()  # type: ignore[attr-defined]

    def slow(*batch: Any) -> Any:
        assert gate.wait(30)
        return begin(*batch)

    monkeypatch.setattr(synced.parts.engine._runner, "begin", slow)  # type: ignore[attr-defined]
    monkeypatch.setattr(probes, "PROBE_SECONDS", 0.05)
    yield gate
    gate.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.proves(29)
def test_a_thread_that_dies_again_and_again(client: Client, synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is told at once; after the third time only a new process helps; one batch that is computed mends it."""
    working = synced.parts.engine._runner.begin  # type: ignore[attr-defined]

    def dying(*_: Any) -> Any:
        raise SystemExit

    monkeypatch.setattr(synced.parts.engine._runner, "begin", dying)  # type: ignore[attr-defined]
    assert "ended unexpectedly" in problem(client.post("/embed", json={"inputs": "a"}), 503)["detail"]
    assert client.get("/health/live").status_code == 200, "the next thread may do better"
    ready = client.get("/health/ready")
    assert (ready.status_code, ready.json()["checks"]) == (503, {"engine": False, "store": True})
    assert "ended unexpectedly" in ready.json()["detail"]
    assert client.get("/health/live").status_code == 200
    assert client.post("/embed", json={"inputs": "a"}).status_code == 503
    live = client.get("/health/live")
    assert (live.status_code, live.json()["checks"]) == (503, {"engine": False})
    assert "3 times in a row" in live.json()["detail"]
    monkeypatch.setattr(synced.parts.engine._runner, "begin", working)  # type: ignore[attr-defined]
    assert client.post("/embed", json={"inputs": "a"}).status_code == 200
    assert client.get("/health/live").status_code == client.get("/health/ready").status_code == 200


@pytest.mark.proves(29)
def test_a_batch_that_never_ends(client: Client, synced: Service, clock: Clock, gate: threading.Event) -> None:
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(client.post, "/embed", json={"inputs": "a"})
        until(lambda: bool(synced.parts.embedder.engine._queue._in_progress))  # type: ignore[attr-defined]
        for seconds, ready, live in ((29, 200, 200), (31, 503, 200), (299, 503, 200), (301, 503, 503)):
            clock.ahead = seconds
            answer = client.get("/health/ready")
            assert answer.status_code == ready, seconds
            assert ready == 200 or "one batch" in answer.json()["detail"]
            assert client.get("/health/live").status_code == live, seconds
        gate.set()
        assert waiting.result(20).status_code == 200
    assert client.get("/health/live").status_code == client.get("/health/ready").status_code == 200


@pytest.mark.proves(20, 29)
def test_a_gpu_that_fails_for_good(
    client: Client, synced: Service, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readiness and liveness say so at once, and the job that met it goes on in the next process."""

    def failing(*_: Any, **__: Any) -> Any:
        raise DeviceFailed("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(HashingBackend, "forward", failing)
    source.rows_by_key["5"] = {"MATNR": "5", "MAKTX": "another row", "MTART": "ROH"}
    job = client.post("/v1/collections/materials/sync", json={"full": True}).json()["job"]
    until(lambda: client.get(f"/v1/jobs/{job}").json()["note"] is not None)
    record = client.get(f"/v1/jobs/{job}").json()
    monkeypatch.undo()
    assert (record["state"], record["error"], record["attempts"]) == ("queued", None, 1)
    assert "illegal memory access" in record["note"]
    for path in ("/health/ready", "/health/live"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["checks"]["engine"]) == (503, False)
        assert "illegal memory access" in answer.json()["detail"]
    told = problem(client.post("/embed", json={"inputs": "a"}), 503)
    assert (told["code"], "illegal memory access" in told["detail"]) == ("OWL-4014", True)
    assert synced.parts.store.quarantine("materials") == []


def test_time_without_work_is_no_stall(client: Client, clock: Clock) -> None:
    assert client.post("/embed", json={"inputs": "a"}).status_code == 200
    clock.ahead = 10_000
    assert client.get("/health/live").status_code == client.get("/health/ready").status_code == 200


@pytest.mark.parametrize(("seconds", "live"), [pytest.param(0, 200, marks=pytest.mark.slow), (59, 200), (61, 503)])
@pytest.mark.proves(29)
def test_an_engine_that_fails_its_own_probe(
    client: Client, synced: Service, monkeypatch: pytest.MonkeyPatch, seconds: float, live: int
) -> None:
    """As a card does whose context is broken: no thread dies of it. It takes time to be believed."""
    start, ahead = time.monotonic(), 0.0

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Later:
        monotonic = staticmethod(lambda: start + ahead)

    monkeypatch.setattr(probes, "time", Later)
    monkeypatch.setattr(HashingBackend, "forward", broken)
    for ahead in (0.0, seconds / 2, seconds):  # noqa: B007 - the clock reads it
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()["detail"]) == (503, "RuntimeError"), "its words may hold anything"
    assert client.get("/health/live").status_code == live
    monkeypatch.undo()
    assert client.get("/health/ready").status_code == client.get("/health/live").status_code == 200


@pytest.mark.proves(29)
def test_a_store_that_hangs(client: Client, synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it who asks, and only one thread does."""
    go, begun = threading.Event(), []

    def hang() -> None:
        begun.append(1)
        assert go.wait(30)

    monkeypatch.setattr(requests, "READY_WITHIN", 0.2)
    monkeypatch.setattr(synced.readiness, "_store_answers", hang)
    try:
        for _ in range(3):
            ready = client.get("/health/ready")
            assert (ready.status_code, ready.json()["checks"]) == (503, {"engine": True, "store": False})
            assert "the store has not answered within 0.2 s" in ready.json()["detail"]
            assert client.get("/health/live").status_code == 200
        assert len(begun) == 1
        told = synced.metrics.registry.get_sample_value
        assert told("owl_sap_ready", {"check": "store"}) == 0, "the alert OwlSapNotReady goes by it"
        assert (told("owl_sap_ready_timestamp_seconds") or 0) > 0
    finally:
        go.set()
    until(lambda: client.get("/health/ready").status_code == 200)
    assert told("owl_sap_ready", {"check": "store"}) == 1


@pytest.mark.parametrize("kind", [WorkerDied, DeviceFailed])
def test_the_process_ends_for_its_supervisor_if_asked_to(
    synced: Service, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Where nobody looks at liveness, as compose does not."""
    document = synced.settings.model_dump(by_alias=True)
    api = document["api"] | {"exit_when_stuck": True}
    synced.settings = Settings.model_validate(document | {"api": api})
    last_resort = Mock()
    monkeypatch.setattr(threading, "Timer", last_resort)
    monkeypatch.setattr(server, "_STUCK_TICKS", 1)
    if kind is DeviceFailed:
        monkeypatch.setattr(synced.parts, "_failed", "the card is gone")
    else:
        monkeypatch.setattr(synced.readiness, "beyond_help", lambda: "the card is gone")
    frozen = []
    try:
        with pytest.raises(kind, match=r"api\.exit_when_stuck.*the card is gone"):
            server.serve(synced, "127.0.0.1", 0, lambda _: frozen.append(gc.get_freeze_count()))
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000, "what is loaded is not gone through again under load"
    last_resort.assert_called_once_with(synced.settings.api.shutdown_seconds + 2, os._exit, (4,))
