"""Q/DQ in graphs: the very arithmetic of 8 bits, the same function but for the rounding, what TensorRT asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import TokenBatch
from app.src.core.backends.folder import Folder, read_folder
from app.src.core.onnx_export.graph import OUTPUT, build_graph, feeds, linear_name
from app.src.core.onnx_export.qdq import (
    GREATEST,
    Constants,
    LayerPlan,
    linears,
    reordered,
    rounded,
    rounded_weight,
    with_qdq,
)
from app.src.core.onnx_export.quantise import Channels, batches, inputs_of, session, vectors
from tests.core.test_architectures import MODELS, save, sequences

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

QKV, OUT, WIDE, NARROW = (linear_name(1, part) for part in ("query_key_value", "attention_out", "wide", "narrow"))
BATCH = sequences()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Folder:
    return read_folder(save(tmp_path_factory.mktemp("qdq") / "bert", minilm_folder, MODELS["bert"]), "tiny")


@pytest.fixture(scope="module")
def graph(tiny: Folder) -> Any:
    return build_graph(tiny)


def random(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(model: Any, layer: str) -> Any:
    return np.concatenate([batch[layer] for batch in inputs_of(model, [layer], BATCH)])


def outputs(model: Any, name: str) -> Any:
    """What a tensor of the graph holds for one batch without padding."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    watched.graph.output.extend([onnx.ValueInfoProto(name=name)])
    return session(watched).run([name], feeds([BATCH[0][:5], BATCH[1][:5]] if len(BATCH[1]) > 4 else [BATCH[0]]))[0]


# ---------------------------------------------------------------------------------------------------------- arithmetic


def test_rounding_is_symmetric_and_cuts_off() -> None:
    scale = 2.0 / GREATEST
    found = rounded(np.array([0.0, 2.0, -2.0, 5.0, -5.0, 0.5 * scale, 1.5 * scale], np.float32), 2.0) / scale
    np.testing.assert_allclose(found, [0, 127, -127, 127, -128, 0, 2], rtol=1e-6)


def test_each_output_channel_of_a_weight_has_its_range() -> None:
    weight = random(16, 3) * np.array([1.0, 100.0, 0.0], np.float32)
    integers, scales = rounded_weight(weight)
    assert integers.dtype == np.int8
    assert np.abs(integers).max(0).tolist() == [127, 127, 0]
    np.testing.assert_allclose(integers * scales, weight, atol=0.51 * scales.max())


