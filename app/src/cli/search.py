"""The verbs that search and embed: search, rows, evaluate, embed and mcp."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from app.src.access.principal import OPERATOR
from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, file_text, opened, read_settings, verb
from app.src.cli.exits import OK, UsageFault
from app.src.cli.interrupts import cancelling, leave_behind_what_hangs, orderly
from app.src.cli.output import watched
from app.src.settings import no_collections
from connector.errors import UnknownRow
from connector.extras import install_command

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from app.src.service.service import Service


_MODES = "vector (meaning), keyword (words) or hybrid (both)"


@verb(app, "search")
def search(  # noqa: PLR0913 - a verb has as many parameters as options
    name: Name,
    text: Annotated[str | None, typer.Argument(help="The search text.", metavar="TEXT", show_default=False)] = None,
    like: Annotated[
        str | None, typer.Option(metavar="ID", help="Instead of TEXT: rows similar to this one, by a hit's id.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many rows.")] = 10,
    filter_: Annotated[str | None, typer.Option("--filter", help='JSON: \'{"MTART": "FERT"}\'')] = None,
    mode: Annotated[
        str | None,
        typer.Option(help=f"{_MODES}. Default: hybrid for TEXT, vector for --like.", show_default=False),
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(
            help="Leave out hits below this score; in mode hybrid it is compared with the cosine, not the score shown."
        ),
    ] = None,
    mmr: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="LAMBDA", help="Diversity: 0 maximum, 1 off."),
    ] = None,
    passages: Annotated[int, typer.Option(min=1, max=20, help="Matching passages to show of each hit.")] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain on stderr, as JSON, how the hits were found.")
    ] = False,
    rerank: Annotated[
        bool | None,
        typer.Option(
            "--rerank/--no-rerank",
            help="Reorder hits with the configured reranker; default: on where one is configured.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Search a collection by meaning, words or both. Shows source rows, best first; --like ID finds rows like one."""
    from app.src.service.search import MODES, Like, SearchOptions

    if (text is None) == (like is None):
        raise UsageFault("give either TEXT or --like ID")
    if like is None and not (text or "").strip():
        raise UsageFault("the search text is empty")
    asked: Any = text if like is None else Like(like)
    where = None if filter_ is None else _parsed_filter(filter_)
    chosen = next((known for known in MODES if known == mode), None)
    if mode is not None and chosen is None:
        raise UsageFault(f"--mode {mode}: use {_MODES}")
    with _refusals():
        options = SearchOptions(chosen, min_score, mmr, passages=passages, explain=explain, rerank=rerank)
    with opened() as service, _refusals():
        try:
            found = service.search.run(name, asked, k, where, options, principal=OPERATOR)
        except UnknownRow as error:
            raise UnknownRow(f"{error}; {_how_ids_look(service, name)}") from None
    for note in found.notes:
        output.say(note)
    if found.stale_since is not None:
        output.say(f"HANA is unavailable: rows may have changed since the last complete sync at {found.stale_since}")
    if found.explain is not None:
        output.line_on_stderr({"explain": found.explain})
    hits = [hit.as_dict() for hit in found.hits]
    shown = [hit | {"text": _shown_text(hit)} for hit in hits]
    columns = ("score", "key", "text", "metadata")
    output.data(hits, f"{name}: {text or like}", columns, json=json, rows=shown, whole=False)


def _how_ids_look(service: Service, name: str) -> str:
    example = service.browse.example_id(name)
    return f"ids of {name} look like '{example}'" if example else f"owl-sap search {name} --json shows the ids"


def _shown_text(hit: dict[str, Any]) -> str:
    """Return one line for each passage."""
    passages = hit.get("passages") or []
    if len(passages) < 2:
        return output.shorten(hit["text"])
    return "\n".join(f"{each['score']:.3f} {output.shorten(each['text'])}" for each in passages)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the service's ValueError into a usage error."""
    try:
        yield
    except ValueError as error:
        raise UsageFault(str(error)) from None


@verb(app, "rows")
def rows(
    name: Name,
    ids: Annotated[list[str], typer.Argument(help="Ids of rows, as search gives them.", metavar="ID...")],
    json: JsonFlag = False,
) -> None:
    """Show stored rows by their ids. Prints whole texts, metadata and chunks."""
    with opened() as service, _refusals():
        found = service.browse.rows(name, ids, principal=OPERATOR)
        missing = len(set(ids)) - len(found)
        if missing:
            how = _how_ids_look(service, name)
            output.say(f"{missing} of the ids {'is' if missing == 1 else 'are'} not in {name}; {how}")
    records = [row.as_dict() for row in found]
    shown = [record | {"chunks": len(record["chunks"])} for record in records]
    output.data(records, name, ("key", "text", "metadata", "chunks"), json=json, rows=shown, whole=False)


