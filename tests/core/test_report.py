"""The optimizer's report: the table for people says what the JSON says, and figures are what they claim to be."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from app.src.core import t4_gpu_optimizer as optimizer
from app.src.core.choices import Setting, settings_of
from app.src.core.device import PRECISIONS, DeviceProfile
from app.src.core.t4_gpu_optimizer import Bench, Embedding, Matmul, Plan, Product, Report, Shape

CPU = DeviceProfile.cpu("Test CPU")
T4 = DeviceProfile.of_card("Tesla T4")


@pytest.fixture(scope="module")
def measured() -> Report:
    """Real, tiny measurements of the processor, the model left out."""
    report = Report(optimizer.describe(CPU), settings_of(CPU))
    for found in optimizer.measure_products(CPU, Plan(sizes=(64, 96), seconds=0.2)):
        (report.matmul if isinstance(found, Matmul) else report.settings).append(found)  # type: ignore[arg-type]
    report.embedding.append(Embedding("fp32", 16, 1234.5, 22222.2))
    return report


def cells(line: str) -> list[str]:
    return line.split()


def test_the_table_has_every_row_of_the_json(measured: Report) -> None:
    document = json.loads(json.dumps(asdict(measured)))
    lines = optimizer.as_text(measured).splitlines()
    products = [line for line in lines if " x " in line and line.startswith("  ")]
    assert len(products) == len(document["matmul"]) == len(PRECISIONS) * 4
    for line, row in zip(products, document["matmul"], strict=True):
        name, m, _, n, _, k, aligned, tflops, spread, peak, error = cells(line)
        assert (name, int(m), int(n), int(k), aligned == "yes") == (
            row["dtype"],
            row["m"],
            row["n"],
            row["k"],
            row["aligned"],
        )
        assert peak == "-"
        if row["tflops"] is None:
            assert (tflops, spread, error) == ("-", "-", "-")
        else:
            assert float(tflops) == pytest.approx(row["tflops"], abs=5.1e-4)
            assert float(spread.rstrip("%")) / 100 == pytest.approx(row["spread"], abs=5.1e-3)
            assert float(error) == pytest.approx(row["relative_error"], rel=0.06)
    assert cells(lines[-1]) == ["fp32", "16", "1234.5", "22222"]


def test_the_table_has_every_setting_with_its_reason(measured: Report) -> None:
    text = optimizer.as_text(measured)
    for setting in measured.settings:
        value = "-" if setting.value is None else str(setting.value)
        (line,) = [
            line for line in text.splitlines() if line.startswith(f"  {setting.name} ") and setting.reason in line
        ]
        assert value in line


def test_figures_of_products_are_plausible(measured: Report) -> None:
    bounds = {"fp32": (0, 1e-5), "tf32": (0, 1e-2), "fp16": (1e-5, 5e-3), "bf16": (5e-4, 2e-2), "int8": (1e-3, 1e-1)}
    reasons = {setting.name for setting in measured.settings if setting.value is None}
    for row in measured.matmul:
        if row.tflops is None:
            assert {f"matmul {row.dtype}", f"matmul {row.dtype} {row.m}x{row.n}x{row.k}"} & reasons
            assert row.relative_error is row.spread is row.share_of_peak is None
            continue
        assert row.tflops > 0
        assert row.spread is not None
        assert row.relative_error is not None
        assert row.spread >= 0
        least, most = bounds[row.dtype]
        assert least <= row.relative_error < most, row
    assert any(row.tflops for row in measured.matmul if row.dtype == "fp32")


def test_numbers_in_json_are_finite(measured: Report) -> None:
    def numbers(node: Any) -> list[float]:
        if isinstance(node, dict):
            return [number for value in node.values() for number in numbers(value)]
        if isinstance(node, list):
            return [number for value in node for number in numbers(value)]
        return [node] if isinstance(node, float) else []

    found = numbers(asdict(measured))
    assert len(found) > 10
    assert all(map(math.isfinite, found))


def test_a_gpu_row_shows_tensor_cores_and_peak() -> None:
    row = Matmul("fp16", 4096, 4096, 4096, True, True, 45.5, 0.02, 0.7, 3.2e-4)
    report = Report(optimizer.describe(T4), [Setting("precision", "fp16", "why")], [row], [])
    text = optimizer.as_text(report)
    assert "Tesla T4 (cuda, compute capability 7.5)" in text
    (line,) = [line for line in text.splitlines() if "4096 x 4096" in line]
    assert cells(line)[:3] == ["fp16", "tensor", "cores"]
    assert cells(line)[-5:] == ["yes", "45.500", "2%", "70%", "3.2e-04"]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (
            CPU,
            {"kind": "cpu", "name": "Test CPU", "compute_capability": None, "memory_bytes": None, "tensor_cores": []},
        ),
        (T4, {"kind": "cuda", "compute_capability": "7.5", "memory_bytes": 16 << 30, "tensor_cores": ["fp16", "int8"]}),
        (T4, {"bandwidth_gb_per_s": 320, "peak_tflops": {"fp32": 8.1, "fp16": 65, "int8": 130}}),
        (DeviceProfile.of_card("NVIDIA L4"), {"compute_capability": "8.9", "attention": "memory-efficient"}),
        (DeviceProfile.cuda("Unlisted", (8, 9)), {"peak_tflops": None, "bandwidth_gb_per_s": None}),
    ],
)
def test_the_device_in_json(profile: DeviceProfile, expected: dict[str, Any]) -> None:
    described = optimizer.describe(profile)
    assert {name: described[name] for name in expected} == expected
    assert {"torch", "cuda", "threads"} <= set(described)


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


def test_rate_and_spread_come_from_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow outlier among the samples changes neither much."""
    monkeypatch.setattr(Bench, "_samples", lambda _self, _work: [2e-6] * 98 + [1.0] * 2)
    row = Bench(CPU, 1).measure(Shape(64, 64, 64), "fp32")
    assert row.tflops == pytest.approx(524_288 / 2e-6 / 1e12, abs=1e-4)
    assert row.spread == 0


