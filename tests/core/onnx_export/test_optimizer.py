"""T4TensorRTOptimizer on a CPU, through the real ONNX Runtime: what it lets pass, what it refuses, and what an engine
then does. The quantiser is replaced where only the verdict matters."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.agreement import LEAST_TEXTS
from app.src.core.backends import ModelUnsupported, OutOfMemory
from app.src.core.backends.folder import Folder
from app.src.core.device import DeviceProfile
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.onnx_export.graph import build_graph
from app.src.core.onnx_export.optimizer import (
    HELD_BACK,
    MOST_JUDGES,
    OptimizerOptions,
    T4GPUConfig,
    T4TensorRTOptimizer,
    TooFewTexts,
    divided,
)
from app.src.core.onnx_export.runtime import CPU, CUDA, Installed, Site
from app.src.core.onnx_export.serving import GraphOptions
from app.src.settings import Settings
from connector.extras import install_command

pytest.importorskip("onnxruntime", reason="needs the extra onnx")
onnx = pytest.importorskip("onnx", reason="needs the extra onnx")

TEXTS = [f"pump {number} leaks at flange {number * 7 % 13}, valve {chr(97 + number % 26)}" for number in range(200)]


class Quantiser:
    """The float graph with noise on its weights: as good or as bad as a test wants."""

    def __init__(self, noise: float = 0.0, share: float = 0.7) -> None:
        self.noise = noise
        self.share = share
        self.calls: list[tuple[str, Sequence[str]]] = []

    def __call__(self, folder: Folder, texts: Sequence[str], algorithm: str) -> tuple[Any, Mapping[str, Any]]:
        self.calls.append((algorithm, texts))
        model, random = build_graph(folder), np.random.default_rng(3)
        for constant in model.graph.initializer:
            if "/" in constant.name and constant.name.endswith(".weight"):
                numbers = onnx.numpy_helper.to_array(constant)
                spoilt = numbers + self.noise * numbers.std() * random.standard_normal(numbers.shape)
                constant.CopyFrom(onnx.numpy_helper.from_array(spoilt.astype(np.float32), constant.name))
        return model, {"int8_share": self.share, "excluded": []}


@pytest.fixture
def folder(make_folder: Callable[..., Path]) -> Path:
    return make_folder()


@pytest.fixture
def options(tmp_path: Path) -> OptimizerOptions:
    return OptimizerOptions(tmp_path / "cache", device="cpu")


def _engine(folder: Path, options: OptimizerOptions, **changed: Any) -> EmbeddingEngine:
    graphs = GraphOptions(options.cache, enabled=True)
    return load_engine(EngineOptions(str(folder), device="cpu", onnx=graphs, **changed))


def test_a_good_graph_is_accepted_and_serves(folder: Path, options: OptimizerOptions) -> None:
    quantiser = Quantiser(1e-4)
    done = T4TensorRTOptimizer(options, quantiser=quantiser).optimize_model_with_calibration(
        str(folder), "materials", TEXTS
    )
    assert done.accepted
    assert done.path.is_file()
    assert (done.algorithm, done.runtime, done.engine, done.cached) == ("minmax", "cpu", None, False)
    assert done.report["int8_share"] == 0.7
    assert done.verdict.mean_cosine is not None
    assert 0.999 < done.verdict.mean_cosine < 1
    assert "path" not in done.as_dict()

    (algorithm, learnt), judged = quantiser.calls[0], done.verdict.texts
    assert algorithm == "minmax" == Settings().tensorrt.algorithm
    assert len(learnt) + judged == len(TEXTS)  # none does both
    for precision in ("auto", "int8"):
        with _engine(folder, options, precision=precision) as engine:
            assert (engine.path, engine.precision) == ("onnx-runtime", "int8")
            assert "calibrated by minmax" in engine.path_reason
            assert np.isfinite(engine.embed(TEXTS[:9])).all()
            assert "/int8-" in engine.fingerprint


def test_a_poor_graph_is_refused_and_the_engine_says_so(
    folder: Path, options: OptimizerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        done = T4TensorRTOptimizer(options, quantiser=Quantiser(0.8)).optimize_model_with_calibration(
            str(folder), "materials", TEXTS
        )
    assert not done.accepted
    assert done.reason.startswith("refused: mean cosine")
    assert "materials: INT8 by minmax was refused" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), _engine(folder, options) as engine:
        assert engine.path == "packed"
        assert engine.precision != "int8"
        assert engine.path_reason.startswith("no graph, not in int8: the accuracy gate refused: mean cosine")
        assert engine.fingerprint.endswith("/float")
    assert "is not computed as a graph" in caplog.text
    assert not any(text in caplog.text for text in TEXTS)


def test_a_graph_with_hardly_any_int8_is_refused(folder: Path, options: OptimizerOptions) -> None:
    done = T4TensorRTOptimizer(options, quantiser=Quantiser(0, 0.2)).optimize_model_with_calibration(
        str(folder), "materials", TEXTS
    )
    assert not done.accepted
    assert "20% of the linear layers" in done.reason


def test_nothing_is_calibrated_twice(folder: Path, options: OptimizerOptions) -> None:
    quantiser = Quantiser(1e-4)
    optimizer = T4TensorRTOptimizer(options, quantiser=quantiser)
    first = optimizer.optimize_model_with_calibration(str(folder), "m", TEXTS)
    again = optimizer.optimize_model_with_calibration(str(folder), "m", TEXTS)
    assert (first.cached, again.cached, len(quantiser.calls)) == (False, True, 1)
    assert again.verdict == first.verdict
    optimizer.optimize_model_with_calibration(str(folder), "m", TEXTS, "entropy")
    optimizer.optimize_model_with_calibration(str(folder), "m", TEXTS[1:])
    assert len(quantiser.calls) == 3
    assert len(list(options.cache.glob("int8-*"))) == 2  # the newest of each algorithm


def test_a_damaged_graph_does_not_serve_and_is_made_again(folder: Path, options: OptimizerOptions) -> None:
    quantiser = Quantiser(1e-4)
    optimizer = T4TensorRTOptimizer(options, quantiser=quantiser)
    path = optimizer.optimize_model_with_calibration(str(folder), "m", TEXTS).path
    path.write_bytes(path.read_bytes()[:-1])
    with _engine(folder, options) as engine:
        assert engine.precision != "int8"
    again = optimizer.optimize_model_with_calibration(str(folder), "m", TEXTS)
    assert not again.cached
    with _engine(folder, options) as engine:
        assert engine.precision == "int8"


def test_a_graph_that_came_out_otherwise_is_another_family(folder: Path, options: OptimizerOptions) -> None:
    """The same model, on another processor or by another version: vectors that are not for one index."""
    families = []
    for texts, noise in ((TEXTS, 1e-4), (TEXTS[1:], 1e-3)):
        optimizer = T4TensorRTOptimizer(options, quantiser=Quantiser(noise))
        assert optimizer.optimize_model_with_calibration(str(folder), "m", texts).accepted
        with _engine(folder, options) as engine:
            families.append(engine.fingerprint)
    assert len(set(families)) == 2


def test_what_was_judged_elsewhere_does_not_serve_here(
    folder: Path, options: OptimizerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    T4TensorRTOptimizer(options, quantiser=Quantiser(1e-4)).optimize_model_with_calibration(str(folder), "m", TEXTS)
    monkeypatch.setattr("onnxruntime.__version__", "1.99.0")
    with _engine(folder, options) as engine:
        assert engine.precision != "int8"
        assert "owl-sap calibrate" in engine.path_reason


def test_without_a_calibration_the_engine_says_how_to_get_one(folder: Path, options: OptimizerOptions) -> None:
    with _engine(folder, options) as engine:
        assert engine.path == "packed"
        assert "no calibration of this model by minmax" in engine.path_reason


def test_without_the_extra_the_engine_says_so(
    folder: Path, options: OptimizerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with _engine(folder, options) as engine:
        assert engine.path == "packed"
        assert install_command("onnx") in engine.path_reason


class Failing:
    """A session that is made, but cannot compute."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Sequence[Any]:
        raise self._error

    def get_providers(self) -> Sequence[str]:
        return []


