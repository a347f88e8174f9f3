"""Changes from the log that triggers fill, used as a queue: a run reads entries, processes their rows, and deletes
exactly these entries after the store commits. It stores no position, because transactions commit out of id order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from connector import failpoints
from connector.document.document import quarantine_id
from connector.errors import LogMissing
from connector.model import CollectionSpec, Key, LogEntry, Table, log_of
from connector.protocols import Source
from connector.sync.feeds.feed import Batch, Choice, Earlier, Mark, ReadPlan
from connector.sync.feeds.full import compare_all, refuse_view

EXTRA_PAGES = 10  # pages to read beyond the entries present at the start; later entries wait for the next run


class LogMethod:
    def check(self, spec: CollectionSpec, table: Table) -> None:
        refuse_view(table, "triggers")

    def identity(self, plan: ReadPlan, source: Source) -> Mark:
        table_id = source.capture.table_id
        return {"table": table_id(plan.query.table), "log": table_id(log_of(plan.spec))}

    def choose(self, plan: ReadPlan, source: Source, earlier: Earlier) -> Choice:
        """Return the feed. Raises LogMissing if the log or one of its triggers is missing."""
        try:
            source.capture.check_log(plan.query, log_of(plan.spec))
        except LogMissing as error:
            collection = plan.spec.name.partition("@")[0]
            advice = f"see `owl-sap changes install {collection}`; the next run then compares everything"
            raise LogMissing(f"{error}: {advice}") from None
        if earlier.due:
            return compare_all(plan, source, earlier)
        return Choice(LogFeed(source, plan, earlier.identity), "log")


class LogFeed:
    complete = False
    trusts_tokens = True

    def __init__(self, source: Source, plan: ReadPlan, mark: Mark) -> None:
        self._source = source
        self._query = plan.query
        self._log = log_of(plan.spec)
        self._page_rows = plan.page_rows
        self._mark = mark
        self._waiting = source.capture.log_length(self._log)

    def total(self) -> int:
        return self._waiting

    def streams(self) -> Sequence[Iterator[Batch]]:
        return [self._batches()]

    def _batches(self) -> Iterator[Batch]:
        """Yield pages, each after the last id of the previous page, whose entries may still be in the log. An entry
        that becomes visible behind the reader waits for the next run."""
        taken, last = 0, 0
        while taken < self._waiting + EXTRA_PAGES * self._page_rows:
            entries = self._source.capture.log_entries(self._query, self._log, last, self._page_rows)
            if not entries:
                return
            taken, last = taken + len(entries), entries[-1].id
            yield self._batch(entries)
            if len(entries) < self._page_rows and taken >= self._waiting:
                return

    def _batch(self, entries: list[LogEntry]) -> Batch:
        """Return the current row of each key, once. Entries logged after this read will find no change."""
        keys: dict[str, Key] = {quarantine_id(entry.key): entry.key for entry in entries}
        rows = self._source.rows(self._query, list(keys.values()))
        found = {quarantine_id(row.key) for row in rows}
        gone = [key for id_, key in keys.items() if id_ not in found]
        return Batch(rows, gone=gone, done=partial(self._forget, [entry.id for entry in entries]))

    def _forget(self, ids: list[int]) -> None:
        failpoints.reach("before_log_delete")
        self._source.capture.forget(self._log, ids)
        failpoints.reach("after_log_delete")

    def mark(self) -> Mark:
        return self._mark
