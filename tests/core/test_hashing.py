"""The hashing model: the same everywhere and always, near for shared words and stems, never a zero vector."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.core.backends import Vectors
from app.src.core.backends.hashing import HashingBackend
from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine
from tests.core.conftest import words_by_text


@pytest.fixture(scope="module")
def hashing() -> Engine:
    return load_engine(EngineOptions("hash:384"))


def cosine(engine: EmbeddingEngine, one: str, other: str) -> float:
    vectors: Vectors = engine.embed([one, other])
    return float(vectors[0] @ vectors[1])


def test_vectors_never_change() -> None:
    # Stored collections depend on it: change _VERSION with the algorithm, so that the fingerprint changes too.
    vector = load_engine(EngineOptions("hash:16")).embed(["Pump leaks oil"])[0]
    wanted = [
        -0.0517482,
        -0.3207853,
        -0.0570954,
        0.0000000,
        0.2721090,
        0.6473162,
        0.2721090,
        -0.1030981,
        -0.0283291,
        0.0544218,
        -0.1172627,
        0.0770054,
        0.5300535,
        -0.0114909,
        -0.0544218,
        -0.0770054,
    ]
    np.testing.assert_allclose(vector, wanted, atol=1e-6)


def test_similar_texts_are_near(hashing: EmbeddingEngine) -> None:
    text = "hydraulic pump leaks oil at the main seal"
    same_words = cosine(hashing, text, "oil leaks at the main seal of the hydraulic pump")
    same_stems = cosine(hashing, text, "hydraulics of pumps leaking oily sealing")
    stranger = cosine(hashing, text, "customer invoice overdue since March")
    assert same_words > 0.8
    assert same_words > same_stems > stranger + 0.1
    assert abs(stranger) < 0.15


def test_case_and_spacing_do_not_matter(hashing: EmbeddingEngine) -> None:
    assert cosine(hashing, "Pump  LEAKS\noil", "pump leaks oil") == pytest.approx(1)


@given(st.lists(st.text(max_size=40), min_size=1, max_size=10))
def test_every_text_has_a_unit_vector(hashing: EmbeddingEngine, texts: list[str]) -> None:
    np.testing.assert_allclose(np.linalg.norm(hashing.embed(texts), axis=1), 1, atol=1e-5)


def test_a_text_whose_features_cancel_is_as_an_empty_one() -> None:
    engine = load_engine(EngineOptions("hash:8"))
    assert np.isfinite(engine.embed(["", "   ", "\ud800", "\x00"])).all()


@given(st.lists(st.text(max_size=24), max_size=5))
def test_ids_are_words(texts: list[str]) -> None:
    backend = HashingBackend("hash:16")
    batch = backend.tokenize(texts)
    spelled = ["".join(text.lower().split()).replace("\x00", "") for text in texts]
    assert ["".join(words) for words in words_by_text(batch)] == spelled


@given(st.text(max_size=100))
def test_tokens_offsets_and_counts_agree(text: str) -> None:
    backend = HashingBackend("hash:16")
    spans = backend.offsets(text)
    assert backend.count([text]) == [len(spans)]
    assert all(text[start:end].strip() for start, end in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_long_texts_are_cut(hashing: EmbeddingEngine) -> None:
    long = " ".join(f"w{number}" for number in range(400))
    cut = " ".join(f"w{number}" for number in range(254))
    assert hashing.max_tokens == 254
    assert hashing.count_tokens([long]) == [400]
    np.testing.assert_array_equal(hashing.embed([long]), hashing.embed([cut]))


def test_dimension_is_in_the_name_and_the_fingerprint() -> None:
    small, large = load_engine(EngineOptions("hash:8")), load_engine(EngineOptions("hash:4096"))
    assert (small.dimension, large.dimension) == (8, 4096)
    assert small.model == "hash:8"
    assert small.fingerprint != large.fingerprint


@given(texts=st.lists(st.text(max_size=12), max_size=80), cut=st.integers(0, 80))
def test_a_vector_does_not_depend_on_what_else_is_embedded(texts: list[str], cut: int) -> None:
    """To the last bit: not on the batch, its size or its order, nor on which words are remembered."""
    backend, forgetful = HashingBackend("hash:16"), HashingBackend("hash:16")
    tokens = backend.tokenize(texts)
    one_by_one = [backend.forward(tokens.select([place])).tobytes() for place in range(len(tokens))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.src.core.backends.hashing._REMEMBERED", 3)
        halves = [
            forgetful.forward(part)
            for part in (tokens.select(range(len(tokens))[:cut]), tokens.select(range(len(tokens))[cut:]))
        ]
    assert [row.tobytes() for row in backend.forward(tokens)] == one_by_one
    assert [row.tobytes() for half in halves for row in half] == one_by_one
