"""Documents in, stored vectors out: cuts chunks, has them embedded, applies change sets, sets aside the rows that the
engine or the store refuses. Knows the protocols of `model.py` only, no SQL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from connector import failpoints
from connector.clock import StageClock
from connector.document import Renderer, vector_digest
from connector.embedding import Embedded, TextEmbedder, Vector, VectorCache
from connector.errors import RowRejected
from connector.model import ChangeSet, Chunk, Document, Embedder, Lease, QuarantinedRow, VectorStore

CHUNKS_PER_APPLY = 1000
"""Bounds one write transaction in the store; at 384 dimensions about 1.5 MB of vectors."""


@dataclass(slots=True)
class Written:
    """What was written. `upserted` are document ids."""

    upserted: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedRow] = field(default_factory=list)
    embedded_texts: int = 0
    reused_texts: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """Where documents go: a store, under a lease."""

    store: VectorStore
    lease: Lease


@dataclass(frozen=True, slots=True)
class Ready:
    """A document with everything the store needs."""

    id: str
    chunks: list[Chunk]
    vectors: list[Vector]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Documents whose every chunk has a vector, the ids of those the engine refused, and what embedding them took."""

    ready: list[Ready]
    refused: list[str]
    embedded: Embedded


class DocumentWriter:
    """Embeds and applies documents of one collection. One per run. `prepare` and `apply` may run in two threads, each
    in one."""

    def __init__(self, target: Target, embedder: Embedder, renderer: Renderer, clock: StageClock) -> None:
        self._target = target
        self._embed = TextEmbedder(embedder, clock)
        self._renderer = renderer
        self._clock = clock

    def write(self, documents: Sequence[Document], extra: ChangeSet | None = None) -> Written:
        """Replace what the store holds of `documents`; `extra` is applied first, in a transaction of its own.

        A document the engine or the store refuses is quarantined and what the store held of it is removed; the others
        go on. Infrastructure errors are raised, and everything not yet applied is untouched in the store.
        """
        return self.apply(self.prepare(documents), extra)

    def prepare(self, documents: Sequence[Document]) -> Prepared:
        """Cut and embed; touches no store."""
        if not documents:
            return Prepared([], [], Embedded())
        with self._clock("tokenize", len(documents)):
            chunked = list(zip(documents, self._renderer.chunks_of(documents), strict=True))
        embedded = self._embed([chunk.text for _, chunks in chunked for chunk in chunks])
        failpoints.reach("after_embed")
        return _prepared(chunked, embedded)

    def apply(self, prepared: Prepared, extra: ChangeSet | None = None, closing: ChangeSet | None = None) -> Written:
        """Store what was prepared; `extra` first, `closing` last, each in a transaction of its own."""
        embedded = prepared.embedded
        written = Written([], [], embedded.embedded_texts, embedded.reused_texts, embedded.tokens)
        failpoints.reach("before_apply")
        if extra:
            self._apply(extra, len(extra.metadata_only) + len(extra.deleted))
        self._refuse(prepared.refused, "embed", "the model gave no finite vector for its text", written)
        for batch in _batches(prepared.ready):
            self._store(batch, written)
        failpoints.reach("after_apply")
        if closing:
            self._apply(closing, 0)
        return written

    def _apply(self, changes: ChangeSet, items: int) -> None:
        with self._clock("apply", items):
            self._target.store.apply(self._target.lease, changes)

    def _store(self, batch: Sequence[Ready], written: Written) -> None:
        """Apply a batch; when the store refuses a row of it, halve until that row stands alone."""
        try:
            self._apply(_change_set(batch), sum(len(ready.chunks) for ready in batch))
        except RowRejected as error:
            if len(batch) == 1:
                self._refuse([batch[0].id], "apply", str(error), written)
                return
            middle = len(batch) // 2
            self._store(batch[:middle], written)
            self._store(batch[middle:], written)
        else:
            written.upserted += [ready.id for ready in batch]

    def _refuse(self, ids: Sequence[str], stage: str, reason: str, written: Written) -> None:
        if not ids:
            return
        rows = [QuarantinedRow(id_, stage, reason) for id_ in ids]
        self._apply(ChangeSet(deleted=list(ids), quarantined=rows), len(ids))
        written.quarantined += rows


def _prepared(chunked: Sequence[tuple[Document, list[Chunk]]], embedded: Embedded) -> Prepared:
    ready: list[Ready] = []
    refused: list[str] = []
    for document, chunks in chunked:
        found = [embedded.vectors.get(VectorCache.key(chunk.text)) for chunk in chunks]
        complete = [vector for vector in found if vector is not None]
        if len(complete) == len(chunks):
            ready.append(Ready(document.id, _hashed(chunks, complete), complete))
        else:
            refused.append(document.id)
    return Prepared(ready, refused, embedded)


def _hashed(chunks: Sequence[Chunk], vectors: Sequence[Vector]) -> list[Chunk]:
    """The stored hash ends in a digest of the vector itself, so that `verify` notices any later change to it."""
    return [
        replace(chunk, content_hash=chunk.content_hash + vector_digest(vector))
        for chunk, vector in zip(chunks, vectors, strict=True)
    ]


def _change_set(batch: Sequence[Ready]) -> ChangeSet:
    vectors = [vector for ready in batch for vector in ready.vectors]
    return ChangeSet(
        chunks=[chunk for ready in batch for chunk in ready.chunks],
        vectors=np.stack(vectors) if vectors else None,
        released=[ready.id for ready in batch],
    )


def _batches(ready: Sequence[Ready], limit: int = CHUNKS_PER_APPLY) -> Iterator[list[Ready]]:
    """Whole documents, at most `limit` chunks together unless one document alone has more."""
    batch: list[Ready] = []
    chunks = 0
    for document in ready:
        if batch and chunks + len(document.chunks) > limit:
            yield batch
            batch, chunks = [], 0
        batch.append(document)
        chunks += len(document.chunks)
    if batch:
        yield batch
