"""Calibrators against distributions whose answers are known, and histograms that lose no count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from app.src.core.onnx_export.calibrators import (
    ALGORITHMS,
    BINS,
    LEVELS,
    Histogram,
    divergence,
    entropy,
    percentile,
    threshold,
)


def seen(*parts: NDArray[Any], bins: int = BINS) -> Histogram:
    histogram = Histogram(bins)
    for part in parts:
        histogram.add(part)
    return histogram


def normal(count: int = 400_000, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------- histograms

FINITE = st.floats(-(2.0**90), 2.0**90, width=32)


@given(st.lists(arrays.arrays(np.float32, arrays.array_shapes(max_dims=3, max_side=6), elements=FINITE), max_size=5))
@settings(deadline=None)
def test_no_count_is_lost_and_each_lies_in_its_bin(parts: Sequence[NDArray[np.float32]]) -> None:
    histogram = seen(*parts, bins=16)
    sizes = np.abs(np.concatenate([part.ravel() for part in parts])) if parts else np.zeros(0, np.float32)
    assert histogram.total == len(sizes)
    assert histogram.greatest == pytest.approx(float(sizes.max()) if len(sizes) else 0.0, abs=1e-12)
    if histogram.width:
        edges = histogram.width * np.arange(17)
        for upto in (1, 4, 8, 15):  # one may fall to the other side of an edge by rounding
            below = int(histogram.counts[:upto].sum())
            slack = 1e-5 * edges[upto]
            assert np.sum(sizes < edges[upto] - slack) <= below <= np.sum(sizes <= edges[upto] + slack)


def test_growing_by_little_and_at_once_count_the_same() -> None:
    numbers = normal(10_000)
    order = np.argsort(np.abs(numbers))
    grown = seen(numbers[:1], *np.array_split(numbers[order], 37))
    assert grown.total == len(numbers) + 1
    assert grown.greatest == pytest.approx(float(np.abs(numbers).max()))
    assert np.count_nonzero(np.arange(BINS) * grown.width < grown.greatest) >= BINS // 2
    assert percentile(grown, 50) == pytest.approx(float(np.median(np.abs(numbers))), rel=0.01)


def test_batches_of_any_shape() -> None:
    numbers = normal(960)
    whole = seen(numbers)
    parts = seen(np.array([[numbers[np.argmax(np.abs(numbers))]]]))
    for part in (numbers[:100].reshape(2, 5, 10), numbers[100:101], numbers[101:].reshape(-1, 1), np.zeros((0, 7))):
        parts.add(part)
    parts.counts[-1] -= 1
    np.testing.assert_array_equal(parts.counts, whole.counts)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        Histogram().add(np.array([1.0, wrong]))


def test_zeros_before_anything_else_are_counted() -> None:
    histogram = seen(np.zeros(5), np.array([0.5, 1.0]))
    assert (histogram.total, histogram.counts[0]) == (7, 5)


def test_an_odd_number_of_bins() -> None:
    with pytest.raises(ValueError, match="even"):
        Histogram(7)


# ------------------------------------------------------------------------------------------------------------- minmax


@pytest.mark.parametrize("sign", [1, -1])
def test_minmax_is_the_greatest_magnitude(sign: int) -> None:
    assert threshold(seen(sign * np.array([0.25, 7.5, -3.0])), "minmax") == 7.5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_but_zeros_has_a_range(algorithm: Any) -> None:
    assert 0 < threshold(seen(np.zeros(10)), algorithm) < 1e-9


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_seen(algorithm: Any) -> None:
    with pytest.raises(ValueError, match="nothing was seen"):
        threshold(Histogram(), algorithm)


def test_an_algorithm_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="use minmax, entropy, percentile"):
        threshold(seen(np.ones(3)), "median")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- percentile


def test_percentile_of_a_normal_distribution() -> None:
    histogram = seen(normal())
    assert percentile(histogram, 95) == pytest.approx(1.96, abs=0.02)
    assert percentile(histogram, 99) == pytest.approx(2.576, abs=0.03)
    assert threshold(histogram, "percentile") == pytest.approx(3.89, abs=0.25)


def test_percentile_is_numpys() -> None:
    numbers = np.random.default_rng(3).gamma(2.0, size=50_000)
    for share in (10, 50, 90, 99.9):
        assert percentile(seen(numbers), share) == pytest.approx(float(np.percentile(numbers, share)), rel=0.01)
    assert percentile(seen(numbers), 100) == pytest.approx(float(numbers.max()))


@pytest.mark.parametrize("share", [0.0, 100.1, -1.0])
def test_no_percentile(share: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(seen(np.ones(3)), share)


# ------------------------------------------------------------------------------------------------------------- entropy


def test_outliers_of_a_normal_distribution_are_cut_off() -> None:
    """ONNX Runtime's, with as many bins as levels, would answer 80."""
    histogram = seen(normal(), np.array([80.0, -60.0, 75.0]))
    assert threshold(histogram, "minmax") == 80.0
    assert 2.5 < threshold(histogram, "entropy") < 8.0


