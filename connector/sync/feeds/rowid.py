"""Changes by row id: HANA gives a row of a column table a new `$rowid$` on every insert and update."""

from __future__ import annotations

from connector.model import CollectionSpec, RowIds, Table
from connector.protocols import Source
from connector.sync.feeds.feed import Feed, Mark, ReadPlan
from connector.sync.feeds.full import by_tokens, refuse_view


def check(spec: CollectionSpec, table: Table) -> None:
    refuse_view(table, 'row ids ("$rowid$")')


def identity(plan: ReadPlan, source: Source) -> Mark:
    return {"table": source.capture.table_id(plan.query.table)}


def feed(plan: ReadPlan, source: Source) -> Feed:
    ids, mark = source.capture.row_ids(plan.query), plan.before
    due = plan.due or _regressed(RowIds(mark["highest"], mark["rows"]), ids)
    after = {**plan.identity, "highest": ids.highest, "rows": ids.rows}
    return by_tokens(plan, source, "rowid", due, after)


def _regressed(before: RowIds, now: RowIds) -> str:
    """Return why an id may now identify other content than before; "" if there is no sign of that.

    Every insert and update takes an id above all others. So the highest id never falls, and row growth never exceeds id
    growth. A table that lost or gained half of its rows was probably reloaded.
    """
    if now.highest < before.highest:
        return "the highest row id has fallen"
    grown = now.rows - before.rows
    if grown > now.highest - before.highest:
        return "the table has grown by more rows than row ids were given out"
    if abs(grown) * 2 > max(before.rows, 1):
        return "the number of rows has jumped"
    return ""
