"""Vectors and words that are kept for searches; the scalar functions, row by row, say what the answers must be."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hana_emulator.errors import HanaError
from hana_emulator.sql.functions.builtin import fvecs
from hana_emulator.sql.functions.builtin.fulltext import score
from hana_emulator.sql.storage.column_cache import ColumnCache, Read
from hana_emulator.sql.storage.row_versions import RowVersions
from hana_emulator.sql.storage.vectors import Column, Metric
from hana_emulator.sql.storage.word_index import WordIndex

KEY = ("T", "V")
COSINE, L2 = Metric.COSINE_SIMILARITY, Metric.L2DISTANCE
Rows = list[tuple[int, bytes | None]]

SCALAR: dict[Metric, Callable[[bytes, bytes], float]] = {COSINE: fvecs.cosine_similarity, L2: fvecs.l2_distance}


def rows_of(*vectors: list[float] | None) -> Rows:
    """Rowids count from 1."""
    return [(rowid, None if values is None else fvecs.encode(values)) for rowid, values in enumerate(vectors, 1)]


def scored(rows: Rows, query: list[float], metric: Metric) -> list[tuple[int, float]]:
    rowids, scores = Column.build(rows).scores(fvecs.encode(query), metric)
    return list(zip(rowids.tolist(), scores.tolist(), strict=True))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 30), st.just(4)), elements=finite)


@pytest.mark.parametrize("metric", list(Metric))
@settings(max_examples=50, deadline=None)
@given(values=matrices)
def test_scores_agree_with_the_scalar_functions(metric: Metric, values: np.ndarray) -> None:
    rows: Rows = [(10 * position, fvecs.encode(row)) for position, row in enumerate(values)]
    query = rows[0][1]
    assert query is not None
    rowids, scores = Column.build(rows).scores(query, metric)
    assert rowids.tolist() == [rowid for rowid, _ in rows]
    assert scores.dtype == np.float32
    assert np.isfinite(scores).all()
    limit = float(np.finfo(np.float32).max)
    expected = [min(SCALAR[metric](data, query), limit) for _, data in rows if data is not None]
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=2e-5)


def test_unordered_rows_come_back_in_rowid_order() -> None:
    rows: Rows = [(9, fvecs.encode([1, 0])), (3, None), (2, fvecs.encode([0, 1])), (5, fvecs.encode([1, 1]))]
    rowids, scores = Column.build(rows).scores(fvecs.encode([1, 0]), COSINE)
    assert rowids.tolist() == [2, 5, 9]
    assert scores.tolist() == pytest.approx([0.0, 0.5**0.5, 1.0])


EXTREMES = [
    # row, query, cosine
    ([1.4e-45, 0], [1.4e-45, 0], 1.0),
    ([1.4e-45, 1.4e-45], [1, 0], 0.5**0.5),
    ([1e-30, -1e-30], [1e30, 1e30], 0.0),
    ([1e-38, 0], [-3e38, 0], -1.0),
    ([1e-26, 2e-26], [2e-26, 4e-26], 1.0),
    ([3e38, 3e38], [3e38, 3e38], 1.0),
    ([3e38, -3e38], [1, 1], 0.0),
    ([1, 1e-30], [1e-30, 1], 0.0),
]


@pytest.mark.parametrize(("row", "query", "expected"), EXTREMES)
def test_no_vector_is_too_short_or_too_long_for_its_cosine(
    row: list[float], query: list[float], expected: float
) -> None:
    ((_, score),) = scored(rows_of(row), query, COSINE)
    assert score == pytest.approx(expected, abs=1e-5)


def test_zero_vectors_score_0_on_either_side() -> None:
    rows = rows_of([0, 0], [1, 0])
    assert scored(rows, [1, 0], COSINE) == [(1, 0.0), (2, 1.0)]
    assert scored(rows, [0, 0], COSINE) == [(1, 0.0), (2, 0.0)]


def test_rows_without_a_vector_are_kept_apart() -> None:
    column = Column.build([(7, None), (2, fvecs.encode([1, 0])), (3, None)])
    assert column.nulls.tolist() == [3, 7]
    assert column.matrices[2][0].rowids.tolist() == [2]


def test_nothing_to_score() -> None:
    assert scored([], [1, 0], COSINE) == []
    assert scored(rows_of(None), [1, 0], COSINE) == []


@pytest.mark.parametrize("metric", list(Metric))
def test_rows_of_another_dimension_are_an_error(metric: Metric) -> None:
    with pytest.raises(HanaError, match="different dimensions"):
        scored(rows_of([1, 0], [1, 0, 0]), [1, 0], metric)


def test_half_vectors_are_read_by_their_width() -> None:
    half: Rows = [(1, fvecs.to_half_vector("[0.5,-2,0.25]")), (2, fvecs.to_half_vector("[1,1,1]"))]
    column = Column.build(half)
    assert column.matrices[3][0].values.tolist() == [[0.5, -2, 0.25], [1, 1, 1]]


def test_bytes_that_are_no_vector_are_refused() -> None:
    broken: Rows = [(1, fvecs.encode([1, 2])), (2, b"\x03\0\0\0" + bytes(8))]
    with pytest.raises(HanaError, match="binary form"):
        Column.build(broken)


def vector_cache(max_bytes: int = 1 << 20) -> tuple[RowVersions, ColumnCache[Column]]:
    versions = RowVersions()
    return versions, ColumnCache(versions, Column.build, max_bytes)


def table_of(rows: Rows, reads: list[object]) -> Read:
    """Reads what `rows` holds at the time; `reads` says what was asked for."""

    def read(rowids: AbstractSet[int] | None) -> Rows:
        reads.append(None if rowids is None else sorted(rowids))
        return [row for row in rows if rowids is None or row[0] in rowids]

    return read


def contents(column: Column) -> dict[int, list[float] | None]:
    found: dict[int, list[float] | None] = dict.fromkeys(column.nulls.tolist())
    for blocks in column.matrices.values():
        for block in blocks:
            assert (np.diff(block.rowids) > 0).all()
            found |= dict(zip(block.rowids.tolist(), block.values.tolist(), strict=True))
    return found


def test_after_a_write_only_the_rows_that_changed_are_read() -> None:
    versions, cache = vector_cache()
    reads: list[object] = []
    rows = rows_of(*[[float(n), 0] for n in range(1000)])
    cache.at(KEY, versions.current("T"), table_of(rows, reads))
    rows[4] = (5, fvecs.encode([7, 7]))
    del rows[6]
    rows.append((2000, fvecs.encode([8, 8])))
    versions.advance("T", lambda: [5, 7])
    versions.advance("T", lambda: [2000])
    now = versions.current("T")
    column = cache.at(KEY, now, table_of(rows, reads))
    assert reads == [None, [5, 7, 2000]]
    assert contents(column) == contents(Column.build(rows))
    assert cache.at(KEY, now, table_of(rows, reads)) is column
    assert len(reads) == 2


def test_an_older_snapshot_gets_its_own_rows_and_does_not_displace_the_newest() -> None:
    versions, cache = vector_cache()
    reads: list[object] = []
    before, after = rows_of([1, 0], [2, 0]), rows_of([1, 0], [3, 0], [4, 0])
    older = versions.current("T")
    cache.at(KEY, older, table_of(before, reads))
    versions.advance("T", lambda: [2, 3])
    newer = versions.current("T")
    column = cache.at(KEY, newer, table_of(after, reads))
    assert contents(cache.at(KEY, older, table_of(before, reads))) == {1: [1, 0], 2: [2, 0]}
    assert reads == [None, [2, 3], [2, 3]]
    assert cache.at(KEY, newer, table_of(after, reads)) is column


def test_blocks_without_changed_rows_are_shared_and_superseded_ones_are_freed() -> None:
    rows = rows_of(*[[float(n), 1] for n in range(1000)])
    before = Column.build(rows)
    after = before.changed({1, 2}, [(1, fvecs.encode([9, 9]))])
    old, new = before.matrices[2], after.matrices[2]
    assert [one is other for one, other in zip(old, new, strict=True)] == [False, True, True, True]
    superseded = weakref.ref(old[0].values)
    del before, old
    assert superseded() is None


writes = st.lists(
    st.tuples(
        st.sets(st.integers(1, 900), max_size=60),
        st.dictionaries(st.integers(1, 900), st.one_of(st.none(), st.integers(0, 9)), max_size=60),
    ),
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(first=st.integers(0, 600), writes=writes)
def test_a_column_after_writes_is_the_column_of_the_rows(
    first: int, writes: list[tuple[set[int], dict[int, int | None]]]
) -> None:
    rows: dict[int, bytes | None] = {rowid: fvecs.encode([rowid, 1]) for rowid in range(1, first)}
    texts: dict[int, object] = {rowid: f"row {rowid % 7}" for rowid in rows}
    column, index = Column.build(rows.items()), WordIndex.build(texts.items())
    for deleted, written in writes:
        given_vectors = {r: None if n is None else fvecs.encode([n] * (2 + n // 9)) for r, n in written.items()}
        given_texts: dict[int, object] = {r: None if n is None else f"new row {n}" for r, n in written.items()}
        rows = {r: data for r, data in rows.items() if r not in deleted} | given_vectors
        texts = {r: text for r, text in texts.items() if r not in deleted} | given_texts
        column = column.changed(deleted | written.keys(), given_vectors.items())
        index = index.changed(deleted | written.keys(), given_texts.items())
        assert contents(column) == contents(Column.build(rows.items()))
        for term in ("row", "row 3", "new row 9", "3 row"):
            assert index.holders(term) == [r for r, t in sorted(texts.items()) if t and score(term, str(t)) > 0]


def test_deletions_leave_no_trail_of_small_blocks() -> None:
    rows = rows_of(*[[float(n), 1] for n in range(10_000)])
    column = Column.build(rows)
    for number in range(9_990):
        if number % 250 == 249:
            column = column.changed(set(range(number - 248, number + 2)) - {number + 1 - 100}, [])
    (blocks,) = column.matrices.values()
    assert len(blocks) <= 9


def test_unknown_changes_mean_reading_everything() -> None:
    versions = RowVersions(most_changes=3)
    cache, reads = ColumnCache(versions, Column.build, 1 << 20), list[object]()
    rows = rows_of([1, 0], [2, 0])
    cache.at(KEY, versions.current("T"), table_of(rows, reads))
    versions.advance("T", lambda: [1, 2])
    versions.advance("T", lambda: [1, 2])
    cache.at(KEY, versions.current("T"), table_of(rows, reads))
    versions.begin_epoch()
    cache.at(KEY, versions.current("T"), table_of(rows, reads))
    assert reads == [None, None, None]


def test_commits_without_rows_are_not_remembered_for_ever() -> None:
    versions = RowVersions(most_changes=3)
    first = versions.current("T")
    for _ in range(3):
        versions.advance("T", list)
    assert versions.between("T", first, versions.current("T")) == set()
    versions.advance("T", list)
    assert versions.between("T", first, versions.current("T")) is None


def test_changes_of_tables_that_nobody_searches_are_not_collected() -> None:
    versions = RowVersions()
    versions.advance("T", lambda: pytest.fail("nobody asked for it"))
    assert versions.current("T").number == 1


def test_memory_is_bounded_and_the_least_used_goes_first() -> None:
    rows = rows_of(*[[float(n)] * 8 for n in range(10)])
    versions, cache = vector_cache(2 * Column.build(rows).nbytes)
    loads = list[str]()

    def use(name: str) -> None:
        def load(rowids: AbstractSet[int] | None) -> Rows:
            loads.append(name)
            return rows

        cache.at((name, "V"), versions.current(name), load)

    for name in ("A", "B", "A", "C", "A", "B"):
        use(name)
    assert loads == ["A", "B", "C", "B"]
    assert cache.nbytes <= cache.max_bytes


def test_a_column_larger_than_the_bound_is_used_but_not_kept() -> None:
    versions, cache = vector_cache(10)
    column = cache.at(KEY, versions.current("T"), table_of(rows_of([1, 0]), []))
    assert contents(column) == {1: [1, 0]}
    assert cache.nbytes == 0


def test_a_definition_releases_everything() -> None:
    versions, cache = vector_cache()
    cache.at(KEY, versions.current("T"), table_of(rows_of([1, 0]), []))
    cache.clear()
    assert cache.nbytes == 0


def test_threads_that_want_the_same_column_load_it_once() -> None:
    versions, cache = vector_cache()
    version, reads = versions.current("T"), list[object]()
    started = threading.Barrier(6)

    def search() -> Column:
        started.wait()
        return cache.at(KEY, version, table_of(rows_of([1, 0]), reads))

    with ThreadPoolExecutor(6) as threads:
        found = [threads.submit(search) for _ in range(6)]
    assert len({id(one.result()) for one in found}) == 1
    assert reads == [None]


def test_a_failing_load_leaves_the_cache_usable() -> None:
    versions, cache = vector_cache()

    def broken(rowids: AbstractSet[int] | None) -> Rows:
        raise HanaError(2048, "cannot read")

    with pytest.raises(HanaError, match="cannot read"):
        cache.at(KEY, versions.current("T"), broken)
    assert contents(cache.at(KEY, versions.current("T"), table_of(rows_of([1, 0]), []))) == {1: [1, 0]}


@pytest.mark.slow
def test_a_search_over_20000_vectors_takes_milliseconds() -> None:
    values = np.random.default_rng(1).normal(size=(20_000, 384)).astype(np.float32)
    rows: Rows = [(rowid, fvecs.encode(row)) for rowid, row in enumerate(values)]
    column = Column.build(rows)
    query = rows[17][1]
    assert query is not None
    took, best = list[float](), -1
    for _ in range(5):
        start = time.thread_time()  # not what other processes take
        rowids, scores = column.scores(query, COSINE)
        best = int(rowids[np.argmax(scores)])
        took.append(time.thread_time() - start)
    assert best == 17
    assert min(took) < 0.06
