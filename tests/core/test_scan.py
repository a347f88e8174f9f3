"""Search on the card: what a ranking leaves out is below its floor, whatever the rows and wherever they stand; and what
the card's memory does not hold is scanned elsewhere. The same code runs here on a CPU's tensors."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.src.core import scan
from app.src.core.backends import DeviceFailed
from app.src.core.device import DeviceProfile
from app.src.core.memory import MemoryLimits, T4MemoryManager
from app.src.core.scan import FIRST_ROWS, CardScan

DIMENSION = 24
CPU = DeviceProfile("cpu", "a CPU in place of a card", memory_bytes=1 << 40)


def manager(rows: int = 10**9, dimension: int = DIMENSION) -> T4MemoryManager:
    """Memory of which half may be booked: for so many rows."""
    profile = DeviceProfile("cpu", "card", memory_bytes=2 * 2 * dimension * rows)
    return T4MemoryManager(profile, MemoryLimits(1.0, 0))


class Host:
    """A scan elsewhere, in double precision."""

    def __init__(self, rows: NDArray[np.float32] | None = None) -> None:
        self.rows = np.empty((0, DIMENSION), np.float32) if rows is None else rows

    def copy(self, dimension: int) -> Host:
        return Host(np.empty((0, dimension), np.float32))

    def append(self, vectors: NDArray[np.float32]) -> None:
        self.rows = np.concatenate([self.rows, vectors])

    def kept(self, rows: NDArray[np.bool_]) -> Host:
        return Host(self.rows[rows])

    def view(self) -> Host:
        return Host(self.rows)

    def rank(self, queries: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> list[Any]:
        found = []
        for query in queries.astype(np.float64):
            scores = self.rows.astype(np.float64) @ query
            found.append(Exact(scores if allowed is None else np.where(allowed, scores, -np.inf)))
        return found

    def rank_rows(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> Any:
        return Exact(self.rows[rows].astype(np.float64) @ query.astype(np.float64), rows)


class Exact:
    def __init__(self, scores: NDArray[np.float64], rows: NDArray[np.int64] | None = None) -> None:
        self.scores = scores
        self.rows = np.arange(len(scores)) if rows is None else rows

    def best(self, count: int) -> tuple[NDArray[np.int64], float]:
        living = self.scores[self.scores > -np.inf]
        if len(living) <= count:
            return self.rows[self.scores > -np.inf], -np.inf
        last = min(1.0, np.sort(living)[len(living) - count])
        return self.rows[self.scores >= last - 2e-9], float(last - 1e-9)  # sums of other rows round otherwise


def units(rows: NDArray[Any]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def some_rows(chance: np.random.Generator, count: int, kind: str) -> NDArray[np.float32]:
    if kind == "clusters":  # many rows nearly as near
        centres = chance.standard_normal((3, DIMENSION))
        return units(centres[chance.integers(0, 3, count)] + 1e-3 * chance.standard_normal((count, DIMENSION)))
    if kind == "ties":  # the same few rows again and again, and what differs in the last place
        few = units(chance.standard_normal((4, DIMENSION)))
        rows = few[chance.integers(0, 4, count)]
        return np.where(chance.random(rows.shape) < 0.05, np.nextafter(rows, np.float32(2)), rows)
    if kind == "one number":  # all of a vector in one place, the rest next to nothing
        rows = np.full((count, DIMENSION), 1e-8)
        rows[np.arange(count), chance.integers(0, DIMENSION, count)] = 1
        return units(rows)
    return units(chance.standard_normal((count, DIMENSION)))


def check(ranking: Any, truth: NDArray[np.float64], count: int) -> None:
    """`truth`: the true scores, -inf for rows that do not count."""
    rows, floor = ranking.best(count)
    assert rows.dtype == np.int64
    assert (np.diff(rows) > 0).all()
    assert not np.isneginf(truth[rows]).any()
    left_out = np.delete(truth, rows)
    left_out = left_out[left_out > -np.inf]
    assert not len(left_out) or left_out.max() < floor
    best = np.sort(truth[truth > -np.inf])[::-1][:count]
    if len(best):
        assert set(np.flatnonzero(truth >= best[-1])) <= set(rows.tolist())
    assert floor < 1


KINDS = ("random", "clusters", "ties", "one number")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    pages=st.lists(st.integers(0, 900), min_size=1, max_size=5),
    fitting=st.sampled_from([0, 1024, 2048, 10**9]),
    share=st.sampled_from([None, 0.9, 0.02, 0.0]),
    count=st.sampled_from([1, 10, 36, 5000]),
)
def test_no_row_that_may_be_among_the_best_is_left_out(
    seed: int, kind: str, pages: list[int], fitting: int, share: float | None, count: int
) -> None:
    chance = np.random.default_rng(seed)
    copy = CardScan(CPU, manager(fitting), Host()).copy(DIMENSION)
    rows = np.concatenate([some_rows(chance, page, kind) for page in pages])
    start = 0
    for page in pages:
        copy.append(rows[start : start + page])
        start += page
    near = rows[chance.integers(0, len(rows), 2)] if len(rows) else units(chance.standard_normal((2, DIMENSION)))
    queries = units(np.concatenate([near, chance.standard_normal((1, DIMENSION)).astype(np.float32)]))
    allowed = None if share is None else chance.random(len(rows)) < share
    truth = rows.astype(np.float64) @ queries.astype(np.float64).T
    view = copy.view()
    for column, ranking in enumerate(view.rank(queries, allowed)):
        expected = truth[:, column] if allowed is None else np.where(allowed, truth[:, column], -np.inf)
        check(ranking, expected, count)
        check(ranking, expected, 3)  # may be asked again
    some = np.flatnonzero(chance.random(len(rows)) < 0.3)
    only = np.full(len(rows), -np.inf)
    only[some] = truth[some, 0]
    check(view.rank_rows(queries[0], some), only, count)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    fitting=st.sampled_from([0, 1024, 3072, 10**9]),
    keep=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_kept_rows_and_earlier_views(seed: int, fitting: int, keep: float) -> None:
    chance = np.random.default_rng(seed)
    copy = CardScan(CPU, manager(fitting), Host()).copy(DIMENSION)
    first, second, third = (some_rows(chance, 1500, "random") for _ in range(3))
    copy.append(first)
    early = copy.view()
    copy.append(second)
    whole = np.concatenate([first, second])
    alive = chance.random(len(whole)) < keep
    kept = copy.kept(alive)
    kept.append(third)
    query = units(chance.standard_normal((1, DIMENSION)))
    for view, rows in ((early, first), (copy.view(), whole), (kept.view(), np.concatenate([whole[alive], third]))):
        check(view.rank(query, None)[0], rows.astype(np.float64) @ query[0].astype(np.float64), 10)


def test_zero_rows_that_are_not_allowed_do_no_harm() -> None:
    copy = CardScan(CPU, manager(), Host()).copy(DIMENSION)
    rows = some_rows(np.random.default_rng(1), 50, "random")
    rows[7] = 0
    copy.append(rows)
    allowed = np.arange(50) != 7
    truth = np.where(allowed, rows.astype(np.float64) @ rows[3].astype(np.float64), -np.inf)
    check(copy.view().rank(rows[3:4], allowed)[0], truth, 50)


# ------------------------------------------------------------------------------------------------------------- memory


def test_memory_is_booked_block_by_block_and_given_back_with_the_last_view() -> None:
    memory = manager(10**6)
    copy = CardScan(CPU, memory, Host()).copy(DIMENSION)
    assert memory.device.booked_bytes == 0
    copy.append(some_rows(np.random.default_rng(1), FIRST_ROWS, "random"))
    assert memory.device.booked_bytes == 2 * DIMENSION * FIRST_ROWS
    copy.append(some_rows(np.random.default_rng(2), 1, "random"))
    assert memory.device.booked_bytes == 2 * 2 * DIMENSION * FIRST_ROWS
    view = copy.view()
    del copy
    gc.collect()
    assert memory.device.booked_bytes == 2 * 2 * DIMENSION * FIRST_ROWS
    assert len(view.rank(some_rows(np.random.default_rng(3), 1, "random"), None)[0].best(5)[0])
    del view
    gc.collect()
    assert memory.device.booked_bytes == 0


@pytest.mark.parametrize(("fitting", "on_card"), [(0, 0), (1023, 0), (1024, 1024), (2048, 2048), (10**6, 5000)])
def test_what_finds_no_room_goes_elsewhere(fitting: int, on_card: int) -> None:
    copy = CardScan(CPU, manager(fitting), Host()).copy(DIMENSION)
    rows = some_rows(np.random.default_rng(1), 5000, "random")
    for start in range(0, 5000, 700):
        copy.append(rows[start : start + 700])
    assert copy.rows_on_card == on_card
    assert isinstance(copy._rest, Host) is (on_card < 5000)
    truth = rows.astype(np.float64) @ rows[4321].astype(np.float64)
    check(copy.view().rank(rows[4321:4322], None)[0], truth, 10)


def test_a_card_without_room_after_all_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have taken what the driver reported as free."""
    memory = manager()
    copy = CardScan(CPU, memory, Host()).copy(DIMENSION)
    rows = some_rows(np.random.default_rng(1), FIRST_ROWS + 10, "random")
    copy.append(rows[:FIRST_ROWS])

    def full(*_args: Any, **_named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(scan.torch, "empty", full)  # type: ignore[attr-defined]
    copy.append(rows[FIRST_ROWS:])
    gc.collect()
    assert copy.rows_on_card == FIRST_ROWS
    assert memory.device.booked_bytes == 2 * DIMENSION * FIRST_ROWS


def on_a_full_card(rows: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch, function: str) -> tuple[Any, list[int]]:
    """A view of rows on a card on which every other call of a torch function finds no memory; and the calls."""
    card = CardScan(CPU, manager(), Host())
    copy = card.copy(DIMENSION)
    copy.append(rows)
    calls: list[int] = []
    usual = getattr(torch, function)

    def full(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) % 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(*arguments, **named)

    monkeypatch.setattr(scan.torch, function, full)  # type: ignore[attr-defined]
    return copy.view(), calls


@pytest.mark.parametrize("function", ["mm", "cat", "topk"])
@pytest.mark.proves(19)
def test_a_search_for_which_the_card_has_no_memory_is_computed_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    rows = some_rows(np.random.default_rng(1), FIRST_ROWS, "clusters")  # in one block, so one product
    view, calls = on_a_full_card(rows, monkeypatch, function)
    truth = rows.astype(np.float64) @ rows[77].astype(np.float64)
    check(view.rank(rows[77:78], None)[0], truth, 10)
    some = np.arange(0, FIRST_ROWS, 3)
    only = np.full(FIRST_ROWS, -np.inf)
    only[some] = truth[some]
    check(view.rank_rows(rows[77], some), only, 10)
    assert len(calls) == 4, "each once more"


def test_a_search_on_a_card_that_failed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(np.random.default_rng(1), 50, "random")
    card = CardScan(CPU, manager(), Host())
    copy = card.copy(DIMENSION)
    copy.append(rows)

    def broken(*_: Any) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    card.product = broken
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        copy.view().rank(rows[:1], None)
    assert "illegal memory access" in card.failed


def test_rows_that_are_kept_need_room_beside_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the old copy stays in use."""
    rows = some_rows(np.random.default_rng(1), FIRST_ROWS, "random")
    memory = manager(FIRST_ROWS)
    copy = CardScan(CPU, memory, Host()).copy(DIMENSION)
    copy.append(rows)
    booked = memory.device.booked_bytes
    monkeypatch.setattr(scan, "KEPT_SHARE", 1.0)
    with pytest.raises(MemoryError):
        copy.kept(np.arange(FIRST_ROWS) % 3 == 0)
    gc.collect()
    assert memory.device.booked_bytes == booked
    check(copy.view().rank(rows[7:8], None)[0], rows.astype(np.float64) @ rows[7].astype(np.float64), 10)


def test_a_product_that_adds_up_too_roughly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that adds up in fp16 would be."""
    monkeypatch.setattr(scan, "_mixed_product", lambda queries, rows: torch.mm(queries, rows.T).float())
    assert CardScan(CPU, manager(), Host()).product is not scan._mixed_product
    monkeypatch.setattr(scan, "_mixed_product", lambda queries, rows: torch.mm(queries.float(), rows.float().T))
    assert CardScan(CPU, manager(), Host()).product is scan._mixed_product
