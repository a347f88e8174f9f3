"""`python -m app.src.core.t4_gpu_optimizer`: describe the device, and measure matrix products and the embedding model.

Without a GPU it measures the CPU. This module has the command and the names of the guides; `measuring/` does the work.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from .backends import EngineError
from .device import DeviceError, DeviceProfile, Setting, detect, settings_of
from .measuring.embedding import Embedding
from .measuring.output import NotWritable, check_writable
from .measuring.products import Matmul, Shape, check_readable
from .measuring.report import MODEL, Plan, Ratio, Report, as_json, describe, make_report, why_not_embedded
from .memory import T4MemoryManager
from .t4_config import T4GPUConfig

__all__ = [
    "DeviceProfile",
    "Embedding",
    "Matmul",
    "Plan",
    "Ratio",
    "Report",
    "Setting",
    "Shape",
    "T4GPUConfig",
    "T4MemoryManager",
    "T4TensorRTOptimizer",  # noqa: F822  (by __getattr__)
    "describe",
    "get_gpu_info",
    "main",
    "make_report",
    "settings_of",
]

LONGEST_RUN = 3600.0


def __getattr__(name: str) -> object:
    """Import `T4TensorRTOptimizer` on access, because measuring needs no ONNX."""
    if name == "T4TensorRTOptimizer":
        return importlib.import_module("app.src.core.onnx_export.optimizer").T4TensorRTOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_gpu_info(device: str = "auto") -> dict[str, object]:
    """Return a JSON description of the device without measuring. Raises DeviceError."""
    return describe(detect(device))


class _Parser(argparse.ArgumentParser):
    """Report a wrong flag in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m app.src.core.t4_gpu_optimizer",
        description="Measures what this device's matrix products and the embedding model reach. Without a GPU: CPU.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--sizes", type=_sizes, default=None, help="edges of square products, such as 512,1024")
    parser.add_argument(
        "--duration",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="of each sustained run (default: 30 on a card, 1 on a CPU); the table of products takes at most as long",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--model", default=None, help=f"whose layers are multiplied and texts embedded ({MODEL})")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write a torch profiler trace of one call, such as trace.json"
    )
    given = parser.parse_args(arguments)
    try:
        if given.profile is not None:
            check_writable("--profile", given.profile)
        if given.model is not None:
            check_readable(given.model)
    except (NotWritable, EngineError) as error:
        parser.error(str(error))
    return given


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(32 <= size <= 32_768 for size in sizes):
        raise argparse.ArgumentTypeError("sizes are numbers from 32 to 32768, separated by commas")
    return sizes


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_RUN:
        raise argparse.ArgumentTypeError(f"seconds are a number above 0, at most {LONGEST_RUN:.0f}")
    return seconds


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def _show(report: Report) -> None:
    from rich.console import Console

    from .measuring.output import as_text, show

    if sys.stdout.isatty():
        show(report, Console(highlight=False))
    else:
        _write(sys.stdout, as_text(report))


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    plan = Plan(given.sizes, given.duration, given.device, given.model or MODEL, given.profile)
    try:
        report = make_report(plan, lambda line: _write(sys.stderr, line))
    except (DeviceError, OSError) as error:
        _write(sys.stderr, str(error))
        return 2
    if given.json:
        _write(sys.stdout, json.dumps(as_json(report), indent=2))
    else:
        _show(report)
    if given.model is not None and not report.embedding:
        _write(sys.stderr, f"--model {given.model}: {why_not_embedded(report)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
