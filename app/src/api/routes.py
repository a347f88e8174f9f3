"""The routes. Each checks its limits and calls one method of the service, in a worker thread where that may wait."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from app.src.api import embeddings, generations, jobs, quarantine, schemas, tables
from app.src.api.desk import Desk, Json
from app.src.api.errors import PROBLEM, RETRY_AFTER, UNAVAILABLE, Unprocessable
from app.src.metrics import CONTENT_TYPE
from app.src.service import Service

_RAW = "application/octet-stream"


_CONTENT = {PROBLEM: {"schema": schemas.ProblemBody.model_json_schema()}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What was asked cannot be done; `detail` says why.", "content": _CONTENT},
    "5XX": {"description": "503, with Retry-After: HANA or the store is away.", "content": _CONTENT},
}


def router(service: Service) -> APIRouter:
    """Every route of this version, bound to `service`."""
    desk = Desk(service)
    routes = APIRouter(responses=_PROBLEMS)
    adds = (_add_health, _add_engine, embeddings.add, tables.add, _add_collections, jobs.add, quarantine.add)
    for add in (*adds, generations.add):
        add(routes, desk)
    return routes


def _add_health(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/health/live", response_model=schemas.HealthBody)
    async def live() -> Response:
        """The process answers."""
        return Json({"status": "ok", "checks": {}})

    @routes.get("/health/ready", response_model=schemas.HealthBody)
    async def ready() -> Response:
        """The engine answered a probe and the store is usable; otherwise 503."""
        readiness = await desk.probe(desk.service.ready)
        document = {"status": "ok" if readiness.ready else "unavailable", "checks": readiness.checks}
        if readiness.ready:
            return Json(document)
        return Json(document | {"detail": readiness.unavailable}, UNAVAILABLE, {"Retry-After": RETRY_AFTER})

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(await desk.look(desk.service.metrics.render), headers={"Content-Type": CONTENT_TYPE})


def _add_engine(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/v1/info")
    async def info() -> Response:
        """Version, model, dimension, limits, device."""
        return Json(await desk.run(desk.service.info))

    @routes.get("/v1/gpu", response_model=schemas.GpuBody)
    async def gpu() -> Response:
        """What NVIDIA's driver says of its cards now; without one an empty list and the reason."""
        return Json(await desk.run(desk.service.gpu))

    @routes.post("/embed", response_model=list[list[float]])
    async def embed(body: schemas.EmbedRequest, accept: Annotated[str, Header()] = "*/*") -> Response:
        """Always a list of vectors; with `Accept: application/octet-stream` raw little-endian float32 instead."""
        desk.check_texts(body.texts, name="inputs")
        vectors = await desk.run(partial(desk.embed, body))
        headers = {"X-Embedding-Dimension": str(vectors.shape[1]), "X-Embedding-Count": str(len(vectors))}
        if _RAW in accept.lower():
            return Response(vectors.astype("<f4", copy=False).tobytes(), media_type=_RAW, headers=headers)
        return Json(vectors, headers=headers)


def _add_collections(routes: APIRouter, desk: Desk) -> None:
    service = desk.service

    @routes.get("/v1/collections", response_model=list[schemas.CollectionBody])
    async def collections() -> Response:
        return Json(await desk.run(service.status))

    @routes.get("/v1/collections/{name}", response_model=schemas.CollectionBody)
    async def collection(name: str) -> Response:
        return Json((await desk.run(partial(service.status, [name])))[0])

    @routes.post("/v1/collections/{name}/search", response_model=schemas.SearchResponse)
    async def search(name: str, body: schemas.SearchRequest) -> Response:
        """The nearest rows, best first, one hit per source row: in meaning, in words, or in both."""
        _check_search(desk, body)
        query = body.query if body.query is not None else body.vector or []
        found = await desk.run(partial(_search, service, name, query, body))
        hits = [hit.as_dict() for hit in found.hits]
        answer = {"hits": hits, "took_ms": found.took_ms, "notes": found.notes, "stale_since": found.stale_since}
        return Json(answer)


def _check_search(desk: Desk, body: schemas.SearchRequest) -> None:
    if body.k > desk.limits.max_k:
        raise Unprocessable(f"k is {body.k}; at most {desk.limits.max_k} (setting api.max_k)")
    if body.query is not None:
        desk.check_texts([body.query], name="query")


def _search(service: Service, name: str, query: str | list[float], body: schemas.SearchRequest) -> Any:
    try:
        return service.search(name, query, body.k, body.filter, body.options)
    except ValueError as error:
        raise Unprocessable(str(error)) from error
