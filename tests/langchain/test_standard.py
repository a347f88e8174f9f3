"""LangChain's own standard tests (langchain-tests), none left out, over the local store and HANA's (the emulator)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import (
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import EmbeddingsUnitTests

from app.src.service.wiring import EngineEmbedder
from connector.langchain import OwlEmbeddings, OwlRetriever
from tests.langchain.conftest import Open


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, open_owl: Open) -> VectorStore:
        return open_owl().vector_store("notes")


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _filled(self, open_owl: Open) -> None:
        store = open_owl().vector_store("notes")
        store.add_texts(["gearbox oil", "garden hose", "oil pump", "an office chair"])
        self._collection = store.collection

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return OwlRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"collection": self._collection}

    @property
    def retriever_query_example(self) -> str:
        return "oil"


class _OfTheHashingModel:
    @pytest.fixture(autouse=True)
    def _model(self) -> Iterator[None]:
        from app.src.core.loading import EngineOptions, load_engine

        self._embedder = EngineEmbedder(load_engine(EngineOptions(model="hash:64")))
        yield
        self._embedder.close()

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OwlEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"embedder": self._embedder}


class TestEmbeddingsUnit(_OfTheHashingModel, EmbeddingsUnitTests):
    pass


class TestEmbeddingsIntegration(_OfTheHashingModel, EmbeddingsIntegrationTests):
    pass
