"""Write documents that clients send with their own ids. Each call is one transaction."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connector.document.document import Chunker, chunks, metadata_digest
from connector.errors import BadDocument, LeaseLost, RowRejected, RowsRejected, WrongOrigin
from connector.model import ChangeSet, Checkpoint, CollectionSpec, Document, Lease, Vectors
from connector.protocols import Embedder
from connector.stores.records import foreign_ids, metadata_text, stored_id, stored_ids
from connector.stores.store import VectorStore
from connector.sync.apply import with_vectors
from connector.sync.decide import Action, decide, rehashed
from connector.sync.embedding import TextEmbedder
from connector.sync.options import StageClock
from connector.sync.schema import WRITTEN
from connector.sync.stored_index import StoredIndex

MAX_DEPTH = 100  # levels of a document's metadata
KEY = ("id",)  # the key of a collection that clients write, for hits
_Wanted = dict[str, tuple[int, Document]]  # by stored id: the place in the request, and the document
# By stored id: the pieces of the text and their vectors; None: the database embeds them.
_Ready = dict[str, tuple[list[str], Vectors | None]]


@dataclass(frozen=True, slots=True)
class NewDocument:
    """`id` None: a new UUID. `metadata`: JSON values, at most MAX_DEPTH levels deep. Filters can use texts, numbers
    and booleans of the first level."""

    id: str | None
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Put:
    """`ids` in the order of the documents. Counts of documents: `upserted` were written, `unchanged` had the same
    content. An id given twice counts once, with its last document."""

    ids: list[str]
    upserted: int = 0
    unchanged: int = 0
    embedded_texts: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """How to take a collection's lease for one write: owner name and seconds to wait. Threads that share `lock` wait on
    it instead of polling for the lease."""

    owner: str = "documents"
    wait: float = 10.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def taken(self, store: VectorStore, collection: str) -> Iterator[Lease]:
        """Hold the lease. Raises LeaseLost if other writers keep it for more than `wait` seconds."""
        if not self.lock.acquire(timeout=self.wait):
            raise LeaseLost(
                f"collection {collection!r} is being written by other requests and did not become free within "
                f"{self.wait:g} s; try again"
            )
        try:
            with store.lease(collection, self.owner, self.wait) as lease:
                yield lease
        finally:
            self.lock.release()


class Documents:
    """Writes documents of one collection. Thread-safe. Other processes may write too, because every write takes the
    lease briefly."""

    def __init__(self, spec: CollectionSpec, store: VectorStore, embedder: Embedder, turn: Turn) -> None:
        """Raise ConfigurationError for a chunk size that the model does not support."""
        self._spec = spec
        self._store = store
        self._embedder = embedder
        self._chunker = Chunker(spec.chunk, embedder)
        self._turn = turn

    def put(self, documents: Sequence[NewDocument]) -> Put:
        """Store all documents in one transaction, or none. Replace stored ones with the same ids, skip unchanged ones,
        and embed nothing if only metadata differs.

        Raises BadDocument for the first invalid document (empty text or id, metadata without JSON form, no finite
        vector), LeaseLost if another writer keeps the lease too long, ModelMismatch, WrongOrigin.
        """
        put = Put([str(uuid.uuid4()) if each.id is None else each.id for each in documents])
        wanted: _Wanted = {}
        for index, (id_, each) in enumerate(zip(put.ids, documents, strict=True)):
            try:
                _check(id_, each)
                metadata_text(each.metadata)
                text_digest, meta_digest = self._chunker.text_digest(each.text), metadata_digest(each.metadata)
                document = Document(stored_id(id_), each.text, each.metadata, text_digest, meta_digest)
            except RowRejected as error:
                raise BadDocument(f"documents[{index}]: {error}", index=index) from None
            wanted[document.id] = index, document
        if wanted:
            name, ready = self._spec.name, _Ready()
            _check_origin(self._spec, self._store.open(name, self._embedder))
            self._prepare(wanted, put, ready)
            with self._turn.taken(self._store, name) as lease:
                checkpoint = self._store.open(name, self._embedder)
                changes, replaced = self._prepare(wanted, put, ready)  # another writer may have changed rows
                if replaced:
                    vectors = [found for id_ in replaced if (found := ready[id_][1]) is not None]
                    changes.vectors = np.concatenate(vectors) if vectors else None
                    changes.model = self._embedder.database_model
                    rendered = [chunk for id_ in replaced for chunk in chunks(wanted[id_][1], ready[id_][0])]
                    changes.chunks = with_vectors(rendered, changes.vectors)
                put.unchanged = len(wanted) - put.upserted
                if checkpoint.mark != WRITTEN:
                    changes.checkpoint = Checkpoint(key=KEY, mark=WRITTEN)
                try:
                    if changes:
                        self._store.apply(lease, changes)
                        put.embedded_texts += 0 if changes.model is None else len(changes.chunks)
                except RowsRejected as error:
                    position, reason = min(error.rows.items())
                    index = wanted[[*changes.chunks, *changes.metadata_only][position].id][0]
                    raise BadDocument(f"documents[{index}]: {reason}", index=index) from None
                except RowRejected as error:
                    message = f"one of the documents was rejected, and the store did not say which: {error}"
                    raise BadDocument(message, index=-1) from None
        return put

    def _prepare(self, wanted: _Wanted, put: Put, ready: _Ready) -> tuple[ChangeSet, list[str]]:
        """Compare the documents with the store and embed changed ones that are not in `ready`. Return the changes,
        without chunks, and the ids whose chunks must be written. Raises BadDocument for a text without a finite
        vector."""
        ids, changes = list(wanted), ChangeSet(partial=True)
        index = StoredIndex(self._store.stored(self._spec.name, ids))
        replaced: list[str] = []
        put.upserted = 0
        for id_, position in zip(ids, index.positions(ids).tolist(), strict=True):
            stored, document = index.hashes(position), wanted[id_][1]
            action = decide(stored, document)
            put.upserted += action is not Action.KEEP
            if action.embeds:
                replaced.append(id_)
            elif action is not Action.KEEP:
                changes.metadata_only += rehashed(stored, document)
        new = [id_ for id_ in replaced if id_ not in ready]
        pieces = self._chunker.pieces_of([wanted[id_][1].text for id_ in new])
        embed = TextEmbedder(self._embedder, StageClock())
        vectors, sound = embed([piece for some in pieces for piece in some])
        start = end = 0
        put.embedded_texts += embed.embedded
        put.tokens += embed.tokens
        for id_, some in zip(new, pieces, strict=True):
            start, end = end, end + len(some)
            if not all(sound[start:end]):
                place = wanted[id_][0]
                raise BadDocument(f"documents[{place}]: the model gave no finite vector for its text", index=place)
            ready[id_] = some, None if vectors is None else vectors[start:end]
        return changes, replaced


def delete(spec: CollectionSpec, store: VectorStore, ids: Sequence[str], turn: Turn) -> int:
    """Delete these documents in one transaction and return their number. Raises LeaseLost as `Documents.put`.
    Raises WrongOrigin for the id of another program's row, and then deletes nothing."""
    status = store.status(spec.name)
    known = stored_ids(spec, list(dict.fromkeys(ids)))
    if status is None or not known:
        return 0
    _check_origin(spec, status.checkpoint)
    with turn.taken(store, spec.name) as lease:
        there = list(dict.fromkeys(chunk.id for page in store.stored(spec.name, known) for chunk in page))
        foreign = [id_ for id_ in foreign_ids(ids) if stored_id(id_) not in there]
        if foreign and (found := store.view(spec.name).texts(foreign)):
            raise WrongOrigin(
                f'"{spec.name}": the row {found[0].id} was written by another program, not through this service; '
                "nothing was deleted. Delete that row with the program that wrote it"
            )
        if there:
            store.apply(lease, ChangeSet(deleted=there))
    return len(there)


