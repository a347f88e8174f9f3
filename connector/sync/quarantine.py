"""Find, retry and drop the entries of quarantined rows."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from connector.document.document import Plain, Renderer, named_key, parse_id, quarantine_id
from connector.errors import RowRejected, UnknownKey
from connector.model import ChangeSet, CollectionSpec, Document, QuarantinedRow
from connector.protocols import Source
from connector.stores.store import VectorStore
from connector.sync.apply import DocumentWriter
from connector.sync.options import Ends, Report, StageClock, SyncOptions, Watch
from connector.sync.run import take_lease

GivenKey = Mapping[str, Any] | Sequence[Any]  # as users write it: some values by column, or all in key order


@dataclass(frozen=True, slots=True)
class Entry:
    """A quarantined row as users see it. `key`: by column name; {"digest": ...} if too long to store. `given_up`: syncs
    skip the row until its content changes or it is retried."""

    id: str
    key: Mapping[str, Plain]
    stage: str
    reason: str
    attempts: int
    given_up: bool
    last_seen: str | None

    def as_dict(self) -> dict[str, Any]:
        shown = asdict(self)
        del shown["id"]
        return shown


def entry(row: QuarantinedRow, columns: Sequence[str], max_attempts: int) -> Entry:
    """Return the entry. `columns`: names of the key columns, () if unknown. `max_attempts`: as in SyncOptions."""
    seen = None if row.last_seen is None else row.last_seen.isoformat()
    values = parse_id(row.id)
    key: dict[str, Plain] = {"digest": str(values[0])} if _by_digest(row.id) else named_key(values, columns)
    return Entry(row.id, key, row.stage, row.reason, row.attempts, row.given_up(max_attempts), seen)


def chosen(entries: Sequence[Entry], wanted: Sequence[GivenKey] | None) -> list[Entry]:
    """Return those of `entries` with these keys, in order; None: all. Raises UnknownKey for a key without an entry."""
    if wanted is None:
        return list(entries)
    ids: set[str] = set()
    for key in wanted:
        found = [entry.id for entry in entries if _fits(entry.key, key)]
        if not found:
            given = [f"{name}={value}" for name, value in key.items()] if isinstance(key, Mapping) else map(str, key)
            shown = ", ".join(given) or "(empty)"
            raise UnknownKey(f"no row in quarantine has the key {shown}; `quarantine list` shows the keys")
        ids.update(found)
    return [entry for entry in entries if entry.id in ids]


def _fits(key: Mapping[str, Plain], wanted: GivenKey) -> bool:
    """Return whether the key has the wanted values. A column has one type, so 5 equals "5". NULL equals only NULL."""
    if not isinstance(wanted, Mapping):
        if len(wanted) != len(key):
            return False
        wanted = dict(zip(key, wanted, strict=True))
    return bool(wanted) and all(
        name in key and (key[name] is None) == (value is None) and (key[name] == value or str(key[name]) == str(value))
        for name, value in wanted.items()
    )


def parse_conditions(text: str, columns: Sequence[str]) -> dict[str, str] | None:
    """Return the values by column of `MANDT=100` or `MANDT=100,MATNR=4711`; None for another form. A comma ends a value
    only before one of `columns`."""
    names = "|".join(re.escape(name) for name in sorted(columns, key=len, reverse=True))
    parts = re.split(rf",(?=(?:{names})=)", text) if names else [text]
    pairs = [part.partition("=") for part in parts]
    return {name: value for name, _, value in pairs} if all(sign for _, sign, _ in pairs) else None


@dataclass(slots=True)
class RetryReport(Report):
    """Counts in rows: `retried = upserted + empty + gone + quarantined`, unless `stopped` (ended early on request).

    `gone`: no longer in the source, so the entry was dropped. `quarantined`: failed again, attempts counted from one;
    also rows whose key is too long to look up, which only a sync can read.
    """

    retried: int = 0
    upserted: int = 0
    empty: int = 0
    gone: int = 0
    quarantined: int = 0
    embedded_texts: int = 0
    tokens: int = 0
    stopped: bool = False
    seconds: float = 0.0


def retry(
    spec: CollectionSpec, ends: Ends, ids: Sequence[str] | None, options: SyncOptions, watch: Watch | None = None
) -> RetryReport:
    """Read quarantined rows (`ids` None: all) again by key, then render, embed and store them as a sync does.

    Rows that succeed, are gone or are now empty leave quarantine. Raises as `sync`.
    """
    watch = watch or Watch()
    start = time.perf_counter()
    report = RetryReport(spec.name)
    renderer = Renderer(spec, ends.source.describe(spec.source), ends.embedder)
    ends.store.open(spec.name, ends.embedder)
    with ExitStack() as held:
        lease = take_lease(held, ends.store, spec.name, options, watch)
        if lease is None:
            return RetryReport(spec.name, stopped=True)
        checkpoint = ends.store.open(spec.name, ends.embedder)  # again: the last owner may have changed the model
        writer = DocumentWriter(ends, lease, renderer, StageClock(), afresh=True)
        # Read under the lease, to skip rows that another worker has released.
        there = [row.id for row in ends.store.quarantine(spec.name)]
        wanted = there if ids is None else [id_ for id_ in there if id_ in set(ids)]
        for first in range(0, len(wanted), options.page_rows):
            _retry_some(wanted[first : first + options.page_rows], ends.source, renderer, writer, report)
            watch.progress(report.retried, len(wanted))
            if watch.stop():
                report.stopped = report.retried < len(wanted)
                break
        if removed := report.gone + report.empty:
            checkpoint = replace(checkpoint, rows_read=checkpoint.rows_read - removed)
            ends.store.apply(lease, ChangeSet(checkpoint=checkpoint, partial=True))
    report.seconds = round(time.perf_counter() - start, 3)
    return report


def _retry_some(
    ids: Sequence[str], source: Source, renderer: Renderer, writer: DocumentWriter, report: RetryReport
) -> None:
    keys = [tuple(parse_id(id_)) for id_ in ids if not _by_digest(id_)]
    keys = [key for key in keys if len(key) == len(renderer.key)]  # others predate a change of the key columns
    rows = {quarantine_id(row.key): row for row in (source.rows(renderer.query, keys) if keys else ())}
    ready: list[Document] = []
    extra = ChangeSet()
    for id_ in ids:
        if _by_digest(id_):
            report.quarantined += 1
            continue
        if id_ not in rows:
            report.gone += 1
            extra.released.append(id_)
            continue
        try:
            document = renderer.document(rows[id_])
        except RowRejected as error:
            report.quarantined += 1
            digest = renderer.row_digest(rows[id_])
            extra.quarantined.append(QuarantinedRow(id_, "render", str(error), digest=digest))
        else:
            if not document.empty:
                ready.append(document)
                continue
            report.empty += 1
        extra.deleted.append(id_)
        extra.released.append(id_)  # if the row failed again, its attempts restart at one
    written = writer.write(ready, extra)
    report.retried += len(ids)
    report.upserted += len(written.upserted)
    report.quarantined += len(written.quarantined)
    report.embedded_texts, report.tokens = writer.embed.embedded, writer.embed.tokens


def _by_digest(id_: str) -> bool:
    return id_.startswith('[{"digest":')


def drop(store: VectorStore, collection: str, ids: Sequence[str], options: SyncOptions) -> int:
    """Drop these entries and return their number. The next sync compares every row, and so retries these, whose sources
    may not report them as changed. Raises LeaseLost while another worker holds the collection."""
    with store.lease(collection, options.owner, options.lease_wait) as lease:
        there, status = {row.id for row in store.quarantine(collection)}, store.status(collection)
        found = [id_ for id_ in ids if id_ in there]
        checkpoint = None if status is None else replace(status.checkpoint, mark=None, last_full=None)
        for start in range(0, len(found), options.page_rows):
            some = found[start : start + options.page_rows]
            store.apply(lease, ChangeSet(released=some, checkpoint=checkpoint, partial=True))
    return len(found)
