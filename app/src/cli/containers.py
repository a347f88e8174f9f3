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
def start(ctx: typer.Context, role: Annotated[Role, typer.Argument(help="What to become.")] = Role.SERVE) -> int:
    """For containers: look at the GPU (a minute at most), say in one line what computes and why, and become `serve` or
    `worker` in the same process. Where a GPU is asked for (USE_GPU=true) and missing, exit 1 with the reason."""
    from app.src import starting
    from app.src.doctor import Fault

    loaded = loaded_for(ctx)
    try:
        output.say(starting.look(loaded.settings.embedding))
    except Fault as fault:
        output.fail(f"a GPU is asked for, but {fault}; to mend it: {fault.fix}")
        return FAILED
    invocation: Invocation = ctx.obj
    options = ["--config", str(invocation.config)] if invocation.config is not None else []
    options += ["--debug"] if invocation.debug else []
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "app", *options, role.value])  # nosec B606 # this Python, no shell


@verb(app, "health")
def health(ctx: typer.Context, role: Annotated[Role, typer.Argument(help="Whom to ask after.")] = Role.SERVE) -> int:
    """For containers: is the service ready, where the settings say that it listens? Or is the worker at work, by its
    heartbeat? Exit 1 when not."""
    from app.src import health as checks
    from app.src.doctor import Fault

    settings = loaded_for(ctx).settings
    try:
        well = checks.of_service(settings.api) if role == Role.SERVE else checks.of_worker(settings.worker)
    except Fault as fault:
        output.fail(f"{fault}; {fault.fix}")
        return FAILED
    output.say(well)
    return OK
