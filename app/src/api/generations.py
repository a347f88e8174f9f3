"""The routes of generations and of the quarantine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.src.api.guard import caller
from app.src.api.jobs import JOB_LINKS, LAST_GENERATION, JobStarted, started
from app.src.api.requests import Body, Executors, Json, Texts, one_of_members
from app.src.service.generations import Switched
from app.src.service.sync import SyncRequest
from connector.sync.generations import Comparison

Keys = Annotated[list[dict[str, Any] | list[Any]], Field(max_length=10_000, fail_fast=True)] | None


class GenerationsBody(Body):
    """`number`: the generation to compare, switch to or drop; null: the newest that is being built."""

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
    number: int | None = Field(default=None, ge=1, le=LAST_GENERATION)
    force: bool = Field(default=False, description="switch even to one that is not complete")
    queries: Texts = Field(default=[], description="compare: texts to ask for, besides stored ones")
    sample: int = Field(default=50, ge=0, le=1000, description="compare: how many stored texts to ask for")

    @model_validator(mode="after")
    def _fits(self) -> GenerationsBody:
        if self.number is None and self.action == "drop":
            raise ValueError("drop needs a number")
        if self.number is not None and self.action in ("build", "rollback"):
            raise ValueError(f"{self.action} takes no number")
        return self


class KeysBody(Body):
    """Which rows of the quarantine; null: all."""

    keys: Keys = Field(
        default=None, description="values by column name, or all values in key order", examples=[[{"MATNR": "4711"}]]
    )


class DropBody(KeysBody):
    """Which entries of the quarantine: either `keys`, or all by name."""

    model_config = one_of_members(keys={"type": "array"}, all={"const": True})

    all: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> DropBody:
        if self.all == (self.keys is not None):
            raise ValueError('give either keys or "all": true')
        return self


class EntryBody(BaseModel):
    key: dict[str, Any] = Field(description="by column name, as in search hits", examples=[{"MATNR": "4711"}])
    stage: str = Field(description="render, embed or apply")
    reason: str = Field(description="names columns and codes, never the row's text")
    attempts: int = Field(description="with its present content, since the last retry by request")
    given_up: bool = Field(description="syncs skip it until its content changes or it is retried by request")
    last_seen: str | None


class GenerationBody(BaseModel):
    generation: int
    state: Literal["building", "active", "retired"]
    complete: bool = Field(description="one sync of it was complete")
    model: str
    dimension: int
    rows: int | None
    table: str
    created: str | None
    retired: str | None
    last_sync: str | None
    template: str | None = Field(description="null: made by an earlier version")


class GenerationDropped(BaseModel):
    collection: str
    dropped: int


class DropResponse(BaseModel):
    dropped: int


_GENERATIONS = "/v1/collections/{name}/generations"
_QUARANTINE = "/v1/collections/{name}/quarantine"
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "What was found or done, for every action but build."},
    202: JOB_LINKS[202] | {"description": "build: the job that does it.", "model": JobStarted},
}


def add(routes: APIRouter, executors: Executors) -> None:
    service = executors.service

    @routes.get(_GENERATIONS, response_model=list[GenerationBody])
    async def generations(name: str) -> Response:
        """The generations of a collection, by number: the active one serves, others are being built or kept for
        rollback."""
        return Json(await executors.run(partial(service.generations.shown, name)))

    @routes.post(_GENERATIONS, response_model=Comparison | Switched | GenerationDropped, responses=_ANSWERS)
    async def change(request: Request, name: str, body: GenerationsBody) -> Response:
        """Build a generation by the settings, in the background; or compare, switch, roll back or drop at once. 404 for
        an unknown generation, 409 where its state forbids it or a job of this collection runs."""
        if body.queries:
            executors.check_texts(body.queries, name="queries")
        if body.action == "compare":  # the result shows texts of stored rows
            service.rights.check_every_row(caller(request), name)
        if body.action == "build":
            build = partial(service.background.start_sync, name, SyncRequest(owner="api"), "build")
            return started(await executors.run(build))
        if body.action == "drop":
            await executors.run(partial(service.generations.drop, name, cast("int", body.number)))
            return Json({"collection": name, "dropped": body.number})
        work: Mapping[str, Callable[[], Comparison | Switched]] = {
            "compare": partial(service.generations.compare, name, body.number, body.queries, body.sample),
            "switch": partial(service.generations.switch, name, body.number, force=body.force),
            "rollback": partial(service.generations.rollback, name),
        }
        return Json(await executors.run(work[body.action]))

    @routes.get(_QUARANTINE, response_model=list[EntryBody])
    async def quarantine(request: Request, name: str, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> Response:
        """The rows that could not be processed, in the order of their keys, each with its reason. `GET
        /v1/collections/{name}` has their total."""
        service.rights.check_every_row(caller(request), name)
        entries = await executors.run(partial(service.quarantine.entries, name))
        return Json([entry.as_dict() for entry in entries[:limit]])

    @routes.post(f"{_QUARANTINE}/retry", status_code=202, response_model=JobStarted, responses=JOB_LINKS)
    async def retry(request: Request, name: str, body: KeysBody | None = None) -> Response:
        """Read these rows (without `keys`: all in quarantine) again and process them, in the background. The job's
        result counts what became of them. 404 for a key that is not in quarantine; 409 while a job of this
        collection runs."""
        keys = None if body is None else body.keys
        if keys is not None:
            service.rights.check_every_row(caller(request), name)
        return started(await executors.run(partial(service.background.start_retry, name, keys)))

    @routes.post(f"{_QUARANTINE}/drop", response_model=DropResponse)
    async def drop(request: Request, name: str, body: DropBody) -> Response:
        """Forget the entries of these `keys`, or with `"all": true` every one; the next sync meets the rows again. 409
        while another worker holds the collection."""
        if body.keys is not None:
            service.rights.check_every_row(caller(request), name)
        forget = partial(service.quarantine.drop, name, body.keys, lease_wait=2.0)
        return Json({"dropped": await executors.run(forget, writes=True)})
