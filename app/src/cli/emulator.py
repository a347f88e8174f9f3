"""`owl-sap emulator` starts the HANA emulator; `emulator sql` is an SQL prompt for a running one.
The emulator is started as a process and never imported."""

from __future__ import annotations

import ipaddress
import json as json_
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import (
    GLOBAL_OPTIONS,
    JsonFlag,
    guarded,
    loaded_for,
    subcommands,
    verb,
    with_global_options,
)
from app.src.cli.exits import OK, USAGE, UsageFault, exit_code
from connector.errors import ConnectorError
from connector.extras import emulator_command
from connector.hana.prompt import Answer, Prompt, StatementRefused, is_blank, split

if TYPE_CHECKING:
    from connector.hana.connection import ConnectionOptions


emulator_app = subcommands("emulator", "The HANA emulator, and an SQL prompt for it.", no_args_is_help=False)

_CONNECTION = "connection.json"  # what a running emulator leaves in its data folder: its first line
_STANDARD = {"host": "127.0.0.1", "user": "OWL", "password": "Owl-Stand-in-1"}
_CERTIFIED_NAME = "localhost"  # the driver never matches an IP address with a certificate
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
    tls_expired: Annotated[bool, typer.Option("--tls-expired", help="Expired TLS certificate.", hidden=True)] = False,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="A fault to inject; repeatable (docs/emulator.md).")
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


_PROMPT_HELP = r"""Statements end with ; and may go over several lines.
\d          tables and views of the current schema
\d TABLE    columns of a table or view (SCHEMA.TABLE; quote names with small letters)
\q          leave (or Ctrl-D)"""
_LONGEST_VALUE = 200
_VECTOR_HEAD = 4
_NAME = re.compile(r'"((?:[^"]|"")+)"|([^".\s]+)')


def run_statements(prompt: Prompt, texts: Iterable[str], screen: Screen) -> int:
    """Run statements until one fails; return its exit code. Those without a result are summarised in one line."""
    changed: list[int] = []
    try:
        for text in texts:
            statements, rest = split(text)
            for statement in (*statements, *([] if is_blank(rest) else [rest.strip()])):
                answer = prompt.run(statement, screen.most_rows)
                screen.show(answer, quiet=True)
                if not answer.columns:
                    changed.append(answer.affected)
    except (ConnectorError, StatementRefused) as error:
        screen.changed(changed)
        return report_refusal(error)
    screen.changed(changed)
    return OK


def report_refusal(error: ConnectorError | StatementRefused) -> int:
    """Print HANA's error. Returns 3 for connection and privilege errors, 2 for faulty statements."""
    output.fail(str(error))
    if not isinstance(error, StatementRefused):
        return exit_code(error)
    unavailable = error.kind.retryable or error.kind.__name__ in ("PermissionRefused", "LoginRefused")
    return 3 if unavailable else USAGE


class Screen:
    """Prints results: tables on a terminal, JSON lines elsewhere, or with `json` one document (written by `finish`)."""

    def __init__(self, json: bool, most_rows: int) -> None:
        self._json = json
        self._documents: list[dict[str, Any]] = []
        self.most_rows = most_rows

    def show(self, answer: Answer, *, quiet: bool = False) -> None:
        """`quiet`: say nothing of a statement without a result; `changed` does."""
        if answer.more:
            output.say(f"only the first {self.most_rows} rows; --max-rows shows more")
        if self._json:
            rows = [[_plain(value) for value in row] for row in answer.rows]
            self._documents.append({"columns": answer.columns, "rows": rows, "affected": answer.affected})
        elif not answer.columns:
            self.changed([] if quiet else [answer.affected])
        else:
            names = _distinct(answer.columns)
            shown = [{name: _shown_value(value) for name, value in zip(names, row, strict=True)} for row in answer.rows]
            plain = [{name: _plain(value) for name, value in zip(names, row, strict=True)} for row in answer.rows]
            title = "1 row" if len(shown) == 1 else f"{len(shown)} rows"
            output.table(title, shown, names, records=plain)

    def changed(self, affected: Sequence[int]) -> None:
        """One line for all statements without a result."""
        if affected and not self._json:
            rows = sum(affected)
            statements = f"{len(affected):,} statements " if len(affected) > 1 else ""
            output.say(f"{statements}done, {rows:,} {'row' if rows == 1 else 'rows'} affected")

    def finish(self) -> None:
        if self._json:
            output.write_json(self._documents)


def _distinct(names: Iterable[str]) -> list[str]:
    """Number repeated column names."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in found:
            number += 1
            candidate = f"{name} ({number})"
        found.append(candidate)
    return found


def _plain(value: Any) -> Any:
    """As JSON has it: bytes in hexadecimal; a vector is a list already."""
    return bytes(value).hex() if isinstance(value, bytes | bytearray | memoryview) else value


def _shown_value(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        head = ", ".join(f"{number:g}" for number in value[:_VECTOR_HEAD])
        return f"[{head}{', …' if len(value) > _VECTOR_HEAD else ''}] ({len(value)})"
    text = str(_plain(value))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


# ------------------------------------------------------------------------------------------------------- interactively


def interact(prompt: Prompt, screen: Screen, history: Path | None) -> int:
    """Run typed statements until \\q or the end of input. Errors are shown, and the prompt continues."""
    output.say(r"HANA emulator. Statements end with ; \? shows help, \q quits.")
    with _line_editing(history), _ctrl_c_is_ours():
        for text in _entries():
            try:
                if text.startswith("\\"):
                    _command(prompt, screen, text)
                else:
                    screen.show(prompt.run(text, screen.most_rows))
            except (ConnectorError, StatementRefused) as error:
                report_refusal(error)
    return OK


def _entries() -> Iterator[str]:
    """Yield typed statements and commands."""
    pending = ""
    while True:
        try:
            line = input("...> " if pending else "sql> ")
        except EOFError:
            output.say("")
            return
        except KeyboardInterrupt:  # discard the typed text
            output.say("")
            pending = ""
            continue
        if not pending and line.startswith("\\"):
            if line.split()[0] == r"\q":
                return
            yield line
            continue
        statements, rest = split(f"{pending}{line}\n")
        pending = "" if is_blank(rest) else rest
        yield from statements


def _command(prompt: Prompt, screen: Screen, line: str) -> None:
    word, _, rest = line.strip().partition(" ")
    names = [quoted.replace('""', '"') or plain.upper() for quoted, plain in _NAME.findall(rest)]
    if word == r"\d" and len(names) <= 2:
        if not names:
            screen.show(prompt.tables(screen.most_rows))
            return
        answer = prompt.columns(names[0] if len(names) == 2 else "", names[-1], screen.most_rows)
        if answer.rows:
            screen.show(answer)
        else:
            output.say(f"table or view not found: {rest.strip()}")
    else:
        output.say(_PROMPT_HELP)


@contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    """Let Ctrl-C discard the typed text instead of ending the verb."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _line_editing(history: Path | None) -> Iterator[None]:
    """Edit lines, with the history in a file if given."""
    try:
        import readline
    except ImportError:  # some systems have none: the prompt works without
        yield
        return
    if history is not None and sys.stdin.isatty():
        with suppress(OSError):
            readline.read_history_file(history)
    try:
        yield
    finally:
        if history is not None:
            with suppress(OSError):
                readline.write_history_file(history)
