"""The verbs before a first sync: tables, introspect, plan."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, opened, verb
from app.src.cli.exits import refusals
from app.src.cli.output import watched
from connector.model import TableRef

_TABLE_COLUMNS = ("schema", "name", "kind", "columns", "rows", "comment")
_PLAN_COLUMNS = (
    "rows", "new", "changed", "unchanged", "deleted", "empty", "unreadable", "duplicates", "chunked", "truncated",
    "tokens",
)  # fmt: skip
_METHODS = {"full": "full comparison", "hash": "row hashes computed by HANA", "log": "change log", "rowid": "row ids"}


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
    with opened() as service, watched(name) as observer:
        planned = service.sync.plan(name, samples=samples, estimate=not no_estimate, observer=observer)
    found: dict[str, Any] = planned.as_dict()
    output.data(found, f"{name}: what a sync would do", _PLAN_COLUMNS, json=json)
    if json:
        return
    if output.for_people() and planned.samples:  # the line for programs has them all
        shown = [{"": number, "text": output.shorten(text, 300)} for number, text in enumerate(planned.samples, 1)]
        output.table("Texts as they would be embedded", shown, whole=False)
    why = f" ({found['reason']})" if found["reason"] else ""
    advice = [f"change detection: {_METHODS.get(found['method'], found['method'])}{why}"]
    if found["estimated_seconds"] is not None:
        speed = f", {found['tokens_per_second']:,.0f} tokens/s" if found["tokens_per_second"] else ""
        reading = f"without writing (reading took {_time(found['seconds'])}{speed})"
        advice.append(f"about {_time(found['estimated_seconds'])}, {reading}")
    if found["duplicates"]:
        advice.append(f"{found['duplicates']:,} rows have the same text as another row; each text is embedded once")
    if found["truncated"]:
        advice.append(f"{found['truncated']:,} texts exceed the model's limit and would be truncated")
    elif found["chunked"]:
        advice.append(f"{found['chunked']:,} long texts are split into chunks, so no text is truncated")
    if found["paused"] == "schema_changed":
        advice.append(
            "a sync would pause: a column in use changed its type since the last sync. If this is expected: "
            f"owl-sap sync {name} --accept-schema"
        )
    elif found["paused"]:
        advice.append(
            f"a sync would pause and delete nothing: {found['deleted']} stored rows are no longer in the source or "
            f"became blank, more than max_deletes allows. If this is expected: owl-sap sync {name} --full "
            "--max-deletes 1"
        )
    else:
        advice.append("a sync would run without a pause")
    if found["unreadable"]:
        advice.append(f"{found['unreadable']} rows cannot be rendered and would go to quarantine")
    output.notes(name, (*advice, *planned.notes))


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
