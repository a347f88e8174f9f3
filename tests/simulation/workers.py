"""Workers of key ranges in the simulation: processes that run `RangeTask`s, die, or are taken for dead."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import wait as _wait
from functools import partial
from typing import TYPE_CHECKING, Any

from connector.sync.options import Ends, Watch
from connector.sync.ranges import RangeReport, RangeTask, WorkerLost
from tests.simulation.scheduler import Process, Scheduler

if TYPE_CHECKING:
    from tests.simulation.world import World


class Spread:
    """`Workers` of one driver. A worker that is lost is replaced."""

    def __init__(self, world: World, driver: Process, count: int) -> None:
        self._world, self._driver = world, driver
        self.count = count
        self._idle: list[Process] = []
        self._made = 0
        self._stopping = False
        driver.on_death.append(self._orphan)
        self._alive: list[Process] = []
        self._ends: dict[Process, Ends] = {}

    def submit(self, task: RangeTask) -> Future[RangeReport]:
        world, future = self._world, Future[RangeReport]()
        worker = self._idle.pop() if self._idle else self._make()
        sent = pickle.dumps(task)
        self._stopping = False

        def lost() -> None:
            answer(lambda: future.set_exception(WorkerLost(f"{worker.name} is lost")))

        def answer(give: Callable[[], None]) -> None:
            if not future.done():
                give()

        def work() -> None:
            world.sim.sleep(world.chance.uniform(0, 0.1))
            taken: RangeTask = pickle.loads(sent)
            world.sim.say(f"takes range {taken.within}")
            try:
                report = taken(self._ends[worker], Watch(stop=lambda: self._stopping))
            except Exception as error:
                world.expected(error)
                failed = error
                answer(lambda: future.set_exception(failed))
            else:
                answer(lambda: future.set_result(report))
            self._idle.append(worker)

        def died() -> None:
            world.sim.at(world.sim.now + world.chance.choice((0.1, 5.0, 30.0)), lost)

        worker.on_death.append(died)
        world.running.append((future, worker, lost))
        world.sim.spawn(worker, work)
        return future

    def stop(self) -> None:
        self._stopping = True

    def _make(self) -> Process:
        self._made += 1
        worker = Process(f"{self._driver.name}r{self._made}", rate=self._world.chance.uniform(0.9, 1.1))
        self._ends[worker] = self._world.ends()
        self._alive.append(worker)
        self._world.victims.append(worker)
        worker.on_death.append(lambda: self._dead(worker))
        return worker

    def _dead(self, worker: Process) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
        self._alive.remove(worker)
        if worker in self._world.victims:
            self._world.victims.remove(worker)

    def __enter__(self) -> Spread:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the workers go; one that was taken for lost is still at work."""
        for worker in self._alive:
            self._world.victims.remove(worker)
        self._driver.on_death.remove(self._orphan)

    def _orphan(self) -> None:
        """The driver died; its workers end some time later."""

        def end(worker: Process) -> None:
            if not worker.dead:
                self._world.sim.kill(worker)

        for worker in self._alive:
            self._world.sim.at(self._world.sim.now + self._world.chance.choice((0.0, 10.0, 60.0)), partial(end, worker))


def waiting(sim: Scheduler) -> Callable[..., Any]:
    """Return `concurrent.futures.wait` for the simulation, with the finished futures in their order."""

    def wait(futures: Collection[Future[Any]], timeout: float, return_when: str) -> Any:
        deadline = sim.now + timeout
        while not (done := [future for future in futures if future.done()]) and sim.now < deadline:
            sim.sleep(min(1.0, deadline - sim.now))
        return type(_wait(()))(done, set(futures) - set(done))  # type: ignore[arg-type]

    return wait
