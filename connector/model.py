"""The vocabulary of the connector: what a collection, a row, a document, a chunk, a checkpoint and a hit are. Knows
NumPy and the standard library, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Literal, NamedTuple

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


NO_TABLE = TableRef("", "")
"""The source of a collection that clients write."""


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
    """One collection as the operator configured it: which rows, as which text, with which metadata. Of one that clients
    write (`source` is NO_TABLE) template, `where` and `changes` say nothing, and `key` is ("id",)."""

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

    @property
    def written_by_clients(self) -> bool:
        return self.source == NO_TABLE


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
class StoredText:
    """A chunk to be read, as it is stored. `id`, `number` and `record` as those of a `Hit`."""

    id: str
    number: int
    text: str
    metadata: Mapping[str, Any]
    record: int


@dataclass(frozen=True, slots=True)
class IndexUse:
    """Whether a vector search goes by an approximate index (None: the store does not say), and why."""

    used: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a collection, each by its first chunk, of the `rows` that there are."""

    chosen: list[StoredText]
    rows: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a collection. A write with an older `epoch` than the store's is refused (LeaseLost)."""

    collection: str
    owner: str
    epoch: int


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
