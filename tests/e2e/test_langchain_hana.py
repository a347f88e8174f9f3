"""Unmodified langchain_hana.HanaDB through the real hdbcli against the emulator: its table, filters and searches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hdbcli import dbapi
from langchain_core.embeddings import Embeddings
from langchain_hana import HanaDB
from langchain_hana.utils import DistanceStrategy

from hana_emulator.testing import Emulator

TEXTS = ["the pump leaks at the seal", "a motor smells of smoke", "the conveyor belt tears", "pumps hum quietly"]
METADATAS: list[dict[str, Any]] = [
    {"name": "adam", "count": 1, "height": 10.5, "active": True, "day": "2024-01-01", "note": "Good work"},
    {"name": "bob", "count": 2, "height": 5.7, "active": False, "day": "2024-01-02", "note": None},
    {"name": "jane", "count": 3, "height": 2.4, "active": True, "day": "2024-01-01", "note": "goodness"},
    {"name": "it's", "count": -4, "height": 0.0, "active": False, "day": "2023-12-31"},
]


class HashedWords(Embeddings):
    """Eight numbers per text, from the hashes of its words: texts with words in common are near each other."""

    def embed_query(self, text: str) -> list[float]:
        vector = np.zeros(8)
        for word in text.split():
            digest = hashlib.sha256(word.encode()).digest()
            vector += np.frombuffer(digest[:8], np.uint8) / 255 - 0.5
        return [float(value) for value in vector / np.linalg.norm(vector)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


Make = Callable[..., HanaDB]


@pytest.fixture
def make(hana: Any) -> Make:
    """Makes a HanaDB over a table of the test's own schema; autocommit, as its documentation shows it."""
    hana.setautocommit(True)

    def build(**options: Any) -> HanaDB:
        return HanaDB(
            connection=options.pop("connection", hana), embedding=HashedWords(), table_name="NOTES", **options
        )

    return build


@pytest.fixture
def filled(make: Make) -> HanaDB:
    database = make()
    database.add_texts(TEXTS, METADATAS)
    return database


@pytest.fixture(scope="module")
def searched(emulator: Emulator, administrator: Any) -> Iterator[HanaDB]:
    """As `filled`, for tests that change nothing."""
    administrator.execute('CREATE SCHEMA "SEARCHED"')
    connection = emulator.connect(currentSchema="SEARCHED", autocommit=True)
    database = HanaDB(connection=connection, embedding=HashedWords(), table_name="NOTES")
    database.add_texts(TEXTS, METADATAS)
    yield database
    connection.close()
    administrator.execute('DROP SCHEMA "SEARCHED" CASCADE')


def fetch(connection: Any, sql: str) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    try:
        cursor.execute(sql)
        return list(map(tuple, cursor.fetchall()))
    finally:
        cursor.close()


def names(documents: list[Any]) -> set[str]:
    return {document.metadata["name"] for document in documents}


# -------------------------------------------------------------------------------------------------- table and writing


def test_it_creates_its_table_and_takes_it_again(make: Make, hana: Any, hana_schema: str) -> None:
    make()
    make()
    columns = fetch(
        hana,
        "SELECT COLUMN_NAME, DATA_TYPE_NAME, LENGTH FROM SYS.TABLE_COLUMNS "
        f"WHERE SCHEMA_NAME = '{hana_schema}' AND TABLE_NAME = 'NOTES' ORDER BY POSITION",
    )
    assert [(name, kind) for name, kind, _ in columns] == [
        ("VEC_TEXT", "NCLOB"),
        ("VEC_META", "NCLOB"),
        ("VEC_VECTOR", "REAL_VECTOR"),
    ]
    assert columns[2][2] == 0


def test_a_table_with_other_column_types_is_refused(make: Make, hana: Any) -> None:
    hana.cursor().execute('CREATE TABLE "NOTES" ("VEC_TEXT" NCLOB, "VEC_META" INTEGER, "VEC_VECTOR" REAL_VECTOR(8))')
    with pytest.raises(AttributeError, match="VEC_META has the wrong type"):
        make()


def test_a_declared_dimension_is_kept(make: Make) -> None:
    database = make(vector_column_length=8)
    database.add_texts(["x"])
    with pytest.raises(dbapi.Error):
        database.add_texts(["x"], embeddings=[[1.0, 2.0]])
    with pytest.raises(AttributeError, match="wrong length"):
        make(vector_column_length=9)


def test_an_explicit_schema_and_odd_names(make: Make, hana: Any, hana_schema: str) -> None:
    database = make(
        schema_name=hana_schema, content_column="TextCol", metadata_column="META_COL", vector_column="VecCol"
    )
    database.add_texts(TEXTS, METADATAS)
    assert names(database.similarity_search(TEXTS[1], k=1)) == {"bob"}
    assert names(database.similarity_search("x", k=9, filter={"count": {"$gte": 2}})) == {"bob", "jane"}
    assert fetch(hana, f'SELECT COUNT("TextCol") FROM "{hana_schema}"."NOTES"') == [(4,)]


