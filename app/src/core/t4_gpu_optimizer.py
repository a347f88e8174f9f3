"""`python -m app.src.core.t4_gpu_optimizer`: describe the device, and measure matrix products and the embedding model.

Without a GPU it measures the CPU. Every figure is measured in this run, or null with a reason in the settings.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .backends import EngineError
from .backends.folder import display_name, find_folder, read_folder
from .backends.hashing import PREFIX as HASHING
from .device import PRECISIONS, DeviceProfile, DeviceUnavailable, Precision, Setting, detect, settings_of
from .loading import EngineOptions, load_engine
from .memory import CPU_TOKENS, ModelShape, T4MemoryManager
from .nvml import snapshot

__all__ = [
    "T4GPUConfig",  # noqa: F822  (by __getattr__)
    "T4MemoryManager",
    "T4TensorRTOptimizer",  # noqa: F822
    "get_gpu_info",
    "main",
    "make_report",
]

Row = dict[str, Any]
Shape = tuple[str, int, int, int]  # role, and the edges m, n, k of a product (m, k) x (k, n)

MODEL = "all-MiniLM-L6-v2"  # the default model to measure
SECONDS = {"cpu": 4.0, "cuda": 8.0}  # for the table of products

# ------------------------------------------------------------------------------------------------------ matrix products

CARD_TOKENS = 16_384  # rows of the layer's product on a card, enough to fill it; a CPU uses CPU_TOKENS
SQUARES = {"cpu": (512, 1024), "cuda": (1024, 4096, 8192)}
# Values per 16 bytes; aligned edges are multiples of it. NVIDIA, Matrix Multiplication Background guide.
MULTIPLES: Mapping[Precision, int] = {"fp32": 4, "tf32": 4, "fp16": 8, "bf16": 8, "int8": 16}
ERROR_ROWS = 64  # the relative error covers only the first rows, which saves fp64 work
# A precision that reaches less than this share of fp32's speed on a small probe is not measured further: it is emulated
# (fp16 on most CPUs), or has few units (fp16 on a P4).
SLOWEST = 0.5
PROBE: Shape = ("square", 256, 1536, 384)


def set_tf32(profile: DeviceProfile, on: bool) -> None:
    """Set torch's process-wide TF32 switch. Turn it off before loading an engine, which sets it itself."""
    if profile.tf32:
        import torch

        torch.set_float32_matmul_precision("high" if on else "highest")


def multiplied(profile: DeviceProfile, shape: Shape, precision: Precision, seconds: float) -> tuple[list[float], float]:
    """Multiply for about `seconds`; return sampled seconds per product, and the relative error. Raises RuntimeError or
    AttributeError if torch does not have the product.

    Values are random: zeros would need less power, and power limits the clocks. The right matrix is laid out (n, k)
    like a layer's weight: cuBLAS has no fast 8-bit product for the other layout. The error is against fp64 (Frobenius
    norm), including the rounding of inputs.
    """
    import torch
    from torch.utils.benchmark import Timer

    _, m, n, k = shape
    device, scale = profile.torch_name, 1.0
    generator = torch.Generator(device).manual_seed(7)
    left, weight = (torch.randn(rows, k, generator=generator, device=device) for rows in (m, n))
    exact = left[:ERROR_ROWS].double() @ weight.double().t()
    if precision == "int8":
        steps = [float(each.abs().max()) / 127 for each in (left, weight)]
        scale = math.prod(steps)
        left, weight = ((each / step).round().char() for each, step in zip((left, weight), steps, strict=True))
    else:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
        left, weight = left.to(dtype), weight.to(dtype)
    out = torch.empty(m, n, dtype=torch.int32 if precision == "int8" else left.dtype, device=device)
    given: Row = {"left": left, "right": weight.t(), "out": out}
    given["multiply"] = torch._int_mm if precision == "int8" else torch.mm
    timer = Timer("multiply(left, right, out=out)", globals=given, num_threads=torch.get_num_threads())
    set_tf32(profile, precision == "tf32")  # fp32 and tf32 are the same call
    with torch.cuda.device(profile.index) if profile.kind == "cuda" else contextlib.nullcontext():
        times = timer.blocked_autorange(min_run_time=seconds).times
    return times, float((out[:ERROR_ROWS].double() * scale - exact).norm() / exact.norm())


def unavailable(profile: DeviceProfile, precision: Precision) -> str | None:
    """Return why this precision is not measured here, or None. A small probe excludes slow precisions."""
    if precision == "fp32":
        return None
    if precision == "tf32" and not profile.tf32:
        where = f"compute capability {profile.dotted_capability}" if profile.capability else "a CPU"
        return f"not available: {where}; TF32 starts at compute capability 8.0"
    if precision == "bf16" and profile.kind == "cuda" and precision not in profile.tensor_cores:
        return "emulated below compute capability 8.0"
    try:
        own, fp32 = (min(multiplied(profile, PROBE, each, 0.01)[0]) for each in (precision, "fp32"))
    except (RuntimeError, AttributeError) as error:
        return f"torch refuses: {_first_line(error)}"
    return f"no gain here: {own / fp32:.1f} times slower than fp32 on a small product" if fp32 < own * SLOWEST else None


