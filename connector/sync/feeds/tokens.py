"""The full comparison by tokens that the database keeps or makes (row ids, hashes): of unchanged rows only key and
token move. And when row ids may be believed at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from connector.model import Query, RowIds, Token
from connector.protocols import Source
from connector.sync.feeds.feed import Batch


class TokenFeed:
    """Every row's key and token; rows whose token is not the stored one are read by key.

    With `prove` all values move too and no token is trusted: that is how the stored tokens come about, and how they are
    looked after from time to time.
    """

    complete = True

    def __init__(self, source: Source, query: Query, token: Token, page_rows: int, *, prove: bool) -> None:
        self._source = source
        self._query = query
        self._token: Token = token
        self._page_rows = page_rows
        self._mark: Mapping[str, Any] | None = None
        self._prove = prove
        self.trusts_tokens = not prove

    def marked(self, mark: Mapping[str, Any]) -> TokenFeed:
        """`mark`: what the checkpoint shall say afterwards, taken before the first page."""
        self._mark = mark
        return self

    def total(self) -> int:
        return self._source.count(self._query)

    def batches(self) -> Iterator[Batch]:
        pages = self._source.capture.tokens(self._query, self._token, self._page_rows, values=self._prove)
        load = None if self._prove else partial(self._source.capture.rows_with_tokens, self._query, self._token)
        return (Batch(page, load=load) for page in pages)

    def mark(self) -> Mapping[str, Any] | None:
        return self._mark


def regressed(before: RowIds, now: RowIds) -> str:
    """Why ids that were seen before may stand for other content now; "" when nothing says so.

    Every insert and every update takes an id above all others. So the highest never falls, and the table cannot have
    grown by more rows than ids were given out; that half of it came or went speaks of a reload.
    """
    if now.highest < before.highest:
        return "the highest row id has fallen"
    grown = now.rows - before.rows
    if grown > now.highest - before.highest:
        return "the table has grown by more rows than row ids were given out"
    if abs(grown) * 2 > max(before.rows, 1):
        return "the number of rows has jumped"
    return ""
