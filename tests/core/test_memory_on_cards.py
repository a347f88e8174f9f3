"""Budgets on cards whose memory is known: what a batch takes is a line with a fixed part, and some more by chance, as
the allocator's gaps are. Measured at loading as on a card, then run for hours of batches of any size."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.src.core.backends import OutOfMemory
from app.src.core.device import DeviceProfile
from app.src.core.memory import (
    FULL_SHARE,
    HEADROOM,
    LEAST_TOKENS,
    MOST_TOKENS,
    RECOVER_AFTER,
    MemoryLimits,
    ModelShape,
    T4MemoryManager,
    TokenCost,
    full_tokens,
    measured_cost,
)

MIB = 1 << 20
MINILM = ModelShape(384, 1536, 12, 256)
BERT_LARGE = ModelShape(1024, 4096, 16, 512)


@dataclass
class Device:
    """`room`: bytes that batches may take. Of each batch: `fixed` + `slope` x tokens, and up to `gaps` of that more."""

    room: int
    slope: int
    fixed: int
    gaps: float
    seed: int
    failures: int = 0
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def peak(self, tokens: int) -> int:
        size = int((self.fixed + self.slope * tokens) * (1 + self.gaps * self.chance.random()))
        if size > self.room:
            self.failures += 1
            raise OutOfMemory
        return size

    def quiet_peak(self, tokens: int) -> int:
        """Without gaps, as right after loading."""
        return self.fixed + self.slope * tokens

    @property
    def surely_fits(self) -> float:
        return (self.room / (1 + self.gaps) - self.fixed) / self.slope


def run(memory: T4MemoryManager, device: Device, batches: int, least_share: float = 0.3) -> None:
    """Batches as the engine plans them: most are full, some are what is left."""
    for _ in range(batches):
        budget = memory.token_budget
        share = device.chance.choice([1.0, 1.0, 1.0, device.chance.uniform(least_share, 1.0)])
        tokens = max(1, int(budget * share))
        try:
            device.peak(tokens)
        except OutOfMemory:
            memory.shrink(tokens)
        else:
            memory.succeeded(tokens)


DEVICES = st.builds(
    Device,
    room=st.integers(700 * MIB, 4096 * MIB),
    slope=st.integers(20_000, 200_000),
    fixed=st.integers(0, 128 * MIB),
    gaps=st.floats(0, 0.3),
    seed=st.integers(0, 1000),
)


def manager(device: Device, measured: TokenCost | None) -> T4MemoryManager:
    """A card whose free memory is the device's room, so that nothing but the cost of a token can be wrong."""
    profile = DeviceProfile.cuda("x", (9, 0), device.room)
    memory = T4MemoryManager(profile, MemoryLimits(1.0, 0), free_bytes=device.room)
    memory.plan_for(BERT_LARGE, "fp16", measured)
    return memory


@settings(max_examples=25, deadline=None)
@given(device=DEVICES)
@example(device=Device(room=734_003_200, slope=25_719, fixed=75_552_307, gaps=0.21875, seed=0))
def test_a_measured_budget_uses_most_of_what_fits_and_hardly_ever_more(device: Device) -> None:
    memory = manager(device, measured_cost(device.quiet_peak, 2048))
    most = min(device.surely_fits, full_tokens(DeviceProfile.cuda("x", (9, 0)), 1024))
    assert memory.token_budget >= most / 2
    run(memory, device, 4000)
    assert memory.token_budget >= most / 2
    assert device.failures <= 4000 // RECOVER_AFTER  # HEADROOM is 1.25 and gaps are up to 1.3
    device.failures = 0
    run(memory, device, 4000)
    if device.gaps < HEADROOM - 1:
        assert device.failures == 0


@settings(max_examples=12, deadline=None)
@given(device=DEVICES, wrong=st.floats(0.02, 4.0))
def test_a_budget_from_a_wrong_cost_converges(device: Device, wrong: float) -> None:
    """The card takes up to 50 times of what was believed: a batch fails only when the budget has grown, and what is
    left is at least half of what fits."""
    device.gaps = 0.0
    memory = manager(device, (device.slope * wrong, 0))
    planned = memory.token_budget
    if device.surely_fits < 4 * LEAST_TOKENS:
        return
    run(memory, device, 120 * RECOVER_AFTER)
    device.failures = 0
    run(memory, device, 100 * RECOVER_AFTER)
    assert device.failures <= 100
    assert memory.token_budget >= min(planned, device.surely_fits) / 2.5


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(device=DEVICES, wrong=st.floats(0.02, 4.0))
def test_gaps_that_come_and_go_do_not_wear_it_down(device: Device, wrong: float) -> None:
    memory = manager(device, (device.slope * wrong, 0))
    planned = memory.token_budget
    if device.surely_fits < 8 * LEAST_TOKENS:
        return
    run(memory, device, 200 * RECOVER_AFTER)
    device.failures = 0
    run(memory, device, 100 * RECOVER_AFTER)
    assert device.failures <= 100
    assert memory.token_budget >= min(planned, device.surely_fits) / 2.5


