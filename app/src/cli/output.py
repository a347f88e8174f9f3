"""What the verbs print: data on stdout (one JSON document, a table, or JSON lines in a pipe), all else on stderr."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import orjson
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

_PIPED_WIDTH = 140
# Control characters but tab and line feed, and those that turn the direction of writing around.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class Layout(Enum):
    """How data is laid out where no --json asks for one document."""

    AUTO = "auto"
    TABLE = "table"
    LINES = "lines"


class _Chosen:
    """The layout of this process's stdout."""

    layout = Layout.AUTO


def choose(layout: Layout) -> None:
    _Chosen.layout = layout


def for_people(*, stderr: bool = False) -> bool:
    """Return whether to print tables and bars: as chosen, else only on a terminal."""
    if _Chosen.layout is Layout.AUTO or (stderr and _Chosen.layout is Layout.LINES):
        return (sys.stderr if stderr else sys.stdout).isatty()
    return _Chosen.layout is Layout.TABLE


def console(*, stderr: bool = False) -> Console:
    """Return a console with the terminal's width, or a fixed width elsewhere."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, soft_wrap=stderr)


def say(text: str) -> None:
    """Print a message on stderr."""
    console(stderr=True).print(_literal(text))


def page(text: str) -> None:
    """Print a text on stdout."""
    console().print(_literal(text))


def fail(text: str) -> None:
    console(stderr=True).print(f"[red bold]owl-sap:[/] {_literal(text)}")


def _literal(text: str) -> str:
    """Escape markup and control characters: a row may hold terminal escape sequences, or characters that reverse the
    direction of writing. They are shown as \\x1b."""
    return escape(_ORDERS.sub(lambda found: ascii(found.group())[1:-1], text))


def write_json(document: Any) -> None:
    """One JSON document on stdout, whole or not at all. Decimals, dates and paths are written as text."""
    sys.stdout.buffer.write(orjson.dumps(document, default=str, option=_OPTIONS))
    sys.stdout.buffer.flush()


def finish() -> None:
    """Flush stdout at the end. Python would retry a full disk or closed pipe, complain, and exit with its own code."""
    if sys.stdout is None:  # closed before the start
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_lines(records: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object per line on stdout."""
    for record in records:
        sys.stdout.buffer.write(orjson.dumps(record, default=str, option=_OPTIONS))
    sys.stdout.buffer.flush()


def line_on_stderr(record: Mapping[str, Any]) -> None:
    """One JSON object on a line of stderr: progress, for programs."""
    sys.stderr.write(orjson.dumps(record, default=str, option=_OPTIONS).decode())
    sys.stderr.flush()


def table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | None = None,
    *,
    records: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Rows under headings; numbers to the right; what a value holds is never read as markup. Long texts are folded.

    Where stdout is not a terminal, JSON lines instead, with every key and not only `columns`. `records` are what the
    lines hold, where `rows` were made for people: the elements of the verb's --json.
    """
    if not rows:
        say(f"{title}: nothing")
        return
    if not for_people():
        write_lines(rows if records is None else records)
        return
    console().print(_drawn(title, rows, list(columns or rows[0])))


def counts(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    *,
    records: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """A table of many short values. Where the terminal is too narrow for its columns they become lines, with as many
    rows beside each other as there is room for. JSON lines as `table` writes them."""
    screen = console()
    if not rows or not for_people() or _fits(screen, _drawn(title, rows, columns)):
        table(title, rows, columns, records=records)
        return
    names = [name for name in columns if name != "collection"]
    side_by_side = len(rows)
    while side_by_side > 1 and not _fits(screen, _turned(title, rows[:side_by_side], names)):
        side_by_side -= 1
    for start in range(0, len(rows), side_by_side):
        screen.print(_turned(title, rows[start : start + side_by_side], names))


def _fits(screen: Console, drawn: Table) -> bool:
    """Return whether every value fits on one line."""
    unlimited = screen.options.update(width=10_000)
    return screen.measure(drawn, options=unlimited).maximum <= screen.width


def _drawn(title: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    drawn = _empty(title)
    for name in names:
        numeric = all(isinstance(row.get(name), int | float) or row.get(name) is None for row in rows)
        drawn.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(_literal(shown(row.get(name))) for name in names))
    return drawn


def _turned(title: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    drawn = _empty(title)
    drawn.add_column("")
    for row in rows:
        drawn.add_column(_literal(shown(row.get("collection", ""))), justify="right", overflow="fold")
    for name in names:
        drawn.add_row(name.replace("_", " "), *(_literal(shown(row.get(name))) for row in rows))
    return drawn


def _empty(title: str) -> Table:
    return Table(title=_literal(title), title_justify="left", title_style="bold", header_style="bold")


def shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
        case dict():
            return ", ".join(f"{name}={shown(item)}" for name, item in value.items())
        case list() | tuple():
            return ", ".join(shown(item) for item in value)
        case _:
            return str(value)


def shorten(text: str, length: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 1] + "…"


_PROGRESS_SECONDS = 5.0


class ProgressObserver(Protocol):
    """`connector.model.Observer`, as far as progress needs it."""

    def stage(self, name: str, seconds: float, items: int) -> None: ...

    def progress(self, done: int, total: int) -> None: ...

    def event(self, name: str, **fields: str | int | float) -> None: ...


@contextmanager
def watched(collection: str, unit: str = "rows") -> Iterator[ProgressObserver]:
    """An observer that shows how far the collection is, until the block is left. `unit`: what is counted."""
    if not sys.stderr.isatty():
        yield _Sentences(collection, unit) if for_people(stderr=True) else _Lines(collection, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{{task.fields[rate]}} {unit}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        yield _Bar(bars, bars.add_task(collection, total=None, rate="-"), collection)


class _Rate:
    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, done: int) -> float:
        """Return the rate, with a decimal below ten."""
        rate = done / max(time.monotonic() - self._start, 1e-3)
        return round(rate) if rate >= 10 else round(rate, 1)


class _Quiet:
    """Stages and events are not shown here; metrics and the report have them."""

    def stage(self, name: str, seconds: float, items: int) -> None:
        return

    def event(self, name: str, **fields: str | int | float) -> None:
        return


class _Bar(_Quiet):
    """Counts rows as they are read; the last rows of a sync are embedded and written after that. Where the total is
    unknown (watermark), it is the number read so far and grows."""

    def __init__(self, bars: Progress, task: TaskID, collection: str) -> None:
        self._bars = bars
        self._task = task
        self._collection = collection
        self._rate = _Rate()
        self._total: int | None = None
        self._grows = False

    def progress(self, done: int, total: int) -> None:
        self._grows = self._grows or (self._total is not None and total > self._total)
        self._total = total
        told = self._collection if done < total or self._grows else f"{self._collection}: finishing"
        self._bars.update(self._task, completed=done, total=total, rate=f"{self._rate(done):,}", description=told)


class _Lines(_Quiet):
    """For programs: one JSON object at the first row, then every few seconds."""

    def __init__(self, collection: str, unit: str) -> None:
        self._collection = collection
        self._unit = unit
        self._rate = _Rate()
        self._next = 0.0

    def progress(self, done: int, total: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PROGRESS_SECONDS
        self._show(done, total, self._rate(done))

    def _show(self, done: int, total: int, rate: float) -> None:
        line_on_stderr({"collection": self._collection, "done": done, "total": total, f"{self._unit}_per_second": rate})


class _Sentences(_Lines):
    """For people who read it in a file: --output table."""

    def _show(self, done: int, total: int, rate: float) -> None:
        say(f"{self._collection}: {done:,} of {total:,} {self._unit}, {rate:,} {self._unit}/s")
