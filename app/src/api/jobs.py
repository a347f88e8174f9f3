"""The routes that start background work and follow it: sync, verify, job records, events and cancelling."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

import anyio
import orjson
from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, Field
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.src.api.errors import Refused
from app.src.api.guard import still_may
from app.src.api.requests import Body, Executors, Json
from app.src.jobs import State
from app.src.jobs.journal import Job
from app.src.service.sync import SyncRequest

LAST_GENERATION = 2**31 - 1  # both stores keep the number as a signed 32-bit integer


class SyncBody(Body):
    full: bool = Field(default=False, description="compare every row, with any change method")
    max_deletes: float | None = Field(default=None, ge=0, le=1)
    retry_login: bool = Field(
        default=False, description="retry a refused login once, after user or privileges were corrected in HANA"
    )
    accept_schema: bool = Field(default=False, description="continue although a column in use changed its type")


class VerifyBody(Body):
    repair: bool = Field(default=False, description="repair what differs: rows that differ are rewritten")
    generation: int | None = Field(default=None, ge=1, le=LAST_GENERATION, description="default: the active one")


class JobStarted(BaseModel):
    job: str


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
    attempts: int = Field(description="how often it was started")
    note: str | None = Field(description="why it is queued again, or its reason to wait")
    next_try: float | None = Field(description="POSIX time until which it waits for HANA")


class EventBody(BaseModel):
    """One server-sent event of a job."""

    id: str = Field(pattern="^[0-9]+$", description="for Last-Event-ID")
    event: Literal["state", "progress", "result"]
    data: str = Field(description="JSON; of `result` the whole job, as GET /v1/jobs/{job_id} has it")


POLL_SECONDS = 0.2
PING_SECONDS = 15  # comments at this interval keep proxies from closing a quiet stream
MOST_STREAMS = 100
# After this many quiet polls the record itself is read, which detects a dead process.
_SETTLE_POLLS = 10

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events `state`, `progress` and, last of all, `result`; ids count from 1.",
        "content": {"text/event-stream": {"schema": EventBody.model_json_schema()}},
    },
    204: {"description": "The job is over and there is nothing after Last-Event-ID."},
}


_EVENT_ID: dict[str, Any] = {"anyOf": [{"type": "string", "pattern": "^[0-9]{0,15}$"}]}
# OpenAPI links from answers that start a job to the operations that take its id.
JOB_LINKS: dict[int | str, dict[str, Any]] = {
    202: {
        "description": "Started; `Location` has the place of the job.",
        "links": {
            operation: {"operationId": operation, "parameters": {"job_id": "$response.body#/job"}}
            for operation in ("one_job", "events", "cancel")
        },
    }
}


def started(job: Job) -> Response:
    return Json({"job": job.id}, 202, {"Location": f"/v1/jobs/{job.id}"})


def add(routes: APIRouter, executors: Executors) -> None:
    service, jobs = executors.service, executors.service.jobs
    streams = anyio.CapacityLimiter(MOST_STREAMS)

    @routes.post("/v1/collections/{name}/sync", status_code=202, response_model=JobStarted, responses=JOB_LINKS)
    async def sync(name: str, body: SyncBody | None = None) -> Response:
        """Start a sync in the background; 409 while a job of this collection runs."""
        request = SyncRequest(owner="api", **(body or SyncBody()).model_dump())
        return started(await executors.run(partial(service.background.start_sync, name, request)))

    @routes.post("/v1/collections/{name}/verify", status_code=202, response_model=JobStarted, responses=JOB_LINKS)
    async def verify(name: str, body: VerifyBody | None = None) -> Response:
        """Compare the collection with its source in the background; `repair` rewrites the rows that differ. The
        job's result is the report; `ok` in it says whether all is well. 409 while a job of this collection runs."""
        wanted = body or VerifyBody()
        work = partial(service.background.start_verify, name, repair=wanted.repair, generation=wanted.generation)
        return started(await executors.run(work))

    @routes.get("/v1/jobs", response_model=list[JobBody])
    async def all_jobs(
        collection: str | None = None, state: State | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100
    ) -> Response:
        """Newest first. Records outlive the service; old ones are deleted (after 30 days, and beyond 1,000)."""
        found = await executors.look(partial(jobs.all, collection, state, limit))
        return Json([job.as_dict() for job in found])

    @routes.get("/v1/jobs/{job_id}", response_model=JobBody, operation_id="one_job")
    async def one_job(job_id: str) -> Response:
        """One record: state, progress and, at the end, the result or the error."""
        job = await executors.look(partial(jobs.get, job_id))
        return Json(job.as_dict())

    @routes.post(
        "/v1/jobs/{job_id}/cancel",
        status_code=202,
        response_model=JobBody,
        operation_id="cancel",
        responses={200: {"description": "It had not begun and was cancelled.", "model": JobBody}},
    )
    async def cancel(job_id: str) -> Response:
        """A queued job ends at once (200). A running one finishes its current batch and keeps its results (202);
        repeating the request has no effect. 409 when it is over."""
        job = await executors.look(partial(jobs.cancel, job_id))
        return Json(job.as_dict(), 200 if job.over else 202)

    @routes.get(
        "/v1/jobs/{job_id}/events", response_class=EventSourceResponse, responses=_STREAM, operation_id="events"
    )
    async def events(
        request: Request,
        job_id: str,
        last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", json_schema_extra=_EVENT_ID)] = None,
    ) -> Response:
        """The job's past and future events as server-sent events; ends after `result`, and when the caller's key or
        token ends. The header `Last-Event-ID` continues after that event, also after a restart of the service."""
        if not re.fullmatch("[0-9]{0,15}", last_event_id or ""):
            why = "Last-Event-ID is not the id of an event of this job: those are numbers from 1"
            raise Refused("Unprocessable", why)
        after = int(last_event_id or 0)
        job = await executors.look(partial(jobs.get, job_id))
        found = await executors.look(partial(jobs.events, job_id, after))
        if job.over and not found:
            return Response(status_code=204)  # tells browsers not to reconnect
        if streams.available_tokens < 1:
            raise Refused(
                "TooManyStreams",
                f"{MOST_STREAMS} clients follow jobs, the limit; try again later, or use GET /v1/jobs/{job_id}",
            )
        return EventSourceResponse(_stream(executors, streams, request, job_id, after), ping=PING_SECONDS, sep="\n")


async def _stream(
    executors: Executors, streams: anyio.CapacityLimiter, request: Request, job_id: str, after: int
) -> AsyncIterator[ServerSentEvent]:
    jobs, quiet = executors.service.jobs, 0
    async with streams:
        while True:
            # Read the record before the events: if the job is over, all its events are written by then. Reading it
            # requeues the job of a dead process, and raises UnknownJob for a deleted job.
            over = quiet >= _SETTLE_POLLS and (await executors.look(partial(jobs.get, job_id))).over
            found = await executors.look(partial(jobs.events, job_id, after))
            if not await still_may(request.scope):
                return
            quiet = 0 if found or quiet >= _SETTLE_POLLS else quiet + 1
            for event in found:
                after = event.id
                data = orjson.dumps(event.data).decode()
                yield ServerSentEvent(data, event=event.name, id=str(event.id), sep="\n")
                if event.name == "result":
                    return
            if over:
                return  # Last-Event-ID was after `result`
            await anyio.sleep(POLL_SECONDS)
