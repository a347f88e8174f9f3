"""Token budgets: from free memory, halved on trouble, recovering slowly; and the guide's batch size."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.core.device import DeviceProfile
from app.src.core.memory import (
    CPU_TOKENS,
    LEAST_TOKENS,
    PACKED_CPU_TOKENS,
    RECOVER_AFTER,
    DeviceMemory,
    MemoryLimits,
    ModelShape,
    T4MemoryManager,
    full_tokens,
)

MINILM = ModelShape(384, 1536, 12, 256)
BERT_LARGE = ModelShape(1024, 4096, 16, 512)
GIB = 1 << 30


def on_t4(free: int = 15 * GIB, **limits: float) -> T4MemoryManager:
    return T4MemoryManager(DeviceProfile.of_card("Tesla T4"), MemoryLimits(**limits), free_bytes=free)  # type: ignore[arg-type]


def test_cpu_budget_is_the_measured_one() -> None:
    assert T4MemoryManager(DeviceProfile.cpu()).plan_for(BERT_LARGE, "fp32") == CPU_TOKENS
    assert T4MemoryManager(DeviceProfile.cpu()).plan_for(BERT_LARGE, "fp32", packed=True) == PACKED_CPU_TOKENS


def test_gpu_budget_follows_free_memory_and_model() -> None:
    plenty, little = on_t4(), on_t4(free=768 << 20)
    assert plenty.plan_for(MINILM, "fp16") == full_tokens(DeviceProfile.of_card("Tesla T4"), 384)
    assert little.plan_for(MINILM, "fp16") == (256 << 20) // MINILM.bytes_per_token("fp16")
    assert little.plan_for(BERT_LARGE, "fp16") < little.plan_for(MINILM, "fp16")
    assert little.plan_for(MINILM, "fp32") == (256 << 20) // MINILM.bytes_per_token("fp32")


def test_budget_never_vanishes() -> None:
    assert on_t4(free=1).plan_for(BERT_LARGE, "fp32") == LEAST_TOKENS


def test_fraction_and_reserve_are_kept() -> None:
    assert on_t4(fraction=0.5, reserve_bytes=0).usable_bytes == 8 * GIB
    assert on_t4(fraction=0.5, reserve_bytes=GIB).usable_bytes == 7 * GIB
    assert on_t4(free=3 * GIB, fraction=0.5, reserve_bytes=GIB).usable_bytes == 2 * GIB
    assert on_t4(free=GIB, reserve_bytes=2 * GIB).usable_bytes == 0


@pytest.mark.parametrize("limits", [{"fraction": 0}, {"fraction": 1.1}, {"reserve_bytes": -1}])
def test_impossible_limits(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="memory"):
        MemoryLimits(**limits)  # type: ignore[arg-type]


def test_shrinks_by_half_and_recovers_slowly() -> None:
    memory = on_t4()
    whole = memory.plan_for(MINILM, "fp16")
    assert memory.shrink(whole) == whole // 2
    assert memory.out_of_memory_count == 1
    for _ in range(RECOVER_AFTER - 1):
        memory.succeeded(memory.token_budget)
    assert memory.token_budget == whole // 2
    memory.succeeded(memory.token_budget)
    assert memory.token_budget == whole // 2 + whole // 16
    for _ in range(20 * RECOVER_AFTER):
        memory.succeeded(memory.token_budget)
    assert memory.token_budget == whole


def test_shrinks_below_the_batch_that_failed() -> None:
    memory = on_t4()
    memory.plan_for(MINILM, "fp16")
    assert memory.shrink(1000) == 500
    assert memory.shrink(10) == LEAST_TOKENS


def test_trouble_resets_the_recovery() -> None:
    memory = on_t4()
    memory.plan_for(MINILM, "fp16")
    memory.shrink(4096)
    for _ in range(RECOVER_AFTER - 1):
        memory.succeeded(memory.token_budget)
    memory.shrink(2048)
    memory.succeeded(memory.token_budget)
    assert memory.token_budget == 1024


def test_batch_size_of_the_guide() -> None:
    memory = on_t4(free=15 * GIB, fraction=0.8)
    assert memory.calculate_optimal_batch_size(2048 * 2, 1024 * 2) == 64
    assert memory.calculate_optimal_batch_size(GIB // 8, GIB // 8) == 16  # 0.75 GiB a sample in 12.3 GiB, less 8 % 8
    assert memory.calculate_optimal_batch_size(GIB, GIB, processing_size_per_sample=0) == 6
    assert memory.calculate_optimal_batch_size(100 * GIB, 0) == 1
    assert memory.calculate_optimal_batch_size(100 * GIB, 0, min_batch=4) == 4


def test_without_a_profile_it_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """`T4MemoryManager()`, as the guide writes it."""
    monkeypatch.setattr("app.src.core.memory.detect", lambda: DeviceProfile.of_card("Tesla T4"))
    ours, given = T4MemoryManager(), T4MemoryManager(DeviceProfile.of_card("Tesla T4"))
    assert ours.usable_bytes == given.usable_bytes > 0
    assert ours.calculate_optimal_batch_size(GIB // 8, GIB // 8) == 16


@given(
    sizes=st.tuples(st.integers(0, 1 << 36), st.integers(0, 1 << 36), st.none() | st.integers(0, 1 << 36)),
    bounds=st.tuples(st.integers(1, 64), st.integers(0, 64)),
)
def test_batch_size_fits_and_stays_in_bounds(sizes: tuple[int, int, int | None], bounds: tuple[int, int]) -> None:
    memory, least, most = on_t4(), bounds[0], bounds[0] + bounds[1]
    size = memory.calculate_optimal_batch_size(*sizes, min_batch=least, max_batch=most)
    assert least <= size <= most
    processing = 2 * (sizes[0] + sizes[1]) if sizes[2] is None else sizes[2]
    assert size == least or size * (sizes[0] + sizes[1] + processing) <= memory.usable_bytes


# ----------------------------------------------------------------------------------------- one device, several engines

T4 = DeviceProfile.of_card("Tesla T4")
EVEN = MemoryLimits(1.0, 0)
PART = 128 << 20  # several of these do not hold a batch that fills the card


def left(*engines: T4MemoryManager) -> list[int]:
    return [engine.usable_bytes for engine in engines]


def test_a_second_model_takes_its_memory_from_both_budgets() -> None:
    card = DeviceMemory(T4)
    first = T4MemoryManager(limits=EVEN, free_bytes=2 * PART, used_bytes=PART, device=card)
    first.plan_for(BERT_LARGE, "fp16")
    alone = first.token_budget
    assert left(first) == [2 * PART]
    second = T4MemoryManager(limits=EVEN, free_bytes=PART, used_bytes=PART, device=card)
    second.plan_for(BERT_LARGE, "fp16")
    assert left(first, second) == [PART // 2] * 2, "weights are counted once, and both compute at the same time"
    assert first.token_budget == second.token_budget == alone // 4
    first.close()
    first.close()
    assert left(second) == [2 * PART]
    assert second.token_budget == alone


def test_an_engine_that_is_gone_leaves_its_memory() -> None:
    card = DeviceMemory(T4)
    first = T4MemoryManager(limits=EVEN, used_bytes=GIB, device=card)
    T4MemoryManager(limits=EVEN, used_bytes=4 * GIB, device=card)  # as if loading failed after this
    gc.collect()
    assert left(first) == [15 * GIB]


def test_bookings_of_a_search_count_for_all_engines() -> None:
    card = DeviceMemory(T4)
    first, second = (T4MemoryManager(limits=EVEN, free_bytes=2 * GIB, device=card) for _ in range(2))
    assert first.book(GIB // 2)
    assert left(first, second) == [GIB // 4 * 3] * 2
    third = T4MemoryManager(limits=EVEN, free_bytes=3 * GIB // 2, device=card)
    assert left(third) == [GIB // 2], "what is booked is not free, and not taken off twice"
    second.release(GIB // 2)
    assert left(first) == [2 * GIB // 3]


def test_a_model_beside_the_engines_is_held_until_it_is_gone() -> None:
    class Model: ...

    card, model = DeviceMemory(T4), Model()
    engine = T4MemoryManager(limits=EVEN, free_bytes=2 * PART, device=card)
    engine.plan_for(BERT_LARGE, "fp16")
    before = engine.token_budget
    card.hold(model, PART)
    assert left(engine) == [PART]
    assert engine.token_budget == before // 2
    del model
    gc.collect()
    assert engine.token_budget == before


def test_the_last_limits_of_a_device_count() -> None:
    card = DeviceMemory(T4)
    first = T4MemoryManager(limits=MemoryLimits(0.8, 0), device=card)
    T4MemoryManager(limits=MemoryLimits(0.5, GIB), device=card).close()
    assert left(first) == [7 * GIB]
