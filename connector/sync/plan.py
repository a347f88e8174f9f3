"""Predict what a sync would do and how long it might take: read source and store, render, decide, count tokens. Writes
nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from connector.discovery.roles import Role, guess
from connector.document import lengths
from connector.document.document import Renderer, quarantine_id
from connector.errors import RowRejected, TextsNotEmbeddable
from connector.model import Checkpoint, CollectionSpec, Document, Row
from connector.protocols import Embedder, Observer, Source
from connector.stores.records import ModelStamp
from connector.stores.store import VectorStore
from connector.sync import schema
from connector.sync.decide import Action, decide
from connector.sync.embedding import VectorCache
from connector.sync.feeds.choose import check, choose
from connector.sync.feeds.feed import ReadPlan
from connector.sync.options import StageClock
from connector.sync.pipeline import pages_ahead
from connector.sync.reconcile import FREE_DELETES
from connector.sync.stored_index import StoredIndex

_MEASURED_TEXTS = 256
_FIRST_BATCH = 8
_SEED = 7


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`max_deletes`: as in SyncOptions. `measure_seconds`: time to embed for the estimate; None: no estimate."""

    page_rows: int = 1000
    max_deletes: float = 0.2
    samples: int = 5
    measure_seconds: float | None = 2.0


@dataclass(slots=True)
class Plan:
    """Counts in source rows: `rows = new + changed + unchanged + empty + unreadable + superseded`; `deleted` beside it.

    `changed` includes `metadata_only` (nothing to embed). `tokens`, `duplicates`, `chunked`, `truncated` and the
    histogram are about rows to be embedded: `tokens` of distinct chunks, because equal texts are embedded once;
    `duplicates`: rows with the text of an earlier one; `chunked`: rows with several chunks; `truncated`: rows with a
    chunk that is longer than the model takes. `paused`: the reason for which a sync would pause. `estimated_range`: by
    the slowest and the fastest measured batch. `languages`: values of SAP's language columns, as far as they are read.
    `method`: how a sync would find changes now; `reason`: why it would compare everything although another method is
    configured. The counts are always of all rows.
    """

    collection: str
    method: str = "full"
    reason: str = ""
    rows: int = 0
    new: int = 0
    changed: int = 0
    metadata_only: int = 0
    unchanged: int = 0
    empty: int = 0
    unreadable: int = 0
    superseded: int = 0
    deleted: int = 0
    paused: str | None = None
    tokens: int = 0
    truncated: int = 0
    chunked: int = 0
    duplicates: int = 0
    estimated_seconds: float | None = None
    estimated_range: tuple[float, float] | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    token_histogram: dict[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def plan(
    spec: CollectionSpec,
    source: Source,
    store: VectorStore | None,
    embedder: Embedder,
    options: PlanOptions | None = None,
    observer: Observer | None = None,
) -> Plan:
    """Compare the source with the store without writing, and without a lease.

    `store` None: nothing is stored yet. Memory: sync's index, and 40 bytes for each chunk to be embedded.
    Raises what a sync would before it writes: configuration errors, ModelMismatch, a lost connection.
    """
    options, table = options or PlanOptions(), source.describe(spec.source)
    check(spec, table)
    renderer = Renderer(spec, table, embedder)
    read = (table.column(name) for name in dict.fromkeys((*renderer.query.key, *renderer.query.columns)))
    languages = [column.name for column in read if column is not None and guess(column).role is Role.LANGUAGE]
    found = _Pass(spec.name, renderer, embedder, options, observer)(source, store, languages)
    status = None if store is None else store.status(spec.name)
    read_plan = ReadPlan(spec, renderer.query, renderer.digest, table, options.page_rows, source.now())
    choice = choose(read_plan, source, Checkpoint() if status is None else status.checkpoint)
    found.method, found.reason = choice.method, choice.reason
    before = Checkpoint() if status is None else status.checkpoint
    if schema.was_synced(before, spec.source) and schema.retyped(schema.columns_in_use(renderer, table, spec), before):
        found.paused = "schema_changed"
    if found.deleted and (other := schema.other_key(renderer.key, before)):
        found.notes.append(f"{other}: every row would get a new id")
    return found


class _Pass:
    """One reading of the source."""

    def __init__(
        self, collection: str, renderer: Renderer, embedder: Embedder, options: PlanOptions, observer: Observer | None
    ) -> None:
        self._renderer = renderer
        self._embedder = embedder
        self._options = options
        self._observer = observer
        self._clock = StageClock()
        self._plan = Plan(collection)
        self._workload = _Workload()
        self._emptied = 0  # stored rows that are now blank; they count toward the deletion limit
        self._places: list[int] = []  # a sample is the first text at or after each of these rows
        self._languages: set[str] = set()

    def __call__(self, source: Source, store: VectorStore | None, languages: Sequence[str]) -> Plan:
        """Return the plan. `languages`: the language columns."""
        start = time.perf_counter()
        self._index = _stored(self._plan.collection, store, self._embedder)
        total, count = source.count(self._renderer.query), self._options.samples
        self._places = [total * number // count for number in range(count)]
        with pages_ahead(source, self._renderer.query, self._options.page_rows) as pages:
            for page in pages:
                self._page(page)
                self._languages.update(str(row.values[name] or "").strip() for row in page for name in languages)
                if self._observer is not None:
                    self._observer.progress(self._plan.rows, max(total, self._plan.rows))
        self._plan.languages = sorted(self._languages - {""})
        self._finish(time.perf_counter() - start)
        return self._plan

    def _page(self, rows: Sequence[Row]) -> None:
        documents, samples = self._documents(rows), self._plan.samples
        positions = self._index.positions(list(documents))
        self._index.mark_seen(positions)
        to_embed = []
        found = zip(documents.values(), positions.tolist(), strict=True)
        for number, (document, position) in enumerate(found, self._plan.rows):
            if self._judge(document, position):
                to_embed.append(document)
            due = len(samples) < len(self._places) and number >= self._places[len(samples)]
            if due and document.text and document.text not in samples:
                samples.append(document.text)
        self._plan.rows += len(rows)
        chunks = self._renderer.chunks_of(to_embed)
        texts = [chunk.text for of_document in chunks for chunk in of_document]
        tokens = self._embedder.count_tokens(texts) if texts else []
        self._workload.add([len(of_document) for of_document in chunks], texts, tokens, self._embedder.max_tokens)

    def _documents(self, rows: Sequence[Row]) -> dict[str, Document]:
        """Return documents by id, as in a sync: the last row of each key, without rows that cannot be rendered."""
        documents: dict[str, Document] = {}
        for row in rows:
            try:
                document = self._renderer.document(row)
            except RowRejected:
                self._plan.unreadable += 1
                self._index.mark_seen(self._index.positions([quarantine_id(row.key)]))
                continue
            self._plan.superseded += document.id in documents
            documents[document.id] = document
        return documents

    def _judge(self, document: Document, position: int) -> bool:
        """Count the document; return whether it must be embedded."""
        counted = self._plan
        action = decide(self._index.hashes(position), document)
        counted.empty += document.empty
        self._emptied += action is Action.REMOVE
        counted.unchanged += action in (Action.KEEP, Action.REHASH)
        counted.metadata_only += action is Action.METADATA
        counted.changed += action in (Action.METADATA, Action.REPLACE)
        counted.new += action is Action.ADD
        return action.embeds

    def _finish(self, seconds: float) -> None:
        counted, work = self._plan, self._workload
        counted.deleted = int((~self._index.seen).sum())
        limit = self._options.max_deletes * len(self._index)
        if counted.deleted > limit or self._emptied > max(FREE_DELETES, limit):
            counted.paused = "max_deletes"
        counted.tokens, counted.duplicates = work.distinct()
        counted.chunked, counted.truncated = work.chunked, work.truncated
        counted.token_histogram = work.histogram()
        counted.seconds = round(seconds, 3)
        if self._options.measure_seconds is not None:
            self._estimate(seconds, self._options.measure_seconds)

    def _estimate(self, read_seconds: float, measure_seconds: float) -> None:
        """Estimate reading by the time just taken, and embedding by tokens. Excludes writing, because a plan must not
        write to measure it."""
        counted = self._plan
        if not counted.tokens:
            counted.estimated_seconds = round(read_seconds, 3)
            counted.estimated_range = (counted.estimated_seconds, counted.estimated_seconds)
            return
        speed = _measured(self._embedder, self._workload.some_texts, measure_seconds)
        if speed is not None:
            mean, high, low = (round(read_seconds + counted.tokens / rate, 3) for rate in speed)
            counted.tokens_per_second = round(speed[0], 1)
            counted.estimated_seconds = mean
            counted.estimated_range = (low, high)


def _stored(collection: str, store: VectorStore | None, embedder: Embedder) -> StoredIndex:
    """Return the stored index. Raises ModelMismatch if a sync would."""
    status = None if store is None else store.status(collection)
    if store is None or status is None:
        return StoredIndex([])
    configured = ModelStamp.of(embedder)
    if (status.model, status.dimension) != (configured.id, configured.dimension):
        if status.chunks or status.foreign:
            raise ModelStamp(status.model, "", status.dimension).mismatch(collection, configured)
        return StoredIndex([])  # a sync creates an empty collection again
    return StoredIndex(store.stored(collection))


class _Workload:
    """The texts to embed, as digests and counts, with a few samples to measure."""

    def __init__(self) -> None:
        self.chunked = 0
        self.truncated = 0
        self.some_texts: list[str] = []
        self._seen = 0
        self._buckets = lengths.counted([])
        self._chunks: list[NDArray[np.bytes_]] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._rows: list[NDArray[np.bytes_]] = []
        self._random = random.Random(_SEED)

    def add(self, chunks: Sequence[int], texts: Sequence[str], tokens: Sequence[int], longest: int) -> None:
        """`chunks[i]`: how many of `texts` belong to row i, in order; `longest`: tokens the model takes."""
        chunks = [count for count in chunks if count]
        if not chunks:
            return
        digests = [VectorCache.key(text) for text in texts]
        counts = np.asarray(tokens, dtype=np.int32)
        first = np.concatenate(([0], np.cumsum(chunks)[:-1]))
        self._chunks.append(np.frombuffer(b"".join(digests), dtype="S16"))
        self._tokens.append(counts)
        self._rows.append(_row_digests(digests, chunks))
        self.chunked += sum(count > 1 for count in chunks)
        self.truncated += int(np.count_nonzero(np.add.reduceat(counts > longest, first)))
        of_rows = np.add.reduceat(counts, first)
        self._buckets += lengths.counted(of_rows)
        for text in texts:
            self._keep(text)

    def _keep(self, text: str) -> None:
        self._seen += 1
        if len(self.some_texts) < _MEASURED_TEXTS:
            self.some_texts.append(text)
        elif (place := self._random.randrange(self._seen)) < _MEASURED_TEXTS:
            self.some_texts[place] = text

    def distinct(self) -> tuple[int, int]:
        """Return the tokens of distinct chunks, and the number of rows that repeat the text of an earlier row."""
        if not self._chunks:
            return 0, 0
        _, first = np.unique(np.concatenate(self._chunks), return_index=True)
        rows = np.concatenate(self._rows)
        tokens = np.concatenate(self._tokens).astype(np.int64)[first]
        return int(tokens.sum()), len(rows) - len(np.unique(rows))

    def histogram(self) -> dict[str, int]:
        """Return rows by tokens of their text ("17-32"); the overlap of chunks counts twice."""
        return lengths.named(self._buckets)


def _row_digests(digests: Sequence[bytes], chunks: Sequence[int]) -> NDArray[np.bytes_]:
    """Return one digest per row, equal for rows with equal chunks."""
    parts = iter(digests)
    rows = []
    for count in chunks:
        own = [next(parts) for _ in range(count)]
        rows.append(own[0] if count == 1 else VectorCache.key(b"".join(own).hex()))
    return np.frombuffer(b"".join(rows), dtype="S16")


def _measured(embedder: Embedder, texts: Sequence[str], seconds: float) -> tuple[float, float, float] | None:
    """Embed the texts repeatedly in growing batches, for at most `seconds` after a warm-up. Return tokens per second in
    total, of the slowest and of the fastest batch; None if nothing could be embedded."""
    tokens, busy = 0, 0.0
    rates: list[float] = []
    deadline = time.perf_counter() + seconds
    if not _embeds(embedder, texts[:_FIRST_BATCH]):
        return None
    start, size = 0, _FIRST_BATCH
    while time.perf_counter() < deadline and busy < seconds / 4:
        batch = texts[start : start + size]
        began = time.perf_counter()
        if counted := _embeds(embedder, batch):
            took = max(time.perf_counter() - began, 1e-9)
            busy += took
            tokens += counted
            rates.append(counted / took)
        start, size = (start + size, size * 2) if start + size < len(texts) else (0, size)
    return (tokens / busy, min(rates), max(rates)) if rates else None


def _embeds(embedder: Embedder, texts: Sequence[str]) -> int:
    """Return the number of tokens, 0 when the texts could not be embedded."""
    try:
        return sum(embedder.embed_counted(list(texts))[1])
    except TextsNotEmbeddable:
        return 0
