"""The stages of a run one behind the other: pages are read ahead, documents embedded and applied in the order in which
they came. Knows what a page and a piece of work are, not what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from connector.apply import DocumentWriter, Written
from connector.changes.feed import Batch
from connector.model import ChangeSet, Document


@dataclass(frozen=True, slots=True)
class Work:
    """What goes to the store together: `extra` first, then `documents`, then `closing` (the checkpoint). Once all of
    that is stored, and everything put before it, each of `done` is called."""

    documents: Sequence[Document]
    extra: ChangeSet
    closing: ChangeSet | None = None
    done: Sequence[Callable[[], None]] = field(default=())


class Pipeline:
    """Takes work in order and writes it in order. Not thread-safe: one thread puts."""

    def __init__(self, writer: DocumentWriter, count: Callable[[Written], None]) -> None:
        """`count` is told of everything that was written, in the thread that puts."""
        self._writer = writer
        self._count = count

    def put(self, work: Work) -> None:
        """Raises what went wrong with this or an earlier piece of work; nothing that was put after that is written."""
        prepared = self._writer.prepare(work.documents)
        self._count(self._writer.apply(prepared, work.extra, work.closing))
        for done in work.done:
            done()

    def finish(self) -> None:
        """Until everything that was put is stored. Raises as `put`."""

    def close(self) -> None:
        """End the threads, whatever is still waiting."""


def read_ahead(pages: Iterable[Batch]) -> Iterator[Batch]:
    """The same pages, the next one read while this one is worked on."""
    return iter(pages)
