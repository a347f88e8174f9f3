"""Exact scoring and choosing, against plain sorting in double precision."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from connector.stores import scan
from connector.stores.scan import exact_scores, numpy_scan, scan_error, shortlist


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_scores_are_dot_products_whatever_the_blocks(monkeypatch):
    matrix, query = unit(1000, 24), unit(24, seed=1)
    whole = numpy_scan(matrix, query)
    monkeypatch.setattr(scan, "BLOCK_ROWS", 64)
    blocks = numpy_scan(matrix, query)
    exact = matrix.astype(np.float64) @ query.astype(np.float64)
    for scores in (whole, blocks):
        assert scores.dtype == np.float32
        assert np.abs(scores - exact).max() < scan_error(24)


def test_no_rows_no_scores():
    assert numpy_scan(np.empty((0, 4), np.float32), unit(4)).shape == (0,)
    positions, floor = shortlist(np.empty(0, np.float32), 5, 0.0)
    assert (len(positions), floor) == (0, -np.inf)


def test_never_nan():
    matrix = np.array([[1, 0], [np.nan, 0], [np.inf, 0], [0, 1]], np.float32)
    scores = numpy_scan(matrix, np.array([0, 1], np.float32))
    assert not np.isnan(scores).any()
    positions, _ = shortlist(scores, 4, 0.0)
    assert positions.tolist() == [0, 3]


def test_rows_scored_minus_infinity_are_never_chosen():
    scores = np.array([-np.inf, 0.5, -np.inf, 0.1], np.float32)
    for count in (1, 2, 3, 100):
        positions, _ = shortlist(scores, count, 0.0)
        assert set(positions.tolist()) <= {1, 3}
        assert 1 in positions


def test_all_that_tie_with_the_last_are_on_the_list():
    scores = np.array([0.9, 0.5, 0.5, 0.5, 0.1], np.float32)
    positions, floor = shortlist(scores, 2, 1e-6)
    assert positions.tolist() == [0, 1, 2, 3]
    assert 0.1 < floor < 0.5


def test_equal_rows_have_equal_exact_scores_wherever_they_stand():
    """A matrix product may sum the last rows of a block in another order."""
    matrix, query = np.repeat(unit(1, 383), 1001, axis=0), unit(383, seed=2)
    assert len(set(exact_scores(matrix, query).tolist())) == 1


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_shortlist_holds_the_true_best(data):
    """Whatever the float32 error: with many near and equal rows, nothing better than the floor is left out."""
    rows, dimension = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 40))
    seed, count = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 320))
    base = unit(rows, dimension, seed=seed)
    matrix = base[np.random.default_rng(seed).integers(0, max(1, rows // 3), rows)]  # with duplicates
    query = unit(dimension, seed=seed + 1)
    truth = exact_scores(matrix, query)
    positions, floor = shortlist(numpy_scan(matrix, query), count, scan_error(dimension))
    left_out = np.setdiff1d(np.arange(rows), positions)
    assert len(positions) >= min(count, rows)
    assert (truth[left_out] < floor).all()
    best = np.sort(truth)[::-1][: min(count, rows)]
    assert np.sort(truth[positions])[::-1][: len(best)].tolist() == best.tolist()


def blas_threads() -> list[int]:
    """Threads of the BLAS that NumPy uses; other packages (SciPy) bring their own, which no scan runs on."""
    return [
        library["num_threads"]
        for library in threadpool_info()
        if library["user_api"] == "blas" and "numpy" in library["filepath"]
    ]


def test_blas_has_one_thread_while_anybody_scans_and_its_own_number_afterwards():
    before = blas_threads()
    assert before, "NumPy's BLAS must be seen here, or this test shows nothing"
    single = scan._SingleThreadedBlas()
    with single():
        assert set(blas_threads()) == {1}
        with single():
            assert set(blas_threads()) == {1}
        assert set(blas_threads()) == {1}, "the first user still scans"
    assert blas_threads() == before
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: numpy_scan(unit(500, 32), unit(32, seed=seed)), range(40)))
    assert blas_threads() == before


def test_the_limit_is_lifted_after_an_error():
    before = blas_threads()
    with pytest.raises(ValueError, match="mismatch"):
        numpy_scan(unit(3, 4), unit(5))
    assert blas_threads() == before
