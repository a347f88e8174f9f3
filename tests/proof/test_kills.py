"""A sync is killed at random moments and at every failpoint, hundreds of times: after each kill the store is sound and
the checkpoint not ahead of it, and whenever a run may end, store and source are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from connector import failpoints
from tests.proof.cycles import EACH_METHOD, GROUNDS, KINDS, NATIVE, Cycles, named
from tests.proof.ground import PAGE
from tests.proof.methods import METHODS
from tests.slow import slow_but

ONE_EACH = (("local", "log"), ("hana", "watermark"))
MOST_TELLING = ("mid_upsert", "after_apply", "mid_delete", "before_log_delete")
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


def killed_at(cycles: Cycles, name: str, visit: int) -> None:
    """There is always work enough for that many visits: rows to embed, rows to delete."""
    ground = cycles.ground
    ground.change()
    ground.purge(PAGE * visit + 3)
    ground.rewrite(PAGE * visit + 1)
    hit = 1 if name in ground.method.once else visit  # the second and third are those of later runs
    assert cycles.killed_at(f"{name}:{hit}"), f"{name} is not passed {hit} times"
    ground.refill()


@pytest.mark.parametrize("ground", slow_but(EACH_METHOD, *ONE_EACH), ids=named, indirect=True)
@pytest.mark.proves(1, 12)
def test_killed_at_random_moments(cycles: Cycles) -> None:
    random_kills(cycles, 2)


def some_grounds() -> Iterator[Any]:
    """Each failpoint with one of the methods that pass it, the stores in turn."""
    for place, name in enumerate(failpoints.NAMES):
        methods = [method for method, known in METHODS.items() if name in known.passes]
        if methods:
            ground = (KINDS[place % len(KINDS)], methods[place % len(methods)])
            yield pytest.param(name, ground, marks=() if name in MOST_TELLING else pytest.mark.slow)


@pytest.mark.parametrize(("name", "ground"), list(some_grounds()), indirect=["ground"])
@pytest.mark.proves(1)
def test_killed_at_each_failpoint(cycles: Cycles, name: str) -> None:
    cycles.converge()
    killed_at(cycles, name, 2)
    cycles.converge()


@pytest.mark.parametrize("name", slow_but(MOST_TELLING[:2], "mid_upsert"))
@pytest.mark.parametrize("ground", [NATIVE], ids=named, indirect=True)
@pytest.mark.proves(1)
def test_killed_where_hana_embeds(cycles: Cycles, name: str) -> None:
    cycles.converge()
    killed_at(cycles, name, 2)
    cycles.converge()


@pytest.mark.slow
@pytest.mark.parametrize("ground", [("native", "full"), ("native", "log")], ids=named, indirect=True)
@pytest.mark.proves(1, 12)
def test_killed_at_random_moments_where_hana_embeds(cycles: Cycles) -> None:
    random_kills(cycles, 10)


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS, ids=named, indirect=True)
@pytest.mark.proves(1, 12)
def test_killed_at_many_random_moments(cycles: Cycles) -> None:
    random_kills(cycles, 40)


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS, ids=named, indirect=True)
@pytest.mark.proves(1)
def test_killed_at_every_failpoint_three_times(cycles: Cycles) -> None:
    for name in cycles.ground.method.passes:
        for visit in (1, 2, 3):
            killed_at(cycles, name, visit)
        cycles.converge()


def test_every_failpoint_is_passed_by_some_method_or_by_a_switch() -> None:
    passed = {name for method in METHODS.values() for name in method.passes}
    assert passed | SWITCH == set(failpoints.NAMES)
