"""Calibration on a CPU: what passes the gate, what is refused, and what an engine then computes. Needs neither ONNX nor
ONNX Runtime."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from app.src.core.agreement import LEAST_TEXTS, Verdict, judge
from app.src.core.backends import ModelUnsupported
from app.src.core.backends.folder import Folder
from app.src.core.backends.torch import int8
from app.src.core.backends.torch.backend import EngineOptions
from app.src.core.backends.torch.int8 import observe
from app.src.core.device import DeviceUnavailable
from app.src.core.engine import Engine
from app.src.core.loading import load_engine
from app.src.core.memory import MemoryLimits
from app.src.core.onnx_export import optimizer
from app.src.core.onnx_export.optimizer import (
    HELD_BACK,
    MOST_JUDGES,
    T4GPUConfig,
    T4TensorRTOptimizer,
    TooFewTexts,
    calibrate,
    divided,
)
from app.src.core.onnx_export.serving import GraphOptions
from app.src.service.wiring import EngineEmbedder
from tests.core.test_int8 import needs_vnni

pytestmark = needs_vnni
TEXTS = [f"pump {number} leaks at flange {number * 7 % 13}, valve {chr(97 + number % 26)}" for number in range(200)]


class Observer:
    """Measures ranges as it should, then multiplies them: limits that are too narrow spoil every vector."""

    factor = 1.0

    def __init__(self) -> None:
        self.calls: list[Sequence[str]] = []

    def __call__(self, folder: Folder, texts: Sequence[str]) -> Mapping[str, Any]:
        assert threading.current_thread() is not threading.main_thread()  # where threads are set
        self.calls.append(texts)
        return {name: each * self.factor for name, each in observe(folder, texts).items()}


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Observer:
    observer = Observer()
    monkeypatch.setattr(int8, "observe", observer)
    return observer


def _calibrated(folder: Path | str, options: GraphOptions, texts: Sequence[str] = TEXTS) -> dict[str, Any]:
    return calibrate(EngineOptions(str(folder), device="cpu"), options, MemoryLimits(), "materials", texts)


def _engine(folder: Path, options: GraphOptions, **changed: Any) -> Engine:
    return load_engine(EngineOptions(str(folder), device="cpu", **changed), options)


def test_a_good_graph_is_accepted_and_serves(folder: Path, options: GraphOptions, observer: Observer) -> None:
    done = _calibrated(folder, options)
    assert done["accepted"]
    assert (done["runtime"], done["engine"]) == ("cpu", None)
    assert done["report"] == {"texts": 160, "int8_share": 1.0, "layers": 8}
    assert 0.999 < done["verdict"]["mean_cosine"] < 1
    assert str(options.cache) not in json.dumps(done)

    (learnt,), judged = observer.calls, done["verdict"]["texts"]
    assert len(learnt) == 160
    assert 40 < judged <= 72  # the other texts, and a few words of some
    for precision in ("auto", "int8"):
        with _engine(folder, options, precision=precision) as engine:
            assert (engine.path, engine.precision) == ("packed", "int8")
            assert "calibrated" in engine.path_reason
            assert done["reason"] in engine.precision_reason
            together = engine.embed(TEXTS[:9])
            alone = np.concatenate([engine.embed([text]) for text in TEXTS[:9]])
            assert np.einsum("ij,ij->i", alone, together).min() >= EngineEmbedder(engine).least_cosine
            assert "/int8-" in engine.fingerprint


def test_a_graph_learns_documents_with_their_prompt_and_serves_both_prompts(
    folder: Path, options: GraphOptions, observer: Observer
) -> None:
    prompts = {"query": "query: ", "passage": "passage: "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    assert _calibrated(folder, options)["accepted"]
    (learnt,) = observer.calls
    assert all(text.removeprefix("passage: ") in TEXTS and text.startswith("passage: ") for text in learnt)
    with _engine(folder, options) as graph, _engine(folder, replace(options, enabled=False), precision="fp32") as exact:
        assert (graph.path, exact.path, graph.prompts) == ("packed", "packed", exact.prompts)
        for input_type in exact.prompts:
            wanted = exact.embed(TEXTS[:9], input_type=input_type)
            cosines = np.einsum("ij,ij->i", graph.embed(TEXTS[:9], input_type=input_type), wanted)
            assert cosines.min() > 0.998
        assert not np.allclose(exact.embed(["oil"], input_type="query"), exact.embed(["oil"]))


def test_a_poor_graph_is_refused_and_the_engine_says_so(
    folder: Path, options: GraphOptions, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    observer.factor = 0.02
    with caplog.at_level(logging.WARNING):
        done = _calibrated(folder, options)
    assert not done["accepted"]
    assert done["reason"].startswith("refused: mean cosine")
    assert "materials: INT8 was refused" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), _engine(folder, options) as engine:
        assert engine.path == "packed"
        assert engine.precision != "int8"
        assert engine.path_reason.startswith("not in int8: the accuracy gate refused: mean cosine")
        assert engine.fingerprint.endswith("/float")
    assert "is not computed in int8" in caplog.text
    assert not any(text in caplog.text for text in TEXTS)


def test_an_earlier_calibration_that_passes_is_kept(
    folder: Path, options: GraphOptions, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with another torch or processor: each start tests the products."""
    first = _calibrated(folder, options)
    assert (first["kept"], first["calibrated_on"]) == (False, 160)
    with _engine(folder, options) as engine:
        family = engine.fingerprint
    monkeypatch.setattr("torch.__version__", "2.99.0")
    again = _calibrated(folder, options, TEXTS[1:])
    assert (again["kept"], again["accepted"], again["calibrated_on"]) == (True, True, 0)
    assert len(observer.calls) == 1
    with _engine(folder, options) as engine:
        assert engine.fingerprint == family


