"""CUDA graphs for small batches: record the kernels of a forward pass once per number of tokens, then replay them.

Launching some eighty kernels takes longer than computing thirty tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import Pause, TokenBatch
from .linears import gain
from .packed import Layout, PackedEncoder
from .staging import Uploads

# A batch's tokens are rounded up to one of these. Launching the kernels takes less time than computing 1,024 tokens of
# MiniLM on a T4, and more than computing 4,096 on an H100, so `with_graphs` measures the largest recording that pays.
LADDER = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SEQUENCES = 32  # most texts of a batch of up to 512 tokens; larger batches may have one for every 16 tokens
GAIN = 1.1  # replaying must be faster than launching by this factor

# Records a function; returns the recording, which has `replay`, and the tensor that each replay fills.
Record = Callable[[Callable[[], torch.Tensor]], tuple[Any, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Rung:
    """A recording for `tokens` tokens, which reads `numbers` and fills `found`."""

    tokens: int
    numbers: torch.Tensor
    recording: Any
    found: torch.Tensor


class GraphedEncoder:
    """An encoder that replays small batches.

    Recordings share memory and run one at a time, on one stream. Each has its own inputs and outputs; a result is
    copied before the next replay.
    """

    pauses = 0

    def __init__(self, encoder: PackedEncoder, record: Record, uploads: Uploads) -> None:
        self.path = encoder.path
        self.encoder = encoder
        self._record = record
        self._uploads = uploads
        self.most = LADDER[-1]  # tokens of the largest batch that is replayed
        self.rungs: dict[int, _Rung] = {}  # by tokens
        self._on = True

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        tokens = rung_for(batch.tokens, len(batch)) if self._on else None
        if tokens is not None and tokens <= self.most:
            longest = self.encoder.longest
            if tokens not in self.rungs:
                borders = sequences_in(tokens) + -(-tokens // longest) + 1  # with room for fillers
                try:
                    fill(self._uploads.room(2 * tokens + borders), tokens, [np.zeros(0, np.int32)] * 2, [], longest)
                    numbers = self._uploads.send()
                    ids, positions, cumulative = torch.split(numbers, [tokens, tokens, borders])
                    layout = Layout((), min(tokens, longest), cumulative)
                    recording, found = self._record(lambda: self.encoder.compute(ids, positions, layout))
                    self.rungs[tokens] = _Rung(tokens, numbers, recording, found)
                except RuntimeError:  # includes OutOfMemoryError; later batches are not replayed
                    self._on = False
                    self.rungs.clear()
            rung = self.rungs.get(tokens)
            if rung is not None:
                room, staged = self._uploads.room(len(rung.numbers)), self.encoder.staged(batch)
                fill(room, rung.tokens, staged, batch.lengths.tolist(), longest)
                self._uploads.send_into(rung.numbers)
                rung.recording.replay()
                return rung.found[: len(batch)].clone()  # the next replay overwrites it
        try:
            return self.encoder(batch)
        except torch.OutOfMemoryError:
            self.rungs.clear()
            raise


def sequences_in(tokens: int) -> int:
    """Return how many texts a recording can hold."""
    return max(SEQUENCES, tokens // 16)


def rung_for(tokens: int, sequences: int) -> int | None:
    """Return the recording size for a batch; None if it has too many tokens or texts."""
    rung = next((rung for rung in LADDER if rung >= tokens), None)
    return rung if rung is not None and sequences <= sequences_in(rung) else None


def fill(
    host: NDArray[np.int32], tokens: int, staged: Sequence[NDArray[np.int32]], lengths: Sequence[int], longest: int
) -> None:
    """Write a batch into the inputs of a recording for `tokens` tokens.

    The rest is filled with sequences of token 0, whose vectors are ignored, and with empty sequences.
    """
    used = sum(lengths)
    left = tokens - used
    for number, values in enumerate(staged):
        part = host[number * tokens : (number + 1) * tokens]
        part[:used] = values
        part[used:] = 0 if number == 0 else np.arange(left) % longest
    fillers = (min(longest, left - start) for start in range(0, left, longest))
    ends = np.cumsum([0, *lengths, *fillers])
    cumulative = host[2 * tokens :]
    cumulative[: len(ends)] = ends
    cumulative[len(ends) :] = tokens


def cuda_recorder(device: torch.device) -> Record:
    """Record with torch.cuda.CUDAGraph. All recordings share one memory pool, because they never run at once."""
    pool: Any = torch.cuda.graph_pool_handle()
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """Warm up on a separate stream, as torch's notes on CUDA graphs require, then record."""
        computing = torch.cuda.current_stream(device)
        beside.wait_stream(computing)
        with torch.cuda.stream(beside), torch.inference_mode():
            for _ in range(3):
                work()
        computing.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread's search may allocate on the card during this; "global" would make both fail.
        recording = torch.cuda.graph(graph, pool=pool, stream=beside, capture_error_mode="thread_local")
        # torch.cuda.graph waits for the current device, and leaves its stream current if ending a recording fails.
        with torch.cuda.device(device), torch.cuda.stream(computing):
            try:
                with torch.inference_mode(), recording:
                    found = work()
            except RuntimeError:
                # Without this torch up to 2.12 never frees tensors used by a second stream (pytorch #180395); later
                # versions raise here.
                with contextlib.suppress(RuntimeError, AttributeError, TypeError):
                    torch._C._cuda_endAllocateToPool(device.index, pool)
                raise
        return graph, found

    return record


# -------------------------------------------------------------------------------------------------- use only if faster

PROBES = (24, 128, 512, 1024, 2048, 4096)  # tokens of the measured batches; the first is a query
# Not 1: filling up a batch changes the shape of the products, and so the rounding in half precision.
LEAST_COSINE = 0.9999


def with_graphs(
    graphed: GraphedEncoder,
    finish: Callable[[], None],
    trial: Callable[[int], TokenBatch],
    probes: Sequence[int] = PROBES,
) -> tuple[Any, str]:
    """Return `graphed`, limited to sizes at which it is faster, or its plain encoder; and the reason.

    `finish` waits for the device; `trial` makes a batch of the given number of tokens.
    """

    def clock() -> float:
        finish()
        return time.perf_counter()

    encoder = graphed.encoder
    gains: dict[int, float] = {}
    with torch.inference_mode():
        for tokens in probes:
            probe = trial(tokens)
            pair = encoder(probe).double(), graphed(probe).double()
            cosine = float(torch.nn.functional.cosine_similarity(*pair).min())
            if not graphed.rungs:  # recording failed, so no batch can be replayed
                return encoder, f"CUDA graphs cannot be recorded for {tokens} tokens here: not used"
            if not cosine >= LEAST_COSINE:
                if tokens == probes[0]:
                    return encoder, f"CUDA graphs gave other vectors (cosine {cosine:.5f})"
                break
            gains[tokens] = gain(partial(encoder, probe), partial(graphed, probe), clock)
            if gains[tokens] < GAIN:
                break
    measured = ", ".join(f"{found:.2f} x as fast for {tokens}" for tokens, found in gains.items())
    most = max((rung_for(tokens, 1) or 0 for tokens, found in gains.items() if found >= GAIN), default=0)
    if not most:
        return encoder, f"CUDA graphs measured {measured} tokens: not used"
    graphed.most = most
    for tokens in [tokens for tokens in graphed.rungs if tokens > most]:
        del graphed.rungs[tokens]  # frees its memory
    return graphed, f"CUDA graphs for batches up to {most} tokens: measured {measured}"
