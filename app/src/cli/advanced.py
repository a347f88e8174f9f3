"""Rarely used verbs: finetune, calibrate and benchmark."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, opened, read_settings, subcommands, verb
from app.src.cli.exits import FAILED, OK, UsageFault
from app.src.cli.interrupts import interruptible
from app.src.cli.output import Invocation, watched

if TYPE_CHECKING:
    from app.src.benchmark.harness import Report as BenchmarkReport

_STEP_SECONDS = 5.0  # seconds between progress lines
_STOPPING = b"stopping with a checkpoint after this step; Ctrl-C again stops at once, without a checkpoint\n"


@verb(app, "finetune")
def finetune(  # noqa: PLR0913 - a verb has as many parameters as options
    name: Name,
    pairs: Annotated[Path | None, typer.Option(help='Lines of {"query", "text"} or {"anchor", "positive"}.')] = None,
    columns: Annotated[tuple[str, str] | None, typer.Option(help="TITLE LONGTEXT; mind SAP's licence.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the new model; default: NAME-1, -2 ...")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, max=100, help="Passes over all pairs; default: 1.")] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="16|32", help="Pairs a step; default: 16.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=1e-8, max=1, help="Highest; default: 0.00002.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of split and order; default: 7.")] = None,
    max_pairs: Annotated[int | None, typer.Option(min=1, help="Read no more pairs; default: 100000.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished training.")] = False,
    generation: Annotated[bool, typer.Option(help="Build a generation with it, beside the active one.")] = True,
    json: JsonFlag = False,
) -> int:
    """Fine-tune the embedding model on pairs of texts. Measures it before and after; exit 1 when it finds less."""
    from app.src.core.finetune.recipe import TrainingObserver
    from connector.model import ModelSource

    if batch_size not in (None, 16, 32):
        raise UsageFault(f"--batch-size {batch_size}: 16 or 32")
    options = {
        "file": pairs and str(pairs.absolute()),
        "columns": columns and list(columns),
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "most_pairs": max_pairs,
    }
    given = {option: value for option, value in options.items() if value is not None}
    shown_at = 0.0

    def step(done: int, steps: int, loss: float | None) -> None:
        """Show progress every few seconds: sentences on a terminal, JSON lines elsewhere."""
        nonlocal shown_at
        if time.monotonic() - shown_at < _STEP_SECONDS and done < steps:
            return
        shown_at = time.monotonic()
        if output.for_people(stderr=True):
            output.say(f"step {done} of {steps}" + ("" if loss is None else f", loss {loss:.4f}"))
        else:
            output.line_on_stderr({"collection": name, "step": done, "steps": steps, "loss": loss})

    with opened() as service, interruptible(_STOPPING) as interrupted:
        training = TrainingObserver(output.say, step, interrupted)
        report = service.tuning.finetune(name, given, out, training, resume=resume)
        whole = not report.stopped
        if generation and whole and not report.worse and service.collections.stored(name) is not None:
            from app.src.service.sync import SyncRequest

            precision = service.settings.embedding.precision
            source = ModelSource(str(report.folder), None, report.weights_sha256, precision)
            with watched(name) as observer:  # builds a generation beside the active one
                built = service.sync.build(name, SyncRequest(owner="finetune"), observer, interrupted, source)
            report.generation, whole = built.generation, not built.stopped
            output.notes(name, built.notes)
        model = service.settings.embedding_of(name).model
    before, after = report.before, report.after
    if json or (before is not None and after is not None):
        figures = ("recall_at_10", "mrr", "queries", "texts")
        rows = [{"": each, "before": (before or {}).get(each), "after": (after or {}).get(each)} for each in figures]
        output.data(asdict(report), f"{name}: {report.folder}", ("", "before", "after"), json=json, rows=rows)
    if report.stopped:
        resume_ = f"owl-sap finetune {name} --resume" + ("" if out is None else f" --out {out}")
        output.say(f"stopped on request; continue with: {resume_}" if report.unfinished else "stopped before training")
    elif report.worse:
        output.say(f"{name}: the trained model in {report.folder} finds less than {model}: it is not proposed")
    else:
        output.say(
            f'{name}: to use it, write  model = "{report.folder}"  into its [[collections]] block, then run '
            f"owl-sap sync {name}; compare and switch with owl-sap generations {name} --compare, --switch"
        )
    if interrupted.code is not None and not whole:
        return interrupted.code
    return FAILED if report.worse else OK


_GATE_FIGURES = ("mean_cosine", "worst_cosine", "overlap")
_CALIBRATION_COLUMNS = ("accepted", "calibrated_on", "judged_on", *_GATE_FIGURES)


@verb(app, "calibrate")
def calibrate(
    name: Name,
    texts: Annotated[int, typer.Option(min=128, max=20_000, help="To calibrate on; a quarter more judges.")] = 1000,
    json: JsonFlag = False,
) -> int:
    """Calibrate the model for INT8 on texts of a collection. Checks its accuracy; exit 1 when it is too low."""
    with opened() as service:
        output.say(f"{name}: calibrating on about {texts} texts, which takes a minute or two on two cores")
        found = service.tuning.calibrate(name, texts)
    verdict = found["verdict"]
    figures = {key: None if verdict[key] is None else round(verdict[key], 4) for key in _GATE_FIGURES}
    shown = {**found, "judged_on": verdict["texts"], **figures}
    outcome = "accepted" if found["accepted"] else "REFUSED"
    output.data(found, f"{name}: INT8 {outcome}", _CALIBRATION_COLUMNS, json=json, rows=[shown])
    if not json:
        stays = "" if found["accepted"] else "; the engine computes as before"
        output.say(f"{name}: {found['reason']}{stays}")
    output.notes(name, found["notes"])
    return OK if found["accepted"] else FAILED


benchmark_app = subcommands("benchmark", "Measure this machine and model against other engines, interleaved.")

_FIGURE_COLUMNS = ("figure", "median", "unit", "rounds", "disturbed")
_BESIDE = ("name", "median", "unit", "rounds", "disturbed", "target", "verdict")


def _check_model(model: str) -> None:
    from app.src.service.wiring import check_computed_here

    check_computed_here(model, "measure")


Against = Annotated[list[str] | None, typer.Option(help="Another engine, or a worker's file; repeatable.")]
Rounds = Annotated[int, typer.Option(min=1, max=1000, help="More rounds give steadier figures and take longer.")]
Peers = Annotated[Path | None, typer.Option(help="Folder of the peers; default: .owl-sap/peers")]


@verb(benchmark_app, "embed")
def benchmark_embed(
    against: Against = None,
    rounds: Rounds = 5,
    scale: Annotated[float, typer.Option(min=0.01, max=100, help="Size of the workloads.")] = 0.5,
    peers: Peers = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes; runs no other engine.")] = False,
    json: JsonFlag = False,
) -> None:
    """Compare embedding with other engines. Measures speed and agreement of the vectors against sentence-transformers,
    infinity, onnx, onnx-int8 or openvino, on short texts and on texts of very different lengths."""
    from app.src.benchmark import embed as benchmark
    from app.src.benchmark.peers import DEFAULT_FOLDER
    from connector.processors import processors

    if profile and against:
        raise UsageFault("--profile runs no other engine: leave out --against")
    chosen, folder = against or ["sentence-transformers"], peers or DEFAULT_FOLDER
    embedding = read_settings().settings.embedding
    _check_model(embedding.model)
    with opened(read_settings({("embedding", "threads"): embedding.threads or processors()})) as service:
        output.say(f"loading {embedding.model}")
        engine, embedding = service.parts.engine, service.settings.embedding
        if profile:
            from app.src.benchmark import profile as profiles

            threads = embedding.threads or processors()
            report = profiles.measure(engine, output.say, rounds=rounds, scale=scale, threads=threads)
            for load, parts in report.details.items() if not json else ():
                output.data(parts, f"{load} texts in {engine.precision}", profiles.COLUMNS, json=False, whole=False)
        else:
            report = benchmark.measure(engine, embedding, chosen, output.say, rounds=rounds, scale=scale, folder=folder)
    _print_benchmark(report, json)


@verb(benchmark_app, "search")
def benchmark_search(
    against: Against = None,
    rounds: Rounds = 5,
    rows: Annotated[int, typer.Option(min=100, max=10_000_000, help="Vectors to search among.")] = 100_000,
    peers: Peers = None,
    json: JsonFlag = False,
) -> None:
    """Compare the local store's exact search with other libraries. Measures numpy, sqlite-vec, usearch, lancedb or
    faiss with one thread per query."""
    from app.src.benchmark import search as benchmark
    from app.src.benchmark.peers import DEFAULT_FOLDER

    read_settings()
    folder = peers or DEFAULT_FOLDER
    report = benchmark.measure(against or ["numpy"], output.say, rounds=rounds, rows=rows, folder=folder)
    _print_benchmark(report, json)


@verb(benchmark_app, "sync")
def benchmark_sync(
    against: Annotated[Literal["engine"], typer.Option(help="Compared with: the engine alone.")] = "engine",
    rounds: Rounds = 3,
    rows: Annotated[int, typer.Option(min=1, max=10_000_000, help="Rows of the generated table.")] = 2_000,
    json: JsonFlag = False,
) -> None:
    """Compare a first sync with embedding alone. Reads generated rows from the emulator into a local store."""
    from app.src.benchmark import sync as benchmark

    _check_model(read_settings().settings.embedding.model)
    with opened() as service:
        output.say(f"loading {service.settings.embedding.model}")
        report = benchmark.measure(service.parts.embedder, service.settings.sync, rounds, rows, output.say)
    _print_benchmark(report, json)


@verb(benchmark_app, "serve")
def benchmark_serve(
    url: Annotated[str | None, typer.Option(help="A running service; default: one is started.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Another server with POST /v1/embeddings, under the same load.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name there.")] = None,
    rounds: Rounds = 3,
    seconds: Annotated[float, typer.Option(min=0.05, max=600, help="Seconds of load in one round.")] = 1.5,
    json: JsonFlag = False,
) -> None:
    """Put the REST service under load. Measures requests per second and latency with one client and with eight."""
    from app.src.benchmark import serve as benchmark

    settings = read_settings().settings
    if url is None:
        _check_model(settings.embedding.model)
    report = benchmark.measure(
        Invocation.config, output.say, url=url, against=against, model=model, rounds=rounds, seconds=seconds
    )
    _print_benchmark(report, json)


@verb(benchmark_app, "peers")
def benchmark_peers(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Default: all.")] = None,
    peers: Peers = None,
) -> None:
    """Create the environments of engines to compare with, from the package index. Keeps those that are there."""
    from app.src.benchmark import peers as environments

    place = peers or environments.DEFAULT_FOLDER
    for name in environments.chosen(names or ()):
        if not environments.is_made(name, place):
            environments.make(name, place, output.say)


def _print_benchmark(report: BenchmarkReport, json: bool) -> None:
    document = report.as_dict()
    if json:
        output.write_json(document)
        return
    figures = document["figures"]
    rows = [figure | {"figure": figure["name"]} for figure in figures]
    output.data(figures, f"Benchmark: {report.benchmark}", _FIGURE_COLUMNS, json=False, rows=rows, whole=False)
    for figure in figures:
        kept = {name.replace("_", " "): value for name, value in figure.items() if name not in _BESIDE}
        output.say(f"{figure['name']}: {output.shown(kept)}")
    for note in report.notes:
        output.say(note)
    about = report.machine
    output.say(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}; with --json versions and options")
    if report.disturbed:
        output.say("DISTURBED: other load made the rounds scatter, so the figure is not valid")
