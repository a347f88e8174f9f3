"""Searches that meet share a pass, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from connector.stores import scan
from connector.stores.scan import SharedScans

WAIT = 20.0


class Gate:
    """A view whose passes wait to be let through; each ranking is the query's first number."""

    def __init__(self) -> None:
        self.passes: list[list[float]] = []
        self._open = threading.Semaphore(0)
        self.fails = False

    def let(self, passes: int = 1) -> None:
        self._open.release(passes)

    def rank(self, queries: np.ndarray, allowed: object) -> list[float]:
        self.passes.append(queries[:, 0].tolist())
        assert self._open.acquire(timeout=WAIT)
        if self.fails:
            raise MemoryError("no room")
        return [float(query[0]) for query in queries]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Callers:
    def __init__(self, scans: SharedScans) -> None:
        self.scans = scans
        self.pool = ThreadPoolExecutor(64)

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def ask(self, gate: Gate, number: float, allowed: object = None) -> Future[float]:
        return self.pool.submit(self.scans.rank, gate, np.array([number], np.float32), allowed)  # type: ignore[arg-type]

    def wait_for(self, waiting: int) -> None:
        until(lambda: len(self.scans._waiting) == waiting)


def test_whoever_waits_goes_together():
    gate = Gate()
    with Callers(SharedScans(1)) as callers:
        first = callers.ask(gate, 0)
        until(lambda: len(gate.passes) == 1)
        others = [callers.ask(gate, number) for number in range(1, 6)]
        callers.wait_for(5)
        gate.let(2)
        assert first.result(WAIT) == 0
        assert [other.result(WAIT) for other in others] == [1, 2, 3, 4, 5]
    assert [len(together) for together in gate.passes] == [1, 5]
    assert callers.scans._free == 1


def test_nobody_waits_while_a_core_is_free():
    gate = Gate()
    with Callers(SharedScans(3)) as callers:
        asked = [callers.ask(gate, number) for number in range(3)]
        until(lambda: len(gate.passes) == 3)
        gate.let(3)
        assert sorted(one.result(WAIT) for one in asked) == [0, 1, 2]


def test_one_taken_along_waits_for_its_answer_while_cores_are_free():
    slow, quick = Gate(), Gate()
    with Callers(SharedScans(2)) as callers:
        busy = [callers.ask(slow, 0), callers.ask(quick, 0)]
        until(lambda: len(slow.passes) == len(quick.passes) == 1)
        asked = [callers.ask(slow, number) for number in (1, 2)]
        callers.wait_for(2)
        quick.let(1)
        until(lambda: len(slow.passes) == 2)  # by the free core, both together
        assert callers.ask(quick, 3) is not None
        quick.let(1)
        slow.let(2)
        assert [one.result(WAIT) for one in (*busy, *asked)] == [0, 0, 1, 2]


def test_a_pass_has_a_size(monkeypatch):
    monkeypatch.setattr(scan, "TOGETHER", 4)
    gate = Gate()
    with Callers(SharedScans(1)) as callers:
        asked = [callers.ask(gate, 0)]
        until(lambda: len(gate.passes) == 1)
        asked += [callers.ask(gate, number) for number in range(1, 11)]
        callers.wait_for(10)
        gate.let(4)
        assert [one.result(WAIT) for one in asked] == list(range(11))
    assert [len(together) for together in gate.passes] == [1, 4, 4, 2]


def test_other_rows_are_another_pass():
    """Another snapshot, or other rows that count."""
    gate, newer, some = Gate(), Gate(), np.ones(3, np.bool_)
    with Callers(SharedScans(1)) as callers:
        asked = [callers.ask(gate, 0)]
        until(lambda: len(gate.passes) == 1)
        for number, (view, allowed) in enumerate([(gate, None), (newer, None), (gate, some), (newer, None)], 1):
            asked.append(callers.ask(view, number, allowed))
            callers.wait_for(number)
        gate.let(3)
        newer.let(1)
        assert [one.result(WAIT) for one in asked] == [0, 1, 2, 3, 4]
    assert gate.passes == [[0], [1], [3]]
    assert newer.passes == [[2, 4]]


def test_a_failing_pass_fails_its_own_searches_only():
    gate = Gate()
    with Callers(SharedScans(1)) as callers:
        asked = [callers.ask(gate, 0)]
        until(lambda: len(gate.passes) == 1)
        asked += [callers.ask(gate, number) for number in (1, 2)]
        callers.wait_for(2)
        gate.fails = True
        gate.let(1)
        with pytest.raises(MemoryError):
            asked[0].result(WAIT)
        until(lambda: len(gate.passes) == 2)
        gate.fails = False
        gate.let(1)
        assert [one.result(WAIT) for one in asked[1:]] == [1, 2]
        again = callers.ask(gate, 7)
        gate.let(1)
        assert again.result(WAIT) == 7


def test_one_that_is_interrupted_while_it_waits_does_not_hold_up_the_others(monkeypatch):
    gate, scans = Gate(), SharedScans(1)
    with Callers(scans) as callers:
        first = callers.ask(gate, 0)
        until(lambda: len(gate.passes) == 1)

        def interrupted(_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(scans._changed, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                scans.rank(gate, np.zeros(1, np.float32), None)  # type: ignore[arg-type]
        gate.let(2)
        assert first.result(WAIT) == 0
        assert callers.ask(gate, 3).result(WAIT) == 3
    assert scans._free == 1
    assert not scans._waiting
