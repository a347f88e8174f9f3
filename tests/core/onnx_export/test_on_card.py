"""What only a card can show: TensorRT and CUDA through the real ONNX Runtime, engines from the cache, the gate on the
card. None of it ever ran where this was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.src.core.backends.torch.backend import EngineOptions, TorchBackend
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import load_engine
from app.src.core.memory import MemoryLimits
from app.src.core.onnx_export.optimizer import calibrate, embedded
from app.src.core.onnx_export.serving import CUDA, TENSORRT, GraphOptions, GraphServing
from tests.core.conftest import MINILM
from tests.core.test_pytorch import ODD, mixed_lengths

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TEXTS = [text for text in dict.fromkeys([*ODD, *mixed_lengths(200)]) if text.strip()]


@pytest.fixture
def found(tmp_path: Path) -> GraphServing:
    pytest.importorskip("onnxruntime", reason="needs the extra tensorrt")
    found = GraphServing(EngineOptions(MINILM, device="cuda"), GraphOptions(tmp_path), MemoryLimits())
    if found.runtime == "cpu":
        pytest.skip(found.reason)
    return found


@pytest.fixture
def with_tensorrt(found: GraphServing) -> GraphServing:
    if found.runtime != "tensorrt":
        pytest.skip(found.reason)
    return found


def _least_cosine(one: np.ndarray, other: np.ndarray) -> float:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(1) / lengths).min())


@pytest.fixture
def exact(found: GraphServing) -> np.ndarray:
    return embedded(TorchBackend.load(EngineOptions(MINILM, "fp32", "cuda")), TEXTS)


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.9999), ("fp16", 0.999)])
def test_float_graphs_give_the_vectors_of_torch(
    found: GraphServing, exact: np.ndarray, precision: str, least: float
) -> None:
    backend = found.float_backend(precision, found.reason)
    assert _least_cosine(backend.forward(backend.tokenize(TEXTS[:4]), exact=True), exact[:4]) >= 0.9999
    assert _least_cosine(embedded(backend, TEXTS), exact) >= least


def test_the_second_start_takes_the_engine_from_the_cache(with_tensorrt: GraphServing) -> None:
    first, again = (with_tensorrt.float_backend("fp16", "") for _ in range(2))
    assert "was built" in first.info.path_reason
    assert "came from the cache" in again.info.path_reason
    assert list(again.usual.get_providers()[:2]) == [TENSORRT, CUDA]


@pytest.mark.usefixtures("with_tensorrt")
def test_int8_is_judged_on_the_card_and_serves_if_it_passes(tmp_path: Path) -> None:
    graphs = GraphOptions(tmp_path)
    done = calibrate(EngineOptions(MINILM, device="cuda"), graphs, MemoryLimits(), "texts", TEXTS)
    assert done["runtime"] == "tensorrt"
    assert done["engine"] is not None
    assert done["verdict"]["mean_cosine"] is not None
    with load_engine(EngineOptions(MINILM, precision="int8", device="cuda"), graphs) as engine:
        assert (engine.precision == "int8") is done["accepted"]
        assert engine.path == ("onnx-runtime" if done["accepted"] else "packed")
        assert isinstance(engine, EmbeddingEngine)
        assert np.isfinite(engine.embed(TEXTS)).all()
