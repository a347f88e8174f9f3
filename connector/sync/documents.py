"""Collections that clients write: documents in, by ids of their own, each call one transaction; and what proves them.
Knows the protocols of `protocols.py`; no source, no SQL.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from connector.document.chunking import Chunker
from connector.document.document import chunks, document_id, metadata_digest, parse_id, vector_digest
from connector.errors import BadDocument, LeaseLost, RowRejected, RowsRejected, WrongOrigin
from connector.model import ChangeSet, Checkpoint, Chunk, CollectionSpec, Document, Lease
from connector.protocols import Embedder
from connector.stores.records import FOREIGN, AskedIds, metadata_text
from connector.stores.store import VectorStore
from connector.sync.clock import StageClock
from connector.sync.difference import Difference, StoredIndex
from connector.sync.embedding import TextEmbedder, Vector, VectorCache
from connector.sync.schema import WRITTEN

DEEPEST = 100
"""Levels of a document's metadata."""
KEY = ("id",)
"""The key of such a collection, for hits."""
_CHECKPOINT = Checkpoint(key=KEY, mark=WRITTEN)


@dataclass(frozen=True, slots=True)
class NewDocument:
    """What a client sends. `id` None: a new UUID. `metadata`: what JSON has a form for, up to DEEPEST levels; filters
    look at texts, numbers, true and false on the first level."""

    id: str | None
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Put:
    """`ids` in the order of the documents. Counts in documents: `upserted` were written, the others stood there already
    just so. An id that was given twice counts once, with its last document."""

    ids: list[str]
    upserted: int = 0
    unchanged: int = 0
    embedded_texts: int = 0
    tokens: int = 0


def stored_id(given: str) -> str:
    """The id in the store of what clients call `given`. Raises RowRejected above 2000 characters."""
    return document_id((given,))


def given_id(stored: str) -> str:
    """The reverse of `stored_id`. Raises ValueError for what that cannot have made."""
    values = parse_id(stored)
    if len(values) != 1 or not isinstance(values[0], str):
        raise ValueError("this id is not of a collection that clients write")
    return values[0]


def stored_ids(spec: CollectionSpec, shown: Sequence[str]) -> list[str]:
    """The ids in the store of those that people are shown; what cannot be the id of a document is left out."""
    return [stored_id(id_) for id_ in shown if _may_be_id(id_)] if spec.written_by_clients else list(shown)


def readable_ids(spec: CollectionSpec, shown: Sequence[str]) -> list[str]:
    """Return what the store may call the rows that people are shown by these ids, each id's candidates in order: a
    client's document may have the id of a row that others wrote, and then means that document."""
    if not spec.written_by_clients:
        return list(shown)
    return [stored for id_ in shown for stored in (*stored_ids(spec, [id_]), *_foreign_ids([id_]))]


def _foreign_ids(shown: Sequence[str]) -> list[str]:
    return [f"{FOREIGN}{number}" for number in AskedIds.of(shown).foreign]


def shown_id(spec: CollectionSpec, stored: str) -> str:
    """The id that people are shown; of a row that others wrote the store's own."""
    return given_id(stored) if spec.written_by_clients and not stored.startswith(FOREIGN) else stored


@dataclass(frozen=True, slots=True)
class Turn:
    """How a collection's lease is taken for one write: by whom, after how many seconds at most. Threads that share
    `lock` do not keep each other waiting for a lease, which is asked for again and again."""

    owner: str = "documents"
    wait: float = 10.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def taken(self, store: VectorStore, collection: str) -> Iterator[Lease]:
        """Raises LeaseLost when others keep it longer than `wait`."""
        if not self.lock.acquire(timeout=self.wait):
            raise LeaseLost(
                f"collection {collection!r} is being written by others of this process and did not become free in "
                "time; try again"
            )
        try:
            with store.lease(collection, self.owner, self.wait) as lease:
                yield lease
        finally:
            self.lock.release()