def from_table(spec: CollectionSpec) -> WrongOrigin:
    return WrongOrigin(
        f'"{spec.name}" is synced from {spec.source}; change its rows there. Only collections with documents = true '
        "take documents"
    )


def nothing_to_sync(name: str) -> WrongOrigin:
    return WrongOrigin(f'"{name}" is written by clients (documents = true) and has no table to read or to compare with')


def _check_origin(spec: CollectionSpec, checkpoint: Checkpoint) -> None:
    if checkpoint.source:
        raise WrongOrigin(
            f'"{spec.name}" holds rows of {checkpoint.source} from earlier syncs; use another collection name for the '
            "documents"
        )


def _check(id_: str, given: NewDocument) -> None:
    if not id_:
        raise RowRejected("the id is empty; leave it out to get a new one")
    if not _is_text(id_):
        raise RowRejected("the id contains an unpaired surrogate")
    if not given.text.strip():
        raise RowRejected("the text is empty")
    if not _is_text(given.text):
        raise RowRejected("the text contains an unpaired surrogate")
    for name, value in given.metadata.items():
        if not isinstance(name, str):
            raise RowRejected("the metadata has a name that is not a string")
        if not _is_json(value, MAX_DEPTH - 1):
            raise RowRejected(
                f"metadata {name[:100]!r} has a value that JSON cannot represent; write dates and decimals as strings"
            )


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _is_json(value: object, levels: int) -> bool:
    """Return whether JSON can represent a value. Raises RowRejected if it is nested deeper than `levels`."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return _is_text(value)
    if not isinstance(value, Mapping | list | tuple):
        return value is None or isinstance(value, bool | int)
    if not levels:
        raise RowRejected(f"the metadata is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(value, Mapping):
        return all(_is_json(each, levels - 1) for each in value)
    names_and_values = value.items()
    return all(
        isinstance(name, str) and _is_text(name) and _is_json(each, levels - 1) for name, each in names_and_values
    )
