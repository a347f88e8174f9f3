"""The verbs that explain a system: doctor, explain and config."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, app, config_app, opened, read_settings, verb
from app.src.cli.exits import FAILED, OK
from app.src.service import explaining
from app.src.settings import Settings, show


@verb(app, "doctor")
def doctor(json: JsonFlag = False) -> int:
    """Check Python, GPU, model, network, login, rights and store. Each failed line has its fix; exit 1 when one
    fails."""
    from app.src.observe.checks import NOT_CHECKED

    with opened() as service:
        records = service.readiness.doctor()
    rows = []
    for record in records:
        state = "ok" if record["ok"] else "skipped" if record["detail"].startswith(NOT_CHECKED) else "FAILED"
        rows.append(record | {"ok": state})
    output.data(records, "Doctor", ("ok", "check", "detail", "fix"), json=json, rows=rows, whole=False)
    return OK if all(record["ok"] for record in records) else FAILED


@verb(config_app, "show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show the settings in force. Secrets are masked."""
    loaded = read_settings()
    columns = ("setting", "value", "origin") if origin else ("setting", "value")
    records = [{column: row[column] for column in columns} for row in show(loaded)]
    if json and not origin:
        output.write_json({row["setting"]: row["value"] for row in records})
        return
    rows = []
    for row in records:  # as one would write it; of collections only the names
        value = row["value"]
        if isinstance(value, list):
            value = ", ".join(item["name"] for item in value) or None
        rows.append(row | {"value": str(value).lower() if isinstance(value, bool) else value and str(value)})
    output.data(records, "Settings", columns, json=json, rows=rows, whole=False)
    for name, note in loaded.inert.items() if origin else ():
        output.say(f"{name}: {note}")


@verb(config_app, "schema")
def config_schema() -> None:
    """Print the JSON schema of owl-sap.toml."""
    output.write_json(Settings.model_json_schema(by_alias=True))


@verb(app, "explain")
def explain(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="OWL-1011 or 1011; default: all.")] = None,
    json: JsonFlag = False,
) -> None:
    """Explain an error code such as OWL-2005. Shows its usual causes and what to do; without a code it lists all."""
    if code is None:
        entries = sorted(explaining.explained().values(), key=lambda each: each.code)
        rows = [{"code": each.code, "error": each.title} for each in entries]
        output.data([asdict(each) for each in entries], "Errors", json=json, rows=rows, columns=("code", "error"))
        return
    found = explaining.by_code(code)
    if json or not output.for_people():
        output.write_json(asdict(found))
        return
    parts = [f"{found.code}: {found.title}", found.what]
    for heading, lines in (("Usual causes", found.causes), ("What to do", found.do)):
        if lines:
            parts.append("\n".join((f"{heading}:", *(f"  - {line}" for line in lines))))
    if found.see:
        parts.append("More: " + ", ".join(f"docs/{place}" for place in found.see))
    output.console().print(output.literal("\n\n".join(parts)))
