"""The verbs that print SQL for an administrator: grants and changes."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import Annotated

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, changes_app, opened, read_settings, verb
from app.src.cli.exits import UsageFault

_HEAD = (
    "The least rights that the technical user needs, made by owl-sap grants. Run all lines as the owner of the tables "
    "or an administrator. Create the user separately, because its password belongs in no file: CREATE USER ... "
    "PASSWORD ... NO FORCE_FIRST_PASSWORD_CHANGE; then ALTER USER ... DISABLE PASSWORD LIFETIME. Run a grant on a "
    "change log once the log exists."
)


@verb(app, "grants")
def grants(
    user: Annotated[str | None, typer.Option(help="The user to grant to; default: the user of the settings.")] = None,
    search_only: Annotated[bool, typer.Option("--search-only", help="For a process that never syncs.")] = False,
    setup: Annotated[bool, typer.Option("--setup", help="Rights to install change logs; revoke them after.")] = False,
    json: JsonFlag = False,
) -> None:
    """Print the least HANA rights these settings need, as SQL. An administrator runs it once (grants.sql)."""
    from app.src.observe.grants import statements

    found = statements(read_settings().settings, user=user, search_only=search_only, setup=setup)
    if json:
        output.write_json(found)
        return
    lines = _commented(_HEAD)
    for system, granted in groupby(found, lambda statement: statement["system"]):
        lines.append(f"\n-- in the HANA of [{system}]")
        for statement in granted:
            # A name with a line break would end the comment.
            lines += [f"-- {' '.join(statement['why'].split())}", f"{statement['sql']};"]
    typer.echo("\n".join(lines))


def _commented(text: str) -> list[str]:
    return [f"-- {line}" for line in textwrap.wrap(text, 110, break_on_hyphens=False)]


@verb(changes_app, "install")
def changes_install(
    name: Name,
    apply: Annotated[bool, typer.Option("--apply", help="Run the statements instead of printing them.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Remove log and triggers (with --apply).")] = False,
    json: JsonFlag = False,
) -> None:
    """Print, or with --apply run, the SQL of the change log. It makes the log table and the triggers that
    changes = { method = "log" } needs; the printed SQL and --json say which of them exist."""
    with opened() as service:
        setup = service.catalog.change_log(name, "look" if not apply else "remove" if drop else "install")
    if json:
        output.write_json(setup)
    elif apply:
        done = ", ".join(piece["name"] for piece in setup["pieces"] if piece["done"])
        output.say(f"{name}: {'dropped' if drop else 'created'} {done}" if done else f"{name}: nothing to do")
        if not drop:
            output.say(f"note: {setup['warning']}")
            output.say(f"the next run compares all rows, later runs use the log: owl-sap sync {name}")
    else:  # each statement ends with a semicolon on its own line, as hdbsql requires
        lines = [] if drop else _commented(setup["warning"])
        for piece in reversed(setup["pieces"]) if drop else setup["pieces"]:
            if piece["present"] != drop:
                lines.append(f"-- {piece['name']} {'does not exist' if drop else 'exists already'}")
            lines += [piece["drop"] if drop else piece["create"], ";"]
        if not drop:
            lines += [
                *("-- the user who syncs needs:", *(f"-- {grant};" for grant in setup["grants"])),
                "-- if a trigger exists and the user cannot see it: CATALOG READ, which shows every name in HANA.",
                "-- the owner of the triggers needs INSERT on the log, and TRIGGER on the table if another user owns "
                "it.",
            ]
        typer.echo("\n".join(lines))
        flags = "--apply --drop" if drop else "--apply"
        output.say(f"run it as the owner of the table, or here: owl-sap changes install {name} {flags}")
    if apply and setup["complete"] == drop:
        raise UsageFault(f"{name}: not everything was {'removed' if drop else 'created'}; see owl-sap doctor")
