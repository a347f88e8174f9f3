"""A collection that HANA's own model embeds: written, compared, repaired and searched without fetching a vector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from app.src.service.hana_engine import HanaBackend
from connector.document.document import UNKNOWN_VECTOR
from connector.errors import (
    ConfigurationError,
    ConnectionLost,
    ModelMismatch,
    RowRejected,
    StatementFailed,
    TextsNotEmbeddable,
    classify,
)
from connector.hana import embedding
from connector.hana.connection import HanaPool, Session
from connector.hana.embedding import HanaModel, embed_plain_word, token_spans
from connector.hana.source import HanaSource
from connector.model import ChunkSpec, CollectionSpec, DatabaseModel, TableRef
from connector.retry import RetryPolicy
from connector.stores.hana import store as hana_store
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.sync import apply, quarantine, run
from connector.sync.documents import Documents, NewDocument, Turn
from connector.sync.plan import plan
from connector.sync.run import Ends, SyncOptions, sync
from connector.sync.verify import verify
from hana_emulator.testing import running
from tests.native import NEB, embedder_of, login, native  # noqa: F401 - the fixture

ROWS = 30
ANY = SyncOptions(max_deletes=1.0)


@dataclass
class Scene:
    """The table SRC and a store over it; `sent`: statements; `failing`: part of a statement -> the error it gets."""

    pool: HanaPool
    ends: Ends
    connection: object
    sent: list[str]
    spec: CollectionSpec

    def run(self, sql: str, *parameters):
        with closing(self.connection.cursor()) as cursor:
            cursor.execute(sql, parameters)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def sync(self, **options):
        return sync(self.spec, self.ends, replace(ANY, **options))

    def stored(self) -> dict[str, np.ndarray]:
        return {r.id: r for page in self.ends.store.records(self.spec.name) for r in page}

    def expected(self, *texts: str) -> np.ndarray:
        return self.ends.embedder.embed_documents(texts)


@pytest.fixture
def scene(native, monkeypatch) -> Iterator[Scene]:  # noqa: F811
    """Rows pass through this process (those that stay: `test_rows_in_database.py`)."""
    monkeypatch.setattr(run, "rows_in_sql", lambda *_: "")
    with scene_in(native) as scene:
        yield scene


@contextmanager
def scene_in(emulator) -> Iterator[Scene]:
    connection = emulator.connect(autocommit=True)
    connection.cursor().execute('CREATE SCHEMA "NATIVE"')
    sent: list[str] = []
    retry = RetryPolicy(first_wait=0.001, longest_wait=0.01)
    with HanaPool(login(emulator, "NATIVE"), on_statement=sent.append, retry=retry) as pool:
        embedder = embedder_of(pool)
        ends = Ends(HanaSource(pool), HanaStore(pool, "NATIVE"), embedder)
        spec = CollectionSpec("native", TableRef("NATIVE", "SRC"), "{TXT}", metadata=("GRP",))
        scene = Scene(pool, ends, connection, sent, spec)
        scene.run('CREATE TABLE "NATIVE"."SRC" ("K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(5000), "GRP" NVARCHAR(3))')
        for key in range(ROWS):
            scene.run('INSERT INTO "NATIVE"."SRC" VALUES (?, ?, ?)', key, f"pump {key} leaks", f"G{key % 3}")
        yield scene
        embedder.close()
    connection.cursor().execute('DROP SCHEMA "NATIVE" CASCADE')
    connection.close()


def change(scene: Scene, key: int, text: str) -> None:
    scene.run('UPDATE "NATIVE"."SRC" SET "TXT" = ? WHERE "K" = ?', text, key)


# ----------------------------------------------------------------------------------------------------------- writing


def test_hana_embeds_while_it_writes_and_no_vector_is_fetched(scene):
    scene.sent.clear()
    report = scene.sync()
    assert (report.upserted, report.embedded_texts, report.quarantined) == (ROWS, ROWS, 0)
    assert not [sql for sql in scene.sent if sql.startswith("SELECT VECTOR") or 'SELECT "ID", "VEC_VECTOR"' in sql]
    assert [sql for sql in scene.sent if "INSERT" in sql and "L2NORMALIZE(VECTOR_EMBEDDING(?, 'DOCUMENT', ?))" in sql]
    again = scene.sync()
    assert (again.unchanged, again.upserted, again.embedded_texts) == (ROWS, 0, 0)
    stored = scene.stored()
    fresh = scene.expected(*(record.text for record in stored.values()))
    for record, vector in zip(stored.values(), fresh, strict=True):
        np.testing.assert_allclose(record.vector, vector, atol=1e-5)
        assert record.content_hash[24:] == UNKNOWN_VECTOR
        assert record.model.startswith("hana:SAP_NEB.20240715@")


def test_hana_embeds_into_vectors_of_half_precision(scene):
    store = HanaStore(scene.pool, "NATIVE", vector_type="half")
    scene.ends = replace(scene.ends, store=store)
    assert scene.sync().upserted == ROWS
    assert any("TO_HALF_VECTOR(L2NORMALIZE(VECTOR_EMBEDDING(?," in sql for sql in scene.sent)
    assert store.status("native").table == "OWL_NATIVE_H1"
    assert scene.sync().unchanged == ROWS
    assert verify(scene.spec, scene.ends).ok
    (hit,) = store.view("native").search(scene.ends.embedder.embed_query("pump 7 leaks"), 1)
    assert hit.id == "[7]"
    scene.run("""UPDATE "NATIVE"."OWL_NATIVE_H1" SET "VEC_VECTOR" = NULL WHERE "SRC_KEY" = '[3]'""")
    assert verify(scene.spec, scene.ends).bad_vectors == 1


def test_changed_metadata_is_written_without_embedding(scene):
    scene.sync()
    scene.run("""UPDATE "NATIVE"."SRC" SET "GRP" = 'X' WHERE "K" = 3""")
    report = scene.sync()
    assert (report.upserted, report.embedded_texts) == (1, 0)
    assert scene.stored()["[3]"].metadata == {"GRP": "X"}
    assert verify(scene.spec, scene.ends).ok


def test_long_texts_are_cut_by_an_estimate_that_is_never_too_low(scene):
    long = " ".join(f"Hydraulikpumpe{number} RÖHRENWERK 00047{number}" for number in range(60))
    change(scene, 1, long)
    spec = replace(scene.spec, chunk=ChunkSpec(overlap=4))
    sync(spec, scene.ends, ANY)
    pieces = [r.text for page in scene.ends.store.records("native") for r in page if r.id == "[1]"]
    assert len(pieces) > 2
    assert max(len(token_spans(piece)) for piece in pieces) <= scene.ends.embedder.max_tokens == 254
    assert verify(spec, scene.ends).ok


@pytest.mark.parametrize("word", ["poison", "mute"])
def test_what_hana_rejects_is_quarantined_and_its_neighbours_are_stored(scene, word):
    scene.sync()
    for key in (2, 9, 10):
        change(scene, key, f"{word} {key}")
    change(scene, 3, "another text")
    report = scene.sync()
    assert (report.upserted, report.quarantined) == (1, 3)
    rows = scene.ends.store.quarantine("native")
    assert [row.id for row in rows] == ["[10]", "[2]", "[9]"]
    assert all(word not in row.reason for row in rows), "no row's text in a reason"
    assert {"[2]", "[9]", "[10]"}.isdisjoint(scene.stored())
    assert scene.sync().upserted == 0
    for key in (2, 9, 10):
        change(scene, key, f"healed {key}")
    assert quarantine.retry(scene.spec, scene.ends, None, ANY).upserted == 3
    assert verify(scene.spec, scene.ends).ok


@pytest.mark.parametrize(
    ("slow", "sizes"), [(99.0, [2, 2, 4, 4, 6, 6, 6]), (0.0, [2, *[1] * 28])], ids=["quick", "slow"]
)
def test_transactions_start_small_and_grow_while_hana_is_quick(scene, monkeypatch, slow, sizes):
    for name, value in {"FIRST_EMBEDDED": 2, "EMBEDDED_PER_APPLY": 6, "GROW_AFTER": 2, "SLOW_SECONDS": slow}.items():
        monkeypatch.setattr(apply, name, value)
    written = inserts(monkeypatch)
    assert scene.sync().upserted == sum(written) == ROWS
    assert written == sizes


def inserts(monkeypatch) -> list[int]:
    """Count the rows of each later INSERT that embeds."""
    real, written = Session.execute_many, []

    def counted(self, sql, rows, **more):
        written.extend([len(rows)] * ("VECTOR_EMBEDDING" in sql))
        real(self, sql, rows, **more)

    monkeypatch.setattr(Session, "execute_many", counted)
    return written


def failing(monkeypatch, part: str, errors: list[Exception]) -> None:
    """The next statements that contain `part` get these errors."""

    def broken(name):
        real = getattr(Session, name)

        def run(self, sql, *rest, **more):
            if part in sql and errors:
                raise errors.pop(0)
            return real(self, sql, *rest, **more)

        monkeypatch.setattr(Session, name, run)

    for name in ("execute_many", "query"):
        broken(name)


def test_without_its_service_hana_quarantines_nothing(scene, monkeypatch):
    scene.sync(page_rows=10)
    change(scene, 5, "another text")
    failing(monkeypatch, "VECTOR_EMBEDDING", [StatementFailed("the service is down", code=8)] * 9)
    with pytest.raises(StatementFailed, match="down"):
        scene.sync()
    monkeypatch.undo()
    assert scene.ends.store.quarantine("native") == []
    assert scene.stored()["[5]"].text == "pump 5 leaks"
    assert scene.sync().upserted == 1


INSERT = 'INSERT INTO "NATIVE"."OWL_NATIVE_G1"'


@pytest.mark.parametrize("kind", [StatementFailed, RowRejected])
def test_an_insert_that_fails_once_is_tried_again(scene, monkeypatch, kind):
    scene.sync()
    for key in range(12):
        change(scene, key, f"another text {key}")
    failing(monkeypatch, INSERT, [kind("the remote source refuses one call", code=2048)])
    report = scene.sync()
    assert (report.upserted, report.quarantined) == (12, 0)


def test_an_insert_that_always_fails_ends_the_sync_and_deletes_nothing(scene, monkeypatch):
    scene.sync()
    for key in range(12):
        change(scene, key, f"another text {key}")
    failing(monkeypatch, INSERT, [StatementFailed("not in an INSERT", code=2048)] * 99)
    with pytest.raises(StatementFailed, match="not in an INSERT"):
        scene.sync()
    documents = Documents(
        CollectionSpec("clients", TableRef("", ""), "", ("id",)), scene.ends.store, scene.ends.embedder, Turn()
    )
    failing(monkeypatch, "INSERT", [StatementFailed("not in an INSERT", code=2048)] * 99)
    with pytest.raises(StatementFailed, match="not in an INSERT"):
        documents.put([NewDocument("a", "steel pump"), NewDocument("b", "rubber seal")])
    assert scene.ends.store.quarantine("native") == []
    assert len(scene.stored()) == ROWS


def test_a_text_that_hana_refuses_once_is_stored_after_all(scene, monkeypatch):
    refused, real = [{1: RowRejected("busy", code=2048)}], hana_store._not_embeddable
    monkeypatch.setattr(hana_store, "_not_embeddable", lambda *given: refused.pop() if refused else real(*given))
    failing(monkeypatch, INSERT, [StatementFailed("busy", code=2048)])
    report = scene.sync(page_rows=10)
    assert (report.upserted, report.quarantined, refused) == (ROWS, 0, [])


@pytest.mark.parametrize("kind", [StatementFailed, RowRejected])
def test_vectors_of_another_dimension_are_blamed_on_no_text(scene, monkeypatch, kind):
    scene.sync()
    change(scene, 5, "another text")
    failing(monkeypatch, INSERT, [kind("another dimension", code=20005)] * 99)
    monkeypatch.setattr(embedding, "probe", lambda model: ("SELECT 3 FROM DUMMY WHERE ? <> ?", ("a", "b")))
    with pytest.raises(ModelMismatch, match=r"now gives vectors of dimension 3, .* has 64"):
        scene.sync()
    assert scene.stored()["[5]"].text == "pump 5 leaks"


def test_a_lost_connection_is_tried_again(scene, monkeypatch):
    failing(monkeypatch, "VECTOR_EMBEDDING", [ConnectionLost("gone", code=-10807)] * 2)
    assert scene.sync().upserted == ROWS
    assert verify(scene.spec, scene.ends).ok


def test_a_row_of_many_chunks_is_inserted_in_portions_and_never_raises_the_limit(scene, monkeypatch):
    change(scene, 1, "a " * 2400)
    monkeypatch.setattr(apply, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(apply, "GROW_AFTER", 99)
    written = inserts(monkeypatch)
    assert sync(replace(scene.spec, chunk=ChunkSpec(overlap=120)), scene.ends, ANY).upserted == ROWS
    assert max(written) == hana_store.EMBEDDED_TOGETHER < sum(written) - ROWS + 1, "of one row, in one transaction"
    assert written[-1] == 1, "the limit fell to 1 and stayed"


def test_clients_documents_are_embedded_by_hana_too(scene):
    spec = CollectionSpec("clients", TableRef("", ""), "", ("id",))
    documents = Documents(spec, scene.ends.store, scene.ends.embedder, Turn())
    put = documents.put([NewDocument("a", "steel pump"), NewDocument("b", "rubber seal")])
    assert (put.upserted, put.embedded_texts) == (2, 2)
    (hit,) = scene.ends.store.view("clients").search(scene.ends.embedder.embed_query("rubber seal"), 1)
    assert hit.id == '["b"]'
    assert documents.put([NewDocument("a", "steel pump")]).unchanged == 1
    with pytest.raises(Exception, match=r"documents\[1\]: .*gave no vector"):
        documents.put([NewDocument("c", "fine"), NewDocument("d", "mute")])
    assert scene.ends.store.status("clients").rows == 2


# --------------------------------------------------------------------------------------------------------- verifying

_OTHER = """UPDATE "NATIVE"."OWL_NATIVE_G1" SET "VEC_VECTOR" = """


@pytest.mark.parametrize(
    "damage",
    [
        f"""{_OTHER}NULL WHERE "SRC_KEY" = '[4]'""",
        f"""{_OTHER}VECTOR_EMBEDDING("VEC_TEXT", 'DOCUMENT', 'SAP_NEB.20240715') WHERE "SRC_KEY" = '[4]'""",
        f"""{_OTHER}L2NORMALIZE(VECTOR_EMBEDDING('other', 'DOCUMENT', 'SAP_NEB.20240715')) WHERE "SRC_KEY" = '[4]'""",
        """UPDATE "NATIVE"."OWL_NATIVE_G1" SET "CONTENT_HASH" = X'"""
        + "00" * 24
        + """0000000000000001' WHERE "SRC_KEY" = '[4]'""",
    ],
    ids=["null", "not of length 1", "of another text", "a digest of ours"],
)
def test_verify_finds_a_damaged_vector_in_the_database_and_repairs_it(scene, damage):
    scene.sync()
    scene.run(damage)
    scene.sent.clear()
    report = verify(scene.spec, scene.ends)
    assert (report.bad_vectors, report.ok) == (1, False)
    assert verify(scene.spec, scene.ends, repair=True).ok
    reads = [sql for sql in scene.sent if sql.startswith("SELECT")]
    assert [sql for sql in reads if "COSINE_SIMILARITY" in sql]
    assert not [sql for sql in reads if '"VEC_META", "VEC_VECTOR"' in sql], "no vector is fetched"
    assert scene.sync().upserted == 0


