"""Write documents: chunk and embed them, apply change sets. Rows that the engine or the store rejects go to quarantine;
the others are written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from connector import failpoints
from connector.document.document import UNKNOWN_VECTOR, Renderer, vector_digests
from connector.errors import ConnectorError, Overloaded, RowRejected, RowsRejected, StatementFailed
from connector.model import ChangeSet, Chunk, DatabaseModel, Document, Lease, QuarantinedRow, Vectors
from connector.sync.embedding import TextEmbedder
from connector.sync.options import Ends, StageClock

CHUNKS_PER_APPLY = 1000  # bounds one write transaction; at 384 dimensions about 1.5 MB of vectors
# Bounds of a transaction in which the database embeds the chunks and which locks the lease's row: the first size and
# the largest one. A transaction longer than SLOW_SECONDS halves the size, because a statement has a time limit.
FIRST_EMBEDDED, EMBEDDED_PER_APPLY = 10, 100
SLOW_SECONDS = 5.0
GROW_AFTER = 8  # successful change sets after which a limit below the highest one doubles
_NAMED_ROUNDS = 3  # rounds that split by the rows that the store names; later rounds halve


@dataclass(slots=True)
class Written:
    """`upserted`: document ids. `undone`: rows of `extra.metadata_only` that the store rejected; they are
    also in `quarantined`."""

    upserted: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedRow] = field(default_factory=list)
    undone: int = 0


_NO_REST = ChangeSet()


@dataclass(slots=True)  # not frozen: there is one for each row, and a frozen one takes three times as long to make
class Piece:
    """One document's part of a transaction: chunks with their vectors (None: the database embeds them), or `rest`,
    entries without chunks. `digest`: of the row as read."""

    id: str
    chunks: Sequence[Chunk] = ()
    vectors: Vectors | None = None
    digest: bytes | None = None
    rest: ChangeSet = field(default_factory=lambda: _NO_REST)

    @property
    def weight(self) -> int:
        return len(self.chunks) or max(1, len(self.rest.metadata_only))


Prepared = tuple[list[Piece], list[QuarantinedRow]]  # pieces with all vectors, and rows that the engine rejected


class DocumentWriter:
    """Embeds and writes documents of one collection, for one run. `prepare` may run in several threads, and
    `apply` in one more."""

    def __init__(
        self, ends: Ends, lease: Lease, renderer: Renderer, clock: StageClock, *, afresh: bool = False
    ) -> None:
        """`afresh`: restart the attempts of rejected rows at one."""
        self._store = ends.store
        self._lease = lease
        self.embed = TextEmbedder(ends.embedder, clock)
        self._renderer = renderer
        self._clock = clock
        self._afresh = afresh
        self._model = ends.embedder.database_model
        # The largest number of chunks per change set; lowered while the store is overloaded.
        self.limit = self._most = CHUNKS_PER_APPLY
        # Errors after which smaller change sets are tried.
        self._dividing: tuple[type[ConnectorError], ...] = (RowRejected,)
        if self._model is not None:
            self._dividing = (RowRejected, StatementFailed)  # a single call of the model may fail
            self.limit, self._most = FIRST_EMBEDDED, EMBEDDED_PER_APPLY
        self._streak = 0

    def write(self, documents: Sequence[Document], extra: ChangeSet | None = None) -> Written:
        """Replace the stored versions of `documents`; apply `extra` first, in its own transaction.

        A rejected document is quarantined, and its stored version is removed. An overloaded store, and a database that
        fails to embed, get smaller change sets. Raises infrastructure errors, and Overloaded if a single document is
        too large.
        """
        return self.apply(self.prepare(documents), extra)

    def prepare(self, documents: Sequence[Document]) -> Prepared:
        """Chunk and embed without accessing the store."""
        ready: list[Piece] = []
        refused: list[QuarantinedRow] = []
        if not documents:
            return ready, refused
        with self._clock("tokenize"):
            chunked = self._renderer.chunks_of(documents)
        rendered = [chunk for chunks in chunked for chunk in chunks]
        vectors, sound = self.embed([chunk.text for chunk in rendered])
        failpoints.reach("after_embed")
        hashed, start, end = with_vectors(rendered, vectors), 0, 0
        for document, chunks in zip(documents, chunked, strict=True):
            start, end = end, end + len(chunks)
            if all(sound[start:end]):
                of_piece = None if vectors is None else vectors[start:end]
                ready.append(Piece(document.id, hashed[start:end], of_piece, document.row_digest))
            else:
                reason = "the model gave no finite vector for its text"
                refused.append(QuarantinedRow(document.id, "embed", reason, digest=document.row_digest))
        return ready, refused

    def apply(self, prepared: Prepared, extra: ChangeSet | None = None, closing: ChangeSet | None = None) -> Written:
        """Store `extra`, the prepared documents, and `closing`, each in its own transaction. An empty `closing` still
        checks the lease."""
        ready, refused = prepared
        written = Written()
        failpoints.reach("before_apply")
        if extra:
            self._write_extra(extra, written)
        if refused:
            self._quarantine(refused, written)
        self._write_pieces(ready, written)
        failpoints.reach("after_apply")
        if closing is not None:
            self._apply(closing)
        return written

    def remove(self, ids: Sequence[str]) -> None:
        """Delete the stored versions of these documents."""
        self._write_extra(ChangeSet(deleted=list(ids)), Written())

    def _apply(self, changes: ChangeSet) -> None:
        with self._clock("apply"):
            self._store.apply(self._lease, changes)

    def _write_extra(self, extra: ChangeSet, written: Written) -> None:
        try:
            self._apply(extra)
        except (Overloaded, RowRejected):
            self._write_pieces(_by_document(extra), written)

    def _write_pieces(self, pieces: Sequence[Piece], written: Written) -> None:
        """Apply the pieces in order, as many at a time as the store accepts.

        If the store rejects rows and names them, try each named row in its own change set, and the others together. If
        it names none, or not all, halve until each bad row is in its own change set.
        """
        stack = [(pieces, 0)] if pieces else []
        while stack:
            whole, rounds = stack.pop()
            weight, count = whole[0].weight, 1
            while count < len(whole) and weight + whole[count].weight <= self.limit:
                weight, count = weight + whole[count].weight, count + 1
            part = whole[:count]
            if len(whole) > count:
                stack.append((whole[count:], rounds))
            began = time.monotonic()
            try:
                self._apply(_merged(part, self._model))
            except Overloaded:
                if len(part) == 1:
                    raise
                self.limit = max(1, min(self.limit, weight) // 2)
                self._streak = 0
                stack.append((part, rounds))
            except self._dividing as error:
                if len(part) > 1:
                    parts = _apart(part, error if rounds < _NAMED_ROUNDS else None)
                    stack += [(some, rounds + 1) for some in reversed(parts)]
                elif isinstance(error, RowRejected):
                    self._reject(part[0], error, written)
                else:
                    raise
            else:
                self.adapt(weight, time.monotonic() - began)
                written.upserted += [piece.id for piece in part if piece.chunks]
                if self._model is not None:
                    self.embed.embedded += sum(len(piece.chunks) for piece in part)

    def adapt(self, weight: int, seconds: float) -> None:
        """Adapt the limit after a successful change set."""
        self._streak += 1
        if self._model is not None and seconds > SLOW_SECONDS:
            self.limit, self._streak = max(1, min(self.limit, weight) // 2), 0
        elif self.limit < self._most and self._streak >= GROW_AFTER:
            self.limit, self._streak = min(self._most, self.limit * 2), 0

    def _reject(self, piece: Piece, error: RowRejected, written: Written) -> None:
        """Quarantine a piece that was rejected in its own change set. Raises the error if the piece writes no data of
        the row."""
        if not piece.chunks:
            if not piece.rest.metadata_only:
                raise error
            written.undone += 1
        reason = next(iter(error.rows.values())) if isinstance(error, RowsRejected) else error
        self._quarantine([QuarantinedRow(piece.id, "apply", str(reason), digest=piece.digest)], written)

    def _quarantine(self, rows: Sequence[QuarantinedRow], written: Written) -> None:
        ids = [row.id for row in rows]
        released = ids if self._afresh else []
        self._write_extra(ChangeSet(deleted=ids, quarantined=list(rows), released=released), written)
        written.quarantined += rows


def with_vectors(chunks: Sequence[Chunk], vectors: Vectors | None) -> list[Chunk]:
    """Return the chunks with the vector's digest appended to their hash, so that `verify` detects a changed vector.
    None: the database computes the vectors."""
    digests = [UNKNOWN_VECTOR] * len(chunks) if vectors is None else vector_digests(vectors)
    return [
        Chunk(chunk.id, chunk.number, chunk.text, chunk.metadata, chunk.content_hash + digest)
        for chunk, digest in zip(chunks, digests, strict=True)
    ]


_REST = ("metadata_only", "deleted", "quarantined", "released")  # a change set's entries other than chunks


def entries(changes: ChangeSet) -> int:
    """Count a change set's entries other than chunks."""
    return len(changes.metadata_only) + len(changes.deleted) + len(changes.quarantined) + len(changes.released)


