"""Calibrated INT8 of an encoder: record the inputs of its linear layers over texts, and plan each layer in 8 bits.

SmoothQuant (Xiao et al. 2023) moves the range of inputs into the weights. In a feed-forward's second layer the channels
with the largest range stay in float. `agreement.judge` decides whether the result may serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends import ModelUnsupported
from ..backends.folder import Folder
from ..backends.onnx import make_session
from ..backends.tokenizing import RustTokenizer
from ..tokens import plan_batches
from . import needs
from .graph import ATTENTION_MASK, PARTS, LayerPlan, build_graph, feeds

if TYPE_CHECKING:
    import onnx

ALPHA = 0.8  # SmoothQuant's exponent; its usual 0.5 is worse here (docs/decisions/0020)
FAR = 24  # one feed-forward channel in 24 stays in float: 64 of 1,536
TOKENS = 1024  # most tokens of a batch
WATCHED = 2**24  # about how many numbers are recorded at once: 64 MB
LEAST = 1e-5


def quantise(folder: Folder, texts: Sequence[str]) -> tuple[onnx.ModelProto, Mapping[str, Any]]:
    """Return the 8-bit graph, calibrated on these texts, and figures. `int8_share`: share of the linear layers'
    multiplications in 8 bits.

    1,000 texts of 40 tokens take seconds with all-MiniLM-L6-v2. Raises DeviceUnavailable without the extra,
    ModelUnsupported for a model without a graph or with non-finite activations.
    """
    needs("onnx", "onnxruntime")
    import onnx

    graph = build_graph(folder)
    constants = {each.name.removesuffix(".weight"): each for each in graph.graph.initializer}
    linears = {
        node.name: (node.input[0], onnx.numpy_helper.to_array(constants[node.name]))
        for node in graph.graph.node
        if node.op_type == "MatMul" and node.name in constants
    }
    sources = [source for source, _ in linears.values()]
    graph.graph.output.extend(onnx.ValueInfoProto(name=source) for source in sources)
    session = make_session(graph.SerializeToString(), [("CPUExecutionProvider", {})])
    tokens = RustTokenizer.load(folder).ids(texts)
    ranges: dict[str, NDArray[np.float32]] = {}  # layer -> least and greatest value of each channel
    budget = min(TOKENS, WATCHED // sum(len(weight) for _, weight in linears.values()))
    for batch in plan_batches(tokens.lengths, budget, 1):
        given = feeds(tokens.select(batch))
        real = given[ATTENTION_MASK].astype(bool)
        for name, found in zip(linears, session.run(sources, given), strict=True):
            low, high = found[real].min(0), found[real].max(0)
            if not np.isfinite(low + high).all():
                raise ModelUnsupported(f"the activations of {name} are not finite, so it cannot be calibrated")
            before = ranges.get(name, (low, high))
            ranges[name] = np.stack([np.minimum(before[0], low), np.maximum(before[1], high)])
    plans = {name: _plan(name, weight, ranges[name]) for name, (_, weight) in linears.items()}
    inside = sum(len(plans[name][1]) * weight.shape[1] for name, (_, weight) in linears.items())
    report = {
        "texts": len(texts),
        "int8_share": inside / sum(weight.size for _, weight in linears.values()),
        "layers": len(plans),
    }
    return build_graph(folder, plans=plans), report


def _plan(name: str, weight: NDArray[np.float32], ranges: NDArray[np.float32]) -> LayerPlan:
    order, near, reach = None, len(weight), np.maximum(np.abs(ranges).max(0), LEAST)
    if name.endswith(f"/{PARTS[-1]}"):
        order = np.argsort(reach, kind="stable")
        weight, reach = weight[order], reach[order]
        near -= max(1, near // FAR)
    reach = reach[:near]
    factors = np.maximum(np.abs(weight[:near]).max(1), LEAST) ** (1 - ALPHA) / reach**ALPHA
    factors = (factors / np.exp(np.log(factors).mean())).astype(np.float32)
    return float((reach * factors).max()), factors, order
