"""The measuring command: the shape of its JSON, figures that are plausible, nulls that come with a reason, flags that
are refused before minutes are spent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from app.src.core import t4_gpu_optimizer as optimizer
from app.src.core.device import PRECISIONS

ROOT = Path(__file__).resolve().parents[2]
MODULE = "app.src.core.t4_gpu_optimizer"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """On one thread: several wait for each other at every product when tests take turns on few cores."""
    whole = [sys.executable, "-W", "error::RuntimeWarning", "-m", MODULE, *arguments]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(whole, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = command("--json", "--device", "cpu", "--duration", "0.2", "--sizes", "128,256")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_has_the_promised_keys(report: dict[str, Any]) -> None:
    assert {"device", "settings", "matmul", "embedding"} <= set(report)
    assert report["device"]["kind"] == "cpu"
    assert all(set(each) == {"name", "value", "reason"} for each in report["settings"])
    product = {"dtype", "m", "n", "k", "aligned", "tensor_cores"}
    figures = {"tflops", "spread", "share_of_peak", "relative_error"}
    assert all(product | figures <= set(each) for each in report["matmul"])
    embedding = {"precision", "tokens", "texts_per_second", "tokens_per_second"}
    assert all(embedding <= set(each) for each in report["embedding"])


def test_every_null_has_its_reason(report: dict[str, Any]) -> None:
    reasons = {each["name"]: each["reason"] for each in report["settings"] if each["value"] is None}
    for row in report["matmul"]:
        if row["tflops"] is None:
            name = f"matmul {row['dtype']}"
            assert name in reasons or f"{name} {row['m']}x{row['n']}x{row['k']}" in reasons
        assert row["share_of_peak"] is None
    assert "no published peak rates" in reasons["share_of_peak"]
    assert "8.0" in reasons["matmul tf32"]
    assert "CPU" in report["clocks"]["reason"]


def test_figures_are_plausible(report: dict[str, Any]) -> None:
    rows = [row for row in report["matmul"] if row["dtype"] == "fp32"]
    squares = {("square", edge, edge, edge) for edge in (128, 256, 255)}
    layers = {("feed-forward", tokens, 1536, 384) for tokens in (1024, 1023)}
    assert {(row["role"], row["m"], row["n"], row["k"]) for row in rows} == squares | layers
    assert [row["aligned"] for row in rows].count(False) == 2
    assert all(1e-5 < row["tflops"] < 100 and row["spread"] >= 0 for row in rows)
    assert all(0 < row["relative_error"] < 1e-5 for row in rows)
    assert not any(row["tensor_cores"] for row in rows)


def test_embedding_is_measured_with_the_real_model(report: dict[str, Any]) -> None:
    rows = [row for row in report["embedding"] if row["precision"] == "fp32"]
    assert [row["tokens"] for row in rows] == [16, 64, 254]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["texts_per_second"] * (row["tokens"] + 2), rel=0.02)


def test_the_sustained_runs_are_of_fp32_and_what_the_engine_takes(report: dict[str, Any]) -> None:
    chosen = next(each["value"] for each in report["settings"] if each["name"] == "precision")
    assert [row["dtype"] for row in report["sustained"]] == ["fp32", *([chosen] if chosen != "fp32" else [])]
    assert all(row["m"] == 256 and row["seconds"] >= 0.2 for row in report["sustained"])


def test_table_for_people() -> None:
    done = command("--device", "cpu", "--duration", "0.1", "--sizes", "64", "--model", "hash:64")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^fp32 +square +64 +64 +64 +True +False +\d", done.stdout, re.MULTILINE)
    assert "is no packaged model" in done.stdout  # the reason why no layers were multiplied
    assert "measured on the CPU" in done.stdout
    bf16 = r"no tensor cores: bf16 is|^matmul bf16 +- +no gain here"  # the second without bf16 instructions
    assert re.search(bf16, done.stdout, re.MULTILINE)


def test_wrong_arguments() -> None:
    done = command("--device", "cuda:99")
    assert done.returncode == 2
    assert "cuda:99" in done.stderr


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--sizes", ["31", "32769", "64,16", "", "64,", "x", "1e3", "1"]),
        ("--duration", ["0", "-1", "nan", "inf", "x", "3601"]),
        ("--device", ["gpu", "cpu:1"]),
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
        (line,) = captured.err.splitlines()
        assert flag in line or value in line


def test_a_model_that_cannot_compute_is_told_with_the_products(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder could be read, its weights could not; products need none."""

    def measured(_device: str, model: str, *_: Any, **__: Any) -> dict[str, Any]:
        settings = [("precision", "bf16", "measured"), ("embedding tf32", None, "a CPU has none")]
        settings.append(("embedding bf16", None, "its weights are not complete"))
        rows = [{"name": name, "value": value, "reason": reason} for name, value, reason in settings]
        return {"model": model, "settings": rows, "embedding": []}

    monkeypatch.setattr(optimizer, "make_report", measured)
    monkeypatch.setattr(optimizer, "model_shape", lambda _model: None)
    assert optimizer.main(["--json", "--model", "damaged"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"] == "damaged"
    assert captured.err == "--model damaged: its weights are not complete\n"
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


@pytest.mark.gpu
def test_report_of_the_gpu() -> None:
    report = optimizer.make_report("cuda", sizes=(1024, 2048), seconds=4)
    rates = {row["dtype"]: row["tflops"] for row in report["matmul"] if row["role"] == "square" and row["m"] == 2048}
    assert rates["fp16"] > 1.5 * rates["fp32"]
    assert {row["precision"] for row in report["embedding"]} >= {"fp32", "fp16"}
    assert set(rates) == set(PRECISIONS)
    assert {row["dtype"] for row in report["sustained"]} == {"fp32", "fp16"}
    assert report["clocks"]["samples"] > 0, report["clocks"]["reason"]
