"""The ONNX Runtime backend on a CPU: the vectors of our own engine, in parts, in fp32 where it must, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.artifacts import GRAPH
from app.src.core.backends import DeviceFailed, DeviceUnavailable, OutOfMemory
from app.src.core.backends.onnx import OnnxRuntimeBackend, make_session
from app.src.core.backends.torch.backend import EngineOptions
from app.src.core.device import DeviceProfile
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import load_engine
from app.src.core.memory import MemoryLimits, memory_of
from app.src.core.onnx_export.serving import CPU, CUDA, TENSORRT, GraphOptions, GraphServing
from app.src.core.tokens import TokenBatch

pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("onnx", reason="needs the extra onnx")

ODD = ["", "pump", "Dichtung undicht", "x" * 300, " ".join(["valve"] * 100), "\ud800 broken", "a b c"] * 3


@pytest.fixture
def serving(folder: Path, tmp_path: Path) -> GraphServing:
    return GraphServing(EngineOptions(str(folder), device="cpu"), GraphOptions(tmp_path / "cache"), MemoryLimits())


@pytest.fixture
def backend(serving: GraphServing) -> OnnxRuntimeBackend:
    return serving.float_backend("auto", "for a test")


def test_the_engine_over_it_gives_the_vectors_of_the_engine_over_torch(
    backend: OnnxRuntimeBackend, folder: Path
) -> None:
    with (
        EmbeddingEngine(backend) as engine,
        load_engine(EngineOptions(str(folder), device="cpu", precision="fp32")) as ours,
    ):
        np.testing.assert_allclose(engine.embed(ODD), ours.embed(ODD), atol=2e-6)
        assert engine.fingerprint == ours.fingerprint
        assert (engine.dimension, engine.max_tokens) == (ours.dimension, ours.max_tokens)
        assert (engine.path, engine.path_reason) == ("onnx-runtime", "ONNX Runtime on the CPU; for a test")
        assert engine.precision == "fp32"
        assert engine.stats().padded_tokens > engine.stats().tokens  # padded rectangles, planned as such
        assert engine.count_tokens(ODD) == ours.count_tokens(ODD)


class Recording:
    """A session around another one; `change` is what it does to the vectors."""

    def __init__(self, inner: Any, change: Callable[[np.ndarray], np.ndarray] = lambda vectors: vectors) -> None:
        self._inner = inner
        self._change = change
        self.shapes: list[tuple[int, ...]] = []
        self.error: Exception | None = None

    def run(self, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]) -> Sequence[Any]:
        if self.error is not None:
            raise self.error
        self.shapes.append(feeds["input_ids"].shape)
        return [self._change(np.array(self._inner.run(outputs, feeds)[0]))]

    def get_providers(self) -> Sequence[str]:
        providers: Sequence[str] = self._inner.get_providers()
        return providers


@pytest.fixture
def plain(serving: GraphServing, tmp_path: Path) -> OnnxRuntimeBackend:
    serving.float_backend("fp32")
    (graph,) = (tmp_path / "cache").glob(f"*/{GRAPH}")
    session = make_session(graph, [(CPU, {})], 1)
    return OnnxRuntimeBackend(
        serving.folder, "0" * 64, DeviceProfile.cpu(), "fp32", "for a test", session, lambda: session
    )


def test_more_texts_than_a_session_was_built_for_go_in_parts(plain: OnnxRuntimeBackend) -> None:
    recording = Recording(plain.usual)
    backend = replace(plain, usual=recording, most_texts=4)
    tokens = backend.tokenize(ODD[:10])
    recording.shapes.clear()
    np.testing.assert_allclose(backend.forward(tokens), replace(plain).forward(tokens), atol=2e-6)
    assert [shape[0] for shape in recording.shapes] == [4, 4, 2]


def test_on_a_card_rectangles_are_filled_up_but_never_beyond_the_positions(plain: OnnxRuntimeBackend) -> None:
    recording = Recording(plain.usual)
    card = replace(plain, profile=DeviceProfile.of_card("Tesla T4"), precision="int8", usual=recording)
    backend = card
    for words, width in ((3, 16), (40, 48), (200, 48)):
        recording.shapes.clear()
        backend.forward(backend.tokenize([" ".join(["pump"] * words)]))
        assert recording.shapes == [(1, width)]


def test_on_a_card_its_weights_are_held(plain: OnnxRuntimeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    card = DeviceProfile.of_card("Tesla T4")
    monkeypatch.setattr(OnnxRuntimeBackend, "free_bytes", lambda backend: 0)
    size = (plain.folder.path / "model.safetensors").stat().st_size
    with EmbeddingEngine(replace(plain, profile=card)), EmbeddingEngine(replace(plain)):
        assert (memory_of(card).held_bytes, memory_of(plain.profile).held_bytes) == (size, 0)
    assert memory_of(card).held_bytes == 0


def test_rows_that_are_not_finite_are_computed_again_in_fp32(plain: OnnxRuntimeBackend) -> None:
    made: list[Any] = []

    def exact() -> Any:
        made.append(Recording(plain.usual))
        return made[-1]

    def spoil(vectors: np.ndarray) -> np.ndarray:
        vectors[0] = np.nan
        return vectors

    backend = replace(plain, usual=Recording(plain.usual, spoil), exact=exact)
    with EmbeddingEngine(backend) as engine, EmbeddingEngine(replace(plain)) as right:
        np.testing.assert_allclose(engine.embed(ODD), right.embed(ODD), atol=2e-6)
        engine.embed(["again"])
        assert engine.stats().recomputed >= 2
        assert len(made) == 1  # kept, once it was needed


def _greedy() -> bytes:
    """A graph that needs 40 TB for each token."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Shape", ["input_ids"], ["shape"]),
        helper.make_node("Mul", ["shape", "large"], ["larger"]),
        helper.make_node("ConstantOfShape", ["larger"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["sentence_embedding"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "m"]) for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, None)
    large = helper.make_tensor("large", TensorProto.INT64, [2], [10**6, 10**7])
    graph = helper.make_graph(nodes, "greedy", inputs, [output], [large])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    return bytes(model.SerializeToString())


