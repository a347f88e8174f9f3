"""What is held out, and how the figures are counted: against texts that must not leak and ranks counted by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.src.core.backends import InputType
from app.src.evaluation.measures import ranks_by_score
from app.src.training.held_out import HELD_OUT, Embed, measured, split
from app.src.training.pairs import Pair
from connector.errors import ConfigurationError

DISTINCT = [Pair(f"q{number}", f"t{number}") for number in range(200)]


def test_a_tenth_is_held_out_and_no_pair_is_lost() -> None:
    training, held_out = split(DISTINCT, 7)
    assert len(held_out) == round(HELD_OUT * 200)
    assert sorted(training + held_out) == sorted(DISTINCT)


def test_the_same_pairs_are_held_out_in_any_order_and_others_with_another_seed() -> None:
    shuffled = random.Random(1).sample(DISTINCT, len(DISTINCT))
    assert set(split(shuffled, 7)[1]) == set(split(DISTINCT, 7)[1])
    assert set(split(DISTINCT, 8)[1]) != set(split(DISTINCT, 7)[1])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=20, max_size=120, unique=True),
    st.integers(0, 5),
)
def test_no_text_is_on_both_sides(numbers: list[tuple[int, int]], seed: int) -> None:
    pairs = [Pair(f"t{query}", f"t{text}") for query, text in numbers]
    try:
        both = split(pairs, seed)
    except ConfigurationError:
        return
    sides = [{text for pair in side for text in pair} for side in both]
    assert not sides[0] & sides[1]
    assert all(sides)
    assert sorted(both[0] + both[1]) == sorted(pairs)


def test_too_few_pairs_and_pairs_that_all_hang_together() -> None:
    with pytest.raises(ConfigurationError, match="19 pairs to learn from; at least 20"):
        split(DISTINCT[:19], 7)
    assert split(DISTINCT[:20], 7)[1]
    with pytest.raises(ConfigurationError, match="nearly all share a text"):
        split([Pair(f"q{number}", "the same answer") for number in range(50)], 7)


# ------------------------------------------------------------------------------------------------------------- figures


def test_ranks_by_hand() -> None:
    scores = np.array([0.9, 0.5, 0.8, 0.5, 0.1], dtype=np.float32)
    assert ranks_by_score(scores, [0]).tolist() == [1]
    assert ranks_by_score(scores, [2]).tolist() == [2]
    assert ranks_by_score(scores, [1]).tolist() == [4], "its equal counts as before it"
    assert ranks_by_score(scores, [1, 3]).tolist() == [3, 4], "among themselves they do not stand in their way"
    assert ranks_by_score(scores, [4, 0]).tolist() == [1, 5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.data())
def test_ranks_are_those_of_a_sorted_list(values: list[int], data: st.DataObject) -> None:
    sought = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=5, unique=True))
    order = sorted(range(len(values)), key=lambda place: (-values[place], place in sought))
    wanted = [rank for rank, place in enumerate(order, 1) if place in sought]
    # Behind equals that are not sought, each of those that are may stand in any place among its own.
    assert ranks_by_score(np.array(values, dtype=np.float32), sought).tolist() == wanted


def vectors(**of: list[float]) -> Embed:
    def embed(texts: Sequence[str], _input_type: InputType) -> NDArray[np.float32]:
        found = np.array([of[text] for text in texts], dtype=np.float32)
        unit: NDArray[np.float32] = found / np.linalg.norm(found, axis=1, keepdims=True)
        return unit

    return embed


def test_figures_by_hand() -> None:
    """Twelve texts that nobody seeks are nearer to the second query than its own text is."""
    others = {f"d{number}": [0.0, 1.0] for number in range(12)}
    embed = vectors(a=[1.0, 0.0], b=[0.0, 1.0], x=[1.0, 0.1], y=[-1.0, 0.0], z=[1.0, 1.0], w=[1, 1], **others)
    held_out = [Pair("a", "x"), Pair("a", "y"), Pair("b", "z")]
    figures = measured(held_out, [Pair("w", text) for text in others], embed)
    assert figures["recall_at_10"] == pytest.approx((0.5 + 0.0) / 2)
    assert figures["mrr"] == pytest.approx((1 / 1 + 1 / 13) / 2)
    assert (figures["queries"], figures["texts"]) == (2, 15)


def test_a_model_with_one_vector_for_everything_finds_nothing() -> None:
    others = [Pair("w", f"d{number}") for number in range(20)]
    figures = measured([Pair("a", "x")], others, lambda texts, _: np.full((len(texts), 4), 0.5, dtype=np.float32))
    assert figures["recall_at_10"] == 0
    assert figures["mrr"] == pytest.approx(1 / 21)


def test_queries_and_texts_are_embedded_as_such() -> None:
    asked: list[tuple[list[str], InputType]] = []

    def embed(texts: Sequence[str], input_type: InputType) -> NDArray[np.float32]:
        asked.append((list(texts), input_type))
        return np.eye(2, dtype=np.float32)[: len(texts)]

    measured([Pair("a", "x")], [Pair("b", "y")], embed)
    assert asked == [(["a"], "query"), (["x", "y"], "document")]
