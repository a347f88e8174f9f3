"""Every operation of the REST API as a value: what to ask, and how to read the answer. Sends nothing: `Client` and
`AsyncClient` do, and have a method of the same signature for each function here.
"""

from __future__ import annotations

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
Keys = Sequence[Mapping[str, Any] | Sequence[Any]]
"""Rows by their keys: values by column name, or all values in key order."""
if TYPE_CHECKING:
    Vector = array[float]
else:  # before Python 3.12 an array takes no brackets
    Vector = array
_RAW = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class As(Generic[T]):
    """Reads a JSON answer as `shape`, or one member of it."""

    shape: type[T]
    member: str | None = None

    def __call__(self, response: httpx.Response) -> T:
        try:
            document = response.json()
            return results.decode(self.shape, document if self.member is None else document[self.member])
        except (ValueError, TypeError, KeyError) as error:
            raise UnexpectedAnswer(
                f"what {response.url.host} answered is not what this operation answers "
                f"({type(error).__name__}); does the address lead to this service, in this version?"
            ) from error


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """`path` as the description of the API has it, with `names` for its braces. `query` and `body` without what is
    None. `repeatable`: asked twice it does what it does once, so it may be sent again after a lost connection."""

    method: Literal["GET", "POST"]
    path: str
    read: Callable[[httpx.Response], T]
    names: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    accept: str = "application/json"
    good: frozenset[int] = frozenset((200, 202))
    repeatable: bool = True

    @property
    def url(self) -> str:
        return place(self.path, self.names)


def place(path: str, names: Mapping[str, str]) -> str:
    """A path with its names filled in; nothing in a name can leave its place. Raises ValueError for an empty one."""
    if not all(names.values()):
        raise ValueError(f"an empty name leads to another place than {path}")
    return path.format_map({key: quote(name, safe="").replace(".", "%2E") for key, name in names.items()})


