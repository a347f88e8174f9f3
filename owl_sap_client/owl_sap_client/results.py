"""The service's answers as frozen dataclasses.

Unknown members are ignored, so that newer services work; members that an older service omits have defaults.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def decode(kind: type[T], value: Any) -> T:
    """Convert JSON into `kind`: a dataclass, or a list or an optional of one; other values are returned unchanged.
    Raises KeyError and TypeError for a document of another shape."""
    return cast("T", _decode(kind, value))


def _decode(kind: Any, value: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(each for each in get_args(kind) if each is not type(None))
        return None if value is None else _decode(inner, value)
    if get_origin(kind) is list:
        return [_decode(get_args(kind)[0], each) for each in value or ()]  # null: not requested
    if not dataclasses.is_dataclass(kind):
        return value
    known = _members(cast("Any", kind))
    return kind(**{name: _decode(hint, value[name]) for name, (hint, must) in known.items() if must or name in value})  # type: ignore[operator]


@cache
def _members(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    """Return each field's type and whether it is required."""
    hints, missing = get_type_hints(kind), dataclasses.MISSING
    return {
        each.name: (hints[each.name], each.default is missing and each.default_factory is missing)
        for each in dataclasses.fields(kind)
    }


# ---------------------------------------------------------------------------------------------------------- searching


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """A matching chunk of a row."""

    text: str
    score: float
    chunk: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """A row that was found. `key`: by column name. `score`: the cosine (mode vector), BM25 (keyword), or in hybrid the
    cosine plus up to 0.5 for matching words. `text`: of the best chunk. `passages`: if requested, the matching chunks,
    best first. `relevance`: 0 to 1, below 0.2 probably irrelevant; None unless the query is a text, and from older
    services. `similar`: hits grouped under this one, if groups were requested."""

    id: str
    key: dict[str, Any]
    score: float
    text: str
    metadata: dict[str, Any]
    passages: list[Passage] = dataclasses.field(default_factory=list)
    relevance: float | None = None
    similar: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits, best first. `notes`: warnings about the request. `stale_since`: while HANA is unavailable, the UTC time of
    the last complete sync. `explain`: stages and rankings, if requested."""

    hits: list[Hit]
    took_ms: dict[str, float]
    notes: list[str] = dataclasses.field(default_factory=list)
    stale_since: str | None = None
    explain: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TextDocument:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reranked:
    """A text that was reranked. `index`: its place in the request; `document`: if it was requested."""

    index: int
    relevance_score: float
    document: TextDocument | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A stored row. `text`: its chunks, joined."""

    id: str
    key: dict[str, Any]
    text: str
    metadata: dict[str, Any]
    chunks: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Rows in an order. `next`: `after` of the next page; None on the last one."""

    rows: list[Row]
    next: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FieldValue:
    value: Any
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A metadata field for filters. `values`: the most frequent first; `more`: whether further values exist."""

    name: str
    type: Literal["text", "number", "boolean", "mixed"]
    values: list[FieldValue]
    more: bool
    min: Any
    max: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """Metadata fields, found in `sampled` of `rows` rows."""

    fields: list[Field]
    sampled: int
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    id: str
    x: float
    y: float
    color: Any
    title: str


@dataclasses.dataclass(frozen=True, slots=True)
class Map:
    """Rows in the plane (principal components). `explained`: share of the variance along each axis."""

    points: list[Point]
    explained: list[float]
    sampled: int
    rows: int


# ---------------------------------------------------------------------------------------------------------- embedding


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    total_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class OpenAIEmbedding:
    """`embedding`: numbers, or base64 of little-endian float32 if requested."""

    object: str
    index: int
    embedding: list[float] | str


@dataclasses.dataclass(frozen=True, slots=True)
class OpenAIEmbeddings:
    object: str
    data: list[OpenAIEmbedding]
    model: str
    usage: Usage


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    id: str
    object: str
    created: int
    owned_by: str


# -------------------------------------------------------------------------------------------------------- collections


