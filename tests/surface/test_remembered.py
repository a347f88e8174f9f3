"""What is remembered of rows: how long, how much, beside writes, and by several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from app.src.service import collections
from app.src.service.collections import Bounds, Key, SingleFlightCache
from connector.cancellation import Cancellation, cancelled_by, current
from connector.errors import Cancelled, ConnectionLost

MATERIALS: Key = ("materials", 1, "null")
OTHERS: Key = ("others", 1, "null")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Looks:
    """Each look finds another number, and takes so many seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.count, self._clock, self._seconds = 0, clock, seconds

    def __call__(self) -> int:
        self.count += 1
        self._clock.now += self._seconds
        return self.count


def made(worth: float = 0.0) -> tuple[SingleFlightCache[int], Clock, Looks]:
    clock = Clock()
    return SingleFlightCache(Bounds(3, 600.0, worth), clock), clock, Looks(clock, 2.0)


def test_it_is_kept_for_its_time() -> None:
    remembered, clock, look = made()
    assert [remembered.get(MATERIALS, look) for _ in range(3)] == [1, 1, 1]
    clock.now += 599
    assert remembered.get(MATERIALS, look) == 1
    clock.now += 1
    assert remembered.get(MATERIALS, look) == 2


@pytest.mark.parametrize(("worth", "seconds"), [(0.0, 0.0), (50.0, 100.0), (10_000.0, 600.0)])
def test_after_a_write_it_is_kept_by_what_it_cost(worth: float, seconds: float) -> None:
    remembered, clock, look = made(worth)
    for key in (OTHERS, MATERIALS):
        remembered.get(key, look)
    remembered.changed("materials")
    if seconds:
        clock.now += seconds - 1
        assert remembered.get(MATERIALS, look) == 2
        clock.now += 1
    assert remembered.get(MATERIALS, look) == 3
    assert remembered.get(MATERIALS, look) == 3, "nothing was written since"
    if seconds < 600:
        assert remembered.get(OTHERS, look) == 1, "nobody wrote to these"


@pytest.mark.parametrize("worth", [0.0, 50.0])
def test_what_was_found_beside_a_write_is_as_if_written_to_after_it(worth: float) -> None:
    remembered, clock, look = made(worth)

    def beside_a_write() -> int:
        found = look()
        remembered.changed("materials")
        return found

    assert remembered.get(MATERIALS, beside_a_write) == 1
    assert remembered.get(MATERIALS, look) == (1 if worth else 2)
    clock.now += 101
    assert remembered.get(MATERIALS, look) == 2


def test_what_does_not_last_is_as_if_written_to() -> None:
    remembered, clock, look = made(worth=50.0)
    assert remembered.get(MATERIALS, look, lasts=lambda _: False) == 1
    clock.now += 99
    assert remembered.get(MATERIALS, look) == 1
    clock.now += 1
    assert remembered.get(MATERIALS, look) == 2


def test_the_oldest_go_first_and_nothing_is_left_of_them() -> None:
    remembered, _, look = made()
    keys: list[Key] = [("materials", number, "null") for number in range(5)]
    for key in keys:
        remembered.get(key, look)
    remembered.get(keys[4], look)
    assert look.count == 5
    remembered.get(keys[0], look)
    assert look.count == 6
    assert set(remembered._entries) == {keys[0], keys[3], keys[4]}


def test_errors_are_not_kept() -> None:
    remembered, _, look = made()

    def fails() -> int:
        raise LookupError

    for _ in range(2):
        with pytest.raises(LookupError):
            remembered.get(MATERIALS, fails)
    assert not remembered._flights
    assert remembered.get(MATERIALS, look) == 1


def test_what_was_written_before_it_is_kept_counts() -> None:
    """Between the end of the look and then."""
    remembered, _, look = made()

    def stays(_: int) -> bool:
        remembered.changed("materials")
        return True

    assert remembered.get(MATERIALS, look, stays) == 1
    assert remembered.get(MATERIALS, look) == 2


def test_a_store_that_fails_one_fails_all_who_wait_for_him(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looked for himself, one after another: eight times as long as a store takes that does not answer."""
    remembered, _, look = made()
    came, fail = threading.Semaphore(0), threading.Event()

    class Waited(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            came.release()
            return super().result(timeout)

    monkeypatch.setattr(collections, "Future", Waited)
    errors: list[Exception] = []

    def fails() -> int:
        assert fail.wait(60)
        look()
        raise ConnectionLost("no answer", code=-10807)

    def ask() -> None:
        with pytest.raises(ConnectionLost, match="no answer") as failed:
            remembered.get(MATERIALS, fails)
        errors.append(failed.value)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(came.acquire(timeout=60) for _ in threads[1:])
    fail.set()
    for thread in threads:
        thread.join(60)
    assert [error.code for error in errors if isinstance(error, ConnectionLost)] == [-10807] * 4
    assert look.count == 1
    assert remembered.get(MATERIALS, look) == 2, "who comes later looks again"


def test_one_looks_for_all_who_ask_at_once() -> None:
    remembered, _, look = made()
    looking, go_on = threading.Event(), threading.Event()
    found: list[int] = []

    def slowly() -> int:
        looking.set()
        assert go_on.wait(10)
        return look()

    def ask(key: Key, how: Callable[[], int]) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.append(remembered.get(key, how)))
        thread.start()
        return thread

    first = ask(MATERIALS, slowly)
    assert looking.wait(10)
    second = ask(MATERIALS, look)
    ask(OTHERS, lambda: 99).join(10)
    assert found == [99], "who asks for something else does not wait"
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert found == [99, 1, 1]


def test_a_look_outlives_the_request_that_began_it() -> None:
    """Others may wait for what it finds: a client that leaves must not fail them."""
    remembered, _, look = made()
    call = Cancellation()

    def looks() -> int:
        call.cancel()
        current().check()
        return look()

    with cancelled_by(call):
        assert remembered.get(MATERIALS, looks) == 1
        assert current() is call
        with pytest.raises(Cancelled):
            current().check()
