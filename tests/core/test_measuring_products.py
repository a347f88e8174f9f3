"""Matrix products as the measuring command takes them: which shapes, in turns, cold, with the error of their precision,
and what cannot be had as a null with its reason."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.src.core.backends.folder import find_folder, read_folder
from app.src.core.device import PRECISIONS, DeviceProfile, Setting
from app.src.core.measuring import products
from app.src.core.measuring.clocks import (
    LEAST_SAMPLES,
    MOST_LAUNCHES,
    MOST_SAMPLES,
    CudaClock,
    Work,
    host_clock,
    in_turns,
    launches_of,
)
from app.src.core.measuring.products import (
    CARD_TOKENS,
    MOST_BYTES,
    Bench,
    Matmul,
    ModelProducts,
    Operands,
    Product,
    Shape,
    copies,
    groups_of,
    kernel_of,
    measure_products,
    on_tensor_cores,
    products_of,
    set_tf32,
    unavailable,
)

CPU = DeviceProfile.cpu("Test CPU")
T4 = DeviceProfile.of_card("Tesla T4")
A100 = DeviceProfile.of_card("NVIDIA A100")
MINILM = products_of(read_folder(find_folder("all-MiniLM-L6-v2"), "all-MiniLM-L6-v2"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Several wait for each other at every product when tests take turns on few cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def card_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards compute on the CPU, timed by the host, with nobody to ask for kernels or caches."""
    monkeypatch.setattr(DeviceProfile, "torch_name", property(lambda _self: "cpu"))
    monkeypatch.setattr(products, "clock_of", lambda _profile: host_clock)
    monkeypatch.setattr(products, "kernel_of", lambda _profile, _run: None)


def product(precision: Any, m: int = 64, n: int = 64, k: int = 96, cache: int = 0) -> Product:
    return Product(Operands(Shape(m, n, k), "cpu"), precision, cache)


# --------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("shape", "operations", "aligned"),
    [
        (Shape(64, 64, 64), 524_288, "fp32 tf32 fp16 bf16 int8"),
        (Shape(1024, 1536, 384), 1_207_959_552, "fp32 tf32 fp16 bf16 int8"),
        (Shape(1023, 1023, 1023), 2_141_198_334, ""),
        (Shape(8, 8, 8), 1024, "fp32 tf32 fp16 bf16"),
        (Shape(4, 4, 12), 384, "fp32 tf32"),
    ],
)
def test_operations_and_alignment(shape: Shape, operations: int, aligned: str) -> None:
    assert shape.operations == operations
    assert [each for each in PRECISIONS if shape.aligned(each)] == aligned.split()


def test_the_models_products_come_from_its_config() -> None:
    assert MINILM.layers == 6
    assert MINILM.products == (
        ("queries, keys, values", 1152, 384),
        ("attention out", 384, 384),
        ("feed-forward in", 1536, 384),
        ("feed-forward out", 384, 1536),
    )
    assert MINILM.operations_per_token == 6 * 2 * (1152 * 384 + 384 * 384 + 2 * 1536 * 384)


def test_a_gated_feed_forward_is_twice_as_wide() -> None:
    shape = SimpleNamespace(hidden=768, intermediate=1152)
    config = {"model_type": "modernbert", "num_hidden_layers": 22}
    folder: Any = SimpleNamespace(name="gated", shape=shape, config=config)
    assert products_of(folder).products[2:] == (("feed-forward in", 2304, 768), ("feed-forward out", 768, 1152))


def test_the_largest_square_and_the_widest_layer_stand_beside_what_is_not_aligned() -> None:
    groups = groups_of(CPU, (256, 128), MINILM)
    assert groups[:2] == [(Shape(128, 128, 128),), (Shape(256, 256, 256), Shape(255, 255, 255))]
    pairs = [group for group in groups[2:] if len(group) == 2]
    assert pairs == [(Shape(1024, 1536, 384, "feed-forward in"), Shape(1023, 1536, 384, "feed-forward in"))]
    assert len(groups) == 2 + 4


def test_sizes_follow_the_device() -> None:
    def edges(profile: DeviceProfile) -> set[int]:
        return {shape.m for group in groups_of(profile, None, MINILM) for shape in group}

    assert max(edges(CPU)) == 1024
    assert edges(A100) == {1024, 4096, 8191, 8192, CARD_TOKENS, CARD_TOKENS - 1}
    assert groups_of(A100, (64,), None) == [(Shape(64, 64, 64), Shape(63, 63, 63))]


# --------------------------------------------------------------------------------------------------------------- clocks


