"""LangChain's own suites over REST where the vectors are in HANA (the emulator), as in production."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from app.src.service.service import Service
from app.src.settings import Settings
from hana_emulator.testing import Emulator
from owl_sap_client import Client
from owl_sap_client.langchain import OwlSapRetriever, OwlSapVectorStore
from tests.api.conftest import TableSource, serving, settings_in
from tests.client.test_langchain import empty

SCHEMA = "LANGCHAIN_OVER_REST"
_CLIENTS: dict[str, Client] = {}
"""The suites take classes and arguments, no fixtures."""


@pytest.fixture(scope="module")
def address(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a service with `materials` synced and `notes` for documents, both in HANA's store."""
    folder: Path = tmp_path_factory.mktemp("client-hana")
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    given = settings_in(folder).model_dump(by_alias=True) | {
        "hana": login | {"schema": SCHEMA, "encrypt": False},
        "store": {"kind": "hana"},
        "state": {"path": folder / "state"},
    }
    given["collections"] = [*given["collections"], {"name": "notes", "documents": True}]
    connection = emulator.connect(autocommit=True)
    connection.cursor().execute(f'CREATE SCHEMA "{SCHEMA}"')
    service = Service(Settings.model_validate(given), source=TableSource())
    try:
        service.sync.run("materials")
        with serving(service) as http:
            yield str(http.base_url)
    finally:
        service.close()
        connection.cursor().execute(f'DROP SCHEMA "{SCHEMA}" CASCADE')
        connection.close()


@pytest.fixture(scope="module", autouse=True)
def shared(address: str) -> Iterator[Client]:
    with Client(address) as client:
        _CLIENTS["client"] = client
        yield client
    _CLIENTS.clear()


@pytest.mark.slow
class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, shared: Client) -> Iterator[VectorStore]:
        yield OwlSapVectorStore(shared, "notes")
        empty(shared)


@pytest.mark.slow
class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return OwlSapRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"client": _CLIENTS["client"], "collection": "materials"}

    @property
    def retriever_query_example(self) -> str:
        return "oil pump"


def test_documents_are_written_found_and_deleted(shared: Client) -> None:
    store = OwlSapVectorStore(shared, "notes")
    (id_,) = store.add_texts(["press 4 leaks oil"], [{"plant": "1000"}], ids=["n1"])
    store.add_texts(["press 4 is dry again"], [{"plant": "1000"}], ids=[id_])
    (found,) = store.similarity_search("press 4", k=2, filter={"plant": "1000"})
    assert (found.id, found.page_content) == ("n1", "press 4 is dry again")
    assert store.delete([id_])
    assert store.get_by_ids([id_]) == []
