"""The graph written from our readers gives the vectors of our fp32 backend on the real ONNX Runtime: every length and
order, odd texts, the packaged model; and what has no graph is refused in a sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.src.core import onnx_export
from app.src.core.backends import DeviceUnavailable, ModelUnsupported
from app.src.core.backends.folder import Folder, read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.backends.torch.packed import PackedEncoder
from app.src.core.device import DeviceProfile
from app.src.core.onnx_export import graph
from app.src.core.onnx_export.graph import ATTENTION_MASK, INPUT_IDS, OUTPUT, build_graph
from app.src.core.tokens import TokenBatch, rectangle
from connector.extras import install_command
from tests.core.conftest import MINILM
from tests.core.test_architectures import MODELS, least_cosine, save, sequences
from tests.core.test_pytorch import ODD

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

KNOWN = list(MODELS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("graphs")

    def get(name: str) -> Path:
        path = root / name.replace(" ", "-")
        return path if path.exists() else save(path, minilm_folder, MODELS[name])

    return get


@pytest.fixture(scope="module")
def minilm_read(minilm_folder: Path) -> Folder:
    return read_folder(minilm_folder, MINILM)


@pytest.fixture(scope="module")
def minilm_graph(minilm_read: Folder) -> Any:
    return build_graph(minilm_read)


@pytest.fixture(scope="module")
def minilm_runs(minilm_graph: Any) -> Any:
    return session(minilm_graph)


def session(model: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def vectors(runs: Any, batch: TokenBatch) -> torch.Tensor:
    ids, mask = rectangle(batch, width=int(batch.lengths.max()), pad_id=0)
    return torch.from_numpy(runs.run([OUTPUT], {INPUT_IDS: ids, ATTENTION_MASK: mask})[0])


def reference(folder: Folder, batch: TokenBatch) -> torch.Tensor:
    with torch.inference_mode():
        return PackedEncoder.load(folder, DeviceProfile.cpu(), torch.float32)(batch)


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        *((name, "mean") for name in KNOWN[:3]),
        *(pytest.param(name, "mean", marks=pytest.mark.slow) for name in KNOWN[3:]),
        *(pytest.param(name, "cls", marks=[pytest.mark.slow] * (name != "bert")) for name in KNOWN),
    ],
)
def test_every_length_and_order(saved: Callable[[str], Path], name: str, pooling: str) -> None:
    folder = replace(read_folder(saved(name), "tiny"), pooling=pooling)
    runs = session(build_graph(folder))
    # As it is stored, 0 is what fills rectangles up: texts that spell out the padding token are in it.
    batch = sequences(int(folder.config.get("pad_token_id") or 0))
    wanted = reference(folder, batch)
    alone = torch.cat([vectors(runs, batch.select([place])) for place in range(len(batch))])
    assert least_cosine(alone, wanted) >= 0.999999
    for order in (list(range(len(batch))), sorted(range(len(batch)), key=lambda place: -len(batch[place]))):
        found = vectors(runs, batch.select(order))
        assert least_cosine(found, wanted[order]) >= 0.999999
        torch.testing.assert_close(found, wanted[order], rtol=1e-3, atol=1e-4)


def test_the_packaged_model(minilm_read: Folder, minilm_graph: Any, minilm_runs: Any) -> None:
    onnx.checker.check_model(minilm_graph, full_check=True)
    texts = [text for text in ODD if text != "x" * 5000]  # as long as another one, as the model sees it
    batch = RustTokenizer.load(minilm_read).ids(texts)
    found = vectors(minilm_runs, batch)
    assert found.shape == (len(texts), 384)
    assert found.dtype == torch.float32
    assert least_cosine(found, reference(minilm_read, batch)) >= 0.99999


def test_what_fills_a_rectangle_up_changes_nothing(minilm_runs: Any) -> None:
    runs = minilm_runs
    batch = TokenBatch.of([[101, 7000, 102], [101, 8000, 9000, 102]])
    ids, mask = rectangle(batch, width=32, pad_id=0)
    wide = torch.from_numpy(runs.run([OUTPUT], {INPUT_IDS: ids, ATTENTION_MASK: mask})[0])
    torch.testing.assert_close(wide, vectors(runs, batch), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_fp16_is_near_and_half_as_large(minilm_read: Folder, minilm_graph: Any) -> None:
    half = build_graph(minilm_read, precision="fp16")
    assert half.ByteSize() < 0.51 * minilm_graph.ByteSize()
    onnx.checker.check_model(half, full_check=True)
    batch = RustTokenizer.load(minilm_read).ids(["Die Pumpe ist undicht.", "oil", "pump " * 300])
    runs = session(half)
    assert least_cosine(vectors(runs, batch), reference(minilm_read, batch)) >= 0.9999
    assert {node.type for node in runs.get_inputs()} == {"tensor(int64)"}
    assert runs.get_outputs()[0].type == "tensor(float)"


def test_what_the_graph_says_of_itself(minilm_graph: Any) -> None:
    model = minilm_graph
    shapes = {
        each.name: [axis.dim_param or axis.dim_value for axis in each.type.tensor_type.shape.dim]
        for each in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {INPUT_IDS: ["batch", "seq"], ATTENTION_MASK: ["batch", "seq"], OUTPUT: ["batch", 384]}
    products = {node.name for node in model.graph.node if node.op_type == "MatMul"}
    assert {f"layer.{layer}/{part}" for layer in range(6) for part in graph.PARTS} < products


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mpnet", "is not one of"), ("deberta-v2", "is not one of")],
)
def test_models_without_a_graph(minilm_read: Folder, name: str, reason: str) -> None:
    folder = replace(minilm_read, config=MODELS.get(name, {"model_type": name}))
    with pytest.raises(ModelUnsupported, match=reason):
        build_graph(folder)


def test_a_number_that_fp16_cannot_hold(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from app.src.core.backends.torch import packed

    load = packed.load_tensors
    monkeypatch.setattr(packed, "load_tensors", lambda *given: {name: 1e6 * t for name, t in load(*given).items()})
    folder = read_folder(saved("bert"), "tiny")
    with pytest.raises(ModelUnsupported, match=r"in fp16: .* overflows"):
        build_graph(folder, precision="fp16")
    assert build_graph(folder).graph.node


def test_more_weights_than_one_file_holds(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST_BYTES", 1_000_000)
    with pytest.raises(ModelUnsupported, match=r"more than the 2 GB .* use fp16"):
        build_graph(read_folder(saved("bert"), "tiny"))


def test_a_tensor_that_is_missing(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from app.src.core.backends.torch import packed

    load = packed.load_tensors
    monkeypatch.setattr(packed, "load_tensors", lambda *given: dict(list(load(*given).items())[5:]))
    with pytest.raises(ModelUnsupported, match="lacks the tensor"):
        build_graph(read_folder(saved("bert"), "tiny"))


def test_without_the_extra(minilm_read: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(DeviceUnavailable, match=re.escape(install_command("onnx"))):
        build_graph(minilm_read)
    onnx_export.needs("json", "sys")