class Documents:
    """What clients write of one collection. Thread-safe; other processes may write at the same time, for every write
    takes the collection's lease, shortly."""

    def __init__(self, spec: CollectionSpec, store: VectorStore, embedder: Embedder, turn: Turn) -> None:
        """Raises ConfigurationError for a chunk size that the model does not take."""
        self._spec = spec
        self._store = store
        self._embedder = embedder
        self._chunker = Chunker(spec.chunk, embedder)
        self._turn = turn

    def put(self, documents: Sequence[NewDocument]) -> Put:
        """Store them, replacing those whose ids are there: all of them in one transaction, or none. What is there just
        so is left alone, and where only the metadata differ nothing is embedded.

        Raises BadDocument for the first that cannot be stored (empty text, no id, metadata that JSON has no form for,
        no finite vector), LeaseLost when another writer keeps the collection too long, ModelMismatch, WrongOrigin.
        """
        ids = [str(uuid.uuid4()) if each.id is None else each.id for each in documents]
        wanted: dict[str, tuple[int, Document]] = {}
        for index, (id_, each) in enumerate(zip(ids, documents, strict=True)):
            document = self._document(index, id_, each)
            wanted[document.id] = index, document
        put = Put(ids)
        if wanted:
            _check_origin(self._spec, self._store.open(self._spec.name, self._embedder))
            self._write(wanted, put)
        return put

    # ------------------------------------------------------------------------------------------------- one document

    def _document(self, index: int, id_: str, given: NewDocument) -> Document:
        try:
            _check(id_, given)
            metadata_text(given.metadata)
            # The order of names and what equals what is for the digest to settle, not for what is stored.
            meta_digest = metadata_digest(given.metadata)
            return Document(
                stored_id(id_), given.text, given.metadata, self._chunker.text_digest(given.text), meta_digest
            )
        except RowRejected as error:
            raise BadDocument(f"documents[{index}]: {error}", index=index) from None

    # ---------------------------------------------------------------------------------------------------- all of them

    def _write(self, wanted: Mapping[str, tuple[int, Document]], put: Put) -> None:
        """Embedded before the lease is taken, by what was stored then; what another writer has changed in between is
        seen under the lease, and embedded there."""
        name, vectors = self._spec.name, _Vectors(self._embedder, self._chunker, put)
        vectors.embed([wanted[id_] for id_ in _to_embed(self._differences(wanted))])
        with self._turn.taken(self._store, name) as lease:
            checkpoint = self._store.open(name, self._embedder)
            differences = self._differences(wanted)
            vectors.embed([wanted[id_] for id_ in _to_embed(differences)])
            changes = ChangeSet(partial=True)
            matrix: list[Vector] = []
            for id_, (difference, metadata_only) in differences.items():
                if difference is Difference.SAME:
                    put.unchanged += 1
                    continue
                put.upserted += 1
                if metadata_only:
                    changes.metadata_only += metadata_only
                else:
                    ready, its_vectors = vectors.ready(wanted[id_][1])
                    changes.chunks += ready
                    matrix += its_vectors
            changes.vectors = np.stack(matrix) if matrix else None
            if checkpoint.mark != WRITTEN:
                changes.checkpoint = _CHECKPOINT
            if changes:
                self._apply(lease, changes, wanted)

    def _apply(self, lease: Lease, changes: ChangeSet, wanted: Mapping[str, tuple[int, Document]]) -> None:
        try:
            self._store.apply(lease, changes)
        except RowsRejected as error:
            position, reason = min(error.rows.items())
            written = [*changes.chunks, *changes.metadata_only]
            index = wanted[written[position].id][0]
            raise BadDocument(f"documents[{index}]: {reason}", index=index) from None
        except RowRejected as error:
            raise BadDocument(f"one of the documents, it is not known which, was refused: {error}", index=-1) from None

    def _differences(self, wanted: Mapping[str, tuple[int, Document]]) -> dict[str, tuple[Difference, list[Chunk]]]:
        """By id, with the chunks to write where only the metadata differ."""
        index = StoredIndex(self._store.stored(self._spec.name, list(wanted)))
        positions = index.positions(list(wanted)).tolist()
        found = {}
        for (id_, (_, document)), position in zip(wanted.items(), positions, strict=True):
            difference = index.compare(document, position)
            only = difference is Difference.METADATA
            found[id_] = difference, index.metadata_chunks(document, position) if only else []
        return found


def delete(spec: CollectionSpec, store: VectorStore, ids: Sequence[str], turn: Turn) -> int:
    """Delete the documents of these ids that are there, in one transaction; how many there were. Raises LeaseLost as
    `Documents.put`, and WrongOrigin, having deleted nothing, for the id of a row that others wrote."""
    status = store.status(spec.name)
    known = [stored_id(id_) for id_ in dict.fromkeys(ids) if _may_be_id(id_)]
    if status is None or not known:
        return 0
    _check_origin(spec, status.checkpoint)
    with turn.taken(store, spec.name) as lease:
        there = list(dict.fromkeys(chunk.id for page in store.stored(spec.name, known) for chunk in page))
        _check_writer(spec, store, [id_ for id_ in _foreign_ids(ids) if stored_id(id_) not in there])
        if there:
            store.apply(lease, ChangeSet(deleted=there))
    return len(there)


