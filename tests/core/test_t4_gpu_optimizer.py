"""The measuring command: the shape of its JSON, figures that are plausible, nulls that come with a reason."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.src.core import t4_gpu_optimizer as optimizer
from app.src.core.choices import Setting, settings_of
from app.src.core.device import DeviceProfile
from app.src.core.t4_gpu_optimizer import Bench, Matmul, Plan, Product, Shape

ROOT = Path(__file__).resolve().parents[2]
MODULE = "app.src.core.t4_gpu_optimizer"
CPU = DeviceProfile.cpu()
T4 = DeviceProfile.of_card("Tesla T4")
A100 = DeviceProfile.of_card("NVIDIA A100")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-W", "error::RuntimeWarning", "-m", MODULE, *arguments]
    return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = command("--json", "--device", "cpu", "--duration", "2", "--sizes", "128,256")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_has_exactly_the_promised_keys(report: dict[str, Any]) -> None:
    assert set(report) == {"device", "settings", "matmul", "embedding"}
    assert report["device"]["kind"] == "cpu"
    assert all(set(each) == {"name", "value", "reason"} for each in report["settings"])
    product = {"dtype", "m", "n", "k", "aligned", "tensor_cores"}
    figures = {"tflops", "spread", "share_of_peak", "relative_error"}
    assert all(set(each) == product | figures for each in report["matmul"])
    embedding = {"precision", "tokens", "texts_per_second", "tokens_per_second"}
    assert all(set(each) == embedding for each in report["embedding"])


def test_every_null_has_its_reason(report: dict[str, Any]) -> None:
    reasons = {each["name"]: each["reason"] for each in report["settings"] if each["value"] is None}
    for row in report["matmul"]:
        if row["tflops"] is None:
            name = f"matmul {row['dtype']}"
            assert name in reasons or f"{name} {row['m']}x{row['n']}x{row['k']}" in reasons
        assert row["share_of_peak"] is None
    assert "no published rate" in reasons["share_of_peak"]
    assert "8.0" in reasons["matmul tf32"]


def test_figures_are_plausible(report: dict[str, Any]) -> None:
    rows = [row for row in report["matmul"] if row["dtype"] == "fp32"]
    assert {row["m"] for row in rows} == {128, 256, 255, 1024}
    assert [row["aligned"] for row in rows] == [True, True, False, True]
    assert all(1e-5 < row["tflops"] < 100 and row["spread"] >= 0 for row in rows)
    assert all(0 < row["relative_error"] < 1e-5 for row in rows)
    assert not any(row["tensor_cores"] for row in rows)


def test_embedding_is_measured_with_the_real_model(report: dict[str, Any]) -> None:
    rows = [row for row in report["embedding"] if row["precision"] == "fp32"]
    assert [row["tokens"] for row in rows] == [16, 64, 254]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["texts_per_second"] * (row["tokens"] + 2), rel=0.02)


def test_table_for_people() -> None:
    done = command("--device", "cpu", "--duration", "0.1", "--sizes", "64", "--model", "no/such-model")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  fp32 +64 x 64 x 64 +yes +\d", done.stdout, re.MULTILINE)
    assert "is no packaged model" in done.stdout
    assert "(cpu)" in done.stdout


def test_wrong_arguments() -> None:
    assert command("--device", "cuda:99").returncode == 2
    assert command("--sizes", "1").returncode == 2


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("fp32", 0, 1e-6), ("bf16", 1e-3, 1e-2), ("fp16", 1e-4, 2e-3), ("int8", 3e-3, 5e-2)],
)
def test_relative_error_is_that_of_the_precision(precision: Any, least: float, most: float) -> None:
    assert least < Product(Shape(64, 64, 96), precision, "cpu").relative_error() < most


def test_alignment_is_16_bytes() -> None:
    assert Shape(64, 72, 8).aligned("fp16")
    assert not Shape(64, 72, 8).aligned("int8")
    assert Shape(64, 68, 4).aligned("fp32")
    assert not Shape(63, 64, 64).aligned("fp32")


def test_a_refused_product_is_a_row_of_nulls_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Product) -> None:
        raise RuntimeError("k must be a multiple of 8\nat line 3")

    monkeypatch.setattr(Product, "run", refuse)
    row, setting = optimizer._measured(Bench(CPU, 0.01), Shape(31, 31, 31), "int8")
    assert isinstance(row, Matmul)
    assert row.tflops is None
    assert setting == Setting("matmul int8 31x31x31", None, "torch refuses: k must be a multiple of 8")


def test_emulated_precisions_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "_probe", lambda _profile, precision: 1.0 if precision == "fp16" else 0.01)
    assert optimizer.unavailable(Bench(CPU, 1), "fp16") == (
        "runs in emulation here: 100 times slower than fp32 on a small product"
    )
    assert optimizer.unavailable(Bench(CPU, 1), "bf16") is None
    assert "7.5" in (optimizer.unavailable(Bench(T4, 1), "tf32") or "")
    assert "emulated" in (optimizer.unavailable(Bench(T4, 1), "bf16") or "")
    assert optimizer.unavailable(Bench(A100, 1), "tf32") is None


@pytest.mark.parametrize(("profile", "precision"), [(T4, "fp16"), (A100, "fp16"), (CPU, "fp32")])
def test_settings_say_what_is_chosen_and_what_is_not(profile: DeviceProfile, precision: str) -> None:
    settings = {each.name: each for each in settings_of(profile)}
    assert settings["precision"].value == precision
    assert ("embedding int8" in settings) == (profile is not CPU)
    assert ("embedding bf16" in settings) == (profile is T4)
    assert ("share_of_peak" in settings) == (profile is CPU)
    assert all(each.reason for each in settings.values())


def test_sizes_follow_the_device() -> None:
    assert max(shape.m for shape in optimizer.shapes_of(CPU, None)) <= 1024
    assert max(shape.m for shape in optimizer.shapes_of(A100, None)) == 16_384
    assert Shape(64, 64, 64) in optimizer.shapes_of(A100, (64,))


def test_share_of_peak_is_of_the_published_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_samples", lambda _self, _work: [1e-3] * 5)
    monkeypatch.setattr(DeviceProfile, "torch_name", property(lambda _self: "cpu"))
    row = Bench(T4, 1).measure(Shape(256, 256, 256), "fp16")
    assert row.tflops == pytest.approx(2 * 256**3 / 1e-3 / 1e12, abs=1e-4)
    assert row.share_of_peak == pytest.approx(row.tflops / 65, abs=1e-4)  # type: ignore[operator]
    assert row.tensor_cores
    assert row.spread == 0


def test_texts_differ_and_have_their_length() -> None:
    texts = optimizer.texts_of(16, 500)
    assert len(set(texts)) == 500
    assert {len(text.split()) for text in texts} == {16}


@pytest.mark.gpu
def test_report_of_the_gpu() -> None:
    report = optimizer.make_report(Plan(sizes=(1024, 2048), seconds=4, device="cuda"))
    rates = {row.dtype: row.tflops for row in report.matmul if row.m == row.n == row.k == 2048}
    assert rates["fp16"] > 1.5 * rates["fp32"]  # type: ignore[operator]
    assert {row.precision for row in report.embedding} >= {"fp32", "fp16"}
