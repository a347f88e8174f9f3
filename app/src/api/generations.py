"""The routes of generations: which there are; build, compare, switch, roll back, drop."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from fastapi import APIRouter, Request, Response

from app.src.api import schemas
from app.src.api.asker import check_every_row
from app.src.api.desk import Desk, Json
from app.src.api.errors import ACCEPTED, OK
from app.src.api.jobs import JOB_LINKS, started
from app.src.service.sync import SyncRequest

_PLACE = "/v1/collections/{name}/generations"
_ANSWERS: dict[int | str, dict[str, Any]] = {
    OK: {"description": "What was found or done, for every action but build."},
    ACCEPTED: JOB_LINKS[ACCEPTED] | {"description": "build: the job that does it.", "model": schemas.JobStarted},
}


def add(routes: APIRouter, desk: Desk) -> None:
    service = desk.service

    @routes.get(_PLACE, response_model=list[schemas.GenerationBody])
    async def generations(name: str) -> Response:
        """The editions of a collection, by number: the active one serves, others are built or kept to go back to."""
        return Json(await desk.run(partial(service.generations.shown, name)))

    @routes.post(
        _PLACE,
        response_model=schemas.ComparisonBody | schemas.SwitchedBody | schemas.GenerationDropped,
        responses=_ANSWERS,
    )
    async def change(request: Request, name: str, body: schemas.GenerationsBody) -> Response:
        """Build another generation by the settings, in the background; or compare, switch, roll back, drop at once. 404
        for a generation there is none of, 409 where its state forbids it or a job of this collection runs."""
        if body.queries:
            desk.check_texts(body.queries, name="queries")
        if body.action == "compare":  # by the texts of stored rows, and it shows them
            check_every_row(service, request, name)
        if body.action == "build":
            return started(await desk.run(partial(service.background.start_build, name, SyncRequest(owner="api"))))
        return Json(await desk.run(partial(_done, desk, name, body)))


def _done(desk: Desk, name: str, body: schemas.GenerationsBody) -> dict[str, Any]:
    service = desk.service
    if body.action == "compare":
        return dict(service.generations.compare(name, body.number, body.queries, body.sample).as_dict())
    if body.action == "switch":
        return service.generations.switch(name, body.number, force=body.force).as_dict()
    if body.action == "rollback":
        return service.generations.rollback(name).as_dict()
    service.generations.drop(name, cast("int", body.number))  # the schema has seen to it
    return {"collection": name, "dropped": body.number}
