"""A store that is a dictionary: what the reconcile core is tried against thousands of times. It keeps the promises of
`VectorStore` that matter there (one transaction, the epoch compared in it, whole documents) and has no search.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from connector import failpoints
from connector.errors import LeaseLost, RowRejected
from connector.model import ChangeSet, Checkpoint, CollectionStatus, Lease, QuarantinedRow, StoredChunk, StoredRecord
from connector.protocols import Embedder
from connector.stores.records import checked_vectors


@dataclass
class _Data:
    """Everything that one transaction may change."""

    documents: dict[str, list[StoredRecord]] = field(default_factory=dict)
    quarantine: dict[str, QuarantinedRow] = field(default_factory=dict)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


class MemoryStore:
    """One collection. `writes` counts transactions."""

    def __init__(self) -> None:
        self.data = _Data()
        self.epoch = 0
        self.holder: str | None = None
        self.writes = 0
        self._records = 0
        self._clock = datetime(2026, 1, 1, tzinfo=UTC)
        self._lock = threading.RLock()

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        self._dimension = embedder.dimension
        return self.data.checkpoint

    @contextmanager
    def lease(self, collection: str, owner: str, wait: float) -> Iterator[Lease]:
        """Whoever asks gets it: the one before is taken for dead."""
        with self._lock:
            self.epoch += 1
            self.holder = owner
            lease = Lease(collection, owner, self.epoch)
        try:
            yield lease
        finally:
            with self._lock:
                if self.epoch == lease.epoch:
                    self.holder = None

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        with self._lock:
            if lease.epoch != self.epoch:
                raise LeaseLost("another worker has taken over")
            data = _Data(dict(self.data.documents), dict(self.data.quarantine), self.data.checkpoint)
            self._write(data, changes)
            self.data = data
            self.writes += 1

    def _write(self, data: _Data, changes: ChangeSet) -> None:
        vectors = checked_vectors(changes, self._dimension)
        for id_ in (*changes.deleted, *(chunk.id for chunk in changes.chunks)):
            data.documents.pop(id_, None)
        failpoints.reach("mid_upsert")
        for chunk, vector in zip(changes.chunks, vectors, strict=True):
            if len(chunk.content_hash) != 32:
                raise RowRejected("a chunk without the digest of its vector")
            self._records += 1
            record = StoredRecord(
                self._records, chunk.id, chunk.number, chunk.content_hash, "m", chunk.text, dict(chunk.metadata), vector
            )
            data.documents[chunk.id] = [*data.documents.get(chunk.id, []), record]
        for chunk in changes.metadata_only:
            data.documents[chunk.id] = [
                replace(record, metadata=dict(chunk.metadata), content_hash=chunk.content_hash)
                if record.number == chunk.number
                else record
                for record in data.documents.get(chunk.id, [])
            ]
        for id_ in changes.released:
            data.quarantine.pop(id_, None)
        for row in changes.quarantined:
            earlier = data.quarantine.get(row.id)
            data.quarantine[row.id] = replace(row, attempts=row.attempts + (earlier.attempts if earlier else 0))
        if changes.checkpoint is not None:
            self._clock += timedelta(seconds=1)
            last = data.checkpoint.last_sync if changes.partial else self._clock
            data.checkpoint = replace(changes.checkpoint, last_sync=last)
            failpoints.reach("mid_checkpoint")

    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        yield [
            StoredChunk(record.record, id_, record.number or 0, record.content_hash or b"")
            for id_ in (list(self.data.documents) if ids is None else ids)
            for record in self.data.documents.get(id_, [])
        ]

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        yield copy.copy([record for records in self.data.documents.values() for record in records])

    def quarantine(self, collection: str) -> list[QuarantinedRow]:
        return list(self.data.quarantine.values())

    def status(self, collection: str) -> CollectionStatus | None:
        data = self.data
        return CollectionStatus(
            collection=collection,
            store="memory",
            schema=None,
            table="memory",
            generation=1,
            model="m",
            dimension=self._dimension,
            rows=len(data.documents),
            chunks=sum(map(len, data.documents.values())),
            foreign=0,
            empty=data.checkpoint.empty,
            quarantined=len(data.quarantine),
            last_sync=data.checkpoint.last_sync,
            checkpoint=data.checkpoint,
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the reconcile core has no need of {name}")
