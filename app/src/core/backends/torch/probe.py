"""Does this CPU multiply faster in bf16 than in fp32? Measured, because no list of names or flags says it: with bf16
instructions it is twice as fast, without them up to a hundred times slower. Knows matrix products only.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch

from .compute_thread import one_thread
from .linears import Affine, Linear, prepacked

Work = Callable[[], object]
Clock = Callable[[], float]

TOKENS, WIDTH, WIDE = 256, 384, 1536
"""The widest layer of the default model over a small batch; larger models gain no less."""
ROUNDS, LEAST_ROUNDS = 7, 3
BUDGET = 0.05
"""CPU seconds, after which no further round is begun."""
_HOPELESS = 0.5
"""Gain on a small product below which the large one, which might take a second in emulation, is not tried."""

_lock = threading.Lock()
_known: float | None = None


def bf16_gain() -> float:
    """How many times as fast products in bf16 are as in fp32, at least; 0 where torch has none. Measured once in a
    process, by the prepacked operator that the model itself will use."""
    global _known
    with _lock:
        if _known is None:
            with one_thread():  # the ratio of one is that of all: they do the same instructions
                _known = _measured()
        return _known


def _measured() -> float:
    small = [_product(32, WIDTH, dtype) for dtype in (torch.float32, torch.bfloat16)]
    if small[0] is None or small[1] is None:
        return 0.0
    with torch.inference_mode():
        first = gain(small[0], small[1])
        if first < _HOPELESS:
            return first
        large = [_product(TOKENS, WIDE, dtype) for dtype in (torch.float32, torch.bfloat16)]
        return gain(large[0] or small[0], large[1] or small[1])


def _product(rows: int, wide: int, dtype: torch.dtype) -> Work | None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(wide, WIDTH, generator=generator).to(dtype)
    linear: Linear | None = prepacked(Affine(weight))
    if linear is None:
        return None
    x = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    return lambda: linear(x)


def gain(one: Work, other: Work, clock: Clock = time.thread_time) -> float:
    """How many times as fast `other` is as `one`, judged so that a disturbed machine makes it less, not more: in turns,
    the lower of best against best and of the middle of the rounds. Both are called once before the clock runs, which
    counts the CPU seconds of this thread: time that other programs took from it is not in them."""
    one()
    other()
    ends = clock() + BUDGET
    rounds: list[tuple[float, float]] = []
    while len(rounds) < ROUNDS and (len(rounds) < LEAST_ROUNDS or clock() < ends):
        rounds.append((_seconds(one, clock), _seconds(other, clock)))
    best = min(took for took, _ in rounds) / min(took for _, took in rounds)
    return min(best, statistics.median([took / other for took, other in rounds]))


def _seconds(work: Work, clock: Clock) -> float:
    started = clock()
    work()
    return max(clock() - started, 1e-9)
