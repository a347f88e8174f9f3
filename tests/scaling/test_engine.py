"""A pool over members whose workers are threads here, not processes of Ray: results, errors, deaths."""

from __future__ import annotations

import pickle
import platform
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import DeviceFailed, DeviceUnavailable, EngineError, ModelNotFound
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.pool import EnginePool
from app.src.core.queue import WorkerDied
from app.src.scaling.engine import WorkerEngine
from app.src.scaling.worker import Block, Worker
from app.src.service.ranges import Order, RangeWorkers, work
from connector.errors import SyncPaused
from connector.sync.options import SyncReport
from connector.sync.ranges import IdSums, RangeReport, WorkerLost

OPTIONS = EngineOptions(model="hash:64", device="cpu")
REPORT = RangeReport(SyncReport("rows"), IdSums(b""))
TASK: Any = None
TEXTS = [f"pump number {number} leaks" for number in range(3000)]


class LocalWorker:
    """A worker in threads of this process. `dies`: the numbers of the calls that kill it."""

    failed = ""
    ready = True

    def __init__(self, dies: tuple[int, ...] = ()) -> None:
        self._threads = ThreadPoolExecutor(2)
        self.process, self.calls, self.deaths, self.dies = Worker(), 0, 0, dies

    def call(self, method: str, *content: object) -> Future[Any]:
        self.calls += 1
        return self._threads.submit(self._called, self.calls, method, *content)

    def _called(self, number: int, method: str, *content: object) -> Any:
        if number in self.dies:
            self.deaths += 1
            self.process = Worker()
            raise WorkerDied("killed")
        return getattr(self.process, method)(*content)


@pytest.fixture
def expected() -> Iterator[np.ndarray]:
    with load_engine(OPTIONS) as engine:
        yield engine.embed(TEXTS)


def pool_of(*workers: LocalWorker, options: EngineOptions = OPTIONS) -> EnginePool:
    members = [
        WorkerEngine(worker, options, worker.call("load", options).result())  # type: ignore[arg-type]
        for worker in workers
    ]
    first = load_engine(OPTIONS)
    assert not isinstance(first, EnginePool)
    return EnginePool(first, members)  # type: ignore[arg-type]


def test_vectors_counts_and_statistics_are_those_of_an_engine(expected: np.ndarray) -> None:
    with pool_of(LocalWorker(), LocalWorker()) as pool:
        vectors, counts = pool.embed_counted(TEXTS, "bulk")
        assert np.array_equal(vectors, expected)
        assert counts == pool.count_tokens(TEXTS)
        assert pool.stats().tokens == sum(counts)


def test_a_worker_that_dies_costs_only_its_blocks(expected: np.ndarray) -> None:
    worker = LocalWorker(dies=(3,))
    with pool_of(worker, LocalWorker()) as pool:
        assert np.array_equal(pool.embed(TEXTS, "bulk"), expected)
        tokens = pool.stats().tokens
        assert np.array_equal(pool.embed(TEXTS, "bulk"), expected)  # by a new worker, which loads the model
        assert pool.stats().tokens > tokens
    assert worker.deaths == 1


@pytest.mark.parametrize("error", [WorkerDied("killed"), DeviceFailed("no worker starts")])
def test_a_range_whose_worker_is_lost_goes_to_another(error: EngineError, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = LocalWorker()
    (member,) = pool_of(worker).members
    failed = Future[Any]()
    failed.set_exception(error)
    monkeypatch.setattr(worker, "call", lambda *_: failed)
    with pytest.raises(WorkerLost, match=str(error)):
        RangeWorkers([member], None).submit(TASK).result(30)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[RangeWorkers, LocalWorker, Future[Any]]:
    """Two workers, the first one, and its answer. The other one answers `REPORT` at once."""
    workers, answer, done = (LocalWorker(), LocalWorker()), Future[Any](), Future[Any]()
    members = pool_of(*workers).members
    done.set_result(REPORT)
    monkeypatch.setattr(workers[0], "call", lambda *_: answer)
    monkeypatch.setattr(workers[1], "call", lambda *_: done)
    return RangeWorkers(members, None), workers[0], answer


Two = tuple[RangeWorkers, LocalWorker, Future[Any]]


def test_a_worker_that_failed_gets_no_more_ranges(two: Two) -> None:
    ranges, first, answer = two
    lost = ranges.submit(TASK)
    first.failed = "no worker starts"
    answer.set_exception(DeviceFailed(first.failed))
    with pytest.raises(WorkerLost):
        lost.result(30)
    assert [ranges.submit(TASK).result(30) for _ in range(3)] == 3 * [REPORT]
    assert ranges.count == 1


def test_a_worker_whose_process_starts_gets_no_range_while_others_work(two: Two) -> None:
    ranges, first, _ = two
    assert ranges.count == 2
    first.ready = False
    assert [ranges.submit(TASK).result(30) for _ in range(3)] == 3 * [REPORT]
    assert ranges.count == 1
    for member in ranges._members:
        member.worker.ready = False
    assert ranges.count == 2, "all wait"


def test_an_error_with_attributes_comes_out_of_a_range_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def paused(*_: object) -> None:
        raise SyncPaused("half of the rows are gone", reason="max_deletes")

    monkeypatch.setattr("app.src.service.ranges._parts", paused)
    error = pickle.loads(pickle.dumps(work(Worker(), Order("run", None, tmp_path, OPTIONS, TASK))))
    assert (type(error), error.reason) == (SyncPaused, "max_deletes")
    assert str(error) == f"{platform.node()}: half of the rows are gone"


def test_errors_of_loading_name_the_node() -> None:
    found = Worker().load(replace(OPTIONS, model="hash:3"))
    assert isinstance(found, ModelNotFound)
    assert re.match(f"{platform.node()}: .*hash:N", str(found))


def test_a_model_with_another_fingerprint_is_refused_at_the_start() -> None:
    with pytest.raises(DeviceUnavailable, match="fingerprint"):
        pool_of(LocalWorker(), options=EngineOptions(model="hash:32", device="cpu"))


def test_a_worker_with_another_fingerprint_later_embeds_nothing() -> None:
    answer = Worker().embed(OPTIONS, Block(["pump"], "bulk", "document", True, "another"))
    assert isinstance(answer, DeviceFailed)
    assert "its fingerprint is hash:64" in str(answer)


def test_errors_of_other_libraries_are_returned_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr("app.src.scaling.worker.load_engine", broken)
    found = Worker().load(OPTIONS)
    assert type(found) is EngineError
    assert str(found) == f"{platform.node()}: ModuleNotFoundError in a worker: No module named 'torch'"


def test_a_report_names_process_and_versions() -> None:
    report = Worker().report()
    assert report["versions"]["numpy"] == np.__version__
    assert report["pid"]
