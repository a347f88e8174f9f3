"""Things measured against each other: in turns within one run, so that whatever else the machine does meets them all
alike. Knows no engine, no store and no file.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCATTER = 1.3
"""Largest over smallest of the rounds, above which something else was running and the figure says nothing."""
OFF = 1.15
"""How many times above or below the median a single round is called disturbed."""

Work = Callable[[], float]
"""Does one round of something and returns what it took: seconds, as a rule."""
Verdict = Literal["met", "missed", "floor missed", "failed"]


class WorkFailed(Exception):
    """Somebody else's work could not be done, in so many words: it is left out from then on, and the others go on."""


def wall(work: Callable[[], object]) -> Work:
    """`work` by the clock on the wall."""
    return _timed(work, time.perf_counter)


def cpu(work: Callable[[], object]) -> Work:
    """`work` by the CPU seconds of this process, all its threads: of use where others compute on the same machine."""
    return _timed(work, time.process_time)


def _timed(work: Callable[[], object], clock: Callable[[], float]) -> Work:
    def run() -> float:
        start = clock()
        work()
        return clock() - start

    return run


# ------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class Target:
    """A bar. `floor`: what is never given up, where the bar itself may be missed and said so."""

    goal: float
    at_least: bool = True
    floor: float | None = None

    def verdict(self, value: float) -> Verdict:
        if self._reaches(value, self.goal):
            return "met"
        return "missed" if self.floor is None or self._reaches(value, self.floor) else "floor missed"

    def _reaches(self, value: float, bar: float) -> bool:
        return value >= bar if self.at_least else value <= bar

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.goal:g}"


def at_least(goal: float, floor: float | None = None) -> Target:
    return Target(goal, floor=floor)


def at_most(goal: float, floor: float | None = None) -> Target:
    return Target(goal, at_least=False, floor=floor)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with the rounds it is the median of. `unit`: "x" for a ratio. `scatter`: as SCATTER, where a figure
    may rightly scatter more. `steady`: what ought to be the same in every round, where the rounds themselves ought not:
    it says whether something else was running. `more`: whatever else is worth keeping. `error`: why there are no
    rounds."""

    name: str
    rounds: Sequence[float]
    unit: str = "x"
    target: Target | None = None
    scatter: float = SCATTER
    steady: Sequence[float] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        if bool(self.rounds) == (self.error is not None):
            raise ValueError(f"figure {self.name!r} was never measured, and nothing says why")

    @property
    def median(self) -> float:
        """Not a number where it failed."""
        return statistics.median(self.rounds) if self.rounds else math.nan

    @property
    def disturbed(self) -> bool:
        """Did the rounds scatter so much that something else must have been running?"""
        seen = self._seen
        return bool(seen) and max(seen) > self.scatter * min(seen)

    @property
    def disturbed_rounds(self) -> list[int]:
        """Rounds far from the median, counted from 1."""
        if not self._seen:
            return []
        middle = statistics.median(self._seen)
        return [at for at, one in enumerate(self._seen, 1) if one > OFF * middle or one * OFF < middle]

    @property
    def _seen(self) -> Sequence[float]:
        return self.rounds if self.steady is None else self.steady

    @property
    def verdict(self) -> Verdict | None:
        if self.error is not None:
            return "failed"
        return None if self.target is None else self.target.verdict(self.median)

    def as_dict(self) -> dict[str, Any]:
        target = self.target
        return {
            "name": self.name,
            "median": significant(self.median) if self.rounds else None,
            "unit": self.unit,
            "rounds": [significant(one) for one in self.rounds],
            "disturbed": self.disturbed,
            "disturbed_rounds": self.disturbed_rounds,
            "target": None if target is None else str(target),
            "floor": None if target is None else target.floor,
            "verdict": self.verdict,
            **({} if self.error is None else {"error": self.error}),
            **self.more,
        }


def significant(number: float, digits: int = 4) -> float:
    return float(f"{number:.{digits}g}")


# -------------------------------------------------------------------------------------------------------------- rounds


@dataclass(frozen=True, slots=True)
class Rounds:
    """What every work took, round by round. `failed`: those that did not go through all of them, and why."""

    took: Mapping[str, Sequence[float]]
    failed: Mapping[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.took[name])

    def ratios(self, over: str, under: str) -> list[float]:
        """`over` divided by `under`, each round by itself: the two ran next to each other."""
        return [above / below for above, below in zip(self.took[over], self.took[under], strict=True)]

    def ratio(self, name: str, over: str, under: str, target: Target | None = None, **more: Any) -> Figure:
        """The figure `name`: `over` divided by `under`; both medians are kept beside it. Without numbers, where one of
        them failed."""
        if error := self.failed.get(over, self.failed.get(under)):
            return Figure(name, (), target=target, error=error)
        kept = {f"{work} seconds": significant(self.median(work)) for work in (over, under)}
        return Figure(name, self.ratios(over, under), target=target, more={**kept, **more})

    def figure(self, name: str, work: str, unit: str = "s", target: Target | None = None, **more: Any) -> Figure:
        if error := self.failed.get(work):
            return Figure(name, (), unit, target, error=error)
        return Figure(name, self.took[work], unit, target, more=more)


def interleaved(
    works: Mapping[str, Work],
    rounds: int,
    *,
    warm: int = 1,
    pause: float = 0.0,
    look: Callable[[int, str], None] = lambda turn, name: None,
) -> Rounds:
    """Every work once a round, every second round in the opposite order, so that none profits from its place.

    `warm` rounds come first and do not count. `look` is told what comes next: turn 0 is warm. `pause`: seconds before
    each work, in which threads of the one before stop spinning. Garbage is collected between works. A work that raises
    WorkFailed gets no more turns.
    """
    if rounds < 1:
        raise ValueError("at least one round is wanted")
    took: dict[str, list[float]] = {name: [] for name in works}
    failed: dict[str, str] = {}
    for turn in range(1 - warm, rounds + 1):
        names = list(works) if turn % 2 else list(works)[::-1]
        for name in (name for name in names if name not in failed):
            look(max(turn, 0), name)
            gc.collect()
            time.sleep(pause)
            try:
                one = works[name]()
            except WorkFailed as error:
                failed[name] = str(error)
                continue
            if turn > 0:
                took[name].append(one)
    return Rounds({name: seconds for name, seconds in took.items() if name not in failed}, failed)
