"""Write a sentence encoder as an ONNX graph from the packed path's weights: padded token ids in, pooled vectors out.

It is written node by node instead of traced, so that linear layers have names for `quantise`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..backends import ModelUnsupported, TokenIds
from ..backends.folder import Folder
from ..tokens import rectangle
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


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A linear layer in 8 bits: (inputs - shift) * factors is rounded, and 127 represents `threshold`. Inputs without
    factors stay in float. `order`: of the inputs of a feed-forward's second layer, largest ranges last."""

    threshold: float
    shift: NDArray[np.float32] | None
    factors: NDArray[np.float32]
    order: NDArray[np.intp] | None = None


def build_graph(
    folder: Folder, *, precision: GraphPrecision = "fp32", plans: Mapping[str, LayerPlan] | None = None
) -> onnx.ModelProto:
    """Build the graph from `input_ids` and `attention_mask`, int64 (batch, seq), to `sentence_embedding`, float32
    (batch, hidden), pooled and not normalised.

    Rows must not exceed the model's `max_length`; the result of a row with an empty mask is undefined. Pooling and the
    sums of norms are in fp32 in every `precision`. `plans`: linear layers (`layer.0/wide`) in 8 bits. Raises
    DeviceUnavailable without the extra, ModelUnsupported for a model without a graph.
    """
    needs("onnx")
    import torch

    from ..backends.torch.architectures import read, refusal
    from ..backends.torch.packed import load_tensors

    if (why_not := refusal(folder)) is not None:
        raise ModelUnsupported(f"model {folder.name!r} has no ONNX graph: {why_not}")
    try:
        weights = read(folder, load_tensors(folder, torch.device("cpu"), torch.float32))
    except KeyError as error:
        raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {error}") from error
    writer = _Writer(folder.name, precision, plans or {})
    output = _encoder(writer, weights, mean=folder.pooling == "mean")
    return writer.model(output, int(weights.words.shape[1]), {"pooling": folder.pooling, "precision": precision})


def feeds(batch: Sequence[TokenIds], *, width: int | None = None, rows: int | None = None) -> dict[str, Numbers]:
    """Return the graph's inputs for these token ids, padded to a rectangle."""
    ids, mask = rectangle(batch, width=width, rows=rows)
    return {INPUT_IDS: ids, ATTENTION_MASK: mask}


