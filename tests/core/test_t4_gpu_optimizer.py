"""The measuring command: the shape of its JSON, figures that are plausible and in turns, nulls that come with a reason,
flags that are refused before minutes are spent."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from app.src.core import t4_gpu_optimizer as optimizer
from app.src.core.device import PRECISIONS, DeviceProfile, Setting, settings_of
from app.src.core.memory import ModelShape
from app.src.core.t4_gpu_optimizer import measure_embedding, measure_products, model_shape, multiplied, unavailable
from tests.core.conftest import MINILM

ROOT = Path(__file__).resolve().parents[2]
MODULE = "app.src.core.t4_gpu_optimizer"
CPU = DeviceProfile.cpu("Test CPU")
T4 = DeviceProfile.of_card("Tesla T4")
A100 = DeviceProfile.of_card("NVIDIA A100")
SQUARE = ("square", 64, 64, 64)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Several wait for each other at every product when tests take turns on few cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """On one thread: several wait for each other at every product when tests take turns on few cores."""
    whole = [sys.executable, "-W", "error::RuntimeWarning", "-m", MODULE, *arguments]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(whole, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as out:
        patched.setattr(optimizer, "TEXTS_TOKENS", {"cpu": 400})
        assert optimizer.main(["--json", "--device", "cpu", "--duration", "0.2", "--sizes", "128,256"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


@pytest.mark.xdist_group("measured")
def test_json_has_the_promised_keys(report: dict[str, Any]) -> None:
    assert {"device", "settings", "matmul", "embedding"} <= set(report)
    assert report["device"]["kind"] == "cpu"
    assert all(set(each) == {"name", "value", "reason"} for each in report["settings"])
    product = {"dtype", "m", "n", "k", "aligned", "tensor_cores"}
    figures = {"tflops", "spread", "share_of_peak", "relative_error"}
    assert all(product | figures <= set(each) for each in report["matmul"])
    embedding = {"precision", "tokens", "texts_per_second", "tokens_per_second"}
    assert all(embedding <= set(each) for each in report["embedding"])


@pytest.mark.xdist_group("measured")
def test_every_null_has_its_reason(report: dict[str, Any]) -> None:
    reasons = {each["name"]: each["reason"] for each in report["settings"] if each["value"] is None}
    for row in report["matmul"]:
        if row["tflops"] is None:
            name = f"matmul {row['dtype']}"
            assert name in reasons or f"{name} {row['m']}x{row['n']}x{row['k']}" in reasons
        assert row["share_of_peak"] is None
    assert "no published peak rates" in reasons["share_of_peak"]
    assert "8.0" in reasons["matmul tf32"]


@pytest.mark.xdist_group("measured")
def test_figures_are_plausible(report: dict[str, Any]) -> None:
    rows = [row for row in report["matmul"] if row["dtype"] == "fp32"]
    squares = {("square", edge, edge, edge) for edge in (128, 256, 255)}
    layers = {("feed-forward", tokens, 1536, 384) for tokens in (1024, 1023)}
    assert {(row["role"], row["m"], row["n"], row["k"]) for row in rows} == squares | layers
    assert [row["aligned"] for row in rows].count(False) == 2
    assert all(1e-5 < row["tflops"] < 100 and row["spread"] >= 0 for row in rows)
    assert all(0 < row["relative_error"] < 1e-5 for row in rows)
    assert not any(row["tensor_cores"] for row in rows)


@pytest.mark.xdist_group("measured")
def test_embedding_is_measured_with_the_real_model(report: dict[str, Any]) -> None:
    rows = [row for row in report["embedding"] if row["precision"] == "fp32"]
    assert [row["tokens"] for row in rows] == [16, 64, 254]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["texts_per_second"] * (row["tokens"] + 2), rel=0.02)


@pytest.mark.slow
def test_table_for_people() -> None:
    done = command("--device", "cpu", "--duration", "0.1", "--sizes", "64", "--model", "hash:64")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^fp32 +square +64 +64 +64 +True +False +\d", done.stdout, re.MULTILINE)
    assert "is not a packaged model" in done.stdout  # the reason why no layers were multiplied
    assert "measured on the CPU" in done.stdout
    assert re.search(r"^precision +(fp32|bf16) ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--sizes", ["31", "32769", "64,16", "", "64,", "x", "1e3", "1"]),
        ("--duration", ["0", "-1", "nan", "inf", "x", "3601"]),
        ("--device", ["gpu", "cpu:x", "cuda:99"]),
        ("--model", ["no/such-model", "all-MiniLM-L6-v22", "", "/no/such/folder"]),
    ],
)
def test_flags_that_are_refused(flag: str, values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for value in values:
        try:
            code: Any = optimizer.main([f"{flag}={value}", "--json"])
        except SystemExit as caught:
            code = caught.code
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, ""), value
        assert flag in captured.err or value in captured.err


def test_a_model_that_cannot_compute_is_told_with_the_products(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder could be read, its weights could not; products need none."""

    report: dict[str, Any] = {"settings": [], "embedding": []}
    monkeypatch.setattr(optimizer, "make_report", lambda *_: report)
    monkeypatch.setattr(optimizer, "model_shape", lambda _model: None)
    assert optimizer.main(["--json", "--model", "damaged"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == report
    assert captured.err.startswith("--model damaged: not measured in any precision")
    assert optimizer.main(["--json"]) == 0, "nobody has asked for the default model"


def test_what_the_device_is_without_measuring() -> None:
    found = optimizer.get_gpu_info("cpu")
    assert found["kind"] == "cpu"
    assert {"compute_capability", "memory_bytes", "tensor_cores", "torch", "driver"} <= set(found)


def test_the_names_of_the_guides(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.src.core.memory import T4MemoryManager

    assert optimizer.T4MemoryManager is T4MemoryManager
    calibrating: Any = ModuleType("optimizer")
    for name in ("T4TensorRTOptimizer", "T4GPUConfig"):
        setattr(calibrating, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "app.src.core.onnx_export", ModuleType("onnx_export"))
    monkeypatch.setitem(sys.modules, "app.src.core.onnx_export.optimizer", calibrating)
    assert optimizer.T4TensorRTOptimizer is calibrating.T4TensorRTOptimizer
    assert optimizer.T4GPUConfig is calibrating.T4GPUConfig
    with pytest.raises(AttributeError, match="no attribute 'T4Nothing'"):
        _ = optimizer.T4Nothing


# ------------------------------------------------------------------------------------------------------- the products


FIGURES = ([1e-3] * 98 + [9.0] * 2, 1e-7)


def only(monkeypatch: pytest.MonkeyPatch, *precisions: str) -> None:
    monkeypatch.setattr(optimizer, "unavailable", lambda _profile, each: None if each in precisions else "no")


@pytest.mark.parametrize(
    ("edge", "aligned"),
    [(64, "fp32 tf32 fp16 bf16 int8"), (1023, ""), (8, "fp32 tf32 fp16 bf16"), (4, "fp32 tf32")],
)
def test_alignment(monkeypatch: pytest.MonkeyPatch, edge: int, aligned: str) -> None:
    only(monkeypatch, "fp32")
    monkeypatch.setattr(optimizer, "multiplied", lambda *_: FIGURES)
    found = [each for each in measure_products(CPU, [edge], None, 0.001) if isinstance(each, dict)]
    assert {row["dtype"] for row in found if row["aligned"] and row["m"] == edge} == set(aligned.split())


def test_the_largest_square_and_the_models_layer_stand_beside_what_is_not_aligned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, "fp32")
    monkeypatch.setattr(optimizer, "multiplied", lambda *_: FIGURES)

    def shapes(profile: DeviceProfile, edges: Sequence[int] | None, model: ModelShape | None) -> list[Any]:
        rows = [each for each in measure_products(profile, edges, model, 0.1) if isinstance(each, dict)]
        return [(row["role"], row["m"], row["n"], row["k"]) for row in rows if row["dtype"] == "fp32"]

    squares = [("square", edge, edge, edge) for edge in (128, 256, 255)]
    layers = [("feed-forward", tokens, 1536, 384) for tokens in (1024, 1023)]
    assert shapes(CPU, (256, 128), model_shape("all-MiniLM-L6-v2")) == squares + layers
    assert {shape[1] for shape in shapes(A100, None, None)} == {1024, 4096, 8191, 8192}


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("fp32", 0, 1e-6), ("bf16", 1e-3, 1e-2), ("fp16", 1e-4, 2e-3), ("int8", 3e-3, 5e-2)],
)
def test_relative_error_is_that_of_the_precision(precision: Any, least: float, most: float) -> None:
    times, error = multiplied(CPU, ("square", 64, 64, 96), precision, 0.001)
    assert least < error < most
    assert min(times) > 0


