"""`owl-sap benchmark`: what this machine does with this model, as ratios to other engines measured in turns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.src.cli import output
from app.src.cli.application import Invocation, JsonFlag, loaded_for, opened, subcommands, verb
from app.src.cli.exits import FAILED, OK, UsageFault

if TYPE_CHECKING:
    from app.src.benchmark.harness import Report

benchmark_app = subcommands("benchmark", "Figures of this machine and model, measured beside other engines in turns.")

_COLUMNS = ("figure", "median", "unit", "rounds", "disturbed")
_BESIDE = ("name", "median", "unit", "rounds", "disturbed", "disturbed_rounds", "target", "floor", "verdict")
_ENGINE = "engine"

Against = Annotated[
    list[str] | None,
    typer.Option("--against", metavar="PEER", help="Another engine, or the file of a worker of your own; repeatable."),
]
Rounds = Annotated[int, typer.Option(min=1, max=1000, help="More of them tell more, and take longer.")]
Peers = Annotated[
    Path | None, typer.Option("--peers", metavar="FOLDER", help="Of the peers' environments; default: .owl-sap/peers")
]


@verb(benchmark_app, "embed")
def embed(
    ctx: typer.Context,
    against: Against = None,
    rounds: Rounds = 5,
    scale: Annotated[float, typer.Option(min=0.01, max=100, help="Size of the workloads.")] = 0.5,
    peers: Peers = None,
    json: JsonFlag = False,
) -> int:
    """Compare embedding with other engines. Measures speed and agreement of the vectors against sentence-transformers,
    infinity, onnx, onnx-int8 or openvino, on short texts and on texts of very different lengths."""
    from app.src.benchmark import embed as benchmark
    from app.src.benchmark.peers import DEFAULT_FOLDER

    chosen = tuple(against or ["sentence-transformers"])
    options = benchmark.EmbedOptions(chosen, rounds, scale, peers or DEFAULT_FOLDER)
    loaded = loaded_for(ctx)
    benchmark.check(loaded.settings.embedding, options)
    threads = benchmark.threads_of(loaded.settings.embedding)
    with opened(loaded_for(ctx, {("embedding", "threads"): threads})) as service:
        output.say(f"loading {loaded.settings.embedding.model}")
        report = benchmark.measure(service.engine, service.settings.embedding, options, output.say)
    return _print(report, json)


@verb(benchmark_app, "search")
def search(
    ctx: typer.Context,
    against: Against = None,
    rounds: Rounds = 5,
    rows: Annotated[int, typer.Option(min=100, max=10_000_000, help="Vectors to search among.")] = 100_000,
    peers: Peers = None,
    json: JsonFlag = False,
) -> int:
    """Compare the local store's exact search with other libraries. Measures numpy, sqlite-vec, usearch, lancedb or
    faiss with one thread per query."""
    from app.src.benchmark import search as benchmark
    from app.src.benchmark.peers import DEFAULT_FOLDER

    loaded_for(ctx)
    chosen = tuple(against or ["numpy"])
    options = benchmark.SearchOptions(chosen, rounds, rows, folder=peers or DEFAULT_FOLDER)
    return _print(benchmark.measure(options, output.say), json)


@verb(benchmark_app, "sync")
def sync(
    ctx: typer.Context,
    against: Annotated[
        str, typer.Option(help="What a sync is compared with: engine, the same texts embedded.")
    ] = _ENGINE,
    rounds: Rounds = 3,
    rows: Annotated[int, typer.Option(min=1, max=10_000_000, help="Rows of the generated table.")] = 2_000,
    json: JsonFlag = False,
) -> int:
    """Compare a first sync with embedding alone. Reads generated rows from the emulator into a local store."""
    from app.src.benchmark import sync as benchmark

    if against != _ENGINE:
        raise UsageFault(f"--against {against}: a sync is compared with the engine alone; there is: {_ENGINE}")
    with opened(loaded_for(ctx)) as service:
        output.say(f"loading {service.settings.embedding.model}")
        options = benchmark.SyncBenchmark(rounds, rows)
        report = benchmark.measure(service.embedder, service.settings.sync, options, output.say)
    return _print(report, json)


@verb(benchmark_app, "serve")
def serve(  # noqa: PLR0913 - a verb has as many parameters as options
    ctx: typer.Context,
    url: Annotated[str | None, typer.Option(help="A service that runs; default: one is started for this.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Another server with POST /v1/embeddings, under the same load.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The name of the model there.")] = None,
    rounds: Rounds = 3,
    seconds: Annotated[float, typer.Option(min=0.05, max=600, help="Of load in one round.")] = 1.5,
    json: JsonFlag = False,
) -> int:
    """Put the REST service under load. Measures requests per second and latency with one client and with eight."""
    from app.src.benchmark import serve as benchmark

    loaded_for(ctx)
    invocation: Invocation = ctx.obj
    options = benchmark.ServeBenchmark(url, against, model, rounds, seconds)
    return _print(benchmark.measure(options, invocation.config, output.say), json)


@verb(benchmark_app, "peers")
def peers(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Default: all.")] = None,
    make: Annotated[bool, typer.Option("--make", help="Make those environments that are not there.")] = False,
    folder: Peers = None,
    json: JsonFlag = False,
) -> int:
    """List the engines to compare with and create their others. Exit 1 when one could not be created."""
    from app.src.benchmark import peers as others

    place = folder or others.DEFAULT_FOLDER
    chosen = others.chosen(names or ())
    code = OK
    for name in chosen if make else ():
        try:
            if not others.is_made(name, place):
                others.make(name, place, output.say)
        except others.PeerUnavailable as error:
            output.fail(str(error))
            code = FAILED
    rows = [
        {
            "environment": name,
            "peers": [peer.name for peer in others.PEERS.values() if peer.environment == name],
            "made": others.is_made(name, place),
            "packages": others.packages(name),
        }
        for name in chosen
    ]
    if json:
        output.write_json(rows)
    else:
        output.table(f"Peers in {place}", rows)
    return code


def _print(report: Report, json: bool) -> int:
    """Exit 1 where something that was compared with failed; the other figures stand."""
    document = report.as_dict()
    code = FAILED if report.failed else OK
    if json:
        output.write_json(document)
        return code
    rows = [figure | {"figure": figure["name"]} for figure in document["figures"]]
    output.table(f"Benchmark: {report.benchmark}", rows, _COLUMNS, records=document["figures"])
    for figure in document["figures"]:
        output.say(f"{figure['name']}: {_details(figure)}")
    for note in report.notes:
        output.say(note)
    about = report.machine
    output.say(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}; with --json versions and options")
    if report.disturbed:
        output.say("DISTURBED: where the rounds scatter something else was running, and the figure says nothing")
    return code


def _details(figure: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in figure.items() if name not in _BESIDE}
    return ", ".join(f"{name.replace('_', ' ')} {output.shown(value)}" for name, value in kept.items())