def test_texts_with_emoji_and_of_megabytes_come_back(make: Make) -> None:
    texts = ["Ärger 🥶", "w" * 1_250_000]
    database = make()
    database.add_texts(texts)
    assert [database.similarity_search(text, k=1)[0].page_content for text in texts] == texts


# ----------------------------------------------------------------------------------------------------------- searching


@pytest.mark.parametrize("vector_type", ["REAL_VECTOR", "HALF_VECTOR"])
def test_similarity_search_finds_the_text_itself(make: Make, vector_type: str) -> None:
    database = make(vector_column_type=vector_type)
    database.add_texts(TEXTS, METADATAS)
    for text, metadata in zip(TEXTS, METADATAS, strict=True):
        ((found, score),) = database.similarity_search_with_score(text, k=1)
        assert (found.page_content, found.metadata) == (text, metadata)
        assert score == pytest.approx(1, abs=2e-3)


def test_scores_are_the_cosines_of_the_embedder(filled: HanaDB) -> None:
    query = np.array(HashedWords().embed_query("the pump"))
    expected = {text: float(query @ np.array(HashedWords().embed_query(text))) for text in TEXTS}
    found = filled.similarity_search_with_score("the pump", k=4)
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    for document, score in found:
        assert score == pytest.approx(expected[document.page_content], abs=1e-6)


def test_euclidean_distance_sorts_the_nearest_first(make: Make) -> None:
    database = make(distance_strategy=DistanceStrategy.EUCLIDEAN_DISTANCE)
    database.add_texts(TEXTS, METADATAS)
    found = database.similarity_search_with_score(TEXTS[2], k=4)
    assert names([found[0][0]]) == {"jane"}
    assert found[0][1] == pytest.approx(0, abs=1e-6)
    assert [score for _, score in found] == sorted(score for _, score in found)


@pytest.mark.parametrize(
    "output",
    ["memoryview", pytest.param("list", marks=pytest.mark.slow), pytest.param("tuple", marks=pytest.mark.slow)],
)
def test_every_form_of_vectors_from_the_driver(emulator: Emulator, hana_schema: str, make: Make, output: str) -> None:
    connection = emulator.connect(currentSchema=hana_schema, autocommit=True, vectoroutputtype=output)
    database = make(connection=connection)
    database.add_texts(TEXTS, METADATAS)
    found = database.similarity_search_with_score_and_vector_by_vector(HashedWords().embed_query(TEXTS[0]), k=1)
    ((document, _, vector),) = found
    assert document.page_content == TEXTS[0]
    assert vector == pytest.approx(HashedWords().embed_query(TEXTS[0]), abs=1e-6)
    connection.close()


def test_max_marginal_relevance_prefers_what_is_different(make: Make) -> None:
    database = make()
    database.add_texts(["same", "same", "same", "other thing"], [{"n": number} for number in range(4)])
    found = database.max_marginal_relevance_search("same", k=2, fetch_k=4, lambda_mult=0.1)
    assert [document.page_content for document in found] == ["same", "other thing"]


