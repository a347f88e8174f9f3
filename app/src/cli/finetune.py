"""`owl-sap finetune`: the embedding model, adapted to one's own texts, as a new generation of the collection."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, loaded_for, opened, verb
from app.src.cli.exits import FAILED, OK, UsageFault
from app.src.cli.interrupts import Interrupted, interruptible
from app.src.cli.progress import watched

if TYPE_CHECKING:
    from app.src.service.service import Service
    from app.src.training.run import Report

_EVERY = 5.0
"""Seconds between two lines of progress."""
_STOPPING = b"stopping with a checkpoint after the step in hand; Ctrl-C again stops at once, without one\n"
_COLUMNS = ("", "before", "after")


@verb(app, "finetune")
def finetune(  # noqa: PLR0913 - a verb has as many parameters as options
    ctx: typer.Context,
    name: Name,
    pairs: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='Lines of {"query", "text"} or {"anchor", "positive"}.'),
    ] = None,
    columns: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="TITLE LONGTEXT", help="Two columns of the collection's rows; mind SAP's licence."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The model to come; default: NAME-1, -2 ...")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, max=100, help="Times over all pairs; default: 1.")] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="16|32", help="Pairs a step; default: 16.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=1e-8, max=1, help="Highest; default: 0.00002.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the split and of the order; default: 7.")] = None,
    max_pairs: Annotated[int | None, typer.Option(min=1, help="Read no more pairs; default: 100000.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished training.")] = False,
    generation: Annotated[
        bool, typer.Option("--generation/--no-generation", help="Build a generation with it, beside what serves.")
    ] = True,
    json: JsonFlag = False,
) -> int:
    """Fine-tune the embedding model on pairs of texts. Measures it before and after; exit 1 when it finds less."""
    from app.src.training.run import Request, TrainingObserver

    if batch_size not in (None, 16, 32):
        raise UsageFault(f"--batch-size {batch_size}: 16 or 32")
    request = Request(pairs, columns, epochs, batch_size, learning_rate, seed, max_pairs, resume)
    with opened(loaded_for(ctx)) as service, interruptible(_STOPPING) as interrupted:
        observer = TrainingObserver(output.say, _Steps(name), interrupted)
        report = service.finetune(name, request, out, observer)
        whole = not report.stopped
        if generation and whole and not report.worse:
            whole = _build(service, report, interrupted)
        model = service.settings.embedding_of(name).model
    _print(report, json)
    _tell(report, model, asked=generation, out=out)
    if interrupted.code is not None and not whole:
        return interrupted.code
    return FAILED if report.worse else OK


class _Steps:
    """Progress on stderr: sentences for people, JSON lines for programs, not too many of either."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = 0.0

    def __call__(self, done: int, steps: int, loss: float | None) -> None:
        now = time.monotonic()
        if now - self._told < _EVERY and done < steps:
            return
        self._told = now
        if output.for_people(stderr=True) or sys.stderr.isatty():
            output.say(f"step {done} of {steps}" + ("" if loss is None else f", loss {loss:.4f}"))
        else:
            output.line_on_stderr({"collection": self._name, "step": done, "steps": steps, "loss": loss})


def _build(service: Service, report: Report, interrupted: Interrupted) -> bool:
    """A generation with the trained model, beside what serves; whether it came to its end."""
    from connector.model import ModelSource

    precision = service.settings.embedding.precision
    model = ModelSource(str(report.folder), None, report.weights_sha256, precision)
    with watched(report.collection) as observer:
        built = service.build_with(report.collection, model, observer, interrupted)
    if built is None:
        return True
    report.generation = built.generation
    for note in built.notes:
        output.say(f"{report.collection}: {note}")
    return not built.stopped


def _print(report: Report, json: bool) -> None:
    document = report.as_dict()
    if json:
        output.write_json(document)
    elif report.before is not None and report.after is not None:
        rows: list[dict[str, Any]] = [
            {"": figure, "before": report.before[figure], "after": report.after[figure]}
            for figure in ("recall_at_10", "mrr", "queries", "texts")
        ]
        output.table(f"{report.collection}: {report.folder}", rows, _COLUMNS, records=[document])


def _tell(report: Report, model: str, *, asked: bool, out: Path | None) -> None:
    """What to do next."""
    name = report.collection
    if report.stopped:
        resume = f"owl-sap finetune {name} --resume" + ("" if out is None else f" --out {out}")
        output.say("stopped on request; " + (f"go on with: {resume}" if report.unfinished else "nothing was begun"))
    elif report.worse:
        output.say(
            f"{name}: the trained model finds less than {model} does, so it is not proposed; it is kept in "
            f"{report.folder}. More pairs, or more like what people ask, may help"
        )
    else:
        never_synced = " (the collection was never synced: there is nothing to build it beside)"
        output.say(
            f'{name}: to use it, write  model = "{report.folder}"  into its [[collections]] block, then run '
            f"owl-sap sync {name}{never_synced if asked and report.generation is None else ''}; "
            f"compare and switch with owl-sap generations {name} --compare, --switch"
        )
