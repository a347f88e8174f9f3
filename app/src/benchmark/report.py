"""What came of a benchmark: its figures with machine and versions, as a table on the screen and as JSON. `main` is all
that a program under benchmarks/ needs around what it measures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.src.benchmark.machine import load_average, machine
from app.src.benchmark.side_by_side import Figure

_WIDTH = 140


@dataclass(slots=True)
class Report:
    """Grows while figures are taken. `machine`: as `machine.machine()` says; `options`: with what it was run."""

    benchmark: str
    machine: dict[str, Any] = field(default_factory=machine)
    options: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)
    """By name: its versions and what it says of itself."""
    details: dict[str, Any] = field(default_factory=dict)
    """What figures were made of, or what is to be read beside them."""
    load_before: float = field(default_factory=load_average)

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.verdict not in (None, "met")]

    @property
    def failed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.error is not None]

    @property
    def disturbed(self) -> bool:
        return any(figure.disturbed for figure in self.figures)

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "machine": self.machine | {"load_average": [self.load_before, load_average()]},
            "options": self.options,
            "peers": self.peers,
            "figures": [figure.as_dict() for figure in self.figures],
            "notes": self.notes,
            **({"details": self.details} if self.details else {}),
        }

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.as_dict(), indent=2, default=str) + "\n", encoding="utf-8")

    def show(self, console: Console) -> None:
        """The figures as a table, then what is to be known of them."""
        console.print(self._table())
        about = self.machine
        versions = ", ".join(f"{name} {about[name]}" for name in ("python", "numpy", "torch") if name in about)
        console.print(escape(f"{about['cpu']}, {about['cores']} cores; {versions}; commit {about['commit'] or 'none'}"))
        for note in self.notes:
            console.print(escape(note))
        if self.disturbed:
            console.print("DISTURBED: where rounds scatter something else was running; those figures say nothing")

    def _table(self) -> Table:
        drawn = Table(title=escape(self.benchmark), title_justify="left", title_style="bold", header_style="bold")
        for name in ("figure", "median", "target", "", "rounds"):
            drawn.add_column(name, justify="right" if name == "median" else "left", overflow="fold")
        for figure in self.figures:
            marks = [figure.verdict or "", "DISTURBED" if figure.disturbed else ""]
            rounds = ", ".join(_short(one) for one in figure.rounds) if figure.error is None else figure.error
            target = "" if figure.target is None else str(figure.target)
            median = "" if figure.error is not None else f"{_short(figure.median)} {figure.unit}"
            drawn.add_row(*map(escape, (figure.name, median, target, " ".join(filter(None, marks)), rounds)))
        return drawn


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


Part = Callable[[argparse.Namespace, Report], Iterable[Figure]]
"""Measures something as the command line says and yields its figures as they are had. What belongs to the whole run,
such as versions of its own or notes, it adds to the report."""


def main(
    name: str,
    description: str,
    parts: Mapping[str, Part],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    arguments: Sequence[str] | None = None,
) -> Report:
    """Run the parts that the command line names, all by default; print the table, and write JSON where --out says.

    Every program gets [PART ...] --rounds N --out FILE; `add_options` may add to them. A figure is printed, and
    written, as soon as it is there: whatever ends the program later leaves it.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    add_options(parser)
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    console = Console(highlight=False, emoji=False)
    console = console if console.is_terminal else Console(width=_WIDTH, highlight=False, emoji=False)
    said = {key: value for key, value in vars(given).items() if key not in ("parts", "out")}
    options = {
        key: value for key, value in said.items() if not isinstance(value, Path)
    }  # folders are nobody's business
    report = Report(name, options=options)
    part = ""
    try:
        for part in given.parts or parts:
            for figure in parts[part](given, report):
                report.figures.append(figure)
                found = figure.error or f"{_short(figure.median)} {figure.unit}"
                console.print(escape(f"{figure.name}: {found}"))
                if given.out:
                    report.write(given.out)
    except BaseException as error:
        report.notes.append(f"not whole: {part} ended with {type(error).__name__}: {error}")
        raise
    finally:
        report.show(console)
        if given.out:
            report.write(given.out)
    return report