def _merged(pieces: Sequence[Piece], model: DatabaseModel | None) -> ChangeSet:
    """Return one change set. `model`: of the database, if it embeds the chunks."""
    changes = ChangeSet(model=model)
    for piece in pieces:
        if piece.chunks:
            changes.chunks += piece.chunks
            changes.released.append(piece.id)
        else:
            for name in _REST:
                getattr(changes, name).extend(getattr(piece.rest, name))
    vectors = [piece.vectors for piece in pieces if piece.vectors is not None]
    changes.vectors = np.concatenate(vectors) if vectors else None
    return changes


def _by_document(changes: ChangeSet) -> list[Piece]:
    """Split a change set without chunks by document."""
    pieces: dict[str, Piece] = {}
    for name in _REST:
        for entry in getattr(changes, name):
            id_ = entry if isinstance(entry, str) else entry.id
            getattr(pieces.setdefault(id_, Piece(id_, rest=ChangeSet())).rest, name).append(entry)
    return list(pieces.values())


def _apart(pieces: Sequence[Piece], error: ConnectorError | None) -> list[Sequence[Piece]]:
    """Return the parts to try: the pieces that the store does not name, then each named piece; or two halves."""
    if isinstance(error, RowsRejected):
        # The error counts positions over all chunks, then over all metadata.
        owners = [place for place, piece in enumerate(pieces) for _ in piece.chunks]
        owners += [place for place, piece in enumerate(pieces) for _ in piece.rest.metadata_only]
        named = {owners[position] for position in error.rows if 0 <= position < len(owners)}
        others = [piece for place, piece in enumerate(pieces) if place not in named]
        if named and others:
            return [others, *([pieces[place]] for place in sorted(named))]
    middle = len(pieces) // 2
    return [pieces[:middle], pieces[middle:]]
