"""`owl-sap emulator` becomes the HANA emulator; `emulator sql` is a prompt for one that runs.
The emulator itself is never imported.
"""

from __future__ import annotations

import ipaddress
import json as json_
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli.application import (
    GLOBAL_OPTIONS,
    JsonFlag,
    guarded,
    loaded_for,
    subcommands,
    verb,
    with_global_options,
)
from app.src.cli.exits import UsageFault
from connector.extras import emulator_command

if TYPE_CHECKING:
    from connector.hana.connection import ConnectionOptions

emulator_app = subcommands("emulator", "The HANA emulator, and an SQL prompt for it.", no_args_is_help=False)

_CONNECTION = "connection.json"
"""What a running emulator leaves in its data folder: its first line."""
_STANDARD = {"host": "127.0.0.1", "user": "OWL", "password": "Owl-Stand-in-1"}
_CERTIFIED_NAME = "localhost"
"""The driver never matches an IP address with a certificate."""
_LOCAL = "the prompt is for an emulator on this machine"


@emulator_app.callback(invoke_without_command=True)
@with_global_options
@guarded
def emulator(  # noqa: PLR0913 - a verb has as many parameters as options
    ctx: typer.Context,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder that keeps the data; default: none is kept.")] = None,
    schema: Annotated[
        str,
        typer.Option(help="Schema the user owns and starts in. SQLAlchemy reflects the one of the user's name, OWL."),
    ] = "SAPDEMO",
    sample: Annotated[bool, typer.Option("--sample", help="Load the SAP-like sample tables.")] = False,
    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS; the first line names the PEM to trust.")] = False,
    tls_host: Annotated[str | None, typer.Option(help="TLS for another host name.", hidden=True)] = None,
    tls_expired: Annotated[bool, typer.Option("--tls-expired", help="TLS that has ended.", hidden=True)] = False,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="What goes wrong; repeatable (docs/emulator.md).")
    ] = None,
) -> None:
    """Run the HANA emulator in the foreground. The first line on stdout says how to connect."""
    if ctx.invoked_subcommand is not None:
        own = ctx.params.keys() - GLOBAL_OPTIONS.keys()
        if any(ctx.get_parameter_source(name).name != "DEFAULT" for name in own):  # type: ignore[union-attr]
            raise UsageFault(
                f"options of the prompt come after its name: owl-sap emulator {ctx.invoked_subcommand} ..."
            )
        return
    command = [*emulator_command(), "--port", str(port), "--schema", schema]
    command += ["--data", str(data)] if data is not None else []
    command += ["--sample"] if sample else []
    command += ["--tls"] if tls else []
    command += ["--tls-host", tls_host] if tls_host is not None else []
    command += ["--tls-expired"] if tls_expired else []
    for order in fault or []:
        command += ["--fault", order]
    # Not a child process: a SIGTERM to us must reach the emulator itself.
    sys.stdout.flush()
    os.execv(sys.executable, command)  # nosec B606 # this Python, no shell


@verb(emulator_app, "sql")
def sql(  # noqa: PLR0913 - as above
    ctx: typer.Context,
    statements: Annotated[
        list[str] | None, typer.Argument(metavar="STATEMENT...", help="Default: from stdin, or typed at a prompt.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The data folder of a running emulator.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: of the folder, or of the section hana.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Default: 127.0.0.1; loopback only.")] = None,
    user: Annotated[str | None, typer.Option(help="Default: OWL, as in the emulator.")] = None,
    password: Annotated[str | None, typer.Option(help="Default: the emulator's own.")] = None,
    tls_trust: Annotated[Path | None, typer.Option(metavar="PEM", help="Speak TLS and trust this authority.")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Most rows of one result.")] = 1000,
    json: JsonFlag = False,
) -> int:
    """Run SQL in an emulator. Takes statements from the arguments, from stdin, or typed line by line."""
    from app.src.cli.prompting import Screen, interact, run_statements
    from connector.hana.prompt import Prompt

    flags = {"port": port, "host": host, "user": user, "password": password}
    flags["trust_store"] = None if tls_trust is None else str(tls_trust)
    options = _options(ctx, data, {name: value for name, value in flags.items() if value is not None})
    prompt, screen = Prompt(options), Screen(json, max_rows)
    try:
        if statements:
            return run_statements(prompt, statements, screen)
        if not sys.stdin.isatty():
            return run_statements(prompt, [sys.stdin.read()], screen)
        return interact(prompt, screen, None if data is None else data / "sql-history")
    finally:
        screen.finish()
        prompt.close()


def _options(ctx: typer.Context, data: Path | None, flags: Mapping[str, Any]) -> ConnectionOptions:
    """From the data folder, or the standard values with --port, or [hana] if that is on this machine; flags win."""
    from connector.hana.connection import ConnectionOptions

    if data is not None:
        found = _of_folder(data)
    elif "port" in flags:
        found = _STANDARD
    else:
        found = _of_settings(ctx)
    wanted = {**found, **flags}
    _check_local(wanted["host"])
    trust_store = wanted.get("trust_store") or ""
    return ConnectionOptions(
        host=wanted["host"],
        port=wanted["port"],
        user=wanted["user"],
        password=wanted["password"],
        encrypt=bool(trust_store),
        trust_store=trust_store,
        host_name_in_certificate=wanted.get("host_name_in_certificate") or (_CERTIFIED_NAME if trust_store else ""),
        application="owl-sap emulator sql",
    )


def _of_folder(data: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json_.loads((data / _CONNECTION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageFault(
            f"no emulator is serving the folder {data}; start one: owl-sap emulator --data {data}"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageFault(f"{data / _CONNECTION} cannot be read ({type(error).__name__}); give --port") from None
    return found


def _of_settings(ctx: typer.Context) -> Mapping[str, Any]:
    """Return the connection of [hana]. Raises UsageFault where no host is set."""
    hana = loaded_for(ctx).settings.hana
    if not hana.host:
        raise UsageFault("no emulator named: give --port, or --data with its folder (or set HANA_HOST and HANA_PORT)")
    _check_local(hana.host)
    return {
        "host": hana.host,
        "port": hana.port,
        "user": hana.user or _STANDARD["user"],
        "password": _STANDARD["password"] if hana.password is None else hana.password.get_secret_value(),
        "trust_store": hana.trust_store if hana.encrypt else None,
        "host_name_in_certificate": hana.host_name_in_certificate,
    }


def _check_local(host: str) -> None:
    """So that no statement meant for test data reaches a real HANA. Raises UsageFault."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise UsageFault(f"{_LOCAL}, and {host} is not; give --port (and --host 127.0.0.1)")
