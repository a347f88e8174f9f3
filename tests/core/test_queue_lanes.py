"""The queue before the device: order, fairness and counts, without threads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.src.core.queue import WINDOW, LaneQueue, Request, Texts
from app.src.core.tokens import TokenBatch, plan_batches

BUDGET = 32


class Piece(NamedTuple):
    """One text of a request."""

    request: Request
    place: int
    length: int


def plan(lengths: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    return plan_batches(lengths, BUDGET, 1)


def pieces(texts: Texts) -> list[Piece]:
    rows = zip(texts.owners.tolist(), texts.places.tolist(), texts.lengths.tolist(), strict=True)
    return [Piece(texts.requests[owner], place, length) for owner, place, length in rows]


def take(queue: LaneQueue, most: int = BUDGET) -> list[Piece]:
    return pieces(queue.take(plan, BUDGET, most))


def request(*lengths: int) -> Request:
    tokens = TokenBatch.of(range(length) for length in lengths)
    return Request(tokens, "bulk", np.zeros((len(tokens), 2), np.float32), arrived=0.0)


def queue_of(*requests: Request) -> LaneQueue:
    queue = LaneQueue()
    for each in requests:
        queue.add(each)
    return queue


def batches(queue: LaneQueue, most: int = BUDGET) -> list[list[Piece]]:
    found = []
    while batch := take(queue, most):
        found.append(batch)
    return found


@given(st.lists(st.lists(st.integers(0, 40), max_size=40), max_size=12), st.integers(1, BUDGET))
def test_every_text_comes_once_within_the_budget(calls: list[list[int]], most: int) -> None:
    requests = [request(*lengths) for lengths in calls]
    queue = queue_of(*requests)
    assert queue.texts == sum(map(len, calls))
    assert queue.tokens == sum(map(sum, calls))
    found = batches(queue, most)
    served = [(id(piece.request), piece.place) for batch in found for piece in batch]
    assert sorted(served) == sorted((id(each), place) for each in requests for place in range(len(each.tokens)))
    for batch in found:
        assert sum(piece.length for piece in batch) <= most or len(batch) == 1
        assert [piece.length for piece in batch] == sorted((piece.length for piece in batch), reverse=True)
    assert (queue.texts, queue.tokens) == (0, 0)
    assert [each.queued_texts for each in requests] == [0] * len(requests)


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=40), max_size=12), st.data())
def test_what_is_over_is_not_served(calls: list[list[int]], data: st.DataObject) -> None:
    requests = [request(*lengths) for lengths in calls]
    queue = queue_of(*requests)
    first = take(queue)
    gone = [each for each in requests if data.draw(st.booleans())]
    for each in gone:
        each.over = True
        queue.forget(each)
    kept = [each for each in requests if not each.over]
    taken = {(id(piece.request), piece.place) for piece in first}
    assert queue.texts == sum((id(each), place) not in taken for each in kept for place in range(len(each.tokens)))
    later = [piece for batch in batches(queue) for piece in batch]
    assert not [piece for piece in later if piece.request.over]
    assert len(later) + sum(not piece.request.over for piece in first) == sum(len(each.tokens) for each in kept)
    assert (queue.texts, queue.tokens) == (0, 0)


def test_a_small_request_does_not_wait_for_the_whole_of_a_large_one() -> None:
    large, small = request(*[8] * 400), request(8, 8)
    queue = queue_of(large)
    first = take(queue)
    assert {piece.request for piece in first} == {large}
    queue.add(small)
    order = [piece.request for batch in batches(queue) for piece in batch]
    last = max(place for place, each in enumerate(order) if each is small)
    assert last < 2 * WINDOW * BUDGET // 8


def test_two_large_requests_share_every_window() -> None:
    one, other = request(*[4] * 200), request(*[4] * 200)
    found = batches(queue_of(one, other))
    half = [piece.request for batch in found[: len(found) // 2] for piece in batch]
    assert abs(half.count(one) - half.count(other)) <= WINDOW * BUDGET // 4


def test_small_requests_go_together_sorted() -> None:
    requests = [request(length) for length in (3, 9, 1, 9, 2)]
    (batch, rest) = batches(queue_of(*requests))
    assert [piece.length for piece in [*batch, *rest]] == [9, 9, 3, 2, 1]


def test_batches_of_one_large_request_are_full_but_for_the_last() -> None:
    found = batches(queue_of(request(*[3] * 1000)))
    assert {len(batch) for batch in found[:-1]} == {BUDGET // 3}


def test_a_planned_batch_is_cut_when_less_is_wanted() -> None:
    queue = queue_of(request(*[8] * 8))
    assert [len(take(queue, most)) for most in (BUDGET, 16, 1, BUDGET)] == [4, 2, 1, 1]


def test_drained_is_whoever_waits() -> None:
    waiting, over, planned = request(5), request(5), request(*[8] * 9)
    queue = queue_of(planned)
    take(queue, 8)
    queue.add(over)
    queue.add(waiting)
    over.over = True
    queue.forget(over)
    assert set(queue.drain()) == {waiting, planned}
    assert take(queue) == []


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.data())
def test_a_batch_has_the_token_ids_of_its_texts(calls: list[list[int]], data: st.DataObject) -> None:
    """Whatever texts of whatever requests, in whatever order."""
    requests = [request(*lengths) for lengths in calls]
    for number, each in enumerate(requests):
        each.tokens.ids[:] += 100 * number
    texts = Texts.of([(each, np.arange(len(each.tokens))) for each in requests])
    chosen = data.draw(st.lists(st.sampled_from(range(len(texts))), min_size=1, unique=True))
    found = texts[np.array(chosen)]
    batch = found.batch()
    wanted = [piece.request.tokens[piece.place].tolist() for piece in pieces(found)]
    assert [ids.tolist() for ids in batch] == wanted
    assert batch.lengths.tolist() == [len(ids) for ids in wanted] == found.lengths.tolist()
    assert set(found.requests) == {piece.request for piece in pieces(found)}
