"""The LangChain classes over the packaged model and the local store: found by meaning, and LangChain's own tests of
embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests

from app.src.langchain import Owl
from app.src.service.service import Service
from app.src.settings import Settings
from connector.langchain import OwlEmbeddings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def owl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owl]:
    folder = tmp_path_factory.mktemp("vectors")
    notes = {"name": "notes", "documents": True}
    settings = {"store": {"kind": "local", "path": folder}, "embedding": {"device": "cpu"}, "collections": [notes]}
    with Owl(service=Service(Settings.model_validate(settings))) as owl:
        yield owl


def test_documents_are_found_by_meaning_and_none_is_above_the_bar_without_one(owl: Owl) -> None:
    store = owl.vector_store("notes")
    store.add_texts(
        ["Submersible pump, drains basements after heavy rain", "Swivel chair with armrests", "Safety helmet, yellow"],
        [{"n": number} for number in range(3)],
        ids=["pump", "chair", "helmet"],
    )
    assert [each.id for each in store.similarity_search("empties a flooded cellar", k=1)] == ["pump"]
    assert [each.id for each in owl.retriever("notes", k=1).invoke("something to sit on at a desk")] == ["chair"]
    strict = {"score_threshold": 0.5}
    assert store.as_retriever(search_type="similarity_score_threshold", search_kwargs=strict).invoke("tax return") == []


class TestEmbeddings(EmbeddingsIntegrationTests):
    @pytest.fixture(autouse=True)
    def _model(self, owl: Owl) -> None:
        self._embedder = owl.embeddings().embedder

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OwlEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"embedder": self._embedder}
