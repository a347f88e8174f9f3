"""Verify a collection: every source row is stored once, with the vector of its current text. Finds missing, stale,
orphaned, duplicate or damaged rows and repairs exactly those on request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

import numpy as np

from connector.document.document import Renderer, content_hash, metadata_json, quarantine_id, vector_digest
from connector.errors import RowRejected, TextsNotEmbeddable
from connector.model import ChangeSet, Chunk, CollectionSpec, Document, Lease, Row, StoredRecord
from connector.protocols import Embedder
from connector.sync.apply import DocumentWriter, Target
from connector.sync.options import Ends, StageClock, SyncOptions, Watch
from connector.sync.pipeline import pages_ahead
from connector.sync.reconcile import FREE_DELETES
from connector.sync.run import take_lease
from connector.sync.schema import check_origin, other_key
from connector.sync.stored_index import id_digest

NORM_TOLERANCE = 1e-3
COSINE_FLOOR = 0.999  # minimum cosine of a stored vector and its text embedded again; fp16 against fp32 stays above it
SAMPLE = 32


@dataclass(slots=True)
class VerifyReport:
    """Counts of source rows, as found. `rows`: distinct stored source rows; `foreign`: records of other programs.

    `ok`: no drift remains, after the repair if any. `repaired`: rows rewritten or removed. `paused`: None, or why a
    repair was not done. `stopped`: ended early on request, so the result is incomplete.
    """

    collection: str
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

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


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
    `max_deletes` or `source_empty`, and a sync with a higher limit deletes them. Rows stored by another key are not
    changed (`schema_changed`).

    `watch` is asked once per page whether to stop; earlier repairs remain. Raises as `sync` does.
    """
    options, watch = options or SyncOptions(), watch or Watch()
    renderer = Renderer(spec, ends.source.describe(spec.source), ends.embedder)
    check_origin(spec.name, ends.store.open(spec.name, ends.embedder))
    if not repair:
        return _Audit(ends, renderer, options, watch)(spec.name)
    with ExitStack() as held:
        lease = take_lease(held, ends.store, spec.name, options, watch)
        if lease is None:
            return VerifyReport(spec.name, stopped=True)
        checkpoint = ends.store.open(spec.name, ends.embedder)  # again: the last owner may have changed the model
        if other_key(renderer.key, checkpoint):  # would write every row twice; sync decides about that
            report = _Audit(ends, renderer, options, watch)(spec.name)
            report.paused = "schema_changed" if report.drift else None
            return report
        report = _Audit(ends, renderer, options, watch, lease)(spec.name)
        if report.drift and report.paused is None and not report.stopped:
            again = _Audit(ends, renderer, options, watch)(spec.name)
            report.ok, report.stopped = again.ok, again.stopped
    return report


class _Audit:
    """One comparison. With a lease it also repairs."""

    def __init__(
        self, ends: Ends, renderer: Renderer, options: SyncOptions, watch: Watch, lease: Lease | None = None
    ) -> None:
        self._ends = ends
        self._renderer = renderer
        self._options = options
        self._watch = watch
        self._lease = lease
        self._report = VerifyReport("")
        self._stored = _Stored()
        self._wrong: list[Document] = []
        self._read = 0
        self._quarantined: set[str] = set()

    def __call__(self, collection: str) -> VerifyReport:
        report, store = self._report, self._ends.store
        report.collection = collection
        status = store.status(collection)
        model = None if status is None else status.model
        for page in store.records(collection):
            self._stored.add(page, model)
            if self._watch.stop():
                report.stopped = True
                return report
        self._stored.check_sample(self._ends.embedder)
        report.rows, report.foreign = len(self._stored.documents), self._stored.foreign
        self._quarantined = {row.id for row in store.quarantine(collection)}
        total = self._ends.source.count(self._renderer.query)
        with pages_ahead(self._ends.source, self._renderer.query, self._options.page_rows) as pages:
            for rows in pages:
                self._read += len(rows)
                self._page(rows)
                self._watch.progress(self._read, total)
                if self._watch.stop():
                    report.stopped = True
                    return report
        report.orphaned += len(self._stored.documents)
        report.ok = not report.drift
        if self._lease is not None:
            self._delete_orphans(self._lease)
        return report

    def _page(self, rows: Sequence[Row]) -> None:
        documents: dict[str, Document] = {}
        for row in rows:
            try:
                document = self._renderer.document(row)
            except RowRejected:
                self._report.quarantined += 1
                self._quarantined.add(quarantine_id(row.key))
            else:
                documents[document.id] = document
        live = [document for document in documents.values() if not document.empty]
        for document, chunks in zip(live, self._renderer.chunks_of(live), strict=True):
            self._check(document, chunks)
        wrong, self._wrong = self._wrong, []
        if self._lease is not None and wrong:
            target = Target(self._ends.store, self._lease)
            written = DocumentWriter(target, self._ends.embedder, self._renderer, StageClock()).write(wrong)
            self._report.repaired += len(written.upserted)

    def _check(self, document: Document, chunks: Sequence[Chunk]) -> None:
        """Count the faults of one document. Ignores empty rows, so their stored documents count as orphaned."""
        report = self._report
        records = self._stored.documents.pop(id_digest(document.id), None)
        if records is None:
            if document.id in self._quarantined:
                report.quarantined += 1
                return
            report.missing += 1
        else:
            duplicate = len({record.number for record in records}) < len(records)
            stale = _stale(document, chunks, records)
            bad = any(record.bad or (record.unlike_model and not stale) for record in records)
            report.duplicates += duplicate
            report.bad_vectors += bad
            report.stale += stale
            if not (duplicate or bad or stale):
                return
        self._wrong.append(document)

    def _delete_orphans(self, lease: Lease) -> None:
        orphans = self._stored.documents
        if not orphans:
            return
        allowed = max(FREE_DELETES, self._options.max_deletes * self._report.rows)
        if not self._read or len(orphans) > allowed:
            self._report.paused = "max_deletes" if self._read else "source_empty"
            return
        # Read to the end first, because deleting moves the pages.
        stored = (chunk.id for page in self._ends.store.stored(lease.collection) for chunk in page)
        ids = list(dict.fromkeys(id_ for id_ in stored if id_digest(id_) in orphans))
        for start in range(0, len(ids), 1000):
            self._ends.store.apply(lease, ChangeSet(deleted=ids[start : start + 1000]))
        self._report.repaired += len(orphans)


