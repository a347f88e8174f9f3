"""The routes of collections: search, status, rows by id, fields for filters, the map, and clients' documents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, model_validator
from pydantic_core import from_json

from app.src.api import export
from app.src.api.errors import Refused
from app.src.api.guard import AUDITED, audit, caller, still_may
from app.src.api.requests import BOUNDED, Body, Executors, Json, Texts, answered, direct, one_of_members
from app.src.service.browse import KEY_ORDER, MOST_IDS, POINTS, SAMPLE, Fields, Page, ReadRow
from app.src.service.labels import LabelledField
from app.src.service.search import MOST_PASSAGES, FoundHit, Like, Mode, SearchOptions, mode_of
from app.src.service.search import Query as SearchQuery
from connector.sync.documents import NewDocument


class SearchRequest(Body):
    """One of `query` (a text), `vector` and `like` (these two in mode vector only)."""

    model_config = one_of_members(query={"type": "string"}, vector={"type": "array"}, like={"type": "string"})

    query: str | None = Field(default=None, examples=["noise from the gearbox"])
    vector: Annotated[list[float], BOUNDED] | None = None
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
        default=None, description="drop hits below it: by score in the modes vector and keyword, by cosine in hybrid"
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
        default=1, ge=1, le=MOST_PASSAGES, description="matching passages of each hit; 1: only its best text"
    )
    explain: bool = Field(default=False, description="explain how the hits were found")
    rerank: bool | None = Field(
        default=None, description="reorder the hits with the configured reranker; null: if there is one"
    )
    group: bool = Field(
        default=False, description="show near-identical hits as one, the best, and count the others in similar"
    )

    @model_validator(mode="after")
    def _one_of(self) -> SearchRequest:
        if [self.query, self.vector, self.like].count(None) != 2:
            raise ValueError("give one of query, vector and like")
        return self


class SearchResponse(BaseModel):
    hits: list[FoundHit] = Field(
        description="best first; with mmr_lambda in the order chosen. score: in mode vector the cosine, keyword BM25, "
        "hybrid nearness in meaning and up to 0.5 for its words. relevance: 0 to 1, comparable between answers; below "
        "0.2 probably irrelevant; null unless a query was given. similar: hits grouped under this one, null without "
        "group"
    )
    took_ms: dict[str, float] = Field(examples=[{"embed": 3.1, "store": 0.9}])
    notes: list[str] = Field(description="hints, such as a filter on unknown metadata")
    stale_since: str | None = Field(
        description="set while HANA is away: the UTC time of the last complete sync, since when rows may have changed"
    )
    explain: dict[str, Any] | None = Field(
        default=None, description="where it was asked for: mode, stages, candidates, rankings, words, index and hits"
    )


_ROW_ID = '["000000000000001201"]'


class RowsRequest(Body):
    ids: list[str] = Field(min_length=1, max_length=MOST_IDS, description="as search gives them", examples=[[_ROW_ID]])


class RowsResponse(BaseModel):
    rows: list[ReadRow]


MOST_ROWS = 200  # of one page
_EXPORTED_AT_ONCE = 1000
_CSV = "text/csv"
_AS_CSV: dict[int | str, dict[str, Any]] = {200: {"content": {_CSV: {"schema": {"type": "string"}}}}}


class PointBody(BaseModel):
    id: str = Field(examples=[_ROW_ID])
    x: float
    y: float
    color: str | int | float | bool | None = Field(description="the row's value of the field", examples=["FERT"])
    title: str = Field(description="its first words")


class MapResponse(BaseModel):
    points: list[PointBody]
    explained: list[float] = Field(description="share of the variance that x shows, and y", examples=[[0.21, 0.08]])
    sampled: int = Field(description="sampled rows")
    rows: int = Field(description="all rows")


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
    method: str | None = Field(description="how changes were found: full, watermark, log, rowid or delta")
    last_full: str | None = Field(description="when the last comparison of everything began, by the source's clock")
    job: str | None
    next_sync: str | None = Field(description="UTC time by the collection's schedule; in the past: overdue")
    stale_since: str | None = Field(description="while HANA is away: UTC time of the last complete sync")
    model_languages: list[str] = Field(
        description="ISO 639-1 codes of the configured model's languages; empty: unknown"
    )
    model_licence: str = Field(description="of the configured model; empty: unknown")


class CollectionDetails(CollectionBody):
    fields: list[LabelledField] = Field(description="key columns, then metadata fields")
    examples: list[str] = Field(description="queries to try, from the settings")


class DocumentBody(Body):
    id: str | None = Field(default=None, max_length=2000, description="null: a new UUID", examples=["note-17"])
    text: str = Field(examples=["The gearbox of press 4 was oiled."])
    metadata: dict[str, Any] = Field(
        default={},
        description="stored unchanged; filters use texts, numbers and booleans on the first level",
        examples=[{"plant": "1000", "year": 2026}],
    )


class DocumentsBody(Body):
    documents: Annotated[list[DocumentBody], BOUNDED] = Field(min_length=1)


class DocumentIds(Body):
    ids: Texts = Field(min_length=1, examples=[["note-17"]])


class DocumentsWritten(BaseModel):
    ids: list[str] = Field(description="in the order of the documents")


class DocumentsDeleted(BaseModel):
    deleted: int = Field(description="how many of the documents existed")


_COLLECTION = "/v1/collections/{name}"


def add_search(routes: APIRouter, executors: Executors) -> None:
    service, limits = executors.service, executors.limits

    @direct(routes, f"{_COLLECTION}/search", response_model=SearchResponse)
    async def search(request: Request, name: str, body: SearchRequest) -> Response:
        """The nearest rows, best first, one hit per source row: by meaning, by words, by both, or like a given row.
        Without `mode` a query is searched by hybrid, a vector or a row by vector."""
        if body.k > limits.max_k:
            raise Refused("Unprocessable", f"k is {body.k}; at most {limits.max_k} (setting api.max_k)")
        asked: SearchQuery = body.vector or [] if body.query is None else body.query
        if body.like is not None:
            asked = Like(body.like)
        if AUDITED in request.scope:
            shape, mode = service.rights.filter_shape(name, body.filter), mode_of(asked, body.mode)
            audit(request, filter=shape, mode=mode, k=body.k)
        if body.query is not None:
            executors.check_texts(body.query, name="query")
            if body.mode != "keyword":
                service.search.check_room(name, body.query)  # before waiting for a thread
        options = {option.name: getattr(body, option.name) for option in fields(SearchOptions)}
        who = caller(request)
        with answered(ValueError, "Unprocessable"):
            call = partial(
                service.search.run, name, asked, body.k, body.filter, SearchOptions(**options), principal=who
            )
            found = await executors.run(call, request)
        audit(request, hits=len(found.hits), rows=found.rows)
        shown = ("hits", "took_ms", "notes", "stale_since", *(["explain"] if body.explain else []))
        return Json({part: getattr(found, part) for part in shown})

    @routes.get("/v1/collections", response_model=list[CollectionBody])
    async def collections() -> Response:
        """Every configured collection: what is stored, how fresh it is, and its running job."""
        return Json(await executors.run(service.status.collections))

    @routes.get(_COLLECTION, response_model=CollectionDetails)
    async def collection(request: Request, name: str) -> Response:
        """What is stored of one collection, how fresh it is, its running job, and HANA's labels of fields and codes.
        While HANA does not answer, or refuses, the labels are the raw names and codes."""
        who = caller(request)
        status = (await executors.run(partial(service.status.collections, [name])))[0]
        fields = partial(service.labels.fields, name, status["key"] or (), principal=who)
        examples = service.collections.block(name).examples
        return Json(status | {"fields": await executors.run(fields), "examples": examples})


def add_browsing(routes: APIRouter, executors: Executors) -> None:
    """Add routes that show stored rows: never a row, value or count outside the caller's row rights."""
    service = executors.service

    def audit_rows(request: Request, name: str, **counts: int) -> None:
        if AUDITED in request.scope:
            audit(request, rows=service.rights.extent(name, caller(request)), **counts)

    @routes.post(f"{_COLLECTION}/rows", response_model=RowsResponse)
    async def rows(request: Request, name: str, body: RowsRequest) -> Response:
        """The whole rows with these ids, in the order of the ids, each once. Unknown ids and rows outside the caller's
        rights are left out."""
        call = partial(service.browse.rows, name, body.ids, principal=caller(request))
        with answered(ValueError, "Unprocessable"):
            found = await executors.run(call, request)
        audit_rows(request, name, asked=len(body.ids), hits=len(found))
        return Json({"rows": found})

    @routes.get(f"{_COLLECTION}/rows", response_model=Page, responses=_AS_CSV, operation_id="page")
    async def page(
        request: Request,
        name: str,
        sort: Annotated[
            str,
            Query(
                description='"key" (ids as text) or a metadata field; with "-" before it in descending order',
                max_length=130,
            ),
        ] = KEY_ORDER,
        after: Annotated[
            str | None, Query(description="`next` of the page before", max_length=12_288, pattern="^[A-Za-z0-9_-]*$")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS, description="rows on a page")] = 50,
        filter: Annotated[str, Query(description="a filter as JSON", max_length=4096)] = "{}",
    ) -> Response:
        """The stored rows, page by page; one entry per source row. Rows keep their order while others change. Rows
        without the sort field come last. `next` is null on the last page. With `Accept: text/csv`, all matching rows
        from `after` on: id, key columns, text, fields; `'` precedes cells that a spreadsheet would run as a
        formula."""
        who = caller(request)
        read = partial(service.browse.page, name, sort, where=_filter_of(filter), principal=who)
        with answered(ValueError, "Unprocessable"):
            if _CSV not in request.headers.get("accept", "").lower():
                found = await executors.run(partial(read, after, limit), request)
                audit_rows(request, name, hits=len(found.rows))
                return Json(found)
            first = await executors.run(partial(read, after, _EXPORTED_AT_ONCE), request)
            columns = await executors.run(partial(service.browse.columns, name, principal=who), request)

        async def exported() -> AsyncIterator[bytes]:
            """Yield the lines page by page. A page that cannot be read breaks the connection off, so that a part never
            looks like the whole."""
            key, shown = columns
            yield export.lines([["id", *key, "text", *shown]])
            page, count = first, 0
            while True:
                count += len(page.rows)
                audit_rows(request, name, hits=count)
                yield export.lines(
                    [each.id, *map(each.key.get, key), each.text, *map(each.metadata.get, shown)] for each in page.rows
                )
                if page.next is None:
                    return
                if not await still_may(request.scope):
                    raise Refused("Unauthenticated", "the key or token has ended during the export")
                page = await executors.run(partial(read, page.next, _EXPORTED_AT_ONCE), request)

        attached = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
        return StreamingResponse(exported(), media_type=f"{_CSV}; header=present", headers=attached)

    @routes.get(f"{_COLLECTION}/fields", response_model=Fields)
    async def fields(request: Request, name: str) -> Response:
        """The metadata fields for filters: type, most frequent values and range, from the rows that the caller may
        see. Large collections are sampled (`sampled` of `rows`)."""
        found = await executors.run(partial(service.browse.fields, name, principal=caller(request)), request)
        audit_rows(request, name, hits=found.sampled)
        return Json(found)

    @routes.get(f"{_COLLECTION}/map", response_model=MapResponse)
    async def map_(
        request: Request,
        name: str,
        color: Annotated[
            str | None, Query(description="a metadata field; each point gets its value", max_length=130)
        ] = None,
        limit: Annotated[int, Query(ge=1, le=SAMPLE)] = POINTS,
    ) -> Response:
        """Visible rows as points in two dimensions: similar rows lie near each other. The two principal components of
        a sample of at most 5000 rows, the same until rows change. Fewer than two rows give no points."""
        call = partial(service.browse.map, name, color, limit, principal=caller(request))
        with answered(ValueError, "Unprocessable"):
            found = await executors.run(call, request)
        audit_rows(request, name, hits=len(found["points"]))
        return Json(found)


