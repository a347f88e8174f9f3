"""A scheduler with a virtual clock. Threads of the code under test become greenlets; at each wait, and at some locks,
one seeded generator chooses which one runs next. Processes can be killed, paused, and have clocks of their own.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

from connector.model import Lease
from tests.simulation import primitives

YIELDS = 0.15  # share of uncontended locks at which another greenlet may run
Queue = list[tuple["Task", int]]


class Killed(BaseException):
    """Ends a greenlet of a killed process: each wait raises it, so that `finally` blocks cannot reach the outside."""


class Stuck(AssertionError):
    """The simulation cannot go on, or does not end."""


class Process:
    """A simulated process. `skew`, `rate`: its wall clock against the true one, and how fast its clocks run."""

    def __init__(self, name: str, skew: float = 0.0, rate: float = 1.0) -> None:
        self.name = name
        self.skew, self.rate = skew, rate
        self.dead = False
        self.paused_until = self.cut_off_until = 0.0
        self.tasks: dict[Task, None] = {}
        self.on_death: list[Callable[[], None]] = []


class Task:
    """A greenlet. `turn` counts its waits, so that a late wake-up cannot end a later wait."""

    def __init__(self, process: Process, run: greenlet) -> None:
        self.process, self.run = process, run
        self.turn = 0
        self.woken = self.done = False
        self.ended: Queue = []
        self.locals: dict[tuple[int, str], Any] = {}
        self.claim: Lease | None = None  # the lease under which it writes


class Scheduler:
    """`now`: seconds since the start. `steps`: switches so far. `trace`: lines for the reader of a replay."""

    def __init__(self, chance: random.Random, *, tracing: bool = False, most_steps: int = 200_000) -> None:
        self.chance = chance
        self.now = 0.0
        self.steps = 0
        self.trace: list[str] | None = [] if tracing else None
        self.errors: list[BaseException] = []
        self.nemesis: Callable[[], None] | None = None  # called before each step
        self._most_steps = most_steps
        self._ready: list[tuple[Task, int]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._tasks: dict[greenlet, Task] = {}
        self._hub = getcurrent()

    def say(self, text: str) -> None:
        if self.trace is not None:
            task = self._tasks.get(getcurrent())
            self.trace.append(f"{self.now:9.3f} {task.process.name if task else '-':8} {text}")

    @property
    def current(self) -> Task:
        return self._tasks[getcurrent()]

    # ------------------------------------------------------------------------------------------------------ running

    def spawn(self, process: Process, work: Callable[[], None]) -> Task:
        def body() -> None:
            try:
                if not process.dead:
                    work()
            except Killed:
                pass
            except BaseException as error:
                self.errors.append(error)
            task.done = True
            process.tasks.pop(task, None)
            self._tasks.pop(task.run, None)
            self.wake(task.ended)

        task = Task(process, greenlet(body, self._hub))
        self._tasks[task.run] = task
        process.tasks[task] = None
        self._ready.append((task, task.turn))
        return task

    def run(self, until: Callable[[], bool]) -> None:
        """Run until the condition holds. Raises the first error of a greenlet, and Stuck."""
        while not until():
            if self.nemesis is not None:
                self.nemesis()
            while not self._ready:
                if not self._timers:
                    raise Stuck("every thread waits and no timer is set")
                self.now, _, ring = heapq.heappop(self._timers)
                ring()
            place = self.chance.randrange(len(self._ready))
            self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
            task, turn = self._ready.pop()
            if task.done or task.turn != turn:
                continue
            if task.process.paused_until > self.now and not task.process.dead:
                self.at(task.process.paused_until, partial(self._ready.append, (task, turn)))
                continue
            self.steps += 1
            if self.steps > self._most_steps:
                raise Stuck(f"no end after {self.steps} steps")
            task.turn += 1
            task.run.switch()
            if self.errors:
                raise self.errors[0]

    def close(self) -> None:
        """End all greenlets."""
        for task in list(self._tasks.values()):
            task.process.dead = True
        for task in list(self._tasks.values()):
            for _ in range(1000):  # each `finally` may wait once more
                if task.done:
                    break
                task.run.switch()

    # ------------------------------------------------------------------------------------------------------ waiting

    def at(self, moment: float, ring: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (moment, next(self._numbers), ring))

    def wait(self, queue: Queue | None, seconds: float | None = None) -> bool:
        """Wait in the queue; return whether `wake` ended the wait. Without a queue: sleep."""
        task = self.current
        self.check(task.process)
        task.woken, turn = False, task.turn
        if queue is not None:
            queue.append((task, turn))
        if seconds is not None:
            self.at(self.now + max(0.0, seconds), lambda: self._ready.append((task, turn)))
        self._hub.switch()
        self.check(task.process)
        return task.woken

    @staticmethod
    def check(process: Process) -> None:
        if process.dead:
            raise Killed

    def wake(self, queue: Queue, count: int | None = None) -> None:
        chosen, queue[:] = queue[:count], [] if count is None else queue[count:]
        for task, turn in chosen:
            if task.turn == turn:
                task.woken = True
                self._ready.append((task, turn))

    def sleep(self, seconds: float) -> None:
        self.wait(None, seconds)

    def step_aside(self) -> None:
        """Let another greenlet run, sometimes."""
        if getcurrent() in self._tasks and self.chance.random() < YIELDS:
            self.sleep(0)

    def kill(self, process: Process) -> None:
        self.say(f"kill {process.name}")
        process.dead = True
        for task in process.tasks:
            self._ready.append((task, task.turn))
        for done in process.on_death:
            done()

    # ----------------------------------------------------------------------------------- for the code under test

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Give every module of the connector this scheduler's `threading` and `time`, and tenacity its `time`."""
        fakes = {threading: primitives.threading_of(self), time: primitives.time_of(self)}
        changed: list[tuple[types.ModuleType, str, types.ModuleType]] = []
        for name, module in list(sys.modules.items()):
            ours = name.startswith("connector.")
            for attribute, real in (("threading", threading), ("time", time)):
                if (ours or (name, attribute) == ("tenacity", "time")) and getattr(module, attribute, None) is real:
                    changed.append((module, attribute, real))
                    setattr(module, attribute, fakes[real])
        state = random.getstate()
        random.seed(self.chance.getrandbits(32))  # tenacity's jitter
        try:
            yield
        finally:
            random.setstate(state)
            for module, attribute, real in changed:
                setattr(module, attribute, real)
