"""The verbs. Each reads settings, calls one method of the service and prints the result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import Invocation, JsonFlag, Name, app, config_app, loaded_for, opened, report_error, verb
from app.src.cli.exits import FAILED, OK, UsageFault, exit_code, message
from app.src.cli.interrupts import Interrupted, interruptible, leave_behind_what_hangs, orderly
from app.src.cli.progress import watched
from app.src.settings import Settings, no_collections, show

if TYPE_CHECKING:
    from app.src.service.service import Service
    from connector.sync.run import SyncReport
    from connector.sync.verify import VerifyReport

_STATUS_COLUMNS = ("collection", "rows", "chunks", "empty", "quarantined", "last_sync", "lag_seconds", "model", "table")
_MOMENTS = ("last_sync", "next_sync", "stale_since")
_SYNC_COLUMNS = ("collection", "read", "upserted", "unchanged", "empty", "quarantined", "deleted", "seconds", "outcome")
_VERIFY_COLUMNS = ("rows", "missing", "stale", "orphaned", "duplicates", "bad_vectors", "foreign", "quarantined", "ok")


# --------------------------------------------------------------------------------------------------------- collections


@verb(app, "sync")
def sync(  # noqa: PLR0913 - a verb has as many parameters as options
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Collections.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every configured collection.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Compare every row, whatever the change method.")] = False,
    max_deletes: Annotated[
        float | None, typer.Option(min=0, max=1, help="Largest share of the stored rows that may be deleted.")
    ] = None,
    accept_schema: Annotated[
        bool, typer.Option("--accept-schema", help="Continue although a column in use changed its type.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when rows were quarantined.")] = False,
    json: JsonFlag = False,
) -> int:
    """Update collections: read rows, embed what changed, delete what is gone."""
    from app.src.service.service import SyncRequest

    with opened(loaded_for(ctx)) as service, interruptible() as interrupted:
        chosen = _chosen(service, names or [], all_)
        request = SyncRequest(full, max_deletes, owner=f"cli-{os.getpid()}", accept_schema=accept_schema)
        run = _SyncRun(service, request, interrupted, strict)
        for name in chosen:
            if not interrupted():
                run.one(name)
    if json:
        output.write_json(run.reports)
    else:
        _show_synced(run)
    for name, error in run.errors:
        report_error(error, ctx.obj.debug, subject=f"{name}: ")
    if interrupted.code is not None:
        output.say(f"stopped on request; continue with: owl-sap sync {' '.join(chosen)}")
        return interrupted.code
    return run.code


def _show_synced(run: _SyncRun) -> None:
    """Failed collections have no counts: their errors follow the table."""
    done = [report for report in run.reports if report["error"] is None]
    if done:
        output.counts("Synced", [_sync_row(report) for report in done], _SYNC_COLUMNS, records=done)


def _sync_row(report: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**report, "outcome": "stopped" if report["stopped"] else "PAUSED" if report["paused"] else "done"}


def _chosen(service: Service, names: list[str], all_: bool) -> list[str]:
    if all_ == bool(names):
        raise UsageFault("name the collections to sync, or give --all (not both)")
    chosen = list(dict.fromkeys(service.synced_names() if all_ else names))
    if not chosen and service.names():
        raise UsageFault("every collection is written by clients (documents = true): there is nothing to sync")
    if not chosen:
        raise UsageFault(no_collections(service.file))
    for name in chosen:
        service.spec(name)
    return chosen


class _SyncRun:
    """Syncs one collection after the other; one's failure never stops the others, the highest exit code counts."""

    def __init__(self, service: Service, request: Any, interrupted: Interrupted, strict: bool) -> None:
        self._service = service
        self._request = request
        self._interrupted = interrupted
        self._strict = strict
        self.reports: list[dict[str, Any]] = []
        # By collection; printed after all reports, so that no table buries them.
        self.errors: list[tuple[str, Exception]] = []
        self.code = OK

    def one(self, name: str) -> None:
        from connector.sync.run import SyncReport

        try:
            with watched(name) as observer:
                report = self._service.sync(name, self._request, observer, self._interrupted)
            error = None
        except Exception as caught:
            report, error = SyncReport(name, complete=False), message(caught)
            self.errors.append((name, caught))
            self.code = max(self.code, exit_code(caught))
        for note in report.notes:
            output.say(f"{name}: {note}")
        self.reports.append(report.as_dict() | {"error": error})
        if report.paused:
            output.say(_paused(name, name, report))
        if report.quarantined:
            output.say(f"{name}: {report.quarantined} rows are in quarantine; see owl-sap quarantine list {name}")
        kept_up = getattr(report, "serving", None)
        if kept_up is not None and kept_up.paused:
            output.say(_paused(name, f"{name}, active generation", kept_up))
            self.code = max(self.code, FAILED)
        if report.paused or (self._strict and report.quarantined):
            self.code = max(self.code, FAILED)


