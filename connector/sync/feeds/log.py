"""Changes from a log that triggers fill. The log is a queue: a run reads entries, processes their rows, and deletes
exactly these entries after the store commits. It stores no position, because transactions commit out of id order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from connector import failpoints
from connector.errors import LogMissing
from connector.hana.catalog import refuse_view
from connector.model import CollectionSpec, Table, TableRef, log_of
from connector.protocols import Capture, Source
from connector.sync.feeds import full
from connector.sync.feeds.feed import Batch, Batches, Feed, Mark, ReadPlan, current

EXTRA_PAGES = 10  # pages to read beyond the entries present at the start; later entries wait for the next run


def check(spec: CollectionSpec, table: Table, source: Source) -> None:
    refuse_view(table, "triggers")


def identity(plan: ReadPlan, source: Source) -> Mark:
    table_id = source.capture.table_id
    return {"table": table_id(plan.query.table), "log": table_id(log_of(plan.spec))}


def feed(plan: ReadPlan, source: Source) -> Feed:
    """Return the feed. Raises LogMissing if the log or one of its triggers is missing."""
    log = log_of(plan.spec)
    try:
        source.capture.check_log(plan.query, log)
    except LogMissing as error:
        collection = plan.spec.name.partition("@")[0]
        advice = f"see `owl-sap changes install {collection}`; the next run then compares everything"
        raise LogMissing(f"{error}: {advice}") from None
    if plan.due:
        return full.feed(plan, source)

    def read() -> Batches:
        waiting = source.capture.log_length(log)
        return waiting, [_batches(plan, source, log, waiting)]

    return Feed(read, plan.identity, "log", complete=False)


def _batches(plan: ReadPlan, source: Source, log: TableRef, waiting: int) -> Iterator[Batch]:
    """Yield pages in order of id. Each starts after the last id of the previous page, whose entries may still be in the
    log. An entry that becomes visible later with a lower id waits for the next run."""
    taken, last = 0, 0
    while taken < waiting + EXTRA_PAGES * plan.page_rows:
        entries = source.capture.log_entries(plan.query, log, last, plan.page_rows)
        if not entries:
            return
        taken, last = taken + len(entries), entries[-1][0]
        # An entry logged after this read of the rows will later find no change.
        batch = current(plan, source, (key for _, key in entries))
        yield replace(batch, done=partial(_forget, source.capture, log, [number for number, _ in entries]))
        if len(entries) < plan.page_rows and taken >= waiting:
            return


def _forget(capture: Capture, log: TableRef, ids: list[int]) -> None:
    failpoints.reach("before_log_delete")
    capture.forget(log, ids)
    failpoints.reach("after_log_delete")