def _check_origin(spec: CollectionSpec, checkpoint: Checkpoint) -> None:
    if checkpoint.source:
        raise WrongOrigin(
            f'"{spec.name}" holds rows of {checkpoint.source}, from when it was synced from that table: give the '
            "documents a collection of another name"
        )


def _check_writer(spec: CollectionSpec, store: VectorStore, foreign: Sequence[str]) -> None:
    found = store.view(spec.name).texts(foreign) if foreign else []
    if found:
        raise WrongOrigin(
            f'"{spec.name}": the row {found[0].id} was written by another program, not through this service; nothing '
            "was deleted. Delete that row with the program that wrote it"
        )


class _Vectors:
    """The chunks and vectors of documents, each text embedded once."""

    def __init__(self, embedder: Embedder, chunker: Chunker, put: Put) -> None:
        self._embed = TextEmbedder(embedder, StageClock(None))
        self._chunker = chunker
        self._put = put
        self._ready: dict[str, tuple[list[Chunk], list[Vector]]] = {}

    def embed(self, documents: Sequence[tuple[int, Document]]) -> None:
        """Raises BadDocument for a text without a finite vector."""
        new = [(index, each) for index, each in documents if each.id not in self._ready]
        if not new:
            return
        pieces = self._chunker.pieces_of([document.text for _, document in new])
        embedded = self._embed([piece for some in pieces for piece in some])
        self._put.embedded_texts += embedded.embedded_texts
        self._put.tokens += embedded.tokens
        for (index, document), some in zip(new, pieces, strict=True):
            found = [embedded.vectors.get(VectorCache.key(piece)) for piece in some]
            vectors = [vector for vector in found if vector is not None]
            if len(vectors) < len(found):
                raise BadDocument(f"documents[{index}]: the model gave no finite vector for its text", index=index)
            self._ready[document.id] = _hashed(chunks(document, some), vectors), vectors

    def ready(self, document: Document) -> tuple[list[Chunk], list[Vector]]:
        return self._ready[document.id]


def _hashed(of: Sequence[Chunk], vectors: Sequence[Vector]) -> list[Chunk]:
    pairs = zip(of, vectors, strict=True)
    return [replace(chunk, content_hash=chunk.content_hash + vector_digest(vector)) for chunk, vector in pairs]


def _to_embed(differences: Mapping[str, tuple[Difference, list[Chunk]]]) -> Iterator[str]:
    there = (Difference.SAME, Difference.METADATA)
    return (id_ for id_, (difference, _) in differences.items() if difference not in there)


def from_table(spec: CollectionSpec) -> WrongOrigin:
    return WrongOrigin(
        f'"{spec.name}" is synced from {spec.source}, which is where its rows are changed; documents are written to '
        "collections with documents = true"
    )


def nothing_to_sync(name: str) -> WrongOrigin:
    return WrongOrigin(
        f'"{name}" is written by clients (documents = true): there is no table behind it to read, to sync '
        "or to compare with"
    )


# ------------------------------------------------------------------------------------------------- what may be stored


def _check(id_: str, given: NewDocument) -> None:
    if not id_:
        raise RowRejected("its id is empty: leave it out, and it gets one")
    if not _is_text(id_):
        raise RowRejected("its id holds half a character, which is no text")
    if not given.text.strip():
        raise RowRejected("its text is empty")
    if not _is_text(given.text):
        raise RowRejected("its text holds half a character, which is no text")
    if _too_deep(given.metadata):
        raise RowRejected(f"its metadata is nested deeper than {DEEPEST} levels")
    for name, value in given.metadata.items():
        if not isinstance(name, str):
            raise RowRejected("its metadata has a name that is no text")
        if not _is_json(value):
            raise RowRejected(
                f"its metadata {name[:100]!r} holds a value that JSON has no form for: write dates and decimals as "
                "texts"
            )


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _may_be_id(id_: str) -> bool:
    try:
        stored_id(id_)
    except RowRejected:
        return False
    return True


def _is_json(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_text(name) and _is_json(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int)


def _too_deep(value: object) -> bool:
    """Is it nested deeper than DEEPEST? Not by recursion, which is what deep values break: here, and in every parser
    that reads them later."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            part
            for each in level
            if isinstance(each, Mapping | list | tuple)
            for part in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, Mapping | list | tuple) for each in level)
