"""Calibrated INT8 of an encoder: measure the inputs of its linear layers over texts, and plan each layer in 8 bits.

SmoothQuant (Xiao et al. 2023) moves the range of inputs into the weights. In a feed-forward's second layer the channels
with the largest range stay in float. `agreement.judge` decides whether the result may serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.folder import Folder
from . import needs
from .graph import PARTS, LayerPlan, build_graph

if TYPE_CHECKING:
    import onnx

ALPHA = 0.8  # SmoothQuant's exponent; its usual 0.5 is worse here (docs/decisions/0020)
FAR = 24  # one feed-forward channel in 24 stays in float: 64 of 1,536
LEAST = 1e-5


def quantise(folder: Folder, texts: Sequence[str]) -> tuple[onnx.ModelProto, Mapping[str, Any]]:
    """Return the 8-bit graph, calibrated on these texts, and figures. `int8_share`: share of the linear layers'
    multiplications in 8 bits.

    1,000 texts of 40 tokens take seconds with all-MiniLM-L6-v2. Raises DeviceUnavailable without the extra,
    ModelUnsupported for a model without a graph or with non-finite activations.
    """
    needs("onnx")
    import onnx

    from ..backends.torch.int8 import observe

    constants = {each.name: each for each in build_graph(folder).graph.initializer}
    ranges = {f"layer.{name}": found.numpy() for name, found in observe(folder, texts).items()}
    weights = {name: onnx.numpy_helper.to_array(constants[f"{name}.weight"]) for name in ranges}
    plans = {name: _plan(name, weight, ranges[name]) for name, weight in weights.items()}
    inside = sum(len(plans[name][1]) * weight.shape[1] for name, weight in weights.items())
    report = {
        "texts": len(texts),
        "int8_share": inside / sum(weight.size for weight in weights.values()),
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
