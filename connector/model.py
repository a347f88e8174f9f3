"""The vocabulary of the connector: what a row, a document, a chunk and a hit are, and what a source, a store and an
embedder must do. Knows NumPy and the standard library, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Value = None | bool | int | float | str | Decimal | date | time | datetime | bytes
"""A column value as the driver gives it."""
Scalar = None | bool | int | float | str
"""A metadata value as it stands in JSON."""
Vectors = NDArray[np.float32]
"""Shape (n, dimension), C-contiguous, every row finite and of length 1."""
Key = tuple[Value, ...]
"""Values of the key columns, in the order of `CollectionSpec.key`."""
Filter = Mapping[str, Any]
"""The filter language of `stores/filters.py`."""


# ---------------------------------------------------------------------------------------------- what is configured


@dataclass(frozen=True, slots=True)
class TableRef:
    """A table or view by schema and name, both literal and case-sensitive."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TableRef:
        """Split at the first dot outside double quotes; parts are literal, their quotes go, their case stays.

        >>> TableRef.parse('S."a.b"')
        TableRef(schema='S', name='a.b')

        Raises ValueError when there is no such dot or a part is empty.
        """
        quoted = False
        for position, char in enumerate(text):
            if char == '"':
                quoted = not quoted
            elif char == "." and not quoted:
                schema, name = _unquote(text[:position]), _unquote(text[position + 1 :])
                if schema and name:
                    return cls(schema, name)
                break
        raise ValueError(f'{text!r} is not SCHEMA.TABLE (quote parts that contain a dot: S."a.b")')

    def __str__(self) -> str:
        return f"{_shown(self.schema)}.{_shown(self.name)}"


def _unquote(part: str) -> str:
    if len(part) >= 2 and part[0] == part[-1] == '"':
        return part[1:-1].replace('""', '"')
    return part


def _shown(part: str) -> str:
    return '"' + part.replace('"', '""') + '"' if "." in part or '"' in part else part


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """How long texts are cut. `max_tokens` without special tokens (None: all the model takes), `overlap` in tokens."""

    max_tokens: int | None = None
    overlap: int = 32


@dataclass(frozen=True, slots=True)
class ChangeSpec:
    """How changes of the source are found. Seconds: `delay` keeps away from rows whose transactions may still be open,
    `reconcile` is the longest time between two full comparisons, which every method needs for what it cannot see."""

    method: Literal["full", "watermark", "log", "rowid"] = "full"
    column: str | None = None
    """watermark: the timestamp (or rising number) that every change sets."""
    delay: float = 30.0
    reconcile: float = 86_400.0
    hash: Literal["client", "server"] = "client"
    """full: `server` lets HANA hash the rows, so that unchanged ones move only key and hash."""
    log: TableRef | None = None
    """log: the table that triggers fill; None: named after the collection, beside the source."""


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """One collection as the operator configured it: which rows, as which text, with which metadata."""

    name: str
    source: TableRef
    template: str
    key: tuple[str, ...] = ()
    """Key columns; empty: the primary key of the table."""
    where: str | None = None
    """The operator's own SQL condition, trusted."""
    metadata: tuple[str, ...] = ()
    chunk: ChunkSpec = ChunkSpec()
    changes: ChangeSpec = ChangeSpec()


# ------------------------------------------------------------------------------------------- what the catalogue says


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table or view as the catalogue describes it. `length` in characters, bytes or decimal precision."""

    name: str
    type_name: str
    length: int = 0
    scale: int = 0
    nullable: bool = True
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table or view with its columns in order; `primary_key` is empty for views and for tables without one."""

    ref: TableRef
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    is_view: bool = False
    comment: str = ""

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)


# ------------------------------------------------------------------------------------------------- rows to documents


