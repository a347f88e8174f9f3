"""What a worker of the cluster does when its processes answer, die or cannot start. They stand in for Ray's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.src.core.backends import DeviceFailed, DeviceUnavailable, EngineClosed, EngineError
from app.src.core.backends.folder import find_folder
from app.src.core.loading import EngineOptions
from app.src.core.memory import MemoryLimits
from app.src.core.onnx_export.optimizer import calibrate
from app.src.core.onnx_export.serving import GraphOptions
from app.src.core.queue import WorkerDied
from app.src.scaling import cluster
from app.src.scaling.cluster import STARTS, Cluster, RayWorker
from app.src.settings.model import ScaleSettings
from connector.errors import ConfigurationError, Unavailable
from tests.core.conftest import make_tiny_folder
from tests.core.test_int8 import needs_vnni

OPTIONS = EngineOptions(model="hash:64")


class Handle:
    """A process whose calls the test answers, in order."""

    def __init__(self) -> None:
        self.calls: list[Future[Any]] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*_: object) -> Any:
            self.calls.append(Future())
            return SimpleNamespace(future=lambda answer=self.calls[-1]: answer)

        return SimpleNamespace(remote=remote)


class Processes(list[Handle]):
    """The processes that were started."""

    def __call__(self) -> Handle:
        self.append(Handle())
        return self[-1]


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(cluster, "_connected", lambda *_: nullcontext())
    cluster_of_one = Cluster(ScaleSettings(actors=1))
    yield cluster_of_one
    cluster_of_one.close()


def settled(callbacks: ThreadPoolExecutor) -> None:
    """Wait until the answers given so far have been handled."""
    callbacks.submit(lambda: None).result(30)


def test_a_dead_worker_is_replaced_and_its_cause_is_told(
    ray: Any, callbacks: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    processes = Processes()
    worker = RayWorker(processes, callbacks)
    processes[0].calls[0].set_result({})
    block = worker.call("embed")
    processes[0].calls[1].set_exception(ray.exceptions.OutOfMemoryError("a killed task\nthe node has 3 MB left"))
    with pytest.raises(WorkerDied, match=r"OutOfMemoryError: the node has 3 MB left"):
        block.result(30)
    assert len(processes) == 2
    assert "the node has 3 MB left" in caplog.text
    assert (worker.ready, worker.deaths) == (False, 1)
    worker.close()


def test_a_late_answer_of_a_dead_worker_counts_nothing(ray: Any, callbacks: ThreadPoolExecutor) -> None:
    processes = Processes()
    worker = RayWorker(processes, callbacks)
    late, block = worker.call("embed"), worker.call("embed")
    processes[0].calls[2].set_exception(ray.exceptions.ActorDiedError())
    with pytest.raises(WorkerDied):
        block.result(30)
    processes[0].calls[1].set_result("vectors")
    assert late.result(30) == "vectors"
    assert (worker.ready, worker.deaths) == (False, 1)
    worker.close()


def test_a_worker_whose_processes_do_not_start_fails_without_blaming_texts(
    ray: Any, callbacks: ThreadPoolExecutor
) -> None:
    processes = Processes()
    worker = RayWorker(processes, callbacks)
    for number in range(STARTS):
        processes[number].calls[0].set_exception(ray.exceptions.ActorDiedError())
        settled(callbacks)
    assert len(processes) == STARTS
    block = worker.call("embed")
    processes[-1].calls[-1].set_exception(ray.exceptions.ActorDiedError())
    with pytest.raises(DeviceFailed, match="died before they answered, the last one of ActorDiedError"):
        block.result(30)
    worker.close()


def test_a_worker_that_has_answered_once_may_die_often_and_has_one_time_limit(
    ray: Any, callbacks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    processes = Processes()
    worker = RayWorker(processes, callbacks)
    processes[0].calls[0].set_result({})
    settled(callbacks)
    worker.call("embed")
    for number in range(2 * STARTS):
        processes[number].calls[-1].set_exception(ray.exceptions.ActorDiedError())
        settled(callbacks)
    timers = [each for each in set(threading.enumerate()) - before if isinstance(each, threading.Timer)]
    assert (len(processes), worker.deaths, worker.failed) == (2 * STARTS + 1, 2 * STARTS, "")
    (timer,) = (each for each in timers if not each.finished.is_set())
    monkeypatch.setattr(ray, "kill", lambda _: None)
    timer.function()  # the time is over
    assert "did not start within" in worker.failed
    worker.close()


def test_an_error_of_starting_another_worker_ends_the_call(ray: Any, callbacks: ThreadPoolExecutor) -> None:
    handle = Handle()
    started = iter([handle])
    worker = RayWorker(lambda: next(started), callbacks)
    block = worker.call("embed")
    handle.calls[1].set_exception(ray.exceptions.ActorDiedError())
    with pytest.raises(EngineError, match="StopIteration"):
        block.result(30)
    worker.close()


def test_a_process_that_could_not_be_started_counts_as_a_death(
    ray: Any, callbacks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ray.exceptions.RaySystemError("failed to register actor")

    processes = Processes()
    monkeypatch.setattr(Handle, "__getattr__", lambda *_: SimpleNamespace(remote=refuse))
    monkeypatch.setattr(ray, "kill", refuse)
    worker = RayWorker(processes, callbacks)
    for _ in range(STARTS - 1):
        settled(callbacks)
    with pytest.raises(DeviceFailed, match="failed to register actor"):
        worker.call("embed").result(30)
    worker.close()


def test_a_closed_worker_starts_no_process(ray: Any, callbacks: ThreadPoolExecutor) -> None:
    processes = Processes()
    worker = RayWorker(processes, callbacks)
    block = worker.call("embed")
    worker.close()
    processes[0].calls[1].set_exception(ray.exceptions.ActorDiedError())
    with pytest.raises(EngineClosed):
        block.result(30)
    assert len(processes) == 1


def test_the_timer_of_a_start_ends_with_the_first_answer(callbacks: ThreadPoolExecutor) -> None:
    before = set(threading.enumerate())
    processes = Processes()
    worker = RayWorker(processes, callbacks)
    timers = [thread for thread in set(threading.enumerate()) - before if isinstance(thread, threading.Timer)]
    assert len(timers) == 1
    processes[0].calls[0].set_result({})
    timers[0].join(30)
    assert not timers[0].is_alive()
    assert worker.ready


@needs_vnni
def test_a_calibration_is_not_dropped_silently(
    ray: Any, unconnected: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.src.core.backends.torch.linears.bf16_gain", lambda: 0.02)
    monkeypatch.setattr(ray, "nodes", list)
    folder = make_tiny_folder(tmp_path, find_folder("all-MiniLM-L6-v2"))
    options, graphs = EngineOptions(str(folder), device="cpu"), GraphOptions(cache=tmp_path / "graphs")
    with pytest.raises(ConfigurationError, match="no node"):
        unconnected.engine(options, graphs)
    texts = [f"pump {number} leaks at flange {number * 7 % 13}, valve {chr(97 + number % 26)}" for number in range(200)]
    assert calibrate(options, graphs, MemoryLimits(), "materials", texts)["accepted"]
    with pytest.raises(DeviceUnavailable, match=r'has a calibration.*precision = "fp32"'):
        unconnected.engine(options, graphs)
    with pytest.raises(ConfigurationError, match="no node"):
        unconnected.engine(replace(options, precision="fp32"), graphs)


@pytest.mark.parametrize("error", [OSError("AF_UNIX path length cannot exceed 107 bytes"), TimeoutError("too slow")])
def test_each_error_of_ray_at_the_start_is_ours(ray: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Unavailable, match=f"cannot be used: {type(error).__name__}: {error}"):
        Cluster(ScaleSettings())


def test_a_long_path_of_the_usual_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert cluster._folder() == "/tmp"
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert cluster._folder() == "/var/tmp"
