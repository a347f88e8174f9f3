"""Changes by row id: HANA gives a row of a column table a new `$rowid$` on every insert and update."""

from __future__ import annotations

from connector.hana.catalog import refuse_view
from connector.model import CollectionSpec, Table
from connector.protocols import Source
from connector.sync.feeds.feed import Feed, Mark, ReadPlan
from connector.sync.feeds.full import by_tokens


def check(spec: CollectionSpec, table: Table, source: Source) -> None:
    refuse_view(table, 'row ids ("$rowid$")')


def identity(plan: ReadPlan, source: Source) -> Mark:
    return {"table": source.capture.table_id(plan.query.table)}


def feed(plan: ReadPlan, source: Source) -> Feed:
    """Return the comparison by row ids, or of all values if an id may now identify other content. Every insert and
    update takes an id above all others, so the highest id never falls, and the table never grows by more rows than ids.
    A table that lost or gained more than half of its rows was probably reloaded."""
    (highest, rows), mark, due = source.capture.row_ids(plan.query), plan.before, plan.due
    if not due:
        grown, given_out = rows - mark["rows"], highest - mark["highest"]
        if given_out < 0:
            due = "the highest row id has fallen"
        elif grown > given_out:
            due = "the table has grown by more rows than row ids were given out"
        elif abs(grown) * 2 > max(mark["rows"], 1):
            due = "the number of rows has jumped"
    return by_tokens(plan, source, "rowid", due, {**plan.identity, "highest": highest, "rows": rows})
