"""Spread a comparison of every row over workers, one key range each. A worker reads, renders, compares, embeds and
writes with its own source, store and embedder, under the lease of the driver.

Afterwards the driver compares every row itself; only this run deletes, and writes the checkpoint. So a lost worker
costs time, never a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Protocol

from connector.document.document import Renderer
from connector.errors import ConfigurationError, ConnectorError
from connector.model import Checkpoint, CollectionSpec, KeyRange, Lease, QuarantinedRow
from connector.stores.store import VectorStore
from connector.sync import schema
from connector.sync.feeds.feed import Batch, Feed
from connector.sync.options import Ends, SyncOptions, SyncReport, Watch
from connector.sync.reconcile import Run, Task, reconcile

RANGE_ROWS = 20_000  # of a large table: a border costs as much as a page, and the last worker ends one range late
RANGES_PER_WORKER = 4  # of a small table
ATTEMPTS = 3  # after which the driver compares the rows of a range alone
STOP_SECONDS = 0.2  # how often the driver checks whether to stop
_EMBEDDED = ("embedded_texts", "reused_texts", "tokens")
_COUNTS = (*("read", "loaded", "upserted", "unchanged", "empty", "quarantined", "superseded"), *_EMBEDDED)


class WorkerLost(Exception):
    """A worker ended before its task."""


class Workers(Protocol):
    """Where tasks run, `count` at a time; 0 once no worker is left."""

    count: int

    def submit(self, task: RangeTask) -> Future[SyncReport]:
        """Run the task in a worker. The future raises WorkerLost if the worker dies, else the error of the task."""
        ...

    def stop(self) -> None:
        """Ask the running tasks to end after the page in hand; they report `stopped`. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class RangeTask:
    """The rows of one key range, for a worker. Picklable, without secrets. `rendering`: the driver's `Renderer.digest`.
    `since`: as in `_tried`."""

    spec: CollectionSpec
    lease: Lease
    within: KeyRange
    options: SyncOptions
    rendering: bytes
    since: datetime | None

    def __call__(self, ends: Ends, watch: Watch | None = None) -> SyncReport:
        """Make the store match the rows of the range; delete no row of the source. Raises ConfigurationError if this
        worker renders or embeds differently from the driver, and LeaseLost once the driver has lost the lease."""
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
        return _RangeRun(replace(task, tried=_tried(ends.store.quarantine(self.lease.collection), self.since)))()


class _RangeRun(Run):
    """Compare the rows of a range. Deletions and the checkpoint are left to the driver."""

    def _note(self, id_: str, digest: bytes | None) -> None:
        """Record nothing: a range gives each key once, and a record per row would cost memory."""

    def _remove_blank(self, id_: str, position: int) -> None:
        """Keep the document: the driver counts the deletions of all ranges against their limit."""

    def _finish(self) -> None:
        schema.check_unchanged(self._ends.source, self._renderer.query.table, self._task.columns)


@dataclass(slots=True)
class Spread:
    """What workers did. `lost`: ranges that lost their worker in every attempt. `stopped`: ended early on request."""

    reports: list[SyncReport] = field(default_factory=list)
    lost: int = 0
    stopped: bool = False


def reconcile_spread(spec: CollectionSpec, task: Task, workers: Workers) -> SyncReport:
    """Do as `reconcile`, with the rows spread over workers first. A feed that does not compare every row by its values
    is not spread, nor is a table of one page."""
    rows, ranges = _ranges(task, workers.count) if task.feed.by_values else (0, [])
    if len(ranges) < 2:
        return reconcile(task)
    start, name, quarantine = time.perf_counter(), task.lease.collection, task.ends.store.quarantine
    since = max((entry.last_seen for entry in quarantine(name) if entry.last_seen), default=None)
    status = task.ends.store.status(name)
    stored = status.rows if status else 0
    tasks = [RangeTask(spec, task.lease, within, task.options, task.renderer.digest, since) for within in ranges]
    spread = run_ranges(tasks, workers, task.ends.store, task.watch, rows)
    # A worker that was taken for lost may still be writing, and must not while the closing run does.
    task.ends.store.end_parts(task.lease)
    if spread.stopped:
        report = _added(SyncReport(name, stopped=True), spread.reports, _COUNTS)
    else:
        closing = replace(task, tried=_tried(quarantine(name), since), stored=stored)
        report = _closed(reconcile(closing), spread.reports)
    if spread.lost:
        report.notes.append(
            f"{spread.lost} of {len(tasks)} key ranges lost their worker {ATTEMPTS} times; the driver compared their "
            "rows alone. Check the workers' logs and memory"
        )
    seconds = time.perf_counter() - start
    report.seconds, report.rows_per_second = round(seconds, 3), round(report.read / seconds, 1)
    return report


