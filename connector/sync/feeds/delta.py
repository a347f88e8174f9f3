"""Changes from a delta table that SAP Datasphere or smart data integration keeps.

Its records only say which keys changed and when, and are read like rows by a watermark. The rows are read from the
source by key, and a key without a row was deleted. So the order of records, repeated records and images do no harm.
Records may arrive long after their time, after an agent was down, but then in order: see `watermark.next_window`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from connector.hana.delta_table import OF_A_ROW, TRUNCATE, delta_table
from connector.model import CollectionSpec, Query, Table
from connector.protocols import Source
from connector.sync.feeds.feed import Batch, Feed, Mark, ReadPlan, current
from connector.sync.feeds.full import all_rows
from connector.sync.feeds.watermark import Window, next_window, pages, type_of


def check(spec: CollectionSpec, table: Table, source: Source) -> None:
    delta_table(spec, table, source)


def identity(plan: ReadPlan, source: Source) -> Mark:
    table_id, (delta, _, at) = source.capture.table_id, delta_table(plan.spec, plan.table, source)
    return {"table": table_id(plan.query.table), "delta": table_id(delta.ref), "type": type_of(at)}


def feed(plan: ReadPlan, source: Source) -> Feed:
    """Return the feed, or a full comparison if a record does not say which rows changed."""
    delta, kind, at = delta_table(plan.spec, plan.table, source)
    # The type is part of a record's key, so that no record shares its place with one that needs a full comparison.
    records = replace(plan, query=Query(delta.ref, (*plan.query.key, kind), ()))
    window = next_window(source.capture, records, at, late=True)
    waiting, unclear = (0, window.due) if window.due else _waiting(records, source, window)
    if unclear:
        mark = window.mark if window.due else window.compared
        return Feed(partial(all_rows, plan, source), mark, "full", unclear)
    return Feed(lambda: (waiting, [_batches(plan, records, source, window)]), window.mark, "delta", complete=False)


def _waiting(records: ReadPlan, source: Source, window: Window) -> tuple[int, str]:
    """Return the number of records to read, and why they do not say which rows changed, or ""."""
    if window.span is None:
        return 0, ""
    counts, keyless = source.capture.record_types(records.query, window.span)
    types = {"NULL" if kind is None else str(kind).strip() for kind in counts}
    table, reasons = records.query.table, []
    if unknown := sorted(types - OF_A_ROW - {TRUNCATE}):
        reasons.append(f"{table} has records of the unknown type {', '.join(unknown)}")
    if TRUNCATE in types:
        reasons.append(f"a record of type {TRUNCATE} in {table} says that the table was emptied")
    if keyless:
        reasons.append(f"{table} has records without a complete key")
    return sum(counts.values()), "; ".join(reasons)


def _batches(plan: ReadPlan, records: ReadPlan, source: Source, window: Window) -> Iterator[Batch]:
    for page in pages(source.capture, records, window, repeated=True):
        yield replace(current(plan, source, (record.key[:-1] for record in page.rows)), mark=page.mark)
