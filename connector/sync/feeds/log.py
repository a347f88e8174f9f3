"""What changed by the log that triggers fill, taken as a queue: entries are read, their rows processed, and exactly
these entries deleted once the store has committed. No position is kept from run to run: commits come in another order
than ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from connector import failpoints
from connector.document.document import quarantine_id
from connector.model import Key, LogEntry, Query, TableRef
from connector.protocols import Source
from connector.sync.feeds.feed import Batch

MARGIN = 10
"""Pages that a run takes beyond the entries there were when it began; what a busy table adds after that is for the next
run."""


class LogFeed:
    complete = False
    trusts_tokens = True

    def __init__(self, source: Source, query: Query, log: TableRef, page_rows: int, mark: Mapping[str, Any]) -> None:
        self._source = source
        self._query = query
        self._log = log
        self._page_rows = page_rows
        self._mark = mark
        self._waiting = source.capture.log_length(log)

    def total(self) -> int:
        return self._waiting

    def batches(self) -> Iterator[Batch]:
        """Within a run each page goes on behind the one before, for that may not be deleted yet; an entry that becomes
        visible behind the reader is there for the next run."""
        taken, last = 0, 0
        while taken < self._waiting + MARGIN * self._page_rows:
            entries = self._source.capture.log_entries(self._query, self._log, last, self._page_rows)
            if not entries:
                return
            taken, last = taken + len(entries), entries[-1].id
            yield self._batch(entries)
            if len(entries) < self._page_rows and taken >= self._waiting:
                return

    def _batch(self, entries: list[LogEntry]) -> Batch:
        """The rows as they are now, once for each key; what was logged of them meanwhile comes again and finds nothing
        to do."""
        keys: dict[str, Key] = {quarantine_id(entry.key): entry.key for entry in entries}
        rows = self._source.rows(self._query, list(keys.values()))
        found = {quarantine_id(row.key) for row in rows}
        gone = [key for id_, key in keys.items() if id_ not in found]
        return Batch(rows, gone=gone, done=partial(self._forget, [entry.id for entry in entries]))

    def _forget(self, ids: list[int]) -> None:
        failpoints.reach("before_log_delete")
        self._source.capture.forget(self._log, ids)
        failpoints.reach("after_log_delete")

    def mark(self) -> Mapping[str, Any]:
        return self._mark