def measure_products(
    profile: DeviceProfile, sizes: Sequence[int] | None, model: ModelShape | None, seconds: float
) -> Iterator[Row | Setting]:
    """Measure squares and the model's widest layer in every precision, in about `seconds` plus warm-up. The largest
    square and the layer are also measured one smaller, which shows the effect of alignment. A product that cannot be
    measured gives a row of nulls and a setting with the reason."""
    *smaller, largest = sorted(set(sizes or SQUARES[profile.kind]))
    shapes: list[Shape] = [("square", edge, edge, edge) for edge in (*smaller, largest, largest - 1)]
    if model:
        tokens = CARD_TOKENS if profile.kind == "cuda" else CPU_TOKENS
        shapes += [("feed-forward", m, model.intermediate, model.hidden) for m in (tokens, tokens - 1)]
    reasons = {precision: unavailable(profile, precision) for precision in PRECISIONS}
    yield from (Setting(f"matmul {precision}", None, reason) for precision, reason in reasons.items() if reason)
    each = seconds / (len(shapes) * list(reasons.values()).count(None))
    for shape in shapes:
        role, *edges = shape
        for precision, reason in reasons.items():
            row: Row = {"dtype": precision, "role": role, **dict(zip("mnk", edges, strict=True))}
            # Tensor cores reach full speed if every edge is aligned.
            row["aligned"] = all(edge % MULTIPLES[precision] == 0 for edge in edges)
            row["tensor_cores"] = precision in profile.tensor_cores
            row |= dict.fromkeys(("tflops", "spread", "share_of_peak", "relative_error"))
            if reason is None:
                try:
                    times, row["relative_error"] = multiplied(profile, shape, precision, each)
                except RuntimeError as error:  # such as out of memory
                    name = f"matmul {precision} " + "x".join(map(str, edges))
                    yield Setting(name, None, f"torch refuses: {_first_line(error)}")
                else:
                    least, middle, most = np.percentile(times, (10, 50, 90)).tolist()
                    rate, peak = 2 * math.prod(edges) / middle / 1e12, profile.peaks.get(precision)
                    row["tflops"] = float(f"{rate:.4g}")  # fixed decimals would round slow rates to 0
                    row["spread"] = round((most - least) / middle, 4)
                    row["share_of_peak"] = float(f"{rate / peak:.4g}") if peak else None
            yield row


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


# ------------------------------------------------------------------------------------------------------------ embedding

TEXT_LENGTHS = (16, 64, 254)
WORDS = (
    *("pump", "motor", "valve", "seal", "oil", "filter", "pressure", "gear"),
    *("order", "late", "noise", "water", "steel", "plant", "repair", "engine"),
)
TEXTS_TOKENS = {"cpu": 3_000, "cuda": 600_000}  # tokens per measurement, if the run has at least a second


