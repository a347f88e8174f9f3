"""Output of the verbs: data on stdout (a JSON document, a table, or JSON lines in a pipe), the rest on stderr."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from connector.protocols import Observer

_PIPED_WIDTH = 140
# Control characters except tab and line feed, and characters that change the writing direction.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
Record = Mapping[str, Any]
Layout = Literal["auto", "table", "lines"]  # how data is printed without --json


class Invocation:
    """The global options of this process."""

    config: Path | None = None
    layout: Layout = "auto"
    debug = False


def for_people(*, stderr: bool = False) -> bool:
    """Return whether to print tables and bars: as --output says, else only on a terminal."""
    if Invocation.layout == "auto" or (stderr and Invocation.layout == "lines"):
        return (sys.stderr if stderr else sys.stdout).isatty()
    return Invocation.layout == "table"


def console(*, stderr: bool = False) -> Console:
    """Return a console with the terminal's width, or a fixed width elsewhere."""
    from rich.console import Console  # here and below: JSON needs no rich, which takes 40 ms to import

    width = None if (sys.stderr if stderr else sys.stdout).isatty() else _PIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, soft_wrap=stderr)


def say(text: str) -> None:
    """Print a message on stderr."""
    console(stderr=True).print(literal(text))


def fail(text: str) -> None:
    console(stderr=True).print(f"[red bold]owl-sap:[/] {literal(text)}")


def literal(text: str) -> str:
    r"""Escape markup, and show control characters and direction overrides, which a row may hold, as \x1b."""
    from rich.markup import escape

    return escape(_ORDERS.sub(lambda found: ascii(found.group())[1:-1], text))


def write_json(*documents: Any) -> None:
    """Write JSON documents to stdout, one a line, each completely or not at all. Decimals, dates and paths become
    text."""
    for document in documents:
        sys.stdout.buffer.write(orjson.dumps(document, default=str, option=_OPTIONS))
    sys.stdout.buffer.flush()


def line_on_stderr(record: Record) -> None:
    """Write one JSON object as a line on stderr, for programs that read the progress."""
    sys.stderr.write(orjson.dumps(record, default=str, option=_OPTIONS).decode())
    sys.stderr.flush()


def finish() -> None:
    """Flush stdout, and discard what a full disk or closed pipe cannot take: at exit, Python would retry, print an
    error and use its own exit code."""
    if sys.stdout is None:  # stdout was closed before the start
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def data(
    document: Any,
    title: str,
    columns: Sequence[str] | None = None,
    *,
    json: bool,
    rows: Sequence[Record] | None = None,
    whole: bool = True,
) -> None:
    """Print the result of a verb: `document` with --json, its records as JSON lines in a pipe, else a table.
    `document`: a record or a list of records. `rows`: the same records, formatted for people. `whole`: if the
    terminal is too narrow for every value on one line, print each row as its own table; otherwise fold long texts."""
    records = [document] if isinstance(document, Mapping) else document
    if json:
        write_json(document)
    elif not records:
        say(f"{title}: nothing")
    elif not for_people():
        write_json(*records)
    else:
        table(title, records if rows is None else rows, columns, whole=whole)


def table(title: str, rows: Sequence[Record], columns: Sequence[str] | None = None, *, whole: bool = True) -> None:
    """Print rows under headings, with numbers right-aligned. Values are never parsed as markup."""
    from rich.table import Table

    screen, names = console(), list(columns or rows[0])
    drawn = Table(title=literal(title), title_justify="left", title_style="bold", header_style="bold")
    for name in names:
        numeric = all(isinstance(row.get(name), int | float) or row.get(name) is None for row in rows)
        drawn.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(literal(shown(row.get(name))) for name in names))
    unlimited = screen.options.update(width=10_000)
    if not whole or screen.measure(drawn, options=unlimited).maximum <= screen.width:
        screen.print(drawn)
        return
    for row in rows:
        fields(title, row, names)


def fields(title: str, row: Record, names: Sequence[str] | None = None) -> None:
    """Print one record, a line for each field."""
    lines = [{"": name.replace("_", " "), " ": shown(row.get(name))} for name in names or row]
    table(title, lines, ("", " "), whole=False)


def notes(name: str, texts: Iterable[str]) -> None:
    for text in texts:
        say(f"{name}: {text}")


def shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return f"{value:,.3f}" if isinstance(value, float) and abs(value) < 100 else f"{value:,.0f}"
        case dict():
            return ", ".join(f"{name}={shown(item)}" for name, item in value.items())
        case list() | tuple():
            return ", ".join(map(shown, value))
        case _:
            return str(value)


def lost_rows(gone: int, blank: int) -> str:
    """Say how many stored rows left the source, and how many became blank."""
    if not gone:
        return f"{blank} stored rows became blank"
    return f"{gone} stored rows are no longer in the source" + (f" and {blank} became blank" if blank else "")


def shorten(text: str, length: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 1] + "…"


def minute(moment: str | None) -> str | None:
    """Shorten an ISO time in UTC to whole seconds, for people."""
    return None if moment is None else moment[:19].replace("T", " ") + "Z"


_PROGRESS_SECONDS = 5.0


class _Watch:
    """A `connector.protocols.Observer` that shows progress: as a bar, or as a line every few seconds."""

    def __init__(self, collection: str, unit: str, bars: Progress | None = None) -> None:
        self._collection, self._unit, self._bars = collection, unit, bars
        if bars is not None:
            bars.add_task(collection, total=None, rate="-")
        self._start, self._next = time.monotonic(), 0.0

    def event(self, name: str) -> None:
        return

    def progress(self, done: int, total: int) -> None:
        """Show the rows read so far; the last rows of a sync are embedded and written later. If the total is unknown
        (watermark), `total` is the number read so far."""
        now = time.monotonic()
        rate = done / max(now - self._start, 1e-3)
        rate = round(rate) if rate >= 10 else round(rate, 1)
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=done, total=total, rate=f"{rate:,}")
        elif now >= self._next:  # at the first row, then every few seconds
            self._next = now + _PROGRESS_SECONDS
            if for_people(stderr=True):  # with --output table also in a file
                say(f"{self._collection}: {done:,} of {total:,} {self._unit}, {rate:,} {self._unit}/s")
            else:
                figures = {"done": done, "total": total, f"{self._unit}_per_second": rate}
                line_on_stderr({"collection": self._collection, **figures})


@contextmanager
def watched(collection: str, unit: str = "rows") -> Iterator[Observer]:
    """Yield an observer that shows the collection's progress until the block ends. `unit`: the counted things."""
    if not sys.stderr.isatty():
        yield _Watch(collection, unit)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn(f"{{task.fields[rate]}} {unit}/s")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        yield _Watch(collection, unit, bars)
