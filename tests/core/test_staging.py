"""Numbers on their way to a card and back: the card of these tests has queues that run when they like, in an order
drawn at random, and memory that is overwritten as soon as it may be. Whoever reads or writes too early gets garbage."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core.backends import DeviceFailed, OutOfMemory, Running
from app.src.core.backends.torch.staging import (
    CardUploads,
    CudaCard,
    Downloads,
    HostUploads,
    uploads_for,
)

GARBAGE = -7


class SimulatedEvent:
    def __init__(self, card: SimulatedCard) -> None:
        self._card = card
        self.reached = False

    def synchronize(self) -> None:
        self._card.run_until(lambda: self.reached)
        if self._card.broken is not None:
            raise self._card.broken


class SimulatedStream:
    """Work in order; a piece of work is (may it run?, what it does)."""

    def __init__(self, card: SimulatedCard) -> None:
        self._card = card
        self.queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()

    def add(self, work: Callable[[], object]) -> None:
        self.queue.append((lambda: True, work))

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self._card)
        self.add(lambda: setattr(event, "reached", True))
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        self.queue.append((lambda: event.reached, lambda: None))


class SimulatedCard(CudaCard):
    """Device tensors are tensors whose memory turns to garbage when the last reference is gone, as soon as the stream
    that it belongs to, and those it is kept for, have done what is queued there by then."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._streams: list[SimulatedStream] = []
        self._computing = self.stream()
        self._current: list[SimulatedStream] = []
        self._kept: dict[int, list[SimulatedStream]] = {}
        self.broken: Exception | None = None
        self.made = 0

    # -- what staging asks for

    def stream(self) -> SimulatedStream:
        self._streams.append(SimulatedStream(self))
        return self._streams[-1]

    def computing(self) -> SimulatedStream:
        return self._computing

    @contextlib.contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.made += 1
        return torch.full((count,), GARBAGE, dtype=dtype)

    def sent(self, numbers: torch.Tensor) -> torch.Tensor:
        found = self.allocated(numbers.shape, numbers.dtype)
        self.copy(found, numbers)
        return found

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        into, out_of = target.detach(), source.detach()  # the same memory, without keeping it from being given back
        self._stream().add(lambda: into.copy_(out_of))

    def keep_for(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        self._kept.setdefault(id(tensor), []).append(stream)

    # -- what a test does

    def _stream(self) -> SimulatedStream:
        return self._current[-1] if self._current else self._computing

    def allocated(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.full(tuple(shape), GARBAGE, dtype=dtype)
        weakref.finalize(tensor, self._given_back, tensor.detach(), id(tensor), self._stream())
        return tensor

    def _given_back(self, memory: torch.Tensor, key: int, owner: SimulatedStream) -> None:
        events = [stream.record_event() for stream in [owner, *self._kept.pop(key, [])]]
        others = SimulatedStream(self)
        for event in events:
            others.wait_event(event)
        others.add(lambda: memory.fill_(GARBAGE))
        self._streams.append(others)

    def compute(self, numbers: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """Each number times two, in float32, as rows."""
        found = self.allocated(shape, torch.float32)
        source, target = numbers.detach(), found.detach()
        self._computing.add(lambda: target.copy_(source.view(shape) * 2))
        return found

    def step(self) -> bool:
        """One piece of work of any stream that can go on."""
        ready = [stream for stream in self._streams if stream.queue and stream.queue[0][0]()]
        if not ready:
            return False
        self._random.choice(ready).queue.popleft()[1]()
        return True

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.step(), "the streams wait for each other"

    def dawdle(self) -> None:
        for _ in range(self._random.randrange(6)):
            self.step()


def numbers_of(batch: int, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return (np.arange(rows * columns, dtype=np.int32) + 1000 * batch).reshape(rows, columns)


def computed(card: SimulatedCard, uploads: CardUploads, batch: int, shape: tuple[int, int]) -> torch.Tensor:
    """As a backend does: nothing of the batch is held once it is queued."""
    room = uploads.room(shape[0] * shape[1])
    card.dawdle()
    room[:] = numbers_of(batch, *shape).ravel()
    return card.compute(uploads.send(), shape)


SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    shapes=SHAPES,
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 3),
    lag=st.integers(0, 5),
)
def test_everybody_gets_his_own_numbers_back(shapes: list[tuple[int, int]], seed: int, slots: int, lag: int) -> None:
    """`lag`: how many batches later one is asked for; more than there are buffers, too. Each third is never asked
    for."""
    card = SimulatedCard(seed)
    uploads = CardUploads(card, slots=slots)
    downloads = Downloads(card, slots=slots)
    pending: deque[tuple[int, Running]] = deque()

    def ask() -> None:
        number, one = pending.popleft()
        if number % 3 < 2:
            found = one()
            card.dawdle()
            np.testing.assert_array_equal(found, 2.0 * numbers_of(number, *shapes[number]))

    for number, shape in enumerate(shapes):
        pending.append((number, downloads.fetch(computed(card, uploads, number, shape))))
        card.dawdle()
        if len(pending) > lag:
            ask()
    while pending:
        ask()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), batches=st.integers(1, 8), slots=st.integers(1, 3))
