"""The search of the demo by its labelled queries, with the real model and the emulator: what docs/search.md says of it
must stay true."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.src.demo import Demo
from app.src.evaluation.measures import mean
from app.src.evaluation.report import Outcome
from app.src.evaluation.run import MODES, Wanted
from app.src.settings import Settings

QUERIES = Path(__file__).parents[2] / "benchmarks" / "queries"
BAR = 0.895  # hit@3 of hybrid: one query below what docs/search.md gives


@pytest.mark.slow
@pytest.mark.timeout(900)  # it takes minutes where other tests run beside it
def test_hybrid_reaches_the_bar_and_is_better_than_either() -> None:
    with Demo(Settings()) as demo:
        for name in demo.names:
            demo.service.sync(name)
        outcomes: dict[str, list[Outcome]] = {}
        for name in demo.names:
            found = demo.service.evaluating.evaluate(name, Wanted(QUERIES / f"{name}.jsonl", MODES))
            assert found.missing == 0
            for mode, each in found.outcomes.items():
                outcomes.setdefault(mode, []).extend(each)
        assert all(len(each) >= 60 for each in outcomes.values())
    hits = {mode: mean(outcome.figures for outcome in each).hit_3 for mode, each in outcomes.items()}
    assert hits["hybrid"] >= BAR, hits
    assert hits["hybrid"] >= max(hits["vector"], hits["keyword"]) - 0.01, hits