def _refusing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    verdicts = iter([Verdict(False, "refused: mean cosine 0.9 is below 0.99", 40)] * times)
    monkeypatch.setattr(optimizer, "judge", lambda *vectors: next(verdicts, None) or judge(*vectors))


def test_ranges_that_do_not_fit_other_texts_are_widened_and_the_old_ones_stay_loadable(
    folder: Path, options: GraphOptions, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _calibrated(folder, options)
    with _engine(folder, options) as engine:
        before, vectors = engine.fingerprint, engine.embed(TEXTS[:3])
    _refusing(monkeypatch, 1)
    done = _calibrated(folder, options, [f"{text} ({number * 7919})" for number, text in enumerate(TEXTS)])
    assert (done["kept"], done["accepted"]) == (False, True)
    with _engine(folder, options) as engine:
        assert engine.precision == "int8"
        assert engine.fingerprint != before
    with _engine(folder, options, precision=before.rpartition("/")[2]) as engine:
        assert engine.fingerprint == before
        np.testing.assert_array_equal(engine.embed(TEXTS[:3]), vectors)
    old, new = (load_file(path) for path in sorted(options.cache.glob("ranges-*/*.safetensors"), key=_changed))
    for name, (low, high) in old.items():
        assert (new[name][0] <= low).all()
        assert (new[name][1] >= high).all()


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_a_refusal_leaves_an_accepted_calibration(
    folder: Path, options: GraphOptions, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _calibrated(folder, options)
    with _engine(folder, options) as engine:
        family = engine.fingerprint
    _refusing(monkeypatch, 2)
    assert not _calibrated(folder, options, TEXTS[1:])["accepted"]
    with _engine(folder, options) as engine:
        assert engine.fingerprint == family


def test_a_family_of_vectors_is_loaded_by_its_name(folder: Path, options: GraphOptions) -> None:
    _calibrated(folder, options)
    with _engine(folder, options, precision="float") as engine:
        assert engine.fingerprint.endswith("/float")
    with pytest.raises(DeviceUnavailable, match="no calibration int8-0123456789ab of this model here: run owl-sap cal"):
        _engine(folder, options, precision="int8-0123456789ab")


def test_a_damaged_graph_does_not_serve_and_is_made_again(
    folder: Path, options: GraphOptions, observer: Observer
) -> None:
    _calibrated(folder, options)
    (path,) = options.cache.glob("ranges-*/ranges.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with _engine(folder, options) as engine:
        assert engine.precision != "int8"
    _calibrated(folder, options)
    with _engine(folder, options) as engine:
        assert engine.precision == "int8"


def test_without_a_calibration_the_engine_says_how_to_get_one(folder: Path, options: GraphOptions) -> None:
    with _engine(folder, options) as engine:
        assert engine.path == "packed"
        assert "no calibration of this model here" in engine.path_reason


def test_neither_onnx_nor_onnx_runtime_is_needed(
    folder: Path, options: GraphOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, library, None)
    assert _calibrated(folder, options)["accepted"]
    with _engine(folder, options, precision="int8") as engine:
        assert engine.precision == "int8"


@pytest.mark.parametrize(("gain", "precision"), [(2.0, "bf16"), (0.02, "int8")])
def test_auto_takes_int8_only_where_bf16_does_not_pay(
    folder: Path, options: GraphOptions, monkeypatch: pytest.MonkeyPatch, gain: float, precision: str
) -> None:
    """[tensorrt] enabled is off by default."""
    options = replace(options, enabled=False)
    monkeypatch.setattr("app.src.core.backends.torch.linears.bf16_gain", lambda: gain)
    with _engine(folder, options) as engine:
        assert engine.precision == ("bf16" if gain > 1 else "fp32")  # without a calibration
        assert ("owl-sap calibrate" in engine.path_reason) is (gain < 1)
    assert _calibrated(folder, options)["accepted"]
    with _engine(folder, options) as engine:
        assert engine.precision == precision


def test_a_cpu_whose_products_overflow_is_refused(
    folder: Path, options: GraphOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _calibrated(folder, options)["accepted"]
    monkeypatch.setattr(int8, "unusable", lambda: "8-bit products overflow on this CPU")
    with pytest.raises(DeviceUnavailable, match="overflow"):
        _calibrated(folder, options)
    with caplog.at_level(logging.WARNING), _engine(folder, options, precision="int8") as engine:
        assert engine.precision != "int8"
        assert engine.path_reason.startswith("not in int8: 8-bit products overflow")
    assert "is not computed in int8" in caplog.text


def test_models_without_a_packed_path_are_refused(make_folder: Callable[..., Path], options: GraphOptions) -> None:
    folder = make_folder(hidden_act="relu")
    with pytest.raises(ModelUnsupported, match="cannot be computed in int8: its activation is relu"):
        _calibrated(folder, options)
    with _engine(folder, options, precision="int8") as engine:
        assert (engine.path, "its activation is relu" in engine.path_reason) == ("padded", True)


def test_models_without_layers_are_refused(options: GraphOptions) -> None:
    with pytest.raises(ModelUnsupported, match="is the test embedder"):
        _calibrated("hash:64", options)


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


@pytest.mark.slow
def test_the_guides_configuration_is_taken(folder: Path, tmp_path: Path, observer: Observer) -> None:
    kept = T4GPUConfig(int8_mode=True, calibration_cache=tmp_path / "kept", optimization_level=4)
    done = T4TensorRTOptimizer(kept, "cpu").optimize_model_with_calibration(folder, "m", TEXTS)
    assert done["accepted"]
    assert len(list((tmp_path / "kept").glob("ranges-*"))) == 1
    own = T4TensorRTOptimizer(device="cpu")
    assert own.optimize_model_with_calibration(str(folder), "m", TEXTS)["accepted"]
    cache = own._options.cache
    assert cache.is_dir()
    del own
    assert not cache.exists()
