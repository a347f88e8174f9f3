"""A sync is killed at random moments and at every failpoint, hundreds of times: after each kill the store is sound and
the checkpoint not ahead of it, and whenever a run may end, store and source are the same.
"""

from __future__ import annotations

import pytest

from connector import failpoints
from tests.proof.cycles import GROUNDS, Cycles, named
from tests.proof.ground import PAGE
from tests.proof.methods import METHODS

SWITCH = {"mid_alias_swap"}
"""Of generations: no sync comes by there."""


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
        if hits > 1:
            cycles.converge()
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
