"""The measuring command's figures: in turns, with the error of their precision, nulls with a reason, conditions of the
card, ratios, and a table that says what the JSON says."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.src.core import measuring
from app.src.core import t4_gpu_optimizer as optimizer
from app.src.core.device import PRECISIONS, DeviceProfile, Precision, Setting
from app.src.core.measuring import (
    LEAST_SAMPLES,
    MOST_LAUNCHES,
    Product,
    Sampler,
    Shape,
    clock_of,
    describe,
    groups_of,
    in_turns,
    launches_of,
    measure_embedding,
    measure_products,
    measure_sustained,
    model_shape,
    ratios_of,
    sustained_row,
    texts_of,
    unavailable,
    usable_precisions,
)
from app.src.core.nvml import GpuSnapshot, GpuState

CPU = DeviceProfile.cpu("Test CPU")
T4 = DeviceProfile.of_card("Tesla T4")
A100 = DeviceProfile.of_card("NVIDIA A100")
SQUARE = Shape(64, 64, 64)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Several wait for each other at every product when tests take turns on few cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------------- the clocks


def test_events_stand_around_launches_back_to_back_on_the_right_card(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, _end: Any) -> float:
            assert log[-1] == "wait", "an event is read only when it has come"
            return 6.0

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        log.append(f"on {index}")
        yield
        log.append("off")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    seconds = clock_of(dataclasses.replace(T4, index=1))(lambda: log.append("launch"), 3)
    assert log == ["on 1", "record", "launch", "launch", "launch", "record", "off", "wait"]
    assert seconds == pytest.approx(0.002)


def test_work_is_sampled_in_turns() -> None:
    log: list[str] = []

    def work(name: str, seconds: float) -> measuring.Sampled:
        def sampled(_launches: int) -> float:
            log.append(name)
            return seconds

        return sampled

    assert in_turns([work("a", 0.25), work("b", 0.5)], 0.0) == [[0.25] * LEAST_SAMPLES, [0.5] * LEAST_SAMPLES]
    assert log[-4:] == ["a", "b"] * 2


def test_on_a_busy_device_two_samples_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(_launches: int) -> float:
        nonlocal now
        now += 10.0
        return 10.0

    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now))
    assert in_turns([work], 0.1) == [[10.0, 10.0]]


@pytest.mark.parametrize(("once", "launches"), [(1.0, 1), (2e-3, 1), (1e-4, 20), (1e-9, MOST_LAUNCHES)])
def test_short_work_is_launched_often_enough_to_be_timed(once: float, launches: int) -> None:
    assert launches_of(lambda _launches: once, 2e-3) == launches


# ------------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize(
    ("shape", "operations", "aligned"),
    [
        (Shape(64, 64, 64), 524_288, "fp32 tf32 fp16 bf16 int8"),
        (Shape(1023, 1023, 1023), 2_141_198_334, ""),
        (Shape(8, 8, 8), 1024, "fp32 tf32 fp16 bf16"),
        (Shape(4, 4, 12), 384, "fp32 tf32"),
    ],
)
def test_operations_and_alignment(shape: Shape, operations: int, aligned: str) -> None:
    assert shape.operations == operations
    assert [each for each in PRECISIONS if shape.row(CPU, each)["aligned"]] == aligned.split()


def test_the_largest_square_and_the_models_layer_stand_beside_what_is_not_aligned() -> None:
    assert groups_of(CPU, (256, 128), model_shape("all-MiniLM-L6-v2")) == [
        [Shape(128, 128, 128)],
        [Shape(256, 256, 256), Shape(255, 255, 255)],
        [Shape(1024, 1536, 384, "feed-forward"), Shape(1023, 1536, 384, "feed-forward")],
    ]
    assert {shape.m for group in groups_of(A100, None, None) for shape in group} == {1024, 4096, 8191, 8192}


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("fp32", 0, 1e-6), ("bf16", 1e-3, 1e-2), ("fp16", 1e-4, 2e-3), ("int8", 3e-3, 5e-2)],
)
def test_relative_error_is_that_of_the_precision(precision: Any, least: float, most: float) -> None:
    assert least < Product(CPU, Shape(64, 64, 96), precision).relative_error() < most


def test_the_right_matrix_lies_as_a_layers_weight_does() -> None:
    """cuBLAS has fast 8-bit products for that layout alone."""
    for precision in PRECISIONS:
        right = Product(CPU, Shape(64, 48, 96), precision)._right
        assert (right.shape, right.stride()) == ((96, 48), (1, 96))


def test_fp32_and_tf32_are_told_apart_by_torchs_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceProfile, "torch_name", property(lambda _self: "cpu"))
    monkeypatch.setattr(measuring, "clock_of", lambda _profile: lambda work, _launches: 1.0)
    switched: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", switched.append)
    for precision in PRECISIONS:
        for profile in (A100, T4):
            Product(profile, SQUARE, precision)(1)
    assert switched == ["highest", "high"]


@pytest.mark.parametrize(("seconds", "tflops"), [(1.0, 5.243e-07), (1e-6, 0.5243), (4.11e-9, 127.6)])
def test_rate_and_spread_come_from_the_median(monkeypatch: pytest.MonkeyPatch, seconds: float, tflops: float) -> None:
    """One slow outlier among the samples changes neither much; slow rates are not rounded to nothing."""
    monkeypatch.setattr(measuring, "in_turns", lambda works, *_: [[seconds] * 98 + [9.0] * 2 for _ in works])
    monkeypatch.setattr(measuring, "unavailable", lambda _profile, each: None if each == "fp32" else "no")
    row = list(measure_products(dataclasses.replace(CPU, peaks={"fp32": 8.1}), [[SQUARE]], 1.0))[-1]
    assert isinstance(row, dict)
    assert row["tflops"] == pytest.approx(tflops, rel=1e-3)
    assert row["share_of_peak"] == pytest.approx(tflops / 8.1, rel=1e-3)
    assert row["spread"] == 0


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_refused_product_is_a_row_of_nulls_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    run = Product.run

    def refuse(self: Product) -> torch.Tensor:
        if self._precision == "int8":
            raise error("k must be a multiple of 8\nat line 3")
        found: torch.Tensor = run(self)
        return found

    monkeypatch.setattr(Product, "run", refuse)
    monkeypatch.setattr(measuring, "unavailable", lambda _profile, each: None if each in ("fp32", "int8") else "no")
    *_, row, setting, fp32 = measure_products(CPU, [[Shape(31, 31, 31)]], 0.01)
    assert setting == Setting("matmul int8 31x31x31", None, "torch refuses: k must be a multiple of 8")
    assert isinstance(row, dict)
    assert isinstance(fp32, dict)
    assert (row["dtype"], row["tflops"]) == ("int8", None)
    assert fp32["tflops"]


def test_emulated_precisions_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"fp16": 1.0, "bf16": 0.01, "fp32": 0.01}
    monkeypatch.setattr(measuring, "Product", lambda _profile, _shape, precision: lambda _launches: took[precision])
    assert unavailable(CPU, "fp16") == "no gain here: 100.0 times slower than fp32 on a small product"
    assert unavailable(CPU, "bf16") is None
    assert unavailable(T4, "tf32") == "not available: compute capability 7.5; TF32 starts at compute capability 8.0"
    assert "emulated" in (unavailable(T4, "bf16") or "")


def test_every_precision_has_a_row_for_every_shape_and_every_null_a_reason() -> None:
    groups = groups_of(CPU, (64, 96), None)
    found = list(measure_products(CPU, groups, 0.2))
    rows = [each for each in found if isinstance(each, dict)]
    reasons = {each.name for each in found if isinstance(each, Setting) and each.value is None and each.reason}
    cells = [(row["dtype"], row["m"]) for row in rows]
    assert sorted(cells) == sorted((each, shape.m) for each in PRECISIONS for group in groups for shape in group)
    for row in rows:
        if row["tflops"] is None:
            assert {f"matmul {row['dtype']}", f"matmul {row['dtype']} {row['m']}x{row['n']}x{row['k']}"} & reasons
            assert row["relative_error"] is row["spread"] is row["share_of_peak"] is None
        else:
            assert row["tflops"] > 0
            assert row["spread"] >= 0
    assert all(row["tflops"] for row in rows if row["dtype"] == "fp32")


# ------------------------------------------------------------------------------------------------------- sustained load


def state(**told: Any) -> GpuState:
    """A card that tells this and nothing else."""
    return GpuState(**dict.fromkeys(GpuState.__dataclass_fields__) | {"index": 0, "name": "Tesla T4"} | told)  # type: ignore[arg-type]


def capped(clock: int, power: float, *reasons: str) -> GpuSnapshot:
    told = {"sm_clock_mhz": clock, "power_watts": power, "power_limit_watts": 70.0}
    return GpuSnapshot((state(**told, throttle_reasons=list(reasons)),))


def sampled(monkeypatch: pytest.MonkeyPatch, *snapshots: GpuSnapshot) -> dict[str, Any]:
    """The first snapshot finds the card."""
    left = [snapshots[0], *snapshots]
    monkeypatch.setattr(measuring, "snapshot", lambda **_: left.pop(0) if left else GpuSnapshot())
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _index: SimpleNamespace())
    with Sampler(T4, interval=0.001) as sampler:
        until = time.monotonic() + 60
        while left and time.monotonic() < until:
            time.sleep(0.001)
    return sampler.conditions


def test_conditions_are_ranges_and_shares_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(
        monkeypatch,
        *(capped(1590, 30.0), capped(900, 70.2, "sw_power_cap")),
        capped(870, 69.8, "sw_power_cap", "hw_thermal_slowdown"),
    )
    assert found == {
        "samples": 3,
        "reason": None,
        "sm_clock_mhz": {"least": 870, "median": 900, "most": 1590},
        "memory_clock_mhz": None,
        "power_watts": {"least": 30.0, "median": 69.8, "most": 70.2},
        "temperature_celsius": None,
        "power_limit_watts": 70.0,
        "throttle_reasons": {"sw_power_cap": 0.6667, "hw_thermal_slowdown": 0.3333},
    }


def test_without_a_driver_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sampler(CPU) as sampler:
        pass
    assert sampler.conditions["reason"] == "a CPU: clocks and power are not read"
    missing = GpuSnapshot(reason="the package nvidia-ml-py is not installed")
    monkeypatch.setattr(measuring, "snapshot", lambda **_: missing)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _index: SimpleNamespace())
    with Sampler(T4) as sampler:
        pass
    assert (sampler.conditions["samples"], sampler.conditions["reason"]) == (0, missing.reason)


@pytest.mark.parametrize(
    ("uuids", "own", "index"),
    [
        (("GPU-aa", "GPU-bb"), "bb", 1),  # CUDA_VISIBLE_DEVICES shows torch the second card alone
        (("GPU-aa",), None, 0),  # an older torch does not tell, and there is no choice
        (("GPU-aa", "GPU-bb"), None, None),
        (("GPU-aa", None), "cc", None),
    ],
)
def test_the_driver_is_asked_about_the_very_card(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str | None, ...], own: str | None, index: int | None
) -> None:
    known = GpuSnapshot(tuple(state(uuid=uuid, index=place) for place, uuid in enumerate(uuids)))
    monkeypatch.setattr(measuring, "snapshot", lambda **_: known)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _index: SimpleNamespace(uuid=own))
    with Sampler(T4, interval=0.001) as sampler:
        until = time.monotonic() + 60
        while index is not None and not sampler._states and time.monotonic() < until:
            time.sleep(0.001)
    assert {each.index for each in sampler._states} == ({index} if index is not None else set())
    if index is None:
        assert sampler.conditions["reason"] == "the driver's card for this device is unknown"


def test_burst_is_the_best_of_the_first_second_and_sustained_the_second_half() -> None:
    """A T4 as NVIDIA's staff describe it: 50 at first, 24 under its cap."""
    rates = [45.0, 50.0, 40.0, 30.0, 24.0, 24.0, 24.0, 24.0]
    found = sustained_row(T4, "fp16", SQUARE, [(0.5 * (place + 1), rate) for place, rate in enumerate(rates)])
    assert (found["burst_tflops"], found["tflops"], found["kept"], found["seconds"]) == (50.0, 24.0, 0.48, 4.0)
    assert found["share_of_peak"] == pytest.approx(24 / 65, rel=1e-3)
    assert sustained_row(CPU, "fp32", SQUARE, [(2.0, 0.01), (4.0, 0.01), (6.0, 0.01)])["kept"] == 1


