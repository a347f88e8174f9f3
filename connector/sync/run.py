"""Sync one collection: take its lease, choose what to read, reconcile, report."""

from __future__ import annotations

import time
from contextlib import ExitStack

from connector import failpoints
from connector.errors import DatabaseError, LeaseLost, SchemaChanged, SyncPaused
from connector.model import CollectionSpec, Lease
from connector.protocols import Observer
from connector.stores.store import VectorStore
from connector.sync import schema
from connector.sync.feeds.choose import choose
from connector.sync.feeds.feed import ReadPlan
from connector.sync.in_database import InDatabaseRun, rows_in_sql
from connector.sync.options import Ends, Stop, SyncOptions, SyncReport, Watch, never
from connector.sync.ranges import Workers, reconcile_spread
from connector.sync.reconcile import Task, reconcile

__all__ = ["Ends", "Stop", "SyncOptions", "SyncReport", "Watch", "never", "sync", "take_lease"]

_LEASE_SLICE_SECONDS = 1.0  # how often a run that waits for a lease checks whether to stop


def sync(
    spec: CollectionSpec,
    ends: Ends,
    options: SyncOptions | None = None,
    observer: Observer | None = None,
    stop: Stop = never,
    workers: Workers | None = None,
) -> SyncReport:
    """Bring the collection up to date with its source.

    Raises configuration errors before writing anything. After a lost connection the next run continues. `stop` is
    called once per page; after True the run finishes the work in hand and reports `stopped`. A changed source pauses
    the collection. `workers`: share a comparison of every row, whose store must be in HANA.
    """
    options, watch = options or SyncOptions(), Watch(observer, stop)
    try:
        table, renderer = schema.readable(spec, ends)
        schema.check_origin(spec.name, ends.store.open(spec.name, ends.embedder))
        with ExitStack() as held:
            lease = take_lease(held, ends.store, spec.name, options, watch)
            if lease is None:
                return SyncReport(spec.name, stopped=True, complete=False)
            failpoints.reach("after_lease")
            checkpoint = ends.store.open(spec.name, ends.embedder)  # again: the last owner may have changed the model
            columns = schema.columns_in_use(renderer, table, spec)
            if not options.accept_schema:
                schema.check_types(spec, columns, checkpoint)
            if options.max_deletes < 1:
                schema.check_key(renderer.key, checkpoint, ends.store, spec.name)
            query, now = renderer.query, ends.source.now()
            plan = ReadPlan(spec, query, renderer.digest, table, options.page_rows, now, options.full, options.readers)
            with schema.pausing_on_source_change(plan, ends, checkpoint, lease):
                feed = choose(plan, ends.source, checkpoint)
                task = Task(ends, renderer, lease, options, watch, feed, checkpoint, columns, now)
                stay = options.rows_stay
                rows = rows_in_sql(ends.source, ends.store, renderer, table, feed, stay) if not workers else ""
                if not isinstance(rows, str):
                    report = InDatabaseRun(task, rows)()
                else:
                    report = reconcile(task) if workers is None else reconcile_spread(spec, task, workers)
    except SyncPaused as paused:
        return SyncReport(spec.name, paused=paused.reason, complete=False, notes=[str(paused)])
    except SchemaChanged as error:  # while reading: earlier rows are stored, unseen rows were not deleted
        return SyncReport(spec.name, paused="schema_changed", complete=False, notes=[str(error)])
    report.method = feed.method
    if feed.reason:
        report.notes.append(f"every row was compared: {feed.reason}")
    if isinstance(rows, str) and rows:
        report.notes.append(f"the rows leave HANA: {rows}")
    if report.upserted:
        try:
            ends.store.optimise(spec.name)
        except DatabaseError as error:  # the index only speeds up searches
            report.notes.append(f"the rows are stored, but the search index was not built: {error}")
    return report


def take_lease(
    held: ExitStack, store: VectorStore, collection: str, options: SyncOptions, watch: Watch
) -> Lease | None:
    """Return the collection's lease, held until `held` ends; None if stopped while another worker had it. If the
    function must wait, the observer receives the events `waiting` and then `owned`."""
    deadline = time.monotonic() + options.lease_wait
    waiting = False
    while True:
        left = deadline - time.monotonic()
        try:
            lease = held.enter_context(
                store.lease(collection, options.owner, min(max(left, 0.0), _LEASE_SLICE_SECONDS))
            )
        except LeaseLost:
            if watch.stop():
                return None
            if left <= _LEASE_SLICE_SECONDS:
                raise
            if not waiting:
                waiting = True
                watch.event("waiting")
            continue
        if waiting:
            watch.event("owned")
        return lease
