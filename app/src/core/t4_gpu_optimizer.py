"""`python -m app.src.core.t4_gpu_optimizer`: describe the device, and measure matrix products and the embedding model.

Without a GPU it measures the CPU. This module has the command and the names of the guides; `measuring` does the work.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from .backends import EngineError
from .backends.hashing import PREFIX as HASHING
from .device import DeviceError, DeviceProfile, Setting, detect, settings_of
from .measuring import MODEL, Row, describe, make_report, model_shape
from .memory import T4MemoryManager

__all__ = [
    "DeviceProfile",
    "Setting",
    "T4GPUConfig",  # noqa: F822  (by __getattr__)
    "T4MemoryManager",
    "T4TensorRTOptimizer",  # noqa: F822
    "describe",
    "get_gpu_info",
    "main",
    "make_report",
    "settings_of",
]

LONGEST_RUN = 3600.0


def __getattr__(name: str) -> object:
    """Import the guides' calibration on access, because measuring needs no ONNX."""
    if name in ("T4GPUConfig", "T4TensorRTOptimizer"):
        return getattr(importlib.import_module("app.src.core.onnx_export.optimizer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_gpu_info(device: str = "auto") -> dict[str, object]:
    """Return a JSON description of the device without measuring. Raises DeviceError."""
    return describe(detect(device))


class _Parser(argparse.ArgumentParser):
    """Report a wrong flag in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


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


def _model(text: str) -> str:
    if not text.startswith(HASHING):
        try:
            model_shape(text)
        except EngineError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


# Section of the report -> its columns for people.
COLUMNS: Mapping[str, str] = {
    "settings": "name value reason",
    "matmul": "dtype role m n k aligned tensor_cores tflops spread share_of_peak relative_error",
    "sustained": "dtype m n k seconds burst_tflops tflops kept share_of_peak conditions",
    "embedding": "precision tokens texts_per_second tokens_per_second path",
}


def as_text(report: Row) -> str:
    """Return the report as tables, one row per line."""

    def shown(value: Any) -> str:
        if isinstance(value, dict):  # the conditions of a sustained run
            held = value["throttle_reasons"] or {}
            return ", ".join(f"{name} {share:.0%}" for name, share in held.items()) or value["reason"] or "nothing"
        if isinstance(value, float):
            return f"{value:.4g}"
        return "-" if value is None else str(value)

    def lines() -> Iterator[str]:
        device = report["device"]
        capability = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
        yield f"{device['name']} ({device['kind']}{capability}), torch {device['torch']}"
        if device["kind"] == "cpu":
            yield "measured on the CPU: no GPU is used"
        for section, names in COLUMNS.items():
            rows = [[shown(row.get(name)) for name in names.split()] for row in report[section]]
            if rows:
                table = [names.split(), *rows]
                widths = [max(map(len, column)) for column in zip(*table, strict=True)]
                yield ""
                for cells in table:
                    yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        yield ""
        yield from (ratio["text"] for ratio in report["ratios"])

    return "\n".join(lines())


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def main(arguments: Sequence[str] | None = None) -> int:
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
    parser.add_argument("--model", type=_model, default=None, help=f"the model to measure ({MODEL})")
    given = parser.parse_args(arguments)
    try:
        report = make_report(
            *(given.device, given.model or MODEL, given.sizes, given.duration),
            tell=lambda line: _write(sys.stderr, line),
        )
    except DeviceError as error:
        _write(sys.stderr, str(error))
        return 2
    _write(sys.stdout, json.dumps(report, indent=2) if given.json else as_text(report))
    if given.model is not None and not report["embedding"]:
        missing = {each["name"]: each["reason"] for each in report["settings"] if each["value"] is None}
        chosen = next(each["value"] for each in report["settings"] if each["name"] == "precision")
        names = (f"embedding {chosen}", *(name for name in missing if name.startswith("embedding ")))
        reason = next((missing[name] for name in names if name in missing), "no precision could be measured here")
        _write(sys.stderr, f"--model {given.model}: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