# ------------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """Collects nodes and constants in order. A node's output has the node's name."""

    def __init__(self, model: str, precision: GraphPrecision, plans: Mapping[str, LayerPlan]) -> None:
        self._model = model
        self._precision = precision
        self.plans = plans
        self.dtype = np.dtype(np.float16 if precision == "fp16" else np.float32)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._bytes = 0

    def node(self, kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        return self.nodes(kind, name, inputs, [name], **attributes)[0]

    def nodes(
        self, kind: str, name: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> list[str]:
        """Add one node with several outputs."""
        from onnx import helper

        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=name, **attributes))
        return list(outputs)

    def constant(self, name: str, numbers: Numbers) -> str:
        from onnx import numpy_helper

        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.asarray(numbers, order="C"), name)
            self._bytes += numbers.nbytes
            if self._bytes > MOST_BYTES:
                raise ModelUnsupported(
                    f"model {self._model!r} has no ONNX graph in {self._precision}: its weights take more than the 2 GB"
                    " that one ONNX file holds" + ("; use fp16" if self._precision == "fp32" else "")
                )
        return name

    def integers(self, name: str, *values: int) -> str:
        return self.constant(name, np.array(values, np.int64))

    def numbers(self, name: str, values: Any) -> str:
        """Add a constant (tensor, array or number) in the graph's precision."""
        exact = np.asarray(values, np.float32)
        with np.errstate(over="ignore"):
            rounded = exact.astype(self.dtype)
        if not np.isfinite(rounded).all():
            raise ModelUnsupported(f"model {self._model!r} has no ONNX graph in {self._precision}: {name} overflows")
        return self.constant(name, rounded)

    def cast(self, name: str, x: str, dtype: Any) -> str:
        from onnx import helper

        return self.node("Cast", name, x, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def affine(self, name: str, x: str, weight: Numbers, bias: Numbers | None) -> str:
        """Add a linear layer with this (in, out) weight, in 8 bits if there is a plan for it."""
        if (plan := self.plans.get(name)) is not None:
            product = self._in_8_bits(name, x, weight, plan)
            if plan.shift is not None:
                bias = plan.shift @ weight + (0 if bias is None else bias)
        else:
            product = self.node("MatMul", name, x, self.numbers(f"{name}.weight", weight))
        if bias is None:
            return product
        return self.node("Add", f"{name}.sum", product, self.numbers(f"{name}.bias", bias))

    def _in_8_bits(self, name: str, x: str, weight: Numbers, plan: LayerPlan) -> str:
        """Add a product with Q and DQ in the form that TensorRT and ONNX Runtime recognise."""
        near, far = len(plan.factors), ""
        if near < len(weight):
            parts = self.integers(f"{name}.parts", near, len(weight) - near)
            x, far = self.nodes("Split", f"{name}.split", [x, parts], [f"{name}.near", f"{name}.far"], axis=-1)
        if plan.shift is not None:
            x = self.node("Sub", f"{name}.shifted", x, self.numbers(f"{name}.shift", plan.shift))
        smooth = self.node("Mul", f"{name}.smooth", x, self.numbers(f"{name}.factors", plan.factors))
        scale = self.constant(f"{name}.scale", np.array(max(plan.threshold / GREATEST, LEAST_SCALE), np.float32))
        zero = self.constant(f"{name}.zero", np.array(0, np.int8))
        whole = self.node("QuantizeLinear", f"{name}.quantize", smooth, scale, zero)
        rounded = self.node("DequantizeLinear", f"{name}.dequantize", whole, scale, zero)
        inside = weight[:near] / plan.factors[:, None]
        scales = np.maximum(np.abs(inside).max(0) / GREATEST, LEAST_SCALE).astype(np.float32)
        integers = np.clip(np.rint(inside / scales), -GREATEST, GREATEST).astype(np.int8)
        constants = {"int8": integers, "scale": scales, "zero": np.zeros(len(scales), np.int8)}
        back = [self.constant(f"{name}.weight.{part}", numbers) for part, numbers in constants.items()]
        inside_back = self.node("DequantizeLinear", f"{name}.weight.dequantize", *back, axis=1)
        product = self.node("MatMul", name, rounded, inside_back)
        if not far:
            return product
        outside = self.node("MatMul", f"{name}.far.product", far, self.numbers(f"{name}.far.weight", weight[near:]))
        return self.node("Add", f"{name}.both", product, outside)

    def norm(self, name: str, x: str, norm: Affine, epsilon: float) -> str:
        """Add a norm, which sums in fp32 in every precision (default stash_type 1)."""
        inputs = [x, self.numbers(f"{name}.weight", norm.weight)]
        if norm.bias is not None:
            inputs.append(self.numbers(f"{name}.bias", norm.bias))
        return self.node("LayerNormalization", name, *inputs, axis=-1, epsilon=epsilon)

    def gelu(self, name: str, x: str) -> str:
        """Add the exact GELU, in the form that ONNX Runtime and TensorRT recognise."""
        turned = self.node("Erf", f"{name}.erf", self.node("Div", f"{name}.div", x, self.numbers("root_2", 2**0.5)))
        whole = self.node("Mul", f"{name}.mul", x, self.node("Add", f"{name}.add", turned, self.numbers("one", 1.0)))
        return self.node("Mul", name, whole, self.numbers("half", 0.5))

    def model(self, output: str, hidden: int, about: Mapping[str, str]) -> onnx.ModelProto:
        from onnx import TensorProto, helper

        shape = ["batch", "seq"]
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in (INPUT_IDS, ATTENTION_MASK)]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", hidden])]
        constants = list(self._constants.values())
        graph = helper.make_graph(self._nodes, "sentence_encoder", inputs, outputs, initializer=constants)
        model = helper.make_model(
            graph,
            producer_name="owl-sap-connector",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )
        helper.set_model_props(model, dict(about))
        return model


# ---------------------------------------------------------------------------------------------------------- the encoder


def _encoder(writer: _Writer, weights: EncoderWeights, *, mean: bool) -> str:
    """Write all layers, and return the output's name."""
    hidden = writer.integers("hidden_axes", 1, 2)
    seen = writer.node("Unsqueeze", "mask", ATTENTION_MASK, hidden)
    hiding = writer.node(
        "Mul",
        "hiding",
        writer.node("Sub", "padding", writer.numbers("one", 1.0), writer.cast("mask.number", seen, writer.dtype)),
        writer.numbers("hidden_score", HIDDEN_SCORE),
    )
    x = _embedded(writer, weights)
    for number, layer in enumerate(weights.layers):
        x = _layer(writer, number, layer, x, hiding, weights)
    return _pooled(writer, x, mean=mean)


def _embedded(writer: _Writer, weights: EncoderWeights) -> str:
    words = writer.node("Gather", "embeddings/words", writer.numbers("words", weights.words), INPUT_IDS)
    table = writer.numbers("positions", weights.positions)
    if weights.padding_id is None:
        length = writer.node("Shape", "seq", INPUT_IDS, start=1, end=2)
        first = (writer.integers("slice.start", 0), length, writer.integers("slice.axis", 0))
        positions = writer.node("Slice", "embeddings/positions", table, *first)
    else:
        places = _counted(writer, weights.padding_id)
        positions = writer.node("Gather", "embeddings/positions", table, places)
    summed = writer.node("Add", "embeddings/sum", words, positions)
    return writer.norm("embeddings/norm", summed, weights.embedding_norm, weights.epsilon)


