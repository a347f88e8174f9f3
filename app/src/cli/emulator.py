"""`owl-sap emulator` starts the HANA emulator."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from app.src.cli.application import app, verb
from connector.extras import emulator_command


@verb(app, "emulator")
def emulator(  # noqa: PLR0913 - a verb has as many parameters as options
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder that keeps the data; default: none is kept.")] = None,
    schema: Annotated[str, typer.Option(help="Schema the user OWL owns and starts in.")] = "SAPDEMO",
    sample: Annotated[bool, typer.Option("--sample", help="Load the SAP-like sample tables.")] = False,
    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS; the first line names the PEM to trust.")] = False,
    tls_host: Annotated[str | None, typer.Option(help="TLS for another host name.", hidden=True)] = None,
    tls_expired: Annotated[bool, typer.Option("--tls-expired", help="Expired TLS certificate.", hidden=True)] = False,
    fault: Annotated[list[str] | None, typer.Option(metavar="JSON", help="A fault to inject; repeatable.")] = None,
) -> None:
    """Run the HANA emulator in the foreground. The first line on stdout says how to connect."""
    command = [*emulator_command(), "--port", str(port), "--schema", schema]
    for name, value in (("--data", data), ("--tls-host", tls_host), *(("--fault", order) for order in fault or [])):
        command += [] if value is None else [name, str(value)]
    flags = {"--sample": sample, "--tls": tls, "--tls-expired": tls_expired}
    command += [name for name, given in flags.items() if given]
    # Not a child process: a SIGTERM must reach the emulator itself.
    sys.stdout.flush()
    os.execv(sys.executable, command)  # nosec B606 # this Python, no shell
