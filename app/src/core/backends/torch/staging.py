"""Numbers on their way to a card and back, beside what it computes: host buffers that are used in turns, a stream for
each direction, and events that say when a buffer may be written or read again.

Knows tensors, streams and events; nothing of models. What a card offers is given, so that the order of all this is
tried without one.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .. import Pending, Vectors

SLOTS = 3
"""Buffers for each direction: one that the card reads or writes, one that waits for its turn, one for the host."""
GROWTH = 2
"""Times what is needed, when a buffer is too small: pinning is slow."""


class Event(Protocol):
    def synchronize(self) -> None:
        """The host waits. Raises what the device could not do until then."""
        ...


class Stream(Protocol):
    """A queue of the device, as torch.cuda.Stream."""

    def record_event(self) -> Any:
        """An `Event`, reached when all is done that was queued here before."""
        ...

    def wait_event(self, event: Any) -> None:
        """What is queued here from now on waits for the event; the host does not."""
        ...


class Card(Protocol):
    def stream(self) -> Any:
        """A new `Stream`."""
        ...

    def computing(self) -> Any:
        """The `Stream` on which this thread computes."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Where the next three queue their work; elsewhere that is `computing`."""
        ...

    def host(self, count: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor: ...

    def sent(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy on the card, which is there when the stream gets so far."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Its memory is not given to others before the stream has done what is queued there now."""
        ...


class CudaCard:
    """A `Card` of torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def host(self, count: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=pinned)

    def sent(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(self._device, non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


# ---------------------------------------------------------------------------------------------------------- to the card


class Uploads(Protocol):
    """`room`, which is written to, then `send` or `send_into`; and again."""

    def room(self, count: int) -> NDArray[np.int32]:
        """Where the next batch's numbers are to be written, before anything is sent."""
        ...

    def send(self) -> torch.Tensor:
        """What was written, on the device, for whatever this thread queues there from now on."""
        ...

    def send_into(self, target: torch.Tensor) -> None:
        """The same, written over a tensor when all that was queued before has read it."""
        ...


class HostUploads:
    """Where the device is the host: the numbers themselves."""

    def room(self, count: int) -> NDArray[np.int32]:
        self._numbers = np.empty(count, dtype=np.int32)
        return self._numbers

    def send(self) -> torch.Tensor:
        return torch.from_numpy(self._numbers)

    def send_into(self, target: torch.Tensor) -> None:
        target.copy_(torch.from_numpy(self._numbers))


@dataclass(slots=True)
class _Outgoing:
    buffer: torch.Tensor
    sent: Any = None
    """The `Event` after which the buffer may be written to again."""


class CardUploads:
    """On a stream of its own, so that a batch's numbers are there before the one before it is done. Not thread-safe."""

    def __init__(self, card: Card, *, pinned: bool = True, slots: int = SLOTS) -> None:
        self._card = card
        self._pinned = pinned
        self._stream = card.stream()
        self._slots = [_Outgoing(card.host(0, torch.int32, pinned=pinned)) for _ in range(slots)]
        self._turn = 0
        self._count = 0

    def room(self, count: int) -> NDArray[np.int32]:
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        if slot.sent is not None:
            slot.sent.synchronize()
            slot.sent = None
        if len(slot.buffer) < count:
            slot.buffer = self._card.host(GROWTH * count, torch.int32, pinned=self._pinned)
        self._count = count
        room: NDArray[np.int32] = slot.buffer[:count].numpy()
        return room

    def send(self) -> torch.Tensor:
        slot, card = self._slots[self._turn], self._card
        with card.on(self._stream):
            found = card.sent(slot.buffer[: self._count])
        slot.sent = self._stream.record_event()
        computing = card.computing()
        computing.wait_event(slot.sent)
        card.keep_for(found, computing)  # it belongs to the other stream, which would take it back as soon as we let go
        return found

    def send_into(self, target: torch.Tensor) -> None:
        slot = self._slots[self._turn]
        self._card.copy(target, slot.buffer[: self._count])
        slot.sent = self._card.computing().record_event()


def uploads_for(device: torch.device, *, pinned: bool = True) -> Uploads:
    return HostUploads() if device.type == "cpu" else CardUploads(CudaCard(device), pinned=pinned)


# ------------------------------------------------------------------------------------------------------------- and back


class _Arriving:
    """A batch's vectors on their way into a buffer. They are read out by whoever asks first: the caller, or who needs
    the buffer again."""

    def __init__(self, buffer: torch.Tensor, source: torch.Tensor, done: Any) -> None:
        self._buffer: torch.Tensor | None = buffer
        self._source: torch.Tensor | None = source
        """Not let go before it was copied, whatever the allocator knows."""
        self._done = done
        self._lock = threading.Lock()
        self._vectors: Vectors | None = None
        self._error: Exception | None = None

    def read(self) -> None:
        with self._lock:
            if self._buffer is None:
                return
            try:
                self._done.synchronize()
                self._vectors = self._buffer.numpy().copy()
            except Exception as error:
                self._error = error
            self._buffer = self._source = None

    def result(self) -> Vectors:
        self.read()
        if self._error is not None:
            raise self._error
        assert self._vectors is not None
        return self._vectors


@dataclass(slots=True)
class _Incoming:
    buffer: torch.Tensor
    arriving: _Arriving | None = None


class CardDownloads:
    """Vectors from the card into pinned memory, on a stream of its own beside the next batch."""

    def __init__(self, card: Card, *, slots: int = SLOTS) -> None:
        self._card = card
        self._stream = card.stream()
        self._slots = [_Incoming(card.host(0, torch.float32, pinned=True)) for _ in range(slots)]
        self._turn = 0

    def fetch(self, found: torch.Tensor) -> Pending:
        """Of what this thread has queued to be computed: float32 (n, dimension). Not from two threads at once."""
        self._turn = (self._turn + 1) % len(self._slots)
        slot, card = self._slots[self._turn], self._card
        if slot.arriving is not None:
            slot.arriving.read()
        if len(slot.buffer) < found.numel():
            slot.buffer = card.host(GROWTH * found.numel(), torch.float32, pinned=True)
        target = slot.buffer[: found.numel()].view(found.shape)
        self._stream.wait_event(card.computing().record_event())
        with card.on(self._stream):
            card.copy(target, found)
        card.keep_for(found, self._stream)
        slot.arriving = _Arriving(target, found, self._stream.record_event())
        return slot.arriving


class _Late:
    """Vectors that stay on the card until somebody asks: a copy to memory that is not pinned keeps the host waiting."""

    def __init__(self, card: Card, stream: Any, found: torch.Tensor) -> None:
        self._card = card
        self._stream = stream
        self._found = found
        self._computed = card.computing().record_event()

    def result(self) -> Vectors:
        target = self._card.host(self._found.numel(), torch.float32, pinned=False).view(self._found.shape)
        self._stream.wait_event(self._computed)
        with self._card.on(self._stream):
            self._card.copy(target, self._found)
        self._stream.record_event().synchronize()
        vectors: Vectors = target.numpy()
        return vectors


class PageableDownloads:
    """Without pinned memory: behind its own batch, but not behind the next one."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._stream = card.stream()

    def fetch(self, found: torch.Tensor) -> Pending:
        return _Late(self._card, self._stream, found)


Downloads = CardDownloads | PageableDownloads


def downloads_for(device: torch.device, *, pinned: bool = True) -> Downloads:
    card = CudaCard(device)
    return CardDownloads(card) if pinned else PageableDownloads(card)
