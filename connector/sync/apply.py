"""Documents in, stored vectors out: cuts chunks, has them embedded, applies change sets, sets aside the rows that the
engine or the store refuses. Knows the protocols of `protocols.py` only, no SQL.
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
from connector.sync.clock import StageClock
from connector.sync.embedding import Embedded, TextEmbedder, Vector, VectorCache

CHUNKS_PER_APPLY = 1000
"""Bounds one write transaction in the store; at 384 dimensions about 1.5 MB of vectors."""
GROW_AFTER = 8
"""Change sets written in a row, after which an overloaded store is given twice as much again."""
_NAMED_ROUNDS = 3
"""How often the rows that a store names are believed to be all; after that the rest is halved."""
_NO_VECTOR = "the model gave no finite vector for its text"


@dataclass(slots=True)
class Written:
    """What was written. `upserted` are document ids. `undone`: rows of `extra.metadata_only` that the store refused;
    they stand in `quarantined`, too."""

    upserted: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedRow] = field(default_factory=list)
    embedded_texts: int = 0
    reused_texts: int = 0
    tokens: int = 0
    undone: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """Where documents go: a store, under a lease. `afresh`: attempts at rows that are refused count from one again."""

    store: VectorStore
    lease: Lease
    afresh: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A document with everything the store needs. `digest`: of the row as it was read."""

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
    """What a change set says of one document beside chunks."""

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
    """Documents whose every chunk has a vector, the rows that the engine refused, and what embedding them took."""

    ready: list[Ready]
    refused: list[QuarantinedRow]
    embedded: Embedded


class DocumentWriter:
    """Embeds and applies documents of one collection. One per run. `prepare` and `apply` may run in two threads, each
    in one."""

    def __init__(self, target: Target, embedder: Embedder, renderer: Renderer, clock: StageClock) -> None:
        self._target = target
        self._embed = TextEmbedder(embedder, clock)
        self._renderer = renderer
        self._clock = clock
        self._size = _Size(CHUNKS_PER_APPLY)

    def write(self, documents: Sequence[Document], extra: ChangeSet | None = None) -> Written:
        """Replace what the store holds of `documents`; `extra` is applied first, in a transaction of its own.

        A document the engine or the store refuses is quarantined and what the store held of it is removed; the others
        go on. Infrastructure errors are raised, and everything not yet applied is untouched in the store. While the
        store is overloaded less is written at a time; Overloaded is raised when a single document is too much.
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
        """Store what was prepared; `extra` first, `closing` last, each in a transaction of its own. An empty `closing`
        makes sure of the lease all the same."""
        embedded = prepared.embedded
        written = Written([], [], embedded.embedded_texts, embedded.reused_texts, embedded.tokens)
        failpoints.reach("before_apply")
        if extra:
            self._extra(extra, written)
        if prepared.refused:
            self._set_aside(prepared.refused, written)
        self._pieces(prepared.ready, written)
        failpoints.reach("after_apply")
        if closing is not None:
            self._apply(closing, 0)
        return written

    def remove(self, ids: Sequence[str]) -> None:
        """Delete what the store holds of these documents; in smaller sets while it is overloaded."""
        self._extra(ChangeSet(deleted=list(ids)), Written())

    def _apply(self, changes: ChangeSet, items: int) -> None:
        with self._clock("apply", items):
            self._target.store.apply(self._target.lease, changes)

    def _extra(self, extra: ChangeSet, written: Written) -> None:
        try:
            self._apply(extra, len(extra.metadata_only) + len(extra.deleted))
        except (Overloaded, RowRejected):
            self._pieces(_by_document(extra), written)

    def _pieces(self, pieces: Sequence[_Piece], written: Written) -> None:
        """Apply them in order, as many at a time as may be. When the store refuses rows, those that it names are tried
        alone and the others together; where it names none, or not all, halves are tried until bad rows stand alone."""
        stack: list[tuple[Sequence[_Piece], int]] = [(pieces, 0)] if pieces else []
        while stack:
            whole, rounds = stack.pop()
            part, rest = self._size.cut(whole)
            if rest:
                stack.append((rest, rounds))
            try:
                self._apply(_merged(part), sum(piece.weight for piece in part))
            except Overloaded:
                if len(part) == 1:
                    raise
                self._size.shrink(part)
                stack.append((part, rounds))
            except RowRejected as error:
                if len(part) == 1:
                    self._refuse(part[0], error, written)
                else:
                    parts = _apart(part, _named(part, error) if rounds < _NAMED_ROUNDS else set())
                    stack += [(some, rounds + 1) for some in reversed(parts)]
            else:
                self._size.grow()
                written.upserted += [piece.id for piece in part if isinstance(piece, Ready)]

    def _refuse(self, piece: _Piece, error: RowRejected, written: Written) -> None:
        """Refused alone. Raises where that is not for the row's data: nothing of them was to be written."""
        if isinstance(piece, _Rest):
            if not piece.changes.metadata_only:
                raise error
            written.undone += 1
        digest = piece.digest if isinstance(piece, Ready) else None
        self._set_aside([QuarantinedRow(piece.id, "apply", _reason(error), digest=digest)], written)

    def _set_aside(self, rows: Sequence[QuarantinedRow], written: Written) -> None:
        ids = [row.id for row in rows]
        released = ids if self._target.afresh else []
        self._extra(ChangeSet(deleted=ids, quarantined=list(rows), released=released), written)
        written.quarantined += rows


