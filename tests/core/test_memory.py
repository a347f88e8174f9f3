"""Token budgets: from free memory, halved on trouble, recovering slowly; and the guide's batch size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.core.device import DeviceProfile
from app.src.core.memory import (
    CPU_TOKENS,
    LEAST_TOKENS,
    RECOVER_AFTER,
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
