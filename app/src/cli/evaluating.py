"""`owl-sap evaluate`: how good the search of a collection is, by labelled queries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, loaded_for, opened, verb
from app.src.cli.exits import OK, UsageFault
from app.src.cli.progress import watched

if TYPE_CHECKING:
    from app.src.evaluation.run import Mode

_ALL = "all"
_FIGURES = ("mode", "group", "queries", "hit_1", "hit_3", "hit_10", "mrr", "recall", "ndcg")
_WORST = ("mode", "line", "query", "right", "ranks")
_RECALL = ("k", "queries", "index_used", "recall", "low", "high", "same_first", "search_ms", "exact_ms")
_DIFFERENCES = ("mode", "measure", "difference", "low", "high", "p")


@verb(app, "evaluate")
def evaluate(  # noqa: PLR0913 - a verb has as many parameters as options
    ctx: typer.Context,
    name: Name,
    queries: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Labelled queries, one JSON object a line.", show_default=False),
    ] = None,
    mode: Annotated[str, typer.Option(help="vector, keyword, hybrid or all.")] = _ALL,
    k: Annotated[int, typer.Option("-k", "--k", min=1, max=1000, help="Hits that recall and nDCG look at.")] = 10,
    save: Annotated[Path | None, typer.Option(help="Write the whole report, every query's outcome too.")] = None,
    against: Annotated[Path | None, typer.Option(help="A report saved before: what changed since?")] = None,
    recall: Annotated[
        bool, typer.Option("--recall", help="Instead of FILE: what the vector index loses against exact search.")
    ] = False,
    sample: Annotated[
        int, typer.Option("--queries", min=1, max=10_000, help="With --recall: stored rows to ask with.")
    ] = 100,
    rerank: Annotated[
        bool | None,
        typer.Option("--rerank/--no-rerank", help="By the configured reranker; default: if there is one."),
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Measure search quality with labelled queries. Shows recall, MRR and nDCG by mode and group."""
    from app.src.evaluation.run import EvaluationRequest, check_earlier, differences

    if recall == (queries is not None):
        raise UsageFault("give a FILE of labelled queries, or --recall")
    if queries is None:
        return _recall(ctx, name, sample, k, json)
    modes = _modes(mode)
    earlier = None if against is None else _report(against)
    if earlier is not None:
        check_earlier(earlier, k)
    with opened(loaded_for(ctx)) as service, watched(name, "queries") as observer:
        report = service.evaluating.evaluate(
            name, EvaluationRequest(queries, modes, k, rerank), observer.progress
        ).as_dict()
    if save is not None:
        _write(save, report)
    changed = None if earlier is None else differences(earlier, report)
    brief = {**report, "modes": {each: _brief(figures) for each, figures in report["modes"].items()}}
    if changed is not None:
        brief["differences"] = changed
    if json:
        output.write_json(brief)
    else:
        _show(name, brief)
    for note in report["notes"]:
        output.say(f"{name}: {note}")
    return OK


def _recall(ctx: typer.Context, name: str, queries: int, k: int, json: bool) -> int:
    with opened(loaded_for(ctx)) as service, watched(name, "queries") as observer:
        try:
            report = service.evaluating.index_recall(name, queries, k, observer.progress).as_dict()
        except ValueError as error:
            raise UsageFault(f"{name}: {error}") from None
    if json:
        output.write_json(report)
    else:
        output.counts(f"{name}: usual search against exact search", [report], _RECALL, records=[report])
        output.say(f"{name}: {report['index_detail']}")
        output.say(f"{name}: {report['proposal']}")
    return OK


def _modes(mode: str) -> tuple[Mode, ...]:
    from app.src.evaluation.run import MODES

    chosen = MODES if mode == _ALL else tuple(known for known in MODES if known == mode)
    if not chosen:
        raise UsageFault(f"--mode {mode}: there is {', '.join(MODES)} or {_ALL}")
    return chosen


def _report(file: Path) -> dict[str, Any]:
    try:
        report = orjson.loads(file.read_bytes())
    except OSError as error:
        raise UsageFault(f"{file} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError:
        report = None
    if not isinstance(report, dict):
        raise UsageFault(f"{file} is not a report of owl-sap evaluate --save")
    return report


def _write(file: Path, report: Mapping[str, Any]) -> None:
    try:
        file.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise UsageFault(f"{file} cannot be written: {error.strerror}") from None


def _brief(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "outcomes"}


def _show(name: str, report: Mapping[str, Any]) -> None:
    rows = [
        {"mode": mode, "group": group, **summary}
        for mode, figures in report["modes"].items()
        for group, summary in {_ALL: figures["all"], **figures["groups"]}.items()
    ]
    output.table(f"{name}: {report['queries']} queries, k = {report['k']}", rows, _FIGURES)
    worst = [{"mode": mode, **each} for mode, figures in report["modes"].items() for each in figures["worst"]]
    if worst:
        output.table(f"{name}: found late or not at all", worst, _WORST)
    changed = [
        {"mode": mode, "measure": measure, **difference}
        for mode, measures in report.get("differences", {}).items()
        for measure, difference in measures.items()
    ]
    if changed:
        output.table(f"{name}: now minus before", changed, _DIFFERENCES)
