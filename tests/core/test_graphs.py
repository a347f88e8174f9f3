"""Graphs: which batch is replayed, by which recording, and that its vectors are those of computing. What records is a
emulator that computes again at each replay, from the numbers that were copied: so a CPU proves everything but CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core.backends import TokenBatch
from app.src.core.backends.folder import read_folder
from app.src.core.backends.torch.encoders import trial_batch
from app.src.core.backends.torch.graphs import LADDER, SEQUENCES, GraphedEncoder, rung_for, with_graphs
from app.src.core.backends.torch.packed import Layout, PackedEncoder
from app.src.core.backends.torch.staging import HostUploads
from app.src.core.device import DeviceProfile


def by_borders(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
    """Attention that knows sequences by their borders on the device only, as the kernels of cards do."""
    assert int((layout.cumulative[1:] - layout.cumulative[:-1]).max()) <= layout.longest
    tokens = torch.arange(len(qkv), dtype=torch.int32)
    sequence = torch.searchsorted(layout.cumulative, tokens, right=True)
    query, key, value = qkv.view(len(qkv), 3, heads, -1).permute(1, 2, 0, 3)
    same = sequence[:, None] == sequence[None, :]
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=same)
    return out.transpose(0, 1).reshape(len(qkv), -1)


class Again:
    """A recording that computes again, into the tensor that it filled first."""

    def __init__(self, work: Callable[[], torch.Tensor], found: torch.Tensor) -> None:
        self._work = work
        self._found = found

    def replay(self) -> None:
        self._found.copy_(self._work())


class Recorder:
    def __init__(self) -> None:
        self.recorded = 0
        self.fail: Exception | None = None

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        if self.fail:
            raise self.fail
        self.recorded += 1
        found = work()
        return Again(work, found), found


@pytest.fixture(scope="module")
def encoder(minilm_folder: Path) -> PackedEncoder:
    loaded = PackedEncoder.load(read_folder(minilm_folder, "all-MiniLM-L6-v2"), DeviceProfile.cpu(), torch.float32)
    loaded.attention = by_borders
    return loaded


class Counting:
    """An encoder that computes nothing and counts its calls."""

    path = "packed"
    longest = 40

    def __init__(self) -> None:
        self.batches = 0
        self.fail: Exception | None = None

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        if self.fail:
            raise self.fail
        self.batches += 1
        return torch.zeros(len(batch), 2)

    def staged(self, batch: TokenBatch) -> Any:
        return PackedEncoder.staged(self, batch)  # type: ignore[arg-type]

    _padding_id = None

    def compute(self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
        borders = layout.cumulative
        return torch.stack([borders[1:], borders[:-1]], dim=1).float()


def tried(encoder: Any, record: Recorder, words: int, **named: Any) -> tuple[Any, str]:
    trial = partial(trial_batch, longest=encoder.longest, words=words)
    return with_graphs(GraphedEncoder(encoder, record, HostUploads()), lambda: None, trial, **named)


def texts(*lengths: int) -> TokenBatch:
    rows = enumerate(lengths)
    return TokenBatch.of([101 + (7 * row + column) % 900 for column in range(length)] for row, length in rows)


@pytest.mark.parametrize(
    ("tokens", "sequences", "rung"),
    [
        *((1, 1, 16), (16, 1, 16), (17, 2, 32), (1000, 32, 1024), (1024, 1, 1024), (1025, 1, 1536)),
        *((4096, 256, 4096), (4097, 1, None), (64, 33, None), (1024, 65, None)),
    ],
)
def test_the_rung_is_the_next_one_up(tokens: int, sequences: int, rung: int | None) -> None:
    assert rung_for(tokens, sequences) == rung


def test_the_ladder_wastes_less_than_half() -> None:
    assert list(LADDER) == sorted(set(LADDER))
    assert all(above <= 2 * below for below, above in pairwise(LADDER))
    assert all(rung % 16 == 0 for rung in LADDER)  # tensor cores are full


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_replayed_vectors_are_the_computed_ones(encoder: PackedEncoder, lengths: list[int]) -> None:
    graphed = GraphedEncoder(encoder, Recorder(), HostUploads())
    with torch.inference_mode():
        for batch in (texts(*lengths), texts(*reversed(lengths)), texts(lengths[0])):
            torch.testing.assert_close(graphed(batch), encoder(batch), rtol=1e-4, atol=1e-5)


def test_a_result_outlives_the_next_replay(encoder: PackedEncoder) -> None:
    graphed = GraphedEncoder(encoder, Recorder(), HostUploads())
    with torch.inference_mode():
        first = graphed(texts(5))
        before = first.clone()
        graphed(TokenBatch.of([[101, 5000, 6000, 7000, 102]]))
    torch.testing.assert_close(first, before)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=SEQUENCES))
def test_every_token_of_a_rung_is_in_some_sequence(lengths: list[int]) -> None:
    """Those of the batch first; what fills up is never longer than the model takes."""
    recorder = Recorder()
    stub: Any = Counting()
    graphed = GraphedEncoder(stub, recorder, HostUploads())
    if rung_for(sum(lengths), len(lengths)) is None:
        return
    found = graphed(texts(*lengths))
    assert found[:, 0].tolist() == [sum(lengths[: place + 1]) for place in range(len(lengths))]
    (rung,) = graphed.rungs.values()
    borders = rung.numbers[2 * rung.tokens :]
    sizes = (borders[1:] - borders[:-1]).tolist()
    assert sizes[: len(lengths)] == lengths
    assert min(sizes) >= 0
    assert max(sizes) <= stub.longest
    assert sum(sizes) == rung.tokens
    assert int(rung.numbers[rung.tokens : 2 * rung.tokens].max()) < stub.longest


def test_what_cannot_be_recorded_is_computed_for_good() -> None:
    recorder, stub = Recorder(), Counting()
    encoder: Any = stub
    graphed = GraphedEncoder(encoder, recorder, HostUploads())
    graphed(texts(5))
    assert (list(graphed.rungs), stub.batches) == ([16], 0)
    recorder.fail = RuntimeError("operation not permitted when stream is capturing")
    graphed(texts(20))
    recorder.fail = None
    graphed(texts(20))
    graphed(texts(5))
    assert (list(graphed.rungs), stub.batches) == ([], 3)


def test_a_large_batch_is_computed_and_running_out_of_memory_gives_recordings_back() -> None:
    stub: Any = Counting()
    graphed = GraphedEncoder(stub, Recorder(), HostUploads())
    graphed(texts(5))
    graphed(texts(*[40] * 110))
    assert (list(graphed.rungs), stub.batches) == ([16], 1)
    stub.fail = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        graphed(texts(*[40] * 110))
    assert not graphed.rungs


# ---------------------------------------------------------------------------------------------- used only where it pays


class Clock:
    """Each reading is one step later; a step of computing takes `slow`, one of replaying `fast`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("computing", "replaying", "used"), [(3.0, 1.0, True), (1.0, 1.0, False), (1.0, 2.0, False)])
