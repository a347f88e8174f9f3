"""Runs on a ground one after the other, disturbed or not, each judged as soon as it is over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.proof.ground import Ground
from tests.proof.methods import METHODS
from tests.proof.worker import Order, Worker

KINDS = ("local", "hana")
GROUNDS = [(kind, method) for kind in KINDS for method in METHODS]


EACH_METHOD = [(KINDS[place % len(KINDS)], method) for place, method in enumerate(METHODS)]
"""The stores in turn, where there is not the time for both."""
NATIVE = ("native", "watermark")
"""HANA computes the vectors, in the transaction that writes them."""


def named(ground: tuple[str, str]) -> str:
    return "-".join(ground)


class Cycles:
    """Runs, killed or not, on one ground."""

    def __init__(self, ground: Ground, folder: Path, seed: int) -> None:
        self.ground = ground
        self._folder = folder
        self.saying = f"replay with OWL_SAP_TEST_SEED={seed}"
        self.kills = 0
        self.ended = 0

    def start(self, failpoint: str = "", *, full: bool = False, port: int = 0) -> Worker:
        self.ground.begin()
        return Worker(Order(self.ground.plan, full, failpoint, port), self._folder)

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
        assert report is None or "error" not in report, (report, how, self.saying)
        self.ground.sound(f"cycle {self.kills + self.ended}: {how}; {self.saying}")

    def converge(self) -> float:
        """A full run that nobody disturbs, and another that finds nothing to do; how long the first took."""
        began = time.perf_counter()
        report = self.start(full=True).wait()
        took = time.perf_counter() - began
        assert report is not None
        assert "error" not in report, (report, self.saying)
        self.ground.converged(report, self.saying)
        again = self.start().wait()
        assert again is not None
        assert "error" not in again, (again, self.saying)
        idle = (again["upserted"], again["embedded_texts"], again["deleted"])
        assert idle == (0, 0, 0), (again, self.saying)
        return took
