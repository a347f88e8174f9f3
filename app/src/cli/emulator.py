"""`owl-sap emulator` starts the HANA emulator as a process; `emulator sql` runs SQL in a running one."""

from __future__ import annotations

import json as json_
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import GLOBAL_OPTIONS, JsonFlag, guarded, read_settings, subcommands, verb
from app.src.cli.exits import OK, UNAVAILABLE, USAGE, UsageFault, exit_code
from app.src.settings import is_loopback
from connector.errors import ConnectorError
from connector.extras import emulator_command

if TYPE_CHECKING:
    from connector.hana.connection import ConnectionOptions
    from connector.hana.prompt import Answer


emulator_app = subcommands("emulator", "The HANA emulator, and SQL for it.", no_args_is_help=False)

_CONNECTION = "connection.json"  # the first line of a running emulator, kept in its data folder
_STANDARD = {"host": "127.0.0.1", "user": "OWL", "password": "Owl-Stand-in-1"}
_CERTIFIED_NAME = "localhost"  # the driver never matches an IP address with a certificate


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
    command += ["--data", str(data)] if data is not None else []
    command += ["--sample"] if sample else []
    command += ["--tls"] if tls else []
    command += ["--tls-host", tls_host] if tls_host is not None else []
    command += ["--tls-expired"] if tls_expired else []
    for order in fault or []:
        command += ["--fault", order]
    # Not a child process: a SIGTERM must reach the emulator itself.
    sys.stdout.flush()
    os.execv(sys.executable, command)  # nosec B606 # this Python, no shell


@verb(emulator_app, "sql")
def sql(  # noqa: PLR0913 - as above
    statements: Annotated[list[str] | None, typer.Argument(metavar="STATEMENT...", help="Default: from stdin.")] = None,
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
    """Run SQL in an emulator. Takes statements from the arguments or from stdin."""
    from connector.hana.prompt import Prompt, StatementRefused, is_blank, split

    flags = {"port": port, "host": host, "user": user, "password": password}
    flags["trust_store"] = None if tls_trust is None else str(tls_trust)
    if not statements and sys.stdin.isatty():
        raise UsageFault("give statements, or pipe them: owl-sap emulator sql < statements.sql")
    prompt = Prompt(_options(data, {name: value for name, value in flags.items() if value is not None}))
    answers: list[Answer] = []
    code = OK
    try:
        for text in statements or [sys.stdin.read()]:
            found, rest = split(text)
            for statement in (*found, *([] if is_blank(rest) else [rest.strip()])):
                answers.append(prompt.run(statement, max_rows))
                _show(answers[-1], max_rows, json)
    except (ConnectorError, StatementRefused) as error:
        output.fail(str(error))
        if isinstance(error, StatementRefused):
            unavailable = error.kind.retryable or error.kind.__name__ in ("PermissionRefused", "LoginRefused")
            code = UNAVAILABLE if unavailable else USAGE
        else:
            code = exit_code(error)
    finally:
        prompt.close()
    if json:
        output.write_json(
            [
                {"columns": each.columns, "rows": list(map(_plain, each.rows)), "affected": each.affected}
                for each in answers
            ]
        )
    elif changed := [answer.affected for answer in answers if not answer.columns]:
        output.say(f"{len(changed):,} statements done, {sum(changed):,} rows affected")
    return code


def _options(data: Path | None, flags: Mapping[str, Any]) -> ConnectionOptions:
    """Return the options from the data folder, or the defaults with --port, or [hana] if it is on this machine; flags
    win."""
    from connector.hana.connection import ConnectionOptions

    if data is not None:
        try:
            found: Mapping[str, Any] = json_.loads((data / _CONNECTION).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageFault(
                f"no emulator is serving the folder {data}; start one: owl-sap emulator --data {data}"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageFault(f"{data / _CONNECTION} cannot be read ({type(error).__name__}); give --port") from None
    elif "port" in flags:
        found = _STANDARD
    else:
        hana = read_settings().settings.hana
        if not hana.host:
            raise UsageFault("no emulator named: give --port, or --data with its folder (or set HANA_HOST, HANA_PORT)")
        found = {
            "host": hana.host,
            "port": hana.port,
            "user": hana.user or _STANDARD["user"],
            "password": _STANDARD["password"] if hana.password is None else hana.password.get_secret_value(),
            "trust_store": hana.trust_store if hana.encrypt else None,
            "host_name_in_certificate": hana.host_name_in_certificate,
        }
    wanted = {**found, **flags}
    if not is_loopback(wanted["host"]):  # statements meant for test data must not reach a real HANA
        raise UsageFault(
            f"SQL runs only in an emulator on this machine, and {wanted['host']} is not; give --port (and --host "
            "127.0.0.1)"
        )
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


def _show(answer: Answer, most_rows: int, json: bool) -> None:
    if answer.more:
        output.say(f"only the first {most_rows} rows; --max-rows shows more")
    if json or not answer.columns:
        return
    names: list[str] = []
    for name in answer.columns:  # repeated names get a number
        count = sum(each == name or each.startswith(f"{name} (") for each in names)
        names.append(f"{name} ({count + 1})" if count else name)
    records = [dict(zip(names, _plain(row), strict=True)) for row in answer.rows]
    rows = [{name: _shortened(value) for name, value in record.items()} for record in records]
    output.data(records, "1 row" if len(rows) == 1 else f"{len(rows)} rows", names, json=False, rows=rows, whole=False)


def _plain(row: tuple[Any, ...]) -> list[Any]:
    """Return values for JSON: bytes in hexadecimal."""
    return [bytes(value).hex() if isinstance(value, bytes | bytearray | memoryview) else value for value in row]


def _shortened(value: Any) -> str:
    if isinstance(value, list):
        head = ", ".join(f"{number:g}" for number in value[:4])
        return f"[{head}{', …' if len(value) > 4 else ''}] ({len(value)})"
    text = "NULL" if value is None else str(value)
    return text if len(text) <= 200 else text[:199] + "…"
