"""The verbs `search` and `rows`: read what to look for and how, and print what is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from app.src.access.principal import OPERATOR
from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, loaded_for, opened, verb
from app.src.cli.exits import UsageFault
from connector.errors import UnknownRow

if TYPE_CHECKING:
    from app.src.service.service import Service

_MODES = "vector (meaning), keyword (words) or hybrid (both)"


@verb(app, "search")
def search(  # noqa: PLR0913 - a verb has as many parameters as options
    ctx: typer.Context,
    name: Name,
    text: Annotated[
        str | None, typer.Argument(help="What to look for, in your own words.", metavar="TEXT", show_default=False)
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="ID", help="Instead of TEXT: rows like this one; ids are those of hits.")
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
    asked = _asked(text, like)
    where = _parsed_filter(filter_)
    loaded = loaded_for(ctx)
    options = replace(_options(mode, min_score, mmr, passages, explain), rerank=rerank)
    with opened(loaded) as service, _refusals():
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
    if json:
        output.write_json(hits)
        return
    shown = [hit | {"text": _text(hit)} for hit in hits]
    output.table(f"{name}: {text or like}", shown, ("score", "key", "text", "metadata"), records=hits)


def _how_ids_look(service: Service, name: str) -> str:
    example = service.browse.example_id(name)
    return f"ids of {name} look like '{example}'" if example else f"owl-sap search {name} --json shows the ids"


def _text(hit: dict[str, Any]) -> str:
    """A line for each passage, where several were asked for."""
    passages = hit.get("passages") or []
    if len(passages) < 2:
        return output.shorten(hit["text"])
    return "\n".join(f"{each['score']:.3f} {output.shorten(each['text'])}" for each in passages)


@contextmanager
def _refusals() -> Iterator[None]:
    """What the service says of an argument is a fault in the use of the command."""
    try:
        yield
    except ValueError as error:
        raise UsageFault(str(error)) from None


def _asked(text: str | None, like: str | None) -> Any:
    from app.src.service.search import Like

    if (text is None) == (like is None):
        raise UsageFault("give either TEXT or --like ID")
    if like is not None:
        return Like(like)
    if not (text or "").strip():
        raise UsageFault("the search text is empty")
    return text


@verb(app, "rows")
def rows(
    ctx: typer.Context,
    name: Name,
    ids: Annotated[list[str], typer.Argument(help="Ids of rows, as search gives them.", metavar="ID...")],
    json: JsonFlag = False,
) -> None:
    """Show stored rows by their ids. Prints whole texts, metadata and chunks."""
    with opened(loaded_for(ctx)) as service, _refusals():
        found = service.browse.rows(name, ids, principal=OPERATOR)
        missing = len(set(ids)) - len(found)
        if missing:
            how = _how_ids_look(service, name)
            output.say(f"{missing} of the ids {'is' if missing == 1 else 'are'} not in {name}; {how}")
    records = [row.as_dict() for row in found]
    if json:
        output.write_json(records)
        return
    shown = [record | {"chunks": len(record["chunks"])} for record in records]
    output.table(name, shown, ("key", "text", "metadata", "chunks"), records=records)


def _options(mode: str | None, min_score: float | None, mmr_lambda: float | None, passages: int, explain: bool) -> Any:
    from app.src.service.search import MODES, SearchOptions

    chosen = next((known for known in MODES if known == mode), None)
    if mode is not None and chosen is None:
        raise UsageFault(f"--mode {mode}: there is {_MODES}")
    try:
        return SearchOptions(chosen, min_score, mmr_lambda, passages=passages, explain=explain)
    except ValueError as error:
        raise UsageFault(str(error)) from None


def _parsed_filter(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageFault(f'--filter is not JSON, such as \'{{"MTART": "FERT"}}\': {error}') from None
    if not isinstance(parsed, dict):
        raise UsageFault('--filter must be a JSON object, for example \'{"MTART": "FERT"}\'')
    return parsed