@dataclasses.dataclass(frozen=True, slots=True)
class FieldLabel:
    """`label`: HANA's comment, else the name. `values`: texts by code, where they are known."""

    name: str
    label: str
    type: Literal["text", "number", "date", "time", "boolean"]
    values: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Collection:
    """Times are UTC in ISO 8601. `table`: the table with the vectors, None for the local store. `key`: the key
    columns."""

    collection: str
    store: str
    schema: str | None
    table: str | None
    generation: int
    model: str | None
    dimension: int | None
    rows: int
    chunks: int
    foreign: int
    empty: int
    quarantined: int
    last_sync: str | None
    key: list[str] | None
    lag_seconds: float | None
    method: str | None = None
    last_full: str | None = None
    job: str | None = None
    next_sync: str | None = None
    stale_since: str | None = None
    model_languages: list[str] = dataclasses.field(default_factory=list)
    model_licence: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CollectionDetails(Collection):
    fields: list[FieldLabel] = dataclasses.field(default_factory=list)
    examples: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class QuarantineEntry:
    key: dict[str, Any]
    stage: str
    reason: str
    attempts: int
    given_up: bool
    last_seen: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    generation: int
    state: Literal["building", "active", "retired"]
    complete: bool
    model: str
    dimension: int
    rows: int | None
    table: str
    created: str | None
    retired: str | None
    last_sync: str | None
    template: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How similar the results of two generations are; figures are None without queries."""

    collection: str
    serving: int
    other: int
    serving_rows: int
    other_rows: int
    complete: bool
    queries: int
    overlap_at_10: float | None
    same_first: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Switched:
    collection: str
    generation: int
    retired: int
    notes: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Background work. Times are POSIX. `state`: queued, running, waiting, succeeded, failed or cancelled."""

    id: str
    collection: str
    kind: str
    state: str
    progress: dict[str, int]
    result: dict[str, Any] | None
    error: str | None
    created: float
    started: float | None
    finished: float | None
    attempts: int
    note: str | None = None
    next_try: float | None = None

    @property
    def over(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")


@dataclasses.dataclass(frozen=True, slots=True)
class JobEvent:
    """`event`: state, progress or, last of all, result, whose `data` is the job's record."""

    id: int
    event: str
    data: dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- tables


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    schema: str
    name: str
    kind: str
    comment: str
    columns: int
    rows: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    name: str
    type_name: str
    length: int
    scale: int
    nullable: bool
    comment: str


@dataclasses.dataclass(frozen=True, slots=True)
class TableDetail:
    """`proposal`: a `[[collections]]` block with its reasons and, in `toml`, its text; if None, `reason` says why."""

    schema: str
    name: str
    kind: str
    comment: str
    rows: int | None
    key: list[str]
    columns: list[Column]
    proposal: dict[str, Any] | None
    reason: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    text: str
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Created:
    """A new collection, and its block as written to the settings file."""

    collection: str
    toml: str


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """Sample rows rendered by a template. `histogram`: rows by tokens. `truncated`: how many of the `sampled` rows
    would lose text."""

    source: str
    template: str
    samples: list[Sample]
    histogram: dict[str, int]
    truncated: int
    chunked: int
    empty: int
    unreadable: int
    sampled: int
    max_tokens: int


# -------------------------------------------------------------------------------------------------------- the service


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Health of the service. `detail` and `note` need authentication."""

    status: str
    checks: dict[str, bool]
    detail: str | None = None
    note: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int
    max_inputs: int
    max_text_chars: int
    max_k: int


@dataclasses.dataclass(frozen=True, slots=True)
class Info:
    """`device`, `settings`: the device (the first of several), and the settings chosen for it, with reasons. `models`:
    the collections' own models; `languages`: ISO 639-1 codes of the model's; `devices`: all, `failed` says why one
    computes nothing. The last four are empty for an older service."""

    version: str
    model: str
    dimension: int
    max_tokens: int
    fingerprint: str
    device: dict[str, Any]
    settings: list[dict[str, Any]]
    store: str
    collections: list[str]
    limits: Limits
    models: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    languages: list[str] = dataclasses.field(default_factory=list)
    licence: str = ""
    devices: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """`devices`: as the NVIDIA driver reports them; None for values that a card does not report."""

    devices: list[dict[str, Any]]
    driver_version: str | None
    cuda_version: str | None
    reason: str | None
    note: str
    answered: bool
