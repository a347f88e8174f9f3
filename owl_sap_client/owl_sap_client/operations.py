"""Every operation of the REST API as a `Call`: the request and how to read its answer.

`Client` and `AsyncClient` send them, with a method of the same signature for each function here.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote
from uuid import uuid4

import httpx

from owl_sap_client import results
from owl_sap_client.errors import UnexpectedAnswer

T = TypeVar("T")
Item = TypeVar("Item")
# Rows by their keys: values by column name, or all values in key order.
Keys = Sequence[Mapping[str, Any] | Sequence[Any]]
if TYPE_CHECKING:
    Vector = array[float]
else:  # before Python 3.12, `array` cannot be subscripted
    Vector = array
_RAW = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class As(Generic[T]):
    """Read a JSON answer, or one member of it, as `shape`."""

    shape: type[T]
    member: str | None = None

    def __call__(self, response: httpx.Response) -> T:
        try:
            document = response.json()
            return results.decode(self.shape, document if self.member is None else document[self.member])
        except (ValueError, TypeError, KeyError) as error:
            raise UnexpectedAnswer(
                f"{response.url.host} sent an answer of another form ({type(error).__name__}); "
                "check the client's url and the service's version"
            ) from error


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `path`: as in OpenAPI, with `names` for its braces. `query`, `body`: without None members.
    `repeatable`: idempotent, so it may be sent again after a lost connection."""

    method: Literal["GET", "POST"]
    path: str
    read: Callable[[httpx.Response], T]
    names: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    accept: str = "application/json"
    good: frozenset[int] = frozenset((200, 201, 202))
    repeatable: bool = True

    @property
    def url(self) -> str:
        return place(self.path, self.names)


def place(path: str, names: Mapping[str, str]) -> str:
    """Return `path` with its names filled in, escaped. Raises ValueError for an empty name."""
    if not all(names.values()):
        raise ValueError(f"the names in {path} must not be empty")
    return path.format_map({key: quote(name, safe="").replace(".", "%2E") for key, name in names.items()})


