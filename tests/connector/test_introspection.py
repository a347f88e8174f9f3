"""Introspection and the list of tables over the wire, against the emulator: what is asked, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.src.settings import load
from app.src.settings.writing import collection_block
from connector.discovery.introspection import candidates, introspect
from connector.discovery.languages import SAMPLE
from connector.document.document import Renderer
from connector.errors import PermissionRefused, UnknownTable
from connector.hana import catalog
from connector.hana.catalog import describe, tables, tables_with_key, unique_keys
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.model import Query, TableRef
from hana_emulator.testing import Emulator
from tests.connector.conftest import WordEmbedder


@pytest.fixture(scope="module")
def pool(emulator: Emulator) -> Iterator[HanaPool]:
    options = ConnectionOptions(
        host=emulator.host, port=emulator.port, user=emulator.user, password=emulator.password, encrypt=False
    )
    with HanaPool(options, 2) as pool:
        yield pool


@pytest.fixture
def schema(pool: HanaPool, hana_schema: str) -> str:
    s = f'"{hana_schema}"'
    for sql in (
        f'CREATE COLUMN TABLE {s}."MARA" ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MTART" NVARCHAR(4), '
        f'PRIMARY KEY ("MANDT", "MATNR")) COMMENT \'General material data\'',
        f'CREATE COLUMN TABLE {s}."MAKT" ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "SPRAS" NVARCHAR(1), '
        '"MAKTX" NVARCHAR(40), PRIMARY KEY ("MANDT", "MATNR", "SPRAS"))',
        f'CREATE COLUMN TABLE {s}."MARC" ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "WERKS" NVARCHAR(4), '
        '"NAME1" NVARCHAR(40), PRIMARY KEY ("MANDT", "MATNR", "WERKS"))',
        f'CREATE VIEW {s}."V_TEXTS" AS SELECT t."MANDT", t."MATNR", t."SPRAS", t."MAKTX", m."MTART" FROM {s}."MAKT" t '
        f'INNER JOIN {s}."MARA" m ON m."MANDT" = t."MANDT" AND m."MATNR" = t."MATNR"',
        f'CREATE TABLE {s}."NOTES" ("A" NVARCHAR(9) NOT NULL, "B" NVARCHAR(9) NOT NULL, "C" NVARCHAR(9) UNIQUE, '
        '"NOTE" NVARCHAR(500), UNIQUE ("A", "B"))',
        f"INSERT INTO {s}.\"MARA\" VALUES ('100', '1', 'ROH')",
        f"INSERT INTO {s}.\"MAKT\" VALUES ('100', '1', 'E', 'Oil')",
        f"INSERT INTO {s}.\"MAKT\" VALUES ('100', '1', 'D', 'Öl')",
        f"INSERT INTO {s}.\"MAKT\" VALUES ('200', '1', 'D', 'Öl')",
    ):
        pool.execute(sql)
    return hana_schema


def test_a_table_without_text_leads_to_its_text_table(pool, schema):
    found = introspect(pool, TableRef(schema, "MARA"))
    assert (found.table.ref.name, found.rows, found.reason) == ("MARA", 1, "")
    assert found.proposal is not None
    assert found.proposal.source == TableRef(schema, "MAKT")
    assert found.proposal.template == "{MAKTX}"
    assert "MAKT" in found.proposal.reasons["source"]
    assert found.proposal.create_view is not None


def test_the_view_that_is_suggested_can_be_made_and_is_proposed_whole(pool, schema):
    proposal = introspect(pool, TableRef(schema, "MARA")).proposal
    assert proposal is not None
    assert proposal.create_view is not None
    pool.execute(proposal.create_view)
    of_view = introspect(pool, TableRef(schema, "V_MARA")).proposal
    assert of_view is not None
    assert (of_view.key, of_view.template) == (("MANDT", "MATNR"), "{MAKTX}")
    assert "MTART" in of_view.metadata
    assert "unique in the current rows" in of_view.reasons["key"]


def test_a_delta_table_beside_a_view_gives_it_its_key_and_its_changes(pool, schema):
    """As Datasphere keeps them: the table with all records, and the view of those that are not deleted."""
    s = f'"{schema}"'
    pool.execute(
        f'CREATE COLUMN TABLE {s}."PARTS_Delta" ("NO" NVARCHAR(9), "PLANT" NVARCHAR(4), "TEXT" NVARCHAR(90), '
        '"Change_Type" NVARCHAR(1), "Change_Date" TIMESTAMP, PRIMARY KEY ("NO", "PLANT"))'
    )
    pool.execute(f'CREATE VIEW {s}."PARTS" AS SELECT "NO", "PLANT", "TEXT" FROM {s}."PARTS_Delta"')
    for rows in (True, False):
        proposal = introspect(pool, TableRef(schema, "PARTS"), look_at_rows=rows).proposal
        assert proposal is not None
        assert (proposal.key, proposal.where) == (("NO", "PLANT"), None)
        assert proposal.changes == {"method": "delta", "table": f"{schema}.PARTS_Delta"}
        assert "Change_Type and Change_Date" in proposal.reasons["changes"]
        assert proposal.guessed & {"key", "changes"} == {"changes"}, "who keeps the records, and how, is not known"
    pool.execute(f'CREATE TABLE {s}."NOTES_Delta" ("NOTE" NVARCHAR(500))')
    listed = {ref.name for ref, _, _ in candidates(pool, schema)}
    assert listed >= {"PARTS", "NOTES", "NOTES_Delta"}
    assert "PARTS_Delta" not in listed


@pytest.mark.parametrize("key", ["MANDT, MATNR", "MANDT, MATNR, SDI_CHANGE_TIME", ""])
def test_a_table_that_smart_data_integration_keeps_is_its_own_delta_table(pool, schema, key):
    """Unless it may be a history, in which a row occurs many times: its key is unknown, or contains the time."""
    ref, primary = TableRef(schema, "RT_MAKT"), f", PRIMARY KEY ({key})" if key else ""
    pool.execute(
        f'CREATE COLUMN TABLE "{schema}"."RT_MAKT" ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MAKTX" NVARCHAR(40), '
        f'"SDI_CHANGE_TYPE" VARCHAR(2), "SDI_CHANGE_TIME" TIMESTAMP{primary})'
    )
    pool.execute(f"""INSERT INTO "{schema}"."RT_MAKT" VALUES ('100', '1', 'Oil', 'D', CURRENT_UTCTIMESTAMP)""")
    proposal = introspect(pool, ref).proposal
    assert proposal is not None
    if key != "MANDT, MATNR":
        assert proposal.changes["method"] != "delta"
        return
    assert proposal.changes == {"method": "delta", "table": f"{schema}.RT_MAKT"}
    alive = """("SDI_CHANGE_TYPE" IS NULL OR "SDI_CHANGE_TYPE" NOT IN ('D', 'X'))"""
    assert proposal.where == f"MANDT = '100' AND {alive}"
    assert not {"SDI_CHANGE_TYPE", "SDI_CHANGE_TIME"} & set(proposal.metadata)
    query = Query(ref, proposal.key, ("MAKTX",), proposal.where)
    assert HanaSource(pool).count(query) == 0, "the row is marked as deleted"


@pytest.mark.parametrize("columns", ['"MATNR" INTEGER', '"A" NVARCHAR(9), "Change_Type" INTEGER, "Change_Date" DATE'])
def test_a_table_that_only_has_the_name_of_a_delta_table_is_none(pool, schema, columns):
    pool.execute(f'CREATE COLUMN TABLE "{schema}"."MAKT_Delta" ({columns})')
    proposal = introspect(pool, TableRef(schema, "MAKT")).proposal
    assert proposal is not None
    assert proposal.changes == {"method": "full"}


def test_a_block_is_loaded_and_fits_its_table(pool, schema, tmp_path):
    for name in ("MAKT", "MARC", "V_TEXTS", "NOTES"):
        proposal = introspect(pool, TableRef(schema, name)).proposal
        assert proposal is not None
        block = collection_block(proposal.settings(), proposal.comments(), proposal.notes, proposal.create_view or "")
        (tmp_path / "owl-sap.toml").write_text(block, encoding="utf-8")
        (collection,) = load(None, environ={}, folder=tmp_path).settings.collections
        spec = collection.spec()
        query = Renderer(spec, describe(pool, spec.source), WordEmbedder()).query
        rows = [row for page in HanaSource(pool).pages(query, 10) for row in page]
        assert len(rows) == HanaSource(pool).count(query)


def test_the_client_with_most_rows_is_proposed(pool, schema):
    proposal = introspect(pool, TableRef(schema, "MAKT")).proposal
    assert proposal is not None
    assert proposal.where == "MANDT = '100'"
    assert "100 (2 rows), 200 (1 rows)" in proposal.reasons["where"]


def test_text_tables_as_cap_makes_them(pool, schema):
    for sql in (
        f'CREATE TABLE "{schema}"."BOOKS" ("ID" INTEGER PRIMARY KEY, "TITLE" NVARCHAR(111), "STOCK" INTEGER)',
        f'CREATE TABLE "{schema}"."BOOKS_TEXTS" ("LOCALE" NVARCHAR(14), "ID" INTEGER, "TITLE" NVARCHAR(111), '
        '"DESCR" NVARCHAR(1111), PRIMARY KEY ("LOCALE", "ID"))',
        f'CREATE TABLE "{schema}"."BOOKS_PRICES" ("LOCALE" NVARCHAR(14), "ID" INTEGER, "PRICE" DECIMAL(9,2), '
        'PRIMARY KEY ("LOCALE", "ID"))',
    ):
        pool.execute(sql)
    proposal = introspect(pool, TableRef(schema, "BOOKS")).proposal
    assert proposal is not None
    assert (proposal.source.name, proposal.key, proposal.template) == ("BOOKS", ("ID",), "{TITLE}")
    assert proposal.create_view is not None
    assert "BOOKS_TEXTS" in proposal.create_view
    assert "BOOKS_PRICES" not in proposal.create_view
    pool.execute(proposal.create_view)
    of_view = introspect(pool, TableRef(schema, "V_BOOKS")).proposal
    assert of_view is not None
    assert of_view.template == "{TITLE}. {DESCR}"


def test_unique_keys_count_only_where_null_cannot_stand(pool, schema):
    assert unique_keys(pool, describe(pool, TableRef(schema, "NOTES"))) == [("A", "B")]
    proposal = introspect(pool, TableRef(schema, "NOTES")).proposal
    assert proposal is not None
    assert proposal.key == ("A", "B")


def test_a_unique_index_is_as_good(pool, schema):
    pool.execute(f'CREATE TABLE "{schema}"."IDX" ("K" INTEGER NOT NULL, "NOTE" NVARCHAR(500))')
    guessed = introspect(pool, TableRef(schema, "IDX")).proposal
    assert guessed is not None
    assert "NOT PROVEN UNIQUE" in guessed.reasons["key"], "an empty table proves nothing"
    pool.execute(f'CREATE UNIQUE INDEX "{schema}"."BY_K" ON "{schema}"."IDX" ("K")')
    proposal = introspect(pool, TableRef(schema, "IDX")).proposal
    assert proposal is not None
    assert proposal.key == ("K",)
    assert "unique constraint or index" in proposal.reasons["key"]


def test_a_key_that_rows_share_is_not_sold_as_one(pool, schema):
    pool.execute(f'CREATE VIEW "{schema}"."TWICE" AS SELECT "MANDT", "MATNR", "MAKTX" FROM "{schema}"."MAKT"')
    proposal = introspect(pool, TableRef(schema, "TWICE")).proposal
    assert proposal is not None
    assert "NOT UNIQUE: 1 of its values" in proposal.reasons["key"]


def test_without_a_look_at_rows_none_is_read(pool, schema, monkeypatch):
    read, sent = pool.read, []

    def recording(sql: str, *rest: Any, **more: Any) -> Any:
        sent.append(sql)
        return read(sql, *rest, **more)

    monkeypatch.setattr(pool, "read", recording)
    proposal = introspect(pool, TableRef(schema, "V_TEXTS"), look_at_rows=False).proposal
    assert proposal is not None
    assert proposal.where is None
    assert "NOT PROVEN UNIQUE" in proposal.reasons["key"]
    assert sent
    assert [sql for sql in sent if " FROM SYS." not in sql] == []


def test_rows_that_may_not_be_read_are_a_refusal(pool, schema, monkeypatch):
    read = pool.read

    def refusing(sql: str, *rest: Any, **more: Any) -> Any:
        if "SYS." not in sql:
            raise PermissionRefused("insufficient privilege", code=258)
        return read(sql, *rest, **more)

    monkeypatch.setattr(pool, "read", refusing)
    with pytest.raises(PermissionRefused):
        introspect(pool, TableRef(schema, "MAKT"))


def test_a_sample_that_may_not_be_read_fails_no_proposal(pool, schema, monkeypatch):
    read = pool.read

    def refusing(sql: str, *rest: Any, **more: Any) -> Any:
        if "SYS." not in sql:
            raise PermissionRefused("insufficient privilege", code=258)
        return read(sql, *rest, **more)

    pool.execute(f'CREATE TABLE "{schema}"."PLAIN" ("K" INTEGER PRIMARY KEY, "NOTE" NVARCHAR(500))')
    pool.execute(f'INSERT INTO "{schema}"."PLAIN" VALUES (1, \'Handschuhe gegen scharfe Kanten\')')
    assert introspect(pool, TableRef(schema, "PLAIN")).languages == {"de": 1}
    monkeypatch.setattr(pool, "read", refusing)
    found = introspect(pool, TableRef(schema, "PLAIN"))
    assert found.proposal is not None
    assert (found.languages, found.sampled) == ({}, 0)


def test_the_languages_of_a_proposal_are_those_of_rows_spread_over_the_table(pool, schema):
    pool.execute(
        f'CREATE TABLE "{schema}"."GROUPS" ("MANDT" NVARCHAR(3), "SPRAS" NVARCHAR(1), "MATKL" NVARCHAR(9), '
        '"WGBEZ" NVARCHAR(60), PRIMARY KEY ("MANDT", "SPRAS", "MATKL"))'
    )
    rows = [("100", "D", f"{number}", "Schrauben und Muttern") for number in range(SAMPLE)]
    rows += [("100", "E", f"{number}", "Bolts and nuts") for number in range(SAMPLE)]
    with pool.session() as session:
        session.execute_many(f'INSERT INTO "{schema}"."GROUPS" VALUES (?, ?, ?, ?)', rows)
    found = introspect(pool, TableRef(schema, "GROUPS"))
    assert (found.languages, found.sampled) == ({"de": SAMPLE // 2, "en": SAMPLE // 2}, SAMPLE)
    assert introspect(pool, TableRef(schema, "GROUPS"), look_at_rows=False).languages == {}
    # MARA has no text: its text table is judged.
    assert introspect(pool, TableRef(schema, "MARA")).languages == {"de": 1, "en": 1}


def test_what_has_no_text_at_all_says_so(pool, schema):
    pool.execute(f'CREATE TABLE "{schema}"."NUMBERS" ("K" INTEGER PRIMARY KEY, "N" DOUBLE)')
    found = introspect(pool, TableRef(schema, "NUMBERS"))
    assert found.proposal is None
    assert "no column that looks like text" in found.reason


def test_hostile_names_over_the_wire(pool, schema, tmp_path):
    odd, column = '/BIC/A"Z\nD.1', 'T"X{T}\n#'
    quoted, inner = odd.replace('"', '""'), column.replace('"', '""')
    pool.execute(
        f'CREATE TABLE "{schema}"."{quoted}" ("K" INTEGER PRIMARY KEY, "{inner}" NCLOB) COMMENT \'a\nmetadata = ["K"]\''
    )
    proposal = introspect(pool, TableRef(schema, odd)).proposal
    assert proposal is not None
    block = collection_block(proposal.settings(), proposal.comments(), proposal.notes)
    (tmp_path / "owl-sap.toml").write_text(block, encoding="utf-8")
    (collection,) = load(None, environ={}, folder=tmp_path).settings.collections
    assert collection.metadata == ()
    spec = collection.spec()
    assert Renderer(spec, describe(pool, spec.source), WordEmbedder()).template.columns == (column,)


# ------------------------------------------------------------------------------------------------------ the list


def test_tables_and_views_with_their_sizes(pool, schema):
    found = {entry["name"]: entry for entry in tables(pool, schema)}
    assert list(found) == ["MAKT", "MARA", "MARC", "NOTES", "V_TEXTS"]
    mara, view = found["MARA"], found["V_TEXTS"]
    assert mara == {"schema": schema, "name": "MARA", "kind": "table", "comment": "General material data",
                    "columns": 3, "rows": 1}  # fmt: skip
    assert (view["kind"], view["columns"], view["rows"]) == ("view", 5, None)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("mar", ["MARA", "MARC"]),
        ("material DATA", ["MARA"]),
        ("%", []),
        ("V_", ["V_TEXTS"]),
        ("A_T", []),
        ("\\", []),
        ("' OR 1 = 1 --", []),
    ],
)
def test_what_is_searched_for_is_taken_literally(pool, schema, text, names):
    assert [entry["name"] for entry in tables(pool, schema, text)] == names


def test_pages_of_the_list(pool, schema):
    names = [entry["name"] for entry in tables(pool, schema)]
    assert [
        entry["name"] for offset in range(0, 6, 2) for entry in tables(pool, schema, limit=2, offset=offset)
    ] == names


def test_more_tables_than_one_look_up_takes(pool, schema, monkeypatch):
    monkeypatch.setattr(catalog, "_NAMES_AT_ONCE", 8)
    for number in range(20):
        pool.execute(f'CREATE TABLE "{schema}"."T{number:03}" ("A" INTEGER, "B" INTEGER)')
    found = tables(pool, schema, "T0")
    assert len(found) == 20
    assert {(entry["columns"], entry["rows"]) for entry in found} == {(2, 0)}


def test_schemas_of_the_system_are_left_out_unless_named(pool, schema):
    pool.execute('CREATE SCHEMA "_SYS_OWL"')
    try:
        pool.execute('CREATE TABLE "_SYS_OWL"."T" ("A" INTEGER)')
        everywhere = {entry["schema"] for entry in tables(pool, limit=1000)}
        assert schema in everywhere
        assert not {name for name in everywhere if name == "SYS" or name.startswith("_SYS_")}
        assert [entry["name"] for entry in tables(pool, "_SYS_OWL")] == ["T"]
    finally:
        pool.execute('DROP SCHEMA "_SYS_OWL" CASCADE')


def test_a_schema_that_is_not_there(pool, schema):
    with pytest.raises(UnknownTable, match=rf"no schema '{schema.lower()}'.*Did you mean '{schema}'"):
        tables(pool, schema.lower())
    assert tables(pool, schema, "nothing is called so") == []


def test_row_counts_that_may_not_be_seen_are_unknown(pool, schema, monkeypatch):
    read = pool.read

    def refusing(sql: str, *rest: Any, **more: Any) -> Any:
        if "M_TABLES" in sql:
            raise PermissionRefused("insufficient privilege", code=258)
        return read(sql, *rest, **more)

    monkeypatch.setattr(pool, "read", refusing)
    assert {entry["rows"] for entry in tables(pool, schema)} == {None}
    assert introspect(pool, TableRef(schema, "MAKT")).rows is None


def test_tables_by_a_column_of_their_key(pool, schema):
    assert tables_with_key(pool, schema, "WERKS") == {"MARC": ("MANDT", "MATNR", "WERKS")}
    assert set(tables_with_key(pool, schema, "MATNR")) == {"MARA", "MAKT", "MARC"}
