"""Progress on stderr, of rows or queries: a bar on a terminal, a JSON line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from app.src.cli.output import console, for_people, line_on_stderr, say

_EVERY = 5.0


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
        """Below ten with one digit: "0 a second" would say that nothing moves."""
        rate = done / max(time.monotonic() - self._start, 1e-3)
        return round(rate) if rate >= 10 else round(rate, 1)


class _Quiet:
    """Stages and events are not shown here; metrics and the report have them."""

    def stage(self, name: str, seconds: float, items: int) -> None:
        return

    def event(self, name: str, **fields: str | int | float) -> None:
        return


class _Bar(_Quiet):
    """Rows count as they are read: when all are, the last ones of a sync are still to be embedded and written. Where
    nobody knows how many there are, by a watermark, the total is what was read so far and grows."""

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
        self._next = time.monotonic() + _EVERY
        self._show(done, total, self._rate(done))

    def _show(self, done: int, total: int, rate: float) -> None:
        line_on_stderr({"collection": self._collection, "done": done, "total": total, f"{self._unit}_per_second": rate})


class _Sentences(_Lines):
    """For people who read it in a file: --output table."""

    def _show(self, done: int, total: int, rate: float) -> None:
        say(f"{self._collection}: {done:,} of {total:,} {self._unit}, {rate:,} {self._unit}/s")
