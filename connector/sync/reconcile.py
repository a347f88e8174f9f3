"""One run over what a feed gives: what the source says should be there against what the store holds. A crash at any
instruction is healed by the next run. Knows no SQL, no engine, no clock but the source's and the store's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import compress
from sys import getsizeof
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector import failpoints
from connector.document.document import Renderer, document_id, quarantine_id
from connector.errors import RowRejected, SchemaChanged, UnknownTable
from connector.model import ChangeSet, Checkpoint, CollectionSpec, Document, Lease, QuarantinedRow, Row, Table
from connector.sync import schema
from connector.sync.apply import DocumentWriter, Target, Written
from connector.sync.clock import StageClock
from connector.sync.difference import Difference, StoredIndex
from connector.sync.feeds.feed import Batch, Feed, Load
from connector.sync.pipeline import Pipeline, Work, read_ahead
from connector.sync.run import Ends, SyncOptions, SyncReport, Watch

FREE_DELETES = 10
"""So many rows may lose their vectors, because they turned blank or in a repair, whatever their share."""
WINDOW_BYTES = 8 << 20
"""Of texts that are embedded together, however few they are."""


@dataclass(frozen=True, slots=True)
class Before:
    """What was known when the run began: the checkpoint it builds on, the types of the columns in use, and the source's
    time."""

    checkpoint: Checkpoint
    columns: Mapping[str, str]
    began: datetime


class Reconciler:
    """One pass over a feed under one lease."""

    def __init__(self, ends: Ends, renderer: Renderer, lease: Lease, options: SyncOptions, watch: Watch) -> None:
        self._ends = ends
        self._renderer = renderer
        self._lease = lease
        self._options = options
        self._watch = watch
        self._clock = StageClock(watch.observer)
        self._writer = DocumentWriter(Target(ends.store, lease), ends.embedder, renderer, self._clock)
        self._pipeline = Pipeline(self._writer, self._count)
        self._report = SyncReport(lease.collection, stages=self._clock.seconds)
        self._pending: dict[str, Document] = {}
        self._pending_bytes = 0
        self._extra = ChangeSet()
        self._mark: Mapping[str, Any] | None = None
        self._done: list[Callable[[], None]] = []
        self._moved: dict[str, bytes | None] = {}
        """What this run has changed already, by id, when the store is asked for one batch at a time: a digest of what
        is stored since, or will be; None: nothing."""
        self._emptied = 0
        self._blank: set[int] = set()
        """Positions of stored rows that came blank."""
        self._left_alone = 0

    def __call__(self, feed: Feed, before: Before) -> SyncReport:
        start = time.perf_counter()
        self._feed, self._before = feed, before
        self._report.complete = feed.complete
        known = before.checkpoint.rows_read - before.checkpoint.empty
        self._limit = self._options.max_deletes * max(known, 0)
        self._quarantined = {row.id: row for row in self._ends.store.quarantine(self._lease.collection)}
        self._whole = StoredIndex(self._ends.store.stored(self._lease.collection)) if feed.complete else None
        try:
            self._read(feed)
            self._flush()
            self._pipeline.finish()
            if not self._report.stopped:
                self._finish()
        except Exception:
            # The first error is the one to tell; what was put before it is stored all the same
            with suppress(Exception):
                self._pipeline.finish()
            raise
        finally:
            self._pipeline.close()
        return self._timed(time.perf_counter() - start)

    def _read(self, feed: Feed) -> None:
        total = feed.total()
        with read_ahead(feed, self._clock) as batches:
            for batch in batches:
                failpoints.reach("after_read")
                self._pipeline.check()
                self._batch(batch)
                failpoints.reach("after_render")
                if self._collected():
                    self._flush()
                self._watch.progress(self._report.read, total)
                if self._watch.stop():
                    self._report.stopped = True
                    return

    def _collected(self) -> bool:
        """Enough for a piece of work?"""
        rows = len(self._pending) + _size(self._extra)
        return rows >= self._options.window or self._pending_bytes >= WINDOW_BYTES

    # -------------------------------------------------------------------------------------- rows that are there

    def _batch(self, batch: Batch) -> None:
        self._report.read += len(batch.rows)
        with self._clock("render", len(batch.rows)):
            rows = self._by_id(batch.rows)
            index = self._index([*rows, *map(quarantine_id, batch.gone)])
            positions = index.positions(list(rows))
            index.mark_seen(positions)
            changed = self._changed(rows, index, positions)
        if batch.load is None:
            self._report.loaded += len(batch.rows)
        elif changed:
            changed = self._loaded(changed, batch.load)
        with self._clock("render", len(changed)):
            for document, position in self._documents(changed, index):
                differs = self._sort(document, position, index)
                if differs and batch.late is not None and batch.late(changed[document.id].key):
                    self._report.late_rows += 1
            for key in batch.gone:
                self._gone(quarantine_id(key), index)
        if batch.mark is not None:
            self._mark = batch.mark
        if batch.done is not None:
            self._done.append(batch.done)

    def _index(self, ids: Sequence[str]) -> StoredIndex:
        """The whole store's, or that of what it holds of these documents."""
        if self._whole is not None:
            return self._whole
        return StoredIndex(self._ends.store.stored(self._lease.collection, list(dict.fromkeys(ids))))

    def _by_id(self, rows: Sequence[Row]) -> dict[str, Row]:
        """The last version of a key that came twice. Keys that cannot be ids go to quarantine."""
        found: dict[str, Row] = {}
        for row in rows:
            try:
                id_ = document_id(row.key)
            except RowRejected as error:
                if not self._leave_alone(quarantine_id(row.key), row):
                    self._reject(row, str(error))
                continue
            self._report.superseded += id_ in found
            found[id_] = row
        return found

    def _changed(self, rows: Mapping[str, Row], index: StoredIndex, positions: NDArray[np.int64]) -> dict[str, Row]:
        """Those that were stored from another content; of the others nothing need be rendered."""
        if not self._feed.trusts_tokens:
            same = np.zeros(len(rows), dtype=np.bool_)
        else:
            same = index.same_rows(positions, self._renderer.row_digests(rows.values()))
        if not (self._moved or self._pending or self._quarantined):  # as in most runs: none needs a second look
            self._report.unchanged += int(same.sum())
            return dict(compress(rows.items(), ~same)) if not same.all() else {}
        changed: dict[str, Row] = {}
        for (id_, row), position, unchanged in zip(rows.items(), positions.tolist(), same.tolist(), strict=True):
            if id_ in self._moved or id_ in self._pending:
                changed[id_] = row
            elif unchanged:
                self._report.unchanged += 1
                self._release(id_)
            elif position >= 0 or not self._leave_alone(id_, row):
                changed[id_] = row
        return changed

    def _leave_alone(self, id_: str, row: Row) -> bool:
        """Whether it failed too often with this content to be tried again. It stays in quarantine as it is."""
        entry = self._quarantined.get(id_) if self._quarantined else None
        if entry is None or not entry.given_up(self._options.max_attempts):
            return False
        if entry.digest != self._renderer.row_digest(row):
            return False
        del self._quarantined[id_]
        self._report.quarantined += 1
        self._left_alone += 1
        return True

    def _loaded(self, rows: Mapping[str, Row], load: Load) -> dict[str, Row]:
        """The rows behind keys and tokens. One that is gone meanwhile counts as superseded."""
        with self._clock("read", len(rows)):
            found = load([row.key for row in rows.values()])
        loaded = {id_: row for row in found if (id_ := document_id(row.key)) in rows}
        self._report.superseded += len(rows) - len(loaded)
        self._report.loaded += len(loaded)
        return loaded

    def _documents(self, rows: Mapping[str, Row], index: StoredIndex) -> Iterator[tuple[Document, int]]:
        """Rendered, with their positions. Rows that cannot be rendered go to quarantine."""
        positions = index.positions(list(rows)).tolist()
        for row, position in zip(rows.values(), positions, strict=True):
            try:
                yield self._renderer.document(row), position
            except RowRejected as error:
                self._reject(row, str(error))

    def _sort(self, document: Document, position: int, index: StoredIndex) -> bool:
        """True where the store holds something else."""
        was_pending = self._superseded(document.id)
        if document.empty:
            self._empty(document.id, position, index, was_pending)
            return position >= 0
        difference = self._difference(document, position, index)
        match difference:
            case Difference.SAME | Difference.ROW:
                self._report.unchanged += 1
                if difference is Difference.ROW:
                    self._extra.metadata_only += index.metadata_chunks(document, position)
                self._release(document.id)
            case Difference.METADATA:
                self._report.upserted += 1
                self._extra.metadata_only += index.metadata_chunks(document, position)
                self._move(document.id, document)
                self._release(document.id)
            case Difference.NEW | Difference.CHANGED:
                self._quarantined.pop(document.id, None)  # released once written; until then its attempts count on
                self._pending[document.id] = document
                self._pending_bytes += getsizeof(document.text)
        return difference not in (Difference.SAME, Difference.ROW)

    def _superseded(self, id_: str) -> bool:
        """What was read of it before, and is not on its way yet, does not count any more."""
        was_pending = self._pending.pop(id_, None) is not None
        self._report.superseded += was_pending
        return was_pending

    def _empty(self, id_: str, position: int, index: StoredIndex, was_pending: bool) -> None:
        """Of an empty row nothing is kept."""
        self._report.empty += 1
        if self._whole is not None:
            if position >= 0:
                self._blank.add(position)
                index.mark_unseen(position)  # removed at the end, where the brake is
        elif self._stored(id_, position):
            self._emptied += 1
            if self._may_delete(self._emptied, FREE_DELETES):
                self._extra.deleted.append(id_)
                self._move(id_, None)
        self._release(id_, was_pending)

    def _gone(self, id_: str, index: StoredIndex) -> None:
        """The feed says that the source no longer has it."""
        was_pending = self._superseded(id_)
        if self._stored(id_, int(index.positions([id_])[0])):
            self._report.to_delete += 1
            if self._may_delete(self._report.deleted + 1, 0):
                self._extra.deleted.append(id_)
                self._report.deleted += 1
                self._move(id_, None)
        self._release(id_, was_pending)

    def _may_delete(self, count: int, free: int) -> bool:
        """The brake of a run that does not know all rows: what is too much pauses it, and the next run, which compares
        everything, judges by the true numbers."""
        if self._report.paused is None and count > max(free, self._limit):
            self._limit = self._options.max_deletes * self._stored_rows()
            if count > max(free, self._limit):
                self._report.paused = "max_deletes"
        return self._report.paused is None

    def _stored_rows(self) -> int:
        """Counting them costs the store a pass, so that it is only done when the number of the last comparison is too
        small for what is to be deleted."""
        status = self._ends.store.status(self._lease.collection)
        return 0 if status is None else status.rows

    def _difference(self, document: Document, position: int, index: StoredIndex) -> Difference:
        if document.id not in self._moved:
            return index.compare(document, position)
        return Difference.SAME if self._moved[document.id] == _content(document) else Difference.CHANGED

    def _stored(self, id_: str, position: int) -> bool:
        return self._moved[id_] is not None if id_ in self._moved else position >= 0

    def _move(self, id_: str, document: Document | None) -> None:
        if self._whole is None:
            self._moved[id_] = None if document is None else _content(document)

    def _release(self, id_: str, was_pending: bool = False) -> None:
        """`was_pending`: it was to be released once it was written, so that nobody knows any more if it is there."""
        if self._quarantined.pop(id_, None) is not None or was_pending:
            self._extra.released.append(id_)

    def _reject(self, row: Row, reason: str) -> None:
        id_ = quarantine_id(row.key)
        self._report.quarantined += 1
        self._superseded(id_)
        self._quarantined.pop(id_, None)
        if self._whole is not None:
            self._whole.mark_seen(self._whole.positions([id_]))
        self._extra.quarantined.append(QuarantinedRow(id_, "render", reason, digest=self._renderer.row_digest(row)))
        self._extra.deleted.append(id_)
        self._move(id_, None)

    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = list(self._pending.values()), {}, 0
        extra, self._extra = self._extra, ChangeSet()
        mark, self._mark = self._mark, None
        done, self._done = self._done, []
        if mark is None and self._report.paused:  # before entries of a log go, the checkpoint says that all is compared
            mark = self._before.checkpoint.mark
        closing = None if mark is None else ChangeSet(checkpoint=self._checkpoint(mark), partial=True)
        if done and not (pending or extra or closing):  # a write that says nothing but that the lease is still ours
            closing = ChangeSet()
        for document in pending:
            self._move(document.id, document)
        if pending or extra or closing is not None:
            self._pipeline.put(Work(pending, extra, closing, done))

    def _count(self, written: Written) -> None:
        report = self._report
        report.upserted += len(written.upserted) - written.undone
        report.quarantined += len(written.quarantined)
        report.embedded_texts += written.embedded_texts
        report.reused_texts += written.reused_texts
        report.tokens += written.tokens

    # ---------------------------------------------------------------------------------------- rows that are gone

    def _finish(self) -> None:
        """Only after a feed that came to its end: delete what the source no longer has, and move the checkpoint."""
        self._check_table()
        released: list[str] = []
        if self._whole is not None:
            self._delete_unseen(self._whole)
            released = sorted(self._quarantined)
        if self._left_alone:
            self._report.notes.append(
                f"{self._left_alone} rows were skipped: they failed {self._options.max_attempts} times unchanged. "
                f"Correct them in the source, or retry them with `owl-sap quarantine retry {self._lease.collection}`"
            )
        failpoints.reach("before_checkpoint")
        changes = ChangeSet(released=released, checkpoint=self._checkpoint(self._feed.mark()))
        with self._clock("apply"):
            self._ends.store.apply(self._lease, changes)
        failpoints.reach("after_checkpoint")

    def _check_table(self) -> None:
        """Raises SchemaChanged where the table is another one by now than the one that was read."""
        query, columns = self._renderer.query, self._before.columns
        try:
            now = schema.used(self._ends.source.describe(query.table), columns)
        except UnknownTable as error:
            raise SchemaChanged(f"{query.table} went away while it was read: {error}") from None
        other = [name for name, kind in columns.items() if now.get(name) != kind]
        if other:
            raise SchemaChanged(f"{query.table} changed while it was read: {', '.join(other)} is not what it was")

    def _checkpoint(self, mark: Mapping[str, Any] | None) -> Checkpoint:
        report, old = self._report, self._before.checkpoint
        complete = self._feed.complete and not report.stopped
        last_full = self._before.began if complete else old.last_full
        return Checkpoint(
            rows_read=report.read if complete else old.rows_read,
            empty=report.empty if complete else old.empty,
            key=self._renderer.key,
            source=str(self._renderer.query.table),
            columns=self._before.columns,
            last_full=None if report.paused else last_full,  # what was held back is looked at again by the next run
            mark=mark,
        )

    def _delete_unseen(self, index: StoredIndex) -> None:
        unseen = int((~index.seen).sum())
        limit = self._options.max_deletes * len(index)
        emptied = sum(not index.seen[position] for position in self._blank)
        self._report.to_delete = unseen - emptied
        if self._report.to_delete > limit or emptied > max(FREE_DELETES, limit):
            self._report.paused = "max_deletes"
            return
        if not unseen:
            return
        for ids in _paged(self._unseen_ids(index), self._options.page_rows):
            self._writer.remove(ids)
            failpoints.reach("mid_delete")
        self._report.deleted += self._report.to_delete

    def _unseen_ids(self, index: StoredIndex) -> list[str]:
        """The index holds digests only, so the ids come from the store once more."""
        unseen: dict[str, None] = {}
        for page in self._ends.store.stored(self._lease.collection):
            unseen.update(dict.fromkeys(index.unseen([chunk.id for chunk in page])))
        return list(unseen)

    def _timed(self, seconds: float) -> SyncReport:
        self._report.seconds = round(seconds, 3)
        self._report.rows_per_second = round(self._report.read / seconds, 1) if seconds else 0.0
        self._report.stages = {name: round(busy, 3) for name, busy in self._clock.seconds.items()}
        return self._report


def types_in_use(renderer: Renderer, table: Table, spec: CollectionSpec) -> dict[str, str]:
    query = renderer.query
    watermark = [name for name in (spec.changes.column,) if name is not None]
    return schema.used(table, dict.fromkeys((*query.key, *query.columns, *watermark)))


def _content(document: Document) -> bytes:
    return document.text_digest + document.meta_digest + document.row_digest


def _size(changes: ChangeSet) -> int:
    return len(changes.metadata_only) + len(changes.deleted) + len(changes.quarantined) + len(changes.released)


def _paged(ids: Sequence[str], size: int) -> Iterable[list[str]]:
    return (list(ids[start : start + size]) for start in range(0, len(ids), size))