def _given(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


# ----------------------------------------------------------------------------------------------------------- searching


class SearchOptions(TypedDict, total=False):
    """`vector` or `like` instead of a query: near these numbers, or like the row of this id. `filter`:
    `{"MTART": "FERT"}`, `{"WEIGHT": {"$gt": 10}}` (docs/search.md). `mode`: left out, it is
    hybrid for a query and vector for the others. `min_score`: hits below it are left out, by their score in the modes
    vector and keyword, in hybrid by their cosine, which its score is not. `mmr_lambda`: hits that differ from each
    other, from 1 (relevance alone) to 0. `depth`: how many hits hybrid and MMR choose from. `passages`: so many
    matching chunks of each hit. `explain`: how hits were found. `rerank`: whether by the service's reranker."""

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


def search(collection: str, query: str | None = None, **options: Unpack[SearchOptions]) -> Call[results.SearchResult]:
    """The nearest rows, best first, one hit per row. See SearchOptions."""
    body = _given(query=query, **options)
    if body.get("vector") is not None:
        body["vector"] = list(map(float, body["vector"]))
    return Call("POST", "/v1/collections/{name}/search", As(results.SearchResult), {"name": collection}, body=body)


def rows(collection: str, ids: Sequence[str]) -> Call[list[results.Row]]:
    """Rows by the ids that search gives (at most 100), in this order; those that are not there are left out."""
    body = {"ids": _listed("ids", ids)}
    return Call("POST", "/v1/collections/{name}/rows", As(list[results.Row], "rows"), {"name": collection}, body=body)


def fields(collection: str) -> Call[results.Fields]:
    """What filters can be made of: metadata fields with their types and values."""
    return Call("GET", "/v1/collections/{name}/fields", As(results.Fields), {"name": collection})


def map_rows(collection: str, color: str | None = None, limit: int | None = None) -> Call[results.Map]:
    """Rows in the plane, coloured by a metadata field."""
    query = _given(color=color, limit=limit)
    return Call("GET", "/v1/collections/{name}/map", As(results.Map), {"name": collection}, query)


# ----------------------------------------------------------------------------------------------------------- documents


class Document(TypedDict, total=False):
    """What a client writes into a collection of documents. Without an id it gets a new one."""

    id: str | None
    text: str
    metadata: Mapping[str, Any]


def add_documents(collection: str, documents: Iterable[Document]) -> Call[list[str]]:
    """Write documents, or write them anew under their ids, into a collection with `documents = true`. Returns their ids
    in order. Ids are made here, so that a request that is sent twice writes once."""
    named = [{**each, "id": each.get("id") or str(uuid4())} for each in documents]
    path = "/v1/collections/{name}/documents"
    return Call("POST", path, As(list[str], "ids"), {"name": collection}, body={"documents": named})


def delete_documents(collection: str, ids: Sequence[str]) -> Call[int]:
    """How many there were. Ids that are not there are passed over."""
    path = "/v1/collections/{name}/documents/delete"
    return Call("POST", path, As(int, "deleted"), {"name": collection}, body={"ids": _listed("ids", ids)})


# ----------------------------------------------------------------------------------------------------------- embedding


def embed(texts: Sequence[str], *, normalize: bool = True, truncate: bool = False) -> Call[list[Vector]]:
    """Vectors in the order of the texts, as arrays of float32 (numpy.asarray takes them as they are). `truncate`: cut
    what is longer than the model takes, instead of refusing it."""
    body = {"inputs": _listed("texts", texts), "normalize": normalize, "truncate": truncate}
    return Call("POST", "/embed", _vectors, body=body, accept=_RAW)


def _listed(name: str, values: Sequence[str]) -> list[str]:
    """Raises ValueError for one string, whose letters would be taken for so many."""
    if isinstance(values, str):
        raise ValueError(f"{name} is one string; give a list")
    return list(values)


def _vectors(response: httpx.Response) -> list[Vector]:
    numbers = array("f")
    try:
        numbers.frombytes(response.content)
        length = int(response.headers["x-embedding-dimension"])
        if length < 1 or len(numbers) != length * int(response.headers["x-embedding-count"]):
            raise ValueError("as many numbers as were said")
    except (KeyError, ValueError) as error:
        raise UnexpectedAnswer(f"{response.url.host} answered no vectors") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def openai_embeddings(
    texts: Sequence[str],
    *,
    model: str | None = None,
    encoding_format: Literal["float", "base64"] | None = None,
    dimensions: int | None = None,
    user: str | None = None,
) -> Call[results.OpenAIEmbeddings]:
    """As OpenAI's clients ask; `embed` costs the service a tenth of it."""
    body = _given(
        input=_listed("texts", texts), model=model, encoding_format=encoding_format, dimensions=dimensions, user=user
    )
    return Call("POST", "/v1/embeddings", As(results.OpenAIEmbeddings), body=body)


def models() -> Call[list[results.Model]]:
    return Call("GET", "/v1/models", As(list[results.Model], "data"))


def model(name: str) -> Call[results.Model]:
    """NotFound for any but the one that is served."""
    return Call("GET", "/v1/models/{model}", As(results.Model), {"model": name})


# --------------------------------------------------------------------------------------------------------- collections


def collections() -> Call[list[results.Collection]]:
    return Call("GET", "/v1/collections", As(list[results.Collection]))


def collection(name: str) -> Call[results.Collection]:
    return Call("GET", "/v1/collections/{name}", As(results.Collection), {"name": name})


def sync(
    collection: str,
    *,
    full: bool | None = None,
    max_deletes: float | None = None,
    retry_login: bool | None = None,
    accept_schema: bool | None = None,
) -> Call[str]:
    """Start a sync and return the id of its job, for `wait` and `events`. Conflict while a job of this collection runs.
    `max_deletes`: the share of the stored rows beyond which nothing is deleted."""
    body = _given(full=full, max_deletes=max_deletes, retry_login=retry_login, accept_schema=accept_schema)
    return _job("/v1/collections/{name}/sync", collection, body)


def verify(collection: str, *, repair: bool | None = None, generation: int | None = None) -> Call[str]:
    """Compare a collection with its source; the id of the job. `ok` in the job's result says whether all is well."""
    return _job("/v1/collections/{name}/verify", collection, _given(repair=repair, generation=generation))


def _job(path: str, name: str, body: Mapping[str, Any]) -> Call[str]:
    """Not repeatable: after a lost connection the first request's job would be met, and told as a conflict."""
    return Call("POST", path, As(str, "job"), {"name": name}, body=body, repeatable=False)


def quarantine(collection: str, limit: int | None = None) -> Call[list[results.QuarantineEntry]]:
    """Rows that could not be processed, each with its reason."""
    path = "/v1/collections/{name}/quarantine"
    return Call("GET", path, As(list[results.QuarantineEntry]), {"name": collection}, _given(limit=limit))


def retry_quarantine(collection: str, keys: Keys | None = None) -> Call[str]:
    """Process these rows (None: all in quarantine) again; the id of the job."""
    body = _given(keys=None if keys is None else list(keys))
    return _job("/v1/collections/{name}/quarantine/retry", collection, body)


def drop_quarantine(collection: str, keys: Keys | None = None, *, all: bool = False) -> Call[int]:
    """Forget the entries of these keys, or all of them; how many there were. The next sync meets the rows again."""
    body = {"all": True} if all and keys is None else _given(keys=None if keys is None else list(keys))
    if all and keys is not None:
        body["all"] = True  # which the service refuses, and says why
    path = "/v1/collections/{name}/quarantine/drop"
    return Call("POST", path, As(int, "dropped"), {"name": collection}, body=body)


_GENERATIONS = "/v1/collections/{name}/generations"


def generations(collection: str) -> Call[list[results.Generation]]:
    return Call("GET", _GENERATIONS, As(list[results.Generation]), {"name": collection})


def build_generation(collection: str) -> Call[str]:
    """Build another one by the service's settings, in the background; the id of the job."""
    return _job(_GENERATIONS, collection, {"action": "build"})


def compare_generations(
    collection: str, number: int | None = None, *, queries: Sequence[str] | None = None, sample: int | None = None
) -> Call[results.Comparison]:
    """What the serving one finds against what another does (None: the newest that is being built)."""
    body = _given(action="compare", number=number, queries=None if queries is None else list(queries), sample=sample)
    return Call("POST", _GENERATIONS, As(results.Comparison), {"name": collection}, body=body)


def switch_generation(
    collection: str, number: int | None = None, *, force: bool | None = None
) -> Call[results.Switched]:
    """Serve another one from now on. `force`: even if it is not complete."""
    body = _given(action="switch", number=number, force=force)
    return Call("POST", _GENERATIONS, As(results.Switched), {"name": collection}, body=body, repeatable=False)


def rollback_generation(collection: str) -> Call[results.Switched]:
    """Serve the one again that served before."""
    body = {"action": "rollback"}
    return Call("POST", _GENERATIONS, As(results.Switched), {"name": collection}, body=body, repeatable=False)


def drop_generation(collection: str, number: int) -> Call[int]:
    """Throw a retired or unfinished one away; its number."""
    body = {"action": "drop", "number": number}
    return Call("POST", _GENERATIONS, As(int, "dropped"), {"name": collection}, body=body, repeatable=False)


# ---------------------------------------------------------------------------------------------------------------- jobs


def jobs(collection: str | None = None, state: str | None = None, limit: int | None = None) -> Call[list[results.Job]]:
    """Newest first."""
    return Call("GET", "/v1/jobs", As(list[results.Job]), query=_given(collection=collection, state=state, limit=limit))


def job(job: str) -> Call[results.Job]:
    return Call("GET", "/v1/jobs/{job_id}", As(results.Job), {"job_id": job})


def cancel(job: str) -> Call[results.Job]:
    """A queued job ends at once; a running one finishes the batch in hand. Conflict when it is over."""
    return Call("POST", "/v1/jobs/{job_id}/cancel", As(results.Job), {"job_id": job}, repeatable=False)


EVENTS = "/v1/jobs/{job_id}/events"
"""The one operation whose answer is a stream: `Client.events`."""


# -------------------------------------------------------------------------------------------------------------- tables


class TableOptions(TypedDict, total=False):
    """`schema`: None is all but the system's. `search`: part of a name or a comment."""

    schema: str | None
    search: str | None
    limit: int | None
    offset: int | None


def tables(**options: Unpack[TableOptions]) -> Call[list[results.Table]]:
    """What the technical user can see in HANA."""
    return Call("GET", "/v1/tables", As(list[results.Table]), query=_given(**options))


def table(schema: str, table: str, *, catalog_only: bool | None = None) -> Call[results.TableDetail]:
    """Columns, key, comments, and a proposed collection. `catalog_only`: without a look at rows."""
    names, query = {"schema": schema, "table": table}, _given(catalog_only=catalog_only)
    return Call("GET", "/v1/tables/{schema}/{table}", As(results.TableDetail), names, query)


def preview(
    schema: str, table: str, template: str | None = None, *, samples: int | None = None
) -> Call[results.Preview]:
    """Rows as a template (None: the proposal's) renders them, with their tokens."""
    names, body = {"schema": schema, "table": table}, _given(template=template, samples=samples)
    return Call("POST", "/v1/tables/{schema}/{table}/preview", As(results.Preview), names, body=body)


# --------------------------------------------------------------------------------------------------------- the service


def info() -> Call[results.Info]:
    """Version, model, limits, device."""
    return Call("GET", "/v1/info", As(results.Info))


def gpu() -> Call[results.Gpu]:
    """What NVIDIA's driver says of its cards now; without one an empty list and the reason."""
    return Call("GET", "/v1/gpu", As(results.Gpu))


_HEALTH = frozenset((200, 503))
"""503 is an answer here: not well, and why."""


def live() -> Call[results.Health]:
    """Does the process answer?"""
    return Call("GET", "/health/live", As(results.Health), good=_HEALTH)


def ready() -> Call[results.Health]:
    """Are the engine and the store usable? Answers within 5 s."""
    return Call("GET", "/health/ready", As(results.Health), good=_HEALTH)


def metrics() -> Call[str]:
    """Prometheus' text format."""
    return Call("GET", "/metrics", lambda response: response.text, accept="text/plain")
