"""Sync is reconciliation: what the source says should be there against what the store holds; the difference is
applied. A crash at any instruction is healed by the next run. Knows no SQL, no engine, no clock but the store's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from connector.apply import STAGES, DocumentWriter, StageClock, Target, Written
from connector.difference import Difference, StoredIndex
from connector.document import Renderer, quarantine_id
from connector.errors import DatabaseError, LeaseLost, RowRejected
from connector.model import (
    ChangeSet,
    Checkpoint,
    CollectionSpec,
    Document,
    Embedder,
    Lease,
    Observer,
    QuarantinedRow,
    Row,
    Source,
    VectorStore,
)

_LEASE_SLICE = 1.0
"""Seconds between questions whether to stop, while another worker holds the lease."""

Stop = Callable[[], bool]
"""Asked between pages; True: end early, keeping what is done."""


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Watch:
    """Who looks on at a run, and who may end it early."""

    observer: Observer | None = None
    stop: Stop = never

    def event(self, name: str) -> None:
        if self.observer is not None:
            self.observer.event(name)

    def progress(self, done: int, total: int) -> None:
        if self.observer is not None:
            self.observer.progress(done, max(done, total))


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """`max_deletes`: the largest share of the stored documents that one run may delete. `lease_wait` in seconds.

    `window` is how many changed documents are collected before they are embedded together: a large window gives the
    engine batches of like lengths. `full` is accepted for every change method; the full comparison is one already.
    """

    page_rows: int = 1000
    max_deletes: float = 0.2
    full: bool = False
    owner: str = "sync"
    lease_wait: float = 60.0
    window: int = 1000


@dataclass(slots=True)
class SyncReport:
    """Counts in source rows: `read = upserted + unchanged + empty + quarantined + superseded`; `deleted` beside it.

    `paused` is None or a reason (`max_deletes`): upserts were applied, deletions were not. `stopped`: the run was asked
    to end early, so nothing was deleted and the checkpoint stayed. `stages`: seconds busy.
    """

    collection: str
    read: int = 0
    upserted: int = 0
    unchanged: int = 0
    empty: int = 0
    quarantined: int = 0
    superseded: int = 0
    deleted: int = 0
    paused: str | None = None
    stopped: bool = False
    to_delete: int = 0
    embedded_texts: int = 0
    reused_texts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rows_per_second: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    notes: list[str] = field(default_factory=list)
    """What a person should know and no count says."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a sync and what stands between them."""

    source: Source
    store: VectorStore
    embedder: Embedder


def sync(
    spec: CollectionSpec,
    ends: Ends,
    options: SyncOptions | None = None,
    observer: Observer | None = None,
    stop: Stop = never,
) -> SyncReport:
    """Bring the collection up to date and say what was done.

    Raises the tree of `errors.py`: configuration errors before anything is written; a lost connection after what was
    already applied, which the next run builds on. `stop` is asked once a page; when it says True the work in hand is
    finished and the report says `stopped`.
    """
    options = options or SyncOptions()
    table = ends.source.describe(spec.source)
    renderer = Renderer(spec, table, ends.embedder)
    ends.store.open(spec.name, ends.embedder)
    with ExitStack() as held:
        lease = own(held, ends.store, spec.name, options, Watch(observer, stop))
        if lease is None:
            return SyncReport(spec.name, stopped=True)
        ends.store.open(spec.name, ends.embedder)  # while we waited, another worker may have given it another model
        run = _Run(ends, renderer, lease, options, observer)
        report = run(stop)
    if report.upserted:
        _optimise(ends.store, report)
    return report


def own(held: ExitStack, store: VectorStore, collection: str, options: SyncOptions, watch: Watch) -> Lease | None:
    """The collection's lease, kept until `held` ends; None when asked to stop while another worker had it. The observer
    gets the events `waiting` and `owned` when there was a wait."""
    deadline = time.monotonic() + options.lease_wait
    waiting = False
    while True:
        left = deadline - time.monotonic()
        try:
            lease = held.enter_context(store.lease(collection, options.owner, min(max(left, 0.0), _LEASE_SLICE)))
        except LeaseLost:
            if watch.stop():
                return None
            if left <= _LEASE_SLICE:
                raise
            if not waiting:
                waiting = True
                watch.event("waiting")
            continue
        if waiting:
            watch.event("owned")
        return lease


def _optimise(store: VectorStore, report: SyncReport) -> None:
    """An index only makes searches faster: when it cannot be built (time, privileges), the data are in all the same."""
    try:
        store.optimise(report.collection)
    except DatabaseError as error:
        report.notes.append(f"the rows are stored, but the search index was not built: {error}")


