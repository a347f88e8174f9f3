"""The verbs of collections: sync, verify, status, quarantine and generations."""

from __future__ import annotations

import os
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, opened, quarantine_app, report_error, verb
from app.src.cli.exits import FAILED, OK, UsageFault, exit_code, message
from app.src.cli.interrupts import interruptible
from app.src.cli.output import watched
from app.src.cli.scale import ActorsFlag, ScaleFlag, read_scaled
from app.src.cli.search import lines_of

if TYPE_CHECKING:
    from app.src.service.service import Service
    from connector.sync.quarantine import GivenKey
    from connector.sync.run import SyncReport


_STATUS_COLUMNS = ("collection", "rows", "chunks", "empty", "quarantined", "last_sync", "lag_seconds", "model", "table")
_MOMENTS = ("last_sync", "next_sync", "stale_since")
_SYNC_COLUMNS = ("collection", "read", "upserted", "unchanged", "empty", "quarantined", "deleted", "seconds", "outcome")
_VERIFY_COLUMNS = ("rows", "missing", "stale", "orphaned", "duplicates", "bad_vectors", "foreign", "quarantined", "ok")


@verb(app, "sync")
def sync(  # noqa: PLR0913 - a verb has as many parameters as options
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Collections.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every configured collection.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Compare every row, with any change method.")] = False,
    max_deletes: Annotated[float | None, typer.Option(min=0, max=1, help="Largest share of rows to delete.")] = None,
    accept_schema: Annotated[bool, typer.Option("--accept-schema", help="Accept a column's new type.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when rows were quarantined.")] = False,
    scale: ScaleFlag = None,
    actors: ActorsFlag = None,
    json: JsonFlag = False,
) -> int:
    """Update collections: read rows, embed what changed, delete what is gone."""
    from app.src.service.sync import SyncRequest
    from connector.sync.run import SyncReport

    reports: list[dict[str, Any]] = []
    failed: dict[str, Exception] = {}
    code = OK
    with opened(read_scaled(scale, actors), scaled=True) as service, interruptible() as interrupted:
        chosen = _chosen(service, names or [], all_)
        request = SyncRequest(full, max_deletes, owner=f"cli-{os.getpid()}", accept_schema=accept_schema)
        for name in chosen:
            if interrupted():
                break
            try:
                with watched(name) as observer:
                    report = service.sync.run(name, request, observer, interrupted)
            except Exception as caught:  # the other collections are still synced
                report, failed[name] = SyncReport(name, complete=False), caught
                code = max(code, exit_code(caught))
            reports.append(report.as_dict() | {"error": message(failed[name]) if name in failed else None})
            if _is_paused(name, report) or (strict and report.quarantined):
                code = max(code, FAILED)
    done = [report for report in reports if report["error"] is None]
    if json:
        output.write_json(reports)
    elif done:
        states = ["stopped" if each["stopped"] else "PAUSED" if each["paused"] else "done" for each in done]
        rows = [each | {"outcome": state} for each, state in zip(done, states, strict=True)]
        output.data(done, "Synced", _SYNC_COLUMNS, json=False, rows=rows)
    for name, error in failed.items():  # last, so that no table hides them
        report_error(error, subject=f"{name}: ")
    if interrupted.code is not None:
        output.say(f"stopped on request; continue with: owl-sap sync {' '.join(chosen)}")
        return interrupted.code
    return code


def _chosen(service: Service, names: list[str], all_: bool) -> list[str]:
    if all_ == bool(names):
        raise UsageFault("name the collections to sync, or give --all (not both)")
    chosen = list(dict.fromkeys(service.collections.synced_names if all_ else names))
    if not chosen and service.collections.names:
        raise UsageFault("every collection is written by clients (documents = true): there is nothing to sync")
    if not chosen:
        from app.src.settings import no_collections

        raise UsageFault(no_collections(service.file))
    for name in chosen:
        service.collections.spec(name)
    return chosen


def _is_paused(name: str, report: SyncReport) -> bool:
    """Print notes, quarantine and pauses of a sync; return whether it, or the active generation's sync, was paused."""
    output.notes(name, report.notes)
    if report.quarantined:
        output.say(f"{name}: {report.quarantined} rows are in quarantine; see owl-sap quarantine list {name}")
    active = getattr(report, "serving", None)
    both = ((name, report), (f"{name}, active generation", active))
    paused = [(subject, each) for subject, each in both if each is not None and each.paused]
    for subject, each in paused:
        if each.paused != "max_deletes":
            output.say(f"{subject}: paused ({each.paused})")
            continue
        what = output.lost_rows(each.to_delete, each.emptied)
        kept = "nothing was deleted"
        if each.emptied and not each.complete:
            kept = "some may have been deleted before the limit was reached, the others were kept"
        elif each.deleted:
            kept = f"{each.deleted} of them were deleted before the limit was reached, the others were kept"
        output.say(
            f"{subject}: {what}, more than max_deletes allows: {kept}. If this is expected: "
            f"owl-sap sync {name} --full --max-deletes 1"
        )
    return bool(paused)


