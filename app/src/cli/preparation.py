"""The verbs that prepare a first sync: doctor, tables, introspect, plan, grants and changes; and config and explain."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, changes_app, config_app, opened, read_settings, verb
from app.src.cli.exits import FAILED, OK, UsageFault, refusals
from app.src.cli.output import watched
from app.src.service import explaining

_TABLE_COLUMNS = ("schema", "name", "kind", "columns", "rows", "comment")
_PLAN_COLUMNS = (
    "rows", "new", "changed", "unchanged", "deleted", "emptied", "empty", "unreadable", "duplicates", "chunked",
    "truncated", "tokens",
)  # fmt: skip
_METHODS = {
    "full": "full comparison", "hash": "row hashes computed by HANA", "log": "change log", "rowid": "row ids",
    "delta": "delta table",
}  # fmt: skip


@verb(app, "tables")
def tables(
    schema: Annotated[str | None, typer.Argument(help="Only this schema.", metavar="[SCHEMA]")] = None,
    search: Annotated[str, typer.Option(help="Part of a name or a comment.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 200,
    json: JsonFlag = False,
) -> None:
    """List the tables and views that this user can see. System schemas are listed only when named."""
    with opened() as service:
        found = service.catalog.tables(schema, search, limit=limit)
    output.data(found, "Tables", _TABLE_COLUMNS, json=json, whole=False)
    if len(found) == limit and not json:
        output.say("there may be more: raise --limit, or narrow it with --search")


@verb(app, "introspect")
def introspect(
    table: Annotated[str, typer.Argument(help='SCHEMA.TABLE; quote a part with a dot: S."a.b"', metavar="TABLE")],
    name: Annotated[str | None, typer.Option(help="Name of the collection; default: from the table's.")] = None,
    catalog_only: Annotated[bool, typer.Option("--catalog-only", help="Do not look at rows.")] = False,
    language: Annotated[list[str] | None, typer.Option(help="Of texts in a proposed view, best first: E, de.")] = None,
    json: JsonFlag = False,
) -> None:
    """Propose a collection for a table or view. Prints TOML for owl-sap.toml with a reason for each choice."""
    from connector.model import TableRef

    with refusals():
        ref = TableRef.parse(table)
    with opened() as service:
        proposed = service.catalog.introspect(ref, name, look_at_rows=not catalog_only, languages=language or ())
    if json:
        output.write_json(proposed)
        return
    typer.echo(proposed["toml"], nl=False)
    output.say(f"check it, append it to owl-sap.toml, then preview the sync: owl-sap plan {proposed['name']}")


@verb(app, "plan")
def plan(
    name: Name,
    samples: Annotated[int, typer.Option(min=0, max=1000, help="How many rendered texts to show.")] = 5,
    no_estimate: Annotated[bool, typer.Option("--no-estimate", help="Do not measure how fast texts embed.")] = False,
    json: JsonFlag = False,
) -> None:
    """Preview a sync without writing anything. Shows rows, tokens, time and texts as they would be embedded."""
    from connector.discovery.sap_tables import LANGUAGE_NAMES as NAMES

    with opened() as service, watched(name) as observer:
        planned = service.sync.plan(name, samples=samples, estimate=not no_estimate, observer=observer)
    found: dict[str, Any] = planned.as_dict()
    output.data(found, f"{name}: what a sync would do", _PLAN_COLUMNS, json=json)
    if json:
        return
    if output.for_people() and planned.samples:  # the JSON line for programs has all samples
        shown = [{"": number, "text": output.shorten(text, 300)} for number, text in enumerate(planned.samples, 1)]
        output.table("Texts as they would be embedded", shown, whole=False)
    why = f" ({found['reason']})" if found["reason"] else ""
    advice = [f"change detection: {_METHODS.get(found['method'], found['method'])}{why}"]
    if found["estimated_seconds"] is not None:
        speed = f", {found['tokens_per_second']:,.0f} tokens/s" if found["tokens_per_second"] else ""
        reading = f"without writing (reading took {_time(found['seconds'])}{speed})"
        advice.append(f"about {_time(found['estimated_seconds'])}, {reading}")
    if found["truncated"]:
        advice.append(f"{found['truncated']:,} texts exceed the model's limit and would be truncated")
    elif found["chunked"]:
        advice.append(f"{found['chunked']:,} long texts are split into chunks, so no text is truncated")
    if found["languages"]:
        counts = ", ".join(f"{rows} {NAMES[code]}" for code, rows in found["languages"].items())
        advice.append(f"languages of {found['sampled']} sampled rows: {counts}")
    if found["paused"] == "schema_changed":
        advice.append(
            "a sync would pause: a column in use changed its type since the last sync. If this is expected: "
            f"owl-sap sync {name} --accept-schema"
        )
    elif found["paused"]:
        advice.append(
            "a sync would pause before it deletes more than max_deletes allows: "
            f"{output.lost_rows(planned.deleted, planned.emptied)}. If this is expected: "
            f"owl-sap sync {name} --full --max-deletes 1"
        )
    else:
        advice.append("a sync would run without a pause")
    output.notes(name, (*advice, *planned.notes))


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


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
    from app.src.settings import show

    loaded = read_settings()
    columns = ("setting", "value", "origin") if origin else ("setting", "value")
    records = [{column: row[column] for column in columns} for row in show(loaded)]
    if json and not origin:
        output.write_json({row["setting"]: row["value"] for row in records})
        return
    rows = []
    for row in records:  # values as a settings file has them; of collections only the names
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
    from app.src.settings import Settings

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
    try:
        found = explaining.by_code(code)
    except LookupError as error:
        raise UsageFault(str(error)) from None
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
            # A line break in a name would end the SQL comment.
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
