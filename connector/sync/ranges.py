"""Spread a comparison of every row over workers, one key range each. A worker reads, renders, compares, embeds and
writes with its own source, store and embedder, under the lease of the driver.

Each worker returns sums of the ids that it leaves in the store. The driver subtracts the ids of everything stored. Only
where something remains may a row have left the source, and only there does the driver compare rows itself. So its
memory does not grow with the table, and a lost worker costs time, never a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import blake2b
from itertools import count
from math import inf
from secrets import token_bytes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from connector.document.document import Renderer, parse_id, quarantine_id
from connector.errors import ConfigurationError, ConnectorError, RowRejected
from connector.model import Checkpoint, CollectionSpec, Document, Key, KeyRange, Lease, Row
from connector.stores.store import VectorStore
from connector.sync import schema
from connector.sync.feeds.feed import Batch, Feed
from connector.sync.options import Ends, SyncOptions, SyncReport, Watch
from connector.sync.reconcile import FREE_DELETES, Run, Task, deletion_limit, reconcile
from connector.sync.stored_index import StoredIndex

RANGE_ROWS = 20_000  # of a large table: a border costs as much as a page, and the last worker ends one range late
RANGES_PER_WORKER = 4  # of a small table
ATTEMPTS = 3  # after which the driver does a range itself
STOP_SECONDS = 0.2  # how often the driver checks whether to stop
BUCKETS = 1 << 16  # 512 KiB a range; for each deletion, the driver looks up one in so many rows
_ROWS = ("read", "loaded", "upserted", "unchanged", "empty", "quarantined", "superseded")
_COUNTS = (*_ROWS, "embedded_texts", "reused_texts", "tokens")


class WorkerLost(Exception):
    """A worker ended before its task."""


class Workers(Protocol):
    """Where tasks run."""

    @property
    def count(self) -> int:
        """How many tasks may run at a time; 0 once no worker is left."""

    def submit(self, task: RangeTask) -> Future[RangeReport]:
        """Run the task in a worker. The future raises WorkerLost if the worker dies, else the error of the task."""

    def stop(self) -> None:
        """Ask the running tasks to end after the page in hand; they report `stopped`. Safe to call twice."""


class IdSums:
    """Sums of the hashes of ids, in buckets by another hash. A bucket is 0 if the same ids were added and subtracted,
    else with a chance of 2**-64, also if the ids were chosen by someone who does not know `salt`. `count`: of the ids
    added, less those subtracted."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self.count = 0
        self._sums = np.zeros(BUCKETS, np.uint64)  # modulo 2**64

    def add(self, ids: Sequence[str]) -> None:
        np.add.at(self._sums, *self._hashed(ids))
        self.count += len(ids)

    def subtract(self, ids: Sequence[str]) -> None:
        np.subtract.at(self._sums, *self._hashed(ids))
        self.count -= len(ids)

    def add_sums(self, other: IdSums) -> None:
        self._sums += other._sums
        self.count += other.count

    def remain(self) -> bool:
        """Return whether any bucket is not 0."""
        return bool(self._sums.any())

    def remaining(self, ids: Sequence[str]) -> list[str]:
        """Return those of `ids` whose bucket is not 0."""
        places = np.flatnonzero(self._sums[self._hashed(ids)[0]])
        return [ids[place] for place in places.tolist()]

    def _hashed(self, ids: Iterable[str]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        digests = [blake2b(id_.encode(), key=self._salt, digest_size=16).digest() for id_ in ids]
        words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        return words[:, 0] % np.uint64(BUCKETS), words[:, 1]


@dataclass(slots=True)
class RangeReport:
    """The counts of a run over one range, and the sums of the ids that it leaves stored. `blank`: how many documents of
    blank rows are still stored. `quarantined`: ids of the rows that are in quarantine, `skipped` of them because they
    failed too often."""

    rows: SyncReport
    stored: IdSums
    blank: int = 0
    quarantined: list[str] = field(default_factory=list)
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class RangeTask:
    """The rows of one key range, for a worker. Picklable, without a login. `rendering`: the driver's `Renderer.digest`.
    `since`: of the last failure of a row before the run, by the store's clock; None: there was none. `salt`: of the
    `IdSums`."""

    spec: CollectionSpec
    lease: Lease
    within: KeyRange
    options: SyncOptions
    rendering: bytes
    since: datetime | None
    salt: bytes

    def __call__(self, ends: Ends, watch: Watch | None = None) -> RangeReport:
        """Make the store match the rows of the range; delete no row of the source. Rows that an earlier attempt wrote
        count as unchanged. Raises ConfigurationError if this worker renders or embeds differently from the driver, and
        LeaseLost once the driver has lost the lease."""
        table = ends.source.describe(self.spec.source)
        renderer = Renderer(self.spec, table, ends.embedder)
        if renderer.digest != self.rendering:
            raise ConfigurationError(
                f"a worker would store other vectors of {self.spec.name!r} than the driver: its model "
                f"({ends.embedder.model}), its settings or its table {self.spec.source} differ. Give every worker the "
                "driver's settings, model and database"
            )
        pages = ends.source.pages(renderer.query, self.options.page_rows, self.within)
        feed = Feed(lambda: (0, [map(Batch, pages)]), None, "full", complete=False)
        columns = schema.columns_in_use(renderer, table, self.spec)
        watch, now = watch or Watch(), ends.source.now()
        task = Task(ends, renderer, self.lease, self.options, watch, feed, Checkpoint(), columns, now)
        return _RangeRun(task, self.since, self.salt).report()


class _RangeRun(Run):
    """Compare the rows of a range. Deletions and the checkpoint are left to the driver."""

    def __init__(self, task: Task, since: datetime | None, salt: bytes) -> None:
        super().__init__(task)
        # A run is one attempt at each row, also if the range runs again.
        entries = self._quarantine.values()
        self._tried = frozenset(row.id for row in entries if row.last_seen and (since is None or row.last_seen > since))
        self._left = RangeReport(self._report, IdSums(salt))

    def report(self) -> RangeReport:
        """Do the range."""
        self()
        self._left.skipped = self._skipped
        self._left.stored.subtract(self._left.quarantined)
        return self._left

    def _last_versions(self, rows: Sequence[Row]) -> tuple[list[str], Sequence[Row]]:
        """Take every row for stored; `report` and `_act` subtract the others."""
        before = len(self._left.quarantined)
        ids, last = super()._last_versions(rows)
        self._left.stored.add([*ids, *self._left.quarantined[before:]])
        return ids, last

    def _act(self, document: Document, index: StoredIndex, position: int) -> None:
        if document.empty:
            self._left.stored.subtract([document.id])
        super()._act(document, index, position)

    def _quarantined(self, ids: Sequence[str]) -> None:
        super()._quarantined(ids)
        self._left.quarantined += ids

    def _note(self, id_: str, digest: bytes | None) -> None:
        """Record nothing: a range gives each key once, and a record per row would cost memory."""

    def _remove_blank(self, id_: str, position: int) -> None:
        """Keep the document: the driver counts the deletions of all ranges against their limit."""
        self._left.blank += 1

    def _finish(self) -> None:
        schema.check_unchanged(self._ends.source, self._renderer.query.table, self._task.columns)


class _ClosingRun(Run):
    """Compare the stored rows that perhaps no range has met, delete those that left the source, write the checkpoint.
    Pauses without comparing any if the counts of the ranges are above the limit."""

    def __init__(self, task: Task, ranges: RangeReport, limit: float) -> None:
        """`limit`: how many rows the run may delete."""
        done = replace(task.checkpoint, rows_read=ranges.rows.read, empty=ranges.rows.empty, last_full=task.began)
        feed = Feed(lambda: (0, [self._unmet(ranges)]), task.feed.mark, task.feed.method, complete=False)
        super().__init__(replace(task, feed=feed, checkpoint=done, watch=Watch(None, task.watch.stop)))
        self._most = limit
        self._skipped = ranges.skipped
        for id_ in ranges.quarantined:
            self._quarantine.pop(id_, None)
        self._gone_rows = 0
        self._to_delete: list[str] = []

    def _unmet(self, ranges: RangeReport) -> Iterator[Batch]:
        """Yield the rows to compare. Their number does not grow with the table if few rows left it. After each page of
        ids, yields a batch that may be empty, so that the run can stop."""
        left, size = ranges.stored, self._options.page_rows
        if self._too_many(left.count, ranges.blank):
            return
        for ids in self._stored_ids():
            left.subtract(ids)
            yield Batch([])
        for ids in self._stored_ids() if left.remain() else ():
            suspects = left.remaining(ids)
            for start in range(0, len(suspects), size):
                keys = {id_: self._key(id_) for id_ in suspects[start : start + size]}
                found = self._rows([key for key in keys.values() if key is not None])
                rows = {id_: row for row in found if (id_ := quarantine_id(row.key)) in keys}
                self._gone_rows += len(keys) - len(rows)
                self._delete_later([id_ for id_ in keys if id_ not in rows])
                yield Batch(list(rows.values()))
            yield Batch([])

    def _too_many(self, met: int, blank: int) -> bool:
        """Return whether more rows are gone, or blank, than may be deleted. They then need no look-up."""
        status = self._ends.store.status(self._lease.collection) if self._most < inf else None
        gone = 0 if status is None else status.rows - met - blank
        if gone <= self._most and blank <= max(FREE_DELETES, self._most):
            return False
        self._gone_rows, self._emptied = gone, blank
        return True

    def _rows(self, keys: Sequence[Key]) -> list[Row]:
        """Look the keys up. A key is gone if the driver cannot convert it to the types of the columns: they have
        changed since it was stored."""
        try:
            return self._ends.source.rows(self._renderer.query, keys)
        except RowRejected as error:
            if error.code > 0:  # of HANA, perhaps about a value in the table
                raise
            return [] if len(keys) == 1 else [row for key in keys for row in self._rows([key])]

    def _stored_ids(self) -> Iterator[list[str]]:
        """Yield the ids of all documents, each once unless its chunks are pages apart."""
        before: Collection[str] = ()
        for page in self._ends.store.stored(self._lease.collection):
            ids = dict.fromkeys(chunk.id for chunk in page)
            yield [id_ for id_ in ids if id_ not in before]
            before = ids

    def _key(self, id_: str) -> Key | None:
        """Return the key of a document; None if the table can have no such key."""
        try:
            key = tuple(parse_id(id_))
        except ValueError:
            return None
        return key if len(key) == len(self._renderer.key) else None

    def _remove_blank(self, id_: str, position: int) -> None:
        self._emptied += 1
        self._delete_later([id_])

    def _delete_later(self, ids: Sequence[str]) -> None:
        """Add to what is deleted at the end. Also called in the reading thread."""
        if len(self._to_delete) <= 2 * self._most + FREE_DELETES:  # with more, the run pauses
            self._to_delete += ids

    def _delete_unseen(self) -> list[str]:
        self._delete_last(self._gone_rows, self._emptied, self._most, lambda: self._to_delete)
        return sorted(self._quarantine)


@dataclass(slots=True)
class Spread:
    """The reports of workers, added up in `done`. `lost`: ranges that no worker ended. `stopped`: ended early on
    request."""

    done: RangeReport
    lost: list[RangeTask] = field(default_factory=list)
    stopped: bool = False

    def add(self, report: RangeReport) -> None:
        _add(self.done.rows, report.rows)
        self.done.stored.add_sums(report.stored)
        self.done.blank += report.blank
        self.done.quarantined += report.quarantined
        self.done.skipped += report.skipped


def reconcile_spread(spec: CollectionSpec, task: Task, workers: Workers) -> SyncReport:
    """Do as `reconcile`, with the rows spread over workers. A feed that does not compare every row by its values is not
    spread, nor is a table of one page or one whose key has changed."""
    alone = schema.other_key(task.renderer.key, task.checkpoint) or schema.retyped(task.columns, task.checkpoint)
    rows, ranges = _ranges(task, workers.count) if task.feed.by_values and not alone else (0, [])
    if len(ranges) < 2:
        return reconcile(task)
    start, name, store = time.perf_counter(), task.lease.collection, task.ends.store
    since = max((entry.last_seen for entry in store.quarantine(name) if entry.last_seen), default=None)
    limit, salt = deletion_limit(task), token_bytes(16)
    tasks = [RangeTask(spec, task.lease, within, task.options, task.renderer.digest, since, salt) for within in ranges]
    spread = run_ranges(tasks, workers, store, task.watch, rows)
    # A worker that was taken for lost may still be writing, and must not while the driver does.
    store.end_parts(task.lease)
    for lost in spread.lost:
        if not spread.stopped:
            ended = lost(task.ends, Watch(None, task.watch.stop))
            spread.add(ended)
            spread.stopped = ended.rows.stopped
            task.watch.progress(spread.done.rows.read, rows)
    report = spread.done.rows
    if not spread.stopped:
        report = _closed(_ClosingRun(task, spread.done, limit)(), report)
    report.stopped = report.stopped or spread.stopped
    report.complete = not report.stopped
    if spread.lost:
        report.notes.append(
            f"{len(spread.lost)} of {len(tasks)} key ranges lost their worker {ATTEMPTS} times; the driver compared "
            "their rows itself. Check the workers' logs and memory"
        )
    seconds = time.perf_counter() - start
    report.seconds, report.rows_per_second = round(seconds, 3), round(report.read / seconds, 1)
    return report


def _ranges(task: Task, workers: int) -> tuple[int, Sequence[KeyRange]]:
    """Return the number of rows and the ranges."""
    source, query = task.ends.source, task.renderer.query
    rows = source.count(query)
    parts = max(rows // RANGE_ROWS, min(RANGES_PER_WORKER * workers, rows // task.options.page_rows))
    return rows, source.ranges(query, parts, rows) if parts > 1 else []


def run_ranges(tasks: Sequence[RangeTask], workers: Workers, store: VectorStore, watch: Watch, rows: int) -> Spread:
    """Run the tasks, `workers.count` at a time. A task runs again, up to ATTEMPTS times, if its worker is lost or its
    error is retryable. Each attempt has its own part of the lease, because a worker that was taken for lost may still
    be writing. If the part of one attempt cannot be ended before the next, the task counts as lost. Any other error
    ends the other tasks and is raised. `rows`: expected, for the progress."""
    failure, parts = None, count()
    whole = tasks[0].lease
    spread = Spread(RangeReport(SyncReport(whole.collection), IdSums(tasks[0].salt)))
    waiting: deque[tuple[RangeTask, int]] = deque((task, 1) for task in tasks)  # `lease`: the last attempt's part
    running: dict[Future[RangeReport], tuple[RangeTask, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers.count:
                task, attempt = waiting.popleft()
                if not _ended(store, task.lease):
                    spread.lost.append(replace(task, lease=whole))
                    continue
                task = replace(task, lease=store.begin_part(whole, next(parts)))
                running[workers.submit(task)] = task, attempt
            if not running:  # no worker is left
                spread.lost += [replace(task, lease=whole) for task, _ in waiting]
                break
            for future in wait(running, STOP_SECONDS, FIRST_COMPLETED).done:
                task, attempt = running.pop(future)
                error, unfinished = future.exception(), _unfinished(future)
                if error is None and (spread.stopped or not unfinished):
                    spread.add(future.result())
                    watch.progress(spread.done.rows.read, rows)
                elif unfinished and attempt < ATTEMPTS:
                    waiting.append((task, attempt + 1))
                elif error is None or isinstance(error, WorkerLost):
                    spread.lost.append(replace(task, lease=whole))
                else:
                    failure = failure or error
            spread.stopped = spread.stopped or watch.stop()
            if spread.stopped or failure is not None:
                waiting.clear()
                workers.stop()
    except BaseException:
        workers.stop()
        raise
    if failure is not None:
        raise failure
    return spread


def _ended(store: VectorStore, lease: Lease) -> bool:
    """End the part of an earlier attempt, if `lease` is one. Return False if its row stays locked: HANA drops the
    session of a worker that vanished during a write only after a while."""
    try:
        if lease.part is not None:
            store.end_parts(lease)
    except ConnectorError as error:
        if not error.retryable:
            raise
        return False
    return True


def _unfinished(future: Future[RangeReport]) -> bool:
    """Return whether another worker may finish the task."""
    error = future.exception()
    if error is None:
        return future.result().rows.stopped
    return isinstance(error, WorkerLost) or (isinstance(error, ConnectorError) and error.retryable)


def _closed(closing: SyncReport, ranges: SyncReport) -> SyncReport:
    """Return the report of the whole run. Each row counts once, by its range; a row that changed afterwards and was
    compared again counts twice."""
    closing.read = closing.loaded = closing.upserted + closing.quarantined
    closing.unchanged = closing.empty = closing.superseded = 0
    _add(closing, ranges)
    return closing


def _add(first: SyncReport, second: SyncReport) -> None:
    """Add the counts of rows and texts, and the busy seconds, to the first report."""
    for name in _COUNTS:
        setattr(first, name, getattr(first, name) + getattr(second, name))
    for stage, seconds in second.stages.items():
        first.stages[stage] = round(first.stages[stage] + seconds, 3)