class _Run:
    """One pass over the source under one lease."""

    def __init__(
        self, ends: Ends, renderer: Renderer, lease: Lease, options: SyncOptions, observer: Observer | None
    ) -> None:
        self._ends = ends
        self._renderer = renderer
        self._lease = lease
        self._options = options
        self._observer = observer
        self._clock = StageClock(observer)
        self._writer = DocumentWriter(Target(ends.store, lease), ends.embedder, renderer, self._clock)
        self._report = SyncReport(lease.collection, stages=self._clock.seconds)
        self._pending: dict[str, Document] = {}
        self._extra = ChangeSet()

    def __call__(self, stop: Stop) -> SyncReport:
        start = time.perf_counter()
        self._quarantined = {row.id for row in self._ends.store.quarantine(self._lease.collection)}
        self._index = StoredIndex(self._ends.store.stored(self._lease.collection))
        self._stored_before = len(self._index)
        total = self._ends.source.count(self._renderer.query)
        for page in self._pages():
            self._page(page)
            if len(self._pending) + _size(self._extra) >= self._options.window:
                self._flush()
            if self._observer is not None:
                self._observer.progress(self._report.read, max(total, self._report.read))
            if stop():
                self._report.stopped = True
                break
        self._flush()
        if not self._report.stopped:
            self._finish()
        return self._timed(time.perf_counter() - start)

    def _pages(self) -> Iterator[list[Row]]:
        pages = iter(self._ends.source.pages(self._renderer.query, self._options.page_rows))
        while True:
            start = time.perf_counter()
            page = next(pages, None)
            self._clock.add("read", time.perf_counter() - start, len(page or ()))
            if page is None:
                return
            yield page

    # -------------------------------------------------------------------------------------- rows that are there

    def _page(self, rows: Sequence[Row]) -> None:
        self._report.read += len(rows)
        with self._clock("render", len(rows)):
            documents = self._documents(rows)
            positions = self._index.positions(list(documents))
            self._index.mark_seen(positions)
            for document, position in zip(documents.values(), positions.tolist(), strict=True):
                self._sort(document, position)

    def _documents(self, rows: Sequence[Row]) -> dict[str, Document]:
        """By id, the last version of a key that came twice. Rows that cannot be rendered go to quarantine."""
        documents: dict[str, Document] = {}
        for row in rows:
            try:
                document = self._renderer.document(row)
            except RowRejected as error:
                self._reject(quarantine_id(row.key), str(error))
                continue
            self._report.superseded += document.id in documents
            documents[document.id] = document
        return documents

    def _sort(self, document: Document, position: int) -> None:
        self._report.superseded += self._pending.pop(document.id, None) is not None
        if document.empty:
            self._report.empty += 1
            if position >= 0:
                self._extra.deleted.append(document.id)
            self._release(document.id)
            return
        match self._index.compare(document, position):
            case Difference.SAME:
                self._report.unchanged += 1
                self._release(document.id)
            case Difference.METADATA:
                self._report.upserted += 1
                self._extra.metadata_only += self._index.metadata_chunks(document, position)
                self._release(document.id)
            case Difference.NEW | Difference.CHANGED:
                self._quarantined.discard(document.id)  # released once written; until then its attempts count on
                self._pending[document.id] = document

    def _release(self, id_: str) -> None:
        if id_ in self._quarantined:
            self._quarantined.discard(id_)
            self._extra.released.append(id_)

    def _reject(self, id_: str, reason: str) -> None:
        self._report.quarantined += 1
        self._quarantined.discard(id_)
        self._index.mark_seen(self._index.positions([id_]))
        self._extra.quarantined.append(QuarantinedRow(id_, "render", reason))
        self._extra.deleted.append(id_)

    def _flush(self) -> None:
        pending, self._pending = list(self._pending.values()), {}
        extra, self._extra = self._extra, ChangeSet()
        if pending or extra:
            self._count(self._writer.write(pending, extra))

    def _count(self, written: Written) -> None:
        report = self._report
        report.upserted += len(written.upserted)
        report.quarantined += len(written.quarantined)
        report.embedded_texts += written.embedded_texts
        report.reused_texts += written.reused_texts
        report.tokens += written.tokens

    # ---------------------------------------------------------------------------------------- rows that are gone

    def _finish(self) -> None:
        """Only after a scan that came to its end: delete what the source no longer has, and move the checkpoint."""
        self._report.to_delete = int((~self._index.seen).sum())
        limit = self._options.max_deletes * self._stored_before
        if self._report.to_delete > limit:
            self._report.paused = "max_deletes"
        else:
            self._delete_unseen()
        checkpoint = Checkpoint(rows_read=self._report.read, empty=self._report.empty, key=self._renderer.key)
        changes = ChangeSet(released=sorted(self._quarantined), checkpoint=checkpoint)
        with self._clock("apply"):
            self._ends.store.apply(self._lease, changes)

    def _delete_unseen(self) -> None:
        if not self._report.to_delete:
            return
        for ids in _paged(self._unseen_ids(), self._options.page_rows):
            with self._clock("apply", len(ids)):
                self._ends.store.apply(self._lease, ChangeSet(deleted=ids))
            self._report.deleted += len(ids)

    def _unseen_ids(self) -> list[str]:
        """The index holds digests only, so the ids come from the store once more."""
        unseen: dict[str, None] = {}
        for page in self._ends.store.stored(self._lease.collection):
            unseen.update(dict.fromkeys(self._index.unseen([chunk.id for chunk in page])))
        return list(unseen)

    def _timed(self, seconds: float) -> SyncReport:
        self._report.seconds = round(seconds, 3)
        self._report.rows_per_second = round(self._report.read / seconds, 1) if seconds else 0.0
        self._report.stages = {name: round(busy, 3) for name, busy in self._clock.seconds.items()}
        return self._report


def _size(changes: ChangeSet) -> int:
    return len(changes.metadata_only) + len(changes.deleted) + len(changes.quarantined) + len(changes.released)


def _paged(ids: Sequence[str], size: int) -> Iterable[list[str]]:
    return (list(ids[start : start + size]) for start in range(0, len(ids), size))