def test_exhausted_memory_is_known(plain: OnnxRuntimeBackend) -> None:
    recording = Recording(plain.usual)
    greedy = replace(plain, usual=recording, exact=lambda: make_session(_greedy(), [(CPU, {})]))
    backend = greedy
    with pytest.raises(OutOfMemory):
        backend.forward(TokenBatch.of([[101, 102]]), exact=True)
    for error in (MemoryError(), RuntimeError("CUDA failure 2: out of memory"), RuntimeError("std::bad_alloc")):
        recording.error = error
        with pytest.raises(OutOfMemory):
            backend.forward(TokenBatch.of([[101, 102]]))
    recording.error = RuntimeError("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT")
    with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
        backend.forward(TokenBatch.of([[101, 102]]))


@pytest.mark.proves(20)
def test_a_card_that_failed_is_known(plain: OnnxRuntimeBackend) -> None:
    recording = Recording(plain.usual)
    backend = replace(plain, usual=recording)
    recording.error = RuntimeError(
        "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; "
        "hostname=planted ; file=cuda_call.cc ; line=121 ; expr=cudaStreamSynchronize(stream_);"
    )
    with pytest.raises(DeviceFailed, match="failure 700: an illegal memory access was encountered; restart") as caught:
        backend.forward(TokenBatch.of([[101, 102]]))
    assert "planted" not in str(caught.value)
    recording.error = RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 1: invalid argument ; GPU=0")
    with pytest.raises(RuntimeError, match="invalid argument"):
        backend.forward(TokenBatch.of([[101, 102]]))


def test_a_closed_backend_computes_nothing(backend: OnnxRuntimeBackend) -> None:
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.forward(TokenBatch.of([[101, 102]]))


def test_a_session_without_the_provider_asked_for_is_refused(plain: OnnxRuntimeBackend, tmp_path: Path) -> None:
    """ONNX Runtime itself only warns and goes on with the CPU."""
    (graph,) = (tmp_path / "cache").glob(f"*/{GRAPH}")
    for provider in (CUDA, TENSORRT):
        with (
            pytest.warns(UserWarning, match="not in available provider names"),
            pytest.raises(DeviceUnavailable, match=f"cannot use {provider}"),
        ):
            make_session(graph, [(provider, {}), (CPU, {})])
    with pytest.raises(DeviceUnavailable, match="cannot load the graph"):
        make_session(b"no graph", [(CPU, {})])


def test_a_float_graph_is_written_once(serving: GraphServing, tmp_path: Path) -> None:
    serving.float_backend("fp32", "")
    (graph,) = (tmp_path / "cache").glob(f"*/{GRAPH}")
    written = graph.stat().st_mtime_ns
    serving.float_backend("auto", "")
    assert graph.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("precision", "said"), [("bf16", "graphs compute in"), ("tf32", "graphs compute in"), ("fp16", "precision fp16")]
)
def test_precisions_that_graphs_have_not_on_a_cpu(serving: GraphServing, precision: str, said: str) -> None:
    with pytest.raises(DeviceUnavailable, match=said):
        serving.float_backend(precision, "")
