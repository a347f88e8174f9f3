"""A sync is killed at random moments and at every failpoint, hundreds of times: after each kill the store is sound and the
checkpoint not ahead of it, and whenever a run may end, store and source are the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from connector import failpoints
from tests.proof.ground import Ground
from tests.proof.methods import METHODS
from tests.proof.worker import Order, Worker

KINDS = ("local", "hana")
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

    def killed_at_random(self, longest: float) -> None:
        after = self.ground.chance.uniform(0, longest)
        self.judge(self.start().kill_after(after), f"killed after {after:.3f} s")

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
    longest = 1.2 * cycles.converge()
    while cycles.kills < count:
        cycles.ground.change()
        cycles.killed_at_random(longest)
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
