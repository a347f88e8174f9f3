"""Verify a collection: every source row is stored once, with the vector of its current text. Finds missing, stale,
orphaned, duplicate or damaged rows and repairs exactly those on request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from connector.document.document import UNKNOWN_VECTOR, Renderer, metadata_json, quarantine_id, vector_digest
from connector.errors import RowRejected, TextsNotEmbeddable
from connector.model import ChangeSet, Checkpoint, Chunk, CollectionSpec, Document, Lease, Row, StoredRecord
from connector.sync.apply import DocumentWriter
from connector.sync.options import Ends, Report, StageClock, SyncOptions, Watch
from connector.sync.pipeline import pages_ahead
from connector.sync.reconcile import FREE_DELETES
from connector.sync.run import take_lease
from connector.sync.sampling import Reservoir
from connector.sync.schema import check_origin, other_key
from connector.sync.stored_index import id_digest

NORM_TOLERANCE = 1e-3
SAMPLE = 32


@dataclass(slots=True)
class VerifyReport(Report):
    """Counts of source rows, as found. `rows`: distinct stored source rows; `foreign`: records of other programs.

    `ok`: no drift remains, after the repair if any. `repaired`: rows rewritten or removed. `paused`: None, or why a
    repair was not done. `stopped`: ended early on request, so the result is incomplete.
    """

    rows: int = 0
    missing: int = 0
    stale: int = 0
    orphaned: int = 0
    duplicates: int = 0
    bad_vectors: int = 0
    foreign: int = 0
    quarantined: int = 0
    repaired: int = 0
    paused: str | None = None
    stopped: bool = False
    ok: bool = False

    @property
    def drift(self) -> int:
        return self.missing + self.stale + self.orphaned + self.duplicates + self.bad_vectors


def verify(
    spec: CollectionSpec,
    ends: Ends,
    *,
    repair: bool = False,
    options: SyncOptions | None = None,
    watch: Watch | None = None,
) -> VerifyReport:
    """Compare the whole collection with its source.

    Reads the store once, then the source once. Checks every stored text, metadata, hash, model and vector, and embeds
    `SAMPLE` stored texts again. `repair` rewrites wrong rows, deletes orphans, and compares again; `ok` is that result.
    If deletions exceed both `max_deletes` and `FREE_DELETES`, or the source is empty, nothing is deleted: `paused` is
    `max_deletes` or `source_empty`. Rows stored under another key are not changed (`schema_changed`). `watch` can
    stop the run after each page; earlier repairs remain. Raises as `sync` does.
    """
    options, watch = options or SyncOptions(), watch or Watch()
    renderer = Renderer(spec, ends.source.describe(spec.source), ends.embedder)
    check_origin(spec.name, ends.store.open(spec.name, ends.embedder))
    audit = partial(_Audit, spec.name, ends, renderer, options, watch)
    if not repair:
        return audit()()
    with ExitStack() as held:
        lease = take_lease(held, ends.store, spec.name, options, watch)
        if lease is None:
            return VerifyReport(spec.name, stopped=True)
        checkpoint = ends.store.open(spec.name, ends.embedder)  # again: the last owner may have changed the model
        if other_key(renderer.key, checkpoint):  # a repair would store every row twice: leave it to a sync
            report = audit()()
            report.paused = "schema_changed" if report.drift else None
            return report
        report = audit(lease)()
        if report.drift and report.paused is None and not report.stopped:
            again = audit()()
            report.ok, report.stopped = again.ok, again.stopped
    return report


@dataclass(slots=True)
class _Record:
    """A stored record. `content`: a digest of the parts that must agree with the source. `bad`: its vector is damaged.
    `unlike_model`: the model gives another vector for the stored text; meaningless if that text is wrong."""

    number: int
    content: bytes
    bad: bool
    unlike_model: bool = False


class _Audit:
    """One comparison. With a lease it also repairs."""

    def __init__(
        self, name: str, ends: Ends, renderer: Renderer, options: SyncOptions, watch: Watch, lease: Lease | None = None
    ) -> None:
        self._ends = ends
        self._renderer = renderer
        self._options = options
        self._watch = watch
        self._lease = lease
        self._report = VerifyReport(name)
        self._stored: dict[bytes, list[_Record]] = {}  # our records by document; those of compared rows are removed
        self._read = 0
        self._quarantined: set[str] = set()

    def __call__(self) -> VerifyReport:
        report, store = self._report, self._ends.store
        status, query = store.status(report.collection), self._renderer.query
        model = None if status is None else status.model
        sample: Reservoir[tuple[_Record, StoredRecord]] = Reservoir(SAMPLE)
        fetched = self._ends.embedder.database_model is None
        for page in store.records(report.collection, vectors=fetched):
            for stored in page:
                if stored.id is None:
                    report.foreign += 1
                    continue
                record = _judged(stored, model)
                self._stored.setdefault(id_digest(stored.id), []).append(record)
                if stored.text and not record.bad:
                    sample.add((record, stored))
            if self._watch.stop():
                report.stopped = True
                return report
        self._embed_again(sample.items)
        report.rows = len(self._stored)
        self._quarantined = {row.id for row in store.quarantine(report.collection)}
        total = self._ends.source.count(query)
        with pages_ahead(self._ends.source, query, self._options.page_rows) as pages:
            for rows in pages:
                self._read += len(rows)
                self._page(rows)
                self._watch.progress(self._read, total)
                if self._watch.stop():
                    report.stopped = True
                    return report
        report.orphaned += len(self._stored)
        report.ok = not report.drift
        if self._lease is not None and status is not None and self._stored:
            self._delete_orphans(self._lease, status.checkpoint)
        return report

    def _embed_again(self, sample: Sequence[tuple[_Record, StoredRecord]]) -> None:
        """Compare the vectors of sampled texts with those that the model gives now."""
        if not sample:
            return
        embedder = self._ends.embedder
        if (model := embedder.database_model) is not None:
            ids = [stored.record for _, stored in sample]
            cosines = self._ends.store.likeness(self._report.collection, ids, model)
            for record, stored in sample:
                record.unlike_model = cosines.get(stored.record, 0.0) < embedder.least_cosine
            return
        try:
            again = embedder.embed_documents([stored.text or "" for _, stored in sample])
        except TextsNotEmbeddable as error:
            for index in error.indices:
                sample[index][0].unlike_model = True
            sample = [taken for taken in sample if not taken[0].unlike_model]
            if not sample:
                return
            again = embedder.embed_documents([stored.text or "" for _, stored in sample])
        for (record, stored), fresh in zip(sample, again, strict=True):
            record.unlike_model = float(fresh @ stored.vector) < embedder.least_cosine

    def _page(self, rows: Sequence[Row]) -> None:
        documents: dict[str, Document] = {}
        for row, document in zip(rows, self._renderer.documents(rows), strict=True):
            if isinstance(document, RowRejected):
                self._report.quarantined += 1
                self._quarantined.add(quarantine_id(row.key))
            else:
                documents[document.id] = document
        # Empty rows are not compared, so their stored documents count as orphaned.
        live = [document for document in documents.values() if not document.empty]
        chunked = zip(live, self._renderer.chunks_of(live), strict=True)
        wrong = [document for document, chunks in chunked if self._is_wrong(document, chunks)]
        if self._lease is not None and wrong:
            written = DocumentWriter(self._ends, self._lease, self._renderer, StageClock()).write(wrong)
            self._report.repaired += len(written.upserted)

    def _is_wrong(self, document: Document, chunks: Sequence[Chunk]) -> bool:
        """Return whether the document must be written again, and count its faults."""
        report = self._report
        records = self._stored.pop(id_digest(document.id), None)
        if records is None:
            waits = document.id in self._quarantined
            report.quarantined += waits
            report.missing += not waits
            return not waits
        duplicate = len({record.number for record in records}) < len(records)
        wanted = {(chunk.number, _content(chunk.content_hash, chunk.text, chunk.metadata)) for chunk in chunks}
        stale = {(record.number, record.content) for record in records} != wanted
        bad = any(record.bad or (record.unlike_model and not stale) for record in records)
        report.duplicates += duplicate
        report.bad_vectors += bad
        report.stale += stale
        return duplicate or bad or stale

    def _delete_orphans(self, lease: Lease, checkpoint: Checkpoint) -> None:
        orphans = self._stored
        allowed = max(FREE_DELETES, self._options.max_deletes * self._report.rows)
        if not self._read or len(orphans) > allowed:
            self._report.paused = "max_deletes" if self._read else "source_empty"
            return
        # Read all pages before deleting, because deletions shift the pages.
        stored = (chunk.id for page in self._ends.store.stored(lease.collection) for chunk in page)
        ids = list(dict.fromkeys(id_ for id_ in stored if id_digest(id_) in orphans))
        for start in range(0, len(ids), 1000):
            some = ids[start : start + 1000]
            checkpoint = replace(checkpoint, rows_read=checkpoint.rows_read - len(some))
            self._ends.store.apply(lease, ChangeSet(deleted=some, checkpoint=checkpoint, partial=True))
        self._report.repaired += len(orphans)


def _judged(stored: StoredRecord, model: str | None) -> _Record:
    """Return the record. Its vector is bad unless it has the right dimension, is finite, of length 1, and matches its
    digest. A vector that was not read has the dimension of its column, and no digest."""
    hashed, vector, length = stored.content_hash or b"", stored.vector, stored.length
    comparable = stored.model == model and len(hashed) == 32
    digest = UNKNOWN_VECTOR
    if vector is not None:
        digest = vector_digest(vector)
        length = float(np.linalg.norm(vector.astype(np.float64)))  # 1e37 squared exceeds float32
    sound = length is not None and abs(length - 1.0) <= NORM_TOLERANCE  # `<=` is false for NaN
    return _Record(
        number=-1 if stored.number is None else stored.number,
        content=_content(hashed, stored.text or "", stored.metadata or {}) if comparable else b"",
        bad=not sound or (len(hashed) == 32 and hashed[24:] != digest),
    )


def _content(content_hash: bytes, text: str, metadata: Mapping[str, Any]) -> bytes:
    """Return a digest of a rendered chunk and of its content hash without the row and vector digests."""
    rendered = f"{len(text)} {text}{metadata_json(metadata)}".encode("utf-8", "surrogatepass")
    return blake2b(content_hash[:16] + rendered, digest_size=12).digest()
