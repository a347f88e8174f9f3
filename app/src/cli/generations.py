"""`owl-sap generations`: another model or template built beside what serves, compared with it, switched to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, loaded_for, opened, verb
from app.src.cli.exits import FAILED, OK, UsageFault
from app.src.cli.interrupts import interruptible
from app.src.cli.progress import watched

if TYPE_CHECKING:
    from app.src.service.service import Service

_COLUMNS = ("generation", "state", "complete", "rows", "model", "dimension", "last_sync", "created", "table")
_COMPARED = (
    *("serving", "other", "serving_rows", "other_rows", "complete", "queries"),
    *("overlap_at_10", "rank_biased_overlap", "same_first"),
)
_BUILT = ("collection", "generation", "read", "upserted", "unchanged", "empty", "quarantined", "seconds")
_NUMBERED = ("compare", "switch", "drop")


@verb(app, "generations")
def generations(  # noqa: PLR0913 - a verb has as many parameters as options
    ctx: typer.Context,
    name: Name,
    number: Annotated[
        int | None,
        typer.Argument(
            min=1,
            max=2**31 - 1,
            metavar="[N]",
            help="Which one to compare, switch to or drop; default: the newest unfinished.",
        ),
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Build another one by the settings, beside what serves.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Ask both the same queries: how alike are they?")] = False,
    switch: Annotated[bool, typer.Option("--switch", help="Let N serve.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Let the one serve again that did before.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Delete N, which does not serve.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Switch even to one that is not complete.")] = False,
    queries: Annotated[
        Path | None, typer.Option(help="With --compare: a file of queries, one per line, besides stored texts.")
    ] = None,
    sample: Annotated[int, typer.Option(min=0, max=10_000, help="With --compare: stored texts to ask for.")] = 50,
    json: JsonFlag = False,
) -> int:
    """Change model or template without downtime. Without an action it lists the generations of a collection."""
    action = check(
        number, queries, build=build, compare=compare, switch=switch, rollback=rollback, drop=drop, force=force
    )
    texts = _lines(queries)
    with opened(loaded_for(ctx)) as service:
        if action == "build":
            return _build(service, name, json)
        if action is None:
            _show(name, service.generations.shown(name), json)
        elif action == "compare":
            compared = service.generations.compare(name, number, texts, sample).as_dict()
            _print(f"{name}: compared", compared, _COMPARED, json)
        elif action == "drop":
            assert number is not None
            service.generations.drop(name, number)
            _print(f"{name}: dropped", {"collection": name, "dropped": number}, ("dropped",), json)
        else:
            switched = (
                service.generations.rollback(name)
                if rollback
                else service.generations.switch(name, number, force=force)
            )
            _print(f"{name}: switched", switched.as_dict(), ("generation", "retired"), json)
            for note in switched.notes:
                output.say(f"{name}: {note}")
    return OK


def check(number: int | None, queries: Path | None, *, force: bool, **actions: bool) -> str | None:
    """The one action that was asked for; None: to look. Raises UsageFault for what does not go together."""
    if (force and not actions["switch"]) or (queries is not None and not actions["compare"]):
        raise UsageFault("--force goes with --switch, --queries with --compare")
    asked = [action for action, wanted in actions.items() if wanted]
    if len(asked) > 1:
        raise UsageFault(f"one thing at a time: {' or '.join(f'--{action}' for action in asked)}")
    action = asked[0] if asked else None
    if number is not None and action not in _NUMBERED:
        raise UsageFault("a number goes with --compare, --switch or --drop")
    if number is None and action == "drop":
        raise UsageFault("say which one to delete: --drop N")
    return action


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageFault(f"{file} cannot be read: {reason}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _print(title: str, record: dict[str, Any], columns: tuple[str, ...], json: bool) -> None:
    if json:
        output.write_json(record)
    else:
        output.counts(title, [record], columns)


def _show(name: str, rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        output.write_json(rows)
    elif not rows:
        output.say(f"{name}: never synced, so there are no generations; run: owl-sap sync {name}")
    else:
        shown = [row | {moment: _minute(row[moment]) for moment in ("last_sync", "created")} for row in rows]
        output.counts(f"{name}: generations", shown, _COLUMNS, records=rows)


def _minute(moment: str | None) -> str | None:
    return None if moment is None else moment[:16].replace("T", " ") + "Z"


def _build(service: Service, name: str, json: bool) -> int:
    from app.src.service.sync import SyncRequest

    with interruptible() as interrupted, watched(name) as observer:
        report = service.sync.build(name, SyncRequest(owner=f"cli-{os.getpid()}"), observer, interrupted)
    _print(f"{name}: built", report.as_dict(), _BUILT, json)
    for note in report.notes:
        output.say(f"{name}: {note}")
    if interrupted.code is not None and report.stopped:
        return interrupted.code
    return FAILED if report.paused or report.stopped else OK
