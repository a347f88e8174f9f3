"""Predict what a sync would do and how long it might take: read source and store, render, decide, count tokens. Writes
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from connector.discovery.languages import SAMPLE, of_rows
from connector.discovery.text_views import language_of
from connector.document.document import Renderer, quarantine_id
from connector.errors import RowRejected, TextsNotEmbeddable
from connector.model import Checkpoint, CollectionSpec, Document, Row, StoredChunk, VectorCache, is_generation
from connector.protocols import Embedder, Observer, Source
from connector.stores.records import ModelStamp
from connector.stores.store import VectorStore
from connector.sync import schema
from connector.sync.decide import Action, decide
from connector.sync.feeds.choose import check, choose
from connector.sync.feeds.feed import ReadPlan
from connector.sync.in_database import rows_in_sql
from connector.sync.options import Report, SyncOptions
from connector.sync.pipeline import pages_ahead
from connector.sync.reconcile import FREE_DELETES
from connector.sync.sampling import Reservoir
from connector.sync.stored_index import StoredIndex


@dataclass(frozen=True, slots=True)
class PlanOptions(SyncOptions):
    """Options of the sync, and `measure_seconds`: time to embed for the estimate; None: none."""

    samples: int = 5
    measure_seconds: float | None = 2.0


@dataclass(slots=True)
class Plan(Report):
    """Counts in source rows: `rows = new + changed + unchanged + empty + unreadable + superseded`; `deleted` is
    separate. `emptied`: stored rows that are now blank, part of `empty`; they count toward the deletion limit.

    `changed` includes `metadata_only` (nothing to embed). `tokens`: of distinct chunks to embed. Rows to embed:
    `duplicates` repeat the text of an earlier row, `chunked` have several chunks, `truncated` have a chunk too long for
    the model.
    `calls`: chunks that HANA's model embeds, one call each; None: an engine embeds them. `paused`: why a sync would
    pause. `languages`: how many of the `sampled` rows are in which language (ISO 639-1), by
    their text and SAP's language key. `model`: the proposed one if the configured one does not know them. `method`: how
    a sync would find changes now; `reason`: why it would compare everything although another method is configured.
    `seconds`: time spent reading.
    """

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
    emptied: int = 0
    paused: str | None = None
    tokens: int = 0
    truncated: int = 0
    chunked: int = 0
    duplicates: int = 0
    calls: int | None = None
    estimated_seconds: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    samples: list[str] = field(default_factory=list)
    languages: dict[str, int] = field(default_factory=dict)
    sampled: int = 0
    model: str | None = None
    notes: list[str] = field(default_factory=list)


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
    Raises the errors that a sync raises before it writes: configuration errors, ModelMismatch, a lost connection.
    """
    options, table = options or PlanOptions(), source.describe(spec.source)
    check(spec, table, source)
    renderer = Renderer(spec, table, embedder)
    language = language_of(table)
    read = {*renderer.query.key, *renderer.query.columns}
    spoken = language.name if language is not None and language.name in read else None
    status = None if store is None else store.status(spec.name)
    stored: Iterable[Sequence[StoredChunk]] = []
    if store is not None and status is not None:
        configured = ModelStamp.of(embedder)
        if (status.model, status.dimension) == (configured.id, configured.dimension):
            stored = store.stored(spec.name)
        elif status.chunks or status.foreign:  # a sync would recreate an empty collection
            raise ModelStamp(status.model, "", status.dimension).mismatch(spec.name, configured)
    full = is_generation(spec.name)  # a sync compares every row of a generation that it builds
    read_plan = ReadPlan(spec, renderer.query, renderer.digest, table, options.page_rows, source.now(), full)
    before = Checkpoint() if status is None else status.checkpoint
    feed = choose(read_plan, source, before)
    seen = feed.method != "watermark"  # whether the sync would see deletions
    found = _Pass(spec.name, renderer, embedder, options, StoredIndex(stored), seen)(source, spoken, observer)
    if found.deleted and not seen:
        gone = f"{found.deleted:,} rows are gone, which a watermark does not show"
        found.notes.append(f"{gone}: only a full comparison deletes them")
    found.method, found.reason = feed.method, feed.reason
    if embedder.database_model is not None:
        rows = rows_in_sql(source, store, renderer, table, feed, options.rows_stay)
        found.notes.append(
            f"the rows leave HANA: {rows}" if isinstance(rows, str) else "a sync leaves the rows in HANA"
        )
    if schema.was_synced(before, spec.source) and schema.retyped(schema.columns_in_use(renderer, table, spec), before):
        found.paused = "schema_changed"
    if found.deleted and (other := schema.other_key(renderer.key, before)):
        found.notes.append(f"{other}: every row would get a new id")
    return found