def _counted(writer: _Writer, padding_id: int) -> str:
    """Count positions as `packed.positions_of` does; in fp32, which TensorRT requires for CumSum."""
    padding = writer.node("Equal", "places.padding", INPUT_IDS, writer.integers("padding_id", padding_id))
    real = writer.cast("places.real", writer.node("Not", "places.not", padding), np.float32)
    sums = writer.node("CumSum", "places.sums", real, writer.constant("places.axis", np.array(1, np.int64)))
    counted = writer.node("Mul", "places.counted", sums, real)
    return writer.node("Add", "places", writer.cast("places.whole", counted, np.int64), "padding_id")


def _layer(writer: _Writer, number: int, layer: LayerWeights, x: str, hiding: str, weights: EncoderWeights) -> str:
    """Write one layer with norms after attention and feed-forward."""
    under, hidden = f"layer.{number}", int(weights.words.shape[1])
    width = hidden // weights.heads
    parts = (layer.query_key_value, layer.attention_out, layer.wide, layer.narrow)
    (joint, out, wide, narrow), names = map(_matrix, parts), [f"{under}/{part}" for part in PARTS]
    # Scaling the query weights once replaces dividing the scores at every call.
    scale = np.repeat(np.array([1.0 / math.sqrt(width), 1.0, 1.0], np.float32), hidden)
    joint = joint[0] * scale, None if joint[1] is None else joint[1] * scale
    if (plan := writer.plans.get(names[3])) is not None and plan.order is not None:
        wide = wide[0][:, plan.order], None if wide[1] is None else wide[1][plan.order]
        narrow = narrow[0][plan.order], narrow[1]
    attended = _attention(
        writer, f"{under}/attention", writer.affine(names[0], x, *joint), hiding, (weights.heads, width)
    )
    summed = writer.node("Add", f"{names[1]}.residual", writer.affine(names[1], attended, *out), x)
    x = writer.norm(f"{under}/attention_norm", summed, layer.attention_norm, weights.epsilon)
    inner = writer.gelu(f"{under}/gelu", writer.affine(names[2], x, *wide))
    summed = writer.node("Add", f"{names[3]}.residual", writer.affine(names[3], inner, *narrow), x)
    return writer.norm(f"{under}/out_norm", summed, layer.out_norm, weights.epsilon)


def _matrix(layer: Affine) -> tuple[Numbers, Numbers | None]:
    """Return the (in, out) weight and the bias."""
    return layer.weight.numpy().T, None if layer.bias is None else layer.bias.numpy()


def _attention(writer: _Writer, name: str, qkv: str, hiding: str, heads: tuple[int, int]) -> str:
    """Write attention from (batch, seq, 3 x hidden) to (batch, seq, hidden). `heads`: number and width."""
    count, width = heads
    hidden = count * width
    third = writer.integers("thirds", hidden, hidden, hidden)
    parts = writer.nodes("Split", f"{name}/split", [qkv, third], [f"{name}/{part}" for part in "qkv"], axis=-1)
    split = writer.integers("by_head", 0, 0, count, width)
    q, k, v = (writer.node("Reshape", f"{part}.heads", part, split) for part in parts)
    q, v = (writer.node("Transpose", f"{part}.first", part, perm=[0, 2, 1, 3]) for part in (q, v))
    k = writer.node("Transpose", f"{k}.first", k, perm=[0, 2, 3, 1])
    scores = writer.node("Add", f"{name}/hidden", writer.node("MatMul", f"{name}/scores", q, k), hiding)
    shares = writer.node("Softmax", f"{name}/shares", scores, axis=-1)
    mixed = writer.node(
        "Transpose", f"{name}/mixed", writer.node("MatMul", f"{name}/mix", shares, v), perm=[0, 2, 1, 3]
    )
    return writer.node("Reshape", name, mixed, writer.integers("all_heads", 0, 0, hidden))


def _pooled(writer: _Writer, x: str, *, mean: bool) -> str:
    """Write the pooling, in fp32."""
    x = writer.cast("pooling/tokens", x, np.float32)
    if not mean:
        return writer.node("Gather", OUTPUT, x, writer.constant("pooling/first", np.array(0, np.int64)), axis=1)
    columns = writer.node("Unsqueeze", "pooling/column", ATTENTION_MASK, writer.integers("pooling/axis", 2))
    weights = writer.cast("pooling/weights", columns, np.float32)
    over = writer.integers("pooling/over", 1)
    seen = writer.node("Mul", "pooling/seen", x, weights)
    total = writer.node("ReduceSum", "pooling/total", seen, over, keepdims=0)
    count = writer.node("ReduceSum", "pooling/count", weights, over, keepdims=0)
    least = writer.constant("pooling/least", np.array(1e-9, np.float32))
    return writer.node("Div", OUTPUT, total, writer.node("Max", "pooling/divisor", count, least))
