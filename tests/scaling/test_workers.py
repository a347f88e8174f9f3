"""What a worker of the cluster does when its processes answer, die or cannot start. They stand in for Ray's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
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
from app.src.scaling.worker import Worker
from app.src.settings.model import ScaleSettings
from connector.errors import ConfigurationError, Unavailable
from tests.core.conftest import make_tiny_folder
from tests.core.test_int8 import needs_vnni

OPTIONS = EngineOptions(model="hash:64")


class Handle:
    """A process whose calls the test answers."""

    def __init__(self) -> None:
        self.calls: list[Future[Any]] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*_: object) -> Any:
            self.calls.append(Future())
            return SimpleNamespace(future=lambda answer=self.calls[-1]: answer)

        return SimpleNamespace(remote=remote)

    def answer(self, number: int, content: object) -> None:
        """Wait for the call, and answer it."""
        until(lambda: len(self.calls) > number)
        if isinstance(content, Exception):
            self.calls[number].set_exception(content)
        else:
            self.calls[number].set_result(content)


class Processes(list[Handle]):
    """The processes that were started."""

    def __call__(self) -> Handle:
        self.append(Handle())
        return self[-1]

    def nth(self, number: int) -> Handle:
        """Wait until it has been started."""
        until(lambda: len(self) > number)
        return self[number]


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(cluster, "_connected", lambda *_: nullcontext())
    cluster_of_one = Cluster(ScaleSettings(actors=1))
    yield cluster_of_one
    cluster_of_one.close()


def settled(callbacks: ThreadPoolExecutor) -> None:
    """Wait until the answers given so far have been handled."""
    callbacks.submit(lambda: None).result(30)


Begin = Callable[..., RayWorker]


@pytest.fixture
def begin(callbacks: ThreadPoolExecutor) -> Iterator[Begin]:
    """`begin(processes, others=...)`: a worker with these processes; `others`: whether others work."""
    with ExitStack() as held:

        def started(processes: Callable[[], Handle], *, others: bool = False) -> RayWorker:
            return held.enter_context(closing(RayWorker(processes, callbacks, lambda: others)))

        yield started


@pytest.fixture
def died(ray: Any) -> Exception:
    error: Exception = ray.exceptions.ActorDiedError()
    return error


REPORT = Worker().report()


def test_a_dead_worker_is_replaced_and_its_cause_is_told(
    ray: Any, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    processes = Processes()
    worker = begin(processes)
    block = worker.call("embed")
    assert len(processes[0].calls) == 1, "calls wait for the report"
    processes[0].answer(0, REPORT)
    processes[0].answer(1, ray.exceptions.OutOfMemoryError("a killed task\nthe node has 3 MB left"))
    with pytest.raises(WorkerDied, match=r"OutOfMemoryError: the node has 3 MB left"):
        block.result(30)
    assert len(processes) == 2
    assert "the node has 3 MB left" in caplog.text
    assert (worker.ready, worker.deaths) == (False, 1)


def test_a_late_answer_of_a_dead_worker_counts_nothing(begin: Begin, died: Exception) -> None:
    processes = Processes()
    worker = begin(processes)
    late, block = worker.call("embed"), worker.call("embed")
    processes[0].answer(0, REPORT)
    processes[0].answer(2, died)
    with pytest.raises(WorkerDied):
        block.result(30)
    processes[0].answer(1, "vectors")
    assert late.result(30) == "vectors"
    assert (worker.ready, worker.deaths) == (False, 1)


@pytest.mark.parametrize("kind", ["RaySystemError", "ObjectStoreFullError", "RayTaskError"])
def test_an_error_of_ray_that_ends_no_process_replaces_none(ray: Any, begin: Begin, kind: str) -> None:
    """A RaySystemError is also an answer that cannot be unpickled."""
    arguments = ("embed", "", TypeError("no reason")) if kind == "RayTaskError" else ("TypeError: no reason",)
    processes = Processes()
    worker = begin(processes)
    block = worker.call("embed")
    processes[0].answer(0, REPORT)
    processes[0].answer(1, getattr(ray.exceptions, kind)(*arguments))
    with pytest.raises(
        EngineError, match="ObjectStoreFullError" if kind == "ObjectStoreFullError" else "no reason"
    ) as caught:
        block.result(30)
    assert type(caught.value) is EngineError
    assert (len(processes), worker.ready) == (1, True)


def test_a_worker_whose_processes_do_not_start_fails_without_blaming_texts(
    begin: Begin, callbacks: ThreadPoolExecutor, died: Exception
) -> None:
    processes = Processes()
    worker = begin(processes)
    block = worker.call("embed")
    for number in range(STARTS):
        processes[number].answer(0, died)
        settled(callbacks)
    assert len(processes) == STARTS
    for call in (block, worker.call("embed")):
        with pytest.raises(DeviceFailed, match="died before they answered, the last one of ActorDiedError"):
            call.result(30)


@pytest.mark.proves(32)
def test_a_worker_that_worked_starts_again_however_often_its_processes_are_killed(
    begin: Begin, died: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "PAUSE_SECONDS", 0.01)
    processes = Processes()
    worker = begin(processes)
    processes.nth(0).answer(0, REPORT)
    worker.call("load")
    processes.nth(0).answer(1, died)
    processes.nth(1)
    block = worker.call("embed")
    for number in range(1, 3 * STARTS):
        processes.nth(number).answer(0, died)
    last = processes.nth(3 * STARTS)
    assert (worker.failed, worker.deaths, block.done()) == ("", 3 * STARTS, False)
    last.answer(0, REPORT)
    last.answer(1, "vectors")
    assert block.result(30) == "vectors"
    assert (worker.ready, worker.deaths) == (True, 0)


def test_an_error_of_starting_another_worker_ends_the_calls(begin: Begin, died: Exception) -> None:
    handle = Handle()
    worker = begin(iter([handle]).__next__)
    block = worker.call("embed")
    handle.answer(0, died)
    for call in (block, worker.call("embed")):
        with pytest.raises(DeviceFailed, match="cannot be started: StopIteration"):
            call.result(30)


def test_a_process_that_could_not_be_started_counts_as_a_death(
    ray: Any, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ray.exceptions.RaySystemError("failed to register actor")

    processes = Processes()
    monkeypatch.setattr(Handle, "__getattr__", lambda *_: SimpleNamespace(remote=refuse))
    monkeypatch.setattr(ray, "kill", refuse)
    with pytest.raises(DeviceFailed, match="failed to register actor"):
        begin(processes).call("embed").result(30)
    assert len(processes) == STARTS


def test_a_closed_worker_starts_no_process(begin: Begin, died: Exception, callbacks: ThreadPoolExecutor) -> None:
    processes = Processes()
    worker = begin(processes)
    block = worker.call("embed")
    worker.close()
    processes[0].answer(0, died)
    for call in (block, worker.call("embed")):
        with pytest.raises(EngineClosed):
            call.result(30)
    settled(callbacks)
    assert len(processes) == 1


def test_the_limit_of_a_start_ends_with_the_first_answer(begin: Begin) -> None:
    before = set(threading.enumerate())
    processes = Processes()
    worker = begin(processes)
    timers = [thread for thread in set(threading.enumerate()) - before if isinstance(thread, threading.Timer)]
    assert len(timers) == 1
    processes[0].answer(0, REPORT)
    timers[0].join(30)
    assert not timers[0].is_alive()
    assert worker.ready


@pytest.mark.parametrize(("worked", "others"), [(False, True), (True, False)])
@pytest.mark.proves(32)
def test_a_worker_that_does_not_start_in_time_fails(
    begin: Begin, died: Exception, monkeypatch: pytest.MonkeyPatch, *, worked: bool, others: bool
) -> None:
    processes = Processes()
    monkeypatch.setattr(cluster, "START_SECONDS", 300 if worked else 0.05)
    worker = begin(processes, others=others)
    if worked:
        processes[0].answer(0, REPORT)
        worker.call("load")
        monkeypatch.setattr(cluster, "START_SECONDS", 0.05)
        processes.nth(0).answer(1, died)
        processes.nth(1)
    with pytest.raises(DeviceFailed, match="did not start within 0 s"):
        worker.call("embed").result(30)
    assert "did not start" in worker.failed


@pytest.mark.proves(33)
def test_a_worker_whose_node_is_away_waits_on_as_long_as_others_work_and_they_do_its_blocks(
    begin: Begin, died: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes()
    worker = begin(processes, others=True)
    processes[0].answer(0, REPORT)
    worker.call("load")
    monkeypatch.setattr(cluster, "START_SECONDS", 0.05)
    processes.nth(0).answer(1, died)
    back = processes.nth(1)
    for _ in range(3):
        with pytest.raises(WorkerDied, match="did not start within"):
            worker.call("embed").result(30)
    back.answer(0, REPORT)
    until(lambda: worker.ready)
    block = worker.call("embed")
    back.answer(1, "vectors")
    assert (block.result(30), worker.failed, len(processes)) == ("vectors", "", 2)


@pytest.mark.proves(36)
def test_another_process_with_other_versions_gets_no_text(begin: Begin, died: Exception) -> None:
    processes = Processes()
    worker = begin(processes)
    processes[0].answer(0, REPORT)
    worker.call("load")
    processes.nth(0).answer(1, died)
    processes.nth(1)
    block = worker.call("embed")
    processes[1].answer(0, REPORT | {"host": "node-2", "versions": REPORT["versions"] | {"numpy": "1.0"}})
    with pytest.raises(DeviceFailed, match=r"node-2 of the Ray cluster has other versions: numpy 1\.0"):
        block.result(30)
    assert len(processes[1].calls) == 1


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
