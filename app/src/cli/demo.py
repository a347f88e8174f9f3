"""The verb `demo`, which shows the result of each step, and `emulator`, which starts the HANA emulator."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from app.src.cli import output
from app.src.cli.application import JsonFlag, app, verb
from app.src.cli.exits import FAILED, OK
from app.src.cli.interrupts import interruptible, orderly
from app.src.cli.output import watched
from app.src.cli.scale import ActorsFlag, ScaleFlag, read_scaled
from connector.extras import emulator_command

if TYPE_CHECKING:
    from app.src.settings import Settings

_SYNC_COLUMNS = ("collection", "read", "upserted", "empty", "quarantined", "tokens", "seconds", "rows_per_second")
_VERIFY_COLUMNS = ("collection", "rows", "missing", "stale", "orphaned", "duplicates", "bad_vectors", "ok")

NEXT = """\
Next, the same with the console in your browser:  ./scripts/demo --serve
Next, your own tables:                            . .venv/bin/activate && owl-sap init"""


@verb(app, "demo")
def demo(
    serve_: Annotated[bool, typer.Option("--serve", help="Keep the REST service up afterwards.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for --serve; 0 picks a free one.")] = None,
    scale: ScaleFlag = None,
    actors: ActorsFlag = None,
    json: JsonFlag = False,
) -> int:
    """Try everything on an emulator with sample data. Sync, search and verify; needs no HANA, GPU or account."""
    from app.src.api import server
    from app.src.demo import TOP, Demo

    output.Invocation.layout = "table"  # a report for people, even in a pipe
    start = time.perf_counter()
    settings = read_scaled(scale, actors, {("api", "port"): port}, serving=serve_).settings
    prepared = Demo(settings, scaled=True)
    output.say("Starting the HANA emulator and loading the sample tables ...")
    with orderly(), prepared as demo:
        output.say(f"The emulator listens on {demo.place}; SAP's driver hdbcli connects to it.")
        synced = []
        with interruptible() as interrupted:
            for name in demo.names:
                with watched(name) as observer:
                    synced.append(demo.service.sync.run(name, None, observer, interrupted).as_dict())
        if interrupted.code is not None:
            return interrupted.code
        show = output.table if not json else lambda *_: None
        show("Synced", synced, _SYNC_COLUMNS)
        searches, console = [demo.ask(query) for query in demo.queries], output.console()
        for answer in () if json else searches:
            place = f"{answer['collection']}, {answer['milliseconds']} ms"
            console.print(f"\n[bold]{escape(answer['query'])}[/]  [dim]{place}[/]")
            for hit in answer["hits"]:
                mark = "[green]*[/]" if hit["expected"] else " "
                key = " ".join(str(part) for part in hit["key"].values())
                text = escape(output.shorten(hit["text"], 80))
                console.print(f" {mark} {hit['score']:.3f}  {escape(key):<30} {text}")
            if not answer["found"]:
                console.print("   [red]the expected row is not among them[/]")
        verified = [demo.service.sync.verify(name).as_dict() for name in demo.names]
        show("Verified", verified, _VERIFY_COLUMNS)
        engines = [demo.service.parts.embedder_for(name).engine for name in demo.names]
        models = {engine.model: engine.weights_sha256 for engine in engines}
        seconds = time.perf_counter() - start
        found = sum(search["found"] for search in searches)
        paused, ok = any(report["paused"] for report in synced), all(report["ok"] for report in verified)
        good = found == len(searches) and ok and not paused
        for model, weights in models.items():
            output.say(f"Model {model}, SHA-256 of its weights {weights}")
        output.say(f"{found} of {len(searches)} searches found the expected row in the top {TOP}; {seconds:.1f} s")
        if json:
            named = [{"model": model, "weights_sha256": weights} for model, weights in models.items()]
            done = {"models": named, **named[0], "seconds": round(seconds, 1), "ok": good}
            output.write_json({"sync": synced, "searches": searches, "verify": verified, **done})
        if serve_:

            def announce(url: str) -> None:
                if json:
                    output.write_json({"url": url})
                output.say(served(url, settings) + " Ctrl-C ends it.")

            server.serve(demo.service, settings.api.host, settings.api.port, announce)
        elif not json:
            output.say(NEXT)
    return OK if good else FAILED


def served(url: str, settings: Settings) -> str:
    """Return the addresses to open, one per line."""
    api = settings.api
    console = f"Console: {url}/\n" if api.console else ""
    manual = f"documentation: {url}/docs, " if api.docs else ""
    return f"{console}REST: {url} ({manual}health: {url}/health/ready)."


@verb(app, "emulator", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def emulator(ctx: typer.Context) -> None:
    """Run the HANA emulator in the foreground. The first line on stdout says how to connect. Takes the options of
    `hana-emulator --help`: --port, --data, --schema, --sample, --tls, --fault and others."""
    sys.stdout.flush()
    # Replace this process instead of starting a child: a SIGTERM must reach the emulator itself.
    os.execv(sys.executable, [*emulator_command(), *ctx.args])  # nosec B606 # this Python, no shell
