"""Measure embedding: texts and tokens per second, with tokenising, by precision and text length; trace one call.

The trace contains the engine's own ranges (tokenise, copy, forward, pool).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import ranges
from ..backends import EngineError
from ..device import PRECISIONS, DeviceError, DeviceProfile, Precision, Setting, choose_precision
from ..engine import EmbeddingEngine
from ..loading import EngineOptions, load_engine
from .clocks import figure, host_clock
from .products import SQUARE, Matmul, ModelProducts, first_line, set_tf32

TEXT_LENGTHS = (16, 64, 254)
SHORTEST, LONGEST = 16, 512  # tokens of texts of mixed length, limited by the model's maximum
WORDS = (
    *("pump", "motor", "valve", "seal", "oil", "filter", "pressure", "gear"),
    *("order", "late", "noise", "water", "steel", "plant", "repair", "engine"),
)
# Tokens of one embedding measurement, if at least a second is given.
TEXTS_TOKENS = {"cpu": 3_000, "cuda": 600_000}


@dataclass(frozen=True, slots=True)
class Embedding:
    """`tokens`: mean length of the texts without special tokens, which the rates include; `linear_tflops`: operations
    of the layers' products over the whole time; `share_of_products`: relative to the same products measured alone."""

    precision: Precision
    tokens: int
    texts_per_second: float
    tokens_per_second: float
    lengths: Literal["equal", "mixed"] = "equal"
    shortest: int | None = None
    longest: int | None = None
    texts: int | None = None
    path: str | None = None
    linear_tflops: float | None = None
    share_of_products: float | None = None


def measure_embedding(
    profile: DeviceProfile, model: str, precisions: Sequence[Precision], share: float = 1.0
) -> Iterator[Embedding | Setting]:
    """Measure equal lengths, then mixed ones, in each precision. `share`: of TEXTS_TOKENS."""
    for precision in precisions:
        set_tf32(profile, False)  # engines expect it off, and switch it on themselves
        try:
            options = EngineOptions(model=model, precision=precision, device=profile.torch_name)
            with load_engine(options) as engine:
                yield Setting(f"embedding {precision}", engine.path, "how batches are computed in this precision")
                tokens = int(TEXTS_TOKENS[engine.profile.kind] * share)
                for lengths in workloads(engine.max_tokens, tokens):
                    yield _embed(engine, precision, lengths)
        except (EngineError, ImportError) as error:
            yield Setting(f"embedding {precision}", None, first_line(error))


