"""Workers of key ranges: a process each, which may be killed, or this process, one range after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from connector import failpoints
from connector.hana.source import HanaSource
from connector.sync.options import Ends, Watch
from connector.sync.ranges import RangeReport, RangeTask, WorkerLost
from tests.forked import processes
from tests.proof.ground import Plan
from tests.proof.worker import embedder


class Processes:
    """A process for each task. `failpoints`: of the first tasks; later ones have none."""

    def __init__(self, plan: Plan, count: int, failpoints: Iterable[str] = ()) -> None:
        self.count = count
        self.tasks: list[RangeTask] = []
        self.processes: list[ForkServerProcess] = []
        self._plan, self._failpoints, self._stop = plan, iter(failpoints), processes.Event()

    def submit(self, task: RangeTask) -> Future[RangeReport]:
        ours, theirs = processes.Pipe(duplex=False)
        order = (self._plan, task, next(self._failpoints, ""), theirs, self._stop)
        process = processes.Process(target=_work, args=order, daemon=True)
        process.start()
        theirs.close()
        self.tasks.append(task)
        self.processes.append(process)
        future: Future[RangeReport] = Future()
        threading.Thread(target=_wait, args=(ours, future), daemon=True).start()
        return future

    def stop(self) -> None:
        self._stop.set()


def _wait(answers: Connection, future: Future[RangeReport]) -> None:
    try:
        answer = answers.recv()
    except EOFError:
        answer = WorkerLost("killed")
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _work(plan: Plan, task: RangeTask, failpoint: str, answers: Connection, stop: Any) -> None:
    if failpoint:
        failpoints.arm(failpoints.hook(failpoint))
    with plan.pool() as pool, closing(plan.store(pool)) as store:
        try:
            answers.send(task(Ends(HanaSource(pool), store, embedder()), Watch(None, stop.is_set)))
        except Exception as error:
            answers.send(error)
    os._exit(0)


class Here:
    """Run each task at once. `before` is called with each task; what it raises is the task's error."""

    count = 2

    def __init__(self, ends: Ends, before: Callable[[RangeTask], None] = lambda task: None) -> None:
        self._ends, self._before, self._stop = ends, before, threading.Event()
        self.tasks: list[RangeTask] = []

    def submit(self, task: RangeTask) -> Future[RangeReport]:
        self.tasks.append(task)
        future: Future[RangeReport] = Future()
        try:
            self._before(task)
            future.set_result(task(self._ends, Watch(None, self._stop.is_set)))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        self._stop.set()
