"""Changes by a watermark column: rows in (mark, the database's time - delay], ordered by watermark and key.

It misses rows whose watermark is NULL, transactions that commit later than `delay`, and deletions; the next full
comparison finds these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from connector.document.document import document_id, parse_id
from connector.errors import ConfigurationError, RowRejected
from connector.hana.catalog import check_columns
from connector.hana.watermarks import Reach, Step, less, moment, reach, watermark
from connector.model import CollectionSpec, Column, Key, Span, Table
from connector.protocols import Capture, Source
from connector.sync.feeds.feed import Batch, Batches, Earlier, Feed, Mark, ReadPlan
from connector.sync.feeds.full import all_rows


def check(spec: CollectionSpec, table: Table) -> None:
    watermark(_column(spec, table), table.ref)


def identity(plan: ReadPlan, source: Source) -> Mark:
    return {"table": source.capture.table_id(plan.query.table)}


def feed(plan: ReadPlan, source: Source, earlier: Earlier) -> Feed:
    column, at = _column(plan.spec, plan.table), earlier.mark.get("at")
    found, mark = _next_mark(source.capture, plan, column, earlier.mark)
    mark = {**mark, **earlier.identity}
    if not earlier.due and at is not None:

        def read() -> Batches:
            return 0, [] if found is None else [_window(source.capture, plan, column, earlier.mark, found)]

        return Feed(read, mark, "watermark", complete=False)
    read_all = partial(all_rows, plan, source, plan.query)
    if at is not None and earlier.compared:
        read_all = partial(_all_with_late, plan, source, column, at)
    return Feed(read_all, mark, "full", earlier.due or "no value of the watermark is old enough to continue from")


def _column(spec: CollectionSpec, table: Table) -> Column:
    name = spec.changes.column
    if name is None:
        raise ConfigurationError('`changes.column`: method = "watermark" needs the column that every change sets')
    check_columns(table, [name], "changes.column")
    column = table.column(name)
    assert column is not None  # check_columns raises otherwise
    return column


def _next_mark(capture: Capture, plan: ReadPlan, column: Column, mark: Mark) -> tuple[Reach | None, dict[str, Any]]:
    """Return how far this run may read, and its final mark, which is never below `mark`.

    A number has no time and may become visible out of order. It is settled `delay` seconds after a run first saw it as
    the highest. Until then, rows above the settled number are read again.
    """
    kind, delay = watermark(column, plan.query.table), plan.spec.changes.delay
    at, seen, now = mark.get("at"), mark.get("seen"), plan.now.isoformat()
    if kind.step is not Step.NUMBER:
        found = reach(kind, plan.now, delay)
        set_back = at is not None and less(kind, found.settled, at)  # the clock
        return found, dict(mark) if set_back else {"at": found.settled, "asked": now}
    highest = capture.highest(plan.query, column)
    if highest is None:
        return None, dict(mark)
    if not delay:
        settled: str | None = highest if at is None else str(max(int(at), int(highest)))
        seen = None
    elif seen is not None and (plan.now - datetime.fromisoformat(seen[1])).total_seconds() >= delay:
        settled, seen = str(max(int(at or seen[0]), int(seen[0]))), [highest, now]
    else:
        settled, seen = at, seen or [highest, now]
    after = {"at": settled, "seen": seen, "asked": now}
    return Reach(highest, settled or highest), {name: value for name, value in after.items() if value is not None}


def behind(mark: Mark | None) -> float:
    """Return by how many seconds the watermark lagged the source's clock at the last run; 0 for numbers and other
    methods."""
    if mark is None or not {"at", "asked"} <= mark.keys():
        return 0.0
    try:
        return max(0.0, (datetime.fromisoformat(mark["asked"]) - moment(mark["at"])).total_seconds())
    except ValueError:
        return 0.0


def _window(capture: Capture, plan: ReadPlan, column: Column, before: Mark, found: Reach) -> Iterator[Batch]:
    """Yield the rows after `before` (which has `at`) up to `found`."""
    kind, at, id_ = watermark(column, plan.query.table), before["at"], before.get("key")
    if less(kind, found.upto, at) or (at == found.upto and id_ is None):
        return
    span = Span(column, at, None if id_ is None else tuple(parse_id(id_)), found.upto)
    for passed in capture.window(plan.query, span, plan.page_rows):
        mark: Mark | None = None
        if not less(kind, found.settled, passed.last):  # otherwise rows with this watermark may still appear
            with suppress(RowRejected):  # a key too long for an id
                mark = {**before, "at": passed.last, "key": document_id(passed.rows[-1].key)}
        yield Batch(passed.rows, mark=mark)


def _all_with_late(plan: ReadPlan, source: Source, column: Column, at: str) -> Batches:
    """Read every row, and mark rows that the watermark missed: NULL, or not above the last mark."""
    query, name, kind = plan.query, column.name, watermark(column, plan.query.table)
    added = name not in (*query.key, *query.columns)
    if added:
        query = replace(query, columns=(*query.columns, name))

    def with_late(batch: Batch) -> Batch:
        values, rows = {row.key: row.values[name] for row in batch.rows}, batch.rows
        if added:  # documents are made without the watermark
            kept = [other for other in (rows[0].values if rows else ()) if other != name]
            rows = [replace(row, values={other: row.values[other] for other in kept}) for row in rows]

        def is_late(key: Key) -> bool:
            value = values[key]
            if value is None:
                return True
            text = kind.form(value.replace(tzinfo=UTC)) if isinstance(value, datetime) else kind.text(value)
            return not less(kind, at, text)

        return replace(batch, rows=rows, late=is_late)

    total, streams = all_rows(plan, source, query)
    return total, [map(with_late, stream) for stream in streams]
