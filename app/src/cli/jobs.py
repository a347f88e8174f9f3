"""`owl-sap jobs`: the records of background work, as the service and its neighbours on this machine keep them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, guarded, jobs_app, loaded_for, opened, verb, with_global_options
from app.src.cli.exits import FAILED, OK
from app.src.jobs import State

if TYPE_CHECKING:
    from app.src.jobs import Event, Job, Jobs

_COLUMNS = ("id", "collection", "kind", "state", "progress", "created", "seconds")
_POLL = 0.2
_SETTLE_POLLS = 10


@jobs_app.callback(invoke_without_command=True)
@with_global_options
def _without_verb(ctx: typer.Context, json: JsonFlag = False) -> None:
    if ctx.invoked_subcommand is None:
        guarded(list_)(ctx, json=json)


JobId = Annotated[str, typer.Argument(help="As `jobs list` shows it.", metavar="ID")]


@verb(jobs_app, "list")
def list_(
    ctx: typer.Context,
    collection: Annotated[str | None, typer.Option(help="Only of this collection.", metavar="NAME")] = None,
    state: Annotated[State | None, typer.Option(help="Only in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    with opened(loaded_for(ctx)) as service:
        found = service.jobs.all(collection, state, limit)
    if json:
        output.write_json([job.as_dict() for job in found])
    else:
        # Ids are copied and errors are sentences: so no value is folded, and why a job failed is for `jobs show`.
        output.counts("Jobs", [_row(job) for job in found], _COLUMNS, records=[job.as_dict() for job in found])
        failed = next((job for job in found if job.error), None)
        if failed is not None and output.for_people():
            output.say(f"for the error run: owl-sap jobs show {failed.id}")


@verb(jobs_app, "show")
def show(ctx: typer.Context, job_id: JobId, json: JsonFlag = False) -> None:
    """Show one job with its result."""
    with opened(loaded_for(ctx)) as service:
        job = service.jobs.get(job_id)
    _print(job, json)


@verb(jobs_app, "cancel")
def cancel(ctx: typer.Context, job_id: JobId, json: JsonFlag = False) -> None:
    """End a job: a queued one at once, a running one after the batch in hand. Exit 1 when it is over already."""
    with opened(loaded_for(ctx)) as service:
        job = service.jobs.cancel(job_id)
    if json:
        output.write_json(job.as_dict())
    else:
        output.say("cancelled" if job.over else f"asked to stop; follow it with: owl-sap jobs watch {job_id}")


@verb(jobs_app, "watch")
def watch(ctx: typer.Context, job_id: JobId, json: JsonFlag = False) -> int:
    """Follow a job to its end, on stderr; then show it. Exit 1 when it failed or was cancelled."""
    with opened(loaded_for(ctx)) as service:
        for event in _events(service.jobs, job_id):
            if event.name == "state":
                output.say(": ".join(filter(None, (event.data["state"], event.data.get("note")))))
            elif event.name == "progress":
                output.say(f"{event.data['done']:,} of {event.data['total']:,} rows")
        job = service.jobs.get(job_id)
    _print(job, json)
    return OK if job.state == "succeeded" else FAILED


def _events(jobs: Jobs, job_id: str) -> Iterator[Event]:
    """As they come, up to the last."""
    after, polls = 0, 0
    while True:
        if polls % _SETTLE_POLLS == 0:
            jobs.get(job_id)  # puts back a job whose process has died; raises UnknownJob
        polls += 1
        for event in jobs.events(job_id, after):
            after = event.id
            yield event
            if event.name == "result":
                return
        time.sleep(_POLL)


def _print(job: Job, json: bool) -> None:
    if json:
        output.write_json(job.as_dict())
        return
    tried = None if job.next_try is None else _moment(job.next_try)
    shown = _row(job) | {"attempts": job.attempts, "note": job.note, "next_try": tried, "result": job.result}
    lines = [{"": name, " ": output.shown(value)} for name, value in shown.items()]
    output.table(f"Job {job.id}", lines, records=[job.as_dict()])


def _row(job: Job) -> dict[str, Any]:
    end = time.time() if job.finished is None else job.finished
    return {
        "id": job.id,
        "collection": job.collection,
        "kind": job.kind,
        "state": "stopping" if job.cancelling and not job.over else job.state,
        "progress": f"{job.progress['done']:,} of {job.progress['total']:,}",
        "created": _moment(job.created),
        "seconds": None if job.started is None else round(end - job.started, 1),
        "error": job.error,
    }


def _moment(time_: float) -> str:
    return f"{datetime.fromtimestamp(time_, UTC):%Y-%m-%d %H:%M:%S}Z"
