"""What only a card can show: TensorRT and CUDA through the real ONNX Runtime, engines from the cache, the gate on the
card. None of it ever ran where this was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.src.core.backends.torch.backend import TorchBackend, TorchOptions
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.onnx_export.cache import ArtifactCache
from app.src.core.onnx_export.optimizer import OptimizerOptions, T4TensorRTOptimizer, _embedded
from app.src.core.onnx_export.runtime import CUDA, TENSORRT, Site, find_site
from app.src.core.onnx_export.serving import GraphOptions, GraphServing, Model
from tests.core.test_pytorch import ODD, mixed_lengths

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MINILM = "all-MiniLM-L6-v2"
TEXTS = [text for text in dict.fromkeys([*ODD, *mixed_lengths(200)]) if text.strip()]


@pytest.fixture
def found() -> Site:
    pytest.importorskip("onnxruntime", reason="needs the extra tensorrt")
    found = find_site("cuda")
    if found.runtime == "cpu":
        pytest.skip(found.reason)
    return found


@pytest.fixture
def with_tensorrt(found: Site) -> Site:
    if found.runtime != "tensorrt":
        pytest.skip(found.reason)
    return found


def _least_cosine(one: np.ndarray, other: np.ndarray) -> float:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(1) / lengths).min())


@pytest.fixture
def exact(found: Site) -> np.ndarray:
    backend = TorchBackend.load(TorchOptions(MINILM, "fp32", "cuda"))
    return _embedded(backend, TEXTS)


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.9999), ("fp16", 0.999)])
def test_float_graphs_give_the_vectors_of_torch(
    found: Site, tmp_path: Path, exact: np.ndarray, precision: str, least: float
) -> None:
    serving = GraphServing(found, Model.find(MINILM), ArtifactCache(tmp_path))
    backend = serving.float_backend(precision, found.reason)
    assert _least_cosine(backend.forward(backend.tokenize(TEXTS[:4]), exact=True), exact[:4]) >= 0.9999
    assert _least_cosine(_embedded(backend, TEXTS), exact) >= least


def test_the_second_start_takes_the_engine_from_the_cache(with_tensorrt: Site, tmp_path: Path) -> None:
    serving = GraphServing(with_tensorrt, Model.find(MINILM), ArtifactCache(tmp_path))
    first, again = (serving.float_backend("fp16", "").info.path_reason for _ in range(2))
    assert "was built" in first
    assert "came from the cache" in again


def test_sessions_run_on_what_was_asked_for(with_tensorrt: Site, tmp_path: Path) -> None:
    serving = GraphServing(with_tensorrt, Model.find(MINILM), ArtifactCache(tmp_path))
    backend = serving.float_backend("fp16", "")
    assert list(backend._open().usual.get_providers()[:2]) == [TENSORRT, CUDA]


def test_int8_is_judged_on_the_card_and_serves_if_it_passes(with_tensorrt: Site, tmp_path: Path) -> None:
    options = OptimizerOptions(tmp_path, device="cuda")
    done = T4TensorRTOptimizer(options).optimize_model_with_calibration(MINILM, "texts", TEXTS, "minmax")
    assert done.runtime == "tensorrt"
    assert done.engine is not None
    assert done.verdict.mean_cosine is not None
    graphs = GraphOptions(tmp_path, algorithm="minmax")
    with load_engine(EngineOptions(MINILM, precision="int8", device="cuda", onnx=graphs)) as engine:
        assert (engine.precision == "int8") is done.accepted
        assert engine.path == ("onnx-runtime" if done.accepted else "packed")
        assert isinstance(engine, EmbeddingEngine)
        assert np.isfinite(engine.embed(TEXTS)).all()
