"""The vocabulary of the connector: collection, row, document, chunk, checkpoint, generation, hit."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

Value = None | bool | int | float | str | Decimal | date | time | datetime | bytes
"""A column value as returned by the driver."""
Scalar = None | bool | int | float | str
"""A metadata value, as in JSON."""
Vector = NDArray[np.float32]
"""Shape (dimension,)."""
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
        """Split at the first dot outside double quotes. Parts are literal and keep their case, without their quotes.

        >>> TableRef.parse('S."a.b"')
        TableRef(schema='S', name='a.b')

        Raises ValueError without such a dot and for an empty part.
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
    """How to cut texts. `max_tokens`: without special tokens (None: the model's limit). `overlap`: in tokens."""

    max_tokens: int | None = None
    overlap: int = 32


@dataclass(frozen=True, slots=True)
class ChangeSpec:
    """How to find changes in the source. `delay` (seconds) skips recent rows, whose transactions may still be open.
    `reconcile` (seconds) is the longest time between full comparisons: every method misses some changes."""

    method: Literal["full", "watermark", "log", "rowid", "delta"] = "full"
    column: str | None = None
    """watermark: a timestamp or increasing number that every change sets."""
    delay: float = 30.0
    reconcile: float = 86_400.0
    hash: Literal["client", "server"] = "client"
    """full: with `server` HANA hashes the rows, and unchanged rows transfer only key and hash."""
    log: TableRef | None = None
    """log: the table that triggers fill; None: OWL_LOG_<NAME> beside the source."""
    table: TableRef | None = None
    """delta: the table whose records say what changed; None: <TABLE>_Delta beside the source."""
    type: str | None = None
    """delta: its column with the type of a change; None: by SAP's names."""
    at: str | None = None
    """delta: its column with the time of a change; None: by SAP's names."""


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """One configured collection: which rows, text and metadata. For a collection that clients write, `source` is
    NO_TABLE, `key` is ("id",), and template, `where` and `changes` are unused."""

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


def log_of(spec: CollectionSpec) -> TableRef:
    """Return `changes.log`, or OWL_LOG_<NAME> in the schema of the source; all generations of a collection share it."""
    if spec.changes.log is not None:
        return spec.changes.log
    return TableRef(spec.source.schema, f"OWL_LOG_{re.sub('[^A-Z0-9_]', '_', spec.name.partition('@')[0].upper())}")


def delta_of(spec: CollectionSpec) -> TableRef:
    """Return `changes.table`, or the delta table beside the source."""
    return spec.changes.table or delta_beside(spec.source)


def delta_beside(table: TableRef) -> TableRef:
    """Return the place of the delta table that SAP Datasphere keeps beside a table."""
    return TableRef(table.schema, f"{table.name}_Delta")


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
    """The values of one row by column name, without a dictionary per row: all rows of a query share `places`."""

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
        return f"Cells({', '.join(self._places)})"  # messages must not contain a row's values


@dataclass(slots=True)  # not frozen, like Document: a frozen object takes three times as long to make
class Row:
    """One source row: its key and the columns that template and metadata need, by column name.

    `token` identifies the content if the database reports changes (a hash, a row id); None: compare the values.
    """

    key: Key
    values: Mapping[str, Value]
    token: bytes | None = None


class Page(Sequence[Row]):
    """Rows of one query, made when they are used: comparing unchanged rows needs only `keys` and `cells`.

    `cells`: the values of each row, the key columns first. `keys`: the key of each row.
    """

    __slots__ = ("_places", "cells", "keys")

    def __init__(self, places: Mapping[str, int], width: int, cells: Sequence[tuple[Value, ...]]) -> None:
        self._places = places
        self.cells = cells
        self.keys: list[Key] = [values[:width] for values in cells]

    def __len__(self) -> int:
        return len(self.cells)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return Row(self.keys[index], Cells(self._places, self.cells[index]))


def keys_of(rows: Sequence[Row]) -> Sequence[Key]:
    return rows.keys if isinstance(rows, Page) else [row.key for row in rows]


@dataclass(slots=True)
class Document:
    """A rendered row.

    `id`: the canonical JSON array of the key values, unique per key. `text`: "" for an empty row. `text_digest` (16
    bytes): text, chunking and model. `meta_digest` (16 bytes): metadata. `row_digest` (8 bytes): the values read; while
    it is unchanged, the row need not be rendered to compare. `in_database`: the other two are SHA-256, which the
    database of the model computes too.
    """

    id: str
    text: str
    metadata: Mapping[str, Scalar]
    text_digest: bytes
    meta_digest: bytes
    row_digest: bytes = bytes(8)
    in_database: bool = False

    @property
    def empty(self) -> bool:
        return not self.text


