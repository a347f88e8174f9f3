"""What flows into the linear layers of a graph while ONNX Runtime computes it on the CPU: batch by batch, only the rows
of real tokens. Knows graphs and token ids; nothing of what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends import DeviceUnavailable, TokenIds, Vectors
from .graph import ATTENTION_MASK, OUTPUT, feeds
from .qdq import linears

if TYPE_CHECKING:
    import onnx

Rows = NDArray[np.float32]
BATCH = 1024
"""Tokens of a batch, at most, or those of one text."""
WATCHED = 2**24
"""Numbers that are watched at once, about: 64 MB."""


def batches(tokens: Sequence[TokenIds], budget: int = BATCH) -> Iterator[list[int]]:
    """Positions of texts that are computed together as rectangles of at most `budget` tokens, like lengths together."""
    batch: list[int] = []
    for place in sorted(range(len(tokens)), key=lambda place: len(tokens[place])):
        if batch and (len(batch) + 1) * len(tokens[place]) > budget:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def session(model: onnx.ModelProto, threads: int | None = None) -> Any:
    """An onnxruntime.InferenceSession on the CPU. Raises DeviceUnavailable where ONNX Runtime refuses the graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting threads leave the CPU to others
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common root but this
        raise DeviceUnavailable(f"ONNX Runtime cannot load the graph: {type(error).__name__}: {error}") from error


def vectors(runtime: Any, tokens: Sequence[TokenIds]) -> Vectors:
    """Of each text its vector, not normalised, in the order given. `runtime`: of `session`."""
    found: list[tuple[int, Any]] = []
    for batch in batches(tokens):
        rows = runtime.run([OUTPUT], feeds([tokens[place] for place in batch]))[0]
        found += zip(batch, rows, strict=True)
    made: Vectors = np.stack([row for _, row in sorted(found, key=lambda pair: pair[0])])
    return made


def inputs_of(
    model: onnx.ModelProto, layers: Sequence[str], tokens: Sequence[TokenIds]
) -> Iterator[Mapping[str, Rows]]:
    """For each batch what each of these MatMuls was given, (tokens, channels) in fp32."""
    import onnx

    sources = {node.name: node.input[0] for node in model.graph.node if node.name in set(layers)}
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    names = list(dict.fromkeys(sources.values()))
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    runtime = session(watched)
    channels = sum(shape[0] for name, shape in linears(model).items() if name in sources)
    for batch in batches(tokens, min(BATCH, WATCHED // channels)):
        given = feeds([tokens[place] for place in batch])
        real = given[ATTENTION_MASK].astype(bool)
        seen = dict(zip(names, runtime.run(names, given), strict=True))
        yield {layer: seen[source][real].astype(np.float32, copy=False) for layer, source in sources.items()}


@dataclass(slots=True)
class Channels:
    """Of the channels of one layer's input: least and greatest, and some rows as they came, evenly spread over all."""

    every: int
    """One row in so many is kept."""
    low: Rows = field(init=False)
    high: Rows = field(init=False)
    kept: list[Rows] = field(default_factory=list)
    _seen: int = 0

    def see(self, rows: Rows) -> None:
        low, high = rows.min(0), rows.max(0)
        if self._seen:
            low, high = np.minimum(low, self.low), np.maximum(high, self.high)
        self.low, self.high = low, high
        self.kept.append(rows[-self._seen % self.every :: self.every].copy())
        self._seen += len(rows)

    def reorder(self, order: NDArray[np.intp]) -> None:
        """As if the channels had come in this order."""
        self.low, self.high = self.low[order], self.high[order]
        self.kept = [rows[:, order] for rows in self.kept]

    @property
    def rows(self) -> Rows:
        return np.concatenate(self.kept)

    @property
    def reach(self) -> Rows:
        made: Rows = np.maximum(np.abs(self.low), np.abs(self.high))
        return made