def test_numbers_that_a_recording_reads_are_written_when_it_has_read_the_last_ones(
    seed: int, batches: int, slots: int
) -> None:
    card = SimulatedCard(seed)
    uploads, downloads = CardUploads(card, slots=slots), Downloads(card, slots=slots)
    room = uploads.room(6)
    room[:] = 0
    numbers = uploads.send()
    pending = []
    for number in range(batches):
        room = uploads.room(6)
        room[:] = numbers_of(number, 2, 3).ravel()
        uploads.send_into(numbers)
        pending.append(downloads.fetch(card.compute(numbers, (2, 3))))
        card.dawdle()
    for number, one in enumerate(pending):
        np.testing.assert_array_equal(one(), 2.0 * numbers_of(number, 2, 3))


def test_the_next_batch_gets_to_the_card_before_this_one_is_computed() -> None:
    """Neither direction waits for what computes, and the host waits for nothing."""
    card = SimulatedCard()
    uploads, downloads = CardUploads(card), Downloads(card)
    blocked = SimulatedEvent(card)
    card.computing().wait_event(blocked)
    first = downloads.fetch(computed(card, uploads, 0, (2, 2)))
    room = uploads.room(4)
    room[:] = 5
    second = uploads.send()
    while card.step():
        pass
    assert second.tolist() == [5, 5, 5, 5]
    blocked.reached = True
    np.testing.assert_array_equal(first(), 2.0 * numbers_of(0, 2, 2))


def test_vectors_that_were_read_are_freed_without_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have failed in the next batch meanwhile; an error while tensors are freed aborts the process."""
    card = SimulatedCard()
    uploads, downloads = CardUploads(card), Downloads(card)
    found = computed(card, uploads, 0, (2, 2))
    alive, told = weakref.ref(found), list[torch.Tensor]()
    monkeypatch.setattr(card, "keep_for", lambda tensor, _stream: told.append(tensor))
    running = downloads.fetch(found)
    del found
    assert alive() is not None, "until its copy has ended"
    np.testing.assert_array_equal(running(), 2.0 * numbers_of(0, 2, 2))
    assert not told
    assert alive() is None


def test_buffers_are_used_again_and_grow_seldom() -> None:
    card = SimulatedCard()
    uploads, downloads = CardUploads(card), Downloads(card)
    for number in range(50):
        downloads.fetch(computed(card, uploads, number, (1 + number % 7, 3)))()
    made = card.made
    for number in range(50):
        downloads.fetch(computed(card, uploads, number, (7, 3)))()
    assert made <= 6 + 18  # six empty ones, each grown at most three times
    assert card.made == made


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("an illegal memory access was encountered"), RuntimeError),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceFailed),
    ],
)
def test_what_the_device_tells_late_is_raised_by_the_batch_that_asks(error: Exception, kind: type[Exception]) -> None:
    card = SimulatedCard()
    uploads, downloads = CardUploads(card), Downloads(card, slots=1)
    first = downloads.fetch(computed(card, uploads, 0, (2, 2)))
    card.broken = error
    with pytest.raises(kind):
        first()
    card.broken = None
    second = downloads.fetch(computed(card, uploads, 1, (2, 2)))
    with pytest.raises(kind):
        first()
    np.testing.assert_array_equal(second(), 2.0 * numbers_of(1, 2, 2))


def test_a_result_may_be_asked_for_again() -> None:
    card = SimulatedCard()
    pending = Downloads(card).fetch(computed(card, CardUploads(card), 3, (2, 2)))
    np.testing.assert_array_equal(pending(), pending())


def test_where_the_device_is_the_host_nothing_is_copied() -> None:
    uploads = uploads_for(torch.device("cpu"))
    assert isinstance(uploads, HostUploads)
    room = uploads.room(3)
    room[:] = [1, 2, 3]
    found = uploads.send()
    assert found.numpy().ctypes.data == room.ctypes.data
    assert uploads.room(3).ctypes.data != room.ctypes.data
    target = torch.zeros(2, dtype=torch.int32)
    uploads.room(2)[:] = [8, 9]
    uploads.send_into(target)
    assert target.tolist() == [8, 9]
    assert found.tolist() == [1, 2, 3]


def test_memory_is_pinned_through_the_cards_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning opens a context on the thread's current card, some 500 MB of cuda:0 for an engine on cuda:1."""
    current = ["cuda:0"]

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(str(chosen))
        yield
        current.pop()

    def empty(count: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        assert current[-1] == "cuda:1"
        return torch.zeros(count, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch, "empty", empty)
    assert len(CudaCard(torch.device("cuda", 1)).host(7, torch.int32)) == 7
    assert current == ["cuda:0"]
