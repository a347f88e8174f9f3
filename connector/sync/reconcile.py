"""Run over a feed: rows become documents, `decide` compares them with the store, the pipeline embeds and writes.

`Run` looks up only the rows of the feed; `FullRun` compares every row with everything stored. The next run repairs the
effects of a crash at any point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from math import inf
from sys import getsizeof

import numpy as np
from numpy.typing import NDArray

from connector import failpoints
from connector.document.document import Renderer, document_id, document_ids, quarantine_id
from connector.errors import RowRejected
from connector.hana.source import size_of_rows
from connector.model import ChangeSet, Checkpoint, Document, Lease, QuarantinedRow, Row, keys_of
from connector.sync import schema
from connector.sync.apply import DocumentWriter, Written, entries
from connector.sync.decide import Action, content_digest, decide, decide_again, rehashed
from connector.sync.feeds.feed import Batch, Feed, Mark
from connector.sync.options import Ends, StageClock, SyncOptions, SyncReport, Watch
from connector.sync.pipeline import Pipeline, Work, read_ahead
from connector.sync.stored_index import StoredIndex

FREE_DELETES = 10  # blank rows that a run, or orphans that a repair, may delete regardless of their share
WINDOW_BYTES = 8 << 20  # limit of the texts embedded together


@dataclass(frozen=True, slots=True)
class Task:
    """One run over `feed` under `lease`. `checkpoint`: of the previous run. `columns`: types of the used columns by
    name. `began`: UTC, by the source's clock."""

    ends: Ends
    renderer: Renderer
    lease: Lease
    options: SyncOptions
    watch: Watch
    feed: Feed
    checkpoint: Checkpoint
    columns: Mapping[str, str]
    began: datetime


def deletion_limit(task: Task) -> float:
    """Return how many rows a run may delete: a share of the rows stored before it. For a run that at its end compares
    all stored rows, also those it added. No limit if none was stored: the run then added every row that is gone."""
    share = task.options.max_deletes
    status = task.ends.store.status(task.lease.collection) if share < 1 else None
    return share * status.rows if status and status.rows else inf


def reconcile(task: Task) -> SyncReport:
    """Make the store match the feed. Raises SchemaChanged if the table changes while it is read."""
    return FullRun(task)() if task.feed.complete else Run(task)()


@dataclass(slots=True)
class _Window:
    """Decisions since the last work was put into the pipeline."""

    documents: dict[str, Document] = field(default_factory=dict)  # to embed, by id
    text_bytes: int = 0
    changes: ChangeSet = field(default_factory=ChangeSet)
    mark: Mark | None = None
    done: list[Callable[[], None]] = field(default_factory=list)


