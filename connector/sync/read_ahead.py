"""Iterators read in threads of their own, ahead of whoever works on what they give. Knows nothing of what that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from connector.sync.channel import Channel, Closed, Crew

T = TypeVar("T")
MAX_BYTES = 32 << 20
"""Of what was read and not yet taken; each thread may hold one item more in its hands."""


def _uncounted(seconds: float, item: object) -> None:
    """Nobody asks how long reading took."""


class ReadAhead(Generic[T]):
    """The items of several iterators, each in its order, the iterators mixed as they come. Reading starts with the
    first `next`; one item of each may wait. An iterator's error is raised after what came before it.

    `size`: bytes of an item, roughly. `busy` is told of the seconds that each item took, in the thread that read it. To
    be left through `close` or as a context manager.
    """

    def __init__(
        self,
        streams: Sequence[Iterator[T]],
        size: Callable[[T], int],
        busy: Callable[[float, T], None] = _uncounted,
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._streams = list(streams)
        self._size = size
        self._busy = busy
        self._channel: Channel[T] = Channel(max_bytes, len(self._streams), senders=len(self._streams))
        self._crew = Crew()
        self._started = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._started:
            self._started = True
            for number, stream in enumerate(self._streams, start=1):
                self._crew.start(f"read-{number}", lambda stream=stream: self._read(stream))  # type: ignore[misc]
        try:
            return self._channel.get()
        except Closed:
            raise StopIteration from None

    def _read(self, stream: Iterator[T]) -> None:
        try:
            start = time.perf_counter()
            for item in stream:
                self._busy(time.perf_counter() - start, item)
                self._channel.put(item, self._size(item))
                start = time.perf_counter()
            self._channel.end()
        except Closed:
            self._channel.end()
        except BaseException as error:
            self._channel.end(error)

    def close(self) -> None:
        """End the threads: each after the item in its hands. Safe to call twice."""
        self._channel.close()
        self._crew.leave()

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