def _tried(quarantine: Sequence[QuarantinedRow], since: datetime | None) -> frozenset[str]:
    """Return the ids of rows that failed in this run. They are not tried again in it, because a run is one attempt.
    `since`: of the last failure before the run, by the store's clock; None: there was none."""
    return frozenset(row.id for row in quarantine if row.last_seen and (since is None or row.last_seen > since))


def _ranges(task: Task, workers: int) -> tuple[int, Sequence[KeyRange]]:
    """Return the number of rows and the ranges."""
    source, query = task.ends.source, task.renderer.query
    rows = source.count(query)
    parts = max(rows // RANGE_ROWS, min(RANGES_PER_WORKER * workers, rows // task.options.page_rows))
    return rows, source.ranges(query, parts, rows) if parts > 1 else []


def run_ranges(tasks: Sequence[RangeTask], workers: Workers, store: VectorStore, watch: Watch, rows: int) -> Spread:
    """Run the tasks, `workers.count` at a time. A task runs again, up to ATTEMPTS times, if its worker is lost or its
    error is retryable. Each attempt has its own part of the lease, because a worker that was taken for lost may still
    be writing. Any other error ends the other tasks and is raised. `rows`: expected, for the progress."""
    spread, failure, parts = Spread(), None, count()
    waiting = deque((task, 1) for task in tasks)
    running: dict[Future[SyncReport], tuple[RangeTask, Lease, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers.count:
                task, attempt = waiting.popleft()
                part = store.begin_part(task.lease, next(parts))
                running[workers.submit(replace(task, lease=part))] = task, part, attempt
            if not running:  # no worker is left
                spread.lost += len(waiting)
                break
            for future in wait(running, STOP_SECONDS, FIRST_COMPLETED).done:
                task, part, attempt = running.pop(future)
                error, unfinished = future.exception(), _unfinished(future)
                if error is None:
                    spread.reports.append(future.result())
                    watch.progress(sum(report.read for report in spread.reports), rows)
                if unfinished and attempt < ATTEMPTS:
                    store.end_parts(part)
                    waiting.append((task, attempt + 1))
                elif error is None or isinstance(error, WorkerLost):
                    spread.lost += unfinished
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


def _unfinished(future: Future[SyncReport]) -> bool:
    """Return whether another worker may finish the task."""
    error = future.exception()
    if error is None:
        return future.result().stopped
    return isinstance(error, WorkerLost) or (isinstance(error, ConnectorError) and error.retryable)


def _closed(closing: SyncReport, parts: Sequence[SyncReport]) -> SyncReport:
    """Return the report of the whole run: each row counts once, by what the closing run found or, where that found it
    unchanged, by what a worker did. A row that changed in between may count as upserted for another one."""
    written = min(sum(part.upserted for part in parts), closing.unchanged)
    closing.upserted, closing.unchanged = closing.upserted + written, closing.unchanged - written
    return _added(closing, parts, _EMBEDDED)


def _added(first: SyncReport, parts: Sequence[SyncReport], counts: Sequence[str]) -> SyncReport:
    """Add these counts, and the busy seconds, of all reports to the first."""
    for part in parts:
        for name in counts:
            setattr(first, name, getattr(first, name) + getattr(part, name))
        for stage, seconds in part.stages.items():
            first.stages[stage] = round(first.stages[stage] + seconds, 3)
    return first
