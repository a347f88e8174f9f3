"""The full comparison: every row of the source, in key order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from connector.changes.feed import Batch
from connector.model import Query, Source


class FullFeed:
    """Every row, page by page. `mark`: what the checkpoint shall say afterwards, taken before the first page."""

    complete = True
    trusts_tokens = True

    def __init__(self, source: Source, query: Query, page_rows: int, mark: Mapping[str, Any] | None = None) -> None:
        self._source = source
        self._query = query
        self._page_rows = page_rows
        self._mark = mark

    def total(self) -> int:
        return self._source.count(self._query)

    def batches(self) -> Iterator[Batch]:
        return (Batch(page) for page in self._source.pages(self._query, self._page_rows))

    def mark(self) -> Mapping[str, Any] | None:
        return self._mark
