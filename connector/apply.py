"""Documents in, stored vectors out: cuts chunks, embeds each distinct text once, applies change sets, sets aside the
rows that the engine or the store refuses. Knows the protocols of `model.py` only, no SQL.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from connector.document import Renderer, vector_digest
from connector.errors import RowRejected, TextsNotEmbeddable
from connector.model import ChangeSet, Chunk, Document, Embedder, Lease, Observer, QuarantinedRow, VectorStore

CHUNKS_PER_APPLY = 1000
"""Bounds one write transaction in the store; at 384 dimensions about 1.5 MB of vectors."""
STAGES = ("read", "render", "tokenize", "embed", "apply")

Vector = NDArray[np.float32]


class StageClock:
    """Seconds each stage was busy, told to an observer as they pass."""

    def __init__(self, observer: Observer | None) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._observer = observer

    @contextmanager
    def __call__(self, stage: str, items: int = 0) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - start, items)

    def add(self, stage: str, seconds: float, items: int = 0) -> None:
        self.seconds[stage] += seconds
        if self._observer is not None:
            self._observer.stage(stage, seconds, items)


class VectorCache:
    """The vectors of the texts last embedded, by text; bounded in bytes, oldest out first."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()
        self._max_bytes = max_bytes
        self._bytes = 0

    @staticmethod
    def key(text: str) -> bytes:
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def get(self, key: bytes) -> Vector | None:
        return self._vectors.get(key)

    def put(self, key: bytes, vector: Vector) -> None:
        self._vectors[key] = vector
        self._bytes += vector.nbytes
        while self._bytes > self._max_bytes:
            _, oldest = self._vectors.popitem(last=False)
            self._bytes -= oldest.nbytes


@dataclass(slots=True)
class Written:
    """What one `DocumentWriter.write` did. `upserted` are document ids."""

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


class DocumentWriter:
    """Embeds and applies documents of one collection. One per run: the cache of vectors lives as long as it does."""

    def __init__(self, target: Target, embedder: Embedder, renderer: Renderer, clock: StageClock) -> None:
        self._target = target
        self._embedder = embedder
        self._renderer = renderer
        self._clock = clock
        self._cache = VectorCache()

    def write(self, documents: Sequence[Document], extra: ChangeSet | None = None) -> Written:
        """Replace what the store holds of `documents`; `extra` is applied first, in a transaction of its own.

        A document the engine or the store refuses is quarantined and what the store held of it is removed; the others
        go on. Infrastructure errors are raised, and everything not yet applied is untouched in the store.
        """
        written = Written()
        if extra:
            self._apply(extra, len(extra.metadata_only) + len(extra.deleted))
        with self._clock("tokenize", len(documents)):
            chunked = list(zip(documents, self._renderer.chunks_of(documents), strict=True))
        vectors = self._vectors([chunk.text for _, chunks in chunked for chunk in chunks], written)
        ready, refused = _ready(chunked, vectors)
        self._refuse(refused, "embed", "the model gave no finite vector for its text", written)
        for batch in _batches(ready):
            self._store(batch, written)
        return written

    # ------------------------------------------------------------------------------------------------- embedding

    def _vectors(self, texts: Sequence[str], written: Written) -> dict[bytes, Vector]:
        """Vector by text key; a text the engine cannot embed is missing."""
        known: dict[bytes, Vector] = {}
        fresh: dict[bytes, str] = {}
        for text in texts:
            key = VectorCache.key(text)
            cached = self._cache.get(key)
            if cached is not None:
                known[key] = cached
            else:
                fresh.setdefault(key, text)
        embedded = self._embed(fresh, written)
        for key, vector in embedded.items():
            self._cache.put(key, vector)
        written.embedded_texts += len(embedded)
        written.reused_texts += len(texts) - len(fresh)
        return known | embedded

    def _embed(self, fresh: dict[bytes, str], written: Written) -> dict[bytes, Vector]:
        if not fresh:
            return {}
        with self._clock("tokenize", len(fresh)):
            written.tokens += sum(self._embedder.count_tokens(list(fresh.values())))
        with self._clock("embed", len(fresh)):
            while fresh:
                try:
                    return dict(zip(fresh, self._embedder.embed_documents(list(fresh.values())), strict=True))
                except TextsNotEmbeddable as error:
                    bad = set(error.indices)
                    good = {key: text for i, (key, text) in enumerate(fresh.items()) if i not in bad}
                    if len(good) == len(fresh):
                        raise
                    fresh = good
        return {}

    # -------------------------------------------------------------------------------------------------- applying

    def _apply(self, changes: ChangeSet, items: int) -> None:
        with self._clock("apply", items):
            self._target.store.apply(self._target.lease, changes)

    def _store(self, batch: Sequence[_Ready], written: Written) -> None:
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


@dataclass(frozen=True, slots=True)
class _Ready:
    """A document with everything the store needs."""

    id: str
    chunks: list[Chunk]
    vectors: list[Vector]


def _ready(
    chunked: Sequence[tuple[Document, list[Chunk]]], vectors: dict[bytes, Vector]
) -> tuple[list[_Ready], list[str]]:
    """Documents whose every chunk has a vector, and the ids of the others."""
    ready: list[_Ready] = []
    refused: list[str] = []
    for document, chunks in chunked:
        found = [vectors.get(VectorCache.key(chunk.text)) for chunk in chunks]
        complete = [vector for vector in found if vector is not None]
        if len(complete) == len(chunks):
            ready.append(_Ready(document.id, _hashed(chunks, complete), complete))
        else:
            refused.append(document.id)
    return ready, refused


def _hashed(chunks: Sequence[Chunk], vectors: Sequence[Vector]) -> list[Chunk]:
    """The stored hash ends in a digest of the vector itself, so that `verify` notices any later change to it."""
    return [
        replace(chunk, content_hash=chunk.content_hash + vector_digest(vector))
        for chunk, vector in zip(chunks, vectors, strict=True)
    ]


def _change_set(batch: Sequence[_Ready]) -> ChangeSet:
    vectors = [vector for ready in batch for vector in ready.vectors]
    return ChangeSet(
        chunks=[chunk for ready in batch for chunk in ready.chunks],
        vectors=np.stack(vectors) if vectors else None,
        released=[ready.id for ready in batch],
    )


def _batches(ready: Sequence[_Ready], limit: int = CHUNKS_PER_APPLY) -> Iterator[list[_Ready]]:
    """Whole documents, at most `limit` chunks together unless one document alone has more."""
    batch: list[_Ready] = []
    chunks = 0
    for document in ready:
        if batch and chunks + len(document.chunks) > limit:
            yield batch
            batch, chunks = [], 0
        batch.append(document)
        chunks += len(document.chunks)
    if batch:
        yield batch