def test_graphs_are_used_where_they_measure_faster(
    encoder: PackedEncoder, monkeypatch: pytest.MonkeyPatch, computing: float, replaying: float, used: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr("app.src.core.backends.torch.graphs.time.perf_counter", clock)

    class Slow(Counting):
        longest = 512

        def __call__(self, batch: TokenBatch) -> torch.Tensor:
            clock.now += computing
            return encoder(batch)

        def compute(self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
            return encoder.compute(ids, positions, layout)

    class Timed(Recorder):
        def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
            recording, found = super().__call__(work)
            replay = recording.replay

            def later() -> None:
                clock.now += replaying
                replay()

            recording.replay = later
            return recording, found

    stub = Slow()
    best, reason = tried(stub, Timed(), 1000, probes=(24,))
    assert isinstance(best, GraphedEncoder) is used
    assert f"{computing / replaying:.2f} x" in reason


def test_graphs_that_give_other_vectors_are_not_used(encoder: PackedEncoder) -> None:
    class Wrong(Recorder):
        def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
            return super().__call__(lambda: work().roll(1, dims=1))

    best, reason = tried(encoder, Wrong(), 1000)
    assert best is encoder
    assert "other vectors" in reason


def test_where_nothing_can_be_recorded_the_encoder_stays(encoder: PackedEncoder) -> None:
    recorder = Recorder()
    recorder.fail = RuntimeError("no graphs here")
    assert tried(encoder, recorder, 1000)[0] is encoder


def test_where_larger_batches_cannot_be_recorded_no_graphs_are_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card that is nearly full: from the first failure on nothing is recorded any more."""
    clock = Clock()
    monkeypatch.setattr("app.src.core.backends.torch.graphs.time.perf_counter", clock)

    class Full(Recorder):
        def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
            if self.recorded == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(work)

    class Slow(Counting):
        longest = 512

        def __call__(self, batch: TokenBatch) -> torch.Tensor:
            clock.now += 3.0
            return torch.ones(len(batch), 2)

        def compute(self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
            return torch.ones(len(layout.cumulative) - 1, 2)

    slow = Slow()
    best, reason = tried(slow, Full(), 1000, probes=(24, 128, 512))
    assert best is slow
    assert "cannot be recorded for 512 tokens" in reason