def _paused(collection: str, subject: str, report: SyncReport) -> str:
    """`subject`: how the message begins; the command in it names the collection."""
    if report.paused != "max_deletes":
        return f"{subject}: paused ({report.paused})"
    gone = report.to_delete
    what = f"{gone} stored rows are no longer in the source" if gone else "too many stored rows became blank"
    kept = "nothing was deleted"
    if report.deleted:
        kept = f"{report.deleted} of them were deleted before the limit was reached, the others were kept"
    return (
        f"{subject}: {what}, more than max_deletes allows: {kept}. If this is expected: "
        f"owl-sap sync {collection} --full --max-deletes 1"
    )


@verb(app, "verify")
def verify(
    ctx: typer.Context,
    name: Name,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair what differs: rows that differ are rewritten.")
    ] = False,
    generation: Annotated[
        int | None,
        typer.Option(min=1, max=2**31 - 1, help="This generation instead of the active one (owl-sap generations)."),
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Compare a collection with its source and optionally repair it. Every row and vector is compared; exit 1 when one
    differs."""
    with opened(loaded_for(ctx)) as service, interruptible() as interrupted, watched(name) as observer:
        report = service.verify(name, repair=repair, generation=generation, observer=observer, stop=interrupted)
    if interrupted.code is not None and report.stopped:
        output.say(f"stopped on request: not everything was compared{'; what was repaired stays' if repair else ''}")
        return interrupted.code
    if json:
        output.write_json(report.as_dict())
    else:
        found = " after repair; the counts are from before" if repair and report.drift else ""
        output.counts(f"{name}: {'ok' if report.ok else 'NOT ok'}{found}", [report.as_dict()], _VERIFY_COLUMNS)
        if repair or not report.ok:
            output.say(_verified(name, report, repair))
    return OK if report.ok else FAILED


def _verified(name: str, report: VerifyReport, repair: bool) -> str:
    """What to do next, or what was done."""
    if report.paused is not None:
        return (
            f"{name}: not everything was repaired ({report.paused}); check the source. If its rows are right: "
            f"owl-sap sync {name} --full --max-deletes 1"
        )
    if repair:
        return f"{name}: {report.repaired} rows repaired"
    return f"repair it with: owl-sap verify {name} --repair"


@verb(app, "status")
def status(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Collection; default: all.", metavar="[NAME]")] = None,
    json: JsonFlag = False,
) -> None:
    """Show what is stored, by which model and how old it is."""
    with opened(loaded_for(ctx)) as service:
        rows = service.status(None if name is None else [name])
    if json:
        output.write_json(rows)
    elif not rows:
        output.say(no_collections(service.file))
    else:
        shown = [row | {column: _minute(row[column]) for column in _MOMENTS} for row in rows]
        sometimes = [
            column for column in _MOMENTS if column not in _STATUS_COLUMNS and any(row[column] for row in rows)
        ]
        output.counts("Collections", shown, (*_STATUS_COLUMNS, *sometimes), records=rows)


def _minute(moment: str | None) -> str | None:
    """2026-11-21T03:22:58.545375+00:00, to the second."""
    return None if moment is None else moment[:19].replace("T", " ") + "Z"


# ---------------------------------------------------------------------------------------------------- engine and doctor


@verb(app, "embed")
def embed(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="One text per line; default: stdin.", metavar="[FILE]")] = None,
    out: Annotated[Path | None, typer.Option(help="Write float32 vectors to this .npy file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Turn texts into vectors. The order is kept; the output is JSON lines, one JSON document with --json, or an .npy
    file with --out."""
    from app.src.cli.embedding import Sink, check_target, lines_of

    check_target(out)
    with opened(loaded_for(ctx)) as service:
        sink = Sink(out, json)
        for texts in lines_of(file):
            sink.add(service.embed(texts), service.engine.max_tokens, service.engine.count_tokens(texts))
        sink.close(service.engine.dimension)


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


# ------------------------------------------------------------------------------------------------------------ processes


@verb(app, "serve")
def serve(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Loopback only, as long as no authentication is configured.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 picks a free one.")] = None,
) -> None:
    """Run the REST service and the console. The first line on stdout is {"url": ...} once it answers."""
    from app.src.api import server
    from app.src.cli.showing import served

    loaded = loaded_for(ctx, {("api", "host"): host, ("api", "port"): port})
    api = loaded.settings.api

    def announce(url: str) -> None:
        output.write_json({"url": url})
        output.say(served(url, loaded.settings))

    server.refuse_public(api.host, authenticated=loaded.settings.access.configured)
    with orderly(OK), opened(loaded) as service:
        server.serve(service, api.host, api.port, announce)
    leave_behind_what_hangs(OK)


@verb(app, "demo")
def demo(
    ctx: typer.Context,
    serve_: Annotated[bool, typer.Option("--serve", help="Keep the REST service up afterwards.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for --serve; 0 picks a free one.")] = None,
    json: JsonFlag = False,
) -> int:
    """Try everything on an emulator with sample data. Sync, search and verify; needs no HANA, GPU or account."""
    from app.src.cli.showing import run_demo

    settings = loaded_for(ctx, {("api", "port"): port}).settings
    return run_demo(settings, serve=serve_, json=json)


# ------------------------------------------------------------------------------------------------------------- settings


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
