"""The routes. Each checks its limits and calls one method of the service, in a worker thread where that may wait."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from app.src.access.principal import Principal
from app.src.api import (
    browsing,
    documents,
    embeddings,
    forms,
    generations,
    gpu_schemas,
    guard,
    jobs,
    quarantine,
    schemas,
    tables,
)
from app.src.api.asker import asker
from app.src.api.audited import AUDITED, tell
from app.src.api.desk import Desk, Json
from app.src.api.direct import direct
from app.src.api.errors import OK, PROBLEM, RETRY_AFTER, UNAVAILABLE, Unprocessable
from app.src.observe.metrics import CONTENT_TYPE
from app.src.service.search import Found, mode_of
from app.src.service.service import Service
from connector.model import Vectors

_RAW = "application/octet-stream"
_WHY_UNAVAILABLE = "a check failed; send a credential to see why"
_CONTENT = {PROBLEM: {"schema": schemas.ProblemBody.model_json_schema()}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What was asked cannot be done; `detail` says why.", "content": _CONTENT},
    "5XX": {"description": "503, with Retry-After: HANA or the store is away.", "content": _CONTENT},
}


_RAW_TOO: dict[int | str, dict[str, Any]] = {
    OK: {
        "description": "The vectors, in the order of the texts. `X-Embedding-Count` and `X-Embedding-Dimension` say "
        "how many there are, and how long each is.",
        "content": {_RAW: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def add(routes: APIRouter, desk: Desk) -> None:
    """Every route of this version. A request is compared with them in this order, so those that are asked for most
    often stand first."""
    adds = (
        _add_embed,
        embeddings.add,
        _add_search,
        _add_health,
        _add_engine,
        _add_collections,
        browsing.add,
        tables.add,
        jobs.add,
    )
    for each in (*adds, quarantine.add, generations.add, documents.add):
        each(routes, desk)


def _add_embed(routes: APIRouter, desk: Desk) -> None:
    @direct(routes, "/embed", response_model=list[list[float]], responses=_RAW_TOO)
    async def embed(request: Request, body: schemas.EmbedRequest) -> Response:
        """Always a list of vectors; with `Accept: application/octet-stream` raw little-endian float32 instead."""
        desk.check_texts(body.texts, name="inputs")
        vectors = await desk.embed(request, body.texts, partial(_queued, desk, request, body))
        headers = {"X-Embedding-Dimension": str(vectors.shape[1]), "X-Embedding-Count": str(len(vectors))}
        if _RAW in request.headers.get("accept", "").lower():
            return Response(forms.as_bytes(vectors), media_type=_RAW, headers=headers)
        return Response(forms.as_json(vectors), media_type=Json.media_type, headers=headers)


def _queued(desk: Desk, request: Request, body: schemas.EmbedRequest) -> Future[Vectors]:
    most = desk.service.parts.engine.max_tokens

    def counted(tokens: list[int]) -> None:
        for position, count in enumerate(tokens):
            if count > most and not body.truncate:
                raise Unprocessable(
                    f"inputs[{position}] has {count} tokens, the model takes {most}; "
                    'send "truncate": true to have it cut'
                )
        desk.spend(request, tokens)

    return desk.service.parts.embedder.embed_later(body.texts, normalize=body.normalize, counted=counted)


def _add_search(routes: APIRouter, desk: Desk) -> None:
    service = desk.service

    @direct(routes, "/v1/collections/{name}/search", response_model=schemas.SearchResponse)
    async def search(request: Request, name: str, body: schemas.SearchRequest) -> Response:
        """The nearest rows, best first, one hit per source row: in meaning, in words, or in both; or those like a
        row. Without `mode` a query is searched by hybrid, a vector or a row by vector."""
        _check_search(desk, body)
        if AUDITED in request.scope:
            shape, mode = service.rights.filter_shape(name, body.filter), mode_of(body.asked, body.mode)
            tell(request.scope, filter=shape, mode=mode, k=body.k)
        if body.query is not None and body.mode != "keyword":
            service.search.check_room(name, body.query)  # before a thread is waited for
        found = await desk.run(partial(_search, service, name, body, asker(request)), request)
        hits, notes = found.hits, found.notes
        tell(request.scope, hits=len(hits), rows=found.rows)
        answer = {"hits": hits, "took_ms": found.took_ms, "notes": notes, "stale_since": found.stale_since}
        return Json(answer if found.explain is None else answer | {"explain": found.explain})


def _add_health(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/health/live", response_model=schemas.HealthBody)
    async def live(request: Request) -> Response:
        """The process answers, and the engine is not beyond help; otherwise 503: only a new process helps."""
        stuck = desk.service.readiness.beyond_help()
        if stuck is None:
            return Json({"status": "ok", "checks": {}})
        detail = stuck if guard.known(request.scope) else _WHY_UNAVAILABLE
        return Json({"status": "unavailable", "checks": {"engine": False}, "detail": detail}, UNAVAILABLE)

    @routes.get("/health/ready", response_model=schemas.HealthBody)
    async def ready(request: Request) -> Response:
        """The engine answered a probe and the store is usable; otherwise 503, within 5 s. Why not is told to whoever is
        known."""
        readiness = await desk.probe()
        document: dict[str, Any] = {
            "status": "ok" if readiness.ready else "unavailable",
            "checks": readiness.checks,
        }
        known = guard.known(request.scope)
        if readiness.note is not None and known:
            document["note"] = readiness.note
        if readiness.ready:
            return Json(document)
        detail = readiness.unavailable if known else _WHY_UNAVAILABLE
        return Json(document | {"detail": detail}, UNAVAILABLE, {"Retry-After": RETRY_AFTER})

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(await desk.look(desk.service.metrics.render), headers={"Content-Type": CONTENT_TYPE})


def _add_engine(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/v1/info", response_model=schemas.InfoBody)
    async def info() -> Response:
        """Version, model, dimension, limits, device, and what is chosen on it."""
        return Json(await desk.run(desk.service.status.info))

    @routes.get("/v1/gpu", response_model=gpu_schemas.GpuBody)
    async def gpu() -> Response:
        """What NVIDIA's driver says of its cards now; without one an empty list and the reason."""
        return Json(await desk.run(desk.service.status.gpu))


def _add_collections(routes: APIRouter, desk: Desk) -> None:
    service = desk.service

    @routes.get("/v1/collections", response_model=list[schemas.CollectionBody])
    async def collections() -> Response:
        """What is configured, and of each collection what is stored, how fresh it is and which job works on it."""
        return Json(await desk.run(service.status.collections))

    @routes.get("/v1/collections/{name}", response_model=schemas.CollectionBody)
    async def collection(name: str) -> Response:
        """What is stored of it, how fresh it is and which job works on it."""
        return Json((await desk.run(partial(service.status.collections, [name])))[0])


def _check_search(desk: Desk, body: schemas.SearchRequest) -> None:
    if body.k > desk.limits.max_k:
        raise Unprocessable(f"k is {body.k}; at most {desk.limits.max_k} (setting api.max_k)")
    if body.query is not None:
        desk.check_texts([body.query], name="query")


def _search(service: Service, name: str, body: schemas.SearchRequest, principal: Principal) -> Found:
    try:
        return service.search.run(name, body.asked, body.k, body.filter, body.options, principal=principal)
    except ValueError as error:
        raise Unprocessable(str(error)) from error
