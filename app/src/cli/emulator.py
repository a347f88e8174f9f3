"""`owl-sap emulator` starts the HANA emulator as a process; `emulator sql` runs SQL in a running one."""

from __future__ import annotations

import json as json_
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import GLOBAL_OPTIONS, JsonFlag, guarded, read_settings, subcommands, verb
from app.src.cli.exits import OK, UNAVAILABLE, USAGE, UsageFault
from app.src.settings import is_loopback
from connector.errors import ConnectFailed, ConnectorError, LoginRefused, PermissionRefused
from connector.extras import emulator_command

if TYPE_CHECKING:
    from connector.hana.connection import ConnectionOptions


emulator_app = subcommands("emulator", "The HANA emulator, and SQL for it.", no_args_is_help=False)

_MOST_ROWS = 1000  # of one result
_LOGIN = {"user": "OWL", "password": "Owl-Stand-in-1"}  # the emulator's own


@emulator_app.callback(invoke_without_command=True)
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
    tls_expired: Annotated[bool, typer.Option("--tls-expired", help="Expired TLS certificate.", hidden=True)] = False,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="A fault to inject; repeatable (docs/emulator.md).")
    ] = None,
) -> None:
    """Run the HANA emulator in the foreground. The first line on stdout says how to connect."""
    if ctx.invoked_subcommand is not None:
        own = ctx.params.keys() - GLOBAL_OPTIONS.keys()
        if any(ctx.get_parameter_source(name).name != "DEFAULT" for name in own):  # type: ignore[union-attr]
            raise UsageFault(f"options of sql come after its name: owl-sap emulator {ctx.invoked_subcommand} ...")
        return
    command = [*emulator_command(), "--port", str(port), "--schema", schema]
    for name, value in (("--data", data), ("--tls-host", tls_host), *(("--fault", order) for order in fault or [])):
        command += [] if value is None else [name, str(value)]
    flags = {"--sample": sample, "--tls": tls, "--tls-expired": tls_expired}
    command += [name for name, given in flags.items() if given]
    # Not a child process: a SIGTERM must reach the emulator itself.
    sys.stdout.flush()
    os.execv(sys.executable, command)  # nosec B606 # this Python, no shell


@verb(emulator_app, "sql")
def sql(
    statements: Annotated[list[str] | None, typer.Argument(metavar="STATEMENT...", help="Default: from stdin.")] = None,
    data: Annotated[Path | None, typer.Option(help="The data folder of a running emulator.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Its port; default: of the section hana.")] = None,
    json: JsonFlag = False,
) -> int:
    """Run SQL in an emulator. Takes statements from the arguments or from stdin."""
    from connector.hana.prompt import run, split

    if not statements and sys.stdin.isatty():
        raise UsageFault("give statements, or pipe them: owl-sap emulator sql < statements.sql")
    options, code = _options(data, port), OK
    documents: list[dict[str, Any]] = []
    wanted = (statement for text in statements or [sys.stdin.read()] for statement in split(text))
    try:
        for columns, found, affected, more in run(options, wanted, _MOST_ROWS):
            rows = [list(map(_plain, row)) for row in found]
            documents.append({"columns": columns, "rows": rows, "affected": affected})
            if more:
                output.say(f"only the first {_MOST_ROWS} rows")
            if columns and not json:
                records = [dict(zip(_numbered(columns), row, strict=True)) for row in rows]
                shown = [{name: _brief(value) for name, value in record.items()} for record in records]
                output.data(records, f"rows: {len(rows)}", json=False, rows=shown, whole=False)
    except ConnectorError as error:
        output.fail(str(error))
        unavailable = error.retryable or isinstance(error, PermissionRefused | LoginRefused | ConnectFailed)
        code = UNAVAILABLE if unavailable else USAGE
    if json:
        output.write_json(documents)
    elif changed := [document["affected"] for document in documents if not document["columns"]]:
        output.say(f"{len(changed):,} statements done, {sum(changed):,} rows affected")
    return code


def _options(data: Path | None, port: int | None) -> ConnectionOptions:
    """Return the options from the data folder, else the given port, else [hana] if it is on this machine."""
    from connector.hana.connection import ConnectionOptions

    found: dict[str, Any] = {"host": "127.0.0.1", "port": port, **_LOGIN}
    if data is not None:
        file = data / "connection.json"  # the first line of a running emulator
        try:
            found |= json_.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageFault(
                f"no emulator is serving the folder {data}; start one: owl-sap emulator --data {data}"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageFault(f"{file} cannot be read ({type(error).__name__}); give --port") from None
    elif port is None:
        hana = read_settings().settings.hana
        if not hana.host:
            raise UsageFault("no emulator named: give --port, or --data with its folder (or set HANA_HOST, HANA_PORT)")
        found |= {"host": hana.host, "port": hana.port, "user": hana.user or _LOGIN["user"]}
        if hana.password is not None:
            found["password"] = hana.password.get_secret_value()
        if hana.encrypt and hana.trust_store:
            found |= {"trust_store": hana.trust_store, "certified": hana.host_name_in_certificate}
    if not is_loopback(found["host"]):  # statements meant for test data must not reach a real HANA
        raise UsageFault(f"SQL runs only in an emulator on this machine, and {found['host']} is not; give --port")
    trust_store = found.get("trust_store") or ""
    return ConnectionOptions(
        host=found["host"],
        port=found["port"],
        user=found["user"],
        password=found["password"],
        encrypt=bool(trust_store),
        trust_store=trust_store,
        # The driver never matches an IP address with a certificate.
        host_name_in_certificate=found.get("certified") or ("localhost" if trust_store else ""),
        application="owl-sap emulator sql",
    )


def _numbered(columns: Sequence[str]) -> list[str]:
    """Return the names, numbered where one is repeated."""
    before = Counter[str]()
    names = []
    for name in columns:
        before[name] += 1
        names.append(f"{name} ({before[name]})" if before[name] > 1 else name)
    return names


def _plain(value: Any) -> Any:
    """Return a value for JSON: bytes in hexadecimal."""
    return bytes(value).hex() if isinstance(value, bytes | bytearray | memoryview) else value


def _brief(value: Any) -> str:
    if isinstance(value, list):
        head = ", ".join(f"{number:g}" for number in value[:4])
        return f"[{head}{', …' if len(value) > 4 else ''}] ({len(value)})"
    return "NULL" if value is None else output.shorten(str(value), 200)
