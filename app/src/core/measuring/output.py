"""Show the report as tables."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .report import Report
from .sustained import Range, Sustained

FOLDED = 24  # columns of a sentence on a narrow terminal
PLAIN_WIDTH = 240  # columns of plain text, enough to fold nothing


def show(report: Report, console: Console) -> None:
    narrow = console.width
    for part in _parts(report):
        console.width = max(narrow, _least_width(part)) if isinstance(part, Table) else narrow
        console.print(part, soft_wrap=isinstance(part, Text), crop=False)
    console.width = narrow


def as_text(report: Report) -> str:
    """Return the report as plain text, one row per line."""
    out = io.StringIO()
    show(report, Console(file=out, width=PLAIN_WIDTH, color_system=None, highlight=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _parts(report: Report) -> Iterator[RenderableType]:
    device = report.device
    capability = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    yield Text(f"{device['name']} ({device['kind']}{capability}), torch {device['torch']}{driver}", style="bold")
    if device["kind"] == "cpu":
        yield Text("measured on the CPU: no GPU is used")
    if profile := _profile(device):
        yield Text(profile)
    yield Text()
    yield _settings(report)
    yield Text()
    yield _products(report)
    if report.sustained:
        yield Text()
        yield _sustained(report)
    yield Text()
    yield _embedding(report)
    if report.trace:
        yield Text()
        yield _trace(report)
    yield Text()
    for ratio in report.ratios:
        yield Text(ratio.text, style="bold" if ratio.name.endswith("over fp32") else "")


def _profile(device: dict[str, Any]) -> str:
    """Describe the device in one line."""
    known = [
        f"{device['memory_bytes'] / 2**30:.1f} GiB" if device.get("memory_bytes") else None,
        f"{device['bandwidth_gb_per_s']:g} GB/s" if device.get("bandwidth_gb_per_s") else None,
        f"{device['multiprocessors']} multiprocessors" if device.get("multiprocessors") else None,
        " ".join(device.get("instructions") or ()) or None,
        f"{device['threads']} threads" if device["kind"] == "cpu" and device.get("threads") else None,
    ]
    peaks = ", ".join(f"{name} {rate:g}" for name, rate in (device.get("peak_tflops") or {}).items())
    known.append(f"peaks in TFLOP/s (int8: TOPS): {peaks}" if peaks else None)
    return "; ".join(each for each in known if each)


def _table(*columns: str, text: tuple[str, ...] = ()) -> Table:
    """Make a table; the first column and those in `text` are left-aligned."""
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        left = number == 0 or column in text
        folds = column in ("reason", "kernel")
        table.add_column(
            column, justify="left" if left else "right", no_wrap=not folds, overflow="fold" if folds else "ellipsis"
        )
    return table


def _least_width(table: Table) -> int:
    """Return the least width that cuts no figure; a narrower terminal wraps the lines."""
    widths = [
        max(map(cell_len, (str(column.header), *map(str, column.cells)))) if column.no_wrap else FOLDED
        for column in table.columns
    ]
    return sum(width + 2 for width in widths)


def _settings(report: Report) -> Table:
    table = _table("setting", "value", "reason", text=("value", "reason"))
    for each in report.settings:
        table.add_row(each.name, _shown(each.value), each.reason)
    return table


def _products(report: Report) -> Table:
    kernels = any(row.kernel for row in report.matmul)
    columns = ["product", "of", "m x n x k", "aligned", "TFLOP/s", "spread", "peak", "error"]
    table = _table(*columns, *(["tensor cores", "kernel"] if kernels else []), text=("of", "kernel"))
    for row in report.matmul:
        name = row.dtype + (" tensor cores" if row.tensor_cores else "")
        cells = [name, row.role, f"{row.m} x {row.n} x {row.k}", "yes" if row.aligned else "no"]
        cells += [_shown(row.tflops, ".3f"), _shown(row.spread, ".0%"), _shown(row.share_of_peak, ".0%")]
        cells.append(_shown(row.relative_error, ".1e"))
        if kernels:
            cells += [{True: "ran", False: "not used", None: "-"}[row.kernel_on_tensor_cores], row.kernel or "-"]
        table.add_row(*cells)
    return table


def _sustained(report: Report) -> Table:
    table = _table(
        *("sustained", "m x n x k", "seconds", "burst TFLOP/s", "TFLOP/s", "kept", "peak"),
        *("MHz", "W", "°C", "clocks held back by"),
        text=("clocks held back by",),
    )
    for row in report.sustained:
        table.add_row(
            row.dtype,
            f"{row.m} x {row.n} x {row.k}",
            f"{row.seconds:.1f}",
            f"{row.burst_tflops:.3f}",
            f"{row.tflops:.3f}",
            f"{row.kept:.0%}",
            _shown(row.share_of_peak, ".0%"),
            *_conditions(row),
        )
    return table


def _conditions(row: Sustained) -> list[str]:
    seen = row.conditions
    held = seen.throttle_reasons
    reasons = ", ".join(f"{name} {share:.0%}" for name, share in held.items()) if held else seen.reason or "-"
    return [_between(seen.sm_clock_mhz), _between(seen.power_watts), _between(seen.temperature_celsius), reasons]


def _between(found: Range | None) -> str:
    return "-" if found is None else f"{found.least:.0f}..{found.most:.0f}"


def _embedding(report: Report) -> Table:
    table = _table("embedding", "tokens a text", "texts/s", "tokens/s", "linear TFLOP/s", "of products", "path")
    for row in report.embedding:
        length = str(row.tokens) if row.lengths == "equal" else f"{row.shortest}..{row.longest}"
        rates = [f"{row.texts_per_second:.1f}", f"{row.tokens_per_second:.0f}"]
        shares = [_shown(row.linear_tflops, ".3f"), _shown(row.share_of_products, ".0%")]
        table.add_row(row.precision, length, *rates, *shares, row.path or "-")
    return table


def _trace(report: Report) -> Table:
    table = _table("trace", "calls", "host ms", "device ms")
    for each in report.trace.ranges if report.trace else ():
        table.add_row(each.name, str(each.calls), f"{each.host_milliseconds:.2f}", _shown(each.device_milliseconds))
    return table


def _shown(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form) if form else str(value)


class NotWritable(ValueError):
    """The file cannot be written here; the message says why."""


def check_writable(flag: str, file: Path) -> None:
    """Check that a file can be written, without changing or creating it. Raises NotWritable."""
    if not file.parent.is_dir():
        raise NotWritable(f"{flag} {file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise NotWritable(f"{flag} {file} is a folder; name a file")
    there = file.exists()
    try:
        file.open("ab").close()
        if not there:
            file.resolve().unlink()
    except OSError as error:
        raise NotWritable(f"{flag} {file}: cannot be written: {error.strerror}") from None
