"""The verbs that run processes: serve and worker, start and health for containers; and the verbs of jobs."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, app, guarded, jobs_app, opened, read_settings, verb
from app.src.cli.exits import FAILED, OK, UNEXPECTED, UsageFault
from app.src.cli.interrupts import leave_behind_what_hangs, orderly
from app.src.cli.output import Invocation
from app.src.jobs import State
from app.src.observe import Fault

if TYPE_CHECKING:
    from app.src.jobs.journal import Job
    from app.src.service.service import Service


@verb(app, "serve")
def serve(
    host: Annotated[str | None, typer.Option(help="Loopback only, as long as no authentication is configured.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 picks a free one.")] = None,
) -> None:
    """Run the REST service and the console. The first line on stdout is {"url": ...} once it answers."""
    from app.src.api import server
    from app.src.cli.demo import served

    loaded = read_settings({("api", "host"): host, ("api", "port"): port})
    api = loaded.settings.api

    def announce(url: str) -> None:
        output.write_json({"url": url})
        output.say(served(url, loaded.settings))

    server.refuse_public(api.host, authenticated=loaded.settings.access.configured)
    with orderly(OK), opened(loaded, measured=True) as service:
        server.serve(service, api.host, api.port, announce)
    leave_behind_what_hangs(OK)


# The worker is unhealthy after this many seconds without a poll for jobs. It polls every second, but a locked file or a
# full disk may interrupt the polls for a while.
_LOOKED_SECONDS = 30.0
_PROBE_SECONDS = 20.0  # between two probes of the engine


@verb(app, "worker")
def worker() -> int:
    """Run jobs and schedules without REST. Runs beside a service with `api.job_workers = 0`, or alone. The first
    line on stdout is {"worker": ..., "collections": ...} once it works, with the address of its metrics if it has one.
    SIGTERM ends it with 0 after the current batch; unfinished jobs are queued again. It ends with 4 when the engine
    fails for good."""
    from app.src.observe import health as health_
    from app.src.settings import no_collections

    loaded = read_settings()
    settings = loaded.settings.worker
    if not loaded.settings.collections:
        raise UsageFault(no_collections(loaded.file))
    health_.forget(settings.heartbeat)
    with orderly(OK), opened(loaded, measured=True) as service, ExitStack() as opening:
        service.jobs.open()  # sets `service.jobs.owner`
        first: dict[str, Any] = {"worker": service.jobs.owner, "collections": len(loaded.settings.collections)}
        if settings.metrics_port is not None:
            from app.src.api.server import metrics_served

            # Start before loading the model, which may take minutes.
            served = metrics_served(service, settings.metrics_host, settings.metrics_port)
            first["metrics"] = opening.enter_context(served)
        service.parts.warm()  # a wrong model fails here, not in the first job
        service.background.run(settings.concurrency, schedules=True, most=settings.max_jobs)
        output.write_json(first)
        stuck = until_over(service, settings.heartbeat)
        if stuck is None:
            output.say(f"{settings.max_jobs} jobs done (worker.max_jobs): exiting, to be restarted")
        else:
            output.fail(f"ended, for a supervisor to start it again: {stuck}")
    code = OK if stuck is None else UNEXPECTED
    leave_behind_what_hangs(code)
    return code


def until_over(service: Service, heartbeat: Path | None, look_seconds: float = 1.0) -> str | None:
    """Wait, probe the engine, and write heartbeats while it answers, or always if HANA computes the model. Return None
    once all allowed jobs are over, or the reason once the engine cannot recover."""
    from app.src.observe import health as health_

    probed, answers = time.monotonic(), True
    with health_.beating(heartbeat) as beat:
        while not service.jobs.wait_spent(look_seconds):
            if time.monotonic() - probed >= _PROBE_SECONDS:
                try:
                    service.readiness.probe_engine()
                    answers = True
                except Exception:  # any error: `beyond_help` counts them
                    answers = service.settings.embedding.in_hana  # a new process would meet the same HANA
                probed = time.monotonic()
            if stuck := service.readiness.beyond_help():
                return stuck
            if answers and service.jobs.looked_ago < _LOOKED_SECONDS:
                beat()
    return service.readiness.beyond_help()


Role = Annotated[Literal["serve", "worker"], typer.Argument(help="Which process of a container.")]


@verb(app, "start")
def start(role: Role = "serve") -> int:
    """Start `serve` or `worker` in a container. Checks the GPU first (three minutes at most) and prints which device
    computes and why; exits 1 where a GPU is required (USE_GPU=true) and missing."""
    from app.src.observe import gpu

    loaded = read_settings()
    try:
        output.say(gpu.first_look(loaded.settings.embedding))
    except Fault as fault:
        output.fail(f"a GPU is required, but {fault}; fix: {fault.fix}")
        return FAILED
    options = ["--config", str(Invocation.config)] if Invocation.config is not None else []
    options += ["--debug"] if Invocation.debug else []
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "app", *options, role])  # nosec B606 # this Python, no shell


@verb(app, "health")
def health(role: Role = "serve") -> int:
    """Check the health of `serve` or `worker` in a container. Asks the service at its configured address, or reads the
    heartbeat of the worker; exit 1 when it is not healthy."""
    from app.src.observe import health as health_

    settings = read_settings().settings
    try:
        well = health_.of_service(settings.api) if role == "serve" else health_.of_worker(settings.worker)
    except Fault as fault:
        output.fail(f"{fault}; {fault.fix}")
        return FAILED
    output.say(well)
    return OK


_JOB_COLUMNS = ("id", "collection", "kind", "state", "progress", "created", "seconds")
JobId = Annotated[str, typer.Argument(help="As `jobs list` shows it.", metavar="ID")]


@jobs_app.callback(invoke_without_command=True)
@guarded
def _jobs_without_verb(ctx: typer.Context, json: JsonFlag = False) -> None:
    if ctx.invoked_subcommand is None:
        jobs_list(json=json)


@verb(jobs_app, "list")
def jobs_list(
    collection: Annotated[str | None, typer.Option(help="Only of this collection.", metavar="NAME")] = None,
    state: Annotated[State | None, typer.Option(help="Only in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    with opened() as service:
        found = service.jobs.all(collection, state, limit)
    # Values are never folded, because users copy ids. Only `jobs show` prints errors, which are whole sentences.
    output.data([job.as_dict() for job in found], "Jobs", _JOB_COLUMNS, json=json, rows=list(map(_job_row, found)))
    failed = next((job for job in found if job.error), None)
    if failed is not None and output.for_people() and not json:
        output.say(f"for the error run: owl-sap jobs show {failed.id}")


@verb(jobs_app, "show")
def jobs_show(job_id: JobId, json: JsonFlag = False) -> None:
    """Show one job with its result."""
    with opened() as service:
        job = service.jobs.get(job_id)
    if json or not output.for_people():
        output.data(job.as_dict(), "", json=json)
        return
    tried = None if job.next_try is None else _moment(job.next_try)
    more = {"attempts": job.attempts, "note": job.note, "next_try": tried, "result": job.result}
    output.fields(f"Job {job.id}", _job_row(job) | more)


@verb(jobs_app, "cancel")
def jobs_cancel(job_id: JobId, json: JsonFlag = False) -> None:
    """End a job: a queued one at once, a running one after the batch in hand. Exit 1 when it is over already."""
    with opened() as service:
        job = service.jobs.cancel(job_id)
    if json:
        output.write_json(job.as_dict())
    else:
        output.say("cancelled" if job.over else f"asked to stop; see owl-sap jobs show {job_id}")


def _job_row(job: Job) -> dict[str, Any]:
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