class Cells(Mapping[str, Value]):
    """The values of one row by column name, without a dictionary for every row: `places` is shared by all rows of a
    query, and `values` stay as the driver gave them."""

    __slots__ = ("_places", "in_order")

    def __init__(self, places: Mapping[str, int], in_order: tuple[Value, ...]) -> None:
        self._places = places
        self.in_order = in_order

    def __getitem__(self, name: str) -> Value:
        return self.in_order[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"Cells({', '.join(self._places)})"  # a row's values belong in no message


@dataclass(frozen=True, slots=True)
class Row:
    """One source row: its key and the columns that template and metadata need, by column name.

    `token` stands for the row's content where the database says what changed (a hash, a row id); None: the values do.
    """

    key: Key
    values: Mapping[str, Value]
    token: bytes | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A rendered row.

    `id` is the canonical JSON array of the key values (never two keys with one id). `text` is "" for an empty row.
    `text_digest` (16 bytes) covers text, chunking and model; `meta_digest` (16 bytes) covers the metadata;
    `row_digest` (8 bytes) what the row was read as: while that is the same, nothing need be rendered to compare.
    """

    id: str
    text: str
    metadata: Mapping[str, Scalar]
    text_digest: bytes
    meta_digest: bytes
    row_digest: bytes = bytes(8)

    @property
    def empty(self) -> bool:
        return not self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored piece of a document. `number` counts from 0.

    `content_hash`: 24 bytes as rendered (`document.content_hash`), 32 once a vector is known (`vector_digest` added).
    """

    id: str
    number: int
    text: str
    metadata: Mapping[str, Scalar]
    content_hash: bytes


# ---------------------------------------------------------------------------------------------------- what is stored


class StoredChunk(NamedTuple):
    """Identity and hash of a chunk in the store, without its text and vector. `record` is the store's own row id. A
    tuple, because a run makes one of every stored row."""

    record: int
    id: str
    number: int
    content_hash: bytes


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A whole record, for verification and export. `id` is None for a foreign row (written by somebody else).

    `vector` is None when the stored bytes are not a vector of the collection's dimension; it may hold NaN.
    """

    record: int
    id: str | None
    number: int | None
    content_hash: bytes | None
    model: str | None
    text: str | None
    metadata: Mapping[str, Any] | None
    vector: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What earlier runs left behind. Correctness never rests on it; it makes differences cheaper to find."""

    last_sync: datetime | None = None
    """UTC, by the store's clock; None: no run has completed yet."""
    rows_read: int = 0
    empty: int = 0
    key: tuple[str, ...] = ()
    """Names of the key columns, so that hits can name them while the source is away."""
    source: str = ""
    """The table that was read."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Type by name of the columns that were used; a change of them pauses the collection."""
    last_full: datetime | None = None
    """When the last complete comparison began, UTC, by the source's clock."""
    mark: Mapping[str, Any] | None = None
    """How far a method other than full has come, in its own words, as JSON. Never ahead of what is stored."""


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A row that could not be processed. `reason` names columns and codes, never the row's text."""

    id: str
    stage: str
    reason: str
    attempts: int = 1
    last_seen: datetime | None = field(default=None, compare=False)
    """When it was last met, UTC, by the store's clock; None before it was written."""
    digest: bytes | None = None
    """What the row was read as (`Document.row_digest`); None: not known. Another one starts its attempts anew."""

    def given_up(self, attempts: int) -> bool:
        """Whether it failed so often with this very content that another attempt is no use."""
        return self.digest is not None and self.attempts >= attempts


@dataclass(slots=True)
class ChangeSet:
    """Everything one `apply` writes, all of it or nothing.

    `vectors[i]` belongs to `chunks[i]`. All chunks of one document stand in one change set; what the store held of that
    document before is replaced. `metadata_only` keeps text and vector and replaces metadata and hash. `deleted` are
    document ids. `checkpoint`, when given, becomes the collection's.
    """

    chunks: list[Chunk] = field(default_factory=list)
    vectors: Vectors | None = None
    metadata_only: list[Chunk] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedRow] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    """Ids whose quarantine entry, if any, goes away."""
    checkpoint: Checkpoint | None = None
    partial: bool = False
    """The checkpoint is of a run still under way: the time of the last sync stays as it was."""

    def __bool__(self) -> bool:
        return bool(
            self.chunks or self.metadata_only or self.deleted or self.quarantined or self.released or self.checkpoint
        )


@dataclass(frozen=True, slots=True)
class CollectionStatus:
    """`rows` counts distinct documents of ours, `chunks` their records, `foreign` the records others wrote."""

    collection: str
    store: str
    schema: str | None
    table: str
    generation: int
    model: str
    dimension: int
    rows: int
    chunks: int
    foreign: int
    empty: int
    quarantined: int
    last_sync: datetime | None
    key: tuple[str, ...] = ()
    """Names of the key columns, as the last complete run read them."""
    checkpoint: Checkpoint = Checkpoint()