def workloads(most: int, tokens: int) -> list[list[int]]:
    """Return the text lengths of each measurement, about `tokens` in each: equal ones, then mixed ones."""
    equal = sorted({min(length, most) for length in TEXT_LENGTHS})
    found = [[length] * max(4, tokens // length) for length in equal]
    return [*found, mixed_lengths(min(SHORTEST, most), min(LONGEST, most), tokens)]


def mixed_lengths(shortest: int, longest: int, tokens: int) -> list[int]:
    """Return log-uniform lengths, always the same: most texts are short, like descriptions."""
    drawn = random.Random(11)
    found: list[int] = []
    while sum(found) < tokens or len(found) < 4:
        found.append(min(longest, round(shortest * (longest / shortest) ** drawn.random())))
    return found


def _embed(engine: EmbeddingEngine, precision: Precision, lengths: Sequence[int]) -> Embedding:
    texts = texts_of(lengths)
    engine.embed(texts[:8], "bulk")
    before = engine.stats().tokens
    seconds = min(host_clock(lambda: engine.embed(texts, "bulk")) for _ in range(2))
    computed = (engine.stats().tokens - before) / 2
    shortest, longest = min(lengths), max(lengths)
    return Embedding(
        precision,
        round(sum(lengths) / len(lengths)),
        round(len(texts) / seconds, 1),
        round(computed / seconds, 1),
        lengths="equal" if shortest == longest else "mixed",
        shortest=shortest,
        longest=longest,
        texts=len(texts),
        path=engine.path,
    )


def texts_of(lengths: Sequence[int]) -> list[str]:
    """Return distinct texts of the given lengths, in one-token words."""
    return [
        " ".join(WORDS[(number >> (place % 8 * 4)) % 16] for place in range(length))
        for number, length in enumerate(lengths)
    ]


def model_rate(products: Sequence[Matmul], model: ModelProducts, precision: Precision) -> float | None:
    """Return the TFLOP/s of a layer's products in sequence, from aligned measurements; None if one is missing."""
    seconds = {
        row.role: row.shape.operations / row.tflops / row.m
        for row in reversed(products)  # the aligned product of a group comes first
        if row.dtype == precision and row.role != SQUARE and row.tflops is not None
    }
    roles = [role for role, _, _ in model.products]
    if not set(roles) <= set(seconds):
        return None
    per_token = sum(2 * n * k for _, n, k in model.products)
    return per_token / sum(seconds[role] for role in roles)


def usable_precisions(profile: DeviceProfile, products: Sequence[Matmul]) -> list[Precision]:
    """Return the precisions that the engine supports here and that have measured products."""
    measured = {row.dtype for row in products if row.tflops is not None}
    return [each for each in PRECISIONS if each in measured and not _refused(profile, each)]


def _refused(profile: DeviceProfile, precision: Precision) -> bool:
    try:
        choose_precision(profile, precision)
    except DeviceError:
        return True
    return False


def with_shares(row: Embedding, products: Sequence[Matmul], model: ModelProducts) -> Embedding:
    """Return the row with `linear_tflops` and `share_of_products`."""
    from dataclasses import replace

    reached = row.tokens_per_second * model.operations_per_token / 1e12
    alone = model_rate(products, model, row.precision)
    share = figure(reached / alone) if alone else None
    return replace(row, linear_tflops=figure(reached), share_of_products=share)


RANGES = ("embed", "tokenise", "copy", "forward", "pool")
TOKENS = {"cuda": 16_384, "cpu": 1024}


@dataclass(frozen=True, slots=True)
class TracedRange:
    name: str
    calls: int
    host_milliseconds: float  # on the host only: a card may still be computing
    device_milliseconds: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    file: str
    precision: str
    texts: int
    ranges: list[TracedRange]


def write_trace(engine: EmbeddingEngine, file: Path) -> Trace:
    """Trace one call over texts of mixed lengths, after a warm-up. Raises OSError if the file cannot be written."""
    on_card = engine.profile.kind == "cuda"
    longest = engine.max_tokens
    texts = texts_of(mixed_lengths(min(16, longest), min(512, longest), TOKENS[engine.profile.kind]))
    recorded = _record(engine, texts)
    if file.is_file():
        file.write_bytes(b"")  # the profiler only prints errors: an older trace must not remain
    recorded.export_chrome_trace(str(file))
    if not file.exists() or (file.is_file() and not file.stat().st_size):
        raise OSError(f"torch's profiler wrote no trace to {file}")
    return Trace(file.name, engine.precision, len(texts), _summed(recorded, on_card))


def _record(engine: EmbeddingEngine, texts: list[str]) -> Any:
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, record_function

    on_card = engine.profile.kind == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    engine.embed(texts)
    with ExitStack() as looking:
        looking.enter_context(ranges.shown_to(record_function))
        if on_card:
            looking.enter_context(ranges.shown_to(torch.cuda.nvtx.range))
        # The engine tokenises in this thread and computes in others.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, record_shapes=True, experimental_config=every_thread) as recorded:
            with record_function("embed"):
                engine.embed(texts)
            if on_card:
                torch.cuda.synchronize(engine.profile.index)
    return recorded


def _summed(recorded: Any, on_card: bool) -> list[TracedRange]:
    """Sum the host's events; on a card each range also appears for its kernels, which is skipped."""
    rows = (event for event in recorded.key_averages() if event.device_type.name == "CPU")
    found = {event.key: event for event in rows if event.key in RANGES}
    return [
        TracedRange(
            name,
            found[name].count,
            figure(found[name].cpu_time_total / 1000),
            figure(found[name].device_time_total / 1000) if on_card else None,
        )
        for name in RANGES
        if name in found
    ]
