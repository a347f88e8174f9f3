"""The verbs of containers: `start`, which looks at the GPU and becomes a service, and `health`, which asks it."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from app.src.cli import output
from app.src.cli.application import Invocation, app, loaded_for, verb
from app.src.cli.exits import FAILED, OK


class Role(StrEnum):
    """What a container runs."""

    SERVE = "serve"
    WORKER = "worker"


@verb(app, "start")
def start(
    ctx: typer.Context, role: Annotated[Role, typer.Argument(help="Which process to start.")] = Role.SERVE
) -> int:
    """Start `serve` or `worker` in a container. Checks the GPU first (one minute at most) and prints which device
    computes and why; exits 1 where a GPU is required (USE_GPU=true) and missing."""
    from app.src.observe import starting
    from app.src.observe.doctor import Fault

    loaded = loaded_for(ctx)
    try:
        output.say(starting.look(loaded.settings.embedding))
    except Fault as fault:
        output.fail(f"a GPU is required, but {fault}; fix: {fault.fix}")
        return FAILED
    invocation: Invocation = ctx.obj
    options = ["--config", str(invocation.config)] if invocation.config is not None else []
    options += ["--debug"] if invocation.debug else []
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "app", *options, role.value])  # nosec B606 # this Python, no shell


@verb(app, "health")
def health(
    ctx: typer.Context, role: Annotated[Role, typer.Argument(help="Which process to check.")] = Role.SERVE
) -> int:
    """Check the health of `serve` or `worker` in a container. Asks the service at its configured address, or reads the
    heartbeat of the worker; exit 1 when it is not healthy."""
    from app.src.observe import health as checks
    from app.src.observe.doctor import Fault

    settings = loaded_for(ctx).settings
    try:
        well = checks.of_service(settings.api) if role == Role.SERVE else checks.of_worker(settings.worker)
    except Fault as fault:
        output.fail(f"{fault}; {fault.fix}")
        return FAILED
    output.say(well)
    return OK
