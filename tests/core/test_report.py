"""The optimizer's report: the table for people says what the JSON says, and figures are what they claim to be."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console

from app.src.core import t4_gpu_optimizer as optimizer
from app.src.core.device import PRECISIONS, DeviceProfile, Precision, Setting, settings_of
from app.src.core.measuring import report as reports
from app.src.core.measuring.embedding import (
    Embedding,
    measure_embedding,
    mixed_lengths,
    model_rate,
    texts_of,
    usable_precisions,
    with_shares,
    workloads,
)
from app.src.core.measuring.output import as_text, show
from app.src.core.measuring.products import Matmul, ModelProducts, groups_of, measure_products
from app.src.core.measuring.report import Report, as_json, describe, ratios_of
from app.src.core.measuring.sustained import Conditions, Point, Range, Sustained

CPU = DeviceProfile.cpu("Test CPU")
T4 = DeviceProfile.of_card("Tesla T4")
A100 = DeviceProfile.of_card("NVIDIA A100")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Several wait for each other at every product when tests take turns on few cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured() -> Report:
    """Real, tiny measurements of the processor, the model left out."""
    report = Report(describe(CPU), settings_of(CPU))
    for found in measure_products(CPU, groups_of(CPU, (64, 96), None), 0.2):
        (report.matmul if isinstance(found, Matmul) else report.settings).append(found)  # type: ignore[arg-type]
    report.embedding.append(Embedding("fp32", 16, 1234.5, 22222.2, path="packed"))
    return report


def on_t4() -> Report:
    """As a T4 might report it."""
    kernel = "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn"
    rows = [
        Matmul(
            "fp32", 4096, 4096, 4096, True, False, 5.0, 0.02, 0.62, 2.5e-7, "square", 27.0, "turing_sgemm_tn", False
        ),
        Matmul("fp16", 4096, 4096, 4096, True, True, 45.5, 0.02, 0.7, 3.2e-4, "square", 3.0, kernel, True),
        Matmul("fp16", 4095, 4095, 4095, False, True, 9.1, 0.02, 0.14, 3.2e-4, "square", 15.0, kernel, True),
        Matmul("tf32", 4096, 4096, 4096, True, False),
    ]
    report = Report(describe(T4), [Setting("precision", "fp16", "why")], rows, [])
    report.embedding = [
        Embedding("fp32", 64, 1000.0, 66_000.0),
        Embedding("fp16", 64, 4000.0, 264_000.0),
        Embedding("fp16", 100, 2000.0, 200_000.0, "mixed", 16, 256),
    ]
    seen = Conditions(9, Range(870, 900, 1590), None, Range(30.0, 69.0, 70.2), 70.0, None, {"sw_power_cap": 0.9})
    points = [Point(1.0, 50.0, 1590, 30.0), Point(30.0, 24.0, 900, 70.0)]
    report.sustained = [
        Sustained("fp32", 4096, 4096, 4096, 30.0, 5.0, 4.0, 0.8, 0.49, Conditions(), []),
        Sustained("fp16", 4096, 4096, 4096, 30.0, 50.0, 24.0, 0.48, 0.37, seen, points),
    ]
    report.ratios = list(ratios_of(T4, report))
    return report


def cells(line: str) -> list[str]:
    return line.split()


# --------------------------------------------------------------------------------------------------------------- tables


def test_the_table_has_every_row_of_the_json(measured: Report) -> None:
    document = json.loads(json.dumps(as_json(measured)))
    lines = as_text(measured).splitlines()
    products = [line for line in lines if " x " in line and line.split()[0] in PRECISIONS and "square" in line]
    assert len(products) == len(document["matmul"]) == len(PRECISIONS) * 3
    for line, row in zip(products, document["matmul"], strict=True):
        name, role, m, _, n, _, k, aligned, tflops, spread, peak, error = cells(line)
        assert (name, role, int(m), int(n), int(k), aligned == "yes") == (
            *(row["dtype"], row["role"], row["m"], row["n"], row["k"]),
            row["aligned"],
        )
        assert peak == "-"
        if row["tflops"] is None:
            assert (tflops, spread, error) == ("-", "-", "-")
        else:
            assert float(tflops) == pytest.approx(row["tflops"], abs=5.1e-4)
            assert float(spread.rstrip("%")) / 100 == pytest.approx(row["spread"], abs=5.1e-3)
            assert float(error) == pytest.approx(row["relative_error"], rel=0.06)
    assert ["fp32", "16", "1234.5", "22222", "-", "-", "packed"] in [cells(line) for line in lines]


@pytest.mark.parametrize("width", [40, 80, 100])
def test_a_narrow_terminal_cuts_no_figure(width: int) -> None:
    """A terminal wraps lines; a rate of "0.…" is lost."""
    report, shown = on_t4(), io.StringIO()
    console = Console(file=shown, width=width, color_system=None, highlight=False)
    show(report, console)
    assert "…" not in shown.getvalue()
    assert console.width == width
    (row,) = [row for row in report.matmul if row.dtype == "fp16" and row.aligned and row.m == 4096]
    line = next(line for line in shown.getvalue().splitlines() if line.startswith("fp16 tensor") and " 4096 x" in line)
    assert f"{row.tflops:.3f}" in line


def test_the_table_has_every_setting_with_its_reason(measured: Report) -> None:
    text = as_text(measured)
    for setting in measured.settings:
        value = "-" if setting.value is None else str(setting.value)
        (line,) = [line for line in text.splitlines() if line.startswith(f"{setting.name} ") and setting.reason in line]
        assert value in line


def test_a_cpu_is_labelled_as_one(measured: Report) -> None:
    assert as_text(measured).splitlines()[:2][0].startswith("Test CPU (cpu), torch ")
    assert as_text(measured).splitlines()[1] == "measured on the CPU: no GPU is used"
    assert "no GPU" not in as_text(on_t4())


def test_numbers_in_json_are_finite(measured: Report) -> None:
    def numbers(node: Any) -> list[float]:
        if isinstance(node, dict):
            return [number for value in node.values() for number in numbers(value)]
        if isinstance(node, list):
            return [number for value in node for number in numbers(value)]
        return [node] if isinstance(node, float) else []

    found = numbers(as_json(measured))
    assert len(found) > 10
    assert all(map(math.isfinite, found))


def test_a_gpu_row_shows_tensor_cores_peak_and_kernel() -> None:
    text = as_text(on_t4())
    assert "Tesla T4 (cuda, compute capability 7.5)" in text
    assert "16.0 GiB; 320 GB/s; peaks in TFLOP/s (int8: TOPS): fp32 8.1, fp16 65, int8 130" in text
    line = next(line for line in text.splitlines() if line.startswith("fp16 tensor cores") and "4096 x 4096" in line)
    assert cells(line)[-7:] == ["yes", "45.500", "2%", "70%", "3.2e-04", "ran", on_t4().matmul[1].kernel]
    fp32 = next(line for line in text.splitlines() if line.startswith("fp32") and "square" in line)
    assert cells(fp32)[-3:] == ["not", "used", "turing_sgemm_tn"]


def test_a_sustained_run_shows_what_held_the_clocks_back() -> None:
    line = next(line for line in as_text(on_t4()).splitlines() if "sw_power_cap" in line)
    assert cells(line)[-10:] == [
        *("30.0", "50.000", "24.000", "48%", "37%", "870..1590", "30..70", "-", "sw_power_cap", "90%")
    ]


def test_on_a_terminal_it_is_in_colour_and_keeps_to_its_width_where_figures_fit() -> None:
    out = io.StringIO()
    show(on_t4(), Console(file=out, width=130, force_terminal=True, color_system="standard"))
    assert "\x1b[1m" in out.getvalue()
    plain = Console(file=io.StringIO(), width=130, color_system=None)
    show(on_t4(), plain)
    tables = [line for line in plain.file.getvalue().splitlines() if "fp16" in line and "times" not in line]  # type: ignore[attr-defined]
    assert max(map(len, tables)) <= 130


# --------------------------------------------------------------------------------------------------------------- ratios


def test_ratios_are_what_a_person_came_for() -> None:
    assert {ratio.name: ratio.value for ratio in on_t4().ratios} == {
        "fp16 over fp32": 9.1,
        "fp16 square 4096 over 4095": 5.0,
        "fp32 sustained over burst": 0.8,
        "fp16 sustained over burst": 0.48,
        "fp16 over fp32 sustained": 6.0,
        "embedding fp16 over fp32, 64 tokens": 4.0,
    }
    texts = [ratio.text for ratio in on_t4().ratios]
    assert texts[0] == "tensor cores: fp16 is 9.10 times fp32 here (4096 x 4096)"
    assert texts[1] == "multiples of 8 in every edge: fp16 is 5.00 times as fast with 4096 as with 4095"
    assert texts[3] == "sustained: fp16 keeps 48% of its burst over 30 s"
    assert texts[-1] == "embedding: fp16 is 4.00 times fp32, texts of 64 tokens"


def test_tensor_cores_are_not_claimed_where_there_are_none() -> None:
    report = Report(describe(CPU), matmul=[Matmul(each, 64, 64, 64, True, False, 1.0) for each in ("fp32", "bf16")])
    assert [ratio.text for ratio in ratios_of(CPU, report)] == [
        "no tensor cores (cpu): bf16 is 1.00 times fp32 here (64 x 64)"
    ]


def test_there_are_no_ratios_of_nothing() -> None:
    assert list(ratios_of(T4, Report(describe(T4), matmul=[Matmul("fp16", 64, 64, 64, True, True)]))) == []


@pytest.mark.parametrize(("spreads", "expected"), [([0.1, 0.2, 0.9], None), ([0.1, 0.6, 0.9], 0.6), ([], None)])
def test_a_disturbed_machine_is_said(spreads: list[float], expected: float | None) -> None:
    rows = [Matmul("fp32", 64, 64, 64, True, False, 1.0, spread) for spread in spreads]
    found = reports._disturbed(rows)
    assert [each.value for each in found] == ([] if expected is None else [expected])


# ------------------------------------------------------------------------------------------------------------ embedding


def test_texts_differ_and_have_their_length() -> None:
    texts = texts_of([16] * 500)
    assert len(set(texts)) == 500
    assert {len(text.split()) for text in texts} == {16}
    assert [len(text.split()) for text in texts_of([3, 40])] == [3, 40]


def test_mixed_lengths_are_the_same_each_time_and_mostly_short() -> None:
    lengths = mixed_lengths(16, 512, 60_000)
    assert lengths == mixed_lengths(16, 512, 60_000)
    assert 16 <= min(lengths) < 20 < 450 < max(lengths) <= 512
    assert 60_000 <= sum(lengths) < 60_512
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(90, rel=0.25)  # the geometric mean of both ends


@pytest.mark.parametrize(("most", "equal"), [(512, [16, 64, 254]), (64, [16, 64]), (10, [10])])
def test_lengths_keep_to_what_the_model_takes(most: int, equal: list[int]) -> None:
    *fixed, mixed = workloads(most, 6000)
    assert [set(lengths) for lengths in fixed] == [{length} for length in equal]
    assert max(mixed) <= most
    assert all(5000 <= sum(lengths) <= 6600 for lengths in fixed)


TWO_LAYERS = ModelProducts("tiny", 2, (("feed-forward in", 64, 32), ("feed-forward out", 32, 64)))


def layer(role: str, n: int, k: int, tflops: float | None, m: int = 1000) -> Matmul:
    return Matmul("fp16", m, n, k, m == 1000, True, tflops, role=role)


def test_the_rate_of_a_layer_is_that_of_its_products_in_turn() -> None:
    rows = [
        layer("feed-forward in", 64, 32, 30.0),
        layer("feed-forward in", 64, 32, 3.0, m=999),
        layer("feed-forward out", 32, 64, 10.0),
        Matmul("fp16", 64, 64, 64, True, True, 99.0),
    ]
    assert model_rate(rows, TWO_LAYERS, "fp16") == pytest.approx(15.0)  # the harmonic mean of 30 and 10
    assert model_rate(rows, TWO_LAYERS, "fp32") is None
    row = with_shares(Embedding("fp16", 64, 1.0, 1e9), rows, TWO_LAYERS)
    assert row.linear_tflops == pytest.approx(2 * 2 * 2 * 64 * 32 * 1e9 / 1e12, rel=1e-3)
    assert row.share_of_products == pytest.approx(16.38 / 15, rel=1e-3)


def test_without_one_of_its_products_there_is_no_rate() -> None:
    rows = [layer("feed-forward in", 64, 32, 30.0), layer("feed-forward out", 32, 64, None)]
    assert model_rate(rows, TWO_LAYERS, "fp16") is None
    assert with_shares(Embedding("fp16", 64, 1.0, 1e9), rows, TWO_LAYERS).share_of_products is None


def test_a_model_that_is_not_there_is_said_for_each_precision() -> None:
    found = list(measure_embedding(CPU, "no/such/model", ["fp32", "bf16"]))
    assert [(each.name, each.value) for each in found if isinstance(each, Setting)] == [
        ("embedding fp32", None),
        ("embedding bf16", None),
    ]


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
    rows = [Matmul(each, 64, 64, 64, True, False, 1.0 if each in measured_in else None) for each in PRECISIONS]
    assert usable_precisions(profile, rows) == expected


# --------------------------------------------------------------------------------------------------------------- device


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
    described = describe(profile)
    assert {name: described[name] for name in expected} == expected
    assert {"torch", "cuda", "threads", "driver"} <= set(described)


@pytest.mark.parametrize(("profile", "precision"), [(T4, "fp16"), (A100, "fp16"), (CPU, "fp32")])
def test_settings_say_what_is_chosen_and_what_is_not(profile: DeviceProfile, precision: str) -> None:
    settings = {each.name: each for each in optimizer.settings_of(profile)}
    assert settings["precision"].value == precision
    assert ("embedding int8" in settings) == (profile is not CPU)
    assert ("embedding bf16" in settings) == (profile is T4)
    assert ("share_of_peak" in settings) == (profile is CPU)
    assert all(each.reason for each in settings.values())