# ------------------------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"name": "adam"}, {"adam"}),
        ({"name": "it's"}, {"it's"}),
        ({"name": ""}, set()),
        ({"count": 1}, {"adam"}),
        ({"height": 5.7}, {"bob"}),
        ({"active": True}, {"adam", "jane"}),
        ({"active": False, "count": 2}, {"bob"}),
        ({"note": None}, {"bob", "it's"}),
        ({"name": {"$eq": "bob"}}, {"bob"}),
        ({"name": {"$ne": "bob"}}, {"adam", "jane", "it's"}),
        ({"note": {"$ne": None}}, {"adam", "jane"}),
        ({"active": {"$ne": True}}, {"bob", "it's"}),
        ({"count": {"$lt": 1}}, {"it's"}),
        ({"count": {"$lte": 1}}, {"adam", "it's"}),
        ({"height": {"$gt": 5.7}}, {"adam"}),
        ({"height": {"$gte": 5.7}}, {"adam", "bob"}),
        ({"name": {"$gt": "bob"}}, {"jane", "it's"}),
        ({"count": {"$in": [1, 3, 99]}}, {"adam", "jane"}),
        ({"name": {"$in": ["adam", "it's"]}}, {"adam", "it's"}),
        ({"name": {"$nin": ["adam", "it's"]}}, {"bob", "jane"}),
        ({"count": {"$between": [1, 2]}}, {"adam", "bob"}),
        ({"name": {"$like": "%a%"}}, {"adam", "jane"}),
        ({"name": {"$like": "A%"}}, set()),
        ({"note": {"$contains": "good"}}, {"adam"}),
        ({"note": {"$contains": "GOOD work"}}, {"adam"}),
        ({"note": {"$contains": "terrible"}}, set()),
        ({"VEC_TEXT": {"$contains": "pump"}}, {"adam"}),
        ({"day": {"type": "date", "date": "2024-01-01"}}, {"adam", "jane"}),
        ({"day": {"$lt": {"type": "date", "date": "2024-01-01"}}}, {"it's"}),
        ({"$or": [{"count": 1}, {"name": "bob"}]}, {"adam", "bob"}),
        ({"$and": [{"active": True}, {"count": {"$gt": 1}}]}, {"jane"}),
        ({"$or": [{"$and": [{"active": True}, {"count": 3}]}, {"note": {"$contains": "work"}}]}, {"adam", "jane"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # the same in every process
)
def test_filters(searched: HanaDB, condition: dict[str, Any], expected: set[str]) -> None:
    assert names(searched.similarity_search("anything", k=10, filter=condition)) == expected


def test_a_filter_keeps_the_order_of_the_search(searched: HanaDB) -> None:
    everything = searched.similarity_search("the pump", k=4)
    active = searched.similarity_search("the pump", k=4, filter={"active": True})
    assert active == [document for document in everything if document.metadata["active"]]


def test_numbers_compared_with_text_are_an_error_and_the_connection_goes_on(filled: HanaDB) -> None:
    with pytest.raises(dbapi.Error) as caught:
        filled.similarity_search("anything", filter={"name": {"$gt": 5}})
    assert caught.value.errorcode == 339
    assert names(filled.similarity_search(TEXTS[0], k=1)) == {"adam"}


def test_specific_metadata_columns_are_filled_and_filtered(make: Make, hana: Any) -> None:
    hana.cursor().execute(
        'CREATE TABLE "NOTES" ("VEC_TEXT" NCLOB, "VEC_META" NCLOB, "VEC_VECTOR" REAL_VECTOR(8), '
        '"name" NVARCHAR(20), "count" INTEGER, "active" NVARCHAR(5), "note" NCLOB)'
    )
    database = make(specific_metadata_columns=["name", "count", "note"])
    database.add_texts(TEXTS, METADATAS)
    assert fetch(hana, 'SELECT "name", "count" FROM "NOTES" ORDER BY "count"') == [
        ("it's", -4),
        ("adam", 1),
        ("bob", 2),
        ("jane", 3),
    ]
    conditions: list[tuple[dict[str, Any], set[str]]] = [
        ({"count": {"$gt": 1}}, {"bob", "jane"}),
        ({"name": {"$like": "%a%"}}, {"adam", "jane"}),
        ({"note": {"$contains": "good"}}, {"adam"}),
        ({"note": None}, {"bob", "it's"}),
        ({"active": True, "count": 1}, {"adam"}),
    ]
    for condition, expected in conditions:
        assert names(database.similarity_search("anything", k=9, filter=condition)) == expected


# --------------------------------------------------------------------------------------------------- deleting, indexes


def test_delete_by_filter(filled: HanaDB, hana: Any) -> None:
    assert filled.delete(filter={"active": False, "count": {"$lt": 0}})
    assert names(filled.similarity_search("x", k=9)) == {"adam", "bob", "jane"}
    assert filled.delete(filter={})
    assert filled.similarity_search("x", k=9) == []
    assert fetch(hana, 'SELECT COUNT(*) FROM "NOTES"') == [(0,)]


def test_hnsw_index_is_recorded_and_a_second_of_its_name_fails(filled: HanaDB, hana: Any, hana_schema: str) -> None:
    filled.create_hnsw_index(m=64, ef_construction=128, ef_search=200)
    indexes = fetch(
        hana,
        f"SELECT INDEX_NAME, INDEX_TYPE FROM SYS.INDEXES WHERE SCHEMA_NAME = '{hana_schema}' AND TABLE_NAME = 'NOTES'",
    )
    assert [name for name, _ in indexes] == ["NOTES_COSINE_SIMILARITY_IDX"]
    assert "HNSW" in indexes[0][1]
    with pytest.raises(dbapi.Error):
        filled.create_hnsw_index()
    assert names(filled.similarity_search(TEXTS[3], k=1)) == {"it's"}


def test_rows_written_are_seen_by_other_connections_at_once(
    filled: HanaDB, make: Make, emulator: Emulator, hana_schema: str
) -> None:
    connection = emulator.connect(currentSchema=hana_schema, autocommit=True)
    other = make(connection=connection)
    assert names(other.similarity_search(TEXTS[1], k=1)) == {"bob"}
    filled.add_texts(["a new note"], [{"name": "new"}])
    assert names(other.similarity_search("a new note", k=1)) == {"new"}
    filled.delete(filter={"name": "new"})
    assert "new" not in names(other.similarity_search("a new note", k=9))
    connection.close()
