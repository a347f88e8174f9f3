"""Q/DQ nodes around linear layers of a graph, as TensorRT and ONNX Runtime expect them: signed 8 bits, one symmetric
range for a layer's activations, one for the weights of each output channel.

Each channel may be shifted and scaled before rounding; weights and bias undo both, so the layer computes the same. The
channels with the largest range of a feed-forward's second layer are computed separately, in float.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .graph import PARTS

if TYPE_CHECKING:
    import onnx

Numbers = NDArray[np.float32]
GREATEST = 127
_LEAST_SCALE = 1e-7  # above the smallest number of fp16


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How a linear layer becomes 8 bits. `threshold`: the magnitude, after shift and factors, that 127 represents.
    `shift`, `factors`: per rounded channel, (x - shift) * factor. `near`: the first channels that are rounded, the
    others stay in float; None: all."""

    threshold: float
    shift: Numbers | None = None
    factors: Numbers | None = None
    near: int | None = None

    def balanced(self, x: Numbers) -> Numbers:
        """Return what is rounded of these inputs."""
        x = x[:, : self.near]
        x = x if self.shift is None else x - self.shift
        return x if self.factors is None else x * self.factors


def rounded(x: Numbers, threshold: float) -> Numbers:
    """Return what Q and DQ make of it."""
    scale = max(threshold / GREATEST, _LEAST_SCALE)
    made: Numbers = np.clip(np.rint(x / np.float32(scale)), -GREATEST - 1, GREATEST) * np.float32(scale)
    return made


def rounded_weight(weight: Numbers, dtype: Any = np.float32) -> tuple[NDArray[np.int8], Numbers]:
    """Return the (in, out) weight in 8 bits and the scale of each output, representable in `dtype`."""
    scales = np.maximum(np.abs(weight).max(0) / GREATEST, _LEAST_SCALE).astype(dtype).astype(np.float32)
    return np.clip(np.rint(weight / scales), -GREATEST, GREATEST).astype(np.int8), scales


