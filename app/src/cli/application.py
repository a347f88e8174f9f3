"""What every verb stands on: the command itself with its global options, how a verb is registered and fails, and the
service it talks to.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from app.src.cli import output
from app.src.cli.exits import INTERRUPTED, OK, exit_code, message
from app.src.cli.interrupts import not_held_up, orderly
from app.src.settings import Loaded, load
from connector import failpoints

if TYPE_CHECKING:
    from app.src.service import Service

app = typer.Typer(
    name="owl-sap",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Semantic search over SAP HANA tables: sync rows into a vector store, search them by meaning.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
jobs_app = typer.Typer(help="Background jobs of the service: list, follow and cancel them.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys of the REST service: make, list, rotate, revoke them.")
quarantine_app = typer.Typer(no_args_is_help=True, help="Rows that could not be processed: show, retry, forget them.")
changes_app = typer.Typer(no_args_is_help=True, help="What the change method `log` needs at the source.")
config_app = typer.Typer(no_args_is_help=True, help="Show the settings and where they come from.")
app.add_typer(changes_app, name="changes")
app.add_typer(config_app, name="config")
app.add_typer(jobs_app, name="jobs")
app.add_typer(keys_app, name="keys")
app.add_typer(quarantine_app, name="quarantine")

P = ParamSpec("P")
Verb = Callable[P, int | None]


@dataclass(slots=True)
class Invocation:
    """The global options."""

    config: Path | None = None
    debug: bool = False

    def load(self, flags: Mapping[tuple[str, ...], Any] | None = None) -> Loaded:
        given = {path: value for path, value in (flags or {}).items() if value is not None}
        return load(self.config, given)


JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Name = Annotated[str, typer.Argument(help="Collection.", metavar="NAME")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from app.src.service import version

        typer.echo(version())
        raise typer.Exit


@app.callback()
def _global(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Settings file; default: owl-sap.toml if it is here.")] = None,
    layout: Annotated[
        output.Layout,
        typer.Option(
            "--output",
            help="How data is printed without --json: auto is tables on a terminal and JSON lines elsewhere; "
            "table forces tables (| less), lines forces JSON lines.",
        ),
    ] = output.Layout.AUTO,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    output.choose(layout)
    ctx.obj = Invocation(config, debug)


def verb(group: typer.Typer, name: str) -> Callable[[Verb[P]], Verb[P]]:
    """Register a command, guarded."""

    def register(function: Verb[P]) -> Verb[P]:
        group.command(name, help=inspect.getdoc(function))(guarded(function))
        return function

    return register


def guarded(function: Verb[P]) -> Callable[P, None]:
    """Errors become one message on stderr and the exit code of the table in `exits`; SIGTERM ends it in good order."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with not_held_up(), orderly():
                code = function(*args, **kwargs) or OK
        except (typer.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, typer.Abort):  # Abort: at a question
            code = INTERRUPTED
        except Exception as error:
            code = report_error(error, _debugging(args, kwargs))
        if code != OK:
            raise typer.Exit(code)

    return run


def _debugging(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    invocations = [getattr(value, "obj", None) for value in (*args, *kwargs.values())]
    return any(isinstance(invocation, Invocation) and invocation.debug for invocation in invocations)


def report_error(error: Exception, debug: bool = False, subject: str = "") -> int:
    if debug:
        traceback.print_exc()
    from app.src.explaining import code_of

    *before, last = message(error).splitlines() or [type(error).__name__]
    for line in (*before, f"{last} [{code_of(error)}]"):
        output.fail(subject + line)
    return exit_code(error)


@contextmanager
def opened(loaded: Loaded) -> Iterator[Service]:
    from app.src.service import Service

    if loaded.failpoint is not None:
        output.say(f"failpoint {loaded.failpoint} is armed: this process will fail there (for tests only)")
        failpoints.arm(loaded.failpoint.hook())
    service = Service(loaded.settings, file=loaded.file)
    try:
        yield service
    finally:
        service.close()


def loaded_for(ctx: typer.Context, flags: Mapping[tuple[str, ...], Any] | None = None) -> Loaded:
    invocation: Invocation = ctx.obj
    return invocation.load(flags)
