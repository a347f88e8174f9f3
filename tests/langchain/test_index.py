"""LangChain's indexing API over our vector store (local)."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index

from tests.langchain.conftest import Open

TEXTS = ["gearbox oil", "garden hose", "oil pump", "office chair"]


def test_index_writes_what_is_new_and_deletes_what_is_gone(open_local: Open) -> None:
    store, records = open_local().vector_store("notes"), InMemoryRecordManager("notes")
    records.create_schema()
    documents = [Document(page_content=text, metadata={"source": text}) for text in TEXTS]
    told: dict[str, Any] = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    assert index(documents, records, store, **told)["num_added"] == 4
    again = index(documents[1:], records, store, **told)
    assert (again["num_added"], again["num_skipped"], again["num_deleted"]) == (0, 3, 1)
    assert {document.page_content for document in store.similarity_search("oil", k=9)} == set(TEXTS[1:])
