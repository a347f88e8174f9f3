"""CUDA graphs for small batches: the kernels of a forward pass are recorded once for so many tokens and replayed,
because launching some eighty kernels takes longer than computing thirty tokens.

The recorder is a parameter, so that tests need no card.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...ranges import ranged
from .. import Pause, TokenBatch
from .attention import Inputs, Layout
from .staging import Uploads
from .target import trial_batch

# Tokens of a batch are rounded up to one of these, by at most half, for launches cost more. Launching some eighty
# kernels takes less time than computing 1,024 tokens of MiniLM on a T4, and more than 4,096 on an H100: the largest
# recording that pays is measured.
LADDER = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SEQUENCES = 32  # texts of a batch of up to 512 tokens; larger ones may have one for each 16 tokens
KEPT = len(LADDER)  # all recordings: making one takes four passes and waits for the device, and they share memory
GAIN = 1.1  # by which factor replaying must be faster than launching


class Computes(Protocol):
    """A packed encoder."""

    path: str
    longest: int  # tokens of a sequence

    def __call__(self, batch: TokenBatch) -> torch.Tensor: ...

    def staged(self, batch: TokenBatch) -> Sequence[NDArray[np.int32]]:
        """Return ids, positions and places of a batch, each sequence after sequence."""
        ...

    def compute(self, inputs: Inputs) -> torch.Tensor:
        """Return (sequences, dimension), pooled, float32."""
        ...


class Recording(Protocol):
    def replay(self) -> None: ...


# Runs and records a function; returns the recording and the tensor that each replay fills.
Record = Callable[[Callable[[], torch.Tensor]], tuple[Recording, torch.Tensor]]


@dataclass(slots=True)
class _Rung:
    """A recording for `tokens` tokens, which reads `numbers`."""

    tokens: int
    numbers: torch.Tensor
    recording: Recording = field(init=False)
    found: torch.Tensor = field(init=False)


class GraphedEncoder:
    """An encoder that replays small batches.

    Recordings share their memory and are replayed one after the other on one stream, in any order. Each keeps its own
    inputs and outputs, and each result is copied before the next replay.
    """

    pauses = 0

    def __init__(
        self, encoder: Computes, record: Record, uploads: Uploads, *, most: int = LADDER[-1], kept: int = KEPT
    ) -> None:
        """`most`: tokens of the largest batch that is replayed."""
        self.path = encoder.path
        self._encoder = encoder
        self._record = record
        self._uploads = uploads
        self._most = most
        self._kept = kept
        self._rungs: OrderedDict[int, _Rung] = OrderedDict()
        self._on = True

    @property
    def recorded(self) -> list[int]:
        """Tokens of the recordings, least recently used first."""
        return list(self._rungs)

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        tokens = rung_for(batch.tokens, len(batch)) if self._on else None
        if tokens is None or tokens > self._most:
            return self._computed(batch)
        rung = self._rungs.get(tokens) or self._recorded(tokens)
        if rung is None:
            return self._computed(batch)
        self._rungs.move_to_end(tokens)
        self._fill(rung, self._encoder.staged(batch), batch.lengths.tolist())
        return self._replayed(rung)[: len(batch)].clone()  # the next replay writes over it

    @ranged("forward")
    def _replayed(self, rung: _Rung) -> torch.Tensor:
        rung.recording.replay()
        return rung.found

    def only_up_to(self, tokens: int) -> None:
        """Launch larger batches, and delete their recordings."""
        self._most = tokens
        for rung in [rung for rung in self._rungs if rung > tokens]:
            del self._rungs[rung]

    def forget(self) -> None:
        """Free the memory of all recordings."""
        self._rungs.clear()

    def _computed(self, batch: TokenBatch) -> torch.Tensor:
        try:
            return self._encoder(batch)
        except torch.OutOfMemoryError:
            self.forget()
            raise

    def _recorded(self, tokens: int) -> _Rung | None:
        """Record; None if that fails, and then all batches are launched from now on."""
        while len(self._rungs) >= self._kept:
            self._rungs.popitem(last=False)
        try:
            rung = self._make(tokens)
        except RuntimeError:  # out of memory among them
            self._on = False
            self.forget()
            return None
        self._rungs[tokens] = rung
        return rung

    def _make(self, tokens: int) -> _Rung:
        longest = self._encoder.longest
        borders = sequences_in(tokens) + -(-tokens // longest) + 1  # with room for what fills up
        size = 3 * tokens + borders
        host = self._uploads.room(size)
        fill(host, tokens, [np.zeros(0, np.int32)] * 3, [], longest)
        numbers = self._uploads.send()
        ids, positions, places, cumulative = torch.split(numbers, [tokens, tokens, tokens, borders])
        rung = _Rung(tokens, numbers)
        inputs = Inputs(ids, positions, places, Layout((), min(tokens, longest), cumulative))
        rung.recording, rung.found = self._record(lambda: self._encoder.compute(inputs))
        return rung

    @ranged("copy")
    def _fill(self, rung: _Rung, staged: Sequence[NDArray[np.int32]], lengths: Sequence[int]) -> None:
        fill(self._uploads.room(len(rung.numbers)), rung.tokens, staged, lengths, self._encoder.longest)
        self._uploads.send_into(rung.numbers)


def sequences_in(tokens: int) -> int:
    """Return for how many texts a recording has room."""
    return max(SEQUENCES, tokens // 16)


def rung_for(tokens: int, sequences: int) -> int | None:
    """Return the rung of the ladder for a batch; None if it has too many tokens, or texts."""
    rung = next((rung for rung in LADDER if rung >= tokens), None)
    return rung if rung is not None and sequences <= sequences_in(rung) else None


def fill(
    host: NDArray[np.int32], tokens: int, staged: Sequence[NDArray[np.int32]], lengths: Sequence[int], longest: int
) -> None:
    """Write a batch into the numbers of a recording for `tokens` tokens.

    The rest becomes sequences of token 0, whose vectors are ignored, and sequences without tokens.
    """
    used = sum(lengths)
    left = tokens - used
    for number, values in enumerate(staged):
        part = host[number * tokens : (number + 1) * tokens]
        part[:used] = values
        part[used:] = 0 if number == 0 else np.arange(left) % longest
    fillers = (min(longest, left - start) for start in range(0, left, longest))
    ends = np.cumsum([0, *lengths, *fillers])
    cumulative = host[3 * tokens :]
    cumulative[: len(ends)] = ends
    cumulative[len(ends) :] = tokens


# ------------------------------------------------------------------------------------------------------------- CUDA's


class CudaRecorder:
    """Records with torch.cuda.CUDAGraph. All recordings share one pool of memory: they are never played at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Recording, torch.Tensor]:
        """Warm up on a separate stream, as torch's notes on CUDA graphs require: the recording must not contain what
        cuBLAS and the kernels allocate on their first call."""
        beside, computing = self._stream, torch.cuda.current_stream(self._device)
        beside.wait_stream(computing)
        with torch.cuda.stream(beside), torch.inference_mode():
            for _ in range(WARM_UP):
                work()
        computing.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a search on the card allocates in another thread meanwhile; "global" would make both fail.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=beside, capture_error_mode="thread_local")
        # torch.cuda.graph waits for the current device; where ending a recording fails, it leaves its stream current.
        with torch.cuda.device(self._device), torch.cuda.stream(computing):
            try:
                with torch.inference_mode(), recording:
                    found = work()
            except RuntimeError:
                self._give_up()
                raise
        return graph, found

    def _give_up(self) -> None:
        """End a failed recording for torch's allocator, which up to 2.12 keeps every tensor that a second stream uses
        as long as it believes in one (pytorch #180395)."""
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):  # told so where it does know
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)