def test_the_right_matrix_lies_as_a_layers_weight_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS has fast 8-bit products for that layout alone."""
    seen = []

    def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        seen.append((right.shape, right.stride()))

    monkeypatch.setattr(torch, "mm", multiply)
    multiplied(CPU, ("square", 64, 48, 96), "fp32", 0.001)
    assert set(seen) == {((96, 48), (1, 96))}


def test_fp32_and_tf32_are_told_apart_by_torchs_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", switched.append)
    monkeypatch.setattr(DeviceProfile, "torch_name", property(lambda _self: "cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda _index: contextlib.nullcontext())
    for precision in ("fp32", "tf32"):
        for profile in (A100, T4):
            multiplied(profile, SQUARE, precision, 0.001)
    assert switched == ["highest", "high"]


@pytest.mark.parametrize(("seconds", "tflops"), [(1.0, 5.243e-07), (1e-6, 0.5243), (4.11e-9, 127.6)])
def test_rate_and_spread_come_from_the_median(monkeypatch: pytest.MonkeyPatch, seconds: float, tflops: float) -> None:
    """One slow outlier among the samples changes neither much; slow rates are not rounded to nothing."""
    only(monkeypatch, "fp32")
    monkeypatch.setattr(optimizer, "multiplied", lambda *_: ([seconds] * 98 + [9.0] * 2, 0.0))
    rows = measure_products(dataclasses.replace(CPU, peaks={"fp32": 8.1}), [64], None, 1.0)
    row = next(each for each in rows if isinstance(each, dict) and each["dtype"] == "fp32")
    assert row["tflops"] == pytest.approx(tflops, rel=1e-3)
    assert row["share_of_peak"] == pytest.approx(tflops / 8.1, rel=1e-3)
    assert row["spread"] == 0


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_refused_product_is_a_row_of_nulls_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(_profile: object, _shape: object, precision: str, _seconds: float) -> Any:
        if precision == "int8":
            raise error("k must be a multiple of 8\nat line 3")
        return FIGURES

    monkeypatch.setattr(optimizer, "multiplied", refuse)
    only(monkeypatch, "fp32", "int8")
    found = list(measure_products(CPU, [31], None, 0.01))
    assert Setting("matmul int8 31x31x31", None, "torch refuses: k must be a multiple of 8") in found
    rows = {each["dtype"]: each["tflops"] for each in found if isinstance(each, dict) and each["m"] == 31}
    assert rows["int8"] is None
    assert rows["fp32"]


def test_emulated_precisions_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"fp16": 1.0, "bf16": 0.01, "fp32": 0.01}
    monkeypatch.setattr(optimizer, "multiplied", lambda _profile, _shape, precision, _seconds: ([took[precision]], 0.0))
    assert unavailable(CPU, "fp16") == "no gain here: 100.0 times slower than fp32 on a small product"
    assert unavailable(CPU, "bf16") is None
    assert unavailable(T4, "tf32") == "not available: compute capability 7.5; TF32 starts at compute capability 8.0"
    assert "emulated" in (unavailable(T4, "bf16") or "")


def test_every_precision_has_a_row_for_every_shape_and_every_null_a_reason() -> None:
    found = list(measure_products(CPU, (64, 96), None, 0.2))
    rows = [each for each in found if isinstance(each, dict)]
    reasons = {each.name for each in found if isinstance(each, Setting) and each.value is None and each.reason}
    cells = [(row["dtype"], row["m"]) for row in rows]
    assert sorted(cells) == sorted((each, edge) for each in PRECISIONS for edge in (64, 95, 96))
    for row in rows:
        if row["tflops"] is None:
            assert {f"matmul {row['dtype']}", f"matmul {row['dtype']} {row['m']}x{row['n']}x{row['k']}"} & reasons
            assert row["relative_error"] is row["spread"] is row["share_of_peak"] is None
        else:
            assert row["tflops"] > 0
            assert row["spread"] >= 0
    assert all(row["tflops"] for row in rows if row["dtype"] == "fp32")


# ------------------------------------------------------------------------------------------- embedding and the report


def test_a_model_that_is_not_there_is_said_for_each_precision() -> None:
    found = list(measure_embedding(CPU, "no/such/model", ["fp32", "bf16"]))
    names = [(each.name, each.value) for each in found if isinstance(each, Setting)]
    assert names == [("embedding fp32", None), ("embedding bf16", None)]


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
def test_the_device_in_json(monkeypatch: pytest.MonkeyPatch, profile: DeviceProfile, expected: dict[str, Any]) -> None:
    monkeypatch.setattr(optimizer, "detect", lambda _device: profile)
    described = optimizer.get_gpu_info()
    assert {name: described[name] for name in expected} == expected
    assert {"torch", "cuda", "threads", "driver"} <= set(described)


@pytest.mark.parametrize(("profile", "precision"), [(T4, "fp16"), (A100, "fp16"), (CPU, "fp32")])
def test_settings_say_what_is_chosen_and_what_is_not(profile: DeviceProfile, precision: str) -> None:
    settings = {each.name: each for each in settings_of(profile)}
    assert settings["precision"].value == precision
    assert "embedding int8" in settings
    assert ("embedding bf16" in settings) == (profile is T4)
    assert ("share_of_peak" in settings) == (profile is CPU)
    assert all(each.reason for each in settings.values())


@pytest.mark.gpu
def test_report_of_the_gpu() -> None:
    report = optimizer.make_report("cuda", model=MINILM, sizes=(1024, 2048), seconds=4)
    rates = {row["dtype"]: row["tflops"] for row in report["matmul"] if row["role"] == "square" and row["m"] == 2048}
    assert rates["fp16"] > 1.5 * rates["fp32"]
    assert {row["precision"] for row in report["embedding"]} >= {"fp32", "fp16"}
    assert set(rates) == set(PRECISIONS)
