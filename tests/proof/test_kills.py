"""A sync is killed at random moments and at every failpoint, hundreds of times: after each kill the store is sound and the
checkpoint not ahead of it, and whenever a run may end, store and source are the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from connector import failpoints
from tests.proof.ground import PAGE, Ground
from tests.proof.methods import METHODS
from tests.proof.worker import Order, Worker

KINDS = ("local", "hana")
SWITCH = {"mid_alias_swap"}
"""Of generations: no sync comes by there."""
GROUNDS = [(kind, method) for kind in KINDS for method in METHODS]


def named(ground: tuple[str, str]) -> str:
    return "-".join(ground)


class Cycles:
    """Runs, killed or not, on one ground."""

    def __init__(self, ground: Ground, folder: Path, seed: int) -> None:
        self.ground = ground
        self._folder = folder
        self._saying = f"replay with OWL_SAP_TEST_SEED={seed}"
        self.kills = 0
        self.ended = 0

    def start(self, failpoint: str = "", *, full: bool = False) -> Worker:
        self.ground.begin()
        return Worker(Order(self.ground.plan, full, failpoint), self._folder)

    def killed_at_random(self, longest: float) -> float:
        """How long it took, or would have taken as far as anyone knows."""
        after = self.ground.chance.uniform(0, longest)
        began = time.perf_counter()
        report = self.start().kill_after(after)
        took = time.perf_counter() - began
        self.judge(report, f"killed after {after:.3f} s")
        return longest if report is None else took

    def killed_at(self, failpoint: str) -> bool:
        """Whether the run came by there."""
        report = self.start(failpoint).wait()
        self.judge(report, f"killed at {failpoint}")
        return report is None

    def judge(self, report: dict[str, Any] | None, how: str) -> None:
        self.kills += report is None
        self.ended += report is not None
        assert report is None or "error" not in report, (report, how, self._saying)
        self.ground.sound(f"cycle {self.kills + self.ended}: {how}; {self._saying}")

    def converge(self) -> float:
        """A full run that nobody disturbs, and another that finds nothing to do; how long the first took."""
        began = time.perf_counter()
        report = self.start(full=True).wait()
        took = time.perf_counter() - began
        assert report is not None
        assert "error" not in report, (report, self._saying)
        self.ground.converged(report, self._saying)
        again = self.start().wait()
        assert again is not None
        idle = (again["upserted"], again["embedded_texts"], again["deleted"])
        assert idle == (0, 0, 0), (again, self._saying)
        return took


@pytest.fixture
def cycles(ground: Ground, tmp_path: Path, seed: int) -> Cycles:
    return Cycles(ground, tmp_path, seed)


def random_kills(cycles: Cycles, count: int) -> None:
    longest = cycles.converge()
    while cycles.kills < count:
        cycles.ground.change()
        longest = 0.5 * longest + 0.5 * cycles.killed_at_random(longest)
        if cycles.ground.chance.random() < 0.1:
            cycles.converge()
    cycles.converge()


@pytest.mark.parametrize("ground", GROUNDS, ids=named, indirect=True)
def test_killed_at_random_moments(cycles: Cycles) -> None:
    random_kills(cycles, 5)


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS, ids=named, indirect=True)
def test_killed_at_many_random_moments(cycles: Cycles) -> None:
    random_kills(cycles, 160)


# -------------------------------------------------------------------------------------------------------- failpoints

def every_failpoint(cycles: Cycles, hits: int) -> None:
    """There is always work enough for that many visits: rows to embed, rows to delete, the first run of all."""
    ground = cycles.ground
    for name in ground.method.passes:
        for hit in range(1, hits + 1):
            ground.change()
            ground.purge(PAGE * hit + 3)
            ground.rewrite(PAGE * hit + 1)
            visit = 1 if name in ground.method.once else hit  # the second and third hit are those of later runs
            assert cycles.killed_at(f"{name}:{visit}"), f"{name} is not passed {visit} times"
            ground.refill()
        cycles.converge()


@pytest.mark.parametrize("ground", GROUNDS, ids=named, indirect=True)
def test_killed_at_every_failpoint(cycles: Cycles) -> None:
    every_failpoint(cycles, 1)


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS, ids=named, indirect=True)
def test_killed_at_every_failpoint_three_times(cycles: Cycles) -> None:
    every_failpoint(cycles, 3)


def test_every_failpoint_is_passed_by_some_method_or_by_a_switch() -> None:
    passed = {name for method in METHODS.values() for name in method.passes}
    assert passed | SWITCH == set(failpoints.NAMES)
