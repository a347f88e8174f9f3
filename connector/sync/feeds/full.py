"""The full comparison: every row of the source, in key order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from connector.model import KeyRange, Query
from connector.protocols import Source
from connector.sync.feeds.feed import Batch

ROWS_PER_READER = 20_000
"""Fewer are read by one as fast: finding where to divide the table costs a statement, too."""


class FullFeed:
    """Every row, page by page; a large table in up to `readers` ranges of keys at once. `mark`: what the checkpoint
    shall say afterwards, taken before the first page."""

    complete = True
    trusts_tokens = True

    def __init__(
        self,
        source: Source,
        query: Query,
        page_rows: int,
        mark: Mapping[str, Any] | None = None,
        readers: int = 1,
    ) -> None:
        self._source = source
        self._query = query
        self._page_rows = page_rows
        self._mark = mark
        self._readers = readers
        self._rows = 0

    def total(self) -> int:
        self._rows = self._source.count(self._query)
        return self._rows

    def batches(self) -> Iterator[Batch]:
        return (Batch(page) for page in self._source.pages(self._query, self._page_rows))

    def streams(self) -> Sequence[Iterator[Batch]]:
        parts = min(self._readers, self._rows // ROWS_PER_READER)
        if parts < 2:
            return [self.batches()]
        return [self._part(within) for within in self._source.ranges(self._query, parts, self._rows)]

    def _part(self, within: KeyRange) -> Iterator[Batch]:
        return (Batch(page) for page in self._source.pages(self._query, self._page_rows, within))

    def mark(self) -> Mapping[str, Any] | None:
        return self._mark
