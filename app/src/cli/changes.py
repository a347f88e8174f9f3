"""The verbs `changes ...`: the log and the triggers that the change method `log` needs at the source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, changes_app, loaded_for, opened, verb
from app.src.cli.exits import FAILED, OK, UsageFault

if TYPE_CHECKING:
    from connector.hana.change_setup import Setup

_COLUMNS = ("name", "present")


@verb(changes_app, "install")
def install(
    ctx: typer.Context,
    name: Name,
    apply: Annotated[bool, typer.Option("--apply", help="Run the statements instead of printing them.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Take log and triggers out again (with --apply).")] = False,
    json: JsonFlag = False,
) -> int:
    """Print, or with --apply run, the SQL of the change log. It makes the log table and the triggers that
    changes = { method = "log" } needs."""
    with opened(loaded_for(ctx)) as service:
        if apply:
            setup = service.changes.remove(name) if drop else service.changes.install(name)
        else:
            setup = service.changes.look(name)
    if json:
        output.write_json(setup.as_dict())
    elif apply:
        _report(setup, drop=drop)
    else:
        typer.echo(_script(setup, drop=drop), nl=False)
        output.say(f"run it as the owner of the table, or here: owl-sap changes install {name} --apply{_flag(drop)}")
    if apply and setup.complete == drop:
        raise UsageFault(f"{name}: not everything is {'gone' if drop else 'there'}; see owl-sap changes status {name}")
    return OK


@verb(changes_app, "status")
def status(ctx: typer.Context, name: Name, json: JsonFlag = False) -> int:
    """Check that the change log and its triggers exist. Exit 1 when one is missing."""
    with opened(loaded_for(ctx)) as service:
        setup = service.changes.look(name)
    if json:
        output.write_json(setup.as_dict())
    else:
        output.table(f"{name}: the change log {setup.log}", [_row(piece.name, piece.present) for piece in setup.pieces])
        if not setup.complete:
            output.say(f"put in what is missing: owl-sap changes install {name} --apply")
    return OK if setup.complete else FAILED


def _row(name: str, present: bool) -> dict[str, object]:
    return dict(zip(_COLUMNS, (name, present), strict=True))


def _flag(drop: bool) -> str:
    return " --drop" if drop else ""


def _report(setup: Setup, *, drop: bool) -> None:
    done = [piece.name for piece in setup.pieces if piece.done]
    what = "dropped" if drop else "created"
    output.say(f"{setup.collection}: {what} {', '.join(done)}" if done else f"{setup.collection}: nothing to do")
    if not drop:
        output.say(f"note: {setup.warning}")
        output.say(f"the next run compares everything, then the log takes over: owl-sap sync {setup.collection}")


def _script(setup: Setup, *, drop: bool) -> str:
    """SQL to read and run; each statement ends in a line of its own with a semicolon, as hdbsql wants it."""
    pieces = reversed(setup.pieces) if drop else setup.pieces
    lines = [] if drop else [f"-- {line}" for line in _wrapped(setup.warning)]
    for piece in pieces:
        if piece.present != drop:
            lines.append(f"-- {piece.name} is {'not there' if drop else 'there already'}")
        lines += [piece.drop if drop else piece.create, ";"]
    if not drop:
        lines += ["-- the user who syncs needs:", *(f"-- {grant};" for grant in setup.grants)]
        lines.append("-- if a trigger is there and he cannot see it: CATALOG READ, which shows him every name in HANA.")
        lines.append("-- the owner of the triggers needs INSERT on the log, and TRIGGER on the table if it is not his.")
    return "\n".join([*lines, ""])


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 110, break_on_hyphens=False)
