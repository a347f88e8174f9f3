"""Choosing the best rows by every scan, against plain sorting in double precision."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import tracemalloc
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from connector.stores import scan
from connector.stores.scan import Blocks, Int8Scan, Ranking, exact_scores, kth_largest, take


@pytest.fixture
def kind() -> Int8Scan:
    return Int8Scan()


@pytest.fixture(params=[None, 64])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block for all, and many."""
    if request.param:
        monkeypatch.setattr(scan, "BLOCK_ROWS", request.param)
        monkeypatch.setattr(scan, "_PART_ROWS", 30)
        monkeypatch.setattr(scan, "_ROWS_AT_ONCE", 50)
        monkeypatch.setattr(scan, "_REFINED_AT_ONCE", 5)


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    return normalised(np.random.default_rng(seed).standard_normal(shape))


def normalised(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float64)
    scaled: np.ndarray = (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)
    return scaled


def truth(matrix: np.ndarray, query: np.ndarray) -> np.ndarray:
    scores: np.ndarray = (matrix.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
    return scores


def check(ranking: Ranking, true: np.ndarray, allowed: np.ndarray, count: int) -> None:
    """`ranking.best` keeps its promise; `true` scores of all rows, of which only the `allowed` count."""
    chosen, floor = ranking.best(count)
    assert (np.diff(chosen) > 0).all(), "ascending"
    assert np.isin(chosen, allowed).all()
    left_out = np.setdiff1d(allowed, chosen)
    assert floor < 1
    assert (true[left_out] < floor).all()
    assert len(chosen) >= min(count, len(allowed))
    if len(allowed):
        last = np.sort(true[allowed])[::-1][min(count, len(allowed)) - 1]
        assert (true[left_out] < last).all(), "none that is as good as the last of the best is left out"


# --------------------------------------------------------------------------------------------------- what is promised

KINDS = ("random", "clusters", "duplicates", "near ties", "sparse", "denormal", "opposite")


def rows_of(kind: str, rows: int, query: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    dimension = len(query)
    noise = rng.standard_normal((rows, dimension))
    centres = rng.standard_normal((max(1, rows // 8), dimension))
    match kind:
        case "clusters":
            return normalised(centres[rng.integers(0, len(centres), rows)] + noise * 10.0 ** -rng.integers(0, 7))
        case "duplicates":
            return normalised(centres)[rng.integers(0, len(centres), rows)]
        case "near ties":  # the same cosine but for less than float32 tells
            return normalised(query * (1 + rng.standard_normal((rows, 1)) * 1e-7) + noise * 1e-4)
        case "sparse":  # one number says nearly all: the scale is coarse for the rest
            noise *= 1e-3
            noise[np.arange(rows), rng.integers(0, dimension, rows)] = rng.choice([-1, 1], rows)
            return normalised(noise)
        case "denormal":
            vectors = normalised(noise)
            vectors[:, 1:] *= np.float32(1e-41)
            vectors[:, 0] = rng.choice([-1, 1], rows)
            return vectors
        case "opposite":
            return np.where(rng.random((rows, 1)) < 0.5, query, -query).astype(np.float32)
    return normalised(noise)


@settings(max_examples=75, deadline=None)
@given(data=st.data())
def test_nothing_better_than_the_floor_is_left_out(data):
    rows, dimension = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 70))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**9), label="seed"))
    query = normalised(rng.standard_normal(dimension))
    matrix = rows_of(data.draw(st.sampled_from(KINDS)), rows, query, rng)
    alive = rng.random(rows) < data.draw(st.sampled_from([0.05, 0.5, 1.0]))
    matrix[~alive] *= data.draw(st.sampled_from([0, 1]))
    copy = Int8Scan().copy(dimension)
    for part in np.array_split(matrix, data.draw(st.integers(1, 5))):
        copy.append(part)
    true, view = truth(matrix, query), copy.view()
    counts = data.draw(st.lists(st.integers(1, rows + 20), min_size=1, max_size=3))
    among = np.flatnonzero(alive & (rng.random(rows) < 0.3))
    of_all, of_some = view.rank(query[None], None if alive.all() else alive)[0], view.rank_rows(query, among)
    for count in counts:
        check(of_all, true, np.flatnonzero(alive), count)
        check(of_some, true, among, count)


