"""Compare every row of the source, by its values or by a token that HANA computes (`hash = "server"`)."""

from __future__ import annotations

from functools import partial

from connector.model import CollectionSpec, Table, Token
from connector.protocols import Source
from connector.sync.feeds.feed import Batch, Batches, Feed, Mark, ReadPlan

ROWS_PER_READER = 20_000  # with fewer rows one reader is as fast, because dividing the table costs extra statements


def check(spec: CollectionSpec, table: Table, source: Source) -> None:
    """Accept every table."""


def identity(plan: ReadPlan, source: Source) -> Mark:
    return {}


def feed(plan: ReadPlan, source: Source) -> Feed:
    """Return the full comparison, with the configured kind of hash."""
    changes = plan.spec.changes
    if changes.hash == "server":
        return by_tokens(plan, source, "hash", plan.due, plan.identity)
    reason = plan.due if changes.method != "full" else ""
    return Feed(partial(all_rows, plan, source), plan.identity, "full", reason)


def all_rows(plan: ReadPlan, source: Source) -> Batches:
    """Read every row page by page; a large table in up to `plan.readers` key ranges at once."""
    query, rows = plan.query, source.count(plan.query)
    parts = min(plan.readers, rows // ROWS_PER_READER)
    ranges = source.ranges(query, parts, rows) if parts > 1 else [None]
    return rows, [map(Batch, source.pages(query, plan.page_rows, within)) for within in ranges]


def by_tokens(plan: ReadPlan, source: Source, token: Token, due: str, mark: Mark) -> Feed:
    """Compare every row's token, and read all values only of rows whose token differs from the stored one.

    If `due`, read all values and trust no token. The first such run stores the tokens; later ones verify them.
    """
    capture, query = source.capture, plan.query
    load = None if due else partial(capture.rows_with_tokens, query, token)

    def read() -> Batches:
        pages = capture.tokens(query, token, plan.page_rows, values=bool(due))
        return source.count(query), [(Batch(page, load=load) for page in pages)]

    mark = {**mark, "proved": plan.now.isoformat() if due else plan.before.get("proved")}
    return Feed(read, mark, "full" if due else token, due, trusts_tokens=not due)