class Events:
    """torch.cuda's events and current device, recorded; 6 ms pass between two records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        events = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                events.log.append("record")

            def synchronize(self) -> None:
                events.log.append("wait")

            def elapsed_time(self, _end: Any) -> float:
                assert events.log[-1] == "wait", "an event is read only when it has come"
                return 6.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", self.device)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.log.append(f"on {index}")
        yield
        self.log.append("off")


def test_events_stand_around_launches_back_to_back_on_the_right_card(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(monkeypatch)
    seconds = CudaClock(1)(lambda: events.log.append("launch"), 3)
    assert events.log == ["on 1", "record", "launch", "launch", "launch", "record", "off", "wait"]
    assert seconds == pytest.approx(0.002)


def clock_of_seconds(seconds: dict[str, float], log: list[str]) -> Callable[..., float]:
    """A clock for work that returns its name."""

    def clock(work: Callable[[], object], launches: int = 1) -> float:
        name = str(work())
        log.append(name)
        return seconds[name]

    return clock


def test_work_is_sampled_in_turns() -> None:
    log: list[str] = []
    works = [Work(lambda: "a", lambda: log.append("before a")), Work(lambda: "b")]
    first, second = in_turns(works, clock_of_seconds({"a": 0.25, "b": 0.5}, log), 0.0)
    assert first == [0.25] * LEAST_SAMPLES
    assert second == [0.5] * LEAST_SAMPLES
    assert log[-6:] == ["before a", "a", "b"] * 2


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_even_without_time_there_are_some_samples(seconds: float) -> None:
    (samples,) = in_turns([Work(lambda: None)], clock_of_seconds({"None": 1e-6}, []), seconds)
    assert LEAST_SAMPLES <= len(samples) <= MOST_SAMPLES


def test_on_a_busy_device_two_samples_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock(_work: Callable[[], object], launches: int = 1) -> float:
        nonlocal now
        now += 10.0
        return 10.0

    monkeypatch.setattr("app.src.core.measuring.clocks.time.perf_counter", lambda: now)
    assert in_turns([Work(lambda: None)], clock, 0.1) == [[10.0, 10.0]]


@pytest.mark.parametrize(("once", "launches"), [(1.0, 1), (2e-3, 1), (1e-4, 20), (1e-9, MOST_LAUNCHES)])
def test_short_work_is_launched_often_enough_to_be_timed(once: float, launches: int) -> None:
    assert launches_of(Work(lambda: "a"), clock_of_seconds({"a": once}, []), 2e-3) == launches


# ------------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("fp32", 0, 1e-6), ("bf16", 1e-3, 1e-2), ("fp16", 1e-4, 2e-3), ("int8", 3e-3, 5e-2)],
)
def test_relative_error_is_that_of_the_precision(precision: Any, least: float, most: float) -> None:
    assert least < product(precision).relative_error() < most


def test_the_error_grows_as_precision_falls() -> None:
    errors = [product(precision, k=256).relative_error() for precision in ("fp32", "fp16", "bf16")]
    assert errors == sorted(errors)
    assert errors[2] / errors[1] == pytest.approx(8, rel=0.5)  # 8 bits of mantissa against 11


def test_the_right_matrix_lies_as_a_layers_weight_does() -> None:
    """cuBLAS has fast 8-bit products for that layout alone."""
    for precision in ("fp32", "int8"):
        made = product(precision)
        _left, right, _out = next(made._next)
        assert right.shape == (96, 64)
        assert right.stride() == (1, 96)


def test_each_run_finds_other_matrices_than_the_one_before() -> None:
    made = product("fp32", cache=1 << 20)
    size = 4 * (64 * 96 + 96 * 64 + 64 * 64)
    assert made.copies == -(-3 * (1 << 20) // size) > 40
    places = {made.run().data_ptr() for _ in range(made.copies)}
    assert len(places) == made.copies
    assert made.run().data_ptr() in places


@pytest.mark.parametrize(
    ("size", "cache", "expected"),
    [
        (1 << 20, 0, 1),
        (1 << 20, 4 << 20, 12),
        (1 << 10, 50 << 20, 64),
        (200 << 20, 500 << 20, 2),
        (1 << 30, 1 << 40, 1),
    ],
)
def test_copies_outgrow_the_cache_within_bounds(size: int, cache: int, expected: int) -> None:
    assert copies(size, cache) == expected
    assert expected == 1 or expected * size <= MOST_BYTES


def test_fp32_and_tf32_are_told_apart_by_torchs_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", switched.append)
    for precision in PRECISIONS:
        if precision != "int8":
            Bench(A100, 1).work(product(precision), precision).before()
            Bench(T4, 1).work(product(precision), precision).before()
    assert switched == ["highest", "high"]
    set_tf32(T4, True)
    assert len(switched) == 2


def test_share_of_peak_is_of_the_published_rate(monkeypatch: pytest.MonkeyPatch, card_on_cpu: None) -> None:
    monkeypatch.setattr(products, "in_turns", lambda works, *_: [[1e-3] * 5 for _ in works])
    (row,) = Bench(T4, 1).measure((Shape(256, 256, 256),), ["fp16"])
    assert isinstance(row, Matmul)
    assert row.tflops == pytest.approx(2 * 256**3 / 1e-3 / 1e12, abs=1e-4)
    assert row.share_of_peak == pytest.approx((row.tflops or 0) / 65, abs=1e-4)
    assert row.milliseconds == 1
    assert row.tensor_cores
    assert row.spread == 0


def test_rate_and_spread_come_from_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow outlier among the samples changes neither much."""
    monkeypatch.setattr(products, "in_turns", lambda works, *_: [[2e-6] * 98 + [1.0] * 2 for _ in works])
    (row,) = Bench(CPU, 1).measure((Shape(64, 64, 64),), ["fp32"])
    assert isinstance(row, Matmul)
    assert row.tflops == pytest.approx(524_288 / 2e-6 / 1e12, abs=1e-4)
    assert row.spread == 0


