"""Request bodies and documented response shapes. Strict: a number is no string, a boolean no number; finite floats.
Vectors never pass through these models on their way out: they are written straight from the array.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.src.api.bounded import FEW_FAULTS, MOST_ITEMS, ListsOfNumbers, Numbers, Texts, few_faults, few_unknown
from app.src.service.browse import MOST_IDS
from app.src.service.search import MOST_PASSAGES, Like, Mode, Query, SearchOptions

_LAST_NUMBER = 2**31 - 1
"""Of a generation: both stores keep it as an integer of 32 bits."""


class Body(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, given: Any) -> Any:
        return few_unknown(given, cls.model_fields)


class EmbedRequest(Body):
    """`truncate`: cut what is longer than the model takes, instead of refusing it."""

    inputs: str | Texts = Field(examples=[["steel shaft", "Welle aus Stahl"]])
    normalize: bool = True
    truncate: bool = False

    @property
    def texts(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


class OpenAIEmbeddings(Body):
    """OpenAI's request. `model` may be left out: there is one. `user` is accepted and not used."""

    input: str | Texts | Numbers | ListsOfNumbers = Field(examples=[["steel shaft", "Welle aus Stahl"]])
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
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "message": 'the model "gpt-5" is not served here; this service has "all-MiniLM-L6-v2"',
                    "type": "invalid_request_error",
                    "param": "model",
                    "code": "model_not_found",
                }
            }
        }
    )

    error: OpenAIFault


_GIVEN: dict[str, dict[str, Any]] = {
    "query": {"type": "string"},
    "vector": {"type": "array"},
    "like": {"type": "string"},
    "keys": {"type": "array"},
    "all": {"const": True},
}
"""JSON Schema of a member that is there and says something: null is as good as left out."""


def _says(given: str) -> dict[str, Any]:
    return {"required": [given], "properties": {given: _GIVEN[given]}}


def _either(*given: str) -> ConfigDict:
    """For the description of the API: what the validator below checks."""
    return ConfigDict(json_schema_extra={"oneOf": [_says(each) for each in given]})


