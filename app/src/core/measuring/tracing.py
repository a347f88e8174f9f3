"""A trace of one call of the engine for Perfetto or chrome://tracing, by torch's profiler, with the engine's own ranges
in it: tokenise, copy, forward, pool. On a card the same ranges go to NVTX.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import ranges
from ..engine import EmbeddingEngine
from .clocks import figure
from .embedding import mixed_lengths, texts_of

RANGES = ("embed", "tokenise", "copy", "forward", "pool")
TOKENS = {"cuda": 16_384, "cpu": 1024}


@dataclass(frozen=True, slots=True)
class TracedRange:
    name: str
    calls: int
    host_milliseconds: float
    """Until the host was through with it; a card may still be computing then."""
    device_milliseconds: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    file: str
    precision: str
    texts: int
    ranges: list[TracedRange]


def write_trace(engine: EmbeddingEngine, file: Path) -> Trace:
    """Traces one call over texts of mixed lengths, after one to warm up. Raises OSError when the file cannot be
    written."""
    on_card = engine.profile.kind == "cuda"
    longest = engine.max_tokens
    texts = texts_of(mixed_lengths(min(16, longest), min(512, longest), TOKENS[engine.profile.kind]))
    recorded = _record(engine, texts)
    if file.is_file():
        file.write_bytes(b"")  # the profiler only prints that it failed, and an older trace would pass for this one
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
        # The engine tokenises in this thread, and computes in others.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, record_shapes=True, experimental_config=every_thread) as recorded:
            with record_function("embed"):
                engine.embed(texts)
            if on_card:
                torch.cuda.synchronize(engine.profile.index)
    return recorded


def _summed(recorded: Any, on_card: bool) -> list[TracedRange]:
    """By what the host did: on a card a range is there a second time, as what its kernels were."""
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
