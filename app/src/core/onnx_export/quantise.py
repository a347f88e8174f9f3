"""Calibrated INT8 of an encoder: record the inputs of its linear layers over texts, and plan each layer in 8 bits.

SmoothQuant (Xiao et al. 2023) moves the range of inputs into the weights; the shift of Outlier Suppression+ (Wei et al.
2023) lets channels of one sign use all 8 bits. In a feed-forward's second layer the channels with the largest range
stay in float. `agreement.judge` decides whether the result may serve.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..backends import ModelUnsupported
from ..backends.folder import Folder
from ..backends.onnx import make_session
from ..backends.tokenizing import RustTokenizer
from ..tokens import TokenBatch, plan_batches
from . import needs
from .graph import ATTENTION_MASK, PARTS, LayerPlan, build_graph, feeds

if TYPE_CHECKING:
    import onnx

Algorithm = Literal["minmax", "entropy", "percentile"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
# Also the default of `[tensorrt] algorithm`, so that the default calibration serves (docs/decisions/0020).
DEFAULT: Algorithm = "minmax"

ALPHA = 0.8  # SmoothQuant's exponent; its usual 0.5 is worse here (docs/decisions/0020)
FAR = 24  # one feed-forward channel in 24 stays in float: 64 of 1,536
TOKENS = 1024  # most tokens of a batch
WATCHED = 2**24  # about how many numbers are recorded at once: 64 MB
SAMPLE = 512  # rows of each layer's inputs for entropy and percentile
PERCENTILE = 99.99
BINS, STRIDE = 2048, 8  # of entropy's histogram; bins between two cuts that are tried
LEVELS = 128  # magnitudes of signed 8 bits
LEAST = 1e-5

Rows = NDArray[np.float32]


def quantise(folder: Folder, texts: Sequence[str], algorithm: str) -> tuple[onnx.ModelProto, Mapping[str, Any]]:
    """Return the 8-bit graph, calibrated on these texts, and figures. `int8_share`: of the linear layers' products.

    1,000 texts of 40 tokens take seconds with all-MiniLM-L6-v2. Raises DeviceUnavailable without the extra,
    ModelUnsupported for a model without a graph or with non-finite activations.
    """
    needs("onnx", "onnxruntime")
    from onnx import numpy_helper

    started = time.perf_counter()
    graph = build_graph(folder)
    constants = {each.name.removesuffix(".weight"): each for each in graph.graph.initializer}
    linears = [node for node in graph.graph.node if node.op_type == "MatMul" and node.name in constants]
    weights = {node.name: numpy_helper.to_array(constants[node.name]) for node in linears}
    tokens = RustTokenizer.load(folder).ids(texts)
    seen = _watched(graph, {node.name: node.input[0] for node in linears}, tokens)
    plans = {name: _plan(name, weights[name], rows, algorithm) for name, rows in seen.items()}
    inside = sum(len(plan.factors) * weights[name].shape[1] for name, plan in plans.items())
    report = {
        "algorithm": algorithm,
        "texts": len(texts),
        "int8_share": inside / sum(weight.size for weight in weights.values()),
        "layers": len(plans),
        "seconds": round(time.perf_counter() - started, 2),
    }
    return build_graph(folder, plans=plans), report


def _watched(graph: onnx.ModelProto, sources: Mapping[str, str], tokens: TokenBatch) -> dict[str, Rows]:
    """Return rows of each layer's input without padding: least and greatest value of each channel, then an even sample
    of tokens."""
    import onnx

    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sources.values())
    session = make_session(graph.SerializeToString(), [("CPUExecutionProvider", {})])
    kept: dict[str, list[Rows]] = {}
    every, seen = max(1, tokens.tokens // SAMPLE), 0
    wide = sum(each.dims[0] for each in graph.graph.initializer if each.name.removesuffix(".weight") in sources)
    for batch in plan_batches(tokens.lengths.tolist(), min(TOKENS, WATCHED // wide), 1):
        given = feeds(tokens.select(batch))
        real = given[ATTENTION_MASK].astype(bool)
        for name, found in zip(sources, session.run(list(sources.values()), given), strict=True):
            rows = found[real]
            low, high = rows.min(0), rows.max(0)
            if not np.isfinite(low + high).all():
                raise ModelUnsupported(f"the activations of {name} are not finite, so it cannot be calibrated")
            before = kept.setdefault(name, [low, high])
            before[:2] = [np.minimum(before[0], low), np.maximum(before[1], high)]
            before.extend(rows[-seen % every :: every].copy())
        seen += int(real.sum())
    return {name: np.stack(rows) for name, rows in kept.items()}


def _plan(name: str, weight: Rows, rows: Rows, algorithm: str) -> LayerPlan:
    """Plan one layer by rows from `_watched`."""
    order, near = None, len(weight)
    if name.endswith(f"/{PARTS[-1]}"):
        order = np.argsort(np.abs(rows[:2]).max(0), kind="stable")
        weight, rows = weight[order], rows[:, order]
        near -= max(1, near // FAR)
    rows = rows[:, :near]
    shift = (rows[0] + rows[1]) / 2 if order is None else None  # after GELU a shift lowers accuracy
    if shift is not None:
        rows = rows - shift
    reach = np.maximum(np.abs(rows[:2]).max(0), LEAST)
    factors = np.maximum(np.abs(weight[:near]).max(1), LEAST) ** (1 - ALPHA) / reach**ALPHA
    factors = (factors / np.exp(np.log(factors).mean())).astype(np.float32)
    magnitudes = np.abs(rows * factors)
    threshold = float(magnitudes[:2].max())
    if algorithm == "percentile":
        threshold = float(np.percentile(magnitudes[2:], PERCENTILE))
    elif algorithm == "entropy":
        threshold = entropy(magnitudes[2:])
    return LayerPlan(threshold, shift, factors, order)


def entropy(magnitudes: Rows) -> float:
    """Return the cut with the smallest Kullback-Leibler divergence in 8 bits; the largest of equal ones.

    Compared are the counts clipped at the cut, and the same in LEVELS even levels, whose counts are spread over their
    non-empty bins. The divergence is infinite if a non-empty bin becomes empty.
    """
    histogram, edges = np.histogram(magnitudes, BINS)
    counts = histogram.astype(np.float64)
    best, found = float("inf"), BINS
    for cut in range(LEVELS, BINS + 1, STRIDE):
        inside = counts[:cut]
        seen = inside.copy()
        seen[-1] += counts[cut:].sum()
        starts = np.arange(LEVELS) * cut // LEVELS
        filled = seen > 0
        of_level = np.add.reduceat(inside, starts) / np.maximum(np.add.reduceat(filled.astype(np.float64), starts), 1.0)
        quantised = np.repeat(of_level, np.diff([*starts, cut]))[filled]
        if quantised.all():
            truth, quantised = seen[filled] / seen.sum(), quantised / quantised.sum()
            divergence = float(np.sum(truth * np.log(truth / quantised)))
            if divergence <= best:
                best, found = divergence, cut
    return float(edges[found])
