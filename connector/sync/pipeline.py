"""The threads of a run: readers fetch pages ahead; the pipeline embeds and writes work in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from sys import getsizeof
from typing import Generic, TypeVar

from connector.hana.source import size_of_rows
from connector.model import ChangeSet, Document, Query, Row
from connector.protocols import Source
from connector.sync.apply import DocumentWriter, Prepared, Written, entries

T = TypeVar("T")
MAX_BYTES = 32 << 20  # bytes that may wait before a stage; each stage also holds one item
_MAX_WORKS, _MAX_PREPARED = 1, 2  # more would gain nothing and delay a stop, because waiting work is finished first
_OVERHEAD_BYTES = 1000  # per document or chunk, besides text and vector: objects, digests, metadata
_LEAVE_SECONDS = 2.0  # how long to wait for threads when leaving early; a blocked thread is inside a library


class Closed(Exception):
    """The senders have ended, or the receiver has."""


class Channel(Generic[T]):
    """A queue between threads, limited in bytes and items. An item above `max_bytes` waits alone."""

    def __init__(self, max_bytes: int, max_items: int, senders: int = 1) -> None:
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._senders = senders
        self._waiting: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._count = 0  # items that were put
        self._closed = False
        self.error: BaseException | None = None  # the first one
        self._changed = threading.Condition()

    def wait_for(self, count: int) -> None:
        """Wait until `count` items were put. Raises as `put`."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == count or self._given_up())
            if self._given_up():
                raise Closed

    def put(self, item: T, size: int) -> None:
        """Wait for room and add an item of `size` bytes. Raises Closed if the receiver or another sender is gone."""
        with self._changed:
            while not self._given_up():
                fits = len(self._waiting) < self._max_items and self._bytes + size <= self._max_bytes
                if fits or not self._waiting:  # one item may always wait, however large it is
                    self._waiting.append((item, size))
                    self._bytes += size
                    self._count += 1
                    self._changed.notify_all()
                    return
                self._changed.wait()
            raise Closed

    def get(self) -> T:
        """Wait for an item. After the last one, raise a sender's error or Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._given_up() or not self._senders)
            if not self._waiting:
                raise self.error or Closed
            item, size = self._waiting.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return item

    def end(self, error: BaseException | None = None) -> None:
        """End one sender; each sender calls this once. An error also stops the other senders."""
        with self._changed:
            self._senders -= 1
            self.error = self.error or error
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Drop waiting items and stop both sides."""
        with self._changed:
            self._closed = True
            self.error = self.error or error
            self._waiting.clear()
            self._bytes = 0
            self._changed.notify_all()

    def _given_up(self) -> bool:
        return self._closed or self.error is not None


def _start(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)  # a daemon does not delay the end of the process
    thread.start()
    return thread


