"""Which layers stay in float: by what was measured of each alone, as many as are needed and no more."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from app.src.core.agreement import Agreement, agreement, judge
from app.src.core.backends import Vectors
from app.src.core.onnx_export.quantise import Search, Target, losses

COSTS = {"a": 3.0, "b": 1.0, "c": 4.0, "d": 4.0}
RNG = np.random.default_rng(5)
EXACT: Vectors = RNG.standard_normal((40, 16)).astype(np.float32)
NOISE: dict[str, Vectors] = {name: RNG.standard_normal(EXACT.shape).astype(np.float32) for name in COSTS}
STRENGTH = {"a": 0.02, "b": 0.30, "c": 0.50, "d": 0.01}


class Model:
    """Each layer in 8 bits adds noise of its own."""

    def __init__(self, strength: dict[str, float]) -> None:
        self.strength = strength
        self.asked: list[list[str]] = []

    def __call__(self, layers: Collection[str]) -> Vectors:
        self.asked.append(sorted(layers))
        found = EXACT.copy()
        for name in layers:
            found += np.float32(self.strength[name]) * NOISE[name]
        return found


def test_of_each_layer_alone() -> None:
    found = losses(list(COSTS), Model(STRENGTH), EXACT)
    assert sorted(found, key=lambda name: found[name]) == ["d", "a", "b", "c"]
    assert found["c"] == pytest.approx(1 - 1 / np.sqrt(1 + 0.5**2), abs=0.03)


def test_nothing_is_measured_where_all_together_are_near_enough() -> None:
    model = Model(dict.fromkeys(COSTS, 0.01))
    choice = Search(COSTS, 12.0)(model, EXACT)
    assert (choice.excluded, choice.met, choice.share, choice.losses) == ((), True, 1.0, {})
    assert model.asked == [sorted(COSTS)]


def test_unless_it_is_asked_for() -> None:
    choice = Search(COSTS, 12.0, always_measure=True)(Model(dict.fromkeys(COSTS, 0.01)), EXACT)
    assert (choice.excluded, choice.met) == ((), True)
    assert set(choice.losses) == set(COSTS)


def test_the_worst_for_its_operations_goes_first_and_no_more_than_are_needed() -> None:
    """b spoils less than c, but for a quarter of the operations; without b c still spoils too much."""
    model = Model(STRENGTH)
    choice = Search(COSTS, 12.0, Target(0.99, 0.85))(model, EXACT)
    assert choice.losses["b"] < choice.losses["c"]
    assert choice.excluded == ("b", "c")
    assert choice.met
    assert choice.share == pytest.approx(7 / 12)
    assert model.asked[5:] == [["a", "c", "d"], ["a", "d"]]
    assert choice.found == agreement(model(["a", "d"]), EXACT)


def test_it_ends_at_the_least_share_and_says_that_the_target_is_missed() -> None:
    choice = Search(COSTS, 12.0, Target(0.99, 0.85), least_share=0.6)(Model(STRENGTH), EXACT)
    assert choice.excluded == ("b",)
    assert not choice.met
    assert choice.share == pytest.approx(11 / 12)
    assert choice.found.mean_cosine < 0.99


def test_both_bars_count() -> None:
    assert Target(0.9, 0.9).met(Agreement(0.9, 0.0, 0.9))
    assert not Target(0.9, 0.9).met(Agreement(0.89, 0.0, 1.0))
    assert not Target(0.9, 0.9).met(Agreement(1.0, 1.0, 0.89))


# ------------------------------------------------------------------------------------------------------------ agreement


def test_agreement_does_not_ask_for_length() -> None:
    found = agreement(EXACT * RNG.uniform(0.1, 9, (40, 1)).astype(np.float32), EXACT)
    assert found.mean_cosine == pytest.approx(1.0)
    assert found.overlap == 1.0


def test_agreement_by_hand() -> None:
    exact = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    found = np.array([[1, 0], [1, 1], [1, 1]], np.float32)
    near = agreement(found, exact)
    assert near.mean_cosine == pytest.approx((2 + 0.5**0.5) / 3)
    assert near.least_cosine == pytest.approx(0.5**0.5)
    assert near.overlap == 1.0
    # Twelve texts around a circle, two of which change places: their ten nearest change, and those of others.
    angles = np.arange(12) * 0.1
    circle = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    changed = circle[[11, *range(1, 11), 0]]
    assert agreement(circle, circle).overlap == 1.0
    assert agreement(changed, circle).overlap < 1.0


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0])
def test_what_is_no_vector_agrees_with_nothing(wrong: float) -> None:
    found = EXACT.copy()
    found[3] = wrong
    assert agreement(found, EXACT).least_cosine == -1.0


def test_one_text_has_no_neighbours() -> None:
    assert agreement(EXACT[:1], EXACT[:1]).overlap == 1.0


def test_layers_are_chosen_by_the_very_figures_that_the_gate_judges_by() -> None:
    """Texts that are there several times over have equally good neighbours, and which is found is chance."""
    exact = np.repeat(EXACT, 8, axis=0)
    found = (exact + 1e-5 * RNG.standard_normal(exact.shape)).astype(np.float32)
    near, verdict = agreement(found, exact), judge(exact, found)
    assert near.overlap == 1.0
    assert (verdict.mean_cosine, verdict.worst_cosine, verdict.overlap) == (
        near.mean_cosine,
        near.least_cosine,
        near.overlap,
    )
