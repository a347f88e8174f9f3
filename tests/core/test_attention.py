"""Attention over packed sequences: every way gives what its definition says; which one a card gets, and why."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core.backends.torch import packed
from app.src.core.backends.torch.packed import (
    SHORT,
    Attention,
    Layout,
    candidates,
    choose,
    flash_attention,
    memory_efficient_attention,
    runs_of,
    runs_of_equal_length,
    varlen_attention,
)
from app.src.core.device import CARDS, DeviceProfile

CPU = DeviceProfile.cpu()
HEADS, WIDTH = 4, 32


@given(st.lists(st.integers(1, 20), max_size=60))
def test_runs_cover_the_batch(lengths: list[int]) -> None:
    runs = runs_of(lengths)
    assert [length for _, count, length in runs for _ in range(count)] == lengths
    starts = [sum(lengths[:position]) for position in range(len(lengths))]
    assert [start + number * length for start, count, length in runs for number in range(count)] == starts


def test_neighbours_of_equal_length_share_a_run() -> None:
    assert runs_of([7, 7, 5, 7]) == [(0, 2, 7), (14, 1, 5), (19, 1, 7)]


def test_a_layout_says_where_sequences_begin_and_end() -> None:
    layout = Layout.of([3, 1, 1], torch.device("cpu"))
    assert (layout.cumulative.tolist(), layout.cumulative.dtype, layout.longest) == ([0, 3, 4, 5], torch.int32, 3)


def by_definition(qkv: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    parts = []
    for rows in torch.split(qkv.double(), lengths):
        query, key, value = rows.view(len(rows), 3, HEADS, -1).permute(1, 2, 0, 3)
        scores = query @ key.transpose(1, 2) / (WIDTH // HEADS) ** 0.5
        weights = torch.softmax(scores, dim=-1)
        parts.append((weights @ value).transpose(0, 1).reshape(len(rows), -1))
    return torch.cat(parts)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 2**31 - 1))
def test_runs_are_attention_by_its_definition(lengths: list[int], seed: int) -> None:
    qkv = torch.randn(sum(lengths), 3 * WIDTH, generator=torch.Generator().manual_seed(seed))
    found = runs_of_equal_length(qkv, Layout.of(lengths, qkv.device), HEADS)
    torch.testing.assert_close(found.double(), by_definition(qkv, lengths), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    "lengths",
    [[5] * 13, [26] * 3 + [8] * 9 + [1] * 40, [57, 57, 30, 3], [31], [7, 2], [19] * 7 + [16] * 3, [44] * 3 + [48] * 2],
)
def test_windows_are_attention_by_its_definition(lengths: list[int], dtype: torch.dtype, close: float) -> None:
    qkv = torch.randn(sum(lengths), 3 * WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = runs_of_equal_length(qkv, Layout.of(lengths, qkv.device), HEADS)
    torch.testing.assert_close(found.double(), by_definition(qkv, lengths), rtol=close, atol=close)


@pytest.mark.parametrize("length", [250, 8010])
def test_masks_of_long_texts_are_small(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept."""
    masks: list[torch.Tensor] = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        masks.append(mask)
        return value

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    qkv = torch.zeros(2 * length + 16, 3 * WIDTH, dtype=torch.bfloat16)
    assert packed.windows(qkv, 0, 2, length, HEADS) is not None
    assert masks[0].untyped_storage().nbytes() <= 4 * length


# ---------------------------------------------------------------------------------------------------- what card, which


def names(card: str, dtype: torch.dtype) -> list[str]:
    return [each.__name__ for each in candidates(DeviceProfile.of_card(card), dtype)]


@pytest.mark.parametrize("card", CARDS)
def test_flash_attention_is_tried_from_8_0_on_in_half_precision(card: str) -> None:
    new = CARDS[card][0] >= (8, 0)
    for name in ("flash_attention", "varlen_attention"):
        assert (name in names(card, torch.float16)) is new
        assert (name in names(card, torch.bfloat16)) is new
        assert name not in names(card, torch.float32)


def test_a_t4_tries_the_memory_efficient_kernel_first() -> None:
    assert names("Tesla T4", torch.float16)[0] == names("Tesla P4", torch.float32)[0] == "memory_efficient_attention"


def test_on_a_cpu_there_are_runs() -> None:
    assert candidates(CPU, torch.float32) == [runs_of_equal_length]


