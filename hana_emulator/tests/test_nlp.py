"""VECTOR_EMBEDDING and CROSS_ENCODE: the default hashing, the caller's functions, an instance without the service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulator_sql import USER, Sql, open_database, vector
from hana_emulator.nlp import DIMENSION, TOKENS, Nlp
from hana_emulator.sql.functions.builtin.fvecs import decode
from hana_emulator.testing import launch, running

NEB, GXY, CER = "SAP_NEB.20240715", "SAP_GXY.20250407", "SAP_CER.20250701"
SIMILARITY = (
    f"SELECT COSINE_SIMILARITY(VECTOR_EMBEDDING(?, 'DOCUMENT', '{NEB}'), VECTOR_EMBEDDING(?, 'QUERY', '{NEB}'))"
    " FROM DUMMY"
)


@contextmanager
def instance(nlp: Nlp) -> Iterator[Sql]:
    database = open_database(nlp=nlp)
    try:
        yield Sql(database.connect(USER))
    finally:
        database.close()


@pytest.fixture
def texts(sql: Sql) -> Sql:
    sql.run("CREATE TABLE T (ID INTEGER PRIMARY KEY, TEXT NCLOB, V REAL_VECTOR(768))")
    sql.many("INSERT INTO T VALUES (?, ?, NULL)", [(1, "steel pump"), (2, "copper pipe"), (3, None)])
    return sql


# --- VECTOR_EMBEDDING -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [NEB, GXY])
def test_a_vector_has_768_elements_and_length_1(shared: Sql, model: str) -> None:
    statement = "SELECT VECTOR_EMBEDDING(?, 'DOCUMENT', ?) FROM DUMMY"
    assert shared.result_types(statement) == ["REAL_VECTOR"]
    for text in ("steel pump", "", "...", "😀 é", "x" * 100_000):
        found = decode(shared.value(statement, text, model))
        assert found.size == DIMENSION, text
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-5), text


def test_common_words_make_texts_close(shared: Sql) -> None:
    def similarity(one: str, other: str) -> float:
        return float(shared.value(SIMILARITY, one, other))

    assert similarity("steel pump", "steel pump") == pytest.approx(1)
    assert similarity("steel pump", "STEEL pump") > similarity("steel pump", "steel pipe") > 0.4
    assert abs(similarity("steel pump", "copper pipe")) < 0.2
    assert 0.9 < similarity("steel pump", "pump steel") < 0.999


def test_models_have_vectors_of_their_own(shared: Sql) -> None:
    one, other = (decode(shared.evaluate("VECTOR_EMBEDDING('pump', 'QUERY', ?)", model)) for model in (NEB, GXY))
    assert abs(float(one @ other)) < 0.3


def test_tokens_beyond_the_limit_are_cut_silently(shared: Sql) -> None:
    kept = " ".join(f"word{number}" for number in range(TOKENS))
    assert shared.value(SIMILARITY, kept, f"{kept} and more") == pytest.approx(1)
    assert shared.value(SIMILARITY, kept, kept.rpartition(" ")[0]) < 0.9999


def test_null_text_gives_null(shared: Sql) -> None:
    assert shared.evaluate(f"VECTOR_EMBEDDING(NULL, 'DOCUMENT', '{NEB}')") is None
    assert shared.evaluate("VECTOR_EMBEDDING(?, 'DOCUMENT', ?)", None, NEB) is None


@pytest.mark.parametrize(
    "arguments",
    ["'x', 'PASSAGE', 'SAP_NEB.20240715'", "'x', 'query', 'SAP_NEB.20240715'", "'x', NULL, 'SAP_NEB.20240715'",
     "'x', 'QUERY', 'SAP_NEB'", "'x', 'QUERY', NULL", "'x', 'QUERY', ''", "'x', 'QUERY', 'other', ''"],
)  # fmt: skip
def test_an_unknown_type_or_model_is_an_error(shared: Sql, arguments: str) -> None:
    assert shared.code(f"SELECT VECTOR_EMBEDDING({arguments}) FROM DUMMY") == 8


def test_the_number_of_arguments_is_checked(shared: Sql) -> None:
    for count in (1, 2, 6):
        assert shared.code(f"SELECT VECTOR_EMBEDDING({', '.join(['?'] * count)}) FROM DUMMY", *["x"] * count) == 316


@pytest.mark.parametrize(
    "source", ["AI_CORE", '"AI_CORE"', "S.AI_CORE", "'AI_CORE'", "'S', 'AI_CORE'", "'', 'AI_CORE'"]
)
def test_a_remote_source_has_models_of_any_name(shared: Sql, source: str) -> None:
    found = decode(shared.evaluate(f"VECTOR_EMBEDDING('x', 'QUERY', 'text-embedding-3-small', {source})"))
    assert found.size == DIMENSION


def test_rows_are_embedded_in_every_writing_statement(texts: Sql) -> None:
    expected = texts.evaluate("VECTOR_EMBEDDING('steel pump', 'DOCUMENT', ?)", NEB)
    assert texts.run("UPDATE T SET V = VECTOR_EMBEDDING(TEXT, 'DOCUMENT', ?)", NEB) == 3
    assert texts.column("SELECT V FROM T ORDER BY ID")[::2] == [expected, None]
    texts.run(f"INSERT INTO T SELECT ID + 10, TEXT, VECTOR_EMBEDDING(TEXT, 'DOCUMENT', '{NEB}') FROM T")
    assert texts.value("SELECT V FROM T WHERE ID = 11") == expected
    rows = [(21, "steel pump", "steel pump", NEB), (22, "pipe", "pipe", NEB)]
    assert texts.many("INSERT INTO T VALUES (?, ?, VECTOR_EMBEDDING(?, 'DOCUMENT', ?))", rows) == [1, 1]
    assert texts.value("SELECT V FROM T WHERE ID = 21") == expected
    texts.run("UPSERT T VALUES (22, ?, VECTOR_EMBEDDING(?, 'DOCUMENT', ?)) WITH PRIMARY KEY", *["steel pump"] * 2, NEB)
    assert texts.value("SELECT V FROM T WHERE ID = 22") == expected


def test_a_failing_row_leaves_nothing_written(texts: Sql) -> None:
    assert texts.code("UPDATE T SET V = VECTOR_EMBEDDING(TEXT, 'DOCUMENT', 'unknown')") == 8
    assert texts.column("SELECT V FROM T ORDER BY ID") == [None] * 3


def test_the_dimension_of_the_column_is_checked(texts: Sql) -> None:
    texts.run("ALTER TABLE T ADD (W REAL_VECTOR(3), H HALF_VECTOR(768))")
    assert texts.code(f"UPDATE T SET W = VECTOR_EMBEDDING(TEXT, 'DOCUMENT', '{NEB}')") == 20005
    texts.run(f"UPDATE T SET H = TO_HALF_VECTOR(VECTOR_EMBEDDING(TEXT, 'DOCUMENT', '{NEB}'))")
    assert texts.value("SELECT CARDINALITY(H) FROM T WHERE ID = 1") == 768


def test_a_search_embeds_its_query(texts: Sql) -> None:
    texts.run("UPDATE T SET V = VECTOR_EMBEDDING(TEXT, 'DOCUMENT', ?)", NEB)
    found = texts.rows(
        "SELECT TOP 2 ID, COSINE_SIMILARITY(V, VECTOR_EMBEDDING(?, 'QUERY', ?)) AS S FROM T ORDER BY S DESC",
        "pipe",
        NEB,
    )
    assert [row[0] for row in found] == [2, 1]
    assert found[0][1] > 0.5 > found[1][1]


# --- CROSS_ENCODE -----------------------------------------------------------------------------------------------------


def test_cross_encode_scores_documents_for_a_query(texts: Sql) -> None:
    statement = "SELECT ID, CROSS_ENCODE(TO_NVARCHAR(TEXT), ?, ?) OVER () AS SCORE FROM T ORDER BY SCORE DESC, ID"
    assert texts.result_types(statement) == ["INTEGER", "DOUBLE"]
    first, second, third = texts.rows(statement, "copper pipe", CER)
    assert (first, second[0], third) == ((2, 1.0), 1, (3, None))
    assert second[1] < 0.5


def test_cross_encode_is_a_window_function(texts: Sql) -> None:
    call = f"CROSS_ENCODE(TEXT, 'x', '{CER}')"
    assert texts.code(f"SELECT {call} FROM T") == 328
    assert texts.code(f"SELECT {call} OVER (PARTITION BY ID) FROM T") == 7
    assert texts.code(f"SELECT ID FROM T WHERE {call} OVER () > 0") > 0
    assert texts.code("SELECT CROSS_ENCODE(TEXT, 'x') OVER () FROM T") == 316


@pytest.mark.parametrize("model", [NEB, "unknown", "", None])
def test_an_unknown_reranking_model_is_an_error(shared: Sql, model: str | None) -> None:
    assert shared.code("SELECT CROSS_ENCODE('x', 'x', ?) OVER () FROM DUMMY", model) == 8


# --- the caller's functions -------------------------------------------------------------------------------------------


def lengths(texts: Sequence[str], text_type: str) -> list[list[float]]:
    """An embedder: the number of characters, and 1 for a document."""
    return [[len(text), float(text_type == "DOCUMENT")] for text in texts]


def shortest(query: str, documents: Sequence[str]) -> list[float]:
    """A reranker: short documents are better."""
    return [-float(len(document)) for document in documents]


def test_the_callers_functions_compute() -> None:
    with instance(Nlp(lengths, shortest)) as sql:
        assert sql.evaluate(f"VECTOR_EMBEDDING('pump', 'DOCUMENT', '{NEB}')") == vector(4, 1)
        assert sql.evaluate(f"VECTOR_EMBEDDING('pump', 'QUERY', '{NEB}')") == vector(4, 0)
        assert sql.value(f"SELECT CROSS_ENCODE('pump', 'x', '{CER}') OVER () FROM DUMMY") == -4
        assert sql.code("SELECT VECTOR_EMBEDDING('pump', 'QUERY', 'unknown') FROM DUMMY") == 8


@pytest.mark.parametrize("answer", [[], [[float("nan")]], [["x"]]])
def test_a_bad_answer_of_the_callers_embedder_is_an_error(answer: list[Any]) -> None:
    with instance(Nlp(lambda texts, text_type: answer)) as sql:
        assert sql.code(f"SELECT VECTOR_EMBEDDING('x', 'QUERY', '{NEB}') FROM DUMMY") in (2, 8)
        assert sql.evaluate("1") == 1


@pytest.mark.parametrize("code", [258, 328])
def test_an_instance_without_the_service_refuses_both_functions(code: int) -> None:
    with instance(Nlp(refused=code)) as sql:
        sql.run("CREATE TABLE EMPTY (A NCLOB)")
        assert sql.code(f"SELECT VECTOR_EMBEDDING(A, 'QUERY', '{NEB}') FROM EMPTY") == code
        assert sql.code(f"SELECT CROSS_ENCODE(A, 'x', '{CER}') OVER () FROM EMPTY") == code
        assert sql.code(f"CREATE VIEW V AS SELECT VECTOR_EMBEDDING(A, 'QUERY', '{NEB}') AS B FROM EMPTY") == code


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_takes_an_embedder_and_a_reranker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    with (
        running("--embedder", "test_nlp:lengths", "--reranker", "test_nlp:shortest") as emulator,
        closing(emulator.connect()) as connection,
        closing(connection.cursor()) as cursor,
    ):
        cursor.execute(
            "SELECT VECTOR_EMBEDDING(?, 'QUERY', ?), CROSS_ENCODE('ab', 'x', ?) OVER () FROM DUMMY", ("pump", NEB, CER)
        )
        found, score = cursor.fetchone()
        assert (bytes(found), score) == (vector(4, 0), -2)


def test_the_command_refuses_a_function_that_it_cannot_import() -> None:
    for name in ("no_such_module:embed", "math:no_such", "math", "math:pi"):
        process = launch("--embedder", name)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert errors.startswith("hana_emulator: --embedder: ")


def test_hdbcli_meets_an_instance_without_the_service() -> None:
    from hdbcli import dbapi

    with running("--without-nlp") as emulator, closing(emulator.connect()) as connection:
        with pytest.raises(dbapi.Error) as caught:
            connection.cursor().execute(f"SELECT VECTOR_EMBEDDING('x', 'QUERY', '{NEB}') FROM DUMMY")
        assert caught.value.errorcode == 258
