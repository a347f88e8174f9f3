"""Changes by a watermark column: rows in (mark, the database's time - delay], ordered by watermark and key.

It misses rows whose watermark is NULL, transactions that commit later than `delay`, and deletions; the next full
comparison finds these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from connector.document.document import document_id, parse_id
from connector.errors import ConfigurationError, RowRejected
from connector.hana.catalog import check_columns
from connector.hana.watermarks import Reach, Step, less, moment, reach, watermark
from connector.model import CollectionSpec, Column, Key, Span, Table, Value
from connector.protocols import Capture, Source
from connector.sync.feeds.feed import Batch, Choice, Earlier, Mark, ReadPlan
from connector.sync.feeds.full import FullFeed


class WatermarkMethod:
    def check(self, spec: CollectionSpec, table: Table) -> None:
        watermark(_column(spec, table), table.ref)

    def identity(self, plan: ReadPlan, source: Source) -> Mark:
        return {"table": source.capture.table_id(plan.query.table)}

    def choose(self, plan: ReadPlan, source: Source, earlier: Earlier) -> Choice:
        column, at = _column(plan.spec, plan.table), earlier.mark.get("at")
        found, mark = _next_mark(source.capture, plan, column, earlier.mark)
        mark = {**mark, **earlier.identity}
        if not earlier.due and at is not None:
            return Choice(WatermarkFeed(source.capture, plan, column, earlier.mark, found, mark), "watermark")
        feed = FullFeed(source, plan.query, plan.page_rows, mark, plan.readers)
        if at is not None and earlier.compared:
            feed = LateFeed(source, plan, column, at, mark)
        return Choice(feed, "full", earlier.due or "no value of the watermark is old enough to continue from")


def _column(spec: CollectionSpec, table: Table) -> Column:
    name = spec.changes.column
    if name is None:
        raise ConfigurationError('`changes.column`: method = "watermark" needs the column that every change sets')
    check_columns(table, [name], "changes.column")
    column = table.column(name)
    assert column is not None  # check_columns raises otherwise
    return column


def _next_mark(capture: Capture, plan: ReadPlan, column: Column, mark: Mark) -> tuple[Reach | None, dict[str, Any]]:
    """Return how far this run may read, and its final mark, which is never below `mark`."""
    kind, delay = watermark(column, plan.query.table), plan.spec.changes.delay
    if kind.step is Step.NUMBER:
        return _next_number(capture.highest(plan.query, column), plan, mark)
    found = reach(kind, plan.now, delay)
    at = mark.get("at")
    if at is not None and less(kind, found.settled, at):  # the clock was set back
        return found, dict(mark)
    return found, {"at": found.settled, "asked": plan.now.isoformat()}


def _next_number(highest: str | None, plan: ReadPlan, mark: Mark) -> tuple[Reach | None, dict[str, Any]]:
    """Return the same for a number, which has no time and may become visible out of order. A number is settled `delay`
    seconds after a run first saw it as the highest. Until then, rows above the settled number are read again."""
    if highest is None:
        return None, dict(mark)
    at, seen, delay = mark.get("at"), mark.get("seen"), plan.spec.changes.delay
    if not delay:
        settled: str | None = highest if at is None else str(max(int(at), int(highest)))
        seen = None
    elif seen is not None and (plan.now - datetime.fromisoformat(seen[1])).total_seconds() >= delay:
        settled, seen = str(max(int(at or seen[0]), int(seen[0]))), [highest, plan.now.isoformat()]
    else:
        settled, seen = at, seen or [highest, plan.now.isoformat()]
    after = {"at": settled, "seen": seen, "asked": plan.now.isoformat()}
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


class WatermarkFeed:
    complete = False
    trusts_tokens = True

    def __init__(
        self, capture: Capture, plan: ReadPlan, column: Column, before: Mark, found: Reach | None, mark: Mark
    ) -> None:
        """Read from after `before` (which has `at`) up to `found`. `mark`: for the checkpoint at the end."""
        self._capture = capture
        self._plan = plan
        self._column = column
        self._kind = watermark(column, plan.query.table)
        self._before = before
        self._reach = found
        self._mark = mark

    def total(self) -> int:
        return 0

    def streams(self) -> Sequence[Iterator[Batch]]:
        return [self._batches()]

    def _batches(self) -> Iterator[Batch]:
        at, id_, found = self._before["at"], self._before.get("key"), self._reach
        if found is None or less(self._kind, found.upto, at) or (at == found.upto and id_ is None):
            return
        span = Span(self._column, at, None if id_ is None else tuple(parse_id(id_)), found.upto)
        for passed in self._capture.window(self._plan.query, span, self._plan.page_rows):
            yield Batch(passed.rows, mark=self._mark_after(passed.last, passed.rows[-1].key, found))

    def _mark_after(self, last: str, key: Key, found: Reach) -> Mark | None:
        """Return the mark of a run that ends after this row; None if rows with this watermark may still appear."""
        if less(self._kind, found.settled, last):
            return None
        try:
            return {**self._before, "at": last, "key": document_id(key)}
        except RowRejected:  # a key too long for an id
            return None

    def mark(self) -> Mark:
        return self._mark


class LateFeed(FullFeed):
    """A full comparison that marks rows the watermark missed: NULL, or not above the last mark."""

    def __init__(self, source: Source, plan: ReadPlan, column: Column, at: str, mark: Mark) -> None:
        query, self._name = plan.query, column.name
        self._added = self._name not in (*query.key, *query.columns)
        self._kind = watermark(column, query.table)
        self._at = at
        if self._added:
            query = replace(query, columns=(*query.columns, self._name))
        super().__init__(source, query, plan.page_rows, mark, plan.readers)

    def streams(self) -> Sequence[Iterator[Batch]]:
        def with_late(batch: Batch) -> Batch:
            values, rows = {row.key: row.values[self._name] for row in batch.rows}, batch.rows
            if self._added:  # documents are made without the watermark
                kept = [name for name in (rows[0].values if rows else ()) if name != self._name]
                rows = [replace(row, values={name: row.values[name] for name in kept}) for row in rows]
            return replace(batch, rows=rows, late=partial(self._is_late, values))

        return [map(with_late, stream) for stream in super().streams()]

    def _is_late(self, values: Mapping[Key, Value], key: Key) -> bool:
        value = values[key]
        if value is None:
            return True
        text = self._kind.form(value.replace(tzinfo=UTC)) if isinstance(value, datetime) else self._kind.text(value)
        return not less(self._kind, self._at, text)
