"""What the connector may expect of any embedder (`connector.model.Embedder`), over the hashing model, a model in the
emulator and the real models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.hana.connection import HanaPool
from connector.protocols import Embedder
from tests.native import embedder_of, login
from tests.slow import slow

HANA = "hana:SAP_NEB.20240715"
TEXTS = [
    "hydraulic pump leaks oil at the shaft seal",
    "Hydraulikpumpe verliert Öl an der Wellendichtung",
    "",
    "🦉",
    "invoice overdue",
    "pump " * 700,
    "invoice overdue",
]


@pytest.fixture(
    scope="module",
    params=[
        *("hash:384", "hash:384 with prompts", "hash:384 on two devices", HANA),
        *slow("all-MiniLM-L6-v2", "all-MiniLM-L6-v2 on two devices", "use-multilingual", "multilingual-e5-small"),
    ],
)
def embedder(request: pytest.FixtureRequest) -> Iterator[Embedder]:
    if request.param == HANA:
        with HanaPool(login(request.getfixturevalue("emulator"))) as pool, closing(embedder_of(pool)) as in_hana:
            yield in_hana
        return
    model, _, more = request.param.partition(" ")
    prompts = {"query_prompt": "search: ", "document_prompt": "passage: "} if more == "with prompts" else {}
    device = "cpu:0,cpu:1" if more == "on two devices" else "cpu"
    with load_engine(EngineOptions(model, device=device, precision="fp32", **prompts)) as engine:
        yield EngineEmbedder(engine)


def test_documents_are_finite_unit_rows_in_order(embedder: Embedder) -> None:
    vectors = embedder.embed_documents(TEXTS)
    assert vectors.shape == (len(TEXTS), embedder.dimension)
    assert vectors.dtype == np.float32
    assert vectors.flags.c_contiguous
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    backwards = embedder.embed_documents(TEXTS[::-1])[::-1]
    np.testing.assert_allclose(backwards, vectors, atol=1e-5)


def test_equal_texts_have_equal_vectors(embedder: Embedder) -> None:
    vectors = embedder.embed_documents(TEXTS)
    np.testing.assert_array_equal(vectors[4], vectors[6])


def test_a_query_is_embedded_as_its_document_unless_prompts_differ(embedder: Embedder) -> None:
    assert isinstance(embedder, EngineEmbedder)
    query, (document,) = embedder.embed_query(TEXTS[0]), embedder.embed_documents([TEXTS[0]])
    assert query.shape == (embedder.dimension,)
    alike = embedder.engine.prompts["query"] == embedder.engine.prompts["document"]  # the emulator's model too
    assert np.allclose(query, document, atol=1e-5) == alike
    np.testing.assert_allclose(embedder.embed([TEXTS[0]], input_type="query")[0], query, atol=1e-5)
    np.testing.assert_allclose(embedder.embed([TEXTS[0]])[0], document, atol=1e-5)


def test_near_texts_are_nearer(embedder: Embedder) -> None:
    near, far = embedder.embed_documents(["oil leak at the pump seal", "quarterly sales figures"])
    query = embedder.embed_query("pump seal leaks oil")
    assert query @ near > query @ far + 0.05  # e5's unrelated texts have cosines of about 0.8


def test_nothing_in_nothing_out(embedder: Embedder) -> None:
    assert embedder.embed_documents([]).shape == (0, embedder.dimension)
    assert embedder.count_tokens([]) == []
    vectors, counts = embedder.embed_counted([])
    assert (vectors.shape, counts) == ((0, embedder.dimension), [])


def test_counting_while_embedding_changes_neither(embedder: Embedder) -> None:
    texts = [*TEXTS, "word " * embedder.max_tokens, "word " * (embedder.max_tokens + 1), "\u0130\u0130 e\u0301"]
    vectors, counts = embedder.embed_counted(texts)
    assert counts == embedder.count_tokens(texts)
    np.testing.assert_allclose(vectors, embedder.embed_documents(texts), atol=1e-5)


def test_counts_are_of_whole_texts(embedder: Embedder) -> None:
    counts = embedder.count_tokens(TEXTS)
    assert counts[2] == 0
    assert counts[5] >= 700 > embedder.max_tokens
    assert counts[5] == 700 or embedder.model == HANA, "HANA has no tokenizer: an estimate, never too low"
    assert counts[4] == counts[6] > 0


@pytest.mark.parametrize(("most", "overlap"), [(8, 0), (8, 3), (254, 32)])
def test_pieces_fit_cover_and_overlap(embedder: Embedder, most: int, overlap: int) -> None:
    text = " ".join(f"item{number} of order {number * 37}, Öl-Pumpe 🦉;" for number in range(60))
    pieces = embedder.split(text, most, overlap)
    assert len(pieces) > 1
    assert max(embedder.count_tokens(pieces)) <= most
    reached = 0
    for number, piece in enumerate(pieces):
        begin = text.index(piece, max(0, reached - len(piece)))
        assert begin <= reached
        assert overlap > 0 or begin == reached
        assert number == 0 or overlap == 0 or begin < reached
        reached = begin + len(piece)
    assert reached == len(text)


def test_pieces_that_fit_are_embedded_whole(embedder: Embedder) -> None:
    text = "word " * 600
    pieces = embedder.split(text, embedder.max_tokens, 32)
    assert "".join(embedder.split(text, embedder.max_tokens, 0)) == text
    if embedder.model == HANA:
        return  # it cuts at its own limit, which is above the estimate
    longer = pieces[0] + " word word word"  # a query's prompt may be longer than a document's
    one, other = embedder.embed_documents([longer, longer + " word word word"])
    np.testing.assert_allclose(one, other, atol=1e-5)  # what lies beyond the longest text is cut, not an error


def test_identity_is_stable_and_fits_the_store(embedder: Embedder) -> None:
    assert isinstance(embedder, EngineEmbedder)
    assert (embedder.database_model is not None) == (embedder.model == HANA)
    if embedder.database_model is not None:
        assert embedder.fingerprint == f"{HANA}/768/unit"
        return
    query, document = embedder.engine.prompts["query"], embedder.engine.prompts["document"]
    with load_engine(
        EngineOptions(embedder.model, "auto", "cpu", query_prompt=query, document_prompt=document)
    ) as again:
        assert again.fingerprint == embedder.fingerprint
    assert 0 < len(embedder.model) <= len(embedder.fingerprint) <= 200
    longest = 510 if embedder.model == "multilingual-e5-small" else 254
    assert embedder.max_tokens == longest - max(embedder.count_tokens([query, document]))