def measure_embedding(
    profile: DeviceProfile, model: str, precisions: Sequence[Precision], share: float = 1.0
) -> Iterator[Row | Setting]:
    """Measure texts and tokens per second, including tokenising, for each precision and text length. `tokens` is the
    length without special tokens and prompt, which the rates include. `share`: of TEXTS_TOKENS to embed."""
    for precision in precisions:
        set_tf32(profile, False)  # engines expect it off, and switch it on themselves
        try:
            with load_engine(EngineOptions(model=model, precision=precision, device=profile.torch_name)) as engine:
                yield Setting(f"embedding {precision}", engine.path, "how batches are computed in this precision")
                for length in sorted({min(length, engine.max_tokens) for length in TEXT_LENGTHS}):
                    count = max(4, int(TEXTS_TOKENS[engine.profile.kind] * share) // length)
                    # Distinct texts; each word is one token.
                    texts = [
                        " ".join(WORDS[(number >> (place % 8 * 4)) % 16] for place in range(length))
                        for number in range(count)
                    ]
                    engine.embed(texts[:8], "bulk")
                    before, took = engine.stats().tokens, []
                    for _ in range(2):
                        started = time.perf_counter()
                        engine.embed(texts, "bulk")
                        took.append(time.perf_counter() - started)
                    yield {
                        "precision": precision,
                        "tokens": length,
                        "texts_per_second": round(count / min(took), 1),
                        "tokens_per_second": round((engine.stats().tokens - before) / 2 / min(took), 1),
                    }
        except (EngineError, ImportError) as error:
            yield Setting(f"embedding {precision}", None, _first_line(error))


# ----------------------------------------------------------------------------------------------------------- the report


def __getattr__(name: str) -> object:
    """Import the guides' calibration classes on access, because measuring does not need ONNX."""
    if name in ("T4GPUConfig", "T4TensorRTOptimizer"):
        return getattr(importlib.import_module("app.src.core.onnx_export.optimizer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_gpu_info(device: str = "auto") -> Row:
    """Describe the device as JSON without measuring; unknown values are null. Raises DeviceUnavailable."""
    import torch

    profile = detect(device)
    return {
        "kind": profile.kind,
        "name": profile.name,
        "compute_capability": profile.dotted_capability,
        "memory_bytes": profile.memory_bytes or None,
        "bandwidth_gb_per_s": profile.bandwidth,
        "multiprocessors": profile.multiprocessors or None,
        "tensor_cores": sorted(profile.tensor_cores),
        "peak_tflops": dict(profile.peaks) or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "driver": snapshot().driver_version,
    }


def make_report(
    device: str = "auto", model: str = MODEL, sizes: Sequence[int] | None = None, seconds: float | None = None
) -> Row:
    """Measure everything. `sizes`: edges of square products; `seconds`: for the table of products. Raises
    DeviceUnavailable for a missing device."""
    import torch

    from .backends.torch.linears import bf16_gain

    profile = detect(device)
    settings = settings_of(profile, bf16_gain)
    matmul: list[Row] = []
    embedding: list[Row] = []

    def collect(found: Iterator[Row | Setting], rows: list[Row]) -> None:
        for each in found:
            settings.append(each) if isinstance(each, Setting) else rows.append(each)

    shape = None
    try:
        shape = model_shape(model)
    except EngineError as error:
        settings.append(Setting("matmul of the model", None, _first_line(error)))
    try:
        seconds = seconds or SECONDS[profile.kind]
        _say(f"measuring matrix products on {profile.name} ({profile.kind}), about {seconds:g} s")
        collect(measure_products(profile, sizes, shape, seconds), matmul)
        refused = {each.name for each in settings if each.value is None}
        measured = {row["dtype"] for row in matmul if row["tflops"] is not None}
        usable = [each for each in PRECISIONS if each in measured and f"embedding {each}" not in refused]
        if profile.kind == "cuda":
            torch.cuda.empty_cache()  # an engine plans its batches by the free memory that the driver reports
        _say(f"measuring the embedding model in {', '.join(usable)}")
        collect(measure_embedding(profile, model, usable, max(0.25, min(1.0, seconds))), embedding)
    finally:
        set_tf32(profile, False)
    return {
        "device": get_gpu_info(device),
        "settings": [asdict(each) for each in settings],
        "matmul": matmul,
        "embedding": embedding,
        "model": model,
    }


def model_shape(model: str) -> ModelShape:
    """Return the sizes of a model by name. Raises EngineError for an unknown model."""
    path = find_folder(model)
    return read_folder(path, display_name(model, path)).shape


def as_text(report: Row) -> str:
    """Return the report as tables, one row per line."""

    def shown(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)

    device = report["device"]
    used = "measured on the CPU: no GPU is used" if device["kind"] == "cpu" else device["compute_capability"]
    lines = [f"{device['name']} ({used}), torch {device['torch']}"]
    for section in ("settings", "matmul", "embedding"):
        if rows := report[section]:
            table = [list(rows[0]), *([shown(value) for value in row.values()] for row in rows)]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines.append("")
            for cells in table:
                padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
                lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------- the command


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if not all(32 <= size <= 32_768 for size in sizes):
        raise ValueError
    return sizes


def _seconds(text: str) -> float:
    if not 0 < float(text) <= 3600:
        raise ValueError
    return float(text)


def _model(text: str) -> str:
    try:
        if not text.startswith(HASHING):
            model_shape(text)
    except EngineError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m app.src.core.t4_gpu_optimizer",
        description="Measures the speed of matrix products and of the embedding model. Without a GPU: on the CPU.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--sizes", type=_sizes, help="edges of square products from 32 to 32768, such as 512,1024")
    parser.add_argument(
        "--duration",
        type=_seconds,
        metavar="SECONDS",
        help="for the table of products (default: 8 on a card, 4 on a CPU); a minute shows a card at its power limit",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--model", type=_model, help=f"the model to measure ({MODEL})")
    given = parser.parse_args(arguments)
    try:
        report = make_report(given.device, given.model or MODEL, given.sizes, given.duration)
    except DeviceUnavailable as error:
        _say(str(error))
        return 2
    sys.stdout.write((json.dumps(report, indent=2) if given.json else as_text(report)) + "\n")
    if given.model and not report["embedding"]:
        _say(f"--model {given.model}: not measured in any precision; see the reasons in the settings")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