def _filter_of(text: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        if isinstance(where := from_json(text), dict):
            return where or None
    raise Refused("Unprocessable", 'filter: must be a JSON object such as {"MTART": "FERT"}')


def add_documents(routes: APIRouter, executors: Executors) -> None:
    service = executors.service

    @routes.post(f"{_COLLECTION}/documents", response_model=DocumentsWritten)
    async def put(request: Request, name: str, body: DocumentsBody) -> Response:
        """Store documents in a collection that clients write (`documents = true`), all or none. A document with a known
        id is replaced; one without an id gets a new one, which is returned. 409 for a collection that is synced from a
        table, and while another writer holds it."""
        documents = [NewDocument(each.id, each.text, each.metadata) for each in body.documents]
        executors.check_texts([each.text for each in documents], name="documents")
        audit(request, documents=len(documents))
        counted = partial(executors.spend, request, whole=True)
        put = partial(service.documents.put, name, documents, principal=caller(request), counted=counted)
        return Json({"ids": (await executors.run(put, request, writes=True)).ids})

    @routes.post(f"{_COLLECTION}/documents/delete", response_model=DocumentsDeleted)
    async def delete(request: Request, name: str, body: DocumentIds) -> Response:
        """Delete the documents with these ids; returns how many existed. 409 as above."""
        most = executors.limits.max_inputs
        if len(body.ids) > most:
            raise Refused("TooMuch", f"{len(body.ids)} ids; at most {most} (setting api.max_inputs)", param="ids")
        audit(request, documents=len(body.ids))
        deletion = partial(service.documents.delete, name, body.ids, principal=caller(request))
        return Json({"deleted": await executors.run(deletion, request, writes=True)})
