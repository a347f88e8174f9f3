"""The verb `demo`: run the demonstration step by step and show the result of each step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from app.src.cli import output
from app.src.cli.application import JsonFlag, app, read_settings, verb
from app.src.cli.exits import FAILED, OK
from app.src.cli.interrupts import Interrupted, interruptible, orderly
from app.src.cli.output import watched
from app.src.settings import Settings

if TYPE_CHECKING:
    from app.src.demo import Answer, Demo


@verb(app, "demo")
def demo(
    serve_: Annotated[bool, typer.Option("--serve", help="Keep the REST service up afterwards.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for --serve; 0 picks a free one.")] = None,
    json: JsonFlag = False,
) -> int:
    """Try everything on an emulator with sample data. Sync, search and verify; needs no HANA, GPU or account."""
    settings = read_settings({("api", "port"): port}).settings
    return run_demo(settings, serve=serve_, json=json)


_SYNC_COLUMNS = ("collection", "read", "upserted", "empty", "quarantined", "tokens", "seconds", "rows_per_second")
_VERIFY_COLUMNS = ("collection", "rows", "missing", "stale", "orphaned", "duplicates", "bad_vectors", "ok")

NEXT = """\
Next, the same with the console in your browser:  ./scripts/demo --serve
Next, your own tables:                            . .venv/bin/activate && owl-sap init"""


def run_demo(settings: Settings, *, serve: bool, json: bool) -> int:
    """Run all steps; return 1 when a search missed or a collection does not verify."""
    from app.src.demo import Demo

    output.choose(output.Layout.TABLE)  # a report for people, in a pipe too
    start = time.perf_counter()
    prepared = Demo(settings)
    output.say("Starting the HANA emulator and loading the sample tables ...")
    with orderly(), prepared as demo:
        output.say(f"The emulator listens on {demo.place}; SAP's driver hdbcli connects to it.")
        with interruptible() as interrupted:
            shown = DemoReport(demo, json)
            shown.sync(interrupted)
        if interrupted.code is not None:
            return interrupted.code
        shown.search()
        shown.verify()
        shown.summary(time.perf_counter() - start)
        if json:
            output.write_json(shown.document)
        if serve:
            _serve(demo, settings, json)
        elif not json:
            output.say(NEXT)
    return OK if shown.good else FAILED


def _serve(demo: Demo, settings: Settings, json: bool) -> None:
    from app.src.api import server

    def announce(url: str) -> None:
        if json:
            output.write_json({"url": url})
        output.say(served(url, settings) + " Ctrl-C ends it.")

    server.serve(demo.service, settings.api.host, settings.api.port, announce)


def served(url: str, settings: Settings) -> str:
    """Return the addresses to open, one per line."""
    api = settings.api
    console = f"Console: {url}/\n" if api.console else ""
    manual = f"documentation: {url}/docs, " if api.docs else ""
    return f"{console}REST: {url} ({manual}health: {url}/health/ready)."


class DemoReport:
    """The results so far, and whether all are as expected."""

    def __init__(self, demo: Demo, json: bool) -> None:
        self._demo = demo
        self._json = json
        self.good = True
        self.document: dict[str, Any] = {"sync": [], "searches": [], "verify": []}

    def _table(self, title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
        if not self._json:
            output.table(title, rows, columns)

    def sync(self, interrupted: Interrupted) -> None:
        reports = self.document["sync"]
        for name in self._demo.names:
            if interrupted():
                break
            with watched(name) as observer:
                reports.append(self._demo.service.sync.run(name, None, observer, interrupted).as_dict())
        self._table("Synced", reports, _SYNC_COLUMNS)
        self.good &= not any(report["paused"] for report in reports)

    def search(self) -> None:
        for query in self._demo.queries:
            answer = self._demo.ask(query)
            self.document["searches"].append(answer.as_dict())
            self.good &= answer.found
            if not self._json:
                _show_answer(answer)

    def verify(self) -> None:
        reports = self.document["verify"]
        for name in self._demo.names:
            reports.append(self._demo.service.sync.verify(name).as_dict())
        self._table("Verified", reports, _VERIFY_COLUMNS)
        self.good &= all(report["ok"] for report in reports)

    def summary(self, seconds: float) -> None:
        from app.src.demo import TOP

        engine = self._demo.service.parts.engine
        found = sum(search["found"] for search in self.document["searches"])
        total = len(self.document["searches"])
        self.document |= {
            "model": engine.model,
            "weights_sha256": engine.weights_sha256,
            "seconds": round(seconds, 1),
            "ok": self.good,
        }
        output.say(f"Model {engine.model}, SHA-256 of its weights {engine.weights_sha256}")
        output.say(f"{found} of {total} searches found the expected row in the top {TOP}; {seconds:.1f} s in all.")


def _show_answer(answer: Answer) -> None:
    console = output.console()
    console.print(
        f"\n[bold]{escape(answer.query.text)}[/]  [dim]{answer.query.collection}, {answer.milliseconds} ms[/]"
    )
    for hit in answer.hits:
        mark = "[green]*[/]" if answer.expected(hit) else " "
        key = " ".join(str(part) for part in hit.key.values())
        console.print(f" {mark} {hit.score:.3f}  {escape(key):<30} {escape(output.shorten(hit.text, 80))}")
    if not answer.found:
        console.print("   [red]the expected row is not among them[/]")
