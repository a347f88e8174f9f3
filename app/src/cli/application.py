"""The command with its global options and panels. Registers verbs, reports their errors and opens their service."""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup

from app.src.cli import output
from app.src.cli.exits import INTERRUPTED, OK, UsageFault, exit_code, message
from app.src.cli.interrupts import not_held_up, orderly
from app.src.cli.output import Invocation, Layout

if TYPE_CHECKING:
    from app.src.service.service import Service
    from app.src.settings import Loaded

# The panels of `owl-sap --help` with their verbs, in the order shown.
PANELS = {
    "Start": ("init", "doctor", "sync", "search", "status", "tables", "introspect", "plan", "explain", "demo"),
    "Search": ("evaluate", "embed", "mcp"),
    "Operate": (
        *("serve", "worker", "verify", "quarantine", "jobs", "generations"),
        *("config", "keys", "grants", "changes", "scale"),
    ),
    "Advanced": ("finetune", "calibrate", "benchmark", "emulator", "start", "health"),
}
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class _InPanels(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in _PANEL_OF if name in self.commands]


app = typer.Typer(
    name="owl-sap",
    cls=_InPanels,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Semantic search over SAP HANA tables: sync rows into a vector store, search them by meaning.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def subcommands(name: str, help_: str, *, no_args_is_help: bool = True) -> typer.Typer:
    """Return a new group of verbs below `owl-sap NAME`. Raises KeyError for a name missing from PANELS."""
    group = typer.Typer(no_args_is_help=no_args_is_help, help=help_)
    app.add_typer(group, name=name, rich_help_panel=_PANEL_OF[name])
    return group


jobs_app = subcommands("jobs", "Background jobs of the service: list, show and cancel them.", no_args_is_help=False)
keys_app = subcommands("keys", "API keys of the REST service: create, list, rotate and revoke them.")
quarantine_app = subcommands("quarantine", "Rows that could not be processed: show, retry or drop them.")
changes_app = subcommands("changes", "The change log that the change method `log` needs at the source.")
scale_app = subcommands("scale", "The Ray cluster on which `owl-sap sync --scale ray` embeds.")
config_app = subcommands("config", "Show the settings and where they come from.")

P = ParamSpec("P")
Verb = Callable[P, int | None]
_CONFIG_HELP = "Settings file; default: owl-sap.toml in the current folder."
_OUTPUT_HELP = (
    "How data is printed without --json: auto prints tables on a terminal and JSON lines elsewhere; "
    "table forces tables (| less), lines forces JSON lines."
)
_DEBUG_HELP = "Show the traceback of an error."
_PANEL = "Global options"
# Every verb takes the global options too: `owl-sap doctor --output table`.
GLOBAL_OPTIONS = {
    "given_config": Annotated[Path | None, typer.Option("--config", help=_CONFIG_HELP, rich_help_panel=_PANEL)],
    "given_layout": Annotated[Layout | None, typer.Option("--output", help=_OUTPUT_HELP, rich_help_panel=_PANEL)],
    "given_debug": Annotated[bool, typer.Option("--debug", help=_DEBUG_HELP, rich_help_panel=_PANEL)],
}
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Name = Annotated[str, typer.Argument(help="Collection.", metavar="NAME")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from app.src.service.status import version

        typer.echo(version())
        raise typer.Exit


@app.callback()
def _global(
    config: Annotated[Path | None, typer.Option(help=_CONFIG_HELP)] = None,
    layout: Annotated[Layout, typer.Option("--output", help=_OUTPUT_HELP)] = "auto",
    debug: Annotated[bool, typer.Option("--debug", help=_DEBUG_HELP)] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    Invocation.config, Invocation.layout, Invocation.debug = config, layout, debug


def verb(group: typer.Typer, name: str, **options: Any) -> Callable[[Verb[P]], Verb[P]]:
    """Register a verb, wrapped by `guarded`. Raises KeyError for a top-level verb without a panel."""
    panel = _PANEL_OF[name] if group is app else None

    def register(function: Verb[P]) -> Verb[P]:
        text = inspect.getdoc(function) or ""
        first_sentence = re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
        group.command(name, help=text, short_help=first_sentence, rich_help_panel=panel, **options)(guarded(function))
        return function

    return register


def guarded(function: Callable[..., int | None]) -> Callable[..., None]:
    """Add the global options to a verb (options after the verb win over those before it), turn errors into a message on
    stderr and an exit code of `exits`, and let SIGTERM stop what the verb started."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        config, layout, debug = (kwargs.pop(name, None) for name in GLOBAL_OPTIONS)
        Invocation.layout = layout or Invocation.layout
        Invocation.config = config or Invocation.config
        Invocation.debug = debug or Invocation.debug
        try:
            with not_held_up(), orderly():
                code = function(*args, **kwargs) or OK
        except (typer.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, typer.Abort):  # Abort: during a prompt
            code = INTERRUPTED
        except Exception as error:
            from connector.extras import missing_module

            if isinstance(error, ModuleNotFoundError) and (advice := missing_module(error)):
                error = UsageFault(advice)
            code = report_error(error)
        if code != OK:
            raise typer.Exit(code)

    signature = inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in GLOBAL_OPTIONS.items()
    ]
    whole = signature.replace(parameters=[*signature.parameters.values(), *added])
    run.__signature__ = whole  # type: ignore[attr-defined]
    # Evaluated once: typer would evaluate texts several times.
    run.__annotations__ = {name: each.annotation for name, each in whole.parameters.items()}
    return run


def report_error(error: Exception, subject: str = "") -> int:
    """Print the error and return its exit code."""
    from app.src.service.explaining import code_of

    if Invocation.debug:
        traceback.print_exception(error)
    *before, last = message(error).splitlines() or [type(error).__name__]
    for line in (*before, f"{last} [{code_of(error)}]"):
        output.fail(subject + line)
    return exit_code(error)


def read_settings(flags: Mapping[tuple[str, ...], Any] | None = None) -> Loaded:
    """Read the settings. `flags`: the verb's options by path of the setting; None means not given."""
    from app.src.settings import load

    given = {path: value for path, value in (flags or {}).items() if value is not None}
    return load(Invocation.config, given)


@contextmanager
def opened(loaded: Loaded | None = None, *, measured: bool = False, scaled: bool = False) -> Iterator[Service]:
    """Yield a service with these settings, by default those read without flags. `measured`: its metrics are served;
    `scaled`: see Service."""
    from app.src.observe.metrics import NoMetrics
    from app.src.service.service import Service
    from connector import failpoints

    loaded = loaded or read_settings()
    if loaded.failpoint:
        output.say(f"failpoint {loaded.failpoint} is armed: this process will fail there (for tests only)")
        failpoints.arm(failpoints.hook(loaded.failpoint))
    service = Service(loaded.settings, None if measured else NoMetrics(), file=loaded.file, scaled=scaled)
    try:
        yield service
    finally:
        service.close()


def file_text(file: Path, what: str = "") -> str:
    """Return a file's text. Raises UsageFault, which names `what` if given, not the path, which may be secret."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and not what else type(error).__name__
        raise UsageFault(f"{what or file} cannot be read: {reason}") from None