def test_a_stored_text_that_hana_no_longer_embeds_is_found(scene, monkeypatch):
    scene.sync()
    failing(monkeypatch, "COSINE_SIMILARITY", [StatementFailed("a text", code=2)] * 2)  # of all, and of the first one
    assert verify(scene.spec, scene.ends).bad_vectors == 1


def test_a_statement_that_never_works_is_no_damage(scene, monkeypatch):
    scene.sync()
    failing(monkeypatch, "COSINE_SIMILARITY", [StatementFailed("not of an NCLOB", code=2)] * 99)
    with pytest.raises(StatementFailed, match="NCLOB"):
        verify(scene.spec, scene.ends, repair=True)


def test_verify_says_when_hana_embeds_no_more(scene, monkeypatch):
    scene.sync()
    failing(monkeypatch, "VECTOR_EMBEDDING", [StatementFailed("down", code=2)] * 99)
    with pytest.raises(StatementFailed, match="down"):
        verify(scene.spec, scene.ends)


# ------------------------------------------------------------------------------------------------- asking and planning


def test_a_plan_counts_calls_and_makes_none(scene):
    change(scene, 7, "pump 8 leaks")
    scene.sent.clear()
    found = plan(scene.spec, scene.ends.source, None, scene.ends.embedder)
    assert (found.calls, found.duplicates, found.estimated_seconds) == (ROWS, 1, None)
    assert f"{ROWS} texts, one call of VECTOR_EMBEDDING each" in found.notes[0]
    assert not [sql for sql in scene.sent if "VECTOR_EMBEDDING" in sql]


