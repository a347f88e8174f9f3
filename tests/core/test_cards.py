"""What every generation of cards gets: precision and its reason, padding, TF32, budgets, the optimizer's advice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core.device import (
    CARDS,
    ELEMENT_BYTES,
    PRECISIONS,
    DeviceProfile,
    DeviceUnavailable,
    builds_for,
    choose_precision,
    driver_ceiling,
    kernels_exist,
    settings_of,
)
from app.src.core.memory import (
    CPU_TOKENS,
    LEAST_TOKENS,
    RECOVER_AFTER,
    MemoryLimits,
    ModelShape,
    T4MemoryManager,
)

GIB = 1 << 30
MINILM = ModelShape(384, 1536, 12, 256)
FULL = 27_264
"""Tokens of MiniLM that fill a T4: 40 multiprocessors, 16 tiles of 128 rows each, 3 tiles to a row."""


def sm(major: int, minor: int) -> DeviceProfile:
    """A card that no list knows, so that only its compute capability counts."""
    return DeviceProfile.cuda(f"Unlisted {major}{minor}", (major, minor), 16 * GIB)


# (capability) -> chosen by itself, padding of it, what can be asked for, part of the reason
GENERATIONS: list[tuple[tuple[int, int], str, int, str, str]] = [
    ((6, 0), "fp32", 1, "fp32 fp16", "6.0 has no tensor cores"),
    ((6, 1), "fp32", 1, "fp32", "6.1 has no tensor cores"),
    ((7, 0), "fp16", 8, "fp32 fp16", "none for bf16 or tf32"),
    ((7, 5), "fp16", 8, "fp32 fp16", "none for bf16 or tf32"),
    ((8, 0), "fp16", 8, "fp32 tf32 fp16 bf16", "more exact than bf16"),
    ((8, 6), "fp16", 8, "fp32 tf32 fp16 bf16", "more exact than bf16"),
    ((8, 9), "fp16", 8, "fp32 tf32 fp16 bf16", "more exact than bf16"),
    ((9, 0), "fp16", 8, "fp32 tf32 fp16 bf16", "more exact than bf16"),
    ((10, 0), "fp16", 8, "fp32 tf32 fp16 bf16", "more exact than bf16"),
    ((12, 0), "fp16", 8, "fp32 tf32 fp16 bf16", "more exact than bf16"),
]
by_generation = pytest.mark.parametrize(
    ("capability", "chosen", "padding", "possible", "reason"), GENERATIONS, ids=lambda value: str(value)[:12]
)


def takes(profile: DeviceProfile, precision: str) -> bool:
    try:
        return choose_precision(profile, precision) == (precision, "requested")
    except DeviceUnavailable:
        return False


@by_generation
def test_each_generation(capability: tuple[int, int], chosen: Any, padding: int, possible: str, reason: str) -> None:
    profile = sm(*capability)
    precision, why = choose_precision(profile)
    assert (precision, profile.padding_multiple(chosen)) == (chosen, padding)
    assert reason in why
    assert [each for each in PRECISIONS if takes(profile, each)] == possible.split()


@by_generation
def test_each_refusal_names_what_to_ask_for_instead(
    capability: tuple[int, int], chosen: str, padding: int, possible: str, reason: str
) -> None:
    profile = sm(*capability)
    for precision in set(PRECISIONS) - set(possible.split()):
        with pytest.raises(DeviceUnavailable) as caught:
            choose_precision(profile, precision)
        message = str(caught.value)
        assert profile.name in message
        assert precision in message
        advised = message.rsplit("use ", 1)[1].split(" or ")
        assert all(advice == "auto" or takes(profile, advice) for advice in advised), message


@by_generation
def test_the_optimizer_gives_the_same_advice(
    capability: tuple[int, int], chosen: str, padding: int, possible: str, reason: str
) -> None:
    settings = {each.name: each for each in settings_of(sm(*capability))}
    assert (settings["precision"].value, settings["padding_multiple"].value) == (chosen, padding)
    refused = {name.removeprefix("embedding ") for name in settings if name.startswith("embedding ")}
    assert refused == set(PRECISIONS) - set(possible.split())
    assert settings["share_of_peak"].value is None
    assert "Unlisted" in settings["share_of_peak"].reason


@pytest.mark.parametrize(
    ("precision", "bytes_", "t4", "a100"),
    [("fp32", 4, 1, 1), ("tf32", 4, 1, 4), ("fp16", 2, 8, 8), ("bf16", 2, 1, 8), ("int8", 1, 16, 16)],
)
def test_padding_fills_16_bytes_on_tensor_cores_only(precision: Any, bytes_: int, t4: int, a100: int) -> None:
    assert ELEMENT_BYTES[precision] == bytes_
    assert sm(7, 5).padding_multiple(precision) == t4
    assert sm(8, 0).padding_multiple(precision) == a100
    assert DeviceProfile.cpu().padding_multiple(precision) == 1
    if a100 > 1:
        assert a100 * bytes_ == 16


@pytest.mark.parametrize(
    ("name", "capability", "fp16", "bandwidth"),
    [
        ("Tesla T4", (7, 5), 65, 320),
        ("Tesla P4", (6, 1), 0.089, 192),
        ("Tesla V100-PCIE-16GB", (7, 0), None, None),
        ("Tesla V100-SXM2-32GB", (7, 0), 125, 900),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 312, 2039),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 312, 1555),
        ("NVIDIA A10", (8, 6), None, 600),
        ("NVIDIA L4", (8, 9), 121, 300),
        ("NVIDIA H100 80GB HBM3", (9, 0), 990, 3350),
        ("NVIDIA H200", (9, 0), 990, 4800),
        ("NVIDIA A10G", (8, 6), None, None),
        ("NVIDIA A100-PCIE-40GB MIG 1g.5gb", (8, 0), None, None),
        ("NVIDIA H100 PCIe", (9, 0), None, None),
        ("NVIDIA L40", (8, 9), None, None),
        ("NVIDIA T400", (7, 5), None, None),
        ("Tesla T4", (8, 0), None, None),  # a name that its capability belies
        ("NVIDIA GeForce RTX 4090", (8, 9), None, None),
    ],
)
def test_published_rates(name: str, capability: tuple[int, int], fp16: float | None, bandwidth: float | None) -> None:
    profile = DeviceProfile.cuda(name, capability)
    assert (profile.peaks.get("fp16"), profile.bandwidth) == (fp16, bandwidth)


# capability -> formats on tensor cores; driver floor and ceiling; builds
PROFILES: list[tuple[tuple[int, int], str, int, int | None, str]] = [
    ((6, 0), "", 525, 580, "12.6"),
    ((6, 1), "", 525, 580, "12.6"),
    ((7, 0), "fp16", 525, 580, "12.6 12.8"),
    ((7, 5), "fp16 int8", 525, None, "13.0 12.6 12.8"),
    ((8, 0), "tf32 fp16 bf16 int8", 525, None, "13.0 12.6 12.8"),
    ((8, 6), "tf32 fp16 bf16 int8", 525, None, "13.0 12.6 12.8"),
    ((8, 9), "tf32 fp16 bf16 int8 fp8", 525, None, "13.0 12.6 12.8"),
    ((9, 0), "tf32 fp16 bf16 int8 fp8", 525, None, "13.0 12.6 12.8"),
    ((10, 0), "tf32 fp16 bf16 int8 fp8", 525, None, "13.0 12.8"),
    ((12, 0), "tf32 fp16 bf16 int8 fp8", 525, None, "13.0 12.8"),
]


@pytest.mark.parametrize(
    ("capability", "cores", "floor", "ceiling", "builds"), PROFILES, ids=lambda value: str(value)[:10]
)
def test_the_whole_profile_of_each_generation(
    capability: tuple[int, int], cores: str, floor: int, ceiling: int | None, builds: str
) -> None:
    profile = sm(*capability)
    assert profile.tensor_core_formats == tuple(cores.split())
    assert profile.tensor_cores == set(cores.split()) - {"fp8"}
    assert (min(each.driver for each in builds_for(capability)), driver_ceiling(capability)) == (floor, ceiling)
    assert [build.cuda for build in builds_for(capability)] == builds.split()
    assert all(kernels_exist(build.architectures, capability) for build in builds_for(capability))


@pytest.mark.parametrize(("capability", "precision"), [(each[0], each[1]) for each in GENERATIONS])
def test_the_list_of_choices_names_cores_build_and_tf32(capability: tuple[int, int], precision: Any) -> None:
    profile = sm(*capability)
    chosen = {each.name: each for each in settings_of(profile)}
    assert chosen["tensor_cores"].value == (" ".join(profile.tensor_core_formats) or None)
    assert chosen["torch_build"].value == builds_for(capability)[0].cuda
    assert builds_for(capability)[0].command in chosen["torch_build"].reason
    assert chosen["tf32"].value is False  # never by itself: the precision that is chosen is faster
    assert ("needs compute capability 8.0" in chosen["tf32"].reason) == (capability < (8, 0))


@pytest.mark.parametrize(("requested", "on"), [("tf32", True), ("fp32", False), ("bf16", False)])
def test_tf32_is_on_only_where_it_is_asked_for(requested: str, on: bool) -> None:
    (found,) = [each for each in settings_of(sm(8, 0), requested=requested) if each.name == "tf32"]
    assert found.value is on
    assert ("exact" in found.reason) == (requested == "bf16")


def test_what_a_loaded_engine_has_is_shown_and_nothing_measured() -> None:
    def measured() -> float:
        raise AssertionError

    cpu = DeviceProfile.cpu("Some CPU")
    chosen = {each.name: each for each in settings_of(cpu, measured, chosen=("bf16", "measured before"))}
    assert (chosen["precision"].value, chosen["precision"].reason) == ("bf16", "measured before")
    assert "torch_build" not in chosen


@pytest.mark.parametrize("name", CARDS)
def test_what_cards_have_in_common(name: str) -> None:
    """Dense rates: half precision at least twice fp32 on tensor cores, INT8 twice fp16, no figure from sparsity."""
    profile = DeviceProfile.of_card(name)
    if profile.tensor_cores and "fp32" in profile.peaks:
        assert 3 < profile.peaks["fp16"] / profile.peaks["fp32"] < 35
    if "int8" in profile.tensor_cores and "int8" in profile.peaks:
        assert profile.peaks["int8"] / profile.peaks["fp16"] == pytest.approx(2, rel=0.01)
    if "tf32" in profile.peaks:
        assert profile.peaks["fp16"] / profile.peaks["tf32"] == pytest.approx(2, rel=0.05)
        assert profile.peaks["bf16"] == profile.peaks["fp16"]
    assert ("fp16" in profile.tensor_cores) == (choose_precision(profile)[0] == "fp16")


@pytest.mark.parametrize(
    ("built_for", "runs_on", "fails_on"),
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", "7.5 8.0 8.6 8.7 8.9 9.0 10.0 10.3 12.0", "5.2 6.1 7.0 11.0"),
        ("sm_50 sm_60 sm_70", "5.0 5.2 6.0 6.1 7.0 7.2 7.5", "8.0 9.0"),
        ("sm_70 compute_70", "7.0 7.5 8.0 9.0 12.0", "6.1"),
        ("sm_90a", "9.0", "8.9 10.0"),
        ("sm_100f sm_120f", "10.0 10.3 12.0 12.1", "9.0 11.0"),
    ],
)
def test_which_builds_of_torch_run_where(built_for: str, runs_on: str, fails_on: str) -> None:
    for listed, expected in ((runs_on, True), (fails_on, False)):
        for text in listed.split():
            major, minor = text.split(".")
            assert kernels_exist(built_for.split(), (int(major), int(minor))) is expected, text


# -------------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("total", "free", "fraction", "reserve", "usable"),
    [
        (16, 16, 0.8, 0, 12.8),
        (16, 15, 0.8, 0.5, 12.3),
        (16, 6, 0.8, 0.5, 5.5),  # others use the rest
        (16, 16, 1.0, 1, 15),
        (16, 16, 0.25, 0, 4),
        (16, 16, 0.1, 2, 0),  # the reserve is all of it
        (16, 0, 0.5, 1, 7),  # unknown free memory: the total counts
        (141, 140, 0.9, 0.5, 126.4),
    ],
)
def test_usable_memory(total: float, free: float, fraction: float, reserve: float, usable: float) -> None:
    profile = DeviceProfile.cuda("x", (7, 5), int(total * GIB))
    limits = MemoryLimits(fraction, int(reserve * GIB))
    memory = T4MemoryManager(profile, limits, free_bytes=int(free * GIB))
    assert memory.usable_bytes == pytest.approx(usable * GIB, rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "bytes_"),
    [
        ("fp32", 4 * (8 * 384 + 2 * 1536 + 12 * 256)),
        ("tf32", 4 * 9216),
        ("fp16", 2 * 9216),
        ("bf16", 2 * 9216),
        ("int8", 9216),
    ],
)
def test_what_a_token_costs(precision: Any, bytes_: int) -> None:
    assert MINILM.bytes_per_token(precision) == bytes_


@pytest.mark.parametrize(
    ("free_mib", "tokens"),
    [(512, LEAST_TOKENS), (513, LEAST_TOKENS), (530, 1024), (768, 14_563), (900, 22_072), (1024, FULL), (2048, FULL)],
)
def test_budget_of_a_crowded_t4(free_mib: int, tokens: int) -> None:
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=free_mib << 20)
    assert memory.plan_for(MINILM, "fp16") == memory.token_budget == tokens


def test_a_cpu_keeps_its_budget_whatever_its_memory() -> None:
    for size in (0, GIB, 512 * GIB):
        assert T4MemoryManager(DeviceProfile.cpu("x", size)).plan_for(MINILM, "fp32") == CPU_TOKENS


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.just(None), st.integers(1, 100_000)), max_size=300))
def test_the_budget_stays_between_its_bounds(events: list[int | None]) -> None:
    """None: a batch went well; a number: a batch of so many tokens did not fit."""
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=2 * GIB)
    most = memory.plan_for(MINILM, "fp16")
    for event in events:
        before = memory.token_budget
        if event is None:
            memory.succeeded(memory.token_budget)
            assert before <= memory.token_budget <= before + max(1, before // 8)
        else:
            after = memory.shrink(event)
            assert after == memory.token_budget == max(LEAST_TOKENS, min(before, event // 2))
        assert LEAST_TOKENS <= memory.token_budget <= most
    assert memory.out_of_memory_count == sum(event is not None for event in events)


def test_recovery_takes_many_good_batches_and_ends_at_the_plan() -> None:
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=2 * GIB)
    most = memory.plan_for(MINILM, "fp16")
    memory.shrink(most)
    batches = 0
    while memory.token_budget < most:
        memory.succeeded(memory.token_budget)
        batches += 1
    assert batches == 6 * RECOVER_AFTER  # 1.125 ** 6 > 2
    memory.succeeded(memory.token_budget)
    assert memory.token_budget == most


def test_a_new_plan_forgets_the_shrinking_but_not_the_count() -> None:
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=2 * GIB)
    most = memory.plan_for(MINILM, "fp16")
    memory.shrink(100)
    assert memory.plan_for(MINILM, "fp16") == most
    assert memory.out_of_memory_count == 1


@pytest.mark.parametrize(
    ("sizes", "bounds", "batch"),
    [
        ((GIB, 0, 0), (1, 64), 8),  # 12.3 GiB: 12 fit, 8 of them aligned
        ((GIB, GIB, None), (1, 64), 2),  # moved 2, processing 4: 6 GiB a sample
        ((GIB // 2, 0, 0), (1, 64), 24),
        ((0, 0, 0), (1, 64), 64),  # costs nothing: the bound
        ((0, 0, 0), (1, 63), 56),
        ((1, 1, 1), (9, 15), 9),  # aligned would be below the least
        ((20 * GIB, 0, 0), (3, 64), 3),
    ],
)
def test_batch_sizes_of_the_guide(sizes: tuple[int, int, int | None], bounds: tuple[int, int], batch: int) -> None:
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=15 * GIB)
    assert memory.calculate_optimal_batch_size(*sizes, min_batch=bounds[0], max_batch=bounds[1]) == batch


# ------------------------------------------------------------------------------------------------------------- bookings


def test_what_is_booked_is_missing_from_batches_and_comes_back() -> None:
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=2 * GIB)
    assert memory.plan_for(MINILM, "fp16") == FULL
    usable = memory.usable_bytes
    assert memory.book(1100 << 20, times=2)
    assert memory.usable_bytes == usable - (1100 << 20)
    fewer = memory.token_budget
    assert fewer == memory.usable_bytes // MINILM.bytes_per_token("fp16") < FULL
    memory.release(1100 << 20)
    assert (memory.usable_bytes, memory.token_budget, memory.device.booked_bytes) == (usable, FULL, 0)


def test_at_most_half_is_booked() -> None:
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=2 * GIB)
    half = memory.usable_bytes // 2
    assert not memory.book(half + 1)
    assert memory.book(half - 5)
    assert not memory.book(6)
    assert memory.book(6, times=1.5)
    assert memory.device.booked_bytes == half + 1


def test_a_budget_that_was_shrunk_stays_shrunk_when_bookings_change() -> None:
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=2 * GIB)
    memory.plan_for(MINILM, "fp16")
    shrunk = memory.shrink(10_000)
    assert memory.book(1 << 20)
    assert memory.token_budget == shrunk
    memory.release(1 << 20)
    assert memory.token_budget == shrunk


def test_a_booking_below_a_shrunk_budget_does_not_make_it_forgotten() -> None:
    memory = T4MemoryManager(DeviceProfile.of_card("Tesla T4"), free_bytes=2 * GIB)
    memory.plan_for(MINILM, "fp16")
    shrunk = memory.shrink(memory.token_budget)
    most = memory.usable_bytes
    assert memory.book(most // 2, times=10)
    assert memory.book(memory.usable_bytes * 9 // 10, times=10)
    assert memory.token_budget < shrunk
    memory.release(memory.device.booked_bytes)
    assert memory.token_budget == shrunk


def test_a_cpus_budget_does_not_know_bookings() -> None:
    memory = T4MemoryManager(DeviceProfile.cpu("x", 8 * GIB))
    memory.plan_for(MINILM, "fp32")
    assert memory.book(GIB)
    assert memory.token_budget == CPU_TOKENS