def test_the_choice_says_what_was_tried_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of cards do not run on a CPU: so each fails its trial, and what works is taken."""
    monkeypatch.setattr(
        packed, "candidates", lambda *_: [varlen_attention, memory_efficient_attention, wrong, runs_of_equal_length]
    )
    chosen, reason = choose(CPU, HEADS, WIDTH, torch.float32)
    assert chosen is runs_of_equal_length
    tried = reason.split("; ")
    assert [part.split(":")[0] for part in tried[:3]] == ["varlen attention", "memory efficient attention", "wrong"]
    assert "off by" in tried[2]
    assert tried[3] == "runs of equal length"


class Timed:
    """A right attention that takes `short` or `long` seconds of a simulated clock for each call."""

    now = 0.0

    def __init__(self, name: str, short: float, long: float) -> None:
        self.__name__ = name
        self.times = short, long
        self.calls = 0

    def __call__(self, qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
        self.calls += 1
        Timed.now += self.times[layout.longest > SHORT]
        return runs_of_equal_length(qkv, layout, heads)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Timed]:
    """The first is faster for long texts, the second for short ones, as FlashAttention and CUTLASS may be."""
    found = [Timed("flash", 30e-6, 80e-6), Timed("cutlass", 20e-6, 100e-6)]
    monkeypatch.setattr(packed, "candidates", lambda *_: [*found, runs_of_equal_length])
    monkeypatch.setattr("app.src.core.backends.torch.process.time.perf_counter", lambda: Timed.now)
    return found


def test_short_and_long_texts_each_get_what_is_faster_for_them(timed: list[Timed]) -> None:
    chosen, reason = choose(CPU, HEADS, WIDTH, torch.float32)
    assert reason == "up to 64 tokens cutlass 20 us (flash 30 us); above flash 80 us (cutlass 100 us)"
    for lengths, which in (([17, 64], 1), ([65, 2], 0)):
        before = [each.calls for each in timed]
        chosen(torch.zeros(sum(lengths), 3 * WIDTH), Layout.of(lengths, torch.device("cpu")), HEADS)
        assert [each.calls - earlier for each, earlier in zip(timed, before, strict=True)] == [1 - which, which]


def test_a_recordings_bound_decides_which_it_uses(timed: list[Timed]) -> None:
    """A graph replays batches of all lengths up to its bound, `Layout.longest`."""
    chosen, _reason = choose(CPU, HEADS, WIDTH, torch.float32)
    before = timed[0].calls
    chosen(torch.zeros(4, 3 * WIDTH), Layout([(0, 1, 4)], 512, torch.tensor([0, 4], dtype=torch.int32)), HEADS)
    assert timed[0].calls == before + 1


def test_what_is_faster_for_all_is_used_alone(timed: list[Timed]) -> None:
    timed[1].times = 50e-6, 100e-6
    assert choose(CPU, HEADS, WIDTH, torch.float32)[0] is timed[0]


def test_what_is_wrong_for_short_or_long_texts_is_not_timed(
    timed: list[Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
        return timed[0](qkv, layout, heads) + (1 if layout.longest <= SHORT else 0)

    monkeypatch.setattr(packed, "candidates", lambda *_: [off, timed[1], runs_of_equal_length])
    chosen, reason = choose(CPU, HEADS, WIDTH, torch.float32)
    assert chosen is timed[1]
    assert reason == "off: off by 1; cutlass gives the right numbers here"


def test_without_memory_to_time_the_first_right_one_is_used(timed: list[Timed]) -> None:
    def full(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
        if len(qkv) > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return runs_of_equal_length(qkv, layout, heads)

    timed[0].__class__ = type("Full", (Timed,), {"__call__": lambda self, *given: full(*given)})
    chosen, reason = choose(CPU, HEADS, WIDTH, torch.float32)
    assert chosen is timed[0]
    assert reason == "flash, not timed: CUDA out of memory"


def wrong(qkv: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
    """Right but for one border: the first two sequences are taken for one."""
    first, second, *others = [length for _, count, length in layout.runs for _ in range(count)]
    return runs_of_equal_length(qkv, Layout.of([first + second, *others], qkv.device), heads)


# ----------------------------------------------------------------------------------------- what is sent to the kernels


class Recorded:
    """Stands for a kernel of a card: computes by the borders it is given, and keeps what it was called with."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def varlen(self, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> torch.Tensor:
        self.calls.append((*rest, named))
        return self._attend(query, key, value, rest[0])

    def flash(self, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> tuple[torch.Tensor, None]:
        self.calls.append((*rest, named))
        return self._attend(query, key, value, rest[0]), None

    def efficient(self, query: Any, key: Any, value: Any, bias: Any, *rest: Any, **named: Any) -> list[torch.Tensor]:
        assert bias is None
        assert query.shape[0] == 1
        self.calls.append((*rest, named))
        return [self._attend(query[0], key[0], value[0], rest[0]).unsqueeze(0)]

    def _attend(self, query: Any, key: Any, value: Any, borders: torch.Tensor) -> torch.Tensor:
        lengths = (borders[1:] - borders[:-1]).tolist()
        qkv = torch.stack([query, key, value], dim=1).reshape(len(query), -1)
        return by_definition(qkv, lengths).view(query.shape).to(query.dtype)


@pytest.mark.parametrize("attention", [flash_attention, varlen_attention, memory_efficient_attention])
def test_kernels_get_heads_borders_and_the_longest(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [random.Random(4).randrange(1, 30) for _ in range(9)]
    stub = Recorded()
    stub.calls.clear()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stub.varlen)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", stub.efficient)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stub.flash)
    qkv = torch.randn(sum(lengths), 3 * WIDTH, generator=torch.Generator().manual_seed(1))
    found = attention(qkv, Layout.of(lengths, qkv.device), HEADS)
    torch.testing.assert_close(found.double(), by_definition(qkv, lengths), rtol=1e-4, atol=1e-5)
    ((starts, ends, longest, also, *rest),) = stub.calls
    assert starts is ends
    assert (longest, also) == (max(lengths), max(lengths))
    wanted: dict[Attention, list[Any]] = {varlen_attention: [{}], flash_attention: [0.0, False, False, {}]}
    assert rest == wanted.get(attention, [0.0, 0, {}])  # no dropout, not causal, no debug mask; no custom mask


@pytest.mark.parametrize("attention", [flash_attention, varlen_attention, memory_efficient_attention])
def test_this_torch_has_the_signatures(attention: Attention) -> None:
    """A CPU refuses the operators for want of a kernel, not for their arguments."""
    qkv = torch.zeros(3, 3 * WIDTH)
    with pytest.raises(NotImplementedError, match=r"CPU|backend"):
        attention(qkv, Layout.of([3], qkv.device), HEADS)
