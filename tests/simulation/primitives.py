"""The parts of `threading` and `time` that the connector uses, on the scheduler of a simulation."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.scheduler import Queue, Scheduler, Task

EPOCH = 1_772_366_400.0  # 2026-03-01 12:00 UTC, when every simulation begins


def time_of(sim: Scheduler) -> Any:
    """Return a `time` whose clocks are those of the process that asks."""

    def monotonic() -> float:
        return 1000.0 + sim.now * sim.current.process.rate

    def wall() -> float:
        return EPOCH + sim.current.process.skew + sim.now * sim.current.process.rate

    return types.SimpleNamespace(monotonic=monotonic, time=wall, perf_counter=lambda: sim.now, sleep=sim.sleep)


def threading_of(sim: Scheduler) -> Any:
    """Return a `threading` whose threads are greenlets."""
    made = {base.__name__: type(base.__name__, (base,), {"sim": sim}) for base in (Lock, Condition, Event, Thread)}
    return types.SimpleNamespace(**made, RLock=made["Lock"], local=lambda: Local(sim))


class Lock:
    """A lock that its owner may take again. Another greenlet may run before a lock is taken."""

    sim: Scheduler

    def __init__(self) -> None:
        self.owner: Task | None = None
        self.depth = 0
        self.queue: Queue = []

    def __enter__(self) -> Lock:
        self.sim.step_aside()
        self.take()
        self.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.give()

    def take(self) -> None:
        task = self.sim.current
        while self.owner not in (None, task):
            self.sim.wait(self.queue)
        self.owner = task

    def give(self) -> None:
        self.owner = None
        self.sim.wake(self.queue, 1)


class Condition(Lock):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: Queue = []

    def wait(self, timeout: float | None = None) -> bool:
        self.depth = 0
        self.give()
        try:
            return self.sim.wait(self.waiting, timeout)
        finally:
            if not self.sim.current.process.dead:
                self.take()
            self.depth = 1

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self.sim.now + timeout
        while not (found := predicate()):
            left = None if deadline is None else deadline - self.sim.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        self.sim.wake(self.waiting, n)

    def notify_all(self) -> None:
        self.sim.wake(self.waiting)


class Event:
    sim: Scheduler

    def __init__(self) -> None:
        self.flag = False
        self.waiting: Queue = []

    def is_set(self) -> bool:
        return self.flag

    def set(self) -> None:
        self.flag = True
        self.sim.wake(self.waiting)

    def wait(self, timeout: float | None = None) -> bool:
        if not self.flag:
            self.sim.wait(self.waiting, timeout)
        return self.flag


class Thread:
    sim: Scheduler

    def __init__(
        self, target: Callable[..., None], name: str = "", args: Sequence[Any] = (), daemon: bool | None = None
    ) -> None:
        self._work = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self.sim.spawn(self.sim.current.process, self._work)

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and not self._task.done:
            self.sim.wait(self._task.ended, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


class Local:
    """Attributes of each greenlet."""

    def __init__(self, sim: Scheduler) -> None:
        self.__dict__["sim"] = sim

    def __getattr__(self, name: str) -> Any:
        try:
            return self.sim.current.locals[id(self), name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.sim.current.locals[id(self), name] = value
