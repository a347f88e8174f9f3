"""Sync is reconciliation: a run under a lease brings a collection up to date with its source and says what was done.
Chooses what to read and whether to go on at all; the comparison itself is `reconcile`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from connector import failpoints
from connector.document.document import Renderer
from connector.errors import (
    ConfigurationError,
    DatabaseError,
    LeaseLost,
    LogMissing,
    SchemaChanged,
    SyncPaused,
    UnknownColumn,
    UnknownTable,
)
from connector.model import ChangeSet, Checkpoint, CollectionSpec, Lease, Table
from connector.protocols import Observer
from connector.stores.store import VectorStore
from connector.sync import schema
from connector.sync.feeds.choose import Choice, Wanted, check, choose, same_settings
from connector.sync.reconcile import Before, Reconciler, types_in_use
from connector.sync.run import Ends, Stop, SyncOptions, SyncReport, Watch, never

__all__ = ["Ends", "Stop", "SyncOptions", "SyncReport", "Watch", "never", "own", "sync"]

_LEASE_SLICE = 1.0
"""Seconds between questions whether to stop, while another worker holds the lease."""


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
    finished and the report says `stopped`. A source that is not what it was at the last sync pauses the collection.
    """
    options, watch = options or SyncOptions(), Watch(observer, stop)
    try:
        return _sync(spec, ends, options, watch)
    except SyncPaused as paused:
        return SyncReport(spec.name, paused=paused.reason, complete=False, notes=[str(paused)])
    except SchemaChanged as error:  # in the middle: what was read until then is stored, nothing was deleted
        return SyncReport(spec.name, paused="schema_changed", complete=False, notes=[str(error)])


def _sync(spec: CollectionSpec, ends: Ends, options: SyncOptions, watch: Watch) -> SyncReport:
    table, renderer = _readable(spec, ends)
    schema.check_origin(spec.name, ends.store.open(spec.name, ends.embedder))
    with ExitStack() as held:
        lease = own(held, ends.store, spec.name, options, watch)
        if lease is None:
            return SyncReport(spec.name, stopped=True, complete=False)
        failpoints.reach("after_lease")
        # While we waited, another worker may have given it another model.
        checkpoint = ends.store.open(spec.name, ends.embedder)
        columns = types_in_use(renderer, table, spec)
        if not options.accept_schema:
            _check_types(spec, columns, checkpoint)
        if options.max_deletes < 1:
            _check_key(renderer, checkpoint, ends.store, spec.name)
        now = ends.source.now()
        wanted = Wanted(
            spec, renderer.query, renderer.digest, table, options.page_rows, now, options.full, options.readers
        )
        with _whatever_happens_underneath(wanted, ends, checkpoint, lease):
            choice = choose(wanted, ends.source, checkpoint)
            before = Before(checkpoint, columns, now)
            report = Reconciler(ends, renderer, lease, options, watch)(choice.feed, before)
    _say(report, choice)
    if report.upserted:
        _optimise(ends.store, report)
    return report


def _say(report: SyncReport, choice: Choice) -> None:
    report.method = choice.method
    if choice.reason:
        report.notes.append(f"every row was compared: {choice.reason}")
    if report.late_rows:
        report.notes.append(
            f"{report.late_rows} changed rows were found that the watermark would have missed: is it set in UTC by "
            "every change, and `delay` longer than the longest transaction that writes?"
        )


@contextmanager
def _whatever_happens_underneath(wanted: Wanted, ends: Ends, checkpoint: Checkpoint, lease: Lease) -> Iterator[None]:
    """What looks like a slip in the settings is none when earlier runs could read the same: the collection pauses."""
    spec = wanted.spec
    try:
        yield
    except LogMissing as error:
        if (checkpoint.mark or {}).get("method") != "log":
            raise
        # What nobody wrote down is found by comparing everything, once the log is back.
        forgetful = ChangeSet(checkpoint=replace(checkpoint, mark=None, last_full=None), partial=True)
        ends.store.apply(lease, forgetful)
        raise SyncPaused(str(error), reason="log_missing") from None
    except (UnknownTable, UnknownColumn) as error:
        known = schema.was_synced(checkpoint, spec.source) and same_settings(wanted, checkpoint)
        if known and _has_changed(wanted, ends, error):
            raise _paused(f"{error} It was there at the last sync. What is stored stays") from None
        raise


def _has_changed(wanted: Wanted, ends: Ends, error: UnknownTable | UnknownColumn) -> bool:
    """Is it the source that lacks something? The store has tables too. What `where` names, nobody can look up."""
    try:
        table = ends.source.describe(wanted.spec.source)
    except UnknownTable:
        return True
    used = (*wanted.query.key, *wanted.query.columns)
    gone = any(table.column(name) is None for name in used)
    return gone or (isinstance(error, UnknownColumn) and wanted.spec.where is not None)


def _readable(spec: CollectionSpec, ends: Ends) -> tuple[Table, Renderer]:
    """The table and what renders its rows. Raises SyncPaused where an earlier sync could do what is impossible now."""
    try:
        table = ends.source.describe(spec.source)
    except UnknownTable as error:
        if schema.was_synced(_earlier(spec, ends.store), spec.source):
            raise _paused(
                f"{error} It was there at the last sync. What is stored stays; sync again once it is back"
            ) from None
        raise
    try:
        check(spec, table)
        return table, Renderer(spec, table, ends.embedder)
    except ConfigurationError:
        earlier = _earlier(spec, ends.store)
        gone = schema.missing(table, earlier) if schema.was_synced(earlier, spec.source) else []
        used = [name for name in gone if _mentions(spec, name)]
        if used:
            raise _paused(
                f"{spec.source} no longer has the column {', '.join(used)}, which the collection uses. What is stored "
                "stays; change template, metadata or key, or bring the column back"
            ) from None
        raise


def _mentions(spec: CollectionSpec, column: str) -> bool:
    if column == spec.changes.column:
        return True
    return column in spec.key or column in spec.metadata or "{" + column + "}" in spec.template.replace('"', "")


def _earlier(spec: CollectionSpec, store: VectorStore) -> Checkpoint:
    status = store.status(spec.name)
    return Checkpoint() if status is None else status.checkpoint


def _check_types(spec: CollectionSpec, columns: dict[str, str], checkpoint: Checkpoint) -> None:
    if schema.was_synced(checkpoint, spec.source) and (changed := schema.retyped(columns, checkpoint)):
        raise _paused(
            f"{spec.source} has changed: {'; '.join(changed)}. Nothing was read; check `owl-sap plan "
            f"{spec.name}`, then continue with --accept-schema"
        )


def _check_key(renderer: Renderer, checkpoint: Checkpoint, store: VectorStore, name: str) -> None:
    """By another key every row is another one: until those of before may go, each would be found twice."""
    other = schema.other_key(renderer.key, checkpoint)
    if other and (status := store.status(name)) is not None and status.rows:
        name = name.partition("@")[0]  # of a generation that is being built
        raise _paused(
            f"{other}: all {status.rows} stored rows would be written again under new ids and the old ones deleted. "
            f"Nothing was read. If this is expected: owl-sap sync {name} --full --max-deletes 1, or, without a gap for "
            f"searches: owl-sap generations {name} --build, then --switch"
        )


def _paused(message: str) -> SyncPaused:
    return SyncPaused(message, reason="schema_changed")


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