@verb(app, "verify")
def verify(
    name: Name,
    repair: Annotated[bool, typer.Option("--repair", help="Rewrite the rows that differ.")] = False,
    generation: Annotated[int | None, typer.Option(min=1, max=2**31 - 1, help="Instead of the active one.")] = None,
    json: JsonFlag = False,
) -> int:
    """Compare a collection with its source and optionally repair it. Every row and vector is compared; exit 1 when one
    differs."""
    with opened() as service, interruptible() as interrupted, watched(name) as observer:
        report = service.sync.verify(name, repair=repair, generation=generation, observer=observer, stop=interrupted)
    if interrupted.code is not None and report.stopped:
        output.say(f"stopped on request: not everything was compared{'; what was repaired stays' if repair else ''}")
        return interrupted.code
    found = " after repair; the counts are from before" if repair and report.drift else ""
    output.data(report.as_dict(), f"{name}: {'ok' if report.ok else 'NOT ok'}{found}", _VERIFY_COLUMNS, json=json)
    if json:
        pass
    elif report.paused is not None:
        output.say(
            f"{name}: not everything was repaired ({report.paused}); check the source. If its rows are right: "
            f"owl-sap sync {name} --full --max-deletes 1"
        )
    elif repair:
        output.say(f"{name}: {report.repaired} rows repaired")
    elif not report.ok:
        output.say(f"repair it with: owl-sap verify {name} --repair")
    return OK if report.ok else FAILED


@verb(app, "status")
def status(
    name: Annotated[str | None, typer.Argument(help="Collection; default: all.", metavar="[NAME]")] = None,
    json: JsonFlag = False,
) -> None:
    """Show what is stored, by which model and how old it is."""
    with opened() as service:
        rows = service.status.collections(None if name is None else [name])
    if not rows and not json:
        from app.src.settings import no_collections

        output.say(no_collections(service.file))
        return
    shown = [row | {column: output.minute(row[column]) for column in _MOMENTS} for row in rows]
    sometimes = [column for column in _MOMENTS if column not in _STATUS_COLUMNS and any(row[column] for row in rows)]
    output.data(rows, "Collections", (*_STATUS_COLUMNS, *sometimes), json=json, rows=shown)


_QUARANTINE_COLUMNS = ("key", "stage", "reason", "attempts", "given_up", "last_seen")
_RETRY_COLUMNS = ("retried", "upserted", "empty", "gone", "quarantined", "seconds")
_HOW = """COLUMN=value, A=x,B=y, a JSON object, or a JSON array of all key values"""

KeyArguments = Annotated[list[str] | None, typer.Argument(help=f"{_HOW}; default: all.", metavar="[KEY...]")]


@verb(quarantine_app, "list")
def quarantine_list(name: Name, json: JsonFlag = False) -> None:
    """List the rows in quarantine, each with its reason."""
    with opened() as service:
        rows = [entry.as_dict() for entry in service.quarantine.entries(name)]
    shown = [
        row | {"reason": output.shorten(row["reason"]), "last_seen": output.minute(row["last_seen"])} for row in rows
    ]
    output.data(rows, f"{name}: in quarantine", _QUARANTINE_COLUMNS, json=json, rows=shown, whole=False)
    if rows and not json:
        output.say(f"correct the rows in the source, then run: owl-sap quarantine retry {name}")


@verb(quarantine_app, "show")
def quarantine_show(name: Name, keys: KeyArguments = None, json: JsonFlag = False) -> None:
    """Show entries in full. Never shows the row's text."""
    with opened() as service:
        rows = [entry.as_dict() for entry in service.quarantine.entries(name, _wanted_keys(service, name, keys))]
    if json or not rows or not output.for_people():
        output.data(rows, f"{name}: rows in quarantine", json=json)
        return
    for row in rows:
        output.fields(name, row, _QUARANTINE_COLUMNS)


@verb(quarantine_app, "retry")
def quarantine_retry(name: Name, keys: KeyArguments = None, json: JsonFlag = False) -> int:
    """Process these rows again. Includes rows that syncs no longer try; their attempts start at one. Exit 1 when some
    fail again."""
    with opened() as service, interruptible() as interrupted:
        wanted = _wanted_keys(service, name, keys)
        with watched(name) as observer:
            ids = service.quarantine.ids(name, wanted)
            report = service.quarantine.retry(name, ids, observer, interrupted)
    output.data(report.as_dict(), f"{name}: retried", _RETRY_COLUMNS, json=json)
    if report.quarantined:
        output.say(f"{report.quarantined} rows stay in quarantine; for the reasons run: owl-sap quarantine list {name}")
    if interrupted.code is not None and report.stopped:
        return interrupted.code
    return FAILED if report.quarantined else OK


