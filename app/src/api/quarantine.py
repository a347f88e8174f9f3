"""The routes of quarantine: list, retry and drop its rows."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.src.api import schemas
from app.src.api.asker import check_every_row
from app.src.api.desk import Desk, Json
from app.src.api.errors import ACCEPTED
from app.src.api.jobs import JOB_LINKS, started

_PLACE = "/v1/collections/{name}/quarantine"
_LEASE_WAIT = 2.0
"""Seconds that a request may wait for another worker before it is answered 409."""


def add(routes: APIRouter, desk: Desk) -> None:
    service = desk.service

    @routes.get(_PLACE, response_model=list[schemas.EntryBody])
    async def quarantine(request: Request, name: str, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> Response:
        """The rows that could not be processed, in the order of their keys, each with its reason. How many there are in
        all, `GET /v1/collections/{name}` says."""
        check_every_row(service, request, name)
        entries = await desk.run(partial(service.quarantine.entries, name))
        return Json([entry.as_dict() for entry in entries[:limit]])

    @routes.post(f"{_PLACE}/retry", status_code=ACCEPTED, response_model=schemas.JobStarted, responses=JOB_LINKS)
    async def retry(request: Request, name: str, body: schemas.KeysBody | None = None) -> Response:
        """Read these rows (without `keys`: all in quarantine) again and process them, in the background. The job's
        result counts what became of them. 404 for a key that is not in quarantine; 409 while a job of this
        collection runs."""
        if _keys(body) is not None:
            check_every_row(service, request, name)
        return started(await desk.run(partial(service.background.start_retry, name, _keys(body))))

    @routes.post(f"{_PLACE}/drop", response_model=schemas.DropResponse)
    async def drop(request: Request, name: str, body: schemas.DropBody) -> Response:
        """Forget the entries of these `keys`, or with `"all": true` every one; the next sync meets the rows again. 409
        while another worker holds the collection."""
        if body.keys is not None:
            check_every_row(service, request, name)
        dropped = await desk.write(partial(service.quarantine.drop, name, body.keys, _LEASE_WAIT))
        return Json({"dropped": dropped})


def _keys(body: schemas.KeysBody | None) -> schemas.Keys:
    return None if body is None else body.keys