class SearchRequest(Body):
    """One of `query` (a text), `vector` and `like` (these two in mode vector only)."""

    model_config = _either("query", "vector", "like")

    query: str | None = Field(default=None, examples=["noise from the gearbox"])
    vector: Annotated[list[float], Field(max_length=MOST_ITEMS, fail_fast=True)] | None = None
    like: str | None = Field(
        default=None, description="the id of a row: rows like it, by the mean of its chunks' vectors, and not itself"
    )
    k: int = Field(default=10, ge=1)
    filter: dict[str, Any] | None = Field(default=None, examples=[{"MTART": "FERT"}])
    mode: Mode | None = Field(
        default=None,
        description="vector: nearest in meaning; keyword: rows that hold the words (needs no model); hybrid: both; "
        "null: hybrid for a query, vector for a vector or like",
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
    depth: int | None = Field(
        default=None,
        ge=1,
        description="how many hits of each ranking hybrid and MMR choose from, at least k and at most 4,000; null: "
        "four times k, at least 50",
    )
    passages: int = Field(
        default=1, ge=1, le=MOST_PASSAGES, description="so many matching passages of each hit; 1: its text is the best"
    )
    explain: bool = Field(default=False, description="say how the hits were found")
    rerank: bool | None = Field(
        default=None, description="put the hits in order by the configured reranker; null: if there is one"
    )

    @model_validator(mode="after")
    def _one_of(self) -> SearchRequest:
        if [self.query, self.vector, self.like].count(None) != 2:
            raise ValueError("give one of query, vector and like")
        return self

    @property
    def asked(self) -> Query:
        if self.query is not None:
            return self.query
        return (self.vector or []) if self.like is None else Like(self.like)

    @property
    def options(self) -> SearchOptions:
        return SearchOptions(
            self.mode,
            self.min_score,
            self.mmr_lambda,
            self.depth,
            passages=self.passages,
            explain=self.explain,
            rerank=self.rerank,
        )


class SyncBody(Body):
    full: bool = Field(default=False, description="compare every row, whatever the change method")
    max_deletes: float | None = Field(default=None, ge=0, le=1)
    retry_login: bool = Field(
        default=False, description="try a refused login once more, after user or privileges were corrected in HANA"
    )
    accept_schema: bool = Field(default=False, description="go on although a column in use has another type now")


Keys = Annotated[list[dict[str, Any] | list[Any]], Field(max_length=10_000), few_faults(10_000)] | None


class VerifyBody(Body):
    repair: bool = Field(default=False, description="repair what differs: rows that differ are rewritten")
    generation: int | None = Field(
        default=None, ge=1, le=_LAST_NUMBER, description="another one than the one that serves"
    )


class GenerationsBody(Body):
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
    queries: Texts = Field(default=[], description="compare: texts to ask for, besides stored ones")
    sample: int = Field(default=50, ge=0, le=1000, description="compare: how many stored texts to ask for")

    @model_validator(mode="after")
    def _fits(self) -> GenerationsBody:
        if self.number is None and self.action == "drop":
            raise ValueError("say which one to drop: number")
        if self.number is not None and self.action in ("build", "rollback"):
            raise ValueError(f"{self.action} takes no number")
        return self


class KeysBody(Body):
    """Which rows of the quarantine; null: all."""

    keys: Keys = Field(
        default=None,
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


class DocumentBody(Body):
    id: str | None = Field(default=None, max_length=2000, description="null: a new UUID", examples=["note-17"])
    text: str = Field(examples=["The gearbox of press 4 was oiled."])
    metadata: dict[str, Any] = Field(
        default={},
        description="kept as it is; filters look at texts, numbers, true and false on the first level",
        examples=[{"plant": "1000", "year": 2026}],
    )


class DocumentsBody(Body):
    documents: Annotated[list[DocumentBody], Field(max_length=MOST_ITEMS), FEW_FAULTS] = Field(min_length=1)


class DocumentIds(Body):
    ids: Texts = Field(min_length=1, examples=[["note-17"]])


class DocumentsWritten(BaseModel):
    ids: list[str] = Field(description="in the order of the documents")


class DocumentsDeleted(BaseModel):
    deleted: int = Field(description="how many of the documents there were")


class PassageBody(BaseModel):
    text: str
    score: float = Field(description="its cosine with the search text; mode keyword: the share of the words it holds")
    chunk: int = Field(description="its number in the row, from 0")


class HitBody(BaseModel):
    id: str
    key: dict[str, Any]
    score: float = Field(
        description="mode vector: the cosine; keyword: BM25; hybrid: nearness in meaning, and up to 0.5 for its words"
    )
    text: str
    metadata: dict[str, Any]
    passages: list[PassageBody] | None = Field(
        default=None, description="where more than one was asked for: the one that was found, then its others"
    )


class PlaceBody(BaseModel):
    rank: int
    score: float


class ExplainedHit(BaseModel):
    id: str
    score: float
    cosine: float | None
    vector: PlaceBody | None = Field(description="where it stood by meaning")
    keyword: PlaceBody | None = Field(description="where it stood by words")


class IndexBody(BaseModel):
    used: bool | None = Field(description="an approximate index; null: the store does not say")
    detail: str


class ExplainBody(BaseModel):
    mode: Mode
    stages: dict[str, float] = Field(description="milliseconds")
    candidates: int = Field(description="rows that the hits were chosen from")
    rankings: dict[str, int] = Field(description="rows that each way of looking gave", examples=[{"vector": 50}])
    words: list[str] = Field(description="mode hybrid: the words that were looked for")
    index: IndexBody
    hits: list[ExplainedHit]


class SearchResponse(BaseModel):
    hits: list[HitBody] = Field(description="best first; with mmr_lambda in the order chosen")
    took_ms: dict[str, float] = Field(examples=[{"embed": 3.1, "store": 0.9}])
    notes: list[str] = Field(description="what the asker may have overlooked, such as a filter on unknown metadata")
    stale_since: str | None = Field(
        description="set while HANA is away: the UTC time of the last complete sync, since when rows may have changed"
    )
    explain: ExplainBody | None = Field(default=None, description="where it was asked for")


_ROW_ID = '["000000000000001201"]'


class RowsRequest(Body):
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


class PointBody(BaseModel):
    id: str = Field(examples=[_ROW_ID])
    x: float
    y: float
    color: str | int | float | bool | None = Field(description="the row's value of the field", examples=["FERT"])
    title: str = Field(description="its first words")


class MapResponse(BaseModel):
    points: list[PointBody]
    explained: list[float] = Field(
        description="of all differences between the vectors the share that x shows, and y", examples=[[0.21, 0.08]]
    )
    sampled: int = Field(description="how many rows the picture is made of")
    rows: int = Field(description="how many rows there are")


class JobStarted(BaseModel):
    job: str


class ProblemBody(BaseModel):
    """RFC 9457, as every error is answered."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "about:blank",
                "title": "Not Found",
                "status": 404,
                "detail": 'there is no collection "material"; did you mean "materials"?',
                "code": "OWL-1004",
                "instance": "/v1/collections/material",
                "request_id": "9b1f0c5e6f0a4e0d8a55b1a0f7a0c3c1",
            }
        }
    )

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str = Field(description="the same for every error of this kind, for good: `owl-sap explain CODE`")
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


class OwnModelBody(BaseModel):
    model: str
    collections: list[str]
    loaded: bool = Field(description="false: nothing has asked for it yet, and the rest is null")
    dimension: int | None
    max_tokens: int | None
    fingerprint: str | None
    device: DeviceBody | None


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
    models: list[OwnModelBody] = Field(description="models that collections have of their own")
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