def linears(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """Return the MatMuls with a constant weight in order: name -> shape of the weight (in, out)."""
    shapes = {each.name: tuple(each.dims) for each in model.graph.initializer}
    return {
        node.name: (shapes[node.input[1]][0], shapes[node.input[1]][1])
        for node in model.graph.node
        if node.op_type == "MatMul" and len(shapes.get(node.input[1], ())) == 2
    }


def behind_gelu(name: str) -> str | None:
    """Return the first layer of the feed-forward whose second layer this is, else None."""
    under, _, part = name.rpartition("/")
    return f"{under}/{PARTS[2]}" if part == PARTS[3] else None


class Constants:
    """A graph's constants as arrays."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._at = {each.name: each for each in model.graph.initializer}

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def __getitem__(self, name: str) -> NDArray[Any]:
        from onnx import numpy_helper

        return numpy_helper.to_array(self._at[name])

    def __setitem__(self, name: str, numbers: NDArray[Any]) -> None:
        from onnx import numpy_helper

        made = numpy_helper.from_array(np.asarray(numbers, order="C"), name)
        if name in self._at:
            self._at[name].CopyFrom(made)
        else:
            self._at[name] = self._model.graph.initializer.add()
            self._at[name].CopyFrom(made)

    def drop(self, names: set[str]) -> None:
        kept = [each for each in self._model.graph.initializer if each.name not in names]
        del self._model.graph.initializer[:]
        self._model.graph.initializer.extend(kept)
        self._at = {each.name: each for each in self._model.graph.initializer}


def reordered(model: onnx.ModelProto, orders: Mapping[str, NDArray[np.intp]]) -> onnx.ModelProto:
    """Return the same function with the feed-forwards' inner channels in another order. `orders`: name of the second
    layer -> old channel at each new place."""
    made = _copy(model)
    constants = Constants(made)
    for narrow, order in orders.items():
        wide = behind_gelu(narrow)
        if wide is None:
            raise ValueError(f"{narrow} is not the second layer of a feed-forward")
        constants[f"{wide}.weight"] = constants[f"{wide}.weight"][:, order]
        if f"{wide}.bias" in constants:
            constants[f"{wide}.bias"] = constants[f"{wide}.bias"][order]
        constants[f"{narrow}.weight"] = constants[f"{narrow}.weight"][order]
    return made


def with_qdq(model: onnx.ModelProto, plans: Mapping[str, LayerPlan]) -> onnx.ModelProto:
    """Return the graph with these layers in 8 bits. Raises ValueError for an unknown layer, and for a shift in a layer
    without a bias that could undo it."""
    unknown = set(plans) - set(linears(model))
    if unknown:
        raise ValueError(f"not linear layers: {', '.join(sorted(unknown))}")
    made = _copy(model)
    constants = Constants(made)
    nodes: list[onnx.NodeProto] = []
    replaced: set[str] = set()
    for node in made.graph.node:
        if node.name in plans:
            replaced.add(node.input[1])
            nodes += _quantised(node, plans[node.name], constants)
        else:
            nodes.append(node)
    nodes = [_kept(node) for node in nodes]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    constants.drop(replaced - {name for node in nodes for name in node.input})
    return made


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    return made


def _kept(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy that survives clearing the list that contains the node."""
    import onnx

    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def _quantised(node: onnx.NodeProto, plan: LayerPlan, constants: Constants) -> Iterator[onnx.NodeProto]:
    from onnx import helper

    name, source, whole = node.name, node.input[0], constants[node.input[1]]
    near = len(whole) if plan.near is None else plan.near
    product = node.output[0]
    if near < len(whole):
        constants[f"{name}.parts"] = np.array([near, len(whole) - near], np.int64)
        halves = [f"{name}.near", f"{name}.far"]
        yield helper.make_node("Split", [source, f"{name}.parts"], halves, name=f"{name}.split", axis=-1)
        source, product = halves[0], f"{name}.near.product"
    plan = _in_dtype(plan, whole.dtype)
    yield from _rounding(name, source, plan, constants, whole.dtype)
    weight = whole[:near].astype(np.float32)
    if plan.shift is not None:
        if f"{name}.bias" not in constants:
            raise ValueError(f"{name} has no bias to undo a shift")
        bias = constants[f"{name}.bias"]
        constants[f"{name}.bias"] = (bias.astype(np.float32) + plan.shift @ weight).astype(bias.dtype)
    if plan.factors is not None:
        weight = weight / plan.factors[:, None]
    integers, scales = rounded_weight(weight, whole.dtype)
    constants[f"{name}.weight.int8"] = integers
    constants[f"{name}.weight.scale"] = scales.astype(whole.dtype)
    constants[f"{name}.weight.zero"] = np.zeros(len(scales), np.int8)
    back = [f"{name}.weight.{part}" for part in ("int8", "scale", "zero")]
    yield helper.make_node("DequantizeLinear", back, [f"{name}.weight.float"], name=f"{name}.weight.dequantize", axis=1)
    yield helper.make_node("MatMul", [f"{name}.rounded", f"{name}.weight.float"], [product], name=name)
    if near < len(whole):
        constants[f"{name}.far.weight"] = whole[near:]
        far = [f"{name}.far", f"{name}.far.weight"]
        yield helper.make_node("MatMul", far, [f"{name}.far.product"], name=f"{name}.far")
        both = [product, f"{name}.far.product"]
        yield helper.make_node("Add", both, [node.output[0]], name=f"{name}.both")


def _in_dtype(plan: LayerPlan, dtype: np.dtype[Any]) -> LayerPlan:
    """Round shift and factors to the graph's type, so that weights and bias undo exactly what is applied."""
    shift, factors = (
        None if numbers is None else numbers.astype(dtype).astype(np.float32) for numbers in (plan.shift, plan.factors)
    )
    return replace(plan, shift=shift, factors=factors)


def _rounding(
    name: str, source: str, plan: LayerPlan, constants: Constants, dtype: np.dtype[Any]
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes from `source` to `name`.rounded."""
    from onnx import helper

    steps: Sequence[tuple[str, str, Numbers | None]] = (("Sub", "shift", plan.shift), ("Mul", "factors", plan.factors))
    for kind, what, numbers in steps:
        if numbers is not None:
            constants[f"{name}.{what}"] = numbers.astype(dtype)
            yield helper.make_node(kind, [source, f"{name}.{what}"], [f"{name}.{kind}"], name=f"{name}.{kind}")
            source = f"{name}.{kind}"
    constants[f"{name}.scale"] = np.array(max(plan.threshold / GREATEST, _LEAST_SCALE), dtype)
    constants[f"{name}.zero"] = np.array(0, np.int8)
    numbers_of = [f"{name}.scale", f"{name}.zero"]
    whole = f"{name}.int8"
    yield helper.make_node("QuantizeLinear", [source, *numbers_of], [whole], name=f"{name}.quantize")
    yield helper.make_node("DequantizeLinear", [whole, *numbers_of], [f"{name}.rounded"], name=f"{name}.dequantize")