def test_a_clipped_normal_keeps_nearly_all_of_itself() -> None:
    clipped = np.clip(normal(), -2.0, 2.0)
    assert 1.8 < threshold(seen(clipped), "entropy") <= 2.0


def test_of_a_uniform_distribution_nothing_is_cut_off() -> None:
    uniform = np.random.default_rng(4).uniform(-3, 3, 1_000_000)
    assert threshold(seen(uniform), "entropy") == pytest.approx(3.0, rel=0.002)
    exact = Histogram()
    exact.add((np.arange(BINS) + 0.5) / BINS)
    assert entropy(exact) == exact.greatest


def test_one_side_is_as_good_as_two() -> None:
    numbers = np.append(normal(), [40.0, 50.0])
    for algorithm in ALGORITHMS:
        assert threshold(seen(np.abs(numbers)), algorithm) == threshold(seen(numbers), algorithm)


def test_few_bins_in_use_are_all_kept() -> None:
    assert entropy(seen(np.linspace(0, 1, 50), bins=64)) == 1.0


def test_a_bound_within_its_range() -> None:
    for seed in range(5):
        numbers = np.random.default_rng(seed).standard_t(2, 20_000)
        histogram = seen(numbers)
        found = [threshold(histogram, algorithm) for algorithm in ALGORITHMS]
        assert all(0 < each <= float(np.abs(numbers).max()) * 1.000001 for each in found)
        assert found[0] == max(found)


def test_divergence_by_hand() -> None:
    """Four bins said by two levels: (3 + 1) / 2 for each of the first two, (2 + 2) / 2 for the others."""
    truth, told = np.array([3, 1, 2, 2]) / 8, np.array([2, 2, 2, 2]) / 8
    assert divergence(np.array([3.0, 1, 2, 2]), 4, 2) == pytest.approx(float(np.sum(truth * np.log(truth / told))))


def test_divergence_spreads_over_bins_that_are_not_empty() -> None:
    assert divergence(np.array([4.0, 0, 0, 2]), 4, 2) == pytest.approx(0.0)


def test_divergence_counts_what_is_cut_off_against_the_last_bin() -> None:
    truth, told = np.array([1, 1, 1, 1 + 4]) / 8, np.ones(4) / 4
    wanted = float(np.sum(truth * np.log(truth / told)))
    assert divergence(np.array([1.0, 1, 1, 1, 3, 1]), 4, 2) == pytest.approx(wanted)


def test_divergence_is_infinite_where_something_is_told_to_be_nothing() -> None:
    assert divergence(np.array([1.0, 1, 0, 0, 5]), 4, 2) == float("inf")


def test_entropy_is_the_best_cut_of_all() -> None:
    """Against every cut by force, on a small histogram."""
    histogram = seen(np.append(normal(20_000), [12.0, -20.0]), bins=256)
    counts = histogram.counts.astype(np.float64)
    cuts = [*range(16, 256, 8), int(np.flatnonzero(counts)[-1]) + 1]
    best = min(cuts, key=lambda cut: divergence(counts, cut, 16))
    assert entropy(histogram, levels=16) == pytest.approx(best * histogram.width, rel=1e-6)
    assert LEVELS == 128