@dataclass(slots=True)  # not frozen, like Row
class Chunk:
    """One stored piece of a document. `number` counts from 0.

    `content_hash`: 24 bytes as rendered (`document.content_hash`), 32 once a vector is known (`vector_digest` added) or
    the database is to embed the text (`UNKNOWN_VECTOR` added).
    """

    id: str
    number: int
    text: str
    metadata: Mapping[str, Scalar]
    content_hash: bytes


# ---------------------------------------------------------------------------------------------------- what is stored


class StoredChunk(NamedTuple):
    """Identity and hash of a stored chunk. `record`: the store's own row id. A tuple to save time and memory, because a
    run creates one per stored row."""

    record: int
    id: str
    number: int
    content_hash: bytes


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A whole record, for verification and export. `id` is None for a foreign row (written by another program).

    `vector` is None if the stored bytes have another dimension; it may contain NaN.
    """

    record: int
    id: str | None
    number: int | None
    content_hash: bytes | None
    model: str | None
    text: str | None
    metadata: Mapping[str, Any] | None
    vector: NDArray[np.float32] | None
    length: float | None = None
    """Of the vector, by the database, if the vector itself was not read; None: there is none."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of earlier runs. It makes differences cheaper to find; correctness never depends on it."""

    last_sync: datetime | None = None
    """UTC, by the store's clock; None: no run has finished."""
    rows_read: int = 0
    """By the last full comparison, less the rows that later runs removed from the collection or its quarantine."""
    empty: int = 0
    key: tuple[str, ...] = ()
    """Names of the key columns, for hits when the source is unavailable."""
    source: str = ""
    """The table that was read."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Types of the columns used, by name; a change pauses the collection."""
    last_full: datetime | None = None
    """When the last complete comparison began, UTC, by the source's clock."""
    mark: Mapping[str, Any] | None = None
    """Progress of a method other than full, in its own JSON format. Never ahead of the stored rows."""


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A row that could not be processed. `reason` names columns and codes, never the row's text."""

    id: str
    stage: str
    reason: str
    attempts: int = 1
    last_seen: datetime | None = field(default=None, compare=False)
    """Time of the last failure, UTC, by the store's clock; None before it is stored."""
    digest: bytes | None = None
    """`Document.row_digest`, None: unknown. A change resets the attempts."""

    def given_up(self, attempts: int) -> bool:
        """Return whether the row failed `attempts` times or more with the same content: retrying is useless."""
        return self.digest is not None and self.attempts >= attempts


@dataclass(frozen=True, slots=True)
class DatabaseModel:
    """A model that the database of the store computes itself. `remote_source`: the database's name for the service
    that computes it; None: a model of the database's own."""

    name: str
    remote_source: str | None = None


@dataclass(slots=True)
class ChangeSet:
    """Everything that one `apply` writes, all or nothing.

    `vectors[i]` belongs to `chunks[i]`; if `model` is given, the database embeds the chunks. All chunks of a document
    are in one change set and replace its stored chunks.
    `metadata_only` replaces metadata and hash, and keeps text and vector. `deleted`: document ids. `checkpoint`, if
    given, replaces the collection's.
    """

    chunks: list[Chunk] = field(default_factory=list)
    vectors: Vectors | None = None
    model: DatabaseModel | None = None
    metadata_only: list[Chunk] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedRow] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    """Ids whose quarantine entries, if any, are deleted."""
    checkpoint: Checkpoint | None = None
    partial: bool = False
    """The checkpoint is of an unfinished sync: keep the time of the last sync."""

    def __bool__(self) -> bool:
        return bool(
            self.chunks or self.metadata_only or self.deleted or self.quarantined or self.released or self.checkpoint
        )


@dataclass(frozen=True, slots=True)
class CollectionStatus:
    """`rows`: our documents. `chunks`: their records. `foreign`: records of other programs."""

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
    """Names of the key columns in the last complete run."""
    checkpoint: Checkpoint = Checkpoint()


GenerationState = Literal["building", "active", "retired"]
IN_DATABASE = "hana:"  # prefix of the configured names of models that HANA computes


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The configured name of a model and the pins that load exactly this model again. A prompt of None is the model's
    own. `remote_source`: as in DatabaseModel."""

    name: str
    revision: str | None = None
    weights_sha256: str | None = None
    precision: str = "auto"
    query_prompt: str | None = None
    document_prompt: str | None = None
    remote_source: str | None = None

    @property
    def in_database(self) -> DatabaseModel | None:
        """The model, if its name is hana:MODEL."""
        if not self.name.startswith(IN_DATABASE):
            return None
        return DatabaseModel(self.name.removeprefix(IN_DATABASE), self.remote_source)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a generation is built: `spec` turns rows into texts, `model` texts into vectors."""

    spec: CollectionSpec
    model: ModelSource


