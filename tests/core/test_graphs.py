"""Graphs: which batch is replayed, by which recording, and that its vectors are those of computing. What records is a
emulator that computes again at each replay, from the numbers that were copied: so a CPU proves everything but CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from app.src.core.backends.torch.graphs import (
    FAST_LADDER,
    LADDER,
    SEQUENCES,
    GraphedEncoder,
    rung_for,
    with_graphs,
)
from app.src.core.backends.torch.packed import Layout, PackedEncoder
from app.src.core.backends.torch.process import device_clock
from app.src.core.backends.torch.staging import HostUploads
from app.src.core.device import DeviceProfile, detect


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
        self.sizes: list[int] = []  # texts that each recording can hold, in the order of recording
        self.fail: Exception | None = None
        self.most = 1 << 30  # texts of a recording that memory holds

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        if self.fail:
            raise self.fail
        found = work()
        if len(found) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(len(found))
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
    return with_graphs(GraphedEncoder(encoder, record, HostUploads()), device_clock(detect("cpu")), trial, **named)


def recorded(encoder: Any, record: Recorder, ladder: Sequence[int] = LADDER) -> GraphedEncoder:
    graphed = GraphedEncoder(encoder, record, HostUploads())
    graphed.record_all(ladder)
    return graphed


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
    assert rung_for(tokens, sequences, LADDER) == rung


def test_the_ladder_wastes_less_than_half() -> None:
    assert FAST_LADDER[: len(LADDER)] == LADDER
    assert list(FAST_LADDER) == sorted(set(FAST_LADDER))
    assert all(above <= 2 * below for below, above in pairwise(FAST_LADDER))
    assert all(rung % 16 == 0 for rung in FAST_LADDER)  # tensor cores are full


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_replayed_vectors_are_the_computed_ones(encoder: PackedEncoder, lengths: list[int]) -> None:
    with torch.inference_mode():
        graphed = recorded(encoder, Recorder(), (16, 64, 384))
        for batch in (texts(*lengths), texts(*reversed(lengths)), texts(lengths[0])):
            torch.testing.assert_close(graphed(batch), encoder(batch), rtol=1e-4, atol=1e-5)


def test_a_result_outlives_the_next_replay(encoder: PackedEncoder) -> None:
    with torch.inference_mode():
        graphed = recorded(encoder, Recorder(), (16, 64, 384))
        first = graphed(texts(5))
        before = first.clone()
        graphed(TokenBatch.of([[101, 5000, 6000, 7000, 102]]))
    torch.testing.assert_close(first, before)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=SEQUENCES))
def test_every_token_of_a_rung_is_in_some_sequence(lengths: list[int]) -> None:
    """Those of the batch first; what fills up is never longer than the model takes."""
    stub: Any = Counting()
    size = rung_for(sum(lengths), len(lengths), LADDER)
    if size is None:
        return
    graphed = recorded(stub, Recorder(), [size])
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


def test_nothing_is_recorded_while_serving() -> None:
    stub: Any = Counting()
    recorder = Recorder()
    graphed = recorded(stub, recorder, LADDER[:5])
    before = list(recorder.sizes)
    for batch in (texts(5), texts(20), texts(40, 40), texts(40, 40, 40), texts(*[40] * 120)):
        graphed(batch)
    assert recorder.sizes == before
    assert stub.batches == 2, "what has no recording is computed"


def test_recording_begins_with_the_largest_so_that_the_others_use_its_memory() -> None:
    """And the recordings of trials are gone before."""
    stub: Any = Counting()
    recorder = Recorder()
    graphed = recorded(stub, recorder)
    assert recorder.sizes == sorted(recorder.sizes, reverse=True)
    assert list(graphed.rungs) == list(LADDER)


def test_a_size_that_memory_does_not_hold_is_left_out_alone() -> None:
    stub: Any = Counting()
    recorder = Recorder()
    recorder.most = 1024 // 16 + -(-1024 // stub.longest)
    graphed = recorded(stub, recorder)
    assert list(graphed.rungs) == [size for size in LADDER if size <= 1024]
    graphed(texts(5))
    assert stub.batches == 0
    graphed(texts(*[40] * 30))
    assert stub.batches == 1


def test_running_out_of_memory_keeps_the_recordings() -> None:
    """Replaying them needs no more memory, and making them again would delay the searches of that moment."""
    stub: Any = Counting()
    graphed = recorded(stub, Recorder())
    stub.fail = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        graphed(texts(*[40] * 110))
    assert list(graphed.rungs) == list(LADDER)
    graphed(texts(5))


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
    monkeypatch.setattr("app.src.core.backends.torch.process.time.perf_counter", clock)

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
    best, reason = tried(stub, Timed(), 1000, ladder=(32,))
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


class Slow(Counting):
    """Computing takes 3 units of time, replaying none."""

    longest = 512

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        self._clock.now += 3.0
        return torch.ones(len(batch), 2)

    def compute(self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
        return torch.ones(len(layout.cumulative) - 1, 2)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    clock = Clock()
    monkeypatch.setattr("app.src.core.backends.torch.process.time.perf_counter", clock)
    return Slow(clock)


def test_a_card_that_is_nearly_full_keeps_the_smaller_recordings(slow: Slow) -> None:
    recorder = Recorder()
    recorder.most = 40  # as many texts as up to 512 tokens have room for
    best, reason = tried(slow, recorder, 1000)
    assert isinstance(best, GraphedEncoder)
    assert list(best.rungs) == [size for size in LADDER if size <= 512]
    assert "1024 tokens cannot be recorded here: CUDA out of memory" in reason
    assert f"{len(best.rungs)} CUDA graphs for up to 512 tokens, recorded in" in reason


def test_a_size_that_a_trial_held_but_the_whole_ladder_does_not_is_named(slow: Slow) -> None:
    class Filling(Recorder):
        def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
            if len(self.sizes) == 6:  # after the trials of 24 to 4,096 tokens
                self.most = 200
            return super().__call__(work)

    best, reason = tried(slow, Filling(), 1000)
    assert max(best.rungs) == 3072
    assert reason.endswith("no memory to record 4096 tokens")


def test_larger_batches_are_recorded_only_while_they_gain(slow: Slow) -> None:
    """On fast cards recordings are tried up to the size at which computing takes as long as launching."""

    class Even(Recorder):
        def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
            recording, found = super().__call__(work)
            replay, texts = recording.replay, len(found)

            def later() -> None:
                slow._clock.now += 1.0 if texts < 8192 // 16 else 3.0
                replay()

            recording.replay = later
            return recording, found

    recorder = Even()
    best, reason = tried(slow, recorder, 1000, ladder=FAST_LADDER)
    assert max(best.rungs) == 4096
    assert max(recorder.sizes) < 16_384 // 16, "16,384 tokens were not tried after 8,192"
    assert "1.00 x as fast for 8192 tokens" in reason
    best, reason = tried(slow, Recorder(), 1000, ladder=FAST_LADDER)
    assert list(best.rungs) == list(FAST_LADDER)
    assert "20 CUDA graphs for up to 16384 tokens" in reason
