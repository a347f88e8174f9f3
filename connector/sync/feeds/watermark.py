"""Changes by a watermark column: rows in (mark, the database's time - delay], ordered by watermark and key.

The method misses rows whose watermark is NULL, transactions that commit later than `delay`, and deletions; the next
full comparison finds these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from connector.document.document import document_id, parse_id
from connector.errors import ConfigurationError, RowRejected
from connector.hana.catalog import check_columns
from connector.hana.watermarks import earlier, less, moment, reach, watermark
from connector.model import CollectionSpec, Column, Span, Table
from connector.protocols import Capture, Source
from connector.sync.feeds.feed import Batch, Feed, Mark, ReadPlan
from connector.sync.feeds.full import all_rows


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a watermark column that a run reads. `span`: None if nothing is to be read. `settled`: no later row
    gets this value or a lower one. `mark`: where the next run begins. `covered`: the value up to which this run sees
    every row with a watermark, unless it arrives late; None for a number that is not settled. `due`: why all rows must
    be compared, or ""."""

    span: Span | None
    settled: str
    mark: Mark
    covered: str | None
    due: str


def check(spec: CollectionSpec, table: Table, source: Source) -> None:
    watermark(_column(spec, table), table.ref)


def identity(plan: ReadPlan, source: Source) -> Mark:
    column = _column(plan.spec, plan.table)
    return {"table": source.capture.table_id(plan.query.table), "type": type_of(column)}


def feed(plan: ReadPlan, source: Source) -> Feed:
    window = next_window(source.capture, plan, _column(plan.spec, plan.table))
    if window.due:
        return Feed(partial(all_rows, plan, source), window.mark, "full", window.due)
    return Feed(lambda: (0, [pages(source.capture, plan, window)]), window.mark, "watermark", complete=False)


def type_of(column: Column) -> str:
    """Return the full type of a watermark column, on which the text of a mark depends."""
    return f"{column.type_name}({column.length},{column.scale})"


def next_window(capture: Capture, plan: ReadPlan, column: Column, *, late: bool = False) -> Window:
    """Return what a run reads of `plan.query` by this watermark column. `late`: rows may arrive any time after their
    watermark, but in its order."""
    kind, at, id_ = watermark(column, plan.query.table), plan.before.get("at"), plan.before.get("key")
    (found, mark), covered = _late_mark(capture, plan, column) if late else (_next_mark(capture, plan, column), None)
    due = plan.due or ("" if at is not None else "no value of the watermark is old enough to continue from")
    span, (upto, settled) = None, found or ("", "")
    if found and at is not None and (less(kind, at, upto) or (at == upto and id_ is not None)):
        span = Span(column, at, None if id_ is None else tuple(parse_id(id_)), upto)
    return Window(span, settled, {**mark, **plan.identity}, covered, due)


def pages(capture: Capture, plan: ReadPlan, window: Window, *, repeated: bool = False) -> Iterator[Batch]:
    """Yield the rows of the window. `repeated`: several rows may have the same watermark and key."""
    if window.span is None:
        return
    kind = watermark(window.span.column, plan.query.table)
    for rows, last in capture.window(plan.query, window.span, plan.page_rows, repeated=repeated):
        mark: Mark | None = None
        if not less(kind, window.settled, last):  # otherwise rows with this watermark may still appear
            with suppress(RowRejected):  # a key too long for an id
                mark = {**plan.before, "at": last, "key": document_id(rows[-1].key)}
        yield Batch(rows, mark=mark)


def _column(spec: CollectionSpec, table: Table) -> Column:
    name = spec.changes.column
    if name is None:
        raise ConfigurationError('`changes.column`: method = "watermark" needs the column that every change sets')
    check_columns(table, [name], "changes.column")
    column = table.column(name)
    assert column is not None  # check_columns raises otherwise
    return column


_Next = tuple[tuple[str, str] | None, dict[str, Any]]
"""The value up to which a run may read with the settled value (see `reach`); and the run's final mark, which is never
below the previous one."""


def _next_mark(capture: Capture, plan: ReadPlan, column: Column) -> _Next:
    kind, delay, mark = watermark(column, plan.query.table), plan.spec.changes.delay, plan.before
    if kind.step is None:
        highest = capture.highest(plan.query, column, mark.get("at"))
        return (None, dict(mark)) if highest is None else _number_mark(plan, highest)
    found = reach(kind, plan.now, delay)
    at = mark.get("at")
    set_back = at is not None and less(kind, found[1], at)  # the clock was set back
    return found, dict(mark) if set_back else {"at": found[1], "asked": plan.now.isoformat()}


def _number_mark(plan: ReadPlan, highest: str) -> _Next:
    """Numbers have no time and may become visible out of order. A number is settled `delay` seconds after a run first
    saw it as the highest. Until then, rows above the settled number are read again."""
    delay, mark, now = plan.spec.changes.delay, plan.before, plan.now.isoformat()
    at, seen = mark.get("at"), mark.get("seen")
    if not delay:
        settled: str | None = highest if at is None else str(max(int(at), int(highest)))
        seen = None
    elif seen is not None and (plan.now - datetime.fromisoformat(seen[1])).total_seconds() >= delay:
        settled, seen = str(max(int(at or seen[0]), int(seen[0]))), [highest, now]
    else:
        settled, seen = at, seen or [highest, now]
    after = {"at": settled, "seen": seen, "asked": now}
    return (highest, settled or highest), {name: value for name, value in after.items() if value is not None}


def _late_mark(capture: Capture, plan: ReadPlan, column: Column) -> tuple[_Next, str | None]:
    """Return what `_next_mark` does, and `Window.covered`.

    The mark never passes the highest value, because late rows come in order. The last `delay` seconds before it are
    read again until no higher value has come for `delay` seconds, because rows of the same time may be incomplete, and
    transactions that overlap come in any order.
    """
    kind, delay = watermark(column, plan.query.table), plan.spec.changes.delay
    highest = capture.highest(plan.query, column, plan.before.get("at"))
    if highest is None:
        return (None, {"at": kind.lowest, **plan.before}), None
    if kind.step is None:
        found, mark = _number_mark(plan, highest)
        return (found, mark), mark.get("at")
    (upto, settled), seen = reach(kind, plan.now, delay), plan.before.get("seen")
    if seen is None or seen[0] != highest:
        seen = [highest, plan.now.isoformat()]

    def at_most(value: str) -> str:
        at = min(value, settled, key=kind.bind)
        before: str = plan.before.get("at", at)
        return max(at, before, key=kind.bind)

    quiet = (plan.now - datetime.fromisoformat(seen[1])).total_seconds() >= delay
    at = at_most(highest if quiet else earlier(kind, highest, delay))
    return ((upto, at), {"at": at, "seen": seen, "asked": plan.now.isoformat(), "upto": upto}), at_most(highest)


def behind(mark: Mark | None) -> float:
    """Return by how many seconds the watermark was behind the source's clock at the last run; 0 for numbers and
    other methods."""
    if mark is None or not {"at", "asked"} <= mark.keys():
        return 0.0
    try:
        return max(0.0, (datetime.fromisoformat(mark["asked"]) - moment(mark.get("upto", mark["at"]))).total_seconds())
    except ValueError:
        return 0.0
