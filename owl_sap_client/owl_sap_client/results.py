"""What the service answers, as frozen dataclasses. A member that this version does not know is left out, so a newer
service can be asked; one that an older service leaves out has its default."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def decode(kind: type[T], value: Any) -> T:
    """JSON into `kind`: a dataclass, or a list or an optional of such; anything else stays as it is. Raises KeyError
    and TypeError for what is no such document."""
    return cast("T", _decode(kind, value))


def _decode(kind: Any, value: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(each for each in get_args(kind) if each is not type(None))
        return None if value is None else _decode(inner, value)
    if get_origin(kind) is list:
        return [_decode(get_args(kind)[0], each) for each in value or ()]  # null: nothing was asked for
    if not dataclasses.is_dataclass(kind):
        return value
    known = _members(cast("Any", kind))
    return kind(**{name: _decode(hint, value[name]) for name, (hint, must) in known.items() if must or name in value})  # type: ignore[operator]


@cache
def _members(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    """Of a dataclass: type, and whether there is no default."""
    hints, missing = get_type_hints(kind), dataclasses.MISSING
    return {
        each.name: (hints[each.name], each.default is missing and each.default_factory is missing)
        for each in dataclasses.fields(kind)
    }


# ---------------------------------------------------------------------------------------------------------- searching


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """A chunk of a row that matches."""

    text: str
    score: float
    chunk: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """`key` by column name. `score`: the cosine (mode vector), BM25 (keyword), or in hybrid nearness in meaning and up
    to 0.5 more for the words, so up to 1.5. `text`: that of the best chunk. `passages`: where they were asked for, the
    one that was found and then its others, best first."""

    id: str
    key: dict[str, Any]
    score: float
    text: str
    metadata: dict[str, Any]
    passages: list[Passage] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits, best first. `notes`: what may have been overlooked. `stale_since`: while HANA is away, the UTC time of the
    last complete sync. `explain`: stages and rankings, where it was asked for."""

    hits: list[Hit]
    took_ms: dict[str, float]
    notes: list[str] = dataclasses.field(default_factory=list)
    stale_since: str | None = None
    explain: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A stored row. `text`: all of it, its chunks joined as they are stored."""

    id: str
    key: dict[str, Any]
    text: str
    metadata: dict[str, Any]
    chunks: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class FieldValue:
    value: Any
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A metadata field that filters can name. `values`: the most frequent first; `more`: there are others."""

    name: str
    type: Literal["text", "number", "boolean", "mixed"]
    values: list[FieldValue]
    more: bool
    min: Any
    max: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """Of `rows` rows, `sampled` were looked at."""

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
    """Rows in the plane (principal components). `explained`: the share of the variance along each axis."""

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
    """`embedding`: numbers, or base64 of little-endian float32 if that was asked for."""

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
class Collection:
    """Times are UTC in ISO 8601. `table`: where the vectors are, None in the local store. `key`: the columns."""

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
    """How alike two generations find; figures are None without queries."""

    collection: str
    serving: int
    other: int
    serving_rows: int
    other_rows: int
    complete: bool
    queries: int
    overlap_at_10: float | None
    rank_biased_overlap: float | None
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
    """`proposal`: a `[[collections]]` block with its reasons, `toml` in it as text; or None, and `reason` says why."""

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
class Preview:
    """What a template makes of a sample of rows. `histogram`: rows by tokens. `truncated`: of `sampled` rows so many
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
    """`detail` and `note` are told to whoever is known."""

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
    """`device` and `settings`: what is computed on, and what was chosen there and why. `models`: those that collections
    have of their own; empty where the service is older than that."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """`devices`: by NVIDIA's driver, members as the API describes them, None where a card does not tell."""

    devices: list[dict[str, Any]]
    driver_version: str | None
    cuda_version: str | None
    reason: str | None
    note: str
    answered: bool
