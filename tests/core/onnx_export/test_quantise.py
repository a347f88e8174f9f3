"""Calibrated INT8 on the real ONNX Runtime: the packaged model passes the gate, and refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.benchmark.workloads import sap_like_texts
from app.src.core.agreement import judge
from app.src.core.backends import ModelUnsupported
from app.src.core.backends.folder import read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.onnx_export.graph import build_graph
from app.src.core.onnx_export.quantise import quantise
from tests.core.conftest import MINILM
from tests.core.onnx_export.test_graph import session, vectors

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

TEXTS = [f"pump {number} leaks at flange {number * 7 % 13}" for number in range(40)]


@pytest.mark.slow
def test_the_packaged_model_passes_the_gate(minilm_folder: Path) -> None:
    """Calibrated on few texts; benchmarks/calibration.py has the figures for 1,000."""
    folder, rng = read_folder(minilm_folder, MINILM), random.Random(3)
    texts = sap_like_texts(rng, 92, 2.8, 0.5, (5, 40))
    learnt, others = texts[:32], texts[32:]
    batch = RustTokenizer.load(folder).ids(others)

    def computed(model: Any) -> np.ndarray:
        runs = session(model)
        return np.concatenate([vectors(runs, batch.select([place])).numpy() for place in range(len(batch))])

    exact = build_graph(folder)
    made, report = quantise(folder, learnt)
    assert report["int8_share"] == pytest.approx(71 / 72)
    assert json.loads(json.dumps(report))["texts"] == 32
    verdict = judge(computed(exact), computed(made))
    assert verdict.accepted
    assert verdict.mean_cosine is not None
    assert verdict.mean_cosine > 0.995
    assert made.ByteSize() < 0.7 * exact.ByteSize()


def test_every_layer_is_in_8_bits_and_the_same_texts_give_the_same_graph(make_folder: Callable[..., Path]) -> None:
    folder = read_folder(make_folder(), "tiny")
    made = quantise(folder, TEXTS)[0]
    onnx.checker.check_model(made, full_check=True)
    products = {node.name for node in build_graph(folder).graph.node if node.op_type == "MatMul" and "." in node.name}
    rounded = {node.name.removesuffix(".quantize") for node in made.graph.node if node.op_type == "QuantizeLinear"}
    assert rounded == {name for name in products if "attention/" not in name}
    assert made.SerializeToString() == quantise(folder, TEXTS)[0].SerializeToString()


def test_activations_that_are_not_finite(make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from app.src.core.backends.torch import packed

    load = packed.load_tensors

    def broken(*given: Any, **named: Any) -> Any:
        return {name: t * 1e37 if "LayerNorm.weight" in name else t for name, t in load(*given, **named).items()}

    monkeypatch.setattr(packed, "load_tensors", broken)
    with pytest.raises(ModelUnsupported, match="not finite"):
        quantise(read_folder(make_folder(), "tiny"), TEXTS)
