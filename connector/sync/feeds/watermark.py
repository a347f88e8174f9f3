"""What changed by a watermark column: the window (mark, the database's time - delay], in order of (watermark, key).
What it cannot see (NULL, commits later than `delay`, deletions) the next full comparison finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from connector.document.document import document_id, parse_id
from connector.errors import RowRejected
from connector.hana.watermarks import Reach, Step, less, moment, reach, watermark
from connector.model import Column, Key, Query, Row, Span, Value
from connector.protocols import Capture
from connector.sync.feeds.feed import Batch, Divided


@dataclass(frozen=True, slots=True)
class Clocked:
    """A query's watermark column, and the source's time at the beginning of the run. `delay` in seconds."""

    query: Query
    column: Column
    now: datetime
    delay: float


def next_mark(
    capture: Capture, clocked: Clocked, mark: Mapping[str, Any] | None
) -> tuple[Reach | None, dict[str, Any]]:
    """How far a run that begins now may read, and the mark once it is done. Never falls behind `mark`.

    A number does not say when it was given out, and numbers become visible in another order than that: one is settled
    `delay` seconds after a run first saw it as the highest; until then rows above the settled one are read again.
    """
    kind = watermark(clocked.column, clocked.query.table)
    at = None if mark is None else mark.get("at")
    if kind.step is Step.NUMBER:
        return _numbered(capture.highest(clocked.query, clocked.column), clocked, mark or {})
    found = reach(kind, clocked.now, clocked.delay)
    if at is not None and less(kind, found.settled, at):  # the clock was set back
        return found, dict(mark or {})
    return found, {"at": found.settled, "asked": clocked.now.isoformat()}


def _numbered(highest: str | None, clocked: Clocked, mark: Mapping[str, Any]) -> tuple[Reach | None, dict[str, Any]]:
    if highest is None:
        return None, dict(mark)
    at, seen = mark.get("at"), mark.get("seen")
    if not clocked.delay:
        settled: str | None = highest if at is None else str(max(int(at), int(highest)))
        seen = None
    elif seen is not None and (clocked.now - datetime.fromisoformat(seen[1])).total_seconds() >= clocked.delay:
        settled, seen = str(max(int(at or seen[0]), int(seen[0]))), [highest, clocked.now.isoformat()]
    else:
        settled, seen = at, seen or [highest, clocked.now.isoformat()]
    after = {"at": settled, "seen": seen, "asked": clocked.now.isoformat()}
    return Reach(highest, settled or highest), {name: value for name, value in after.items() if value is not None}


def behind(mark: Mapping[str, Any] | None) -> float:
    """Seconds between the time of the source at the last run and the watermark up to which it had read; 0 for numbers
    and other methods."""
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
        self,
        capture: Capture,
        clocked: Clocked,
        page_rows: int,
        mark: Mapping[str, Any],
        identity: Mapping[str, Any],
    ) -> None:
        """`mark` has `at`; `identity` is what every mark of this collection says of its settings."""
        self._identity = identity
        self._capture = capture
        self._clocked = clocked
        self._page_rows = page_rows
        self._old = mark
        self._kind = watermark(clocked.column, clocked.query.table)
        self._reach, self._new = next_mark(capture, clocked, mark)

    def total(self) -> int:
        return 0

    def batches(self) -> Iterator[Batch]:
        at, id_, found = self._old["at"], self._old.get("key"), self._reach
        if found is None or less(self._kind, found.upto, at) or (at == found.upto and id_ is None):
            return
        span = Span(self._clocked.column, at, None if id_ is None else tuple(parse_id(id_)), found.upto)
        for passed in self._capture.window(self._clocked.query, span, self._page_rows):
            yield Batch(passed.rows, mark=self._halfway(passed.last, passed.rows[-1].key, found))

    def _halfway(self, last: str, key: Key, found: Reach) -> Mapping[str, Any] | None:
        """A run that ends here goes on behind this row; where values may still come, only the end of the run says."""
        if less(self._kind, found.settled, last):
            return None
        try:
            return {**self._old, "at": last, "key": document_id(key)}
        except RowRejected:  # a key too long for an id
            return None

    def mark(self) -> Mapping[str, Any]:
        return {**self._new, **self._identity}


class LateFeed:
    """A full comparison that tells which rows a window would have missed: those whose watermark is NULL, or lies at or
    below the mark of the runs before."""

    complete = True
    trusts_tokens = True

    def __init__(self, full: Callable[[Query], Divided], clocked: Clocked, at: str) -> None:
        """`full`: the comparison over a query, which is given the watermark column in addition."""
        query, name = clocked.query, clocked.column.name
        self._own = name not in (*query.key, *query.columns)
        self._full = full(replace(query, columns=(*query.columns, name)) if self._own else query)
        self._name = name
        self._kind = watermark(clocked.column, query.table)
        self._at = at

    def total(self) -> int:
        return self._full.total()

    def mark(self) -> Mapping[str, Any] | None:
        return self._full.mark()

    def batches(self) -> Iterator[Batch]:
        return self._told(self._full.batches())

    def streams(self) -> Sequence[Iterator[Batch]]:
        return [self._told(stream) for stream in self._full.streams()]

    def _told(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            values = {row.key: row.values[self._name] for row in batch.rows}
            rows = [self._stripped(row) for row in batch.rows] if self._own else batch.rows
            yield replace(batch, rows=rows, late=partial(self._late, values))

    def _stripped(self, row: Row) -> Row:
        values = dict(row.values)
        del values[self._name]
        return replace(row, values=values)

    def _late(self, values: Mapping[Key, Value], key: Key) -> bool:
        value = values[key]
        if value is None:
            return True
        text = self._kind.form(value.replace(tzinfo=UTC)) if isinstance(value, datetime) else self._kind.text(value)
        return not less(self._kind, self._at, text)
