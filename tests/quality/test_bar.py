"""The search of the demo by its labelled queries, with the real model and the emulator: what docs/search.md says of it
must stay true."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.src.demo import Demo
from app.src.evaluation.measures import mean
from app.src.evaluation.report import Outcome
from app.src.evaluation.run import MODES, Wanted
from app.src.settings import SearchSettings, Settings

QUERIES = Path(__file__).parents[2] / "benchmarks" / "queries"
BAR = 0.90
"""Of hit@3 in hybrid with late interaction."""
WITHOUT = 0.895
"""Of hybrid alone, one query below."""


@pytest.mark.slow
@pytest.mark.timeout(900)  # it takes minutes where other tests run beside it
def test_hybrid_reaches_the_bar_and_is_better_than_either() -> None:
    hits: dict[str, float] = {}
    with Demo(Settings(search=SearchSettings(rerank="late-interaction", rerank_seconds=60))) as demo:
        for name in demo.names:
            demo.service.sync(name)
        for rerank in (False, True):
            outcomes: dict[str, list[Outcome]] = {}
            for name in demo.names:
                wanted = Wanted(QUERIES / f"{name}.jsonl", ("hybrid",) if rerank else MODES, rerank=rerank)
                found = demo.service.evaluating.evaluate(name, wanted)
                assert found.missing == 0
                for mode, each in found.outcomes.items():
                    outcomes.setdefault(f"{mode}, reranked" if rerank else mode, []).extend(each)
            hits |= {mode: mean(outcome.figures for outcome in each).hit_3 for mode, each in outcomes.items()}
            assert all(len(each) >= 60 for each in outcomes.values())
        told = demo.service.metrics.render().decode().splitlines()
        reranks = [line.rsplit(" ", 1) for line in told if line.startswith("owl_sap_reranks_total{")]
        assert reranks
        assert [line for line, count in reranks if 'outcome="done"' not in line and float(count)] == []
    assert hits["hybrid, reranked"] >= BAR, hits
    assert hits["hybrid"] >= WITHOUT, hits
    assert min(hits["hybrid"], hits["hybrid, reranked"]) >= max(hits["vector"], hits["keyword"]) - 0.01, hits