@pytest.mark.parametrize(("seconds", "tflops"), [(1.0, 5.243e-07), (1e-2, 5.243e-05), (1e-6, 0.5243), (4.11e-9, 127.6)])
def test_a_slow_device_is_slow_and_not_nothing(monkeypatch: pytest.MonkeyPatch, seconds: float, tflops: float) -> None:
    monkeypatch.setattr(Bench, "_samples", lambda _self, _work: [seconds] * 5)
    assert Bench(CPU, 1).measure(Shape(64, 64, 64), "fp32").tflops == pytest.approx(tflops, rel=1e-3)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_even_without_time_there_are_some_samples(seconds: float) -> None:
    samples = Bench(CPU, seconds)._samples(lambda: None)
    assert optimizer.LEAST_SAMPLES <= len(samples) <= optimizer.MOST_SAMPLES


def test_the_error_grows_as_precision_falls() -> None:
    errors = [Product(Shape(64, 64, 256), precision, "cpu").relative_error() for precision in ("fp32", "fp16", "bf16")]
    assert errors == sorted(errors)
    assert errors[2] / errors[1] == pytest.approx(8, rel=0.5)  # 8 bits of mantissa against 11


@pytest.mark.parametrize("text", ["31", "32769", "64,16", "", "64,", "x", "1e3"])
def test_sizes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        optimizer.main(["--sizes", text])
    assert caught.value.code == 2
    assert "--sizes" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:1"])
def test_a_device_that_is_none(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizer.main(["--device", device, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert device in captured.err


def test_a_model_that_is_none_costs_only_its_own_section() -> None:
    found = list(optimizer.measure_embedding(CPU, Plan(model="no/such/model"), ["fp32", "bf16"]))
    assert [(each.name, each.value) for each in found if isinstance(each, Setting)] == [
        ("embedding fp32", None),
        ("embedding bf16", None),
    ]
    assert all("no such folder" in each.reason for each in found if isinstance(each, Setting))


@pytest.mark.parametrize(
    ("profile", "measured_in", "expected"),
    [
        (CPU, "fp32 fp16 bf16 int8", ["fp32", "bf16", "int8"]),
        (T4, "fp32 fp16 int8", ["fp32", "fp16"]),
        (DeviceProfile.of_card("NVIDIA A100"), "fp32 tf32 fp16 bf16 int8", ["fp32", "tf32", "fp16", "bf16"]),
        (CPU, "", []),
    ],
)
def test_the_model_is_measured_where_products_were(
    profile: DeviceProfile, measured_in: str, expected: list[str]
) -> None:
    rows = [Matmul(precision, 1, 1, 1, True, False, 1.0) for precision in measured_in.split()]  # type: ignore[arg-type]
    rows += [Matmul("bf16", 1, 1, 1, True, False)] * ("bf16" not in measured_in)
    assert optimizer.usable_precisions(profile, rows) == expected
