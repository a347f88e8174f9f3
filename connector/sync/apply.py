"""Write documents: chunk and embed them, apply change sets. Rows that the engine or the store rejects go to quarantine;
the others continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from connector import failpoints
from connector.document.document import Renderer, vector_digest
from connector.errors import Overloaded, RowRejected, RowsRejected
from connector.model import ChangeSet, Chunk, Document, Lease, QuarantinedRow
from connector.protocols import Embedder
from connector.stores.store import VectorStore
from connector.sync.embedding import Embedded, TextEmbedder, Vector
from connector.sync.options import StageClock

CHUNKS_PER_APPLY = 1000  # bounds one write transaction; at 384 dimensions about 1.5 MB of vectors
GROW_AFTER = 8  # successful change sets after which the limit doubles again for an overloaded store
_NAMED_ROUNDS = 3  # rounds in which the rows that a store names are taken as complete; then halve the rest


@dataclass(slots=True)
class Written:
    """`upserted`: document ids. `undone`: rows of `extra.metadata_only` that the store rejected; also in
    `quarantined`."""

    upserted: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedRow] = field(default_factory=list)
    embedded_texts: int = 0
    reused_texts: int = 0
    tokens: int = 0
    undone: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """The store to write to, and the lease. `afresh`: count attempts at rejected rows from one."""

    store: VectorStore
    lease: Lease
    afresh: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A document with chunks and vectors. `digest`: of the row as read."""

    id: str
    chunks: list[Chunk]
    vectors: list[Vector]
    digest: bytes

    @property
    def weight(self) -> int:
        return len(self.chunks)

    def add_to(self, changes: ChangeSet) -> None:
        changes.chunks += self.chunks
        changes.released.append(self.id)


@dataclass(frozen=True, slots=True)
class _Rest:
    """The entries of a change set for one document, without chunks."""

    id: str
    changes: ChangeSet = field(default_factory=ChangeSet)

    @property
    def weight(self) -> int:
        return max(1, len(self.changes.metadata_only))

    def add_to(self, changes: ChangeSet) -> None:
        changes.metadata_only += self.changes.metadata_only
        changes.deleted += self.changes.deleted
        changes.quarantined += self.changes.quarantined
        changes.released += self.changes.released


_Piece = Ready | _Rest


@dataclass(frozen=True, slots=True)
class Prepared:
    """Documents with a vector for every chunk, and the rows that the engine rejected."""

    ready: list[Ready]
    refused: list[QuarantinedRow]
    embedded: Embedded