@pytest.mark.parametrize("fault", ["no kernels", "no memory", "no memory to load", "no folder", "no space"])
def test_a_card_that_cannot_run_the_graph_stops_no_start(
    folder: Path, options: OptimizerOptions, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The engine runs on torch and says why, whatever fails between a card that looks well and its first vector."""
    from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

    def make(graph: bytes | Path, providers: object, threads: int | None) -> Failing:
        if fault == "no memory to load":
            raise OutOfMemory("the device's memory does not hold this graph")
        return Failing(EPFail("no kernel image" if fault == "no kernels" else "CUDA failure 2: out of memory"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere")

    installed = Installed("1.31.1", "1.23.2", None, "580.95", (CUDA, CPU))
    site = Site(DeviceProfile.of_card("Tesla T4"), "cuda", installed, "for a test", make=make)
    monkeypatch.setattr("app.src.core.onnx_export.serving.find_site", lambda *_: site)
    monkeypatch.setattr("app.src.core.onnx_export.runtime.preload", lambda _: None)
    if fault == "no folder":
        options.cache.write_text("a file")
    if fault == "no space":
        monkeypatch.setattr(Path, "write_bytes", full)
    said = {"no kernels": "no kernel image", "no folder": "cannot be written to", "no space": "No space left"}
    with _engine(folder, options) as engine:
        assert engine.path == "packed"
        assert said.get(fault, "memory does not hold this") in engine.path_reason
        assert "/somewhere" not in engine.path_reason
        assert np.isfinite(engine.embed(TEXTS[:3])).all()


def test_a_loaded_sentence_transformer_can_be_given(folder: Path, options: OptimizerOptions) -> None:
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(str(folder), device="cpu")
    done = T4TensorRTOptimizer(options, quantiser=Quantiser()).optimize_model_with_calibration(loaded, "mine", TEXTS)
    assert done.accepted


@pytest.mark.parametrize("model", [None, 5, object()])
def test_what_is_no_model_is_refused(options: OptimizerOptions, model: Any) -> None:
    with pytest.raises(ModelUnsupported, match="cannot be calibrated"):
        T4TensorRTOptimizer(options).optimize_model_with_calibration(model, "m", TEXTS)


def test_models_without_layers_are_refused(options: OptimizerOptions) -> None:
    with pytest.raises(ModelUnsupported, match="is the test embedder"):
        T4TensorRTOptimizer(options).optimize_model_with_calibration("hash:64", "m", TEXTS)


def test_an_unknown_algorithm_is_refused(options: OptimizerOptions) -> None:
    with pytest.raises(ValueError, match="use minmax, entropy, percentile"):
        T4TensorRTOptimizer(options).optimize_model_with_calibration("all-MiniLM-L6-v2", "m", TEXTS, "median")


def test_texts_are_divided_without_overlap() -> None:
    learnt, judges = divided([*TEXTS, *TEXTS, " ", ""])
    assert not set(learnt) & set(judges)
    assert [*sorted([*learnt, *judges])] == sorted(TEXTS)
    assert len(judges) == len(TEXTS) // HELD_BACK
    learnt, judges = divided([str(number) for number in range(5000)])
    assert (len(learnt), len(judges)) == (4000, MOST_JUDGES)
    assert int(judges[-1]) > 4900


def test_few_texts_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(TooFewTexts, match="100 distinct texts are too few"):
        divided([f"{number % 100}" for number in range(400)])
    assert len(divided([str(number) for number in range(HELD_BACK * LEAST_TEXTS)])[1]) == LEAST_TEXTS


def test_the_guides_configuration_is_taken(folder: Path, tmp_path: Path) -> None:
    kept = T4GPUConfig(int8_mode=True, precision="int8", calibration_cache=tmp_path / "kept", optimization_level=4)
    done = T4TensorRTOptimizer(kept, quantiser=Quantiser()).optimize_model_with_calibration(str(folder), "m", TEXTS)
    assert done.path.is_relative_to(tmp_path / "kept")
    optimizer = T4TensorRTOptimizer(T4GPUConfig(), quantiser=Quantiser())
    done = optimizer.optimize_model_with_calibration(str(folder), "m", TEXTS)
    assert done.path.is_file()
    del optimizer
    assert not done.path.exists()