class Run:
    """Compare the rows of the feed with their stored versions. A run above the deletion limit pauses; the next run
    compares everything and decides by exact counts."""

    def __init__(self, task: Task) -> None:
        self._start = time.perf_counter()
        self._task = task
        self._ends, self._lease, self._options = task.ends, task.lease, task.options
        self._renderer, self._feed = task.renderer, task.feed
        self._clock = StageClock()
        self._report = SyncReport(task.lease.collection, complete=task.feed.complete)
        self._writer = DocumentWriter(task.ends, task.lease, task.renderer, self._clock)
        self._pipeline = Pipeline(self._writer, self._count, task.options.windows)
        self._window = _Window()
        # Quarantine entries whose rows this run has not processed yet.
        self._quarantine = {row.id: row for row in task.ends.store.quarantine(task.lease.collection)}
        self._tried: frozenset[str] = frozenset()  # ids in quarantine that an earlier attempt at this run has tried
        self._skipped = 0
        # Content digests written by this run, by id; None for a removed document. Empty in a full run.
        self._written: dict[str, bytes | None] = {}
        kept = task.checkpoint.rows_read - task.checkpoint.empty - len(self._quarantine)
        self._limit = self._options.max_deletes * max(kept, 0)
        self._emptied = 0
        self._removed = 0  # rows that were stored or in quarantine, and are neither now
        self._spared: set[str] = set()  # ids that the limit of deletions kept, which a feed may name again
        self._index: StoredIndex | None = None  # of the whole store; None: look up the documents of each batch

    def __call__(self) -> SyncReport:
        try:
            self._read()
            self._flush()
            self._pipeline.finish()
            if not self._report.stopped:
                self._finish()
        except Exception:
            with suppress(Exception):  # raise the first error; earlier work is still stored
                self._pipeline.finish()
            raise
        finally:
            self._pipeline.close()
        report, seconds = self._report, time.perf_counter() - self._start
        report.complete = report.complete and not report.stopped
        embed = self._writer.embed
        report.embedded_texts, report.reused_texts, report.tokens = embed.embedded, embed.reused, embed.tokens
        report.emptied = self._emptied
        report.seconds = round(seconds, 3)
        report.rows_per_second = round(report.read / seconds, 1) if seconds else 0.0
        report.stages = {name: round(busy, 3) for name, busy in self._clock.seconds.items()}
        return report

    def _read(self) -> None:
        total, streams = self._feed.read()
        busy = partial(self._clock.add, "read")
        with read_ahead(streams, lambda batch: size_of_rows(batch.rows), busy) as batches:
            for batch in batches:
                failpoints.reach("after_read")
                self._pipeline.check()
                self._batch(batch)
                failpoints.reach("after_render")
                collected = len(self._window.documents) + entries(self._window.changes)
                if collected >= self._options.window or self._window.text_bytes >= WINDOW_BYTES:
                    self._flush()
                self._task.watch.progress(self._report.read, total)
                if self._task.watch.stop():
                    self._report.stopped = True
                    return

    def _batch(self, batch: Batch) -> None:
        report, window = self._report, self._window
        report.read += len(batch.rows)
        gone = list(map(quarantine_id, batch.gone))
        with self._clock("render"):
            ids: Sequence[str]
            ids, rows = self._last_versions(batch.rows)
            index = self._index
            if index is None:
                wanted = list(dict.fromkeys([*ids, *gone]))
                index = StoredIndex(self._ends.store.stored(self._lease.collection, wanted))
            positions = index.positions(ids)
            index.mark_seen(positions)
            ids, rows = self._changed(ids, rows, index, positions)
        if batch.load is None:
            report.loaded += len(batch.rows)
        elif ids:  # read these rows whole; a row deleted since its token was read counts as superseded, and as unseen
            with self._clock("read"):
                found = batch.load(keys_of(rows))
            asked = set(ids)
            loaded = {id_: row for row in found if (id_ := document_id(row.key)) in asked}
            lost = index.positions([id_ for id_ in ids if id_ not in loaded])
            index.seen[lost[lost >= 0]] = False
            report.superseded += len(ids) - len(loaded)
            report.loaded += len(loaded)
            ids, rows = list(loaded), list(loaded.values())
        with self._clock("render"):
            documents = self._renderer.documents(rows, ids)
            # The usual case of a first sync: nothing to compare with.
            fresh = not (self._written or window.documents or self._quarantine)
            for place, (document, position) in enumerate(zip(documents, index.positions(ids).tolist(), strict=True)):
                if isinstance(document, RowRejected):
                    self._reject(rows[place], str(document))
                elif fresh and position < 0 and document.text:
                    self._embed(document)
                else:
                    self._act(document, index, position)
            for id_, position in zip(gone, index.positions(gone).tolist(), strict=True):
                self._gone(id_, position)
        if batch.mark is not None:
            window.mark = batch.mark
        if batch.done is not None:
            window.done.append(batch.done)

    def _last_versions(self, rows: Sequence[Row]) -> tuple[list[str], Sequence[Row]]:
        """Return the last version of each key, as ids and rows. Rows whose keys cannot be ids go to quarantine."""
        places: dict[str, int] = {}
        try:
            places = dict(zip(document_ids(keys_of(rows)), range(len(rows)), strict=True))
            self._report.superseded += len(rows) - len(places)
        except RowRejected:
            for place, row in enumerate(rows):
                try:
                    id_ = document_id(row.key)
                except RowRejected as error:
                    if not self._skip(quarantine_id(row.key), row):
                        self._reject(row, str(error))
                    continue
                self._report.superseded += id_ in places
                places[id_] = place
        return list(places), rows if len(places) == len(rows) else [rows[place] for place in places.values()]

    def _changed(
        self, ids: Sequence[str], rows: Sequence[Row], index: StoredIndex, positions: NDArray[np.int64]
    ) -> tuple[Sequence[str], Sequence[Row]]:
        """Return the rows whose row digest differs from the stored one, as ids and rows; only these need rendering."""
        if self._feed.trusts_tokens and (positions >= 0).any():
            same = index.same_rows(positions, self._renderer.row_digests(rows))
        else:
            same = np.zeros(len(rows), dtype=np.bool_)
        pending = self._window.documents
        if not (self._written or pending or self._quarantine):  # the usual case, without a loop in Python
            self._report.unchanged += int(same.sum())
            if not same.any():
                return ids, rows
            places = np.flatnonzero(~same).tolist()
            return [ids[place] for place in places], [rows[place] for place in places]
        changed: dict[str, Row] = {}
        for id_, row, position, unchanged in zip(ids, rows, positions.tolist(), same.tolist(), strict=True):
            if id_ in self._written or id_ in pending:
                changed[id_] = row
            elif unchanged:
                self._report.unchanged += 1
                self._release(id_)
            elif position >= 0 or not self._skip(id_, row):
                changed[id_] = row
        return list(changed), list(changed.values())

    def _embed(self, document: Document) -> None:
        self._window.documents[document.id] = document
        self._window.text_bytes += getsizeof(document.text)

    def _act(self, document: Document, index: StoredIndex, position: int) -> None:
        id_, report, changes = document.id, self._report, self._window.changes
        was_pending = self._supersede(id_)
        stored = index.hashes(position)
        again = id_ in self._written
        action = decide_again(self._written[id_], document) if again else decide(stored, document)
        if action.embeds:
            self._quarantine.pop(id_, None)  # writing the row releases its entry; until then its attempts count
            self._embed(document)
            return
        if action in (Action.METADATA, Action.REHASH):
            changes.metadata_only += rehashed(stored, document)
        if action is Action.METADATA:
            self._note(id_, content_digest(document))
        if action is Action.REMOVE:
            self._remove_blank(id_, position)
        report.upserted += action is Action.METADATA
        report.unchanged += action in (Action.KEEP, Action.REHASH)
        report.empty += document.empty
        self._release(id_, document.empty if again else was_pending, stored=not document.empty)

    def _supersede(self, id_: str) -> bool:
        """Drop an earlier version of the document that this run read but has not written yet."""
        was_pending = self._window.documents.pop(id_, None) is not None
        self._report.superseded += was_pending
        return was_pending

    def _skip(self, id_: str, row: Row) -> bool:
        """Return whether the row failed too often, or already in this run, with this content. It then stays in
        quarantine."""
        entry, tried = self._quarantine.get(id_), id_ in self._tried
        given_up = entry is not None and entry.given_up(self._options.max_attempts)
        if entry is None or not (tried or given_up) or entry.digest != self._renderer.row_digest(row):
            return False
        del self._quarantine[id_]
        self._quarantined([id_])
        self._skipped += given_up and not tried
        return True

    def _reject(self, row: Row, reason: str) -> None:
        id_ = quarantine_id(row.key)
        self._quarantined([id_])
        self._supersede(id_)
        self._quarantine.pop(id_, None)
        self._note(id_, None)
        digest = self._renderer.row_digest(row)
        self._window.changes.quarantined.append(QuarantinedRow(id_, "render", reason, digest=digest))
        self._window.changes.deleted.append(id_)

    def _release(self, id_: str, embedded: bool = False, *, stored: bool = True) -> None:
        """Release the entry. `embedded`: this run has embedded, or was to embed, an earlier version of the row, which
        may have put it into quarantine. `stored`: the row is stored from now on."""
        entry = self._quarantine.pop(id_, None)
        self._removed += entry is not None and not stored
        if entry is not None or embedded:
            self._window.changes.released.append(id_)

    def _flush(self) -> None:
        window, self._window = self._window, _Window()
        mark = window.mark
        if mark is None and self._report.paused:
            # Before log entries are deleted, the checkpoint must say that the next run compares everything.
            mark = self._task.checkpoint.mark
        closing = None if mark is None else ChangeSet(checkpoint=self._checkpoint(mark), partial=True)
        documents = list(window.documents.values())
        if window.done and not (documents or window.changes or closing):
            closing = ChangeSet()  # writes nothing, but fails if the lease is lost
        for document in documents:
            self._note(document.id, content_digest(document))
        if documents or window.changes or closing is not None:
            self._pipeline.put(Work(documents, window.changes, closing, window.done))

    def _count(self, written: Written) -> None:
        self._report.upserted += len(written.upserted) - written.undone
        self._quarantined([row.id for row in written.quarantined])

    def _quarantined(self, ids: Sequence[str]) -> None:
        """Count rows that are in quarantine at the end of the run."""
        self._report.quarantined += len(ids)

    def _finish(self) -> None:
        """Finish a complete feed: delete what the source no longer has, and advance the checkpoint."""
        schema.check_unchanged(self._ends.source, self._renderer.query.table, self._task.columns)
        released = self._delete_unseen()
        if self._skipped:
            self._report.notes.append(
                f"{self._skipped} rows were skipped: they failed {self._options.max_attempts} times unchanged. "
                f"Correct them in the source, or retry them with `owl-sap quarantine retry {self._lease.collection}`"
            )
        failpoints.reach("before_checkpoint")
        changes = ChangeSet(released=released, checkpoint=self._checkpoint(self._feed.mark))
        with self._clock("apply"):
            self._ends.store.apply(self._lease, changes)
        failpoints.reach("after_checkpoint")

    def _checkpoint(self, mark: Mark | None) -> Checkpoint:
        report, old = self._report, self._task.checkpoint
        complete = self._feed.complete and not report.stopped
        last_full = self._task.began if complete else old.last_full
        return Checkpoint(
            rows_read=report.read if complete else old.rows_read - self._removed,
            empty=report.empty if complete else old.empty,
            key=self._renderer.key,
            source=str(self._renderer.query.table),
            columns=self._task.columns,
            last_full=None if report.paused else last_full,  # after a pause the next run compares everything
            mark=mark,
        )

    # ----------------------------------------------------------------- deletions, and methods that FullRun overrides

    def _note(self, id_: str, digest: bytes | None) -> None:
        """Record content that was sent to the store; None: the document was removed."""
        self._written[id_] = digest

    def _remove_blank(self, id_: str, position: int) -> None:
        """Handle a stored document whose row is now blank."""
        if id_ in self._spared:
            return
        self._emptied += 1
        if self._may_delete(self._emptied, FREE_DELETES):
            self._delete(id_)
        else:
            self._spared.add(id_)

    def _delete_unseen(self) -> list[str]:
        """Delete what a complete feed did not give. Return the ids whose quarantine entries must be removed."""
        return []

    def _gone(self, id_: str, position: int) -> None:
        """Handle a row that the feed reports as deleted."""
        was_pending, again = self._supersede(id_), id_ in self._written
        stored = self._written[id_] is not None if again else position >= 0
        if stored and id_ not in self._spared:
            self._report.to_delete += 1
            if self._may_delete(self._report.deleted + 1, 0):
                self._report.deleted += 1
                self._delete(id_)
            else:
                self._spared.add(id_)
        self._release(id_, was_pending or again, stored=False)

    def _delete(self, id_: str) -> None:
        self._window.changes.deleted.append(id_)
        self._removed += 1
        self._note(id_, None)

    def _may_delete(self, count: int, free: int) -> bool:
        """Return whether `count` deletions are within the limit. Counting stored rows scans the store, so first try the
        count of the last full comparison, less the rows removed since."""
        if self._report.paused is None and count > max(free, self._limit):
            status = self._ends.store.status(self._lease.collection)
            self._limit = self._options.max_deletes * (0 if status is None else status.rows)
            if count > max(free, self._limit):
                self._report.paused = "max_deletes"
        return self._report.paused is None

    def _delete_last(self, gone: int, emptied: int, limit: float, ids: Callable[[], Sequence[str]]) -> None:
        """Delete the documents of `gone` rows that left the source and of `emptied` blank rows, or pause if there are
        too many. `ids`: of all of them."""
        report, size = self._report, self._options.page_rows
        report.to_delete = gone
        if gone > limit or emptied > max(FREE_DELETES, limit):
            report.paused = "max_deletes"
        elif gone or emptied:
            ordered = ids()
            report.to_delete = max(len(ordered) - emptied, 0)  # the source may have changed since they were counted
            if len(ordered) > max(gone + emptied, limit):
                report.paused = "max_deletes"
                return
            for start in range(0, len(ordered), size):
                self._writer.remove(ordered[start : start + size])
                failpoints.reach("mid_delete")
            report.deleted += report.to_delete


class FullRun(Run):
    """Compare every source row with everything stored. Delete last, when the share of deletions is known."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._index: StoredIndex = StoredIndex(self._ends.store.stored(self._lease.collection))
        self._blank: set[int] = set()  # positions of stored documents whose rows are blank

    def _note(self, id_: str, digest: bytes | None) -> None:
        """Mark a removed document as seen. Record no content: a full comparison gives each key once, and a record per
        row would cost memory."""
        if digest is None:
            self._index.mark_seen(self._index.positions([id_]))

    def _remove_blank(self, id_: str, position: int) -> None:
        self._blank.add(position)
        self._index.seen[position] = False

    def _delete_unseen(self) -> list[str]:
        index = self._index
        unseen = int((~index.seen).sum())
        self._emptied = sum(not index.seen[position] for position in self._blank)
        self._delete_last(unseen - self._emptied, self._emptied, self._options.max_deletes * len(index), self._unseen)
        return sorted(self._quarantine)

    def _unseen(self) -> list[str]:
        """Read the ids from the store again: the index has only digests."""
        ids: dict[str, None] = {}
        for page in self._ends.store.stored(self._lease.collection):
            ids.update(dict.fromkeys(self._index.unseen([chunk.id for chunk in page])))
        return list(ids)