@dataclass(frozen=True, slots=True)
class Generation:
    """One version of a collection. `name`: the collection's name while active, else NAME@N. All store methods accept
    this name as a collection, but `open` does not create NAME@N. Numbers are never reused."""

    name: str
    number: int
    state: GenerationState
    model: str
    fingerprint: str
    """Identifies the model, as in `ModelStamp`."""
    dimension: int
    table: str
    rows: int | None
    """Our documents; None when not counted."""
    created: datetime | None
    """UTC, by the store's clock; None if created by an earlier version."""
    retired: datetime | None
    last_sync: datetime | None
    """None: no run has finished, so rows are missing."""
    recipe: Recipe | None
    """None when no run has recorded it."""

    @property
    def complete(self) -> bool:
        return self.last_sync is not None


def generation_name(collection: str, number: int) -> str:
    """Return the name of a generation that is not active; configured names contain no @."""
    return f"{collection}@{number}"


def is_generation(name: str) -> bool:
    return "@" in name


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result: the best chunk of a document. `score` is the cosine similarity, BM25 or a fused score,
    depending on the search; higher is better. `id` is the document's id; for a foreign row `record:<n>`."""

    id: str
    score: float
    text: str
    metadata: Mapping[str, Any]
    number: int = 0
    record: int = field(default=0, compare=False)
    """The store's own id of the chunk, for `View.vectors`."""


@dataclass(frozen=True, slots=True)
class StoredText:
    """A stored chunk. `id`, `number` and `record` as in `Hit`."""

    id: str
    number: int
    text: str
    metadata: Mapping[str, Any]
    record: int


@dataclass(frozen=True, slots=True)
class IndexUse:
    """Whether a vector search uses an approximate index (None: unknown), and why."""

    used: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Sample:
    """`chosen`: the first chunk of each chosen row. `rows`: how many rows there were to choose from."""

    chosen: list[StoredText]
    rows: int


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows: by a metadata field, then by id; without a field by id alone. Rows without a value come last in
    both directions. `numeric`: compare numbers, also those stored as text, and treat other values as missing. Without
    it compare the first 200 characters of the values as text, by code point."""

    field: str | None = None
    numeric: bool = False
    descending: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a row in an order. `value`: what it is sorted by, None: missing."""

    id: str
    value: str | float | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a collection. A write with an `epoch` below the store's raises LeaseLost. `part`: number
    of a part (`VectorStore.begin_part`); None: the whole lease."""

    collection: str
    owner: str
    epoch: int
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a watermark column: values above `after` up to and including `upto`, and rows with exactly `after`
    whose key is above `key` (None: none of them). Values are in the format of `watermarks`."""

    column: Column
    after: str
    key: Key | None
    upto: str


Token = Literal["hash", "rowid"]
"""How the database identifies a row's content: by a hash, or by an id that every change replaces."""


@dataclass(frozen=True, slots=True)
class Query:
    """A read of a table: `key` and `columns` are names from its catalogue, `where` is the operator's own SQL."""

    table: TableRef
    key: tuple[str, ...]
    columns: tuple[str, ...]
    where: str | None = None


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys above `after` up to and including `upto`, in the database's order; None: unbounded."""

    after: Key | None = None
    upto: Key | None = None


# ---------------------------------------------------------------------------------------------------- cached vectors

_ENTRY_BYTES = 256  # bytes of a cached vector besides its numbers: array, key, table entry (measured)


class VectorCache:
    """Cache vectors by text, limited in bytes; drops the least recently used. Not thread-safe."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()
        self._max_bytes = max_bytes
        self.bytes = 0

    @staticmethod
    def key(text: str) -> bytes:
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def get(self, key: bytes) -> Vector | None:
        vector = self._vectors.get(key)
        if vector is not None:
            self._vectors.move_to_end(key)
        return vector

    def put(self, key: bytes, vector: Vector) -> None:
        if key not in self._vectors:  # all vectors of a model have the same size
            self.bytes += vector.nbytes + _ENTRY_BYTES
        self._vectors[key] = vector
        self._vectors.move_to_end(key)
        while self.bytes > self._max_bytes:
            self.bytes -= self._vectors.popitem(last=False)[1].nbytes + _ENTRY_BYTES

    def clear(self) -> None:
        self._vectors.clear()
        self.bytes = 0
