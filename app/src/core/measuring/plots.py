"""The report as a drawing: rates by precision against the card's peak, the course of the sustained runs, tokens per
second by length. matplotlib comes with the extra `benchmark` and is imported when something is drawn.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from connector.extras import install_command

from ..device import PRECISIONS
from .report import Report
from .shapes import SQUARE

SUFFIXES = (".png", ".svg")


class NotDrawable(ValueError):
    """Nothing can be drawn into this file here; the message says what to do."""


def check_drawable(file: Path) -> None:
    """Before minutes of measuring. Raises NotDrawable."""
    if file.suffix.lower() not in SUFFIXES:
        raise NotDrawable(f"--plot {file}: the name must end in {' or '.join(SUFFIXES)}")
    check_writable("--plot", file)
    if importlib.util.find_spec("matplotlib") is None:
        raise NotDrawable(f"--plot needs matplotlib: {install_command('benchmark')}")


def check_writable(flag: str, file: Path) -> None:
    """Leaves what is there as it is, and nothing where nothing was. Raises NotDrawable."""
    if not file.parent.is_dir():
        raise NotDrawable(f"{flag} {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise NotDrawable(f"{flag} {file}: that is a folder; give the name of a file")
    there = file.exists()
    try:
        file.open("ab").close()
        if not there:
            file.resolve().unlink()
    except OSError as error:
        raise NotDrawable(f"{flag} {file}: cannot be written: {error.strerror}") from None


def draw(report: Report, file: Path) -> None:
    """Raises OSError when the file cannot be written."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 12), layout="constrained")
    rates, course, embedding = picture.subplots(3, 1)
    device = report.device
    picture.suptitle(f"{device['name']} ({device['kind']}), torch {device['torch']}")
    _rates(rates, report)
    _course(course, report)
    _embedding(embedding, report)
    picture.savefig(file, dpi=130)


def _rates(axes: Any, report: Report) -> None:
    """A group of bars for each shape; a dash where the data sheet's peak is."""
    shapes = list(dict.fromkeys((row.role, row.m, row.n, row.k) for row in report.matmul if row.tflops))
    found = {(row.dtype, row.role, row.m, row.n, row.k): row.tflops for row in report.matmul if row.tflops}
    present = [each for each in PRECISIONS if any(key[0] == each for key in found)]
    width = 0.8 / max(1, len(present))
    peaks = device_peaks(report)
    for number, precision in enumerate(present):
        places = [place + number * width for place in range(len(shapes))]
        heights = [found.get((precision, *shape), 0.0) for shape in shapes]
        bars = axes.bar(places, heights, width, label=precision)
        if precision in peaks:
            axes.hlines(peaks[precision], -0.2, len(shapes), colors=bars[0].get_facecolor(), linestyles="dashed")
    labels = [f"{m} x {n} x {k}" + ("" if role == SQUARE else f"\n{role}") for role, m, n, k in shapes]
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(shapes))], labels, fontsize=7)
    axes.set_ylabel("TFLOP/s (int8: TOPS)")
    axes.set_title("matrix products" + (", dashed: the data sheet's peak" if peaks else ""))
    if present:
        axes.legend()


def device_peaks(report: Report) -> dict[str, float]:
    return dict(report.device.get("peak_tflops") or {})


def _course(axes: Any, report: Report) -> None:
    for row in report.sustained:
        axes.plot([point.seconds for point in row.course], [point.tflops for point in row.course], label=row.dtype)
    clocked = [(row, [point for point in row.course if point.sm_clock_mhz]) for row in report.sustained]
    if any(points for _, points in clocked):
        beside = axes.twinx()
        beside.set_ylabel("MHz")
        for row, points in clocked:
            clocks = [point.sm_clock_mhz for point in points]
            beside.plot([point.seconds for point in points], clocks, linestyle="dotted", label=f"{row.dtype}, clock")
        beside.legend(loc="lower right")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("one product without pause")
    if report.sustained:
        axes.legend(loc="lower left")


def _embedding(axes: Any, report: Report) -> None:
    for precision in PRECISIONS:
        rows = [row for row in report.embedding if row.precision == precision]
        labels = [f"{row.tokens}" if row.lengths == "equal" else f"{row.shortest} to {row.longest}" for row in rows]
        if rows:
            axes.plot(labels, [row.tokens_per_second for row in rows], marker="o", label=precision)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens a text")
    axes.set_ylabel("tokens/s")
    axes.set_title(f"embedding, {report.model}")
    if report.embedding:
        axes.legend()