@verb(quarantine_app, "drop")
def quarantine_drop(name: Name, keys: KeyArguments = None, json: JsonFlag = False) -> None:
    """Delete entries from quarantine (without KEY: all). Reasons and attempts are lost; the next sync compares
    every row and tries these again."""
    with opened() as service:
        dropped = service.quarantine.drop(name, _wanted_keys(service, name, keys))
    if json:
        output.write_json({"collection": name, "dropped": dropped})
    else:
        output.say(f"{name}: {dropped} entries dropped")


def _wanted_keys(service: Service, name: str, keys: list[str] | None) -> list[GivenKey] | None:
    from connector.sync.quarantine import parse_conditions

    if not keys:
        return None
    columns = service.collections.key_columns(name)
    wanted: list[GivenKey] = []
    for text in keys:
        if text.lstrip().startswith(("[", "{")):
            try:
                wanted.append(orjson.loads(text))
            except orjson.JSONDecodeError as error:
                raise UsageFault(f"{text!r} is not JSON: {error}") from None
        elif (conditions := parse_conditions(text, columns)) is not None:
            wanted.append(conditions)
        elif len(columns) == 1:
            wanted.append([text])
        else:
            raise UsageFault(f"{text!r} is not a key; give {_HOW}; key columns: {', '.join(columns) or 'not known'}")
    return wanted


_GENERATION_COLUMNS = ("generation", "state", "complete", "rows", "model", "dimension", "last_sync", "created", "table")
_COMPARED = (
    *("serving", "other", "serving_rows", "other_rows", "complete", "queries"),
    *("overlap_at_10", "same_first"),
)
_WHICH = "The generation to compare, switch to or drop; default: the newest unfinished."
_BUILT = ("collection", "generation", "read", "upserted", "unchanged", "empty", "quarantined", "seconds")


@verb(app, "generations")
def generations(  # noqa: PLR0913 - a verb has as many parameters as options
    name: Name,
    number: Annotated[int | None, typer.Argument(min=1, max=2**31 - 1, metavar="[N]", help=_WHICH)] = None,
    build: Annotated[bool, typer.Option("--build", help="Build one beside the active one.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Compare the results of the same queries.")] = False,
    switch: Annotated[bool, typer.Option("--switch", help="Make N active.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Make the previous generation active again.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Delete N, which must not be active.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Switch even to an incomplete one.")] = False,
    queries: Annotated[Path | None, typer.Option(help="With --compare: a file of queries, one a line.")] = None,
    sample: Annotated[int, typer.Option(min=0, max=10_000, help="With --compare: stored texts to ask for.")] = 50,
    json: JsonFlag = False,
) -> int:
    """Change model or template without downtime. Without an action it lists the generations of a collection."""
    from app.src.service.sync import SyncRequest

    actions = {"build": build, "compare": compare, "switch": switch, "rollback": rollback, "drop": drop}
    asked = [action for action, wanted in actions.items() if wanted]
    if (force and not switch) or (queries is not None and not compare):
        raise UsageFault("--force goes with --switch, --queries with --compare")
    if len(asked) > 1:
        raise UsageFault(f"give only one of: {' or '.join(f'--{action}' for action in asked)}")
    if number is not None and not (compare or switch or drop):
        raise UsageFault("a number goes with --compare, --switch or --drop")
    if number is None and drop:
        raise UsageFault("--drop needs a number: --drop N")
    lines = [] if queries is None else chain(*lines_of(queries))
    texts = [line.strip() for line in lines if line.strip()]
    with opened(scaled=build) as service:
        if build:
            with interruptible() as interrupted, watched(name) as observer:
                report = service.sync.build(name, SyncRequest(owner=f"cli-{os.getpid()}"), observer, interrupted)
            output.data(report.as_dict(), f"{name}: built", _BUILT, json=json)
            output.notes(name, report.notes)
            if interrupted.code is not None and report.stopped:
                return interrupted.code
            return FAILED if report.paused or report.stopped else OK
        if compare:
            compared = service.generations.compare(name, number, texts, sample)
            output.data(asdict(compared), f"{name}: compared", _COMPARED, json=json)
        elif drop:
            assert number is not None
            service.generations.drop(name, number)
            output.data({"collection": name, "dropped": number}, f"{name}: dropped", ("dropped",), json=json)
        elif switch or rollback:
            chosen = service.generations
            switched = chosen.rollback(name) if rollback else chosen.switch(name, number, force=force)
            output.data(asdict(switched), f"{name}: switched", ("generation", "retired"), json=json)
            output.notes(name, switched.notes)
        else:
            rows = service.generations.shown(name)
            if not rows and not json:
                output.say(f"{name}: never synced, so there are no generations; run: owl-sap sync {name}")
                return OK
            shown = [row | {moment: output.minute(row[moment]) for moment in ("last_sync", "created")} for row in rows]
            output.data(rows, f"{name}: generations", _GENERATION_COLUMNS, json=json, rows=shown)
    return OK
