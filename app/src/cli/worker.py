"""The verb `worker`: the background part of a service in a process of its own."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import app, loaded_for, opened, verb
from app.src.cli.exits import OK, UNEXPECTED, UsageFault
from app.src.cli.interrupts import leave_behind_what_hangs, orderly
from app.src.observe.health import Heartbeat, forget
from app.src.settings import WorkerSettings, no_collections

if TYPE_CHECKING:
    from app.src.api.scraping import MetricsListener
    from app.src.service.service import Service

_LOOKED_SECONDS = 30.0
"""Without a look for jobs for so long the worker is not well: it looks every second, and a file that is locked or a
disk that is full passes."""


@verb(app, "worker")
def worker(
    ctx: typer.Context,
    max_jobs: Annotated[
        int | None, typer.Option(min=0, help="End with 0 after this many jobs, so that it is restarted; 0: never.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Answer GET /metrics there; 0 picks a free one.")
    ] = None,
) -> int:
    """Run jobs and schedules without REST. Stands beside a service that has `api.job_workers = 0`, or alone. The first
    line on stdout is {"worker": ..., "collections": ...} once it works, with the address of its metrics if it has one.
    SIGTERM ends it with 0 after the current batch; unfinished jobs are queued again. It ends with 4 when the engine
    fails for good."""
    loaded = loaded_for(ctx, {("worker", "max_jobs"): max_jobs, ("worker", "metrics_port"): metrics_port})
    settings = loaded.settings.worker
    if not loaded.settings.collections:
        raise UsageFault(no_collections(loaded.file))
    forget(settings.heartbeat)
    with orderly(OK), opened(loaded) as service, ExitStack() as opening:
        listener = _listener(service, settings)
        if listener is not None:
            opening.enter_context(closing(listener)).start()  # before the model, which may take minutes
        service.jobs.open()
        service.parts.embedder.embed(["warm"])  # a wrong model ends the start, not the first job
        service.background.run(settings.concurrency, schedules=True, most=settings.max_jobs)
        first: dict[str, Any] = {"worker": service.jobs.owner, "collections": len(loaded.settings.collections)}
        if listener is not None:
            first["metrics"] = listener.url
        output.write_json(first)
        with closing(Heartbeat(settings.heartbeat)) as heartbeat:
            stuck = until_over(service, heartbeat)
        if stuck is None:
            output.say(f"{settings.max_jobs} jobs done (worker.max_jobs): ending, so that it is restarted")
        else:
            output.fail(f"ended, for a supervisor to start it again: {stuck}")
    code = OK if stuck is None else UNEXPECTED
    leave_behind_what_hangs(code)
    return code


def until_over(service: Service, heartbeat: Heartbeat, look_seconds: float = 1.0) -> str | None:
    """Waits until all jobs that may be begun are over (None), or until the engine is beyond help: then why. Gives signs
    of life meanwhile."""
    while not service.jobs.wait_spent(look_seconds):
        stuck = service.readiness.beyond_help()
        if stuck is not None:
            return stuck
        heartbeat.beat(lambda: service.jobs.looked_ago < _LOOKED_SECONDS)
    return None


def _listener(service: Service, wanted: WorkerSettings) -> MetricsListener | None:
    if wanted.metrics_port is None:
        return None
    from app.src.api.scraping import MetricsListener

    return MetricsListener(service, wanted.metrics_host, wanted.metrics_port)