class _Size:
    """How many chunks a change set may have: fewer while the store is overloaded, more again when that is over."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._now = most
        self._streak = 0

    def cut(self, pieces: Sequence[_Piece]) -> tuple[Sequence[_Piece], Sequence[_Piece]]:
        """Those that go together, at least one, and the rest."""
        weight = 0
        for place, piece in enumerate(pieces):
            weight += piece.weight
            if place and weight > self._now:
                return pieces[:place], pieces[place:]
        return pieces, ()

    def shrink(self, part: Sequence[_Piece]) -> None:
        self._now = max(1, min(self._now, sum(piece.weight for piece in part)) // 2)
        self._streak = 0

    def grow(self) -> None:
        self._streak += 1
        if self._now < self._most and self._streak >= GROW_AFTER:
            self._now = min(self._most, self._now * 2)
            self._streak = 0


def _prepared(chunked: Sequence[tuple[Document, list[Chunk]]], embedded: Embedded) -> Prepared:
    ready: list[Ready] = []
    refused: list[QuarantinedRow] = []
    for document, chunks in chunked:
        found = [embedded.vectors.get(VectorCache.key(chunk.text)) for chunk in chunks]
        complete = [vector for vector in found if vector is not None]
        if len(complete) == len(chunks):
            ready.append(Ready(document.id, _hashed(chunks, complete), complete, document.row_digest))
        else:
            refused.append(QuarantinedRow(document.id, "embed", _NO_VECTOR, digest=document.row_digest))
    return Prepared(ready, refused, embedded)


def _hashed(chunks: Sequence[Chunk], vectors: Sequence[Vector]) -> list[Chunk]:
    """The stored hash ends in a digest of the vector itself, so that `verify` notices any later change to it."""
    return [
        replace(chunk, content_hash=chunk.content_hash + vector_digest(vector))
        for chunk, vector in zip(chunks, vectors, strict=True)
    ]


def _merged(pieces: Sequence[_Piece]) -> ChangeSet:
    changes = ChangeSet()
    for piece in pieces:
        piece.add_to(changes)
    vectors = [vector for piece in pieces if isinstance(piece, Ready) for vector in piece.vectors]
    changes.vectors = np.stack(vectors) if vectors else None
    return changes


def _by_document(changes: ChangeSet) -> list[_Rest]:
    """A change set without chunks, taken apart: what it says of one document stays together."""
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
    """Which of the pieces the store says are bad."""
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


def _reason(error: RowRejected) -> str:
    """Of a row that was tried alone."""
    reasons: Iterable[RowRejected] = error.rows.values() if isinstance(error, RowsRejected) else (error,)
    return str(next(iter(reasons)))
