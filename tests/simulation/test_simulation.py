"""Seeds of the simulation: none violates a rule, each planted bug is found, and a seed replays step by step."""

from __future__ import annotations

import pytest

from tests.simulation.planted import FOCUS, PLANTED
from tests.simulation.world import Violation, live

SEEDS, EACH = 300, 50
MANY, PART, SECONDS = 10_000, 500, 600
ENOUGH = 300  # seeds after which a planted bug counts as not found


@pytest.mark.proves(1, 10)
@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_no_seed_violates_a_rule(first: int) -> None:
    for seed in range(first, first + EACH):
        live(seed)


@pytest.mark.slow
@pytest.mark.proves(1, 10)
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY, PART))
def test_no_seed_of_many_violates_a_rule(first: int) -> None:
    for seed in range(first, first + PART):
        live(seed)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    def live_all() -> None:
        for seed in range(ENOUGH):
            live(seed, focus=FOCUS.get(bug))

    with PLANTED[bug](), pytest.raises(Violation, match=r"replay: .* -m tests.simulation \d+"):
        live_all()


def test_a_seed_replays() -> None:
    first, again = (live(7, tracing=True) for _ in range(2))
    assert first.sim.trace
    assert first.sim.trace == again.sim.trace
    assert first.sim.steps == again.sim.steps