def misleading(plane: int, query: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows whose codes lie: of half of them all that the planes up to this one leave out speaks for the query, of the
    others against it, so that these look better by more than the bound and are a little worse."""
    dimension, signs = len(query), np.sign(query)
    grid = rng.integers(-60, 61, (2, dimension)) + 20 * signs
    grid[0, 0], grid[1, 0], grid[1, 1] = 127, 0, 127  # the scale of each plane is that of its largest
    signs[:2] = 0
    ahead = np.where(rng.random(dimension) < 0.85, signs, 0)
    left = np.where(np.arange(100)[:, None] % 2, 0.49 * signs, ahead - 0.49 * signs) * (1 - rng.random((100, 1)) * 1e-4)
    if plane == 1:
        return normalised(grid[0] + left)
    return normalised(grid[0] + 0.49 / 127 * (grid[1] + left))


@pytest.mark.parametrize("plane", [1, 2])
@pytest.mark.parametrize("dimension", [64, 384])
@pytest.mark.parametrize("seed", range(4))
def test_rows_whose_codes_lie(plane, dimension, seed):
    rng = np.random.default_rng(seed)
    whole = rng.integers(-126, 127, dimension)
    whole[0] = 127
    query = normalised(whole)  # its codes tell all, so that only the rows' own errors are in play
    matrix = misleading(plane, query, rng)
    copy, true = Int8Scan().copy(dimension), truth(matrix, query)
    copy.append(matrix)
    assert true[1::2].min() > true[::2].max(), "the trap is set"
    for count in (1, 10, 49):
        check(copy.view().rank(query[None], None)[0], true, np.arange(100), count)
        check(copy.view().rank_rows(query, np.arange(100)), true, np.arange(100), count)


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_a_query_whose_codes_lie(plane, seed):
    """Rows that agree with what the query's codes leave out, and others that are a little worse and agree with its
    opposite."""
    rng = np.random.default_rng(seed)
    query = normalised(rng.standard_normal(384))
    coded = scan._Query(query)
    rest = query - np.tensordot(coded.scales[: plane + 1], coded.codes[: plane + 1].astype(np.float64), 1)
    ahead = query / np.linalg.norm(query.astype(np.float64))
    rest -= (rest @ ahead) * ahead
    rest /= np.linalg.norm(rest)
    other = rng.standard_normal((100, 384))
    for direction in (ahead, rest):
        other -= np.outer(other @ direction, direction)
    agrees = np.arange(100)[:, None] % 2
    along = np.where(agrees, 0.3, 0.3 - 1e-6) * ahead + np.where(agrees, 0.9, -0.9) * rest
    other *= np.sqrt(1 - (along**2).sum(axis=1, keepdims=True)) / np.linalg.norm(other, axis=1, keepdims=True)
    matrix = normalised(along + other)
    copy, true = Int8Scan().copy(384), truth(matrix, query)
    copy.append(matrix)
    assert true[1::2].min() > true[::2].max(), "the trap is set"
    for count in (1, 10, 49):
        check(copy.view().rank(query[None], None)[0], true, np.arange(100), count)


@pytest.mark.usefixtures("blocks")
def test_many_queries_share_a_pass(kind):
    matrix, queries = unit(1000, 48), unit(7, 48, seed=1)
    copy = kind.copy(48)
    copy.append(matrix)
    alive = np.arange(1000) % 3 > 0
    for query, ranking in zip(queries, copy.view().rank(queries, alive), strict=True):
        check(ranking, truth(matrix, query), np.flatnonzero(alive), 20)


@pytest.mark.usefixtures("blocks")
def test_a_list_is_short(kind):
    """Or a scan would be exact by reading everything."""
    matrix, query = unit(20_000, 64), unit(64, seed=1)
    copy = kind.copy(64)
    copy.append(matrix)
    (ranking,) = copy.view().rank(query[None], None)
    assert len(ranking.best(36)[0]) < 50
    assert len(copy.view().rank_rows(query, np.arange(0, 20_000, 7)).best(36)[0]) < 50


@pytest.mark.usefixtures("blocks")
def test_a_view_stays_what_it_was(kind):
    matrix, query = unit(500, 16), unit(16, seed=1)
    copy = kind.copy(16)
    copy.append(matrix[:70])
    before = copy.view()
    expected = [part.tolist() for part in before.rank(query[None], None)[0].best(5)[:1]]
    copy.append(matrix[70:])
    kept = np.arange(500) % 2 > 0
    other = copy.kept(kept)
    other.append(matrix[:3])
    assert [part.tolist() for part in before.rank(query[None], None)[0].best(5)[:1]] == expected
    check(before.rank(query[None], None)[0], truth(matrix[:70], query), np.arange(70), 9)
    check(copy.view().rank(query[None], None)[0], truth(matrix, query), np.arange(500), 9)
    left = np.concatenate([matrix[kept], matrix[:3]])
    check(other.view().rank(query[None], None)[0], truth(left, query), np.arange(253), 9)


def test_views_are_read_while_rows_are_added(kind):
    """Eight readers of older views, one writer; nobody sees a row half written."""
    matrix, queries = unit(4000, 32), unit(8, 32, seed=1)
    copy = kind.copy(32)
    copy.append(matrix[:100])
    views = [(100, copy.view())]

    def search(query: np.ndarray) -> None:
        for _ in range(20):
            rows, view = views[-1]
            check(view.rank(query[None], None)[0], truth(matrix[:rows], query), np.arange(rows), 5)

    with ThreadPoolExecutor(8) as pool:
        searches = [pool.submit(search, query) for query in queries]
        for end in range(150, 4001, 50):
            copy.append(matrix[end - 50 : end])
            views.append((end, copy.view()))
        for one in searches:
            one.result()


@pytest.mark.usefixtures("blocks")
def test_idle_cores_scan_too(kind, monkeypatch):
    matrix, query = unit(1000, 48), unit(48, seed=1)
    copy = kind.copy(48)
    copy.append(matrix)
    for cores in (1, 2, 7):
        monkeypatch.setattr(scan._cores, "count", cores)
        check(copy.view().rank(query[None], None)[0], truth(matrix, query), np.arange(1000), 20)
    assert scan._cores._busy == 0


def test_busy_cores_are_not_used_again():
    cores, both, threads = scan._Cores(), threading.Barrier(2), set[int]()
    cores.count = 2
    part = (0, np.empty(0, np.int8))

    def work(_: scan._Part) -> None:
        both.wait(20)  # breaks unless two threads work at once
        cores.each([part] * 5, lambda _: threads.add(threading.get_ident()))

    cores.each([part] * 4, work)
    assert len(threads) == 2
    assert cores._busy == 0


@pytest.mark.parametrize(("searches", "expected"), [(0, 6), (1, 6), (2, 3), (4, 1), (9, 1)])
def test_searches_that_run_at_once_share_the_cores(searches: int, expected: int):
    cores, together, threads = scan._Cores(), threading.Barrier(expected), set[int]()
    cores.count = 6

    def work(_: scan._Part) -> None:
        together.wait(20)  # breaks unless as many threads work at once
        threads.add(threading.get_ident())

    with ExitStack() as held:
        for _ in range(searches):
            held.enter_context(cores.searching())
        cores.each([(0, np.empty(0, np.int8))] * (expected * 12), work)
    assert len(threads) == expected
    assert (cores._busy, cores.share) == (0, 6)


def test_an_error_of_any_thread_ends_the_scan():
    cores, both, done = scan._Cores(), threading.Barrier(2), list[int]()
    cores.count = 2

    def work(part: scan._Part) -> None:
        if part[0] < 2:
            both.wait(20)  # so that each thread has one
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")
        done.append(part[0])

    with pytest.raises(MemoryError):
        cores.each([(number, np.empty(0, np.int8)) for number in range(4)], work)
    assert len(done) < 4
    assert cores._busy == 0


def test_a_scan_without_further_threads(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    cores, done = scan._Cores(), list[int]()
    cores.count = 4
    monkeypatch.setattr(threading.Thread, "start", refuse)
    cores.each([(number, np.empty(0, np.int8)) for number in range(5)], lambda part: done.append(part[0]))
    assert done == [0, 1, 2, 3, 4]


def test_no_rows(kind):
    view = kind.copy(4).view()
    (ranking,) = view.rank(unit(1, 4), None)
    for empty in (ranking, view.rank_rows(unit(4), np.empty(0, np.int64))):
        chosen, floor = empty.best(5)
        assert (len(chosen), floor) == (0, -np.inf)


# -------------------------------------------------------------------------------------------------------- quantisation


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), kind=st.sampled_from(KINDS), dimension=st.integers(1, 400))
def test_the_measured_error_is_no_less_than_the_true_one(seed, kind, dimension):
    rng = np.random.default_rng(seed)
    vectors = rows_of(kind, 20, normalised(rng.standard_normal(dimension)), rng)
    codes, scales, errors = scan._quantised(vectors)
    rest = vectors.astype(np.float64)
    for plane in (0, 1):
        rest -= scales[plane].astype(np.float64)[:, None] * codes[plane]
        assert (np.linalg.norm(rest, axis=1) <= errors[plane]).all()
    assert (np.abs(codes.astype(int)) <= 127).all()
    assert (errors[1] < 2e-4).all(), "two planes tell nearly all"


@pytest.mark.skipif(importlib.util.find_spec("simsimd") is None and not os.environ.get("CI"), reason="no SimSIMD")
def test_integer_kernels_count_right_here():
    assert scan._kernel() is not None


@pytest.fixture
def asked_anew() -> Iterator[None]:
    scan._kernel.cache_clear()
    yield
    scan._kernel.cache_clear()


def check_without_kernels() -> None:
    assert scan._kernel() is None
    matrix, queries = unit(300, 1100), unit(3, 1100, seed=1)
    copy = Int8Scan().copy(1100)
    copy.append(matrix)
    for query, ranking in zip(queries, copy.view().rank(queries, None), strict=True):
        check(ranking, truth(matrix, query), np.arange(300), 20)


@pytest.mark.usefixtures("asked_anew", "blocks")
def test_without_the_library_numpy_counts(monkeypatch):
    monkeypatch.setitem(sys.modules, "simsimd", None)
    check_without_kernels()


@pytest.mark.usefixtures("asked_anew")
def test_numpy_needs_little_memory_for_each_thread(monkeypatch):
    monkeypatch.setitem(sys.modules, "simsimd", None)
    rows = np.ones((scan._PART_ROWS, 384), np.int8)
    scan._dots(rows[:1], rows[:1])  # imports and finds the BLAS
    tracemalloc.start()
    try:
        products = scan._dots(rows[:1], rows)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (products == 384).all()
    assert most < rows.nbytes / 2


@pytest.mark.usefixtures("asked_anew")
def test_a_kernel_that_miscounts_is_not_used(monkeypatch):
    """As one that saturates 16-bit sums would."""

    def cdist(queries: np.ndarray, rows: np.ndarray, metric: str, **_: object) -> np.ndarray:
        products: np.ndarray = queries.astype(np.int32) @ rows.T.astype(np.int32)
        return np.clip(products, -(2**15), 2**15 - 1).astype(np.float32)

    monkeypatch.setitem(sys.modules, "simsimd", types.SimpleNamespace(cdist=cdist))
    check_without_kernels()


# ------------------------------------------------------------------------------------------------------------ the parts


@settings(max_examples=100, deadline=None)
@given(
    scores=st.lists(st.floats(-1, 1, width=32) | st.just(-np.inf), min_size=1, max_size=700), count=st.integers(1, 700)
)
def test_the_kth_largest(scores, count):
    count = min(count, len(scores))
    assert kth_largest(np.array(scores, np.float32), count) == sorted(scores, reverse=True)[count - 1]


@pytest.mark.usefixtures("blocks")
def test_rows_are_taken_from_where_they_are():
    rows = np.random.default_rng(1).integers(-127, 128, (300, 3), np.int8)
    blocks = Blocks(3)
    for part in np.array_split(rows, [1, 64, 130, 131]):
        blocks.append(part)
    view = blocks.view()
    assert np.array_equal(np.concatenate(view), rows)
    for wanted in ([0], [63, 64, 65], [299], list(range(300)), [5, 200]):
        assert np.array_equal(take(view, np.array(wanted)), rows[wanted])


def test_rows_that_do_not_count_are_never_chosen(kind):
    copy, allowed = kind.copy(16), np.array([False, True, False, True])
    copy.append(unit(4, 16))
    for count in (1, 2, 3, 100):
        positions, _ = copy.view().rank(unit(1, 16), allowed)[0].best(count)
        assert set(positions.tolist()) <= {1, 3}
        assert len(positions) >= min(count, 2)


def test_equal_rows_have_equal_exact_scores_wherever_they_stand():
    """A matrix product may sum the last rows of a block in another order."""
    matrix, query = np.repeat(unit(1, 383), 1001, axis=0), unit(383, seed=2)
    assert len(set(exact_scores(matrix, query).tolist())) == 1


# ------------------------------------------------------------------------------------------------------------ threads


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


def test_the_limit_is_lifted_after_an_error():
    before = blas_threads()
    with pytest.raises(ZeroDivisionError), scan.single_threaded():
        _ = 1 / 0
    assert blas_threads() == before
