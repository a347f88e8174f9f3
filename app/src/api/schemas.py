"""Request bodies and documented response shapes. Strict: a number is no string, a boolean no number; finite floats.
Vectors never pass through these models on their way out: they are written straight from the array.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.src.browsing import MOST_IDS
from app.src.searching import Mode, SearchOptions

_LAST_NUMBER = 2**31 - 1
"""Of a generation: both stores keep it as an integer of 32 bits."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class EmbedRequest(_Body):
    """`truncate`: cut what is longer than the model takes, instead of refusing it."""

    inputs: str | list[str] = Field(examples=[["steel shaft", "Welle aus Stahl"]])
    normalize: bool = True
    truncate: bool = False

    @property
    def texts(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


class OpenAIEmbeddings(_Body):
    """OpenAI's request. `model` may be left out: there is one. `user` is accepted and not used."""

    input: str | list[str] | list[int] | list[list[int]] = Field(examples=[["steel shaft", "Welle aus Stahl"]])
    model: str | None = Field(default=None, examples=["all-MiniLM-L6-v2"])
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class OpenAIEmbedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="base64: little-endian float32")


class OpenAIUsage(BaseModel):
    prompt_tokens: int = Field(description="tokens of the texts, without special tokens")
    total_tokens: int


class OpenAIEmbeddingsResponse(BaseModel):
    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: OpenAIUsage


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int = Field(description="POSIX time")
    owned_by: str


class OpenAIModels(BaseModel):
    object: Literal["list"]
    data: list[OpenAIModel]


class OpenAIFault(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    error: OpenAIFault


_GIVEN: dict[str, dict[str, Any]] = {
    "query": {"type": "string"},
    "vector": {"type": "array"},
    "keys": {"type": "array"},
    "all": {"const": True},
}
"""JSON Schema of a member that is there and says something: null is as good as left out."""


def _says(given: str) -> dict[str, Any]:
    return {"required": [given], "properties": {given: _GIVEN[given]}}


def _either(one: str, other: str) -> ConfigDict:
    """For the description of the API: what the validator below checks."""
    return ConfigDict(json_schema_extra={"oneOf": [_says(one), _says(other)]})


class SearchRequest(_Body):
    """Either `query` (a text) or `vector` (mode vector only)."""

    model_config = _either("query", "vector")

    query: str | None = Field(default=None, examples=["noise from the gearbox"])
    vector: list[float] | None = None
    k: int = Field(default=10, ge=1)
    filter: dict[str, Any] | None = Field(default=None, examples=[{"MTART": "FERT"}])
    mode: Mode = Field(
        default="vector",
        description="vector: nearest in meaning; keyword: rows that hold the words (needs no model); hybrid: both",
    )
    min_score: float | None = Field(
        default=None,
        description="leave out hits below it: their score in the modes vector and keyword, their cosine in hybrid",
    )
    mmr_lambda: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="choose hits that differ from each other (maximal marginal relevance): 1 is relevance alone, 0 "
        "difference alone",
    )

    @model_validator(mode="after")
    def _one_of(self) -> SearchRequest:
        if (self.query is None) == (self.vector is None):
            raise ValueError("give either query or vector")
        return self

    @property
    def options(self) -> SearchOptions:
        return SearchOptions(self.mode, self.min_score, self.mmr_lambda)


class SyncBody(_Body):
    full: bool = Field(default=False, description="compare every row, whatever the change method")
    max_deletes: float | None = Field(default=None, ge=0, le=1)
    retry_login: bool = Field(
        default=False, description="try a refused login once more, when user or privileges have been mended in HANA"
    )
    accept_schema: bool = Field(default=False, description="go on although a column in use has another type now")


Keys = list[dict[str, Any] | list[Any]] | None


class VerifyBody(_Body):
    repair: bool = Field(default=False, description="mend what is found")
    generation: int | None = Field(
        default=None, ge=1, le=_LAST_NUMBER, description="another one than the one that serves"
    )


