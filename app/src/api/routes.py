"""The routes. Each checks its limits and calls one method of the service, in a worker thread where that may wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

import anyio.to_thread
import numpy as np
import orjson
from anyio import CapacityLimiter
from fastapi import APIRouter, Header, Response
from numpy.typing import NDArray

from app.src.api import schemas
from app.src.api.errors import ACCEPTED, PROBLEM, RETRY_AFTER, UNAVAILABLE, TooMuch, Unprocessable
from app.src.metrics import CONTENT_TYPE
from app.src.service import Service, SyncRequest

Result = TypeVar("Result")
_RAW = "application/octet-stream"


_CONTENT = {PROBLEM: {"schema": schemas.ProblemBody.model_json_schema()}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What was asked cannot be done; `detail` says why.", "content": _CONTENT},
    "5XX": {"description": "503, with Retry-After: HANA or the store is away.", "content": _CONTENT},
}


class _Json(Response):
    """JSON written by orjson, which takes NumPy arrays and writes NaN as null (none gets this far)."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class _Desk:
    """The service behind a bounded number of threads, so that waiting never blocks the event loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limits = service.settings.api
        # Health has threads of its own: it must answer while every other thread waits for HANA.
        self._limiter = CapacityLimiter(self.limits.threads)
        self._health = CapacityLimiter(2)

    async def run(self, call: Callable[[], Result]) -> Result:
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)

    async def probe(self, call: Callable[[], Result]) -> Result:
        return await anyio.to_thread.run_sync(call, limiter=self._health)

    def check_texts(self, texts: list[str], *, name: str) -> None:
        if not texts:
            raise Unprocessable(f"{name} is empty")
        if len(texts) > self.limits.max_inputs:
            raise TooMuch(f"{len(texts)} texts; at most {self.limits.max_inputs} (setting api.max_inputs)")
        for position, text in enumerate(texts):
            if len(text) > self.limits.max_text_chars:
                limit = self.limits.max_text_chars
                raise TooMuch(f"{name}[{position}] has {len(text)} characters; at most {limit} (api.max_text_chars)")
            if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
                raise Unprocessable(f"{name}[{position}] holds half a surrogate pair, which is no text")

    def embed(self, body: schemas.EmbedRequest) -> NDArray[np.float32]:
        engine = self.service.engine
        if not body.truncate:
            for position, tokens in enumerate(engine.count_tokens(body.texts)):
                if tokens > engine.max_tokens:
                    raise Unprocessable(
                        f"inputs[{position}] has {tokens} tokens, the model takes {engine.max_tokens}; "
                        'send "truncate": true to have it cut'
                    )
        return self.service.embed(body.texts, normalize=body.normalize)


def router(service: Service) -> APIRouter:
    """Every route of this version, bound to `service`."""
    desk = _Desk(service)
    routes = APIRouter(responses=_PROBLEMS)
    for add in (_add_health, _add_engine, _add_collections, _add_jobs):
        add(routes, desk)
    return routes


def _add_health(routes: APIRouter, desk: _Desk) -> None:
    @routes.get("/health/live", response_model=schemas.HealthBody)
    async def live() -> Response:
        """The process answers."""
        return _Json({"status": "ok", "checks": {}})

    @routes.get("/health/ready", response_model=schemas.HealthBody)
    async def ready() -> Response:
        """The engine answered a probe and the store is usable; otherwise 503."""
        readiness = await desk.probe(desk.service.ready)
        document = {"status": "ok" if readiness.ready else "unavailable", "checks": readiness.checks}
        if readiness.ready:
            return _Json(document)
        return _Json(document | {"detail": readiness.unavailable}, UNAVAILABLE, {"Retry-After": RETRY_AFTER})

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(await desk.probe(desk.service.metrics.render), headers={"Content-Type": CONTENT_TYPE})


def _add_engine(routes: APIRouter, desk: _Desk) -> None:
    @routes.get("/v1/info")
    async def info() -> Response:
        """Version, model, dimension, limits, device."""
        return _Json(await desk.run(desk.service.info))

    @routes.post("/embed", response_model=list[list[float]])
    async def embed(body: schemas.EmbedRequest, accept: Annotated[str, Header()] = "*/*") -> Response:
        """Always a list of vectors; with `Accept: application/octet-stream` raw little-endian float32 instead."""
        desk.check_texts(body.texts, name="inputs")
        vectors = await desk.run(partial(desk.embed, body))
        headers = {"X-Embedding-Dimension": str(vectors.shape[1]), "X-Embedding-Count": str(len(vectors))}
        if _RAW in accept.lower():
            return Response(vectors.astype("<f4", copy=False).tobytes(), media_type=_RAW, headers=headers)
        return _Json(vectors, headers=headers)


def _add_collections(routes: APIRouter, desk: _Desk) -> None:
    service = desk.service

    @routes.get("/v1/collections", response_model=list[schemas.CollectionBody])
    async def collections() -> Response:
        return _Json(await desk.run(service.status))

    @routes.get("/v1/collections/{name}", response_model=schemas.CollectionBody)
    async def collection(name: str) -> Response:
        return _Json((await desk.run(partial(service.status, [name])))[0])

    @routes.post("/v1/collections/{name}/search", response_model=schemas.SearchResponse)
    async def search(name: str, body: schemas.SearchRequest) -> Response:
        """The nearest rows, best first, one hit per source row. `score` is the cosine."""
        _check_search(desk, body)
        query = body.query if body.query is not None else body.vector or []
        found = await desk.run(partial(_search, service, name, query, body))
        return _Json({"hits": [hit.as_dict() for hit in found.hits], "took_ms": found.took_ms})

    @routes.post("/v1/collections/{name}/sync", status_code=ACCEPTED, response_model=schemas.JobStarted)
    async def sync(name: str, body: schemas.SyncBody | None = None) -> Response:
        """Start a sync in the background; 409 while one runs."""
        wanted = body or schemas.SyncBody()
        job = service.start_sync(name, SyncRequest(wanted.full, wanted.max_deletes, owner="api"))
        return _Json({"job": job.id}, ACCEPTED, {"Location": f"/v1/jobs/{job.id}"})


def _check_search(desk: _Desk, body: schemas.SearchRequest) -> None:
    if body.mode != "vector":
        raise Unprocessable(f'mode "{body.mode}" comes with a later version; this one has "vector"')
    if body.k > desk.limits.max_k:
        raise Unprocessable(f"k is {body.k}; at most {desk.limits.max_k} (setting api.max_k)")
    if body.query is not None:
        desk.check_texts([body.query], name="query")


def _search(service: Service, name: str, query: str | list[float], body: schemas.SearchRequest) -> Any:
    try:
        return service.search(name, query, body.k, body.filter)
    except ValueError as error:
        raise Unprocessable(str(error)) from error


def _add_jobs(routes: APIRouter, desk: _Desk) -> None:
    jobs = desk.service.jobs

    @routes.get("/v1/jobs", response_model=list[schemas.JobBody])
    async def all_jobs() -> Response:
        """Newest first. Kept in memory: a restart forgets them."""
        return _Json([job.as_dict() for job in jobs.all()])

    @routes.get("/v1/jobs/{job_id}", response_model=schemas.JobBody)
    async def one_job(job_id: str) -> Response:
        shown: Mapping[str, Any] = jobs.get(job_id).as_dict()
        return _Json(shown)
