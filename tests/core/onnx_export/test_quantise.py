"""Calibrated INT8 on the real ONNX Runtime: the packaged model meets the target with nearly all layers in 8 bits, by
each algorithm; layers are left out where they must be; ranges, reports and refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.benchmark.workloads import sap_like
from app.src.core.agreement import agreement
from app.src.core.backends import ModelUnsupported, TokenBatch
from app.src.core.backends.folder import Folder, read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.backends.torch.int8 import calibration_texts
from app.src.core.onnx_export.calibrators import ALGORITHMS, Algorithm
from app.src.core.onnx_export.graph import build_graph
from app.src.core.onnx_export.qdq import Constants, LayerPlan, linears, rounded, rounded_weight
from app.src.core.onnx_export.quantise import (
    Channels,
    Recipe,
    Report,
    Target,
    balances,
    error,
    quantise,
    session,
    vectors,
)
from tests.core.conftest import MINILM
from tests.core.test_architectures import MODELS, save, sequences

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

ANY = Target(-1.0, 0.0)
"""Met by everything, so that nothing is measured layer by layer."""


@pytest.fixture(scope="module")
def graph(minilm_folder: Path) -> Any:
    return build_graph(read_folder(minilm_folder, MINILM))


@pytest.fixture(scope="module")
def tokens(minilm_folder: Path) -> TokenBatch:
    """To calibrate on."""
    return RustTokenizer.load(read_folder(minilm_folder, MINILM)).ids(calibration_texts(32, 5))


@pytest.fixture(scope="module")
def others(minilm_folder: Path) -> TokenBatch:
    """To judge by, of other kinds than those."""
    rng = random.Random(3)
    texts = [*calibration_texts(30, 6), *(sap_like(rng, rng.randrange(5, 40)) for _ in range(30))]
    return RustTokenizer.load(read_folder(minilm_folder, MINILM)).ids(texts)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Folder:
    return read_folder(save(tmp_path_factory.mktemp("quantise") / "bert", minilm_folder, MODELS["bert"]), "tiny")


@pytest.mark.parametrize(
    "algorithm", ["entropy", *(pytest.param(each, marks=pytest.mark.slow) for each in ("minmax", "percentile"))]
)
def test_the_packaged_model_meets_the_target(graph: Any, tokens: Any, others: Any, algorithm: Algorithm) -> None:
    """Calibrated on 32 texts only; benchmarks/calibration.py has the figures for 1,000."""
    made, report = quantise(graph, tokens, algorithm, held_out=others, recipe=Recipe(alphas=(0.7,)))
    assert report.met
    assert report.excluded == ()
    assert report.share == pytest.approx(71 / 72)
    assert report.mean_cosine >= 0.99
    assert report.least_cosine >= 0.98
    assert report.overlap >= 0.90
    found = agreement(vectors(session(made), others), vectors(session(graph), others))
    assert found.mean_cosine == pytest.approx(report.mean_cosine)
    assert made.ByteSize() < 0.7 * graph.ByteSize()


def test_the_calibrators_differ(tiny: Folder) -> None:
    graph = build_graph(tiny)
    batch = sequences()
    found = {
        algorithm: [
            layer.threshold
            for layer in quantise(graph, batch, algorithm, recipe=Recipe(ANY, alphas=(), shifts=False))[1].layers
        ]
        for algorithm in ALGORITHMS
    }
    assert found["entropy"] != found["minmax"]
    assert all(np.array(found["minmax"]) >= np.array(found["percentile"]))
    assert all(np.array(found["minmax"]) >= np.array(found["entropy"]))


def test_minmax_covers_all_that_was_seen(tiny: Folder) -> None:
    """Its ranges are those of all texts, not of the rows by which plans were compared."""
    from app.src.core.onnx_export.quantise import inputs_of

    graph, batch = build_graph(tiny), sequences()
    recipe = Recipe(ANY, alphas=(), shifts=False, far=0)
    report = quantise(graph, batch, "minmax", held_out=batch[:4], recipe=recipe)[1]
    seen = {name: 0.0 for name in linears(graph)}
    for rows in inputs_of(graph, list(seen), batch):
        seen = {name: max(greatest, float(np.abs(rows[name]).max())) for name, greatest in seen.items()}
    assert {layer.name: pytest.approx(layer.threshold, rel=1e-5) for layer in report.layers} == seen


def test_layers_are_left_out_until_it_is_near_enough(tiny: Folder) -> None:
    """These random weights suffer much in 8 bits: some layers must stay in float, and the graph has no Q for them."""
    graph, batch = build_graph(tiny), sequences()
    bare = Recipe(ANY, alphas=(), shifts=False, far=0)
    whole = quantise(graph, batch, "minmax", held_out=batch, recipe=bare)[1]
    wanted = Target(mean_cosine=(1 + whole.mean_cosine) / 2, overlap=0.0)
    recipe = Recipe(wanted, 0.1, (), shifts=False, far=0)
    made, report = quantise(graph, batch, "minmax", held_out=batch, recipe=recipe)
    assert report.met
    assert report.mean_cosine >= wanted.mean_cosine
    assert 0 < len(report.excluded) < 12
    assert report.share < whole.share
    rounding = {node.name.removesuffix(".quantize") for node in made.graph.node if node.op_type == "QuantizeLinear"}
    assert rounding == set(linears(graph)) - set(report.excluded)
    alone = {layer.name: layer.loss for layer in report.layers}
    assert None not in alone.values()
    assert {layer.name for layer in report.layers if not layer.int8} == set(report.excluded)


def test_a_target_that_cannot_be_met_is_said_to_be_missed(tiny: Folder) -> None:
    recipe = Recipe(Target(1.1, 1.1), least_share=0.9, alphas=())
    _, report = quantise(build_graph(tiny), sequences(), "minmax", recipe=recipe)
    assert not report.met
    assert report.share >= 0.9


@pytest.mark.slow
def test_smoothing_shifts_and_far_channels_each_help(graph: Any, tokens: Any, others: Any) -> None:
    def nearness(**recipe: Any) -> float:
        return quantise(graph, tokens, "minmax", held_out=others, recipe=Recipe(ANY, **recipe))[1].mean_cosine

    bare, smooth = nearness(alphas=(), shifts=False, far=0), nearness(shifts=False, far=0)
    assert 1 - smooth < 0.6 * (1 - bare)
    assert 1 - nearness() < 0.6 * (1 - smooth)  # 0.4 with most texts; they come from what is installed


def test_texts_are_held_out_where_none_are_given(tiny: Folder) -> None:
    report = quantise(build_graph(tiny), sequences(), "minmax", recipe=Recipe(ANY, alphas=()))[1]
    assert (report.texts, report.held_out) == (41, 11)


def test_the_same_texts_give_the_same_graph(tiny: Folder) -> None:
    made = [
        quantise(build_graph(tiny), sequences(), "entropy", recipe=Recipe(ANY, alphas=(0.6,)))[0].SerializeToString()
        for _ in range(2)
    ]
    assert made[0] == made[1]


def test_a_graph_in_fp16(tiny: Folder) -> None:
    made, report = quantise(build_graph(tiny, precision="fp16"), sequences(), "minmax", recipe=Recipe(ANY, alphas=()))
    onnx.checker.check_model(made, full_check=True)
    assert report.mean_cosine > 0.9


def test_a_report_is_json(tiny: Folder) -> None:
    report = quantise(build_graph(tiny), sequences(), "percentile", recipe=Recipe(ANY))[1]
    assert isinstance(report, Report)
    back = json.loads(json.dumps(report.to_dict()))
    assert back["algorithm"] == "percentile"
    assert back["layers"][0]["name"] == "layer.0/query_key_value"
    assert set(back["seconds"]) == {"observing", "planning", "calibrating", "judging"}


@pytest.mark.parametrize(("texts", "algorithm", "said"), [(0, "minmax", "needs texts"), (9, "median", "use minmax")])
def test_what_cannot_be_calibrated(tiny: Folder, texts: int, algorithm: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quantise(build_graph(tiny), sequences()[:texts], algorithm)


def test_activations_that_are_not_finite(tiny: Folder) -> None:
    graph = build_graph(tiny)
    constants = Constants(graph)
    constants["layer.0/out_norm.weight"] = np.full(32, np.nan, np.float32)
    with pytest.raises(ModelUnsupported, match=r"layer\.1/query_key_value are not finite"):
        quantise(graph, sequences(), "minmax")


# ---------------------------------------------------------------------------------------------------------------- plans


def channels(rows: Any) -> Channels:
    seen = Channels(1)
    seen.see(rows)
    return seen


def test_a_shift_brings_one_sided_channels_to_the_middle() -> None:
    rows = np.random.default_rng(1).uniform(2, 4, (50, 3)).astype(np.float32)
    plans = [plan for _, plan in balances(channels(rows), np.ones((3, 2), np.float32), (), shifts=True)]
    assert [plan.shift is None for plan in plans] == [True, False]
    assert np.abs(plans[1].balanced(rows)).max() <= 1.0


def test_factors_make_channels_and_weights_reach_alike() -> None:
    rows = np.random.default_rng(1).standard_normal((500, 4)).astype(np.float32) * [1, 100, 0.01, 1]
    weight = np.random.default_rng(2).standard_normal((4, 8)).astype(np.float32)
    (_, whole), (alpha, plan) = balances(channels(rows.astype(np.float32)), weight, (0.5,), shifts=False)
    assert (whole.factors, alpha) == (None, 0.5)
    assert plan.factors is not None
    assert np.exp(np.log(plan.factors).mean()) == pytest.approx(1.0)
    inputs = np.abs(rows * plan.factors).max(0)
    weights = np.abs(weight / plan.factors[:, None]).max(1)
    np.testing.assert_allclose(inputs / weights, (inputs / weights)[0], rtol=1e-4)


def test_the_error_of_a_plan() -> None:
    rng = np.random.default_rng(3)
    rows, weight = rng.standard_normal((64, 6)).astype(np.float32), rng.standard_normal((6, 5)).astype(np.float32)
    exact = rows @ weight
    plan = LayerPlan(3.0, near=4)
    integers, scales = rounded_weight(weight[:4])
    found = rounded(rows[:, :4], 3.0) @ (integers * scales) + rows[:, 4:] @ weight[4:]
    assert error(plan, rows, weight, exact) == pytest.approx(np.mean((found - exact) ** 2) / exact.var(), rel=1e-4)
    assert error(LayerPlan(0.1), rows, weight, exact) > 0.5
