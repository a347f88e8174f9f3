"""SAP's tables -> what is proposed for them; and the views over their texts, made and read on the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from connector.discovery.introspection import introspect
from connector.discovery.proposal import Facts, Proposal, propose, stamp_column
from connector.discovery.roles import measures
from connector.discovery.text_views import languages_for
from connector.document.document import Renderer
from connector.errors import NoProposal
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import CollectionSpec, Column, Table, TableRef
from hana_emulator.testing import Emulator
from tests.connector.conftest import WordEmbedder
from tests.connector.sap_catalogue import CATALOGUE, create

FULL = {"method": "full"}
KEPT_UP = (100, 100, 90)


def watermark(column: str) -> dict[str, str]:
    return {"method": "watermark", "column": column, "delay": "30s"}


# table: template, metadata, changes (with a time stamp that is kept up in the rows)
PROPOSED: dict[str, tuple[str, str, dict[str, str]]] = {
    "MAKT": ("{MAKTX}", "SPRAS", FULL),
    "QMEL": ("{QMTXT}", "QMART PRIOK ERDAT AEDAT QMDAT", FULL),
    "QMFE": ("{FETXT}", "FEGRP", FULL),
    "QMSM": ("{MATXT}", "", FULL),
    "AUFK": ("{KTEXT}", "AUART AUTYP LTEXT WERKS ERDAT AEDAT", FULL),
    "EQKT": ("{EQKTX}", "SPRAS", FULL),
    "IFLOTX": ("{PLTXT}", "SPRAS", FULL),
    "KNA1": ("{NAME1}, {NAME2}. {ORT01}. {STRAS}", "SPRAS LAND1 BRSCH KTOKD ERDAT", FULL),
    "LFA1": ("{NAME1}. {ORT01}", "SPRAS LAND1 KTOKK", FULL),
    "BUT000": ("{NAME_ORG1}, {NAME_ORG2}, {NAME_LAST}, {NAME_FIRST}", "TYPE BPKIND CHDAT", FULL),
    "ADRC": ("{NAME1}. {CITY1}. {STREET}", "LANGU NATION COUNTRY DATE_FROM", FULL),
    "VBAK": ("{KTEXT}", "AUART VKORG ERDAT AEDAT NETWR WAERK", watermark("UPD_TMSTMP")),
    "VBAP": ("{ARKTX}", "ERDAT KWMENG VRKME NETWR WAERK", FULL),
    "EKPO": ("{TXZ01}", "MATKL MENGE MEINS", FULL),
    "/BIC/TZMAT": ("{TXTSH}, {TXTMD}", "LANGU", FULL),
    "/BIC/AZD00100": ('{"/BIC/ZTEXT"}', "", FULL),
    "SAP_BOOKS": ("{title}. {descr}", "createdAt modifiedAt price currency_code", watermark("modifiedAt")),
    "SAP_BOOKS_TEXTS": ("{title}. {descr}", "locale", FULL),
    "I_ProductText": ("{ProductName}", "Language", FULL),
    "I_MaintenanceNotification": (
        "{NotificationText}",
        "NotificationType MaintPriority CreationDate",
        watermark("LastChangeDateTime"),
    ),
}
WITHOUT_TEXT = {"MARA", "MARC", "EQUI", "IFLOT", "EKKO", "/BIC/PZMAT", "I_Product", "STXH", "STXL"}


def facts(table: Table) -> Facts:
    return Facts(clients=[("100", 5)], stamps=KEPT_UP if stamp_column(table) is not None else None)


def with_text(table: Table, facts: Facts) -> Proposal:
    """What is proposed for a table once it has a text and a key."""
    columns = (*table.columns, Column("REMARK", "NVARCHAR", 200))
    return propose(replace(table, columns=columns, primary_key=table.primary_key or (columns[0].name,)), facts)


def test_every_table_of_the_catalogue_is_expected_to_give_something() -> None:
    assert PROPOSED.keys() | WITHOUT_TEXT == CATALOGUE.keys()


@pytest.mark.parametrize("name", PROPOSED)
def test_what_is_proposed(name: str) -> None:
    table = CATALOGUE[name]
    proposal = propose(table, facts(table))
    template, metadata, changes = PROPOSED[name]
    assert (proposal.template, " ".join(proposal.metadata), proposal.changes) == (template, metadata, changes)
    client = next((column.name for column in table.columns if column.name in ("MANDT", "CLIENT")), None)
    assert proposal.where == (None if client is None else f"{client} = '100'")
    assert proposal.key == (table.primary_key or proposal.key)
    spec = CollectionSpec(
        "tried", table.ref, proposal.template, proposal.key, proposal.where, metadata=proposal.metadata
    )
    Renderer(spec, table, WordEmbedder())


@pytest.mark.parametrize("name", ["MARA", "MARC", "EQUI", "IFLOT", "EKKO", "/BIC/PZMAT", "I_Product"])
def test_tables_of_codes_and_numbers_have_no_text_of_their_own(name: str) -> None:
    with pytest.raises(NoProposal, match="no column that looks like text"):
        propose(CATALOGUE[name], Facts())


@pytest.mark.parametrize("name", ["STXH", "STXL"])
def test_long_texts_cannot_be_read_and_what_to_do_is_said(name: str) -> None:
    with pytest.raises(NoProposal, match=r"compressed ABAP clusters.*READ_TEXT.*introspect that table"):
        propose(CATALOGUE[name], Facts())


@pytest.mark.parametrize(("name", "told"), [("QMEL", "object QMEL"), ("VBAK", "object VBBK"), ("KNA1", "object KNA1")])
def test_who_has_long_texts_elsewhere_is_warned(name: str, told: str) -> None:
    assert any("STXL" in note and told in note for note in propose(CATALOGUE[name], Facts()).notes)


def test_what_is_guessed_bears_a_mark() -> None:
    known, view = (propose(CATALOGUE[name], Facts()) for name in ("QMEL", "I_ProductText"))
    assert "template" not in known.guessed
    assert "key" not in known.guessed
    assert {"template", "key"} <= view.guessed
    assert view.comments()["template"].startswith("GUESS: ")
    assert not known.comments()["key"].startswith("GUESS")
    several = propose(CATALOGUE["QMEL"], Facts(clients=[("100", 5), ("200", 4)]))
    assert "where" in several.guessed


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("MARA", "BRGEW GEWEI, NTGEW GEWEI"),
        ("EQUI", "ANSWT WAERS"),
        ("VBAP", "KWMENG VRKME, NETWR WAERK"),
        ("EKPO", "MENGE MEINS"),
        ("I_Product", "GrossWeight WeightUnit"),
        ("SAP_BOOKS", "price currency_code"),
        ("KNA1", ""),
    ],
)
def test_amounts_and_quantities_find_their_unit(name: str, pairs: str) -> None:
    found = measures(CATALOGUE[name].columns)
    assert ", ".join(f"{value.name} {unit.name}" for value, unit in found) == pairs


# ------------------------------------------------------------------------------------------------- ways to find changes


@pytest.mark.parametrize(
    ("name", "stamps", "told"),
    [
        ("MARA", None, "LAEDA is not a UTC time precise to the second"),
        ("AUFK", None, "AEDAT is not a UTC time"),
        ("QMEL", None, "AEDAT is not a UTC time"),
        ("BUT000", None, "CHDAT is not a UTC time"),
        ("MAKT", None, "no column holds the time of a change"),
        ("VBAK", None, "were not read"),
        ("VBAK", (0, 0, 0), "the table is empty"),
        ("VBAK", (100, 60, 55), "40 of 100 rows have no value"),
        ("VBAK", (100, 100, 1), "all rows have the same value"),
        ("VBAK", (2, 2, 1), "all rows have the same value"),
        ("VBAK", (1, 1, 1), "the table has only one row"),
    ],
)
def test_why_every_row_is_compared(name: str, stamps: tuple[int, int, int] | None, told: str) -> None:
    found = with_text(CATALOGUE[name], Facts(stamps=stamps))
    why = found.reasons["changes"]
    assert (found.changes, "changes" in found.guessed, told in why) == (FULL, False, True), why


def test_a_time_stamp_that_is_kept_up_is_proposed_with_its_trap() -> None:
    found = with_text(CATALOGUE["EKKO"], Facts(stamps=KEPT_UP))
    assert (found.changes, "changes" in found.guessed) == (watermark("LASTCHANGEDATETIME"), True)
    assert "daily comparison" in found.reasons["changes"]


def test_other_ways_are_named_where_a_table_is_large() -> None:
    def why_of(name: str, rows: int) -> str:
        return with_text(CATALOGUE[name], Facts(rows=rows)).reasons["changes"]

    why = why_of("MARA", 2_000_000)
    assert all(word in why for word in ('hash = "server"', "rowid", "triggers"))
    of_view = why_of("I_ProductText", 2_000_000)
    assert 'hash = "server"' in of_view
    assert "rowid" not in of_view
    assert "rowid" not in why_of("MARA", 1000)


# ------------------------------------------------------------------------------------------------------ on the emulator


@pytest.fixture(scope="module")
def pool(emulator: Emulator) -> Iterator[HanaPool]:
    options = ConnectionOptions(
        host=emulator.host, port=emulator.port, user=emulator.user, password=emulator.password, encrypt=False
    )
    with HanaPool(options, 2) as pool:
        yield pool


@pytest.fixture
def rows(hana: Any, hana_schema: str) -> Any:
    """`rows(table, row, ...)` makes a table of the catalogue and fills it; values by column, the rest stay empty."""

    def fill(name: str, *values: dict[str, Any]) -> TableRef:
        table = CATALOGUE[name]
        cursor = hana.cursor()
        cursor.execute(create(table, hana_schema))
        for row in values:
            columns = ", ".join(f'"{column}"' for column in row)
            marks = ", ".join("?" * len(row))
            cursor.execute(f'INSERT INTO "{hana_schema}"."{name}" ({columns}) VALUES ({marks})', tuple(row.values()))
        hana.commit()
        return TableRef(hana_schema, name)

    return fill


def seen(pool: HanaPool, proposal: Any, columns: str) -> list[tuple[Any, ...]]:
    """The rows of the view that was proposed."""
    assert proposal.create_view is not None
    pool.execute(proposal.create_view)
    name = proposal.create_view.split(" AS ", 1)[0].removeprefix("CREATE VIEW ")
    return [tuple(row) for row in pool.read(f"SELECT {columns} FROM {name} ORDER BY 1, 2")]


def materials(rows: Any) -> TableRef:
    found = rows("MARA", *({"MANDT": "100", "MATNR": number, "MTART": "ROH"} for number in "12345"))
    texts = [("1", "D", "Öl"), ("1", "E", "Oil"), ("2", "D", "Rohr"), ("2", "F", "Tube"), ("3", "F", "Vis"),
             ("4", "E", ""), ("4", "D", "Blech")]  # fmt: skip
    rows("MAKT", *({"MANDT": "100", "MATNR": n, "SPRAS": lang, "MAKTX": text} for n, lang, text in texts))
    return found


@pytest.mark.parametrize(
    ("languages", "expected"),
    [
        ((), [("1", "E", "Oil"), ("2", "D", "Rohr"), ("3", "F", "Vis"), ("4", "D", "Blech"), ("5", None, None)]),
        (
            ("fr", "D"),
            [("1", "D", "Öl"), ("2", "F", "Tube"), ("3", "F", "Vis"), ("4", "D", "Blech"), ("5", None, None)],
        ),
    ],
)
def test_each_material_has_the_text_of_the_best_language(
    pool: HanaPool, rows: Any, languages: tuple[str, ...], expected: list[tuple[str, ...]]
) -> None:
    """Wanted first, then the others, then any; a blank text is none; a material without text is there, once."""
    proposal = introspect(pool, materials(rows), languages=languages).proposal
    assert proposal is not None
    assert proposal.source.name == "MAKT"
    assert seen(pool, proposal, '"MATNR", "SPRAS", "MAKTX"') == expected


def test_the_view_is_proposed_with_one_row_a_material(pool: HanaPool, rows: Any) -> None:
    ref = materials(rows)
    proposal = introspect(pool, ref).proposal
    assert proposal is not None
    pool.execute(str(proposal.create_view))
    of_view = introspect(pool, TableRef(ref.schema, "V_MARA")).proposal
    assert of_view is not None
    assert (of_view.key, of_view.template, of_view.where) == (("MANDT", "MATNR"), "{MAKTX}", "MANDT = '100'")
    assert "MTART" in of_view.metadata
    assert of_view.metadata[-2:] == ("BRGEW", "GEWEI")


def test_a_plants_materials_find_their_names_by_a_shorter_key(pool: HanaPool, rows: Any) -> None:
    materials(rows)
    marc = rows("MARC", *({"MANDT": "100", "MATNR": "2", "WERKS": plant} for plant in ("P1", "P2")))
    found = seen(pool, introspect(pool, marc).proposal, '"MATNR", "WERKS", "MAKTX"')
    assert found == [("2", "P1", "Rohr"), ("2", "P2", "Rohr")]


def test_items_and_tasks_of_a_notification_are_strung_together(pool: HanaPool, rows: Any) -> None:
    head = rows("QMEL", *({"MANDT": "100", "QMNUM": number, "QMTXT": f"Leak {number}"} for number in "12"))
    items = (("0002", "gasket torn"), ("0001", "screw loose"))
    rows("QMFE", *({"MANDT": "100", "QMNUM": "1", "FENUM": n, "FETXT": text} for n, text in items))
    rows("QMSM", {"MANDT": "100", "QMNUM": "1", "MANUM": "0001", "MATXT": "replace gasket"})
    proposal = introspect(pool, head).proposal
    assert proposal is not None
    assert (proposal.source, proposal.template) == (head, "{QMTXT}"), "it has a text of its own and needs no view"
    assert any("QMFE" in note and "concatenates them" in note for note in proposal.notes)
    assert seen(pool, proposal, '"QMNUM", "QMTXT", "FETXT", "MATXT"') == [
        ("1", "Leak 1", "screw loose. gasket torn", "replace gasket"),
        ("2", "Leak 2", None, None),
    ]


def test_an_order_whose_only_texts_are_those_of_its_items(pool: HanaPool, rows: Any) -> None:
    order = rows("EKKO", {"MANDT": "100", "EBELN": "45", "BSART": "NB"})
    rows("EKPO", *({"MANDT": "100", "EBELN": "45", "EBELP": n, "TXZ01": f"Pump {n}"} for n in ("00010", "00020")))
    proposal = introspect(pool, order).proposal
    assert proposal is not None
    assert proposal.source.name == "EKPO"
    assert seen(pool, proposal, '"EBELN", "BSART", "TXZ01"') == [("45", "NB", "Pump 00010. Pump 00020")]


def test_bws_texts_stand_under_another_key_and_only_active_rows_count(pool: HanaPool, rows: Any) -> None:
    master = rows("/BIC/PZMAT", *({"/BIC/ZMAT": "1", "OBJVERS": v, "/BIC/ZGROUP": v} for v in ("A", "M")))
    rows("/BIC/TZMAT", *({"/BIC/ZMAT": "1", "LANGU": lang, "TXTMD": lang * 3} for lang in "DE"))
    proposal = introspect(pool, master).proposal
    assert proposal is not None
    assert proposal.source.name == "/BIC/TZMAT"
    assert seen(pool, proposal, '"/BIC/ZMAT", "OBJVERS", "LANGU", "TXTMD"') == [("1", "A", "E", "EEE")]


def test_caps_translations_replace_the_default_as_cap_does_it(pool: HanaPool, rows: Any) -> None:
    books = rows("SAP_BOOKS", *({"ID": n, "title": f"Titel {n}", "descr": "Roman"} for n in "12"))
    translated = [("1", "en", "Title 1", "Novel"), ("2", "fr", "Titre 2", None)]
    rows("SAP_BOOKS_TEXTS", *({"ID": n, "locale": lang, "title": t, "descr": d} for n, lang, t, d in translated))
    proposal = introspect(pool, books, languages=["en"]).proposal
    assert proposal is not None
    assert (proposal.source, proposal.changes["method"]) == (books, "full"), "the time stamps are empty here"
    expected = [("1", "Title 1", "Novel"), ("2", "Titel 2", "Roman")]
    assert seen(pool, proposal, '"ID", "title", "descr"') == expected


def test_a_cds_views_texts_emulator_the_view_beside_it(pool: HanaPool, rows: Any, hana_schema: str) -> None:
    for name in ("I_Product", "I_ProductText"):
        stored = TableRef(hana_schema, name)
        rows(name)
        pool.execute(f'RENAME TABLE "{hana_schema}"."{name}" TO "Z{name}"')
        pool.execute(f'CREATE VIEW "{hana_schema}"."{name}" AS SELECT * FROM "{hana_schema}"."Z{name}"')
    pool.execute(f'INSERT INTO "{hana_schema}"."ZI_Product" ("Product", "ProductType") VALUES (\'P1\', \'FERT\')')
    for language in ("D", "E 2", "E"):  # a view may hold a text twice: then it is always the same one
        place = f'"{hana_schema}"."ZI_ProductText"'
        pool.execute(f"INSERT INTO {place} VALUES ('P1', '{language[0]}', 'Pump {language}')")
    proposal = introspect(pool, TableRef(hana_schema, "I_Product")).proposal
    assert proposal is not None
    assert proposal.source == stored
    assert seen(pool, proposal, '"Product", "ProductType", "Language", "ProductName"') == [
        ("P1", "FERT", "E", "Pump E")
    ]


def test_blanks_are_no_texts(pool: HanaPool, rows: Any) -> None:
    head = rows("QMEL", *({"MANDT": "100", "QMNUM": number, "QMTXT": "Leak"} for number in "12"))
    items = [("1", "1", ""), ("1", "2", "seal"), ("1", "3", " "), ("2", "1", ""), ("2", "2", "  ")]
    rows("QMFE", *({"MANDT": "100", "QMNUM": q, "FENUM": n, "FETXT": text} for q, n, text in items))
    assert seen(pool, introspect(pool, head).proposal, '"QMNUM", "QMTXT", "FETXT"') == [
        ("1", "Leak", "seal"),
        ("2", "Leak", None),
    ]
    material = rows("MARA", {"MANDT": "100", "MATNR": "1"})
    texts = ({"MANDT": "100", "MATNR": "1", "SPRAS": lang, "MAKTX": text} for lang, text in (("E", "  "), ("D", "Öl")))
    rows("MAKT", *texts)
    assert seen(pool, introspect(pool, material).proposal, '"MATNR", "SPRAS", "MAKTX"') == [("1", "D", "Öl")]


def test_two_text_tables_may_have_a_column_of_the_same_name(pool: HanaPool, rows: Any, hana_schema: str) -> None:
    """The likelier one gives it, the other what it has beyond. A person who is part of the key is not left out."""
    place, key = f'"{hana_schema}"', "BNAME NVARCHAR(12), {}PRIMARY KEY (BNAME{})"
    for name, columns in {
        "USX": "",
        "USXT": "KTEXT NVARCHAR(40), ",
        "ZLONG": "KTEXT NVARCHAR(40), LTEXT NVARCHAR(90), ",
    }.items():
        language = ("SPRAS NVARCHAR(1), ", ", SPRAS") if columns else ("", "")
        pool.execute(f"CREATE COLUMN TABLE {place}.{name} ({key.format(language[0] + columns, language[1])})")
    pool.execute(f"INSERT INTO {place}.USX VALUES ('1')")
    pool.execute(f"INSERT INTO {place}.USXT VALUES ('1', 'E', 'likelier')")
    pool.execute(f"INSERT INTO {place}.ZLONG VALUES ('1', 'E', 'other', 'long')")
    proposal = introspect(pool, TableRef(hana_schema, "USX")).proposal
    assert seen(pool, proposal, '"BNAME", "KTEXT", "LTEXT"') == [("1", "likelier", "long")]


@pytest.mark.parametrize(
    ("wanted", "letter", "locale"),
    [("DE", "D", "de"), ("d", "d", "d"), ("D", "D", "de"), ("en_GB", "en_GB", "en_GB"), ("cs", "C", "cs")],
)
def test_languages_as_people_write_them(wanted: str, letter: str, locale: str) -> None:
    """One letter stays what it is: d is another language than D."""
    assert languages_for(Column("SPRAS", "NVARCHAR", 1), [wanted])[0] == letter
    assert languages_for(Column("LOCALE", "NVARCHAR", 14), [wanted])[0] == locale


@pytest.mark.parametrize(
    ("first", "second", "method", "told"),
    [
        ("20240131101112.1234567", "20240201101112.1234567", "watermark", "set in all 2 rows"),
        ("0", "20240201101112.1234567", "full", "1 of 2 rows have no value"),
        (None, "20240201101112.1234567", "full", "1 of 2 rows have no value"),
    ],
)
def test_initial_time_stamps_are_none(
    pool: HanaPool, rows: Any, first: str | None, second: str, method: str, told: str
) -> None:
    stamps = ({"MANDT": "100", "VBELN": str(n), "UPD_TMSTMP": at} for n, at in enumerate((first, second)))
    proposal = introspect(pool, rows("VBAK", *stamps)).proposal
    assert proposal is not None
    assert (proposal.changes["method"], told in proposal.reasons["changes"]) == (method, True)
    only_catalogue = introspect(pool, TableRef(proposal.source.schema, "VBAK"), look_at_rows=False).proposal
    assert only_catalogue is not None
    assert only_catalogue.changes == FULL


def test_stxl_is_refused_without_a_look_at_its_rows(pool: HanaPool, rows: Any) -> None:
    found = introspect(pool, rows("STXL"))
    assert found.proposal is None
    assert "READ_TEXT" in found.reason


def test_a_columns_time_alone_is_no_change() -> None:
    created = Table(TableRef("S", "T"), (Column("CREATED_AT", "TIMESTAMP"), Column("EXCHANGE_DATE", "TIMESTAMP")))
    assert stamp_column(created) is None
    assert "no column holds" in with_text(created, Facts()).reasons["changes"]
