"""The verb `mcp`: tools for the program that starts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.src.cli.application import app, loaded_for, opened, verb
from app.src.cli.exits import OK, UsageFault
from app.src.cli.interrupts import leave_behind_what_hangs, orderly
from app.src.settings import no_collections
from connector.extras import install_command

if TYPE_CHECKING:
    from app.src.service.service import Service


@verb(app, "mcp")
def mcp(
    ctx: typer.Context,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with an API key or token whose rights hold; default: the setting mcp.key, or yours."),
    ] = None,
    write: Annotated[
        bool | None, typer.Option("--write/--read-only", help="Offer start_sync too; default: the setting mcp.write.")
    ] = None,
) -> int:
    """Offer search and rows to agents over the Model Context Protocol. An agent's program starts it and talks to it on
    stdin and stdout (docs/agents.md); it ends with 0 when stdin ends and on SIGTERM."""
    loaded = loaded_for(ctx, {("mcp", "key"): _key(key_file), ("mcp", "write"): write})
    if not loaded.settings.collections:
        raise UsageFault(no_collections(loaded.file))
    serve = _serving()
    with orderly(OK), opened(loaded) as service:
        if loaded.settings.mcp.write:
            service.background.run(1, schedules=False)  # what start_sync asks for, where nobody else works
        serve(service)
    leave_behind_what_hangs(OK)
    return OK


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageFault(f"--key-file: the file cannot be read ({type(error).__name__})") from None


def _serving() -> Callable[[Service], None]:
    try:
        from app.src.mcp.stdio import serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise UsageFault(f"the package mcp is not installed: {install_command('mcp')}") from None
    return serve
