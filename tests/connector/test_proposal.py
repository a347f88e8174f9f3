"""Proposals over many shapes of tables: what is chosen, why, and that whatever names hold the block can be used."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.settings import load
from app.src.settings.writing import collection_block
from connector.discovery.proposal import Facts, Proposal, propose
from connector.discovery.roles import Role, guess
from connector.discovery.sap_tables import text_table_names
from connector.discovery.text_views import create_view, languages_for
from connector.document.document import Renderer
from connector.document.template import Template
from connector.errors import NoProposal
from connector.model import Column, Table, TableRef
from hana_emulator.sample.tables import TABLES
from tests.connector.conftest import WordEmbedder

CLIENTS = (("100", 304), ("200", 95))


def column(name: str, declared: str = "NVARCHAR(40)", comment: str = "", nullable: bool = True) -> Column:
    match = re.fullmatch(r"(\w+)(?:\((\d+)(?:,(\d+))?\))?", declared)
    assert match
    return Column(name, match[1], int(match[2] or 0), int(match[3] or 0), nullable, comment)


def table(*columns: Column, key: tuple[str, ...] = (), name: str = "T", is_view: bool = False) -> Table:
    return Table(TableRef("S", name), columns, key, is_view)


SAMPLE = {
    sample.name: Table(
        TableRef("SAPDEMO", sample.name),
        tuple(column(name, field.type, field.comment) for name, field in sample.fields.items()),
        tuple(sample.fields)[: sample.key],
        comment=sample.comment,
    )
    for sample in TABLES
}


def loaded(proposal: Proposal, folder: Path):
    """The block as our own settings read it."""
    text = collection_block(proposal.settings(), proposal.comments(), proposal.notes, proposal.create_view or "")
    (folder / "owl-sap.toml").write_text(text, encoding="utf-8")
    (collection,) = load(None, environ={}, folder=folder).settings.collections
    return collection.spec()


# ---------------------------------------------------------------------------------------------------- SAP's own tables


@pytest.mark.parametrize(
    ("name", "key", "template", "metadata"),
    [
        ("MAKT", ("MANDT", "MATNR", "SPRAS"), "{MAKTX}", ("SPRAS",)),
        ("MATERIAL_TEXT", ("MANDT", "MATNR", "SPRAS"), "{LTEXT}", ("SPRAS",)),
        ("QMEL", ("MANDT", "QMNUM"), "{QMTXT}. {LTEXT}", ("QMART", "PRIOK", "QMDAT", "LTRMN")),
        ("KNA1", ("MANDT", "KUNNR"), "{NAME1}, {NAME2}. {STRAS}. {ORT01}", ("SPRAS", "LAND1", "ERDAT")),
    ],
)
def test_sample_tables(name, key, template, metadata, tmp_path):
    proposal = propose(SAMPLE[name], Facts(clients=CLIENTS))
    assert (proposal.key, proposal.template, proposal.metadata) == (key, template, metadata)
    assert proposal.where == "MANDT = '100'"
    assert set(proposal.reasons) == {"key", "template", "where", "metadata", "changes"}
    spec = loaded(proposal, tmp_path)
    assert (spec.source, spec.key, spec.where) == (TableRef("SAPDEMO", name), key, "MANDT = '100'")
    assert Renderer(spec, SAMPLE[name], WordEmbedder()).key == key


def test_persons_and_addresses_are_neither_text_nor_metadata():
    proposal = propose(SAMPLE["QMEL"], Facts())
    assert "QMNAM" in proposal.reasons["metadata"]
    assert "TELF1" not in str(propose(SAMPLE["KNA1"], Facts()).settings())


def test_a_table_of_codes_has_no_text():
    with pytest.raises(NoProposal, match=r"SAPDEMO\.MARA has no column that looks like text.*MTART"):
        propose(SAMPLE["MARA"], Facts())


def test_a_change_column_is_named_and_not_relied_on():
    made = table(column("ID", "INTEGER"), column("TXT", "NVARCHAR(99)"), column("LAEDA", "NVARCHAR(8)"), key=("ID",))
    proposal = propose(made, Facts())
    assert proposal.changes == {"method": "full"}
    assert "LAEDA is not a UTC time precise to the second" in proposal.reasons["changes"]


# ------------------------------------------------------------------------------------------------------------- clients


def test_several_clients_are_told_and_the_largest_is_proposed():
    reason = propose(SAMPLE["QMEL"], Facts(clients=CLIENTS)).reasons["where"]
    assert "100 (304 rows), 200 (95 rows)" in reason
    assert "mix" in reason


def test_one_client_gets_a_condition_too():
    proposal = propose(SAMPLE["QMEL"], Facts(clients=[("800", 5)]))
    assert proposal.where == "MANDT = '800'"
    assert "only client now" in proposal.reasons["where"]


@pytest.mark.parametrize(("clients", "why"), [(None, "not read"), ([], "empty")])
def test_unknown_clients_are_no_condition_but_a_warning(clients, why):
    proposal = propose(SAMPLE["QMEL"], Facts(clients=clients))
    assert proposal.where is None
    assert any("MANDT" in note and why in note for note in proposal.notes)


def test_a_client_cannot_break_out_of_the_condition(tmp_path):
    proposal = propose(SAMPLE["QMEL"], Facts(clients=[("1' OR", 5)]))
    assert loaded(proposal, tmp_path).where == "MANDT = '1'' OR'"


# ---------------------------------------------------------------------------------------------------------------- keys

TEXT = column("DESCRIPTION", "NVARCHAR(200)")


def test_a_unique_constraint_stands_in_for_a_primary_key():
    proposal = propose(table(column("A", nullable=False), TEXT), Facts(unique_keys=[("A",)]))
    assert proposal.key == ("A",)
    assert "unique constraint" in proposal.reasons["key"]


VIEW = table(column("MANDT", "NVARCHAR(3)"), column("MATNR"), column("SPRAS", "NVARCHAR(1)"), TEXT, is_view=True)
BY_NAME = ("MANDT", "MATNR", "SPRAS")


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ({BY_NAME: 0}, "unique in the current rows"),
        ({BY_NAME: 7, BY_NAME[:2]: 90}, "NOT UNIQUE: 7"),
        ({}, "NOT PROVEN UNIQUE"),
    ],
)
def test_a_key_chosen_by_name_says_how_sure_it_is(shared, said):
    proposal = propose(VIEW, Facts(shared=shared))
    assert proposal.key == BY_NAME
    assert said in proposal.reasons["key"]


def test_of_several_candidates_the_proven_one_is_taken():
    view = table(column("MANDT", "NVARCHAR(3)"), column("X", "NVARCHAR(20)"), column("ORDER_ID"), TEXT, is_view=True)
    leading = ("MANDT", "X", "ORDER_ID")
    shared = {("ORDER_ID",): 9, ("MANDT", "ORDER_ID"): 3, leading: 0}
    assert propose(view, Facts(shared=shared)).key == leading
    assert propose(view, Facts(shared=shared | {leading: 5})).key == ("MANDT", "ORDER_ID")


def test_no_key_at_all_is_said():
    with pytest.raises(NoProposal, match=r"key = \["):
        propose(table(TEXT, column("REMARKS", "NCLOB")), Facts())


# ---------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("declared", "role"),
    [
        (column("MAKTX"), Role.TITLE),
        (column("LTEXT", "NCLOB"), Role.LONG_TEXT),
        (column("title", "NVARCHAR(111)"), Role.TITLE),
        (column("descr", "NVARCHAR(1111)"), Role.TEXT),
        (column("ZZFREE", "NVARCHAR(40)", "Beschreibung des Schadens"), Role.TITLE),
        (column("ZZFREE", "NVARCHAR(255)"), Role.TEXT),
        (column("ZZFREE", "NVARCHAR(30)"), Role.OTHER),
        (column("ORDER_ID", "NVARCHAR(200)"), Role.NUMBER),
        (column("TEXT_ID", "NVARCHAR(40)"), Role.NUMBER),
        (column("MATNR"), Role.NUMBER),
        (column("WERKS", "NVARCHAR(4)", "Plant"), Role.CODE),
        (column("WAERS", "NVARCHAR(5)", "Currency"), Role.OTHER),
        (column("ERNAM", "NVARCHAR(12)", "Created by"), Role.PERSON),
        (column("EMAIL", "NVARCHAR(241)", "E-mail address"), Role.OTHER),
        (column("MAKTG", comment="Material description in upper case for matchcodes"), Role.OTHER),
        (column("ERDAT", "NVARCHAR(8)", "Date"), Role.DATE),
        (column("ERZET", "NVARCHAR(6)", "Time"), Role.OTHER),
        (column("CREATED", "TIMESTAMP"), Role.DATE),
        (column("LOCALE", "NVARCHAR(14)"), Role.LANGUAGE),
        (column("CLIENT", "NVARCHAR(3)"), Role.CLIENT),
        (column("CLIENT", "NVARCHAR(80)", "Name of the client company"), Role.TITLE),
        (column("PIC", "BLOB"), Role.OTHER),
        (column("V", "REAL_VECTOR(3)"), Role.OTHER),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "value", None),
)
def test_what_a_column_is_for(declared, role):
    assert guess(declared).role is role


def test_key_columns_are_no_text_and_the_number_of_texts_is_bounded():
    columns = [column("NAME1", nullable=False), *(column(f"TEXT_{n}", "NVARCHAR(200)") for n in range(9))]
    proposal = propose(table(*columns, key=("NAME1",)), Facts())
    assert Template.parse(proposal.template).columns == tuple(f"TEXT_{n}" for n in range(6))
    assert "left out: TEXT_6, TEXT_7, TEXT_8" in proposal.reasons["template"]


def test_the_number_of_a_row_is_no_filter():
    columns = [column("MANDT", "NVARCHAR(3)"), column("TICKET", "NVARCHAR(10)"), TEXT, column("ERDAT", "NVARCHAR(8)")]
    assert propose(table(*columns, key=("MANDT", "TICKET")), Facts()).metadata == ("ERDAT",)
    assert propose(table(*columns, key=("MANDT", "TICKET", "ERDAT")), Facts()).metadata == ("TICKET", "ERDAT")


def test_metadata_are_bounded_and_say_what_is_left_out():
    codes = [column(f"CODE{n}", "NVARCHAR(4)", "Code") for n in range(20)]
    proposal = propose(table(column("ID", "INTEGER"), TEXT, *codes, key=("ID",)), Facts())
    assert proposal.metadata == tuple(f"CODE{n}" for n in range(8))
    assert "left out: CODE8" in proposal.reasons["metadata"]


# --------------------------------------------------------------------------------------------------------- text tables


def test_text_tables_are_named_with_a_view_over_them():
    sql = create_view(SAMPLE["MARA"], [SAMPLE["MAKT"], SAMPLE["MATERIAL_TEXT"]])
    assert sql is not None
    first, frm, texts, joined, *_ = sql.splitlines()
    assert first.startswith('CREATE VIEW "SAPDEMO"."V_MARA" AS SELECT m."MANDT", m."MATNR", m."MTART"')
    assert first.endswith('t1."SPRAS", t1."MAKTX", t2."LTEXT"')
    assert frm == '  FROM "SAPDEMO"."MARA" m'
    assert "CASE \"SPRAS\" WHEN 'E' THEN 1 WHEN 'D' THEN 2 ELSE 3 END" in texts
    assert joined == '    ON t1."MANDT" = m."MANDT" AND t1."MATNR" = m."MATNR" AND t1."OWL_RANK" = 1'
    assert "ERNAM" not in sql


def test_the_wanted_languages_come_first_in_the_form_of_the_column():
    sql = str(create_view(SAMPLE["MARA"], [SAMPLE["MAKT"]], languages=["fr", "D"]))
    assert "WHEN 'F' THEN 1 WHEN 'D' THEN 2 WHEN 'E' THEN 3 ELSE 4" in sql
    assert languages_for(column("LOCALE", "NVARCHAR(14)"), ["fr", "D"]) == ["fr", "de", "en"]


def test_nothing_to_join_is_no_view():
    assert create_view(SAMPLE["QMEL"], []) is None
    assert create_view(SAMPLE["QMEL"], [SAMPLE["MAKT"]], [SAMPLE["MAKT"]]) is None


def test_names_of_text_tables_by_likelihood():
    assert text_table_names("MARA")[0] == ["MAKT"]
    assert text_table_names("ZORDER")[1][0] == "ZORDERT"
    assert text_table_names("/BIC/PZMAT")[0] == ["/BIC/TZMAT"]


def test_names_of_collections():
    names = {"/BIC/AZD00100": "bic-azd00100", "V_MATERIALS": "v_materials", "Ünï": "n", "漢字": "collection"}
    keyed = (column("ID", "INTEGER"), TEXT)
    assert {name: propose(table(*keyed, key=("ID",), name=name), Facts()).name for name in names} == names
    assert len(propose(table(*keyed, key=("ID",), name="X" * 127), Facts()).name) == 100


# ------------------------------------------------------------------------------------------------ names from outside

hostile = st.text(
    st.one_of(
        st.sampled_from("\"'\n\r\t{}\\/.#[]= ;-%\x07\x7f\u2028\ufeff"),
        st.characters(codec="utf-8", exclude_characters="\0"),
    ),
    min_size=1,
    max_size=12,
)
names = st.lists(hostile, min_size=2, max_size=6, unique=True)


@settings(max_examples=60, deadline=None)
@given(names=names, schema=hostile, name=hostile, comment=hostile, client=hostile)
def test_no_name_or_comment_breaks_the_block(names, schema, name, comment, client, tmp_path_factory):
    key, *others = names
    columns = (
        Column(key, "NVARCHAR", 10, nullable=False, comment=comment),
        Column("MANDT", "NVARCHAR", 3, comment=comment),
        *(Column(other, "NCLOB", comment=f"Description {comment}") for other in others if other != "MANDT"),
    )
    made = Table(TableRef(schema, name), columns, (key,), comment=comment)
    text_table = Table(
        TableRef(schema, name + "T"),
        (columns[0], Column("SPRAS", "NVARCHAR", 1), Column("LTEXT", "NCLOB")),
        (key, "SPRAS"),
    )
    proposal = propose(made, Facts(clients=[(client, 1)], texts=[text_table]))
    text = collection_block(proposal.settings(), proposal.comments(), proposal.notes, proposal.create_view or "")
    assert tomllib.loads(text) == {"collections": [proposal.settings()]}
    spec = loaded(proposal, tmp_path_factory.mktemp("s"))
    assert spec.key == (key,)
    assert set(Template.parse(spec.template).columns) <= set(names)
    assert spec.where == "MANDT = '" + client.replace("'", "''") + "'"
    assert spec.source == made.ref
    Renderer(spec, made, WordEmbedder())