def test_queries_differ_from_documents_and_bad_texts_are_named(scene):
    embedder = scene.ends.embedder
    (document,) = embedder.embed_documents(["oil pump"])
    assert 0.5 < float(embedder.embed_query("oil pump") @ document) < 0.99
    with pytest.raises(TextsNotEmbeddable) as caught:
        embedder.embed_documents(["fine", "poison", "fine too", "mute"])
    assert caught.value.indices == (1, 3)


def test_texts_are_embedded_several_in_a_statement_and_long_or_bad_ones_alone(scene):
    model, sent = HanaModel(scene.pool, NEB), scene.sent
    texts = [f"text {number}" for number in range(16)]
    sent.clear()
    vectors = model.embed(texts, "QUERY")
    assert len(sent) == 1
    assert np.isfinite(vectors).all()
    for bad in ("poison", "pump " * 600):
        some = [texts[0], bad, texts[2]]
        sent.clear()
        found = model.embed(some, "QUERY")
        np.testing.assert_allclose(found[[0, 2]], vectors[[0, 2]], atol=1e-6)
        assert np.isfinite(found[1]).all() == (bad != "poison")
        assert len(sent) in (3, 5), "together, each alone, and a plain word; or each alone"


def test_searches_pass_between_statements_of_a_batch(scene):
    backend, sent, passed = HanaBackend(HanaModel(scene.pool, NEB)), scene.sent, []
    texts = [f"text {number}" for number in range(40)]
    sent.clear()
    vectors = backend.forward(backend.tokenize(texts), pause=lambda: passed.append(len(sent)))
    assert passed == [1, 2]
    np.testing.assert_allclose(vectors, scene.expected(*texts), atol=1e-5)


