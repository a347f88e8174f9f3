"""Copies to and from a card while it computes: pinned host buffers used in turns, a stream for each direction, and
events that show when a buffer is free again.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import Running, Vectors
from .process import device_errors_mapped

SLOTS = 3  # buffers for each direction: one for the card, one waiting, one for the host
GROWTH = 2  # a buffer that is too small grows to twice the size needed: pinning is slow


class CudaCard:
    """The functions of torch.cuda that uploads and downloads use; tests simulate it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def computing(self) -> Any:
        """Return the stream on which this thread computes."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Use `stream` for the copies within the context."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.device(self._device):  # pinning opens a context on the thread's current card, else cuda:0
            return torch.empty(count, dtype=dtype, pin_memory=True)

    def sent(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(self._device, non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the tensor's memory until the stream has finished its current work."""
        tensor.record_stream(stream)


class HostUploads:
    """Uploads to the CPU; `send` copies nothing."""

    def room(self, count: int) -> NDArray[np.int32]:
        """Return the buffer for the next batch's numbers; fill it, then send."""
        self._numbers = np.empty(count, dtype=np.int32)
        return self._numbers

    def send(self) -> torch.Tensor:
        """Return the numbers on the device, for work that this thread queues from now on."""
        return torch.from_numpy(self._numbers)

    def send_into(self, target: torch.Tensor) -> None:
        """Overwrite a tensor with the numbers, after all work queued before."""
        target.copy_(torch.from_numpy(self._numbers))


class CardUploads:
    """Uploads on a separate stream, while the previous batch computes. Not thread-safe."""

    def __init__(self, card: CudaCard, *, slots: int = SLOTS) -> None:
        self._card = card
        self._stream = card.stream()
        self._buffers = [card.host(0, torch.int32) for _ in range(slots)]
        self._sent: list[Any] = [None] * slots  # events after which the buffers may be overwritten
        self._turn = 0
        self._count = 0

    def room(self, count: int) -> NDArray[np.int32]:
        self._turn = turn = (self._turn + 1) % len(self._buffers)
        if self._sent[turn] is not None:
            self._sent[turn].synchronize()
        if len(self._buffers[turn]) < count:
            self._buffers[turn] = self._card.host(GROWTH * count, torch.int32)
        self._count = count
        room: NDArray[np.int32] = self._buffers[turn][:count].numpy()
        return room

    def send(self) -> torch.Tensor:
        card, computing = self._card, self._card.computing()
        with card.on(self._stream):
            found = card.sent(self._buffers[self._turn][: self._count])
        self._sent[self._turn] = sent = self._stream.record_event()
        computing.wait_event(sent)
        card.keep_for(found, computing)  # else the upload stream, which owns it, could reuse it too early
        return found

    def send_into(self, target: torch.Tensor) -> None:
        self._card.copy(target, self._buffers[self._turn][: self._count])
        self._sent[self._turn] = self._card.computing().record_event()


Uploads = HostUploads | CardUploads


def uploads_for(device: torch.device) -> Uploads:
    return HostUploads() if device.type == "cpu" else CardUploads(CudaCard(device))


class Downloads:
    """Copies vectors from the card to pinned memory on a separate stream, while the next batch computes."""

    def __init__(self, card: CudaCard, *, slots: int = SLOTS) -> None:
        self._card = card
        self._stream = card.stream()
        self._buffers = [card.host(0, torch.float32) for _ in range(slots)]
        self._reads: list[Running | None] = [None] * slots
        self._turn = 0

    def fetch(self, found: torch.Tensor) -> Running:
        """Start to fetch a float32 tensor (n, dimension) that this thread has queued. Not thread-safe. The result may
        be called again; it copies the numbers out of the buffer at its first call, or before the buffer is reused."""
        self._turn = turn = (self._turn + 1) % len(self._buffers)
        card, before = self._card, self._reads[turn]
        if before is not None:
            with contextlib.suppress(Exception):  # raised again when that batch is read
                before()
        if len(self._buffers[turn]) < found.numel():
            self._buffers[turn] = card.host(GROWTH * found.numel(), torch.float32)
        target = self._buffers[turn][: found.numel()].view(found.shape)
        self._stream.wait_event(card.computing().record_event())
        with card.on(self._stream):
            card.copy(target, found)
        # Both are kept until the host has seen the copy end. After `keep_for` torch would record an event when the
        # vectors are freed; if the next batch has failed by then, that aborts the process.
        kept = [(target, found, self._stream.record_event())]
        lock, answer, device = threading.Lock(), Future[Vectors](), found.device

        def read() -> Vectors:
            with lock:
                if kept:
                    buffer, _, done = kept.pop()
                    try:
                        with torch.inference_mode(), device_errors_mapped(device):  # errors that the card reports late
                            done.synchronize()
                            answer.set_result(buffer.numpy().copy())
                    except Exception as error:
                        answer.set_exception(error)
            return answer.result()

        self._reads[turn] = read
        return read
