"""CUDA graphs for small batches: record the kernels of a forward pass once per number of tokens, then replay them.

Launching some eighty kernels takes longer than computing thirty tokens.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
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
# MiniLM on a T4, and about as long as computing 8,000 to 10,000 on an H100 (an estimate), so `with_graphs` measures the
# largest recording that pays.
LADDER = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
FAST_LADDER = (*LADDER, 6144, 8192, 12_288, 16_384)  # from compute capability 9.0 on
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
    """An encoder that replays batches for which there is a recording.

    Recordings share memory and run one at a time, on one stream. Each has its own inputs and outputs; a result is
    copied before the next replay. They are made while a model is loaded, never while it serves, and stay when a batch
    runs out of memory: replaying them needs no more.
    """

    pauses = 0

    def __init__(self, encoder: PackedEncoder, record: Record, uploads: Uploads) -> None:
        self.path = encoder.path
        self.encoder = encoder
        self._record = record
        self._uploads = uploads
        self.rungs: dict[int, _Rung] = {}  # by tokens, ascending

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        rung = self.rungs.get(rung_for(batch.tokens, len(batch), self.rungs) or 0)
        if rung is None:
            return self.encoder(batch)
        room, staged = self._uploads.room(len(rung.numbers)), self.encoder.staged(batch)
        fill(room, rung.tokens, staged, batch.lengths.tolist(), self.encoder.longest)
        self._uploads.send_into(rung.numbers)
        rung.recording.replay()
        return rung.found[: len(batch)].clone()  # the next replay overwrites it

    def record(self, tokens: int) -> None:
        """Record batches of `tokens` tokens. Raises RuntimeError, which includes OutOfMemoryError."""
        longest = self.encoder.longest
        borders = sequences_in(tokens) + -(-tokens // longest) + 1  # with room for fillers
        fill(self._uploads.room(2 * tokens + borders), tokens, [np.zeros(0, np.int32)] * 2, [], longest)
        numbers = self._uploads.send()
        ids, positions, cumulative = torch.split(numbers, [tokens, tokens, borders])
        layout = Layout((), min(tokens, longest), cumulative)
        recording, found = self._record(lambda: self.encoder.compute(ids, positions, layout))
        self.rungs[tokens] = _Rung(tokens, numbers, recording, found)

    def record_all(self, ladder: Sequence[int]) -> None:
        """Replace all recordings by those of `ladder`, without those that memory does not hold. Begins with the
        largest, whose memory the others reuse."""
        self.rungs.clear()
        for tokens in sorted(ladder, reverse=True):
            with contextlib.suppress(RuntimeError):
                self.record(tokens)
        self.rungs = dict(sorted(self.rungs.items()))


def sequences_in(tokens: int) -> int:
    """Return how many texts a recording can hold."""
    return max(SEQUENCES, tokens // 16)


def rung_for(tokens: int, sequences: int, ladder: Iterable[int]) -> int | None:
    """Return the recording size of an ascending `ladder` for a batch; None if it has too many tokens or texts."""
    rung = next((rung for rung in ladder if rung >= tokens), None)
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
    """Record with torch.cuda.CUDAGraph. Recordings that exist together share one memory pool, because they never run at
    once. The work is run three times before, as torch's notes on CUDA graphs require."""
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pool: Any = None
    alive: weakref.WeakSet[Any] = weakref.WeakSet()  # the recordings in the pool

    def record(work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        nonlocal pool
        with torch.cuda.device(device):
            if not alive:  # torch accepts no pool again whose recordings are all gone
                # torch.cuda.graph would do this before each recording, and so drop the cache of other models.
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
                pool = torch.cuda.graph_pool_handle()
            computing = torch.cuda.current_stream(device)
            beside.wait_stream(computing)
            with torch.cuda.stream(beside), torch.inference_mode():
                try:
                    for _ in range(3):
                        work()
                finally:
                    computing.wait_stream(beside)  # the inputs must not be overwritten before
                graph = torch.cuda.CUDAGraph()
                try:
                    # thread_local: another thread's search may allocate on the card during this; "global" would make
                    # both fail.
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    try:
                        found = work()
                    finally:
                        graph.capture_end()
                except RuntimeError:
                    # Without this torch up to 2.12 never frees tensors used by a second stream (pytorch #180395), and
                    # never the pool, which counts this recording; later versions raise here.
                    with contextlib.suppress(RuntimeError, AttributeError, TypeError):
                        torch._C._cuda_endAllocateToPool(device.index, pool)
                        torch._C._cuda_releasePool(device.index, pool)
                    raise
        alive.add(graph)
        return graph, found

    return record


# -------------------------------------------------------------------------------------------------- use only if faster

PROBES = (24, 128, 512, 1024, 2048, 4096, 8192, 16_384)  # tokens of the measured batches; the first is a query
# Not 1: filling up a batch changes the shape of the products, and so the rounding in half precision.
LEAST_COSINE = 0.9999


def with_graphs(
    graphed: GraphedEncoder,
    clock: Callable[[], float],
    trial: Callable[[int], TokenBatch],
    ladder: Sequence[int] = LADDER,
) -> tuple[Any, str]:
    """Return `graphed` with recordings for the sizes of `ladder` at which it is faster, or its plain encoder; and the
    reason. Measures larger batches only while they gain.

    `clock` waits for the device; `trial` makes a batch of the given number of tokens.
    """
    encoder = graphed.encoder
    gains: dict[int, float] = {}
    stopped = ""
    with torch.inference_mode():
        for tokens in PROBES:
            rung = rung_for(tokens, 1, ladder)
            if rung is None:
                break
            probe = trial(tokens)
            try:
                graphed.record(rung)
                pair = encoder(probe).double(), graphed(probe).double()
            except RuntimeError as error:  # includes OutOfMemoryError
                said = str(error).partition("\n")[0][:80]
                stopped = f"{tokens} tokens cannot be recorded here: {said}"
                break
            cosine = float(torch.nn.functional.cosine_similarity(*pair).min())
            if not cosine >= LEAST_COSINE:
                stopped = f"{tokens} tokens gave other vectors (cosine {cosine:.5f})"
                break
            gains[tokens] = gain(partial(encoder, probe), partial(graphed, probe), clock)
            if gains[tokens] < GAIN:
                break
        most = max((rung_for(tokens, 1, ladder) or 0 for tokens, found in gains.items() if found >= GAIN), default=0)
        started = clock()
        wanted = [rung for rung in ladder if rung <= most]
        graphed.record_all(wanted)
        seconds = clock() - started
    why = [f"measured {found:.2f} x as fast for {tokens} tokens" for tokens, found in gains.items()]
    why += [stopped] if stopped else []
    why += [f"no memory to record {rung} tokens" for rung in wanted if rung not in graphed.rungs]
    if not graphed.rungs:
        return encoder, f"CUDA graphs not used: {', '.join(why)}"
    largest, number = max(graphed.rungs), len(graphed.rungs)
    return graphed, f"{number} CUDA graphs for up to {largest} tokens, recorded in {seconds:.2f} s: {', '.join(why)}"
