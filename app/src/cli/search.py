"""The verbs that search and embed: search, rows, evaluate, embed and mcp."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, file_text, opened, read_settings, verb
from app.src.cli.exits import OK, UsageFault, refusals
from app.src.cli.interrupts import cancelling, leave_behind_what_hangs, orderly
from app.src.cli.output import watched
from connector.errors import UnknownRow

if TYPE_CHECKING:
    from app.src.service.wiring import EngineEmbedder


Mode = Literal["vector", "keyword", "hybrid"]  # by meaning, words or both
InputType = Literal["query", "document"]  # as in app.src.core.backends, which takes time to import


@verb(app, "search")
def search(  # noqa: PLR0913 - a verb has as many parameters as options
    name: Name,
    text: Annotated[str | None, typer.Argument(help="The search text.", metavar="TEXT", show_default=False)] = None,
    like: Annotated[str | None, typer.Option(metavar="ID", help="Instead of TEXT: rows like the hit ID.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many rows.")] = 10,
    filter_: Annotated[str | None, typer.Option("--filter", help='JSON: \'{"MTART": "FERT"}\'')] = None,
    mode: Annotated[Mode | None, typer.Option(help="Default: hybrid; vector for --like.")] = None,
    min_score: Annotated[float | None, typer.Option(help="Least score; in mode hybrid least cosine.")] = None,
    mmr: Annotated[float | None, typer.Option(min=0, max=1, help="Diversity: 0 maximum, 1 off.")] = None,
    passages: Annotated[int, typer.Option(min=1, max=20, help="Matching passages to show of each hit.")] = 1,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the hits on stderr, as JSON.")] = False,
    rerank: Annotated[bool | None, typer.Option(help="By the configured reranker; default: if any.")] = None,
    group: Annotated[bool | None, typer.Option(help="Near-identical hits as one; default: in tables only.")] = None,
    json: JsonFlag = False,
) -> None:
    """Search a collection by meaning, words or both. Shows source rows, best first; --like ID finds rows like one."""
    from app.src.access.principal import OPERATOR
    from app.src.service.search import Like, SearchOptions

    if (text is None) == (like is None):
        raise UsageFault("give either TEXT or --like ID")
    asked: Any = text if like is None else Like(like)
    where = None
    if filter_ is not None:
        with refusals("--filter is not JSON: "):
            where = orjson.loads(filter_)
        if not isinstance(where, dict):
            raise UsageFault('--filter must be a JSON object, for example \'{"MTART": "FERT"}\'')
    with refusals():
        grouped = group if group is not None else output.for_people() and not json
        options = SearchOptions(mode, min_score, mmr, None, passages, explain, rerank, grouped)
    logging.getLogger("app.src.service.rerank").setLevel(logging.ERROR)  # its warning would repeat a note
    with opened() as service, refusals():
        try:
            found = service.search.run(name, asked, k, where, options, principal=OPERATOR)
        except UnknownRow as error:
            raise UnknownRow(f"{error}; owl-sap search {name} --json shows ids") from None
    for note in found.notes:
        output.say(note)
    if found.stale_since is not None:
        output.say(f"HANA is unavailable: rows may have changed since the last complete sync at {found.stale_since}")
    if found.explain is not None:
        output.line_on_stderr({"explain": found.explain})
    hits = [hit.as_dict() for hit in found.hits]
    shown = []
    for hit in hits:
        texts = [output.shorten(hit["text"])]
        if len(found_passages := hit.get("passages") or ()) > 1:  # one line per passage
            texts = [f"{each['score']:.3f} {output.shorten(each['text'])}" for each in found_passages]
        if others := hit.get("similar"):
            texts.append(f"{others} more like this: --no-group, or --like ID")
        shown.append(hit | {"text": "\n".join(texts)})
    columns = ("relevance", "score", "key", "text", "metadata")
    output.data(hits, f"{name}: {text or like}", columns, json=json, rows=shown, whole=False)


_FIGURES = ("mode", "group", "queries", "hit_1", "hit_3", "hit_10", "mrr", "recall", "ndcg")
_WORST = ("mode", "line", "query", "right", "ranks")
_RECALL = ("k", "queries", "index_used", "recall", "low", "high", "same_first", "search_ms", "exact_ms")
_DIFFERENCES = ("mode", "measure", "difference", "low", "high", "p")


@verb(app, "evaluate")
def evaluate(  # noqa: PLR0913 - a verb has as many parameters as options
    name: Name,
    queries: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Labelled queries: JSON lines.")] = None,
    mode: Annotated[Literal["vector", "keyword", "hybrid", "all"], typer.Option(help="One of them, or all.")] = "all",
    k: Annotated[int, typer.Option("-k", "--k", min=1, max=1000, help="Hits that recall and nDCG look at.")] = 10,
    save: Annotated[Path | None, typer.Option(help="Write the whole report, every query's outcome too.")] = None,
    against: Annotated[Path | None, typer.Option(help="A saved report to compare with.")] = None,
    recall: Annotated[bool, typer.Option("--recall", help="Instead of FILE: recall of the vector index.")] = False,
    sample: Annotated[int, typer.Option("--queries", min=1, max=10_000, help="Rows asked with by --recall.")] = 100,
    rerank: Annotated[bool | None, typer.Option(help="By the configured reranker; default: if any.")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure search quality with labelled queries. Shows recall, MRR and nDCG by mode and group."""
    from app.src.evaluation.run import MODES, check_earlier, differences

    if recall == (queries is not None):
        raise UsageFault("give a FILE of labelled queries, or --recall")
    if queries is None:
        with opened() as service, watched(name, "queries") as observer, refusals(f"{name}: "):
            found = service.evaluation.index_recall(name, sample, k, observer.progress)
        output.data(found, f"{name}: usual search against exact search", _RECALL, json=json)
        if not json:
            output.notes(name, (str(found["index_detail"]),))
        return
    modes = MODES if mode == "all" else (mode,)
    earlier = None
    if against is not None:
        with suppress(orjson.JSONDecodeError):
            earlier = orjson.loads(file_text(against))
        if not isinstance(earlier, dict):
            raise UsageFault(f"{against} is not a report of owl-sap evaluate --save")
        check_earlier(earlier, k)
    with opened() as service, watched(name, "queries") as observer:
        report = service.evaluation.evaluate(name, queries, modes, k=k, rerank=rerank, progress=observer.progress)
    if save is not None:
        try:
            save.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        except OSError as error:
            raise UsageFault(f"{save} cannot be written: {error.strerror}") from None
    changes = {} if earlier is None else {"differences": differences(earlier, report)}
    for figures in report["modes"].values():
        del figures["outcomes"]
    if json:
        output.write_json(report | changes)
    else:
        rows = [
            {"mode": each, "group": group, **summary}
            for each, figures in report["modes"].items()
            for group, summary in {"all": figures["all"], **figures["groups"]}.items()
        ]
        worst = [{"mode": each} | query for each, figures in report["modes"].items() for query in figures["worst"]]
        changed = [
            {"mode": each, "measure": measure, **difference}
            for each, measures in changes.get("differences", {}).items()
            for measure, difference in measures.items()
        ]
        for title, records, columns in (
            (f"{report['queries']} queries, k = {report['k']}", rows, _FIGURES),
            ("found late or not at all", worst, _WORST),
            ("now minus before", changed, _DIFFERENCES),
        ):
            if records:
                output.data(records, f"{name}: {title}", columns, json=False, whole=False)
    output.notes(name, report["notes"])