class GenerationsBody(_Body):
    """`number`: which one to compare, switch to or drop; null: the newest that is being built."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"action": {"enum": ["compare", "switch"]}}},
                {"properties": {"action": {"const": "drop"}, "number": {"type": "integer"}}, "required": ["number"]},
                {"properties": {"action": {"enum": ["build", "rollback"]}, "number": {"type": "null"}}},
            ]
        }
    )

    action: Literal["build", "compare", "switch", "rollback", "drop"]
    number: int | None = Field(default=None, ge=1, le=_LAST_NUMBER)
    force: bool = Field(default=False, description="switch even to one that is not complete")
    queries: list[str] = Field(default=[], description="compare: texts to ask for, besides stored ones")
    sample: int = Field(default=50, ge=0, le=1000, description="compare: how many stored texts to ask for")

    @model_validator(mode="after")
    def _fits(self) -> GenerationsBody:
        if self.number is None and self.action == "drop":
            raise ValueError("say which one to drop: number")
        if self.number is not None and self.action in ("build", "rollback"):
            raise ValueError(f"{self.action} takes no number")
        return self


class KeysBody(_Body):
    """Which rows of the quarantine; null: all."""

    keys: Keys = Field(
        default=None,
        max_length=10_000,
        description="values by column name, or all values in key order",
        examples=[[{"MATNR": "4711"}]],
    )


class DropBody(KeysBody):
    """Which entries of the quarantine: either `keys`, or all by name."""

    model_config = _either("keys", "all")

    all: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> DropBody:
        if self.all == (self.keys is not None):
            raise ValueError('give either keys or "all": true')
        return self


class DocumentBody(_Body):
    id: str | None = Field(default=None, max_length=2000, description="null: a new UUID", examples=["note-17"])
    text: str = Field(examples=["The gearbox of press 4 was oiled."])
    metadata: dict[str, Any] = Field(
        default={},
        description="kept as it is; filters look at texts, numbers, true and false on the first level",
        examples=[{"plant": "1000", "year": 2026}],
    )


class DocumentsBody(_Body):
    documents: list[DocumentBody] = Field(min_length=1)


class DocumentIds(_Body):
    ids: list[str] = Field(min_length=1, examples=[["note-17"]])


class DocumentsWritten(BaseModel):
    ids: list[str] = Field(description="in the order of the documents")


class DocumentsDeleted(BaseModel):
    deleted: int = Field(description="how many of the documents there were")


class HitBody(BaseModel):
    id: str
    key: dict[str, Any]
    score: float = Field(description="mode vector: the cosine; keyword: BM25; hybrid: the sum of 1 / (60 + rank)")
    text: str
    metadata: dict[str, Any]


class SearchResponse(BaseModel):
    hits: list[HitBody] = Field(description="best first; with mmr_lambda in the order chosen")
    took_ms: dict[str, float] = Field(examples=[{"embed": 3.1, "store": 0.9}])
    notes: list[str] = Field(description="what the asker may have overlooked, such as a filter on unknown metadata")
    stale_since: str | None = Field(
        description="set while HANA is away: the UTC time of the last complete sync, since when rows may have changed"
    )


_ROW_ID = '["000000000000001201"]'


class RowsRequest(_Body):
    ids: list[str] = Field(min_length=1, max_length=MOST_IDS, description="as search gives them", examples=[[_ROW_ID]])


class RowBody(BaseModel):
    id: str = Field(examples=[_ROW_ID])
    key: dict[str, Any] = Field(examples=[{"MATNR": "000000000000001201"}])
    text: str = Field(description="the whole text: its chunks put together where they overlap")
    metadata: dict[str, Any] = Field(examples=[{"MTART": "FERT"}])
    chunks: list[str] = Field(description="as they are stored, in order")


class RowsResponse(BaseModel):
    rows: list[RowBody]


class FieldValueBody(BaseModel):
    value: str | int | float | bool = Field(examples=["FERT"])
    count: int = Field(description="rows of the sample that have it", examples=[412])


class FieldBody(BaseModel):
    name: str = Field(examples=["MTART"])
    type: Literal["text", "number", "boolean", "mixed"]
    values: list[FieldValueBody] = Field(description="the most frequent first, at most 50")
    more: bool = Field(description="there are other values than these")
    min: str | int | float | None = Field(description="of numbers and of ISO dates; null for others")
    max: str | int | float | None


class FieldsResponse(BaseModel):
    fields: list[FieldBody] = Field(description="declared metadata first")
    sampled: int = Field(description="how many rows were looked at")
    rows: int = Field(description="how many rows there are")


class JobStarted(BaseModel):
    job: str


class ProblemBody(BaseModel):
    """RFC 9457, as every error is answered."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    request_id: str