class DocumentWriter:
    """Embeds and writes documents of one collection, for one run. `prepare` and `apply` may run in two threads."""

    def __init__(self, target: Target, embedder: Embedder, renderer: Renderer, clock: StageClock) -> None:
        self._target = target
        self._embed = TextEmbedder(embedder, clock)
        self._renderer = renderer
        self._clock = clock
        # The largest number of chunks per change set; lowered while the store is overloaded.
        self._limit = CHUNKS_PER_APPLY
        self._streak = 0

    def write(self, documents: Sequence[Document], extra: ChangeSet | None = None) -> Written:
        """Replace the stored versions of `documents`; apply `extra` first, in its own transaction.

        A document that the engine or the store rejects is quarantined, and its stored version is removed.
        Infrastructure errors are raised, and work not yet applied leaves the store unchanged. An overloaded store gets
        smaller change sets. Raises Overloaded if a single document is too large.
        """
        return self.apply(self.prepare(documents), extra)

    def prepare(self, documents: Sequence[Document]) -> Prepared:
        """Chunk and embed without accessing the store."""
        if not documents:
            return Prepared([], [], Embedded())
        with self._clock("tokenize", len(documents)):
            chunked = self._renderer.chunks_of(documents)
        embedded = self._embed([chunk.text for chunks in chunked for chunk in chunks])
        failpoints.reach("after_embed")
        prepared = Prepared([], [], embedded)
        for document, chunks in zip(documents, chunked, strict=True):
            vectors = [vector for chunk in chunks if (vector := embedded.vector(chunk.text)) is not None]
            if len(vectors) == len(chunks):
                ready = Ready(document.id, with_vectors(chunks, vectors), vectors, document.row_digest)
                prepared.ready.append(ready)
            else:
                reason = "the model gave no finite vector for its text"
                prepared.refused.append(QuarantinedRow(document.id, "embed", reason, digest=document.row_digest))
        return prepared

    def apply(self, prepared: Prepared, extra: ChangeSet | None = None, closing: ChangeSet | None = None) -> Written:
        """Store `extra`, the prepared documents, and `closing`, each in its own transaction. An empty `closing` still
        checks the lease."""
        embedded = prepared.embedded
        written = Written([], [], embedded.embedded_texts, embedded.reused_texts, embedded.tokens)
        failpoints.reach("before_apply")
        if extra:
            self._write_extra(extra, written)
        if prepared.refused:
            self._quarantine(prepared.refused, written)
        self._write_pieces(prepared.ready, written)
        failpoints.reach("after_apply")
        if closing is not None:
            self._apply(closing, 0)
        return written

    def remove(self, ids: Sequence[str]) -> None:
        """Delete the stored versions of these documents."""
        self._write_extra(ChangeSet(deleted=list(ids)), Written())

    def _apply(self, changes: ChangeSet, items: int) -> None:
        with self._clock("apply", items):
            self._target.store.apply(self._target.lease, changes)

    def _write_extra(self, extra: ChangeSet, written: Written) -> None:
        try:
            self._apply(extra, len(extra.metadata_only) + len(extra.deleted))
        except (Overloaded, RowRejected):
            self._write_pieces(_by_document(extra), written)

    def _write_pieces(self, pieces: Sequence[_Piece], written: Written) -> None:
        """Apply the pieces in order, as many at a time as the store accepts.

        If the store rejects rows, try the rows that it names alone and the others together. If it names none, or not
        all, halve until each bad row is alone.
        """
        stack: list[tuple[Sequence[_Piece], int]] = [(pieces, 0)] if pieces else []
        while stack:
            whole, rounds = stack.pop()
            count = self._fitting(whole)
            part = whole[:count]
            if len(whole) > count:
                stack.append((whole[count:], rounds))
            try:
                self._apply(_merged(part), sum(piece.weight for piece in part))
            except Overloaded:
                if len(part) == 1:
                    raise
                self._limit = max(1, min(self._limit, sum(piece.weight for piece in part)) // 2)
                self._streak = 0
                stack.append((part, rounds))
            except RowRejected as error:
                if len(part) == 1:
                    self._reject(part[0], error, written)
                else:
                    parts = _apart(part, _named(part, error) if rounds < _NAMED_ROUNDS else set())
                    stack += [(some, rounds + 1) for some in reversed(parts)]
            else:
                self._grow()
                written.upserted += [piece.id for piece in part if isinstance(piece, Ready)]

    def _fitting(self, pieces: Sequence[_Piece]) -> int:
        weight = 0
        for count, piece in enumerate(pieces):
            weight += piece.weight
            if count and weight > self._limit:
                return count
        return len(pieces)

    def _grow(self) -> None:
        self._streak += 1
        if self._limit < CHUNKS_PER_APPLY and self._streak >= GROW_AFTER:
            self._limit = min(CHUNKS_PER_APPLY, self._limit * 2)
            self._streak = 0

    def _reject(self, piece: _Piece, error: RowRejected, written: Written) -> None:
        """Quarantine a piece that was rejected alone. Raises the error if the piece writes no data of the row."""
        if isinstance(piece, _Rest):
            if not piece.changes.metadata_only:
                raise error
            written.undone += 1
        reasons: Iterable[RowRejected] = error.rows.values() if isinstance(error, RowsRejected) else (error,)
        digest = piece.digest if isinstance(piece, Ready) else None
        self._quarantine([QuarantinedRow(piece.id, "apply", str(next(iter(reasons))), digest=digest)], written)

    def _quarantine(self, rows: Sequence[QuarantinedRow], written: Written) -> None:
        ids = [row.id for row in rows]
        released = ids if self._target.afresh else []
        self._write_extra(ChangeSet(deleted=ids, quarantined=list(rows), released=released), written)
        written.quarantined += rows


def with_vectors(chunks: Sequence[Chunk], vectors: Sequence[Vector]) -> list[Chunk]:
    """Return the chunks with the vector's digest appended to their hash; `verify` detects a changed vector by it."""
    pairs = zip(chunks, vectors, strict=True)
    return [replace(chunk, content_hash=chunk.content_hash + vector_digest(vector)) for chunk, vector in pairs]


def entries(changes: ChangeSet) -> int:
    """Count a change set's entries other than chunks."""
    return len(changes.metadata_only) + len(changes.deleted) + len(changes.quarantined) + len(changes.released)


def _merged(pieces: Sequence[_Piece]) -> ChangeSet:
    changes = ChangeSet()
    for piece in pieces:
        piece.add_to(changes)
    vectors = [vector for piece in pieces if isinstance(piece, Ready) for vector in piece.vectors]
    changes.vectors = np.stack(vectors) if vectors else None
    return changes


def _by_document(changes: ChangeSet) -> list[_Rest]:
    """Split a change set without chunks by document."""
    pieces: dict[str, _Rest] = {}

    def of(id_: str) -> ChangeSet:
        return pieces.setdefault(id_, _Rest(id_)).changes

    for chunk in changes.metadata_only:
        of(chunk.id).metadata_only.append(chunk)
    for row in changes.quarantined:
        of(row.id).quarantined.append(row)
    for id_ in changes.deleted:
        of(id_).deleted.append(id_)
    for id_ in changes.released:
        of(id_).released.append(id_)
    return list(pieces.values())


def _named(pieces: Sequence[_Piece], error: RowRejected) -> set[int]:
    """Return the positions of the pieces that the store names as bad."""
    if not isinstance(error, RowsRejected):
        return set()
    chunks = [place for place, piece in enumerate(pieces) if isinstance(piece, Ready) for _ in piece.chunks]
    metadata = [
        place for place, piece in enumerate(pieces) if isinstance(piece, _Rest) for _ in piece.changes.metadata_only
    ]
    owners = chunks + metadata
    return {owners[position] for position in error.rows if 0 <= position < len(owners)}


def _apart(pieces: Sequence[_Piece], named: set[int]) -> list[Sequence[_Piece]]:
    others = [piece for place, piece in enumerate(pieces) if place not in named]
    if named and others:
        return [others, *([pieces[place]] for place in sorted(named))]
    middle = len(pieces) // 2
    return [pieces[:middle], pieces[middle:]]