class _Pass:
    """One pass over the source."""

    def __init__(
        self,
        collection: str,
        renderer: Renderer,
        embedder: Embedder,
        options: PlanOptions,
        index: StoredIndex,
        seen: bool,
    ) -> None:
        self._renderer = renderer
        self._embedder = embedder
        self._options = options
        self._index = index
        self._seen = seen
        self._plan = Plan(collection)
        self._places: list[int] = []  # a sample is the first text at or after each of these rows
        # Digests of the texts of rows and chunks to embed, and tokens per chunk.
        self._rows: list[NDArray[np.bytes_]] = []
        self._chunks: list[NDArray[np.bytes_]] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._measured: Reservoir[str] = Reservoir(256)
        self._rendered: Reservoir[tuple[str, object]] = Reservoir(SAMPLE)  # texts with their language keys

    def __call__(self, source: Source, language: str | None, observer: Observer | None) -> Plan:
        """Return the plan. `language`: the column with the language of the texts."""
        plan, start = self._plan, time.perf_counter()
        total, count = source.count(self._renderer.query), self._options.samples
        self._places = [total * number // count for number in range(count)]
        with pages_ahead(source, self._renderer.query, self._options.page_rows) as pages:
            for page in pages:
                self._page(page, language)
                if observer is not None:
                    observer.progress(plan.rows, max(total, plan.rows))
        texts, keys = zip(*self._rendered.items, strict=True) if self._rendered.items else ((), ())
        plan.languages, plan.sampled = of_rows(texts, keys), len(texts)
        plan.deleted = int((~self._index.seen).sum())
        limit = self._options.max_deletes * len(self._index)
        if (self._seen and plan.deleted > limit) or plan.emptied > max(FREE_DELETES, limit):
            plan.paused = "max_deletes"
        if self._chunks:
            _, first = np.unique(np.concatenate(self._chunks), return_index=True)
            plan.tokens = int(np.concatenate(self._tokens)[first].sum())
            rows = np.concatenate(self._rows)
            plan.duplicates = len(rows) - len(np.unique(rows))
        plan.seconds = round(time.perf_counter() - start, 3)
        if self._embedder.database_model is not None:
            plan.calls = sum(map(len, self._chunks))
            plan.notes.append(
                f"{self._embedder.model} would embed {plan.calls:,} texts, one call of VECTOR_EMBEDDING each, equal "
                "texts each time; tokens are estimated, and time is not measured, because calls may be charged"
            )
        elif self._options.measure_seconds is not None:
            self._estimate(self._options.measure_seconds)
        return plan

    def _page(self, rows: Sequence[Row], language: str | None) -> None:
        plan, samples = self._plan, self._plan.samples
        documents: dict[str, Document] = {}  # as in a sync: the last row of each key
        for row, document in zip(rows, self._renderer.documents(rows), strict=True):
            if isinstance(document, RowRejected):
                plan.unreadable += 1
                self._index.mark_seen(self._index.positions([quarantine_id(row.key)]))
                continue
            plan.superseded += document.id in documents
            documents[document.id] = document
            if not document.empty:
                self._rendered.add((document.text, row.values[language] if language else None))
        positions = self._index.positions(list(documents))
        self._index.mark_seen(positions)
        to_embed = []
        for number, (document, position) in enumerate(
            zip(documents.values(), positions.tolist(), strict=True), plan.rows
        ):
            action = decide(self._index.hashes(position), document)
            plan.empty += document.empty
            plan.emptied += action is Action.REMOVE
            plan.unchanged += action in (Action.KEEP, Action.REHASH)
            plan.metadata_only += action is Action.METADATA
            plan.changed += action in (Action.METADATA, Action.REPLACE)
            plan.new += action is Action.ADD
            if action.embeds:
                to_embed.append(document)
            due = len(samples) < len(self._places) and number >= self._places[len(samples)]
            if due and document.text and document.text not in samples:
                samples.append(document.text)
        plan.rows += len(rows)
        if to_embed:
            self._add(to_embed)

    def _add(self, documents: Sequence[Document]) -> None:
        """Count the texts to embed."""
        chunks = self._renderer.chunks_of(documents)
        texts = [chunk.text for of_document in chunks for chunk in of_document]
        tokens = np.asarray(self._embedder.count_tokens(texts), dtype=np.int64)
        first = np.cumsum([0, *map(len, chunks[:-1])])
        self._plan.chunked += sum(len(of_document) > 1 for of_document in chunks)
        self._plan.truncated += int(np.count_nonzero(np.add.reduceat(tokens > self._embedder.max_tokens, first)))
        self._rows.append(np.frombuffer(b"".join(document.text_digest for document in documents), dtype="S16"))
        self._chunks.append(np.frombuffer(b"".join(map(VectorCache.key, texts)), dtype="S16"))
        self._tokens.append(tokens)
        for text in texts:
            self._measured.add(text)

    def _estimate(self, seconds: float) -> None:
        """Estimate reading by the time just taken, and embedding by tokens: embed texts repeatedly in growing batches,
        for at most `seconds` including a warm-up. Excludes writing, because a plan must not write to measure it."""
        plan, texts = self._plan, self._measured.items
        if not plan.tokens:
            plan.estimated_seconds = plan.seconds
            return

        def embedded(some: Sequence[str]) -> int:
            """Return the number of tokens; 0 if the texts could not be embedded."""
            try:
                return sum(self._embedder.embed_counted(list(some))[1])
            except TextsNotEmbeddable:
                return 0

        deadline = time.perf_counter() + seconds
        tokens, busy, start, size = 0, 0.0, 0, 8
        healthy = embedded(texts[:size])
        while healthy and time.perf_counter() < deadline and busy < seconds / 4:
            began = time.perf_counter()
            if counted := embedded(texts[start : start + size]):
                tokens += counted
                busy += max(time.perf_counter() - began, 1e-9)
            start, size = (start + size, size * 2) if start + size < len(texts) else (0, size)
        if tokens:
            plan.tokens_per_second = round(tokens / busy, 1)
            plan.estimated_seconds = round(plan.seconds + plan.tokens * busy / tokens, 3)