class JobBody(BaseModel):
    id: str
    collection: str
    kind: str = Field(description="sync, verify, retry or build")
    state: str = Field(
        description="queued, running, waiting (for another worker, or until next_try), succeeded, failed or cancelled"
    )
    progress: dict[str, int] = Field(examples=[{"done": 400, "total": 596}])
    result: dict[str, Any] | None = Field(description="the report of the work, once it is over")
    error: str | None
    created: float = Field(description="POSIX time")
    started: float | None
    finished: float | None
    attempts: int = Field(description="how often it was begun")
    note: str | None = Field(description="why it is queued again, or what it waits for")
    next_try: float | None = Field(description="POSIX time until which it waits for HANA")


class EventBody(BaseModel):
    """One server-sent event of a job."""

    id: str = Field(pattern="^[0-9]+$", description="for Last-Event-ID")
    event: Literal["state", "progress", "result"]
    data: str = Field(description="JSON; of `result` the whole job, as GET /v1/jobs/{job_id} has it")


class EntryBody(BaseModel):
    key: dict[str, Any] = Field(description="by column name, as in search hits", examples=[{"MATNR": "4711"}])
    stage: str = Field(description="render, embed or apply")
    reason: str = Field(description="names columns and codes, never the row's text")
    attempts: int = Field(description="with its present content, since it was last retried by request")
    given_up: bool = Field(description="syncs leave it alone until its content changes or it is retried by request")
    last_seen: str | None


class GenerationBody(BaseModel):
    generation: int
    state: Literal["building", "active", "retired"]
    complete: bool = Field(description="a sync of it has come to its end")
    model: str
    dimension: int
    rows: int | None
    table: str
    created: str | None
    retired: str | None
    last_sync: str | None
    template: str | None = Field(description="null: made by an earlier version")


class ComparisonBody(BaseModel):
    collection: str
    serving: int
    other: int
    serving_rows: int
    other_rows: int
    complete: bool
    queries: int
    overlap_at_10: float | None = Field(description="mean share of the first ten rows that both find")
    rank_biased_overlap: float | None = Field(description="1: the same rows in the same order")
    same_first: float | None = Field(description="share of the queries with the same best row")


class SwitchedBody(BaseModel):
    collection: str
    generation: int
    retired: int
    notes: list[str]


class GenerationDropped(BaseModel):
    collection: str
    dropped: int


class DropResponse(BaseModel):
    dropped: int


class DeviceBody(BaseModel):
    kind: Literal["cpu", "cuda"]
    name: str
    precision: str
    precision_reason: str
    path: str = Field(description="how vectors are computed: packed, padded, sentence-transformers or hashing")
    path_reason: str


class SettingBody(BaseModel):
    name: str = Field(examples=["padding_multiple"])
    value: str | int | float | bool | None = Field(description="null: it cannot be had here")
    reason: str


class LimitsBody(BaseModel):
    max_body_bytes: int
    max_inputs: int
    max_text_chars: int
    max_k: int


class InfoBody(BaseModel):
    version: str
    model: str
    dimension: int
    max_tokens: int
    fingerprint: str
    device: DeviceBody
    settings: list[SettingBody] = Field(description="what is chosen on this device, and why")
    store: str
    collections: list[str]
    limits: LimitsBody


class HealthBody(BaseModel):
    status: str
    checks: dict[str, bool] = Field(
        description="`gpu` is there where one is asked for (USE_GPU=true); it alone does not make the service unready"
    )
    detail: str | None = Field(default=None, description="why it is not ready")
    note: str | None = Field(default=None, description="why the GPU that is asked for is not used, and what to do")


class GpuProcessBody(BaseModel):
    pid: int
    memory_bytes: int | None


class ThrottleBody(BaseModel):
    reason: str
    words: str
    normal: bool | None = Field(description="no reason for an alarm, as a power limit under load; null: unknown")


