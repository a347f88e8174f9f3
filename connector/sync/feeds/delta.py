"""Changes from a delta table that SAP Datasphere or smart data integration keeps.

Its records only say which keys changed and when, and are read like rows by a watermark. The rows are read from the
source by key, and a key without a row was deleted. So the order of records, repeated records and images do no harm.
Records may arrive long after their time, after an agent was down, but then in order: see `watermark.next_window`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from connector.hana.delta_table import OF_A_ROW, TRUNCATE, delta_table
from connector.hana.watermarks import less, watermark
from connector.model import CollectionSpec, Query, Table
from connector.protocols import Source
from connector.sync.feeds.feed import Batch, Feed, Mark, ReadPlan, current
from connector.sync.feeds.full import all_rows
from connector.sync.feeds.watermark import Window, next_window, pages, type_of

MANY = 10_000  # records; with fewer, counting the rows of the source would gain little
# Rows that a full comparison reads in the time in which one is looked up: 7 in the emulator, more over a slow network.
ROWS_PER_RECORD = 4


def check(spec: CollectionSpec, table: Table, source: Source) -> None:
    delta_table(spec, table, source)


def identity(plan: ReadPlan, source: Source) -> Mark:
    table_id, (delta, _, at) = source.capture.table_id, delta_table(plan.spec, plan.table, source)
    return {"table": table_id(plan.query.table), "delta": table_id(delta.ref), "type": type_of(at)}


def feed(plan: ReadPlan, source: Source) -> Feed:
    """Return the feed, or a full comparison if a record does not say which rows changed, or if that is faster."""
    delta, kind, at = delta_table(plan.spec, plan.table, source)
    # The type is part of a record's key, so that no record shares its place with one that needs a full comparison.
    records = replace(plan, query=Query(delta.ref, (*plan.query.key, kind), ()))
    window, compared = next_window(source.capture, records, at, late=True), plan.before.get("compared")
    reading = pages(source.capture, records, window, repeated=True)
    first = [] if window.due else list(islice(reading, 2))
    waiting, why = _waiting(records, source, window, compared, first)
    if not why and waiting > MANY and waiting * ROWS_PER_RECORD > source.count(plan.query):
        why = f"{waiting:,} records of {delta.ref} are to be read, and this is faster"
    mark = {**window.mark, "compared": window.covered if why else compared}
    if why:
        return Feed(partial(all_rows, plan, source), mark, "full", why)
    return Feed(lambda: (waiting, [_batches(plan, source, chain(first, reading))]), mark, "delta", complete=False)


def _waiting(
    records: ReadPlan, source: Source, window: Window, compared: str | None, first: Sequence[Batch]
) -> tuple[int, str]:
    """Return the number of records to read, and why all rows must be compared instead, or "". `compared`: all rows were
    compared after the records up to this time, of which some are read again. `first`: the first two pages; empty where
    a comparison is due."""
    span, capture = window.span, source.capture
    if span is None or not first:
        return 0, window.due
    table, reasons = records.query.table, []
    if len(first) == 1:  # counted here, because HANA would read the whole table once more
        keys = [row.key for row in first[0].rows]
        counts, keyless = dict(Counter(key[-1] for key in keys)), sum(None in key[:-1] for key in keys)
    else:
        counts, keyless = capture.record_types(records.query, span)
    waiting = sum(counts.values())
    if compared is not None and not less(watermark(span.column, table), compared, span.after):
        later = replace(span, after=compared, key=None)
        if later != span:
            counts, keyless = capture.record_types(records.query, later)
    types = {"NULL" if kind is None else str(kind).strip() for kind in counts}
    if unknown := sorted(types - OF_A_ROW - {TRUNCATE}):
        reasons.append(f"{table} has records of the unknown type {', '.join(unknown)}")
    if TRUNCATE in types:
        reasons.append(f"a record of type {TRUNCATE} in {table} says that the table was emptied")
    if keyless:
        reasons.append(f"{table} has records without a complete key")
    return waiting, "; ".join(reasons)


def _batches(plan: ReadPlan, source: Source, pages: Iterable[Batch]) -> Iterator[Batch]:
    for page in pages:
        yield replace(current(plan, source, (record.key[:-1] for record in page.rows)), mark=page.mark)