def test_a_sustained_run_of_the_processor_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measure_sustained(CPU, Shape(128, 128, 128), "bf16", 0.1)
    assert isinstance(row, dict)
    assert 0 < row["tflops"] < 100
    assert row["conditions"]["reason"] == "a CPU: clocks and power are not read"

    def full(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(measuring, "Product", full)
    refused = Setting("sustained fp32", None, "torch refuses: CUDA out of memory")
    assert measure_sustained(CPU, SQUARE, "fp32", 0.1) == refused


# ------------------------------------------------------------------------------------------------------------ embedding


def test_texts_differ_and_have_their_length() -> None:
    texts = texts_of(500, 16)
    assert len(set(texts)) == 500
    assert {len(text.split()) for text in texts} == {16}


def test_a_model_that_is_not_there_is_said_for_each_precision() -> None:
    found = list(measure_embedding(CPU, "no/such/model", ["fp32", "bf16"]))
    names = [(each.name, each.value) for each in found if isinstance(each, Setting)]
    assert names == [("embedding fp32", None), ("embedding bf16", None)]


def product(dtype: str, m: int, tflops: float | None, *, aligned: bool = True, cores: bool = False) -> dict[str, Any]:
    named = {"dtype": dtype, "m": m, "n": m, "k": m, "role": "square", "aligned": aligned, "tensor_cores": cores}
    return named | {"tflops": tflops, "spread": 0.02, "share_of_peak": None, "relative_error": 2e-4}


@pytest.mark.parametrize(
    ("profile", "measured_in", "expected"),
    [
        (CPU, ["fp32", "bf16"], ["fp32", "bf16"]),
        (CPU, ["fp16"], []),
        (T4, ["fp32", "fp16", "bf16", "tf32"], ["fp32", "fp16"]),
        (A100, ["fp32", "tf32", "fp16", "bf16"], ["fp32", "tf32", "fp16", "bf16"]),
    ],
)
def test_only_what_was_measured_and_can_be_asked_for_is_embedded(
    profile: DeviceProfile, measured_in: list[Precision], expected: list[Precision]
) -> None:
    rows = [product(each, 64, 1.0 if each in measured_in else None) for each in PRECISIONS]
    assert usable_precisions(profile, rows) == expected


# ----------------------------------------------------------------------------------------------------------- the report


def on_t4() -> dict[str, Any]:
    """As a T4 might report it."""
    matmul = [
        product("fp32", 4096, 5.0),
        product("fp16", 4096, 45.5, cores=True),
        product("fp16", 4095, 9.1, aligned=False, cores=True),
        product("tf32", 4096, None),
    ]
    run = {"m": 4096, "n": 4096, "k": 4096, "seconds": 30.0, "share_of_peak": None}
    capped: dict[str, Any] = {"throttle_reasons": {"sw_power_cap": 0.9}, "reason": None}
    sustained = [
        run | {"dtype": "fp32", "burst_tflops": 5.0, "tflops": 4.0, "kept": 0.8, "conditions": capped},
        run | {"dtype": "fp16", "burst_tflops": 50.0, "tflops": 24.0, "kept": 0.48, "conditions": capped},
    ]
    embedding = [
        {"precision": name, "tokens": 64, "texts_per_second": rate, "tokens_per_second": 66 * rate, "path": "packed"}
        for name, rate in (("fp32", 1000.0), ("fp16", 4000.0))
    ]
    return {
        "device": describe(T4),
        "settings": [{"name": "precision", "value": "fp16", "reason": "why"}],
        "matmul": matmul,
        "sustained": sustained,
        "embedding": embedding,
        "ratios": list(ratios_of(matmul, sustained, embedding)),
    }


def test_ratios_are_what_a_person_came_for() -> None:
    ratios = on_t4()["ratios"]
    assert {ratio["name"]: ratio["value"] for ratio in ratios} == {
        "fp16 over fp32": 9.1,
        "fp16 square 4096 over 4095": 5.0,
        "fp32 sustained over burst": 0.8,
        "fp16 sustained over burst": 0.48,
        "fp16 over fp32 sustained": 6.0,
        "embedding fp16 over fp32, 64 tokens": 4.0,
    }
    texts = [ratio["text"] for ratio in ratios]
    assert texts[0] == "tensor cores: fp16 is 9.10 times fp32 here (4096 x 4096)"
    assert texts[1] == "multiples of 8 in every edge: fp16 is 5.00 times as fast with 4096 as with 4095"
    assert texts[3] == "sustained: fp16 keeps 48% of its burst over 30 s"
    assert texts[-1] == "embedding: fp16 is 4.00 times fp32, texts of 64 tokens"


def test_tensor_cores_are_not_claimed_where_there_are_none_and_nothing_gives_nothing() -> None:
    (ratio,) = ratios_of([product("fp32", 64, 1.0), product("bf16", 64, 1.0)], [], [])
    assert ratio["text"] == "no tensor cores: bf16 is 1.00 times fp32 here (64 x 64)"
    assert list(ratios_of([product("fp16", 64, None)], [], [])) == []


def test_the_table_has_every_row_and_every_reason() -> None:
    report = on_t4()
    lines = [line.split() for line in optimizer.as_text(report).splitlines()]
    assert lines[0][:3] == ["Tesla", "T4", "(cuda,"]
    assert ["fp16", "square", "4096", "4096", "4096", "True", "True", "45.5", "0.02", "-", "0.0002"] in lines
    assert ["tf32", "square", "4096", "4096", "4096", "True", "False", "-", "0.02", "-", "0.0002"] in lines
    assert ["fp16", "4096", "4096", "4096", "30", "50", "24", "0.48", "-", "sw_power_cap", "90%"] in lines
    assert ["fp16", "64", "4000", "2.64e+05", "packed"] in lines
    assert ["precision", "fp16", "why"] in lines


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (
            CPU,
            {"kind": "cpu", "name": "Test CPU", "compute_capability": None, "memory_bytes": None, "tensor_cores": []},
        ),
        (T4, {"kind": "cuda", "compute_capability": "7.5", "memory_bytes": 16 << 30, "tensor_cores": ["fp16", "int8"]}),
        (T4, {"bandwidth_gb_per_s": 320, "peak_tflops": {"fp32": 8.1, "fp16": 65, "int8": 130}}),
        (DeviceProfile.cuda("Unlisted", (8, 9)), {"peak_tflops": None, "bandwidth_gb_per_s": None}),
    ],
)
def test_the_device_in_json(profile: DeviceProfile, expected: dict[str, Any]) -> None:
    described = describe(profile)
    assert {name: described[name] for name in expected} == expected
    assert {"torch", "cuda", "threads", "driver"} <= set(described)


@pytest.mark.parametrize(("profile", "precision"), [(T4, "fp16"), (A100, "fp16"), (CPU, "fp32")])
def test_settings_say_what_is_chosen_and_what_is_not(profile: DeviceProfile, precision: str) -> None:
    settings = {each.name: each for each in optimizer.settings_of(profile)}
    assert settings["precision"].value == precision
    assert "embedding int8" in settings
    assert ("embedding bf16" in settings) == (profile is T4)
    assert ("share_of_peak" in settings) == (profile is CPU)
    assert all(each.reason for each in settings.values())


@pytest.mark.gpu
def test_a_card_tells_its_clocks_while_it_works() -> None:
    profile = DeviceProfile.cuda(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    row = measure_sustained(profile, Shape(4096, 4096, 4096), "fp16", 3.0)
    assert isinstance(row, dict)
    assert row["conditions"]["samples"] >= 5, row["conditions"]["reason"]
    assert row["conditions"]["sm_clock_mhz"] is not None
    assert row["burst_tflops"] >= row["tflops"] * 0.9