@dataclass(slots=True)
class _Record:
    """A stored record without text and vector. `other_model`: its model differs from the collection's. `unlike_model`:
    the model gives another vector for the stored text; meaningless if that text is wrong."""

    number: int
    content_hash: bytes
    text: bytes
    metadata: bytes
    other_model: bool
    bad: bool
    unlike_model: bool = False


@dataclass(slots=True)
class _Stored:
    """Our records by document, and a sample of texts with their vectors."""

    documents: dict[bytes, list[_Record]] = field(default_factory=dict)
    foreign: int = 0
    _sample: list[tuple[_Record, str, np.ndarray]] = field(default_factory=list)
    _sampled_from: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, page: Sequence[StoredRecord], model: str | None) -> None:
        """Add records. `model`: the collection's, by the store's own record."""
        for stored in page:
            if stored.id is None:
                self.foreign += 1
                continue
            record = _judge(stored, model)
            self.documents.setdefault(id_digest(stored.id), []).append(record)
            if not stored.text or stored.vector is None or record.bad:
                continue
            self._sampled_from += 1
            if len(self._sample) < SAMPLE:
                self._sample.append((record, stored.text, stored.vector))
            elif (slot := self._random.randrange(self._sampled_from)) < SAMPLE:
                self._sample[slot] = (record, stored.text, stored.vector)

    def check_sample(self, embedder: Embedder) -> None:
        if not self._sample:
            return
        sample = self._sample
        try:
            again = embedder.embed_documents([text for _, text, _ in sample])
        except TextsNotEmbeddable as error:
            for index in error.indices:
                sample[index][0].unlike_model = True
            sample = [taken for index, taken in enumerate(sample) if index not in set(error.indices)]
            if not sample:
                return
            again = embedder.embed_documents([text for _, text, _ in sample])
        for (record, _, vector), fresh in zip(sample, again, strict=True):
            record.unlike_model = float(fresh @ vector) < COSINE_FLOOR


def _judge(stored: StoredRecord, model: str | None) -> _Record:
    digest = stored.content_hash or b""
    return _Record(
        number=-1 if stored.number is None else stored.number,
        content_hash=digest,
        text=_digest(stored.text or ""),
        metadata=_digest(metadata_json(stored.metadata or {})),
        other_model=stored.model != model,
        bad=not _sound(stored.vector, digest),
    )


def _sound(vector: np.ndarray | None, digest: bytes) -> bool:
    """Return whether the vector has the right dimension, is finite, of length 1, and matches its digest."""
    if vector is None or not bool(np.isfinite(vector).all()):
        return False
    if abs(float(np.linalg.norm(vector.astype(np.float64))) - 1.0) > NORM_TOLERANCE:  # 1e37 squared exceeds float32
        return False
    return len(digest) != 32 or digest[24:] == vector_digest(vector)


def _stale(document: Document, chunks: Sequence[Chunk], records: Sequence[_Record]) -> bool:
    """Return whether the stored chunks, ignoring duplicates, differ from the document's."""
    by_number = {record.number: record for record in records}
    if sorted(by_number) != list(range(len(chunks))):
        return True
    return not all(_matches(document, chunks[record.number], len(chunks), record) for record in records)


def _matches(document: Document, chunk: Chunk, total: int, record: _Record) -> bool:
    return (
        not record.other_model
        and record.content_hash[:16] == content_hash(document, chunk.number, total)[:16]  # then: how it was read
        and len(record.content_hash) == 32
        and record.text == _digest(chunk.text)
        and record.metadata == _digest(metadata_json(chunk.metadata))
    )


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()
