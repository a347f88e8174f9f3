"""From rows in the emulator to hits, over the real hdbcli: every kind of source, and the store in HANA tables."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from connector.document.document import metadata_names
from connector.errors import ConfigurationError, NoKey, UnknownColumn, UnknownTable
from connector.hana.source import HanaSource
from connector.model import ChunkSpec, CollectionSpec, TableRef
from connector.stores.hana.store import HanaStore
from connector.sync.run import Ends, SyncOptions, sync
from connector.sync.verify import verify
from hana_emulator.testing import running

OPTIONS = SyncOptions(page_rows=4, window=8, max_deletes=1.0)

ROWS = [
    ("100", "P-1", "Centrifugal pump for hot water", "FERT", 12.5),
    ("100", "P-2", "Mechanical seal, graphite", "HALB", 0.25),
    ("100", "P-3", "Drucklufttank ÄÖÜ 😀", "FERT", 80),
    ("100", "P/4", 'Conveyor belt "wide"', "ROH", None),
    ("100", "P'5", "Safety helmet, yellow", "FERT", 0.3),
    ("100", "P-6", None, "FERT", 1),
    ("100", "P-7", "   ", "FERT", 1),
    ("200", "P-1", "Office chair", "FERT", 9),
    ("200", "P-2", "Mechanical seal, graphite", "HALB", 0.25),
]


@pytest.fixture
def spec(hana_schema, run_sql) -> CollectionSpec:
    run_sql(
        'CREATE COLUMN TABLE "MARA" ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MAKTX" NVARCHAR(200), '
        '"MTART" NVARCHAR(4), "BRGEW" DECIMAL(13,3), PRIMARY KEY ("MANDT", "MATNR"))'
    )
    run_sql('INSERT INTO "MARA" VALUES (?,?,?,?,?)', *ROWS)
    return CollectionSpec(
        "materials",
        TableRef(hana_schema, "MARA"),
        "{MAKTX}",
        metadata=("MTART", "BRGEW", "MANDT"),
        chunk=ChunkSpec(max_tokens=16, overlap=4),
    )


def search(ends: Ends, text: str, k: int = 3, where: dict | None = None, name: str = "materials") -> list[str]:
    return [hit.id for hit in ends.store.view(name).search(ends.embedder.embed_query(text), k, where)]


def test_two_column_keys_find_their_rows(ends, spec):
    report = sync(spec, ends, OPTIONS)
    assert (report.read, report.upserted, report.empty) == (9, 7, 2)
    assert report.reused_texts == 1
    assert search(ends, "Centrifugal pump", 1) == ['["100","P-1"]']
    assert set(search(ends, "graphite seal", 2)) == {'["100","P-2"]', '["200","P-2"]'}
    assert search(ends, "graphite seal", 5, {"MANDT": "200"})[0] == '["200","P-2"]'
    assert verify(spec, ends).ok


def test_resync_is_silent_and_changes_are_exact(ends, spec, run_sql, hana_schema):
    sync(spec, ends, OPTIONS)
    state = 'SELECT "ID", "SRC_KEY", "SYNCED_AT" FROM "OWL_MATERIALS_G1" ORDER BY "ID"'
    before = run_sql(state)
    report = sync(spec, ends, OPTIONS)
    assert (report.unchanged, report.embedded_texts, report.upserted, report.deleted) == (7, 0, 0, 0)
    assert run_sql(state) == before

    run_sql("""UPDATE "MARA" SET "MAKTX" = 'Vacuum pump' WHERE "MATNR" = 'P-3'""")
    run_sql("""UPDATE "MARA" SET "MTART" = 'ROH' WHERE "MATNR" = 'P''5'""")
    run_sql("""DELETE FROM "MARA" WHERE "MANDT" = '200' AND "MATNR" = 'P-1'""")
    run_sql("""INSERT INTO "MARA" VALUES ('100', 'P-0', 'Ball bearing', 'ROH', 1)""")
    report = sync(spec, ends, OPTIONS)
    assert (report.upserted, report.deleted, report.unchanged, report.embedded_texts) == (3, 1, 4, 2)
    kept = {row[0]: row for row in before}
    after = {row[0]: row for row in run_sql(state)}
    untouched = [id_ for id_, row in after.items() if kept.get(id_) == row]
    assert len(untouched) == 4
    assert search(ends, "vacuum pump", 1) == ['["100","P-3"]']


def test_the_table_is_the_promised_one(ends, spec, run_sql, hana_schema):
    sync(spec, ends, OPTIONS)
    columns = run_sql(
        "SELECT COLUMN_NAME, DATA_TYPE_NAME, LENGTH FROM SYS.TABLE_COLUMNS "
        "WHERE SCHEMA_NAME = ? AND TABLE_NAME = 'OWL_MATERIALS_G1' ORDER BY POSITION",
        (hana_schema,),
    )
    assert [(name, kind) for name, kind, _ in columns] == [
        ("ID", "BIGINT"),
        ("VEC_TEXT", "NCLOB"),
        ("VEC_META", "NCLOB"),
        ("VEC_VECTOR", "REAL_VECTOR"),
        ("SRC_KEY", "NVARCHAR"),
        ("CHUNK_NO", "INTEGER"),
        ("CONTENT_HASH", "VARBINARY"),
        ("MODEL_ID", "NVARCHAR"),
        ("SYNCED_AT", "TIMESTAMP"),
    ]
    assert dict((name, length) for name, _, length in columns)["VEC_VECTOR"] == 64
    ((meta,),) = run_sql("""SELECT "VEC_META" FROM "OWL_MATERIALS_G1" WHERE "SRC_KEY" = '["100","P-1"]'""")
    assert (
        json.loads(meta) == {"BRGEW": "12.500", "MANDT": "100", "MTART": "FERT"} or json.loads(meta)["BRGEW"] == "12.5"
    )


# --------------------------------------------------------------------------------------------------- other sources


def test_views_need_a_key_and_work_with_one(ends, spec, run_sql, hana_schema):
    run_sql(
        'CREATE VIEW "V MAT" AS SELECT "MANDT" AS "Client", "MATNR" AS "Number", UPPER("MAKTX") AS "Text" FROM "MARA"'
    )
    view = CollectionSpec("by_view", TableRef(hana_schema, "V MAT"), '{"Text"}', where="\"Client\" = '100'")
    with pytest.raises(NoKey, match="key"):
        sync(view, ends, OPTIONS)
    report = sync(replace(view, key=("Number",)), ends, OPTIONS)
    assert (report.read, report.upserted, report.empty) == (7, 5, 2)
    assert search(ends, "helmet", 1, name="by_view") == ['["P\'5"]']


def test_a_table_without_key_is_refused_by_name(ends, run_sql, hana_schema):
    run_sql('CREATE TABLE "NOKEY" ("A" INTEGER, "T" NVARCHAR(20))')
    with pytest.raises(NoKey, match=r"NOKEY(.|\n)*key"):
        sync(CollectionSpec("c", TableRef(hana_schema, "NOKEY"), "{T}"), ends, OPTIONS)


@pytest.mark.slow
def test_odd_names_stand_as_they_are(emulator, open_pool, hashing, run_sql, hana_schema):
    names = {"odd-1": metadata_names(["/BIC/Grp", "a.b"])}
    pool = open_pool(emulator)
    ends = Ends(HanaSource(pool), HanaStore(pool, hana_schema, names=names), hashing)
    run_sql(
        'CREATE TABLE "/BIC/A ""odd"".x" ("Key One" NVARCHAR(10), "k2" INTEGER, "/BIC/TXT" NVARCHAR(50), '
        '"/BIC/Grp" NVARCHAR(5), "a.b" NVARCHAR(5), PRIMARY KEY ("Key One", "k2"))'
    )
    insert = 'INSERT INTO "/BIC/A ""odd"".x" VALUES (?,?,?,?,?)'
    run_sql(insert, *[("x", n, f"text number {n}", "G1" if n % 2 else "g1", str(n)) for n in range(11)])
    source = TableRef.parse(f'{hana_schema}."/BIC/A ""odd"".x"')
    odd = CollectionSpec("odd-1", source, '{"/BIC/TXT"} in {"Key One"}', metadata=("/BIC/Grp", "a.b"))
    assert sync(odd, ends, OPTIONS).upserted == 11
    assert verify(odd, ends).ok
    hits = ends.store.view("odd-1").search(ends.embedder.embed_query("text number 7"), 20, {"/BIC/Grp": "G1"})
    assert {json.loads(hit.id)[1] % 2 for hit in hits} == {1}
    assert run_sql('SELECT COUNT(*) FROM "OWL_ODD_1_G1"') == [(11,)]


def test_unknown_names_are_refused_with_the_nearest(ends, spec, hana_schema):
    with pytest.raises(UnknownTable, match="MARA"):
        sync(replace(spec, source=TableRef(hana_schema, "MARRA")), ends, OPTIONS)
    with pytest.raises(UnknownColumn, match="MTART"):
        sync(replace(spec, metadata=("MTARD",)), ends, OPTIONS)


def test_a_where_that_is_no_sql_is_a_mistake_in_the_configuration(ends, spec):
    with pytest.raises(ConfigurationError, match="where"):
        sync(replace(spec, where="\"MANDT\" = '100' AND"), ends, OPTIONS)


@pytest.mark.slow
def test_source_in_one_hana_and_vectors_in_another(spec, emulator, open_pool, hashing, run_sql):
    with running("--schema", "VECTORS") as other:
        ends = Ends(HanaSource(open_pool(emulator)), HanaStore(open_pool(other), "VECTORS"), hashing)
        assert sync(spec, ends, OPTIONS).upserted == 7
        assert verify(spec, ends).ok
        assert search(ends, "helmet", 1) == ['["100","P\'5"]']
        run_sql('DELETE FROM "MARA" WHERE "MANDT" = \'200\'')
        assert sync(spec, ends, OPTIONS).deleted == 2
        assert run_sql(
            "SELECT COUNT(*) FROM SYS.TABLES WHERE TABLE_NAME LIKE 'OWL%MATERIALS%' AND SCHEMA_NAME = 'VECTORS'"
        ) == [(0,)]


# -------------------------------------------------------------------------------------------------- planted damage


COPY = """INSERT INTO "OWL_MATERIALS_G1"
    ("SRC_KEY","VEC_TEXT","VEC_META","VEC_VECTOR","CHUNK_NO","CONTENT_HASH","MODEL_ID")
    SELECT %s,"VEC_TEXT","VEC_META","VEC_VECTOR","CHUNK_NO","CONTENT_HASH","MODEL_ID"
    FROM "OWL_MATERIALS_G1" WHERE "SRC_KEY" = '["100","P-1"]'"""
DAMAGE = {
    "missing": """DELETE FROM "OWL_MATERIALS_G1" WHERE "SRC_KEY" = '["100","P-1"]'""",
    "stale": """UPDATE "OWL_MATERIALS_G1" SET "VEC_TEXT" = 'something else' WHERE "SRC_KEY" = '["100","P-1"]'""",
    "orphaned": COPY % """'["100","GONE"]'""",
    "duplicates": COPY % '"SRC_KEY"',
    "bad_vectors": """UPDATE "OWL_MATERIALS_G1" SET "VEC_VECTOR" = NULL WHERE "SRC_KEY" = '["100","P-1"]'""",
}
KINDS = ("missing", "stale", "orphaned", "duplicates", "bad_vectors")
CONTENT = 'SELECT "SRC_KEY","CHUNK_NO","VEC_TEXT","VEC_META","CONTENT_HASH" FROM "OWL_MATERIALS_G1" ORDER BY 1, 2'


@pytest.mark.parametrize("kind", ["missing", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_planted_damage_is_found_and_mended_and_nothing_else(ends, spec, run_sql, kind):
    sync(spec, ends, OPTIONS)
    clean = run_sql(CONTENT)
    places = 'SELECT "ID","SRC_KEY" FROM "OWL_MATERIALS_G1"'
    run_sql(DAMAGE[kind])
    before = set(run_sql(places))
    report = verify(spec, ends)
    assert {name: getattr(report, name) for name in KINDS} == dict.fromkeys(KINDS, 0) | {kind: 1}
    assert not report.ok
    mended = verify(spec, ends, repair=True)
    assert mended.ok
    assert getattr(mended, kind) == 1
    assert run_sql(CONTENT) == clean
    assert verify(spec, ends).drift == 0
    touched = before ^ set(run_sql(places))
    assert {key for _, key in touched} <= {'["100","P-1"]', '["100","GONE"]'}


@pytest.mark.parametrize(
    "column",
    [
        pytest.param("CHUNK_NO", marks=pytest.mark.slow),
        "CONTENT_HASH",
        pytest.param("VEC_TEXT", marks=pytest.mark.slow),
        pytest.param("VEC_META", marks=pytest.mark.slow),
        pytest.param("MODEL_ID", marks=pytest.mark.slow),
    ],
)
def test_a_column_set_to_null_stops_neither_sync_nor_verify(ends, spec, run_sql, column):
    sync(spec, ends, OPTIONS)
    clean = run_sql(CONTENT)
    run_sql(f"""UPDATE "OWL_MATERIALS_G1" SET "{column}" = NULL WHERE "SRC_KEY" = '["100","P-1"]'""")
    assert sync(spec, ends, OPTIONS).read == len(ROWS)
    assert verify(spec, ends, repair=True).ok
    assert run_sql(CONTENT) == clean


def test_poisoned_vectors_never_win_a_search(ends, spec, run_sql, hana):
    sync(spec, ends, OPTIONS)
    poison = (64).to_bytes(4, "little") + np.full(64, np.nan, dtype="<f4").tobytes()
    run_sql("""UPDATE "OWL_MATERIALS_G1" SET "VEC_VECTOR" = ? WHERE "SRC_KEY" = '["100","P-1"]'""", (poison,))
    assert '["100","P-1"]' not in search(ends, "Centrifugal pump for hot water", 10)
    report = verify(spec, ends)
    assert (report.bad_vectors, report.ok) == (1, False)
    assert verify(spec, ends, repair=True).ok


# ------------------------------------------------------------------------------------------------------- neighbours


def as_langchain(ends):
    from langchain_core.embeddings import Embeddings

    class Ours(Embeddings):
        def embed_documents(self, texts):
            return [vector.tolist() for vector in ends.embedder.embed_documents(texts)]

        def embed_query(self, text):
            return ends.embedder.embed_query(text).tolist()

    return Ours()


@pytest.mark.slow
def test_hanadb_reads_our_collection_and_its_rows_are_foreign(ends, spec, emulator, hana_schema, run_sql):
    from langchain_hana import HanaDB

    sync(spec, ends, OPTIONS)
    connection = emulator.connect(autocommit=True, currentSchema=hana_schema)
    database = HanaDB(
        connection=connection,
        embedding=as_langchain(ends),
        table_name="OWL_MATERIALS_G1",
        vector_column_length=64,
    )
    (document,) = database.similarity_search("Safety helmet", k=1)
    assert document.page_content == "Safety helmet, yellow"
    assert document.metadata["MTART"] == "FERT"
    filtered = database.similarity_search(
        "seal", k=5, filter={"$and": [{"MANDT": "100"}, {"MTART": {"$in": ["HALB"]}}]}
    )
    assert [found.metadata["MTART"] for found in filtered] == ["HALB"]

    database.add_texts(["A foreign note about garden hoses"], [{"MTART": "NOTE"}])
    connection.close()
    report = verify(spec, ends, repair=True)
    assert (report.foreign, report.rows, report.ok, report.repaired) == (1, 7, True, 0)
    assert sync(spec, ends, OPTIONS).deleted == 0
    assert run_sql('SELECT COUNT(*) FROM "OWL_MATERIALS_G1" WHERE "SRC_KEY" IS NULL') == [(1,)]
    (hit,) = ends.store.view("materials").search(ends.embedder.embed_query("garden hoses"), 1)
    assert hit.id.startswith("record:")
    assert ends.store.status("materials").foreign == 1


# --------------------------------------------------------------------------------------------------- half precision


@pytest.fixture
def halved(ends) -> Ends:
    """The same ends, with a store that keeps vectors in half precision."""
    store = ends.store
    return replace(ends, store=HanaStore(store.pool, store._schema, vector_type="half"))


def test_vectors_of_half_precision_are_compared_as_they_are_stored(halved, spec, run_sql):
    """A second sync finds nothing to do, verify nothing wrong, and a vector changed by one bit is found."""
    sync(spec, halved, OPTIONS)
    assert halved.store.status("materials").table == "OWL_MATERIALS_H1"
    assert search(halved, "Centrifugal pump", 1) == ['["100","P-1"]']
    ((stored,),) = run_sql("""SELECT "VEC_VECTOR" FROM "OWL_MATERIALS_H1" WHERE "SRC_KEY" = '["100","P-1"]'""")
    assert len(stored) == 4 + 2 * 64
    run_sql("""UPDATE "MARA" SET "MTART" = 'ROH' WHERE "MATNR" = 'P''5'""")  # metadata alone keeps the digest
    assert sync(spec, halved, OPTIONS).upserted == 1
    again = sync(spec, halved, OPTIONS)
    assert (again.unchanged, again.upserted, again.embedded_texts) == (7, 0, 0)
    assert verify(spec, halved).ok
    bit = stored[:4] + bytes([stored[4] ^ 1]) + stored[5:]
    run_sql("""UPDATE "OWL_MATERIALS_H1" SET "VEC_VECTOR" = ? WHERE "SRC_KEY" = '["100","P-1"]'""", (bit,))
    assert verify(spec, halved).bad_vectors == 1
    assert verify(spec, halved, repair=True).ok


def test_hanadb_reads_and_writes_a_collection_of_half_precision(halved, spec, emulator, hana_schema):
    from langchain_hana import HanaDB

    sync(spec, halved, OPTIONS)
    connection = emulator.connect(autocommit=True, currentSchema=hana_schema)
    table = {"table_name": "OWL_MATERIALS_H1", "vector_column_length": 64, "connection": connection}
    with pytest.raises(AttributeError, match="VEC_VECTOR has the wrong type"):
        HanaDB(embedding=as_langchain(halved), **table)
    database = HanaDB(embedding=as_langchain(halved), vector_column_type="HALF_VECTOR", **table)
    ((document, score),) = database.similarity_search_with_score("Safety helmet", k=1)
    assert document.page_content == "Safety helmet, yellow"
    (hit,) = halved.store.view("materials").search(halved.embedder.embed_query("Safety helmet"), 1)
    assert score == pytest.approx(hit.score, abs=1e-6)
    database.add_texts(["A foreign note about garden hoses"], [{"MTART": "NOTE"}])
    connection.close()
    assert search(halved, "garden hoses", 1)[0].startswith("record:")
    assert (verify(spec, halved).foreign, verify(spec, halved).ok) == (1, True)