WARM_UP = 3
PROBES, PROBE_ROUNDS = (24, 128, 512, 1024, 2048, 4096), 9
"""Tokens of the batches that are measured: a query first."""
QUERY = PROBES[0]


@dataclass(frozen=True, slots=True)
class Trials:
    """How graphs are tried: with token ids below `words`, in batches of `probes` tokens.

    `always`: use them if their vectors are right, without measuring.
    """

    words: int
    always: bool = False
    probes: Sequence[int] = PROBES


def with_graphs(
    encoder: Computes, record: Record, uploads: Uploads, finish: Callable[[], None], trials: Trials
) -> tuple[Any, str]:
    """Return the encoder with recordings up to the size at which they are faster here, or itself; and the reason.

    `finish` waits for the device.
    """
    graphed = GraphedEncoder(encoder, record, uploads)
    gains: dict[int, float] = {}
    with torch.inference_mode():
        why_not = _why_not(encoder, graphed, trial_batch(QUERY, encoder.longest, trials.words))
        if why_not is not None:
            return encoder, why_not
        if trials.always:
            return graphed, f"CUDA graphs for batches up to {LADDER[-1]} tokens: asked for"
        for tokens in trials.probes:
            probe = trial_batch(tokens, encoder.longest, trials.words)
            if _why_not(encoder, graphed, probe) is not None:
                break
            gains[tokens] = _gain(partial(encoder, probe), partial(graphed, probe), finish)
            if gains[tokens] < GAIN:
                break
    if not graphed.recorded:  # not even small ones are, from then on
        return encoder, f"CUDA graphs cannot be recorded for {tokens} tokens here: not used"
    measured = ", ".join(f"{gain:.2f} x as fast for {tokens}" for tokens, gain in gains.items())
    most = max((rung_for(tokens, 1) or 0 for tokens, gain in gains.items() if gain >= GAIN), default=0)
    if not most:
        return encoder, f"CUDA graphs measured {measured} tokens: not used"
    graphed.only_up_to(most)
    return graphed, f"CUDA graphs for batches up to {most} tokens: measured {measured}"


def _why_not(encoder: Computes, graphed: GraphedEncoder, probe: TokenBatch) -> str | None:
    """Return None if recording works and gives the same vectors."""
    wanted, found = encoder(probe), graphed(probe)
    if not graphed.recorded:
        return "CUDA graphs cannot be recorded here"
    cosine = float(torch.nn.functional.cosine_similarity(wanted.double(), found.double()).min())
    return None if cosine >= LEAST_COSINE else f"CUDA graphs gave other vectors (cosine {cosine:.5f})"


# Not 1: filling up a batch changes the sizes of the products, and so the order in which half precision rounds.
LEAST_COSINE = 0.9999


def _gain(one: Callable[[], object], other: Callable[[], object], finish: Callable[[], None]) -> float:
    """Return the median gain of interleaved rounds."""

    def seconds(work: Callable[[], object]) -> float:
        finish()
        started = time.perf_counter()
        work()
        finish()
        return max(time.perf_counter() - started, 1e-9)

    seconds(one), seconds(other)
    return statistics.median(seconds(one) / seconds(other) for _ in range(PROBE_ROUNDS))
