"""Write a sentence encoder as an ONNX graph from the packed path's weights: padded token ids in, pooled vectors out.

The graph is written node by node, not traced, so that linear layers have the names that `quantise` needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..backends import ModelUnsupported
from ..backends.folder import Folder
from . import needs

if TYPE_CHECKING:
    import onnx

    from ..backends.torch.architectures import EncoderWeights, LayerWeights
    from ..backends.torch.linears import Affine

GraphPrecision = Literal["fp32", "fp16"]
Numbers = NDArray[Any]

INPUT_IDS, ATTENTION_MASK, OUTPUT = "input_ids", "attention_mask", "sentence_embedding"
# First opset with fp16 in QuantizeLinear, which strongly typed engines need, and its IR version. TensorRT 10 and ONNX
# Runtime from 1.17 on read it.
OPSET, IR_VERSION = 19, 9
# The linear layers within one layer, in order of computation.
PARTS = ("query_key_value", "attention_out", "wide", "narrow")
# Most bytes of weights: a protobuf message, and so a single ONNX file, is limited to 2 GiB.
MOST_BYTES = 2_000_000_000
# Added to the score of a padding token. Fits fp16; its exponential is 0 in fp16 and fp32.
HIDDEN_SCORE = -10_000.0

# Greatest value of signed 8 bits; zero points are 0, as TensorRT requires.
GREATEST = 127
LEAST_SCALE = 1e-7  # above the smallest number of fp16


# Plan of a linear layer in 8 bits: threshold, factors, order. 127 represents the threshold. Inputs are multiplied by
# their factors and rounded; inputs without a factor stay in float. The order, only for a feed-forward's second layer,
# sorts its inputs, largest ranges last.
LayerPlan = tuple[float, NDArray[np.float32], NDArray[np.intp] | None]


def build_graph(
    folder: Folder, *, precision: GraphPrecision = "fp32", plans: Mapping[str, LayerPlan] | None = None
) -> onnx.ModelProto:
    """Build the graph from `input_ids` and `attention_mask`, int64 (batch, seq), to `sentence_embedding`, float32
    (batch, hidden), pooled and not normalised.

    Rows must not exceed the model's `max_length`; the result of a row with an empty mask is undefined. Pooling and the
    sums of norms are in fp32 in every `precision`. `plans`: by name (such as `layer.0/wide`), the linear
    layers in 8 bits. Raises DeviceUnavailable without the extra, ModelUnsupported for a model without a graph.
    """
    needs("onnx")
    import torch
    from onnx import TensorProto, helper

    from ..backends.torch.architectures import read, refusal
    from ..backends.torch.packed import load_tensors

    if (why_not := refusal(folder)) is not None:
        raise ModelUnsupported(f"model {folder.name!r} has no ONNX graph: {why_not}")
    try:
        tensors = load_tensors(folder, torch.device("cpu"), torch.float32)
        if sum(map(torch.numel, tensors.values())) * (2 if precision == "fp16" else 4) > MOST_BYTES:
            raise ModelUnsupported(
                f"model {folder.name!r} has no ONNX graph in {precision}: its weights take more than the 2 GB"
                " that one ONNX file holds" + ("; use fp16" if precision == "fp32" else "")
            )
        weights = read(folder, tensors)
    except KeyError as error:
        raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {error}") from error
    writer = _Writer(folder.name, precision, plans or {})
    _encoder(writer, weights, mean=folder.pooling == "mean")
    names = (INPUT_IDS, ATTENTION_MASK)
    graph = helper.make_graph(
        writer.nodes,
        "sentence_encoder",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]) for name in names],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", int(weights.words.shape[1])])],
        initializer=list(writer.constants.values()),
    )
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, producer_name="owl-sap-connector", ir_version=IR_VERSION, opset_imports=opsets)


# ------------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """Collects nodes and constants in order. A node's output has the node's name."""

    def __init__(self, model: str, precision: GraphPrecision, plans: Mapping[str, LayerPlan]) -> None:
        self._model = model
        self._precision = precision
        self.plans = plans
        self.dtype = np.dtype(np.float16 if precision == "fp16" else np.float32)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def node(self, kind: str, name: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node and return its name. `outputs`: their names, if it has several."""
        from onnx import helper

        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs) or [name], name=name, **attributes))
        return name

    def constant(self, name: str, numbers: Any, dtype: Any = np.int64) -> str:
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(numbers, dtype, order="C"), name)
        return name

    def numbers(self, name: str, values: Any) -> str:
        """Add a constant (tensor, array or number) in the graph's precision."""
        with np.errstate(over="ignore"):
            rounded = np.asarray(values, np.float32).astype(self.dtype)
        if not np.isfinite(rounded).all():
            raise ModelUnsupported(f"model {self._model!r} has no ONNX graph in {self._precision}: {name} overflows")
        return self.constant(name, rounded, self.dtype)

    def cast(self, name: str, x: str, dtype: Any) -> str:
        from onnx import helper

        return self.node("Cast", name, x, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def affine(self, name: str, x: str, weight: Numbers, bias: Numbers | None) -> str:
        """Add a linear layer with this (in, out) weight. A layer with a plan is in 8 bits, with Q and DQ in the form
        that TensorRT and ONNX Runtime recognise."""
        plan = self.plans.get(name)
        if plan is None:
            product = self.node("MatMul", name, x, self.numbers(f"{name}.weight", weight))
        else:
            threshold, factors, _ = plan
            near, far = len(factors), ""
            if near < len(weight):
                parts = self.constant(f"{name}.parts", [near, len(weight) - near])
                outputs = [f"{name}.near", f"{name}.far"]
                self.node("Split", f"{name}.split", x, parts, outputs=outputs, axis=-1)
                x, far = outputs
            smooth = self.node("Mul", f"{name}.smooth", x, self.numbers(f"{name}.factors", factors))
            scale = self.constant(f"{name}.scale", max(threshold / GREATEST, LEAST_SCALE), np.float32)
            zero = self.constant(f"{name}.zero", 0, np.int8)
            whole = self.node("QuantizeLinear", f"{name}.quantize", smooth, scale, zero)
            rounded = self.node("DequantizeLinear", f"{name}.dequantize", whole, scale, zero)
            inside = weight[:near] / factors[:, None]
            scales = np.maximum(np.abs(inside).max(0) / GREATEST, LEAST_SCALE).astype(np.float32)
            back = (
                self.constant(f"{name}.weight.int8", np.clip(np.rint(inside / scales), -GREATEST, GREATEST), np.int8),
                self.constant(f"{name}.weight.scale", scales, np.float32),
                self.constant(f"{name}.weight.zero", np.zeros(len(scales)), np.int8),
            )
            product = self.node(
                "MatMul", name, rounded, self.node("DequantizeLinear", f"{name}.weight.dequantize", *back, axis=1)
            )
            if far:
                outside = self.numbers(f"{name}.far.weight", weight[near:])
                product = self.node(
                    "Add", f"{name}.both", product, self.node("MatMul", f"{name}.far.product", far, outside)
                )
        if bias is None:
            return product
        return self.node("Add", f"{name}.sum", product, self.numbers(f"{name}.bias", bias))

    def norm(self, name: str, x: str, norm: Affine, epsilon: float) -> str:
        """Add a norm, which sums in fp32 in every precision (default stash_type 1)."""
        inputs = [x, self.numbers(f"{name}.weight", norm.weight)]
        if norm.bias is not None:
            inputs.append(self.numbers(f"{name}.bias", norm.bias))
        return self.node("LayerNormalization", name, *inputs, axis=-1, epsilon=epsilon)


# ---------------------------------------------------------------------------------------------------------- the encoder


def _encoder(writer: _Writer, weights: EncoderWeights, *, mean: bool) -> None:
    """Write embeddings, all layers, and the pooling, which is in fp32."""
    node, constant = writer.node, writer.constant
    seen = node("Unsqueeze", "mask", ATTENTION_MASK, constant("hidden_axes", [1, 2]))
    padding = node("Sub", "padding", writer.numbers("one", 1.0), writer.cast("mask.number", seen, writer.dtype))
    hiding = node("Mul", "hiding", padding, writer.numbers("hidden_score", HIDDEN_SCORE))

    words = node("Gather", "embeddings/words", writer.numbers("words", weights.words), INPUT_IDS)
    table = writer.numbers("positions", weights.positions)
    if weights.padding_id is None:
        length = node("Shape", "seq", INPUT_IDS, start=1, end=2)
        first = (constant("slice.start", [0]), length, constant("slice.axis", [0]))
        positions = node("Slice", "embeddings/positions", table, *first)
    else:  # counted as `packed.positions_of` does; in fp32, which TensorRT requires for CumSum
        is_padding = node("Equal", "places.padding", INPUT_IDS, constant("padding_id", [weights.padding_id]))
        real = writer.cast("places.real", node("Not", "places.not", is_padding), np.float32)
        sums = node("CumSum", "places.sums", real, constant("places.axis", 1))
        whole = writer.cast("places.whole", node("Mul", "places.counted", sums, real), np.int64)
        positions = node("Gather", "embeddings/positions", table, node("Add", "places", whole, "padding_id"))
    summed = node("Add", "embeddings/sum", words, positions)
    x = writer.norm("embeddings/norm", summed, weights.embedding_norm, weights.epsilon)
    for number, layer in enumerate(weights.layers):
        x = _layer(writer, f"layer.{number}", layer, x, hiding, weights)

    x = writer.cast("pooling/tokens", x, np.float32)
    if not mean:
        node("Gather", OUTPUT, x, constant("pooling/first", 0), axis=1)
        return
    columns = node("Unsqueeze", "pooling/column", ATTENTION_MASK, constant("pooling/axis", [2]))
    counted = writer.cast("pooling/weights", columns, np.float32)
    over = constant("pooling/over", [1])
    total = node("ReduceSum", "pooling/total", node("Mul", "pooling/seen", x, counted), over, keepdims=0)
    count = node("ReduceSum", "pooling/count", counted, over, keepdims=0)
    node("Div", OUTPUT, total, node("Max", "pooling/divisor", count, constant("pooling/least", 1e-9, np.float32)))


def _layer(writer: _Writer, under: str, layer: LayerWeights, x: str, hiding: str, weights: EncoderWeights) -> str:
    """Write one layer with norms after attention and feed-forward, and the exact GELU in the form that ONNX Runtime and
    TensorRT recognise."""
    node, constant = writer.node, writer.constant
    hidden, heads = int(weights.words.shape[1]), weights.heads
    width = hidden // heads
    (joint, out, wide, narrow), names = (
        [
            (part.weight.numpy().T, None if part.bias is None else part.bias.numpy())
            for part in (layer.query_key_value, layer.attention_out, layer.wide, layer.narrow)
        ],
        [f"{under}/{part}" for part in PARTS],
    )
    # Scaling the query weights once replaces dividing the scores at every call.
    scale = np.repeat(np.array([1.0 / math.sqrt(width), 1.0, 1.0], np.float32), hidden)
    joint = joint[0] * scale, None if joint[1] is None else joint[1] * scale
    if (plan := writer.plans.get(names[3])) is not None and (order := plan[2]) is not None:
        wide = wide[0][:, order], None if wide[1] is None else wide[1][order]
        narrow = narrow[0][order], narrow[1]

    name = f"{under}/attention"
    thirds = constant("thirds", [hidden] * 3)
    parts = [f"{name}/{part}" for part in "qkv"]
    node("Split", f"{name}/split", writer.affine(names[0], x, *joint), thirds, outputs=parts, axis=-1)
    by_head = constant("by_head", [0, 0, heads, width])
    q, k, v = (node("Reshape", f"{part}.heads", part, by_head) for part in parts)
    q, v = (node("Transpose", f"{part}.first", part, perm=[0, 2, 1, 3]) for part in (q, v))
    k = node("Transpose", f"{k}.first", k, perm=[0, 2, 3, 1])
    scores = node("Add", f"{name}/hidden", node("MatMul", f"{name}/scores", q, k), hiding)
    mix = node("MatMul", f"{name}/mix", node("Softmax", f"{name}/shares", scores, axis=-1), v)
    mixed = node("Transpose", f"{name}/mixed", mix, perm=[0, 2, 1, 3])
    attended = node("Reshape", name, mixed, constant("all_heads", [0, 0, hidden]))

    summed = node("Add", f"{names[1]}.residual", writer.affine(names[1], attended, *out), x)
    x = writer.norm(f"{under}/attention_norm", summed, layer.attention_norm, weights.epsilon)
    y, gelu = writer.affine(names[2], x, *wide), f"{under}/gelu"
    turned = node("Erf", f"{gelu}.erf", node("Div", f"{gelu}.div", y, writer.numbers("root_2", 2**0.5)))
    doubled = node("Mul", f"{gelu}.mul", y, node("Add", f"{gelu}.add", turned, writer.numbers("one", 1.0)))
    inner = node("Mul", gelu, doubled, writer.numbers("half", 0.5))
    summed = node("Add", f"{names[3]}.residual", writer.affine(names[3], inner, *narrow), x)
    return writer.norm(f"{under}/out_norm", summed, layer.out_norm, weights.epsilon)