class GpuDevice(BaseModel):
    """null: this card does not tell."""

    index: int
    name: str
    uuid: str | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    memory_free_bytes: int | None
    utilization_percent: int | None = Field(description="share of the time in which a kernel ran")
    memory_utilization_percent: int | None = Field(description="share of the time in which memory was in use")
    temperature_celsius: int | None
    power_watts: float | None
    power_limit_watts: float | None = Field(description="in force now")
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    throttle_reasons: list[str] | None = Field(description="NVML's names of what `throttle` says in words")
    compute_processes: int | None
    compute_capability: str | None = Field(examples=["7.5"])
    temperature_slowdown_celsius: int | None = Field(description="from here on the clock is lowered")
    power_limit_default_watts: float | None
    power_limit_min_watts: float | None
    power_limit_max_watts: float | None
    sm_clock_max_mhz: int | None
    memory_clock_max_mhz: int | None
    pcie_generation: int | None = Field(description="now: an idle link falls back to 1")
    pcie_generation_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    pcie_sent_bytes_per_second: int | None = Field(description="by the card, over 20 ms")
    pcie_received_bytes_per_second: int | None
    throttle: list[ThrottleBody] | None = Field(description="what holds the clock back")
    throttled_abnormally: bool | None = Field(description="by heat or by the power supply")
    performance_state: int | None = Field(description="0 is the fastest, 15 the slowest")
    ecc_enabled: bool | None
    ecc_corrected_errors: int | None = Field(description="since the driver was loaded")
    ecc_uncorrected_errors: int | None
    ecc_corrected_errors_lifetime: int | None
    ecc_uncorrected_errors_lifetime: int | None
    retired_pages: int | None = Field(description="up to Turing; later cards remap rows")
    retired_pages_pending: bool | None
    remapped_rows: int | None
    remapped_rows_pending: bool | None
    energy_joules: float | None = Field(description="since the driver was loaded")
    fan_percent: int | None = Field(description="null on a card without a fan, as a T4 is")
    persistence_mode: bool | None
    processes: list[GpuProcessBody] | None = Field(description="those that compute on it")
    reason: str | None = Field(description="why this card tells nothing")


class GpuBody(BaseModel):
    devices: list[GpuDevice]
    driver_version: str | None
    cuda_version: str | None = Field(description="the newest that the driver knows")
    reason: str | None = Field(description="why there are no devices")
    note: str = Field(description="what these figures are not")
    answered: bool = Field(description="false: the driver hangs")


class CollectionBody(BaseModel):
    collection: str
    store: str
    schema_name: str | None = Field(alias="schema")
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
    method: str | None = Field(description="how changes were found: full, watermark, log or rowid")
    last_full: str | None = Field(description="when the last comparison of everything began, by the source's clock")
    job: str | None
    next_sync: str | None = Field(description="UTC time by the collection's schedule; in the past: overdue")
    stale_since: str | None = Field(description="while HANA is away: UTC time of the last complete sync")


class TableBody(BaseModel):
    schema_name: str = Field(alias="schema")
    name: str
    kind: str = Field(examples=["table", "view"])
    comment: str
    columns: int
    rows: int | None = Field(description="as HANA keeps count; null for views, and where the user may not see it")


class ColumnBody(BaseModel):
    name: str
    type_name: str
    length: int = Field(description="characters, bytes or decimal precision")
    scale: int
    nullable: bool
    comment: str


class ProposalBody(BaseModel):
    """A proposed `[[collections]]` block, its reasons, and all of it as text for owl-sap.toml."""

    name: str
    source: str
    key: list[str]
    where: str | None = None
    template: str
    metadata: list[str]
    reasons: dict[str, str] = Field(description="by setting")
    notes: list[str]
    create_view: str | None = Field(description="SQL of a view that joins the table with its texts")
    toml: str


class TableDetailBody(BaseModel):
    schema_name: str = Field(alias="schema")
    name: str
    kind: str
    comment: str
    rows: int | None
    key: list[str] = Field(description="the primary key")
    columns: list[ColumnBody]
    proposal: ProposalBody | None
    reason: str | None = Field(description="why there is no proposal")