def _given(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


# ----------------------------------------------------------------------------------------------------------- searching


class SearchOptions(TypedDict, total=False):
    """Options of a search.

    `vector` or `like` replaces the query: a vector, or the id of a row. `filter`: `{"MTART": "FERT"}`,
    `{"WEIGHT": {"$gt": 10}}` (docs/search.md). `mode`: default hybrid for a query, vector otherwise. `min_score`:
    drops hits below it, by score in the modes vector and keyword, by cosine in hybrid. `mmr_lambda`: diversity, from 1
    (relevance alone) to 0. `depth`: how many hits hybrid and MMR choose from. `passages`: matching chunks returned per
    hit. `explain`: return how hits were found. `rerank`: use the service's reranker. `group`: return near-identical
    hits as one.
    """

    vector: Sequence[float] | None
    like: str | None
    k: int | None
    filter: Mapping[str, Any] | None
    mode: Literal["vector", "keyword", "hybrid"] | None
    min_score: float | None
    mmr_lambda: float | None
    depth: int | None
    passages: int | None
    explain: bool | None
    rerank: bool | None
    group: bool | None


def search(collection: str, query: str | None = None, **options: Unpack[SearchOptions]) -> Call[results.SearchResult]:
    """Return the nearest rows, best first, one hit per row."""
    body = _given(query=query, **options)
    if body.get("vector") is not None:
        body["vector"] = list(map(float, body["vector"]))
    return Call("POST", "/v1/collections/{name}/search", As(results.SearchResult), {"name": collection}, body=body)


def rows(collection: str, ids: Sequence[str]) -> Call[list[results.Row]]:
    """Return rows by their ids (at most 100) in this order; unknown ids are left out."""
    body = {"ids": _listed("ids", ids)}
    return Call("POST", "/v1/collections/{name}/rows", As(list[results.Row], "rows"), {"name": collection}, body=body)


def page(
    collection: str,
    *,
    sort: str | None = None,
    filter: Mapping[str, Any] | None = None,
    after: str | None = None,
    limit: int | None = None,
) -> Call[results.Page]:
    """Return stored rows in an order: "key" or a metadata field, with "-" before it descending. `after`: `next` of the
    page before. `limit`: at most 200 rows."""
    query = _given(sort=sort, after=after, limit=limit, filter=None if filter is None else json.dumps(filter))
    return Call("GET", "/v1/collections/{name}/rows", As(results.Page), {"name": collection}, query)


def fields(collection: str) -> Call[results.Fields]:
    """Return the metadata fields that filters can use, with types and values."""
    return Call("GET", "/v1/collections/{name}/fields", As(results.Fields), {"name": collection})


def map_rows(collection: str, color: str | None = None, limit: int | None = None) -> Call[results.Map]:
    """Return rows as points in the plane, coloured by a metadata field."""
    query = _given(color=color, limit=limit)
    return Call("GET", "/v1/collections/{name}/map", As(results.Map), {"name": collection}, query)


def rerank(
    query: str,
    documents: Sequence[str | Mapping[str, str]],
    *,
    top_n: int | None = None,
    return_documents: bool | None = None,
    model: str | None = None,
) -> Call[list[results.Reranked]]:
    """Return the documents' places with scores of the service's reranker, best first. `documents`: texts, or
    `{"text": ...}`. `top_n`: only the best so many. `model`: refuse any other reranker than the one of this name.
    Raises Unprocessable if the service has no reranker."""
    options = {"top_n": top_n, "return_documents": return_documents, "model": model}
    body = _given(query=query, documents=_listed("documents", documents), **options)
    return Call("POST", "/rerank", As(list[results.Reranked], "results"), body=body)


# ----------------------------------------------------------------------------------------------------------- documents


class Document(TypedDict, total=False):
    """A document to write; without an id it gets a new one."""

    id: str | None
    text: str
    metadata: Mapping[str, Any]


def add_documents(collection: str, documents: Iterable[Document]) -> Call[list[str]]:
    """Write documents into a collection with `documents = true`; existing ids are replaced. Returns the ids in order.
    New ids are created here, so that a repeated request writes each document once."""
    named = [{**each, "id": each.get("id") or str(uuid4())} for each in documents]
    path = "/v1/collections/{name}/documents"
    return Call("POST", path, As(list[str], "ids"), {"name": collection}, body={"documents": named})


def delete_documents(collection: str, ids: Sequence[str]) -> Call[int]:
    """Delete documents and return how many existed."""
    path = "/v1/collections/{name}/documents/delete"
    return Call("POST", path, As(int, "deleted"), {"name": collection}, body={"ids": _listed("ids", ids)})


# ----------------------------------------------------------------------------------------------------------- embedding


InputType = Literal["query", "document"]


def embed(
    texts: Sequence[str], *, input_type: InputType = "document", normalize: bool = True, truncate: bool = False
) -> Call[list[Vector]]:
    """Return one vector per text, in order, as arrays of float32 (numpy.asarray accepts them). `input_type`: some
    models embed a search text (query) otherwise than a text to be found (document). `truncate`: cut texts that are
    longer than the model's limit instead of rejecting them."""
    body = {
        "inputs": _listed("texts", texts),
        "input_type": input_type,
        "normalize": normalize,
        "truncate": truncate,
    }
    return Call("POST", "/embed", _vectors, body=body, accept=_RAW)


def _listed(name: str, values: Sequence[Item]) -> list[Item]:
    """Return a list. Raises ValueError for a string, whose letters would become texts."""
    if isinstance(values, str):
        raise ValueError(f"{name} is one string; pass a list")
    return list(values)


def _vectors(response: httpx.Response) -> list[Vector]:
    numbers = array("f")
    try:
        numbers.frombytes(response.content)
        length = int(response.headers["x-embedding-dimension"])
        if length < 1 or len(numbers) != length * int(response.headers["x-embedding-count"]):
            raise ValueError("wrong number of values")
    except (KeyError, ValueError) as error:
        raise UnexpectedAnswer(f"{response.url.host} did not answer with vectors") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def openai_embeddings(
    texts: Sequence[str],
    *,
    model: str | None = None,
    encoding_format: Literal["float", "base64"] | None = None,
    dimensions: int | None = None,
    input_type: InputType | None = None,
    user: str | None = None,
) -> Call[results.OpenAIEmbeddings]:
    """Embed in OpenAI's format; `input_type` as in `embed`, which costs the service a tenth of this."""
    options = {"model": model, "encoding_format": encoding_format, "dimensions": dimensions}
    body = _given(input=_listed("texts", texts), **options, input_type=input_type, user=user)
    return Call("POST", "/v1/embeddings", As(results.OpenAIEmbeddings), body=body)


def models() -> Call[list[results.Model]]:
    return Call("GET", "/v1/models", As(list[results.Model], "data"))


def model(name: str) -> Call[results.Model]:
    """Return the served model. Raises NotFound for any other name."""
    return Call("GET", "/v1/models/{model}", As(results.Model), {"model": name})


# --------------------------------------------------------------------------------------------------------- collections


def collections() -> Call[list[results.Collection]]:
    return Call("GET", "/v1/collections", As(list[results.Collection]))


def collection(name: str) -> Call[results.CollectionDetails]:
    return Call("GET", "/v1/collections/{name}", As(results.CollectionDetails), {"name": name})


def create_collection(block: Mapping[str, Any]) -> Call[results.Created]:
    """Create a collection. `block`: its settings, as in owl-sap.toml. Raises Conflict if the name is in use, or the
    service cannot write its settings file."""
    return Call("POST", "/v1/collections", As(results.Created), body=dict(block), repeatable=False)


def sync(
    collection: str,
    *,
    full: bool | None = None,
    max_deletes: float | None = None,
    retry_login: bool | None = None,
    accept_schema: bool | None = None,
) -> Call[str]:
    """Start a sync and return the id of its job. Raises Conflict while a job of this collection runs. `max_deletes`:
    largest share of the stored rows that may be deleted; above it, none are."""
    body = _given(full=full, max_deletes=max_deletes, retry_login=retry_login, accept_schema=accept_schema)
    return _job("/v1/collections/{name}/sync", collection, body)


def verify(collection: str, *, repair: bool | None = None, generation: int | None = None) -> Call[str]:
    """Start comparing a collection with its source and return the id of the job; its result has `ok`."""
    return _job("/v1/collections/{name}/verify", collection, _given(repair=repair, generation=generation))


def _job(path: str, name: str, body: Mapping[str, Any]) -> Call[str]:
    # Not repeatable: after a lost connection the job of the first request would cause a conflict.
    return Call("POST", path, As(str, "job"), {"name": name}, body=body, repeatable=False)


def quarantine(collection: str, limit: int | None = None) -> Call[list[results.QuarantineEntry]]:
    """Return the rows in quarantine, each with its reason."""
    path = "/v1/collections/{name}/quarantine"
    return Call("GET", path, As(list[results.QuarantineEntry]), {"name": collection}, _given(limit=limit))


def retry_quarantine(collection: str, keys: Keys | None = None) -> Call[str]:
    """Start processing these rows (None: all in quarantine) again and return the id of the job."""
    body = _given(keys=None if keys is None else list(keys))
    return _job("/v1/collections/{name}/quarantine/retry", collection, body)


def drop_quarantine(collection: str, keys: Keys | None = None, *, all: bool = False) -> Call[int]:
    """Remove the entries of these keys, or all, and return how many existed. The next sync tries the rows again."""
    body = {"all": True} if all and keys is None else _given(keys=None if keys is None else list(keys))
    if all and keys is not None:
        body["all"] = True  # the service rejects this with its reason
    path = "/v1/collections/{name}/quarantine/drop"
    return Call("POST", path, As(int, "dropped"), {"name": collection}, body=body)


_GENERATIONS = "/v1/collections/{name}/generations"


def generations(collection: str) -> Call[list[results.Generation]]:
    return Call("GET", _GENERATIONS, As(list[results.Generation]), {"name": collection})


def build_generation(collection: str) -> Call[str]:
    """Start building a generation from the service's settings and return the id of the job."""
    return _job(_GENERATIONS, collection, {"action": "build"})


def compare_generations(
    collection: str, number: int | None = None, *, queries: Sequence[str] | None = None, sample: int | None = None
) -> Call[results.Comparison]:
    """Compare search results of the active generation with another (None: the newest one being built)."""
    body = _given(action="compare", number=number, queries=None if queries is None else list(queries), sample=sample)
    return Call("POST", _GENERATIONS, As(results.Comparison), {"name": collection}, body=body)


def switch_generation(
    collection: str, number: int | None = None, *, force: bool | None = None
) -> Call[results.Switched]:
    """Make a generation the active one. `force`: even if it is incomplete."""
    body = _given(action="switch", number=number, force=force)
    return Call("POST", _GENERATIONS, As(results.Switched), {"name": collection}, body=body, repeatable=False)


def rollback_generation(collection: str) -> Call[results.Switched]:
    """Make the previously active generation active again."""
    body = {"action": "rollback"}
    return Call("POST", _GENERATIONS, As(results.Switched), {"name": collection}, body=body, repeatable=False)


def drop_generation(collection: str, number: int) -> Call[int]:
    """Delete a retired or unfinished generation and return its number."""
    body = {"action": "drop", "number": number}
    return Call("POST", _GENERATIONS, As(int, "dropped"), {"name": collection}, body=body, repeatable=False)


# ---------------------------------------------------------------------------------------------------------------- jobs


def jobs(collection: str | None = None, state: str | None = None, limit: int | None = None) -> Call[list[results.Job]]:
    """Return jobs, newest first."""
    return Call("GET", "/v1/jobs", As(list[results.Job]), query=_given(collection=collection, state=state, limit=limit))


def job(job: str) -> Call[results.Job]:
    return Call("GET", "/v1/jobs/{job_id}", As(results.Job), {"job_id": job})


def cancel(job: str) -> Call[results.Job]:
    """Cancel a job: a queued one ends at once, a running one after its batch. Raises Conflict if it has ended."""
    return Call("POST", "/v1/jobs/{job_id}/cancel", As(results.Job), {"job_id": job}, repeatable=False)


# The one operation whose answer is a stream: `Client.events`.
EVENTS = "/v1/jobs/{job_id}/events"


# -------------------------------------------------------------------------------------------------------------- tables


class TableOptions(TypedDict, total=False):
    """`schema`: None for all but system schemas. `search`: part of a name or comment."""

    schema: str | None
    search: str | None
    limit: int | None
    offset: int | None


def tables(**options: Unpack[TableOptions]) -> Call[list[results.Table]]:
    """Return the tables and views that the technical user can see."""
    return Call("GET", "/v1/tables", As(list[results.Table]), query=_given(**options))


def table(schema: str, table: str, *, catalog_only: bool | None = None) -> Call[results.TableDetail]:
    """Return columns, key, comments and a proposed collection. `catalog_only`: read no rows."""
    names, query = {"schema": schema, "table": table}, _given(catalog_only=catalog_only)
    return Call("GET", "/v1/tables/{schema}/{table}", As(results.TableDetail), names, query)


def preview(
    schema: str, table: str, template: str | None = None, *, samples: int | None = None
) -> Call[results.Preview]:
    """Return sample rows rendered by a template (None: the proposed one), with token counts."""
    names, body = {"schema": schema, "table": table}, _given(template=template, samples=samples)
    return Call("POST", "/v1/tables/{schema}/{table}/preview", As(results.Preview), names, body=body)


# --------------------------------------------------------------------------------------------------------- the service


def info() -> Call[results.Info]:
    """Return version, model, limits and device."""
    return Call("GET", "/v1/info", As(results.Info))


def gpu() -> Call[results.Gpu]:
    """Return the state of the NVIDIA cards; without a driver an empty list and the reason."""
    return Call("GET", "/v1/gpu", As(results.Gpu))


# 503 is a regular answer here: unhealthy, with the reason.
_HEALTH = frozenset((200, 503))


def live() -> Call[results.Health]:
    """Return whether the process answers."""
    return Call("GET", "/health/live", As(results.Health), good=_HEALTH)


def ready() -> Call[results.Health]:
    """Return whether engine and store are usable, within 5 s."""
    return Call("GET", "/health/ready", As(results.Health), good=_HEALTH)


def metrics() -> Call[str]:
    """Return the metrics in Prometheus' text format."""
    return Call("GET", "/metrics", lambda response: response.text, accept="text/plain")