GenerationState = Literal["building", "active", "retired"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What loads a model again: the name it was configured by, and what pins it."""

    name: str
    revision: str | None = None
    weights_sha256: str | None = None
    precision: str = "auto"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a generation is made by: rows become texts by `spec`, texts vectors by `model`."""

    spec: CollectionSpec
    model: ModelSource


@dataclass(frozen=True, slots=True)
class Generation:
    """One edition of a collection. The store keeps it under `name`: the collection's own while it serves, else NAME@N,
    which every method but `open` for something new takes like any other collection. A number is never used twice."""

    name: str
    number: int
    state: GenerationState
    model: str
    fingerprint: str
    """As `ModelStamp` has it: it decides whether a model is the one."""
    dimension: int
    table: str
    rows: int | None
    """Documents of ours; None when they were not counted."""
    created: datetime | None
    """UTC, by the store's clock; None for one that an earlier version made."""
    retired: datetime | None
    last_sync: datetime | None
    """None: no run has come to its end yet, so rows are missing."""
    recipe: Recipe | None
    """None when no run has recorded it."""

    @property
    def complete(self) -> bool:
        return self.last_sync is not None


def generation_name(collection: str, number: int) -> str:
    """Of one that does not serve; no configured name has an @."""
    return f"{collection}@{number}"


def is_generation(name: str) -> bool:
    return "@" in name


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result: the best chunk of a document. `score` is the cosine similarity, BM25 or a fused score, by how
    it was found; higher is better. `id` is the document's id; for a foreign row `record:<n>`."""

    id: str
    score: float
    text: str
    metadata: Mapping[str, Any]
    number: int = 0
    record: int = field(default=0, compare=False)
    """The store's own id of the chunk, which `VectorStore.vectors` goes by."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a collection. A write with an older `epoch` than the store's is refused (LeaseLost)."""

    collection: str
    owner: str
    epoch: int


# ------------------------------------------------------------------------------------------------------ the protocols


class Source(Protocol):
    """Where rows come from."""

    def describe(self, ref: TableRef) -> Table:
        """The table or view. Raises UnknownTable with the nearest names."""
        ...

    def count(self, query: Query) -> int: ...

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        """Every row once, in key order, `size` at a time; no cursor and no transaction is open between pages."""
        ...

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        """The keys cut into at most `parts` ranges of about as many of the `rows` rows each; together they hold every
        key there may ever be, and none twice."""
        ...

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        """The rows that exist among `keys`, any order."""
        ...

    def now(self) -> datetime:
        """UTC, by the clock of the database."""
        ...

    @property
    def capture(self) -> Capture:
        """What it can say of its changes; asked only by the methods that need it."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a watermark column: values behind `after`, and of those that hold `after` itself the rows behind
    `key` (None: none of them), up to and including `upto`. Values as `watermarks` writes them."""

    column: Column
    after: str
    key: Key | None
    upto: str


@dataclass(frozen=True, slots=True)
class Passed:
    """Rows of a span in order of (watermark, key), and the watermark of the last one."""

    rows: list[Row]
    last: str


@dataclass(frozen=True, slots=True)
class RowIds:
    """Of a column table: the highest `"$rowid$"` (0 when it is empty) and how many rows it has."""

    highest: int
    rows: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """That the row of this key was inserted, updated or deleted."""

    id: int
    key: Key


Token = Literal["hash", "rowid"]
"""What stands for a row's content: a hash by the database, or the id that every change of the row replaces."""


class Capture(Protocol):
    """What a source can say of its changes. A source that cannot do it raises ConfigurationError, saying why."""

    def table_id(self, table: TableRef) -> int | None:
        """Another one once the table was dropped and made anew; None for a view."""
        ...

    def window(self, query: Query, span: Span, size: int) -> Iterator[Passed]:
        """The rows of a span, each with exactly what `Source.pages` gives of it, `size` at a time."""
        ...

    def highest(self, query: Query, column: Column) -> str | None:
        """The highest value of a watermark column; None when there is none."""
        ...

    def tokens(self, query: Query, token: Token, size: int, *, values: bool = False) -> Iterator[list[Row]]:
        """Every row once, in key order, with its token; without `values` that is all, and the rows hold none."""
        ...

    def row_ids(self, query: Query) -> RowIds:
        """For the table as a whole, whatever `where` says."""
        ...

    def check_log(self, query: Query, log: TableRef) -> None:
        """Raises LogMissing when the log, or a trigger that fills it, is not there or not at work."""
        ...

    def log_length(self, log: TableRef) -> int: ...

    def log_entries(self, query: Query, log: TableRef, after: int, size: int) -> list[LogEntry]:
        """The first `size` entries with an id above `after`, in order of their ids."""
        ...

    def forget(self, log: TableRef, ids: Sequence[int]) -> None:
        """Delete exactly these entries; those that are gone already do not matter."""
        ...


@dataclass(frozen=True, slots=True)
class Query:
    """What to read of a table: `key` and `columns` are names from its catalogue, `where` the operator's own SQL."""

    table: TableRef
    key: tuple[str, ...]
    columns: tuple[str, ...]
    where: str | None = None


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys behind `after` up to and with `upto`, in the order of the database; None: from the first, to the
    last."""

    after: Key | None = None
    upto: Key | None = None


class Embedder(Protocol):
    """Texts in, unit vectors out, same order."""

    dimension: int
    model: str
    """Human name, for MODEL_ID and status."""
    fingerprint: str
    """Changes whenever vectors would: model, weights, pooling, precision family."""
    max_tokens: int
    """Longest text in tokens, without special tokens."""

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Raises TextsNotEmbeddable, naming the texts; everything else about the batch is unaffected."""
        ...

    def embed_query(self, text: str) -> NDArray[np.float32]: ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Without special tokens."""
        ...

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        """Pieces of at most `max_tokens` tokens, each starting up to `overlap` tokens before the end of the one before
        it, cut at word borders where that is possible; exact substrings of `text` that together cover it."""
        ...


class VectorStore(Protocol):
    """Where vectors live. Thread-safe. `collection` is the configured name.

    Writes need a `Lease`; every write transaction compares its epoch.
    """

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        """Create what is missing. Raises ModelMismatch when the collection holds vectors of another model."""
        ...

    def lease(self, collection: str, owner: str, wait: float) -> AbstractContextManager[Lease]:
        """Own the collection for writing; renewed in the background, at most 30 s long after a crash.

        Waits up to `wait` seconds for another owner; raises LeaseLost when it does not let go.
        """
        ...

    def stored(self, collection: str) -> Iterator[list[StoredChunk]]:
        """All our chunks (foreign rows excluded), page by page, in no particular order."""
        ...

    def stored_of(self, collection: str, ids: Sequence[str]) -> list[StoredChunk]:
        """Our chunks of these documents, in no particular order."""
        ...

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        """Everything in the table, foreign rows included, page by page."""
        ...

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        """One transaction. Raises RowRejected when the data is refused, LeaseLost when another worker took over.

        RowsRejected, where the store knows which, by positions in `chunks` and, behind them, `metadata_only`; a name
        may be wrong, and there may be more of them. Overloaded: the store may take a smaller change set.
        """
        ...

    def optimise(self, collection: str) -> None:
        """After a bulk load: build or refresh the search index. Cheap when there is nothing to do."""
        ...

    def search(
        self,
        collection: str,
        vector: NDArray[np.float32],
        k: int,
        where: Filter | None,
        generation: int | None = None,
    ) -> list[Hit]:
        """Best first; one hit per document (its best chunk); ties by id. Raises BadFilter, UnknownCollection, and
        GenerationChanged when another one than `generation` (None: any) serves now."""
        ...

    def keyword(
        self, collection: str, text: str, k: int, where: Filter | None, generation: int | None = None
    ) -> list[Hit]:
        """As `search`, by the words of `text` (`stores/words.py`): whole words whatever their case, any of them, scored
        by BM25, so that rare words and short texts count more. Scores compare within one answer only. None of `text` is
        query syntax. Raises ConfigurationError where the store cannot do it."""
        ...

    def vectors(self, collection: str, hits: Sequence[Hit], generation: int | None = None) -> Vectors:
        """The stored vectors of the chunks that were found, in order; zeros for one that is gone meanwhile."""
        ...

    def quarantine(self, collection: str) -> list[QuarantinedRow]: ...

    def status(self, collection: str) -> CollectionStatus | None:
        """None when the collection was never opened."""
        ...

    def generations(self, collection: str, counted: bool = True) -> list[Generation]:
        """All there are, by number; [] when the collection was never opened. Counting costs a look at every record."""
        ...

    def begin_generation(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        """The name NAME@N of a generation to be built beside the active one, with vectors of `embedder`: the newest
        unfinished one of that model; else the newest retired one of that model and recipe, which is being built again;
        else a new, empty one. Raises UnknownCollection where none is active."""
        ...

    def record_recipe(self, collection: str, number: int, recipe: Recipe) -> None:
        """Remember what generation `number` is made by, serving or not. Nothing happens where there is none."""
        ...

    def switch(self, collection: str, number: int) -> None:
        """Generation `number` serves from now on, and the one that did is retired: one transaction. Who writes to
        either loses the lease. Nothing happens when it serves already. Raises UnknownGeneration."""
        ...

    def drop_generation(self, collection: str, number: int) -> None:
        """Delete one that does not serve, with all it holds; cut short, it stays as an unfinished one. Raises
        UnknownGeneration, GenerationRefused for the active one, LeaseLost while somebody writes to it."""
        ...

    def close(self) -> None: ...


class VectorScan(Protocol):
    """Scores of a query against rows of a matrix; NumPy by default, a GPU's where the service injects it."""

    def __call__(self, matrix: Vectors, query: NDArray[np.float32]) -> NDArray[np.float32]:
        """matrix (n, d), query (d,) -> (n,) dot products."""
        ...


class Observer(Protocol):
    """Told of events while a sync runs; must return at once and never raise."""

    def stage(self, name: str, seconds: float, items: int) -> None:
        """A stage (`read render tokenize embed apply`) was busy for `seconds` over `items` rows or texts."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Rows handled so far."""
        ...

    def event(self, name: str, **fields: str | int | float) -> None:
        """`waiting`: another worker holds the collection; `owned`: it is ours after such a wait."""
        ...