def test_trouble_that_passes_is_forgotten() -> None:
    """Somebody else takes the card for a while: each time the budget comes back to what it was."""
    memory = manager(Device(2048 * MIB, 50_000, 0, 0.0, 0), (50_000, 0))
    planned = memory.token_budget
    for _ in range(3):
        while memory.token_budget > 1000:
            memory.shrink(memory.token_budget)
        for _ in range(60 * RECOVER_AFTER):
            memory.succeeded(memory.token_budget)
        assert memory.token_budget == planned


@pytest.mark.parametrize("share", [0.0, 0.2, FULL_SHARE - 0.01])
def test_small_batches_let_no_shrunken_budget_grow(share: float) -> None:
    memory = manager(Device(2048 * MIB, 50_000, 0, 0.0, 0), (50_000, 0))
    shrunk = memory.shrink(memory.token_budget)
    for _ in range(50 * RECOVER_AFTER):
        memory.succeeded(int(shrunk * share))
    assert memory.token_budget == shrunk
    for _ in range(RECOVER_AFTER):
        memory.succeeded(-(-shrunk // 2))
    assert memory.token_budget == shrunk + shrunk // 8


def test_batches_planned_before_the_budget_shrank_do_not_shrink_it_again() -> None:
    memory = manager(Device(2048 * MIB, 50_000, 0, 0.0, 0), (50_000, 0))
    planned = memory.token_budget
    assert [memory.shrink(planned) for _ in range(5)] == [planned // 2] * 5
    assert memory.out_of_memory_count == 5
    assert memory.shrink(planned // 2) == planned // 4


# --------------------------------------------------------------------------------------------------- what a token costs


def test_the_cost_is_the_line_through_two_peaks() -> None:
    found = measured_cost(lambda tokens: 7 * MIB + 18_432 * tokens, 768)
    assert found == (18_432 * HEADROOM, 7 * MIB * HEADROOM)


@pytest.mark.parametrize("peak", [lambda tokens: 5 * MIB, lambda tokens: 100 * tokens, lambda tokens: -18_000 * tokens])
def test_peaks_that_tell_nothing_are_not_believed(peak: object) -> None:
    assert measured_cost(peak, 768) is None  # type: ignore[arg-type]


def test_what_this_process_has_counts_against_its_fraction() -> None:
    card = DeviceProfile.of_card("Tesla T4")
    limits = MemoryLimits(0.5, 0)
    memory = T4MemoryManager(card, limits, free_bytes=12 << 30, used_bytes=3 << 30)
    assert memory.usable_bytes == 5 << 30


# ---------------------------------------------------------------------------------------------------- what fills a card


@pytest.mark.parametrize(
    ("card", "hidden", "tokens"),
    [
        ("Tesla P4", 384, 13_568),
        ("Tesla T4", 384, 27_264),
        ("Tesla T4", 768, 13_568),
        ("Tesla T4", 1024, 10_240),
        ("NVIDIA L4", 384, 39_552),
        ("NVIDIA A100", 384, 73_728),
        ("NVIDIA H100", 384, 90_112),
        ("NVIDIA H100", 1024, 33_792),
        ("NVIDIA B200", 128, MOST_TOKENS),
    ],
)
def test_what_fills_a_card(card: str, hidden: int, tokens: int) -> None:
    assert full_tokens(DeviceProfile.of_card(card), hidden) == tokens


def test_a_card_says_how_many_multiprocessors_it_has() -> None:
    from dataclasses import replace

    part = replace(DeviceProfile.of_card("NVIDIA H100"), multiprocessors=16)  # a seventh, as MIG gives it
    assert full_tokens(part, 384) == 85 * 128


def test_a_card_with_more_memory_uses_it() -> None:
    """Until it is full: beyond that nothing is faster."""
    budgets = [
        T4MemoryManager(DeviceProfile.of_card("NVIDIA A100", size), MemoryLimits(0.8, 512 * MIB)).plan_for(
            BERT_LARGE, "fp32"
        )
        for size in (1, 2, 3, 4, 40, 80)
    ]
    assert budgets[:4] == sorted(set(budgets[:4]))
    assert budgets[-1] == budgets[-2] == full_tokens(DeviceProfile.of_card("NVIDIA A100"), 1024)
