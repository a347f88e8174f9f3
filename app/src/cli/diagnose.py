"""The verbs that explain a system: doctor, explain and config."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import Invocation, JsonFlag, app, config_app, loaded_for, opened, verb
from app.src.cli.exits import FAILED, OK
from app.src.service import explaining
from app.src.settings import Settings, show

if TYPE_CHECKING:
    pass


@verb(app, "doctor")
def doctor(ctx: typer.Context, json: JsonFlag = False) -> int:
    """Check Python, GPU, model, network, login, rights and store. Each failed line has its fix; exit 1 when one
    fails."""
    with opened(loaded_for(ctx)) as service:
        checks = service.doctor()
    records = [check.as_dict() for check in checks]
    if json:
        output.write_json(records)
    else:
        rows = [
            check.as_dict() | {"ok": "ok" if check.ok else "skipped" if check.skipped else "FAILED"} for check in checks
        ]
        output.table("Doctor", rows, ("ok", "check", "detail", "fix"), records=records)
    return OK if all(check.ok for check in checks) else FAILED


@verb(config_app, "show")
def config_show(
    ctx: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show the settings in force. Secrets are masked."""
    invocation: Invocation = ctx.obj
    loaded = invocation.load()
    columns = ("setting", "value", "origin") if origin else ("setting", "value")
    records = [{column: row[column] for column in columns} for row in show(loaded)]
    if json:
        output.write_json(records if origin else {row["setting"]: row["value"] for row in records})
    else:
        rows = [row | {"value": _setting(row["value"])} for row in records]
        output.table("Settings", rows, columns, records=records)
    if origin:
        for name, note in loaded.inert.items():
            output.say(f"{name}: {note}")


def _setting(value: Any) -> str | None:
    """As one would write it; of collections only the names."""
    if isinstance(value, list):
        return ", ".join(item["name"] for item in value) or None
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


@verb(config_app, "schema")
def config_schema() -> None:
    """Print the JSON schema of owl-sap.toml."""
    output.write_json(Settings.model_json_schema(by_alias=True))


@verb(app, "explain")
def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="As an error shows it: OWL-1011, or 1011; default: all.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Explain an error code such as OWL-2005. Shows its usual causes and what to do; without a code it lists all."""
    if code is None:
        entries = sorted(explaining.explained().values(), key=lambda each: each.code)
        records = [asdict(each) for each in entries]
        if json:
            output.write_json(records)
        else:
            rows = [{"code": each.code, "error": each.title} for each in entries]
            output.table("Errors", rows, records=records)
        return
    found = explaining.by_code(code)
    if json:
        output.write_json(asdict(found))
    elif output.for_people():
        output.page(_page(found))
    else:
        output.write_lines([asdict(found)])


def _page(each: explaining.Explained) -> str:
    parts = [f"{each.code}: {each.title}", each.what]
    for heading, lines in (("Usual causes", each.causes), ("What to do", each.do)):
        if lines:
            parts.append("\n".join((f"{heading}:", *(f"  - {line}" for line in lines))))
    if each.see:
        parts.append("More: " + ", ".join(f"docs/{place}" for place in each.see))
    return "\n\n".join(parts)
