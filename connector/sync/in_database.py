"""A full comparison of rows that stay in HANA, where the source, the store and the model are in one database.

HANA renders, compares, embeds and writes the rows of one key range at a time. Rows that it cannot finish, in quarantine
or rejected pass through this process, as in any other run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from connector import failpoints
from connector.document.document import Renderer, document_ids
from connector.document.in_sql import SqlRows, compile_rows
from connector.errors import Overloaded, RowRejected, StatementFailed
from connector.hana.source import HanaSource
from connector.model import KeyRange, Table
from connector.protocols import Source
from connector.stores.hana.in_database import Counts, State
from connector.stores.hana.store import HanaStore
from connector.stores.store import VectorStore
from connector.sync.feeds.feed import Batch, Feed
from connector.sync.options import SyncReport
from connector.sync.reconcile import FREE_DELETES, Run, Task, deletion_limit


def rows_in_sql(
    source: Source, store: VectorStore | None, renderer: Renderer, table: Table, feed: Feed, stay: bool
) -> SqlRows | str:
    """Return the rows if they stay in the database, else why they leave it: "" if the model is not the database's.
    `store` None: not known yet. `stay`: `rows_stay` of SyncOptions."""
    if not renderer.chunker.in_database:
        return ""
    if not stay:
        return "the setting sync.rows_stay is false"
    if not feed.trusts_tokens:
        return "this run stores a token of every row, by which later runs find changes"
    if not feed.by_values:
        return f"changes are found by the method {feed.method}"
    pool = store.pool if isinstance(store, HanaStore) else None
    if not isinstance(source, HanaSource) or (pool is not None and pool.options != source.pool.options):
        return "source and store have different logins"
    try:
        rows = compile_rows(renderer, table)
    except ValueError as reason:
        return str(reason)
    try:  # a function may be missing, or take other arguments
        if rows.odd and (odd := source.count_where(renderer.query, rows.odd)):
            return f"{odd} keys are too long or contain control characters"
        source.pool.read(rows.first(), doing="rendering a row in HANA")
    except (Overloaded, RowRejected, StatementFailed) as error:
        return f"HANA does not render them: {error}"
    return rows


class InDatabaseRun(Run):
    """Compare every source row with everything stored, in the database."""

    def __init__(self, task: Task, rows: SqlRows) -> None:
        super().__init__(task)
        store, source, model = self._ends.store, self._ends.source, self._ends.embedder.database_model
        assert isinstance(store, HanaStore)
        assert isinstance(source, HanaSource)
        assert model is not None
        self._rows = store.in_database(self._lease.collection, source, rows, model)
        self._embedded = 0
        self._blank: list[str] = []  # stored documents whose rows are blank, as many as may be deleted
        self._limit = deletion_limit(task)

    def __call__(self) -> SyncReport:
        report = super().__call__()
        report.embedded_texts += self._embedded
        report.notes.append(f"{report.read - report.loaded} of {report.read} rows stayed in HANA")
        return report

    def _read(self) -> None:
        size, total = self._options.page_rows, self._ends.source.count(self._renderer.query)
        rest = [KeyRange()]
        while rest:
            within, *rest = self._rows.first(size, rest[0])
            for _ in self._range(within):
                self._pipeline.check()
                self._task.watch.progress(self._report.read, total)
                if self._task.watch.stop():
                    self._report.stopped = True
                    return

    def _range(self, within: KeyRange) -> Iterator[None]:
        """Bring a range up to date, and yield after each transaction."""
        report, writer = self._report, self._writer
        found: Counts | None
        try:
            with self._clock("read"):
                found = self._rows.compare(within)
                blank = self._rows.keys(within, ["emptied"]) if found.emptied else []
        except (Overloaded, RowRejected, StatementFailed) as error:  # for example because of a single text
            found, blank = None, []
            self._say_once(f"some rows left HANA, which did not compare them: {error}")
        failpoints.reach("after_read")
        if found is None or 2 * found.ours > found.rows:  # one page is cheaper than looking these rows up
            for page in self._ends.source.pages(self._renderer.query, self._options.page_rows, within):
                self._batch(Batch(page))
                self._flush()
                yield
            return
        report.read += found.same + found.empty
        report.unchanged += found.same
        report.empty += found.empty
        for id_ in document_ids(blank):
            self._remove_blank(id_, 0)
        to_embed, rest = found.embed, [within]
        while rest:
            part, *rest = self._rows.first(writer.limit, rest[0]) if to_embed > writer.limit else rest
            ours: list[State] = ["ours"] if found.ours else []
            if found.embed or found.meta:
                began = time.monotonic()
                failpoints.reach("before_apply")
                try:
                    with self._clock("apply"):
                        embedded, described = self._rows.write(self._lease, part, found)
                except (Overloaded, RowRejected, StatementFailed) as error:
                    # Write them alone, to learn which row it is.
                    self._say_once(f"some rows left HANA, which did not write them together: {error}")
                    ours = ["ours", "new", "changed", "meta"]
                else:
                    failpoints.reach("after_apply")
                    if embedded:
                        writer.adapt(embedded, time.monotonic() - began)
                    to_embed -= embedded
                    self._embedded += embedded
                    report.upserted += embedded + described
                    report.read += embedded + described
            if ours and (keys := self._rows.keys(part, ours)):
                with self._clock("read"):
                    batch = Batch(self._ends.source.rows(self._renderer.query, keys))
                self._batch(batch)
                self._flush()
            yield

    def _say_once(self, note: str) -> None:
        self._report.notes += [note] * (note not in self._report.notes)

    def _note(self, id_: str, digest: bytes | None) -> None:
        """Record nothing: each key comes once, and a record per row would cost memory."""

    def _remove_blank(self, id_: str, position: int) -> None:
        self._emptied += 1  # deleted last, when the share of deletions is known
        if self._emptied <= max(FREE_DELETES, self._limit):  # else none is deleted
            self._blank.append(id_)

    def _delete_unseen(self) -> list[str]:
        self._delete_last(self._rows.gone(), self._emptied, self._limit, self._unwanted)
        return sorted(self._quarantine)

    def _unwanted(self) -> list[str]:
        return list(dict.fromkeys([*self._blank, *self._rows.gone_ids()]))
