"""A place in the cluster whose workers do not start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from app.src.core.queue import WorkerDied
from app.src.scaling import cluster
from app.src.scaling.cluster import STARTS, RayPlace

ray = pytest.importorskip("ray")


class Handle:
    """As Ray's of an actor. Its calls end when it is killed."""

    def __init__(self, *, dead: bool) -> None:
        self._answer: Future[Any] = Future()
        if dead:
            self.kill()

    def kill(self) -> None:
        self._answer.set_exception(ray.exceptions.ActorDiedError())

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": lambda *_: self})

    def future(self) -> Future[Any]:
        return self._answer


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.mark.proves(32)
def test_workers_that_die_before_they_answer_are_given_up(threads: ThreadPoolExecutor) -> None:
    started: list[Handle] = []

    def start() -> Handle:
        started.append(Handle(dead=True))
        return started[-1]

    place = RayPlace(start, threads)
    while not place.failed:
        with pytest.raises(WorkerDied):
            place.call("load").result(10)
    assert "died before they answered" in place.failed
    assert len(started) == STARTS
    with pytest.raises(WorkerDied, match="died before they answered"):
        place.call("load").result(10)


@pytest.mark.proves(32)
def test_a_worker_that_does_not_start_is_given_up(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, killed = Handle(dead=False), threading.Event()

    def kill(worker: Handle) -> None:
        worker.kill()
        killed.set()

    monkeypatch.setattr(cluster, "START_SECONDS", 0.05)
    monkeypatch.setattr(ray, "kill", kill)
    place = RayPlace(lambda: handle, threads)
    assert not place.ready
    with pytest.raises(WorkerDied, match="no worker of the Ray cluster started"):
        place.call("load").result(10)
    assert killed.wait(10)
    assert place.failed
