"""The command line of the benchmark programs, their report as lines and JSON, and targets."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from app.src.benchmark.harness import Figure, PeerUnavailable, Report, Target
from app.src.benchmark.peers import Kind, PeerProcess


def at_least(goal: float) -> Target:
    return ">=", goal


def at_most(goal: float) -> Target:
    return "<=", goal


def line(figure: Figure) -> str:
    """Return a figure as one line."""
    if figure.error is not None:
        return f"{figure.name}: failed: {figure.error}"
    target = ""
    if figure.target is not None:
        target = f" ({figure.target[0]} {figure.target[1]:g}: {figure.verdict or 'not judged'})"
    disturbed = "; DISTURBED: ignore, the rounds scatter because other work was running" if figure.disturbed else ""
    rounds = ", ".join(f"{one:.4g}" for one in figure.rounds)
    return f"{figure.name}: {figure.median:.4g} {figure.unit}{target}; rounds {rounds}{disturbed}"


def write(report: Report, file: Path) -> None:
    """Write or replace the file as a whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(report.as_dict(), indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(file)


def available(names: Sequence[str], kind: Kind, report: Report) -> list[str]:
    """Return the peers that can run; name the others in the report's notes."""
    found = []
    for name in names:
        try:
            PeerProcess(name, kind)
            found.append(name)
        except PeerUnavailable as error:
            report.notes.append(f"left out: {error}")
    return found


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process (Linux) in bytes, by default of this one."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# Takes options and report, and yields figures one by one. It may add notes and versions to the report.
Part = Callable[[argparse.Namespace, Report], Iterable[Figure]]


def main(
    name: str,
    description: str,
    parts: Mapping[str, Part],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    arguments: Sequence[str] | None = None,
) -> Report:
    """Run the parts named on the command line (default: all), print the figures, and write JSON to --out.

    Every program accepts [PART ...] --rounds N --out FILE; `add_options` adds more. Each figure is printed and written
    as soon as it is measured, so an aborted run keeps its figures.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    add_options(parser)
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; parts: {', '.join(parts)}")
    # Keep paths out of committed results.
    chosen = {key: value for key, value in vars(given).items() if key not in ("parts", "out")}
    report = Report(name, options={key: value for key, value in chosen.items() if not isinstance(value, Path)})
    part = ""
    try:
        for part in given.parts or parts:
            for figure in parts[part](given, report):
                report.figures.append(figure)
                sys.stdout.write(line(figure) + "\n")
                if given.out:
                    write(report, given.out)
    except BaseException as error:
        report.notes.append(f"incomplete: {part} ended with {type(error).__name__}: {error}")
        raise
    finally:
        sys.stdout.writelines(f"{line}\n" for line in (*report.notes, f"machine: {report.machine}"))
        if given.out:
            write(report, given.out)
    return report
