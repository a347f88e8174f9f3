"""CUDA graphs for small batches: the kernels of a forward pass recorded once for so many tokens and played again,
because launching some eighty kernels takes longer than computing thirty tokens. Larger batches are computed as ever.

Knows an encoder that computes on staged inputs; nothing of models. What records is given, so that choosing, filling and
forgetting can be tried without a card.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..ranges import ranged
from . import TokenIds
from .attention import Inputs, Layout

LADDER = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of a batch, rounded up to one of these: at most half again as many tokens, where launches cost more."""
SEQUENCES = 32
"""Texts of a batch at most. A query is one; micro-batches of callers are a few."""
KEPT = 8
"""Recordings that are kept; the one used longest ago makes room."""
GAIN = 1.1
"""How many times as fast as launching a recording must measure to be used at all."""


class Computes(Protocol):
    """A packed encoder."""

    path: str
    longest: int
    """Tokens that a sequence may have."""

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor: ...

    def staged(self, batch: Sequence[TokenIds]) -> Sequence[NDArray[np.int32]]:
        """ids, positions and places of a batch, one after the other."""
        ...

    def compute(self, inputs: Inputs) -> torch.Tensor:
        """(sequences, dimension), pooled, float32."""
        ...


class Recording(Protocol):
    def replay(self) -> None: ...


Record = Callable[[Callable[[], torch.Tensor]], tuple[Recording, torch.Tensor]]
"""Runs what it is given, recording it; gives the recording and the tensor that each replay fills anew."""


@dataclass(slots=True)
class _Rung:
    """A recording for `tokens` tokens. `host` is filled and copied to `numbers`, which the recording reads."""

    tokens: int
    host: torch.Tensor
    numbers: torch.Tensor
    recording: Recording = field(init=False)
    found: torch.Tensor = field(init=False)