def _leave(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _LEAVE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def read_ahead(
    streams: Sequence[Iterator[T]],
    size: Callable[[T], int],
    busy: Callable[[float], None] | None = None,
    *,
    max_bytes: int = MAX_BYTES,
) -> Iterator[Iterator[T]]:
    """Give the items of several iterators, each read in its own thread. Items of one iterator keep their order; those
    of different iterators mix as they arrive.

    Reading starts with the first `next`; one item per iterator may wait. An iterator's error is raised after its items.
    `size` returns an item's approximate bytes. `busy` receives the seconds of each read, in the reading thread. Leaving
    the context ends the threads.
    """
    channel: Channel[T] = Channel(max_bytes, len(streams), senders=len(streams))
    threads: list[threading.Thread] = []

    def read(stream: Iterator[T]) -> None:
        try:
            start = time.perf_counter()
            for item in stream:
                if busy is not None:
                    busy(time.perf_counter() - start)
                channel.put(item, size(item))
                start = time.perf_counter()
            channel.end()
        except Closed:
            channel.end()
        except BaseException as error:
            channel.end(error)

    def items() -> Iterator[T]:
        threads.extend(_start(f"read-{number}", partial(read, stream)) for number, stream in enumerate(streams, 1))
        with suppress(Closed):
            while True:
                yield channel.get()

    try:
        yield items()
    finally:
        channel.close()
        _leave(threads)


def pages_ahead(source: Source, query: Query, page_rows: int) -> AbstractContextManager[Iterator[Sequence[Row]]]:
    """Return `source.pages`, read ahead while the caller processes earlier pages."""
    return read_ahead([source.pages(query, page_rows)], size_of_rows)


@dataclass(frozen=True, slots=True)
class Work:
    """Work to write: `extra`, then `documents`, then `closing` (the checkpoint). The writing thread calls each `done`
    once this and all earlier work is stored."""

    documents: Sequence[Document]
    extra: ChangeSet
    closing: ChangeSet | None = None
    done: Sequence[Callable[[], None]] = field(default=())


class Pipeline:
    """Embed up to `windows` pieces of work at a time, and write them in the order of `put`. Not thread-safe.

    The first error of either stage ends the run: nothing put later is written, and `put`, `check` and `finish` raise
    it. Work put before the failing piece is still written if possible.
    """

    def __init__(
        self, writer: DocumentWriter, count: Callable[[Written], None], windows: int = 1, *, max_bytes: int = MAX_BYTES
    ) -> None:
        """`count` receives everything written, in the thread that calls `put`."""
        self._writer = writer
        self._count = count
        self._windows = windows
        self._works: Channel[tuple[int, Work]] = Channel(max_bytes, _MAX_WORKS)  # each with the number put before it
        self._prepared: Channel[tuple[Work, Prepared]] = Channel(max_bytes, _MAX_PREPARED, senders=windows)
        self._written: deque[Written] = deque()
        self._threads: list[threading.Thread] = []
        self._put = 0
        self._ended = False

    def put(self, work: Work) -> None:
        """Wait while the stages are busy. Raises the error of this or earlier work."""
        self.check()
        if not self._threads:
            embed = partial(self._stage, self._embed, self._prepared.end)
            self._threads = [_start(f"sync-embed-{number}", embed) for number in range(1, self._windows + 1)]
            self._threads.append(_start("sync-apply", partial(self._stage, self._apply, self._prepared.close)))
        try:
            texts = sum(getsizeof(document.text) for document in work.documents)
            size = texts + _OVERHEAD_BYTES * (len(work.documents) + entries(work.extra))
            self._works.put((self._put, work), size)
        except Closed:
            self.check()
            raise
        self._put += 1

    def check(self) -> None:
        """Count what was written since the last call. Raises as `put`."""
        while self._written:
            self._count(self._written.popleft())
        if self._prepared.error is not None:
            raise self._prepared.error

    def finish(self) -> None:
        """Wait until everything that was put is stored. Raises as `put`."""
        if not self._ended:
            self._ended = True
            self._works.end()
        for thread in self._threads:
            thread.join()
        self.check()

    def close(self) -> None:
        """Drop waiting work and end the threads. Safe to call twice."""
        self._works.close()
        self._prepared.close()
        _leave(self._threads)

    def _stage(self, step: Callable[[], None], leave: Callable[[BaseException | None], None]) -> None:
        """Run the step until its queue ends."""
        failure = None
        try:
            while True:
                step()
        except Closed:
            pass
        except BaseException as error:
            failure = error
        finally:
            leave(failure)
            self._works.close()

    def _embed(self) -> None:
        number, work = self._works.get()
        try:
            prepared = self._writer.prepare(work.documents)
        finally:
            self._prepared.wait_for(number)  # results and errors in the order of `put`
        size = _OVERHEAD_BYTES * entries(work.extra)
        for piece in prepared[0]:
            size += 0 if piece.vectors is None else piece.vectors.nbytes
            size += sum([_OVERHEAD_BYTES + getsizeof(chunk.text) for chunk in piece.chunks])
        self._prepared.put((work, prepared), size)

    def _apply(self) -> None:
        work, prepared = self._prepared.get()
        self._written.append(self._writer.apply(prepared, work.extra, work.closing))
        for done in work.done:
            done()
