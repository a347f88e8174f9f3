"""A collection that langchain-hana writes too, in the same table of HANA (the emulator): ids shown can be got, and a
delete that cannot delete says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_hana import HanaDB

from connector.errors import WrongOrigin
from connector.langchain import OwlVectorStore
from hana_emulator.testing import Emulator
from tests.langchain.conftest import Open

ON_HANA = pytest.mark.parametrize("open_owl", ["hana"], indirect=True)
"""Others write tables of HANA only."""


class Same(Embeddings):
    """The vectors of the collection's own model."""

    def __init__(self, store: OwlVectorStore) -> None:
        self._own = store.embeddings

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._own.embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        return self._own.embed_query(text)


@pytest.fixture
def ours(open_owl: Open) -> OwlVectorStore:
    store = open_owl().vector_store("notes")
    store.add_texts(["gearbox oil"], [{"n": 1}], ids=["a"])
    return store


@pytest.fixture
def theirs(ours: OwlVectorStore, request: pytest.FixtureRequest) -> Iterator[HanaDB]:
    emulator: Emulator = request.getfixturevalue("emulator")
    connection: Any = emulator.connect(currentSchema=request.getfixturevalue("hana_schema"), autocommit=True)
    store = HanaDB(connection=connection, embedding=Same(ours), table_name="OWL_NOTES_G1")
    store.add_texts(["garden hose of rubber"], [{"n": 2}])
    yield store
    connection.close()


def foreign_id(store: OwlVectorStore) -> str:
    (found,) = store.similarity_search("garden hose of rubber", k=1)
    assert found.page_content == "garden hose of rubber"
    assert found.id is not None
    assert found.id.startswith("record:")
    return found.id


@ON_HANA
@pytest.mark.usefixtures("theirs")
def test_the_id_that_a_search_shows_can_be_got(ours: OwlVectorStore) -> None:
    shown = foreign_id(ours)
    found = ours.get_by_ids(["a", shown, "record:999999"])
    assert [(each.id, each.page_content, each.metadata) for each in found] == [
        ("a", "gearbox oil", {"n": 1}),
        (shown, "garden hose of rubber", {"n": 2}),
    ]


@ON_HANA
@pytest.mark.usefixtures("theirs")
def test_deleting_the_row_of_another_program_is_an_error_and_deletes_nothing(ours: OwlVectorStore) -> None:
    shown = foreign_id(ours)
    with pytest.raises(WrongOrigin, match=f"{shown} was written by another program"):
        ours.delete(["a", shown])
    assert len(ours.get_by_ids(["a", shown])) == 2


@ON_HANA
def test_after_its_own_program_deleted_it_the_id_does_not_matter(ours: OwlVectorStore, theirs: HanaDB) -> None:
    shown = foreign_id(ours)
    theirs.delete(filter={"n": 2})
    assert ours.get_by_ids([shown]) == []
    assert ours.delete(["a", shown]) is True
    assert ours.get_by_ids(["a"]) == []


@ON_HANA
@pytest.mark.usefixtures("theirs")
def test_a_document_of_ours_with_such_an_id_comes_before_the_row_of_others(ours: OwlVectorStore) -> None:
    shown = foreign_id(ours)
    ours.add_texts(["office chair"], ids=[shown])
    assert [each.page_content for each in ours.get_by_ids([shown])] == ["office chair"]
    assert ours.delete([shown]) is True
    assert [each.page_content for each in ours.get_by_ids([shown])] == ["garden hose of rubber"]


def test_a_document_of_ours_may_have_such_an_id(ours: OwlVectorStore) -> None:
    ours.add_texts(["office chair"], ids=["record:3"])
    assert [each.page_content for each in ours.get_by_ids(["record:3"])] == ["office chair"]
    assert ours.delete(["record:3"]) is True
    assert ours.get_by_ids(["record:3"]) == []
    assert ours.delete(["record:3"]) is True