@pytest.mark.parametrize(("seconds", "tflops"), [(1.0, 5.243e-07), (1e-2, 5.243e-05), (1e-6, 0.5243), (4.11e-9, 127.6)])
def test_a_slow_device_is_slow_and_not_nothing(monkeypatch: pytest.MonkeyPatch, seconds: float, tflops: float) -> None:
    monkeypatch.setattr(products, "in_turns", lambda works, *_: [[seconds] * 5 for _ in works])
    (row,) = Bench(CPU, 1).measure((Shape(64, 64, 64),), ["fp32"])
    assert isinstance(row, Matmul)
    assert row.tflops == pytest.approx(tflops, rel=1e-3)


def test_a_refused_product_is_a_row_of_nulls_with_a_reason_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Product.run

    def refuse(self: Product) -> torch.Tensor:
        if self._precision == "int8":
            raise RuntimeError("k must be a multiple of 8\nat line 3")
        return run(self)

    monkeypatch.setattr(Product, "run", refuse)
    fp32, row, setting = Bench(CPU, 0.01).measure((Shape(31, 31, 31),), ["fp32", "int8"])
    assert isinstance(fp32, Matmul)
    assert fp32.tflops
    assert isinstance(row, Matmul)
    assert (row.dtype, row.tflops) == ("int8", None)
    assert setting == Setting("matmul int8 31x31x31", None, "torch refuses: k must be a multiple of 8")


def test_matrices_that_memory_does_not_hold_are_refused_in_every_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(products, "Operands", full)
    found = list(Bench(CPU, 0.01).measure((Shape(32, 32, 32),), ["fp32", "bf16"]))
    assert [row.tflops for row in found if isinstance(row, Matmul)] == [None, None]
    assert [each.reason for each in found if isinstance(each, Setting)] == ["torch refuses: CUDA out of memory"] * 2


def test_emulated_precisions_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_probe", lambda _profile, precision: 1.0 if precision == "fp16" else 0.01)
    assert unavailable(CPU, "fp16") == "no gain here: 100.0 times slower than fp32 on a small product"
    assert unavailable(CPU, "bf16") is None
    assert unavailable(T4, "tf32") == "not available: compute capability 7.5; TF32 starts at compute capability 8.0"
    assert "emulated" in (unavailable(T4, "bf16") or "")
    assert unavailable(A100, "tf32") is None


def test_every_precision_has_a_row_for_every_shape_and_every_null_a_reason() -> None:
    groups = groups_of(CPU, (64, 96), ModelProducts("tiny", 1, (("feed-forward in", 64, 32),)))
    found = list(measure_products(CPU, groups, 0.2))
    rows = [each for each in found if isinstance(each, Matmul)]
    reasons = {each.name for each in found if isinstance(each, Setting) and each.value is None and each.reason}
    shapes = [shape for group in groups for shape in group]
    cells = [(row.dtype, row.shape) for row in rows]
    assert len(cells) == len(set(cells))
    assert set(cells) == {(each, shape) for each in PRECISIONS for shape in shapes}
    bounds = {"fp32": (0, 1e-5), "tf32": (0, 1e-2), "fp16": (1e-5, 5e-3), "bf16": (5e-4, 2e-2), "int8": (1e-3, 1e-1)}
    for row in rows:
        if row.tflops is None:
            assert {f"matmul {row.dtype}", f"matmul {row.dtype} {row.m}x{row.n}x{row.k}"} & reasons
            assert row.relative_error is row.spread is row.share_of_peak is row.milliseconds is None
            continue
        assert row.tflops > 0
        assert row.spread is not None
        assert row.relative_error is not None
        assert row.spread >= 0
        least, most = bounds[row.dtype]
        assert least <= row.relative_error < most, row
        assert row.tflops == pytest.approx(row.shape.operations / (row.milliseconds or 0) / 1e9, rel=1e-2)
    assert all(row.tflops for row in rows if row.dtype == "fp32")


