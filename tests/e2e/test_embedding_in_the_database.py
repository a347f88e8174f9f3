"""Models inside the database, on the emulator: langchain-hana's internal embeddings and reranker, and our own model
behind VECTOR_EMBEDDING (`hana-emulator --embedder`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from langchain_hana import HanaDB, HanaInternalEmbeddings

from hana_emulator.testing import running

TEXTS = ["the pump leaks at the seal", "a motor smells of smoke", "the conveyor belt tears"]
MODEL = "SAP_NEB.20240715"


@cache
def _engine() -> Any:
    from app.src.core.loading import EngineOptions, load_engine

    return load_engine(EngineOptions("all-MiniLM-L6-v2", device="cpu"))


def minilm(texts: Sequence[str], text_type: str) -> Any:
    """The packaged model as the emulator's embedder; it makes no difference between documents and queries."""
    return _engine().embed(list(texts))


@pytest.mark.parametrize("map_merge", [False, True])
def test_langchain_hana_embeds_and_reranks_in_the_database(hana: Any, map_merge: bool) -> None:
    hana.setautocommit(True)
    store = HanaDB(connection=hana, embedding=HanaInternalEmbeddings(internal_embedding_model_id=MODEL))
    store.add_texts(TEXTS, use_map_merge=map_merge)
    (found,) = store.similarity_search("smoke of a motor", k=1)
    assert found.page_content == TEXTS[1]
    rerank = {"model_id": "SAP_CER.20250701", "query": "the belt", "top_n": 1}
    (found,) = store.similarity_search("smoke of a motor", k=3, rerank_config=rerank)
    assert found.page_content == TEXTS[2]


@pytest.mark.slow
def test_our_model_embeds_in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    with (
        running("--embedder", "test_embedding_in_the_database:minilm") as emulator,
        closing(emulator.connect()) as connection,
        closing(connection.cursor()) as cursor,
    ):
        cursor.execute("CREATE TABLE T (A NVARCHAR(100), V REAL_VECTOR(384))")
        cursor.executemany(
            f"INSERT INTO T VALUES (?, VECTOR_EMBEDDING(?, 'DOCUMENT', '{MODEL}'))", [(t, t) for t in TEXTS]
        )
        search = f"COSINE_SIMILARITY(V, VECTOR_EMBEDDING(?, 'QUERY', '{MODEL}'))"
        cursor.execute(f"SELECT TOP 1 A, {search} AS S FROM T ORDER BY S DESC", ("burning engine",))
        assert cursor.fetchone()[0] == TEXTS[1]