PLANS = {
    "bare": LayerPlan(2.0),
    "shift": LayerPlan(2.0, shift=random(32, seed=2)),
    "factors": LayerPlan(2.0, factors=np.exp(random(32, seed=3))),
    "both": LayerPlan(2.0, random(32, seed=2), np.exp(random(32, seed=3))),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_layer_computes_what_its_plan_says(graph: Any, name: str) -> None:
    """ONNX Runtime's integers against the plan's own arithmetic in numpy, on what the layer is really given."""
    plan = PLANS[name]
    made = with_qdq(graph, {QKV: plan})
    onnx.checker.check_model(made, full_check=True)
    x = outputs(graph, "layer.0/out_norm")
    weight, bias = Constants(graph)[f"{QKV}.weight"], Constants(graph)[f"{QKV}.bias"]
    rows = x.reshape(-1, x.shape[-1])
    inside: Any = weight if plan.factors is None else weight / plan.factors[:, None]
    integers, scales = rounded_weight(inside)
    undone = 0.0 if plan.shift is None else plan.shift @ weight
    wanted = rounded(plan.balanced(rows), plan.threshold) @ (integers * scales) + bias + undone
    found = outputs(made, f"{QKV}.sum").reshape(wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
    assert np.abs(found - outputs(graph, f"{QKV}.sum").reshape(wanted.shape)).max() > 1e-3


def test_a_wide_range_makes_the_same_function_but_for_the_rounding(graph: Any) -> None:
    """All layers, with shifts and factors that would spoil everything if weights and biases did not undo them."""
    plans = {}
    for name in linears(graph):
        channels = inputs(graph, name).shape[1]
        shift, factors = 0.3 * random(channels, seed=2), np.exp(0.5 * random(channels, seed=3))
        plan = LayerPlan(1.0, shift, factors, channels - 4 if name.endswith("narrow") else None)
        if plan.near:
            plan = LayerPlan(1.0, shift[:-4], factors[:-4], plan.near)
        plans[name] = LayerPlan(
            float(np.abs(plan.balanced(inputs(graph, name))).max()), plan.shift, plan.factors, plan.near
        )
    exact, found = vectors(session(graph), BATCH), vectors(session(with_qdq(graph, plans)), BATCH)
    cosines = (exact * found).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(found, axis=1)
    assert cosines.mean() > 0.97
    assert np.abs(exact - found).max() > 1e-4


def test_far_channels_are_computed_in_float(graph: Any) -> None:
    """A channel that reaches a thousand times as far as the range comes through whole."""
    plan = LayerPlan(1e-3, near=60)
    made = with_qdq(graph, {NARROW: plan})
    x = outputs(graph, "layer.1/gelu")
    weight = Constants(graph)[f"{NARROW}.weight"]
    integers, scales = rounded_weight(weight[:60])
    wanted = rounded(x[..., :60], 1e-3) @ (integers * scales) + x[..., 60:] @ weight[60:]
    np.testing.assert_allclose(outputs(made, NARROW), wanted, rtol=1e-3, atol=1e-3)


def test_channels_in_another_order_are_the_same_function(graph: Any) -> None:
    order = np.random.default_rng(1).permutation(64)
    made = reordered(graph, {NARROW: order})
    np.testing.assert_allclose(vectors(session(made), BATCH), vectors(session(graph), BATCH), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs(made, "layer.1/gelu"), outputs(graph, "layer.1/gelu")[..., order], atol=1e-5)
    with pytest.raises(ValueError, match="not the second layer"):
        reordered(graph, {WIDE: order})


# ---------------------------------------------------------------------------------------------------- what is asked for


def test_only_linear_layers_and_only_as_tensorrt_wants_them(graph: Any) -> None:
    assert list(linears(graph)) == [
        linear_name(layer, part)
        for layer in range(3)
        for part in ("query_key_value", "attention_out", "wide", "narrow")
    ]
    made = with_qdq(graph, {name: LayerPlan(1.0) for name in linears(graph)})
    constants = Constants(made)
    rounding = [node for node in made.graph.node if node.op_type == "QuantizeLinear"]
    assert len(rounding) == 12
    for node in made.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = constants[node.input[2]]
            assert zero.dtype == np.int8
            assert not zero.any()
    assert {constants[node.input[1]].shape for node in rounding} == {()}
    assert constants[f"{QKV}.weight.scale"].shape == (96,)
    back = next(node for node in made.graph.node if node.name == f"{QKV}.weight.dequantize")
    assert [(each.name, each.i) for each in back.attribute] == [("axis", 1)]
    assert not any(name in constants for name in (f"{QKV}.weight", f"{NARROW}.weight"))
    assert made.ByteSize() < graph.ByteSize()
    assert QKV in linears(graph), "the graph that was given is left as it is"


def test_what_is_no_linear_layer(graph: Any) -> None:
    with pytest.raises(ValueError, match=r"not linear layers: layer\.0/attention/scores"):
        with_qdq(graph, {"layer.0/attention/scores": LayerPlan(1.0)})


def test_a_shift_needs_a_bias_that_undoes_it(graph: Any) -> None:
    bare = onnx.ModelProto()
    bare.CopyFrom(graph)
    Constants(bare).drop({f"{QKV}.bias"})
    with pytest.raises(ValueError, match="no bias"):
        with_qdq(bare, {QKV: PLANS["shift"]})


def test_a_graph_in_fp16(tiny: Folder) -> None:
    half = build_graph(tiny, precision="fp16")
    plans = {name: LayerPlan(4.0 * np.abs(inputs(half, name)).max()) for name in (QKV, OUT)}
    made = with_qdq(half, plans)
    onnx.checker.check_model(made, full_check=True)
    assert Constants(made)[f"{QKV}.scale"].dtype == np.float16
    assert Constants(made)[f"{QKV}.weight.scale"].dtype == np.float16
    exact, found = vectors(session(half), BATCH), vectors(session(made), BATCH)
    cosines = (exact * found).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(found, axis=1)
    assert cosines.mean() > 0.9


# ---------------------------------------------------------------------------------------------------------- activations


def test_batches_hold_every_text_once_and_keep_to_the_budget() -> None:
    made = list(batches(BATCH, 100))
    assert sorted(place for batch in made for place in batch) == list(range(len(BATCH)))
    assert all(len(batch) * max(len(BATCH[place]) for place in batch) <= 100 for batch in made)
    assert list(batches(TokenBatch.of([[1] * 500]), 100)) == [[0]]
    assert list(batches([])) == []


def test_vectors_come_in_the_order_given(graph: Any) -> None:
    runtime = session(graph)
    alone = np.concatenate([runtime.run([OUTPUT], feeds([tokens]))[0] for tokens in BATCH])
    np.testing.assert_allclose(vectors(runtime, BATCH), alone, rtol=1e-4, atol=1e-5)


def test_only_rows_of_real_tokens_are_seen(graph: Any) -> None:
    rows = inputs(graph, QKV)
    assert rows.shape == (sum(map(len, BATCH)), 32)
    longest = sorted(BATCH, key=len)[-1]
    alone = np.concatenate([batch[QKV] for batch in inputs_of(graph, [QKV], [longest])])
    np.testing.assert_allclose(rows[-len(longest) :], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every", [1, 3, 7, 1000])
def test_channels_keep_least_greatest_and_evenly_spread_rows(every: int) -> None:
    rows = random(100, 4)
    seen = Channels(every)
    for part in (rows[:1], rows[1:9], rows[9:60], rows[60:]):
        seen.see(part)
    np.testing.assert_array_equal(seen.low, rows.min(0))
    np.testing.assert_array_equal(seen.high, rows.max(0))
    np.testing.assert_array_equal(seen.reach, np.abs(rows).max(0))
    np.testing.assert_array_equal(seen.rows, rows[::every])
    seen.reorder(np.array([3, 2, 1, 0]))
    np.testing.assert_array_equal(seen.rows, rows[::every, ::-1])
    np.testing.assert_array_equal(seen.low, rows.min(0)[::-1])
