"""Which request gets a thread next, and how many may wait for one: as many as get one in time, and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from app.src.api import requests as module
from app.src.api.errors import Refused
from app.src.api.requests import FairQueue, Ticket

ME, OTHER, THIRD = "key:me", "key:other", "key:third"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def called(turns: FairQueue, clock: Clock, seconds: float, together: int = 1, calls: int = 200) -> None:
    """So many calls of so many seconds each, as many at the same time as `together` says."""
    begun: deque[Ticket] = deque()
    for _ in range(calls):
        turns.enter(ME, begun.append)
        clock.now += seconds / together
        if len(begun) == together:
            turns.finish(begun.popleft())
    for turn in begun:
        turns.finish(turn)


def crowd(turns: FairQueue, most: int = 10_000, caller: str = ME) -> tuple[list[Ticket], list[Ticket]]:
    """As many as are let in at one moment: those that have a thread, and those that wait for one."""
    inside: list[Ticket] = []
    begun: list[Ticket] = []
    while len(inside) < most:
        try:
            inside.append(turns.enter(caller, begun.append))
        except Refused:
            break
    return begun, [turn for turn in inside if turn.begun is None]


def alone(threads: int, max_wait: float, clock: Callable[[], float]) -> FairQueue:
    """Without authentication: callers are not told apart."""
    return FairQueue(threads, max_wait, clock, several_callers=False)


def test_a_burst_is_let_in_as_far_as_it_is_served_in_time(clock: Clock) -> None:
    """1,000 clients at once waited for 13 s where 1 s was allowed (found by benchmarks/load.py)."""
    turns = alone(4, 1.0, clock)
    called(turns, clock, 0.1, together=4)
    begun, waiting = crowd(turns)
    assert len(begun) == 4
    assert 30 <= len(waiting) <= 42  # 4 threads, 0.1 s each: 40 a second
    with pytest.raises(Refused, match=r"another would wait 1\.\d s; the limit is 1 s .*api\.max_wait") as refused:
        turns.enter(ME, begun.append)
    assert refused.value.seconds == pytest.approx(1.0, abs=0.1)


def test_a_request_that_is_served_or_leaves_makes_room(clock: Clock) -> None:
    turns = alone(1, 1.0, clock)
    called(turns, clock, 0.5)
    begun, waiting = crowd(turns)
    with pytest.raises(Refused):
        turns.enter(ME, begun.append)
    clock.now += 0.5
    turns.finish(begun[0])
    assert begun[1] is waiting[0], "first come, first served"
    turns.enter(ME, begun.append)
    with pytest.raises(Refused):
        turns.enter(ME, begun.append)
    assert turns.leave(waiting[1])
    assert not turns.leave(waiting[1]), "it makes room once"
    assert not turns.leave(waiting[0]), "it has a thread: nobody waits less for that"
    turns.enter(ME, begun.append)
    with pytest.raises(Refused):
        turns.enter(ME, begun.append)


def test_when_no_call_ends_the_first_that_waits_tells(clock: Clock) -> None:
    """As while HANA does not answer: nothing is known of how long calls take."""
    turns = alone(2, 10.0, clock)
    _, waiting = crowd(turns, 52)
    assert len(waiting) == 50
    clock.now += 10.5
    with pytest.raises(Refused, match="the next one has waited 10 s"):
        turns.enter(ME, waiting.append)
    for turn in waiting:
        turns.leave(turn)
    turns.enter(ME, waiting.append)


def test_a_request_that_waits_longer_than_it_may_is_refused(clock: Clock) -> None:
    """Four waited 120 s for a 503 although 10 s were allowed."""
    turns = alone(1, 10.0, clock)
    begun: list[Ticket] = []
    first, second = turns.enter(ME, begun.append), turns.enter(ME, begun.append)
    clock.now += 10.0
    refused = turns.expire(second)
    assert refused.seconds == 10.0
    assert "the next one has waited 10 s; the limit is 10 s (setting api.max_wait)" in str(refused)
    clock.now += 1
    with pytest.raises(Refused, match="the next one has waited 11 s"):
        turns.enter(ME, begun.append)
    turns.finish(first)
    assert turns.enter(ME, begun.append) is begun[-1], "there is a thread again"
    turns.leave(turns.enter(ME, begun.append))


def test_a_caller_whose_request_was_refused_late_is_next_all_the_same(clock: Clock) -> None:
    """The others keep all threads busy and always have somebody who waits."""
    turns = FairQueue(2, 10.0, clock)
    begun: list[Ticket] = []
    crowd = [turns.enter(caller, begun.append) for caller in (OTHER, THIRD, OTHER, THIRD)]
    late = turns.enter(ME, begun.append)
    clock.now += 10.0
    turns.expire(late)
    again = turns.enter(ME, begun.append)
    for turn, caller in zip(crowd, (OTHER, THIRD, OTHER, THIRD), strict=True):
        clock.now += 1
        turns.finish(turn)
        turns.enter(caller, begun.append)
    assert again in begun


def test_one_call_at_a_time_says_little_of_what_all_threads_can(clock: Clock) -> None:
    """Computing takes as much longer as there are threads that compute; waiting for HANA does not, and that shows."""
    turns = alone(8, 1.0, clock)
    called(turns, clock, 0.1)
    assert len(crowd(turns)[1]) <= 12
    turns = alone(8, 1.0, clock)
    called(turns, clock, 0.1, together=8)
    assert len(crowd(turns)[1]) >= 50


def test_nobody_is_refused_while_nobody_waits(clock: Clock) -> None:
    """However long calls took: a request that is let in shows whether they still do."""
    turns = alone(1, 1.0, clock)
    called(turns, clock, 10_000.0, calls=1)
    called(turns, clock, 0.1, calls=400)
    assert len(crowd(turns)[1]) >= 9


# ---------------------------------------------------------------------------------------------------- several callers


def test_one_caller_never_holds_all_threads(clock: Clock) -> None:
    """Eight requests of one key held all eight threads for 557 s."""
    turns = FairQueue(8, 10.0, clock)
    begun, waiting = crowd(turns, 50)
    assert (len(begun), len(waiting)) == (7, 43)
    other: list[Ticket] = []
    turns.enter(OTHER, other.append)
    assert len(other) == 1
    turns.finish(other[0])
    assert len(begun) == 7, "the thread stays free for others"


def test_without_authentication_all_threads_are_for_all(clock: Clock) -> None:
    assert len(crowd(alone(8, 10.0, clock), 50)[0]) == 8


def test_of_one_thread_none_is_kept(clock: Clock) -> None:
    assert len(crowd(FairQueue(1, 10.0, clock), 5)[0]) == 1


def test_the_caller_with_the_fewest_threads_is_next(clock: Clock) -> None:
    turns = FairQueue(5, 10.0, clock)
    mine, _ = crowd(turns, 20)
    others, _ = crowd(turns, 20, OTHER)
    assert (len(mine), len(others)) == (4, 1)
    clock.now += 1
    turns.finish(mine[0])
    assert (len(mine), len(others)) == (4, 1), "the last free thread is for callers that hold none"
    third: list[Ticket] = []
    turns.enter(THIRD, third.append)
    assert len(third) == 1
    turns.finish(third[0])
    turns.finish(mine[1])
    assert (len(mine), len(others)) == (4, 2), "two of mine run on, and one of the other's"


def test_one_callers_slow_calls_refuse_nobody_else(clock: Clock) -> None:
    """The pace and the wait of one say nothing of another's."""
    turns = FairQueue(2, 1.0, clock)
    called(turns, clock, 60.0, calls=1)
    mine, _ = crowd(turns, 2)
    clock.now += 60
    with pytest.raises(Refused):
        turns.enter(ME, mine.append)
    others: list[Ticket] = []
    for _ in range(50):
        turns.enter(OTHER, others.append)
        clock.now += 0.01
        turns.finish(others[-1])
    assert len(others) == 50
    _, waiting = crowd(turns, 500, OTHER)
    assert 90 <= len(waiting) <= 110, "as many as its own pace allows"


def test_callers_without_a_request_are_forgotten_in_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CALLERS", 10)
    turns = FairQueue(2, 10.0, clock)
    held: list[Ticket] = []
    turns.enter(ME, held.append)
    for number in range(100):
        begun: list[Ticket] = []
        turns.enter(f"key:{number}", begun.append)
        turns.finish(begun[0])
    assert len(turns._callers) <= 10
    assert ME in turns._callers
    turns.finish(held[0])
