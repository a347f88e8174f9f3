"""The measures against values worked out by hand, and the bootstrap against what must hold for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.evaluation.measures import MEASURES, figures, mean, paired

FOUND = (2, 4)  # the ranks of two of three relevant rows


def test_by_hand() -> None:
    found = figures(FOUND, 3, 5)
    assert found["recall"] == pytest.approx(2 / 3)
    assert figures(FOUND, 3, 3)["recall"] == pytest.approx(1 / 3)
    assert [found[f"hit_{k}"] for k in (1, 3, 10)] == [0, 1, 1]
    assert found["mrr"] == 0.5
    assert set(figures((), 3, 5).values()) == {0}
    best = 1 + 1 / math.log2(3) + 1 / 2
    assert found["ndcg"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / best)
    assert found["ndcg"] == pytest.approx(0.49819, abs=1e-5)
    assert figures(range(1, 11), 40, 10)["ndcg"] == 1, "no order of ten is better, however many there are"
    assert figures([2], 1, 10)["ndcg"] == pytest.approx(1 / math.log2(3))


def test_the_mean_is_of_each_measure() -> None:
    both = mean([figures([1], 1, 10), figures([], 1, 10)])
    assert both == dict.fromkeys(MEASURES, 0.5)


@given(st.lists(st.integers(1, 15), max_size=15, unique=True), st.integers(0, 9), st.integers(1, 12))
def test_every_measure_lies_between_none_and_all(ranks: list[int], more: int, k: int) -> None:
    for value in values(ranks, max(1, len(ranks) + more), k):
        assert 0 <= value <= 1


@given(st.integers(2, 9), st.integers(1, 12))
def test_a_relevant_row_further_up_is_never_worse(rank: int, k: int) -> None:
    for lower, higher in zip(values([rank], 2, k), values([rank - 1], 2, k), strict=True):
        assert lower <= higher


def values(ranks: list[int], relevant: int, k: int) -> list[float]:
    return list(figures(ranks, relevant, k).values())


def test_a_difference_that_is_sure_and_one_that_is_not() -> None:
    random = np.random.default_rng(3)
    before = random.random(200)
    better = paired(before.tolist(), (before + 0.1 + 0.05 * random.standard_normal(200)).tolist())
    assert better["p"] < 0.05
    assert better["low"] < better["difference"] < better["high"]
    assert better["low"] == pytest.approx(0.1, abs=0.02)
    luck = paired(before.tolist(), (before + 0.5 * random.standard_normal(200)).tolist())
    assert luck["p"] >= 0.05
    assert luck["low"] < 0 < luck["high"]
    same = paired(before.tolist(), before.tolist())
    assert same == {"difference": 0, "low": 0, "high": 0, "p": 1, "queries": 200}
    assert paired([0, 0, 1], [1, 0, 1]) == paired([0, 0, 1], [1, 0, 1])
    with pytest.raises(ValueError, match="paired"):
        paired([1.0], [])


@pytest.mark.parametrize(
    ("before", "after", "p"),
    [
        ([0.0], [1.0], 1.0),
        ([0.2], [0.2], 1.0),
        ([0.0] * 3, [1.0] * 3, 0.25),
        ([0.0] * 5, [1.0] * 5, 0.0625),
        ([0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], 1.0),
    ],
)
def test_few_queries_prove_nothing(before: list[float], after: list[float], p: float) -> None:
    """Resamples of differences that are all alike do not scatter, so they alone would say p = 0."""
    assert paired(before, after)["p"] == p >= 0.05


def test_six_that_agree_are_sure() -> None:
    assert paired([0.0] * 6, [1.0] * 6)["p"] < 0.05


def test_the_interval_is_the_normal_one_for_many() -> None:
    values = np.random.default_rng(1).standard_normal(400)
    found = paired([0.0] * 400, values.tolist())
    error = values.std() / 20
    assert found["low"] == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert found["high"] == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
