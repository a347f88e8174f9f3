"""Blending and MMR against their formulas written out, and MMR against LangChain's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.model import Hit
from connector.stores.ranking import COSINE_SHARE, FEWEST_ROWS, Backdrop, blend, closeness, groups, mmr, overlap, units


def hits(*ids: str, number: int = 0) -> list[Hit]:
    return [Hit(id_, 1.0 - place / 100, f"text {id_} {number}", {}, number) for place, id_ in enumerate(ids)]


def ids(found: Sequence[Hit]) -> list[str]:
    return [hit.id for hit in found]


def test_a_blend_by_hand():
    candidates = hits("a", "b", "c", "d")
    blended = blend(candidates, [0.4, 0.1, 0.3, 0.2], [0.0, 1.0, 0.5, 0.0])
    expected = {"b": 0.1 + 0.5, "a": 0.4, "c": 0.3 + 0.5 * 0.125, "d": 0.2}
    assert ids(blended) == list(expected)
    assert [hit.score for hit in blended] == pytest.approx(list(expected.values()))
    assert [hit.text for hit in blended] == ["text b 0", "text a 0", "text c 0", "text d 0"]
    assert blend([], [], []) == []


def test_of_a_document_the_best_chunk_is_shown_and_equal_scores_go_by_id_and_chunk():
    blended = blend([*hits("b", "a", number=2), *hits("a", "b", number=1)], [0.3, 0.2, 0.2, 0.1], [0, 0, 0, 0])
    assert [(hit.id, hit.number) for hit in blended] == [("b", 2), ("a", 1)]
    assert ids(blend(hits("z", "a"), [0.5, 0.5], [0, 0])) == ["a", "z"]


def test_what_all_rows_have_in_common_does_not_count():
    random = np.random.default_rng(1)
    subject = np.zeros((FEWEST_ROWS, 8))
    subject[np.arange(FEWEST_ROWS), 2 + np.arange(FEWEST_ROWS) % 6] = 1.0
    language = np.where(random.random(FEWEST_ROWS) < 0.5, 3.0, -3.0)
    rows = subject + 0.05 * random.standard_normal(subject.shape)
    rows[:, 0] += 5.0
    rows[:, 1] += language
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    backdrop = Backdrop.of(rows)
    assert backdrop is not None
    query = np.eye(8, dtype=np.float32)[2] + np.float32([5, -3, 0, 0, 0, 0, 0, 0])
    query /= np.linalg.norm(query)
    right = np.arange(FEWEST_ROWS) % 6 == 0
    plain, both = (closeness(query[None, :], rows, each)[:, 0] for each in (None, backdrop))
    without = (both - COSINE_SHARE * plain) / (1 - COSINE_SHARE)
    assert plain == pytest.approx(rows.astype(float) @ query.astype(float))
    assert plain[right].min() < plain[~right].max(), "language and what all have in common decide"
    assert without[right].min() > without[~right].max() + 0.5
    assert np.abs(without).max() <= 1 + 1e-9
    assert np.linalg.norm(backdrop.without(rows), axis=1) == pytest.approx(1)


def test_units_are_of_length_one_or_zero_whatever_was_stored():
    given = np.float32([[3, 4], [0, 0], [1e30, 0], [np.nan, 1], [np.inf, 1]])
    assert units(given).tolist() == [[0.6, 0.8], [0, 0], [1, 0], [0, 0], [0, 0]]


def test_few_rows_and_equal_ones_have_no_backdrop():
    assert Backdrop.of(unit(FEWEST_ROWS - 1, 1)) is None
    assert Backdrop.of(np.repeat(unit(1, 1), FEWEST_ROWS, axis=0)) is None


def unit(count: int, seed: int, dimension: int = 6) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def plain_mmr(relevance: np.ndarray, vectors: np.ndarray, k: int, balance: float) -> list[int]:
    """The formula, word for word."""
    chosen = [int(np.argmax(relevance))] if len(relevance) and k > 0 else []
    while len(chosen) < min(k, len(relevance)):
        values = {
            place: balance * relevance[place]
            - (1 - balance) * max(float(vectors[place].astype(float) @ vectors[one].astype(float)) for one in chosen)
            for place in range(len(relevance))
            if place not in chosen
        }
        chosen.append(max(values, key=lambda place: (values[place], -place)))
    return chosen


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 14), st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.integers(0, 10**6))
def test_mmr_is_its_formula(count: int, k: int, balance: float, seed: int):
    vectors, query = unit(count, seed), unit(1, seed + 1)[0]
    relevance = (vectors @ query).astype(np.float64)
    assert mmr(relevance, vectors, k, balance) == plain_mmr(relevance, vectors, k, balance)


@pytest.mark.parametrize("balance", [0.0, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_mmr_is_langchains(balance: float, seed: int):
    utils = pytest.importorskip("langchain_core.vectorstores.utils")
    vectors, query = unit(40, seed), unit(1, seed + 99)[0]
    theirs = utils.maximal_marginal_relevance(query, list(vectors), lambda_mult=balance, k=12)
    assert mmr((vectors @ query).astype(np.float64), vectors, 12, balance) == theirs


def test_mmr_leaves_twins_for_the_end():
    vectors = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    relevance = np.array([0.9, 0.9, 0.5])
    assert mmr(relevance, vectors, 3, 0.5) == [0, 2, 1]
    assert mmr(relevance, vectors, 3, 1.0) == [0, 1, 2]


def test_mmr_takes_vectors_of_any_length_and_zeros():
    vectors = np.array([[3, 0], [7, 0], [0, 0], [0, 0.1]], np.float32)
    assert mmr(np.array([0.9, 0.8, 0.5, 0.4]), vectors, 4, 0.5) == [0, 2, 3, 1]


# --------------------------------------------------------------------------------------------------------- how alike


def test_overlap_is_the_share_of_the_longer_one():
    assert overlap(["a", "b"], ["b", "a"]) == 1.0
    assert overlap(["a", "b", "c", "d"], ["a"]) == 0.25
    assert overlap(["a"], []) == 0.0
    assert overlap([], []) == 1.0


def test_alike_rows_agree_in_words_and_without_a_backdrop_in_more_of_them():
    texts = [
        "ball bearing 6206 shielded",
        "ball bearing 6308 shielded",
        "ball bearing 6206 open",
        "hex bolt M8 shielded",
    ]
    near = np.float32([[1, 0], [1, 0.1], [0.9, 0.1], [1, 0]])
    assert groups(texts, near, None, 9) == [[0, 1], [2], [3]], "numbers do not count, one word of three does"
    backdrop = Backdrop(np.zeros(2), np.zeros(2))
    assert groups(texts, near, backdrop, 9) == [[0, 1, 2], [3]], "half of the words suffice, two of six do not"
    far = np.float32([[1, 0], [0, 1], [0, 1], [1, 0]])
    assert groups(texts, far, backdrop, 9) == [[0, 1], [2], [3]], "half of the words and other vectors"
    assert groups(texts, near, backdrop, 1) == [[0, 1, 2]], "rows beyond the last group are left out"
    assert groups([], np.empty((0, 2), np.float32), None, 3) == []
