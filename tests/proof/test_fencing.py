"""A worker stands still past its lease, at any point outside a transaction; another takes over and does the work; the
first wakes up and can write nothing more, whatever it was about to write.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.proof.cycles import EACH_METHOD, GROUNDS, NATIVE, Cycles, named
from tests.proof.ground import PAGE
from tests.proof.worker import PATIENCE, Worker
from tests.slow import slow_but

HOLDING = ("mid_upsert", "mid_checkpoint")
"""Here a transaction is open: nobody can take over before it ends, and it may."""
NOTHING_LEFT = ("after_checkpoint",)
"""Here everything is written."""


def stands_still(cycles: Cycles, name: str) -> None:
    ground = cycles.ground
    sleeper = asleep(cycles, name)
    ground.expire_lease()
    ground.change()
    cycles.converge()
    before = ground.content()
    sleeper.signal(signal.SIGCONT)
    report = sleeper.wait()
    assert report is not None
    assert name in NOTHING_LEFT or report.get("error") == "LeaseLost", (name, report)
    assert ground.content() == before, f"I9: woken at {name}, it has written"
    ground.refill()


def woken_early(cycles: Cycles, name: str) -> None:
    """While the other is still at work. What the two leave is what one would have left."""
    sleeper = asleep(cycles, name)
    cycles.ground.expire_lease()
    other = cycles.start(full=True)
    deadline = time.monotonic() + PATIENCE
    while cycles.ground.holder() != other.owner and time.monotonic() < deadline:
        time.sleep(0.002)
    sleeper.signal(signal.SIGCONT)
    report, done = sleeper.wait(), other.wait()
    assert report is not None
    assert done is not None
    assert name in NOTHING_LEFT or report.get("error") == "LeaseLost", (name, report)
    assert "error" not in done, done
    cycles.ground.converged(done, cycles.saying)


def asleep(cycles: Cycles, name: str) -> Worker:
    """A worker that stands still there. Where another of its threads has a transaction open, it is woken, and the next
    one tried."""
    ground = cycles.ground
    for _ in range(10):
        ground.refill()
        cycles.converge()
        ground.purge(PAGE + 3)
        ground.rewrite(2 * PAGE)
        sleeper = cycles.start(f"{name}:1:stop")
        assert sleeper.stopped(), f"no run passes {name}"
        if not ground.in_transaction():
            return sleeper
        sleeper.signal(signal.SIGCONT)
        report = sleeper.wait()
        assert report is not None
        assert "error" not in report, report
    raise AssertionError(f"whoever stands still at {name} always has a transaction open; {cycles.saying}")


def points(cycles: Cycles) -> list[str]:
    return [name for name in cycles.ground.method.passes if name not in HOLDING]


@pytest.mark.parametrize("ground", slow_but([*EACH_METHOD, NATIVE], ("hana", "hash")), ids=named, indirect=True)
@pytest.mark.proves(10, 26)
def test_a_worker_that_stood_still_at_some_point_writes_nothing_more(cycles: Cycles) -> None:
    stands_still(cycles, cycles.ground.chance.choice(points(cycles)))
    woken_early(cycles, cycles.ground.chance.choice(points(cycles)))


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS, ids=named, indirect=True)
@pytest.mark.proves(10, 26)
def test_a_worker_that_stood_still_at_any_point_writes_nothing_more(cycles: Cycles) -> None:
    for name in points(cycles):
        stands_still(cycles, name)
        woken_early(cycles, name)
