"""Rows in quarantine: list, retry and drop them. Reads exactly those rows and writes
them the way sync does. Knows the protocols of `protocols.py` only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from connector.document.document import Renderer, parse_id, quarantine_id
from connector.errors import RowRejected, UnknownKey
from connector.model import ChangeSet, CollectionSpec, Document, Key, Lease, QuarantinedRow, Row, Value
from connector.stores.store import VectorStore
from connector.sync.apply import DocumentWriter, Target
from connector.sync.clock import StageClock
from connector.sync.run import Ends, SyncOptions, Watch
from connector.sync.sync import own

Wanted = Mapping[str, Any] | Sequence[Any]
"""A key as people and programs name it: values by column (not necessarily all), or all values in key order."""
Plain = bool | int | float | str | None


# ------------------------------------------------------------------------------------------------ which rows are meant


@dataclass(frozen=True, slots=True)
class Entry:
    """A row in quarantine as users see it: `key` by column name, as in search hits. A key too long to be kept is
    {"digest": ...}."""

    id: str
    key: Mapping[str, Plain]
    stage: str
    reason: str
    attempts: int
    given_up: bool
    """Syncs leave it alone until its content changes or somebody has it retried."""
    last_seen: str | None

    def as_dict(self) -> dict[str, Any]:
        shown = asdict(self)
        del shown["id"]
        return shown


def entry(row: QuarantinedRow, columns: Sequence[str], max_attempts: int) -> Entry:
    """`columns`: names of the key columns as far as they are known. `max_attempts` as in SyncOptions."""
    seen = None if row.last_seen is None else row.last_seen.isoformat()
    key, given_up = _named(row.id, columns), row.given_up(max_attempts)
    return Entry(row.id, key, row.stage, row.reason, row.attempts, given_up, seen)


def _named(id_: str, columns: Sequence[str]) -> dict[str, Plain]:
    if _by_digest(id_):
        return {"digest": str(parse_id(id_)[0])}
    return named_key(parse_id(id_), columns)


def named_key(values: Sequence[Value], columns: Sequence[str]) -> dict[str, Plain]:
    """Key values by column name; by position where the names are not known."""
    names = columns if len(columns) == len(values) else [str(position) for position in range(len(values))]
    return {name: plain(value) for name, value in zip(names, values, strict=True)}


def plain(value: Value) -> Plain:
    """A key value as JSON takes it; what JSON has no type for becomes text."""
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def chosen(entries: Sequence[Entry], wanted: Sequence[Wanted] | None) -> list[Entry]:
    """The entries that are meant, in their order; None: all. Raises UnknownKey for a key that fits none of them."""
    if wanted is None:
        return list(entries)
    ids: set[str] = set()
    for key in wanted:
        found = [entry.id for entry in entries if _fits(entry.key, key)]
        if not found:
            raise UnknownKey(f"no row in quarantine has the key {_shown(key)}; `quarantine list` shows those that are")
        ids.update(found)
    return [entry for entry in entries if entry.id in ids]


def _fits(key: Mapping[str, Plain], wanted: Wanted) -> bool:
    if isinstance(wanted, Mapping):
        return bool(wanted) and all(name in key and _same(key[name], value) for name, value in wanted.items())
    return len(wanted) == len(key) and all(map(_same, key.values(), wanted))


def _same(value: Plain, wanted: Any) -> bool:
    """A column has one type, so 5 and "5" cannot be two keys; NULL is no text."""
    if value is None or wanted is None:
        return value is wanted
    return value == wanted or str(value) == str(wanted)


def _shown(wanted: Wanted) -> str:
    if isinstance(wanted, Mapping):
        return ", ".join(f"{name}={value}" for name, value in wanted.items()) or "{}"
    return ", ".join(map(str, wanted)) or "[]"


def parse_conditions(text: str, columns: Sequence[str]) -> dict[str, str] | None:
    """`MANDT=100` or `MANDT=100,MATNR=4711`: values by column; None when it is not of that form. A comma ends a value
    only before one of `columns`."""
    names = "|".join(re.escape(name) for name in sorted(columns, key=len, reverse=True))
    parts = re.split(rf",(?=(?:{names})=)", text) if names else [text]
    pairs = [part.partition("=") for part in parts]
    return {name: value for name, _, value in pairs} if all(sign for _, sign, _ in pairs) else None


# ----------------------------------------------------------------------------------------------------- trying again


@dataclass(slots=True)
class RetryReport:
    """Counts in rows: `retried = upserted + empty + gone + quarantined`, unless `stopped` (asked to end early).

    `gone`: no longer in the source, so the entry was dropped. `quarantined`: still bad, their attempts counting
    from one again; with them those whose key is too long to be looked up, which only a sync meets again.
    """

    collection: str
    retried: int = 0
    upserted: int = 0
    empty: int = 0
    gone: int = 0
    quarantined: int = 0
    embedded_texts: int = 0
    tokens: int = 0
    stopped: bool = False
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def retry(
    spec: CollectionSpec, ends: Ends, ids: Sequence[str] | None, options: SyncOptions, watch: Watch | None = None
) -> RetryReport:
    """Read the quarantined rows again, by key, and push them through the path of a sync; `ids` None: all of them.

    What has been mended is stored and leaves quarantine, and so do rows that are gone or empty now. Raises as `sync`.
    """
    watch = watch or Watch()
    start = time.perf_counter()
    renderer = Renderer(spec, ends.source.describe(spec.source), ends.embedder)
    ends.store.open(spec.name, ends.embedder)
    with ExitStack() as held:
        lease = own(held, ends.store, spec.name, options, watch)
        if lease is None:
            return RetryReport(spec.name, stopped=True)
        ends.store.open(spec.name, ends.embedder)  # while we waited, another worker may have given it another model
        report = _Retry(ends, renderer, lease)(ids, options.page_rows, watch)
    report.seconds = round(time.perf_counter() - start, 3)
    return report


class _Retry:
    """One pass over the entries under one lease."""

    def __init__(self, ends: Ends, renderer: Renderer, lease: Lease) -> None:
        self._ends = ends
        self._renderer = renderer
        self._report = RetryReport(lease.collection)
        self._lease = lease
        self._writer = DocumentWriter(Target(ends.store, lease, afresh=True), ends.embedder, renderer, StageClock(None))

    def __call__(self, ids: Sequence[str] | None, size: int, watch: Watch) -> RetryReport:
        # Under the lease: what another worker has released meanwhile is not tried again.
        there = [row.id for row in self._ends.store.quarantine(self._lease.collection)]
        wanted = there if ids is None else [id_ for id_ in there if id_ in set(ids)]
        for start in range(0, len(wanted), size):
            self._some(wanted[start : start + size])
            watch.progress(self._report.retried, len(wanted))
            if watch.stop():
                self._report.stopped = self._report.retried < len(wanted)
                break
        return self._report

    def _some(self, ids: Sequence[str]) -> None:
        report, extra = self._report, ChangeSet()
        keys = {id_: key for id_ in ids if not _by_digest(id_) and (key := self._key(id_)) is not None}
        rows = {quarantine_id(row.key): row for row in self._rows(list(keys.values()))}
        ready: list[Document] = []
        for id_ in ids:
            if _by_digest(id_):
                report.quarantined += 1
            elif id_ in rows:
                self._row(rows[id_], ready, extra)
            else:
                report.gone += 1
                extra.released.append(id_)
        written = self._writer.write(ready, extra)
        report.retried += len(ids)
        report.upserted += len(written.upserted)
        report.quarantined += len(written.quarantined)
        report.embedded_texts += written.embedded_texts
        report.tokens += written.tokens

    def _key(self, id_: str) -> Key | None:
        """None for an entry from when the collection had another key: no row has it now."""
        values = tuple(parse_id(id_))
        return values if len(values) == len(self._renderer.key) else None

    def _rows(self, keys: Sequence[Key]) -> list[Row]:
        return self._ends.source.rows(self._renderer.query, keys) if keys else []

    def _row(self, row: Row, ready: list[Document], extra: ChangeSet) -> None:
        try:
            document = self._renderer.document(row)
        except RowRejected as error:
            id_ = quarantine_id(row.key)
            self._report.quarantined += 1
            extra.quarantined.append(QuarantinedRow(id_, "render", str(error), digest=self._renderer.row_digest(row)))
            extra.released.append(id_)  # so that its attempts count from one again
            extra.deleted.append(id_)
            return
        if document.empty:
            self._report.empty += 1
            extra.deleted.append(document.id)
            extra.released.append(document.id)
        else:
            ready.append(document)


def _by_digest(id_: str) -> bool:
    return id_.startswith('[{"digest":')


# ------------------------------------------------------------------------------------------------------- forgetting


def drop(store: VectorStore, collection: str, ids: Sequence[str], options: SyncOptions) -> int:
    """Forget these entries; how many there were. The next sync meets the rows again. Raises LeaseLost while another
    worker holds the collection."""
    with store.lease(collection, options.owner, options.lease_wait) as lease:
        there = {row.id for row in store.quarantine(collection)}
        found = [id_ for id_ in ids if id_ in there]
        for page in _paged(found, options.page_rows):
            store.apply(lease, ChangeSet(released=page))
    return len(found)


def _paged(ids: Sequence[str], size: int) -> Iterator[list[str]]:
    return (list(ids[start : start + size]) for start in range(0, len(ids), size))
