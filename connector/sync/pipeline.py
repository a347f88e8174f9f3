"""The stages of a run, each in a thread of its own: what the caller puts is embedded, then applied, in the order in
which it came. Knows what a piece of work is, not what is in it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import getsizeof

from connector.hana.source import size_of_rows
from connector.model import ChangeSet, Document, Query, Row
from connector.protocols import Source
from connector.sync.apply import DocumentWriter, Prepared, Written
from connector.sync.channel import Channel, Closed, Crew
from connector.sync.clock import StageClock
from connector.sync.feeds.feed import Batch, Divided, Feed
from connector.sync.read_ahead import ReadAhead

MAX_BYTES = 32 << 20
"""Of what may wait before a stage; each stage holds one piece of work more in its hands."""
_WORKS, _PREPARED = 1, 2
"""So many pieces of work may wait. More would gain nothing, and who asks a run to stop waits until they are done."""
_OVERHEAD = 1000
"""Bytes of a document or chunk beside its text and vector: objects, digests, metadata."""


@dataclass(frozen=True, slots=True)
class Work:
    """What goes to the store together: `extra` first, then `documents`, then `closing` (the checkpoint). Once all of
    that is stored, and everything put before it, each of `done` is called, in the thread that writes."""

    documents: Sequence[Document]
    extra: ChangeSet
    closing: ChangeSet | None = None
    done: Sequence[Callable[[], None]] = field(default=())


@dataclass(frozen=True, slots=True)
class _Embedded:
    work: Work
    prepared: Prepared


class Pipeline:
    """Takes work in order and writes it in order, one piece at a time. Not thread-safe: one thread puts.

    The first error of any stage ends the run: nothing of a later piece is written, and whoever puts or finishes gets
    it. Work put before the piece that failed is still written where the stages behind are sound.
    """

    def __init__(self, writer: DocumentWriter, count: Callable[[Written], None], *, max_bytes: int = MAX_BYTES) -> None:
        """`count` is told of everything that was written, in the thread that puts."""
        self._writer = writer
        self._count = count
        self._works: Channel[Work] = Channel(max_bytes, _WORKS)
        self._embedded: Channel[_Embedded] = Channel(max_bytes, _PREPARED)
        self._written: deque[Written] = deque()
        self._crew = Crew()
        self._started = False
        self._ended = False
        self._error: BaseException | None = None
        self._failing = threading.Lock()

    def put(self, work: Work) -> None:
        """Waits while the stages have enough to do. Raises what went wrong with this or an earlier piece of work."""
        self.check()
        if not self._started:
            self._started = True
            self._crew.start("sync-embed", self._embed)
            self._crew.start("sync-apply", self._apply)
        try:
            self._works.put(work, _size_of_work(work))
        except Closed:
            self.check()
            raise

    def check(self) -> None:
        """Count what was written meanwhile. Raises as `put`."""
        while self._written:
            self._count(self._written.popleft())
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Until everything that was put is stored, and the threads have ended. Raises as `put`."""
        if not self._ended:
            self._ended = True
            self._works.end()
        self._crew.join()
        self.check()

    def close(self) -> None:
        """End the threads, each after the piece of work in its hands, whatever is still waiting. Safe to call twice."""
        self._works.close()
        self._embedded.close()
        self._crew.leave()

    def _embed(self) -> None:
        try:
            while True:
                work = self._works.get()
                prepared = self._writer.prepare(work.documents)
                self._embedded.put(_Embedded(work, prepared), _size_of_embedded(work, prepared))
        except Closed:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._works.close()
            self._embedded.end()

    def _apply(self) -> None:
        try:
            while True:
                embedded = self._embedded.get()
                work = embedded.work
                self._written.append(self._writer.apply(embedded.prepared, work.extra, work.closing))
                for done in work.done:
                    done()
        except Closed:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._works.close()
            self._embedded.close()

    def _fail(self, error: BaseException) -> None:
        with self._failing:
            self._error = self._error or error


def read_ahead(feed: Feed, clock: StageClock) -> ReadAhead[Batch]:
    """The batches of a feed, read while those before them are worked on; the clock counts every thread's seconds."""
    streams = feed.streams() if isinstance(feed, Divided) else [feed.batches()]
    return ReadAhead(streams, _size_of_batch, lambda seconds, batch: clock.add("read", seconds, len(batch.rows)))


def pages_ahead(source: Source, query: Query, page_rows: int) -> ReadAhead[list[Row]]:
    """`source.pages`, read while those before them are worked on."""
    return ReadAhead([source.pages(query, page_rows)], size_of_rows)


def _size_of_batch(batch: Batch) -> int:
    return size_of_rows(batch.rows)


def _size_of_work(work: Work) -> int:
    texts = sum(getsizeof(document.text) for document in work.documents)
    return texts + _OVERHEAD * len(work.documents) + _size_of_changes(work.extra)


def _size_of_embedded(work: Work, prepared: Prepared) -> int:
    chunks = [chunk for ready in prepared.ready for chunk in ready.chunks]
    vector = next((vector.nbytes for ready in prepared.ready for vector in ready.vectors), 0)
    texts = sum(getsizeof(chunk.text) for chunk in chunks)
    return texts + (vector + _OVERHEAD) * len(chunks) + _size_of_changes(work.extra)


def _size_of_changes(changes: ChangeSet) -> int:
    lists: Sequence[Sequence[object]] = (
        changes.metadata_only,
        changes.deleted,
        changes.quarantined,
        changes.released,
    )
    return _OVERHEAD * sum(map(len, lists))