@verb(app, "embed")
def embed(
    file: Annotated[Path | None, typer.Argument(help="One text per line; default: stdin.", metavar="[FILE]")] = None,
    out: Annotated[Path | None, typer.Option(help="Write float32 vectors to this .npy file.")] = None,
    as_: Annotated[InputType, typer.Option("--as", help="Search texts or texts to be found.")] = "document",
    json: JsonFlag = False,
) -> None:
    """Turn texts into vectors. The order is kept; the output is JSON lines, one JSON document with --json, or an .npy
    file with --out. With --as query, a model that has prompts embeds search texts as a search does."""
    if out is not None:  # check before computing anything
        if out.suffix != ".npy":
            raise UsageFault(f"--out {out}: only .npy files are written")
        if not out.parent.is_dir():
            raise UsageFault(f"--out {out}: folder {out.parent} not found")
        if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
            raise UsageFault(f"--out {out}: cannot be written")
    with opened() as service:
        write_vectors(service.parts.embedder, lines_of(file), out, json, as_)


_BATCH = 4096


def lines_of(file: Path | None) -> Iterator[list[str]]:
    """Yield the lines in batches, without line ends. Raises UsageFault for a file that is unreadable or not UTF-8."""
    try:
        # Reopen stdin: Python's own accepts invalid bytes in some locales. utf-8-sig drops the byte order mark that
        # Windows editors write.
        source = 0 if file is None else file
        with open(source, encoding="utf-8-sig", errors="strict", closefd=file is not None) as stream:
            while batch := [line.rstrip("\r\n") for line in islice(stream, _BATCH)]:
                yield batch
    except OSError as error:
        raise UsageFault(f"{file or 'stdin'}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageFault(f"{file or 'stdin'}: not UTF-8 text") from None


def write_vectors(
    embedder: EngineEmbedder,
    batches: Iterable[list[str]],
    file: Path | None,
    json: bool,
    input_type: InputType = "document",
) -> None:
    """Write vectors as JSON lines batch by batch, or at the end as one JSON document or an .npy file. With `json` and
    `file`, the document describes the file."""
    import numpy as np

    blocks = [np.empty((0, embedder.dimension), dtype=np.float32)]
    cut = 0
    for texts in batches:
        vectors = embedder.embed(texts, input_type=input_type)
        cut += sum(count > embedder.max_tokens for count in embedder.count_tokens(texts))
        if json or file is not None:
            blocks.append(vectors)
        else:
            output.write_json(*vectors)
    vectors = np.concatenate(blocks)
    if file is not None:
        np.save(file, vectors)
        output.say(f"{len(vectors)} vectors of {embedder.dimension} numbers in {file}")
        if json:
            output.write_json({"file": str(file), "vectors": len(vectors), "dimension": embedder.dimension})
    elif json:
        output.write_json(vectors)
    if cut:
        output.say(f"{cut} texts exceed the model's limit and were truncated")


@verb(app, "mcp")
def mcp(
    key_file: Annotated[Path | None, typer.Option(help="API key whose rights apply; default: mcp.key.")] = None,
    write: Annotated[bool | None, typer.Option("--write/--read-only", help="Offer start_sync.")] = None,
) -> int:
    """Offer search and rows to agents over the Model Context Protocol. An agent's program starts it and talks to it on
    stdin and stdout (docs/agents.md); it ends with 0 when stdin ends and on SIGTERM."""
    from app.src.settings import no_collections

    key = None if key_file is None else file_text(key_file, "the file of --key-file").strip()
    loaded = read_settings({("mcp", "key"): key, ("mcp", "write"): write})
    if not loaded.settings.collections:
        raise UsageFault(no_collections(loaded.file))
    from app.src.mcp.stdio import serve

    with orderly(OK), opened(loaded) as service:
        if loaded.settings.mcp.write:
            service.background.run(1, schedules=False)  # runs the jobs of start_sync
        serve(service, cancelling)
    leave_behind_what_hangs(OK)
    return OK
