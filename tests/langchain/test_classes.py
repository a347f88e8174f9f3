"""OwlVectorStore, OwlRetriever and OwlEmbeddings beyond LangChain's own tests, over the local store and HANA's (the
emulator)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from app.src.access.principal import OPERATOR, Principal
from app.src.langchain import Owl
from app.src.service.search import Like
from connector.errors import BadDocument, BadFilter, UnknownCollection, UnknownRow, WrongOrigin
from connector.langchain import BATCH, OwlVectorStore
from tests.langchain.conftest import NOTES, Open

TEXTS = ["gearbox oil for the press", "garden hose of rubber", "oil pump, hydraulic", "office chair with wheels"]
METADATAS: list[dict[str, Any]] = [
    {"n": 0, "kind": "FERT"},
    {"n": 1, "kind": "ROH"},
    {"n": 2, "kind": "FERT"},
    {"n": 3},
]
IDS = ["a", "b", "c", "d"]


@pytest.fixture
def store(open_owl: Open) -> OwlVectorStore:
    return filled(open_owl)


@pytest.fixture
def local(open_local: Open) -> OwlVectorStore:
    """For what does not depend on the store."""
    return filled(open_local)


def filled(opening: Open) -> OwlVectorStore:
    store = opening().vector_store("notes")
    assert store.add_texts(TEXTS, METADATAS, ids=IDS) == IDS
    return store


def ids(documents: Sequence[Document]) -> list[str | None]:
    return [document.id for document in documents]


# ------------------------------------------------------------------------------------------------------------ reading


def test_scores_are_cosines_and_relevance_scores_are_those_of_the_hits(store: OwlVectorStore) -> None:
    query = np.array(store.embeddings.embed_query("oil pump"))
    vectors = np.array(store.embeddings.embed_documents(TEXTS))
    found = store.similarity_search_with_score("oil pump", k=4, mode="vector")
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    expected = dict(zip(IDS, (vectors @ query).tolist(), strict=True))
    assert {document.id: score for document, score in found} == pytest.approx(expected, abs=1e-5)
    relevant = store.similarity_search_with_relevance_scores("oil pump", k=4)
    judged = [hit.relevance for hit in store.collection.search("oil pump", 4, mode="vector")]
    assert [score for _, score in relevant] == judged == sorted(judged, reverse=True)
    few = store.similarity_search_with_relevance_scores("oil pump", k=4, score_threshold=0.3)
    assert len(few) == sum(score >= 0.3 for score in judged)
    assert 0 < len(few) < 4


def test_a_search_by_vector_finds_what_one_by_its_text_does(store: OwlVectorStore) -> None:
    vector = store.embeddings.embed_query("oil pump")
    assert store.similarity_search_by_vector(vector, k=3) == store.similarity_search("oil pump", k=3, mode="vector")


def test_modes_and_filters(store: OwlVectorStore) -> None:
    assert ids(store.similarity_search("wheels", k=4, mode="keyword")) == ["d"]
    assert ids(store.similarity_search("wheels", k=4, mode="hybrid"))[0] == "d"
    assert set(ids(store.similarity_search("oil", k=4, filter={"kind": "FERT"}))) == {"a", "c"}
    where = {"$or": [{"n": {"$gte": 3}}, {"kind": {"$in": ["ROH"]}}]}
    assert set(ids(store.similarity_search("oil", k=4, filter=where))) == {"b", "d"}
    assert len(store.similarity_search("oil pump", k=4, min_score=0.3)) < 4
    with pytest.raises(BadFilter, match="unknown operator"):
        store.similarity_search("oil", filter={"n": {"$near": 3}})
    with pytest.raises(ValueError, match="unknown search mode"):
        store.similarity_search("oil", mode="fuzzy")
    with pytest.raises(TypeError, match="filters"):
        store.similarity_search("oil", filters={"n": 3})


def test_max_marginal_relevance_chooses_what_differs_from_the_best_of_fetch_k(store: OwlVectorStore) -> None:
    store.add_texts(["oil pump, hydraulic"] * 3, ids=["same1", "same2", "same3"])
    spread = store.max_marginal_relevance_search("oil pump, hydraulic", k=2, fetch_k=7, lambda_mult=0.1)
    assert [document.page_content == "oil pump, hydraulic" for document in spread] == [True, False]
    near = store.max_marginal_relevance_search("oil pump, hydraulic", k=2, fetch_k=4, lambda_mult=0.1)
    assert {document.page_content for document in near} == {"oil pump, hydraulic"}, "the four best are the same text"
    vector = store.embeddings.embed_query("oil pump, hydraulic")
    by_vector = store.max_marginal_relevance_search_by_vector(vector, k=2, fetch_k=7, lambda_mult=0.1)
    assert ids(by_vector) == ids(spread)


async def test_every_mode_has_relevance_scores(local: OwlVectorStore) -> None:
    for mode in ("vector", "keyword", "hybrid"):
        found = local.similarity_search_with_relevance_scores("oil", mode=mode)
        assert 0.2 < found[0][1] <= 1
        assert await local.asimilarity_search_with_relevance_scores("oil", mode=mode) == found


def test_a_long_text_is_found_by_its_passage_and_read_whole(open_owl: Open) -> None:
    owl = open_owl(NOTES | {"chunk": {"max_tokens": 8, "overlap": 2}})
    store = owl.vector_store("notes")
    text = " ".join(f"word{number}" for number in range(60))
    store.add_texts([text, "something else"], [{"n": 1}, {"n": 2}], ids=["long", "short"])
    (found,) = store.similarity_search("word40 word41", k=1)
    assert found.id == "long"
    assert "word40" in found.page_content
    assert len(found.page_content) < len(text)
    assert store.get_by_ids(["short", "gone", "long"]) == [
        Document(id="short", page_content="something else", metadata={"n": 2}),
        Document(id="long", page_content=text, metadata={"n": 1}),
    ]
    (status,) = owl.service.status.collections(["notes"])
    assert (status["rows"], status["chunks"] > 5) == (2, True)


def test_more_ids_than_are_read_at_once(open_owl: Open) -> None:
    store = open_owl().vector_store("notes")
    many = [f"id {number}" for number in range(BATCH + 5)]
    assert store.add_texts([f"text {number}" for number in range(BATCH + 5)], ids=many) == many
    assert ids(store.get_by_ids(many[::-1])) == many[::-1]
    assert store.delete(many)
    assert store.get_by_ids(many) == []


# ------------------------------------------------------------------------------------------------------------ writing


def test_metadata_comes_back_as_it_went_in(store: OwlVectorStore) -> None:
    metadata = {"source": "a.pdf", "page": 3, "ptex.fullbanner": "x", "box": [1.5, None, {"deep": True}], "none": None}
    store.add_documents([Document(id="pdf", page_content="from a file", metadata=metadata)])
    assert store.get_by_ids(["pdf"]) == [Document(id="pdf", page_content="from a file", metadata=metadata)]
    assert ids(store.similarity_search("x", k=9, filter={"page": 3})) == ["pdf"]
    assert ids(store.similarity_search("x", k=9, filter={"box": {"$ne": None}})) == [], "lists are no values of filters"


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, {"deep": [object()]}, "half \ud800"])
def test_metadata_that_json_has_no_form_for_is_named(local: OwlVectorStore, value: Any) -> None:
    with pytest.raises(BadDocument, match=r"documents\[1\]: metadata 'when' has") as caught:
        local.add_texts(["fine", "not fine"], [{}, {"when": value}])
    assert caught.value.index == 1
    assert len(local.similarity_search("fine", k=9)) == 4


def test_numbers_of_metadatas_and_ids_must_fit(local: OwlVectorStore) -> None:
    with pytest.raises(ValueError, match="1 metadatas for 2 texts"):
        local.add_texts(["x", "y"], [{}])
    with pytest.raises(ValueError, match="3 ids for 2 texts"):
        local.add_texts(["x", "y"], ids=["1", "2", "3"])
    with pytest.raises(TypeError, match="embeddings"):
        local.add_texts(["x"], embeddings=[[1.0]])


def test_nothing_deletes_everything(local: OwlVectorStore) -> None:
    with pytest.raises(ValueError, match="never deletes all"):
        local.delete()
    assert local.delete([]) is True
    assert len(local.similarity_search("oil", k=9)) == 4


def test_one_string_is_not_a_list_of_letters(local: OwlVectorStore) -> None:
    for wrong in (local.delete, local.get_by_ids, local.add_texts):
        with pytest.raises(ValueError, match="one string"):
            wrong("ab")  # type: ignore[arg-type]
    assert ids(local.get_by_ids(IDS)) == IDS


def test_from_texts_takes_the_collections_own_embeddings_only(open_local: Open) -> None:
    empty = open_local().vector_store("notes")
    made = OwlVectorStore.from_texts(TEXTS, empty.embeddings, METADATAS, ids=IDS, collection=empty.collection)
    assert ids(made.get_by_ids(IDS)) == IDS
    with pytest.raises(ValueError, match="embeds by itself, with hash:64"):
        OwlVectorStore.from_texts(TEXTS, DeterministicFakeEmbedding(size=64), collection=empty.collection)
    with pytest.raises(TypeError, match="collection="):
        OwlVectorStore.from_texts(TEXTS, empty.embeddings)


# ------------------------------------------------------------------------------------------- asynchronous, retrievers


async def test_asynchronous_methods_leave_the_loop_free(local: OwlVectorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    release, search = threading.Event(), local.collection.search

    def waits(*args: Any, **options: Any) -> Any:
        assert release.wait(60)
        return search(*args, **options)

    monkeypatch.setattr(local.collection, "search", waits)
    searches = asyncio.gather(
        local.asimilarity_search("oil", k=2),
        local.asimilarity_search_with_score("oil", k=2),
        local.amax_marginal_relevance_search("oil", k=2),
        local.as_retriever(search_kwargs={"k": 2}).ainvoke("oil"),
    )
    await asyncio.sleep(0)  # a search on the loop itself would hang here for good
    release.set()
    assert [len(found) for found in await searches] == [2, 2, 2, 2]
    assert await local.aadd_texts(["later"], ids=["e"]) == ["e"]
    assert await local.adelete(["e"])


async def test_retrievers(local: OwlVectorStore, open_local: Open) -> None:
    retriever = open_local().retriever("notes", k=3, filter={"kind": "FERT"})
    assert set(ids(retriever.invoke("oil"))) == {"a", "c"}
    assert ids(retriever.invoke("rubber", mode="keyword", filter=None, k=1)) == ["b"]
    assert ids(await retriever.ainvoke("rubber", mode="keyword", filter=None, k=1)) == ["b"]
    assert ids(local.as_retriever(search_kwargs={"k": 1, "mode": "keyword"}).invoke("wheels")) == ["d"]
    mmr = local.as_retriever(search_type="mmr", search_kwargs={"k": 2, "lambda_mult": 0.5})
    assert len(mmr.invoke("oil")) == 2
    threshold = local.as_retriever(search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.3})
    assert 0 < len(threshold.invoke("oil pump")) < 4
    with pytest.raises(ValueError, match="filters"):
        open_local().retriever("notes", filters={})


# --------------------------------------------------------------------------------------------- rights, other kinds


def test_a_principal_with_row_rights_reads_its_rows_and_writes_none(open_owl: Open) -> None:
    owl = open_owl(NOTES | {"metadata": ["kind"], "row_rights": {"kind": "kinds"}})
    owl.vector_store("notes").add_texts(TEXTS, METADATAS, ids=IDS)
    somebody = Principal("agent", OPERATOR.scopes, {"kinds": ["FERT"]})
    store = owl.vector_store("notes", principal=somebody)
    assert set(ids(store.similarity_search("oil", k=9))) == {"a", "c"}
    assert ids(store.get_by_ids(IDS)) == ["a", "c"]
    assert set(ids(owl.retriever("notes", principal=somebody, k=9).invoke("oil"))) <= {"a", "c"}
    with pytest.raises(Exception, match="row rights"):
        store.add_texts(["mine"], [{"kind": "FERT"}])
    with pytest.raises(Exception, match="row rights"):
        store.delete(["b"])


def test_an_unknown_collection_is_told_when_it_is_asked_for(open_local: Open) -> None:
    with pytest.raises(UnknownCollection, match='did you mean "notes"'):
        open_local().vector_store("note")


def test_a_collection_of_a_table_is_for_reading(open_local: Open) -> None:
    owl = open_local({"name": "materials", "source": "S.MARA", "template": "{MAKTX}"})
    store = owl.vector_store("materials")
    with pytest.raises(WrongOrigin, match=r"synced from S\.MARA"):
        store.add_texts(["x"])
    with pytest.raises(WrongOrigin, match=r"synced from S\.MARA"):
        store.delete(["x"])


def test_every_way_to_read_knows_documents_by_the_ids_that_were_given(store: OwlVectorStore, open_owl: Open) -> None:
    service = open_owl().service
    asker = OPERATOR
    (row,) = service.browse.rows("notes", ["c"], principal=asker)
    assert (row.id, row.key, row.text, row.metadata) == ("c", {"id": "c"}, TEXTS[2], METADATAS[2])
    assert service.browse.rows("notes", ["x" * 3000, '["c"]'], principal=asker) == []
    liked = service.search.run("notes", Like("c"), k=9, principal=asker).hits
    assert sorted(hit.id for hit in liked) == ["a", "b", "d"]
    with pytest.raises(UnknownRow):
        service.search.run("notes", Like('["c"]'), principal=asker)
    fields = {
        field.name: [value.value for value in field.values]
        for field in service.browse.fields("notes", principal=asker).fields
    }
    assert fields["kind"] == ["FERT", "ROH"]
    points = service.browse.map("notes", "kind", principal=asker)["points"]
    assert sorted(point["id"] for point in points) == IDS


def test_every_way_to_read_takes_a_collection_that_nobody_has_written_to(open_owl: Open) -> None:
    service = open_owl().service
    assert service.search.run("notes", "anything", principal=OPERATOR).hits == []
    assert service.browse.rows("notes", ["a"], principal=OPERATOR) == []
    assert service.browse.fields("notes", principal=OPERATOR).fields == []
    assert service.browse.map("notes", principal=OPERATOR)["points"] == []
    with pytest.raises(UnknownRow):
        service.search.run("notes", Like("a"), principal=OPERATOR)


def test_search_quality_is_measured_by_the_ids_that_were_given(local: OwlVectorStore, tmp_path: Path) -> None:
    service = local.collection._service
    file = tmp_path / "queries.jsonl"
    file.write_text('{"query": "garden hose of rubber", "relevant": [["b"]]}\n')
    measured = service.evaluation.evaluate("notes", file, ("vector",))
    assert measured["missing"] == 0
    assert measured["modes"]["vector"]["all"]["mrr"] == 1


def test_settings_of_a_folder_are_read_where_it_is_named(tmp_path: Path) -> None:
    config = tmp_path / "elsewhere.toml"
    config.write_text(
        f"[store]\nkind = 'local'\npath = '{tmp_path}/v'\n[embedding]\nmodel = 'hash:8'\n"
        "[[collections]]\nname = 'notes'\ndocuments = true\n"
    )
    with Owl(config) as opened:
        assert opened.vector_store("notes").add_texts(["a text"], ids=["a"]) == ["a"]
        assert len(opened.embeddings().embed_query("a text")) == 8


def test_the_model_that_a_collection_began_with_goes_on_whatever_the_settings_name_later(open_owl: Open) -> None:
    open_owl(model="hash:64").vector_store("notes").add_texts(["oil pump"], ids=["a"])
    later = open_owl(model="hash:32").vector_store("notes")
    assert len(later.embeddings.embed_query("x")) == 64
    later.add_texts(["garden hose"], ids=["b"])
    assert ids(later.similarity_search("oil pump", k=1)) == ["a"]
    assert ids(later.similarity_search("garden hose", k=1)) == ["b"]
