"""The engine as services use it: search texts are remembered, metrics tell what goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import NonFinite
from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.tokens import TokenBatch
from app.src.observe.metrics import Metrics
from app.src.service.wiring import EngineEmbedder
from app.src.settings import Settings
from connector.errors import TextsNotEmbeddable
from connector.protocols import Embedder


@pytest.fixture
def engine() -> Iterator[Engine]:
    with load_engine(EngineOptions("hash:32")) as engine:
        yield engine


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def embedder(engine: EmbeddingEngine, metrics: Metrics) -> Iterator[EngineEmbedder]:
    made = EngineEmbedder(engine, metrics, max_wait=10.0)
    yield made
    made.close()


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    """By the values of the labels."""
    return {
        ",".join(sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_it_is_what_the_connector_wants(embedder: EngineEmbedder) -> None:
    wanted: Embedder = embedder
    assert wanted.dimension == 32


def test_a_search_text_is_embedded_once(embedder: EngineEmbedder, engine: EmbeddingEngine, metrics: Metrics) -> None:
    first = embedder.embed_query("oil pump")
    np.testing.assert_array_equal(first, engine.embed(["oil pump"])[0])
    batches = engine.stats().batches
    again = embedder.embed_query("oil pump")
    np.testing.assert_array_equal(again, first)
    assert engine.stats().batches == batches
    again[:] = 0  # a caller's own, which he may change
    np.testing.assert_array_equal(embedder.embed_query("oil pump"), first)
    assert samples(metrics, "owl_sap_query_cache_total") == {"miss": 1, "hit": 2}


def test_documents_and_probes_are_not_remembered(embedder: EngineEmbedder, engine: EmbeddingEngine) -> None:
    for call in (embedder.embed_documents, embedder.embed):
        call(["oil pump"])
        before = engine.stats().batches
        call(["oil pump"])
        assert engine.stats().batches == before + 1


@pytest.mark.parametrize(("entries", "again"), [(3, 1), (0, 3)])
def test_the_cache_of_search_texts_is_bounded_and_keeps_those_in_use(
    engine: EmbeddingEngine, metrics: Metrics, entries: int, again: int
) -> None:
    size = 32 * 4 + 256
    embedder = EngineEmbedder(engine, metrics, cache_bytes=entries * size)
    for text in ("a", "b", "c", "a", "d", "a", "b"):
        embedder.embed_query(text)
    assert engine.stats().batches == 4 + again


def test_errors_are_translated_and_not_remembered(
    embedder: EngineEmbedder, engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine._runner
    begin = runner.begin

    def ill(batch: TokenBatch, *more: Any) -> Any:
        return lambda: begin(batch, *more)() * np.float32(np.nan)

    monkeypatch.setattr(runner, "begin", ill)
    with pytest.raises(TextsNotEmbeddable) as caught:
        embedder.embed_documents(["a", "b"])
    assert caught.value.indices == (0, 1)
    with pytest.raises(TextsNotEmbeddable):
        embedder.embed_query("a")
    with pytest.raises(NonFinite):
        embedder.embed(["a"])
    monkeypatch.undo()
    assert np.isfinite(embedder.embed_query("a")).all()


def test_metrics_tell_what_goes_on(embedder: EngineEmbedder, metrics: Metrics) -> None:
    embedder.embed_query("oil")
    embedder.embed_documents(["oil", "pump", "oil"])
    embedder.embed_later(["seal"]).result(10)
    assert samples(metrics, "owl_sap_embed_queue_texts") == {"interactive": 0, "bulk": 0}
    assert samples(metrics, "owl_sap_embed_wait_seconds_count") == {"interactive": 2, "bulk": 1}
    assert samples(metrics, "owl_sap_embed_batch_texts_sum") == {"interactive": 2, "bulk": 2}
    assert samples(metrics, "owl_sap_embed_refused_total") == {"": 0}


def test_its_settings() -> None:
    wanted = Settings.model_validate({"embedding": {"max_wait": "1m"}}).embedding
    assert (wanted.max_wait, wanted.query_cache_mb) == (60, 16)
    with pytest.raises(ValueError, match="max_wait"):
        Settings.model_validate({"embedding": {"max_wait": 0}})
