"""The accuracy gate: what it measures, what it lets pass, and that it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from app.src.core.agreement import LEAST_TEXTS, judge


def _vectors(texts: int = 200, dimension: int = 64, seed: int = 1) -> NDArray[np.float32]:
    vectors: NDArray[np.float32] = np.random.default_rng(seed).standard_normal((texts, dimension)).astype(np.float32)
    return vectors


def _blurred(exact: NDArray[np.float32], amount: float, seed: int = 2) -> NDArray[np.float32]:
    return (exact + np.float32(amount) * _vectors(len(exact), exact.shape[1], seed)).astype(np.float32)


def test_the_same_vectors_pass_whatever_their_length() -> None:
    exact = _vectors()
    verdict = judge(exact, 3 * exact)
    assert verdict.accepted
    assert verdict.mean_cosine == pytest.approx(1)
    assert verdict.worst_cosine == pytest.approx(1)
    assert verdict.overlap == 1
    assert verdict.reason.startswith("accepted")


def test_the_figures_are_those_of_plain_arithmetic() -> None:
    exact, candidate = _vectors(60, 16), _blurred(_vectors(60, 16), 0.4)
    units = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (exact, candidate)]
    cosines = (units[0] * units[1]).sum(1)
    shares = []
    for row in range(60):
        others = [place for place in range(60) if place != row]
        first, second = ({*sorted(others, key=lambda n: -(each[row] @ each[n]))[:10]} for each in units)
        shares.append(len(first & second) / 10)
    verdict = judge(exact, candidate)
    assert verdict.mean_cosine == pytest.approx(float(cosines.mean()), abs=1e-6)
    assert verdict.worst_cosine == pytest.approx(float(cosines.min()), abs=1e-6)
    assert verdict.overlap == pytest.approx(float(np.mean(shares)), abs=1e-9)


def test_a_low_cosine_is_refused_by_name() -> None:
    verdict = judge(_vectors(), _blurred(_vectors(), 0.5))
    assert not verdict.accepted
    assert "mean cosine" in verdict.reason
    assert "overlap" in verdict.reason


def test_one_text_that_is_far_off_is_refused() -> None:
    candidate = _vectors()
    candidate[3] += 0.5 * _vectors(seed=2)[3]
    verdict = judge(_vectors(), candidate)
    assert verdict.reason.startswith("refused: least cosine 0.")
    assert verdict.mean_cosine is not None
    assert verdict.mean_cosine > 0.999


def test_a_high_cosine_does_not_excuse_other_neighbours() -> None:
    """Texts that lie near each other: their vectors are almost those of fp32, their neighbours are not."""
    exact = np.float32(1) + np.float32(0.01) * _vectors()
    verdict = judge(exact, _blurred(exact, 0.01))
    assert verdict.mean_cosine is not None
    assert verdict.mean_cosine > 0.999
    assert not verdict.accepted
    assert "overlap" in verdict.reason
    assert "mean cosine" not in verdict.reason


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 0.0])
def test_one_text_without_a_vector_is_enough(spoilt: float) -> None:
    exact = _vectors()
    candidate = exact.copy()
    candidate[7] = spoilt
    verdict = judge(exact, candidate)
    assert not verdict.accepted
    assert "1 of 200" in verdict.reason


def test_few_texts_prove_nothing() -> None:
    exact = _vectors(LEAST_TEXTS - 1)
    verdict = judge(exact, exact)
    assert not verdict.accepted
    assert verdict.mean_cosine is None
    assert judge(_vectors(LEAST_TEXTS), _vectors(LEAST_TEXTS)).accepted


def test_of_equally_good_neighbours_either_counts() -> None:
    """Every text twice: which of two equal ones is found is chance, and no fault."""
    exact = np.repeat(_vectors(40, 16), 8, axis=0)
    noise = _vectors(320, 16, seed=9) * np.float32(1e-5)
    assert judge(exact, exact + noise).overlap == 1


def test_vectors_of_other_shapes_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="one shape"):
        judge(_vectors(40), _vectors(41))