@pytest.mark.parametrize("code", [258, 328])
def test_an_instance_without_the_service_is_a_clear_error(code):
    said = pytest.raises(ConfigurationError, match=rf"code {code}.*Natural Language Processing")
    with running("--without-nlp", str(code)) as emulator, HanaPool(login(emulator)) as pool, said:
        HanaModel(pool, NEB)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (DatabaseModel("SAP_XYZ.1"), "hana:SAP_XYZ.1.*a model that the instance has.*needs remote_source"),
    ],
)
def test_an_unknown_model_is_a_clear_error(scene, model, said):
    with pytest.raises(ConfigurationError, match=said):
        HanaModel(scene.pool, model)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "with hana:ada: .*code 403.*Natural Language Processing.*needs remote_source"),
        ("AI_CORE", "with hana:ada of remote source 'AI_CORE': .*code 403.*Check the remote source 'AI_CORE'.*right"),
    ],
)
def test_a_model_that_fails_later_is_named_with_its_remote_source(source, said):
    def query(sql, parameters, *, doing):
        raise classify(403, "internal error: a text", doing=doing)

    with pytest.raises(StatementFailed, match=said) as caught:
        embed_plain_word(query, DatabaseModel("ada", source))
    assert (caught.value.code, "a text" in str(caught.value)) == (403, False)


def test_a_model_of_a_remote_source_is_another_model(scene):
    remote = embedder_of(scene.pool, DatabaseModel("text-embedding-3-small", "AI_CORE"))
    assert remote.fingerprint != scene.ends.embedder.fingerprint
    assert "AI_CORE" in remote.fingerprint
    (vector,) = remote.embed_documents(["pump"])
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    remote.close()


def test_a_local_store_refuses_it(scene, tmp_path):
    with closing(LocalStore(tmp_path)) as store, pytest.raises(ConfigurationError, match='kind = "hana"'):
        sync(scene.spec, Ends(scene.ends.source, store, scene.ends.embedder))


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("pump", 1),
        ("Hydraulikpumpe", 5),
        ("HEX NUT M12", 6),
        ("000000004711", 6),
        ("水泵漏油", 4),
        ("a, b; c.", 6),
        ("", 0),
        ("насос", 5),
    ],
)
def test_tokens_are_rather_over_than_underestimated(text, least):
    assert len(token_spans(text)) >= least
