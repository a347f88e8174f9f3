"""The full comparison: every row of the source, by value, or by a token that HANA computes (`hash = "server"`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from connector.errors import ConfigurationError
from connector.model import CollectionSpec, Query, Table, Token
from connector.protocols import Source
from connector.sync.feeds.feed import Batch, Choice, Earlier, Mark, ReadPlan

ROWS_PER_READER = 20_000  # with fewer rows one reader is as fast, because dividing the table costs extra statements


class FullFeed:
    """Yield every row page by page; a large table in up to `readers` key ranges at once."""

    complete = True
    trusts_tokens = True

    def __init__(
        self, source: Source, query: Query, page_rows: int, mark: Mark | None = None, readers: int = 1
    ) -> None:
        """`mark`: for the checkpoint, determined before the first page is read."""
        self._source = source
        self._query = query
        self._page_rows = page_rows
        self._mark = mark
        self._readers = readers
        self._rows = 0

    def total(self) -> int:
        self._rows = self._source.count(self._query)
        return self._rows

    def streams(self) -> Sequence[Iterator[Batch]]:
        parts = min(self._readers, self._rows // ROWS_PER_READER)
        if parts < 2:
            return [map(Batch, self._source.pages(self._query, self._page_rows))]
        ranges = self._source.ranges(self._query, parts, self._rows)
        return [map(Batch, self._source.pages(self._query, self._page_rows, within)) for within in ranges]

    def mark(self) -> Mark | None:
        return self._mark


class TokenFeed:
    """Yield every row's key and token, and read whole only rows whose token differs from the stored one.

    With `prove`, read all values and trust no token. This stores the first tokens and verifies them periodically.
    """

    complete = True

    def __init__(self, source: Source, plan: ReadPlan, token: Token, mark: Mark, *, prove: bool) -> None:
        self._source = source
        self._query = plan.query
        self._page_rows = plan.page_rows
        self._token: Token = token
        self._mark = mark
        self.trusts_tokens = not prove

    def total(self) -> int:
        return self._source.count(self._query)

    def streams(self) -> Sequence[Iterator[Batch]]:
        capture, prove = self._source.capture, not self.trusts_tokens
        pages = capture.tokens(self._query, self._token, self._page_rows, values=prove)
        load = None if prove else partial(capture.rows_with_tokens, self._query, self._token)
        return [(Batch(page, load=load) for page in pages)]

    def mark(self) -> Mark | None:
        return self._mark


def by_tokens(plan: ReadPlan, source: Source, mark: Mark, token: Token, due: str, last_proved: str | None) -> Choice:
    proved = plan.now.isoformat() if due else last_proved
    feed = TokenFeed(source, plan, token, {**mark, "proved": proved}, prove=bool(due))
    return Choice(feed, "full" if due else token, due)


def compare_all(plan: ReadPlan, source: Source, earlier: Earlier) -> Choice:
    """Return the full comparison, by the configured kind of hash."""
    changes = plan.spec.changes
    if changes.hash == "server":
        return by_tokens(plan, source, earlier.identity, "hash", earlier.due, earlier.mark.get("proved"))
    feed = FullFeed(source, plan.query, plan.page_rows, earlier.identity, plan.readers)
    return Choice(feed, "full", earlier.due if changes.method != "full" else "")


def refuse_view(table: Table, needs: str) -> None:
    """Raise ConfigurationError for a view. `needs`: what the method needs that views lack."""
    if table.is_view:
        raise ConfigurationError(
            f'`changes.method`: {table.ref} is a view, and only tables have {needs}; use "full" with hash = "server", '
            'or "watermark"'
        )


class FullMethod:
    def check(self, spec: CollectionSpec, table: Table) -> None:
        pass

    def identity(self, plan: ReadPlan, source: Source) -> Mark:
        return {}

    def choose(self, plan: ReadPlan, source: Source, earlier: Earlier) -> Choice:
        return compare_all(plan, source, earlier)