class GraphedEncoder:
    """An encoder whose small batches are replayed. Not thread-safe, like every encoder."""

    def __init__(self, encoder: Computes, device: torch.device, record: Record, *, kept: int = KEPT) -> None:
        self.path = encoder.path
        self._encoder = encoder
        self._device = device
        self._record = record
        self._kept = kept
        self._rungs: OrderedDict[int, _Rung] = OrderedDict()
        self._on = True

    @property
    def recorded(self) -> list[int]:
        """Tokens of the recordings that are kept, the one used longest ago first."""
        return list(self._rungs)

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        tokens = rung_for(sum(map(len, batch)), len(batch)) if self._on else None
        if tokens is None:
            return self._computed(batch)
        rung = self._rungs.get(tokens) or self._recorded(tokens)
        if rung is None:
            return self._computed(batch)
        self._rungs.move_to_end(tokens)
        self._staged(rung, batch)
        return self._replayed(rung)[: len(batch)].clone()  # the next replay writes over it

    @ranged("copy")
    def _staged(self, rung: _Rung, batch: Sequence[TokenIds]) -> None:
        fill(rung, self._encoder.staged(batch), [len(ids) for ids in batch], self._encoder.longest)
        rung.numbers.copy_(rung.host, non_blocking=True)

    @ranged("forward")
    def _replayed(self, rung: _Rung) -> torch.Tensor:
        rung.recording.replay()
        return rung.found

    def forget(self) -> None:
        """Give the memory of all recordings back."""
        self._rungs.clear()

    def _computed(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        try:
            return self._encoder(batch)
        except torch.OutOfMemoryError:
            self.forget()
            raise

    def _recorded(self, tokens: int) -> _Rung | None:
        """None where recording fails: then nothing is recorded any more, and batches are computed as ever."""
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
        borders = SEQUENCES + -(-tokens // longest) + 1  # with room for what fills up
        size = 3 * tokens + borders
        host = torch.zeros(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        numbers = host.to(self._device, copy=True)
        ids, positions, places, cumulative = torch.split(numbers, [tokens, tokens, tokens, size - 3 * tokens])
        rung = _Rung(tokens, host, numbers)
        fill(rung, [np.zeros(0, np.int32)] * 3, [], longest)
        numbers.copy_(host)
        inputs = Inputs(ids, positions, places, Layout((), min(tokens, longest), cumulative))
        rung.recording, rung.found = self._record(lambda: self._encoder.compute(inputs))
        return rung


def rung_for(tokens: int, sequences: int) -> int | None:
    """The rung of the ladder for a batch; None when it is too large for any."""
    if sequences > SEQUENCES:
        return None
    return next((rung for rung in LADDER if rung >= tokens), None)


def fill(rung: _Rung, staged: Sequence[NDArray[np.int32]], lengths: Sequence[int], longest: int) -> None:
    """Write a batch into a rung's numbers. What is left over are sequences of token 0, which no other sequence sees and
    nobody reads; behind them sequences without tokens."""
    host: NDArray[np.int32] = rung.host.numpy()
    used = sum(lengths)
    left = rung.tokens - used
    for number, values in enumerate(staged):
        part = host[number * rung.tokens : (number + 1) * rung.tokens]
        part[:used] = values
        part[used:] = 0 if number == 0 else np.arange(left) % longest
    fillers = (min(longest, left - start) for start in range(0, left, longest))
    ends = np.cumsum([0, *lengths, *fillers])
    cumulative = host[3 * rung.tokens :]
    cumulative[: len(ends)] = ends
    cumulative[len(ends) :] = rung.tokens


# ------------------------------------------------------------------------------------------------------------- CUDA's


class CudaRecorder:
    """Records with torch.cuda.CUDAGraph. All recordings share one pool of memory: they are never played at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Recording, torch.Tensor]:
        """Warms up on a stream of its own, as torch's notes on CUDA graphs ask for: what cuBLAS and the kernels
        allocate on their first call must not fall into the recording."""
        beside = self._stream
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside), torch.inference_mode():
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream(self._device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a search on the card allocates in another thread meanwhile; "global" would make both fail.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=beside, capture_error_mode="thread_local")
        with torch.inference_mode(), recording:
            found = work()
        return graph, found


WARM_UP = 3
PROBE_TOKENS, PROBE_ROUNDS = 24, 9


def with_graphs(encoder: Computes, device: torch.device, record: Record, finish: Callable[[], None]) -> tuple[Any, str]:
    """The encoder with recordings where they measure faster here, and right; the encoder itself otherwise. With the
    reason in words. `finish` waits for the device."""
    graphed = GraphedEncoder(encoder, device, record)
    probe = [[101 + (37 * place) % 900 for place in range(PROBE_TOKENS)]]
    with torch.inference_mode():
        wanted, found = encoder(probe), graphed(probe)
        if not graphed.recorded:
            return encoder, "CUDA graphs cannot be recorded here"
        cosine = float(torch.nn.functional.cosine_similarity(wanted.double(), found.double()).min())
        if not cosine >= LEAST_COSINE:
            return encoder, f"CUDA graphs gave other vectors (cosine {cosine:.5f})"
        gain = _gain(lambda: encoder(probe), lambda: graphed(probe), finish)
    if gain < GAIN:
        return encoder, f"CUDA graphs measured {gain:.2f} x as fast for {PROBE_TOKENS} tokens: not used"
    return graphed, f"CUDA graphs for batches up to {LADDER[-1]} tokens: {gain:.2f} x as fast for {PROBE_TOKENS}"


LEAST_COSINE = 0.9999
"""Filling up a batch changes the sizes of the products, and with them the order in which half precision rounds."""


def _gain(one: Callable[[], object], other: Callable[[], object], finish: Callable[[], None]) -> float:
    """In turns; the middle of the rounds."""

    def seconds(work: Callable[[], object]) -> float:
        finish()
        started = time.perf_counter()
        work()
        finish()
        return max(time.perf_counter() - started, 1e-9)

    seconds(one), seconds(other)
    return statistics.median(seconds(one) / seconds(other) for _ in range(PROBE_ROUNDS))
