"""The verb `worker`: the background part of a service in a process of its own."""

from __future__ import annotations

import threading

import typer

from app.src.cli import output
from app.src.cli.application import app, loaded_for, opened, verb
from app.src.cli.exits import OK, UsageFault
from app.src.cli.interrupts import orderly
from app.src.settings import no_collections


@verb(app, "worker")
def worker(ctx: typer.Context) -> None:
    """Jobs and schedules without REST, beside a service that has `api.job_workers = 0`, or alone: goes on with what was
    left, runs what is asked for and what is due. The first line on stdout is {"worker": ..., "collections": ...} once
    it works. SIGTERM ends it with 0 after the batch in hand; what is unfinished goes on elsewhere, later."""
    loaded = loaded_for(ctx)
    if not loaded.settings.collections:
        raise UsageFault(no_collections(loaded.file))
    with orderly(OK), opened(loaded) as service:
        service.jobs.open()
        service.embed(["warm"])  # a wrong model ends the start, not the first job
        service.background.run(loaded.settings.worker.concurrency, schedules=True)
        output.write_json({"worker": service.jobs.owner, "collections": len(loaded.settings.collections)})
        threading.Event().wait()
