"""`owl-sap quarantine`: the rows that could not be processed, and what to do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, loaded_for, opened, quarantine_app, verb
from app.src.cli.exits import FAILED, OK, UsageFault
from app.src.cli.interrupts import interruptible
from app.src.cli.progress import watched

if TYPE_CHECKING:
    from app.src.service.service import Service
    from connector.sync.quarantine import GivenKey

_COLUMNS = ("key", "stage", "reason", "attempts", "given_up", "last_seen")
_RETRY_COLUMNS = ("retried", "upserted", "empty", "gone", "quarantined", "seconds")
_HOW = """COLUMN=value, A=x,B=y, a JSON object, or a JSON array of all key values"""

Keys = Annotated[
    list[str] | None, typer.Argument(help=f"Which rows: {_HOW}; default: all in quarantine.", metavar="[KEY...]")
]


@verb(quarantine_app, "list")
def list_(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """List the rows in quarantine, each with its reason."""
    with opened(loaded_for(ctx)) as service:
        rows = [entry.as_dict() for entry in service.quarantine(name)]
    if json:
        output.write_json(rows)
        return
    shown = [row | {"reason": output.shorten(row["reason"]), "last_seen": _second(row["last_seen"])} for row in rows]
    output.table(f"{name}: in quarantine", shown, _COLUMNS, records=rows)
    if rows:
        output.say(f"correct the rows in the source, then run: owl-sap quarantine retry {name}")


@verb(quarantine_app, "show")
def show(ctx: typer.Context, name: Name, keys: Keys = None, json: JsonFlag = False) -> None:
    """Show entries in full. Never shows the row's text."""
    with opened(loaded_for(ctx)) as service:
        rows = [entry.as_dict() for entry in service.quarantine(name, _wanted(service, name, keys))]
    if json:
        output.write_json(rows)
    elif not rows:
        output.say(f"{name}: no rows in quarantine")
    for row in [] if json else rows:
        output.table(name, [{"": column, " ": output.shown(row[column])} for column in _COLUMNS], records=[row])


@verb(quarantine_app, "retry")
def retry(ctx: typer.Context, name: Name, keys: Keys = None, json: JsonFlag = False) -> int:
    """Process these rows again. Includes rows that syncs no longer try; their attempts start at one. Exit 1 when some
    fail again."""
    with opened(loaded_for(ctx)) as service, interruptible() as interrupted:
        wanted = _wanted(service, name, keys)
        with watched(name) as observer:
            report = service.retry(name, wanted, observer, interrupted)
    if json:
        output.write_json(report.as_dict())
    else:
        output.counts(f"{name}: retried", [report.as_dict()], _RETRY_COLUMNS)
    if report.quarantined:
        output.say(f"{report.quarantined} rows stay in quarantine; for the reasons run: owl-sap quarantine list {name}")
    if interrupted.code is not None and report.stopped:
        return interrupted.code
    return FAILED if report.quarantined else OK


@verb(quarantine_app, "drop")
def drop(
    ctx: typer.Context,
    name: Name,
    keys: Annotated[list[str] | None, typer.Argument(help=f"Which rows: {_HOW}.", metavar="[KEY...]")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every entry, as without KEY.")] = False,
    json: JsonFlag = False,
) -> None:
    """Delete entries from quarantine (without KEY: all). Reasons and attempts are lost; the next full sync tries the
    rows again."""
    if all_ and keys:
        raise UsageFault("name the rows to drop from quarantine, or give --all (not both)")
    with opened(loaded_for(ctx)) as service:
        dropped = service.drop(name, _wanted(service, name, keys))
    if json:
        output.write_json({"collection": name, "dropped": dropped})
    else:
        output.say(f"{name}: {dropped} entries dropped")


def _wanted(service: Service, name: str, keys: list[str] | None) -> list[Wanted] | None:
    if not keys:
        return None
    columns = service.key_columns(name)
    return [_key(text, columns) for text in keys]


def _key(text: str, columns: tuple[str, ...]) -> Wanted:
    from connector.sync.quarantine import parse_conditions

    if text.lstrip().startswith(("[", "{")):
        return _json_key(text)
    conditions = parse_conditions(text, columns)
    if conditions is not None:
        return conditions
    if len(columns) == 1:
        return [text]
    raise UsageFault(f"{text!r} is no key; give {_HOW}; the key columns are {', '.join(columns) or 'not known'}")


def _json_key(text: str) -> Wanted:
    try:
        parsed: Any = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageFault(f"{text!r} is not JSON: {error}") from None
    key: Wanted = parsed
    return key


def _second(moment: str | None) -> str | None:
    return None if moment is None else moment[:19].replace("T", " ") + "Z"