# -------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize(
    ("kernel", "on"),
    [
        ("volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_tn", True),
        ("turing_s1688gemm_fp16_256x128_ldg8_tn", True),
        ("turing_fp16_h1688gemm_128x128_ldg8_stages_32x1_tn", True),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn", True),
        ("cutlass_80_tensorop_s1688gemm_tf32_128x128_32x3_tn_align4", True),
        ("void cutlass::Kernel2<cutlass_80_tensorop_i16832gemm_s8_128x64_128x3_tn_align16>(T1::Params)", True),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", True),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_tensor16x8x8_kernel", True),
        ("turing_sgemm_128x64_tn", False),
        ("ampere_sgemm_32x128_tn", False),
        ("turing_igemm_int8_128x128_ldg4_mods_nt", False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(T1::Params)", False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_kernel", False),
        ("vectorized_elementwise_kernel", None),
    ],
)
def test_kernels_are_told_by_their_names(kernel: str, on: bool | None) -> None:
    assert on_tensor_cores(kernel) is on


def lasting(microseconds: float) -> SimpleNamespace:
    return SimpleNamespace(elapsed_us=lambda: microseconds)


def test_the_kernel_that_took_longest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_card, on_host = SimpleNamespace(name="CUDA"), SimpleNamespace(name="CPU")
    events = [
        SimpleNamespace(name="aten::mm", device_type=on_host, time_range=lasting(99.0)),
        SimpleNamespace(name="Memset (Device)", device_type=on_card, time_range=lasting(50.0)),
        SimpleNamespace(name="splitKreduce_kernel", device_type=on_card, time_range=lasting(2.0)),
        SimpleNamespace(name="turing_sgemm_128x64_tn", device_type=on_card, time_range=lasting(9.0)),
    ]
    ran: list[str] = []

    @contextlib.contextmanager
    def profiler(**_: Any) -> Iterator[Any]:
        yield SimpleNamespace(events=lambda: events)
        assert ran == ["product", "synchronize"], "the profiler must not stop before the kernel has"

    monkeypatch.setattr(torch.profiler, "profile", profiler)
    monkeypatch.setattr(torch.cuda, "device", lambda _index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ran.append("synchronize"))
    assert kernel_of(T4, lambda: ran.append("product")) == "turing_sgemm_128x64_tn"
    assert kernel_of(CPU, lambda: ran.append("product")) is None


def test_no_kernel_where_the_profiler_cannot_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    monkeypatch.setattr(torch.cuda, "device", lambda _index: contextlib.nullcontext())
    assert kernel_of(T4, lambda: None) is None


# ----------------------------------------------------------------------------------------------------------- on a card


@pytest.mark.gpu
def test_events_agree_with_the_clock_on_the_wall() -> None:
    import time

    operands = Operands(Shape(2048, 2048, 2048), "cuda")
    made = Product(operands, "fp32")
    clock = CudaClock(0)
    clock(made.run, 20)
    torch.cuda.synchronize()
    started = time.perf_counter()
    took = clock(made.run, 50)
    assert took * 50 == pytest.approx(time.perf_counter() - started, rel=0.2)


@pytest.mark.gpu
def test_half_precision_runs_on_tensor_cores_and_fp32_does_not() -> None:
    profile = DeviceProfile.cuda("card", torch.cuda.get_device_capability(0))
    found = [row for row in Bench(profile, 0.2).measure((Shape(2048, 2048, 2048),), ["fp32", "fp16"])]
    fp32, fp16 = (row for row in found if isinstance(row, Matmul))
    assert statistics.fmean([fp32.tflops or 0, fp16.tflops or 0]) > 0
    assert fp32.kernel_on_tensor_cores is False, fp32.kernel
    if "fp16" in profile.tensor_cores:
        assert fp16.kernel_on_tensor_cores, fp16.kernel
        assert (fp16.tflops or 0) > 1.5 * (fp32.tflops or 1)