def _parsed_filter(text: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageFault(f'--filter is not JSON, such as \'{{"MTART": "FERT"}}\': {error}') from None
    if not isinstance(parsed, dict):
        raise UsageFault('--filter must be a JSON object, for example \'{"MTART": "FERT"}\'')
    return parsed


_ALL = "all"
_FIGURES = ("mode", "group", "queries", "hit_1", "hit_3", "hit_10", "mrr", "recall", "ndcg")
_WORST = ("mode", "line", "query", "right", "ranks")
_RECALL = ("k", "queries", "index_used", "recall", "low", "high", "same_first", "search_ms", "exact_ms")
_DIFFERENCES = ("mode", "measure", "difference", "low", "high", "p")


@verb(app, "evaluate")
def evaluate(  # noqa: PLR0913 - a verb has as many parameters as options
    name: Name,
    queries: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Labelled queries, one JSON object a line.", show_default=False),
    ] = None,
    mode: Annotated[str, typer.Option(help="vector, keyword, hybrid or all.")] = _ALL,
    k: Annotated[int, typer.Option("-k", "--k", min=1, max=1000, help="Hits that recall and nDCG look at.")] = 10,
    save: Annotated[Path | None, typer.Option(help="Write the whole report, every query's outcome too.")] = None,
    against: Annotated[Path | None, typer.Option(help="A saved report to compare with.")] = None,
    recall: Annotated[
        bool, typer.Option("--recall", help="Instead of FILE: the recall of the vector index against exact search.")
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
    from app.src.evaluation.run import MODES, EvaluationRequest, check_earlier, differences

    if recall == (queries is not None):
        raise UsageFault("give a FILE of labelled queries, or --recall")
    if queries is None:
        return _evaluate_recall(name, sample, k, json)
    modes = MODES if mode == _ALL else tuple(known for known in MODES if known == mode)
    if not modes:
        raise UsageFault(f"--mode {mode}: use {', '.join(MODES)} or {_ALL}")
    earlier = None if against is None else _earlier_report(against)
    if earlier is not None:
        check_earlier(earlier, k)
    with opened() as service, watched(name, "queries") as observer:
        report = service.evaluation.evaluate(
            name, EvaluationRequest(queries, modes, k, rerank), observer.progress
        ).as_dict()
    if save is not None:
        try:
            save.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        except OSError as error:
            raise UsageFault(f"{save} cannot be written: {error.strerror}") from None
    modes_only = {
        each: {name: value for name, value in figures.items() if name != "outcomes"}
        for each, figures in report["modes"].items()
    }
    brief = {**report, "modes": modes_only}
    if earlier is not None:
        brief["differences"] = differences(earlier, report)
    if json:
        output.write_json(brief)
    else:
        _show_evaluation(name, brief)
    for note in report["notes"]:
        output.say(f"{name}: {note}")
    return OK


def _evaluate_recall(name: str, queries: int, k: int, json: bool) -> int:
    with opened() as service, watched(name, "queries") as observer:
        try:
            report = service.evaluation.index_recall(name, queries, k, observer.progress).as_dict()
        except ValueError as error:
            raise UsageFault(f"{name}: {error}") from None
    output.data(report, f"{name}: usual search against exact search", _RECALL, json=json)
    if not json:
        output.say(f"{name}: {report['index_detail']}")
        output.say(f"{name}: {report['proposal']}")
    return OK


def _earlier_report(file: Path) -> dict[str, Any]:
    try:
        report = orjson.loads(file_text(file))
    except orjson.JSONDecodeError:
        report = None
    if not isinstance(report, dict):
        raise UsageFault(f"{file} is not a report of owl-sap evaluate --save")
    return report


def _show_evaluation(name: str, report: Mapping[str, Any]) -> None:
    rows = [
        {"mode": mode, "group": group, **summary}
        for mode, figures in report["modes"].items()
        for group, summary in {_ALL: figures["all"], **figures["groups"]}.items()
    ]
    output.data(rows, f"{name}: {report['queries']} queries, k = {report['k']}", _FIGURES, json=False, whole=False)
    worst = [{"mode": mode, **each} for mode, figures in report["modes"].items() for each in figures["worst"]]
    if worst:
        output.data(worst, f"{name}: found late or not at all", _WORST, json=False, whole=False)
    changed = [
        {"mode": mode, "measure": measure, **difference}
        for mode, measures in report.get("differences", {}).items()
        for measure, difference in measures.items()
    ]
    if changed:
        output.data(changed, f"{name}: now minus before", _DIFFERENCES, json=False, whole=False)


@verb(app, "embed")
def embed(
    file: Annotated[Path | None, typer.Argument(help="One text per line; default: stdin.", metavar="[FILE]")] = None,
    out: Annotated[Path | None, typer.Option(help="Write float32 vectors to this .npy file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Turn texts into vectors. The order is kept; the output is JSON lines, one JSON document with --json, or an .npy
    file with --out."""
    check_target(out)
    with opened() as service:
        sink = Sink(out, json)
        for texts in lines_of(file):
            embedder = service.parts.embedder
            sink.add(embedder.embed(texts), embedder.max_tokens, embedder.count_tokens(texts))
        sink.close(service.parts.engine.dimension)


_BATCH = 4096


def lines_of(file: Path | None) -> Iterator[list[str]]:
    """Yield the lines without their ends, in batches. Raises UsageFault for a file that is not UTF-8."""
    try:
        # Reopened: Python's stdin accepts invalid bytes in some locales. -sig drops the byte order mark of Windows
        # editors.
        source = 0 if file is None else file
        with open(source, encoding="utf-8-sig", errors="strict", closefd=file is not None) as stream:
            while batch := [line.rstrip("\r\n") for line in islice(stream, _BATCH)]:
                yield batch
    except OSError as error:
        raise UsageFault(f"{file or 'stdin'}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageFault(f"{file or 'stdin'}: not UTF-8 text") from None


def check_target(out: Path | None) -> None:
    """Raise UsageFault for a file that cannot be written, before computing anything."""
    if out is None:
        return
    if out.suffix != ".npy":
        raise UsageFault(f"--out {out}: only .npy files are written")
    if not out.parent.is_dir():
        raise UsageFault(f"--out {out}: folder {out.parent} not found")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UsageFault(f"--out {out}: cannot be written")


class Sink:
    """Writes vectors as JSON lines at once, or collects them for one JSON document or an .npy file. With both, the
    document describes the file."""

    def __init__(self, file: Path | None, json: bool) -> None:
        self._file = file
        self._json = json
        self._whole = json or file is not None
        self._blocks: list[NDArray[np.float32]] = []
        self._count = 0
        self._cut = 0

    def add(self, vectors: NDArray[np.float32], limit: int, tokens: Sequence[int]) -> None:
        self._count += len(vectors)
        self._cut += sum(count > limit for count in tokens)
        if self._whole:
            self._blocks.append(vectors)
            return
        for vector in vectors:
            sys.stdout.buffer.write(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))

    def close(self, dimension: int) -> None:
        import numpy as np

        sys.stdout.buffer.flush()
        vectors = np.concatenate([np.empty((0, dimension), dtype=np.float32), *self._blocks])
        if self._file is not None:
            np.save(self._file, vectors)
            output.say(f"{self._count} vectors of {dimension} numbers in {self._file}")
            if self._json:
                output.write_json({"file": str(self._file), "vectors": self._count, "dimension": dimension})
        elif self._json:
            output.write_json(vectors)
        if self._cut:
            output.say(f"{self._cut} texts exceed the model's limit and were truncated")


@verb(app, "mcp")
def mcp(
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with an API key or token whose rights apply; default: the setting mcp.key, or yours."),
    ] = None,
    write: Annotated[
        bool | None, typer.Option("--write/--read-only", help="Offer start_sync too; default: the setting mcp.write.")
    ] = None,
) -> int:
    """Offer search and rows to agents over the Model Context Protocol. An agent's program starts it and talks to it on
    stdin and stdout (docs/agents.md); it ends with 0 when stdin ends and on SIGTERM."""
    key = None if key_file is None else file_text(key_file, "the file of --key-file").strip()
    loaded = read_settings({("mcp", "key"): key, ("mcp", "write"): write})
    if not loaded.settings.collections:
        raise UsageFault(no_collections(loaded.file))
    try:
        from app.src.mcp.stdio import serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise UsageFault(f"the package mcp is not installed: {install_command('mcp')}") from None
    with orderly(OK), opened(loaded) as service:
        if loaded.settings.mcp.write:
            service.background.run(1, schedules=False)  # runs the jobs of start_sync
        serve(service, cancelling)
    leave_behind_what_hangs(OK)
    return OK
