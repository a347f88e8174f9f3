"""Changes by row id: HANA gives a row of a column table a new `$rowid$` on every insert and update."""

from __future__ import annotations

from connector.model import CollectionSpec, Table
from connector.protocols import Source
from connector.sync.feeds.feed import Feed, Mark, ReadPlan
from connector.sync.feeds.full import by_tokens, refuse_view


def check(spec: CollectionSpec, table: Table) -> None:
    refuse_view(table, 'row ids ("$rowid$")')


def identity(plan: ReadPlan, source: Source) -> Mark:
    return {"table": source.capture.table_id(plan.query.table)}


def feed(plan: ReadPlan, source: Source) -> Feed:
    (highest, rows), mark = source.capture.row_ids(plan.query), plan.before
    due = plan.due or _regressed(rows - mark["rows"], highest - mark["highest"], mark["rows"])
    after = {**plan.identity, "highest": highest, "rows": rows}
    return by_tokens(plan, source, "rowid", due, after)


def _regressed(more_rows: int, more_ids: int, rows_before: int) -> str:
    """Return why an id may now identify other content than before; "" if there is no sign of that. `more_ids`: by which
    the highest id has grown.

    Every insert and update takes an id above all others. So the highest id never falls, and row growth never exceeds id
    growth. A table that lost or gained half of its rows was probably reloaded.
    """
    if more_ids < 0:
        return "the highest row id has fallen"
    if more_rows > more_ids:
        return "the table has grown by more rows than row ids were given out"
    if abs(more_rows) * 2 > max(rows_before, 1):
        return "the number of rows has jumped"
    return ""
